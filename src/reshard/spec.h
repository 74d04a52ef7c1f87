/* The spec of a resharding: a JSON document that defines, for each tensor of a checkpoint, its
 * form in the source and in the target.
 *
 *     {"src_mesh": {"mesh": [2, 4], "names": ["dp", "tp"]}, "dst_mesh": [2],
 *      "tensors": {"lm_head.weight": {"shape": [32000, 4096], "dtype": "bf16", "src": {"tp": "Shard(0)"},
 *                                     "dst": {"mesh": [2], "ranks": [0, 1], "placements": [["S", 0]], "dtype":
 * "f16"}}}, "rules": [{"match": "*.q_proj.weight", "src": {"tp": "Shard(0)"}, "dst": "Shard(0)"},
 *                {"match": "*.rotary_emb.*", "skip": true},
 *                {"match": "*"}]}
 *
 * docs/reshard.md has all forms. A tensor's own entry comes before the rules, which are tried in
 * order. A missing side is Replicate over that side's mesh, and a missing mesh is rank 0
 * alone. */
#ifndef TB_RESHARD_SPEC_H
#define TB_RESHARD_SPEC_H

#include "base/index.h"
#include "base/mem.h"
#include "device/quant.h"
#include "tensorbus/plan.h"

typedef struct tb__spec_rule {
    const char *match; /* a tensor's name, or a pattern */
    char where[64];    /* "tensors 'lm_head.weight'", "rules 2": how sentences name it */
    bool is_skipped;   /* the tensors are left out */
    bool has_shape;
    tb_shape shape;                        /* global */
    tb_dtype src_dtype, dst_dtype;         /* TB_DTYPE_NONE: as the files have it; as the source has it */
    tb__quant_format src_quant, dst_quant; /* kind 0: none */
    const char *group;                     /* of the target's scales, as the spec has it; NULL: none */
    tb_layout *src, *dst;                  /* NULL where it is skipped */
} tb__spec_rule;

typedef struct tb__spec {
    size_t ntensors;
    tb__spec_rule *tensors;
    size_t nrules;
    tb__spec_rule *rules;
    tb__index by_name; /* of tensors */
    tb__arena arena;
} tb__spec;

tb_status tb__spec_parse(const char *text, size_t length, tb__spec **out);
tb_status tb__spec_load(const char *path, tb__spec **out); /* every error message names the file */
void tb__spec_destroy(tb__spec *spec);                     /* accepts NULL */

/* What holds for the tensor of this name; NULL if nothing does. */
const tb__spec_rule *tb__spec_find(const tb__spec *spec, const char *name);

/* The scale group of a tensor that the rule is for: "tensor" is the tensor's own, and a * is what that of the rule's
 * pattern matched. NULL: it is in none. The text is the rule's, the name, or in the arena. */
tb_status tb__spec_group(const tb__spec_rule *rule, const char *name, tb__arena *arena, const char **out);

#endif
