/* Transforms of the user's own: pieces that go as other bytes than their elements have, and what is refused. */
#include "bus/bus_test.h"

enum { SIDE = 12 };

static bool takes_w(void *arg, const char *name) {
    (void)arg;
    return name[0] == 'w';
}

static int64_t count_elements(const tb_transform_piece *piece) {
    int64_t n = 1;
    for (int d = 0; d < piece->ndim; d++)
        n *= piece->shape[d];
    return n;
}

/* Every number takes one byte more than it has, and the wire ends with the sum of what is on it. */
static int64_t wire_size(void *arg, const tb_transform_piece *piece) {
    (void)arg;
    return count_elements(piece) * 5 + 4;
}

static uint32_t *element_of(const tb_binding *box, int64_t i) {
    int64_t at = 0;
    for (int d = box->shape.ndim; d-- > 0; i /= box->shape.dim[d])
        at += i % box->shape.dim[d] * box->strides[d];
    return (uint32_t *)(void *)((char *)box->base + box->offset) + at;
}

static tb_status to_wire(void *arg, const tb_transform_piece *piece, const tb_binding *box, void *wire) {
    unsigned char *out = wire;
    uint32_t sum = 0;
    ++*(_Atomic int *)arg;
    for (int64_t i = 0; i < count_elements(piece); i++) {
        uint32_t x = *element_of(box, i) ^ 0x5a5a5a5a;
        out[5 * i] = 17;
        memcpy(out + 5 * i + 1, &x, sizeof x);
        sum += x;
    }
    memcpy(out + 5 * count_elements(piece), &sum, sizeof sum);
    return TB_OK;
}

static tb_status from_wire(void *arg, const tb_transform_piece *piece, const tb_binding *box, const void *wire) {
    const unsigned char *in = wire;
    uint32_t sum = 0, expected;
    ++*(_Atomic int *)arg;
    for (int64_t i = 0; i < count_elements(piece); i++) {
        uint32_t x;
        memcpy(&x, in + 5 * i + 1, sizeof x);
        if (in[5 * i] != 17)
            return tb_error_set(TB_INVALID, "a byte is wrong");
        *element_of(box, i) = x ^ 0x5a5a5a5a;
        sum += x;
    }
    memcpy(&expected, in + 5 * count_elements(piece), sizeof expected);
    return sum == expected ? TB_OK : tb_error_set(TB_INVALID, "a sum is wrong");
}

static void transform(rank *r) {
    _Atomic int calls = 0;
    tb_transform own = {.size = sizeof own,
                        .arg = &calls,
                        .should_transform = takes_w,
                        .prepare_recv = wire_size,
                        .prepare_send = to_wire,
                        .finalize_recv = from_wire};
    tb_batch_opts opts = {.size = sizeof opts, .transform = &own};
    const char *layout = is_a(r) ? "mesh=2 place=Shard(0)" : "mesh=2 place=Shard(1)";
    part parts[2];
    tb_pair *pair;
    tb_batch *batch;
    check_ok(tb_pair_create(r->world, "p", other_group(r), layout, NULL, &pair));
    check_ok(tb_batch_create(r->world, "step", &opts, &batch));
    for (int i = 0; i < 2; i++) {
        part_init(&parts[i], layout, r->index, SIDE, SIDE);
        tb_tensor t = part_tensor(&parts[i]);
        check_ok(tb_batch_add(batch, pair, i ? "w" : "bias", &t));
    }
    for (uint32_t version = 1; version <= 3; version++) {
        for (int i = 0; i < 2; i++) {
            if (is_a(r))
                part_fill(&parts[i], version);
            else
                part_poison(&parts[i]);
        }
        check_ok(tb_reshard_execute(batch, "a", NULL, NULL, NULL));
        check(part_holds(&parts[0], version) && part_holds(&parts[1], version));
        check(calls == 2 * (int)version);
        meet(r);
    }
    char *dump;
    check_ok(tb_batch_dump(batch, is_a(r), &dump));
    check(strstr(dump, is_a(r) ? "to 2, coded" : "from 0, transform") || strstr(dump, is_a(r) ? "coded" : "transform"));
#ifndef TB_SLOW_DEVICE /* which is staged */
    check(strstr(dump, is_a(r) ? "read in place" : "direct"));
#endif
    free(dump);
    meet(r);
    tb_batch_destroy(batch);
    tb_pair_destroy(pair);
    part_fini(&parts[0]);
    part_fini(&parts[1]);
}

