/* Versions: who has which, when the tensors change, what a failure leaves behind, and what is done about a doubt. What
 * happens when processes are killed is in version_kill_test.c. */
#include "bus/bus_test.h"

#include "bus/store/server.h"
#include "bus/store/store.h"

#include <poll.h>
#include <signal.h>
#include <stdatomic.h>
#include <sys/wait.h>

static const tb_batch_opts shadow_opts = {.size = sizeof shadow_opts, .commit = TB_SHADOW};

static void check_version(const setup *s, uint64_t wanted, bool wanted_torn) {
    uint64_t version;
    bool is_torn;
    check_ok(tb_batch_version(s->batch, s->pair, &version, &is_torn));
    check(version == wanted);
    check(is_torn == wanted_torn);
}

static tb_transfer *begin(const rank *r, const setup *s) {
    tb_transfer *t = NULL;
    check_ok((is_a(r) ? tb_send : tb_recv)(s->batch, NULL, &t));
    return t;
}

/* As exchange, where what has arrived is not live yet. */
static void move(rank *r, setup *s, uint32_t version) {
    if (is_a(r))
        part_fill(&s->w, version);
    tb_transfer *t = begin(r, s);
    check_ok(tb_wait(t, TB_COMMITTED, -1));
    check(part_holds(&s->w, version));
    tb_transfer_destroy(t);
}

/* ---- When tensors change ---------------------------------------------------------------------------------------- */

/* What the host saw when it was told. */
typedef struct witness {
    const part *w;
    uint32_t before, after;
    atomic_int calls;
    atomic_bool is_wrong;
} witness;

static void on_committing(void *arg, bool is_done) {
    witness *w = arg;
    bool is_right = is_done          ? w->after == 0 || part_holds(w->w, w->after)
                    : w->before == 0 ? part_is_poison(w->w)
                                     : part_holds(w->w, w->before);
    tensors_flush();
    atomic_fetch_add(&w->calls, 1);
    if (!is_right || (atomic_load(&w->calls) % 2 == 0) != is_done)
        atomic_store(&w->is_wrong, true);
}

/* What was decided long ago goes from the store, a little later; of the last two versions it stays. */
static void check_decisions(const rank *r, size_t wanted) {
    tb__store *store;
    tb__store_entries entries;
    size_t count;
    int64_t deadline_ms = tb__now_ms() + PATIENCE_MS;
    check_ok(tb__store_open(r->scene->url, "", PATIENCE_MS, &store));
    do {
        check_ok(tb__store_list(store, "decisions/", &entries));
        count = entries.count;
        tb__store_entries_fini(&entries);
    } while (count > wanted && tb__now_ms() < deadline_ms);
    check(count == wanted);
    tb__store_close(store);
}

static void commits(rank *r) {
    setup s;
    set_up(r, &s, "mesh=2 place=S0", "mesh=3 place=S1", 50, 40, r->scene->shared);
    check(tb_batch_epoch(s.batch) == 1);
    for (uint32_t version = 1; version <= 5; version++) {
        witness seen = {.w = &s.w, .before = version - 1, .after = version};
        tb_transfer_opts opts = {.size = sizeof opts, .committing = on_committing, .arg = &seen};
        tb_transfer_state state = {.size = sizeof state};
        tb_transfer *t = NULL;
        if (is_a(r))
            part_fill(&s.w, version);
        check_ok((is_a(r) ? tb_send : tb_recv)(s.batch, &opts, &t));
        check_ok(tb_wait(t, TB_COMMITTED, -1));
        check(part_holds(&s.w, version));
        tb_transfer_query(t, &state);
        check(state.version == version && state.attempt == version);
        check(atomic_load(&seen.calls) == (is_a(r) ? 0 : 2) && !atomic_load(&seen.is_wrong));
        tb_transfer_destroy(t);
        check_version(&s, is_a(r) ? 0 : version, false);
    }
    meet(r);
    if (!is_a(r))
        check_decisions(r, 2);
    meet(r);
    tear_down(&s);
}

