/* A verifier is a random salt and the token's HMAC of it, both in hexadecimal, with a space between them. */
#include "bus/store/etcd_token.h"

#include "base/sha256.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <sys/random.h>

enum { SALT = 16 };

static char *write_hex(char *at, const uint8_t *data, size_t nbytes) {
    static const char digits[] = "0123456789abcdef";
    for (size_t i = 0; i < nbytes; i++) {
        *at++ = digits[data[i] >> 4];
        *at++ = digits[data[i] & 15];
    }
    return at;
}

/* The salt is taken as it is written. */
static void write_code(const char *token, const char *salt, char *out) {
    uint8_t code[TB__SHA256_NBYTES];
    tb__hmac_sha256(token, strlen(token), salt, (size_t)2 * SALT, code);
    write_hex(out, code, sizeof code);
}

tb_status tb__verifier_make(const char *token, tb__verifier *out) {
    uint8_t salt[SALT];
    if (getrandom(salt, sizeof salt, 0) != (ssize_t)sizeof salt)
        return tb__fail(TB_IO, "getrandom: %s", strerror(errno));
    *out = (tb__verifier){0};
    char *at = write_hex(out->text, salt, sizeof salt);
    *at++ = ' ';
    write_code(token, out->text, at);
    return TB_OK;
}

bool tb__verifier_accepts(const void *verifier, size_t nbytes, const char *token) {
    const char *text = verifier;
    char code[2 * TB__SHA256_NBYTES];
    if (nbytes != TB__VERIFIER_NBYTES)
        return false;
    write_code(token, text, code);
    return tb__is_equal_in_constant_time(code, text + nbytes - sizeof code, sizeof code);
}

static tb_status read_first_line(const char *path, char out[TB__LOGIN_LINE]) {
    FILE *file = fopen(path, "re");
    if (!file)
        return tb__fail(TB_INVALID, "can't read %s: %s", path, strerror(errno));
    bool is_read = fgets(out, TB__LOGIN_LINE, file) != NULL;
    fclose(file);
    size_t length = is_read ? strcspn(out, "\r\n") : 0;
    if (length == 0 || length == TB__LOGIN_LINE - 1)
        return tb__fail(TB_INVALID, "the first line of %s has %s", path, length ? "more than 254 bytes" : "nothing");
    out[length] = '\0';
    return TB_OK;
}

tb_status tb__login_make(const char *user_file, const char *password_file, char user[TB__LOGIN_LINE], json_t **out) {
    char password[TB__LOGIN_LINE];
    TB_TRY(read_first_line(user_file, user));
    TB_TRY(read_first_line(password_file, password));
    *out = json_pack("{s:s, s:s}", "name", user, "password", password);
    explicit_bzero(password, sizeof password);
    return *out ? TB_OK : tb__fail(TB_INVALID, "user and password in %s and %s must be text", user_file, password_file);
}
