/* A sum by which bytes that were changed on their way are told from those that were not: XXH3, 64 bits. */
#ifndef TB_BASE_CHECKSUM_H
#define TB_BASE_CHECKSUM_H

#include <stddef.h>
#include <stdint.h>

uint64_t tb__checksum(const void *data, size_t nbytes);

#endif
