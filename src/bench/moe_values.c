/* Values that tell which element of which canonical tensor is there. Places are found by arithmetic on the parameter's
 * kind, so that a wrong name or view shows as a wrong value. */
#include "bench/moe.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

/* A row of storage as a row of a canonical tensor; columns are the same in both. */
typedef struct row {
    char name[96];  /* "": padding */
    int64_t number; /* row-major over all dims but the last */
    int64_t width;  /* of the last dim */
} row;

static void name_row(row *out, const moe_param *p, const char *name, int64_t number) {
    snprintf(out->name, sizeof out->name, "model.layers.%" PRId64 ".%s.weight", p->layer, name);
    out->number = number;
}

/* The trainer has groups of query heads, a key head and a value head; the engine all of each. */
static void find_qkv(const moe_rank *rank, const moe_param *p, int64_t i, row *out) {
    const moe_model *m = rank->model;
    int64_t q = m->nqueries, d = m->head, nq = m->ngroups * q * d, nk = m->ngroups * d;
    if (rank->which == TOOL_SOURCE) {
        int64_t group = i / ((q + 2) * d), head = i / d % (q + 2), r = i % d;
        if (head < q)
            name_row(out, p, "self_attn.q_proj", (group * q + head) * d + r);
        else
            name_row(out, p, head == q ? "self_attn.k_proj" : "self_attn.v_proj", group * d + r);
    } else if (i < nq) {
        name_row(out, p, "self_attn.q_proj", i);
    } else {
        name_row(out, p, i < nq + nk ? "self_attn.k_proj" : "self_attn.v_proj", (i - nq) % nk);
    }
}

static void find_expert(const moe_rank *rank, const moe_param *p, const int64_t *index, row *out) {
    bool is_stack = rank->which == TOOL_TARGET;
    int64_t e = is_stack ? index[0] : p->expert, i = is_stack ? index[1] : index[0], n = rank->model->expert_width;
    const char *what = p->kind == MOE_EXPERT_DOWN ? "down_proj" : i < n ? "gate_proj" : "up_proj";
    char name[64];
    snprintf(name, sizeof name, "mlp.experts.%" PRId64 ".%s", e, what);
    name_row(out, p, name, p->kind == MOE_EXPERT_DOWN ? i : i % n);
}

/* `index` has the global index of all dims but the last. */
static void find_row(const moe_rank *rank, const moe_param *p, const int64_t *index, row *out) {
    int64_t i = index[0], f = rank->model->shared_width;
    *out = (row){.width = p->shape.dim[p->shape.ndim - 1]};
    switch (p->kind) {
    case MOE_EMBEDDING:
    case MOE_HEAD: /* tied */
        out->number = i;
        if (i < rank->model->vocabulary)
            snprintf(out->name, sizeof out->name, "model.embed_tokens.weight");
        break;
    case MOE_LAST_NORM:
        snprintf(out->name, sizeof out->name, "model.norm.weight");
        break;
    case MOE_NORM:
        name_row(out, p, "input_layernorm", 0);
        break;
    case MOE_MLP_NORM:
        name_row(out, p, "post_attention_layernorm", 0);
        break;
    case MOE_ROUTER:
        name_row(out, p, "mlp.gate", i);
        break;
    case MOE_QKV:
        find_qkv(rank, p, i, out);
        break;
    case MOE_OUT:
        name_row(out, p, "self_attn.o_proj", i);
        break;
    case MOE_SHARED_UP:
        name_row(out, p, i < f ? "mlp.shared_expert.gate_proj" : "mlp.shared_expert.up_proj", i % f);
        break;
    case MOE_SHARED_DOWN:
        name_row(out, p, "mlp.shared_expert.down_proj", i);
        break;
    case MOE_EXPERT_UP:
    case MOE_EXPERT_DOWN:
        find_expert(rank, p, index, out);
        break;
    case MOE_NKINDS:
        break;
    }
}

/* ---- Values -------------------------------------------------------------------------------------------------- */

enum { PIECE = 1024 };

static uint64_t mix(uint64_t x) {
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9u;
    x = (x ^ x >> 27) * 0x94D049BB133111EBu;
    return x ^ x >> 31;
}

static uint64_t key_of(const row *r, uint32_t version) {
    uint64_t key = version;
    for (const char *c = r->name; *c; c++)
        key = mix(key + (unsigned char)*c);
    return key;
}

/* Elements first .. first+n-1 of a row, as 16 bits each. Neighbours differ: the low bits of the index are mixed one to
 * one, under a key that is made of everything else. */
