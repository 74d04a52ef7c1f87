/* Specs for models of well-known families: how Hugging Face's files, vLLM's sharded_state and Megatron-LM's ranks have
 * their tensors, worked out from a model's configuration. */
#ifndef TB_RESHARD_MODEL_SPEC_H
#define TB_RESHARD_MODEL_SPEC_H

#include "base/text.h"

#include <jansson.h>

typedef enum tb__model_form { TB__FORM_HF, TB__FORM_VLLM, TB__FORM_MEGATRON } tb__model_form;

/* How a side has the model. Sizes of 0 are 1. */
typedef struct tb__model_side {
    tb__model_form form;
    int64_t tp, pp, ep;
} tb__model_side;

tb_status tb__model_form_parse(const char *name, tb__model_form *out);

/* The spec that brings a model from one form to the other. `config` is its config.json; `family` is its "model_type",
 * or NULL: what the configuration says. What the configuration does not tell is added to `notes`, a line each. */
tb_status tb__model_spec(const json_t *config, const char *family, const tb__model_side *src, const tb__model_side *dst,
                         json_t **out, tb__text *notes);

/* As JSON that a person can read: a rule on each line. */
void tb__model_spec_format(const json_t *spec, tb__text *out);

/* Replaces a spec that has "model" by the one which it stands for: {"model": "llama", "from": "hf", "to": "vllm",
 * "tp": 4, "from_tp": 1, ...}. The configuration is that of the spec, or dir's config.json. `rules` come first. */
tb_status tb__model_spec_resolve(json_t *root, const char *dir, json_t **out, tb__text *notes);

#endif
