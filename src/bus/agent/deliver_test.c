/* What an agent writes into memory that it does not have mapped: a program receives from two groups at once, and gets
 * of each pair exactly what arrived, and nothing else. The program goes on writing what is its own meanwhile. */
#include "bus/agent/agent_test.h"

#include <sys/mman.h>

/* r receives u from x, and v from y 0 and y 1, half of it from each. */
static const char *const groups[] = {"r", "x", "y", "y"};

enum { ROWS = 64, COLUMNS = 40, WIDTH = COLUMNS + 8, GUARD = 0x0badcafe, NRANKS = 4 };

typedef struct scene_opts {
    agent_scene agents; /* first */
    tb_commit commit;
} scene_opts;

typedef struct member {
    rank *rank;
    bool is_r;
    program *client;
    program_batch *batch;
    uint32_t *u, *v; /* u has rows of WIDTH at r: the rest of them is the program's own */
    size_t u_nbytes;
} member;

static bool is_in(const rank *r, const char *group) {
    return strcmp(r->group, group) == 0;
}

static uint32_t value_of(uint32_t version, size_t row, size_t column) {
    return (version << 24) + (uint32_t)(row * COLUMNS + column);
}

/* The rows of v that a rank of y has. */
static size_t first_row(const member *p) {
    return is_in(p->rank, "y") ? (size_t)p->rank->index * ROWS / 2 : 0;
}

static size_t nrows(const member *p) {
    return is_in(p->rank, "y") ? ROWS / 2 : ROWS;
}

static void fill(uint32_t *data, size_t width, size_t first, size_t n, uint32_t version) {
    for (size_t i = 0; i < n; i++) {
        for (size_t j = 0; j < COLUMNS; j++)
            data[i * width + j] = value_of(version, first + i, j);
    }
}

static bool holds(const uint32_t *data, size_t width, uint32_t version) {
    for (size_t i = 0; i < ROWS; i++) {
        for (size_t j = 0; j < COLUMNS; j++) {
            if (data[i * width + j] != value_of(version, i, j))
                return false;
        }
    }
    return true;
}

/* What is between the rows of u. */
static void set_guards(const member *p, uint32_t value) {
    for (size_t i = 0; i < ROWS; i++) {
        for (size_t j = COLUMNS; j < WIDTH; j++)
            p->u[i * WIDTH + j] = value;
    }
}

static bool has_guards(const member *p, uint32_t value) {
    for (size_t i = 0; i < ROWS; i++) {
        for (size_t j = COLUMNS; j < WIDTH; j++) {
            if (p->u[i * WIDTH + j] != value)
                return false;
        }
    }
    return true;
}

static void add(member *p, const char *pair, const char *name, uint32_t *data, const int64_t *strides) {
    tb_tensor t = {
        .size = sizeof t, .data = data, .dtype = TB_U32, .ndim = 2, .shape = {ROWS, COLUMNS}, .strides = strides};
    check_ok(program_add(p->batch, pair, name, &t));
}

