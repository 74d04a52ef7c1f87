/* Copy services between threads as ranks: what is copied, and what fails, on every rank and without hanging any. */
#include "bus/bus_test.h"

#include "copy/copy.h"
#include "flow/flow_inside.h"

static tb_copy *open_service(rank *r, const tb_copy_opts *opts) {
    tb_copy *copy;
    check_ok(tb_copy_open(r->world, "c", NULL, opts, &copy));
    return copy;
}

static tb_copy_view row(void *data, int64_t n) {
    return (tb_copy_view){.size = sizeof(tb_copy_view), .data = data, .dtype = TB_U32, .ndim = 1, .shape = {n}};
}

static bool is_all(const uint32_t *data, size_t n, uint32_t value) {
    for (size_t i = 0; i < n; i++) {
        if (data[i] != value)
            return false;
    }
    return true;
}

static void set_all(uint32_t *data, size_t n, uint32_t value) {
    for (size_t i = 0; i < n; i++)
        data[i] = value;
}

static void send(tb_copy *copy, tb_copy_view view, int32_t seat, uint64_t id) {
    check_ok(tb_copy_submit_send(copy, &view, 1, seat, id));
}

static void receive(tb_copy *copy, tb_copy_view view, int32_t seat, uint64_t id) {
    check_ok(tb_copy_submit_recv(copy, &view, 1, seat, id));
}

/* ---- What is copied -------------------------------------------------------------------------------------------- */

/* Every rank sends to every rank, itself too, in run after run; one of them does nothing in every other run. */
static void all_to_all(rank *r) {
    enum { N = 100 };
    const tb_copy_opts *opts = r->scene->shared;
    tb_copy *copy = open_service(r, opts);
    uint32_t *out, *in;
    check((out = tensor_alloc(sizeof *out * N)));
    check((in = tensor_alloc(sizeof *in * N * MAX_RANKS)));
    for (uint32_t round = 1; round <= 6; round++) {
        bool is_idle = round % 2 && r->index == 1;
        set_all(tensor_bytes(out), N, round * 100 + (uint32_t)r->index);
        set_all(tensor_bytes(in), (size_t)N * MAX_RANKS, POISON);
        for (int32_t i = 0; i < r->size && !is_idle; i++) {
            if (round % 2 && i == 1)
                continue;
            tb_copy_view from = row(out, N), to = row(in + (size_t)i * N, N);
            check_ok(tb_copy_submit_send(copy, &from, 1, i, (uint64_t)(r->index * 100 + i)));
            check_ok(tb_copy_submit_recv(copy, &to, 1, i, (uint64_t)(i * 100 + r->index)));
        }
        check_ok(tb_copy_run(copy, 0));
        for (int32_t i = 0; i < MAX_RANKS; i++) {
            bool is_there = i < r->size && !is_idle && !(round % 2 && i == 1);
            check(
                is_all((uint32_t *)tensor_bytes(in) + (size_t)i * N, N, is_there ? round * 100 + (uint32_t)i : POISON));
        }
    }
    check_ok(tb_copy_run(copy, 0)); /* of nothing at all */
    tb_copy_close(copy);
    tensor_free(out);
    tensor_free(in);
}

static void runs_again_and_again(void **state) {
    (void)state;
    run_ranks(all_to_all, 4, 0, NULL);
}

static void runs_staged(void **state) {
    (void)state;
    tb_copy_opts opts = {.size = sizeof opts, .staged = true, .bucket_size = 300};
    run_ranks(all_to_all, 4, 0, &opts);
}

static void runs_alone(void **state) {
    (void)state;
    run_ranks(all_to_all, 1, 0, NULL);
}

/* One is staged, the others are not; bucket sizes and staging memory differ. What is larger than a quarter of the least
 * staging memory is cut. */
static void mixed(rank *r) {
    enum { N = 100000 };
    tb_copy_opts opts = {.size = sizeof opts,
                         .staged = r->index == 0,
                         .bucket_size = 1000 << r->index,
                         .staging_bytes = (64 << 10) << r->index};
    tb_copy *copy = open_service(r, &opts);
    check(copy->bucket_size == 1000 && copy->staging_bytes == 64 << 10);
    uint32_t *data = malloc(sizeof *data * N);
    for (uint32_t i = 0; i < N; i++)
        data[i] = r->index == 1 ? POISON : i * 7;
    tb_copy_view v = row(data, N);
    if (r->index == 0)
        check_ok(tb_copy_submit_send(copy, &v, 1, 1, 9));
    if (r->index == 1)
        check_ok(tb_copy_submit_recv(copy, &v, 1, 0, 9));
    check_ok(tb_copy_run(copy, 0));
    for (uint32_t i = 0; i < N; i++)
        check(data[i] == i * 7);
    tb_copy_close(copy);
    free(data);
}

typedef struct packed {
    const tb_copy *copy;
    size_t nbytes;
} packed;

static void count_packed(void *arg, size_t bucket, tb_bucket_step step) {
    packed *p = arg;
    if (step == TB_BUCKET_PREPARED)
        p->nbytes += (size_t)p->copy->flow->setup.ir->buckets[bucket].total_bytes;
}

/* All would fit into one bucket, and one of them can't be read in place: it lies in short runs, in memory that is not
 * mapped. No other one is staged with it. */
