/* A program that uses the bus as a script tells it: through a world of its own, or through an agent. It has the public
 * headers only, so that one source can be linked with any release.
 *
 * Commands are lines on standard input, words separated by tabs, options as key=value behind them. Each is answered
 * with one line: the status, then a tab and the sentence of a failure, or what was asked for. Objects are named by the
 * script: bus.py has what each command takes. */
#include "matrix.h"

#include "tensorbus/tensorbus.h"
#ifdef TB_PROGRAM_MPI
#include "tensorbus/mpi.h"
#endif

#include <inttypes.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <unistd.h>

enum { MAX_WORDS = 24, MAX_OBJECTS = 512, MAX_MEMBERS = 16, LINE = 8192 };
typedef struct batch {
    tb_batch *of_world;
    const memory *members[MAX_MEMBERS];
    const tb_pair *pairs[MAX_MEMBERS]; /* of the members */
    size_t nmembers;
} batch;

typedef struct transfer {
    tb_transfer *of_world;
    const batch *batch;
    const tb_pair *watched; /* whose tensors the callback looks at */
    bool is_send;
    pthread_mutex_t lock;
    char log[LINE];             /* what the callbacks saw */
    tb_transfer_state reported; /* by the last call of progress */
    bool has_reported, has_gone_back;
} transfer;

typedef struct object {
    char kind; /* 'p'air, 'b'atch, 'm'emory, 't'ransfer; 0: free */
    char key[64];
    union {
        tb_pair *pair;
        batch *batch;
        memory *memory;
        transfer *transfer;
    } as;
} object;

static object objects[MAX_OBJECTS];
static tb_world *world;
static char *words[MAX_WORDS];
static int nwords;

/* ---- Answers --------------------------------------------------------------------------------------------------- */

static const char *const status_names[] = {"TB_OK",       "TB_INVALID",   "TB_NO_MEMORY", "TB_TOO_BIG",   "TB_REFUSED",
                                           "TB_IO",       "TB_INTERNAL",  "TB_TIMEOUT",   "TB_LOST",      "TB_DENIED",
                                           "TB_CONFLICT", "TB_CANCELLED", "TB_IN_DOUBT",  "TB_SUPERSEDED"};

static void answer(tb_status status) {
    printf("%s\t%s\n", status_names[-(int)status], status == TB_OK ? "" : tb_error_detail());
}

#define answer_values(...)                                                                                             \
    do {                                                                                                               \
        printf("TB_OK\t");                                                                                             \
        printf(__VA_ARGS__);                                                                                           \
        printf("\n");                                                                                                  \
    } while (0)

/* Only a script that is wrong gets here. */
static void give_up(const char *what, const char *which) {
    fprintf(stderr, "program: %s '%s'\n", what, which);
    exit(3);
}

static const char *word(int i) {
    if (i >= nwords)
        give_up("too few words for", words[0]);
    return words[i];
}

static long number(int i) {
    return strtol(word(i), NULL, 10);
}

static const char *option(const char *key) {
    size_t length = strlen(key);
    for (int i = 1; i < nwords; i++) {
        if (strncmp(words[i], key, length) == 0 && words[i][length] == '=')
            return words[i] + length + 1;
    }
    return NULL;
}

static long option_number(const char *key) {
    const char *text = option(key);
    return text ? strtol(text, NULL, 10) : 0;
}

/* ---- Objects --------------------------------------------------------------------------------------------------- */

static object *find(char kind, const char *key) {
    for (int i = 0; i < MAX_OBJECTS; i++) {
        if (objects[i].kind == kind && strcmp(objects[i].key, key) == 0)
            return &objects[i];
    }
    give_up("there is no object", key);
    return NULL;
}

static object *make(char kind, const char *key) {
    for (int i = 0; i < MAX_OBJECTS; i++) {
        if (!objects[i].kind) {
            objects[i].kind = kind;
            snprintf(objects[i].key, sizeof objects[i].key, "%s", key);
            return &objects[i];
        }
    }
    give_up("no room for", key);
    return NULL;
}

