/* Specs for models of well-known families. Every tensor of Hugging Face's files, cut as finely as any form cuts it (q,
 * k and v, gate and up, each expert), has a *place* in each form: a name, a view, a layout. A rule for the spec is a
 * pair of places. Rules for tensors that a model does not have match nothing, so that only sizes are taken from its
 * configuration. */
#include "reshard/model_spec.h"

#include "reshard/model_config.h"

#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

enum { NFORMS = 3, LATE_STAGE = -1 };

/* Where a form has a tensor. In names @ is the layer, # the expert, in views # the expert. */
typedef struct place {
    char name[128], view[128], cut[1536];
    bool is_expert; /* cut over experts' ranks first, in vLLM */
    int ndim;
    int64_t shape[4]; /* of the whole, where there is a view */
    bool has_stage;
    int64_t stage;
} place;

typedef struct places {
    place form[NFORMS];
} places;

typedef struct maker {
    tb__model_config m;
    tb__model_side side[2];
    json_t *rules;
    tb__text *notes;
    tb__arena arena;
} maker;

static const char *const form_names[NFORMS] = {"hf", "vllm", "megatron"};

tb_status tb__model_form_parse(const char *name, tb__model_form *out) {
    for (int i = 0; i < NFORMS; i++) {
        if (strcmp(name, form_names[i]) == 0) {
            *out = (tb__model_form)i;
            return TB_OK;
        }
    }
    return tb__fail(TB_INVALID, "'%.40s' is none of hf, vllm and megatron", name);
}

static __attribute__((format(printf, 3, 4))) void put(char *to, size_t size, const char *format, ...) {
    va_list args;
    va_start(args, format);
    (void)vsnprintf(to, size, format, args);
    va_end(args);
}

#define PUT(field, ...) put(field, sizeof(field), __VA_ARGS__)

/* ---- Rules --------------------------------------------------------------------------------------------------- */

/* @ and # of a name or view become text. */
static const char *fill(maker *k, const char *text, const char *layer, const char *expert) {
    tb__text out = {0};
    char *whole;
    for (; *text; text++) {
        if (*text == '@')
            tb__text_add(&out, "%s", layer);
        else if (*text == '#')
            tb__text_add(&out, "%s", expert);
        else
            tb__text_add(&out, "%c", *text);
    }
    if (tb__text_take(&out, &whole) != TB_OK)
        return "";
    const char *kept = tb__arena_strdup(&k->arena, whole);
    free(whole);
    return kept ? kept : "";
}

static json_t *shape_json(const place *p) {
    json_t *list = json_array();
    for (int d = 0; d < p->ndim; d++)
        json_array_append_new(list, json_integer(p->shape[d]));
    return list;
}

static json_t *side_json(const maker *k, int s, const place *p) {
    const tb__model_side *side = &k->side[s];
    json_t *json = json_object();
    if (side->form == TB__FORM_HF)
        return json;
    if (side->form == TB__FORM_VLLM && p->is_expert) {
        json_object_set_new(json, "mesh", json_pack("[I,I]", (json_int_t)side->ep, (json_int_t)(side->tp / side->ep)));
        json_object_set_new(json, "names", json_pack("[s,s]", "ep", "tp"));
        json_object_set_new(json, "ep", json_string("Shard(0)"));
    }
    if (*p->cut)
        json_object_set_new(json, "tp", json_string(p->cut));
    if (p->has_stage && side->form == TB__FORM_MEGATRON && side->pp > 1)
        json_object_set_new(json, "stage", json_integer(p->stage));
    return json;
}

static void add_rule(maker *k, const place *src, const place *dst, const char *layer, const char *expert) {
    bool has_layer = strchr(src->name, '@') && strcmp(layer, "*") == 0, has_expert = strchr(src->name, '#') != NULL;
    const char *match = fill(k, src->name, layer, has_expert ? "*" : expert);
    const char *to_layer = has_layer ? "\\1" : layer, *to_expert = has_expert ? (has_layer ? "\\2" : "\\1") : expert;
    json_t *rule = json_pack("{s:s}", "match", match), *from = side_json(k, 0, src), *to = side_json(k, 1, dst);
    if (*src->view) {
        json_object_set_new(from, "view", json_string(fill(k, src->view, layer, has_expert ? "*" : expert)));
        if (strstr(src->cut, "Explicit"))
            json_object_set_new(rule, "shape", shape_json(src));
    }
    const char *name = fill(k, dst->name, to_layer, to_expert);
    if (strcmp(src->name, dst->name) != 0 || !has_layer || has_expert)
        json_object_set_new(to, "name", json_string(name));
    if (strcmp(name, match) == 0)
        json_object_del(to, "name");
    if (*dst->view) {
        json_object_set_new(to, "view", json_string(fill(k, dst->view, to_layer, to_expert)));
        json_object_set_new(to, "shape", shape_json(dst));
    }
    if (json_object_size(from) > 0)
        json_object_set(rule, "src", from);
    if (json_object_size(to) > 0)
        json_object_set(rule, "dst", to);
    json_decref(from);
    json_decref(to);
    json_array_append_new(k->rules, rule);
}

