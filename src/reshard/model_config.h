/* What a model's config.json says of its family and sizes. */
#ifndef TB_RESHARD_MODEL_CONFIG_H
#define TB_RESHARD_MODEL_CONFIG_H

#include "base/mem.h"

#include <jansson.h>

typedef struct tb__model_config {
    const char *family; /* as model_type has it */
    int64_t hidden, layers, heads, kv_heads, head_dim, vocab, intermediate;
    int64_t experts, expert_intermediate, shared_intermediate;
    int64_t further_layers; /* behind the others, for the prediction of further tokens */
    int64_t q_rank, kv_rank, rope_dim;
    bool is_mla, is_tied, is_mixtral;
    bool *is_dense; /* by layer, where others have experts */
} tb__model_config;

/* DIR/config.json */
tb_status tb__model_config_load(const char *dir, json_t **out);

/* `family` NULL: that of the configuration. The result points into the arena, and into `config` or `family`. */
tb_status tb__model_config_read(const json_t *config, const char *family, tb__model_config *out, tb__arena *arena);

#endif