static void open_program(rank *r, member *p) {
    const scene_opts *o = (const scene_opts *)r->scene;
    static const int64_t strides[] = {WIDTH, 1};
    tb_batch_opts opts = {.size = sizeof opts, .commit = o->commit};
    *p = (member){.rank = r, .is_r = is_in(r, "r"), .client = open_client(r), .u_nbytes = sizeof *p->u * ROWS * WIDTH};
    p->u = mmap(NULL, p->u_nbytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    check(p->u != MAP_FAILED && (p->v = calloc(ROWS * COLUMNS, sizeof *p->v)));
    check_ok(program_batch_create(p->client, "step", &opts, &p->batch));
    if (!is_in(r, "y")) {
        check_ok(program_pair(p->client, "rx", p->is_r ? "x" : "r", "mesh=1 place=R", 0));
        add(p, "rx", "u", p->u, p->is_r ? strides : NULL);
    }
    if (!is_in(r, "x")) {
        check_ok(program_pair(p->client, "ry", p->is_r ? "y" : "r", p->is_r ? "mesh=1 place=R" : "mesh=2 place=S0", 0));
        add(p, "ry", "v", p->v, NULL);
    }
    check_ok(program_register(p->batch, 0));
}

static void close_program(member *p) {
    program_batch_destroy(p->batch);
    program_close(p->client);
    munmap(p->u, p->u_nbytes);
    free(p->v);
}

static void begin(const member *p, bool skip_lost, bool hold) {
    program_transfer_opts opts = {.no_wait = true, .skip_lost = skip_lost, .hold = hold};
    check_ok(program_transfer(p->batch, !p->is_r, &opts));
}

/* The agent has read the program's memory, and so many bytes have arrived. */
static void await_bytes(const member *p, int64_t nbytes) {
    program_status status = {0};
    int64_t deadline_ms = tb__now_ms() + PATIENCE_MS;
    do {
        check_ok(program_query(p->batch, &status));
        check(tb__now_ms() < deadline_ms);
    } while (status.bytes_total == 0 || status.bytes_done < nbytes);
}

/* Poisons what is received, or fills in what is sent. */
static void prepare(const member *p, uint32_t version) {
    if (p->is_r) {
        fill(p->u, WIDTH, 0, ROWS, 0xee);
        fill(p->v, COLUMNS, 0, ROWS, 0xee);
    } else if (is_in(p->rank, "x")) {
        fill(p->u, COLUMNS, 0, ROWS, version);
    } else {
        fill(p->v, COLUMNS, first_row(p), nrows(p), version);
    }
}

static void check_pair(const member *p, const char *pair, bool is_good, uint64_t version, bool is_torn) {
    program_pair_state state = {0};
    check_ok(program_query_pair(p->batch, pair, &state));
    check((state.status == TB_OK) == is_good && (state.error[0] == '\0') == is_good);
    check(state.version == version && state.is_torn == is_torn);
    check((strstr(state.error, "torn") != NULL) == (is_torn && strstr(state.error, "memory of process") == NULL));
}

static void check_status(const member *p, uint64_t version, bool is_mixed, bool is_torn) {
    program_status status = {0};
    check_ok(program_query(p->batch, &status));
    check(status.version == version && status.is_mixed == is_mixed && status.is_torn == is_torn);
    char *report, words[64];
    snprintf(words, sizeof words, "\"version\":%d,\"mixed\":%s", (int)version, is_mixed ? "true" : "false");
    check_ok(tb__agent_report(seat_of(p->rank)->agent, PATIENCE_MS, &report));
    bool is_told = strstr(report, words) != NULL;
    free(report);
    check(is_told);
}

/* A version that goes well everywhere. */
static void move_all(const member *p, uint32_t version) {
    prepare(p, version);
    if (p->is_r)
        set_guards(p, GUARD);
    meet(p->rank);
    check_ok(program_transfer(p->batch, !p->is_r, NULL));
    if (!p->is_r)
        return;
    check(holds(p->u, WIDTH, version) && holds(p->v, COLUMNS, version) && has_guards(p, GUARD));
    check_pair(p, "rx", true, version, false);
    check_pair(p, "ry", true, version, false);
    check_status(p, version, false, false);
}

/* ---- One pair fails -------------------------------------------------------------------------------------------- */

/* x sends, y 0 sends its half, y 1 leaves. */
static void one_fails(rank *r) {
    const scene_opts *o = (const scene_opts *)r->scene;
    bool is_shadow = o->commit == TB_SHADOW;
    member p;
    open_program(r, &p);
    move_all(&p, 1);
    prepare(&p, 2);
    meet(r);
    if (is_in(r, "x") || (is_in(r, "y") && r->index == 0)) {
        begin(&p, false, false);
    } else if (p.is_r) {
        begin(&p, false, false);
        await_bytes(&p, (int64_t)(sizeof *p.u * COLUMNS * (ROWS + ROWS / 2)));
        set_guards(&p, GUARD + 1);
    }
    meet(r);
    if (is_in(r, "y") && r->index == 1) {
        program_batch_destroy(p.batch);
        p.batch = NULL;
    }
    if (p.is_r) { /* in place, the pairs go on without each other; shadows are all written, or none */
        check_fails(program_wait(p.batch, false, TB_COMMITTED, PATIENCE_MS), TB_LOST, "y 1");
        check(!strstr(tb_error_detail(), "torn"));
        check(holds(p.u, WIDTH, is_shadow ? 0xee : 2) && has_guards(&p, GUARD + 1));
        check(holds(p.v, COLUMNS, 0xee));
        check_pair(&p, "rx", !is_shadow, is_shadow ? 1 : 2, false);
        check_pair(&p, "ry", false, 1, false);
        check_status(&p, 1, !is_shadow, false);
    }
    if (is_in(r, "x") && is_shadow)
        check_fails(program_wait(p.batch, true, TB_COMMITTED, -1), TB_LOST, "y 1");
    else if (is_in(r, "x"))
        check_ok(program_wait(p.batch, true, TB_COMMITTED, -1));
    meet(r);
    prepare(&p, 3); /* without y, whose tensors are the program's meanwhile */
    if (p.is_r) {
        program_transfer_opts skips = {.skip_lost = true};
        check_fails(program_transfer(p.batch, false, &skips), TB_LOST, "y 1");
        check_ok(program_remove_pair(p.batch, "ry"));
        begin(&p, false, false);
        await_bytes(&p, 0);
        fill(p.v, COLUMNS, 0, ROWS, 77);
    }
    meet(r);
    if (is_in(r, "x"))
        check_ok(program_transfer(p.batch, true, NULL));
    if (p.is_r) {
        check_ok(program_wait(p.batch, false, TB_COMMITTED, -1));
        check(holds(p.u, WIDTH, 3) && has_guards(&p, GUARD + 1));
        check(holds(p.v, COLUMNS, 77));
        check_pair(&p, "rx", true, 3, false);
        check_status(&p, 3, false, false);
    }
    meet(r);
    close_program(&p);
}

static void test_one_fails(void **state) {
    (void)state;
    for (int i = 0; i < 2; i++) {
        scene_opts o = {.agents.groups = groups, .commit = i ? TB_SHADOW : TB_IN_PLACE};
        run_agent_scene(&o.agents, one_fails, 1, NRANKS - 1);
    }
}

/* ---- Memory that can't be written ------------------------------------------------------------------------------ */

static void not_writable(rank *r) {
    member p;
    open_program(r, &p);
    move_all(&p, 1);
    prepare(&p, 2);
    if (p.is_r) {
        begin(&p, false, false);
        await_bytes(&p, 0);
        check(mprotect(p.u, p.u_nbytes, PROT_READ) == 0);
    }
    meet(r);
    if (!p.is_r) {
        check_ok(program_transfer(p.batch, true, NULL));
    } else {
        program_status status = {0};
        check_fails(program_wait(p.batch, false, TB_COMMITTED, -1), TB_IO, "can't be written");
        check_ok(program_query(p.batch, &status));
        check(!(status.events & TB_COMMITTED) && strcmp(status.state, "failed") == 0);
        check(holds(p.u, WIDTH, 0xee) && holds(p.v, COLUMNS, 2));
        check_pair(&p, "rx", false, 1, true);
        check_pair(&p, "ry", true, 2, false);
        check_status(&p, 1, true, true);
        check(mprotect(p.u, p.u_nbytes, PROT_READ | PROT_WRITE) == 0);
    }
    meet(r);
    move_all(&p, 3);
    meet(r);
    close_program(&p);
}

static void test_not_writable(void **state) {
    (void)state;
    for (int i = 0; i < 2; i++) {
        scene_opts o = {.agents.groups = groups, .commit = i ? TB_SHADOW : TB_IN_PLACE};
        run_agent_scene(&o.agents, not_writable, 1, NRANKS - 1);
    }
}

/* ---- What is not the tensor's ---------------------------------------------------------------------------------- */

enum { PART = 32, PARTS = 3, LENGTH = 64, PACKED_WIDTH = LENGTH / 2 + 3 };

/* Storage of which the agent writes a part only, and what it has in the end. */
typedef struct storage {
    uint16_t fused[PARTS * PART][LENGTH]; /* the second part arrives */
    uint8_t packed[PART][PACKED_WIDTH];   /* 4-bit elements, and 3 bytes after each row */
    uint8_t data[PARTS * PART][LENGTH];   /* of mxfp8; the second part arrives */
    uint8_t scales[PARTS * PART][LENGTH / 32];
    uint16_t own[PART][LENGTH]; /* the other side has no such tensor */
} storage;

static void add_parts(program_batch *b, storage *s, uint8_t *plain, uint8_t *plain_scales, bool is_target) {
    static const int64_t packed_strides[] = {2 * PACKED_WIDTH, 1};
    tb_tensor fused = {.size = sizeof fused,
                       .data = s->fused,
                       .dtype = TB_BF16,
                       .ndim = 2,
                       .shape = {PARTS * PART, LENGTH}},
              packed = {.size = sizeof packed,
                        .data = s->packed,
                        .dtype = TB_F4E2M1,
                        .ndim = 2,
                        .shape = {PART, LENGTH},
                        .strides = packed_strides},
              data = {.size = sizeof data,
                      .data = s->data,
                      .dtype = TB_F8E4M3,
                      .ndim = 2,
                      .shape = {PARTS * PART, LENGTH},
                      .encode = "mxfp8",
                      .scales = s->scales},
              whole = {.size = sizeof whole,
                       .data = plain,
                       .dtype = TB_F8E4M3,
                       .ndim = 2,
                       .shape = {PART, LENGTH},
                       .encode = "mxfp8",
                       .scales = plain_scales},
              own = {.size = sizeof own, .data = s->own, .dtype = TB_BF16, .ndim = 2, .shape = {PART, LENGTH}};
    fused.view = data.view = "slice(0, 32, 32)";
    check_ok(program_add(b, "p", "fused", &fused));
    check_ok(program_add(b, "p", "packed", &packed));
    if (is_target) {
        check_ok(program_add(b, "p", "data", &data));
        check_ok(program_add(b, "p", "whole", &whole));
        check_ok(program_add(b, "p", "own", &own));
    } else {
        tb_tensor numbers = {
            .size = sizeof numbers, .data = s->own, .dtype = TB_BF16, .ndim = 2, .shape = {PART, LENGTH}};
        check_ok(program_add(b, "p", "data", &numbers));
        check_ok(program_add(b, "p", "whole", &numbers));
    }
}

static void check_storage(const storage *s, const storage *sent, const uint8_t *plain, const uint8_t *plain_scales,
                          uint8_t guard) {
    for (size_t i = 0; i < (size_t)PARTS * PART; i++) {
        bool is_part = i >= PART && i < (size_t)2 * PART;
        for (size_t j = 0; j < LENGTH; j++) {
            check(s->fused[i][j] == (is_part ? sent->fused[i][j] : guard * 0x101));
            check(s->data[i][j] == (is_part ? plain[(i - PART) * LENGTH + j] : guard));
        }
        for (size_t j = 0; j < LENGTH / 32; j++)
            check(s->scales[i][j] == (is_part ? plain_scales[(i - PART) * (LENGTH / 32) + j] : guard));
    }
    for (size_t i = 0; i < PART; i++) {
        for (size_t j = 0; j < PACKED_WIDTH; j++)
            check(s->packed[i][j] == (j < LENGTH / 2 ? sent->packed[i][j] : guard));
        for (size_t j = 0; j < LENGTH; j++)
            check(s->own[i][j] == guard * 0x101);
    }
}

static void set_numbers(storage *s, uint32_t version) {
    for (size_t i = 0; i < (size_t)PARTS * PART; i++) {
        for (size_t j = 0; j < LENGTH; j++)
            s->fused[i][j] = (uint16_t)(0x3f80 + version * 16 + i + j); /* around 1 */
    }
    for (size_t i = 0; i < PART; i++) {
        for (size_t j = 0; j < LENGTH; j++)
            s->own[i][j] = (uint16_t)(0x3f80 + version * 8 + i * 2 + j);
        for (size_t j = 0; j < PACKED_WIDTH; j++)
            s->packed[i][j] = (uint8_t)(version * 37 + i * 5 + j);
    }
}

/* The program writes all of the storage after the agent has read it. */
static void parts(rank *r) {
    static storage sent;
    static const char *ignored[] = {"own"};
    const scene_opts *o = (const scene_opts *)r->scene;
    tb_batch_opts opts = {.size = sizeof opts, .commit = o->commit, .ignored = ignored, .nignored = 1};
    storage *s = is_a(r) ? &sent : calloc(1, sizeof *s);
    uint8_t *plain = calloc(PART, LENGTH + LENGTH / 32), *plain_scales = plain + PART * LENGTH;
    check(s && plain);
    program *client = open_client(r);
    program_batch *batch = NULL;
    check_ok(program_pair(client, "p", other_group(r), "mesh=1 place=R", 0));
    check_ok(program_batch_create(client, "step", &opts, &batch));
    add_parts(batch, s, plain, plain_scales, !is_a(r));
    check_ok(program_register(batch, 0));
    for (uint32_t version = 1; version <= 2; version++) {
        member p = {.rank = r, .is_r = !is_a(r), .batch = batch};
        uint8_t guard = (uint8_t)(0xa0 + version);
        meet(r);
        if (is_a(r)) {
            set_numbers(s, version);
        } else {
            begin(&p, false, false);
            if (version == 2) /* the first one has no total to see before it has begun */
                await_bytes(&p, 0);
            memset(s, guard, sizeof *s);
        }
        meet(r);
        if (is_a(r)) {
            check_ok(program_transfer(batch, true, NULL));
        } else {
            check_ok(program_wait(batch, false, TB_COMMITTED, -1));
            if (version == 2)
                check_storage(s, &sent, plain, plain_scales, guard);
        }
    }
    meet(r);
    program_batch_destroy(batch);
    program_close(client);
    free(plain);
    if (!is_a(r))
        free(s);
}

static void test_parts(void **state) {
    (void)state;
    for (int i = 0; i < 2; i++) {
        scene_opts o = {.commit = i ? TB_SHADOW : TB_IN_PLACE};
        run_agent_scene(&o.agents, parts, 1, 1);
    }
}

/* ---- Both ways ------------------------------------------------------------------------------------------------- */

/* The agent has one copy of the tensors: what is being sent from it must not be overwritten, nor what arrives in it. */
static void both_ways(rank *r) {
    client_setup s = {0};
    uint32_t *mine = calloc(ROWS * COLUMNS, sizeof *mine);
    tb_tensor t = {.size = sizeof t, .data = mine, .dtype = TB_U32, .ndim = 2, .shape = {ROWS, COLUMNS}};
    program_transfer_opts no_wait = {.no_wait = true};
    check(mine);
    s.client = open_client(r);
    check_ok(program_pair(s.client, "p", other_group(r), "mesh=1 place=R", 0));
    check_ok(program_batch_create(s.client, "step", NULL, &s.batch));
    check_ok(program_add(s.batch, "p", "w", &t));
    check_ok(program_register(s.batch, 0));
    fill(mine, COLUMNS, 0, ROWS, is_a(r) ? 1 : 2);
    for (int turn = 0; turn < 2; turn++) {
        bool is_send = is_a(r) == (turn == 0);
        meet(r);
        if (is_a(r)) {
            check_ok(program_transfer(s.batch, is_send, &no_wait));
            check_fails(program_transfer(s.batch, !is_send, NULL), TB_REFUSED, "copied through the agent");
        }
        meet(r);
        if (is_a(r))
            check_ok(program_wait(s.batch, is_send, TB_COMMITTED, -1));
        else
            check_ok(program_transfer(s.batch, is_send, NULL));
        check(holds(mine, COLUMNS, 1));
    }
    meet(r);
    program_batch_destroy(s.batch);
    program_close(s.client);
    free(mine);
}

static void test_both_ways(void **state) {
    (void)state;
    run_agents(both_ways, 1, 1);
}

int main(void) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_one_fails), cmocka_unit_test(test_not_writable),
                                       cmocka_unit_test(test_parts), cmocka_unit_test(test_both_ways)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
