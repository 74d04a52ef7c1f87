/* The transport over NVSHMEM, for memory of GPUs, between ranks that it connects once. It is loaded when it is opened.
 *
 * Buckets lie in symmetric memory, which all ranks of a communicator allocate together. A message takes three steps:
 * its sender OFFERs it; the receiver, if it still wants it, GRANTs it a place in its memory and a signal word; the
 * sender puts the data there, and then a value in the word (nvshmemx_putmem_signal_on_stream), on a stream of its own.
 * The receiver copies its words to the host again and again, on another stream, while it has granted something. Nothing
 * waits on the GPU for another rank (on a GPU that several ranks share, NVSHMEM's own waits end the process). A sender
 * that cancelled a message which is then granted puts a value of its own instead, so a granted receive always ends.
 *
 * NVSHMEM's collective calls (init, malloc, free, finalize) block, and must be made by all ranks in the same order. The
 * rank with the lowest number leads: when all ranks have told it that they are there, it tells them what to do, and
 * each does it in a thread (nvshmem_library.h) in the order in which it was told. So a rank that never comes blocks no
 * call: the communicator just does not become ready. A rank that has left may end at once, so memory is freed, and
 * NVSHMEM finalised, only when all ranks are known to be there: to make another communicator, or to close, of which
 * they tell each other by words in symmetric memory.
 *
 * What is weaker than in other transports:
 *  - A process has one set of ranks at a time, and one rank. Communicators with the same ranks share it, with memory of
 *    their own; one with others is refused while a communicator is in use, and then waits for the end of that use,
 *    which all ranks must have left.
 *  - When a rank is lost that has not left all communicators, these fail at all ranks, and none can be made again in
 *    these processes. No function of NVSHMEM is called any more, not even to end it: its memory is kept until the
 *    process ends. A thread may stay behind in a call that will never return; exit then ends early, by _exit.
 *  - When a rank has left all communicators, and its process ends, those that it left go on, but none can be made
 * again, either, and memory is not freed.
 *  - NVSHMEM itself ends the process on some errors (exit), with a message on its standard error.
 *  - A put that has begun can't be stopped: cancelling it, or a receive with a granted place, waits for a second at
 *    most, and then completes with TB_TIMEOUT: the memory may still be read or written. */
#include "transport/nvshmem/nvshmem.h"

#include "base/descriptors.h"
#include "base/log.h"
#include "base/process.h"
#include "transport/message.h"
#include "transport/transport.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>

static tb_status open_nvshmem(const tb_transport_env *env, void **context) {
    const nvshmem_functions *call;
    const nvshmem_cuda *cuda;
    TB_TRY(nvshmem_load(env, &call, &cuda));
    nvshmem *u = tb__calloc(1, sizeof *u);
    if (!u)
        return TB_NO_MEMORY;
    u->env = *env;
    u->call = call;
    u->cuda = cuda;
    u->event = tb__fd_own(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
    if (u->event < 0) {
        free(u);
        return tb__fail(TB_IO, "eventfd: %s", tb__errno_text(errno));
    }
    *context = u;
    return TB_OK;
}

static void close_nvshmem(void *context) {
    nvshmem *u = context;
    tb_comm *c = u->comms;
    for (; c; c = c->next) {
        if (!c->is_destroyed)
            nvshmem_comm_destroy(u, c);
    }
    nvshmem_library_part(u);
    if (!nvshmem_library_abandon(u))
        tb__log(TB_LOG_WARN, "nvshmem: a thread is left behind in a call that waits for other ranks");
    while ((c = u->comms)) {
        u->comms = c->next;
        nvshmem_free_comm(c);
    }
    nvshmem_forget_early(u, TB_NO_RANK);
    free(u->ranks);
    tb__fd_close(u->event);
    free(u);
}

static tb_status progress(void *context) {
    nvshmem *u = context;
    eventfd_t unused;
    tb_comm *c;
    bool is_busy = false;
    eventfd_read(u->event, &unused);
    nvshmem_take_jobs(u);
    for (c = u->comms; c; c = c->next)
        is_busy |= nvshmem_advance(c);
    nvshmem_sweep(u);
    if (is_busy)
        eventfd_write(u->event, 1);
    return TB_OK;
}

static int get_fd(void *context) {
    return ((nvshmem *)context)->event;
}

static void told(void *context, int32_t peer, const void *bytes, size_t nbytes) {
    nvshmem *u = context;
    nvshmem_message m = {0};
    if (nbytes < NVSHMEM_MESSAGE_HEAD || nbytes > sizeof m)
        return;
    memcpy(&m, bytes, nbytes);
    if (m.kind < TELL_OFFER) {
        nvshmem_told_comm(u, peer, &m);
        return;
    }
    tb_comm *c = u->comms;
    while (c && c->key != m.key)
        c = c->next;
    if (c && nvshmem_find(c, peer) != SIZE_MAX)
        nvshmem_told_op(c, peer, &m);
}

static void peer_lost(void *context, int32_t peer, const char *why) {
    nvshmem_lost(context, peer, why);
}

const tb_transport_ops tb__nvshmem_ops = {
    .size = sizeof tb__nvshmem_ops,
    .name = "nvshmem",
    .memory = 1U << TB_MEM_CUDA,
    .open = open_nvshmem,
    .close = close_nvshmem,
    .post = nvshmem_post,
    .cancel = nvshmem_cancel,
    .progress = progress,
    .fd = get_fd,
    .comm_id = nvshmem_comm_id,
    .comm_create = nvshmem_comm_create,
    .comm_check = nvshmem_comm_check,
    .comm_memory = nvshmem_comm_memory,
    .comm_destroy = nvshmem_comm_destroy,
    .told = told,
    .peer_lost = peer_lost,
    .is_by_request = true,
};
