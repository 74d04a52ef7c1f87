/* The transports of this build, and the defaults of their optional slots. */
#include "transport/transport.h"

#include "base/opts.h"

#include <inttypes.h>
#include <pthread.h>
#include <stdatomic.h>
#include <string.h>

#define TABLE_OF(name) &tb__##name##_ops,
static const tb_transport_ops *const built_in[] = {TB__BUILT_IN_TRANSPORTS(TABLE_OF) NULL};

const tb_transport_ops *const *_Atomic tb__transports = built_in;

/* A table with a registered transport. Old tables are kept, because another thread may be reading one. */
typedef struct transport_list {
    struct transport_list *before;
    tb_transport_ops added;
    const tb_transport_ops *all[]; /* ends with NULL */
} transport_list;

static transport_list *newest;

static tb_status add_transport(const tb_transport_ops *ops) {
    const tb_transport_ops *const *old = tb__transports;
    size_t n = 0, at = 0;
    for (; old[n]; n++) {
        if (strcmp(old[n]->name, ops->name) == 0)
            return old[n]->open == ops->open ? TB_OK
                                             : tb__fail(TB_CONFLICT, "there is another transport '%.40s'", ops->name);
        if (old[n] == &tb__shm_ops)
            at = n + 1;
    }
    transport_list *l = tb__malloc(1, sizeof *l + (n + 2) * sizeof *l->all);
    if (!l)
        return TB_NO_MEMORY;
    l->before = newest;
    l->added = *ops;
    memcpy(l->all, old, at * sizeof *l->all);
    l->all[at] = &l->added;
    memcpy(l->all + at + 1, old + at, (n + 1 - at) * sizeof *l->all);
    newest = l;
    tb__transports = l->all;
    return TB_OK;
}

tb_status tb_transport_register(const tb_transport_ops *callers) {
    static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
    tb_transport_ops ops;
    TB_TRY(tb__opts_read(&ops, sizeof ops, callers));
    if (!ops.name)
        return tb__fail(TB_INVALID, "a transport without a name");
    bool has_comms = ops.comm_create && ops.comm_id && ops.comm_check && ops.comm_destroy && ops.told && ops.peer_lost;
    if (!ops.open || !ops.close || !(has_comms || (ops.address && ops.connect)) || !ops.post || !ops.cancel ||
        !ops.progress || !ops.fd)
        return tb__fail(TB_INVALID, "transport '%.40s' lacks a function that is not optional", ops.name);
    if (!has_comms && !(ops.memory & 1U << TB_MEM_HOST))
        return tb__fail(TB_INVALID, "transport '%.40s' does not carry host memory, which ranks' messages are in",
                        ops.name);
    pthread_mutex_lock(&lock);
    tb_status status = add_transport(&ops);
    pthread_mutex_unlock(&lock);
    return status;
}

tb_status tb__transport_open(const char *name, const tb_transport_env *env, tb_transport *out) {
    for (const tb_transport_ops *const *ops = tb__transports; *ops; ops++) {
        if (strcmp((*ops)->name, name) != 0)
            continue;
        void *context;
        TB_TRY((*ops)->open(env, &context));
        *out = (tb_transport){*ops, context};
        return TB_OK;
    }
    return tb__fail(TB_INVALID, "there is no transport '%.40s'", name);
}

void tb__transport_close(tb_transport *transport) {
    if (transport->ops)
        transport->ops->close(transport->context);
    *transport = (tb_transport){0};
}

bool tb__transport_reaches(const tb_transport *t, const void *address, size_t nbytes) {
    return t->ops->reaches ? t->ops->reaches(t->context, address, nbytes) : true;
}

bool tb__transport_carries(const tb_transport *t, tb_mem_kind kind) {
    return t->ops->memory >> kind & 1U && (t->ops->carries ? t->ops->carries(t->context, kind) : true);
}

tb_status tb__transport_register(const tb_transport *t, const tb_mem_desc *desc, tb_mem **out) {
    if (!t->ops->mem_register)
        return tb__fail(TB_REFUSED, "transport %s does not make memory reachable", t->ops->name);
    return t->ops->mem_register(t->context, desc, out);
}