/* A rule for the tensor or, where a side has all experts in one, a rule for each expert. */
static void add_places_of(maker *k, const places *all, const char *layer) {
    const place *src = &all->form[k->side[0].form], *dst = &all->form[k->side[1].form];
    if (!*src->name || !*dst->name)
        return;
    bool is_stack = (strchr(src->view, '#') || strchr(dst->view, '#')) && !strchr(src->name, '#');
    for (int64_t e = 0; e < (is_stack ? k->m.experts : 1); e++) {
        char expert[24];
        PUT(expert, "%" PRId64, e);
        add_rule(k, src, dst, layer, is_stack ? expert : "#");
    }
}

static void add_places(maker *k, const places *all) {
    add_places_of(k, all, "*");
}

/* As one tensor with the same shape in all forms; NULL: a form does not have it. */
static places whole(const char *hf, const char *vllm, const char *megatron, const char *cut) {
    places p = {0};
    const char *const names[NFORMS] = {hf, vllm, megatron};
    for (int i = 0; i < NFORMS; i++) {
        PUT(p.form[i].name, "%s", names[i] ? names[i] : "");
        PUT(p.form[i].cut, "%s", cut);
    }
    return p;
}

static void set_shape(place *p, int ndim, int64_t a, int64_t b, int64_t c) {
    p->ndim = ndim;
    p->shape[0] = a;
    p->shape[1] = b;
    p->shape[2] = c;
}

/* ---- Attention ----------------------------------------------------------------------------------------------- */

/* vLLM's rows of q, k and v on each rank. With more ranks than key heads, several have the same key head. */
static void put_qkv_cut(const tb__model_config *m, int64_t tp, char *cut, size_t size) {
    int64_t q = m->heads * m->head_dim, kv = m->kv_heads * m->head_dim;
    if (tp <= m->kv_heads) {
        put(cut, size, "BlockShard(0,%" PRId64 ",%" PRId64 ",%" PRId64 ")", q, kv, kv);
        return;
    }
    size_t n = (size_t)snprintf(cut, size, "Explicit(0");
    for (int64_t r = 0; r < tp && n < size; r++) {
        int64_t rows = q / tp, head = r * m->kv_heads / tp * m->head_dim;
        n += (size_t)snprintf(
            cut + n, size - n, "%s%" PRId64 "-%" PRId64 ",%" PRId64 "-%" PRId64 ",%" PRId64 "-%" PRId64, r ? ";" : ",",
            r * rows, (r + 1) * rows, q + head, q + head + m->head_dim, q + kv + head, q + kv + head + m->head_dim);
    }
    if (n + 2 < size)
        put(cut + n, size - n, ")");
}