static void write_values(const row *r, uint64_t key, int64_t first, int64_t n, uint16_t *out) {
    if (r->name[0] == '\0') {
        memset(out, 0, (size_t)n * sizeof *out);
        return;
    }
    uint64_t at = (uint64_t)(r->number * r->width + first);
    for (int64_t done = 0; done < n;) {
        int64_t left = (int64_t)(0x10000 - (at & 0xffff)), length = left < n - done ? left : n - done;
        uint64_t block = mix(key + (at >> 16));
        uint16_t low = (uint16_t)at, before = (uint16_t)block, after = (uint16_t)(block >> 16);
        for (int64_t i = 0; i < length; i++) {
            uint16_t x = (uint16_t)((low + i) ^ before);
            x = (uint16_t)(x * 0x9E4Bu);
            x = (uint16_t)(x ^ x >> 7);
            out[done + i] = (uint16_t)(x * 0xD6E9u ^ after);
        }
        done += length;
        at += (uint64_t)length;
    }
}

typedef struct walk {
    const moe_rank *rank;
    const moe_param *param;
    uint32_t version;
    tb_local local;
    uint16_t *next; /* the rank's part is row-major: it is walked from front to back */
    tb_status (*visit)(struct walk *w, const row *r, int64_t first, const uint16_t *values, int64_t n);
} walk;

static tb_status visit_row(walk *w, const int64_t *index) {
    int last = w->param->shape.ndim - 1;
    row r;
    find_row(w->rank, w->param, index, &r);
    uint64_t key = key_of(&r, w->version);
    for (size_t s = 0; s < w->local.nsegments[last]; s++) {
        tb_segment segment = w->local.segments[last][s];
        for (int64_t at = segment.start; at < segment.stop; at += PIECE) {
            uint16_t values[PIECE];
            int64_t n = segment.stop - at < PIECE ? segment.stop - at : PIECE;
            write_values(&r, key, at, n, values);
            TB_TRY(w->visit(w, &r, at, values, n));
            w->next += n;
        }
    }
    return TB_OK;
}

static tb_status walk_dim(walk *w, int dim, int64_t *index) {
    if (dim == w->param->shape.ndim - 1)
        return visit_row(w, index);
    for (size_t s = 0; s < w->local.nsegments[dim]; s++) {
        tb_segment segment = w->local.segments[dim][s];
        for (index[dim] = segment.start; index[dim] < segment.stop; index[dim]++)
            TB_TRY(walk_dim(w, dim + 1, index));
    }
    return TB_OK;
}

static tb_status walk_param(walk *w) {
    int64_t index[TB_MAX_DIMS] = {0};
    tb_layout *layout;
    TB_TRY(tb_layout_parse(w->param->layout, &layout));
    tb_status status = tb_layout_local(layout, &w->param->shape, w->rank->rank, &w->local);
    tb_layout_destroy(layout);
    TB_TRY(status);
    status = walk_dim(w, 0, index);
    tb_local_fini(&w->local);
    return status;
}

/* A source's padding is not zero, so that it would be noticed at a target. */
static tb_status fill(walk *w, const row *r, int64_t first, const uint16_t *values, int64_t n) {
    (void)first;
    if (r->name[0])
        memcpy(w->next, values, (size_t)n * sizeof *values);
    else
        memset(w->next, 0xa5, (size_t)n * sizeof *values);
    return TB_OK;
}

static tb_status poison(walk *w, const row *r, int64_t first, const uint16_t *values, int64_t n) {
    (void)r, (void)first;
    for (int64_t i = 0; i < n; i++)
        w->next[i] = (uint16_t)~values[i];
    return TB_OK;
}

static tb_status check(walk *w, const row *r, int64_t first, const uint16_t *values, int64_t n) {
    if (memcmp(w->next, values, (size_t)n * sizeof *values) == 0)
        return TB_OK;
    int64_t i = 0;
    while (w->next[i] == values[i])
        i++;
    return tb__fail(
        TB_INTERNAL,
        "version %" PRIu32 " of %s is wrong: row %" PRId64 ", column %" PRId64 " of %s should be 0x%04x, and is 0x%04x",
        w->version, w->param->name, r->number, first + i, r->name[0] ? r->name : "the padding", values[i], w->next[i]);
}

tb_status moe_param_fill(const moe_rank *rank, const moe_param *param, uint32_t version, void *data) {
    walk w = {.rank = rank, .param = param, .version = version, .next = data, .visit = fill};
    return walk_param(&w);
}

tb_status moe_param_poison(const moe_rank *rank, const moe_param *param, uint32_t version, void *data) {
    walk w = {.rank = rank, .param = param, .version = version, .next = data, .visit = poison};
    return walk_param(&w);
}

tb_status moe_param_check(const moe_rank *rank, const moe_param *param, uint32_t version, const void *data) {
    walk w = {.rank = rank, .param = param, .version = version, .visit = check};
    memcpy(&w.next, &data, sizeof data); /* which is only read */
    return walk_param(&w);
}
