/* New weights for an inference engine that serves while a trainer trains. Both have the same model, and keep it in
 * different forms, under different names:
 *
 *   trainer   2 processes, in the way of Megatron: heads of a group side by side in linear_qkv, gate and up in one
 *             linear_fc1, both cut in two; of the 4 experts each process has two, whole, and calls them 0 and 1
 *   engine    4 processes, in the way of vLLM: query, key and value rows one after the other in qkv_proj, gate and up
 *             in gate_up_proj, all experts on top of one another in w13 and w2, all of it cut in four
 *
 * There are 8 query heads, but 2 key heads only: two processes of the engine have copies of each. Neither program knows
 * the other's form. Each says how its own parameters become tensors that both know by name; the rest follows. Two
 * versions are moved, and every element is compared with where it must lie, worked out by hand (see locate). */
#include <tensorbus/tensorbus.h>

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

/* The model: layer 0 has a dense MLP, layer 1 has experts. The texts below have these numbers in them. */
enum { HIDDEN = 64, GROUPS = 2, QUERIES = 4, HEAD = 8, DENSE = 96, EXPERTS = 4, EXPERT = 32, WORDS = 120 };
enum {
    TRAINERS = 2,
    ENGINES = 4,
    Q_ROWS = GROUPS * QUERIES * HEAD,
    VERSIONS = 2,
    MOST_PARAMS = 16,
    TIMEOUT_MS = 20000
};

/* ---- What each side has -------------------------------------------------------------------------------------- */

typedef enum kind { EMBEDDING, QKV, OUT, GATE_UP, DOWN, EXPERTS_UP, EXPERTS_DOWN } kind;

/* A parameter as the program has it: its shape, all processes together; how they share it; and what one process
 * allocates. */
typedef struct param {
    const char *name;
    kind kind;
    int layer, slot; /* which of the process's experts */
    int ndim;
    int64_t shape[3];
    const char *layout;
    int64_t local[3];
} param;

#define ROWS_IN_2    "mesh=2 place=Shard(0)"
#define COLUMNS_IN_2 "mesh=2 place=Shard(1)"
#define PAIR_IN_2    "mesh=2 place=BlockShard(0,96,96)" /* two matrices, each cut on its own */
#define OWN          NULL                               /* the process has it alone */

/* The rows of linear_qkv go group by group, so an even cut gives each process a group. */
static const param trainer_params[] = {
    {"embedding.word_embeddings.weight", EMBEDDING, 0, 0, 2, {120, 64}, ROWS_IN_2, {60, 64}},
    {"decoder.layers.0.self_attention.linear_qkv.weight", QKV, 0, 0, 2, {96, 64}, ROWS_IN_2, {48, 64}},
    {"decoder.layers.0.self_attention.linear_proj.weight", OUT, 0, 0, 2, {64, 64}, COLUMNS_IN_2, {64, 32}},
    {"decoder.layers.0.mlp.linear_fc1.weight", GATE_UP, 0, 0, 2, {192, 64}, PAIR_IN_2, {96, 64}},
    {"decoder.layers.0.mlp.linear_fc2.weight", DOWN, 0, 0, 2, {64, 96}, COLUMNS_IN_2, {64, 48}},
    {"decoder.layers.1.self_attention.linear_qkv.weight", QKV, 1, 0, 2, {96, 64}, ROWS_IN_2, {48, 64}},
    {"decoder.layers.1.self_attention.linear_proj.weight", OUT, 1, 0, 2, {64, 64}, COLUMNS_IN_2, {64, 32}},
    {"decoder.layers.1.mlp.experts.linear_fc1.weight0", EXPERTS_UP, 1, 0, 2, {64, 64}, OWN, {64, 64}},
    {"decoder.layers.1.mlp.experts.linear_fc1.weight1", EXPERTS_UP, 1, 1, 2, {64, 64}, OWN, {64, 64}},
    {"decoder.layers.1.mlp.experts.linear_fc2.weight0", EXPERTS_DOWN, 1, 0, 2, {64, 32}, OWN, {64, 32}},
    {"decoder.layers.1.mlp.experts.linear_fc2.weight1", EXPERTS_DOWN, 1, 1, 2, {64, 32}, OWN, {64, 32}},
};