static void one_of_many(rank *r) {
    enum { NMANY = 40, BAD = 17, N = 512 };
    tb_copy *copy = open_service(r, NULL);
    packed p = {.copy = copy};
    uint32_t *good, *bad = malloc(2 * N * sizeof *bad);
    const int64_t every_second[] = {2};
    bool sends = r->index == 0;
    check(bad);
    check_ok(tb_alloc(NMANY * N * sizeof *good, (void **)&good));
    for (uint32_t i = 0; i < NMANY * N; i++)
        good[i] = sends ? i * 7 : POISON;
    for (uint32_t i = 0; i < N; i++)
        bad[2 * i] = good[BAD * N + i];
    for (uint64_t i = 0; i < NMANY; i++) {
        tb_copy_view v = row(good + i * N, N);
        if (sends && i == BAD) {
            v.data = bad;
            v.strides = every_second;
        }
        if (sends)
            send(copy, v, 1, i);
        else
            receive(copy, v, 0, i);
    }
    copy->on_bucket = count_packed;
    copy->on_bucket_arg = &p;
    check_ok(tb_copy_run(copy, 0));
    for (uint32_t i = 0; i < NMANY * N; i++)
        check(good[i] == i * 7);
    check(p.nbytes == (sends ? N * sizeof *good : 0));
    tb_copy_close(copy);
    tb_free(good);
    free(bad);
}

static void only_what_must_be_is_staged(void **state) {
    (void)state;
    run_ranks(one_of_many, 2, 0, NULL);
}

static void options_may_differ(void **state) {
    (void)state;
    run_ranks(mixed, 3, 0, NULL);
}

/* A matrix goes as its transpose, in 3-d pieces, with data and scale under one id: to another rank and to itself. */
static void strided(rank *r) {
    tb_copy *copy = open_service(r, r->scene->shared);
    uint16_t from[6 * 10], scale = (uint16_t)(1000 + r->index), to[2][4 * 6 * 3], scales[2] = {0};
    int64_t rows[] = {10, 1}, columns[] = {36, 12, 3};
    for (int i = 0; i < 60; i++)
        from[i] = (uint16_t)(r->index * 100 + i);
    memset(to, 0xee, sizeof to);
    tb_copy_view out[] = {
        {.size = sizeof *out, .data = from, .dtype = TB_F16, .ndim = 2, .shape = {6, 4}, .strides = rows},
        {.size = sizeof *out, .data = &scale, .dtype = TB_U16}};
    int32_t next = (r->index + 1) % r->size, last = (r->index + r->size - 1) % r->size;
    check_ok(tb_copy_submit_send(copy, out, 2, next, 50 + (uint64_t)r->index));
    check_ok(tb_copy_submit_send(copy, out, 2, r->index, 5));
    for (int i = 0; i < 2; i++) {
        tb_copy_view in[] = {
            {.size = sizeof *in, .data = to[i], .dtype = TB_BF16, .ndim = 3, .shape = {2, 3, 4}, .strides = columns},
            {.size = sizeof *in, .data = &scales[i], .dtype = TB_U16, .ndim = 1, .shape = {1}}};
        check_ok(tb_copy_submit_recv(copy, in, 2, i ? r->index : last, i ? 5 : 50 + (uint64_t)last));
    }
    check_ok(tb_copy_run(copy, 0));
    for (int i = 0; i < 2; i++) {
        int32_t source = i ? r->index : last;
        check(scales[i] == 1000 + source);
        for (int at = 0; at < 72; at++) {
            int element = at / 3, wanted = source * 100 + element / 4 * 10 + element % 4;
            check(to[i][at] == (at % 3 ? 0xeeee : wanted));
        }
    }
    tb_copy_close(copy);
}

static void strides_and_several_tensors(void **state) {
    (void)state;
    run_ranks(strided, 3, 0, NULL);
    tb_copy_opts opts = {.size = sizeof opts, .staged = true};
    run_ranks(strided, 3, 0, &opts);
}

/* Two services of one group, and one of another, at the same time; ranks are seats of the group. */
static void several(rank *r) {
    tb_copy *copies[3];
    check_ok(tb_world_enter(r->world, "turned", r->size - 1 - r->index, r->size));
    check_ok(tb_copy_open(r->world, "x", NULL, NULL, &copies[0]));
    check_ok(tb_copy_open(r->world, "y", "a", NULL, &copies[1]));
    check_ok(tb_copy_open(r->world, "x", "turned", NULL, &copies[2]));
    tb_copy *second;
    check_fails(tb_copy_open(r->world, "x", NULL, NULL, &second), TB_CONFLICT, "already");
    for (int i = 0; i < 3; i++) {
        uint32_t out = (uint32_t)(i * 10 + r->index), in = POISON;
        int32_t seat = i == 2 ? r->size - 1 - r->index : r->index;
        tb_copy_view from = row(&out, 1), to = row(&in, 1);
        int32_t next = (seat + 1) % r->size, last = (seat + r->size - 1) % r->size;
        check_ok(tb_copy_submit_send(copies[i], &from, 1, next, (uint64_t)seat));
        check_ok(tb_copy_submit_recv(copies[i], &to, 1, last, (uint64_t)last));
        check_ok(tb_copy_run(copies[i], 0));
        check(in == (uint32_t)(i * 10 + (i == 2 ? r->size - 1 - last : last)));
    }
    for (int i = 0; i < 3; i++)
        tb_copy_close(copies[i]);
}

