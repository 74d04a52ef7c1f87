/* The nccl transport where something goes wrong: several ranks in this process, whose messages the test carries, or
 * drops, and the fake NCCL, which fails on demand. */
#include "../tests/support/fake_nccl/fake_nccl.h"

#include "../tests/support/cuda_program.h"
#include "base/process.h"
#include "transport/transport.h"

#include <poll.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

enum { NRANKS = 3, SIZE = 100000, SECONDS = 10 };

typedef struct letter {
    struct letter *next;
    int32_t from;
    size_t nbytes;
    unsigned char bytes[];
} letter;

typedef struct rank {
    tb_transport transport;
    tb_comm *comm;
    letter *inbox;
    CUdeviceptr memory; /* SIZE bytes to send, then SIZE to receive */
    tb_op send, recv;
    tb_piece pieces[2];
    bool is_sent, is_received;
} rank;

static rank ranks[NRANKS];
static long nlost_letters; /* so many are carried, then all are dropped; negative: none is */

static const fake_nccl_control *fake_nccl(void) {
    void *library = dlopen(getenv("TENSORBUS_NCCL") ? getenv("TENSORBUS_NCCL") : "libnccl.so.2", RTLD_NOW | RTLD_LOCAL);
    return library ? dlsym(library, "fake_nccl_controls") : NULL;
}

static tb_status enter_device(void *arg, tb_mem_kind kind, int device) {
    (void)arg;
    (void)kind;
    (void)device;
    return tb__cuda.cuCtxPushCurrent(primary_context(0)) == CUDA_SUCCESS ? TB_OK : TB_IO;
}

static void leave_device(void *arg, tb_mem_kind kind) {
    CUcontext context;
    (void)arg;
    (void)kind;
    tb__cuda.cuCtxPopCurrent(&context);
}

static void *device_function(void *arg, tb_mem_kind kind, const char *name) {
    (void)arg;
    (void)kind;
    return driver_function(name);
}

static tb_status tell(void *arg, int32_t peer, const void *bytes, size_t nbytes) {
    letter *l = malloc(sizeof *l + nbytes), **at = &ranks[peer].inbox;
    assert_non_null(l);
    *l = (letter){.from = (int32_t)((rank *)arg - ranks), .nbytes = nbytes};
    memcpy(l->bytes, bytes, nbytes);
    while (*at)
        at = &(*at)->next;
    *at = l;
    return TB_OK;
}

/* Carries one message to this rank; false: there was none. */
static bool carry_letter(rank *r) {
    letter *l = r->inbox;
    if (!l)
        return false;
    r->inbox = l->next;
    bool is_dropped = nlost_letters == 0;
    nlost_letters -= nlost_letters > 0;
    if (!is_dropped && r->transport.ops)
        r->transport.ops->told(r->transport.context, l->from, l->bytes, l->nbytes);
    free(l);
    return true;
}

static void step(rank *r) {
    assert_int_equal(r->transport.ops->progress(r->transport.context), TB_OK);
}

static void step_all(void) {
    for (int i = 0; i < NRANKS; i++) {
        while (carry_letter(&ranks[i]))
            ;
        if (ranks[i].transport.ops)
            step(&ranks[i]);
    }
    nanosleep(&(struct timespec){.tv_nsec = 100000}, NULL);
}

