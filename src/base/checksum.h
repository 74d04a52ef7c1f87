/* Checksums, by which bytes that were changed on their way are told from those that were not: XXH3 with 64 bits of each
 * block of 64 KiB, then of the blocks' sums, as little-endian words. So the blocks can be summed in any order. */
#ifndef TB_BASE_CHECKSUM_H
#define TB_BASE_CHECKSUM_H

#include <stddef.h>
#include <stdint.h>

enum { TB__CHECKSUM_BLOCK = 64 << 10 }; /* bytes; the last block has what is left */

static inline size_t tb__checksum_nblocks(size_t nbytes) {
    return nbytes / TB__CHECKSUM_BLOCK + (nbytes % TB__CHECKSUM_BLOCK != 0);
}

/* XXH3 of the bytes: of one block, or of the sums of all of them. */
uint64_t tb__checksum_block(const void *data, size_t nbytes);

/* The checksum. */
uint64_t tb__checksum(const void *data, size_t nbytes);

#endif
