/* Worlds: taking seats, waiting for others, and driving a world by hand. */
#include "bus/bus_test.h"

#include <poll.h>
#include <stdatomic.h>

static tb_world *join(const scene *s, const char *group, int32_t index, int32_t size, bool manual) {
    tb_world *world = NULL;
    tb_world_opts opts = {.size = sizeof opts, .timeout_ms = PATIENCE_MS, .manual = manual};
    check_ok(tb_world_join(s->url, group, index, size, &opts, &world));
    return world;
}

static int make_scene(void **state) {
    scene *s = calloc(1, sizeof *s);
    scene_init(s);
    *state = s;
    return 0;
}

static int remove_scene(void **state) {
    scene_fini(*state);
    free(*state);
    return 0;
}

static void test_seats(void **state) {
    const scene *s = *state;
    tb_world *a = join(s, "a", 0, 2, false), *b = join(s, "a", 1, 2, false), *c = NULL;
    assert_true(tb_world_rank(a) >= 0 && tb_world_rank(b) >= 0 && tb_world_rank(a) != tb_world_rank(b));
    assert_int_equal(tb_world_incarnation(a), 1);
    check_fails(tb_world_join(s->url, "a", 1, 2, NULL, &c), TB_CONFLICT, "");
    check_fails(tb_world_join(s->url, "a", 1, 3, NULL, &c), TB_CONFLICT, "");
    check_fails(tb_world_enter(a, "a", 1, 2), TB_CONFLICT, "");
    check_ok(tb_world_enter(a, "both", 1, 2));
    check_fails(tb_world_enter(b, "both", 1, 2), TB_CONFLICT, "");
    check_ok(tb_world_enter(b, "both", 0, 2));
    check_ok(tb_world_wait(a, "both", 0));
    char *groups = NULL;
    check_ok(tb_world_groups(a, 0, &groups));
    check(strstr(groups, "2 2 both\n"));
    free(groups);
    check_ok(tb_world_wait(b, "a", 0));
    assert_null(c);
    int32_t number = tb_world_rank(b);
    tb_world_destroy(b); /* not a: that serves the store */
    b = join(s, "a", 1, 2, false);
    assert_int_equal(tb_world_rank(b), number); /* the seat keeps its number */
    assert_int_equal(tb_world_incarnation(b), 2);
    tb_world_destroy(b);
    tb_world_destroy(a);
    tb_world_destroy(NULL);
}

static void test_wait_names_the_missing(void **state) {
    const scene *s = *state;
    tb_world *a = join(s, "a", 3, 12, false);
    check_fails(tb_world_wait(a, "a", 20), TB_TIMEOUT,
                "group 'a' has 1 of 12 ranks; missing: 0, 1, 2, 4, 5, 6, 7, 8 and 3 more");
    check_fails(tb_world_wait(a, "nobody", 20), TB_TIMEOUT, "nobody has joined group 'nobody'");
    check_fails(tb_world_wait(a, "", 20), TB_INVALID, "a group needs a name");
    tb_world_destroy(a);
}

static void test_mistakes(void **state) {
    const scene *s = *state;
    tb_world *world = NULL;
    tb_world_opts opts = {.size = sizeof opts, .transport = "pigeons"};
    check_fails(tb_world_join(s->url, "a", 0, 1, &opts, &world), TB_INVALID, "there is no transport 'pigeons'");
    opts = (tb_world_opts){.size = sizeof opts, .timeout_ms = -1};
    check_fails(tb_world_join(s->url, "a", 0, 1, &opts, &world), TB_INVALID, "timeout_ms can't be negative");
    opts = (tb_world_opts){.size = sizeof opts, .workers = -1};
    check_fails(tb_world_join(s->url, "a", 0, 1, &opts, &world), TB_INVALID, "workers");
    opts = (tb_world_opts){0};
    check_fails(tb_world_join(s->url, "a", 0, 1, &opts, &world), TB_INVALID, "");
    opts = (tb_world_opts){.size = sizeof opts, .host = ""};
    check_fails(tb_world_join(s->url, "a", 0, 1, &opts, &world), TB_INVALID, "a host's id has 1 to 63 bytes");
    check_fails(tb_world_join(NULL, "a", 0, 1, NULL, &world), TB_INVALID, "URL");
    check_fails(tb_world_join("carrier:pigeon", "a", 0, 1, NULL, &world), TB_INVALID, "");
    check_fails(tb_world_join(s->url, "", 0, 1, NULL, &world), TB_INVALID, "a group needs a name");
    check_fails(tb_world_join(s->url, "a", 1, 1, NULL, &world), TB_INVALID, "");
    check_fails(tb_world_join(s->url, "a", -1, 1, NULL, &world), TB_INVALID, "");
    check_fails(tb_world_join(s->url, "a", 0, 0, NULL, &world), TB_INVALID, "");
    assert_null(world);
}