#define ROWS_IN_4    "mesh=4 place=Shard(0)"
#define COLUMNS_IN_4 "mesh=4 place=Shard(1)"
#define PAIR_IN_4    "mesh=4 place=BlockShard(0,96,96)"
#define PAIRS_IN_4   "mesh=4 place=BlockShard(1,32,32)" /* of every expert */

/* qkv_proj has 64 query rows, 16 key rows and 16 value rows. The mesh is (key heads, copies). Its first dim cuts each
 * of the three in two, which leaves 32 + 8 + 8 rows; of those, each copy keeps its half of the queries, and all the
 * rest. */
#define QKV_IN_4 "mesh=2,2 place=BlockShard(0,64,16,16),Explicit(0, 0-16,32-48; 16-32,32-48)"

static const param engine_params[] = {
    {"model.embed_tokens.weight", EMBEDDING, 0, 0, 2, {120, 64}, ROWS_IN_4, {30, 64}},
    {"lm_head.weight", EMBEDDING, 0, 0, 2, {120, 64}, ROWS_IN_4, {30, 64}},
    {"model.layers.0.self_attn.qkv_proj.weight", QKV, 0, 0, 2, {96, 64}, QKV_IN_4, {32, 64}},
    {"model.layers.0.self_attn.o_proj.weight", OUT, 0, 0, 2, {64, 64}, COLUMNS_IN_4, {64, 16}},
    {"model.layers.0.mlp.gate_up_proj.weight", GATE_UP, 0, 0, 2, {192, 64}, PAIR_IN_4, {48, 64}},
    {"model.layers.0.mlp.down_proj.weight", DOWN, 0, 0, 2, {64, 96}, COLUMNS_IN_4, {64, 24}},
    {"model.layers.1.self_attn.qkv_proj.weight", QKV, 1, 0, 2, {96, 64}, QKV_IN_4, {32, 64}},
    {"model.layers.1.self_attn.o_proj.weight", OUT, 1, 0, 2, {64, 64}, COLUMNS_IN_4, {64, 16}},
    {"model.layers.1.mlp.experts.w13_weight", EXPERTS_UP, 1, 0, 3, {4, 64, 64}, PAIRS_IN_4, {4, 16, 64}},
    {"model.layers.1.mlp.experts.w2_weight", EXPERTS_DOWN, 1, 0, 3, {4, 64, 32}, "mesh=4 place=Shard(2)", {4, 64, 8}},
};

/* ---- What both sides know ------------------------------------------------------------------------------------ */

/* Rules give a parameter its canonical name, and the view that makes the canonical tensor of it. Rules of one pattern
 * that follow on one another make several tensors of one parameter. Here the heads get dims of their own, [groups,
 * heads of each, rows of a head, hidden], because that is a shape that both sides have without moving anything. */
#define LAYER "decoder.layers.*."
#define TO    "model.layers.\\1."

static const tb_rule trainer_rules[] = {
    {"embedding.word_embeddings.weight", "model.embed_tokens.weight", NULL},
    {LAYER "self_attention.linear_qkv.weight", TO "self_attn.q_proj.weight", "split(0,-1,6,8) slice(1,0,4)"},
    {LAYER "self_attention.linear_qkv.weight", TO "self_attn.k_proj.weight", "split(0,-1,6,8) slice(1,4,1)"},
    {LAYER "self_attention.linear_qkv.weight", TO "self_attn.v_proj.weight", "split(0,-1,6,8) slice(1,5,1)"},
    {LAYER "self_attention.linear_proj.weight", TO "self_attn.o_proj.weight", NULL},
    {LAYER "mlp.linear_fc1.weight", TO "mlp.gate_proj.weight", "slice(0,0,96)"},
    {LAYER "mlp.linear_fc1.weight", TO "mlp.up_proj.weight", "slice(0,96,96)"},
    {LAYER "mlp.linear_fc2.weight", TO "mlp.down_proj.weight", NULL},
    {LAYER "mlp.experts.linear_fc1.weight*", TO "mlp.experts.\\2.w1.weight", "slice(0,0,32)"},
    {LAYER "mlp.experts.linear_fc1.weight*", TO "mlp.experts.\\2.w3.weight", "slice(0,32,32)"},
    {LAYER "mlp.experts.linear_fc2.weight*", TO "mlp.experts.\\2.w2.weight", NULL},
};

