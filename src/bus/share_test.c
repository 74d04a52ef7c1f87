/* Device memory that ranks map from each other: once for each memory, until its owner takes it back, or is gone. */
#define TB_SLOW_DEVICE
#include "bus/bus_test.h"

#include <dirent.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>

enum { SIDE = 32, NTENSORS = 20, CYCLES = 50, NBYTES = SIDE * SIDE * sizeof(uint32_t), HASTY_MS = 700 };

#define WHOLE "mesh=1 place=R"

static const char *layout_of(const rank *r) {
    return is_a(r) ? WHOLE : "mesh=2 place=R";
}

static size_t count_descriptors(void) {
    size_t count = 0;
    DIR *dir = opendir("/proc/self/fd");
    check(dir);
    while (readdir(dir))
        count++;
    closedir(dir);
    return count;
}

static bool has_mappings(size_t count) {
    int64_t deadline_ms = tb__now_ms() + PATIENCE_MS;
    while (slow_device_count_mappings() != count && tb__now_ms() < deadline_ms)
        usleep(1000);
    return slow_device_count_mappings() == count;
}

/* A matrix at this address, which has everything in it. */
static part part_at(uint32_t *data) {
    part p;
    part_init(&p, WHOLE, 0, SIDE, SIDE);
    tensor_free(p.data);
    p.data = data;
    return p;
}

static tb_batch *make_batch(const rank *r, tb_pair *pair, const char *name, part *parts, int count) {
    tb_batch *batch;
    check_ok(tb_batch_create(r->world, name, NULL, &batch));
    for (int i = 0; i < count; i++) {
        char tensor[16];
        snprintf(tensor, sizeof tensor, "t%d", i);
        tb_tensor t = part_tensor(&parts[i]);
        check_ok(tb_batch_add(batch, pair, tensor, &t));
    }
    return batch;
}

static tb_transfer *begin(const rank *r, tb_batch *batch, part *parts, int count, uint32_t version) {
    tb_transfer *t = NULL;
    for (int i = 0; i < count; i++) {
        if (is_a(r))
            part_fill(&parts[i], version + (uint32_t)i);
        else
            part_poison(&parts[i]);
    }
    check_ok((is_a(r) ? tb_send : tb_recv)(batch, NULL, &t));
    return t;
}

static void transfer(const rank *r, tb_batch *batch, part *parts, int count, uint32_t version) {
    tb_transfer *t = begin(r, batch, parts, count, version);
    check_ok(tb_wait(t, TB_COMMITTED, -1));
    for (int i = 0; i < count; i++)
        check(part_holds(&parts[i], version + (uint32_t)i));
    tb_transfer_destroy(t);
}

/* ---- Once for all ------------------------------------------------------------------------------------------------ */

/* Many tensors of two batches lie in one allocation. Taking some of them back ends what uses them, and no more. */
static void share_one(rank *r) {
    char *memory = slow_device_alloc((size_t)2 * NTENSORS * NBYTES);
    tb_pair *pair;
    tb_batch *batches[2];
    part parts[2][NTENSORS];
    check_ok(tb_pair_create(r->world, "p", other_group(r), layout_of(r), NULL, &pair));
    for (int i = 0; i < 2 * NTENSORS; i++)
        parts[i / NTENSORS][i % NTENSORS] = part_at((uint32_t *)(void *)(memory + (size_t)i * NBYTES));
    for (int i = 0; i < 2; i++) {
        batches[i] = make_batch(r, pair, i ? "second" : "first", parts[i], NTENSORS);
        transfer(r, batches[i], parts[i], NTENSORS, 1);
    }
    meet(r);
    check(slow_device_count_mappings() == 2);
    meet(r);
    if (is_a(r))
        check_ok(tb_world_invalidate(r->world, memory, NBYTES));
    meet(r);
    check(slow_device_count_mappings() == 2); /* the second batch uses them */
    transfer(r, batches[1], parts[1], NTENSORS, 2);
    tb_transfer *t = NULL;
    if (is_a(r))
        meet(r); /* who comes later waits for the next transfer */
    check_ok((is_a(r) ? tb_send : tb_recv)(batches[0], NULL, &t));
    if (!is_a(r))
        meet(r);
    check_fails(tb_wait(t, TB_COMMITTED, -1), TB_INVALID, "the memory of tensor 't0' on rank");
    tb_transfer_destroy(t);
    tb_batch_destroy(batches[0]);
    batches[0] = make_batch(r, pair, "first", parts[0], NTENSORS); /* it was not given back to anybody */
    transfer(r, batches[0], parts[0], NTENSORS, 3);
    meet(r);
    check(slow_device_count_mappings() == 4); /* it is shared anew */
    meet(r);
    if (is_a(r))
        check_ok(tb_world_invalidate(r->world, memory, (size_t)2 * NTENSORS * NBYTES));
    check(slow_device_count_mappings() == 0 || !is_a(r));
    meet(r);
    for (int i = 0; i < 2; i++)
        tb_batch_destroy(batches[i]);
    tb_pair_destroy(pair);
    for (int i = 0; i < 2 * NTENSORS; i++)
        tb_local_fini(&parts[i / NTENSORS][i % NTENSORS].local);
    slow_device_free(memory);
}

