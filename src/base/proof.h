/* Tokens, and how two ends prove to each other that they have the same one: challenge and response. Each end sends its
 * id and a nonce; then each sends a proof, an HMAC-SHA-256 over a label, its role, the protocol's version, both ids and
 * both nonces. The key is derived from the token for one purpose (HKDF), so a proof is of no use elsewhere. The token
 * itself is never sent. An end without a token has the key of the empty token: an end that has one never accepts it.
 *
 * A proof shows membership, not identity: everybody who has the token can make one. It protects no bytes that follow.
 */
#ifndef TB_BASE_PROOF_H
#define TB_BASE_PROOF_H

#include "base/sha256.h"

enum {
    TB__TOKEN_MIN = 32, /* bytes of a token that is not empty */
    TB__TOKEN_MAX = 510,
    TB__TOKEN_ROOM = TB__TOKEN_MAX + 2, /* so that one that is too long is found out */
    TB__PROOF_ID = 16,
    TB__PROOF_NONCE = 16,
    TB__PROOF_NBYTES = TB__SHA256_NBYTES,
};

typedef struct tb__proof_key {
    uint8_t bytes[TB__SHA256_NBYTES];
} tb__proof_key;

/* One end of a connection. */
typedef struct tb__proof_end {
    uint8_t id[TB__PROOF_ID], nonce[TB__PROOF_NONCE];
} tb__proof_end;

/* NULL is the empty token, which is allowed: it proves nothing. */
tb_status tb__token_check(const char *token);

/* The first line of a file, or of standard input for "-": a token, which is not empty. */
tb_status tb__token_read(const char *path, char out[TB__TOKEN_ROOM]);

void tb__proof_key_derive(const char *token, const char *purpose, tb__proof_key *out);

/* The proof that `from`, in this role, sends to `to`. */
void tb__proof_make(const tb__proof_key *key, const char *role, uint32_t version, const tb__proof_end *from,
                    const tb__proof_end *to, uint8_t out[TB__PROOF_NBYTES]);

/* Compares in constant time. */
bool tb__proof_accepts(const tb__proof_key *key, const char *role, uint32_t version, const tb__proof_end *from,
                       const tb__proof_end *to, const void *proof, size_t nbytes);

/* From the system's random generator. */
tb_status tb__random_bytes(void *out, size_t nbytes);

#endif
