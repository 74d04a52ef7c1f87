/* How a tensor is reached is decided per tensor: one rank has tensors that others can map, in host memory and on a
 * device, and some that have to be staged, each in a bucket of its own or all small enough for one. The dump says
 * which, and why. */
#define TB_SLOW_DEVICE
#include "bus/bus_test.h"

enum { SIDE = 64 };

/* All go from one rank to the same two ranks. */
static const char from[] = "mesh=1 place=Replicate", to[] = "mesh=2 place=Shard(0)";

typedef enum home { SHARED, PRIVATE, DEVICE, UNSHAREABLE } home;

typedef struct kind {
    const char *name;
    home at_sender, at_receiver;
    const char *why; /* it is staged: "S" or "R", whether the sender or a receiver can't reach it, and what follows that
                        rank in the reason; NULL: it is not staged */
} kind;

typedef struct kinds {
    const kind *item;
    int count;
    int64_t bucket_size; /* 0: all would fit into one */
} kinds;

enum { MAX_KINDS = 8 };

static void *allocate(home where, size_t nbytes) {
    void *p = NULL;
    if (where == SHARED)
        check_ok(tb_alloc(nbytes, &p));
    else
        p = where == PRIVATE ? malloc(nbytes) : slow_device_alloc_on(0, where == DEVICE, nbytes);
    check(p);
    return p;
}

static home home_of(const rank *r, const kind *k) {
    return is_a(r) ? k->at_sender : k->at_receiver;
}

static void init_tensor_in(const rank *r, const char *layout, const kind *k, part *p) {
    part_init(p, layout, r->index, SIDE, SIDE);
    tensor_free(p->data);
    p->data = allocate(home_of(r, k), p->count * sizeof *p->data);
}

static void fini_tensor(const rank *r, const kind *k, part *p) {
    if (home_of(r, k) != PRIVATE) {
        part_fini(p);
        return;
    }
    tb_local_fini(&p->local);
    free(p->data);
}

static void describe(const rank *r, const kind *k, char *out, size_t room) {
    if (k->why)
        snprintf(out, room, is_a(r) ? ", staged (rank " : ", copy, staged (rank ");
    else if (is_a(r))
        snprintf(out, room, ", read in place, ");
    else
        snprintf(out, room, ", direct, mapped, ");
}

/* The dump begins with the rank whose it is; the reason, with that which can't reach the tensor. */
static bool names_right_rank(const rank *r, const kind *k, const char *dump, const char *reason) {
    const char *own = strstr(dump, ", rank ");
    char *end;
    if (!k->why)
        return true;
    long named = strtol(reason, &end, 10);
    bool is_own = is_a(r) == (k->why[0] == 'S');
    return own && (named == strtol(own + strlen(", rank "), NULL, 10)) == is_own && strstr(end, k->why + 1) == end;
}

static void check_dump(const rank *r, tb_batch *batch, const kinds *all) {
    char *dump, name[40], words[200];
    check_ok(tb_batch_dump(batch, is_a(r), &dump));
    for (int i = 0; i < all->count; i++) {
        snprintf(name, sizeof name, "  %s [", all->item[i].name);
        const char *line = strstr(dump, name), *end = line ? strchr(line, '\n') : NULL;
        describe(r, &all->item[i], words, sizeof words);
        const char *how = line ? strstr(line, words) : NULL;
        if (!end || !how || how > end || !names_right_rank(r, &all->item[i], dump, how + strlen(words)))
            fails(__FILE__, __LINE__, all->item[i].name, dump);
    }
    free(dump);
}

static void send_once(const rank *r, tb_batch *batch, part *parts, int count, uint32_t version) {
    tb_transfer *t = NULL;
    for (int i = 0; i < count; i++) {
        if (is_a(r))
            part_fill(&parts[i], version);
        else
            part_poison(&parts[i]);
    }
    check_ok((is_a(r) ? tb_send : tb_recv)(batch, NULL, &t));
    check_ok(tb_wait(t, TB_COMMITTED, -1));
    for (int i = 0; i < count; i++)
        check(part_holds(&parts[i], version));
    tb_transfer_destroy(t);
}