static void test_transform(void **state) {
    (void)state;
    run_ranks(transform, 2, 2, NULL);
}

static int64_t half_size(void *arg, const tb_transform_piece *piece) {
    (void)arg;
    return count_elements(piece) * 2;
}

/* Pieces have a size of their own, and nothing makes or reads them. */
static void no_functions(rank *r) {
    tb_transform own = {.size = sizeof own, .prepare_recv = half_size};
    tb_batch_opts opts = {.size = sizeof opts, .transform = &own};
    part p;
    tb_pair *pair;
    tb_batch *batch;
    tb_transfer *receiving = NULL;
    static const char words[] = "tensor 'w' has a piece of 288 bytes on the wire, but nothing converts it here";
    check_ok(tb_pair_create(r->world, "p", other_group(r), "mesh=1 place=R", NULL, &pair));
    check_ok(tb_batch_create(r->world, "step", &opts, &batch));
    part_init(&p, "mesh=1 place=R", r->index, SIDE, SIDE);
    tb_tensor t = part_tensor(&p);
    check_ok(tb_batch_add(batch, pair, "w", &t));
    check_ok(tb_batch_register(batch, 0));
    if (!is_a(r))
        check_ok(tb_recv(batch, NULL, &receiving));
    meet(r);
    if (is_a(r))
        check_fails(tb_reshard_execute(batch, "a", NULL, NULL, NULL), TB_INVALID, words);
    else
        check_fails(tb_wait(receiving, TB_ARRIVED, -1), TB_INVALID, words);
    tb_transfer_destroy(receiving);
    meet(r);
    tb_batch_destroy(batch);
    tb_pair_destroy(pair);
    part_fini(&p);
}

static void test_no_functions(void **state) {
    (void)state;
    run_ranks(no_functions, 1, 1, NULL);
}

/* ---- At one side ------------------------------------------------------------------------------------------------ */

#define MASK 0x00c3a55aU

static tb_status send_masked(void *arg, const tb_transform_piece *piece, const tb_binding *box, void *wire) {
    (void)arg;
    for (int64_t i = 0; i < count_elements(piece); i++)
        ((uint32_t *)wire)[i] = *element_of(box, i) ^ MASK;
    return TB_OK;
}

static tb_status recv_masked(void *arg, const tb_transform_piece *piece, const tb_binding *box, const void *wire) {
    (void)arg;
    for (int64_t i = 0; i < count_elements(piece); i++)
        *element_of(box, i) = ((const uint32_t *)wire)[i] ^ MASK;
    return TB_OK;
}

static bool holds_masked(const part *p, uint32_t version) {
    for (size_t i = 0; i < p->count; i++) {
        if (part_bytes(p)[i] != (part_value(p, i, version) ^ MASK))
            return false;
    }
    return true;
}

/* The side that `shared` names transforms "w", and the other one knows nothing of it, nor of "bias". */
static void lone_transform(rank *r) {
    bool is_mine = strcmp(r->group, r->scene->shared) == 0;
    tb_transform own = {.size = sizeof own,
                        .should_transform = takes_w,
                        .prepare_send = is_mine && is_a(r) ? send_masked : NULL,
                        .finalize_recv = is_mine && !is_a(r) ? recv_masked : NULL};
    tb_batch_opts opts = {.size = sizeof opts, .transform = is_mine ? &own : NULL};
    const char *layout = is_a(r) ? "mesh=2 place=Shard(0)" : "mesh=2 place=Shard(1)";
    part parts[2];
    tb_pair *pair;
    tb_batch *batch;
    check_ok(tb_pair_create(r->world, "p", other_group(r), layout, NULL, &pair));
    check_ok(tb_batch_create(r->world, "step", &opts, &batch));
    for (int i = 0; i < 2; i++) {
        part_init(&parts[i], layout, r->index, SIDE, SIDE);
        tb_tensor t = part_tensor(&parts[i]);
        check_ok(tb_batch_add(batch, pair, i ? "w" : "bias", &t));
    }
    for (uint32_t version = 1; version <= 3; version++) {
        for (int i = 0; i < 2; i++) {
            if (is_a(r))
                part_fill(&parts[i], version);
            else
                part_poison(&parts[i]);
        }
        check_ok(tb_reshard_execute(batch, "a", NULL, NULL, NULL));
        check(part_holds(&parts[0], version));
        check(is_a(r) ? part_holds(&parts[1], version) : holds_masked(&parts[1], version));
        meet(r);
    }
    tb_batch_destroy(batch);
    tb_pair_destroy(pair);
    part_fini(&parts[0]);
    part_fini(&parts[1]);
}

