/* Plans that somebody else has made, executed over a copy service: every element of every target, and what fails.
 *
 * A matrix "w" has its columns on ranks 0 and 1, and its rows on ranks 1 and 2; a vector "b" goes from rank 0 to
 * rank 2. So rank 0 only sends, 1 does both, also to itself, 2 only receives, and 3 is idle. Blocks of 32 columns come
 * from two ranks. */
#include "bus/bus_test.h"
#include "copy/copy.h"
#include "reshard/encode.h"

#include "../tests/support/quantised.h"

enum { ROWS = 64, HALF = 32, COLUMNS = 64, CUT = 16, NB = 40, MASK = 0x5a };

typedef struct job {
    tb_dtype src, dst, wire; /* wire: buffer_dtype of both ends */
    const char *encode;      /* of the targets */
    enum { NO_TRANSFORM, AT_TARGETS, AT_SOURCES, AT_BOTH } transform;
    bool staged, is_strided;
    const char *fails; /* in the way that it names */
} job;

/* An integer that bf16 has, too. */
static float value_at(uint32_t version, int64_t row, int64_t column) {
    return (float)((row * COLUMNS + column) * 7 % 241 - 120 + (int64_t)version);
}

static uint64_t bits_at(tb_dtype dtype, uint32_t version, int64_t row, int64_t column) {
    float f = value_at(version, row, column);
    uint32_t bits;
    memcpy(&bits, &f, sizeof bits);
    return number_cast(TB_F32, dtype, bits);
}

/* ---- Transforms -------------------------------------------------------------------------------------------------- */

typedef struct log {
    const job *job;
    const void *b; /* the vector that is received directly */
    uint32_t version;
    int count;
    int64_t column[4];
} log_of_pieces;

static bool takes_w(void *arg, const char *name) {
    (void)arg;
    return strcmp(name, "w") == 0;
}

static char *element_of(const tb_binding *box, int64_t i) {
    int64_t at = 0;
    for (int d = box->shape.ndim; d-- > 0; i /= box->shape.dim[d])
        at += i % box->shape.dim[d] * box->strides[d];
    return (char *)box->base + box->offset + at * (int64_t)number_size(box->dtype);
}

/* Bytes are turned, as they lie in the wire. */
static tb_status send_masked(void *arg, const tb_transform_piece *piece, const tb_binding *box, void *wire) {
    const log_of_pieces *l = arg;
    size_t each = number_size(box->dtype);
    int64_t n = piece->shape[0] * piece->shape[1];
    if (l->job->fails && strcmp(l->job->fails, "send") == 0)
        return tb_error_set(TB_INVALID, "it does not like this");
    for (int64_t i = 0; i < n; i++) {
        for (size_t k = 0; k < each; k++)
            ((char *)wire)[(size_t)i * each + k] = (char)(element_of(box, i)[k] ^ MASK);
    }
    if (piece->nbuffers == 2)
        memcpy((char *)wire + piece->buffer_offset[1], &n, sizeof n);
    return TB_OK;
}

static tb_status recv_masked(void *arg, const tb_transform_piece *piece, const tb_binding *box, const void *wire) {
    log_of_pieces *l = arg;
    size_t each = number_size(box->dtype);
    int64_t n = piece->shape[0] * piece->shape[1], sent = n;
    if (l->job->fails && strcmp(l->job->fails, "recv") == 0)
        return tb_error_set(TB_INVALID, "it does not like that");
    if (piece->nbuffers == 2)
        memcpy(&sent, (const char *)wire + piece->buffer_offset[1], sizeof sent);
    if (l->count == 4 || sent != n)
        return tb_error_set(TB_INVALID, "there is more than there should be");
    for (int64_t i = 0; i < NB && l->b; i++) {
        if (((const uint32_t *)tensor_bytes(l->b))[i] != l->version * 1000 + i)
            return tb_error_set(TB_INVALID, "not all has arrived");
    }
    tensors_flush();
    l->column[l->count++] = piece->dst_start[1];
    for (int64_t i = 0; i < n; i++) {
        for (size_t k = 0; k < each; k++)
            element_of(box, i)[k] = (char)(((const char *)wire)[(size_t)i * each + k] ^ MASK);
    }
    return TB_OK;
}

