/* SHA-256, HMAC and HKDF: see sha256.h. */
#include "base/sha256.h"

#include <string.h>

enum { BLOCK = 64 };

/* The fractional parts of the cube roots of the first 64 primes. */
static const uint32_t constants[64] = {
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5,
    0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174,
    0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
    0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967,
    0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
    0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
    0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
    0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2,
};

static uint32_t rotate_right(uint32_t x, int n) {
    return x >> n | x << (32 - n);
}

static void hash_block(tb__sha256 *hash) {
    uint32_t w[64], s[8];
    for (int i = 0; i < 16; i++) {
        const uint8_t *at = hash->block + 4 * i;
        w[i] = (uint32_t)at[0] << 24 | (uint32_t)at[1] << 16 | (uint32_t)at[2] << 8 | at[3];
    }
    for (int i = 16; i < 64; i++) {
        uint32_t a = rotate_right(w[i - 15], 7) ^ rotate_right(w[i - 15], 18) ^ w[i - 15] >> 3;
        uint32_t b = rotate_right(w[i - 2], 17) ^ rotate_right(w[i - 2], 19) ^ w[i - 2] >> 10;
        w[i] = w[i - 16] + a + w[i - 7] + b;
    }
    memcpy(s, hash->state, sizeof s);
    for (int i = 0; i < 64; i++) {
        uint32_t choice = (s[4] & s[5]) ^ (~s[4] & s[6]);
        uint32_t majority = (s[0] & s[1]) ^ (s[0] & s[2]) ^ (s[1] & s[2]);
        uint32_t first = s[7] + (rotate_right(s[4], 6) ^ rotate_right(s[4], 11) ^ rotate_right(s[4], 25)) + choice +
                         constants[i] + w[i];
        uint32_t second = (rotate_right(s[0], 2) ^ rotate_right(s[0], 13) ^ rotate_right(s[0], 22)) + majority;
        memmove(s + 1, s, 7 * sizeof *s);
        s[4] += first;
        s[0] = first + second;
    }
    for (int i = 0; i < 8; i++)
        hash->state[i] += s[i];
}

void tb__sha256_init(tb__sha256 *hash) {
    *hash = (tb__sha256){
        .state = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a, 0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19}};
}

void tb__sha256_add(tb__sha256 *hash, const void *data, size_t nbytes) {
    const uint8_t *at = data;
    for (size_t i = 0; i < nbytes; i++) {
        hash->block[hash->nbytes++ % BLOCK] = at[i];
        if (hash->nbytes % BLOCK == 0)
            hash_block(hash);
    }
}

void tb__sha256_end(tb__sha256 *hash, uint8_t out[TB__SHA256_NBYTES]) {
    uint64_t nbits = hash->nbytes * 8;
    uint8_t length[8];
    for (int i = 0; i < 8; i++)
        length[i] = (uint8_t)(nbits >> (56 - 8 * i));
    tb__sha256_add(hash, "\x80", 1);
    while (hash->nbytes % BLOCK != BLOCK - sizeof length)
        tb__sha256_add(hash, "", 1);
    tb__sha256_add(hash, length, sizeof length);
    for (int i = 0; i < TB__SHA256_NBYTES; i++)
        out[i] = (uint8_t)(hash->state[i / 4] >> (24 - i % 4 * 8));
}

/* HMAC of three parts, one after the other. */
static void hmac_parts(const void *key, size_t key_nbytes, const void *const part[3], const size_t nbytes[3],
                       uint8_t out[TB__SHA256_NBYTES]) {
    uint8_t padded[BLOCK] = {0}, inner[TB__SHA256_NBYTES];
    tb__sha256 hash;
    if (key_nbytes > BLOCK) {
        tb__sha256_init(&hash);
        tb__sha256_add(&hash, key, key_nbytes);
        tb__sha256_end(&hash, padded);
    } else if (key_nbytes > 0) {
        memcpy(padded, key, key_nbytes);
    }
    for (int i = 0; i < BLOCK; i++)
        padded[i] ^= 0x36;
    tb__sha256_init(&hash);
    tb__sha256_add(&hash, padded, BLOCK);
    for (int i = 0; i < 3; i++) {
        if (nbytes[i] > 0)
            tb__sha256_add(&hash, part[i], nbytes[i]);
    }
    tb__sha256_end(&hash, inner);
    for (int i = 0; i < BLOCK; i++)
        padded[i] ^= 0x36 ^ 0x5c;
    tb__sha256_init(&hash);
    tb__sha256_add(&hash, padded, BLOCK);
    tb__sha256_add(&hash, inner, sizeof inner);
    tb__sha256_end(&hash, out);
}

void tb__hmac_sha256(const void *key, size_t key_nbytes, const void *data, size_t nbytes,
                     uint8_t out[TB__SHA256_NBYTES]) {
    hmac_parts(key, key_nbytes, (const void *const[3]){data}, (const size_t[3]){nbytes}, out);
}

void tb__hkdf_sha256(const void *salt, size_t salt_nbytes, const void *secret, size_t secret_nbytes, const void *info,
                     size_t info_nbytes, uint8_t *out, size_t nbytes) {
    uint8_t key[TB__SHA256_NBYTES], block[TB__SHA256_NBYTES];
    tb__hmac_sha256(salt, salt_nbytes, secret, secret_nbytes, key);
    for (uint8_t counter = 1; nbytes > 0; counter++) {
        hmac_parts(key, sizeof key, (const void *const[3]){block, info, &counter},
                   (const size_t[3]){counter > 1 ? sizeof block : 0, info_nbytes, 1}, block);
        size_t n = nbytes < sizeof block ? nbytes : sizeof block;
        memcpy(out, block, n);
        out += n;
        nbytes -= n;
    }
}

bool tb__is_equal_in_constant_time(const void *a, const void *b, size_t nbytes) {
    const uint8_t *left = a, *right = b;
    volatile unsigned difference = 0;
    for (size_t i = 0; i < nbytes; i++)
        difference |= (unsigned)(left[i] ^ right[i]);
    return difference == 0;
}
