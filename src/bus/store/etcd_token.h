/* Tokens in etcd, which has no such concept. The first process that opens a namespace stores a *verifier* there, a
 * salted HMAC of its token; the others check their tokens against it. This blocks clients with a wrong token, but not
 * those that write to etcd by other means. */
#ifndef TB_BUS_STORE_ETCD_TOKEN_H
#define TB_BUS_STORE_ETCD_TOKEN_H

#include "base/error.h"

#include <jansson.h>

enum { TB__VERIFIER_NBYTES = 2 * 16 + 1 + 2 * 32 };

typedef struct tb__verifier {
    char text[TB__VERIFIER_NBYTES + 1];
} tb__verifier;

/* With a salt of its own: two for the same token differ. */
tb_status tb__verifier_make(const char *token, tb__verifier *out);

/* Whether the verifier was made from this token. Takes the same time for all tokens of the same length. */
bool tb__verifier_accepts(const void *verifier, size_t nbytes, const char *token);

enum { TB__LOGIN_LINE = 256 };

/* A login: the first lines of two files. It has the password in it. */
tb_status tb__login_make(const char *user_file, const char *password_file, char user[TB__LOGIN_LINE], json_t **out);

#endif