/* Expert e of the stack, and of that w1 or w3, which is a matrix again. */
#define W13(e)                                                                                                         \
    {"*.experts.w13_weight", "\\1.experts." #e ".w1.weight", "slice(0," #e ",1) slice(1,0,32) merge(0,1)"}, {          \
        "*.experts.w13_weight", "\\1.experts." #e ".w3.weight", "slice(0," #e ",1) slice(1,32,32) merge(0,1)"          \
    }
#define W2(e)                                                                                                          \
    { "*.experts.w2_weight", "\\1.experts." #e ".w2.weight", "slice(0," #e ",1) merge(0,1)" }

static const tb_rule engine_rules[] = {
    {"*.qkv_proj.weight", "\\1.q_proj.weight", "slice(0,0,64) split(0,2,4,8)"},
    {"*.qkv_proj.weight", "\\1.k_proj.weight", "slice(0,64,16) split(0,2,1,8)"},
    {"*.qkv_proj.weight", "\\1.v_proj.weight", "slice(0,80,16) split(0,2,1,8)"},
    {"*.gate_up_proj.weight", "\\1.gate_proj.weight", "slice(0,0,96)"},
    {"*.gate_up_proj.weight", "\\1.up_proj.weight", "slice(0,96,96)"},
    W13(0),
    W13(1),
    W13(2),
    W13(3),
    W2(0),
    W2(1),
    W2(2),
    W2(3),
};

/* The trainer has no lm_head: it is the embedding. */
static const tb_tie tie = {"lm_head.weight", "model.embed_tokens.weight"};

/* ---- A process ----------------------------------------------------------------------------------------------- */

typedef struct process {
    bool is_trainer;
    int index; /* seat in its group */
    const param *params;
    size_t nparams;
    float *data[MOST_PARAMS]; /* this process's parts of the parameters */
    tb_world *world;
    tb_pair *pair;
    tb_batch *batch;
    tb_names *names;
    tb_parts parts; /* the canonical tensors that are in them */
} process;

static size_t count(const param *p) {
    return (size_t)(p->local[0] * p->local[1] * (p->ndim > 2 ? p->local[2] : 1));
}

/* Which canonical tensors this process has. The trainer's experts are numbered anew: expert 0 of process 1 is expert 2
 * of the model. (Layers would be, too, in a pipeline.) */
static tb_status resolve(process *me) {
    tb_names_opts opts = {.size = sizeof opts, .rules = engine_rules, .nrules = sizeof engine_rules / sizeof(tb_rule)};
    if (me->is_trainer) {
        opts.rules = trainer_rules;
        opts.nrules = sizeof trainer_rules / sizeof(tb_rule);
        opts.expert_pattern = "experts.*.weight#";
        opts.expert_rank = me->index;
        opts.nexpert_ranks = TRAINERS;
        opts.nexperts = EXPERTS;
    }
    const char *names[MOST_PARAMS];
    for (size_t i = 0; i < me->nparams; i++)
        names[i] = me->params[i].name;
    tb_status status = tb_names_create(&opts, &me->names);
    return status == TB_OK ? tb_names_resolve(me->names, names, me->nparams, &me->parts) : status;
}

/* Shape, layout and memory are the parameter's; the view says what the tensor is in it. */
static tb_status add(process *me, const tb_part *part) {
    const param *p = &me->params[part->param];
    char own[64];
    snprintf(own, sizeof own, "mesh=1 place=Replicate ranks=%d", me->index);
    tb_tensor tensor = {.size = sizeof tensor,
                        .data = me->data[part->param],
                        .dtype = TB_F32,
                        .ndim = p->ndim,
                        .layout = p->layout ? p->layout : own,
                        .view = part->text,
                        .group = (uint32_t)p->layer};
    memcpy(tensor.shape, p->shape, sizeof p->shape);
    return tb_batch_add(me->batch, me->pair, part->name, &tensor);
}

/* All that is done once in a program's life. */
static tb_status set_up(process *me, const char *url) {
    tb_world_opts world = {.size = sizeof world, .timeout_ms = TIMEOUT_MS};
    tb_batch_opts batch = {.size = sizeof batch, .ties = &tie, .nties = 1};
    tb_status status = tb_world_join(url, me->is_trainer ? "trainer" : "engine", me->index,
                                     me->is_trainer ? TRAINERS : ENGINES, &world, &me->world);
    if (status == TB_OK) /* every tensor has a layout of its own below; this one is not used */
        status = tb_pair_create(me->world, "weights", me->is_trainer ? "engine" : "trainer",
                                me->is_trainer ? "mesh=2 place=Replicate" : "mesh=4 place=Replicate", NULL, &me->pair);
    if (status == TB_OK)
        status = tb_batch_create(me->world, "model", &batch, &me->batch);
    if (status == TB_OK)
        status = resolve(me);
    for (size_t i = 0; i < me->nparams && status == TB_OK; i++)
        status = tb_alloc(count(&me->params[i]) * sizeof(float), (void **)&me->data[i]);
    for (size_t i = 0; i < me->parts.count && status == TB_OK; i++)
        status = add(me, &me->parts.part[i]);
    return status;
}

static void tear_down(process *me) {
    tb_parts_fini(&me->parts);
    tb_names_destroy(me->names);
    tb_batch_destroy(me->batch);
    tb_pair_destroy(me->pair);
    tb_world_destroy(me->world);
    for (size_t i = 0; i < me->nparams; i++)
        tb_free(me->data[i]);
}

/* ---- Which element lies where -------------------------------------------------------------------------------- */

typedef enum matrix { WORD, Q, K, V, O, GATE, UP, FROM_DENSE, W1, FROM_EXPERT, W3 } matrix;

/* Every element of the model has a value of its own in every version. */
static float value(matrix which, int number, int64_t row, int64_t column, int version) {
    return (float)((((which * 4 + number) * 128 + row) * 128 + column) * 4 + version);
}

/* A row of two matrices of n rows, on top of one another, of which each of `cuts` processes has a share. */
static float in_pair(matrix upper, matrix lower, int number, int64_t n, int64_t i, int64_t j, int index, int cuts,
                     int version) {
    int64_t share = n / cuts;
    return value(i < share ? upper : lower, number, index * share + i % share, j, version);
}

/* What has to be at [i, j] of the process's part of a parameter, or at [e, i, j]. */
static float locate(const process *me, const param *p, int64_t e, int64_t i, int64_t j, int version) {
    int index = me->index, cuts = me->is_trainer ? TRAINERS : ENGINES, layer = p->layer;
    int expert = (int)(me->is_trainer ? index * EXPERTS / TRAINERS + p->slot : e);
    int64_t group = me->is_trainer ? index : index / (ENGINES / GROUPS); /* the key head of this process */
    int64_t queries = Q_ROWS / cuts; /* rows that come before the keys: in Megatron's form a process has one group */
    switch (p->kind) {
    case EMBEDDING:
        return value(WORD, 0, index * (WORDS / cuts) + i, j, version);
    case QKV:
        if (i < queries)
            return value(Q, layer, index * queries + i, j, version);
        return value(i < queries + HEAD ? K : V, layer, group * HEAD + (i - queries) % HEAD, j, version);
    case OUT:
        return value(O, layer, i, index * (Q_ROWS / cuts) + j, version);
    case GATE_UP:
        return in_pair(GATE, UP, layer, DENSE, i, j, index, cuts, version);
    case DOWN:
        return value(FROM_DENSE, layer, i, index * (DENSE / cuts) + j, version);
    case EXPERTS_UP: /* the trainer's experts are whole */
        return in_pair(W1, W3, expert, EXPERT, i, j, me->is_trainer ? 0 : index, me->is_trainer ? 1 : cuts, version);
    case EXPERTS_DOWN:
        return value(FROM_EXPERT, expert, i, (me->is_trainer ? 0 : index * (EXPERT / cuts)) + j, version);
    }
    return -1;
}

/* Puts every value in its place, or returns how many are not there. */
static size_t go_through(process *me, int version, bool fills) {
    size_t wrong = 0;
    for (size_t k = 0; k < me->nparams; k++) {
        const param *p = &me->params[k];
        int64_t rows = p->local[p->ndim - 2], columns = p->local[p->ndim - 1];
        for (int64_t n = 0; n < (int64_t)count(p); n++) {
            float right = locate(me, p, n / columns / rows, n / columns % rows, n % columns, version);
            if (fills)
                me->data[k][n] = right;
            else if (me->data[k][n] != right && wrong++ == 0)
                fprintf(stderr, "engine %d: element %lld of %s is %g, not %g\n", me->index, (long long)n, p->name,
                        me->data[k][n], right);
        }
    }
    return wrong;
}

/* ---- Versions ------------------------------------------------------------------------------------------------ */

/* How one process gets the attention of layer 0: which box of which tensor, from whom, and that it is read straight
 * into its place in qkv_proj. Ranks are those of the bus. */
static void show(process *me) {
    char *dump, *rest = NULL;
    if (tb_batch_dump(me->batch, false, &dump) != TB_OK)
        return;
    for (char *line = strtok_r(dump, "\n", &rest); line; line = strtok_r(NULL, "\n", &rest)) {
        if (strncmp(line, "  ", 2) != 0 || strstr(line, "layers.0.self_attn"))
            printf("%s\n", line);
    }
    free(dump);
}

static tb_status move(process *me, int version, size_t *wrong) {
    tb_transfer_opts opts = {.size = sizeof opts, .timeout_ms = TIMEOUT_MS};
    tb_transfer_state received = {.size = sizeof received};
    for (size_t i = 0; i < me->nparams; i++)
        memset(me->data[i], 0xff, count(&me->params[i]) * sizeof(float)); /* not a number, so nothing is right */
    if (me->is_trainer)
        go_through(me, version, true);
    tb_status status = tb_reshard_execute(me->batch, "trainer", &opts, NULL, &received);
    if (status != TB_OK || me->is_trainer)
        return status;
    *wrong += go_through(me, version, false);
    printf("engine %d: version %d, %zu tensors in %zu parameters, %lld bytes, %s\n", me->index, version,
           me->parts.count, me->nparams, (long long)received.bytes_done, *wrong ? "not all right" : "all right");
    return TB_OK;
}

static int run(const char *url, bool is_trainer, int index) {
    process me = {.is_trainer = is_trainer, .index = index, .params = engine_params};
    me.nparams = sizeof engine_params / sizeof(param);
    if (is_trainer) {
        me.params = trainer_params;
        me.nparams = sizeof trainer_params / sizeof(param);
    }
    size_t wrong = 0;
    tb_status status = set_up(&me, url);
    for (int version = 1; version <= VERSIONS && status == TB_OK; version++)
        status = move(&me, version, &wrong);
    if (status != TB_OK)
        fprintf(stderr, "%s %d: %s\n", is_trainer ? "trainer" : "engine", index, tb_error_detail());
    else if (!is_trainer && index == 1)
        show(&me);
    tear_down(&me);
    return status == TB_OK && wrong == 0 ? EXIT_SUCCESS : EXIT_FAILURE;
}

/* A process may fork before it uses the bus, not after. */
int main(void) {
    char folder[] = "/tmp/vllm_target-XXXXXX", url[64];
    int failures = 0, status;
    if (!mkdtemp(folder))
        return EXIT_FAILURE;
    snprintf(url, sizeof url, "unix:%s/store", folder);
    for (int i = 0; i < TRAINERS + ENGINES; i++) {
        pid_t pid = fork();
        if (pid == 0)
            exit(run(url, i < TRAINERS, i < TRAINERS ? i : i - TRAINERS));
        failures += pid < 0;
    }
    while (wait(&status) > 0)
        failures += status != 0;
    rmdir(folder); /* whoever served the store has removed its socket */
    return failures ? EXIT_FAILURE : EXIT_SUCCESS;
}