static int two_buffers(void *arg, const tb_transform_piece *piece, int64_t *nbytes) {
    (void)arg;
    nbytes[0] = piece->shape[0] * piece->shape[1] * (int64_t)number_size(piece->dtype);
    nbytes[1] = 8;
    return 2;
}

/* ---- A rank ------------------------------------------------------------------------------------------------------ */

typedef struct member {
    tb_copy *copy;
    bool is_source, is_target;
    int64_t first_column, ncolumns, first_row; /* of the matrix */
    int64_t gap;                               /* between rows */
    char *source, *target;
    uint32_t *b;
    tb__encoded_size size;
    uint8_t *scales;
    float *scale;
    tb_copy_view views[3];
    int64_t strides[2][2];
    tb_reshard_param sources[2], targets[2];
    tb_reshard_op sends[3], recvs[3];
    tb_reshard_plan plan;
    tb_transform transform;
    log_of_pieces log;
} member;

static tb_reshard_op matrix_op(int32_t peer, int32_t source, int32_t target, bool is_send) {
    int64_t n = source ? COLUMNS - CUT : CUT;
    tb_slice in_source = {.start = {target * HALF}, .length = {HALF, n}};
    tb_slice in_target = {.start = {0, source ? CUT : 0}, .length = {HALF, n}};
    return (tb_reshard_op){.size = sizeof(tb_reshard_op),
                           .param = "w",
                           .peer = peer,
                           .here = is_send ? in_source : in_target,
                           .there = is_send ? in_target : in_source,
                           .task_id = (uint64_t)(source * 10 + target)};
}

static tb_reshard_op vector_op(int32_t peer) {
    return (tb_reshard_op){.size = sizeof(tb_reshard_op),
                           .param = "b",
                           .peer = peer,
                           .here.length = {NB},
                           .there.length = {NB},
                           .task_id = TB_NO_TASK};
}

static tb_copy_view matrix_view(member *m, const job *j, bool is_source) {
    tb_copy_view v = {.size = sizeof v, .data = is_source ? m->source : m->target, .ndim = 2};
    v.dtype = is_source ? j->src : j->dst;
    v.shape[0] = is_source ? ROWS : HALF;
    v.shape[1] = is_source ? m->ncolumns : COLUMNS;
    m->strides[is_source][0] = v.shape[1] + m->gap;
    m->strides[is_source][1] = 1;
    v.strides = m->gap ? m->strides[is_source] : NULL;
    return v;
}

static void add_source(const rank *r, member *m, const job *j) {
    m->first_column = r->index ? CUT : 0;
    m->ncolumns = r->index ? COLUMNS - CUT : CUT;
    check((m->source = tensor_alloc((size_t)(ROWS * (m->ncolumns + m->gap)) * 8)));
    m->views[0] = matrix_view(m, j, true);
    m->sources[0] =
        (tb_reshard_param){.size = sizeof m->sources[0], .name = "w", .view = &m->views[0], .buffer_dtype = j->wire};
    for (int32_t t = 0; t < 2; t++)
        m->sends[m->plan.nsends++] = matrix_op(1 + t, r->index, t, true);
    m->plan.nsources = 1;
}

static void add_target(const rank *r, member *m, const job *j) {
    tb__encoding e;
    m->first_row = r->index == 1 ? 0 : HALF;
    check((m->target = tensor_alloc((size_t)(HALF * (COLUMNS + m->gap)) * 8)));
    m->views[1] = matrix_view(m, j, false);
    m->targets[0] = (tb_reshard_param){
        .size = sizeof m->targets[0], .name = "w", .view = &m->views[1], .buffer_dtype = j->wire, .encode = j->encode};
    if (j->encode) {
        tb_shape shape = {2, {HALF, COLUMNS}};
        check_ok(tb__encoding_parse(j->encode, &e));
        check_ok(tb__encoded_measure(&e, &shape, &m->size));
        check((m->targets[0].scales = m->scales = tensor_alloc(m->size.scales_nbytes + 1)));
        check((m->targets[0].scale = m->scale = tensor_alloc(sizeof *m->scale)));
    }
    for (int32_t s = 2; s-- > 0;) /* not in the order of ids */
        m->recvs[m->plan.nrecvs++] = matrix_op(s, s, r->index - 1, false);
    m->plan.ntargets = 1;
}

