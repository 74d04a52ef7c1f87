/* Communicators, and the messages by which transports that have them talk. */
#include "loop/comm.h"

#include "base/mem.h"
#include "loop/loop_inside.h"

#include <string.h>

enum { CAUSE_MS = 500 }; /* how long a failure waits for its cause, a lost rank */

static const tb_transport *find_transport(const tb__loop *loop, const char *name) {
    for (size_t i = 0; i < loop->ntransports; i++) {
        if (strcmp(loop->transports[i].ops->name, name) == 0)
            return &loop->transports[i];
    }
    return NULL;
}

uint32_t tb__comm_carriers(const tb__loop *loop, const tb__device *device, bool are_near) {
    uint32_t carriers = 0;
    for (size_t i = 0; i < loop->ntransports; i++) {
        const tb_transport *t = &loop->transports[i];
        bool is_asked_for =
            loop->requested_comms ? t->ops == loop->requested_comms : !(t->ops->comm_create && are_near);
        if (is_asked_for && device->ops->transport_kind != TB_MEM_HOST &&
            tb__transport_carries(t, device->ops->transport_kind))
            carriers |= 1U << i;
    }
    return carriers;
}

tb__device *tb__comm_find_device(tb__loop *loop, int *unit) {
    for (size_t i = 0; loop->requested_comms && i < loop->ndevices; i++) {
        tb__device *device = loop->devices[i];
        if (!tb__comm_carriers(loop, device, false))
            continue;
        *unit = device->ops->current_unit(device);
        return device;
    }
    return NULL;
}

void tb__comm_pack_carriers(const tb__loop *loop, uint32_t carriers, tb__pack *out) {
    tb__pack_u32(out, (uint32_t)__builtin_popcount(carriers));
    for (size_t i = 0; i < loop->ntransports; i++) {
        if (carriers >> i & 1U)
            tb__pack_string(out, loop->transports[i].ops->name);
    }
}

uint32_t tb__comm_unpack_carriers(const tb__loop *loop, tb__unpack *message) {
    uint32_t carriers = 0;
    for (uint32_t n = tb__unpack_u32(message); n > 0 && !message->failed; n--) {
        const tb_transport *t = find_transport(loop, tb__unpack_string(message));
        carriers |= t ? 1U << (t - loop->transports) : 0;
    }
    return carriers;
}

void tb__comm_make_id(const tb__loop *loop, uint32_t carriers, unsigned char id[TB_COMM_ID_SIZE]) {
    memset(id, 0, TB_COMM_ID_SIZE);
    for (size_t i = 0; i < loop->ntransports; i++) {
        const tb_transport *t = &loop->transports[i];
        if (carriers >> i & 1U && t->ops->comm_id && t->ops->comm_id(t->context, id) == TB_OK)
            return;
    }
}

static bool step_comm(tb__task *task) {
    tb__comm *comm = (tb__comm *)task;
    bool is_ready = false;
    if (comm->has_failed)
        return false;
    tb_status status = comm->transport->ops->comm_check(comm->transport->context, comm->handle, &is_ready);
    if (status == TB_OK && (!is_ready || comm->is_ready))
        return false;
    if (status != TB_OK && status != TB_LOST && comm->report_ms == 0)
        task->deadline_ms = comm->report_ms = tb__now_ms() + CAUSE_MS;
    if (status != TB_OK && tb__now_ms() < comm->report_ms)
        return false;
    task->deadline_ms = INT64_MAX;
    comm->is_ready |= status == TB_OK;
    comm->has_failed = status != TB_OK;
    comm->status = status;
    comm->changed(comm);
    return true;
}

