/* Hashes that the standards give: FIPS 180-4's examples, RFC 4231's test cases. */
#include "base/proof.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>

static void assert_digest(const uint8_t digest[TB__SHA256_NBYTES], const char *hex) {
    char text[2 * TB__SHA256_NBYTES + 1];
    for (int i = 0; i < TB__SHA256_NBYTES; i++)
        snprintf(text + 2 * i, 3, "%02x", digest[i]);
    assert_string_equal(text, hex);
}

static void hashes(void **state) {
    (void)state;
    static const struct {
        const char *text, *hex;
    } cases[] = {
        {"", "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"},
        {"abc", "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"},
        {"abcdbcdecdefdefgefghfghighijhijkijkljklmklmnlmnomnopnopq",
         "248d6a61d20638b8e5c026930c3e6039a33ce45964ff2167f6ecedd419db06c1"},
    };
    uint8_t digest[TB__SHA256_NBYTES];
    tb__sha256 hash;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        tb__sha256_init(&hash);
        tb__sha256_add(&hash, cases[i].text, strlen(cases[i].text));
        tb__sha256_end(&hash, digest);
        assert_digest(digest, cases[i].hex);
    }
    tb__sha256_init(&hash);
    for (int i = 0; i < 1000000; i++)
        tb__sha256_add(&hash, "a", 1);
    tb__sha256_end(&hash, digest);
    assert_digest(digest, "cdc76e5c9914fb9281a1c7e284d73e67f1809a48a497200e046d39ccc7112cd0");
}

static void codes(void **state) {
    (void)state;
    uint8_t digest[TB__SHA256_NBYTES], key[131];
    tb__hmac_sha256("Jefe", 4, "what do ya want for nothing?", 28, digest);
    assert_digest(digest, "5bdcc146bf60754e6a042426089575c75a003f089d2739839dec58b964ec3843");
    memset(key, 0xaa, sizeof key);
    static const char text[] = "Test Using Larger Than Block-Size Key - Hash Key First";
    tb__hmac_sha256(key, sizeof key, text, sizeof text - 1, digest);
    assert_digest(digest, "60e431591ee0b67f0d8a26aacbf5b77f8e0bc6213728c5140546040f0ee37f54");
}

/* RFC 4231, cases 1 to 7 without those above and the truncated one. */
static void rfc_4231(void **state) {
    (void)state;
    uint8_t digest[TB__SHA256_NBYTES], key[131], data[50];
    memset(key, 0x0b, 20);
    tb__hmac_sha256(key, 20, "Hi There", 8, digest);
    assert_digest(digest, "b0344c61d8db38535ca8afceaf0bf12b881dc200c9833da726e9376c2e32cff7");
    memset(key, 0xaa, 20);
    memset(data, 0xdd, sizeof data);
    tb__hmac_sha256(key, 20, data, 50, digest);
    assert_digest(digest, "773ea91e36800e46854db8ebd09181a72959098b3ef8c122d9635514ced565fe");
    for (int i = 0; i < 25; i++)
        key[i] = (uint8_t)(i + 1);
    memset(data, 0xcd, sizeof data);
    tb__hmac_sha256(key, 25, data, 50, digest);
    assert_digest(digest, "82558a389a443c0ea4cc819899f2083a85f0faa3e578f8077a2e3ff46729665b");
    memset(key, 0xaa, sizeof key);
    static const char text[] =
        "This is a test using a larger than block-size key and a larger than block-size data. The key needs to be "
        "hashed before being used by the HMAC algorithm.";
    tb__hmac_sha256(key, sizeof key, text, sizeof text - 1, digest);
    assert_digest(digest, "9b09ffa71b942fcb27635fbcd5b0e944bfdc63644f0713938a7f51535c3a35e2");
}

static void assert_hex(const uint8_t *bytes, size_t nbytes, const char *hex) {
    char text[3];
    assert_int_equal(strlen(hex), 2 * nbytes);
    for (size_t i = 0; i < nbytes; i++) {
        snprintf(text, sizeof text, "%02x", bytes[i]);
        assert_memory_equal(text, hex + 2 * i, 2);
    }
}

