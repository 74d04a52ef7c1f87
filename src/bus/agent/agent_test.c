/* Tensors of programs through agents: wherever they are, whatever they look like, whoever else there is. */
#include "bus/agent/agent_test.h"

#include <math.h>

/* ---- Both ways ------------------------------------------------------------------------------------------------- */

static void both_ways(rank *r) {
    client_setup s;
    move_in(r, &s, "mesh=2 place=S0", "mesh=2 place=S1", 24, 20);
    check(s.client->index == r->index && s.client->size == r->size);
    check(strcmp(s.client->group, r->group) == 0);
    for (uint32_t version = 1; version <= 4; version++)
        client_exchange(r, &s, version % 2 ? "a" : "b", version);
    program_status status = {0};
    check_ok(program_query(s.batch, &status));
    check(strcmp(status.state, "idle") == 0 && !*status.error && status.version > 0 && !status.transfer_signal);
    meet(r);
    move_out(&s);
}

/* News of a seat that another rank has taken may come a moment later. */
static void await_groups(const program *c, const char *expected) {
    bool is_same = false;
    for (int64_t until_ms = tb__now_ms() + PATIENCE_MS; !is_same && tb__now_ms() < until_ms;) {
        char *groups = NULL;
        check_ok(tb_world_groups(c->world, 0, &groups));
        is_same = strcmp(groups, expected) == 0;
        free(groups);
    }
    check(is_same);
}

/* An agent lists the groups as the bus knows them: its own, the others, and one that is entered meanwhile. */
static void list_groups(rank *r) {
    program *c = open_client(r);
    char *groups = NULL;
    await_groups(c, "2 2 a\n1 1 b\n");
    meet(r);
    if (is_a(r))
        check_ok(tb_world_enter(c->world, "more", r->index, 3));
    meet(r);
    await_groups(c, "2 2 a\n1 1 b\n2 3 more\n");
    meet(r);
    if (!is_a(r)) {
        seat_close((agent_scene *)r->scene, 2);
        check_fails(tb_world_groups(c->world, 0, &groups), TB_LOST, "is gone");
    }
    program_close(c);
}

static void test_list_groups(void **state) {
    (void)state;
    run_agents(list_groups, 2, 1);
}

static tb_status transform_send(void *arg, const tb_transform_piece *piece, const tb_binding *here, void *wire) {
    (void)arg, (void)piece, (void)here, (void)wire;
    return TB_OK;
}

static tb_status transform_recv(void *arg, const tb_transform_piece *piece, const tb_binding *here, const void *wire) {
    (void)arg, (void)piece, (void)here, (void)wire;
    return TB_OK;
}

/* What needs a process that is on the bus itself. */
static void refusals(rank *r) {
    program *c = open_client(r);
    tb_transform transform = {
        .size = sizeof transform, .prepare_send = transform_send, .finalize_recv = transform_recv};
    tb_batch_opts batch = {.size = sizeof batch, .transform = &transform};
    tb_world_opts manual = {.size = sizeof manual, .manual = true};
    tb_world *world = NULL;
    tb_batch *b = NULL;
    tb_copy *copy = NULL;
    tb_ir *ir = NULL;
    char url[100];
    snprintf(url, sizeof url, "agent:%s", seat_of(r)->path);
    check_fails(tb_world_join(url, NULL, 0, 0, &manual, &world), TB_REFUSED, "a manual world needs a process");
    check_fails(tb_batch_create(c->world, "b", &batch, &b), TB_REFUSED, "a transform needs a process");
    check_fails(tb_copy_open(c->world, "c", r->group, NULL, &copy), TB_REFUSED, "a copy service needs a process");
    check(!world && !b && !copy);
    check_ok(tb_batch_create(c->world, "b", NULL, &b));
    check_fails(tb_batch_ir(b, true, &ir), TB_REFUSED, "tb_batch_dump shows it");
    tb_batch_destroy(b);
    program_close(c);
}

