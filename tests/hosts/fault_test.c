/* Faults between hosts. Two trainers on host 0 send to two engines of two ranks, one on host 1 and one on host 2, in
 * the middle of which something happens to the second engine:
 *
 *   fault_test kill    one of its ranks is killed
 *   fault_test cut     its host is unplugged, which kernels would not notice for minutes
 *   fault_test drop    all hosts lose 5% of what they receive
 *
 * Whatever happens, everybody is told by the deadline: that all is well, and then every element is right, or what is
 * wrong and with whom. Then the rest move the next version without those that were lost. */
#include "bus/store/server.h"
#include "tests/hosts/board.h"

#include <inttypes.h>
#include <signal.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

enum { NTRAINERS = 2, NENGINES = 2, SEATS = 2 /* of each group */ };
/* 8 MiB to each engine, through a link that takes 40 Mbit/s. Each trainer sends each rank 16 buckets, of a tensor each:
 * when the first has come, most of the version is still to be sent. */
enum { NTENSORS = 16, ROWS = 128 /* of each tensor */, COLUMNS = 1024, NVERSIONS = 3 };
enum { PART = ROWS * COLUMNS / 2, NELEMENTS = NTENSORS * PART }; /* of each rank: in a tensor, and in all */
enum { BUCKET = PART / 2 * sizeof(float) };
enum { NOTICE_MS = 20000 }; /* less than the deadline */

static const char *const groups[] = {"trainer", "near", "far"};
static const char *const names[NSEATS] = {"trainer 0", "trainer 1", "near 0", "near 1", "far 0", "far 1"};

/* ---- In a rank's process ----------------------------------------------------------------------------------------- */

typedef struct rank {
    int number, seat, group;
    tb_world *world;
    tb_pair *pair[NENGINES];
    tb_batch *batch;
    float *w;
} rank;

static void must(const rank *r, tb_status status) {
    if (status == TB_OK)
        return;
    fprintf(stderr, "%s: %s: %s\n", name_of(r->number), tb_status_string(status), tb_error_detail());
    exit(1);
}

static float value(int version, int64_t index) {
    return (float)((index * 7 + (int64_t)version * 1000003) % (1 << 24));
}

/* Trainers have rows, engines have columns. */
static int64_t index_of(const rank *r, int64_t i) {
    int64_t width = COLUMNS / SEATS, tensor = i / PART * ROWS * COLUMNS, at = i % PART;
    return tensor + (r->group == 0 ? r->seat * (int64_t)(ROWS / NTRAINERS) * COLUMNS + at
                                   : at / width * COLUMNS + r->seat * width + at % width);
}

static float (*tensors)[NELEMENTS]; /* by rank; the first process looks at them, too */

static void add_pair(rank *r, int engine) {
    char name[24];
    snprintf(name, sizeof name, "to %s", groups[engine + 1]);
    must(r, tb_pair_create(r->world, name, r->group == 0 ? groups[engine + 1] : groups[0],
                           r->group == 0 ? "mesh=2 place=S0" : "mesh=2 place=S1", NULL, &r->pair[engine]));
    for (int i = 0; i < NTENSORS; i++) {
        tb_tensor w = {
            .size = sizeof w, .data = r->w + (size_t)i * PART, .dtype = TB_F32, .ndim = 2, .shape = {ROWS, COLUMNS}};
        snprintf(name, sizeof name, "w%d", i);
        must(r, tb_batch_add(r->batch, r->pair[engine], name, &w));
    }
}

static void open_rank(rank *r, const char *url) {
    tb_world_opts opts = {.size = sizeof opts, .timeout_ms = JOIN_MS, .token = hosts_token};
    tb_batch_opts batch = {.size = sizeof batch, .bucket_size = BUCKET};
    must(r, tb_world_join(url, groups[r->group], r->seat, SEATS, &opts, &r->world));
    must(r, tb_batch_create(r->world, "step", &batch, &r->batch));
    for (int engine = 0; engine < NENGINES; engine++) {
        if (r->group == 0 || r->group == engine + 1)
            add_pair(r, engine);
    }
    must(r, tb_batch_register(r->batch, 0));
}

static void note_progress(void *arg, const tb_transfer_state *state) {
    const rank *r = arg;
    if (state->bytes_done > 0)
        atomic_store(&shared->seat[r->number].moves, true);
}

static tb_status move(rank *r, int version) {
    tb_transfer_opts opts = {.size = sizeof opts,
                             .timeout_ms = DEADLINE_MS,
                             .progress = note_progress,
                             .arg = r,
                             .skip_lost = version == NVERSIONS};
    tb_transfer *t = NULL;
    tb_status status = (r->group == 0 ? tb_send : tb_recv)(r->batch, &opts, &t);
    if (status == TB_OK)
        status = tb_wait(t, TB_COMMITTED, -1);
    tb_transfer_destroy(t);
    return status;
}

