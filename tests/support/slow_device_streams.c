/* The streams of the slow device. What is done is worked out by whoever changes something: there is no thread for them,
 * but for gates whose time has come, which the device's thread opens. */
#include "slow_device_inside.h"

#include "base/process.h"

#include <stdio.h>
#include <string.h>
#include <sys/eventfd.h>

struct slow_stream {
    struct slow_queue queue;
    bool is_captured;
    tb_status status; /* of what is recorded, when it comes */
    char why[TB__FENCE_WHY_MAX];
    LIST_ENTRY(slow_stream) link;
};

static LIST_HEAD(streams, slow_stream) streams;
static slow_stream default_stream;

static void *allocate(size_t nbytes) {
    void *p = malloc(nbytes);
    if (p)
        return p;
    slow_die("no memory");
}

static void init_stream(slow_stream *s) {
    *s = (slow_stream){0};
    TAILQ_INIT(&s->queue);
    LIST_INSERT_HEAD(&streams, s, link);
}

static void free_works(slow_stream *s) {
    slow_work *w;
    while ((w = TAILQ_FIRST(&s->queue))) {
        TAILQ_REMOVE(&s->queue, w, link);
        w->stream = NULL;
        if (!w->fence) /* else it is freed when the fence is done */
            free(w);
    }
}

void slow_streams_reset(void) {
    for (slow_stream *s = LIST_FIRST(&streams), *next; s; s = next) {
        next = LIST_NEXT(s, link);
        free_works(s);
        if (s != &default_stream)
            free(s);
    }
    LIST_INIT(&streams);
    init_stream(&default_stream);
}

static void tell_mark(slow_work *mark, tb_status status) {
    mark->status = status;
    TAILQ_INSERT_TAIL(&mark->device->marks, mark, mark_link);
    eventfd_write(mark->device->wake, 1);
}

/* Does what can be done. */
static void advance(slow_stream *s) {
    slow_work *w = TAILQ_FIRST(&s->queue);
    while (w && w->is_done)
        w = TAILQ_NEXT(w, link);
    for (; w && w->may_pass; w = TAILQ_NEXT(w, link)) {
        if (w->is_done) /* a mark that was cancelled */
            continue;
        w->is_done = true;
        if (w->fn)
            w->fn(w->arg);
        if (w->fence)
            tell_mark(w, s->status);
    }
    pthread_cond_broadcast(&slow.changed);
}

static slow_work *add(slow_stream *s, const slow_work *what) {
    slow_work *w = allocate(sizeof *w);
    *w = *what;
    w->stream = s;
    w->pending.is_mark = w->kind == SLOW_MARK;
    TAILQ_INSERT_TAIL(&s->queue, w, link);
    advance(s);
    return w;
}

/* ---- Tests ------------------------------------------------------------------------------------------------------- */

slow_stream *slow_stream_create(void) {
    slow_stream *s = allocate(sizeof *s);
    slow_lock();
    init_stream(s);
    slow_unlock();
    return s;
}

void slow_stream_destroy(slow_stream *s) {
    slow_lock();
    for (const slow_work *w = TAILQ_FIRST(&s->queue); w; w = TAILQ_NEXT(w, link)) {
        if (!w->is_done)
            slow_die("a stream is destroyed whose work is not done");
    }
    LIST_REMOVE(s, link);
    free_works(s);
    slow_unlock();
    free(s);
}

slow_work *slow_stream_add(slow_stream *s, void (*fn)(void *arg), void *arg, bool is_held) {
    slow_lock();
    slow_work *w =
        add(s ? s : &default_stream, &(slow_work){.kind = SLOW_WORK, .may_pass = !is_held, .fn = fn, .arg = arg});
    slow_unlock();
    return w;
}

void slow_work_let_go(slow_work *work) {
    slow_lock();
    work->may_pass = true;
    advance(work->stream);
    slow_unlock();
}

bool slow_work_wait(slow_work *work, int timeout_ms) {
    struct timespec until = tb__time_of_ms(tb__now_ms() + timeout_ms);
    int error = 0;
    slow_lock();
    while (!work->is_done && error == 0)
        error = pthread_cond_timedwait(&slow.changed, &slow.lock, &until);
    bool is_done = work->is_done;
    slow_unlock();
    return is_done;
}

size_t slow_stream_count(slow_stream *s) {
    size_t n = 0;
    slow_lock();
    for (const slow_work *w = TAILQ_FIRST(&s->queue); w; w = TAILQ_NEXT(w, link))
        n++;
    slow_unlock();
    return n;
}

void slow_stream_set_captured(slow_stream *s, bool is_captured) {
    slow_lock();
    s->is_captured = is_captured;
    slow_unlock();
}