static void test_refusals(void **state) {
    (void)state;
    run_agents(refusals, 1, 1);
}

static void test_both_ways(void **state) {
    (void)state;
    run_agents(both_ways, 2, 2);
}

/* A part of the ranks holds all of the tensor; the others take part with nothing. */
static void some_ranks(rank *r) {
    static const char *const layouts[2] = {"mesh=1 ranks=1 place=R", "mesh=2 ranks=2,0 place=S0"};
    program *c = open_client(r);
    program_batch *b = NULL;
    uint32_t data[12];
    tb_layout *layout;
    tb_local local;
    tb_shape shape = {.ndim = 1, .dim = {12}};
    check_ok(tb_layout_parse(layouts[!is_a(r)], &layout));
    check_ok(tb_layout_local(layout, &shape, r->index, &local));
    int64_t count = local.shape.dim[0], first = count ? local.segments[0][0].start : 0;
    check_ok(program_pair(c, "p", other_group(r), layouts[!is_a(r)], 0));
    check_ok(program_batch_create(c, "step", NULL, &b));
    tb_tensor t = {.size = sizeof t, .data = count ? data : NULL, .dtype = TB_U32, .ndim = 1, .shape = {12}};
    check_ok(program_add(b, "p", "w", &t));
    check_ok(program_register(b, 0));
    for (int64_t i = 0; i < 12; i++)
        data[i] = is_a(r) ? (uint32_t)(1000 + i) : POISON;
    check_ok(program_transfer(b, is_a(r), NULL));
    for (int64_t i = 0; i < count && !is_a(r); i++)
        check(data[i] == (uint32_t)(1000 + first + i));
    for (int64_t i = count; i < 12 && !is_a(r); i++)
        check(data[i] == POISON);
    meet(r);
    program_batch_destroy(b);
    program_close(c);
    tb_local_fini(&local);
    tb_layout_destroy(layout);
}

static void test_some_ranks(void **state) {
    (void)state;
    run_agents(some_ranks, 2, 3);
}

/* ---- Memory ---------------------------------------------------------------------------------------------------- */

enum { ROWS = 6, COLUMNS = 5, PITCH = 9, BIG = 700 };

typedef struct hall {
    bool is_shared; /* of tb_alloc */
    uint32_t *grid, *back, *fused, *ignored, *transposed;
} hall;

static uint32_t *get_memory(const hall *h, size_t count) {
    uint32_t *data = NULL;
    if (h->is_shared)
        check_ok(tb_alloc(count * sizeof *data, (void **)&data));
    else
        check((data = malloc(count * sizeof *data)) != NULL);
    for (size_t i = 0; i < count; i++)
        data[i] = POISON;
    return data;
}

static void put_memory(const hall *h, uint32_t *data) {
    if (h->is_shared)
        tb_free(data);
    else
        free(data);
}

static void add(program_batch *b, const char *name, const tb_tensor *t) {
    check_ok(program_add(b, "p", name, t));
}

/* Rows with gaps between them, rows from last to first, a slice of a larger tensor, columns before rows, and one that
 * only this side has. Nothing around their elements may change, and it does while they are on their way. */
