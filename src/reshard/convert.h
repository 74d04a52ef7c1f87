/* Conversions of a flow's tensors: quantising, dequantising, and the user's transforms. Which side converts, and when,
 * follows from arguments that all ranks have, so that all ranks agree.
 *
 * A target that its receiver quantises is gathered in slots (flow/flow.h), whole or band by band, and quantised from
 * there. Tensors with one scale for the whole tensor are gathered whole, all of a scale group together; then the ranks
 * with parts of it exchange their largest magnitudes. */
#ifndef TB_RESHARD_CONVERT_H
#define TB_RESHARD_CONVERT_H

#include "flow/flow.h"
#include "reshard/encode.h"

/* One tensor of a flow. */
typedef struct tb__convert_how {
    const tb__encoding *src_encoding, *dst_encoding;   /* NULL: plain */
    const tb__encoded *src, *dst;                      /* this rank's encoded parts; NULL: none */
    const char *scale_group;                           /* of the target; NULL: each part has its own scale */
    bool is_sent_transformed, is_received_transformed; /* by the sending side, by the receiving side */
    bool is_whole;                                     /* one of the sides wants whole pieces */
    const tb_transform *transform;                     /* this process's; NULL: none */
} tb__convert_how;

typedef struct tb__convert tb__convert;

/* Sets up conversions in the flow's tensors, which are borrowed and sorted by key, and in its options: groups, bands,
 * codecs, slots, and the remaining staging memory. *out is NULL if nothing is converted. */
tb_status tb__convert_create(tb__flow_opts *opts, tb__flow_tensor *tensors, const tb__convert_how *how,
                             tb__convert **out);
void tb__convert_destroy(tb__convert *convert);

#endif