static void services_are_apart(void **state) {
    (void)state;
    run_ranks(several, 3, 0, NULL);
}

/* Source and target may share memory between ranks: two of them swap. A rank's copy to where it is already is nothing.
 */
static void swap(rank *r) {
    tb_copy *copy = open_service(r, NULL);
    uint32_t data[64], other[64];
    set_all(data, 64, (uint32_t)r->index);
    set_all(other, 64, 5);
    tb_copy_view v = row(data, 64), same = row(other, 64);
    check_ok(tb_copy_submit_send(copy, &v, 1, !r->index, (uint64_t)r->index));
    check_ok(tb_copy_submit_recv(copy, &v, 1, !r->index, (uint64_t)!r->index));
    check_ok(tb_copy_submit_send(copy, &same, 1, r->index, 7));
    check_ok(tb_copy_submit_recv(copy, &same, 1, r->index, 7));
    check_ok(tb_copy_run(copy, 0));
    check(is_all(data, 64, (uint32_t)!r->index) && is_all(other, 64, 5));
    tb_copy_close(copy);
}

static void ranks_swap(void **state) {
    (void)state;
    run_ranks(swap, 2, 0, NULL);
}

/* ---- What fails ------------------------------------------------------------------------------------------------ */

/* Operations without ids are paired by order, with each rank apart; submits under one id are one operation. To the next
 * rank, and to itself. */
static void numbered_by_order(rank *r) {
    enum { N = 4 };
    tb_copy *copy = open_service(r, r->scene->shared);
    int32_t next = (r->index + 1) % r->size, last = (r->index + r->size - 1) % r->size;
    for (uint32_t round = 0; round < 2; round++) { /* the second counts from the beginning again */
        uint32_t out[6][N], in[6][N], own[6][N];
        for (uint32_t i = 0; i < 6; i++) {
            set_all(out[i], N, 100 * (uint32_t)r->index + 10 * round + i);
            set_all(in[i], N, POISON);
            set_all(own[i], N, POISON);
        }
        const uint64_t ids[] = {TB_NO_TASK, 40, TB_NO_TASK, 41, 40, 41};
        for (uint32_t i = 0; i < 6; i++) {
            bool has_id = ids[i] != TB_NO_TASK;
            send(copy, row(out[i], N), next, has_id ? ids[i] + 10 * (uint32_t)r->index : TB_NO_TASK);
            send(copy, row(out[i], N), r->index, has_id ? ids[i] + 100 + 10 * (uint32_t)r->index : TB_NO_TASK);
        }
        static const uint32_t order[] = {1, 0, 3, 4, 2, 5}; /* only what has the same id, or none, keeps its order */
        for (uint32_t i = 0; i < 6; i++) {
            uint64_t id = ids[order[i]];
            bool has_id = id != TB_NO_TASK;
            receive(copy, row(in[order[i]], N), last, has_id ? id + 10 * (uint32_t)last : TB_NO_TASK);
            receive(copy, row(own[order[i]], N), r->index, has_id ? id + 100 + 10 * (uint32_t)r->index : TB_NO_TASK);
        }
        check_ok(tb_copy_run(copy, 0));
        for (uint32_t i = 0; i < 6; i++) {
            check(is_all(in[i], N, 100 * (uint32_t)last + 10 * round + i));
            check(is_all(own[i], N, 100 * (uint32_t)r->index + 10 * round + i));
        }
    }
    tb_copy_close(copy);
}

static void ids_may_be_left_out_or_repeated(void **state) {
    (void)state;
    tb_copy_opts staged = {.size = sizeof staged, .staged = true};
    run_ranks(numbered_by_order, 3, 0, NULL);
    run_ranks(numbered_by_order, 3, 0, &staged);
    run_ranks(numbered_by_order, 1, 0, NULL);
}

static tb_copy_view matrix(void *data, tb_dtype dtype, int ndim, int64_t rows, int64_t columns) {
    tb_copy_view v = {.size = sizeof v, .data = data, .dtype = dtype, .ndim = ndim, .shape = {rows, columns}};
    if (ndim == 1)
        v.shape[0] = columns;
    return v;
}

