/* Options of `spec` and `reshard --to`, and files that belong to a model beside its tensors. */
#ifndef TB_TOOLS_MODEL_H
#define TB_TOOLS_MODEL_H

#include "tools/tools.h"

#include <jansson.h>

/* Eight options that follow one another: [TO] = TOOL_MODEL_OPTIONS. */
#define TOOL_MODEL_OPTIONS                                                                                             \
    {"to", "FORM", "the form of the target: hf, vllm or megatron"},                                                    \
        {"tp", "N", "tensor-parallel ranks of the target"}, {"pp", "N", "pipeline stages of the target"},              \
        {"ep", "N", "expert-parallel ranks of the target"},                                                            \
        {"from-form", "FORM", "the form of the source; default: hf"},                                                  \
        {"from-tp", "N", "tensor-parallel ranks of the source"}, {"from-pp", "N", "pipeline stages of the source"}, {  \
        "from-ep", "N", "expert-parallel ranks of the source"                                                          \
    }

/* The spec that these options ask for, from dir's config.json; `options` and `value` begin with --to. Prints what the
 * configuration does not tell. */
tb_status tool_model_spec(const char *dir, const tool_option *options, const char *const *value, json_t **out);
void tool_say_notes(tb__text *notes); /* a sentence for each line; frees it */

/* Copies what is beside the tensors (config.json, the tokenizer, ...) from one directory to the other, where that has
 * no file of the name. */
tb_status tool_copy_companions(const char *from, const char *to);

#endif
