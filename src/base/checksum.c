/* xxHash is compiled in from its header, so that no library has to be found at run time. */
#include "base/checksum.h"

#define XXH_INLINE_ALL
#include <xxhash.h>

uint64_t tb__checksum_block(const void *data, size_t nbytes) {
    return XXH3_64bits(data, nbytes);
}

uint64_t tb__checksum(const void *data, size_t nbytes) {
    XXH3_state_t all;
    uint64_t sums[64]; /* of blocks, not yet added to `all` */
    size_t n = 0;
    XXH3_64bits_reset(&all);
    for (size_t at = 0; at < nbytes; at += TB__CHECKSUM_BLOCK) {
        size_t left = nbytes - at;
        sums[n++] = tb__checksum_block((const char *)data + at, left < TB__CHECKSUM_BLOCK ? left : TB__CHECKSUM_BLOCK);
        if (n == sizeof sums / sizeof *sums) {
            XXH3_64bits_update(&all, sums, sizeof sums);
            n = 0;
        }
    }
    XXH3_64bits_update(&all, sums, n * sizeof *sums);
    return XXH3_64bits_digest(&all);
}