/* Copies within the rank are cast and broadcast. The run as a whole fails if one can't be, and nothing is written. */
static void converts(rank *r) {
    tb_copy_opts opts = {.size = sizeof opts, .convert_local = true};
    tb_copy *copy = open_service(r, &opts);
    static const uint16_t rounded[] = {0x3fc0, 0xc000, 0x4780};
    float from[3] = {1.5f, -2.0f, 65536.0f}, columns[2] = {1.0f, 2.0f}, wide[2][3], one = 7.0f;
    uint32_t back[3], bits[3];
    uint16_t halves[3] = {0}, filled[2][3];
    send(copy, matrix(from, TB_F32, 1, 0, 3), r->index, 1);
    receive(copy, matrix(halves, TB_BF16, 1, 0, 3), r->index, 1);
    send(copy, matrix(columns, TB_F32, 2, 2, 1), r->index, 2);
    receive(copy, matrix(wide, TB_F32, 2, 2, 3), r->index, 2);
    send(copy, matrix(&one, TB_F32, 0, 0, 0), r->index, 3);
    receive(copy, matrix(filled, TB_BF16, 2, 2, 3), r->index, 3);
    check_ok(tb_copy_run(copy, 0));
    for (int i = 0; i < 3; i++) {
        check(halves[i] == rounded[i]);
        check(wide[0][i] == 1.0f && wide[1][i] == 2.0f);
        check(filled[0][i] == 0x40e0 && filled[1][i] == 0x40e0);
    }
    send(copy, matrix(halves, TB_BF16, 1, 0, 3), r->index, TB_NO_TASK);
    receive(copy, matrix(back, TB_F32, 1, 0, 3), r->index, TB_NO_TASK);
    check_ok(tb_copy_run(copy, 0));
    memcpy(bits, from, sizeof bits);
    check(memcmp(back, bits, sizeof back) == 0);
    set_all(back, 3, POISON);
    send(copy, matrix(from, TB_F32, 1, 0, 3), r->index, 1);
    receive(copy, matrix(back, TB_F32, 1, 0, 3), r->index, 1);
    send(copy, matrix(wide, TB_F32, 2, 2, 3), r->index, 2);
    receive(copy, matrix(halves, TB_F32, 1, 0, 1), r->index, 2);
    check_fails(tb_copy_run(copy, 0), TB_CONFLICT, "[2,3] can't be broadcast to [1]");
    check(is_all(back, 3, POISON));
    send(copy, matrix(from, TB_F32, 1, 0, 3), r->index, 1);
    receive(copy, matrix(wide, TB_I32, 1, 0, 3), r->index, 1);
    check_fails(tb_copy_run(copy, 0), TB_REFUSED, "there is no cast from f32 to i32");
    tb_copy_close(copy);
    copy = open_service(r, NULL); /* who does not ask for it does not get it */
    send(copy, matrix(from, TB_F32, 1, 0, 3), r->index, 1);
    receive(copy, matrix(halves, TB_BF16, 1, 0, 3), r->index, 1);
    check_fails(tb_copy_run(copy, 0), TB_CONFLICT, "has 12 bytes on");
    tb_copy_close(copy);
}

static void own_copies_are_converted(void **state) {
    (void)state;
    run_ranks(converts, 1, 0, NULL);
}

typedef enum fault {
    UNRECEIVED,
    UNSENT,
    WRONG_RANK,
    SIZES,
    ITEMS,
    COUNTS,
    SHAPES,
    DOUBLED_SEND,
    DOUBLED_RECV,
    DOUBLED_BOTH,
    ONE_WITHOUT_ID,
    LOCAL_ALONE,
    LOCAL_SIZES,
    SAME_TARGET,
    SAME_TARGET_OF_ONE,
    FOLDED_TARGET,
    LOCAL_OVERLAP,
    LOCAL_READ,
    FAULTS
} fault;

static const struct {
    tb_status status;
    const char *words, *id;
} expected[FAULTS] = {
    [UNRECEIVED] = {TB_CONFLICT, "(a 1) sends task 70 to rank ", "(a 2), which does not receive it"},
    [UNSENT] = {TB_CONFLICT, "(a 2) is to receive task 70 from rank ", "(a 1), which does not send it"},
    [WRONG_RANK] = {TB_CONFLICT, "receive task 70 from", "(a 0), which does not send it"},
    [SIZES] = {TB_CONFLICT, "tensor 0 of task 70 has 32 bytes on rank", "(a 1), which sends it, but 28 on"},
    [ITEMS] = {TB_CONFLICT, "tensor 0 of task 70 has items of 32 bits", "(a 1), which sends it, but of 64 on"},
    [COUNTS] = {TB_CONFLICT, "task 70 has 1 tensors on rank", "(a 1), which sends it, but 2 on"},
    [SHAPES] = {TB_CONFLICT, "tensor 0 of task 70 is strided like [2,3]", "and like [3,2]"},
    [DOUBLED_SEND] = {TB_CONFLICT, "task 70 has 2 tensors on rank", "(a 1), which sends it, but 1 on rank"},
    [DOUBLED_RECV] = {TB_CONFLICT, "task 70 has 1 tensors on rank", "(a 1), which sends it, but 2 on rank"},
    [ONE_WITHOUT_ID] = {TB_CONFLICT, "(a 1) sends operation 1 without a task id to rank",
                        "(a 2), which does not receive it"},
    [DOUBLED_BOTH] = {TB_CONFLICT, "(a 1) has submitted task 70 twice: to rank", "(a 2), and from rank"},
    [LOCAL_ALONE] = {TB_CONFLICT, "(a 1) sends task 70 to rank", "(a 1), which does not receive it"},
    [LOCAL_SIZES] = {TB_CONFLICT, "tensor 0 of task 70 has 32 bytes", "but 28 on"},
    [SAME_TARGET] = {TB_INVALID, "(a 2): task 7", "would be received into the same memory"},
    [SAME_TARGET_OF_ONE] = {TB_INVALID, "(a 2): two tensors of task 70", "would be received into the same memory"},
    [FOLDED_TARGET] = {TB_INVALID, "(a 2): ", "task 70 has several elements in the same memory"},
    [LOCAL_OVERLAP] = {TB_INVALID, "(a 1): ", "task 70 sends memory that is received into"},
    [LOCAL_READ] = {TB_INVALID, "(a 1): ", "task 70 sends memory that is received into"},
};

