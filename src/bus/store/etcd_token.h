/* etcd knows nothing of tensorbus's tokens. Whoever opens a namespace first leaves something there by which a token can
 * be recognised but not read off; the others compare. This keeps out who does not know the token by mistake. Who can
 * write to etcd by other means has to be kept out by etcd. */
#ifndef TB_BUS_STORE_ETCD_TOKEN_H
#define TB_BUS_STORE_ETCD_TOKEN_H

#include "base/error.h"

enum { TB__VERIFIER_NBYTES = 2 * 16 + 1 + 2 * 32 };

typedef struct tb__verifier {
    char text[TB__VERIFIER_NBYTES + 1];
} tb__verifier;

/* With a salt of its own: two for the same token differ. */
tb_status tb__verifier_make(const char *token, tb__verifier *out);

/* Whether the verifier was made from this token. Takes as long for any token as for any other of the same length. */
bool tb__verifier_accepts(const void *verifier, size_t nbytes, const char *token);

#endif