void slow_stream_fail(slow_stream *s, tb_status status, const char *why) {
    slow_lock();
    s->status = status;
    snprintf(s->why, sizeof s->why, "%s", why);
    slow_unlock();
}

/* ---- The device -------------------------------------------------------------------------------------------------- */

void slow_streams_end_run(const slow_run *run) {
    for (slow_stream *s = LIST_FIRST(&streams); s; s = LIST_NEXT(s, link)) {
        bool has_any = false;
        for (slow_work *w = TAILQ_FIRST(&s->queue); w; w = TAILQ_NEXT(w, link)) {
            if (w->run != run)
                continue;
            has_any = w->may_pass = true;
            w->run = NULL;
        }
        if (has_any)
            advance(s);
    }
}

/* The stream itself goes on as before. */
void slow_cancel_mark(slow_work *mark) {
    if (!mark->is_done)
        tell_mark(mark, TB_CANCELLED);
    mark->is_done = true;
}

bool slow_complete_marks(slow_device *device) {
    slow_work *mark;
    bool did = false;
    while ((mark = TAILQ_FIRST(&device->marks))) {
        TAILQ_REMOVE(&device->marks, mark, mark_link);
        slow_complete_fence(mark->fence, mark->status,
                            mark->status == TB_OK || !mark->stream ? ""
                            : mark->status == TB_CANCELLED         ? "it was cancelled"
                                                                   : mark->stream->why);
        mark->fence = NULL;
        if (!mark->stream)
            free(mark);
        device->nmarks--;
        did = true;
    }
    return did;
}

int64_t slow_open_late_gates(slow_device *device) {
    int64_t next_ms = INT64_MAX / 1000;
    for (slow_work *gate = LIST_FIRST(&device->gates); gate; gate = LIST_NEXT(gate, gate_link)) {
        if (gate->may_pass)
            continue;
        gate->may_pass = gate->deadline_ms <= tb__now_ms();
        if (gate->may_pass)
            advance(gate->stream);
        else if (gate->deadline_ms < next_ms)
            next_ms = gate->deadline_ms;
    }
    return next_ms == INT64_MAX / 1000 ? INT64_MAX : next_ms * 1000;
}

static tb_status find_stream(const void *handle, slow_stream **out) {
    TB_TRY(slow_check_call(SLOW_DEVICE_STREAM));
    slow_stream *s = *(slow_stream *const *)handle;
    s = s ? s : &default_stream;
    slow_lock();
    bool is_captured = s->is_captured;
    slow_unlock();
    *out = s;
    return is_captured ? tb__fail(TB_REFUSED, "the stream is being captured") : TB_OK;
}

tb_status slow_stream_record(tb__device *base, const void *handle, tb__fence *fence) {
    slow_device *device = (slow_device *)base;
    slow_stream *s;
    TB_TRY(find_stream(handle, &s));
    slow_lock();
    device->nmarks++;
    slow_work mark = {.kind = SLOW_MARK, .may_pass = true, .device = device, .fence = fence};
    slow_work *added = add(s, &mark);
    fence->state = added;
    slow_unlock();
    return TB_OK;
}

tb_status slow_stream_wait(tb__device *base, const void *handle, const tb__fence *fence) {
    slow_device *device = (slow_device *)base;
    slow_stream *s;
    TB_TRY(find_stream(handle, &s));
    slow_lock();
    slow_pending *pending = fence->is_done ? NULL : fence->state;
    if (pending && pending->is_mark)
        slow_die("a stream is to wait for what is no run");
    if (pending)
        add(s, &(slow_work){.kind = SLOW_WAIT, .device = device, .run = (slow_run *)pending});
    slow_unlock();
    return TB_OK;
}

tb_status slow_gate_create(tb__device *base, const void *handle, int64_t deadline_ms, tb__gate **out) {
    slow_device *device = (slow_device *)base;
    slow_stream *s;
    TB_TRY(find_stream(handle, &s));
    slow_lock();
    slow_work *gate = add(s, &(slow_work){.kind = SLOW_GATE, .device = device, .deadline_ms = deadline_ms});
    LIST_INSERT_HEAD(&device->gates, gate, gate_link);
    pthread_cond_broadcast(&slow.changed); /* the device's thread has to look at the clock */
    *out = (tb__gate *)gate;
    slow_unlock();
    return TB_OK;
}

void slow_gate_open(tb__gate *given) {
    slow_work *gate = (slow_work *)given;
    slow_lock();
    if (!gate->device)
        slow_die("a gate is opened twice");
    LIST_REMOVE(gate, gate_link);
    gate->device = NULL;
    gate->may_pass = true;
    advance(gate->stream);
    slow_unlock();
}
