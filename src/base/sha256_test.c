/* Hashes that the standards give: FIPS 180-4's examples, RFC 4231's test cases. */
#include "base/sha256.h"

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

static void comparison(void **state) {
    (void)state;
    assert_true(tb__is_equal_in_constant_time("abc", "abd", 2));
    assert_false(tb__is_equal_in_constant_time("abc", "abd", 3));
    assert_false(tb__is_equal_in_constant_time("xbc", "abc", 3));
}

int main(void) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(hashes), cmocka_unit_test(codes), cmocka_unit_test(comparison)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
