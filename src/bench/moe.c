/* The parameters of one rank, and the rules that make canonical tensors of them. */
#include "bench/moe.h"

#include "base/int.h"

#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

enum { LAYERS = 6, EXPERTS = 8, GROUPS = 2, QUERIES = 4, HEADS = GROUPS * QUERIES, HIDDEN_STEP = 2 * HEADS };

const tb_tie moe_tie = {"lm_head.weight", "model.embed_tokens.weight"};

/* In units of hidden^2 a layer has 2.5 for attention, 3 for the shared expert, 1.5 for each other one, and the
 * embedding 8 or so; what is linear in hidden is left to the vocabulary. */
tb_status moe_model_init(moe_model *model, int64_t nbytes) {
    if (nbytes < MOE_MIN_BYTES)
        return tb__fail(TB_INVALID, "a model of %" PRId64 " bytes is too small; it must have at least %d", nbytes,
                        MOE_MIN_BYTES);
    int64_t nelements = nbytes / 2;
    int64_t h = (int64_t)sqrt((double)nelements / (LAYERS * (5.5 + 1.5 * EXPERTS) + 8));
    h -= h % HIDDEN_STEP;
    *model = (moe_model){.nlayers = LAYERS,
                         .hidden = h,
                         .ngroups = GROUPS,
                         .nqueries = QUERIES,
                         .head = h / HEADS,
                         .nexperts = EXPERTS,
                         .expert_width = h / 2,
                         .shared_width = h};
    int64_t layer = h * h * 11 / 2 + EXPERTS * h * h * 3 / 2 + h * EXPERTS + 2 * h;
    model->vocabulary = (nelements - LAYERS * layer - h) / h | 1; /* odd, so that everybody has to pad it */
    return TB_OK;
}

/* ---- Ranks --------------------------------------------------------------------------------------------------- */

/* A rank under construction, and where it is: stage, and its number among the stage's ranks. */
typedef struct builder {
    moe_rank *out;
    const moe_model *model;
    const moe_cut *cut;
    int32_t stage, number;
    TB_VEC(tb_rule) rules;
    tb__text scratch;
} builder;

static bool is_trainer(const builder *b) {
    return b->out->which == TOOL_SOURCE;
}

/* The trainer's ranks go through tensor, data, and then pipeline parallelism; the engine has a whole pipeline for each
 * data parallel rank. */
static void find_place(builder *b, int32_t rank) {
    const moe_cut *c = b->cut;
    if (is_trainer(b)) {
        b->stage = rank / (c->dp * c->tp);
        b->number = rank % (c->dp * c->tp);
    } else {
        b->stage = rank / c->tp % c->pp;
        b->number = rank / (c->tp * c->pp) * c->tp + rank % c->tp;
    }
}

static int32_t rank_of(const builder *b, int32_t number) {
    const moe_cut *c = b->cut;
    return is_trainer(b) ? b->stage * c->dp * c->tp + number
                         : (number / c->tp * c->pp + b->stage) * c->tp + number % c->tp;
}

static int32_t expert_rank(const builder *b) {
    return b->number / b->cut->etp % b->cut->ep;
}

static int64_t first_layer(const builder *b, int32_t stage) {
    return stage * b->model->nlayers / b->cut->pp;
}

static int64_t slots(const builder *b) {
    return b->cut->map ? b->cut->nslots : b->model->nexperts / b->cut->ep;
}

static int64_t expert_in(const builder *b, int32_t e, int64_t slot) {
    return b->cut->map ? b->cut->map[e * slots(b) + slot] : e * slots(b) + slot;
}

static tb_status check_cut(const builder *b, int32_t rank) {
    const moe_cut *c = b->cut;
    const moe_model *m = b->model;
    if (c->tp < 1 || c->pp < 1 || c->dp < 1 || c->ep < 1 || c->etp < 1)
        return tb__fail(TB_INVALID, "tp, pp, dp, ep and etp must be at least 1");
    if (rank < 0 || rank >= c->tp * c->pp * c->dp)
        return tb__fail(TB_INVALID, "there is no rank %" PRId32 " of %" PRId32, rank, c->tp * c->pp * c->dp);
    if (c->dp * c->tp % (c->ep * c->etp) != 0)
        return tb__fail(TB_INVALID,
                        "ep %" PRId32 " times etp %" PRId32 " does not divide the %" PRId32 " ranks of a stage", c->ep,
                        c->etp, c->dp * c->tp);
    if (!c->map && m->nexperts % c->ep != 0)
        return tb__fail(TB_INVALID, "ep %" PRId32 " does not divide %" PRId64 " experts", c->ep, m->nexperts);
    bool fits = m->ngroups % c->tp == 0 ||
                (!is_trainer(b) && c->tp % m->ngroups == 0 && m->nqueries % (c->tp / m->ngroups) == 0);
    return fits ? TB_OK
                : tb__fail(TB_INVALID, "%" PRId64 " groups of heads can't be dealt out to tp %" PRId32, m->ngroups,
                           c->tp);
}

