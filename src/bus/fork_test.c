/* A forked child and the objects it inherits: every call on them fails at once, destroying them harms nobody, and the
 * parent and its peers go on. The child keeps none of the parent's descriptors, and can join by itself. */
#include "bus/bus_test.h"

#include <fcntl.h>
#include <signal.h>
#include <stdatomic.h>
#include <sys/wait.h>

enum { ROWS = 64, COLUMNS = 48, CHILD_S = 60 };

/* Both runtimes have locks of their own that a child of a process with busy threads may find taken; ThreadSanitizer
 * ends a child that starts a thread. */
#if defined(__SANITIZE_THREAD__)
static const bool can_fork_busy = false, can_start_threads = false;
#elif defined(__SANITIZE_ADDRESS__)
static const bool can_fork_busy = false, can_start_threads = true;
#else
static const bool can_fork_busy = true, can_start_threads = true;
#endif

static bool is_child;

#ifdef __SANITIZE_ADDRESS__
/* LeakSanitizer asks. In a child it does not see what the stacks of the parent's other threads point to. */
TB_API int __lsan_is_turned_off(void); // NOLINT(bugprone-reserved-identifier)
int __lsan_is_turned_off(void) {       // NOLINT(bugprone-reserved-identifier)
    return is_child;
}
#endif

/* ---- In a child ------------------------------------------------------------------------------------------------ */

/* Any of them may be NULL, but for the world. */
typedef struct inherited {
    tb_world *world;
    tb_pair *pair;
    tb_batch *batch;
    tb_transfer *transfer;
    tb_copy *copy;
    const part *w;
} inherited;

static void child_fails(int line, const char *what) {
    fprintf(stderr, "%s:%d: in the child: %s; the last sentence is: %s\n", __FILE__, line, what, tb_error_detail());
    _exit(1);
}