static void test_commits(void **state) {
    (void)state;
    tb_batch_opts staged = shadow_opts;
    staged.staged = true;
    staged.bucket_size = 500;
    run_ranks(commits, 2, 3, &shadow_opts);
    run_ranks(commits, 2, 3, &staged);
}

/* Ranks that hold back have what they had until they proceed, each for itself; others do not wait for them. */
static void held(rank *r) {
    setup s;
    set_up(r, &s, "mesh=2 place=S0", "mesh=3 place=S1", 50, 40, &shadow_opts);
    for (uint32_t version = 1; version <= 4; version++) {
        bool holds = !is_a(r) && (r->index + version) % 3 != 0;
        tb_transfer_opts opts = {.size = sizeof opts, .hold = holds};
        tb_transfer *t = NULL;
        if (is_a(r))
            part_fill(&s.w, version);
        check_ok((is_a(r) ? tb_send : tb_recv)(s.batch, &opts, &t));
        if (holds) {
            check_ok(tb_wait(t, TB_DECIDED, -1));
            check_fails(tb_wait(t, TB_COMMITTED, 2), TB_TIMEOUT, "has not been committed");
            check(version == 1 ? part_is_poison(&s.w) : part_holds(&s.w, version - 1));
        } else if (!is_a(r)) {
            check_ok(tb_wait(t, TB_COMMITTED, -1));
            check(part_holds(&s.w, version));
            check_fails(tb_wait(t, TB_DECIDED, 0), TB_INVALID, "not begun with hold");
            check_fails(tb_proceed(t), TB_INVALID, "not begun with hold");
        }
        meet(r);
        if (is_a(r))
            check_fails(tb_wait(t, TB_COMMITTED, 2), TB_TIMEOUT, "has not been committed");
        meet(r);
        if (holds && version == 4)
            tb_cancel(t); /* what is decided holds */
        else if (holds)
            check_ok(tb_proceed(t));
        check_ok(tb_wait(t, TB_COMMITTED, -1));
        check(part_holds(&s.w, version));
        check_version(&s, is_a(r) ? 0 : version, false);
        tb_transfer_destroy(t);
        meet(r);
    }
    tear_down(&s);
}

static void test_held(void **state) {
    (void)state;
    run_ranks(held, 2, 3, NULL);
}

/* Nobody lets it go on: the deadline does. One that may from the start does not wait. */
static void held_too_long(rank *r) {
    setup s;
    set_up(r, &s, "mesh=1 place=R", "mesh=2 place=S0", 8, 8, &shadow_opts);
    enum { ENOUGH_MS = 1500 }; /* to get there */
    move(r, &s, 1);
    for (uint32_t version = 2; version <= 3; version++) {
        tb_transfer_opts opts = {.size = sizeof opts, .hold = !is_a(r)};
        tb_transfer *t = NULL;
        if (is_a(r))
            part_fill(&s.w, version);
        opts.timeout_ms = is_a(r) || version == 3 ? 0 : ENOUGH_MS;
        if (is_a(r)) {
            opts.hold = true;
            check_fails(tb_send(s.batch, &opts, &t), TB_INVALID, "for receiving");
            opts.hold = false;
        }
        check_ok((is_a(r) ? tb_send : tb_recv)(s.batch, &opts, &t));
        if (!is_a(r) && version == 3)
            check_ok(tb_proceed(t));
        check_ok(tb_wait(t, TB_COMMITTED, -1));
        check(part_holds(&s.w, version));
        tb_transfer_destroy(t);
        check_version(&s, is_a(r) ? 0 : version, false);
        meet(r);
    }
    tear_down(&s);
}

static void test_held_too_long(void **state) {
    (void)state;
    run_ranks(held_too_long, 1, 2, NULL);
}

