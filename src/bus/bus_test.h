/* What the tests of worlds, pairs, batches and transfers share: ranks that are threads of one process, each with a
 * world of its own, and tensors whose values tell where they belong. */
#ifndef TB_BUS_BUS_TEST_H
#define TB_BUS_BUS_TEST_H

#include "tensorbus/plan.h"

#include "base/process.h"

#include <errno.h>
#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

#include "../tests/support/tensor_memory.h"

/* Long enough for any machine; only a hang takes it. */
enum { PATIENCE_MS = 30000, SOON_MS = 200, MAX_RANKS = 8 };

typedef struct scene scene;

typedef struct rank {
    scene *scene;
    const char *group;
    int32_t index, size;
    tb_world *world;
    pthread_t thread;
    jmp_buf end;
    char failure[1500];
} rank;

struct scene {
    char folder[32], url[64];
    void (*body)(rank *r);
    rank ranks[MAX_RANKS];
    int nranks;
    pthread_mutex_t lock;
    pthread_cond_t moved;
    int nmet;
    uint64_t round;
    bool has_failed;
    const void *shared;       /* what a test's ranks tell each other */
    const char *const *hosts; /* of the ranks, between which there is ucx; NULL: all are on this one */
    const char *transport;    /* all of them use this one; NULL: TB_TRANSPORT in the environment, or what is best */
    bool is_manual;           /* their worlds are */
    bool is_b_manual;         /* those of group "b" are */
    int64_t plan_bytes;       /* of their worlds; 0: the default */
    int timeout_ms;           /* likewise; 0: PATIENCE_MS */
};

static _Thread_local rank *me; /* NULL: the test's own thread */

/* Ends the rank's part, or the test. cmocka's own way out works in its thread only. */
static inline void fails(const char *file, int line, const char *text, const char *why) {
    if (!me) {
        print_error("%s:%d: %s: %s\n", file, line, text, why);
        fail();
        return;
    }
    snprintf(me->failure, sizeof me->failure, "%s:%d: %s %d: %s: %s", file, line, me->group, (int)me->index, text, why);
    pthread_mutex_lock(&me->scene->lock);
    me->scene->has_failed = true;
    pthread_cond_broadcast(&me->scene->moved);
    pthread_mutex_unlock(&me->scene->lock);
    longjmp(me->end, 1);
}