static void add_attention(maker *k) {
    const tb__model_config *m = &k->m;
    static const char *const parts[] = {"q", "k", "v"};
    int64_t group = m->heads / m->kv_heads, hd = m->head_dim, q = m->heads * hd, kv = m->kv_heads * hd;
    const int64_t begin[] = {0, q, q + kv}, rows[] = {q, kv, kv}, slot[] = {0, group, group + 1}, n[] = {group, 1, 1};
    bool has_groups = k->side[0].form == TB__FORM_MEGATRON || k->side[1].form == TB__FORM_MEGATRON;
    for (int i = 0; i < 6; i++) {
        bool is_bias = i >= 3;
        int part = i % 3, ndim = is_bias ? 1 : 2;
        const char *what = is_bias ? "bias" : "weight";
        char name[96], split[64] = "";
        PUT(name, "model.layers.@.self_attn.%s_proj.%s", parts[part], what);
        places p = whole(name, "model.layers.@.self_attn.qkv_proj.", "decoder.layers.@.self_attention.linear_qkv.", "");
        strncat(p.form[TB__FORM_VLLM].name, what, 8);
        strncat(p.form[TB__FORM_MEGATRON].name, what, 8);
        if (has_groups)
            PUT(split, "split(0,%" PRId64 ",%" PRId64 ",%" PRId64 ")", m->kv_heads, n[part], hd);
        PUT(p.form[TB__FORM_HF].view, "%s", split);
        set_shape(&p.form[TB__FORM_HF], ndim, rows[part], m->hidden, 0);
        place *vllm = &p.form[TB__FORM_VLLM], *megatron = &p.form[TB__FORM_MEGATRON];
        PUT(vllm->view, "slice(0,%" PRId64 ",%" PRId64 ")%s%s", begin[part], rows[part], *split ? " " : "", split);
        set_shape(vllm, ndim, q + 2 * kv, m->hidden, 0);
        put_qkv_cut(m, k->side[k->side[0].form == TB__FORM_VLLM ? 0 : 1].tp, vllm->cut, sizeof vllm->cut);
        PUT(megatron->view, "split(0,%" PRId64 ",%" PRId64 ",%" PRId64 ") slice(1,%" PRId64 ",%" PRId64 ")",
            m->kv_heads, group + 2, hd, slot[part], n[part]);
        set_shape(megatron, ndim, q + 2 * kv, m->hidden, 0);
        PUT(megatron->cut, "Shard(0)");
        add_places(k, &p);
    }
    places norm = whole("model.layers.@.self_attn.q_norm.weight", "model.layers.@.self_attn.q_norm.weight",
                        "decoder.layers.@.self_attention.q_layernorm.weight", "");
    add_places(k, &norm);
    norm = whole("model.layers.@.self_attn.k_norm.weight", "model.layers.@.self_attn.k_norm.weight",
                 "decoder.layers.@.self_attention.k_layernorm.weight", "");
    add_places(k, &norm);
    places out = whole("model.layers.@.self_attn.o_proj.weight", "model.layers.@.self_attn.o_proj.weight",
                       "decoder.layers.@.self_attention.linear_proj.weight", "Shard(1)");
    add_places(k, &out);
}

static void add_latent_attention(maker *k) {
    const tb__model_config *m = &k->m;
#define HF(x)       "model.layers.@.self_attn." x ".weight"
#define VLLM(x)     HF("mla_attn." x) /* of names for one module, vLLM's loader asks for the first by the alphabet */
#define MEGATRON(x) "decoder.layers.@.self_attention." x
    const struct {
        const char *hf, *vllm, *megatron, *cut;
    } list[] = {
        {HF("q_proj"), VLLM("q_proj"), MEGATRON("linear_q_proj.weight"), "Shard(0)"},
        {HF("q_b_proj"), VLLM("q_b_proj"), MEGATRON("linear_q_up_proj.weight"), "Shard(0)"},
        {HF("q_a_layernorm"), VLLM("q_a_layernorm"), MEGATRON("linear_q_up_proj.layer_norm_weight"), ""},
        {HF("kv_b_proj"), HF("kv_b_proj"), MEGATRON("linear_kv_up_proj.weight"), "Shard(0)"},
        {HF("kv_a_layernorm"), HF("kv_a_layernorm"), MEGATRON("linear_kv_up_proj.layer_norm_weight"), ""},
        {HF("o_proj"), VLLM("o_proj"), MEGATRON("linear_proj.weight"), "Shard(1)"},
    };
    for (size_t i = 0; i < sizeof list / sizeof *list; i++) {
        places p = whole(list[i].hf, list[i].vllm, list[i].megatron, list[i].cut);
        add_places(k, &p);
    }
    places q = whole(HF("q_a_proj"), HF("q_a_proj"), MEGATRON("linear_q_down_proj.weight"), "");
    places kv = whole(HF("kv_a_proj_with_mqa"), HF("kv_a_proj_with_mqa"), MEGATRON("linear_kv_down_proj.weight"), "");
    if (m->q_rank > 0) { /* vLLM has both in one, whole on every rank */
        int64_t rows = m->kv_rank + m->rope_dim;
        place *a = &q.form[TB__FORM_VLLM], *b = &kv.form[TB__FORM_VLLM];
        PUT(a->name, "%s", HF("fused_qkv_a_proj"));
        PUT(b->name, "%s", HF("fused_qkv_a_proj"));
        PUT(a->view, "slice(0,0,%" PRId64 ")", m->q_rank);
        PUT(b->view, "slice(0,%" PRId64 ",%" PRId64 ")", m->q_rank, rows);
        set_shape(a, 2, m->q_rank + rows, m->hidden, 0);
        set_shape(b, 2, m->q_rank + rows, m->hidden, 0);
        add_places(k, &q);
    }
    add_places(k, &kv);
#undef HF
#undef VLLM
#undef MEGATRON
}