/* ---- Text ---------------------------------------------------------------------------------------------------- */

/* In the rank's arena; NULL, with the sentence set, if there is no memory. */
static char *copy(builder *b, const char *string) {
    return tb__arena_strdup(&b->out->arena, string);
}

static tb__text *begin_text(builder *b) {
    b->scratch.count = 0;
    return &b->scratch;
}

static char *end_text(builder *b) {
    return b->scratch.failed ? NULL : copy(b, b->scratch.data);
}

/* compose(b, format, ...): the same for a text that is made here. */
#define compose(b, ...) (tb__text_add(begin_text(b), __VA_ARGS__), end_text(b))

static tb_status keep(builder *b, tb__text *text, const char **out) {
    char *taken;
    TB_TRY(tb__text_take(text, &taken));
    *out = copy(b, taken);
    free(taken);
    return *out ? TB_OK : TB_NO_MEMORY;
}

/* Of the stage, those of one expert rank, or all of them if that is negative. */
static void add_ranks(const builder *b, tb__text *text, int32_t expert) {
    const char *before = " ranks=";
    for (int32_t i = 0; i < b->cut->dp * b->cut->tp; i++) {
        if (expert >= 0 && i / b->cut->etp % b->cut->ep != expert)
            continue;
        tb__text_add(text, "%s%" PRId32, before, rank_of(b, i));
        before = ",";
    }
}

/* ---- Layouts ------------------------------------------------------------------------------------------------- */

/* What is not of an expert: data parallel ranks have copies. */
static tb_status lay_out(builder *b, const char *place, const char **out) {
    tb__text text = {0};
    tb__text_add(&text, "mesh=%" PRId32 ",%" PRId32 " place=Replicate,%s", b->cut->dp, b->cut->tp, place);
    add_ranks(b, &text, -1);
    return keep(b, &text, out);
}

/* Query rows, then key rows, then value rows. With more ranks than groups, the ranks of a group share its queries, and
 * each has its key and value. */
static tb_status lay_out_qkv(builder *b, const char **out) {
    const moe_model *m = b->model;
    int64_t q = m->ngroups * m->nqueries * m->head, kv = m->ngroups * m->head, copies = b->cut->tp / m->ngroups;
    char place[96];
    snprintf(place, sizeof place, "BlockShard(0,%" PRId64 ",%" PRId64 ",%" PRId64 ")", q, kv, kv);
    if (copies <= 1)
        return lay_out(b, place, out);
    int64_t queries = m->nqueries * m->head, share = queries / copies;
    tb__text text = {0};
    tb__text_add(&text, "mesh=%" PRId32 ",%" PRId64 ",%" PRId64 " place=Replicate,%s,Explicit(0", b->cut->dp,
                 m->ngroups, copies, place);
    for (int64_t i = 0; i < copies; i++)
        tb__text_add(&text, "%c%" PRId64 "-%" PRId64 ",%" PRId64 "-%" PRId64, i ? ';' : ',', i * share, (i + 1) * share,
                     queries, queries + 2 * m->head);
    tb__text_add(&text, ")");
    add_ranks(b, &text, -1);
    return keep(b, &text, out);
}

static int32_t copies_of_experts(const builder *b) {
    return b->cut->dp * b->cut->tp / (b->cut->ep * b->cut->etp);
}

/* A parameter of one expert, on the ranks that have it. */
static tb_status lay_out_expert(builder *b, const char *place, const char **out) {
    tb__text text = {0};
    tb__text_add(&text, "mesh=%" PRId32 ",%" PRId32 " place=Replicate,%s", copies_of_experts(b), b->cut->etp, place);
    add_ranks(b, &text, expert_rank(b));
    return keep(b, &text, out);
}