static void test_once_for_all(void **state) {
    (void)state;
    run_ranks(share_one, 1, 2, NULL);
}

/* ---- Again and again --------------------------------------------------------------------------------------------- */

/* Memory is taken back and replaced: by the call while the batch exists or after its end, at another address or at the
 * same. When the call has returned, nobody has mapped it. */
static void cycle(rank *r) {
    tb_pair *pair;
    part p = part_at(slow_device_alloc(NBYTES));
    size_t before = 0;
    check_ok(tb_pair_create(r->world, "p", other_group(r), layout_of(r), NULL, &pair));
    for (int i = 0; i < CYCLES; i++) {
        bool is_first = i % 2, in_place = i % 3 == 0;
        tb_batch *batch = make_batch(r, pair, "step", &p, 1);
        transfer(r, batch, &p, 1, 1 + (uint32_t)i);
        meet(r);
        check(slow_device_count_mappings() == 2);
        meet(r);
        if (is_first && is_a(r))
            tb_batch_destroy(batch);
        if (is_a(r)) {
            check_ok(tb_world_invalidate(r->world, p.data, NBYTES));
            check(slow_device_count_mappings() == 0);
        }
        if (is_a(r) && in_place)
            slow_device_replace(p.data);
        if (is_a(r) && !in_place) {
            slow_device_free(p.data);
            p.data = slow_device_alloc(NBYTES);
        }
        meet(r);
        if (!is_first || !is_a(r))
            tb_batch_destroy(batch);
        meet(r);
        before = i == 0 && is_a(r) ? count_descriptors() : before;
        meet(r);
    }
    check(!is_a(r) || count_descriptors() <= before);
    meet(r);
    tb_pair_destroy(pair);
    part_fini(&p);
}

static void test_again_and_again(void **state) {
    (void)state;
    run_ranks(cycle, 1, 2, NULL);
}

/* The same without the call: importers unmap the memory when the batch of its owner ends. */
static void end_batches(rank *r) {
    tb_pair *pair;
    part p = part_at(slow_device_alloc(NBYTES));
    check_ok(tb_pair_create(r->world, "p", other_group(r), layout_of(r), NULL, &pair));
    tb_batch *batch = make_batch(r, pair, "step", &p, 1);
    transfer(r, batch, &p, 1, 1);
    meet(r);
    check(slow_device_count_mappings() == 2);
    meet(r);
    if (is_a(r))
        tb_batch_destroy(batch);
    check(has_mappings(0));
    if (!is_a(r))
        tb_batch_destroy(batch);
    tb_pair_destroy(pair);
    part_fini(&p);
}

static void test_batch_that_ends(void **state) {
    (void)state;
    run_ranks(end_batches, 1, 2, NULL);
}

/* ---- Copies under way -------------------------------------------------------------------------------------------- */

/* An importer's device does not finish its copy: the call names the importer, and nothing is unmapped before. */
static void hold_copy(rank *r) {
    tb_pair *pair;
    part p = part_at(slow_device_alloc(NBYTES));
    check_ok(tb_pair_create(r->world, "p", other_group(r), WHOLE, NULL, &pair));
    tb_batch *batch = make_batch(r, pair, "step", &p, 1);
    transfer(r, batch, &p, 1, 1);
    meet(r);
    if (is_a(r))
        slow_device_hold_run(0);
    meet(r);
    tb_transfer *t = begin(r, batch, &p, 1, 2);
    usleep(100000);
    meet(r);
    if (is_a(r)) {
        check_fails(tb_world_invalidate(r->world, p.data, NBYTES), TB_TIMEOUT, "(b 0)");
        check(slow_device_count_mappings() == 1);
        slow_device_let_go();
        check_ok(tb_world_invalidate(r->world, p.data, NBYTES));
        check(slow_device_count_mappings() == 0);
    }
    check_fails(tb_wait(t, TB_COMMITTED, -1), TB_INVALID, "the memory of tensor 't0' on rank");
    tb_transfer_destroy(t);
    meet(r);
    tb_batch_destroy(batch);
    tb_pair_destroy(pair);
    part_fini(&p);
}

