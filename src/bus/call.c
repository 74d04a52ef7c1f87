/* Calls that wait, made by a thread: the caller waits for a descriptor. */
#include "base/descriptors.h"
#include "base/int.h"
#include "base/mem.h"
#include "base/opts.h"
#include "base/process.h"
#include "bus/ops.h"

#include <errno.h>
#include <pthread.h>
#include <string.h>
#include <sys/eventfd.h>

/* A call that can't be woken is abandoned: its thread frees it. */
enum { UNDER_WAY, ENDED, ABANDONED };

struct tb_call {
    tb__owner owner;
    pthread_t thread;
    atomic_int state;
    atomic_bool cancelled;
    int event;
    tb_status status;
    tb__saved_detail why;
    tb_status (*run)(tb_call *call); /* sets `made` */
    void (*drop)(tb_call *call);     /* destroys `made`; NULL: nothing is made */
    void *made;
    tb__arena arena;        /* of what follows */
    tb__bus_object *object; /* the world or batch, whose waits can be woken; NULL: there is none yet */
    const char *url, *name, *group, *layout;
    int32_t index, size;
    int timeout_ms;
    tb_world_opts world_opts;
    tb_pair_opts pair_opts;
    tb_transfer_opts transfer_opts;
    const void *stream; /* the handle that transfer_opts points to */
};

static void free_call(tb_call *call) {
    if (call->made && call->drop)
        call->drop(call);
    tb__fd_close(call->event);
    tb__arena_fini(&call->arena);
    free(call);
}

static void *call_main(void *arg) {
    tb_call *call = arg;
    int expected = UNDER_WAY;
    call->status = call->run(call);
    call->why = tb__save_detail();
    if (atomic_compare_exchange_strong(&call->state, &expected, ENDED))
        eventfd_write(call->event, 1);
    else
        free_call(call);
    return NULL;
}

