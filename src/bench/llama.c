/* A model: names and shapes like those of a small Llama, of the size that is asked for. */
#include "bench/move.h"

#include <inttypes.h>
#include <math.h>
#include <stdio.h>

enum { MAX_LAYERS = 32, HIDDEN_STEP = 16, SMALL_HIDDEN = 64, ELEMENT = 2, NO_LAYER = -1 };

typedef struct builder {
    tool_tensors *tensors;
    int64_t nelements;
} builder;

static tb_status add(builder *b, tool_cut cut, tb_shape shape, int layer, const char *name) {
    tool_tensor tensor = {.shape = shape, .cut = cut, .dtype = {TB_BF16, TB_BF16}};
    int64_t nelements;
    if (layer == NO_LAYER)
        snprintf(tensor.name, sizeof tensor.name, "%s.weight", name);
    else
        snprintf(tensor.name, sizeof tensor.name, "model.layers.%d.%s.weight", layer, name);
    TB_TRY(tb_shape_size(&shape, TB_BF16, &nelements, NULL));
    if (!tb__vec_push(b->tensors, tensor))
        return TB_NO_MEMORY;
    b->nelements += nelements;
    return TB_OK;
}

static tb_shape vector(int64_t n) {
    return (tb_shape){.ndim = 1, .dim = {n}};
}

static tb_shape matrix(int64_t rows, int64_t columns) {
    return (tb_shape){.ndim = 2, .dim = {rows, columns}};
}

static tb_status add_layer(builder *b, int64_t h, int i) {
    int64_t kv = h / 4, f = h / 4 * 11;
    TB_TRY(add(b, TOOL_CUT_NORM, vector(h), i, "input_layernorm"));
    TB_TRY(add(b, TOOL_CUT_COLUMN, matrix(h, h), i, "self_attn.q_proj"));
    TB_TRY(add(b, TOOL_CUT_COLUMN, matrix(kv, h), i, "self_attn.k_proj"));
    TB_TRY(add(b, TOOL_CUT_COLUMN, matrix(kv, h), i, "self_attn.v_proj"));
    TB_TRY(add(b, TOOL_CUT_ROW, matrix(h, h), i, "self_attn.o_proj"));
    TB_TRY(add(b, TOOL_CUT_NORM, vector(h), i, "post_attention_layernorm"));
    TB_TRY(add(b, TOOL_CUT_COLUMN, matrix(f, h), i, "mlp.gate_proj"));
    TB_TRY(add(b, TOOL_CUT_COLUMN, matrix(f, h), i, "mlp.up_proj"));
    return add(b, TOOL_CUT_ROW, matrix(h, f), i, "mlp.down_proj");
}

/* Elements in units of hidden^2: of a layer 10.75, and of embedding and head 56, which is a vocabulary of 28*hidden. */
static int64_t choose_hidden(int64_t nelements, int nlayers) {
    int64_t hidden = (int64_t)sqrt((double)nelements / (10.75 * nlayers + 56));
    return hidden - hidden % HIDDEN_STEP;
}

tb_status tool_llama_add(tool_tensors *tensors, int64_t nbytes, tool_llama *out) {
    if (nbytes < TOOL_MIN_LLAMA)
        return tb__fail(TB_INVALID, "a model of %" PRId64 " bytes is too small; it must have at least %d", nbytes,
                        TOOL_MIN_LLAMA);
    int64_t nelements = nbytes / ELEMENT;
    builder b = {.tensors = tensors};
    int nlayers = MAX_LAYERS;
    /* What is small has fewer layers before its matrices become slivers. */
    while (nlayers > 1 && choose_hidden(nelements, nlayers) < SMALL_HIDDEN)
        nlayers /= 2;
    int64_t hidden = choose_hidden(nelements, nlayers);
    for (int i = 0; i < nlayers; i++)
        TB_TRY(add_layer(&b, hidden, i));
    TB_TRY(add(&b, TOOL_CUT_NORM, vector(hidden), NO_LAYER, "model.norm"));
    int64_t row = 2 * hidden; /* one in each of both */
    int64_t vocabulary = (nelements - b.nelements + row - 1) / row;
    TB_TRY(add(&b, TOOL_CUT_COLUMN, matrix(vocabulary, hidden), NO_LAYER, "model.embed_tokens"));
    TB_TRY(add(&b, TOOL_CUT_COLUMN, matrix(vocabulary, hidden), NO_LAYER, "lm_head"));
    *out = (tool_llama){.nlayers = nlayers, .hidden = hidden, .nbytes = b.nelements * ELEMENT};
    return TB_OK;
}