tb_status tb__transport_import(const tb_transport *t, int32_t peer, const tb_mem_key *key, tb_remote **out) {
    if (!t->ops->mem_import)
        return tb__fail(TB_REFUSED, "transport %s does not reach a peer's memory", t->ops->name);
    return t->ops->mem_import(t->context, peer, key, out);
}

void *tb__transport_map(const tb_transport *t, tb_remote *remote) {
    return t->ops->mem_map ? t->ops->mem_map(t->context, remote) : NULL;
}

bool tb__transport_is_valid(const tb_transport *t, const tb_remote *remote) {
    return t->ops->mem_is_valid ? t->ops->mem_is_valid(t->context, remote) : true;
}

tb_status tb__transport_read(const tb_transport *t, tb_remote *remote, const tb_range *ranges, size_t nranges,
                             const tb_piece *pieces, size_t npieces) {
    if (!t->ops->mem_read)
        return tb__fail(TB_REFUSED, "transport %s can't read a peer's memory", t->ops->name);
    return t->ops->mem_read(t->context, remote, ranges, nranges, pieces, npieces);
}

tb_status tb__transport_send_fds(const tb_transport *t, int32_t peer, const int *fds, size_t nfds, uint64_t *id) {
    if (!t->ops->fd_send)
        return tb__fail(TB_REFUSED, "transport %s carries no file descriptors", t->ops->name);
    return t->ops->fd_send(t->context, peer, fds, nfds, id);
}

tb_status tb__transport_take_fds(const tb_transport *t, int32_t peer, uint64_t id, int *fds, size_t nfds) {
    if (!t->ops->fd_take)
        return tb__fail(TB_REFUSED, "transport %s carries no file descriptors", t->ops->name);
    return t->ops->fd_take(t->context, peer, id, fds, nfds);
}

void tb__transport_cancel(const tb_transport *t, tb_op *op) {
    if (op->state)
        t->ops->cancel(t->context, op);
}

bool tb__transport_is_reached(const tb_transport *t, int32_t peer) {
    return !t->ops->is_reached || t->ops->is_reached(t->context, peer);
}

void tb__transport_disconnect(const tb_transport *t, int32_t peer, const char *why) {
    if (t->ops->disconnect)
        t->ops->disconnect(t->context, peer, why);
}

tb_status tb__transport_post(const tb_transport *t, tb_op *op) {
    op->size = sizeof *op;
    op->status = TB_OK;
    op->why[0] = '\0';
    op->nbytes = 0;
    op->state = NULL;
    size_t nbytes = op->kind == TB_OP_SEND && !op->is_expected ? tb__pieces_size(op->pieces, op->npieces) : 0;
    if (nbytes > TB_SHORT_MAX)
        return tb__fail(TB_INVALID, "%zu bytes can't be sent before they are expected, only %d can", nbytes,
                        TB_SHORT_MAX);
    if (op->memory != TB_MEM_HOST && (op->npieces != 1 || !tb__transport_carries(t, op->memory)))
        return tb__fail(TB_INVALID, "transport %s does not take %zu pieces of this kind of memory", t->ops->name,
                        op->npieces);
    return t->ops->post(t->context, op);
}

const char *tb__op_why(const tb_op *op) {
    return *op->why ? op->why : tb_status_string(op->status);
}

size_t tb__pieces_size(const tb_piece *pieces, size_t npieces) {
    size_t nbytes = 0;
    for (size_t i = 0; i < npieces; i++)
        nbytes += pieces[i].nbytes;
    return nbytes;
}

/* A position in a list of pieces. */
typedef struct cursor {
    const tb_piece *pieces;
    size_t npieces, skip; /* remaining pieces, and bytes of the first that are done */
} cursor;