/* ---- MLP ----------------------------------------------------------------------------------------------------- */

/* gate and up, which become one, and down. */
static void add_mlp(maker *k, const char *hf, const char *vllm, const char *megatron, int64_t n) {
    static const char *const parts[] = {"gate", "up"};
    for (int i = 0; i < 2; i++) {
        places p = {0};
        PUT(p.form[TB__FORM_HF].name, "model.layers.@.%s.%s_proj.weight", hf, parts[i]);
        PUT(p.form[TB__FORM_VLLM].name, "model.layers.@.%s.gate_up_proj.weight", vllm);
        PUT(p.form[TB__FORM_MEGATRON].name, "decoder.layers.@.%s.linear_fc1.weight", megatron);
        for (int f = TB__FORM_VLLM; f <= TB__FORM_MEGATRON; f++) {
            PUT(p.form[f].view, "slice(0,%" PRId64 ",%" PRId64 ")", i * n, n);
            PUT(p.form[f].cut, "BlockShard(0,%" PRId64 ",%" PRId64 ")", n, n);
            set_shape(&p.form[f], 2, 2 * n, k->m.hidden, 0);
        }
        add_places(k, &p);
    }
    places down = whole("", "", "", "Shard(1)");
    PUT(down.form[TB__FORM_HF].name, "model.layers.@.%s.down_proj.weight", hf);
    PUT(down.form[TB__FORM_VLLM].name, "model.layers.@.%s.down_proj.weight", vllm);
    PUT(down.form[TB__FORM_MEGATRON].name, "decoder.layers.@.%s.linear_fc2.weight", megatron);
    add_places(k, &down);
}

static void add_experts(maker *k) {
    const tb__model_config *m = &k->m;
    const char *block = m->is_mixtral ? "block_sparse_moe" : "mlp";
    static const char *const parts[2][3] = {{"gate_proj", "up_proj", "down_proj"}, {"w1", "w3", "w2"}};
    int64_t n = m->expert_intermediate;
    for (int i = 0; i < 3; i++) {
        places p = {0};
        place *vllm = &p.form[TB__FORM_VLLM], *megatron = &p.form[TB__FORM_MEGATRON];
        bool is_down = i == 2;
        PUT(p.form[TB__FORM_HF].name, "model.layers.@.%s.experts.#.%s.weight", block, parts[m->is_mixtral][i]);
        PUT(vllm->name, "model.layers.@.%s.experts.routed_experts.%s", block, is_down ? "w2_weight" : "w13_weight");
        PUT(megatron->name, "decoder.layers.@.mlp.experts.linear_fc%d.weight#", is_down ? 2 : 1);
        vllm->is_expert = true;
        if (is_down) {
            PUT(vllm->view, "slice(0,#,1) merge(0,1)");
            PUT(vllm->cut, "Shard(2)");
            set_shape(vllm, 3, m->experts, m->hidden, n);
            PUT(megatron->cut, "Shard(1)");
        } else {
            PUT(vllm->view, "slice(0,#,1) slice(1,%" PRId64 ",%" PRId64 ") merge(0,1)", i * n, n);
            PUT(vllm->cut, "BlockShard(1,%" PRId64 ",%" PRId64 ")", n, n);
            set_shape(vllm, 3, m->experts, 2 * n, m->hidden);
            PUT(megatron->view, "slice(0,%" PRId64 ",%" PRId64 ")", i * n, n);
            PUT(megatron->cut, "BlockShard(0,%" PRId64 ",%" PRId64 ")", n, n);
            set_shape(megatron, 2, 2 * n, m->hidden, 0);
        }
        add_places(k, &p);
    }
    static const char *const gates[2][2] = {{"weight", "weight"}, {"e_score_correction_bias", "expert_bias"}};
    for (int i = 0; i < 2; i++) {
        char from[96], to[96], other[96];
        PUT(from, "model.layers.@.%s.gate.%s", block, gates[i][0]);
        PUT(to, "model.layers.@.%s.gate.%s", m->is_mixtral ? block : "mlp.experts", gates[i][0]);
        PUT(other, "decoder.layers.@.mlp.router.%s", gates[i][1]);
        places p = whole(from, to, other, "");
        add_places(k, &p);
    }
    if (m->shared_intermediate > 0)
        add_mlp(k, "mlp.shared_experts", "mlp.experts._shared_experts._layer", "mlp.shared_experts",
                m->shared_intermediate);
}