/* A rank that does not come keeps the others from committing, and nothing of what has arrived is live. */
/* The lead has given up the next version when a rank is still held back with this one, which counts all the same. */
static void overtaken(rank *r) {
    setup s;
    set_up(r, &s, "mesh=2 place=S0", "mesh=2 place=S0", 8, 6, &shadow_opts);
    bool is_slow = r->index == 1;
    tb_transfer_opts opts = {.size = sizeof opts, .hold = is_slow && !is_a(r)};
    tb_transfer *t = NULL;
    if (is_a(r))
        part_fill(&s.w, 1);
    check_ok((is_a(r) ? tb_send : tb_recv)(s.batch, &opts, &t));
    check_ok(tb_wait(t, is_slow ? (is_a(r) ? TB_RELEASED : TB_DECIDED) : TB_COMMITTED, -1));
    if (!is_slow) { /* these two have no business with the others' part */
        tb_transfer_destroy(t);
        t = begin(r, &s);
        check_ok(tb_wait(t, is_a(r) ? TB_RELEASED : TB_ARRIVED, -1));
    }
    meet(r);
    if (!is_slow && !is_a(r))
        tb_cancel(t);
    if (!is_slow)
        check_fails(tb_wait(t, TB_COMMITTED, -1), TB_CANCELLED, "cancelled");
    meet(r); /* the lead's word is on its way, or there */
    if (is_slow && !is_a(r)) {
        nanosleep(&(struct timespec){.tv_nsec = 20000000}, NULL);
        check_ok(tb_proceed(t));
    }
    if (is_slow)
        check_ok(tb_wait(t, TB_COMMITTED, PATIENCE_MS));
    check(part_holds(&s.w, 1));
    check_version(&s, is_a(r) ? 0 : 1, false);
    tb_transfer_destroy(t);
    meet(r);
    tear_down(&s);
}

static void test_overtaken(void **state) {
    (void)state;
    run_ranks(overtaken, 2, 2, NULL);
}

static void one_is_missing(rank *r) {
    setup s;
    tb_transfer *t = NULL;
    bool is_missing = !is_a(r) && r->index == *(const int32_t *)r->scene->shared;
    bool receives = !is_a(r) && !is_missing;
    set_up(r, &s, "mesh=1 place=R", "mesh=2 place=S1", 8, 6, &shadow_opts);
    move(r, &s, 1);
    meet(r);
    if (is_a(r))
        part_fill(&s.w, 2);
    if (!is_missing)
        t = begin(r, &s);
    if (receives)
        check_ok(tb_wait(t, TB_ARRIVED, -1));
    meet(r);
    if (!is_missing)
        check_fails(tb_wait(t, TB_COMMITTED, SOON_MS), TB_TIMEOUT, receives && r->index == 1 ? "to commit" : "to ");
    check(!receives || part_holds(&s.w, 1));
    meet(r);
    if (is_a(r))
        tb_cancel(t);
    if (!is_missing)
        check_fails(tb_wait(t, TB_COMMITTED, -1), TB_CANCELLED, "cancelled");
    check(is_a(r) || part_holds(&s.w, 1));
    check_version(&s, is_a(r) ? 0 : 1, false);
    tb_transfer_destroy(t);
    meet(r);
    if (is_missing) { /* it may come before it has heard that the second version is over */
        t = begin(r, &s);
        tb_status status = tb_wait(t, TB_COMMITTED, -1);
        tb_transfer_destroy(t);
        if (status == TB_OK)
            check(part_holds(&s.w, 3));
        else
            move(r, &s, 3);
    } else {
        move(r, &s, 3);
    }
    check_version(&s, is_a(r) ? 0 : 3, false);
    meet(r);
    tear_down(&s);
}

static void test_one_is_missing(void **state) {
    (void)state;
    for (int32_t missing = 0; missing < 2; missing++) /* the lead is one of them */
        run_ranks(one_is_missing, 1, 2, &missing);
}