/* Returns the address of the next *n contiguous bytes, at most `most`, and advances; NULL at the end. */
static char *next_run(cursor *c, size_t most, size_t *n) {
    while (c->npieces > 0 && c->skip >= c->pieces->nbytes) {
        c->skip -= c->pieces->nbytes;
        c->pieces++;
        c->npieces--;
    }
    if (c->npieces == 0)
        return NULL;
    char *at = (char *)c->pieces->base + c->skip;
    *n = c->pieces->nbytes - c->skip < most ? c->pieces->nbytes - c->skip : most;
    c->skip += *n;
    return at;
}

/* Copies nbytes between memory and the pieces. */
static void copy_pieces(cursor *c, char *memory, size_t nbytes, bool to_memory) {
    char *piece;
    size_t n;
    for (; nbytes > 0 && (piece = next_run(c, nbytes, &n)); memory += n, nbytes -= n)
        memcpy(to_memory ? memory : piece, to_memory ? piece : memory, n);
}

void tb__pieces_gather(const tb_piece *pieces, size_t npieces, size_t skip, void *to, size_t nbytes) {
    copy_pieces(&(cursor){pieces, npieces, skip}, to, nbytes, true);
}

void tb__pieces_scatter(const tb_piece *pieces, size_t npieces, size_t skip, const void *from, size_t nbytes) {
    copy_pieces(&(cursor){pieces, npieces, skip}, (char *)from, nbytes, false);
}

void tb__pieces_seek(const tb_piece *pieces, size_t npieces, tb__piece_cursor *mark, size_t at) {
    if (at < mark->before)
        *mark = (tb__piece_cursor){0};
    while (mark->piece < npieces && at - mark->before >= pieces[mark->piece].nbytes)
        mark->before += pieces[mark->piece++].nbytes;
}

void tb__pieces_gather_on(const tb_piece *pieces, size_t npieces, tb__piece_cursor *mark, size_t skip, void *to,
                          size_t nbytes) {
    tb__pieces_seek(pieces, npieces, mark, skip);
    tb__pieces_gather(pieces + mark->piece, npieces - mark->piece, skip - mark->before, to, nbytes);
}

void tb__pieces_scatter_on(const tb_piece *pieces, size_t npieces, tb__piece_cursor *mark, size_t skip,
                           const void *from, size_t nbytes) {
    tb__pieces_seek(pieces, npieces, mark, skip);
    tb__pieces_scatter(pieces + mark->piece, npieces - mark->piece, skip - mark->before, from, nbytes);
}

void tb__pieces_copy(const tb_piece *from, size_t nfrom, const tb_piece *to, size_t nto, size_t nbytes) {
    cursor at = {to, nto, 0};
    for (size_t i = 0; i < nfrom && nbytes > 0; i++) {
        size_t n = from[i].nbytes < nbytes ? from[i].nbytes : nbytes;
        copy_pieces(&at, from[i].base, n, false);
        nbytes -= n;
    }
}

tb_status tb__ranges_check(const tb_range *ranges, size_t nranges, const tb_piece *pieces, size_t npieces,
                           size_t nbytes, int32_t rank) {
    size_t there = 0, here = tb__pieces_size(pieces, npieces);
    for (size_t i = 0; i < nranges; i++) {
        const tb_range *r = &ranges[i];
        if (r->offset > nbytes || r->nbytes > nbytes - r->offset)
            return tb__fail(TB_INVALID, "%zu bytes from %zu of rank %" PRId32 "'s memory, which has %zu", r->nbytes,
                            r->offset, rank, nbytes);
        if (__builtin_add_overflow(there, r->nbytes, &there))
            return tb__fail(TB_INVALID, "ranges of more than 2^64 bytes of rank %" PRId32 "'s memory", rank);
    }
    if (there != here)
        return tb__fail(TB_INVALID, "%zu bytes of rank %" PRId32 "'s memory, but pieces of %zu", there, rank, here);
    return TB_OK;
}

void tb__ranges_copy(const void *memory, const tb_range *ranges, size_t nranges, const tb_piece *pieces,
                     size_t npieces) {
    cursor at = {pieces, npieces, 0};
    for (size_t i = 0; i < nranges; i++)
        copy_pieces(&at, (char *)memory + ranges[i].offset, ranges[i].nbytes, false);
}