static void test_tokens(void **state) {
    const scene *s = *state;
    tb_world *a = NULL, *b = NULL;
    tb_world_opts right = {.size = sizeof right,
                           .timeout_ms = PATIENCE_MS,
                           .token = "sesame, sesame, sesame, sesame, s"},
                  wrong = right;
    wrong.token = "simsim, simsim, simsim, simsim, s";
    check_ok(tb_world_join(s->url, "a", 0, 1, &right, &a));
    check_fails(tb_world_join(s->url, "b", 0, 1, &wrong, &b), TB_DENIED, "");
    check_fails(tb_world_join(s->url, "b", 0, 1, NULL, &b), TB_DENIED, "");
    check_ok(tb_world_join(s->url, "b", 0, 1, &right, &b));
    check_ok(tb_world_wait(a, "b", 0));
    tb_world_destroy(b);
    tb_world_destroy(a);
}

static void test_namespaces(void **state) {
    const scene *s = *state;
    char url[96];
    tb_world *a = join(s, "a", 0, 1, false), *b = NULL;
    snprintf(url, sizeof url, "%s?namespace=other", s->url);
    check_ok(tb_world_join(url, "a", 0, 1, NULL, &b)); /* the same seat of another bus */
    check_ok(tb_world_wait(b, "a", 0));
    check_ok(tb_world_enter(a, "here", 0, 1));
    check_fails(tb_world_wait(b, "here", 20), TB_TIMEOUT, "nobody has joined group 'here'");
    tb_world_destroy(b);
    tb_world_destroy(a);
}

/* Who is on another host can't be reached through a store that nobody else could have reached. */
static void test_hosts(void **state) {
    const scene *s = *state;
    for (int round = 0; round < 2; round++) {
        tb_world_opts near = {.size = sizeof near, .timeout_ms = PATIENCE_MS, .host = "here"}, far = near;
        far.host = "there";
        near.transport = far.transport = round ? "shm" : "auto";
        tb_world *a = NULL, *b = NULL;
        tb_pair *pair[2] = {NULL};
        tb_pair_opts no_wait = {.size = sizeof no_wait, .no_wait = true};
        check_ok(tb_world_join(s->url, "a", 0, 1, &near, &a));
        check_ok(tb_world_join(s->url, "b", 0, 1, &far, &b));
        check_ok(tb_pair_create(a, "p", "b", "mesh=1 place=R", &no_wait, &pair[0]));
        if (round)
            check_ok(tb_pair_create(b, "p", "a", "mesh=1 place=R", NULL, &pair[1]));
        else
            check_fails(tb_pair_create(b, "p", "a", "mesh=1 place=R", NULL, &pair[1]), TB_REFUSED,
                        "has no transport in common with us, or is on another host: it has self, shm, we have self, "
                        "shm; the store can be reached on this machine only");
        tb_pair_destroy(pair[1]);
        tb_pair_destroy(pair[0]);
        tb_world_destroy(b);
        tb_world_destroy(a);
    }
}

/* ---- By hand --------------------------------------------------------------------------------------------------- */

/* Drives both worlds from one thread, asleep in between, until both transfers have the event. */
static void drive(tb_world *const *worlds, tb_transfer *const *transfers, int n) {
    int64_t deadline = tb__now_ms() + PATIENCE_MS;
    for (;;) {
        int ndone = 0;
        struct pollfd fds[2];
        for (int i = 0; i < n; i++) {
            tb_transfer_state state = {.size = sizeof state};
            check_ok(tb_world_progress(worlds[i]));
            tb_transfer_query(transfers[i], &state);
            check(state.status == TB_OK);
            ndone += (state.events & TB_COMMITTED) != 0;
            fds[i] = (struct pollfd){.fd = tb_world_fd(worlds[i]), .events = POLLIN};
        }
        if (ndone == n)
            return;
        check(poll(fds, (nfds_t)n, tb__ms_until(deadline)) > 0);
    }
}

typedef struct registration {
    tb_world *world;
    tb_batch *batch;
    tb_status status;
    char why[300]; /* sentences are a thread's own */
    _Atomic int *left;
} registration;

/* What one side has to say may still be on its way when it has heard the other: both are driven until both are done. */
static void *register_one(void *arg) {
    registration *g = arg;
    g->status = tb_batch_register(g->batch, 0);
    snprintf(g->why, sizeof g->why, "%s", tb_error_detail());
    atomic_fetch_sub(g->left, 1);
    while (atomic_load(g->left) > 0) {
        struct pollfd fd = {.fd = tb_world_fd(g->world), .events = POLLIN};
        poll(&fd, 1, 10);
        tb_world_progress(g->world);
    }
    return NULL;
}