static void shapes(rank *r, bool is_shared) {
    static const int64_t gaps[2] = {PITCH, 1}, backward[2] = {-COLUMNS, 1}, columns_first[2] = {1, BIG};
    static const char *const ignored = "mine.*";
    tb_batch_opts opts = {.size = sizeof opts, .ignored = &ignored, .nignored = 1};
    hall h = {.is_shared = is_shared};
    size_t n = (size_t)ROWS * PITCH, nbig = (size_t)BIG * BIG;
    h.grid = get_memory(&h, n);
    h.back = get_memory(&h, n);
    h.fused = get_memory(&h, n);
    h.ignored = get_memory(&h, n);
    h.transposed = get_memory(&h, nbig);
    program *c = open_client(r);
    program_batch *b = NULL;
    check_ok(program_pair(c, "p", other_group(r), "mesh=1 place=R", 0));
    check_ok(program_batch_create(c, "step", &opts, &b));
    add(b, "grid",
        &(tb_tensor){.size = sizeof(tb_tensor),
                     .data = h.grid,
                     .dtype = TB_U32,
                     .ndim = 2,
                     .shape = {ROWS, COLUMNS},
                     .strides = gaps});
    add(b, "back",
        &(tb_tensor){.size = sizeof(tb_tensor),
                     .data = h.back + (ROWS - 1) * COLUMNS,
                     .dtype = TB_U32,
                     .ndim = 2,
                     .shape = {ROWS, COLUMNS},
                     .strides = backward});
    add(b, "middle",
        &(tb_tensor){.size = sizeof(tb_tensor),
                     .data = h.fused,
                     .dtype = TB_U32,
                     .ndim = 2,
                     .shape = {ROWS, COLUMNS},
                     .view = "slice(0, 2, 3)"});
    add(b, "transposed",
        &(tb_tensor){.size = sizeof(tb_tensor),
                     .data = h.transposed,
                     .dtype = TB_U32,
                     .ndim = 2,
                     .shape = {BIG - 1, BIG},
                     .strides = columns_first});
    if (!is_a(r))
        add(b, "mine.w",
            &(tb_tensor){.size = sizeof(tb_tensor), .data = h.ignored, .dtype = TB_U32, .ndim = 1, .shape = {4}});
    check_ok(program_register(b, 0));
    for (uint32_t version = 1; version <= 2; version++) {
        for (size_t i = 0; i < n && is_a(r); i++) {
            h.grid[i] = version << 24 | (uint32_t)i;
            h.back[i] = version << 24 | 1U << 20 | (uint32_t)i;
            h.fused[i] = version << 24 | 2U << 20 | (uint32_t)i;
        }
        for (size_t i = 0; i < nbig && is_a(r); i++)
            h.transposed[i] = version << 24 | (uint32_t)i;
        check_ok(program_transfer(b, is_a(r), NULL));
        for (size_t i = 0; i < n && !is_a(r); i++) {
            bool is_of_grid = i % PITCH < COLUMNS, is_of_back = i < ROWS * COLUMNS;
            bool is_of_middle = i / COLUMNS >= 2 && i / COLUMNS < 5;
            check(h.grid[i] == (is_of_grid ? version << 24 | (uint32_t)i : POISON));
            check(h.back[i] == (is_of_back ? version << 24 | 1U << 20 | (uint32_t)i : POISON));
            check(h.fused[i] == (is_of_middle ? version << 24 | 2U << 20 | (uint32_t)i : POISON));
            check(h.ignored[i] == POISON);
        }
        for (size_t i = 0; i < nbig && !is_a(r); i++)
            check(h.transposed[i] == (i % BIG < BIG - 1 ? version << 24 | (uint32_t)i : POISON));
        meet(r);
    }
    program_batch_destroy(b);
    program_close(c);
    put_memory(&h, h.grid);
    put_memory(&h, h.back);
    put_memory(&h, h.fused);
    put_memory(&h, h.ignored);
    put_memory(&h, h.transposed);
}

static void shapes_shared(rank *r) {
    shapes(r, true);
}

static void shapes_private(rank *r) {
    shapes(r, false);
}

static void test_shapes(void **state) {
    (void)state;
    run_agents(shapes_shared, 1, 1);
    run_agents(shapes_private, 1, 1);
}