static void check(const rank *r, int version) {
    for (int64_t i = 0; i < NELEMENTS; i++) {
        if (r->w[i] != value(version, index_of(r, i))) {
            fprintf(stderr, "%s: version %d is said to be there, but element %" PRId64 " is %.0f, not %.0f\n",
                    name_of(r->number), version, i, r->w[i], value(version, index_of(r, i)));
            exit(1);
        }
    }
}

static void run_version(rank *r, int version) {
    for (int64_t i = 0; i < NELEMENTS; i++)
        r->w[i] = r->group == 0 ? value(version, index_of(r, i)) : -1;
    tb_status status = move(r, version);
    note_status(r->number, status);
    if (status == TB_OK && r->group > 0)
        check(r, version);
    /* Late is not lost: whoever does not want to wait for them again goes on without them. */
    if (status == TB_TIMEOUT && r->group == 0)
        must(r, tb_batch_remove_pair(r->batch, r->pair[NENGINES - 1]));
    atomic_store(&shared->seat[r->number].done, version + 1);
}

static _Noreturn void play(int number, const char *url) {
    int group = number / SEATS;
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    hosts_enter(group);
    rank r = {.number = number, .seat = number % SEATS, .group = group, .w = tensors[number]};
    open_rank(&r, url);
    atomic_store(&shared->seat[number].done, 1);
    for (int version = 1; version <= NVERSIONS; version++) {
        while (atomic_load(&shared->next) < version)
            nap(); /* the first process ends us if it does not come so far */
        run_version(&r, version);
    }
    tb_batch_destroy(r.batch);
    for (int i = 0; i < NENGINES; i++)
        tb_pair_destroy(r.pair[i]);
    tb_world_destroy(r.world);
    exit(0);
}

static _Noreturn void serve(const char *url) {
    tb__store_server *server;
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    hosts_enter(0);
    if (tb__store_server_start(url, hosts_token, &server) != TB_OK) {
        fprintf(stderr, "the store: %s\n", tb_error_detail());
        exit(1);
    }
    atomic_store(&shared->next, 0);
    for (;;)
        pause();
}

/* ---- In the first process ---------------------------------------------------------------------------------------- */

static pid_t pids[NSEATS];

/* Whoever ends before it is over has failed, and has said why. */
static void look_at(int i) {
    int how;
    if (pids[i] > 0 && waitpid(pids[i], &how, WNOHANG) == pids[i]) {
        pids[i] = 0;
        fail("%s has ended", name_of(i));
    }
}

static void await_done(int version, int patience_ms, unsigned whom) {
    int64_t deadline = tb__now_ms() + patience_ms;
    for (int i = 0; i < NSEATS; i++) {
        while (whom & 1u << i && atomic_load(&shared->seat[i].done) < version + 1) {
            if (tb__now_ms() > deadline)
                fail("%s has not come to the end of version %d", name_of(i), version);
            look_at(i);
            nap();
        }
    }
}

static void must_be_well(int i, int version) {
    if (shared->seat[i].status != TB_OK)
        fail("%s does not get version %d", name_of(i), version);
}

/* What a trainer says has been sent has arrived. */
static void must_have_sent(int trainer, int version) {
    for (int engine = NTRAINERS; engine < NSEATS && shared->seat[trainer].status == TB_OK; engine++) {
        rank r = {.number = engine, .seat = engine % SEATS, .group = engine / SEATS};
        for (int64_t i = 0; i < NELEMENTS; i++) {
            int64_t index = index_of(&r, i);
            bool is_its = index / COLUMNS % ROWS / (ROWS / NTRAINERS) == trainer;
            if (is_its && tensors[engine][i] != value(version, index))
                fail("%s says that version %d has been sent, but element %" PRId64 " of %s is %.0f", name_of(trainer),
                     version, i, name_of(engine), tensors[engine][i]);
        }
    }
}

/* The sentence has to name a rank of the other side. */
static void must_name(int i, const char *group) {
    const char *sentence = shared->seat[i].sentence;
    char name[32];
    snprintf(name, sizeof name, "(%s ", group);
    if (shared->seat[i].status == TB_OK)
        fail("%s thinks that all is well", name_of(i));
    if (!strstr(sentence, name))
        fail("%s does not name a rank of %s", name_of(i), group);
}

/* And it is lost, not only late, so that the next version skips it. */
static void must_miss(int i, const char *group) {
    must_name(i, group);
    if (shared->seat[i].status != TB_LOST || !strstr(shared->seat[i].sentence, "nothing has come from it for 13 s"))
        fail("%s has not missed a rank of %s", name_of(i), group);
}