typedef struct memory {
    uint32_t out[64], in[64];
} memory;

/* On rank 1, which sends. */
static void do_wrong_sending(tb_copy *copy, fault f, memory *m) {
    static const int64_t gaps[] = {20, 3};
    tb_copy_view v = row(m->out, 8);
    switch (f) {
    case UNSENT:
        return;
    case SHAPES:
        v = (tb_copy_view){
            .size = sizeof(tb_copy_view), .data = m->out, .dtype = TB_U32, .ndim = 2, .shape = {2, 3}, .strides = gaps};
        break;
    case DOUBLED_SEND:
        send(copy, v, 2, 70);
        break;
    case DOUBLED_BOTH:
        receive(copy, row(m->in, 8), 0, 70);
        break;
    case ONE_WITHOUT_ID:
        send(copy, v, 2, TB_NO_TASK);
        send(copy, v, 2, TB_NO_TASK);
        break;
    case LOCAL_ALONE:
        send(copy, v, 1, 70);
        return;
    case LOCAL_SIZES:
        send(copy, v, 1, 70);
        receive(copy, row(m->in, 7), 1, 70);
        return;
    case LOCAL_OVERLAP: /* with what is sent to another rank */
        send(copy, row(m->out + 16, 8), 1, 71);
        receive(copy, row(m->out + 7, 8), 1, 71);
        break;
    case LOCAL_READ: /* with what comes from another rank */
        send(copy, v, 1, 70);
        receive(copy, row(m->in, 8), 1, 70);
        receive(copy, row(m->out + 7, 1), 0, 72);
        return;
    default:
        break;
    }
    send(copy, v, 2, 70);
}

/* On rank 2, which receives. */
static void do_wrong_receiving(tb_copy *copy, fault f, memory *m) {
    static const int64_t gaps[] = {20, 3}, folded[] = {0};
    tb_copy_view v = row(m->in, 8), both[] = {v, row(m->in + 20, 1)};
    switch (f) {
    case UNRECEIVED:
    case LOCAL_ALONE:
    case LOCAL_SIZES:
    case LOCAL_READ:
        return;
    case WRONG_RANK:
        receive(copy, v, 0, 70);
        return;
    case SIZES:
        v = row(m->in, 7);
        break;
    case ITEMS:
        v = (tb_copy_view){.size = sizeof(tb_copy_view), .data = m->in, .dtype = TB_F64, .ndim = 1, .shape = {4}};
        break;
    case COUNTS:
        check_ok(tb_copy_submit_recv(copy, both, 2, 1, 70));
        return;
    case SHAPES:
        v = (tb_copy_view){
            .size = sizeof(tb_copy_view), .data = m->in, .dtype = TB_U32, .ndim = 2, .shape = {3, 2}, .strides = gaps};
        break;
    case DOUBLED_RECV:
        receive(copy, row(m->in + 8, 8), 1, 70);
        break;
    case ONE_WITHOUT_ID:
        receive(copy, row(m->in + 8, 8), 1, TB_NO_TASK);
        break;
    case SAME_TARGET:
        receive(copy, row(m->in + 7, 8), 0, 73);
        break;
    case SAME_TARGET_OF_ONE:
        receive(copy, row(m->in + 7, 8), 1, 70);
        break;
    case FOLDED_TARGET:
        v.strides = folded;
        break;
    default:
        break;
    }
    receive(copy, v, 1, 70);
}

/* Something good goes along with each fault, and must not move. */
static void add_good(tb_copy *copy, const rank *r, memory *m) {
    int32_t other = 3 - r->index;
    if (r->index == 0 || r->index == 3) {
        send(copy, row(m->out + 48, 8), other, 80 + (uint64_t)r->index);
        receive(copy, row(m->in + 48, 8), other, 80 + (uint64_t)other);
        send(copy, row(m->out + 48, 8), r->index, 1);
        receive(copy, row(m->in + 56, 8), r->index, 1);
    }
}

static void go_wrong(rank *r) {
    tb_copy *copy = open_service(r, r->scene->shared);
    memory m;
    for (fault f = 0; f < FAULTS; f++) {
        set_all(m.out, 64, 3);
        set_all(m.in, 64, POISON);
        add_good(copy, r, &m);
        if (r->index == 1)
            do_wrong_sending(copy, f, &m);
        if (r->index == 2)
            do_wrong_receiving(copy, f, &m);
        if (r->index == 0 && f == SAME_TARGET)
            send(copy, row(m.out, 8), 2, 73);
        if (r->index == 0 && f == LOCAL_READ)
            send(copy, row(m.out, 1), 1, 72);
        check_fails(tb_copy_run(copy, 0), expected[f].status, expected[f].words);
        check(strstr(tb_error_detail(), expected[f].id));
        check(strstr(tb_error_detail(), "copy service 'c' over shm"));
        check(is_all(m.in, 64, POISON) && is_all(m.out, 64, 3));
        add_good(copy, r, &m); /* the next one succeeds */
        check_ok(tb_copy_run(copy, 0));
        bool has_good = r->index == 0 || r->index == 3;
        check(is_all(m.in + 48, 16, has_good ? 3 : POISON) && is_all(m.in, 48, POISON));
    }
    tb_copy_close(copy);
}