/* All experts, on top of one another. */
static tb_status lay_out_stack(builder *b, const char *place, const char **out) {
    tb__text text = {0};
    tb__text_add(&text, "mesh=%" PRId32 ",%" PRId32 ",%" PRId32 " place=Replicate,", copies_of_experts(b), b->cut->ep,
                 b->cut->etp);
    if (!b->cut->map)
        tb__text_add(&text, "Shard(0)");
    for (int32_t e = 0; b->cut->map && e < b->cut->ep; e++) {
        for (int64_t i = 0; i < slots(b); i++) {
            int64_t expert = expert_in(b, e, i);
            tb__text_add(&text, "%s%" PRId64 "-%" PRId64, i ? "," : e ? ";" : "Explicit(0,", expert, expert + 1);
        }
    }
    tb__text_add(&text, "%s,%s", b->cut->map ? ")" : "", place);
    add_ranks(b, &text, -1);
    return keep(b, &text, out);
}

/* ---- Parameters ---------------------------------------------------------------------------------------------- */

/* Those of layers come after the layer's number, and the trainer's experts before their own. */
static const char *const names[TOOL_NSIDES][MOE_NKINDS] = {
    [TOOL_SOURCE] = {[MOE_EMBEDDING] = "embedding.word_embeddings.weight",
                     [MOE_LAST_NORM] = "decoder.final_layernorm.weight",
                     [MOE_NORM] = "self_attention.linear_qkv.layer_norm_weight",
                     [MOE_QKV] = "self_attention.linear_qkv.weight",
                     [MOE_OUT] = "self_attention.linear_proj.weight",
                     [MOE_MLP_NORM] = "pre_mlp_layernorm.weight",
                     [MOE_ROUTER] = "mlp.router.weight",
                     [MOE_SHARED_UP] = "mlp.shared_experts.linear_fc1.weight",
                     [MOE_SHARED_DOWN] = "mlp.shared_experts.linear_fc2.weight",
                     [MOE_EXPERT_UP] = "mlp.experts.linear_fc1.weight",
                     [MOE_EXPERT_DOWN] = "mlp.experts.linear_fc2.weight"},
    [TOOL_TARGET] = {[MOE_EMBEDDING] = "model.embed_tokens.weight",
                     [MOE_HEAD] = "lm_head.weight",
                     [MOE_LAST_NORM] = "model.norm.weight",
                     [MOE_NORM] = "input_layernorm.weight",
                     [MOE_QKV] = "self_attn.qkv_proj.weight",
                     [MOE_OUT] = "self_attn.o_proj.weight",
                     [MOE_MLP_NORM] = "post_attention_layernorm.weight",
                     [MOE_ROUTER] = "mlp.gate.weight",
                     [MOE_SHARED_UP] = "mlp.shared_expert.gate_up_proj.weight",
                     [MOE_SHARED_DOWN] = "mlp.shared_expert.down_proj.weight",
                     [MOE_EXPERT_UP] = "mlp.experts.w13_weight",
                     [MOE_EXPERT_DOWN] = "mlp.experts.w2_weight"},
};

enum { NO_LAYER = -1 };

/* The trainer pads for kernels, the engine for its own ranks; both have less than a row of ranks too much. */
static int64_t padded_vocabulary(const builder *b) {
    int64_t step = (is_trainer(b) ? 16 : 6) * b->cut->tp;
    return tb__align(b->model->vocabulary, step);
}

static tb_shape matrix(int64_t rows, int64_t columns) {
    return (tb_shape){2, {rows, columns}};
}

/* The layout of gate and up, which lie one after the other in a dim. */
static tb_status lay_out_pair(builder *b, int dim, int64_t width,
                              tb_status (*make)(builder *b, const char *place, const char **out), const char **out) {
    char place[64];
    snprintf(place, sizeof place, "BlockShard(%d,%" PRId64 ",%" PRId64 ")", dim, width, width);
    return make(b, place, out);
}

static tb_status describe_expert(builder *b, moe_param *p) {
    int64_t h = b->model->hidden, n = b->model->expert_width, e = b->model->nexperts;
    bool is_up = p->kind == MOE_EXPERT_UP;
    p->shape = is_up ? matrix(2 * n, h) : matrix(h, n);
    if (is_trainer(b))
        return is_up ? lay_out_pair(b, 0, n, lay_out_expert, &p->layout) : lay_out_expert(b, "Shard(1)", &p->layout);
    p->shape = (tb_shape){3, {e, p->shape.dim[0], p->shape.dim[1]}};
    return is_up ? lay_out_pair(b, 1, n, lay_out_stack, &p->layout) : lay_out_stack(b, "Shard(2)", &p->layout);
}