#define step_until(condition)                                                                                          \
    do {                                                                                                               \
        for (int64_t end_ = tb__now_ms() + SECONDS * 1000; !(condition); step_all()) {                                 \
            if (tb__now_ms() > end_)                                                                                   \
                fail_msg("not after %d s: %s", SECONDS, #condition);                                                   \
        }                                                                                                              \
    } while (0)

static tb_status check_comm(rank *r, bool *is_ready) {
    return r->transport.ops->comm_check(r->transport.context, r->comm, is_ready);
}

static tb_status status_of(rank *r) {
    bool is_ready;
    return check_comm(r, &is_ready);
}

static bool are_all_ready(void) {
    bool is_ready = true;
    for (int i = 0; i < NRANKS && is_ready; i++)
        assert_int_equal(check_comm(&ranks[i], &is_ready), TB_OK);
    return is_ready;
}

static void begin_comm(void) {
    unsigned char id[TB_COMM_ID_SIZE];
    int32_t members[NRANKS];
    for (int i = 0; i < NRANKS; i++)
        members[i] = i;
    assert_int_equal(ranks[0].transport.ops->comm_id(ranks[0].transport.context, id), TB_OK);
    for (size_t i = 0; i < NRANKS; i++) {
        tb_comm_desc desc = {sizeof desc, id, members, NRANKS, i, TB_MEM_CUDA, 0, 0};
        assert_int_equal(ranks[i].transport.ops->comm_create(ranks[i].transport.context, &desc, &ranks[i].comm), TB_OK);
    }
}

static int open_ranks(void **state) {
    (void)state;
    nlost_letters = -1;
    for (int i = 0; i < NRANKS; i++) {
        tb_transport_env env = {.size = sizeof env,
                                .rank = i,
                                .arg = &ranks[i],
                                .enter_device = enter_device,
                                .leave_device = leave_device,
                                .device_function = device_function,
                                .tell = tell};
        ranks[i] = (rank){.memory = alloc_legacy(2 * (size_t)SIZE)};
        assert_int_equal(tb__transport_open("nccl", &env, &ranks[i].transport), TB_OK);
    }
    return 0;
}

static int close_ranks(void **state) {
    (void)state;
    fake_nccl()->hold_aborts(0);
    for (int i = 0; i < NRANKS; i++)
        tb__transport_close(&ranks[i].transport);
    fake_cuda()->mend();
    for (int i = 0; i < NRANKS; i++) {
        while (carry_letter(&ranks[i]))
            ;
        free_legacy(ranks[i].memory);
    }
    for (int64_t end = tb__now_ms() + SECONDS * 1000; fake_nccl()->count_alive() > 0 && tb__now_ms() < end;)
        tb__sleep_ms(1);
    assert_int_equal(fake_nccl()->count_alive(), 0);
    return 0;
}

static void mark_done(tb_op *op) {
    *(bool *)op->arg = true;
}

static tb_status post(rank *r, bool is_send, int32_t peer, uint64_t tag) {
    tb_op *op = is_send ? &r->send : &r->recv;
    bool *is_done = is_send ? &r->is_sent : &r->is_received;
    r->pieces[is_send] = (tb_piece){(void *)(uintptr_t)(r->memory + (is_send ? 0 : SIZE)), SIZE};
    *op = (tb_op){.kind = is_send ? TB_OP_SEND : TB_OP_RECV,
                  .peer = peer,
                  .tag = tag,
                  .pieces = &r->pieces[is_send],
                  .npieces = 1,
                  .is_expected = is_send,
                  .done = mark_done,
                  .arg = is_done,
                  .memory = TB_MEM_CUDA,
                  .comm = r->comm};
    *is_done = false;
    return tb__transport_post(&r->transport, op);
}

static void expect_failure(rank *r, tb_status status, const char *part) {
    assert_int_equal(status_of(r), status);
    if (!strstr(tb_error_detail(), part))
        fail_msg("\"%s\" is not in: %s", part, tb_error_detail());
}

/* A message from 0 to 1 that arrives. */
static void carry_one(uint64_t tag) {
    static unsigned char bytes[SIZE], got[SIZE];
    for (size_t i = 0; i < SIZE; i++)
        bytes[i] = (unsigned char)(i * 7 + tag);
    write_gpu(0, ranks[0].memory, bytes, SIZE);
    assert_int_equal(post(&ranks[1], false, 0, tag), TB_OK);
    assert_int_equal(post(&ranks[0], true, 1, tag), TB_OK);
    step_until(ranks[0].is_sent && ranks[1].is_received);
    assert_int_equal(ranks[0].send.status, TB_OK);
    assert_int_equal(ranks[1].recv.status, TB_OK);
    read_gpu(0, ranks[1].memory + SIZE, got, SIZE);
    assert_memory_equal(bytes, got, SIZE);
}

static void ready_comm(void) {
    begin_comm();
    step_until(are_all_ready());
    carry_one(1);
}

static void test_connecting_fails(void **state) {
    (void)state;
    fake_nccl()->fail_init(0, 3);
    begin_comm();
    step_until(status_of(&ranks[0]) != TB_OK && status_of(&ranks[1]) != TB_OK && status_of(&ranks[2]) != TB_OK);
    for (int i = 0; i < NRANKS; i++)
        expect_failure(&ranks[i], TB_IO, "ncclCommInitRankConfig: a fault of the test");
}

/* All ranks learn of it, and which rank had it. */
static void test_launch_fails(void **state) {
    (void)state;
    ready_comm();
    assert_int_equal(post(&ranks[2], false, 0, 5), TB_OK);
    assert_int_equal(post(&ranks[1], false, 0, 4), TB_OK);
    fake_nccl()->fail_group(0, 1);
    assert_int_equal(post(&ranks[0], true, 1, 4), TB_OK);
    step_until(ranks[0].is_sent && ranks[1].is_received && ranks[2].is_received);
    assert_int_equal(ranks[0].send.status, TB_IO);
    assert_int_equal(ranks[1].recv.status, TB_IO);
    assert_int_equal(ranks[2].recv.status, TB_IO);
    for (int i = 0; i < NRANKS; i++)
        expect_failure(&ranks[i], TB_IO, "rank 0: ncclSend: a fault of the test");
    assert_int_equal(post(&ranks[0], true, 1, 6), TB_IO);
    assert_string_equal(ranks[2].recv.why, "rank 0: ncclSend: a fault of the test (fake NCCL)");
}

/* NCCL notices the loss of a rank before the transport of the messages does: it is a loss all the same, at all ranks.
 */
static void test_loss_after_error(void **state) {
    (void)state;
    enum { REMOTE_ERROR = 6 };
    ready_comm();
    assert_int_equal(post(&ranks[2], false, 0, 5), TB_OK);
    assert_int_equal(post(&ranks[1], false, 0, 4), TB_OK);
    fake_nccl()->fail_group(0, REMOTE_ERROR);
    assert_int_equal(post(&ranks[0], true, 1, 4), TB_OK);
    for (int64_t end = tb__now_ms() + 200; tb__now_ms() < end;)
        step_all();
    assert_false(ranks[0].is_sent || ranks[2].is_received);
    ranks[0].transport.ops->peer_lost(ranks[0].transport.context, 1, "it was killed");
    ranks[2].transport.ops->peer_lost(ranks[2].transport.context, 1, "it was killed");
    step_until(ranks[0].is_sent && ranks[2].is_received);
    assert_int_equal(ranks[0].send.status, TB_LOST);
    assert_int_equal(ranks[2].recv.status, TB_IO);
    expect_failure(&ranks[0], TB_LOST, "rank 1 is lost: it was killed");
    expect_failure(&ranks[2], TB_LOST, "rank 1 is lost: it was killed");
}

/* The driver's error ends what was launched. */
static void test_gpu_fails(void **state) {
    (void)state;
    ready_comm();
    assert_int_equal(post(&ranks[1], false, 0, 4), TB_OK);
    fake_cuda()->fail_call("cuEventRecord", 0, CUDA_ERROR_LAUNCH_FAILED);
    assert_int_equal(post(&ranks[0], true, 1, 4), TB_OK);
    step_until(ranks[0].is_sent && ranks[1].is_received);
    assert_int_not_equal(ranks[0].send.status == TB_OK && ranks[1].recv.status == TB_OK, true);
    step_until(status_of(&ranks[2]) != TB_OK);
    expect_failure(&ranks[2], TB_IO, "cuEventRecord: CUDA_ERROR_LAUNCH_FAILED");
}

/* The receiver never hears that the sender has started, as if it had died in that moment. */
static void launch_alone(void) {
    ready_comm();
    assert_int_equal(post(&ranks[1], false, 0, 4), TB_OK);
    assert_int_equal(post(&ranks[0], true, 1, 4), TB_OK);
    long before = fake_nccl()->count_groups();
    nlost_letters = 2; /* the offer and its answer */
    step_until(fake_nccl()->count_groups() > before);
    for (int i = 0; i < 100; i++)
        step_all();
    assert_false(ranks[0].is_sent);
}

static void test_cancel_of_what_is_launched(void **state) {
    (void)state;
    launch_alone();
    int64_t begun = tb__now_ms();
    tb__transport_cancel(&ranks[0].transport, &ranks[0].send);
    assert_true(ranks[0].is_sent);
    assert_int_equal(ranks[0].send.status, TB_CANCELLED);
    assert_in_range(tb__now_ms() - begun, 900, 5000);
    expect_failure(&ranks[0], TB_IO, "rank 0 has cancelled what was under way");
}

/* NCCL does not come back: the memory may still be read. */
static void test_abort_hangs(void **state) {
    (void)state;
    launch_alone();
    fake_nccl()->hold_aborts(1);
    int64_t begun = tb__now_ms();
    ranks[0].transport.ops->peer_lost(ranks[0].transport.context, 1, "it was killed");
    step_until(ranks[0].is_sent);
    assert_int_equal(ranks[0].send.status, TB_TIMEOUT);
    assert_in_range(tb__now_ms() - begun, 1000, 8000);
    expect_failure(&ranks[0], TB_LOST, "rank 1 is lost: it was killed");
    begun = tb__now_ms();
    tb__transport_close(&ranks[0].transport);
    assert_in_range(tb__now_ms() - begun, 0, 8000);
}

static void test_cancel_hangs(void **state) {
    (void)state;
    launch_alone();
    fake_nccl()->hold_aborts(1);
    int64_t begun = tb__now_ms();
    tb__transport_cancel(&ranks[0].transport, &ranks[0].send);
    assert_int_equal(ranks[0].send.status, TB_TIMEOUT);
    assert_in_range(tb__now_ms() - begun, 1000, 8000);
}

/* A receive is cancelled after it was accepted: the sender launches, and the message goes nowhere. */
static void test_cancel_of_accepted(void **state) {
    (void)state;
    static unsigned char before[SIZE], after[SIZE];
    ready_comm();
    memset(before, 0xEE, SIZE);
    write_gpu(0, ranks[1].memory + SIZE, before, SIZE);
    assert_int_equal(post(&ranks[1], false, 0, 4), TB_OK);
    assert_int_equal(post(&ranks[0], true, 1, 4), TB_OK);
    for (int64_t end = tb__now_ms() + 1000; !ranks[0].inbox && tb__now_ms() < end;) {
        step(&ranks[0]);
        carry_letter(&ranks[1]); /* the offer, which it answers */
        step(&ranks[1]);
    }
    assert_non_null(ranks[0].inbox);
    tb__transport_cancel(&ranks[1].transport, &ranks[1].recv);
    assert_int_equal(ranks[1].recv.status, TB_CANCELLED);
    step_until(ranks[0].is_sent);
    assert_int_equal(ranks[0].send.status, TB_OK);
    read_gpu(0, ranks[1].memory + SIZE, after, SIZE);
    assert_memory_equal(before, after, SIZE);
    carry_one(9);
}

/* A send is cancelled after it was accepted: the receive waits on, for another one. */
static void test_cancel_of_offered(void **state) {
    (void)state;
    ready_comm();
    assert_int_equal(post(&ranks[1], false, 0, 4), TB_OK);
    assert_int_equal(post(&ranks[0], true, 1, 4), TB_OK);
    step(&ranks[0]);
    carry_letter(&ranks[1]);
    step(&ranks[1]);
    tb__transport_cancel(&ranks[0].transport, &ranks[0].send);
    assert_int_equal(ranks[0].send.status, TB_CANCELLED);
    for (int i = 0; i < 20; i++)
        step_all();
    assert_false(ranks[1].is_received);
    assert_int_equal(post(&ranks[0], true, 1, 4), TB_OK);
    step_until(ranks[0].is_sent && ranks[1].is_received);
    assert_int_equal(ranks[1].recv.status, TB_OK);
}

/* A receiver that never answers does not hold up what goes to others, once nothing is offered to it any more. */
static void test_silent_receiver(void **state) {
    (void)state;
    ready_comm();
    assert_int_equal(post(&ranks[1], false, 0, 4), TB_OK);
    assert_int_equal(post(&ranks[0], true, 1, 4), TB_OK);
    step(&ranks[0]);
    letter *offer = ranks[1].inbox;
    assert_non_null(offer);
    ranks[1].inbox = NULL; /* it is on its way for a long time */
    tb__transport_cancel(&ranks[0].transport, &ranks[0].send);
    assert_int_equal(ranks[0].send.status, TB_CANCELLED);
    assert_int_equal(post(&ranks[2], false, 0, 5), TB_OK);
    assert_int_equal(post(&ranks[0], true, 2, 5), TB_OK);
    step_until(ranks[0].is_sent && ranks[2].is_received);
    assert_int_equal(ranks[2].recv.status, TB_OK);
    ranks[1].inbox = offer; /* now it comes, and is accepted */
    for (int i = 0; i < 20; i++)
        step_all();
    assert_false(ranks[1].is_received);
    assert_int_equal(post(&ranks[0], true, 1, 4), TB_OK);
    step_until(ranks[0].is_sent && ranks[1].is_received);
    assert_int_equal(ranks[1].recv.status, TB_OK);
}

/* Whatever a peer says, this rank goes on. */
static void test_bad_messages(void **state) {
    (void)state;
    unsigned char bytes[64];
    uint64_t random = 1;
    ready_comm();
    assert_int_equal(post(&ranks[1], false, 0, 4), TB_OK);
    assert_int_equal(post(&ranks[0], true, 1, 4), TB_OK);
    step(&ranks[0]);
    letter *offer = ranks[1].inbox;
    assert_non_null(offer);
    for (int i = 0; i < 20000; i++) {
        size_t nbytes = offer->nbytes < sizeof bytes ? offer->nbytes : sizeof bytes;
        memcpy(bytes, offer->bytes, nbytes);
        bytes[0] = (unsigned char)(i % 4); /* but for failures, which may be true */
        for (int k = 0; k < 3; k++) {
            random = random * 6364136223846793005 + 1442695040888963407;
            bytes[4 + (random >> 33) % (nbytes - 4)] = (unsigned char)(random >> 48);
        }
        ranks[2].transport.ops->told(ranks[2].transport.context, 0, bytes, (size_t)(random >> 40) % (nbytes + 1));
        ranks[2].transport.ops->told(ranks[2].transport.context, 77, bytes, nbytes);
    }
    step_until(ranks[0].is_sent && ranks[1].is_received);
    assert_int_equal(ranks[1].recv.status, TB_OK);
}

static void test_bad_operations(void **state) {
    (void)state;
    begin_comm();
    assert_int_equal(post(&ranks[0], true, 0, 1), TB_INVALID);
    assert_int_equal(post(&ranks[0], true, 17, 1), TB_INVALID);
    step_until(are_all_ready());
}

/* Without memory, calls fail, and nothing leaks or is half made. */
static void test_no_memory(void **state) {
    (void)state;
    unsigned char id[TB_COMM_ID_SIZE] = "";
    tb_comm *comm;
    tb_comm_desc desc = {sizeof desc, id, (int32_t[]){0, 1}, 2, 0, TB_MEM_CUDA, 0, 0};
    ready_comm();
    for (long i = 0; i < 2; i++) {
        tb__mem_fail_after(i);
        assert_int_equal(ranks[0].transport.ops->comm_create(ranks[0].transport.context, &desc, &comm), TB_NO_MEMORY);
        tb__mem_fail_after(-1);
    }
    assert_int_equal(post(&ranks[1], false, 0, 4), TB_OK);
    tb__mem_fail_after(0);
    assert_int_equal(post(&ranks[0], true, 1, 4), TB_NO_MEMORY);
    tb__mem_fail_after(-1);
    assert_int_equal(post(&ranks[0], true, 1, 4), TB_OK);
    tb__mem_fail_after(0);
    step(&ranks[0]);
    tb__mem_fail_after(-1);
    step_until(ranks[0].is_sent && ranks[1].is_received);
    assert_int_equal(ranks[0].send.status, TB_NO_MEMORY);
    assert_int_equal(ranks[1].recv.status, TB_NO_MEMORY);
}

/* What another NCCL, or none, leads to; in processes of their own, because it is loaded once. */
static void expect_refusal(const char *variable, const char *value, const char *part) {
    pid_t pid = fork();
    if (pid == 0) {
        setenv(variable, value, 1);
        tb_transport_env env = {.size = sizeof env,
                                .enter_device = enter_device,
                                .leave_device = leave_device,
                                .device_function = device_function,
                                .tell = tell};
        tb_transport transport;
        tb_status status = tb__transport_open("nccl", &env, &transport);
        if (status != TB_REFUSED || !strstr(tb_error_detail(), part))
            fprintf(stderr, "%s=%s: %s\n", variable, value, tb_error_detail());
        _exit(status != TB_REFUSED || !strstr(tb_error_detail(), part));
    }
    int result;
    waitpid(pid, &result, 0);
    assert_int_equal(result, 0);
}

static void test_other_libraries(void **state) {
    (void)state;
    expect_refusal("FAKE_NCCL_VERSION", "21803",
                   "needs NCCL 2.19 or later (pip install nvidia-nccl-cu13): it is version 2.18.3");
    expect_refusal("TENSORBUS_NCCL", "/nowhere/libnccl.so.2", "/nowhere/libnccl.so.2");
    expect_refusal("TENSORBUS_NCCL", "libm.so.6", "ncclGetVersion");
}

int main(void) {
    const struct CMUnitTest before[] = {cmocka_unit_test(test_other_libraries)};
#define TEST(name) cmocka_unit_test_setup_teardown(name, open_ranks, close_ranks)
    const struct CMUnitTest tests[] = {
        TEST(test_connecting_fails),
        TEST(test_launch_fails),
        TEST(test_loss_after_error),
        TEST(test_gpu_fails),
        TEST(test_cancel_of_what_is_launched),
        TEST(test_abort_hangs),
        TEST(test_cancel_hangs),
        TEST(test_cancel_of_accepted),
        TEST(test_cancel_of_offered),
        TEST(test_silent_receiver),
        TEST(test_bad_messages),
        TEST(test_bad_operations),
        TEST(test_no_memory),
    };
    need_gpu();
    if (!fake_cuda()) {
        printf("skipped: a real NCCL does not fail on demand\n");
        return 77;
    }
    int failed = cmocka_run_group_tests(before, NULL, NULL);
    if (!fake_nccl()) {
        printf("skipped: a real NCCL does not fail on demand\n");
        return 77;
    }
    return failed + cmocka_run_group_tests(tests, NULL, NULL);
}