static void faults_fail_everywhere(void **state) {
    (void)state;
    run_ranks(go_wrong, 4, 0, NULL);
    tb_copy_opts opts = {.size = sizeof opts, .staged = true};
    run_ranks(go_wrong, 4, 0, &opts);
}

/* What is wrong with a call alone is refused at once, and leaves nothing behind. */
static void misuse(rank *r) {
    tb_copy *copy = open_service(r, NULL), *none;
    uint32_t data[4] = {0};
    tb_copy_view v = row(data, 4), bad = row(NULL, 4);
    check_fails(tb_copy_submit_send(copy, &v, 1, 2, 1), TB_INVALID, "task 1: there is no rank 2");
    check_fails(tb_copy_submit_recv(copy, &v, 1, -1, 1), TB_INVALID, "there is no rank -1");
    check_fails(tb_copy_submit_send(copy, &v, 0, 1, 1), TB_INVALID, "0 tensors");
    check_fails(tb_copy_submit_send(copy, &bad, 1, 1, 18), TB_INVALID, "task 18: tensor 0: a view's data is NULL");
    bad = row(data, 4);
    bad.memory = "cuda";
    check_fails(tb_copy_submit_send(copy, &bad, 1, 1, 18), TB_REFUSED, "tensor 0: its memory is said to be on device");
    bad.size = 0;
    check_fails(tb_copy_submit_send(copy, &bad, 1, 1, 18), TB_INVALID, "tensor 0: a tb_copy_view has size 0");
    check_fails(tb_copy_run(copy, -1), TB_INVALID, "negative");
    check_ok(tb_copy_run(copy, 0));
    tb_copy_opts opts = {.size = sizeof opts, .staging_bytes = 1};
    check_fails(tb_copy_open(r->world, "d", NULL, &opts, &none), TB_INVALID, "staging_bytes");
    check_fails(tb_copy_open(r->world, "", NULL, NULL, &none), TB_INVALID, "needs a name");
    check_fails(tb_copy_open(r->world, "d", "elsewhere", NULL, &none), TB_INVALID, "not in group 'elsewhere'");
    tb_copy_close(copy);
    tb_copy_close(NULL);
}

static void misuse_is_refused(void **state) {
    (void)state;
    run_ranks(misuse, 2, 0, NULL);
}

/* A rank that does not come is named, to all that have; when it does come, it is to the next run. */
static void come_late(rank *r) {
    tb_copy *copy = open_service(r, NULL);
    uint32_t data = (uint32_t)r->index;
    tb_copy_view v = row(&data, 1);
    for (int round = 0; round < 3; round++) {
        if (r->index == 0) {
            send(copy, v, 2, 4);
            check_fails(tb_copy_run(copy, SOON_MS), TB_TIMEOUT, "(a 2) has not come to run");
        } else if (r->index == 1) {
            check_fails(tb_copy_run(copy, 0), TB_TIMEOUT, "(a 2) has not come to run");
        }
        meet(r);
    }
    if (r->index == 0)
        send(copy, v, 2, 4);
    if (r->index == 2)
        receive(copy, v, 0, 4);
    check_ok(tb_copy_run(copy, 0));
    check(data == (r->index == 1));
    tb_copy_close(copy);
}

static void a_rank_never_comes(void **state) {
    (void)state;
    run_ranks(come_late, 3, 0, NULL);
}

/* One with nothing to do in a run goes on to the next and gives that up. It is not the others' run that it gave up. */
static void run_ahead(rank *r) {
    enum { N = 16 << 20 };
    tb_copy *copy = open_service(r, NULL);
    uint32_t *data = calloc(N, sizeof *data);
    for (uint32_t round = 1; round <= 5; round++) {
        tb_copy_view v = row(data, N);
        for (size_t i = 0; i < N && r->index == 0; i++)
            data[i] = (uint32_t)i * round;
        if (r->index == 0)
            send(copy, v, 1, round);
        if (r->index == 1)
            receive(copy, v, 0, round);
        check_ok(tb_copy_run(copy, 0));
        if (r->index == 2)
            check_fails(tb_copy_run(copy, 1), TB_TIMEOUT, "has not come to run");
        for (size_t i = 0; i < N && r->index == 1; i++)
            check(data[i] == (uint32_t)i * round);
        meet(r);
    }
    free(data);
    tb_copy_close(copy);
}

static void a_rank_runs_ahead(void **state) {
    (void)state;
    run_ranks(run_ahead, 3, 0, NULL);
}

/* Nobody waits for a rank that has closed the service, but what it had a part in is good. */
static void close_early(rank *r) {
    tb_copy *copy = open_service(r, NULL);
    uint32_t data = (uint32_t)r->index;
    tb_copy_view v = row(&data, 1);
    if (r->index == 2)
        send(copy, v, 0, 4);
    if (r->index == 0)
        receive(copy, v, 2, 4);
    check_ok(tb_copy_run(copy, 0));
    check(data == (r->index == 0 ? 2 : (uint32_t)r->index));
    if (r->index == 2)
        tb_copy_close(copy);
    else
        check_fails(tb_copy_run(copy, 0), TB_LOST, "(a 2) has closed copy service 'c'");
    meet(r);
    if (r->index != 2)
        tb_copy_close(copy);
    copy = open_service(r, NULL); /* a new one of the same name */
    check_ok(tb_copy_run(copy, 0));
    tb_copy_close(copy);
}