static tb_status describe(builder *b, moe_param *p) {
    const moe_model *m = b->model;
    int64_t h = m->hidden, q = m->ngroups * m->nqueries * m->head, qkv = q + 2 * m->ngroups * m->head;
    switch (p->kind) {
    case MOE_EMBEDDING:
    case MOE_HEAD:
        p->shape = matrix(padded_vocabulary(b), h);
        return lay_out(b, "Shard(0)", &p->layout);
    case MOE_LAST_NORM:
    case MOE_NORM:
    case MOE_MLP_NORM:
        p->shape = (tb_shape){1, {h}};
        return lay_out(b, "Replicate", &p->layout);
    case MOE_ROUTER:
        p->shape = matrix(m->nexperts, h);
        return lay_out(b, "Replicate", &p->layout);
    case MOE_QKV:
        p->shape = matrix(qkv, h);
        return is_trainer(b) ? lay_out(b, "Shard(0)", &p->layout) : lay_out_qkv(b, &p->layout);
    case MOE_OUT:
        p->shape = matrix(h, q);
        return lay_out(b, "Shard(1)", &p->layout);
    case MOE_SHARED_UP:
        p->shape = matrix(2 * m->shared_width, h);
        return lay_out_pair(b, 0, m->shared_width, lay_out, &p->layout);
    case MOE_SHARED_DOWN:
        p->shape = matrix(h, m->shared_width);
        return lay_out(b, "Shard(1)", &p->layout);
    case MOE_EXPERT_UP:
    case MOE_EXPERT_DOWN:
        return describe_expert(b, p);
    case MOE_NKINDS:
        break;
    }
    return tb__fail(TB_INTERNAL, "there is no parameter of kind %d", (int)p->kind);
}

static tb_status add_param(builder *b, moe_kind kind, int64_t layer, int64_t slot) {
    const char *name = names[b->out->which][kind];
    moe_param p = {.name = name, .kind = kind, .layer = layer};
    bool has_number = is_trainer(b) && (kind == MOE_EXPERT_UP || kind == MOE_EXPERT_DOWN);
    int64_t local = is_trainer(b) ? layer - first_layer(b, b->stage) : layer;
    if (has_number)
        p.expert = expert_in(b, expert_rank(b), slot);
    if (has_number)
        p.name = compose(b, "decoder.layers.%" PRId64 ".%s%" PRId64, local, name, slot);
    else if (layer != NO_LAYER)
        p.name = compose(b, "%s.layers.%" PRId64 ".%s", is_trainer(b) ? "decoder" : "model", local, name);
    if (!p.name)
        return TB_NO_MEMORY;
    TB_TRY(describe(b, &p));
    return tb__vec_push(&b->out->params, p) ? TB_OK : TB_NO_MEMORY;
}

static tb_status add_layer(builder *b, int64_t layer) {
    for (moe_kind kind = MOE_NORM; kind < MOE_EXPERT_UP; kind++)
        TB_TRY(add_param(b, kind, layer, 0));
    for (int64_t slot = 0; slot < (is_trainer(b) ? slots(b) : 1); slot++) {
        TB_TRY(add_param(b, MOE_EXPERT_UP, layer, slot));
        TB_TRY(add_param(b, MOE_EXPERT_DOWN, layer, slot));
    }
    return TB_OK;
}

static tb_status add_params(builder *b) {
    bool is_last = b->stage == b->cut->pp - 1;
    if (b->stage == 0)
        TB_TRY(add_param(b, MOE_EMBEDDING, NO_LAYER, 0));
    for (int64_t i = first_layer(b, b->stage); i < first_layer(b, b->stage + 1); i++)
        TB_TRY(add_layer(b, i));
    if (is_last)
        TB_TRY(add_param(b, MOE_LAST_NORM, NO_LAYER, 0));
    return is_last && !is_trainer(b) ? add_param(b, MOE_HEAD, NO_LAYER, 0) : TB_OK;
}

/* ---- Rules --------------------------------------------------------------------------------------------------- */

static tb_status add_rule(builder *b, const char *match, const char *name, const char *view) {
    tb_rule rule = {match, name, view};
    return tb__vec_push(&b->rules, rule) ? TB_OK : TB_NO_MEMORY;
}

/* With a view that has just been written. */
static tb_status add_view(builder *b, const char *match, const char *name, const char *view) {
    return view ? add_rule(b, match, name, view) : TB_NO_MEMORY;
}

#define LAYER "decoder.layers.*."
#define TO    "model.layers.\\1."