tb_status tb__comm_create(tb__loop *loop, const tb__comm_opts *opts, tb__comm **out) {
    *out = NULL;
    if (!opts->carriers || !loop->transports[__builtin_ctz(opts->carriers)].ops->comm_create)
        return TB_OK;
    const tb_transport *t = &loop->transports[__builtin_ctz(opts->carriers)];
    tb__comm *comm = tb__calloc(1, sizeof *comm);
    int32_t *ranks = tb__malloc(opts->npeers, sizeof *ranks);
    tb_status status = comm && ranks ? TB_OK : TB_NO_MEMORY;
    for (size_t i = 0; status == TB_OK && i < opts->npeers; i++)
        ranks[i] = opts->peers[i]->transport_rank;
    if (status == TB_OK) {
        *comm = (tb__comm){.task = {.step = step_comm, .deadline_ms = INT64_MAX},
                           .loop = loop,
                           .transport = t,
                           .device = opts->device,
                           .unit = opts->unit,
                           .nbytes = opts->nbytes,
                           .is_requested = t->ops == loop->requested_comms,
                           .changed = opts->changed,
                           .arg = opts->arg};
        tb_comm_desc desc = {.size = sizeof desc,
                             .id = opts->id,
                             .ranks = ranks,
                             .nranks = opts->npeers,
                             .self = opts->self,
                             .kind = opts->device->ops->transport_kind,
                             .device = opts->unit,
                             .nbytes = opts->nbytes};
        status = t->ops->comm_create(t->context, &desc, &comm->handle);
    }
    free(ranks);
    if (status != TB_OK) {
        free(comm);
        return tb__fail_within(status, "communicator of %s", t->ops->name);
    }
    tb__loop_add_task(loop, &comm->task);
    *out = comm;
    return TB_OK;
}

void tb__comm_destroy(tb__comm *comm) {
    if (!comm)
        return;
    tb__loop_remove_task(comm->loop, &comm->task);
    comm->transport->ops->comm_destroy(comm->transport->context, comm->handle);
    free(comm);
}

void *tb__comm_memory(const tb__comm *comm) {
    const tb_transport *t = comm->transport;
    return t->ops->comm_memory ? t->ops->comm_memory(t->context, comm->handle) : NULL;
}

bool tb__comm_reaches(const tb__comm *comm, const tb__peer *peer) {
    return !comm->has_failed && !peer->transport->ops->is_local;
}

tb_status tb__comm_post(const tb__comm *comm, tb__peer *peer, tb_op *op) {
    if (peer->is_lost)
        return tb__fail(TB_LOST, "%s", peer->why ? peer->why : "it is gone");
    op->comm = comm->handle;
    return tb__transport_post(comm->transport, op);
}

tb_status tb__comm_tell(void *arg, int32_t transport_rank, const void *bytes, size_t nbytes) {
    const tb__loop_transport *from = arg;
    tb__peer *peer = tb__loop_find_by_transport_rank(from->loop, transport_rank);
    tb__pack pack = {0};
    if (!peer)
        return tb__fail(TB_INVALID, "there is no rank %d", (int)transport_rank);
    tb__pack_string(&pack, from->transport->ops->name);
    tb__pack_bytes(&pack, bytes, nbytes);
    return tb__loop_send(peer, TB__PORT_TRANSPORTS, &pack);
}

bool tb__comms_on_message(tb__peer *from, tb__unpack *message) {
    size_t nbytes;
    const char *name = tb__unpack_string(message);
    const void *bytes = tb__unpack_bytes(message, &nbytes);
    if (!tb__unpack_is_done(message))
        return false;
    const tb_transport *t = find_transport(from->loop, name);
    if (t && t->ops->told)
        t->ops->told(t->context, from->transport_rank, bytes, nbytes);
    return true;
}

void tb__comms_on_lost(const tb__peer *peer) {
    for (size_t i = 0; i < peer->loop->ntransports; i++) {
        const tb_transport *t = &peer->loop->transports[i];
        if (t->ops->peer_lost)
            t->ops->peer_lost(t->context, peer->transport_rank, peer->why ? peer->why : "it is gone");
    }
}