static void a_rank_closes(void **state) {
    (void)state;
    run_ranks(close_early, 3, 0, NULL);
}

/* One gives up waiting for another, and comes again; a third has been waiting all the time. */
static void open_alone(rank *r) {
    static _Atomic bool has_given_up;
    tb_copy *copy;
    tb_copy_opts opts = {.size = sizeof opts, .timeout_ms = SOON_MS};
    if (r->index == 0) {
        check_fails(tb_copy_open(r->world, "c", NULL, &opts, &copy), TB_TIMEOUT, "");
        has_given_up = true;
    }
    int64_t deadline_ms = tb__now_ms() + PATIENCE_MS;
    while (r->index == 1 && !has_given_up && tb__now_ms() < deadline_ms)
        usleep(1000);
    copy = open_service(r, NULL);
    check_ok(tb_copy_run(copy, 0));
    tb_copy_close(copy);
}

static void a_rank_does_not_open(void **state) {
    (void)state;
    run_ranks(open_alone, 3, 0, NULL);
}

/* ---- Memory that is invalidated --------------------------------------------------------------------------------- */

typedef struct runner {
    tb_copy *copy;
    int timeout_ms;
    tb_status status;
    char why[512];
} runner;

static void *run_elsewhere(void *arg) {
    runner *n = arg;
    n->status = tb_copy_run(n->copy, n->timeout_ms);
    snprintf(n->why, sizeof n->why, "%s", tb_error_detail());
    return NULL;
}

/* Rank 0 invalidates what it has submitted: before the run, while the run waits for rank 1, or when rank 1 has just
 * given that run up, so that rank 0 would begin the next one. Both ranks fail by name, and nothing is read or written.
 * Then all is well again. */
static void taken_away(rank *r) {
    enum { N = 1000 };
    const char *moment = r->scene->shared;
    bool is_early = strcmp(moment, "early") == 0, is_given_up = strcmp(moment, "given up") == 0;
    tb_copy *copy = open_service(r, NULL);
    runner n = {.copy = copy};
    pthread_t thread;
    uint32_t *data = malloc(sizeof *data * N);
    char words[80];
    for (int round = 0; round < 4; round++) {
        bool is_send = (r->index == 0) == (round % 2 == 0);
        set_all(data, N, is_send ? 7 : POISON);
        tb_copy_view v = row(data, N);
        check_ok((is_send ? tb_copy_submit_send : tb_copy_submit_recv)(copy, &v, 1, 1 - r->index, 3));
        meet(r);
        snprintf(words, sizeof words, "the memory of tensor 'task 3, tensor 0' on rank %d",
                 (int)tb_world_rank(r->scene->ranks[0].world));
        if (r->index == 0 && round < 2) {
            if (is_early)
                check_ok(tb_world_invalidate(r->world, data, sizeof *data * N));
            check(pthread_create(&thread, NULL, run_elsewhere, &n) == 0);
            for (bool is_running = is_early; !is_running; usleep(100)) {
                tb__loop_lock(r->world->loop);
                is_running = copy->is_running;
                if (is_running && is_given_up) { /* as by an ABORT of rank 1 that has come, but was not looked at yet */
                    copy->is_given_up = copy->is_late = true;
                    copy->abort_status = TB_TIMEOUT;
                }
                tb__loop_unlock(r->world->loop);
            }
            if (!is_early)
                check_ok(tb_world_invalidate(r->world, data, sizeof *data * N));
            set_all(data, N, POISON);
            if (!is_early)
                pthread_join(thread, NULL);
            meet(r);
            if (is_early)
                pthread_join(thread, NULL);
            check(n.status == TB_INVALID && strstr(n.why, words) && strstr(n.why, "copy service 'c'"));
            check(is_all(data, N, POISON));
        } else {
            if (round < 2)
                meet(r);
            tb_status status = tb_copy_run(copy, round < 2 && !is_early ? SOON_MS : 0);
            if (round < 2 && status != TB_TIMEOUT) /* it was given up before this rank came */
                check_fails(status, TB_INVALID, words);
            check(round < 2 ? is_early || status != TB_OK : status == TB_OK);
            check(is_all(data, N, round >= 2 || is_send ? 7 : POISON));
        }
        meet(r);
    }
    tb_copy_close(copy);
    free(data);
}

static void await_running(const rank *r, const tb_copy *copy) {
    for (bool is_running = false; !is_running; usleep(100)) {
        tb__loop_lock(r->world->loop);
        is_running = copy->is_running;
        tb__loop_unlock(r->world->loop);
    }
}

/* Rank 0 cancels its run: while it waits for rank 1, and then in the middle of it, at some moment. What a rank was told
 * has succeeded is there; after a failure nothing hinders the next run. */