static void drop(object *o) {
    *o = (object){0};
}

/* ---- Memory ---------------------------------------------------------------------------------------------------- */

static int content_of_all(const batch *b, const tb_pair *pair) {
    int all = IS_MIXED;
    bool is_first = true;
    for (size_t i = 0; i < b->nmembers; i++) {
        if (b->pairs[i] != pair)
            continue;
        int one = memory_content(b->members[i]);
        if (!is_first && one != all)
            return IS_MIXED;
        all = one;
        is_first = false;
    }
    return all;
}

/* memory KEY alloc|malloc LAYOUT SEAT ROWS COLUMNS TENSOR */
static void do_memory(void) {
    memory *m = NULL;
    bool is_shared = strcmp(word(2), "alloc") == 0;
    tb_status status = memory_create(is_shared, word(3), (int32_t)number(4), number(5), number(6), word(7), &m);
    if (status == TB_OK)
        make('m', word(1))->as.memory = m;
    answer(status);
}

static void do_fill(void) {
    memory_fill(find('m', word(1))->as.memory, (uint32_t)number(2));
    answer(TB_OK);
}

static void do_poison(void) {
    memory_poison(find('m', word(1))->as.memory);
    answer(TB_OK);
}

static void do_look(void) {
    char text[16];
    answer_values("%s", content_name(memory_content(find('m', word(1))->as.memory), text));
}

static void do_free(void) {
    object *o = find('m', word(1));
    memory_destroy(o->as.memory);
    drop(o);
    answer(TB_OK);
}

/* ---- Worlds, clients, pairs ------------------------------------------------------------------------------------ */

static void do_release(void) {
    answer_values("%s", tb_version_string());
}

/* join URL GROUP INDEX SIZE; an MPI program has its URL, index and size from MPI */
static void do_join(void) {
    tb_world_opts opts = {.size = sizeof opts,
                          .token = option("token"),
                          .timeout_ms = (int)option_number("timeout"),
                          .transport = option("transport"),
                          .workers = 1,
                          .host = option("host")};
#ifdef TB_PROGRAM_MPI
    answer(tb_world_from_mpi(MPI_COMM_WORLD, word(2), &opts, &world));
#else
    answer(tb_world_join(word(1), word(2), (int32_t)number(3), (int32_t)number(4), &opts, &world));
#endif
}

static void do_enter(void) {
    answer(tb_world_enter(world, word(1), (int32_t)number(2), (int32_t)number(3)));
}

static void do_rank(void) {
    answer_values("%" PRId32 "\t%" PRIu64, tb_world_rank(world), tb_world_incarnation(world));
}

static void do_leave(void) {
    tb_world_destroy(world);
    world = NULL;
    answer(TB_OK);
}

/* connect SOCKET: joins through an agent, whichever seat that has. */
static void do_connect(void) {
    char url[200];
    tb_world_opts opts = {.size = sizeof opts,
                          .timeout_ms = (int)option_number("timeout"),
                          .token = option("token"),
                          .name = option("name")};
    tb_world_destroy(world);
    world = NULL;
    snprintf(url, sizeof url, "agent:%s", word(1));
    answer(tb_world_join(url, NULL, 0, 0, &opts, &world));
}

/* pair KEY NAME REMOTE LAYOUT */
static void do_pair(void) {
    tb_pair_opts opts = {.size = sizeof opts,
                         .group = option("group"),
                         .timeout_ms = (int)option_number("timeout"),
                         .no_wait = option("no_wait") != NULL};
    tb_pair *pair = NULL;
    tb_status status = tb_pair_create(world, word(2), word(3), word(4), &opts, &pair);
    if (status == TB_OK)
        make('p', word(1))->as.pair = pair;
    answer(status);
}

static void do_drop_pair(void) {
    object *o = find('p', word(1));
    tb_pair_destroy(o->as.pair);
    drop(o);
    answer(TB_OK);
}

/* ---- Batches --------------------------------------------------------------------------------------------------- */

