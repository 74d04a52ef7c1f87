/* What is done to the tensors of a flow on their way: quantised ones are made or read, by whom and when; the user's own
 * conversions are called. All that the two sides must know alike follows from arguments that all ranks have.
 *
 * A target that is quantised where it is received gathers in slots (flow/flow.h), whole or band by band, and is
 * quantised from there. Tensors with a scale for all of them gather whole, all of a scale group together; then the
 * ranks that have parts of it tell each other their largest magnitudes. */
#ifndef TB_RESHARD_CONVERT_H
#define TB_RESHARD_CONVERT_H

#include "flow/flow.h"
#include "reshard/encode.h"

/* One tensor of a flow. */
typedef struct tb__convert_how {
    const tb__encoding *src_encoding, *dst_encoding; /* NULL: plain */
    const tb__encoded *src, *dst;                    /* this rank's parts of what is encoded; NULL: it has none */
    const char *scale_group;                         /* of the target; NULL: each part for itself */
    bool is_transformed;
    const tb_transform *transform; /* this process's; only where is_transformed */
} tb__convert_how;

typedef struct tb__convert tb__convert;

/* Fills in what is to be converted in the flow's tensors, which are borrowed and by key, and in its options: groups,
 * bands, codecs, slots, and how much staging memory is left for the rest. *out is NULL where nothing is. */
tb_status tb__convert_create(tb__flow_opts *opts, tb__flow_tensor *tensors, const tb__convert_how *how,
                             tb__convert **out);
void tb__convert_destroy(tb__convert *convert);

#endif