#define check(claim)                                                                                                   \
    do {                                                                                                               \
        if (!(claim))                                                                                                  \
            fails(__FILE__, __LINE__, #claim, "is not so");                                                            \
    } while (0)

#define check_ok(call)                                                                                                 \
    do {                                                                                                               \
        if ((call) != TB_OK)                                                                                           \
            fails(__FILE__, __LINE__, #call, tb_error_detail());                                                       \
    } while (0)

#define check_fails(call, wanted, words)                                                                               \
    do {                                                                                                               \
        tb_status status_ = (call);                                                                                    \
        if (status_ != (wanted) || !strstr(tb_error_detail(), words)) {                                                \
            char why_[700];                                                                                            \
            snprintf(why_, sizeof why_, "%s, not %s with '%s': %s", tb_status_string(status_),                         \
                     tb_status_string(wanted), words, status_ == TB_OK ? "" : tb_error_detail());                      \
            fails(__FILE__, __LINE__, #call, why_);                                                                    \
        }                                                                                                              \
    } while (0)

/* All ranks of the scene come to the same point. */
static inline void meet(rank *r) {
    scene *s = r->scene;
    struct timespec deadline = tb__time_of_ms(tb__now_ms() + PATIENCE_MS);
    pthread_mutex_lock(&s->lock);
    uint64_t round = s->round;
    if (++s->nmet == s->nranks) {
        s->nmet = 0;
        s->round++;
        pthread_cond_broadcast(&s->moved);
    }
    int error = 0;
    while (s->round == round && !s->has_failed && error == 0)
        error = pthread_cond_timedwait(&s->moved, &s->lock, &deadline);
    bool has_met = s->round != round;
    pthread_mutex_unlock(&s->lock);
    if (!has_met)
        fails(__FILE__, __LINE__, "meet", "another rank did not come");
}

static inline void scene_init(scene *s) {
    *s = (scene){.folder = "/tmp/tb-bus-XXXXXX"};
    check(mkdtemp(s->folder));
    snprintf(s->url, sizeof s->url, "unix:%s/s", s->folder);
    pthread_mutex_init(&s->lock, NULL);
    tb__monotonic_cond_init(&s->moved);
}

/* Fails if anything is left behind. */
static inline void scene_fini(const scene *s) {
    check(rmdir(s->folder) == 0);
}

static inline void *rank_main(void *arg) {
    rank *r = me = arg;
    if (setjmp(r->end) == 0) {
        const scene *s = r->scene;
        tb_world_opts opts = {.size = sizeof opts,
                              .timeout_ms = s->timeout_ms ? s->timeout_ms : PATIENCE_MS,
                              .manual = s->is_manual || (s->is_b_manual && r->group[0] == 'b'),
                              .plan_bytes = s->plan_bytes,
                              .transport = s->transport ? s->transport
                                           : s->hosts   ? "ucx"
                                                        : getenv("TB_TRANSPORT"),
                              .host = s->hosts ? s->hosts[r - s->ranks] : NULL};
        check_ok(tb_world_join(r->scene->url, r->group, r->index, r->size, &opts, &r->world));
        r->scene->body(r);
    }
    me = NULL;
    return NULL;
}

/* Runs `body` as `na` ranks of group "a" and `nb` of group "b", all at once. Worlds go when all are through: who
 * serves the store must not take it away from the others. */
static inline void run_ranks_in(scene *s, void (*body)(rank *r), int32_t na, int32_t nb, const void *shared) {
    s->body = body;
    s->nranks = na + nb;
    s->shared = shared;
    for (int32_t i = 0; i < na + nb; i++) {
        rank *r = &s->ranks[i];
        *r = (rank){.scene = s, .group = i < na ? "a" : "b", .index = i < na ? i : i - na, .size = i < na ? na : nb};
        check(pthread_create(&r->thread, NULL, rank_main, r) == 0);
    }
    for (int i = 0; i < s->nranks; i++)
        pthread_join(s->ranks[i].thread, NULL);
    for (int i = 0; i < s->nranks; i++) {
        if (s->ranks[i].failure[0])
            print_error("%s\n", s->ranks[i].failure);
    }
    check(!s->has_failed);
    for (int i = 0; i < s->nranks; i++)
        tb_world_destroy(s->ranks[i].world);
    scene_fini(s);
}

static inline void run_ranks(void (*body)(rank *r), int32_t na, int32_t nb, const void *shared) {
    scene s;
    scene_init(&s);
    run_ranks_in(&s, body, na, nb, shared);
}

/* ---- Tensors --------------------------------------------------------------------------------------------------- */

#define POISON 0xdeadbeefU

/* One rank's part of a matrix of 32-bit integers, in memory of tensor_memory.h. */
typedef struct part {
    tb_local local;
    int64_t rows, columns;
    size_t count;
    uint32_t *data;
} part;

static inline void part_init(part *p, const char *layout, int32_t seat, int64_t rows, int64_t columns) {
    tb_layout *parsed;
    tb_shape shape = {.ndim = 2, .dim = {rows, columns}};
    check_ok(tb_layout_parse(layout, &parsed));
    check_ok(tb_layout_local(parsed, &shape, seat, &p->local));
    tb_layout_destroy(parsed);
    p->rows = rows;
    p->columns = columns;
    p->count = (size_t)(p->local.shape.dim[0] * p->local.shape.dim[1]);
    p->data = tensor_alloc(p->count * sizeof *p->data);
    check(p->data);
}

static inline void part_fini(part *p) {
    tb_local_fini(&p->local);
    tensor_free(p->data);
}

/* The global index of the i-th of a dimension that this rank has. */
static inline int64_t global_index(const tb_local *local, int dim, int64_t i) {
    for (size_t k = 0; k < local->nsegments[dim]; k++) {
        const tb_segment *s = &local->segments[dim][k];
        if (i < s->stop - s->start)
            return s->start + i;
        i -= s->stop - s->start;
    }
    return -1;
}

static inline uint32_t part_value(const part *p, size_t i, uint32_t version) {
    int64_t width = p->local.shape.dim[1];
    int64_t row = global_index(&p->local, 0, (int64_t)i / width),
            column = global_index(&p->local, 1, (int64_t)i % width);
    return (version << 24) + (uint32_t)(row * p->columns + column);
}

static inline uint32_t *part_bytes(const part *p) {
    return tensor_bytes(p->data);
}

static inline void part_fill(part *p, uint32_t version) {
    for (size_t i = 0; i < p->count; i++)
        part_bytes(p)[i] = part_value(p, i, version);
}

static inline bool part_holds(const part *p, uint32_t version) {
    for (size_t i = 0; i < p->count; i++) {
        if (part_bytes(p)[i] != part_value(p, i, version))
            return false;
    }
    return true;
}

static inline void part_poison(part *p) {
    for (size_t i = 0; i < p->count; i++)
        part_bytes(p)[i] = POISON;
}

static inline bool part_is_poison(const part *p) {
    for (size_t i = 0; i < p->count; i++) {
        if (part_bytes(p)[i] != POISON)
            return false;
    }
    return true;
}

static inline tb_tensor part_tensor(const part *p) {
    return (tb_tensor){
        .size = sizeof(tb_tensor), .data = p->data, .dtype = TB_U32, .ndim = 2, .shape = {p->rows, p->columns}};
}

/* ---- The usual set-up: a pair, a batch with one matrix --------------------------------------------------------- */

typedef struct setup {
    tb_pair *pair;
    tb_batch *batch;
    part w;
} setup;

static inline const char *other_group(const rank *r) {
    return strcmp(r->group, "a") == 0 ? "b" : "a";
}

static inline bool is_a(const rank *r) {
    return strcmp(r->group, "a") == 0;
}

static inline void set_up(rank *r, setup *s, const char *layout_a, const char *layout_b, int64_t rows, int64_t columns,
                          const tb_batch_opts *opts) {
    const char *layout = is_a(r) ? layout_a : layout_b;
    part_init(&s->w, layout, r->index, rows, columns);
    part_poison(&s->w);
    check_ok(tb_pair_create(r->world, "p", other_group(r), layout, NULL, &s->pair));
    check_ok(tb_batch_create(r->world, "step", opts, &s->batch));
    tb_tensor w = part_tensor(&s->w);
    check_ok(tb_batch_add(s->batch, s->pair, "w", &w));
    check_ok(tb_batch_register(s->batch, 0));
}

static inline void tear_down(setup *s) {
    tb_batch_destroy(s->batch);
    tb_pair_destroy(s->pair);
    part_fini(&s->w);
}

/* One transfer from `from` to the other group, of a version of its own, and what has come of it. */
static inline void exchange(rank *r, setup *s, const char *from, uint32_t version) {
    bool is_send = strcmp(r->group, from) == 0;
    tb_transfer *t = NULL;
    if (is_send)
        part_fill(&s->w, version);
    else
        part_poison(&s->w);
    check_ok((is_send ? tb_send : tb_recv)(s->batch, NULL, &t));
    check_ok(tb_wait(t, is_send ? TB_RELEASED : TB_ARRIVED, -1));
    check(part_holds(&s->w, version));
    check_ok(tb_wait(t, TB_COMMITTED, -1));
    tb_transfer_destroy(t);
}

#endif
