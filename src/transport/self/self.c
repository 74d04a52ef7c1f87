/* The transport of a rank to itself, by memcpy. It is the reference for the others. */
#include "transport/message.h"

#include "base/descriptors.h"
#include "base/process.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <string.h>
#include <sys/eventfd.h>
#include <unistd.h>

/* A posted operation: waiting for its counterpart, or ready to be done. */
typedef struct posted {
    tb__waiter waiter;
    tb_op *op;
    struct posted *next_ready;
    struct posted *counterpart; /* of a ready receive: its send. NULL: a send without a receive, which is dropped */
} posted;

/* Descriptors that were sent; none if they were taken. */
typedef struct sent_fds {
    int *item;
    size_t count;
} sent_fds;

typedef struct self {
    tb_transport_env env;
    int event; /* readable while something is ready */
    bool is_readable;
    tb__match sends, receives;
    posted *ready, **ready_end;
    TB_VEC(struct tb_mem *) memory; /* by id; NULL: unregistered */
    TB_VEC(sent_fds) fds;           /* by id - 1 */
} self;

struct tb_mem {
    tb_mem_desc desc;
    uint64_t id;
    bool is_valid;
    size_t refs; /* the registration itself, and remotes */
};

struct tb_remote {
    struct tb_mem *mem;
};