/* What is between the elements belongs to somebody who goes on using it. */
static void neighbours(rank *r) {
    enum { MANY = 2000 };
    static const int64_t every_other[1] = {2};
    uint32_t *data = malloc(2 * MANY * sizeof *data);
    check(data);
    for (uint32_t i = 0; i < 2 * MANY; i++)
        data[i] = is_a(r) ? i : POISON;
    program *c = open_client(r);
    program_batch *b = NULL;
    tb_tensor t = {.size = sizeof t, .data = data, .dtype = TB_U32, .ndim = 1, .shape = {MANY}, .strides = every_other};
    check_ok(program_pair(c, "p", other_group(r), "mesh=1 place=R", 0));
    check_ok(program_batch_create(c, "step", NULL, &b));
    add(b, "w", &t);
    check_ok(program_register(b, 0));
    if (is_a(r)) {
        meet(r);
        check_ok(program_transfer(b, true, NULL));
    } else {
        program_transfer_opts opts = {.no_wait = true};
        program_status status = {0};
        check_ok(program_transfer(b, false, &opts));
        int64_t deadline_ms = tb__now_ms() + PATIENCE_MS;
        while (status.seconds == 0 && tb__now_ms() < deadline_ms) /* until the agent has read what there was */
            check_ok(program_query(b, &status));
        for (uint32_t i = 0; i < MANY; i++)
            data[2 * i + 1] = i;
        meet(r);
        while (strcmp(status.state, "receiving") == 0 && tb__now_ms() < deadline_ms)
            check_ok(program_query(b, &status));
        check(strcmp(status.state, "idle") == 0);
        for (uint32_t i = 0; i < MANY; i++)
            check(data[2 * i] == 2 * i && data[2 * i + 1] == i);
    }
    meet(r);
    program_batch_destroy(b);
    program_close(c);
    free(data);
}

static void test_neighbours(void **state) {
    (void)state;
    run_agents(neighbours, 1, 1);
}

/* ---- Quantised ------------------------------------------------------------------------------------------------- */

/* Numbers that the formats have: what comes back is what was sent. */
static void quantised(rank *r) {
    enum { HIGH = 8, WIDE = 64 };
    static const float exact[8] = {6, 0, 0.5F, -1, 1.5F, -2, 3, 4};
    bool is_here = !is_a(r);
    float *numbers;
    uint8_t *data, *more, scales[HIGH * WIDE / 32] = {0}, fine[HIGH * WIDE / 16] = {0};
    float scale = 0;
    check_ok(tb_alloc((size_t)HIGH * WIDE * sizeof *numbers, (void **)&numbers));
    check_ok(tb_alloc((size_t)HIGH * WIDE, (void **)&data));
    check((more = malloc((size_t)HIGH * WIDE / 2)) != NULL);
    for (int i = 0; i < HIGH * WIDE; i++)
        numbers[i] = exact[i % 8];
    program *c = open_client(r);
    program_batch *b = NULL;
    check_ok(program_pair(c, "p", other_group(r), "mesh=1 place=R", 0));
    check_ok(program_batch_create(c, "step", NULL, &b));
    tb_tensor plain = {.size = sizeof plain, .data = numbers, .dtype = TB_F32, .ndim = 2, .shape = {HIGH, WIDE}};
    tb_tensor mx = plain, nv = plain;
    if (is_here) {
        mx = (tb_tensor){.size = sizeof(tb_tensor),
                         .data = data,
                         .dtype = TB_F8E4M3,
                         .ndim = 2,
                         .shape = {HIGH, WIDE},
                         .encode = "mxfp8",
                         .scales = scales};
        nv = (tb_tensor){.size = sizeof(tb_tensor),
                         .data = more,
                         .dtype = TB_F4E2M1,
                         .ndim = 2,
                         .shape = {HIGH, WIDE},
                         .encode = "nvfp4",
                         .scales = fine,
                         .scale = &scale,
                         .scale_group = "g"};
        tb_tensor lacking = nv;
        lacking.scale = NULL;
        program_batch *bad = NULL;
        check_ok(program_batch_create(c, "bad", NULL, &bad));
        add(bad, "nv", &lacking);
        check_fails(program_register(bad, 0), TB_INVALID, "its scale has 4 bytes, but 0 are given");
        program_batch_destroy(bad);
    }
    add(b, "mx", &mx);
    if (is_here)
        add(b, "nv", &nv);
    else
        add(b, "nv",
            &(tb_tensor){
                .size = sizeof(tb_tensor), .data = numbers, .dtype = TB_F32, .ndim = 2, .shape = {HIGH, WIDE}});
    check_ok(program_register(b, 0));
    check_ok(program_transfer(b, is_a(r), NULL));
    if (is_here)
        check(scale > 0 && scales[0] != 0 && fine[0] != 0);
    if (is_a(r))
        memset(numbers, 0, (size_t)HIGH * WIDE * sizeof *numbers);
    program_batch_destroy(b);

    /* Back again, one after the other, as both are for the same memory. */
    for (int i = 0; i < 2; i++) {
        check_ok(program_batch_create(c, i ? "nv" : "mx", NULL, &b));
        add(b, "w", is_here && i ? &nv : is_here ? &mx : &plain);
        check_ok(program_register(b, 0));
        check_ok(program_transfer(b, is_here, NULL));
        for (int k = 0; k < HIGH * WIDE && is_a(r); k++)
            check(fabsf(numbers[k] - exact[k % 8]) < 1e-5F);
        if (is_a(r))
            memset(numbers, 0, (size_t)HIGH * WIDE * sizeof *numbers);
        program_batch_destroy(b);
    }
    meet(r);
    program_close(c);
    tb_free(numbers);
    tb_free(data);
    free(more);
}