static void test_receiver_only(void **state) {
    (void)state;
    run_ranks(lone_transform, 2, 2, "b");
}

static void test_sender_only(void **state) {
    (void)state;
    run_ranks(lone_transform, 2, 2, "a");
}

/* The one side that transforms it wants other bytes than the elements'. */
static void lone_of_other_size(rank *r) {
    tb_transform own = {.size = sizeof own, .prepare_recv = half_size, .finalize_recv = recv_masked};
    tb_batch_opts opts = {.size = sizeof opts, .transform = is_a(r) ? NULL : &own};
    setup s;
    tb_transfer *t = NULL;
    static const char words[] = "its transform has 288 bytes for a piece of 576 bytes, and the other side does not";
    set_up(r, &s, "mesh=1 place=R", "mesh=1 place=R", SIDE, SIDE, &opts);
    check_ok((is_a(r) ? tb_send : tb_recv)(s.batch, NULL, &t));
    check_fails(tb_wait(t, TB_COMMITTED, -1), TB_INVALID, words);
    check(is_a(r) || part_is_poison(&s.w));
    tb_transfer_destroy(t);
    meet(r);
    tear_down(&s);
}

static void test_lone_of_other_size(void **state) {
    (void)state;
    run_ranks(lone_of_other_size, 1, 1, NULL);
}

/* ---- Whole pieces ------------------------------------------------------------------------------------------------ */

enum { TALL = 256, NWHOLE = 3, LEAST_STAGING = 1 << 16 };

typedef struct log {
    const part *plain; /* that has arrived before anything is finished */
    uint32_t version;
    int count;
    char name[8 * NWHOLE][8];
    int64_t row[8 * NWHOLE], nrows[8 * NWHOLE];
} log_of_pieces;

static tb_status recv_logged(void *arg, const tb_transform_piece *piece, const tb_binding *box, const void *wire) {
    log_of_pieces *l = arg;
    bool has_all = part_holds(l->plain, l->version);
    tensors_flush();
    if (!has_all)
        return tb_error_set(TB_INVALID, "it is finished before all has arrived");
    if (l->count == 8 * NWHOLE)
        return tb_error_set(TB_INVALID, "there are too many pieces");
    snprintf(l->name[l->count], sizeof l->name[0], "%s", piece->name);
    l->row[l->count] = piece->dst_start[0];
    l->nrows[l->count++] = piece->shape[0];
    return recv_masked(NULL, piece, box, wire);
}

/* The receivers, which have halves of the columns, get a piece of each of the two senders for each tensor. */
static void whole_pieces(rank *r) {
    const bool *is_whole = r->scene->shared;
    const char *layout = is_a(r) ? "mesh=2 place=Shard(0)" : "mesh=2 place=Shard(1)";
    part parts[1 + NWHOLE];
    log_of_pieces l = {.plain = &parts[0]};
    tb_transform own = {.size = sizeof own,
                        .arg = &l,
                        .should_transform = takes_w,
                        .finalize_recv = *is_whole ? recv_logged : recv_masked,
                        .whole = *is_whole};
    tb_batch_opts opts = {.size = sizeof opts, .transform = is_a(r) ? NULL : &own, .staging_bytes = LEAST_STAGING};
    tb_pair *pair;
    tb_batch *batch;
    check_ok(tb_pair_create(r->world, "p", other_group(r), layout, NULL, &pair));
    check_ok(tb_batch_create(r->world, "step", &opts, &batch));
    for (int i = 0; i < 1 + NWHOLE; i++) {
        char name[16];
        snprintf(name, sizeof name, i ? "w%d" : "z", i);
        part_init(&parts[i], layout, r->index, TALL, SIDE);
        tb_tensor t = part_tensor(&parts[i]);
        check_ok(tb_batch_add(batch, pair, name, &t));
    }
    for (uint32_t version = 1; version <= 3; version++) {
        l.version = version;
        l.count = 0;
        for (int i = 0; i < 1 + NWHOLE; i++) {
            if (is_a(r))
                part_fill(&parts[i], version);
            else
                part_poison(&parts[i]);
        }
        check_ok(tb_reshard_execute(batch, "a", NULL, NULL, NULL));
        for (int i = 1; i < 1 + NWHOLE && !is_a(r); i++)
            check(holds_masked(&parts[i], version));
        check(part_holds(&parts[0], version));
        check(l.count == (*is_whole && !is_a(r) ? 2 * NWHOLE : 0));
        for (int i = 0; i < l.count; i++) {
            check(l.name[i][1] == '1' + i / 2);
            check(l.row[i] == i % 2 * TALL / 2 && l.nrows[i] == TALL / 2);
        }
        meet(r);
    }
    tb_batch_destroy(batch);
    tb_pair_destroy(pair);
    for (int i = 0; i < 1 + NWHOLE; i++)
        part_fini(&parts[i]);
}

