/* What every transport must do. */
#include "conformance_inside.h"

#include <inttypes.h>
#include <poll.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

static void mark_done(tb_op *op) {
    op->arg = op; /* was NULL */
}

void make_op(tb_op *op, tb_op_kind kind, int32_t peer, uint64_t tag, const tb_piece *pieces, size_t npieces) {
    *op = (tb_op){.kind = kind, .peer = peer, .tag = tag, .pieces = pieces, .npieces = npieces, .done = mark_done};
    op->is_expected = kind == TB_OP_SEND && tb__pieces_size(pieces, npieces) > TB_SHORT_MAX;
}

uint64_t new_tag(void) {
    static uint64_t last = 1000000;
    return ++last;
}

bool is_done(const tb_op *op) {
    return op->arg == op;
}

static void progress_both(endpoints *e) {
    assert_int_equal(e->a.ops->progress(e->a.context), TB_OK);
    if (e->b.context != e->a.context)
        assert_int_equal(e->b.ops->progress(e->b.context), TB_OK);
}

void work_until_done(endpoints *e, tb_op *const *ops, size_t count) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    time_t deadline = now.tv_sec + 60;
    for (size_t i = 0; i < count;) {
        if (is_done(ops[i])) {
            i++;
            continue;
        }
        progress_both(e);
        if (is_done(ops[i]))
            continue;
        struct pollfd fds[2] = {{.fd = e->a.ops->fd(e->a.context), .events = POLLIN},
                                {.fd = e->b.ops->fd(e->b.context), .events = POLLIN}};
        clock_gettime(CLOCK_MONOTONIC, &now);
        if (now.tv_sec >= deadline)
            fail_msg("operation %zu of %zu is not done after a minute", i, count);
        poll(fds, 2, 1000);
    }
}

typedef struct worker {
    const tb_transport *transport;
    _Atomic bool is_over;
} worker;

static void *work(void *arg) {
    worker *w = arg;
    const tb_transport *t = w->transport;
    while (!atomic_load(&w->is_over)) {
        t->ops->progress(t->context);
        poll(&(struct pollfd){.fd = t->ops->fd(t->context), .events = POLLIN}, 1, 1);
    }
    return NULL;
}

void cancel_or_close(tb_transport *t, tb_op *op, const tb_transport *other) {
    worker w = {.transport = other};
    pthread_t thread;
    bool is_alone = t->context == other->context;
    if (!is_alone)
        assert_int_equal(pthread_create(&thread, NULL, work, &w), 0);
    if (op)
        tb__transport_cancel(t, op);
    else
        tb__transport_close(t);
    atomic_store(&w.is_over, true);
    if (!is_alone)
        pthread_join(thread, NULL);
}

/* One message of n bytes in pieces; the receive is posted first or, of a short message, last. */
static void message(endpoints *e, size_t n, size_t npieces, bool receive_first) {
    unsigned char *from = malloc(n + 1), *to = malloc(n + 1);
    tb_piece out[8], in[3];
    tb_op send, receive;
    fill(from, n, n);
    memset(to, 0xEE, n + 1);
    for (size_t i = 0; i < npieces; i++) {
        size_t start = n * i / npieces;
        out[i] = (tb_piece){from + start, n * (i + 1) / npieces - start};
    }
    in[0] = (tb_piece){to, n / 3};
    in[1] = (tb_piece){to + n / 3, 0};
    in[2] = (tb_piece){to + n / 3, n - n / 3};
    uint64_t tag = n > TB_SHORT_MAX ? new_tag() : 7;
    make_op(&send, TB_OP_SEND, e->rank_b, tag, out, npieces);
    make_op(&receive, TB_OP_RECV, e->rank_a, tag, in, 3);
    if (receive_first)
        post(&e->b, &receive);
    post(&e->a, &send);
    progress_both(e);
    if (!receive_first)
        post(&e->b, &receive);
    work_until_done(e, (tb_op *[]){&send, &receive}, 2);
    assert_int_equal(send.status, TB_OK);
    assert_int_equal(receive.status, TB_OK);
    assert_int_equal(receive.nbytes, n);
    assert_null(send.state);
    assert_null(receive.state);
    check(to, n, n);
    assert_int_equal(to[n], 0xEE);
    free(from);
    free(to);
}

static void messages(endpoints *e) {
    static const size_t sizes[] = {0, 1, 100, 4095, 16384, 16385, 65536, 1000003, 9 << 20};
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
        for (size_t npieces = 1; npieces <= 8; npieces += 7) {
            message(e, sizes[i], npieces, true);
            if (sizes[i] <= TB_SHORT_MAX)
                message(e, sizes[i], npieces, false);
        }
    }
}