static tb_status add_trainer_rules(builder *b) {
    const moe_model *m = b->model;
    int64_t q = m->nqueries, d = m->head, f = m->shared_width, n = m->expert_width;
    static const char qkv[] = LAYER "self_attention.linear_qkv.weight",
                      up[] = LAYER "mlp.shared_experts.linear_fc1.weight",
                      expert[] = LAYER "mlp.experts.linear_fc1.weight*";
#define HEADS_VIEW "split(0,-1,%" PRId64 ",%" PRId64 ") slice(1,%" PRId64 ",%" PRId64 ")"
    TB_TRY(add_view(b, qkv, TO "self_attn.q_proj.weight", compose(b, HEADS_VIEW, q + 2, d, (int64_t)0, q)));
    TB_TRY(add_view(b, qkv, TO "self_attn.k_proj.weight", compose(b, HEADS_VIEW, q + 2, d, q, (int64_t)1)));
    TB_TRY(add_view(b, qkv, TO "self_attn.v_proj.weight", compose(b, HEADS_VIEW, q + 2, d, q + 1, (int64_t)1)));
#define ROWS_VIEW "slice(0,%" PRId64 ",%" PRId64 ")"
    TB_TRY(add_view(b, up, TO "mlp.shared_expert.gate_proj.weight", compose(b, ROWS_VIEW, (int64_t)0, f)));
    TB_TRY(add_view(b, up, TO "mlp.shared_expert.up_proj.weight", compose(b, ROWS_VIEW, f, f)));
    TB_TRY(add_view(b, expert, TO "mlp.experts.\\2.gate_proj.weight", compose(b, ROWS_VIEW, (int64_t)0, n)));
    TB_TRY(add_view(b, expert, TO "mlp.experts.\\2.up_proj.weight", compose(b, ROWS_VIEW, n, n)));
    TB_TRY(add_rule(b, LAYER "mlp.experts.linear_fc2.weight*", TO "mlp.experts.\\2.down_proj.weight", NULL));
    TB_TRY(add_rule(b, LAYER "self_attention.linear_qkv.layer_norm_weight", TO "input_layernorm.weight", NULL));
    TB_TRY(add_rule(b, LAYER "self_attention.linear_proj.weight", TO "self_attn.o_proj.weight", NULL));
    TB_TRY(add_rule(b, LAYER "pre_mlp_layernorm.weight", TO "post_attention_layernorm.weight", NULL));
    TB_TRY(add_rule(b, LAYER "mlp.router.weight", TO "mlp.gate.weight", NULL));
    TB_TRY(add_rule(b, LAYER "mlp.shared_experts.linear_fc2.weight", TO "mlp.shared_expert.down_proj.weight", NULL));
    TB_TRY(add_rule(b, "decoder.final_layernorm.weight", "model.norm.weight", NULL));
    return add_view(b, "embedding.word_embeddings.weight", "model.embed_tokens.weight",
                    compose(b, "pad(0,0,%" PRId64 ")", padded_vocabulary(b) - m->vocabulary));
}

/* Each expert is a tensor of its own, on all ranks that the stack is cut among: some of them have nothing of it. */
static tb_status add_stack_rules(builder *b, const char *match, const char *name, int64_t start, int64_t length) {
    for (int64_t e = 0; e < b->model->nexperts; e++) {
        const char *view =
            compose(b, "slice(0,%" PRId64 ",1) slice(1,%" PRId64 ",%" PRId64 ") merge(0,1)", e, start, length);
        const char *to = compose(b, "\\1.experts.%" PRId64 ".%s.weight", e, name);
        TB_TRY(to ? add_view(b, match, to, view) : TB_NO_MEMORY);
    }
    return TB_OK;
}

