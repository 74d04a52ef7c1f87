/* SHA-256 (FIPS 180-4), and a message authentication code made of it (HMAC, RFC 2104). For small inputs. */
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

bool tb__is_equal_in_constant_time(const void *a, const void *b, size_t nbytes);

#endif