static void test_whole(void **state) {
    (void)state;
    run_ranks(whole_pieces, 2, 2, &(bool){true});
    run_ranks(whole_pieces, 2, 2, &(bool){false});
}

/* A piece that is too large to be staged as it is, and pieces that are too many to be kept until the end. */
static void whole_in_little_memory(rank *r) {
    const int *rows = r->scene->shared;
    tb_transform own = {.size = sizeof own, .finalize_recv = recv_masked, .whole = true};
    tb_batch_opts opts = {.size = sizeof opts, .transform = is_a(r) ? NULL : &own, .staging_bytes = LEAST_STAGING};
    const char *words = *rows > 1000 ? "a piece of it has 96000 bytes on the wire, and is not to be cut"
                                     : "transforms of batch 'step' want all of it to arrive first, and rank";
    part parts[8];
    tb_pair *pair;
    tb_batch *batch;
    tb_transfer *t = NULL;
    check_ok(tb_pair_create(r->world, "p", other_group(r), "mesh=1 place=R", NULL, &pair));
    check_ok(tb_batch_create(r->world, "step", &opts, &batch));
    for (int i = 0; i < 8; i++) {
        char name[16];
        snprintf(name, sizeof name, "w%d", i);
        part_init(&parts[i], "mesh=1 place=R", r->index, *rows, SIDE);
        part_poison(&parts[i]);
        tb_tensor w = part_tensor(&parts[i]);
        check_ok(tb_batch_add(batch, pair, name, &w));
    }
    check_ok(tb_batch_register(batch, 0));
    tb_status begun = (is_a(r) ? tb_send : tb_recv)(batch, NULL, &t);
    if (begun != TB_OK) { /* the other rank was first to find it out */
        check_fails(begun, TB_REFUSED, words);
    } else {
        check_fails(tb_wait(t, TB_COMMITTED, -1), TB_REFUSED, words);
        tb_transfer_destroy(t);
    }
    meet(r);
    tb_batch_destroy(batch);
    tb_pair_destroy(pair);
    for (int i = 0; i < 8; i++) {
        check(part_is_poison(&parts[i]));
        part_fini(&parts[i]);
    }
}

static void test_whole_in_little_memory(void **state) {
    (void)state;
    run_ranks(whole_in_little_memory, 1, 1, &(int){2000});
    run_ranks(whole_in_little_memory, 1, 1, &(int){300});
}

/* ---- Several buffers --------------------------------------------------------------------------------------------- */

/* Half-words in one buffer, what is above them in another, and in a third how many there are. */
static int three_buffers(void *arg, const tb_transform_piece *piece, int64_t *nbytes) {
    (void)arg;
    nbytes[0] = nbytes[1] = count_elements(piece) * 2;
    nbytes[2] = 8;
    return 3;
}

static tb_status send_halves(void *arg, const tb_transform_piece *piece, const tb_binding *box, void *wire) {
    int64_t n = count_elements(piece);
    (void)arg;
    if (piece->nbuffers != 3 || piece->buffer_offset[1] % 64 || piece->buffer_offset[1] < 2 * n)
        return tb_error_set(TB_INVALID, "buffers are not where they should be");
    for (int64_t i = 0; i < n; i++) {
        uint32_t x = *element_of(box, i);
        uint16_t low = (uint16_t)x, high = (uint16_t)(x >> 16);
        memcpy((char *)wire + 2 * i, &low, sizeof low);
        memcpy((char *)wire + piece->buffer_offset[1] + 2 * i, &high, sizeof high);
    }
    memcpy((char *)wire + piece->buffer_offset[2], &n, sizeof n);
    return TB_OK;
}

