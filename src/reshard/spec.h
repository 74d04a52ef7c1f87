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
#include "reshard/pattern.h"
#include "tensorbus/plan.h"

#include <jansson.h>

enum { TB__SPEC_LAYERS, TB__SPEC_EXPERTS, TB__SPEC_NUMBERS };

/* Layers, or experts, of which each coordinate of a mesh dim has some; the files of its ranks count them from 0. */
typedef struct tb__spec_numbers {
    const char *pattern; /* "layers.#."; NULL: names have the numbers of the whole model */
    int dim;             /* of the side's mesh */
    int64_t ncoords;
    const int64_t *first; /* of each coordinate; and one more, which is how many there are in all */
} tb__spec_numbers;

/* The ranks of a side, for all tensors that do not say otherwise. */
typedef struct tb__spec_mesh {
    tb_layout *layout; /* Replicate in every dim */
    bool is_given;     /* by the spec; otherwise it is one rank */
    tb__spec_numbers numbers[TB__SPEC_NUMBERS];
} tb__spec_mesh;

/* What a side says of a tensor besides its layout. Names and views may have \1 to \9 for what the rule's wildcards
 * matched. */
typedef struct tb__spec_form {
    const char *name; /* of the target's tensor; NULL: the source's */
    const char *view; /* from this side's tensor to what both sides have; NULL: none */
    bool has_shape, has_own_mesh, has_stage;
    tb_shape shape; /* of the target's tensor */
    int64_t stage;  /* coordinate of a tensor without a layer's number, in the dim that the layers are dealt out over */
} tb__spec_form;

typedef struct tb__spec_rule {
    const char *match;   /* a tensor's name, or a pattern */
    tb__pattern pattern; /* of rules */
    bool is_more;        /* it holds together with the one before */
    char where[64];      /* "tensors 'lm_head.weight'", "rules 2": how sentences name it */
    bool is_skipped;     /* the tensors are left out */
    bool has_shape;
    tb_shape shape;                        /* global */
    tb_dtype src_dtype, dst_dtype;         /* TB_DTYPE_NONE: as the files have it; as the source has it */
    tb__quant_format src_quant, dst_quant; /* kind 0: none */
    const char *group;                     /* of the target's scales, as the spec has it; NULL: none */
    tb_layout *src, *dst;                  /* NULL where it is skipped */
    tb__spec_form src_form, dst_form;
} tb__spec_rule;

/* A number, f32, that is no tensor of the source; every target rank has it. */
typedef struct tb__spec_constant {
    const char *name;
    float value;
} tb__spec_constant;

typedef enum tb__spec_files { TB__SPEC_RANKS, TB__SPEC_HF, TB__SPEC_VLLM } tb__spec_files;

typedef struct tb__spec {
    tb__spec_files files; /* what the target's are called */
    tb__spec_mesh src_mesh, dst_mesh;
    size_t ntensors;
    tb__spec_rule *tensors;
    size_t nrules;
    tb__spec_rule *rules;
    size_t nconstants;
    tb__spec_constant *constants;
    tb__index by_name; /* of tensors */
    tb__arena arena;
} tb__spec;

tb_status tb__spec_parse(const char *text, size_t length, tb__spec **out);
tb_status tb__spec_from_json(const json_t *json, tb__spec **out);

/* Every error message names the file. One that refers to a model takes its sizes from dir's config.json; what that does
 * not tell is added to `notes`, a line each, which may be NULL. */
tb_status tb__spec_load(const char *path, const char *dir, tb__text *notes, tb__spec **out);
void tb__spec_destroy(tb__spec *spec); /* accepts NULL */

/* What holds for the tensor of this name; NULL if nothing does. */
const tb__spec_rule *tb__spec_find(const tb__spec *spec, const char *name);

/* What else holds for the same tensor, which becomes several; NULL: nothing. */
const tb__spec_rule *tb__spec_more(const tb__spec *spec, const tb__spec_rule *rule);

/* A name or view of the rule, for a tensor of this name; NULL stays NULL. In the arena. */
tb_status tb__spec_expand(const tb__spec_rule *rule, const char *name, const char *text, tb__arena *arena,
                          const char **out);

/* What a tensor is called in the file of a rank, and the other way round. TB_INVALID where the rank has no such layer
 * or expert. The result is the name itself, or in the arena. */
tb_status tb__spec_local_name(const tb__spec_mesh *mesh, int32_t rank, const char *name, tb__arena *arena,
                              const char **out);
tb_status tb__spec_whole_name(const tb__spec_mesh *mesh, int32_t rank, const char *local, tb__arena *arena,
                              const char **out);

/* The layout of a tensor that has this name on the side: on the ranks of its layer and expert only. The caller owns
 * it. */
tb_status tb__spec_layout(const tb__spec_mesh *mesh, const tb__spec_form *form, const tb_layout *layout,
                          const char *name, tb_layout **out);

/* The scale group of a tensor that the rule is for: "tensor" is the tensor's own, and a * is what that of the rule's
 * pattern matched. NULL: it is in none. The text is the rule's, the name, or in the arena. */
tb_status tb__spec_group(const tb__spec_rule *rule, const char *name, tb__arena *arena, const char **out);

#endif
