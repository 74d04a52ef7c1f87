/* xxHash's header has all of it, so there is no library to be found at run time. */
#include "base/checksum.h"

#define XXH_INLINE_ALL
#include <xxhash.h>

uint64_t tb__checksum(const void *data, size_t nbytes) {
    return XXH3_64bits(data, nbytes);
}
