/* Proofs: see proof.h. */
#include "base/proof.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <sys/random.h>

static const char label[] = "tensorbus proof";

tb_status tb__token_check(const char *token) {
    size_t length = token ? strlen(token) : 0;
    if (length > 0 && length < TB__TOKEN_MIN)
        return tb__fail(TB_INVALID, "a token of %zu bytes; it must have at least %d", length, TB__TOKEN_MIN);
    if (length > TB__TOKEN_MAX)
        return tb__fail(TB_TOO_BIG, "a token of %zu bytes; %d are allowed", length, TB__TOKEN_MAX);
    return TB_OK;
}

tb_status tb__token_read(const char *path, char out[TB__TOKEN_ROOM]) {
    FILE *file = strcmp(path, "-") == 0 ? stdin : fopen(path, "re");
    if (!file)
        return tb__fail(TB_INVALID, "can't read %s: %s", path, strerror(errno));
    size_t length = 0;
    for (int c; length + 1 < TB__TOKEN_ROOM && (c = getc(file)) != EOF && c != '\r' && c != '\n';)
        out[length++] = (char)c;
    out[length] = '\0';
    int error = ferror(file) ? errno : 0;
    if (file != stdin)
        fclose(file);
    if (error)
        return tb__fail(TB_INVALID, "can't read %s: %s", path, strerror(error));
    if (memchr(out, '\0', length))
        return tb__fail(TB_INVALID, "the token in %s has a NUL byte; it must be text", path);
    if (length == 0)
        return tb__fail(TB_INVALID, "there is no token in the first line of %s", path);
    tb_status status = tb__token_check(out);
    return status == TB_OK ? TB_OK : tb__fail_within(TB_INVALID, "%.200s", path);
}

void tb__proof_key_derive(const char *token, const char *purpose, tb__proof_key *out) {
    tb__hkdf_sha256(label, sizeof label - 1, token ? token : "", token ? strlen(token) : 0, purpose, strlen(purpose),
                    out->bytes, sizeof out->bytes);
}

/* Every field has a fixed length or ends with a NUL, so that no two lists of fields have the same bytes. */
void tb__proof_make(const tb__proof_key *key, const char *role, uint32_t version, const tb__proof_end *from,
                    const tb__proof_end *to, uint8_t out[TB__PROOF_NBYTES]) {
    uint8_t text[sizeof label + 64 + 4 + 2 * sizeof(tb__proof_end)], *at = text;
    memcpy(at, label, sizeof label);
    at += sizeof label;
    size_t length = strlen(role) < 63 ? strlen(role) : 63;
    memcpy(at, role, length);
    at += length;
    *at++ = 0;
    for (int i = 0; i < 4; i++)
        *at++ = (uint8_t)(version >> (8 * i));
    memcpy(at, from, sizeof *from);
    memcpy(at + sizeof *from, to, sizeof *to);
    at += 2 * sizeof *from;
    tb__hmac_sha256(key->bytes, sizeof key->bytes, text, (size_t)(at - text), out);
}

bool tb__proof_accepts(const tb__proof_key *key, const char *role, uint32_t version, const tb__proof_end *from,
                       const tb__proof_end *to, const void *proof, size_t nbytes) {
    uint8_t expected[TB__PROOF_NBYTES];
    tb__proof_make(key, role, version, from, to, expected);
    return nbytes == sizeof expected && tb__is_equal_in_constant_time(expected, proof, nbytes);
}

tb_status tb__random_bytes(void *out, size_t nbytes) {
    ssize_t n = getrandom(out, nbytes, 0); /* up to 256 bytes come as a whole */
    return n == (ssize_t)nbytes ? TB_OK : tb__fail(TB_IO, "getrandom: %s", strerror(errno));
}