/* ---- Norms, embeddings --------------------------------------------------------------------------------------- */

static void add_norms(maker *k) {
    const tb__model_config *m = &k->m;
    bool is_gemma = strncmp(m->family, "gemma", 5) == 0, has_experts = m->experts > 0;
    bool is_sandwich = is_gemma && strcmp(m->family, "gemma") != 0; /* a norm behind each block, too */
    const char *fc1 = "decoder.layers.@.mlp.linear_fc1.layer_norm_weight";
    const char *before_mlp = is_sandwich ? "model.layers.@.pre_feedforward_layernorm.weight"
                                         : "model.layers.@.post_attention_layernorm.weight";
    places p = whole("model.layers.@.input_layernorm.weight", "model.layers.@.input_layernorm.weight",
                     m->is_mla ? "decoder.layers.@.input_layernorm.weight"
                               : "decoder.layers.@.self_attention.linear_qkv.layer_norm_weight",
                     "");
    add_places(k, &p);
    places dense = whole(before_mlp, before_mlp, fc1, "");
    p = whole(before_mlp, before_mlp, "decoder.layers.@.pre_mlp_layernorm.weight", "");
    for (int64_t i = 0; has_experts && i < m->layers; i++) {
        char layer[24];
        PUT(layer, "%" PRId64, i);
        if (m->is_dense[i])
            add_places_of(k, &dense, layer);
    }
    add_places(k, has_experts ? &p : &dense);
    if (is_sandwich) {
        p = whole("model.layers.@.post_attention_layernorm.weight", "model.layers.@.post_attention_layernorm.weight",
                  "decoder.layers.@.self_attention.linear_proj.post_layernorm.weight", "");
        add_places(k, &p);
        p = whole("model.layers.@.post_feedforward_layernorm.weight",
                  "model.layers.@.post_feedforward_layernorm.weight",
                  "decoder.layers.@.mlp.linear_fc2.post_layernorm.weight", "");
        add_places(k, &p);
    }
    p = whole("model.norm.weight", "model.norm.weight", "decoder.final_layernorm.weight", "");
    p.form[TB__FORM_MEGATRON].has_stage = true;
    p.form[TB__FORM_MEGATRON].stage = LATE_STAGE;
    add_places(k, &p);
}

static int64_t tp_of(const maker *k, tb__model_form form) {
    return k->side[k->side[0].form == form ? 0 : 1].tp;
}

static void pad_vocabulary(const maker *k, place *p, int64_t multiple) {
    int64_t padded = (k->m.vocab + multiple - 1) / multiple * multiple;
    if (padded > k->m.vocab) {
        PUT(p->view, "pad(0,0,%" PRId64 ")", padded - k->m.vocab);
        set_shape(p, 2, padded, k->m.hidden, 0);
    }
}

static void add_embeddings(maker *k) {
    const tb__model_config *m = &k->m;
    places p[2] = {
        whole("model.embed_tokens.weight", "model.embed_tokens.weight", "embedding.word_embeddings.weight", "Shard(0)"),
        whole("lm_head.weight", "lm_head.weight", "output_layer.weight", "Shard(0)")};
    for (int i = 0; i < 2; i++) {
        pad_vocabulary(k, &p[i].form[TB__FORM_VLLM], 64);
        pad_vocabulary(k, &p[i].form[TB__FORM_MEGATRON], 128 * tp_of(k, TB__FORM_MEGATRON));
        p[i].form[TB__FORM_MEGATRON].has_stage = true;
        p[i].form[TB__FORM_MEGATRON].stage = i ? LATE_STAGE : 0;
    }
    if (!m->is_tied) {
        add_places(k, &p[0]);
        add_places(k, &p[1]);
        return;
    }
    /* vLLM's loader asks for the first name, by the alphabet, of weights that are one tensor. */
    if (strcmp(m->family, "gemma2") != 0)
        PUT(p[0].form[TB__FORM_VLLM].name, "lm_head.weight");
    add_places(k, &p[0]);
    if (k->side[1].form == TB__FORM_MEGATRON && k->side[1].pp > 1) { /* the last stage has a copy */
        places copy = p[0];
        copy.form[TB__FORM_MEGATRON] = p[1].form[TB__FORM_MEGATRON];
        add_places(k, &copy);
    }
    const char *again = k->side[0].form == TB__FORM_MEGATRON ? "output_layer.weight"
                        : k->side[0].form == TB__FORM_HF     ? "lm_head.weight"
                                                             : NULL;
    if (again)
        json_array_append_new(k->rules, json_pack("{s:s,s:b}", "match", again, "skip", 1));
}