/* batch KEY NAME */
static void do_batch(void) {
    const char *commit = option("commit");
    tb_batch_opts opts = {.size = sizeof opts,
                          .bucket_size = option_number("bucket_size"),
                          .group_window = (uint32_t)option_number("group_window"),
                          .staged = option("staged") != NULL,
                          .snapshot = option("snapshot") != NULL,
                          .commit = commit && strcmp(commit, "shadow") == 0 ? TB_SHADOW : TB_IN_PLACE,
                          .checksum = option("checksum") != NULL};
    batch *b = calloc(1, sizeof *b);
    tb_status status = tb_batch_create(world, word(2), &opts, &b->of_world);
    if (status == TB_OK)
        make('b', word(1))->as.batch = b;
    else
        free(b);
    answer(status);
}

/* add BATCH PAIR TENSOR MEMORY */
static void do_add(void) {
    batch *b = find('b', word(1))->as.batch;
    const object *p = find('p', word(2));
    const memory *m = find('m', word(4))->as.memory;
    const char *rows = option("rows");
    tb_tensor t = {.size = sizeof t,
                   .data = m->data,
                   .dtype = TB_U32,
                   .ndim = 2,
                   .shape = {rows ? option_number("rows") : m->rows, m->columns},
                   .group = (uint32_t)option_number("group")};
    tb_status status = tb_batch_add(b->of_world, p->as.pair, word(3), &t);
    if (status == TB_OK && b->nmembers < MAX_MEMBERS) {
        b->pairs[b->nmembers] = p->as.pair;
        b->members[b->nmembers++] = m;
    }
    answer(status);
}

static void do_register(void) {
    const batch *b = find('b', word(1))->as.batch;
    int timeout_ms = (int)option_number("timeout");
    answer(tb_batch_register(b->of_world, timeout_ms));
}

static void do_remove(void) {
    const batch *b = find('b', word(1))->as.batch;
    const object *p = find('p', word(2));
    answer(tb_batch_remove_pair(b->of_world, p->as.pair));
}

static void free_batch(batch *b) {
    tb_batch_destroy(b->of_world);
    free(b);
}

static void do_drop_batch(void) {
    object *o = find('b', word(1));
    free_batch(o->as.batch);
    drop(o);
    answer(TB_OK);
}

/* What the pair's tensors have: version, is_torn. */
static void do_version(void) {
    const batch *b = find('b', word(1))->as.batch;
    const object *p = find('p', word(2));
    uint64_t version = 0;
    bool is_torn = false;
    tb_status status = tb_batch_version(b->of_world, p->as.pair, &version, &is_torn);
    if (status == TB_OK)
        answer_values("%" PRIu64 "\t%d", version, is_torn);
    else
        answer(status);
}

/* What was received through all pairs: version, is_torn, is_mixed. */
static void do_status(void) {
    tb_batch_state s = {.size = sizeof s};
    tb_status status = tb_batch_query(find('b', word(1))->as.batch->of_world, &s);
    if (status == TB_OK)
        answer_values("%" PRIu64 "\t%d\t%d", s.version, s.is_torn, s.is_mixed);
    else
        answer(status);
}

/* ---- Transfers ------------------------------------------------------------------------------------------------- */

static void add_to_log(transfer *t, const char *what, const char *text) {
    pthread_mutex_lock(&t->lock);
    size_t used = strlen(t->log);
    snprintf(t->log + used, sizeof t->log - used, " %s:%s", what, text);
    pthread_mutex_unlock(&t->lock);
}

static void on_committing(void *arg, bool is_done) {
    transfer *t = arg;
    char text[16];
    add_to_log(t, is_done ? "after" : "before", content_name(content_of_all(t->batch, t->watched), text));
}

static void on_progress(void *arg, const tb_transfer_state *state) {
    transfer *t = arg;
    char text[16];
    const tb_transfer_state *last = &t->reported;
    snprintf(text, sizeof text, "%u", state->events);
    if (!t->has_reported || last->events != state->events)
        add_to_log(t, "events", text);
    t->has_gone_back |= t->has_reported && (state->bytes_done < last->bytes_done ||
                                            state->groups_done < last->groups_done || (last->events & ~state->events));
    t->has_gone_back |= state->bytes_done > state->bytes_total || state->groups_done > state->groups_total;
    t->reported = *state;
    t->has_reported = true;
}

