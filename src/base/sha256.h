/* SHA-256 (FIPS 180-4), a message authentication code (HMAC, RFC 2104) and key derivation (HKDF, RFC 5869). For small
 * inputs: handshakes and tokens. These 100 lines of our own keep libcrypto, 5 MB with its own release cycle, out of
 * every process that joins a bus. */
#ifndef TB_BASE_SHA256_H
#define TB_BASE_SHA256_H

#include "base/error.h"

enum { TB__SHA256_NBYTES = 32 };

typedef struct tb__sha256 {
    uint32_t state[8];
    uint64_t nbytes;
    uint8_t block[64];
} tb__sha256;

void tb__sha256_init(tb__sha256 *hash);
void tb__sha256_add(tb__sha256 *hash, const void *data, size_t nbytes);
void tb__sha256_end(tb__sha256 *hash, uint8_t out[TB__SHA256_NBYTES]);

void tb__hmac_sha256(const void *key, size_t key_nbytes, const void *data, size_t nbytes,
                     uint8_t out[TB__SHA256_NBYTES]);

/* At most 255 * 32 bytes. A salt of NULL is HKDF's default. */
void tb__hkdf_sha256(const void *salt, size_t salt_nbytes, const void *secret, size_t secret_nbytes, const void *info,
                     size_t info_nbytes, uint8_t *out, size_t nbytes);

bool tb__is_equal_in_constant_time(const void *a, const void *b, size_t nbytes);

#endif