/* Strides, and padding: what is around the tensor is the host's, what its view pads is zero with the version. */
static void padded(rank *r) {
    enum { N = 4, WIDE = 6 };
    tb_pair *pair;
    tb_batch *batch;
    uint16_t *memory;
    check_ok(tb_alloc((N + 2) * WIDE * sizeof *memory, (void **)&memory));
    check_ok(tb_pair_create(r->world, "p", other_group(r), "mesh=1 place=R", NULL, &pair));
    check_ok(tb_batch_create(r->world, "step", &shadow_opts, &batch));
    tb_tensor t = {.size = sizeof t, .data = memory, .dtype = TB_U16, .ndim = 2, .shape = {N, N}};
    const int64_t strides[] = {WIDE, 1};
    if (!is_a(r)) {
        t.strides = strides;
        t.shape[0] = N + 2;
        t.view = "pad(0,1,1)";
    }
    check_ok(tb_batch_add(batch, pair, "w", &t));
    for (int version = 1; version <= 2; version++) {
        tb_transfer *moves = NULL;
        for (int i = 0; i < (N + 2) * WIDE; i++)
            memory[i] = (uint16_t)(is_a(r) ? version * 100 + i : 7);
        check_ok((is_a(r) ? tb_send : tb_recv)(batch, NULL, &moves));
        check_ok(tb_wait(moves, TB_COMMITTED, -1));
        tb_transfer_destroy(moves);
        for (int i = 0; !is_a(r) && i < (N + 2) * WIDE; i++) {
            int row = i / WIDE, column = i % WIDE;
            int wanted = column >= N ? 7 : row == 0 || row == N + 1 ? 0 : version * 100 + (row - 1) * N + column;
            check(memory[i] == wanted);
        }
    }
    meet(r);
    tb_batch_destroy(batch);
    tb_pair_destroy(pair);
    tb_free(memory);
}

static void test_padded(void **state) {
    (void)state;
    run_ranks(padded, 1, 1, NULL);
}

/* Cancelled when all has arrived: nobody has it, or everybody. */
static void cancelled(rank *r) {
    setup s;
    set_up(r, &s, "mesh=1 place=R", "mesh=3 place=S0", 60, 6, &shadow_opts);
    move(r, &s, 1);
    for (uint32_t version = 2; version < 12; version++) {
        tb_transfer *t = NULL;
        uint64_t now, before;
        bool is_torn;
        check_ok(tb_batch_version(s.batch, s.pair, &before, &is_torn));
        if (is_a(r))
            part_fill(&s.w, version);
        if (!is_a(r))
            check_ok(tb_recv(s.batch, NULL, &t));
        meet(r); /* who comes when it is given up waits for the next one */
        if (is_a(r))
            check_ok(tb_send(s.batch, NULL, &t));
        if (!is_a(r) && (uint32_t)r->index == version % 3) {
            tb_status status = tb_wait(t, TB_ARRIVED, -1);
            check(status == TB_OK || status == TB_CANCELLED);
            tb_cancel(t);
        }
        tb_status status = tb_wait(t, TB_COMMITTED, -1);
        if (status != TB_OK)
            check_fails(status, TB_CANCELLED, "cancelled");
        check_ok(tb_batch_version(s.batch, s.pair, &now, &is_torn));
        check(is_a(r) || now == (status == TB_OK ? version : before));
        check(is_a(r) || part_holds(&s.w, (uint32_t)now));
        tb_transfer_destroy(t);
        meet(r); /* versions count what the sender has begun, whatever became of it */
    }
    tear_down(&s);
}

static void test_cancelled(void **state) {
    (void)state;
    run_ranks(cancelled, 1, 3, NULL);
}

/* ---- In place ---------------------------------------------------------------------------------------------------- */

/* The first group is there and not taken, so the second can't come. */
static void hold_first_group(const tb_transfer *t) {
    tb_transfer_state state = {.size = sizeof state};
    int64_t deadline_ms = tb__now_ms() + PATIENCE_MS;
    for (tb_transfer_query(t, &state); state.groups_done == 0; tb_transfer_query(t, &state)) {
        struct pollfd news = {.fd = tb_transfer_fd(t), .events = POLLIN};
        check(tb__now_ms() < deadline_ms);
        poll(&news, 1, 1000);
    }
}