/* begin KEY BATCH send|recv */
static void do_begin(void) {
    transfer *t = calloc(1, sizeof *t);
    int timeout_ms = (int)option_number("timeout");
    bool skip_lost = option("skip_lost") != NULL, hold = option("hold") != NULL;
    pthread_mutex_init(&t->lock, NULL);
    t->batch = find('b', word(2))->as.batch;
    t->is_send = strcmp(word(3), "send") == 0;
    t->watched = option("watched") ? find('p', option("watched"))->as.pair : NULL;
    tb_transfer_opts opts = {.size = sizeof opts,
                             .timeout_ms = timeout_ms,
                             .progress = on_progress,
                             .arg = t,
                             .group = option("group"),
                             .committing = on_committing,
                             .skip_lost = skip_lost,
                             .hold = hold};
    tb_status status = (t->is_send ? tb_send : tb_recv)(t->batch->of_world, &opts, &t->of_world);
    if (status == TB_OK)
        make('t', word(1))->as.transfer = t;
    else
        free(t);
    answer(status);
}

static tb_event event_of(const char *name) {
    static const struct {
        const char *name;
        tb_event event;
    } events[] = {
        {"released", TB_RELEASED}, {"arrived", TB_ARRIVED}, {"committed", TB_COMMITTED}, {"decided", TB_DECIDED}};
    for (size_t i = 0; i < sizeof events / sizeof *events; i++) {
        if (strcmp(name, events[i].name) == 0)
            return events[i].event;
    }
    give_up("there is no event", name);
    return TB_RELEASED;
}

/* wait KEY EVENT MS */
static void do_wait(void) {
    transfer *t = find('t', word(1))->as.transfer;
    tb_event event = event_of(word(2));
    int timeout_ms = (int)number(3);
    answer(tb_wait(t->of_world, event, timeout_ms));
}

/* wait_group KEY GROUP MS */
static void do_wait_group(void) {
    answer(tb_wait_group(find('t', word(1))->as.transfer->of_world, (uint32_t)number(2), (int)number(3)));
}

static void do_proceed(void) {
    transfer *t = find('t', word(1))->as.transfer;
    answer(tb_proceed(t->of_world));
}

static void do_cancel(void) {
    tb_cancel(find('t', word(1))->as.transfer->of_world);
    answer(TB_OK);
}

static void answer_state(const tb_transfer_state *s) {
    answer_values("%s\t%u\t%" PRIu64 "\t%" PRIu64 "\t%" PRId64 "\t%" PRId64 "\t%u\t%u", status_names[-(int)s->status],
                  s->events, s->attempt, s->version, s->bytes_done, s->bytes_total, s->groups_done, s->groups_total);
}

/* status, events, attempt, version, bytes_done, bytes_total, groups_done, groups_total */
static void do_query(void) {
    const transfer *t = find('t', word(1))->as.transfer;
    tb_transfer_state s = {.size = sizeof s};
    tb_status status = tb_transfer_query(t->of_world, &s);
    if (status != TB_OK) {
        answer(status);
        return;
    }
    answer_state(&s);
}

/* Of one pair, as above. */
static void do_query_pair(void) {
    const transfer *t = find('t', word(1))->as.transfer;
    const object *p = find('p', word(2));
    tb_transfer_state s = {.size = sizeof s};
    tb_status status = tb_transfer_pair(t->of_world, p->as.pair, &s);
    if (status != TB_OK) {
        answer(status);
        return;
    }
    answer_state(&s);
}

/* Whether the descriptor is readable within so many ms. */
static void do_readable(void) {
    const transfer *t = find('t', word(1))->as.transfer;
    struct pollfd fd = {.fd = tb_transfer_fd(t->of_world), .events = POLLIN};
    answer_values("%d", poll(&fd, 1, (int)number(2)) == 1);
}

