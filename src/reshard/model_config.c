/* Reads config.json of models. It may be malformed. */
#include "reshard/model_config.h"

#include "format/file.h"

#include <string.h>

tb_status tb__model_config_load(const char *dir, json_t **out) {
    char *path;
    json_error_t error;
    TB_TRY(tb__file_join(dir, "config.json", &path));
    json_t *json = json_load_file(path, 0, &error);
    tb_status status = TB_OK;
    if (!json_is_object(json))
        status = tb__file_fail(TB_INVALID, path, "no configuration: %s", json ? "not an object" : error.text);
    free(path);
    if (status != TB_OK) {
        json_decref(json);
        return status;
    }
    *out = json;
    return TB_OK;
}

static const char *const families[] = {"llama", "mistral", "qwen2",       "qwen3",       "qwen3_moe",  "mixtral",
                                       "gemma", "gemma2",  "gemma3_text", "deepseek_v2", "deepseek_v3"};

static int64_t number(const json_t *config, const char *key, int64_t otherwise) {
    const json_t *value = json_object_get(config, key);
    return json_is_integer(value) ? json_integer_value(value) : otherwise;
}

static tb_status need(const json_t *config, const char *key, int64_t *out) {
    *out = number(config, key, 0);
    return *out >= 1 && *out <= INT32_MAX ? TB_OK
                                          : tb__fail(TB_INVALID, "config.json: '%s' is missing, or not a size", key);
}

static tb_status read_experts(const json_t *config, tb__model_config *m, tb__arena *arena) {
    bool is_deepseek = strncmp(m->family, "deepseek", 8) == 0, is_qwen = strcmp(m->family, "qwen3_moe") == 0;
    m->is_mixtral = strcmp(m->family, "mixtral") == 0;
    m->is_dense = tb__arena_alloc(arena, (size_t)m->layers, sizeof *m->is_dense);
    if (!m->is_dense)
        return TB_NO_MEMORY;
    memset(m->is_dense, 0, (size_t)m->layers * sizeof *m->is_dense);
    if (!is_deepseek && !is_qwen && !m->is_mixtral)
        return TB_OK;
    if (is_deepseek && json_is_null(json_object_get(config, "n_routed_experts")))
        return TB_OK;
    const char *key = is_deepseek ? "n_routed_experts" : m->is_mixtral ? "num_local_experts" : "num_experts";
    if (is_qwen && !json_object_get(config, key))
        key = "num_local_experts"; /* as later versions of transformers write it */
    TB_TRY(need(config, key, &m->experts));
    m->expert_intermediate = m->intermediate;
    if (!m->is_mixtral)
        TB_TRY(need(config, "moe_intermediate_size", &m->expert_intermediate));
    int64_t first = number(config, "first_k_dense_replace", 0), step = number(config, "decoder_sparse_step", 1);
    const json_t *dense = json_object_get(config, "mlp_only_layers");
    for (int64_t i = 0; i < m->layers; i++) {
        m->is_dense[i] = is_deepseek ? i < first : is_qwen && step > 0 && (i + 1) % step != 0;
        for (size_t k = 0; is_qwen && k < json_array_size(dense); k++)
            m->is_dense[i] |= json_integer_value(json_array_get(dense, k)) == i;
    }
    if (is_deepseek)
        m->shared_intermediate = number(config, "n_shared_experts", 0) * m->expert_intermediate;
    return TB_OK;
}

tb_status tb__model_config_read(const json_t *config, const char *family, tb__model_config *m, tb__arena *arena) {
    *m = (tb__model_config){.family = family ? family : json_string_value(json_object_get(config, "model_type"))};
    bool is_known = false;
    for (size_t i = 0; m->family && i < sizeof families / sizeof *families; i++)
        is_known |= strcmp(m->family, families[i]) == 0;
    if (!is_known)
        return tb__fail(
            TB_INVALID,
            "the model is '%.40s'; known are llama, mistral, qwen2, qwen3, qwen3_moe, mixtral, gemma, gemma2, "
            "gemma3_text, deepseek_v2 and deepseek_v3",
            m->family ? m->family : "of no type");
    if (json_is_object(json_object_get(config, "quantization_config")))
        return tb__fail(TB_INVALID, "config.json: the model is quantised, which is not described; a spec with "
                                    "\"quantisation\" in 'src' turns it into bf16 first");
    m->is_mla = strncmp(m->family, "deepseek", 8) == 0;
    TB_TRY(need(config, "hidden_size", &m->hidden));
    TB_TRY(need(config, "num_hidden_layers", &m->layers));
    TB_TRY(need(config, "num_attention_heads", &m->heads));
    TB_TRY(need(config, "vocab_size", &m->vocab));
    TB_TRY(need(config, "intermediate_size", &m->intermediate));
    m->kv_heads = number(config, "num_key_value_heads", m->heads);
    bool is_gemma = strncmp(m->family, "gemma", 5) == 0;
    m->head_dim = number(config, "head_dim", is_gemma ? 256 : m->hidden / m->heads);
    if (m->kv_heads < 1 || m->heads % m->kv_heads != 0 || m->head_dim < 1)
        return tb__fail(TB_INVALID, "config.json: the heads don't fit one another");
    if (m->is_mla) {
        m->q_rank = number(config, "q_lora_rank", 0);
        TB_TRY(need(config, "kv_lora_rank", &m->kv_rank));
        TB_TRY(need(config, "qk_rope_head_dim", &m->rope_dim));
    }
    m->further_layers = number(config, "num_nextn_predict_layers", 0);
    const json_t *tied = json_object_get(config, "tie_word_embeddings");
    m->is_tied = tied ? json_is_true(tied) : is_gemma; /* as transformers has it */
    return read_experts(config, m, arena);
}