/* `object` may be NULL; `what` it is, for the sentence in a forked child. */
static tb_status new_call(tb_status (*run)(tb_call *call), void (*drop)(tb_call *call), void *object, const char *what,
                          tb_call **out) {
    if (object)
        TB_TRY(tb__owner_check(&((tb__bus_object *)object)->owner, what, "join again"));
    tb_call *call = tb__calloc(1, sizeof *call);
    if (!call)
        return TB_NO_MEMORY;
    tb__owner_init(&call->owner);
    call->object = object;
    call->run = run;
    call->drop = drop;
    call->event = tb__fd_own(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
    if (call->event < 0) {
        tb_status status = tb__fail(TB_IO, "eventfd: %s", tb__errno_text(errno));
        free_call(call);
        return status;
    }
    *out = call;
    return TB_OK;
}

static tb_status start(tb_call *call, tb_status status, tb_call **out) {
    if (status == TB_OK)
        status = tb__start_thread(&call->thread, "tb-call", call_main, call);
    if (status == TB_OK)
        *out = call;
    else
        free_call(call);
    return status;
}

/* Copies a text that may be NULL. */
static bool copy_text(tb_call *call, const char **text) {
    return !*text || (*text = tb__arena_strdup(&call->arena, *text));
}

/* ---- Join ------------------------------------------------------------------------------------------------------ */

static tb_status run_join(tb_call *call) {
    return tb_world_join(call->url, call->group, call->index, call->size, &call->world_opts, (tb_world **)&call->made);
}

static void drop_world(tb_call *call) {
    tb_world_destroy(call->made);
}

tb_status tb_call_join(const char *url, const char *group, int32_t index, int32_t size, const tb_world_opts *opts,
                       tb_call **out) {
    tb_world_opts o;
    tb_call *call;
    TB_TRY(tb__opts_read(&o, sizeof o, opts));
    TB_TRY(new_call(run_join, drop_world, NULL, NULL, &call));
    call->url = url;
    call->group = group;
    call->index = index;
    call->size = size;
    call->world_opts = o;
    const char **texts[] = {&call->url,
                            &call->group,
                            &call->world_opts.token,
                            &call->world_opts.transport,
                            &call->world_opts.host,
                            &call->world_opts.name};
    bool has_room = true;
    for (size_t i = 0; i < sizeof texts / sizeof *texts; i++)
        has_room = has_room && copy_text(call, texts[i]);
    return start(call, has_room ? TB_OK : TB_NO_MEMORY, out);
}

/* ---- Pairs ----------------------------------------------------------------------------------------------------- */

static tb_status run_pair(tb_call *call) {
    return call->object->ops->pair_create((tb_world *)call->object, call->name, call->group, call->layout,
                                          &call->pair_opts, &call->cancelled, (tb_pair **)&call->made);
}

static void drop_pair(tb_call *call) {
    tb_pair_destroy(call->made);
}

tb_status tb_call_pair(tb_world *world, const char *name, const char *remote_group, const char *layout,
                       const tb_pair_opts *opts, tb_call **out) {
    tb_pair_opts o;
    tb_call *call;
    TB_TRY(tb__opts_read(&o, sizeof o, opts));
    TB_TRY(new_call(run_pair, drop_pair, world, "world", &call));
    call->name = name;
    call->group = remote_group;
    call->layout = layout;
    call->pair_opts = o;
    bool has_room = copy_text(call, &call->name) && copy_text(call, &call->group) && copy_text(call, &call->layout) &&
                    copy_text(call, &call->pair_opts.group);
    return start(call, has_room ? TB_OK : TB_NO_MEMORY, out);
}

/* ---- Registrations --------------------------------------------------------------------------------------------- */

static tb_status run_register(tb_call *call) {
    return call->object->ops->batch_register((tb_batch *)call->object, call->timeout_ms, &call->cancelled);
}

tb_status tb_call_register(tb_batch *batch, int timeout_ms, tb_call **out) {
    tb_call *call;
    TB_TRY(new_call(run_register, NULL, batch, "batch", &call));
    call->timeout_ms = timeout_ms;
    return start(call, TB_OK, out);
}

/* ---- Transfers ------------------------------------------------------------------------------------------------- */

static tb_status run_transfer(tb_call *call, bool is_send) {
    int64_t begun_ms = tb__now_ms();
    tb_transfer_opts *o = &call->transfer_opts;
    TB_TRY(call->object->ops->batch_register((tb_batch *)call->object, o->timeout_ms, &call->cancelled));
    if (o->timeout_ms > 0) /* it is for both */
        o->timeout_ms = (int)tb__max64(o->timeout_ms - (tb__now_ms() - begun_ms), 1);
    return (is_send ? tb_send : tb_recv)((tb_batch *)call->object, o, (tb_transfer **)&call->made);
}

static tb_status run_send(tb_call *call) {
    return run_transfer(call, true);
}

static tb_status run_recv(tb_call *call) {
    return run_transfer(call, false);
}

static void drop_transfer(tb_call *call) {
    tb_transfer_destroy(call->made);
}

static tb_status begin_by_call(tb_status (*run)(tb_call *call), tb_batch *batch, const tb_transfer_opts *opts,
                               tb_call **out) {
    tb_transfer_opts o;
    tb_call *call;
    TB_TRY(tb__opts_read(&o, sizeof o, opts));
    if (o.timeout_ms < 0)
        return tb__fail(TB_INVALID, "timeout_ms can't be negative");
    TB_TRY(new_call(run, drop_transfer, batch, "batch", &call));
    if (o.stream)
        memcpy(&call->stream, o.stream, sizeof call->stream);
    o.stream = o.stream ? &call->stream : NULL;
    call->transfer_opts = o;
    return start(call, copy_text(call, &call->transfer_opts.group) ? TB_OK : TB_NO_MEMORY, out);
}

tb_status tb_call_send(tb_batch *batch, const tb_transfer_opts *opts, tb_call **out) {
    return begin_by_call(run_send, batch, opts, out);
}

tb_status tb_call_recv(tb_batch *batch, const tb_transfer_opts *opts, tb_call **out) {
    return begin_by_call(run_recv, batch, opts, out);
}

/* ---- All of them ----------------------------------------------------------------------------------------------- */

int tb_call_fd(const tb_call *call) {
    return tb__is_inherited(&call->owner) ? -1 : call->event;
}

tb_status tb_call_result(tb_call *call, void **out) {
    TB_TRY(tb__owner_check(&call->owner, "call", "join again"));
    if (atomic_load(&call->state) == UNDER_WAY)
        return tb__fail(TB_TIMEOUT, "the call has not ended");
    if (call->status != TB_OK)
        return tb__fail(call->status, "%s", call->why.text);
    if (out) {
        *out = call->made;
        call->made = NULL;
    }
    return TB_OK;
}

/* In a forked child, which has no thread, the call stays as it was at the fork. */
void tb_call_destroy(tb_call *call) {
    int expected = UNDER_WAY;
    if (!call || tb__is_inherited(&call->owner))
        return;
    if (call->object) {
        const tb__bus_ops *ops = call->object->ops;
        atomic_store(&call->cancelled, true);
        ops->lock(call->object->guard);
        ops->wake(call->object->guard);
        ops->unlock(call->object->guard);
    } else {
        pthread_t thread = call->thread; /* the call may be freed any moment */
        if (atomic_compare_exchange_strong(&call->state, &expected, ABANDONED)) {
            pthread_detach(thread);
            return;
        }
    }
    pthread_join(call->thread, NULL);
    free_call(call);
}