static void test_copy_under_way(void **state) {
    (void)state;
    scene s;
    scene_init(&s);
    s.timeout_ms = HASTY_MS;
    run_ranks_in(&s, hold_copy, 1, 1, NULL);
    slow_device_mend();
}

/* ---- Processes --------------------------------------------------------------------------------------------------- */

/* Another process, which is the other group. */
typedef struct other {
    pid_t pid;
    int said; /* a pipe: it says that the first transfer is over */
} other;

static void join(rank *r, const scene *s, const char *group) {
    tb_world_opts opts = {.size = sizeof opts, .timeout_ms = strcmp(group, "a") == 0 ? HASTY_MS : PATIENCE_MS};
    *r = (rank){.group = group};
    check_ok(tb_world_join(s->url, group, 0, 1, &opts, &r->world));
}

/* One transfer; an owner begins a second one. Then it waits to be killed. */
static void be_the_other(const scene *s, const char *group, int say, int hear) {
    rank r;
    tb_pair *pair;
    char byte;
    check(read(hear, &byte, 1) == 1);
    join(&r, s, group);
    part p = part_at(slow_device_alloc(NBYTES));
    check_ok(tb_pair_create(r.world, "p", other_group(&r), WHOLE, NULL, &pair));
    tb_batch *batch = make_batch(&r, pair, "step", &p, 1);
    transfer(&r, batch, &p, 1, 1);
    check(write(say, "1", 1) == 1);
    if (is_a(&r))
        (void)begin(&r, batch, &p, 1, 2);
    for (;;)
        pause();
}

static other start_other(const scene *s, const char *group, int *tell) {
    int said[2], heard[2];
    check(pipe(said) == 0 && pipe(heard) == 0);
    other o = {.pid = fork(), .said = said[0]};
    check(o.pid >= 0);
    if (o.pid == 0) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        be_the_other(s, group, said[1], heard[0]);
        _exit(1);
    }
    close(said[1]);
    close(heard[0]);
    *tell = heard[1];
    return o;
}

static void await_first(const other *o) {
    char byte;
    check(read(o->said, &byte, 1) == 1);
}

static void kill_other(const other *o) {
    int status;
    check(kill(o->pid, SIGKILL) == 0);
    check(waitpid(o->pid, &status, 0) == o->pid);
}

/* The survivor's device still copies from the memory of the killed process; when that has ended, it is unmapped. */
static void test_killed_owner(void **state) {
    (void)state;
    scene s;
    rank r;
    tb_pair *pair;
    int tell;
    scene_init(&s);
    other o = start_other(&s, "a", &tell);
    join(&r, &s, "b");
    check(write(tell, "1", 1) == 1);
    part p = part_at(slow_device_alloc(NBYTES));
    check_ok(tb_pair_create(r.world, "p", "a", WHOLE, NULL, &pair));
    tb_batch *batch = make_batch(&r, pair, "step", &p, 1);
    transfer(&r, batch, &p, 1, 1);
    await_first(&o);
    check(slow_device_count_mappings() == 1);
    slow_device_hold_run(0);
    tb_transfer *t = begin(&r, batch, &p, 1, 2);
    usleep(200000);
    kill_other(&o);
    usleep(200000);
    check(slow_device_count_mappings() == 1);
    slow_device_let_go();
    check_fails(tb_wait(t, TB_COMMITTED, -1), TB_LOST, "(a 0)");
    check(has_mappings(0));
    tb_transfer_destroy(t);
    tb_batch_destroy(batch);
    tb_pair_destroy(pair);
    part_fini(&p);
    tb_world_destroy(r.world);
    close(o.said);
    close(tell);
    slow_device_mend();
    scene_fini(&s);
}

/* An importer that does not answer is named; of a killed one nothing is expected. */
static void test_killed_importer(void **state) {
    (void)state;
    scene s;
    rank r;
    tb_pair *pair;
    int tell;
    scene_init(&s);
    other o = start_other(&s, "b", &tell);
    join(&r, &s, "a");
    check(write(tell, "1", 1) == 1);
    part p = part_at(slow_device_alloc(NBYTES));
    check_ok(tb_pair_create(r.world, "p", "b", WHOLE, NULL, &pair));
    tb_batch *batch = make_batch(&r, pair, "step", &p, 1);
    transfer(&r, batch, &p, 1, 1);
    await_first(&o);
    check(kill(o.pid, SIGSTOP) == 0);
    check(waitpid(o.pid, NULL, WUNTRACED) == o.pid); /* all its threads are stopped */
    check_fails(tb_world_invalidate(r.world, p.data, NBYTES), TB_TIMEOUT, "(b 0)");
    kill_other(&o);
    check_ok(tb_world_invalidate(r.world, p.data, NBYTES));
    tb_batch_destroy(batch);
    tb_pair_destroy(pair);
    part_fini(&p);
    tb_world_destroy(r.world);
    close(o.said);
    close(tell);
    scene_fini(&s);
}