/* ---- Sides ----------------------------------------------------------------------------------------------------- */

static tb_status check_side(const maker *k, tb__model_side *side) {
    const tb__model_config *m = &k->m;
    side->tp = side->tp ? side->tp : 1;
    side->pp = side->pp ? side->pp : 1;
    side->ep = side->ep ? side->ep : 1;
    const char *form = form_names[side->form];
    if (side->form == TB__FORM_HF && (side->tp > 1 || side->pp > 1 || side->ep > 1))
        return tb__fail(TB_INVALID, "hf has one rank, so that it takes no sizes");
    if (side->form == TB__FORM_VLLM && side->pp > 1)
        return tb__fail(TB_INVALID, "vllm: files of pipeline stages are not described");
    if (side->ep > 1 && m->experts == 0)
        return tb__fail(TB_INVALID, "ep is %" PRId64 ", but the model has no experts", side->ep);
    if (side->form == TB__FORM_VLLM && side->tp % side->ep != 0)
        return tb__fail(TB_INVALID, "vllm: ep, %" PRId64 ", does not divide tp, %" PRId64, side->ep, side->tp);
    int64_t kv = m->is_mla ? m->heads : m->kv_heads;
    bool heads_fit = m->heads % side->tp == 0 && (kv % side->tp == 0 || side->tp % kv == 0);
    if (side->form == TB__FORM_MEGATRON && kv % side->tp != 0 && heads_fit)
        return tb__fail(TB_INVALID, "megatron: %" PRId64 " key heads can't be cut for tp %" PRId64, kv, side->tp);
    int64_t etp = side->form == TB__FORM_VLLM ? side->tp / side->ep : side->tp;
    const struct {
        const char *what;
        int64_t size, ways;
        bool fits;
    } sizes[] = {{"attention heads", m->heads, side->tp, heads_fit},
                 {"intermediate_size", m->intermediate, side->tp, m->intermediate % side->tp == 0},
                 {"experts", m->experts, side->ep, m->experts % side->ep == 0},
                 {"the experts' intermediate size", m->expert_intermediate, etp, m->expert_intermediate % etp == 0},
                 {"layers", m->layers, side->pp, m->layers % side->pp == 0}};
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
        if (!sizes[i].fits)
            return tb__fail(TB_INVALID, "%s: %s, %" PRId64 ", can't be cut equally by %" PRId64, form, sizes[i].what,
                            sizes[i].size, sizes[i].ways);
    }
    return side->tp > 64 ? tb__fail(TB_INVALID, "tp is at most 64") : TB_OK;
}

static json_t *mesh_json(const maker *k, const tb__model_side *side) {
    if (side->form == TB__FORM_HF)
        return NULL;
    if (side->form == TB__FORM_VLLM)
        return json_pack("{s:[I],s:[s]}", "mesh", (json_int_t)side->tp, "names", "tp");
    json_t *mesh = json_pack("{s:[I,I,I],s:[s,s,s]}", "mesh", (json_int_t)side->pp, (json_int_t)side->ep,
                             (json_int_t)side->tp, "names", "pp", "ep", "tp");
    if (side->pp > 1)
        json_object_set_new(mesh, "layers", json_pack("{s:s,s:I}", "dim", "pp", "count", (json_int_t)k->m.layers));
    if (side->ep > 1)
        json_object_set_new(
            mesh, "experts",
            json_pack("{s:s,s:I,s:s}", "dim", "ep", "count", (json_int_t)k->m.experts, "pattern", "experts.*.weight#"));
    return mesh;
}