/* Two worlds of one process, without any thread but ours. Only agreeing on a batch waits for the other side, and so is
 * left to a thread of its own. */
static void two_by_hand(const scene *s, bool staged) {
    enum { N = 2 };
    const char *groups[N] = {"a", "b"};
    tb_world *worlds[N];
    tb_pair *pairs[N];
    tb_batch *batches[N];
    tb_transfer *transfers[N];
    part parts[N];
    tb_pair_opts pair_opts = {.size = sizeof pair_opts, .no_wait = true};
    tb_batch_opts batch_opts = {.size = sizeof batch_opts, .staged = staged, .bucket_size = 4096};
    for (int i = 0; i < N; i++) {
        worlds[i] = join(s, groups[i], 0, 1, true);
        check_ok(tb_pair_create(worlds[i], "p", groups[!i], "mesh=1 place=R", &pair_opts, &pairs[i]));
        part_init(&parts[i], "mesh=1 place=R", 0, 100, 100);
        tb_tensor t = part_tensor(&parts[i]);
        check_ok(tb_batch_create(worlds[i], "step", &batch_opts, &batches[i]));
        check_ok(tb_batch_add(batches[i], pairs[i], "w", &t));
    }
    pthread_t thread;
    _Atomic int left = N;
    registration mine = {.world = worlds[0], .batch = batches[0], .left = &left};
    registration other = {.world = worlds[1], .batch = batches[1], .left = &left};
    check(pthread_create(&thread, NULL, register_one, &other) == 0);
    register_one(&mine);
    pthread_join(thread, NULL);
    if (mine.status != TB_OK || other.status != TB_OK)
        fails(__FILE__, __LINE__, "register", mine.status != TB_OK ? mine.why : other.why);
    for (uint32_t version = 1; version <= 4; version++) {
        int from = version % 2;
        part_fill(&parts[from], version);
        part_poison(&parts[!from]);
        check_ok(tb_recv(batches[!from], NULL, &transfers[!from]));
        check_ok(tb_send(batches[from], NULL, &transfers[from]));
        drive(worlds, transfers, N);
        check(part_holds(&parts[!from], version));
        tb_transfer_destroy(transfers[0]);
        tb_transfer_destroy(transfers[1]);
    }
    /* Cancelling makes what progress it needs. */
    check_ok(tb_recv(batches[0], NULL, &transfers[0]));
    tb_cancel(transfers[0]);
    check_fails(tb_wait(transfers[0], TB_ARRIVED, -1), TB_CANCELLED, "cancelled batch 'step'");
    tb_transfer_destroy(transfers[0]);
    for (int i = 0; i < N; i++) {
        tb_batch_destroy(batches[i]);
        tb_pair_destroy(pairs[i]);
        part_fini(&parts[i]);
    }
    for (int i = N; i-- > 0;)
        tb_world_destroy(worlds[i]);
}

static void test_two_worlds_driven_by_one_thread(void **state) {
    two_by_hand(*state, false);
}

static void test_two_worlds_driven_by_one_thread_staged(void **state) {
    two_by_hand(*state, true);
}

/* A world that is both groups, and so has to do with itself. */
typedef struct loop {
    tb_pair *pairs[2];
    tb_batch *batch;
    part part;
} loop;

/* The world is in group "a". */
static void loop_init(loop *l, tb_world *world) {
    check_ok(tb_world_enter(world, "b", 0, 1));
    tb_pair_opts as_a = {.size = sizeof as_a, .group = "a", .no_wait = true},
                 as_b = {.size = sizeof as_b, .group = "b"};
    check_ok(tb_pair_create(world, "p", "b", "mesh=1 place=R", &as_a, &l->pairs[0]));
    check_ok(tb_pair_create(world, "p", "a", "mesh=1 place=R", &as_b, &l->pairs[1]));
    part_init(&l->part, "mesh=1 place=R", 0, 4, 4);
    tb_tensor tensor = part_tensor(&l->part);
    check_ok(tb_batch_create(world, "step", NULL, &l->batch));
    for (int i = 0; i < 2; i++)
        check_ok(tb_batch_add(l->batch, l->pairs[i], "w", &tensor));
}