static void test_quantised(void **state) {
    (void)state;
    run_agents(quantised, 1, 1);
}

/* ---- Several clients ------------------------------------------------------------------------------------------- */

static void many_clients(rank *r) {
    enum { CLIENTS = 4 };
    program *c[CLIENTS];
    program_batch *b[CLIENTS] = {0}, *other = NULL;
    uint32_t *data;
    char name[32];
    check_ok(tb_alloc(CLIENTS * sizeof *data, (void **)&data));
    for (int i = 0; i < CLIENTS; i++) {
        c[i] = open_client(r);
        if (i == 1) {
            check_fails(program_pair(c[1], "p", other_group(r), "mesh=1 place=S0", 0), TB_CONFLICT, "already");
            check_fails(program_pair(c[1], "p", "c", "mesh=1 place=R", 0), TB_CONFLICT, "already");
        }
        check_ok(program_pair(c[i], "p", other_group(r), "mesh=1 place=R", 0));
    }
    for (int i = 0; i < CLIENTS; i++) {
        snprintf(name, sizeof name, "batch %d", i);
        check_ok(program_batch_create(c[i], name, NULL, &b[i]));
        add(b[i], "w", &(tb_tensor){.size = sizeof(tb_tensor), .data = &data[i], .dtype = TB_U32});
        check_ok(program_register(b[i], 0));
    }
    /* A batch is its client's, and there is one of a name. */
    check_ok(program_batch_create(c[1], "batch 0", NULL, &other));
    add(other, "w", &(tb_tensor){.size = sizeof(tb_tensor), .data = &data[1], .dtype = TB_U32});
    check_fails(program_register(other, 0), TB_CONFLICT, "there is a batch 'batch 0' already");
    check_fails(program_transfer(other, true, NULL), TB_CONFLICT, "there is a batch 'batch 0' already");
    program_batch_destroy(other);
    /* The first one goes, and the pair that it asked for stays for the others. */
    meet(r);
    program_close(c[0]);
    program_batch_destroy(b[0]);
    for (int i = CLIENTS; i-- > 1;) {
        data[i] = is_a(r) ? 77U + (uint32_t)i : POISON;
        check_ok(program_transfer(b[i], is_a(r), NULL));
        check(data[i] == 77U + (uint32_t)i);
    }
    /* Its name is free again: it may take a moment until the agent has seen the end. */
    check_ok(program_batch_create(c[1], "batch 0", NULL, &other));
    add(other, "w", &(tb_tensor){.size = sizeof(tb_tensor), .data = &data[0], .dtype = TB_U32});
    int64_t deadline_ms = tb__now_ms() + PATIENCE_MS;
    tb_status status;
    while ((status = program_register(other, 0)) == TB_CONFLICT && tb__now_ms() < deadline_ms)
        usleep(1000);
    check_ok(status);
    meet(r);
    program_batch_destroy(other);
    for (int i = 1; i < CLIENTS; i++) {
        program_batch_destroy(b[i]);
        program_close(c[i]);
    }
    tb_free(data);
}