/* Thousands in flight, received in another order than they were sent in, half of the short ones late. */
static void many_messages(endpoints *e) {
    enum { N = 4000, SIZE = 600, LARGE = 40000 };
    unsigned char *from = calloc(N, LARGE), *to = calloc(N, LARGE);
    tb_piece *out = calloc(N, sizeof *out), *in = calloc(N, sizeof *in);
    tb_op *sends = calloc(N, sizeof *sends), *receives = calloc(N, sizeof *receives);
    tb_op **all = calloc((size_t)2 * N, sizeof *all);
    for (size_t i = 0; i < N; i++) {
        size_t n = i % 10 ? SIZE : LARGE, other = (i * 1237 + 11) % N;
        out[i] = (tb_piece){from + i * LARGE, n};
        fill(out[i].base, n, i);
        make_op(&sends[i], TB_OP_SEND, e->rank_b, i, &out[i], 1);
        in[i] = (tb_piece){to + i * LARGE, LARGE};
        make_op(&receives[i], TB_OP_RECV, e->rank_a, other, &in[i], 1);
        all[i] = &sends[i];
        all[N + i] = &receives[i];
    }
    for (size_t i = 0; i < N; i++) {
        if (i < N / 2 || receives[i].tag % 10 == 0)
            post(&e->b, &receives[i]);
    }
    for (size_t i = 0; i < N; i++)
        post(&e->a, &sends[i]);
    progress_both(e);
    for (size_t i = N / 2; i < N; i++) {
        if (receives[i].tag % 10 != 0)
            post(&e->b, &receives[i]);
    }
    work_until_done(e, all, (size_t)2 * N);
    for (size_t i = 0; i < N; i++) {
        size_t other = (i * 1237 + 11) % N;
        assert_int_equal(sends[i].status, TB_OK);
        assert_int_equal(receives[i].status, TB_OK);
        assert_int_equal(receives[i].nbytes, other % 10 ? SIZE : LARGE);
        check(in[i].base, receives[i].nbytes, other);
    }
    free(from);
    free(to);
    free(out);
    free(in);
    free(sends);
    free(receives);
    free(all);
}

/* Messages with the same tag come in the order they were sent in, the shortest and the longest that can be. */
static void equal_tags_keep_their_order(endpoints *e) {
    enum { N = 6, LARGE = TB_SHORT_MAX };
    static unsigned char from[N][LARGE], to[N][LARGE];
    tb_piece out[N], in[N];
    tb_op sends[N], receives[N], *all[2 * N];
    for (size_t i = 0; i < N; i++) {
        out[i] = (tb_piece){from[i], i % 2 ? LARGE : 10 + i};
        in[i] = (tb_piece){to[i], LARGE};
        fill(from[i], out[i].nbytes, i);
        make_op(&sends[i], TB_OP_SEND, e->rank_b, 5, &out[i], 1);
        make_op(&receives[i], TB_OP_RECV, e->rank_a, 5, &in[i], 1);
        all[i] = &sends[i];
        all[N + i] = &receives[i];
        post(&e->a, &sends[i]);
    }
    progress_both(e);
    for (size_t i = 0; i < N; i++)
        post(&e->b, &receives[i]);
    work_until_done(e, all, (size_t)2 * N);
    for (size_t i = 0; i < N; i++) {
        assert_int_equal(receives[i].nbytes, out[i].nbytes);
        check(to[i], out[i].nbytes, i);
    }
}

/* More than there is room for: the receiver is told, nothing is written, the sender has done its part. */
static void too_big(endpoints *e) {
    static const size_t sizes[] = {100, 100000};
    for (size_t i = 0; i < 2; i++) {
        size_t n = sizes[i];
        unsigned char *from = malloc(n), *to = malloc(n);
        memset(to, 0xEE, n);
        fill(from, n, 1);
        tb_piece out = {from, n}, in = {to, n - 1};
        tb_op send, receive;
        uint64_t tag = new_tag();
        make_op(&send, TB_OP_SEND, e->rank_b, tag, &out, 1);
        make_op(&receive, TB_OP_RECV, e->rank_a, tag, &in, 1);
        post(&e->b, &receive);
        post(&e->a, &send);
        work_until_done(e, (tb_op *[]){&send, &receive}, 2);
        assert_int_equal(receive.status, TB_TOO_BIG);
        assert_int_equal(receive.nbytes, n);
        assert_non_null(strstr(receive.why, "there is room for"));
        for (size_t j = 0; j < n; j++)
            assert_int_equal(to[j], 0xEE);
        free(from);
        free(to);
        message(e, 1000, 1, true); /* and all goes on */
    }
}

