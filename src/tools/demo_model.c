/* The demo's model: names and shapes like those of a small Llama, of the size that is asked for. */
#include "tools/demo.h"

#include <inttypes.h>
#include <math.h>
#include <stdio.h>

enum { MAX_LAYERS = 32, HIDDEN_STEP = 16, SMALL_HIDDEN = 64, NO_LAYER = -1 };

static tb_status add(tool_model *model, tool_cut cut, tb_shape shape, int layer, const char *name) {
    tool_weight weight = {.shape = shape, .cut = cut};
    int64_t nelements;
    if (layer == NO_LAYER)
        snprintf(weight.name, sizeof weight.name, "%s.weight", name);
    else
        snprintf(weight.name, sizeof weight.name, "model.layers.%d.%s.weight", layer, name);
    TB_TRY(tb_shape_size(&shape, TB_BF16, &nelements, NULL));
    if (!tb__vec_push(&model->weights, weight))
        return TB_NO_MEMORY;
    model->nelements += nelements;
    return TB_OK;
}

static tb_shape vector(int64_t n) {
    return (tb_shape){.ndim = 1, .dim = {n}};
}

static tb_shape matrix(int64_t rows, int64_t columns) {
    return (tb_shape){.ndim = 2, .dim = {rows, columns}};
}

static tb_status add_layer(tool_model *model, int i) {
    int64_t h = model->hidden, kv = h / 4, f = h / 4 * 11;
    TB_TRY(add(model, TOOL_CUT_NORM, vector(h), i, "input_layernorm"));
    TB_TRY(add(model, TOOL_CUT_COLUMN, matrix(h, h), i, "self_attn.q_proj"));
    TB_TRY(add(model, TOOL_CUT_COLUMN, matrix(kv, h), i, "self_attn.k_proj"));
    TB_TRY(add(model, TOOL_CUT_COLUMN, matrix(kv, h), i, "self_attn.v_proj"));
    TB_TRY(add(model, TOOL_CUT_ROW, matrix(h, h), i, "self_attn.o_proj"));
    TB_TRY(add(model, TOOL_CUT_NORM, vector(h), i, "post_attention_layernorm"));
    TB_TRY(add(model, TOOL_CUT_COLUMN, matrix(f, h), i, "mlp.gate_proj"));
    TB_TRY(add(model, TOOL_CUT_COLUMN, matrix(f, h), i, "mlp.up_proj"));
    return add(model, TOOL_CUT_ROW, matrix(h, f), i, "mlp.down_proj");
}

/* Elements in units of hidden^2: of a layer 10.75, and of embedding and head 56, which is a vocabulary of 28*hidden. */
static int64_t choose_hidden(int64_t nelements, int nlayers) {
    int64_t hidden = (int64_t)sqrt((double)nelements / (10.75 * nlayers + 56));
    return hidden - hidden % HIDDEN_STEP;
}

static tb_status add_weights(tool_model *model, int64_t nelements) {
    for (int i = 0; i < model->nlayers; i++)
        TB_TRY(add_layer(model, i));
    TB_TRY(add(model, TOOL_CUT_NORM, vector(model->hidden), NO_LAYER, "model.norm"));
    int64_t row = 2 * model->hidden; /* one in each of both */
    int64_t vocabulary = (nelements - model->nelements + row - 1) / row;
    TB_TRY(add(model, TOOL_CUT_COLUMN, matrix(vocabulary, model->hidden), NO_LAYER, "model.embed_tokens"));
    return add(model, TOOL_CUT_COLUMN, matrix(vocabulary, model->hidden), NO_LAYER, "lm_head");
}

tb_status tool_model_init(tool_model *model, int64_t nbytes) {
    if (nbytes < TOOL_MIN_MODEL)
        return tb__fail(TB_INVALID, "a model of %" PRId64 " bytes is too small; it must have at least %d", nbytes,
                        TOOL_MIN_MODEL);
    int64_t nelements = nbytes / TOOL_ELEMENT;
    *model = (tool_model){.nlayers = MAX_LAYERS};
    /* What is small has fewer layers before its matrices become slivers. */
    while (model->nlayers > 1 && choose_hidden(nelements, model->nlayers) < SMALL_HIDDEN)
        model->nlayers /= 2;
    model->hidden = choose_hidden(nelements, model->nlayers);
    tb_status status = add_weights(model, nelements);
    if (status != TB_OK)
        tool_model_fini(model);
    return status;
}

void tool_model_fini(tool_model *model) {
    free(model->weights.item);
    *model = (tool_model){0};
}