/* What the callbacks saw; whether anything has gone back; the last events and bytes that progress was told. */
static void do_log(void) {
    transfer *t = find('t', word(1))->as.transfer;
    pthread_mutex_lock(&t->lock);
    answer_values("%s\t%d\t%u\t%" PRId64, *t->log ? t->log + 1 : "", t->has_gone_back, t->reported.events,
                  t->reported.bytes_done);
    pthread_mutex_unlock(&t->lock);
}

static void free_transfer(transfer *t) {
    tb_transfer_destroy(t->of_world);
    pthread_mutex_destroy(&t->lock);
    free(t);
}

static void do_end(void) {
    object *o = find('t', word(1));
    free_transfer(o->as.transfer);
    drop(o);
    answer(TB_OK);
}

/* From now on an agent that has no capabilities may not look at this process. */
static void do_close_to_agents(void) {
    prctl(PR_SET_DUMPABLE, 0);
    answer(TB_OK);
}

/* ---- Commands -------------------------------------------------------------------------------------------------- */

static const struct {
    const char *name;
    void (*run)(void);
} commands[] = {
#define COMMAND(name)                                                                                                  \
    { #name, do_##name }
    COMMAND(memory),         COMMAND(fill),       COMMAND(poison),     COMMAND(look),    COMMAND(free),
    COMMAND(release),        COMMAND(join),       COMMAND(enter),      COMMAND(rank),    COMMAND(leave),
    COMMAND(connect),        COMMAND(pair),       COMMAND(drop_pair),  COMMAND(batch),   COMMAND(add),
    COMMAND(register),       COMMAND(remove),     COMMAND(drop_batch), COMMAND(version), COMMAND(status),
    COMMAND(begin),          COMMAND(wait),       COMMAND(wait_group), COMMAND(proceed), COMMAND(cancel),
    COMMAND(query),          COMMAND(query_pair), COMMAND(readable),   COMMAND(log),     COMMAND(end),
    COMMAND(close_to_agents)
#undef COMMAND
};

static void run(char *line) {
    nwords = 0;
    line[strcspn(line, "\n")] = 0;
    for (char *rest = line; rest && nwords < MAX_WORDS;)
        words[nwords++] = strsep(&rest, "\t");
    for (size_t i = 0; i < sizeof commands / sizeof *commands; i++) {
        if (strcmp(words[0], commands[i].name) == 0) {
            commands[i].run();
            fflush(stdout);
            return;
        }
    }
    give_up("there is no command", words[0]);
}

static void free_all(void) {
    for (const char *kind = "tbpm"; *kind; kind++) {
        for (int i = 0; i < MAX_OBJECTS; i++) {
            object *o = &objects[i];
            if (o->kind != *kind)
                continue;
            if (*kind == 't')
                free_transfer(o->as.transfer);
            else if (*kind == 'b')
                free_batch(o->as.batch);
            else if (*kind == 'p')
                tb_pair_destroy(o->as.pair);
            else
                memory_destroy(o->as.memory);
        }
    }
    tb_world_destroy(world);
}

int main(int argc, char **argv) {
    static char line[LINE];
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    prctl(PR_SET_PTRACER, PR_SET_PTRACER_ANY, 0, 0, 0); /* an agent reads memory that is not of tb_alloc */
#ifdef TB_PROGRAM_MPI
    /* Ranks have no standard input of their own: each reads FOLDER/RANK.in, and writes FOLDER/RANK.out. */
    int provided, rank;
    char path[200];
    MPI_Init_thread(&argc, &argv, MPI_THREAD_MULTIPLE, &provided);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    snprintf(path, sizeof path, "%s/%d.in", argv[1], rank);
    if (!freopen(path, "re", stdin))
        give_up("can't open", path);
    snprintf(path, sizeof path, "%s/%d.out", argv[1], rank);
    if (!freopen(path, "we", stdout))
        give_up("can't open", path);
#else
    (void)argc;
    (void)argv;
#endif
    while (fgets(line, sizeof line, stdin))
        run(line);
    free_all();
#ifdef TB_PROGRAM_MPI
    MPI_Finalize();
#endif
    return 0;
}