/* RFC 5869, the three cases of SHA-256. */
static void rfc_5869(void **state) {
    (void)state;
    uint8_t secret[80], salt[80], info[80], out[82];
    memset(secret, 0x0b, 22);
    for (int i = 0; i < 13; i++)
        salt[i] = (uint8_t)i;
    for (int i = 0; i < 10; i++)
        info[i] = (uint8_t)(0xf0 + i);
    tb__hkdf_sha256(salt, 13, secret, 22, info, 10, out, 42);
    assert_hex(out, 42, "3cb25f25faacd57a90434f64d0362f2a2d2d0a90cf1a5a4c5db02d56ecc4c5bf34007208d5b887185865");
    tb__hkdf_sha256(NULL, 0, secret, 22, NULL, 0, out, 42);
    assert_hex(out, 42, "8da4e775a563c18f715f802a063c5a31b8a11f5c5ee1879ec3454e5f3c738d2d9d201395faa4b61a96c8");
    for (int i = 0; i < 80; i++) {
        secret[i] = (uint8_t)i;
        salt[i] = (uint8_t)(0x60 + i);
        info[i] = (uint8_t)(0xb0 + i);
    }
    tb__hkdf_sha256(salt, 80, secret, 80, info, 80, out, 82);
    assert_hex(out, 82,
               "b11e398dc80327a1c8e7f78c596a49344f012eda2d4efad8a050cc4c19afa97c59045a99cac7827271cb41c65e590e09"
               "da3275600c2f09b8367793a9aca3db71cc30c58179ec3e87c14c01d5c1f3434f1d87");
}

static void proofs(void **state) {
    (void)state;
    static const char token[] = "a token of thirty-two bytes, or more";
    tb__proof_key key, other_purpose, other_token, none;
    tb__proof_end a = {{1}, {2}}, b = {{3}, {4}}, later = {{1}, {5}};
    uint8_t proof[TB__PROOF_NBYTES];
    tb__proof_key_derive(token, "store", &key);
    tb__proof_key_derive(token, "rank", &other_purpose);
    tb__proof_key_derive("another token of thirty-two bytes...", "store", &other_token);
    tb__proof_key_derive(NULL, "store", &none);
    tb__proof_make(&key, "client", 2, &a, &b, proof);
    assert_true(tb__proof_accepts(&key, "client", 2, &a, &b, proof, sizeof proof));
    assert_false(tb__proof_accepts(&key, "client", 2, &a, &b, proof, sizeof proof - 1));
    assert_false(tb__proof_accepts(&key, "client", 2, &a, &b, NULL, 0));
    assert_false(tb__proof_accepts(&key, "server", 2, &a, &b, proof, sizeof proof)); /* reflected */
    assert_false(tb__proof_accepts(&key, "client", 2, &b, &a, proof, sizeof proof));
    assert_false(tb__proof_accepts(&key, "client", 1, &a, &b, proof, sizeof proof));     /* downgraded */
    assert_false(tb__proof_accepts(&key, "client", 2, &later, &b, proof, sizeof proof)); /* replayed */
    assert_false(tb__proof_accepts(&other_purpose, "client", 2, &a, &b, proof, sizeof proof));
    assert_false(tb__proof_accepts(&other_token, "client", 2, &a, &b, proof, sizeof proof));
    assert_false(tb__proof_accepts(&none, "client", 2, &a, &b, proof, sizeof proof));
    proof[31] ^= 1;
    assert_false(tb__proof_accepts(&key, "client", 2, &a, &b, proof, sizeof proof));
}

static void tokens(void **state) {
    (void)state;
    char token[TB__TOKEN_MAX + 2];
    memset(token, 't', sizeof token);
    assert_int_equal(tb__token_check(NULL), TB_OK);
    assert_int_equal(tb__token_check(""), TB_OK);
    token[TB__TOKEN_MAX + 1] = '\0';
    assert_int_equal(tb__token_check(token), TB_TOO_BIG);
    token[TB__TOKEN_MAX] = '\0';
    assert_int_equal(tb__token_check(token), TB_OK);
    token[32] = '\0';
    assert_int_equal(tb__token_check(token), TB_OK);
    token[31] = '\0';
    assert_int_equal(tb__token_check(token), TB_INVALID);
    assert_string_equal(tb_error_detail(), "a token of 31 bytes; it must have at least 32");
}

static void comparison(void **state) {
    (void)state;
    assert_true(tb__is_equal_in_constant_time("abc", "abd", 2));
    assert_false(tb__is_equal_in_constant_time("abc", "abd", 3));
    assert_false(tb__is_equal_in_constant_time("xbc", "abc", 3));
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(hashes),   cmocka_unit_test(codes),  cmocka_unit_test(comparison), cmocka_unit_test(rfc_4231),
        cmocka_unit_test(rfc_5869), cmocka_unit_test(proofs), cmocka_unit_test(tokens)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