/* A deadline passes without anybody else's doing: the descriptor tells. */
static void test_deadlines_wake_a_manual_world(void **state) {
    const scene *s = *state;
    tb_world *a = join(s, "a", 0, 1, true);
    tb_transfer *t = NULL;
    loop l;
    loop_init(&l, a);
    tb_transfer_opts opts = {.size = sizeof opts, .timeout_ms = SOON_MS};
    check_ok(tb_batch_register(l.batch, 0));
    check_ok(tb_recv(l.batch, &opts, &t));
    tb_transfer_state now = {.size = sizeof now};
    for (tb_transfer_query(t, &now); now.status == TB_OK; tb_transfer_query(t, &now)) {
        struct pollfd fd = {.fd = tb_world_fd(a), .events = POLLIN};
        check(poll(&fd, 1, PATIENCE_MS) == 1);
        check_ok(tb_world_progress(a));
    }
    assert_int_equal(now.status, TB_TIMEOUT);
    tb_transfer_destroy(t);
    tb_batch_destroy(l.batch);
    tb_pair_destroy(l.pairs[0]);
    tb_pair_destroy(l.pairs[1]);
    part_fini(&l.part);
    tb_world_destroy(a);
}

/* Workers wake the world when a copy is done. Once that was seen, there is nothing to wake for. */
static void test_an_idle_world_sleeps(void **state) {
    const scene *s = *state;
    tb_world_opts opts = {.size = sizeof opts, .manual = true, .workers = 4};
    tb_world *world;
    loop l;
    part from, to;
    check_ok(tb_world_join(s->url, "a", 0, 1, &opts, &world));
    loop_init(&l, world);
    part_init(&to, "mesh=1 place=R", 0, 300, 300);
    part_init(&from, "mesh=1 place=R", 0, 300, 300);
    tb_tensor tensors[2] = {part_tensor(&from), part_tensor(&to)};
    for (int i = 0; i < 2; i++)
        check_ok(tb_batch_add(l.batch, l.pairs[i], "large", &tensors[i]));
    for (uint32_t i = 0; i < 200; i++) {
        tb_transfer *sent, *received;
        part_fill(&from, i);
        check_ok(tb_send(l.batch, NULL, &sent));
        check_ok(tb_recv(l.batch, NULL, &received));
        check_ok(tb_wait(received, TB_COMMITTED, -1));
        check_ok(tb_wait(sent, TB_COMMITTED, -1));
        tb_transfer_destroy(sent);
        tb_transfer_destroy(received);
        check(part_holds(&to, i));
        struct pollfd fd = {.fd = tb_world_fd(world), .events = POLLIN};
        int nwakes = 0;
        for (; nwakes < 1000 && poll(&fd, 1, 1) == 1; nwakes++)
            check_ok(tb_world_progress(world));
        check(nwakes < 1000);
    }
    tb_batch_destroy(l.batch);
    tb_pair_destroy(l.pairs[0]);
    tb_pair_destroy(l.pairs[1]);
    part_fini(&l.part);
    part_fini(&from);
    part_fini(&to);
    tb_world_destroy(world);
}

/* The last to be destroyed ends it all. */
static void test_destroyed_in_any_order(void **state) {
    const scene *s = *state;
    tb_world *world;
    tb_transfer *sent, *received;
    loop l;
    check_ok(tb_world_join(s->url, "a", 0, 1, NULL, &world));
    loop_init(&l, world);
    check_ok(tb_send(l.batch, NULL, &sent));
    check_ok(tb_recv(l.batch, NULL, &received));
    tb_world_destroy(world);
    tb_batch_destroy(l.batch);
    tb_pair_destroy(l.pairs[0]);
    check_ok(tb_wait(received, TB_ARRIVED, -1));
    tb_transfer_destroy(sent);
    tb_transfer_destroy(received);
    tb_pair_destroy(l.pairs[1]);
    part_fini(&l.part);
    check_ok(tb_world_join(s->url, "a", 0, 1, NULL, &world)); /* the seat is free */
    tb_world_destroy(world);
}

#define IN_A_SCENE(test) cmocka_unit_test_setup_teardown(test, make_scene, remove_scene)

int main(void) {
    const struct CMUnitTest tests[] = {
        IN_A_SCENE(test_seats),
        IN_A_SCENE(test_wait_names_the_missing),
        IN_A_SCENE(test_mistakes),
        IN_A_SCENE(test_tokens),
        IN_A_SCENE(test_namespaces),
        IN_A_SCENE(test_hosts),
        IN_A_SCENE(test_two_worlds_driven_by_one_thread),
        IN_A_SCENE(test_two_worlds_driven_by_one_thread_staged),
        IN_A_SCENE(test_deadlines_wake_a_manual_world),
        IN_A_SCENE(test_an_idle_world_sleeps),
        IN_A_SCENE(test_destroyed_in_any_order),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
