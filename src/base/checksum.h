/* Checksums of data in transit: the 64-bit XXH3 of each block of 64 KiB, then the XXH3 of these sums as little-endian
 * words. So blocks can be summed in any order. */
#ifndef TB_BASE_CHECKSUM_H
#define TB_BASE_CHECKSUM_H

#include <stddef.h>
#include <stdint.h>

enum { TB__CHECKSUM_BLOCK = 64 << 10 }; /* bytes; the last block may be shorter */

static inline size_t tb__checksum_nblocks(size_t nbytes) {
    return nbytes / TB__CHECKSUM_BLOCK + (nbytes % TB__CHECKSUM_BLOCK != 0);
}

/* XXH3 of one block, or of the array of all block sums. */
uint64_t tb__checksum_block(const void *data, size_t nbytes);

/* The checksum of any number of bytes. */
uint64_t tb__checksum(const void *data, size_t nbytes);

#endif