static void torn(rank *r) {
    setup s;
    part second;
    tb_batch_opts opts = {.size = sizeof opts, .group_window = 1};
    const char *layout = "mesh=1 place=R";
    part_init(&s.w, layout, 0, 8, 6);
    part_init(&second, layout, 0, 8, 6);
    check_ok(tb_pair_create(r->world, "p", other_group(r), layout, NULL, &s.pair));
    check_ok(tb_batch_create(r->world, "step", &opts, &s.batch));
    tb_tensor w = part_tensor(&s.w), x = part_tensor(&second);
    x.group = 1;
    check_ok(tb_batch_add(s.batch, s.pair, "w", &w));
    check_ok(tb_batch_add(s.batch, s.pair, "x", &x));
    for (uint32_t version = 1; version <= 3; version++) {
        part_fill(&s.w, is_a(r) ? version : 9);
        part_fill(&second, is_a(r) ? version : 9);
        tb_transfer *t = begin(r, &s);
        if (version != 2) {
            check_ok(tb_wait(t, TB_COMMITTED, -1));
            check_version(&s, is_a(r) ? 0 : version, false);
        } else if (is_a(r)) {
            check_fails(tb_wait(t, TB_COMMITTED, -1), TB_CANCELLED, "cancelled");
            check(!strstr(tb_error_detail(), "torn"));
        } else {
            hold_first_group(t);
            tb_cancel(t);
            check_fails(tb_wait(t, TB_COMMITTED, -1), TB_CANCELLED, "torn");
            check_version(&s, 1, true);
        }
        tb_transfer_destroy(t);
    }
    meet(r);
    tear_down(&s);
    part_fini(&second);
}

static void test_torn(void **state) {
    (void)state;
    run_ranks(torn, 1, 1, NULL);
}

/* ---- What is refused --------------------------------------------------------------------------------------------- */

static void differ(rank *r) {
    setup s;
    tb_batch_opts opts = {.size = sizeof opts, .commit = !is_a(r) && r->index == 1 ? TB_SHADOW : TB_IN_PLACE};
    const char *layout = is_a(r) ? "mesh=1 place=R" : "mesh=2 place=R";
    part_init(&s.w, layout, r->index, 4, 4);
    check_ok(tb_pair_create(r->world, "p", other_group(r), layout, NULL, &s.pair));
    check_ok(tb_batch_create(r->world, "step", &opts, &s.batch));
    tb_tensor w = part_tensor(&s.w);
    check_ok(tb_batch_add(s.batch, s.pair, "w", &w));
    check_fails(tb_batch_register(s.batch, 0), TB_CONFLICT, "(b 1) commit batch 'step' differently: in place and shad");
    meet(r);
    tear_down(&s);
}

/* Both ways at once through the same memory. */
static void crossing(rank *r) {
    setup s;
    tb_transfer *first = NULL, *second = NULL;
    set_up(r, &s, "mesh=1 place=R", "mesh=1 place=R", 4, 4, &shadow_opts);
    check_ok(tb_recv(s.batch, NULL, &first));
    check_fails(tb_send(s.batch, NULL, &second), TB_REFUSED, "tensor 'w' is being sent, and would be overwritten");
    meet(r);
    tb_transfer_destroy(first);
    tear_down(&s);
}

static void test_refused(void **state) {
    (void)state;
    tb_batch *batch = NULL;
    tb_batch_opts opts = {.size = sizeof opts, .commit = (tb_commit)7};
    check_fails(tb_batch_create(NULL, "b", &opts, &batch), TB_INVALID, "commit is 7");
    run_ranks(differ, 1, 2, NULL);
    run_ranks(crossing, 1, 1, NULL);
}

/* ---- Doubts ------------------------------------------------------------------------------------------------------ */

