/* Shared by convert.c (conversions) and convert_steps.c (tensors that are gathered together). */
#ifndef TB_RESHARD_CONVERT_INSIDE_H
#define TB_RESHARD_CONVERT_INSIDE_H

#include "base/mem.h"
#include "reshard/convert.h"

typedef struct entry {
    char *name;
    tb__convert_how how;
    tb__encoding src_encoding, dst_encoding; /* copies of those in `how` */
    tb__codec codec;
    tb_dtype dtype; /* of gathered data, or of a transform's input */
    tb_shape most;  /* the largest part of any target, by dim */
    int64_t nbytes; /* of that, in a slot */
    size_t unit;    /* index, if the tensor is gathered */
    size_t slot_offset;
    int64_t band;
} entry;

typedef struct peer_amax {
    int32_t rank;
    uint64_t attempt;
    float amax;
} peer_amax;

/* Tensors that are gathered and quantised together: a single one, or a scale group. */
typedef struct unit {
    size_t first, count; /* of `order` */
    uint32_t group;
    bool is_global;
    size_t nranks; /* that exchange magnitudes, including this one if it has a part */
    int32_t *ranks;
    uint64_t measured, told; /* attempts */
    float amax, scale;       /* amax: of this rank's parts; scale: of all. Where is_global */
    TB_VEC(peer_amax) peer_amaxes;
} unit;

struct tb__convert {
    int32_t rank;
    size_t nentries;
    entry *entries; /* by key */
    size_t *order;  /* of gathered tensors, unit by unit */
    TB_VEC(unit) units;
    size_t ngroups;
    uint32_t *user_groups;
    size_t *unit_of;       /* by group: its first unit, or the next group's if it has none */
    int64_t *group_nbytes; /* by group: in a slot */
    int64_t most_nbytes;   /* of a slot */
    int32_t awaited;       /* a rank whose magnitude is missing */
};

/* Chooses the order of gathering; sets the groups and bands of all tensors. */
tb_status tb__convert_steps(tb__convert *convert, tb__flow_tensor *tensors);
/* Fails, with the name of a tensor, if the group takes too large a slot. */
tb_status tb__convert_measure_slot(void *convert, uint32_t group, size_t *nbytes);

#endif