static void member_init(rank *r, member *m, const job *j) {
    tb_copy_opts opts = {.size = sizeof opts, .staged = j->staged};
    *m = (member){.is_source = r->index < 2, .is_target = r->index == 1 || r->index == 2};
    m->gap = j->is_strided ? 3 : 0;
    m->plan = (tb_reshard_plan){
        .size = sizeof m->plan, .sends = m->sends, .recvs = m->recvs, .sources = m->sources, .targets = m->targets};
    m->transform = (tb_transform){.size = sizeof m->transform,
                                  .arg = &m->log,
                                  .should_transform = takes_w,
                                  .prepare_send = j->transform & AT_SOURCES ? send_masked : NULL,
                                  .finalize_recv = j->transform & AT_TARGETS ? recv_masked : NULL,
                                  .list_buffers = j->transform == AT_BOTH ? two_buffers : NULL};
    m->plan.transform = j->transform ? &m->transform : NULL;
    if (m->is_source)
        add_source(r, m, j);
    if (m->is_target)
        add_target(r, m, j);
    if (r->index == 0 || r->index == 2) {
        bool is_send = r->index == 0;
        check((m->b = tensor_alloc(NB * sizeof *m->b)));
        m->views[2] =
            (tb_copy_view){.size = sizeof m->views[2], .data = m->b, .dtype = TB_U32, .ndim = 1, .shape = {NB}};
        tb_reshard_param p = {.size = sizeof p, .name = "b", .view = &m->views[2]};
        if (is_send) {
            m->sources[m->plan.nsources++] = p;
            m->sends[m->plan.nsends++] = vector_op(2);
        } else {
            m->targets[m->plan.ntargets++] = p;
            m->recvs[m->plan.nrecvs++] = vector_op(0);
        }
    }
    m->log = (log_of_pieces){.job = j, .b = r->index == 2 ? m->b : NULL};
    check_ok(tb_copy_open(r->world, "c", NULL, &opts, &m->copy));
}

static void member_fini(member *m) {
    tb_copy_close(m->copy);
    tensor_free(m->source);
    tensor_free(m->target);
    tensor_free(m->b);
    tensor_free(m->scales);
    tensor_free(m->scale);
}

static void fill(const rank *r, member *m, const job *j, uint32_t version) {
    size_t each = number_size(j->src);
    for (int64_t i = 0; m->is_source && i < ROWS * m->ncolumns; i++) {
        int64_t row = i / m->ncolumns, column = i % m->ncolumns;
        number_store(j->src, (char *)tensor_bytes(m->source) + (size_t)(row * (m->ncolumns + m->gap) + column) * each,
                     bits_at(j->src, version, row, m->first_column + column));
    }
    for (uint32_t i = 0; m->b && i < NB; i++)
        ((uint32_t *)tensor_bytes(m->b))[i] = r->index ? POISON : version * 1000 + i;
    if (m->is_target)
        memset(tensor_bytes(m->target), 0xa5, (size_t)(HALF * (COLUMNS + m->gap)) * 8);
    if (m->scales) {
        memset(tensor_bytes(m->scales), 0xa5, m->size.scales_nbytes);
        *(float *)tensor_bytes(m->scale) = -1;
    }
    m->log.version = version;
    m->log.count = 0;
}

static bool is_poison(const void *p, size_t nbytes) {
    for (size_t i = 0; i < nbytes; i++) {
        if (((const uint8_t *)p)[i] != 0xa5)
            return false;
    }
    return true;
}