/* The store, in a process that can be stopped. */
static pid_t serve(const char *url) {
    int ready[2];
    check(pipe(ready) == 0);
    fflush(NULL);
    pid_t pid = fork();
    check(pid >= 0);
    if (pid == 0) {
        tb__store_server *server;
        bool is_good = tb__store_server_start(url, "", &server) == TB_OK && write(ready[1], "", 1) == 1;
        if (!is_good)
            _exit(1);
        for (;;)
            pause();
    }
    char byte;
    check(read(ready[0], &byte, 1) == 1);
    close(ready[0]);
    close(ready[1]);
    return pid;
}

typedef struct stopping {
    pid_t *server;
    atomic_uint_least64_t *found; /* by rank of b: the version after it was resolved */
} stopping;

/* Nobody hears from the store, so nobody knows; when it answers again, all find the same. */
static void doubts(rank *r) {
    const stopping *stop = r->scene->shared;
    setup s;
    tb_transfer_opts soon = {.size = sizeof soon, .timeout_ms = SOON_MS};
    tb_transfer_opts later = {.size = sizeof later, .timeout_ms = 5000};
    tb_transfer *t = NULL;
    set_up(r, &s, "mesh=1 place=R", "mesh=2 place=S0", 8, 6, &shadow_opts);
    move(r, &s, 1);
    meet(r);
    if (is_a(r)) {
        part_fill(&s.w, 2);
        int status;
        check(kill(*stop->server, SIGSTOP) == 0);
        check(waitpid(*stop->server, &status, WUNTRACED) == *stop->server && WIFSTOPPED(status));
    }
    meet(r);
    if (is_a(r)) {
        t = begin(r, &s);
        check_ok(tb_wait(t, TB_RELEASED, -1));
        check_fails(tb_wait(t, TB_COMMITTED, SOON_MS), TB_TIMEOUT, "to commit");
        check_fails(tb_wait(t, TB_COMMITTED, -1), TB_IN_DOUBT, "): whether version 2 of batch 'step'");
    } else {
        /* the lead asks by itself, until its deadline */
        check_ok(tb_recv(s.batch, r->index == 0 ? &later : NULL, &t));
        check_ok(tb_wait(t, TB_ARRIVED, -1));
        if (r->index == 1)
            tb_cancel(t);
        check_fails(tb_wait(t, TB_COMMITTED, -1), TB_IN_DOUBT, "version 2 of batch 'step'");
        check(part_holds(&s.w, 1));
        check_version(&s, 1, false);
    }
    meet(r);
    tb_transfer_destroy(t);
    if (!is_a(r)) {
        check_fails(tb_recv(s.batch, &soon, &t), TB_IN_DOUBT, "not known");
        check_fails(tb_send(s.batch, &soon, &t), TB_IN_DOUBT, "not known");
    }
    meet(r);
    if (is_a(r))
        check(kill(*stop->server, SIGCONT) == 0);
    witness seen = {.w = &s.w, .before = 1, .after = 2};
    tb_transfer_opts told = {.size = sizeof told, .committing = on_committing, .arg = &seen};
    if (is_a(r))
        part_fill(&s.w, 3);
    if (!is_a(r)) {
        check_ok(tb_recv(s.batch, &told, &t));
        uint64_t version;
        bool is_torn;
        check_ok(tb_batch_version(s.batch, s.pair, &version, &is_torn));
        check(version == 1 || version == 2);
        check(part_holds(&s.w, (uint32_t)version));
        check(atomic_load(&seen.calls) == (version == 2 ? 2 : 0) && !atomic_load(&seen.is_wrong));
        seen.before = (uint32_t)version;
        seen.after = 3;
        atomic_store(&stop->found[r->index], version);
        meet(r);
        check(atomic_load(&stop->found[0]) == atomic_load(&stop->found[1]));
        meet(r);
    } else {
        meet(r);
        check_ok(tb_send(s.batch, NULL, &t));
        meet(r);
    }
    check_ok(tb_wait(t, TB_COMMITTED, -1));
    check(part_holds(&s.w, 3));
    tb_transfer_destroy(t);
    meet(r);
    tear_down(&s);
}