static void cancel_runs(rank *r) {
    enum { N = 2 << 20, NROUNDS = 12 };
    tb_copy *copy = open_service(r, NULL);
    runner n = {.copy = copy};
    pthread_t thread;
    uint32_t *data = malloc(sizeof *data * N);
    tb_copy_cancel(copy); /* there is none */
    for (int round = 0; round < NROUNDS; round++) {
        bool is_send = (r->index == 0) == (round % 2 == 0), is_alone = round < 2;
        set_all(data, N, is_send ? 7 : POISON);
        tb_copy_view v = row(data, N);
        check_ok((is_send ? tb_copy_submit_send : tb_copy_submit_recv)(copy, &v, 1, 1 - r->index, 3));
        meet(r);
        if (r->index == 0) {
            check(pthread_create(&thread, NULL, run_elsewhere, &n) == 0);
            if (is_alone)
                await_running(r, copy);
            else
                usleep((useconds_t)(round * 300));
            tb_copy_cancel(copy);
            pthread_join(thread, NULL);
            check(n.status == TB_CANCELLED || (n.status == TB_OK && !is_alone));
            check(n.status == TB_OK || strstr(n.why, "was cancelled by"));
            if (is_alone)
                meet(r);
        } else {
            if (is_alone)
                meet(r);
            n.status = tb_copy_run(copy, SOON_MS); /* who comes after the end waits in vain */
            check(n.status == TB_CANCELLED || n.status == TB_TIMEOUT || (n.status == TB_OK && !is_alone));
        }
        if (n.status == TB_OK || is_send || is_alone)
            check(is_all(data, N, is_send || n.status == TB_OK ? 7 : POISON));
        meet(r);
        set_all(data, N, is_send ? 9 : POISON);
        check_ok((is_send ? tb_copy_submit_send : tb_copy_submit_recv)(copy, &v, 1, 1 - r->index, 3));
        meet(r);
        check_ok(tb_copy_run(copy, 0));
        check(is_all(data, N, 9));
        meet(r);
    }
    tb_copy_close(copy);
    free(data);
}

static void a_run_is_cancelled(void **state) {
    (void)state;
    run_ranks(cancel_runs, 2, 0, NULL);
}

/* What a rank copies to itself, and to others, in the middle of it. */
static void taken_in_the_rush(rank *r) {
    enum { N = 2 << 20 };
    tb_copy *copy = open_service(r, NULL);
    runner n = {.copy = copy, .timeout_ms = r->index ? 1000 : 0}; /* who comes after the end waits in vain */
    pthread_t thread;
    uint32_t *from = malloc(sizeof *from * N), *to = malloc(sizeof *to * N), *all;
    for (int round = 0; round < 6; round++) {
        set_all(from, N, 7);
        set_all(to, N, POISON);
        tb_copy_view source = row(from, N), target = row(to, N);
        check_ok(tb_copy_submit_send(copy, &source, 1, (r->index + 1) % r->size, 1 + (uint64_t)r->index));
        check_ok(tb_copy_submit_recv(copy, &target, 1, (r->index + r->size - 1) % r->size,
                                     1 + (uint64_t)(r->index + r->size - 1) % r->size));
        all = round % 2 ? from : to;
        check(pthread_create(&thread, NULL, run_elsewhere, &n) == 0);
        usleep(200 * (useconds_t)round);
        if (r->index == 0) {
            check_ok(tb_world_invalidate(r->world, all, sizeof *all * N));
            set_all(all, N, POISON);
        }
        pthread_join(thread, NULL);
        check(n.status == TB_OK || (n.status == TB_TIMEOUT && r->index) ||
              (n.status == TB_INVALID && strstr(n.why, "the memory of tensor 'task")));
        check(r->index != 0 || is_all(all, N, POISON));
        check((r->index == 0 && all == to) || n.status != TB_OK || is_all(to, N, 7));
        meet(r);
    }
    tb_copy_close(copy);
    free(from);
    free(to);
}

static void memory_is_taken_in_the_rush(void **state) {
    (void)state;
    run_ranks(taken_in_the_rush, 1, 0, NULL);
    run_ranks(taken_in_the_rush, 2, 0, NULL);
}

static void memory_is_taken_away(void **state) {
    (void)state;
    run_ranks(taken_away, 2, 0, "waiting");
    run_ranks(taken_away, 2, 0, "given up");
    run_ranks(taken_away, 2, 0, "early");
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(runs_again_and_again),
        cmocka_unit_test(runs_staged),
        cmocka_unit_test(runs_alone),
        cmocka_unit_test(options_may_differ),
        cmocka_unit_test(only_what_must_be_is_staged),
        cmocka_unit_test(strides_and_several_tensors),
        cmocka_unit_test(ids_may_be_left_out_or_repeated),
        cmocka_unit_test(own_copies_are_converted),
        cmocka_unit_test(services_are_apart),
        cmocka_unit_test(ranks_swap),
        cmocka_unit_test(faults_fail_everywhere),
        cmocka_unit_test(misuse_is_refused),
        cmocka_unit_test(a_rank_never_comes),
        cmocka_unit_test(a_rank_runs_ahead),
        cmocka_unit_test(a_rank_closes),
        cmocka_unit_test(a_rank_does_not_open),
        cmocka_unit_test(a_run_is_cancelled),
        cmocka_unit_test(memory_is_taken_away),
        cmocka_unit_test(memory_is_taken_in_the_rush),
    };
    return cmocka_run_group_tests_name("copy", tests, NULL, NULL);
}