static void check_plain(const member *m, const job *j, uint32_t version) {
    size_t each = number_size(j->dst);
    const char *at = tensor_bytes(m->target);
    bool is_masked = j->transform == AT_TARGETS || j->transform == AT_SOURCES;
    for (int64_t row = 0; row < HALF; row++) {
        for (int64_t column = 0; column < COLUMNS; column++, at += each) {
            uint64_t wanted = bits_at(j->dst, version, m->first_row + row, column);
            for (size_t k = 0; is_masked && k < each; k++)
                wanted ^= (uint64_t)MASK << (8 * k);
            check(number_load(j->dst, at) == wanted);
        }
        check(is_poison(at, (size_t)m->gap * each));
        at += (size_t)m->gap * each;
    }
}

/* Against the reference, of all rows at once. */
static void check_encoded(const member *m, const job *j, uint32_t version) {
    tb__encoding e;
    check_ok(tb__encoding_parse(j->encode, &e));
    static _Thread_local uint16_t numbers[HALF * COLUMNS];
    static _Thread_local uint8_t data[HALF * COLUMNS], scales[HALF * COLUMNS];
    float most = 0;
    for (int64_t i = 0; i < (int64_t)HALF * COLUMNS; i++) {
        float f = value_at(version, m->first_row + i / COLUMNS, i % COLUMNS);
        numbers[i] = (uint16_t)bits_at(TB_BF16, version, m->first_row + i / COLUMNS, i % COLUMNS);
        most = f > most ? f : -f > most ? -f : most;
    }
    tb__quant_tensor to = {.format = e.format, .rows = HALF, .columns = COLUMNS, .data = data, .scales = scales};
    bool is_global = tb__encoding_is_global(&e);
    if (is_global)
        check_ok(tb__quant_scale(&e.format, most, &to.scale));
    quantised_make(&to, &(tb__quant_rows){(void *)numbers, TB_BF16, COLUMNS});
    check(memcmp(tensor_bytes(m->target), data, m->size.data_nbytes) == 0);
    check(memcmp(tensor_bytes(m->scales), scales, m->size.scales_nbytes) == 0);
    check(!is_global || *(float *)tensor_bytes(m->scale) == to.scale);
}

static void check_counts(const rank *r, const job *j, const tb_reshard_counts *c) {
    size_t w = r->index == 1 || r->index == 2 ? 2 : 0;
    bool is_transformed = j->transform & AT_TARGETS, copies = j->wire && j->wire != j->dst;
    check(c->direct == (size_t)(r->index == 2) + (is_transformed || j->encode || copies ? 0 : w));
    check(c->transformed == (is_transformed ? w : 0));
    check(c->accumulated == (j->encode ? w : 0));
    check(c->copied == (copies && !j->encode && !is_transformed ? w : 0));
}

static void run_job(rank *r) {
    const job *j = r->scene->shared;
    member m;
    member_init(r, &m, j);
    for (uint32_t version = 1; version <= 3; version++) {
        tb_reshard_counts counts = {.size = sizeof counts};
        fill(r, &m, j, version);
        check_ok(tb_reshard_execute_plan(m.copy, &m.plan, 0, &counts));
        check_counts(r, j, &counts);
        if (m.is_target && j->encode)
            check_encoded(&m, j, version);
        else if (m.is_target)
            check_plain(&m, j, version);
        for (uint32_t i = 0; m.b && i < NB; i++)
            check(((uint32_t *)tensor_bytes(m.b))[i] == version * 1000 + i);
        check(m.log.count == (m.is_target && j->transform & AT_TARGETS ? 2 : 0));
        check(m.log.count == 0 || (m.log.column[0] == CUT && m.log.column[1] == 0)); /* as in the plan */
        meet(r);
    }
    member_fini(&m);
}