/* A receive that waits can be cancelled, twice even. */
static void cancellation(endpoints *e) {
    unsigned char to[1000];
    tb_piece in = {to, sizeof to};
    tb_op receive;
    make_op(&receive, TB_OP_RECV, e->rank_a, 20, &in, 1);
    post(&e->b, &receive);
    progress_both(e);
    tb__transport_cancel(&e->b, &receive);
    assert_true(is_done(&receive));
    assert_int_equal(receive.status, TB_CANCELLED);
    tb__transport_cancel(&e->b, &receive); /* again: nothing happens */
    message(e, 300000, 1, true);
    message(e, 10, 1, false);
}

/* A long send is cancelled after so many steps of both ends. Its memory is changed at once, and whoever received the
 * message has received the bytes before; the receive that got some of it only is told so. Returns whether the message
 * was through. */
static bool cancel_long_send(endpoints *e, size_t n, int steps) {
    unsigned char *from = malloc(n), *to = malloc(n);
    tb_piece out = {from, n}, in = {to, n};
    tb_op send, receive;
    uint64_t tag = new_tag();
    fill(from, n, 1);
    memset(to, 0xEE, n);
    make_op(&send, TB_OP_SEND, e->rank_b, tag, &out, 1);
    make_op(&receive, TB_OP_RECV, e->rank_a, tag, &in, 1);
    post(&e->b, &receive);
    post(&e->a, &send);
    for (int i = 0; i < steps && !is_done(&send); i++)
        progress_both(e);
    bool was_done = is_done(&send);
    cancel_or_close(&e->a, &send, &e->b);
    assert_true(is_done(&send));
    assert_true(send.status == TB_OK || send.status == TB_CANCELLED);
    memset(from, 0xDD, n);
    message(e, 10, 1, false); /* what was sent before is there when this one is */
    if (send.status == TB_OK)
        work_until_done(e, (tb_op *[]){&receive}, 1);
    tb__transport_cancel(&e->b, &receive);
    if (receive.status == TB_OK) /* it may be all there, and not told yet */
        check(to, n, 1);
    else
        assert_int_equal(receive.status, TB_CANCELLED);
    if (send.status == TB_OK)
        assert_int_equal(receive.status, TB_OK);
    message(e, n, 1, true);
    free(from);
    free(to);
    return was_done;
}

static void cancelled_long_sends(endpoints *e) {
    static const size_t sizes[] = {100000, 9 << 20};
    message(e, 1, 1, true); /* they know each other */
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
        for (int steps = 0; steps <= 256 && !cancel_long_send(e, sizes[i], steps); steps = steps ? 2 * steps : 1)
            ;
    }
}

/* A long message is refused unless it is expected. */
static void unexpected_long_messages(endpoints *e) {
    static unsigned char bytes[TB_SHORT_MAX + 1];
    tb_piece out = {bytes, sizeof bytes};
    tb_op send;
    make_op(&send, TB_OP_SEND, e->rank_b, 1, &out, 1);
    send.is_expected = false;
    assert_int_equal(tb__transport_post(&e->a, &send), TB_INVALID);
    assert_string_equal(tb_error_detail(), "16385 bytes can't be sent before they are expected, only 16384 can");
    assert_false(is_done(&send));
}

/* A message that comes for a receive that is no more is dropped, at whichever point the receive was cancelled: after
 * so many steps of both ends. Its send is done, nothing is written, and the next receive gets the next message. */