static void send_kinds(rank *r, const kinds *all) {
    part parts[MAX_KINDS];
    tb_pair *pair;
    tb_batch *batch;
    tb_batch_opts opts = {.size = sizeof opts, .bucket_size = all->bucket_size};
    check_ok(tb_pair_create(r->world, "p", other_group(r), is_a(r) ? from : to, NULL, &pair));
    check_ok(tb_batch_create(r->world, "step", &opts, &batch));
    for (int i = 0; i < all->count; i++) {
        init_tensor_in(r, is_a(r) ? from : to, &all->item[i], &parts[i]);
        tb_tensor t = part_tensor(&parts[i]);
        check_ok(tb_batch_add(batch, pair, all->item[i].name, &t));
    }
    for (uint32_t version = 1; version <= 3; version++)
        send_once(r, batch, parts, all->count, version);
    check_dump(r, batch, all);
    meet(r);
    tb_batch_destroy(batch);
    tb_pair_destroy(pair);
    for (int i = 0; i < all->count; i++)
        fini_tensor(r, &all->item[i], &parts[i]);
}

static void send_all_kinds(rank *r) {
    send_kinds(r, r->scene->shared);
}

static void run_kinds(const kind *item, int count) {
    for (int64_t bucket_size = 0; bucket_size < 2; bucket_size++) {
        scene s;
        kinds all = {item, count, bucket_size};
        scene_init(&s);
        s.transport = "shm";
        run_ranks_in(&s, send_all_kinds, 1, 2, &all);
        check(slow_device_count_mappings() == 0);
    }
}

static void test_each_tensor_for_itself(void **state) {
    (void)state;
    static const kind all[] = {
        {"both_on_device", DEVICE, DEVICE, NULL},
        {"from_device", DEVICE, SHARED, NULL},
        {"to_device", SHARED, DEVICE, NULL},
        {"private_to_device", PRIVATE, DEVICE, "R can't map its memory)"},
        {"unshareable", UNSHAREABLE, DEVICE, "S can't share it: memory of device slow at "},
        {"private", PRIVATE, SHARED, "R can't map its memory)"},
        {"shared", SHARED, SHARED, NULL},
    };
    run_kinds(all, sizeof all / sizeof *all);
}

/* A process that has nothing on the device is not made to open it. */
static void test_device_that_is_not_used(void **state) {
    (void)state;
    static const kind all[] = {
        {"device", DEVICE, SHARED, "R can't map it: it has no memory of its own on device slow)"},
        {"shared", SHARED, SHARED, NULL},
    };
    run_kinds(all, sizeof all / sizeof *all);
}

/* ---- One bucket -------------------------------------------------------------------------------------------------- */

enum { NMANY = 40, BAD = 17 };

typedef struct many {
    const char *from, *to;
    int nsenders, nreceivers;
    home bad_at_sender, bad_at_receiver;
} many;

/* Sum of the bytes of all pieces that are staged, or of all; each line has "..., MODE N bytes, id ...". */
static size_t count_bytes(const char *dump, bool is_staged_only) {
    size_t nbytes = 0;
    for (const char *line = strchr(dump, '\n'); line && line[1]; line = strchr(line + 1, '\n')) {
        const char *staged = strstr(line, "staged ("), *end = strstr(line + 1, "\n"), *id = strstr(line, " bytes, id ");
        check(end && id && id < end);
        while (id && id[-1] != ' ')
            id--;
        if (!is_staged_only || (staged && staged < end))
            nbytes += id ? strtoul(id, NULL, 10) : 0;
    }
    return nbytes;
}