/* ---- Units ------------------------------------------------------------------------------------------------------- */

/* Snapshots and shadows are on the units of their tensors. */
static void use_units(rank *r) {
    tb_pair *pair;
    tb_batch *batch;
    part p[2];
    tb_batch_opts opts = {.size = sizeof opts, .commit = is_a(r) ? TB_IN_PLACE : TB_SHADOW, .snapshot = is_a(r)};
    check_ok(tb_pair_create(r->world, "p", other_group(r), WHOLE, NULL, &pair));
    check_ok(tb_batch_create(r->world, "step", &opts, &batch));
    for (int i = 0; i < 2; i++) {
        p[i] = part_at(slow_device_alloc_on(3 + i, true, NBYTES));
        tb_tensor t = part_tensor(&p[i]);
        check_ok(tb_batch_add(batch, pair, i ? "second" : "first", &t));
    }
    transfer(r, batch, p, 2, 1);
    meet(r);
    check(slow_device_count_allocations(0) == 0);
    for (int i = 0; i < 2; i++)
        check(slow_device_count_allocations(3 + i) == 2);
    meet(r);
    tb_batch_destroy(batch);
    tb_pair_destroy(pair);
    for (int i = 0; i < 2; i++)
        part_fini(&p[i]);
}

static void test_units(void **state) {
    (void)state;
    run_ranks(use_units, 1, 1, NULL);
}

/* ---- Staging ----------------------------------------------------------------------------------------------------- */

typedef struct staging {
    bool is_on_host;   /* the second receiver's tensor */
    bool is_shareable; /* the sender's */
    bool is_asked_for;
    bool is_used; /* staging memory on the device */
} staging;

/* Memory that can't be shared is staged on its device, for readers that are on the device, too. */
static void stage_tensor(rank *r) {
    const staging *s = r->scene->shared;
    tb_batch_opts opts = {
        .size = sizeof opts, .staged = s->is_asked_for, .bucket_size = 4096, .staging_bytes = 1 << 20};
    tb_pair *pair;
    tb_batch *batch;
    part p;
    part_init(&p, layout_of(r), r->index, 256, 64);
    size_t nbytes = p.count * sizeof *p.data, before = slow_device_count_buffer_runs();
    tensor_free(p.data);
    p.data = NULL;
    if (is_a(r))
        p.data = slow_device_alloc_on(2, s->is_shareable, nbytes);
    else if (s->is_on_host && r->index == 1)
        check_ok(tb_alloc(nbytes, (void **)&p.data));
    else
        p.data = slow_device_alloc_on(1, true, nbytes);
    meet(r);
    check_ok(tb_pair_create(r->world, "p", other_group(r), layout_of(r), NULL, &pair));
    check_ok(tb_batch_create(r->world, "step", &opts, &batch));
    tb_tensor t = part_tensor(&p);
    check_ok(tb_batch_add(batch, pair, "w", &t));
    for (uint32_t version = 1; version <= 5; version++)
        transfer(r, batch, &p, 1, version);
    meet(r);
    check(slow_device_count_allocations(2) == 1);
    check((slow_device_count_buffer_runs() > before) == s->is_used);
    meet(r);
    if (is_a(r))
        tb_batch_destroy(batch);
    check(has_mappings(0));
    if (!is_a(r))
        tb_batch_destroy(batch);
    tb_pair_destroy(pair);
    part_fini(&p);
}

static void test_staging(void **state) {
    (void)state;
    run_ranks(stage_tensor, 1, 2, &(staging){.is_used = true});
    run_ranks(stage_tensor, 1, 2, &(staging){.is_shareable = true, .is_asked_for = true, .is_used = true});
    run_ranks(stage_tensor, 1, 2, &(staging){.is_on_host = true}); /* both receivers get the same buckets */
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_once_for_all),    cmocka_unit_test(test_again_and_again),
        cmocka_unit_test(test_batch_that_ends), cmocka_unit_test(test_copy_under_way),
        cmocka_unit_test(test_killed_owner),    cmocka_unit_test(test_killed_importer),
        cmocka_unit_test(test_units),           cmocka_unit_test(test_staging),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