/* Rules for the same tensors have to follow one another. */
static json_t *sort_rules(const json_t *rules) {
    json_t *places_of = json_object(), *sorted = json_array(), *groups = json_array();
    size_t i;
    json_t *rule;
    json_array_foreach((json_t *)rules, i, rule) {
        const char *match = json_string_value(json_object_get(rule, "match"));
        json_t *at = json_object_get(places_of, match);
        if (!at) {
            at = json_array();
            json_object_set_new(places_of, match, at);
            json_array_append(groups, at);
        }
        json_array_append(at, rule);
    }
    for (i = 0; i < json_array_size(groups); i++)
        json_array_extend(sorted, json_array_get(groups, i));
    json_decref(places_of);
    json_decref(groups);
    return sorted;
}

static void add_notes(maker *k) {
    bool has_vllm = false, has_megatron = false;
    for (int i = 0; i < 2; i++) {
        has_vllm |= k->side[i].form == TB__FORM_VLLM;
        has_megatron |= k->side[i].form == TB__FORM_MEGATRON;
        if (k->side[i].form == TB__FORM_VLLM && k->side[i].ep > 1 && k->side[i].ep != k->side[i].tp)
            tb__text_add(k->notes, "vLLM itself deals experts out over all ranks of tp, or cuts each over all\n");
    }
    if (has_vllm)
        tb__text_add(k->notes, "vLLM's names are those of 0.32; a vocabulary is padded to a multiple of 64\n");
    if (has_megatron) {
        tb__text_add(k->notes,
                     "Megatron's names are those of Megatron-Core with Transformer Engine and grouped experts; the "
                     "configuration does not tell whether it is built like this\n");
        tb__text_add(k->notes, "the vocabulary is padded to a multiple of 128 times tp, Megatron's default\n");
    }
    if (k->m.further_layers > 0)
        tb__text_add(k->notes, "layers for the prediction of further tokens are left out\n");
}

/* What vLLM's attention layers have beside weights: all 1 where the model is not quantised. */
static json_t *attention_scales(const tb__model_config *m) {
    static const char *const scales[] = {"k", "v", "q", "prob"};
    json_t *all = json_object();
    for (int64_t layer = 0; layer < m->layers; layer++) {
        for (size_t i = 0; i < sizeof scales / sizeof *scales; i++) {
            char name[96];
            PUT(name, "model.layers.%" PRId64 ".self_attn.%s._%s_scale", layer,
                m->is_mla ? "mla_attn.mla_attn" : "attn", scales[i]);
            json_object_set_new(all, name, json_integer(1));
        }
    }
    return all;
}

static tb_status make_rules(maker *k) {
    const tb__model_config *m = &k->m;
    TB_TRY(check_side(k, &k->side[0]));
    TB_TRY(check_side(k, &k->side[1]));
    for (int64_t i = 0; i < m->further_layers; i++) {
        char match[48];
        PUT(match, "model.layers.%" PRId64 ".*", m->layers + i);
        json_array_append_new(k->rules, json_pack("{s:s,s:b}", "match", match, "skip", 1));
    }
    json_array_append_new(k->rules, json_pack("{s:s,s:b}", "match", "*.rotary_emb.inv_freq", "skip", 1));
    if (k->side[0].form == TB__FORM_VLLM)
        json_array_append_new(k->rules, json_pack("{s:s,s:b}", "match", "*attn._*_scale", "skip", 1));
    add_embeddings(k);
    add_norms(k);
    if (m->is_mla)
        add_latent_attention(k);
    else
        add_attention(k);
    if (m->experts > 0)
        add_experts(k);
    add_mlp(k, "mlp", "mlp", "mlp", m->intermediate);
    add_notes(k);
    return TB_OK;
}

tb_status tb__model_spec(const json_t *config, const char *family, const tb__model_side *src, const tb__model_side *dst,
                         json_t **out, tb__text *notes) {
    maker k = {.side = {*src, *dst}, .rules = json_array(), .notes = notes};
    tb_status status = tb__model_config_read(config, family, &k.m, &k.arena);
    if (status == TB_OK)
        status = make_rules(&k);
    if (status == TB_OK) {
        json_t *spec = json_object(), *mesh = mesh_json(&k, &k.side[0]);
        if (mesh)
            json_object_set_new(spec, "src_mesh", mesh);
        mesh = mesh_json(&k, &k.side[1]);
        if (mesh)
            json_object_set_new(spec, "dst_mesh", mesh);
        if (dst->form != TB__FORM_MEGATRON)
            json_object_set_new(spec, "files", json_string(form_names[dst->form]));
        json_object_set_new(spec, "rules", sort_rules(k.rules));
        if (dst->form == TB__FORM_VLLM)
            json_object_set_new(spec, "constants", attention_scales(&k.m));
        *out = spec;
    }
    json_decref(k.rules);
    tb__arena_fini(&k.arena);
    return status;
}