static void test_ways(void **state) {
    (void)state;
    static const job jobs[] = {
        {.src = TB_F32, .dst = TB_F32},
        {.src = TB_F32, .dst = TB_F32, .is_strided = true, .staged = true},
        {.src = TB_F32, .dst = TB_BF16, .wire = TB_BF16},
        {.src = TB_BF16, .dst = TB_F32, .wire = TB_BF16, .is_strided = true},
        {.src = TB_F32, .dst = TB_F32, .wire = TB_BF16, .staged = true},
        {.src = TB_F32, .dst = TB_F32, .transform = AT_TARGETS},
        {.src = TB_BF16, .dst = TB_BF16, .transform = AT_SOURCES, .is_strided = true},
        {.src = TB_F32, .dst = TB_F32, .transform = AT_BOTH},
        {.src = TB_BF16, .dst = TB_BF16, .transform = AT_BOTH, .is_strided = true, .staged = true},
        {.src = TB_BF16, .dst = TB_F8E4M3, .encode = "mxfp8"},
        {.src = TB_F32, .dst = TB_F8E4M3, .encode = "mxfp8", .wire = TB_BF16, .staged = true},
        {.src = TB_BF16, .dst = TB_F8E4M3, .encode = "fp8_tensor"},
    };
    for (size_t i = 0; i < sizeof jobs / sizeof *jobs; i++)
        run_ranks(run_job, 4, 0, &jobs[i]);
}

/* Between machines. */
static void test_ucx(void **state) {
    (void)state;
    static const char *const hosts[] = {"w", "x", "y", "z"};
    static const job jobs[] = {{.src = TB_F32, .dst = TB_F32, .transform = AT_BOTH},
                               {.src = TB_F32, .dst = TB_F8E4M3, .encode = "mxfp8", .wire = TB_BF16}};
    for (size_t i = 0; i < sizeof jobs / sizeof *jobs; i++) {
        scene s;
        scene_init(&s);
        s.hosts = hosts;
        run_ranks_in(&s, run_job, 4, 0, &jobs[i]);
    }
}

/* A quantised source is sent as numbers. */
static void from_quantised(rank *r) {
    enum { N = 4 };
    tb_copy *copy;
    tb__encoding e;
    uint16_t *numbers = tensor_alloc(N * HALF * sizeof *numbers);
    uint8_t *data = tensor_alloc(N * HALF), *scales = tensor_alloc(N);
    check_ok(tb_copy_open(r->world, "c", NULL, NULL, &copy));
    check_ok(tb__encoding_parse("mxfp8", &e));
    for (int i = 0; i < N * HALF; i++)
        ((uint16_t *)tensor_bytes(numbers))[i] = (uint16_t)bits_at(TB_BF16, 1, i / HALF, i % HALF);
    tb__quant_tensor to = {
        .format = e.format, .rows = N, .columns = HALF, .data = tensor_bytes(data), .scales = tensor_bytes(scales)};
    quantised_make(&to, &(tb__quant_rows){tensor_bytes(numbers), TB_BF16, HALF});
    tb_copy_view quantised = {
        .size = sizeof quantised, .data = data, .dtype = TB_F8E4M3, .ndim = 2, .shape = {N, HALF}};
    tb_copy_view plain = {.size = sizeof plain, .data = numbers, .dtype = TB_BF16, .ndim = 2, .shape = {N, HALF}};
    tb_reshard_param source = {
        .size = sizeof source, .name = "w", .view = &quantised, .encode = "mxfp8", .scales = scales};
    tb_reshard_param target = {.size = sizeof target, .name = "w", .view = &plain};
    tb_reshard_op op = {.size = sizeof op, .param = "w", .peer = 1 - r->index, .task_id = 5};
    op.here = op.there = (tb_slice){.start = {1, 8}, .length = {2, 16}};
    tb_reshard_plan plan = {.size = sizeof plan};
    if (r->index == 0) {
        plan.sends = &op, plan.nsends = 1, plan.sources = &source, plan.nsources = 1;
    } else {
        plan.recvs = &op, plan.nrecvs = 1, plan.targets = &target, plan.ntargets = 1;
        memset(tensor_bytes(numbers), 0xa5, N * HALF * sizeof *numbers);
    }
    check_ok(tb_reshard_execute_plan(copy, &plan, 0, NULL));
    to.data = tensor_bytes(data); /* the same on both */
    to.scales = tensor_bytes(scales);
    for (int i = 0; r->index == 1 && i < N * HALF; i++) {
        int row = i / HALF, column = i % HALF;
        bool is_in = row >= 1 && row < 3 && column >= 8 && column < 24;
        check(((uint16_t *)tensor_bytes(numbers))[i] == (is_in ? quantised_value(&to, row, column, TB_BF16) : 0xa5a5));
    }
    meet(r);
    tb_copy_close(copy);
    tensor_free(numbers);
    tensor_free(data);
    tensor_free(scales);
}

