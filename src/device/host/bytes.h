/* Moving bytes between strided boxes: no dtypes, no arithmetic. */
#ifndef TB_DEVICE_HOST_BYTES_H
#define TB_DEVICE_HOST_BYTES_H

#include "tensorbus/tensorbus.h"

/* For every index (i, j, ...) of the box, `run` bytes go from src + i*src_step[0] + j*src_step[1] + ... to the same
 * with dst. Steps are in bytes, may be negative, and need no order. */
typedef struct tb__byte_box {
    int ndim;
    size_t run;
    int64_t len[TB_MAX_DIMS];
    char *dst;
    int64_t dst_step[TB_MAX_DIMS];
    const char *src; /* NULL: zeros */
    int64_t src_step[TB_MAX_DIMS];
} tb__byte_box;

/* With `stream`, stores bypass the cache, and tb__kernels.fence must follow. */
void tb__bytes_copy(char *dst, const char *src, size_t nbytes, bool stream);
void tb__bytes_move(const tb__byte_box *box, bool stream);

/* Two dimensions, `len` long, that the two sides go through in opposite order: dst_step[1] is the smaller of its two,
 * src_step[0] of its own. */
typedef struct tb__swapped_dims {
    size_t run;
    int64_t len[2], dst_step[2], src_step[2];
} tb__swapped_dims;

bool tb__is_swapped(size_t run, const int64_t dst_step[2], const int64_t src_step[2]);
void tb__transpose(char *dst, const char *src, const tb__swapped_dims *dims, bool stream);

#endif
