/* Two checkpoints compared, element by element, however either is sharded: the first becomes what a spec says, band by
 * band, and each band is compared with what the second has there. */
#ifndef TB_RESHARD_DISK_DIFF_H
#define TB_RESHARD_DISK_DIFF_H

#include "reshard/disk.h"

typedef struct tb__diff_opts {
    double absolute, relative; /* |a - b| may be up to absolute + relative * |b| */
} tb__diff_opts;

/* How a tensor of the target differs. */
typedef struct tb__diff {
    const char *name;
    tb_dtype a, b;
    bool is_missing; /* the second checkpoint does not have it */
    bool has_other_shape;
    int64_t nelements, ndifferent; /* of all ranks; beyond the tolerances */
    double largest, mean;          /* |a - b|; infinite where only one is a number */
    int32_t rank;                  /* where the largest is, and its index in the whole tensor */
    int64_t index[TB_MAX_DIMS];
    tb_shape shape;
} tb__diff;

/* Calls `found` for each tensor, equal or not, by name, and then with `only_b` for each name that only the second has.
 */
tb_status tb__disk_diff(const tb__disk *disk, const char *dir, const tb__diff_opts *opts,
                        tb_status (*found)(void *arg, const tb__diff *diff),
                        tb_status (*only_b)(void *arg, const char *name), void *arg);

#endif