static void test_from_quantised(void **state) {
    (void)state;
    run_ranks(from_quantised, 2, 0, NULL);
}

/* ---- What fails -------------------------------------------------------------------------------------------------- */

typedef struct mistake {
    const char *what;
    tb_status status;
    const char *words;
} mistake;

static void make_mistake(const rank *r, member *m, const char *what) {
    bool is_0 = r->index == 0, is_2 = r->index == 2;
    if (is_0 && strcmp(what, "name") == 0)
        m->sends[1].param = "v";
    if (is_0 && strcmp(what, "slice") == 0)
        m->sends[0].here.start[1] = 1;
    if (is_2 && strcmp(what, "there") == 0)
        m->recvs[0].there.length[0]++;
    if (is_2 && strcmp(what, "task") == 0)
        m->recvs[1].task_id = 99;
    if (is_2 && strcmp(what, "part") == 0)
        m->plan.nrecvs = 1, m->recvs[0].there.length[0] = m->recvs[0].here.length[0] = HALF / 2;
    if (is_2 && strcmp(what, "twice") == 0)
        m->targets[1].name = "w";
    if (is_2 && strcmp(what, "peer") == 0)
        m->recvs[0].peer = 7;
    if (is_2 && strcmp(what, "cast") == 0)
        m->targets[1].buffer_dtype = TB_F16;
}

/* Everybody fails alike, nothing is written, and the next execution succeeds. */
static void mistaken(rank *r) {
    const mistake *k = r->scene->shared;
    job j = {.src = TB_BF16,
             .dst = strcmp(k->what, "part") == 0 ? TB_F8E4M3 : TB_BF16,
             .encode = strcmp(k->what, "part") == 0 ? "mxfp8" : NULL,
             .transform = strcmp(k->what, "send") == 0 ? AT_SOURCES : NO_TRANSFORM,
             .fails = k->what};
    member m;
    member_init(r, &m, &j);
    fill(r, &m, &j, 1);
    tb_reshard_op sends[3], recvs[3];
    tb_reshard_param targets[2];
    size_t nrecvs = m.plan.nrecvs;
    memcpy(sends, m.sends, sizeof sends);
    memcpy(recvs, m.recvs, sizeof recvs);
    memcpy(targets, m.targets, sizeof targets);
    make_mistake(r, &m, k->what);
    check_fails(tb_reshard_execute_plan(m.copy, &m.plan, 0, NULL), k->status, k->words);
    check(!m.is_target || is_poison(tensor_bytes(m.target), (size_t)HALF * COLUMNS * number_size(j.dst)));
    meet(r);
    memcpy(m.sends, sends, sizeof sends);
    memcpy(m.recvs, recvs, sizeof recvs);
    memcpy(m.targets, targets, sizeof targets);
    m.plan.nrecvs = nrecvs;
    j.fails = NULL;
    check_ok(tb_reshard_execute_plan(m.copy, &m.plan, 0, NULL));
    if (m.is_target && j.encode)
        check_encoded(&m, &j, 1);
    else if (m.is_target)
        check_plain(&m, &j, 1);
    meet(r);
    member_fini(&m);
}

static void test_mistakes(void **state) {
    (void)state;
    static const mistake all[] = {
        {"name", TB_INVALID, "(a 0): send 1, of parameter 'v': there is no such source"},
        {"slice", TB_INVALID, "(a 0): send 0, of parameter 'w': 16 indices from 1 on are not in dim 1, which has 16"},
        {"there", TB_INVALID,
         "receive 0, of parameter 'w': it has 32 indices of dim 0 here, but 33 from 32 on at the peer"},
        {"task", TB_CONFLICT, "task 1"},
        {"part", TB_INVALID, "the plan has 768 elements of parameter 'w', which is quantised and has 2048"},
        {"twice", TB_INVALID, "two targets are called 'w'"},
        {"peer", TB_INVALID, "there is no rank 7: the group has 4"},
        {"cast", TB_REFUSED, "parameter 'b': there is no cast from f16 to u32"},
        {"send", TB_INVALID, "of parameter 'w': it does not like this"},
    };
    for (size_t i = 0; i < sizeof all / sizeof *all; i++)
        run_ranks(mistaken, 4, 0, &all[i]);
}