static tb_status add_engine_rules(builder *b) {
    const moe_model *m = b->model;
    int64_t g = m->ngroups, d = m->head, q = g * m->nqueries * d, kv = g * d, f = m->shared_width, n = m->expert_width;
    static const char qkv[] = "*.qkv_proj.weight", up[] = "*.gate_up_proj.weight", w13[] = "*.experts.w13_weight";
#define SPLIT_VIEW ROWS_VIEW " split(0,%" PRId64 ",%" PRId64 ",%" PRId64 ")"
    TB_TRY(add_view(b, qkv, "\\1.q_proj.weight", compose(b, SPLIT_VIEW, (int64_t)0, q, g, m->nqueries, d)));
    TB_TRY(add_view(b, qkv, "\\1.k_proj.weight", compose(b, SPLIT_VIEW, q, kv, g, (int64_t)1, d)));
    TB_TRY(add_view(b, qkv, "\\1.v_proj.weight", compose(b, SPLIT_VIEW, q + kv, kv, g, (int64_t)1, d)));
    TB_TRY(add_view(b, up, "\\1.gate_proj.weight", compose(b, ROWS_VIEW, (int64_t)0, f)));
    TB_TRY(add_view(b, up, "\\1.up_proj.weight", compose(b, ROWS_VIEW, f, f)));
    TB_TRY(add_stack_rules(b, w13, "gate_proj", 0, n));
    TB_TRY(add_stack_rules(b, w13, "up_proj", n, n));
    TB_TRY(add_stack_rules(b, "*.experts.w2_weight", "down_proj", 0, m->hidden));
    const char *pad = compose(b, "pad(0,0,%" PRId64 ")", padded_vocabulary(b) - m->vocabulary);
    TB_TRY(add_view(b, "model.embed_tokens.weight", NULL, pad));
    return add_view(b, "lm_head.weight", NULL, pad);
}

static tb_status resolve(builder *b) {
    moe_rank *out = b->out;
    int64_t *first = tb__arena_alloc(&out->arena, (size_t)b->cut->pp, sizeof *first);
    const char **params = tb__arena_alloc(&out->arena, out->params.count, sizeof *params);
    if (!first || !params)
        return TB_NO_MEMORY;
    for (int32_t i = 0; i < b->cut->pp; i++)
        first[i] = first_layer(b, i);
    for (size_t i = 0; i < out->params.count; i++)
        params[i] = out->params.item[i].name;
    tb_names_opts opts = {.size = sizeof opts, .rules = b->rules.item, .nrules = b->rules.count};
    if (is_trainer(b)) { /* the engine calls layers what they are, and experts have no names there */
        opts.stage = b->stage;
        opts.nstages = b->cut->pp;
        opts.nlayers = b->model->nlayers;
        opts.first_layers = first;
        opts.expert_pattern = "experts.*.weight#";
        opts.expert_rank = expert_rank(b);
        opts.nexpert_ranks = b->cut->ep;
        opts.nexperts = b->model->nexperts;
    }
    TB_TRY(tb_names_create(&opts, &out->names));
    return tb_names_resolve(out->names, params, out->params.count, &out->parts);
}

static tb_status build(builder *b, int32_t number) {
    TB_TRY(check_cut(b, number));
    find_place(b, number);
    TB_TRY(add_params(b));
    TB_TRY(is_trainer(b) ? add_trainer_rules(b) : add_engine_rules(b));
    return resolve(b);
}

tb_status moe_rank_init(moe_rank *rank, const moe_model *model, int which, const moe_cut *cut, int32_t number) {
    *rank = (moe_rank){.model = model, .which = which, .rank = number};
    builder b = {.out = rank, .model = model, .cut = cut};
    tb_status status = build(&b, number);
    free(b.rules.item);
    tb__text_fini(&b.scratch);
    if (status != TB_OK)
        moe_rank_fini(rank);
    return status;
}

void moe_rank_fini(moe_rank *rank) {
    tb_parts_fini(&rank->parts);
    tb_names_destroy(rank->names);
    free(rank->params.item);
    tb__arena_fini(&rank->arena);
    *rank = (moe_rank){0};
}

/* Padding is the rows of a vocabulary that are none of its words. */
static int64_t count_words(const moe_model *model, const tb_local *local) {
    int64_t count = 0;
    for (size_t i = 0; i < local->nsegments[0]; i++) {
        tb_segment s = local->segments[0][i];
        int64_t stop = s.stop < model->vocabulary ? s.stop : model->vocabulary;
        count += stop > s.start ? stop - s.start : 0;
    }
    return count;
}

tb_status moe_param_size(const moe_rank *rank, const moe_param *param, int64_t *stored, int64_t *used) {
    tb_layout *layout;
    tb_local local;
    TB_TRY(tb_layout_parse(param->layout, &layout));
    tb_status status = tb_layout_local(layout, &param->shape, rank->rank, &local);
    tb_layout_destroy(layout);
    TB_TRY(status);
    status = tb_shape_size(&local.shape, TB_BF16, NULL, stored);
    if (status == TB_OK && (param->kind == MOE_EMBEDDING || param->kind == MOE_HEAD))
        local.shape.dim[0] = count_words(rank->model, &local);
    if (status == TB_OK)
        status = tb_shape_size(&local.shape, TB_BF16, NULL, used);
    tb_local_fini(&local);
    return status;
}
