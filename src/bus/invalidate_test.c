/* Memory that is invalidated while transfers use it: they fail by name, nothing is read or written any more, and nobody
 * reports success for what has come from elsewhere. */
#include "bus/bus_test.h"

#include <stdatomic.h>
#include <sys/mman.h>

#define ROWS    "mesh=2 place=Shard(0)"
#define COLUMNS "mesh=2 place=Shard(1)"

/* How a test goes. */
typedef struct way {
    const char *group; /* whose rank 1 takes the memory away */
    bool is_mapped;    /* by mmap; else from tb_alloc */
    bool staged, checksum, is_manual, is_far;
    bool sums; /* what the senders have is added up */
    tb_commit commit;
} way;

typedef struct shared {
    way way;
    _Atomic int nready;
} shared;

/* ---- Memory ----------------------------------------------------------------------------------------------------- */

static uint32_t *allocate(bool is_mapped, size_t count) {
    void *memory = NULL;
    size_t nbytes = count * sizeof(uint32_t);
    if (is_mapped)
        memory = mmap(NULL, nbytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    else
        memory = tensor_alloc(nbytes);
    check(memory && memory != MAP_FAILED);
    return memory;
}

static void release(bool is_mapped, uint32_t *memory, size_t count) {
    if (is_mapped)
        munmap(memory, count * sizeof *memory);
    else
        tensor_free(memory);
}

/* The part's memory becomes another allocation, if it can be at the same place, full of poison. */
static void replace(bool is_mapped, part *p) {
    size_t nbytes = p->count * sizeof *p->data;
    if (is_mapped) {
        void *again = mmap(p->data, nbytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0);
        check(again == p->data);
    } else {
        tensor_free(p->data);
        p->data = allocate(false, p->count);
    }
    part_poison(p);
}

static void part_make(part *p, bool is_mapped, const char *layout, int32_t seat, int64_t rows, int64_t columns) {
    part_init(p, layout, seat, rows, columns);
    tensor_free(p->data);
    p->data = allocate(is_mapped, p->count);
}

static void part_drop(part *p, bool is_mapped) {
    tb_local_fini(&p->local);
    release(is_mapped, p->data, p->count);
}

/* ---- A transfer that is held half-way --------------------------------------------------------------------------- */

/* Two groups of tensors and a window of one: a receiver that does not take the first keeps the second back. */
typedef struct stage {
    tb_pair *pair;
    tb_batch *batch;
    part first, second;
    bool is_mapped, is_zero;
} stage;

static void add(stage *g, const char *name, part *p, uint32_t group) {
    tb_tensor t = part_tensor(p);
    t.group = group;
    check_ok(tb_batch_add(g->batch, g->pair, name, &t));
}

static void make_batch(rank *r, stage *g, const way *w) {
    tb_batch_opts opts = {.size = sizeof opts,
                          .group_window = 1,
                          .staged = w->staged,
                          .checksum = w->checksum,
                          .commit = w->commit,
                          .bucket_size = 16 << 10,
                          .staging_bytes = 64 << 10};
    check_ok(tb_batch_create(r->world, "step", &opts, &g->batch));
    add(g, "first", &g->first, 0);
    add(g, "second", &g->second, 1);
    check_ok(tb_batch_register(g->batch, 0));
}

static void set_stage(rank *r, stage *g, const way *w) {
    const char *layout = !is_a(r) ? COLUMNS : w->sums ? "mesh=2 place=P" : ROWS;
    g->is_mapped = w->is_mapped;
    g->is_zero = w->sums && is_a(r) && r->index == 1; /* then the sum is what the other one has */
    part_make(&g->first, g->is_mapped, layout, r->index, 40, 40);
    part_make(&g->second, g->is_mapped, layout, r->index, 512, 256);
    check_ok(tb_pair_create(r->world, "p", other_group(r), layout, NULL, &g->pair));
    make_batch(r, g, w);
}

static void clear_stage(stage *g) {
    tb_batch_destroy(g->batch);
    tb_pair_destroy(g->pair);
    part_drop(&g->first, g->is_mapped);
    part_drop(&g->second, g->is_mapped);
}

static tb_transfer *begin(rank *r, stage *g, uint32_t version) {
    tb_transfer *t = NULL;
    if (is_a(r)) {
        part_fill(&g->first, version);
        part_fill(&g->second, version);
        for (size_t i = 0; g->is_zero && i < g->first.count + g->second.count; i++)
            *(i < g->first.count ? &part_bytes(&g->first)[i] : &part_bytes(&g->second)[i - g->first.count]) = 0;
        check_ok(tb_send(g->batch, NULL, &t));
    } else {
        part_poison(&g->first);
        part_poison(&g->second);
        check_ok(tb_recv(g->batch, NULL, &t));
    }
    return t;
}

/* Until all receivers have the first group, which they do not take. */
static void await_first(rank *r, tb_transfer *t, shared *s) {
    int nreceivers = r->scene->nranks - (is_a(r) ? r->size : r->scene->nranks - r->size);
    int64_t deadline_ms = tb__now_ms() + PATIENCE_MS;
    for (bool is_ready = is_a(r); atomic_load(&s->nready) < nreceivers;) {
        tb_transfer_state state = {.size = sizeof state};
        check_ok(tb_world_progress(r->world));
        tb_transfer_query(t, &state);
        check(state.status == TB_OK && tb__now_ms() < deadline_ms);
        if (!is_ready && state.groups_done == 1)
            atomic_fetch_add(&s->nready, 1);
        is_ready |= state.groups_done == 1;
        usleep(100);
    }
}

static void invalidate(rank *r) {
    shared *s = (shared *)r->scene->shared;
    const way *w = &s->way;
    const rank *who = &r->scene->ranks[strcmp(w->group, "a") == 0 ? 1 : 3];
    char words[100];
    stage g;
    set_stage(r, &g, w);
    snprintf(words, sizeof words, "the memory of tensor 'second' on rank %d", (int)tb_world_rank(who->world));
    tb_transfer *t = begin(r, &g, 1);
    await_first(r, t, s);
    meet(r);
    if (r == who) {
        check_ok(tb_world_invalidate(r->world, g.second.data, g.second.count * sizeof *g.second.data));
        replace(g.is_mapped, &g.second);
    }
    meet(r);
    check_fails(tb_wait(t, TB_COMMITTED, -1), TB_INVALID, words);
    check(strstr(tb_error_detail(), "batch 'step'"));
    meet(r);
    check(r != who || part_is_poison(&g.second));
    tb_transfer_destroy(t);
    tb_batch_destroy(g.batch); /* with the new memory it can be made again */
    make_batch(r, &g, w);
    t = begin(r, &g, 2);
    check_ok(tb_wait(t, TB_COMMITTED, -1));
    check(g.is_zero || (part_holds(&g.first, 2) && part_holds(&g.second, 2)));
    tb_transfer_destroy(t);
    clear_stage(&g);
}

static const char *const far[] = {"north", "north", "south", "south"};

static void run_way(void (*body)(rank *r), const way *w) {
    scene s;
    shared with = {.way = *w};
    scene_init(&s);
    s.is_manual = w->is_manual;
    s.hosts = w->is_far ? far : NULL;
    run_ranks_in(&s, body, 2, 2, &with);
}

static void test_under_way(void **state) {
    (void)state;
    const way ways[] = {
        {.group = "a"},
        {.group = "b"},
        {.group = "a", .is_mapped = true},
        {.group = "b", .is_mapped = true},
        {.group = "a", .staged = true},
        {.group = "b", .staged = true, .is_mapped = true},
        {.group = "a", .checksum = true, .is_mapped = true},
        {.group = "b", .commit = TB_SHADOW},
        {.group = "a", .commit = TB_SHADOW, .staged = true},
        {.group = "a", .is_manual = true, .is_mapped = true},
        {.group = "b", .is_manual = true, .staged = true},
        {.group = "a", .sums = true, .is_mapped = true},
        {.group = "b", .sums = true, .staged = true, .is_mapped = true},
        {.group = "a", .sums = true, .staged = true},
    };
    for (size_t i = 0; i < sizeof ways / sizeof *ways; i++)
        run_way(invalidate, &ways[i]);
}

static void test_between_hosts(void **state) {
    (void)state;
    const way ways[] = {{.group = "a", .is_far = true, .is_mapped = true},
                        {.group = "b", .is_far = true, .is_mapped = true}};
    for (size_t i = 0; i < sizeof ways / sizeof *ways; i++)
        run_way(invalidate, &ways[i]);
}

/* ---- In the middle of copies ------------------------------------------------------------------------------------ */

/* A rank takes its memory away as soon as some bytes have moved. Whoever reports success has all of it. */
static void in_the_rush(rank *r) {
    shared *s = (shared *)r->scene->shared;
    const way *w = &s->way;
    const rank *who = &r->scene->ranks[strcmp(w->group, "a") == 0 ? 1 : 3];
    const char *layout = is_a(r) ? ROWS : COLUMNS;
    char words[100];
    tb_pair *pair;
    check_ok(tb_pair_create(r->world, "p", other_group(r), layout, NULL, &pair));
    snprintf(words, sizeof words, "the memory of tensor 'w' on rank %d", (int)tb_world_rank(who->world));
    for (int round = 0; round < 5; round++) {
        tb_batch_opts opts = {.size = sizeof opts, .bucket_size = 64 << 10, .staged = w->staged};
        tb_batch *batch;
        tb_transfer *t = NULL;
        tb_transfer_state state = {.size = sizeof state};
        part p;
        part_make(&p, w->is_mapped, layout, r->index, 1024, 1024);
        if (is_a(r))
            part_fill(&p, 1);
        else
            part_poison(&p);
        check_ok(tb_batch_create(r->world, "step", &opts, &batch));
        tb_tensor tensor = part_tensor(&p);
        check_ok(tb_batch_add(batch, pair, "w", &tensor));
        check_ok(tb_batch_register(batch, 0));
        atomic_store(&s->nready, 0);
        meet(r);
        bool is_lead = is_a(r) && r->index == 0; /* who comes too late for a failure waits for the next transfer */
        if (is_lead)
            meet(r);
        check_ok((is_a(r) ? tb_send : tb_recv)(batch, NULL, &t));
        if (!is_lead)
            meet(r);
        for (bool is_over = false; !is_over && (r == who || !is_a(r)) && atomic_load(&s->nready) == 0;) {
            tb_transfer_query(t, &state);
            is_over = state.status != TB_OK || state.events & TB_COMMITTED;
            if (is_over || (!is_a(r) && state.bytes_done > state.bytes_total / 8 * round))
                atomic_store(&s->nready, 1);
        }
        if (r == who) {
            check_ok(tb_world_invalidate(r->world, p.data, p.count * sizeof *p.data));
            tb_transfer_query(t, &state);
            replace(w->is_mapped, &p);
        }
        tb_status status = tb_wait(t, TB_COMMITTED, -1);
        if (status != TB_OK)
            check_fails(status, TB_INVALID, words);
        meet(r);
        check(r != who || part_is_poison(&p));
        check(r == who || is_a(r) || status != TB_OK || part_holds(&p, 1));
        tb_transfer_destroy(t);
        tb_batch_destroy(batch);
        part_drop(&p, w->is_mapped);
        meet(r);
    }
    tb_pair_destroy(pair);
}

static void test_in_the_rush(void **state) {
    (void)state;
    for (int i = 0; i < 8; i++) {
        way w = {.group = i & 1 ? "a" : "b", .is_mapped = i & 2, .staged = i & 4};
        run_way(in_the_rush, &w);
    }
}

/* Source and target are the same memory: what is read has to be put aside before it is overwritten. */
static void in_one_place(rank *r) {
    shared *s = (shared *)r->scene->shared;
    const way *w = &s->way;
    const rank *who = &r->scene->ranks[1];
    tb_pair_opts a = {.size = sizeof a, .group = "a", .no_wait = true}, b = {.size = sizeof b, .group = "b"};
    tb_pair *pairs[2];
    check_ok(tb_world_enter(r->world, "b", r->index, r->size));
    check_ok(tb_pair_create(r->world, "p", "b", ROWS, &a, &pairs[0]));
    check_ok(tb_pair_create(r->world, "p", "a", COLUMNS, &b, &pairs[1]));
    for (int round = 0; round < 6; round++) {
        tb_batch_opts opts = {.size = sizeof opts, .bucket_size = 64 << 10, .staged = w->staged};
        tb_transfer *send = NULL, *recv = NULL;
        tb_batch *batch;
        part from, to;
        part_make(&from, w->is_mapped, ROWS, r->index, 512, 512);
        part_init(&to, COLUMNS, r->index, 512, 512);
        uint32_t *home = to.data;
        to.data = from.data;
        part_fill(&from, 1);
        check_ok(tb_batch_create(r->world, "step", &opts, &batch));
        tb_tensor source = part_tensor(&from), target = part_tensor(&to);
        check_ok(tb_batch_add(batch, pairs[0], "w", &source));
        check_ok(tb_batch_add(batch, pairs[1], "w", &target));
        check_ok(tb_batch_register(batch, 0));
        check_ok(tb_recv(batch, NULL, &recv));
        if (r == who)
            check_ok(tb_send(batch, NULL, &send));
        meet(r);
        if (r != who)
            check_ok(tb_send(batch, NULL, &send));
        usleep(r == who ? 300 * (useconds_t)round : 0);
        if (r == who) {
            check_ok(tb_world_invalidate(r->world, from.data, from.count * sizeof *from.data));
            replace(w->is_mapped, &from);
        }
        tb_status status = tb_wait(recv, TB_COMMITTED, -1);
        if (status != TB_OK)
            check_fails(status, TB_INVALID, "the memory of tensor 'w' on rank");
        check(r == who || status != TB_OK || part_holds(&to, 1));
        (void)tb_wait(send, TB_COMMITTED, -1);
        meet(r);
        check(r != who || part_is_poison(&from));
        tb_transfer_destroy(send);
        tb_transfer_destroy(recv);
        tb_batch_destroy(batch);
        part_drop(&from, w->is_mapped);
        to.data = home;
        part_fini(&to);
        meet(r);
    }
    tb_pair_destroy(pairs[0]);
    tb_pair_destroy(pairs[1]);
}

static void test_in_one_place(void **state) {
    (void)state;
    for (int i = 0; i < 4; i++) {
        scene s;
        shared with = {.way = {.is_mapped = i & 1, .staged = i & 2}};
        scene_init(&s);
        run_ranks_in(&s, in_one_place, 2, 0, &with);
    }
}

/* ---- Memory that is not in use yet, or not any more ------------------------------------------------------------- */

/* A batch plans when it is first used. What was invalidated before is not used then. */
static void before_the_first(rank *r) {
    setup s, other;
    tb_transfer *t = NULL;
    const rank *who = &r->scene->ranks[1];
    char words[100];
    set_up(r, &s, "mesh=1 place=R", "mesh=1 place=R", 64, 64, NULL);
    tb_tensor w = part_tensor(&s.w); /* of another batch, in the same memory */
    check_ok(tb_batch_create(r->world, "other", NULL, &other.batch));
    check_ok(tb_batch_add(other.batch, s.pair, "v", &w));
    check_ok(tb_batch_register(other.batch, 0));
    part_poison(&s.w);
    meet(r);
    if (r == who)
        check_ok(tb_world_invalidate(r->world, s.w.data + 17, 1)); /* one byte is enough */
    for (int i = 0; i < 2; i++) {
        meet(r);
        snprintf(words, sizeof words, "the memory of tensor '%s' on rank %d was invalidated; make batch '%s' again",
                 i ? "v" : "w", (int)tb_world_rank(who->world), i ? "other" : "step");
        if (is_a(r))
            meet(r);
        check_ok((is_a(r) ? tb_send : tb_recv)(i ? other.batch : s.batch, NULL, &t));
        if (!is_a(r))
            meet(r);
        check_fails(tb_wait(t, TB_COMMITTED, -1), TB_INVALID, words);
        tb_transfer_destroy(t);
    }
    meet(r);
    check(part_is_poison(&s.w));
    tb_batch_destroy(other.batch);
    tear_down(&s);
}

static void test_before_the_first_transfer(void **state) {
    (void)state;
    run_ranks(before_the_first, 1, 1, NULL);
}

/* What a quantised tensor has beside its data. */
static void scales_away(rank *r) {
    enum { SIDE = 64, NSCALES = SIDE * SIDE / 32 };
    static float numbers[SIDE * SIDE];
    static unsigned char data[SIDE * SIDE], scales[NSCALES];
    tb_tensor plain = {.size = sizeof plain, .data = numbers, .dtype = TB_F32, .ndim = 2, .shape = {SIDE, SIDE}};
    tb_tensor quantised = {.size = sizeof quantised,
                           .data = data,
                           .dtype = TB_F8E4M3,
                           .ndim = 2,
                           .shape = {SIDE, SIDE},
                           .encode = "mxfp8",
                           .scales = scales};
    tb_pair *pair;
    tb_batch *batch;
    tb_transfer *t = NULL;
    memset(data, 0xa5, sizeof data);
    memset(scales, 0xa5, sizeof scales);
    check_ok(tb_pair_create(r->world, "p", other_group(r), "mesh=1 place=R", NULL, &pair));
    check_ok(tb_batch_create(r->world, "step", NULL, &batch));
    check_ok(tb_batch_add(batch, pair, "w", is_a(r) ? &plain : &quantised));
    check_ok(tb_batch_register(batch, 0));
    if (!is_a(r)) {
        check_ok(tb_recv(batch, NULL, &t));
        check_ok(tb_world_invalidate(r->world, scales + NSCALES - 1, 1));
    }
    meet(r);
    if (is_a(r))
        check_ok(tb_send(batch, NULL, &t)); /* which comes too late */
    tb_status status = tb_wait(t, TB_COMMITTED, is_a(r) ? SOON_MS : -1);
    if (!is_a(r))
        check_fails(status, TB_INVALID, "the memory of tensor 'w' on rank");
    check(status != TB_OK);
    tb_transfer_destroy(t);
    meet(r);
    for (int i = 0; i < NSCALES; i++)
        check(scales[i] == 0xa5);
    for (int i = 0; i < SIDE * SIDE; i++)
        check(data[i] == 0xa5);
    tb_batch_destroy(batch);
    tb_pair_destroy(pair);
}

static void test_scales(void **state) {
    (void)state;
    run_ranks(scales_away, 1, 1, NULL);
}

/* What is in a snapshot is not read any more: it goes on. The next send fails. */
static void in_a_snapshot(rank *r) {
    setup s;
    tb_transfer *t = NULL;
    tb_batch_opts opts = {.size = sizeof opts, .snapshot = true};
    set_up(r, &s, ROWS, COLUMNS, 64, 64, &opts);
    exchange(r, &s, "a", 1);
    meet(r);
    part_fill(&s.w, is_a(r) ? 2 : 0);
    if (is_a(r)) {
        check_ok(tb_send(s.batch, NULL, &t));
        check_ok(tb_wait(t, TB_RELEASED, -1));
        check_ok(tb_world_invalidate(r->world, s.w.data, s.w.count * sizeof *s.w.data));
        part_poison(&s.w);
    }
    meet(r);
    if (!is_a(r))
        check_ok(tb_recv(s.batch, NULL, &t));
    check_ok(tb_wait(t, TB_COMMITTED, -1));
    check(is_a(r) || part_holds(&s.w, 2));
    tb_transfer_destroy(t);
    meet(r);
    if (is_a(r) && r->index == 0)
        meet(r);
    check_ok((is_a(r) ? tb_send : tb_recv)(s.batch, NULL, &t));
    if (!is_a(r) || r->index != 0)
        meet(r);
    check_fails(tb_wait(t, TB_COMMITTED, -1), TB_INVALID, "the memory of tensor 'w' on rank");
    tb_transfer_destroy(t);
    meet(r);
    tear_down(&s);
}

static void test_in_a_snapshot(void **state) {
    (void)state;
    run_ranks(in_a_snapshot, 2, 2, NULL);
}

/* ---- Shadows ---------------------------------------------------------------------------------------------------- */

static void commit_first(rank *r, setup *s) {
    tb_transfer *t = NULL;
    part_fill(&s->w, is_a(r) ? 1 : 0);
    check_ok((is_a(r) ? tb_send : tb_recv)(s->batch, NULL, &t));
    check_ok(tb_wait(t, TB_COMMITTED, -1));
    check(part_holds(&s->w, 1));
    tb_transfer_destroy(t);
    meet(r);
    part_fill(&s->w, is_a(r) ? 2 : 1);
}

/* The group has decided, and one rank has not copied yet. It never does; the others have the version. */
static void held_back(rank *r) {
    setup s;
    tb_transfer *t = NULL;
    tb_batch_opts opts = {.size = sizeof opts, .commit = TB_SHADOW};
    tb_transfer_opts hold = {.size = sizeof hold, .hold = true};
    const rank *who = &r->scene->ranks[r->scene->shared ? 2 : 3];
    set_up(r, &s, ROWS, COLUMNS, 64, 64, &opts);
    commit_first(r, &s);
    check_ok(is_a(r) ? tb_send(s.batch, NULL, &t) : tb_recv(s.batch, r == who ? &hold : NULL, &t));
    if (r == who) {
        check_ok(tb_wait(t, TB_DECIDED, -1));
        check_ok(tb_world_invalidate(r->world, s.w.data, s.w.count * sizeof *s.w.data));
        part_poison(&s.w);
        check_ok(tb_proceed(t));
    }
    tb_status status = tb_wait(t, TB_COMMITTED, -1);
    if (r == who || is_a(r))
        check_fails(status, TB_INVALID, "version 2 of batch 'step' is committed, but not on this rank");
    check(r != who || strstr(tb_error_detail(), "the memory of tensor 'w' on rank"));
    check(r == who || is_a(r) || (status == TB_OK && part_holds(&s.w, 2)));
    meet(r);
    check(r != who || part_is_poison(&s.w));
    tb_transfer_destroy(t);
    meet(r);
    tear_down(&s);
}

static void test_held_back(void **state) {
    (void)state;
    run_ranks(held_back, 2, 2, NULL);
    run_ranks(held_back, 2, 2, "the lead");
}

/* One rank has all of it, the other has not come: nothing is decided, and all fail. */
static void prepared(rank *r) {
    setup s;
    tb_transfer *t = NULL;
    tb_batch_opts opts = {.size = sizeof opts, .commit = TB_SHADOW};
    bool is_who = !is_a(r) && r->index == 0, is_late = !is_a(r) && r->index == 1;
    set_up(r, &s, ROWS, COLUMNS, 64, 64, &opts);
    commit_first(r, &s);
    if (!is_late)
        check_ok((is_a(r) ? tb_send : tb_recv)(s.batch, NULL, &t));
    if (is_who) {
        check_ok(tb_wait(t, TB_ARRIVED, -1));
        check_ok(tb_world_invalidate(r->world, s.w.data, s.w.count * sizeof *s.w.data));
        part_poison(&s.w);
    }
    if (!is_late)
        check_fails(tb_wait(t, TB_COMMITTED, -1), TB_INVALID, "the memory of tensor 'w' on rank");
    meet(r);
    check(is_who ? part_is_poison(&s.w) : is_a(r) || part_holds(&s.w, 1));
    tb_transfer_destroy(t);
    meet(r);
    tear_down(&s);
}

static void test_prepared(void **state) {
    (void)state;
    run_ranks(prepared, 2, 2, NULL);
}

/* ---- Functions of the program's --------------------------------------------------------------------------------- */

typedef struct gate {
    rank *rank;
    _Atomic bool is_inside, may_leave;
    tb_status status; /* of a call from inside */
    char why[200];
} gate;

static void call_from_inside(gate *g) {
    uint32_t unused = 0;
    g->status = tb_world_invalidate(g->rank->world, &unused, sizeof unused);
    snprintf(g->why, sizeof g->why, "%s", tb_error_detail());
}

static tb_status stop_at_gate(void *arg, const tb_transform_piece *piece, const tb_binding *box, void *wire) {
    gate *g = arg;
    (void)box;
    memset(wire, 0, (size_t)(piece->shape[0] * piece->shape[1]) * sizeof(uint32_t));
    call_from_inside(g);
    atomic_store(&g->is_inside, true);
    while (!atomic_load(&g->may_leave))
        usleep(100);
    return TB_OK;
}

static void on_progress(void *arg, const tb_transfer_state *state) {
    (void)state;
    call_from_inside(arg);
}

/* The memory is in a function that does not return: the deadline passes. One process is both groups. */
static void test_in_a_function(void **state) {
    (void)state;
    scene s;
    rank r = {0};
    gate g = {.rank = &r};
    tb_transform own = {.size = sizeof own, .arg = &g, .prepare_send = stop_at_gate};
    tb_batch_opts opts = {.size = sizeof opts, .transform = &own};
    tb_world_opts hasty = {.size = sizeof hasty, .timeout_ms = 2000};
    tb_pair_opts a = {.size = sizeof a, .group = "a", .no_wait = true}, b = {.size = sizeof b, .group = "b"};
    tb_transfer_opts patient = {.size = sizeof patient, .timeout_ms = PATIENCE_MS};
    tb_transfer *send, *recv;
    tb_pair *pairs[2];
    tb_batch *batch;
    part from, to;
    scene_init(&s);
    check_ok(tb_world_join(s.url, "a", 0, 1, &hasty, &r.world));
    check_ok(tb_world_enter(r.world, "b", 0, 1));
    check_ok(tb_pair_create(r.world, "p", "b", "mesh=1 place=R", &a, &pairs[0]));
    check_ok(tb_pair_create(r.world, "p", "a", "mesh=1 place=R", &b, &pairs[1]));
    check_ok(tb_batch_create(r.world, "step", &opts, &batch));
    part_init(&from, "mesh=1 place=R", 0, 16, 16);
    part_init(&to, "mesh=1 place=R", 0, 16, 16);
    part_fill(&from, 1);
    part_poison(&to);
    tb_tensor source = part_tensor(&from), target = part_tensor(&to);
    check_ok(tb_batch_add(batch, pairs[0], "w", &source));
    check_ok(tb_batch_add(batch, pairs[1], "w", &target));
    check_ok(tb_send(batch, &patient, &send));
    check_ok(tb_recv(batch, &patient, &recv));
    while (!atomic_load(&g.is_inside))
        usleep(100);
    check(g.status == TB_REFUSED && strstr(g.why, "a function that the library calls"));
    check_fails(tb_world_invalidate(r.world, from.data, 4), TB_TIMEOUT,
                "still in use by tensor 'w' of batch 'step' on rank 0");
    check_fails(tb_wait(send, TB_COMMITTED, 0), TB_TIMEOUT, "");
    atomic_store(&g.may_leave, true);
    check_ok(tb_world_invalidate(r.world, from.data, 4));
    check_fails(tb_wait(send, TB_COMMITTED, -1), TB_INVALID, "the memory of tensor 'w' on rank 0");
    check_fails(tb_wait(recv, TB_COMMITTED, -1), TB_INVALID, "the memory of tensor 'w' on rank 0");
    check(part_is_poison(&to));
    tb_transfer_destroy(send);
    tb_transfer_destroy(recv);
    tb_batch_destroy(batch);
    tb_pair_destroy(pairs[0]);
    tb_pair_destroy(pairs[1]);
    part_fini(&from);
    part_fini(&to);
    tb_world_destroy(r.world);
    scene_fini(&s);
}

static void from_progress(rank *r) {
    gate g = {.rank = r};
    setup s;
    tb_transfer *t = NULL;
    tb_transfer_opts opts = {.size = sizeof opts, .progress = on_progress, .arg = &g};
    set_up(r, &s, ROWS, COLUMNS, 64, 64, NULL);
    part_fill(&s.w, is_a(r) ? 1 : 0);
    check_ok((is_a(r) ? tb_send : tb_recv)(s.batch, &opts, &t));
    check_ok(tb_wait(t, TB_COMMITTED, -1));
    tb_transfer_destroy(t);
    check(part_holds(&s.w, 1));
    check(g.status == TB_REFUSED && strstr(g.why, "a function that the library calls"));
    tear_down(&s);
}

static void test_from_progress(void **state) {
    (void)state;
    run_ranks(from_progress, 2, 2, NULL);
}

/* Memory that was invalidated can be unmapped before its batch is destroyed, and its addresses used again: a device
 * that had pinned it has let go of it. */
static void unmapped(rank *r) {
    tb_pair *pair;
    part on_device, mapped;
    part_init(&on_device, "mesh=1 place=R", 0, 20, 10);
    check_ok(tb_pair_create(r->world, "p", other_group(r), "mesh=1 place=R", NULL, &pair));
    for (uint32_t version = 1; version <= 3; version++) {
        tb_transfer *t = NULL;
        tb_batch *batch;
        part_make(&mapped, !is_a(r), "mesh=1 place=R", 0, 30, 50);
        check_ok(tb_batch_create(r->world, version % 2 ? "odd" : "even", NULL, &batch));
        part *parts[] = {&on_device, &mapped};
        for (int i = 0; i < 2; i++) {
            tb_tensor tensor = part_tensor(parts[i]);
            check_ok(tb_batch_add(batch, pair, i ? "mapped" : "on_device", &tensor));
        }
        check_ok(tb_batch_register(batch, 0));
        for (int i = 0; i < 2; i++) {
            if (is_a(r))
                part_fill(parts[i], version);
            else
                part_poison(parts[i]);
        }
        check_ok((is_a(r) ? tb_send : tb_recv)(batch, NULL, &t));
        check_ok(tb_wait(t, TB_COMMITTED, -1));
        check(part_holds(&mapped, version) && part_holds(&on_device, version));
        tb_transfer_destroy(t);
        check_ok(tb_world_invalidate(r->world, mapped.data, mapped.count * sizeof *mapped.data));
        part_drop(&mapped, !is_a(r));
        tb_batch_destroy(batch);
        meet(r);
    }
    tb_pair_destroy(pair);
    part_fini(&on_device);
}

static void test_unmapped(void **state) {
    (void)state;
    run_ranks(unmapped, 1, 1, NULL);
}

static void test_bad_arguments(void **state) {
    (void)state;
    scene s;
    tb_world *world;
    scene_init(&s);
    check_ok(tb_world_join(s.url, "a", 0, 1, NULL, &world));
    check_fails(tb_world_invalidate(world, (void *)16, SIZE_MAX), TB_INVALID, "run past the last address");
    check_ok(tb_world_invalidate(world, NULL, 0));
    tb_world_destroy(world);
    scene_fini(&s);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_bad_arguments), cmocka_unit_test(test_under_way),
        cmocka_unit_test(test_between_hosts), cmocka_unit_test(test_in_the_rush),
        cmocka_unit_test(test_in_one_place),  cmocka_unit_test(test_before_the_first_transfer),
        cmocka_unit_test(test_scales),        cmocka_unit_test(test_in_a_snapshot),
        cmocka_unit_test(test_held_back),     cmocka_unit_test(test_prepared),
        cmocka_unit_test(test_in_a_function), cmocka_unit_test(test_from_progress),
        cmocka_unit_test(test_unmapped),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