static bool cancel_expected(endpoints *e, size_t n, int steps) {
    unsigned char *from = malloc(n + 1), *other = malloc(n + 1), *to = malloc(n + 1);
    tb_piece out = {from, n}, out_other = {other, n}, in = {to, n};
    tb_op send, again, receive;
    fill(from, n, 1);
    fill(other, n, 2);
    memset(to, 0xEE, n);
    uint64_t tag = n > TB_SHORT_MAX ? new_tag() : 30;
    make_op(&send, TB_OP_SEND, e->rank_b, tag, &out, 1);
    make_op(&receive, TB_OP_RECV, e->rank_a, tag, &in, 1);
    send.is_expected = true;
    post(&e->b, &receive);
    if (steps < 0)
        tb__transport_cancel(&e->b, &receive);
    post(&e->a, &send);
    for (int i = 0; i < steps && !is_done(&receive); i++)
        progress_both(e);
    bool was_done = is_done(&receive);
    cancel_or_close(&e->b, &receive, &e->a);
    if (receive.status == TB_OK) /* it may be all there, and not told yet */
        check(to, n, 1);
    else
        assert_int_equal(receive.status, TB_CANCELLED);
    memset(to, 0xEE, n);
    message(e, 10, 1, false); /* what was sent before is there when this one is */
    work_until_done(e, (tb_op *[]){&send}, 1);
    assert_int_equal(send.status, TB_OK);
    for (size_t i = 0; i < n; i++) {
        if (to[i] != 0xEE)
            fail_msg("byte %zu was written after the receive was cancelled", i);
    }
    tag = n > TB_SHORT_MAX ? new_tag() : 30;
    make_op(&again, TB_OP_SEND, e->rank_b, tag, &out_other, 1);
    make_op(&receive, TB_OP_RECV, e->rank_a, tag, &in, 1);
    post(&e->b, &receive);
    post(&e->a, &again);
    work_until_done(e, (tb_op *[]){&again, &receive}, 2);
    assert_int_equal(receive.status, TB_OK);
    check(to, n, 2);
    free(from);
    free(other);
    free(to);
    return was_done;
}

static void expected_messages(endpoints *e) {
    static const size_t sizes[] = {0, 100, 100000, 9 << 20};
    message(e, 1, 1, true); /* they know each other */
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
        cancel_expected(e, sizes[i], -1);
        for (int steps = 0; steps <= 256 && !cancel_expected(e, sizes[i], steps); steps = steps ? 2 * steps : 1)
            ;
    }
}

/* Nothing to do: the file descriptor is quiet. A message: it wakes up. */
static void wake_up(endpoints *e) {
    struct pollfd fd = {.fd = e->b.ops->fd(e->b.context), .events = POLLIN};
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    time_t deadline = now.tv_sec + 60;
    int is_readable = 1;
    while (is_readable && now.tv_sec < deadline) { /* while they meet there is something to do */
        progress_both(e);
        is_readable = poll(&fd, 1, 20);
        clock_gettime(CLOCK_MONOTONIC, &now);
    }
    assert_int_equal(is_readable, 0);
    unsigned char byte = 1, got = 0;
    tb_piece out = {&byte, 1}, in = {&got, 1};
    tb_op send, receive;
    make_op(&receive, TB_OP_RECV, e->rank_a, 1, &in, 1);
    post(&e->b, &receive);
    make_op(&send, TB_OP_SEND, e->rank_b, 1, &out, 1);
    post(&e->a, &send);
    if (e->a.context != e->b.context)
        assert_int_equal(e->a.ops->progress(e->a.context), TB_OK);
    assert_int_equal(poll(&fd, 1, 60000), 1);
    work_until_done(e, (tb_op *[]){&send, &receive}, 2);
    assert_int_equal(got, 1);
}