static tb_status self_open(const tb_transport_env *env, void **context) {
    self *s = tb__calloc(1, sizeof *s);
    if (!s)
        return TB_NO_MEMORY;
    s->env = *env;
    s->ready_end = &s->ready;
    s->event = tb__fd_own(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
    if (s->event < 0) {
        free(s);
        return tb__fail(TB_IO, "eventfd: %s", tb__errno_text(errno));
    }
    *context = s;
    return TB_OK;
}

static void complete_op(posted *p, tb_status status) {
    p->op->status = status;
    tb__op_complete(p->op);
}

static void mem_unref(struct tb_mem *mem) {
    if (--mem->refs == 0)
        free(mem);
}

static void close_sent(sent_fds *sent) {
    for (size_t i = 0; i < sent->count; i++)
        tb__fd_close(sent->item[i]);
    free(sent->item);
    *sent = (sent_fds){0};
}

static void self_close(void *context) {
    self *s = context;
    tb__waiter *w;
    while ((w = tb__match_drain(&s->sends, -1)) || (w = tb__match_drain(&s->receives, -1)))
        complete_op((posted *)w, TB_CANCELLED);
    while (s->ready) {
        posted *p = s->ready;
        s->ready = p->next_ready;
        if (p->counterpart)
            complete_op(p->counterpart, TB_CANCELLED);
        complete_op(p, TB_CANCELLED);
    }
    for (size_t i = 0; i < s->memory.count; i++) {
        if (s->memory.item[i])
            mem_unref(s->memory.item[i]);
    }
    free(s->memory.item);
    for (size_t i = 0; i < s->fds.count; i++)
        close_sent(&s->fds.item[i]);
    free(s->fds.item);
    tb__fd_close(s->event);
    free(s);
}

static tb_status self_address(void *context, void *buffer, size_t *nbytes) {
    self *s = context;
    if (*nbytes < sizeof s->env.rank)
        return tb__fail(TB_TOO_BIG, "the address needs %zu bytes", sizeof s->env.rank);
    memcpy(buffer, &s->env.rank, sizeof s->env.rank);
    *nbytes = sizeof s->env.rank;
    return TB_OK;
}

static tb_status self_connect(void *context, int32_t peer, const void *address, size_t nbytes) {
    self *s = context;
    (void)address;
    (void)nbytes;
    return peer == s->env.rank ? TB_OK
                               : tb__fail(TB_INVALID, "transport self reaches rank %" PRId32 " only, not rank %" PRId32,
                                          s->env.rank, peer);
}

static tb_status self_register(void *context, const tb_mem_desc *desc, tb_mem **out) {
    self *s = context;
    struct tb_mem *mem = tb__malloc(1, sizeof *mem);
    if (!mem)
        return TB_NO_MEMORY;
    *mem = (struct tb_mem){.desc = *desc, .id = s->memory.count, .is_valid = true, .refs = 1};
    if (!tb__vec_push(&s->memory, mem)) {
        free(mem);
        return TB_NO_MEMORY;
    }
    *out = mem;
    return TB_OK;
}

static void self_unregister(void *context, tb_mem *mem) {
    self *s = context;
    s->memory.item[mem->id] = NULL;
    mem->is_valid = false;
    mem_unref(mem);
}

static tb_status self_export(void *context, tb_mem *mem, int32_t peer, tb_mem_key *out) {
    (void)context;
    (void)peer;
    *out = (tb_mem_key){.nbytes = sizeof mem->id};
    memcpy(out->bytes, &mem->id, sizeof mem->id);
    return TB_OK;
}

static tb_status self_import(void *context, int32_t peer, const tb_mem_key *key, tb_remote **out) {
    self *s = context;
    uint64_t id = UINT64_MAX;
    if (key->nbytes == sizeof id)
        memcpy(&id, key->bytes, sizeof id);
    if (id >= s->memory.count || !s->memory.item[id])
        return tb__fail(TB_INVALID, "rank %" PRId32 " has no such memory, or has unregistered it", peer);
    tb_remote *remote = tb__malloc(1, sizeof *remote);
    if (!remote)
        return TB_NO_MEMORY;
    remote->mem = s->memory.item[id];
    remote->mem->refs++;
    *out = remote;
    return TB_OK;
}

static void self_release(void *context, tb_remote *remote) {
    (void)context;
    mem_unref(remote->mem);
    free(remote);
}

static void *self_map(void *context, tb_remote *remote) {
    (void)context;
    return remote->mem->is_valid ? remote->mem->desc.base : NULL;
}

static bool self_is_valid(void *context, const tb_remote *remote) {
    (void)context;
    return remote->mem->is_valid;
}

static tb_status self_read(void *context, tb_remote *remote, const tb_range *ranges, size_t nranges,
                           const tb_piece *pieces, size_t npieces) {
    self *s = context;
    const struct tb_mem *mem = remote->mem;
    if (!mem->is_valid)
        return tb__fail(TB_INVALID, "memory %" PRIu64 " of rank %" PRId32 " has been unregistered", mem->id,
                        s->env.rank);
    TB_TRY(tb__ranges_check(ranges, nranges, pieces, npieces, mem->desc.nbytes, s->env.rank));
    tb__ranges_copy(mem->desc.base, ranges, nranges, pieces, npieces);
    return TB_OK;
}

static tb_status self_send_fds(void *context, int32_t peer, const int *fds, size_t nfds, uint64_t *id) {
    self *s = context;
    (void)peer;
    sent_fds sent = {.item = tb__malloc(nfds, sizeof *fds)};
    if (!sent.item || !tb__vec_reserve(&s->fds, 1)) {
        free(sent.item);
        return TB_NO_MEMORY;
    }
    for (; sent.count < nfds; sent.count++) {
        sent.item[sent.count] = tb__fd_own(fcntl(fds[sent.count], F_DUPFD_CLOEXEC, 0));
        if (sent.item[sent.count] < 0) {
            tb_status status = tb__fail(TB_IO, "duplicating a descriptor to send: %s", tb__errno_text(errno));
            close_sent(&sent);
            return status;
        }
    }
    s->fds.item[s->fds.count++] = sent;
    *id = s->fds.count;
    return TB_OK;
}

static tb_status self_take_fds(void *context, int32_t peer, uint64_t id, int *fds, size_t nfds) {
    self *s = context;
    sent_fds *sent = id > 0 && id <= s->fds.count ? &s->fds.item[id - 1] : NULL;
    if (nfds == 0)
        return TB_OK;
    if (!sent || sent->count != nfds)
        return tb__fail(TB_INVALID, "rank %" PRId32 " has not sent %zu descriptors with id %" PRIu64, peer, nfds, id);
    memcpy(fds, sent->item, nfds * sizeof *fds);
    sent->count = 0;
    close_sent(sent);
    return TB_OK;
}

static void make_ready(self *s, posted *p) {
    p->next_ready = NULL;
    *s->ready_end = p;
    s->ready_end = &p->next_ready;
    if (!s->is_readable)
        eventfd_write(s->event, 1);
    s->is_readable = true;
}

static tb_status self_post(void *context, tb_op *op) {
    self *s = context;
    if (op->peer != s->env.rank)
        return tb__fail(TB_LOST, "transport self does not reach rank %" PRId32, op->peer);
    posted *p = tb__op_begin(op, sizeof *p);
    if (!p)
        return TB_NO_MEMORY;
    p->op = op;
    bool is_send = op->kind == TB_OP_SEND;
    tb__match *others = is_send ? &s->receives : &s->sends, *own = is_send ? &s->sends : &s->receives;
    posted *other = (posted *)tb__match_take(others, p->waiter.peer, p->waiter.tag);
    if (!other) {
        if (is_send && op->is_expected)
            make_ready(s, p);
        else
            tb__match_add(own, &p->waiter);
        return TB_OK;
    }
    posted *receive = is_send ? other : p;
    receive->counterpart = is_send ? p : other;
    make_ready(s, receive);
    return TB_OK;
}

static void deliver(posted *p) {
    tb_op *from = p->counterpart->op, *to = p->op;
    size_t nbytes = tb__pieces_size(from->pieces, from->npieces);
    tb_status status = TB_OK;
    to->nbytes = nbytes;
    size_t room = tb__pieces_size(to->pieces, to->npieces);
    if (nbytes > room)
        status = tb__op_too_big(to, room, nbytes);
    else
        tb__pieces_copy(from->pieces, from->npieces, to->pieces, to->npieces, nbytes);
    complete_op(p->counterpart, TB_OK);
    complete_op(p, status);
}

static tb_status self_progress(void *context) {
    self *s = context;
    eventfd_t unused;
    if (s->is_readable)
        eventfd_read(s->event, &unused);
    s->is_readable = false;
    while (s->ready) {
        posted *p = s->ready;
        s->ready = p->next_ready;
        if (!s->ready)
            s->ready_end = &s->ready;
        if (p->counterpart)
            deliver(p);
        else
            complete_op(p, TB_OK);
    }
    return TB_OK;
}

static void remove_ready(self *s, posted *p) {
    posted **at = &s->ready;
    while (*at && *at != p)
        at = &(*at)->next_ready;
    if (*at)
        *at = p->next_ready;
    for (s->ready_end = &s->ready; *s->ready_end;)
        s->ready_end = &(*s->ready_end)->next_ready;
}

static void self_cancel(void *context, tb_op *op) {
    self *s = context;
    posted *p = op->state;
    if (!p)
        return;
    tb__match_remove(op->kind == TB_OP_SEND ? &s->sends : &s->receives, &p->waiter);
    posted *ready = s->ready; /* the operation itself, or the receive that it was paired with */
    while (ready && ready != p && ready->counterpart != p)
        ready = ready->next_ready;
    if (ready)
        remove_ready(s, ready);
    if (ready == p && p->counterpart) {
        complete_op(p->counterpart, TB_OK);
    } else if (ready && ready != p) { /* the receive waits for another message */
        ready->counterpart = NULL;
        tb__match_add(&s->receives, &ready->waiter);
    }
    complete_op(p, TB_CANCELLED);
}

static int self_fd(void *context) {
    return ((self *)context)->event;
}

const tb_transport_ops tb__self_ops = {
    .size = sizeof tb__self_ops,
    .name = "self",
    .memory = 1U << TB_MEM_HOST,
    .is_local = true,
    .open = self_open,
    .close = self_close,
    .address = self_address,
    .connect = self_connect,
    .mem_register = self_register,
    .mem_unregister = self_unregister,
    .mem_export = self_export,
    .mem_import = self_import,
    .mem_release = self_release,
    .mem_map = self_map,
    .mem_is_valid = self_is_valid,
    .mem_read = self_read,
    .post = self_post,
    .cancel = self_cancel,
    .progress = self_progress,
    .fd = self_fd,
    .fd_send = self_send_fds,
    .fd_take = self_take_fds,
};