#define child_check(claim)                                                                                             \
    do {                                                                                                               \
        if (!(claim))                                                                                                  \
            child_fails(__LINE__, #claim);                                                                             \
    } while (0)

/* The sentence says whose the object is, and what to do instead. */
static bool is_explained(const char *what) {
    char words[80];
    snprintf(words, sizeof words, "this %s belongs to process %d; a forked child can't use it", what, (int)getppid());
    return strstr(tb_error_detail(), words) && strstr(tb_error_detail(), "join again");
}

#define refused(call, what) child_check(tb_error_set(TB_OK, "") == TB_OK && (call) == TB_REFUSED && is_explained(what))

static void use_world(const inherited *o) {
    tb_pair *pair = NULL;
    tb_batch *batch = NULL;
    tb_copy *copy = NULL;
    uint64_t hits = 1, misses = 1;
    refused(tb_world_enter(o->world, "c", 0, 1), "world");
    refused(tb_world_wait(o->world, "a", 0), "world");
    refused(tb_world_groups(o->world, 0, &(char *){NULL}), "world");
    refused(tb_world_progress(o->world), "world");
    refused(tb_world_invalidate(o->world, o->w->data, 64), "world");
    refused(tb_pair_create(o->world, "q", "b", "mesh=1 place=R", NULL, &pair), "world");
    refused(tb_batch_create(o->world, "other", NULL, &batch), "world");
    refused(tb_copy_open(o->world, "others", NULL, NULL, &copy), "world");
    child_check(!pair && !batch && !copy);
    child_check(tb_world_fd(o->world) == -1 && is_explained("world"));
    tb_world_plan_counters(o->world, &hits, &misses);
    child_check(hits == 0 && misses == 0);
    child_check(tb_world_rank(o->world) >= 0 && tb_world_incarnation(o->world) > 0);
}

static void use_batch(const inherited *o) {
    tb_transfer *transfer = NULL;
    tb_transfer_state state = {.size = sizeof state};
    char *text = NULL;
    uint64_t version = 77;
    bool is_torn;
    tb_tensor w = part_tensor(o->w);
    refused(tb_batch_add(o->batch, o->pair, "v", &w), "batch");
    refused(tb_batch_add_pair(o->batch, o->pair), "batch");
    refused(tb_batch_register(o->batch, 0), "batch");
    refused(tb_batch_dump(o->batch, true, &text), "batch");
    refused(tb_batch_remove_pair(o->batch, o->pair), "batch");
    refused(tb_batch_version(o->batch, o->pair, &version, &is_torn), "batch");
    tb_batch_state together = {.size = sizeof together};
    refused(tb_batch_query(o->batch, &together), "batch");
    refused(tb_batch_signal(o->batch, NULL, 1, 0, &is_torn), "batch");
    child_check(together.version == 0 && tb_world_plan_bytes(o->world) == 0);
    refused(tb_send(o->batch, NULL, &transfer), "batch");
    refused(tb_recv(o->batch, NULL, &transfer), "batch");
    refused(tb_reshard_execute(o->batch, "a", NULL, &state, &state), "batch");
    child_check(!transfer && !text && version == 77);
    child_check(tb_batch_epoch(o->batch) == 0 && is_explained("batch"));
}

static void use_transfer(const inherited *o) {
    tb_transfer_state state = {.size = sizeof state};
    refused(tb_wait(o->transfer, TB_COMMITTED, -1), "transfer");
    refused(tb_wait_group(o->transfer, 0, -1), "transfer");
    refused(tb_stream_wait(o->transfer, TB_COMMITTED, &state), "transfer");
    refused(tb_proceed(o->transfer), "transfer");
    refused(tb_transfer_pair(o->transfer, o->pair, &state), "transfer");
    refused(tb_transfer_query(o->transfer, &state), "transfer");
    child_check(state.events == 0);
    child_check(tb_transfer_fd(o->transfer) == -1);
    tb_cancel(o->transfer);
}

static void use_copy(const inherited *o) {
    uint32_t value = 0;
    tb_copy_view view = {.size = sizeof view, .data = &value, .dtype = TB_U32};
    refused(tb_copy_submit_send(o->copy, &view, 1, 0, 1), "copy service");
    refused(tb_copy_submit_recv(o->copy, &view, 1, 0, 1), "copy service");
    refused(tb_copy_run(o->copy, 0), "copy service");
}

static void use_all(const inherited *o) {
    use_world(o);
    if (o->batch)
        use_batch(o);
    if (o->transfer)
        use_transfer(o);
    if (o->copy)
        use_copy(o);
}

static void destroy_all(const inherited *o, bool world_first) {
    if (world_first)
        tb_world_destroy(o->world);
    tb_copy_close(o->copy);
    if (world_first) {
        tb_pair_destroy(o->pair);
        tb_batch_destroy(o->batch);
        tb_transfer_destroy(o->transfer);
    } else {
        tb_transfer_destroy(o->transfer);
        tb_batch_destroy(o->batch);
        tb_pair_destroy(o->pair);
        tb_world_destroy(o->world);
    }
}

/* What has no connections and no threads works as before. */
static void use_pure(void) {
    tb_layout *src, *dst;
    tb_plan_cache *cache;
    tb_shape shape = {.ndim = 2, .dim = {8, 8}};
    tb_ir *ir;
    void *memory;
    child_check(tb_layout_parse("mesh=2 place=S0", &src) == TB_OK);
    child_check(tb_layout_parse("mesh=2 place=S1", &dst) == TB_OK);
    child_check(tb_plan_cache_create(&cache) == TB_OK);
    tb_tensor_spec spec = {.size = sizeof spec,
                           .name = "w",
                           .shape = shape,
                           .src = src,
                           .dst = dst,
                           .src_dtype = TB_F32,
                           .dst_dtype = TB_F32};
    child_check(tb_ir_create(0, &spec, 1, cache, NULL, &ir) == TB_OK && ir->nchunks > 0);
    tb_ir_destroy(ir);
    tb_plan_cache_destroy(cache);
    tb_layout_destroy(src);
    tb_layout_destroy(dst);
    child_check(tb_alloc(1 << 20, &memory) == TB_OK);
    memset(memory, 1, 1 << 20);
    tb_free(memory);
}

/* ---- Its parent ------------------------------------------------------------------------------------------------ */

static pid_t fork_child(void) {
    fflush(NULL);
    pid_t pid = fork();
    check(pid >= 0);
    if (pid == 0) {
        is_child = true;
        alarm(CHILD_S); /* one that hangs is killed */
    }
    return pid;
}

static void check_end(pid_t pid) {
    int status = 0;
    check(waitpid(pid, &status, 0) == pid);
    if (WIFSIGNALED(status))
        print_error("the child was killed by signal %d\n", WTERMSIG(status));
    check(WIFEXITED(status) && WEXITSTATUS(status) == 0);
}

/* One child that leaves with its destructors run, and one that does not. */
static void let_children_use(const inherited *o) {
    for (int i = 0; i < 4; i++) {
        pid_t pid = fork_child();
        if (pid == 0) {
            use_all(o);
            use_pure();
            if (i < 3) /* and one child leaves everything to the end of the process */
                destroy_all(o, i % 2);
            if (i == 1)
                _exit(0);
            exit(0);
        }
        check_end(pid);
    }
}

/* Each rank of the group sends its number to the next one. */
static void run_copies(const rank *r, tb_copy *copy) {
    uint32_t mine = 100 + (uint32_t)r->index, got = POISON;
    tb_copy_view from = {.size = sizeof from, .data = &mine, .dtype = TB_U32},
                 to = {.size = sizeof to, .data = &got, .dtype = TB_U32};
    int32_t next = (r->index + 1) % r->size, before = (r->index + r->size - 1) % r->size;
    check_ok(tb_copy_submit_send(copy, &from, 1, next, (uint64_t)r->index));
    check_ok(tb_copy_submit_recv(copy, &to, 1, before, (uint64_t)before));
    check_ok(tb_copy_run(copy, 0));
    check(got == 100 + (uint32_t)before);
}

/* One transfer; with TB_SHADOW the tensors change when it is committed. */
static void move(const rank *r, setup *s, const char *from, uint32_t version) {
    bool is_send = strcmp(r->group, from) == 0;
    tb_transfer *t = NULL;
    if (is_send)
        part_fill(&s->w, version);
    else
        part_poison(&s->w);
    check_ok((is_send ? tb_send : tb_recv)(s->batch, NULL, &t));
    check_ok(tb_wait(t, TB_COMMITTED, -1));
    check(part_holds(&s->w, version));
    tb_transfer_destroy(t);
}

/* Children are forked while a transfer is under way, on the side that has begun it. */
static void move_with_children(rank *r, setup *s, tb_copy *copy, const char *from, bool sender_first,
                               uint32_t version) {
    bool is_send = strcmp(r->group, from) == 0;
    tb_transfer *t = NULL;
    if (is_send)
        part_fill(&s->w, version);
    else
        part_poison(&s->w);
    if (is_send == sender_first) {
        check_ok((is_send ? tb_send : tb_recv)(s->batch, NULL, &t));
        if (r->index == 0)
            let_children_use(&(inherited){r->world, s->pair, s->batch, t, copy, &s->w});
    }
    meet(r);
    if (!t)
        check_ok((is_send ? tb_send : tb_recv)(s->batch, NULL, &t));
    check_ok(tb_wait(t, TB_COMMITTED, -1));
    check(part_holds(&s->w, version));
    tb_transfer_destroy(t);
    meet(r);
}

static void go_on(rank *r) {
    const tb_batch_opts *opts = r->scene->shared;
    setup s;
    tb_copy *copy = NULL;
    set_up(r, &s, "mesh=2 place=S0", "mesh=2 place=S1", ROWS, COLUMNS, opts);
    check_ok(tb_copy_open(r->world, "copies", NULL, NULL, &copy));
    move(r, &s, "a", 1);
    move_with_children(r, &s, copy, "a", true, 2);
    move_with_children(r, &s, copy, "a", false, 3);
    move(r, &s, "b", 4);
    run_copies(r, copy);
    if (r->index == 0)
        let_children_use(&(inherited){r->world, s.pair, s.batch, NULL, copy, &s.w});
    meet(r);
    run_copies(r, copy);
    move(r, &s, "a", 5);
    tb_copy_close(copy);
    tear_down(&s);
}

static void test_shm(void **state) {
    (void)state;
    static const tb_batch_opts staged = {.size = sizeof staged, .staged = true},
                               shadow = {.size = sizeof shadow, .commit = TB_SHADOW, .snapshot = true};
    run_ranks(go_on, 2, 2, NULL);
    run_ranks(go_on, 2, 2, &staged);
    run_ranks(go_on, 2, 2, &shadow);
}

static void test_manual(void **state) {
    (void)state;
    scene s;
    scene_init(&s);
    s.is_manual = true;
    run_ranks_in(&s, go_on, 2, 2, NULL);
}

static bool has_ucx(void) {
    tb_world *world = NULL;
    char folder[] = "/tmp/tb-bus-XXXXXX", url[64];
    check(mkdtemp(folder));
    snprintf(url, sizeof url, "unix:%s/s", folder);
    tb_world_opts opts = {.size = sizeof opts, .transport = "ucx"};
    tb_status status = tb_world_join(url, "a", 0, 1, &opts, &world);
    tb_world_destroy(world);
    rmdir(folder);
    return status == TB_OK;
}

static void test_ucx(void **state) {
    (void)state;
    static const char *const hosts[] = {"first", "first", "second", "second"};
    if (!has_ucx()) {
        print_message("there is no transport ucx: %s\n", tb_error_detail());
        skip();
    }
    scene s;
    scene_init(&s);
    s.hosts = hosts;
    run_ranks_in(&s, go_on, 2, 2, NULL);
}

/* One process in both groups, which moves everything to itself. */
static void test_self(void **state) {
    (void)state;
    scene sc;
    scene_init(&sc);
    tb_world_opts opts = {.size = sizeof opts, .transport = "self"};
    tb_pair_opts first = {.size = sizeof first, .no_wait = true}, second = {.size = sizeof second, .group = "b"};
    tb_world *world;
    tb_pair *from, *to;
    tb_batch *batch;
    tb_transfer *send, *recv;
    part a, b;
    check_ok(tb_world_join(sc.url, "a", 0, 1, &opts, &world));
    check_ok(tb_world_enter(world, "b", 0, 1));
    check_ok(tb_pair_create(world, "p", "b", "mesh=1 place=R", &first, &from));
    check_ok(tb_pair_create(world, "p", "a", "mesh=1 place=R", &second, &to));
    part_init(&a, "mesh=1 place=R", 0, ROWS, COLUMNS);
    part_init(&b, "mesh=1 place=R", 0, ROWS, COLUMNS);
    part_fill(&a, 1);
    part_poison(&b);
    tb_tensor source = part_tensor(&a), target = part_tensor(&b);
    check_ok(tb_batch_create(world, "step", NULL, &batch));
    check_ok(tb_batch_add(batch, from, "w", &source));
    check_ok(tb_batch_add(batch, to, "w", &target));
    check_ok(tb_send(batch, NULL, &send));
    let_children_use(&(inherited){world, from, batch, send, NULL, &a});
    check_ok(tb_recv(batch, NULL, &recv));
    check_ok(tb_wait(recv, TB_COMMITTED, -1));
    check_ok(tb_wait(send, TB_COMMITTED, -1));
    check(part_holds(&b, 1));
    tb_transfer_destroy(send);
    tb_transfer_destroy(recv);
    tb_batch_destroy(batch);
    tb_pair_destroy(from);
    tb_pair_destroy(to);
    tb_world_destroy(world);
    part_fini(&a);
    part_fini(&b);
    scene_fini(&sc);
}

/* ---- While others are inside the library ----------------------------------------------------------------------- */

typedef struct forker {
    rank *rank;
    setup *setup;
    atomic_bool is_over;
    char failure[200];
} forker;

static void *fork_again_and_again(void *arg) {
    enum { CHILDREN = 100 };
    forker *f = arg;
    inherited o = {f->rank->world, f->setup->pair, f->setup->batch, NULL, NULL, &f->setup->w};
    for (int i = 0; i < CHILDREN && !f->failure[0]; i++) {
        int status = 0;
        pid_t pid = fork();
        if (pid == 0) {
            alarm(CHILD_S);
            use_all(&o);
            destroy_all(&o, i % 2);
            exit(0);
        }
        if (pid < 0 || waitpid(pid, &status, 0) != pid || status != 0)
            snprintf(f->failure, sizeof f->failure, "child %d ended with status %#x", i, (unsigned)status);
    }
    atomic_store(&f->is_over, true);
    return NULL;
}

static void move_meanwhile(rank *r) {
    setup s;
    atomic_bool *is_last = (atomic_bool *)(uintptr_t)r->scene->shared;
    forker f = {.rank = r, .setup = &s};
    pthread_t thread;
    set_up(r, &s, "mesh=1 place=R", "mesh=1 place=R", ROWS, COLUMNS, NULL);
    if (is_a(r))
        check(pthread_create(&thread, NULL, fork_again_and_again, &f) == 0);
    for (uint32_t version = 1; !atomic_load(is_last); version = version % 200 + 1) {
        move(r, &s, "a", version);
        meet(r);
        if (is_a(r) && atomic_load(&f.is_over))
            atomic_store(is_last, true);
        meet(r);
    }
    if (is_a(r)) {
        pthread_join(thread, NULL);
        if (f.failure[0])
            fails(__FILE__, __LINE__, "a child", f.failure);
    }
    tear_down(&s);
}

static void test_busy(void **state) {
    (void)state;
    static atomic_bool is_last;
    if (!can_fork_busy) {
        print_message("the sanitizer does not let a child of busy threads allocate memory\n");
        skip();
    }
    run_ranks(move_meanwhile, 1, 1, &is_last);
}

/* ---- A world of its own ---------------------------------------------------------------------------------------- */

static void join_from_child(const rank *r, const inherited *o) {
    tb_world *world;
    tb_pair *pair;
    tb_batch *batch;
    tb_transfer *t;
    part w;
    tb_world_opts opts = {.size = sizeof opts, .timeout_ms = PATIENCE_MS};
    child_check(tb_world_join(r->scene->url, "c", 0, 1, &opts, &world) == TB_OK);
    child_check(tb_pair_create(world, "q", "b", "mesh=1 place=R", NULL, &pair) == TB_OK);
    child_check(tb_batch_create(world, "own", NULL, &batch) == TB_OK);
    part_init(&w, "mesh=1 place=R", 0, ROWS, COLUMNS);
    part_fill(&w, 9);
    tb_tensor tensor = part_tensor(&w);
    child_check(tb_batch_add(batch, pair, "w", &tensor) == TB_OK);
    child_check(tb_send(batch, NULL, &t) == TB_OK);
    use_all(o);
    destroy_all(o, true);
    child_check(tb_wait(t, TB_COMMITTED, -1) == TB_OK);
    tb_transfer_destroy(t);
    tb_batch_destroy(batch);
    tb_pair_destroy(pair);
    tb_world_destroy(world);
    part_fini(&w);
    exit(0);
}

/* The child exchanges with its parent's peer, as somebody else, and both go on. */
static void join_again(rank *r) {
    setup s;
    set_up(r, &s, "mesh=1 place=R", "mesh=1 place=R", ROWS, COLUMNS, NULL);
    move(r, &s, "a", 1);
    if (is_a(r)) {
        pid_t pid = fork_child();
        if (pid == 0)
            join_from_child(r, &(inherited){r->world, s.pair, s.batch, NULL, NULL, &s.w});
        check_end(pid);
    } else {
        setup own;
        part_init(&own.w, "mesh=1 place=R", 0, ROWS, COLUMNS);
        part_poison(&own.w);
        tb_tensor w = part_tensor(&own.w);
        tb_transfer *t;
        check_ok(tb_pair_create(r->world, "q", "c", "mesh=1 place=R", NULL, &own.pair));
        check_ok(tb_batch_create(r->world, "own", NULL, &own.batch));
        check_ok(tb_batch_add(own.batch, own.pair, "w", &w));
        check_ok(tb_recv(own.batch, NULL, &t));
        check_ok(tb_wait(t, TB_COMMITTED, -1));
        check(part_holds(&own.w, 9));
        tb_transfer_destroy(t);
        tear_down(&own);
    }
    meet(r);
    move(r, &s, "a", 2);
    tear_down(&s);
}

static void test_join(void **state) {
    (void)state;
    if (!can_start_threads) {
        print_message("ThreadSanitizer does not let a child start threads\n");
        skip();
    }
    run_ranks(join_again, 1, 1, NULL);
}

/* ---- Descriptors ----------------------------------------------------------------------------------------------- */

enum { MOST_FDS = 256 };

static void list_fds(bool is_open[MOST_FDS]) {
    for (int fd = 0; fd < MOST_FDS; fd++)
        is_open[fd] = fcntl(fd, F_GETFD) >= 0;
}

static bool before[MOST_FDS];

/* A child has no descriptor that its parent had not before it joined; nor does a program that it starts. */
static void keep_descriptors(rank *r) {
    setup s;
    tb_copy *copy = NULL;
    tb_transfer *t = NULL;
    set_up(r, &s, "mesh=1 place=R", "mesh=1 place=R", ROWS, COLUMNS, NULL);
    check_ok(tb_copy_open(r->world, "copies", NULL, NULL, &copy));
    move(r, &s, "a", 1);
    if (is_a(r)) {
        part_fill(&s.w, 2);
        check_ok(tb_send(s.batch, NULL, &t));
    }
    meet(r);
    if (is_a(r)) {
        bool now[MOST_FDS];
        list_fds(now);
        for (int fd = 0; fd < MOST_FDS; fd++)
            check(before[fd] || !now[fd] || fcntl(fd, F_GETFD) & FD_CLOEXEC);
        pid_t pid = fork_child();
        if (pid == 0) {
            list_fds(now);
            for (int fd = 0; fd < MOST_FDS; fd++)
                child_check(before[fd] || !now[fd]);
            exit(0);
        }
        check_end(pid);
    } else {
        part_poison(&s.w);
        check_ok(tb_recv(s.batch, NULL, &t));
    }
    check_ok(tb_wait(t, TB_COMMITTED, -1));
    check(part_holds(&s.w, 2));
    tb_transfer_destroy(t);
    tb_copy_close(copy);
    tear_down(&s);
}

static void test_descriptors(void **state) {
    (void)state;
    list_fds(before);
    run_ranks(keep_descriptors, 1, 1, NULL);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_shm),  cmocka_unit_test(test_manual), cmocka_unit_test(test_self),
        cmocka_unit_test(test_busy), cmocka_unit_test(test_join),   cmocka_unit_test(test_descriptors),
        cmocka_unit_test(test_ucx), /* last: what it loads stays */
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