static void test_many_clients(void **state) {
    (void)state;
    run_agents(many_clients, 1, 1);
}

/* ---- Without waiting ------------------------------------------------------------------------------------------- */

static void later(rank *r) {
    client_setup s;
    program_status status = {0};
    move_in(r, &s, "mesh=2 place=S0", "mesh=1 place=R", 40, 30);
    check_ok(program_query(s.batch, &status));
    check(strcmp(status.state, "idle") == 0 && status.version == 0);
    for (int i = 0; i < 2; i++) { /* the second time nobody receives */
        program_transfer_opts opts = {.no_wait = true, .timeout_ms = i ? SOON_MS : 0};
        if (is_a(r))
            part_fill(&s.w, 1);
        meet(r);
        if (i == 1 && !is_a(r))
            break;
        check_ok(program_transfer(s.batch, is_a(r), &opts));
        check_ok(program_query(s.batch, &status)); /* it is under way, or it has ended: never as if nothing were */
        if (i == 0)
            check(strcmp(status.state, is_a(r) ? "sending" : "receiving") == 0 ||
                  (strcmp(status.state, "idle") == 0 && status.version > 0));
        tb_status ended = program_wait(s.batch, is_a(r), TB_COMMITTED, -1);
        check(ended == (i ? TB_TIMEOUT : TB_OK));
        check_ok(program_query(s.batch, &status));
        check(strcmp(status.state, i ? "failed" : "idle") == 0);
        check(i ? strstr(status.error, "has not ended") != NULL : !*status.error);
        check(status.version == 1);
        if (i == 0)
            check(part_holds(&s.w, 1));
    }
    meet(r);
    move_out(&s);
}

static void test_later(void **state) {
    (void)state;
    run_agents(later, 2, 1);
}

/* ---- A client that is closed in the middle ---------------------------------------------------------------------- */

/* Its memory is its own when the call returns: nobody writes there, or reports that what it finds there has come. In
 * even rounds the receiver closes, in odd ones the sender. */
static void close_early(rank *r) {
    enum { SIDE = 1200, NROUNDS = 16 };
    const uint32_t own = 0xeeeeeeee;
    for (int round = 0; round < NROUNDS; round++) {
        client_setup s;
        program_transfer_opts opts = {.no_wait = true};
        bool closes = is_a(r) == round % 2;
        move_in(r, &s, "mesh=1 place=S0", "mesh=1 place=S1", SIDE, SIDE);
        if (is_a(r))
            part_fill(&s.w, 1);
        meet(r);
        check_ok(program_transfer(s.batch, is_a(r), &opts));
        if (closes) {
            usleep((useconds_t)(round * 150));
            program_close(s.client);
            for (size_t i = 0; i < s.w.count; i++)
                s.w.data[i] = own;
        } else if (program_wait(s.batch, is_a(r), TB_COMMITTED, PATIENCE_MS) == TB_OK) {
            check(part_holds(&s.w, 1));
        }
        meet(r);
        for (size_t i = 0; closes && i < s.w.count; i++)
            check(s.w.data[i] == own);
        program_batch_destroy(s.batch);
        if (!closes)
            program_close(s.client);
        part_fini(&s.w);
        meet(r);
    }
}

static void test_close_early(void **state) {
    (void)state;
    run_agents(close_early, 1, 1);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_both_ways),   cmocka_unit_test(test_some_ranks),  cmocka_unit_test(test_shapes),
        cmocka_unit_test(test_neighbours),  cmocka_unit_test(test_quantised),   cmocka_unit_test(test_many_clients),
        cmocka_unit_test(test_later),       cmocka_unit_test(test_close_early), cmocka_unit_test(test_refusals),
        cmocka_unit_test(test_list_groups),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