/* All of them would fit into one bucket, and one is in other memory: none of the others is staged with it. */
static void send_many(rank *r) {
    const many *m = r->scene->shared;
    static const kind good = {.at_sender = DEVICE, .at_receiver = DEVICE};
    const kind bad = {.at_sender = m->bad_at_sender, .at_receiver = m->bad_at_receiver};
    part parts[NMANY];
    size_t nbytes = 0;
    tb_pair *pair;
    tb_batch *batch;
    char *dump, name[40];
    check_ok(tb_pair_create(r->world, "p", other_group(r), is_a(r) ? m->from : m->to, NULL, &pair));
    check_ok(tb_batch_create(r->world, "step", NULL, &batch));
    for (int i = 0; i < NMANY; i++) {
        snprintf(name, sizeof name, "t%02d", i);
        init_tensor_in(r, is_a(r) ? m->from : m->to, i == BAD ? &bad : &good, &parts[i]);
        tb_tensor t = part_tensor(&parts[i]);
        check_ok(tb_batch_add(batch, pair, name, &t));
    }
    for (uint32_t version = 1; version <= 3; version++)
        send_once(r, batch, parts, NMANY, version);
    check_ok(tb_batch_dump(batch, is_a(r), &dump));
    snprintf(name, sizeof name, "  t%02d [", BAD);
    for (const char *line = dump; (line = strstr(line, name)); line++) {
        const char *end = strchr(line, '\n'), *staged = strstr(line, ", staged (rank ");
        if (!end || !staged || staged > end || strstr(dump, "is in its bucket"))
            fails(__FILE__, __LINE__, name, dump);
    }
    nbytes = count_bytes(dump, false);
    if (nbytes == 0 || count_bytes(dump, true) != nbytes / NMANY)
        fails(__FILE__, __LINE__, "not one tensor is staged", dump);
    free(dump);
    meet(r);
    tb_batch_destroy(batch);
    tb_pair_destroy(pair);
    for (int i = 0; i < NMANY; i++)
        fini_tensor(r, i == BAD ? &bad : &good, &parts[i]);
}

static void test_one_bucket(void **state) {
    (void)state;
    static const many all[] = {
        {"mesh=1 place=R", "mesh=2 place=S0", 1, 2, UNSHAREABLE, DEVICE},
        {"mesh=1 place=R", "mesh=2 place=R", 1, 2, UNSHAREABLE, DEVICE},             /* a broadcast */
        {"mesh=2 place=Partial(max)", "mesh=2 place=S0", 2, 2, UNSHAREABLE, DEVICE}, /* combined */
        {"mesh=2 place=S0", "mesh=2 place=S1", 2, 2, PRIVATE, DEVICE},
    };
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) {
        many m = all[i];
        run_ranks(send_many, m.nsenders, m.nreceivers, &m);
        check(slow_device_count_mappings() == 0);
    }
}

/* What could not be mapped, or not be shared, is tried again when the batch is made again. */
static void fail_calls(rank *r) {
    static const struct {
        slow_device_call call;
        kind kind;
    } faults[] = {
        {SLOW_DEVICE_MAP, {"w", DEVICE, DEVICE, "R can't map it: map of the slow device fails, as the test wants)"}},
        {SLOW_DEVICE_SHARE,
         {"w", DEVICE, DEVICE, "S can't share it: share of the slow device fails, as the test wants)"}},
        {SLOW_DEVICE_NCALLS, {"w", DEVICE, DEVICE, NULL}},
    };
    part w;
    tb_pair *pair;
    tb_batch *batches[3]; /* that stay, and with them what they share */
    char name[] = "step 0";
    check_ok(tb_pair_create(r->world, "p", other_group(r), from, NULL, &pair));
    part_init(&w, from, 0, SIDE, SIDE);
    tb_tensor t = part_tensor(&w);
    for (int i = 0; i < 3; i++) {
        if (is_a(r) && i < 2)
            slow_device_fail_call(faults[i].call, 0, TB_IO);
        meet(r);
        name[5] = (char)('0' + i);
        check_ok(tb_batch_create(r->world, name, NULL, &batches[i]));
        check_ok(tb_batch_add(batches[i], pair, "w", &t));
        send_once(r, batches[i], &w, 1, (uint32_t)i + 1);
        check_dump(r, batches[i], &(kinds){&faults[i].kind, 1, 0});
        meet(r);
    }
    for (int i = 0; i < 3; i++)
        tb_batch_destroy(batches[i]);
    tb_pair_destroy(pair);
    part_fini(&w);
}

static void test_calls_that_fail(void **state) {
    (void)state;
    run_ranks(fail_calls, 1, 1, NULL);
    check(slow_device_count_mappings() == 0);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_each_tensor_for_itself),
        cmocka_unit_test(test_device_that_is_not_used),
        cmocka_unit_test(test_one_bucket),
        cmocka_unit_test(test_calls_that_fail),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