/* Larger than 31 bits can tell. */
static void gigabytes(endpoints *e) {
#ifdef __SANITIZE_THREAD__
    printf("    skipped: ThreadSanitizer needs five times the memory\n");
    (void)e;
    return;
#endif
    enum { STEP = 4099 };
    size_t n = ((size_t)1 << 31) + 12345;
    unsigned char *from = mmap(NULL, n, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    unsigned char *to = mmap(NULL, n, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    assert_true(from != MAP_FAILED && to != MAP_FAILED);
    for (size_t i = 0; i < n; i += STEP)
        from[i] = pattern(i, 1);
    tb_piece out = {from, n}, in = {to, n};
    tb_op send, receive;
    make_op(&send, TB_OP_SEND, e->rank_b, 1, &out, 1);
    make_op(&receive, TB_OP_RECV, e->rank_a, 1, &in, 1);
    post(&e->b, &receive);
    post(&e->a, &send);
    work_until_done(e, (tb_op *[]){&send, &receive}, 2);
    assert_int_equal(receive.status, TB_OK);
    assert_int_equal(receive.nbytes, n);
    static const unsigned char zeros[STEP - 1]; /* as all between the marks */
    for (size_t i = 0; i < n; i += STEP) {
        size_t rest = n - i - 1 < sizeof zeros ? n - i - 1 : sizeof zeros;
        if (to[i] != pattern(i, 1) || memcmp(to + i + 1, zeros, rest) != 0)
            fail_msg("one of the bytes from %zu to %zu is wrong", i, i + rest);
    }
    munmap(from, n);
    munmap(to, n);
}

/* What is under way when an endpoint closes is told. */
static void closing(endpoints *e) {
    static unsigned char byte;
    static tb_op receive;
    static tb_piece in = {&byte, 1};
    make_op(&receive, TB_OP_RECV, e->rank_a, 99, &in, 1);
    post(&e->b, &receive);
    bool one_endpoint = e->a.context == e->b.context;
    tb__transport_close(&e->b);
    if (one_endpoint)
        e->a = (tb_transport){0};
    assert_true(is_done(&receive));
    assert_int_equal(receive.status, TB_CANCELLED);
}

enum { LAST_WORDS = 5 };

/* Takes one message after the other under one tag, asking for the next when one is there, and answers each. */
typedef struct listener {
    tb_op op;
    tb_op answers[LAST_WORDS];
    tb_transport *transport;
    unsigned char byte;
    tb_piece piece;
    int count;
    tb_status end;
} listener;

static void listen_on(tb_op *op) {
    listener *l = (listener *)op;
    l->end = op->status;
    if (op->status == TB_OK && l->byte == l->count) {
        tb_op *answer = &l->answers[l->count++];
        make_op(answer, TB_OP_SEND, op->peer, 8, NULL, 0);
        post(l->transport, answer);
        l->end = tb__transport_post(l->transport, op);
    }
    if (l->end != TB_OK)
        op->arg = op;
}

/* All that a peer has said before it left is heard, also by whoever asks for one thing after the other, and whatever he
 * says to it; then it is lost. */
static void last_words(endpoints *e) {
    if (e->a.context == e->b.context)
        return;
    message(e, 1, 1, true); /* they know each other */
    listener l = {.transport = &e->b, .byte = 0xEE};
    l.piece = (tb_piece){&l.byte, 1};
    make_op(&l.op, TB_OP_RECV, e->rank_a, 7, &l.piece, 1);
    l.op.done = listen_on;
    post(&e->b, &l.op);
    unsigned char bytes[LAST_WORDS];
    tb_piece pieces[LAST_WORDS];
    tb_op sends[LAST_WORDS], *all[LAST_WORDS];
    for (int i = 0; i < LAST_WORDS; i++) {
        bytes[i] = (unsigned char)i;
        pieces[i] = (tb_piece){&bytes[i], 1};
        make_op(&sends[i], TB_OP_SEND, e->rank_b, 7, &pieces[i], 1);
        post(&e->a, &sends[i]);
        all[i] = &sends[i];
    }
    endpoints one = {e->a, e->a, e->rank_a, e->rank_a}, other = {e->b, e->b, e->rank_b, e->rank_b};
    work_until_done(&one, all, LAST_WORDS);
    tb__transport_close(&e->a);
    work_until_done(&other, (tb_op *[]){&l.op}, 1);
    assert_int_equal(l.count, LAST_WORDS);
    assert_int_equal(l.end, TB_LOST);
    char why[TB_OP_WHY_MAX];
    snprintf(why, sizeof why, "%s", l.op.why);
    /* Whoever comes later is told why, not only that it is so. */
    make_op(&l.op, TB_OP_RECV, e->rank_a, 7, &l.piece, 1);
    assert_int_equal(tb__transport_post(&e->b, &l.op), TB_LOST);
    if (strcmp(tb_error_detail(), "") == 0 || strcmp(tb_error_detail(), "it is lost") == 0)
        fail_msg("the reason is '%s'", tb_error_detail());
    assert_non_null(strstr(tb_error_detail(), why));
    assert_string_not_equal(why, "");
}

void conformance(void (*make)(endpoints *e), void (*unmake)(endpoints *e)) {
    conformance_without(NULL, make, unmake);
}

void conformance_without(const char *part, void (*make)(endpoints *e), void (*unmake)(endpoints *e)) {
    static const struct {
        const char *name;
        void (*run)(endpoints *e);
    } parts[] = {{"messages", messages},
                 {"many messages", many_messages},
                 {"equal tags keep their order", equal_tags_keep_their_order},
                 {"too big", too_big},
                 {"cancellation", cancellation},
                 {"cancelled long sends", cancelled_long_sends},
                 {"unexpected long messages", unexpected_long_messages},
                 {"expected messages", expected_messages},
                 {"wake up", wake_up},
                 {"memory", conformance_memory},
                 {"scattered", conformance_scattered},
                 {"many registrations", conformance_many_registrations},
                 {"descriptors", conformance_fds},
                 {"gigabytes", gigabytes},
                 {"closing", closing},
                 {"last words", last_words}};
    for (size_t i = 0; i < sizeof parts / sizeof *parts; i++) {
        endpoints e = {0};
        if (part && strcmp(parts[i].name, part) == 0)
            continue;
        printf("  %s\n", parts[i].name);
        fflush(stdout);
        make(&e);
        parts[i].run(&e);
        unmake(&e);
    }
}
