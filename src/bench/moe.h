/* A mixture-of-experts model as two programs keep it: a trainer in the way of Megatron, an inference engine in the way
 * of vLLM. For any cut among ranks it tells which parameters a rank has, under which names and in which layouts, and
 * which canonical tensors they become. All of it is worked out by each rank for itself.
 *
 * The trainer numbers layers from 0 in every stage and experts from 0 on every expert rank, keeps the heads of each
 * group together in linear_qkv, and gate and up in one linear_fc1. The engine has query, key and value rows one after
 * the other in qkv_proj, copies of key and value heads where it has more ranks than those, and stacks of experts: w13,
 * which is gate and up, and w2. Both pad the vocabulary, differently. lm_head is tied: only the engine has one. */
#ifndef TB_BENCH_MOE_H
#define TB_BENCH_MOE_H

#include "bench/move.h"

typedef struct moe_model {
    int64_t nlayers, hidden;
    int64_t ngroups, nqueries, head; /* key heads, query heads of each, rows of a head */
    int64_t nexperts, expert_width, shared_width;
    int64_t vocabulary;
} moe_model;

enum { MOE_MIN_BYTES = 128 << 10 };

/* About 200 canonical tensors, `nbytes` of bf16 and hardly more: the vocabulary takes what the layers leave. */
tb_status moe_model_init(moe_model *model, int64_t nbytes);

/* How a side cuts the model: pp stages of dp * tp ranks. Of a stage's ranks, ep times etp have the experts together,
 * and the others have copies: ep ranks have different experts, etp ranks have shares of the same. */
typedef struct moe_cut {
    int32_t tp, pp, dp, ep, etp;
    /* The engine's: slot i of expert rank e has expert map[e * nslots + i]; an expert may be on several expert ranks,
     * once on each. NULL: all in order, equally many everywhere. */
    const int64_t *map;
    int64_t nslots;
} moe_cut;

typedef enum moe_kind {
    MOE_EMBEDDING,
    MOE_HEAD,
    MOE_LAST_NORM,
    MOE_NORM,
    MOE_QKV,
    MOE_OUT,
    MOE_MLP_NORM,
    MOE_ROUTER,
    MOE_SHARED_UP,
    MOE_SHARED_DOWN,
    MOE_EXPERT_UP,
    MOE_EXPERT_DOWN,
    MOE_NKINDS
} moe_kind;

/* A parameter as the rank has it. */
typedef struct moe_param {
    const char *name;   /* local */
    tb_shape shape;     /* of the storage, all ranks together */
    const char *layout; /* in ranks of the side */
    moe_kind kind;
    int64_t layer, expert; /* in the whole model, where it has one */
} moe_param;

typedef struct moe_rank {
    const moe_model *model;
    int which; /* TOOL_SOURCE: the trainer; TOOL_TARGET: the engine */
    int32_t rank;
    TB_VEC(moe_param) params;
    tb_names *names;
    tb_parts parts; /* what the params become */
    tb__arena arena;
} moe_rank;

/* The model must outlive it. */
tb_status moe_rank_init(moe_rank *rank, const moe_model *model, int which, const moe_cut *cut, int32_t number);
void moe_rank_fini(moe_rank *rank);

/* The rank's part of a parameter: bytes in its memory, and those of them that are not padding. */
tb_status moe_param_size(const moe_rank *rank, const moe_param *param, int64_t *stored, int64_t *used);

extern const tb_tie moe_tie; /* lm_head and the embedding */

/* ---- Values (moe_values.c) ----------------------------------------------------------------------------------- */

/* Every element of a canonical tensor has a value of its own, made of version, the tensor's name and its index there.
 * Which element a place in storage has is worked out from what the parameter is, and not from names and views. `data`
 * is the rank's part of the parameter, row-major without gaps. A source's padding is filled with what is not zero. */
tb_status moe_param_fill(const moe_rank *rank, const moe_param *param, uint32_t version, void *data);

/* The opposite of what is right, everywhere; also in the padding, where zeros are right. */
tb_status moe_param_poison(const moe_rank *rank, const moe_param *param, uint32_t version, void *data);

/* TB_INTERNAL, with a sentence that names tensor and place, unless all is right, and the padding zero. */
tb_status moe_param_check(const moe_rank *rank, const moe_param *param, uint32_t version, const void *data);

#endif