void tb__model_spec_format(const json_t *spec, tb__text *out) {
    const char *key;
    json_t *value;
    size_t n = 0, i;
    json_object_foreach((json_t *)spec, key, value) {
        tb__text_add(out, "%s", n++ ? ",\n " : "{");
        tb__text_add_json(out, key);
        tb__text_add(out, ": ");
        json_t *one;
        char *text;
        if (!json_is_array(value)) {
            text = json_dumps(value, JSON_ENCODE_ANY | (strcmp(key, "constants") == 0 ? JSON_INDENT(3) : 0));
            tb__text_add(out, "%s", text ? text : "null");
            free(text);
            continue;
        }
        tb__text_add(out, "[");
        json_array_foreach(value, i, one) {
            text = json_dumps(one, JSON_ENCODE_ANY);
            tb__text_add(out, "%s%s", i ? ",\n   " : "\n   ", text ? text : "null");
            free(text);
        }
        tb__text_add(out, "]");
    }
    tb__text_add(out, "}\n");
}

/* ---- Specs that refer to a model ------------------------------------------------------------------------------- */

static tb_status read_model_side(const json_t *root, bool is_target, tb__model_side *out) {
    static const char *const keys[2][4] = {{"from", "from_tp", "from_pp", "from_ep"}, {"to", "tp", "pp", "ep"}};
    int64_t *const sizes[] = {&out->tp, &out->pp, &out->ep};
    const char *form = json_string_value(json_object_get(root, keys[is_target][0]));
    if (!form && json_object_get(root, keys[is_target][0]))
        return tb__fail(TB_INVALID, "'%s' is not text", keys[is_target][0]);
    TB_TRY(tb__model_form_parse(form ? form : "hf", &out->form));
    for (int i = 0; i < 3; i++) {
        const json_t *size = json_object_get(root, keys[is_target][i + 1]);
        *sizes[i] = size ? (json_is_integer(size) ? json_integer_value(size) : 0) : 1;
        if (*sizes[i] < 1 || *sizes[i] > 4096)
            return tb__fail(TB_INVALID, "'%s' is not a number between 1 and 4096", keys[is_target][i + 1]);
    }
    return TB_OK;
}

tb_status tb__model_spec_resolve(json_t *root, const char *dir, json_t **out, tb__text *notes) {
    static const char *const keys[] = {"model",   "config", "rules", "from", "from_tp", "from_pp",
                                       "from_ep", "to",     "tp",    "pp",   "ep",      NULL};
    const char *key, *family = json_string_value(json_object_get(root, "model"));
    json_t *value, *config = json_incref(json_object_get(root, "config")), *spec = NULL;
    tb__model_side src = {0}, dst = {0};
    tb_status status = family ? TB_OK : tb__fail(TB_INVALID, "'model' is not the name of a family, such as \"llama\"");
    json_object_foreach(root, key, value) {
        int i = 0;
        while (keys[i] && strcmp(keys[i], key) != 0)
            i++;
        if (status == TB_OK && !keys[i])
            status = tb__fail(TB_INVALID, "'%.60s' does not go with 'model'", key);
    }
    if (status == TB_OK && !config)
        status = dir ? tb__model_config_load(dir, &config)
                     : tb__fail(TB_INVALID, "'model' needs 'config', or a directory with config.json");
    if (status == TB_OK)
        status = read_model_side(root, false, &src);
    if (status == TB_OK)
        status = read_model_side(root, true, &dst);
    if (status == TB_OK)
        status = tb__model_spec(config, family, &src, &dst, &spec, notes);
    const json_t *more = json_object_get(root, "rules");
    if (status == TB_OK && more) {
        json_t *rules = json_is_array(more) ? json_copy((json_t *)more) : NULL;
        if (rules) {
            json_array_extend(rules, json_object_get(spec, "rules"));
            json_object_set_new(spec, "rules", rules);
        } else {
            status = tb__fail(TB_INVALID, "'rules' is not an array");
        }
    }
    json_decref(config);
    if (status != TB_OK) {
        json_decref(spec);
        return status;
    }
    *out = spec;
    return TB_OK;
}