enum { ALL = (1 << NSEATS) - 1, NEAR = 15, FAR = ALL & ~NEAR };

static void start_all(const char *url) {
    board_make(names);
    tensors = mmap(NULL, NSEATS * sizeof *tensors, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (tensors == MAP_FAILED)
        fail("there is no memory for the tensors");
    atomic_store(&shared->next, -1); /* until there is a store */
    if (fork() == 0)
        serve(url);
    for (int64_t deadline = tb__now_ms() + JOIN_MS; atomic_load(&shared->next) < 0; nap()) {
        if (tb__now_ms() > deadline)
            fail("there is no store");
    }
    for (int i = 0; i < NSEATS; i++) {
        pids[i] = fork();
        if (pids[i] == 0)
            play(i, url);
    }
    await_done(0, JOIN_MS + SLACK_MS, ALL);
}

/* The first version is whole; the second is slow, and what happens, happens in the middle of it. */
static void run_until_middle(void) {
    begin(1);
    await_done(1, DEADLINE_MS + SLACK_MS, ALL);
    for (int i = 0; i < NSEATS; i++)
        must_be_well(i, 1);
    must_do("shape 0 40mbit");
    begin(2);
    await_middle(VICTIM - 1);
}

/* The third goes to those that are left. */
static void run_without(void) {
    must_do("shape 0 off");
    begin(3);
    await_done(3, DEADLINE_MS + SLACK_MS, NEAR);
    for (int i = 0; i < VICTIM - 1; i++)
        must_be_well(i, 3);
}

static void kill_rank(void) {
    run_until_middle();
    int64_t since_ms = tb__now_ms();
    kill(pids[VICTIM], SIGKILL);
    waitpid(pids[VICTIM], NULL, 0);
    pids[VICTIM] = 0;
    await_done(2, DEADLINE_MS + SLACK_MS, ALL & ~(1u << VICTIM));
    tell_all(since_ms);
    for (int i = 0; i < NTRAINERS; i++)
        must_have_sent(i, 2);
    for (int i = 0; i < NTRAINERS; i++)
        must_name(i, "far");
    for (int i = NTRAINERS; i < VICTIM - 1; i++)
        must_be_well(i, 2);
    must_name(VICTIM - 1, "far"); /* of its own group */
    run_without();
}

static void cut_link(void) {
    run_until_middle();
    int64_t since_ms = tb__now_ms();
    must_do("cut 2");
    await_done(2, NOTICE_MS, ALL);
    tell_all(since_ms);
    for (int i = 0; i < NTRAINERS; i++)
        must_have_sent(i, 2);
    for (int i = 0; i < NTRAINERS; i++)
        must_miss(i, "far");
    for (int i = NTRAINERS; i < VICTIM - 1; i++)
        must_be_well(i, 2);
    for (int i = VICTIM - 1; i < NSEATS; i++)
        must_miss(i, "trainer");
    run_without();
}

/* TCP makes good for it; a rank that is not well has to say with whom. */
static void drop_packets(void) {
    static const char *const others[] = {"far", "trainer", "trainer"};
    run_until_middle();
    for (int host = 0; host < 3; host++) {
        char what[32];
        snprintf(what, sizeof what, "drop %d 5", host);
        must_do(what);
    }
    await_done(2, DEADLINE_MS + SLACK_MS, ALL);
    int nwell = 0;
    for (int i = 0; i < NSEATS; i++) {
        if (shared->seat[i].status == TB_OK)
            nwell++;
        else if (!strstr(shared->seat[i].sentence, "(near "))
            must_name(i, others[i / SEATS]);
    }
    printf("%d of %d ranks have a version of which 5%% of the packets were lost\n", nwell, NSEATS);
    for (int host = 0; host < 3; host++) {
        char what[32];
        snprintf(what, sizeof what, "drop %d 0", host);
        must_do(what);
    }
    run_without();
}

int main(int argc, char **argv) {
    static const struct {
        const char *name;
        void (*run)(void);
    } faults[] = {{"kill", kill_rank}, {"cut", cut_link}, {"drop", drop_packets}};
    char url[64];
    if (hosts_count() != 3) {
        fprintf(stderr, "to be run by tests/hosts/bed 3 -- %s FAULT\n", argv[0]);
        return 2;
    }
    hosts_need_ucx();
    hosts_store(url, sizeof url);
    for (size_t i = 0; argc > 1 && i < sizeof faults / sizeof *faults; i++) {
        if (strcmp(argv[1], faults[i].name) != 0)
            continue;
        start_all(url);
        faults[i].run();
        return 0; /* the ranks end with us */
    }
    fprintf(stderr, "the faults are kill, cut and drop\n");
    return 2;
}