/* What fails after the run is that rank's own. */
static void fails_to_finish(rank *r) {
    job j = {.src = TB_BF16, .dst = TB_BF16, .transform = AT_TARGETS, .fails = r->index == 2 ? "recv" : NULL};
    member m;
    member_init(r, &m, &j);
    fill(r, &m, &j, 1);
    if (r->index == 2)
        check_fails(tb_reshard_execute_plan(m.copy, &m.plan, 0, NULL), TB_INVALID,
                    "receive 0, of parameter 'w': it does not like that");
    else
        check_ok(tb_reshard_execute_plan(m.copy, &m.plan, 0, NULL));
    if (r->index == 1)
        check_plain(&m, &j, 1);
    meet(r);
    member_fini(&m);
}

static void test_fails_to_finish(void **state) {
    (void)state;
    run_ranks(fails_to_finish, 4, 0, NULL);
}

/* Rank 3 does not come in time. */
static void late(rank *r) {
    job j = {.src = TB_F32, .dst = TB_F32};
    member m;
    member_init(r, &m, &j);
    fill(r, &m, &j, 1);
    if (r->index != 3)
        check_fails(tb_reshard_execute_plan(m.copy, &m.plan, SOON_MS, NULL), TB_TIMEOUT, "(a 3) has not come to run 1");
    check(!m.is_target || is_poison(tensor_bytes(m.target), (size_t)HALF * COLUMNS * 4));
    meet(r);
    check_ok(tb_reshard_execute_plan(m.copy, &m.plan, 0, NULL));
    if (m.is_target)
        check_plain(&m, &j, 1);
    meet(r);
    member_fini(&m);
}

static void test_late(void **state) {
    (void)state;
    run_ranks(late, 4, 0, NULL);
}

/* Two receives into the same slice by copies: the plan's last one stays. */
static void same_slice(rank *r) {
    tb_copy *copy;
    float number = r->index ? (float)r->index : -1;
    tb_copy_view view = {.size = sizeof view, .data = &number, .dtype = TB_F32, .ndim = 1, .shape = {1}};
    tb_reshard_param p = {.size = sizeof p, .name = "x", .view = &view, .buffer_dtype = TB_BF16};
    tb_reshard_op ops[2];
    check_ok(tb_copy_open(r->world, "c", NULL, NULL, &copy));
    for (int32_t last = 1; last <= 2; last++) {
        for (int32_t i = 0; i < 2; i++)
            ops[i] = (tb_reshard_op){.size = sizeof ops[i],
                                     .param = "x",
                                     .peer = r->index ? 0
                                             : i      ? last
                                                      : 3 - last,
                                     .here.length = {1},
                                     .there.length = {1},
                                     .task_id = TB_NO_TASK};
        tb_reshard_plan plan = {.size = sizeof plan,
                                .sends = ops,
                                .nsends = r->index ? 1 : 0,
                                .recvs = ops,
                                .nrecvs = r->index ? 0 : 2,
                                .sources = &p,
                                .nsources = r->index ? 1 : 0,
                                .targets = &p,
                                .ntargets = r->index ? 0 : 1};
        check_ok(tb_reshard_execute_plan(copy, &plan, 0, NULL));
        check(r->index || number == (float)last);
    }
    meet(r);
    tb_copy_close(copy);
}

static void test_same_slice(void **state) {
    (void)state;
    run_ranks(same_slice, 3, 0, NULL);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_ways),       cmocka_unit_test(test_ucx),      cmocka_unit_test(test_from_quantised),
        cmocka_unit_test(test_same_slice), cmocka_unit_test(test_mistakes), cmocka_unit_test(test_fails_to_finish),
        cmocka_unit_test(test_late),
    };
    return cmocka_run_group_tests_name("reshard", tests, NULL, NULL);
}