#ifdef TB_SLOW_DEVICE
/* The only receiver finds out later that its version was committed; its device does not finish the copy then. */
static void apply_late(rank *r) {
    const stopping *stop = r->scene->shared;
    setup s;
    tb_transfer_opts soon = {.size = sizeof soon, .timeout_ms = SOON_MS};
    tb_transfer *t = NULL;
    set_up(r, &s, "mesh=1 place=R", "mesh=1 place=R", 8, 6, &shadow_opts);
    move(r, &s, 1);
    meet(r);
    if (is_a(r)) {
        int status;
        check(kill(*stop->server, SIGSTOP) == 0);
        check(waitpid(*stop->server, &status, WUNTRACED) == *stop->server && WIFSTOPPED(status));
    }
    meet(r);
    check_ok((is_a(r) ? tb_send : tb_recv)(s.batch, is_a(r) ? NULL : &soon, &t));
    check_fails(tb_wait(t, TB_COMMITTED, -1), TB_IN_DOUBT, "version 2 of batch 'step'");
    tb_transfer_destroy(t);
    meet(r);
    if (is_a(r))
        check(kill(*stop->server, SIGCONT) == 0);
    meet(r);
    if (!is_a(r) && is_slow_memory(s.w.data)) {
        slow_device_hold_run(0);
        for (int i = 0; i < 2; i++) {
            int64_t began_ms = tb__now_ms();
            check_fails(tb_recv(s.batch, &soon, &t), TB_TIMEOUT, i ? "has not finished" : "a device of rank");
            check(tb__now_ms() - began_ms < PATIENCE_MS / 2);
        }
        slow_device_let_go();
    }
    meet(r);
    tear_down(&s);
}
#endif

static void run_stoppable(void (*body)(rank *r), int32_t nb) {
    scene s;
    scene_init(&s);
    pid_t server = serve(s.url);
    atomic_uint_least64_t found[2] = {0, 0};
    stopping stop = {.server = &server, .found = found};
    s.body = body;
    s.nranks = 1 + nb;
    s.shared = &stop;
    for (int32_t i = 0; i < s.nranks; i++) {
        rank *r = &s.ranks[i];
        *r = (rank){.scene = &s, .group = i < 1 ? "a" : "b", .index = i < 1 ? i : i - 1, .size = i < 1 ? 1 : nb};
        check(pthread_create(&r->thread, NULL, rank_main, r) == 0);
    }
    for (int i = 0; i < s.nranks; i++)
        pthread_join(s.ranks[i].thread, NULL);
    kill(server, SIGCONT);
    for (int i = 0; i < s.nranks; i++) {
        if (s.ranks[i].failure[0])
            print_error("%s\n", s.ranks[i].failure);
        tb_world_destroy(s.ranks[i].world);
    }
    kill(server, SIGKILL);
    waitpid(server, NULL, 0);
    char left[2][64];
    snprintf(left[0], sizeof *left, "%s/s", s.folder);
    snprintf(left[1], sizeof *left, "%s/s.lock", s.folder);
    unlink(left[0]);
    unlink(left[1]);
    check(!s.has_failed);
    scene_fini(&s);
}

static void test_doubts(void **state) {
    (void)state;
    run_stoppable(doubts, 2);
#ifdef TB_SLOW_DEVICE
    run_stoppable(apply_late, 1);
#endif
}

int main(void) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_doubts),         cmocka_unit_test(test_commits),
                                       cmocka_unit_test(test_one_is_missing), cmocka_unit_test(test_cancelled),
                                       cmocka_unit_test(test_padded),         cmocka_unit_test(test_torn),
                                       cmocka_unit_test(test_refused),        cmocka_unit_test(test_held),
                                       cmocka_unit_test(test_held_too_long),  cmocka_unit_test(test_overtaken)};
    return cmocka_run_group_tests_name("shadow", tests, NULL, NULL);
}