static tb_status recv_halves(void *arg, const tb_transform_piece *piece, const tb_binding *box, const void *wire) {
    int64_t n;
    (void)arg;
    memcpy(&n, (const char *)wire + piece->buffer_offset[2], sizeof n);
    if (n != count_elements(piece))
        return tb_error_set(TB_INVALID, "another number has come");
    for (int64_t i = piece->buffer_offset[0] + piece->buffer_nbytes[0]; i < piece->buffer_offset[1]; i++) {
        if (((const char *)wire)[i])
            return tb_error_set(TB_INVALID, "there is something between the buffers");
    }
    for (int64_t i = 0; i < n; i++) {
        uint16_t low, high;
        memcpy(&low, (const char *)wire + 2 * i, sizeof low);
        memcpy(&high, (const char *)wire + piece->buffer_offset[1] + 2 * i, sizeof high);
        *element_of(box, i) = (uint32_t)high << 16 | low;
    }
    return TB_OK;
}

static void buffers(rank *r) {
    tb_transform own = {.size = sizeof own,
                        .prepare_send = send_halves,
                        .finalize_recv = recv_halves,
                        .list_buffers = three_buffers,
                        .whole = true};
    tb_batch_opts opts = {.size = sizeof opts, .transform = &own};
    setup s;
    set_up(r, &s, "mesh=2 place=Shard(0)", "mesh=2 place=Shard(1)", 18, SIDE, &opts);
    for (uint32_t version = 1; version <= 3; version++) {
        exchange(r, &s, version % 2 ? "a" : "b", version);
        meet(r);
    }
    tear_down(&s);
}

static void test_buffers(void **state) {
    (void)state;
    run_ranks(buffers, 2, 2, NULL);
}

/* ---- To itself --------------------------------------------------------------------------------------------------- */

/* One process is in both groups, and finishes what it has sent itself as the last step, too. */
static void to_itself(rank *r) {
    tb_transform own = {.size = sizeof own, .finalize_recv = recv_masked, .whole = true};
    tb_batch_opts opts = {.size = sizeof opts, .transform = &own};
    tb_pair_opts first = {.size = sizeof first, .group = "a", .no_wait = true},
                 second = {.size = sizeof second, .group = "c"};
    part from, to;
    tb_pair *pairs[2];
    tb_batch *batch;
    check_ok(tb_world_enter(r->world, "c", 1 - r->index, 2));
    check_ok(tb_pair_create(r->world, "p", "c", "mesh=2 place=Shard(0)", &first, &pairs[0]));
    check_ok(tb_pair_create(r->world, "p", "a", "mesh=2 place=Shard(1)", &second, &pairs[1]));
    check_ok(tb_batch_create(r->world, "step", &opts, &batch));
    part_init(&from, "mesh=2 place=Shard(0)", r->index, SIDE, SIDE);
    part_init(&to, "mesh=2 place=Shard(1)", 1 - r->index, SIDE, SIDE);
    tb_tensor source = part_tensor(&from), target = part_tensor(&to);
    check_ok(tb_batch_add(batch, pairs[0], "w", &source));
    check_ok(tb_batch_add(batch, pairs[1], "w", &target));
    for (uint32_t version = 1; version <= 3; version++) {
        part_fill(&from, version);
        part_poison(&to);
        check_ok(tb_reshard_execute(batch, "a", NULL, NULL, NULL));
        check(part_holds(&from, version) && holds_masked(&to, version));
        meet(r);
    }
    tb_batch_destroy(batch);
    tb_pair_destroy(pairs[0]);
    tb_pair_destroy(pairs[1]);
    part_fini(&from);
    part_fini(&to);
}

static void test_to_itself(void **state) {
    (void)state;
    run_ranks(to_itself, 2, 0, NULL);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_transform),
        cmocka_unit_test(test_no_functions),
        cmocka_unit_test(test_receiver_only),
        cmocka_unit_test(test_sender_only),
        cmocka_unit_test(test_lone_of_other_size),
        cmocka_unit_test(test_whole),
        cmocka_unit_test(test_whole_in_little_memory),
        cmocka_unit_test(test_buffers),
        cmocka_unit_test(test_to_itself),
    };
    return cmocka_run_group_tests_name("transform", tests, NULL, NULL);
}
