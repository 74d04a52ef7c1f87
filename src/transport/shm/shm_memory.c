/* Memory that peers access: mapped if it belongs to a file, else read by process_vm_readv. */
#include "transport/shm/shm.h"

#include "base/descriptors.h"

#include <errno.h>
#include <inttypes.h>
#include <string.h>

typedef struct key {
    uint32_t id, unused;
    uint64_t epoch, base, nbytes;
    uint64_t file, offset; /* file 0: none */
} key;

_Static_assert(sizeof(key) <= TB_MEM_KEY_MAX, "a key fits");

/* A free registration id; low ones first, so that few pages of the control page are touched. */
static tb_status take_id(shm *s, uint32_t *id) {
    if (s->memory_free > 0) {
        *id = s->memory_free - 1;
        s->memory_free = s->memory.item[*id].next_free;
        return TB_OK;
    }
    if (s->memory.count == SHM_REGISTRATIONS)
        return tb__fail(TB_TOO_BIG, "more than %d registrations", SHM_REGISTRATIONS);
    *id = (uint32_t)s->memory.count;
    return tb__vec_push(&s->memory, (shm_registration){0}) ? TB_OK : TB_NO_MEMORY;
}

static void give_back_id(shm *s, uint32_t id) {
    s->memory.item[id] = (shm_registration){.next_free = s->memory_free};
    s->memory_free = id + 1;
}

tb_status shm_register(void *context, const tb_mem_desc *desc, tb_mem **out) {
    shm *s = context;
    if (desc->kind == TB_MEM_CUDA)
        return tb__fail(TB_REFUSED, "transport shm carries host memory only");
    tb_mem *mem = tb__calloc(1, sizeof *mem);
    if (!mem)
        return TB_NO_MEMORY;
    mem->base = desc->base;
    mem->nbytes = desc->nbytes;
    mem->offset = desc->offset;
    tb_status status = take_id(s, &mem->id);
    if (status == TB_OK && desc->fd >= 0 && (status = shm_file_take(s, desc, &mem->file)) != TB_OK)
        give_back_id(s, mem->id);
    if (status != TB_OK) {
        free(mem);
        return status;
    }
    mem->epoch = ++s->next_epoch;
    s->memory.item[mem->id].mem = mem;
    atomic_store(&s->control->memory[mem->id], mem->epoch);
    *out = mem;
    return TB_OK;
}

void shm_unregister(void *context, tb_mem *mem) {
    shm *s = context;
    atomic_store(&s->control->memory[mem->id], 0);
    give_back_id(s, mem->id);
    if (mem->file)
        shm_file_drop(s, mem->file);
    free(mem);
}

void shm_memory_close(shm *s) {
    for (size_t i = 0; i < s->memory.count; i++)
        free(s->memory.item[i].mem);
    free(s->memory.item);
    shm_files_close(s);
}

tb_status shm_export(void *context, tb_mem *mem, int32_t rank, tb_mem_key *out) {
    shm *s = context;
    shm_peer *peer = shm_find(s, rank);
    if (!peer || peer->out.fd < 0 || atomic_load(&peer->is_lost))
        return tb__fail(TB_LOST, "rank %" PRId32 " is not connected", rank);
    if (mem->file)
        TB_TRY(shm_file_send(s, mem->file, peer));
    key k = {.id = mem->id,
             .epoch = mem->epoch,
             .base = (uint64_t)(uintptr_t)mem->base,
             .nbytes = mem->nbytes,
             .file = mem->file ? mem->file->id : 0,
             .offset = mem->offset};
    *out = (tb_mem_key){.nbytes = sizeof k};
    memcpy(out->bytes, &k, sizeof k);
    return TB_OK;
}

/* The mapping of a key's file; NULL for memory without a file. */
static tb_status find_mapping(const shm_peer *peer, const key *k, shm_mapping **out) {
    *out = NULL;
    if (k->file == 0)
        return TB_OK;
    shm_mapping *mapping = shm_mapping_find(peer, k->file);
    if (!mapping)
        return tb__fail(TB_INVALID, "the file of rank %" PRId32 "'s memory %" PRIu32 " has not been received",
                        peer->rank, k->id);
    if (!mapping->base)
        return tb__fail(TB_IO, "mapping rank %" PRId32 "'s memory %" PRIu32 ": %s", peer->rank, k->id,
                        tb__errno_text(mapping->error));
    if (k->offset > mapping->nbytes || k->nbytes > mapping->nbytes - k->offset)
        return tb__fail(TB_INVALID,
                        "rank %" PRId32 "'s memory %" PRIu32 " lies outside of its file, which has %zu bytes",
                        peer->rank, k->id, mapping->nbytes);
    *out = mapping;
    return TB_OK;
}

tb_status shm_import_key(void *context, int32_t rank, const tb_mem_key *from, tb_remote **out) {
    shm *s = context;
    shm_peer *peer = shm_find(s, rank);
    key k;
    if (!peer || !peer->control || atomic_load(&peer->is_lost))
        return tb__fail(TB_LOST, "rank %" PRId32 " is not connected", rank);
    if (from->nbytes != sizeof k)
        return tb__fail(TB_INVALID, "not a memory key of rank %" PRId32, rank);
    memcpy(&k, from->bytes, sizeof k);
    if (k.id >= SHM_REGISTRATIONS)
        return tb__fail(TB_INVALID, "not a memory key of rank %" PRId32, rank);
    if (atomic_load(&peer->control->memory[k.id]) != k.epoch)
        return tb__fail(TB_INVALID, "memory %" PRIu32 " of rank %" PRId32 " has been unregistered", k.id, rank);
    shm_mapping *mapping;
    TB_TRY(find_mapping(peer, &k, &mapping));
    tb_remote *remote = tb__malloc(1, sizeof *remote);
    if (!remote)
        return TB_NO_MEMORY;
    *remote = (tb_remote){.peer = peer,
                          .mapping = mapping,
                          .id = k.id,
                          .epoch = k.epoch,
                          .base = k.base,
                          .nbytes = k.nbytes,
                          .offset = k.offset};
    if (mapping)
        mapping->refs++;
    peer->nremotes++;
    *out = remote;
    return TB_OK;
}

void shm_release(void *context, tb_remote *remote) {
    shm_peer *peer = remote->peer;
    if (remote->mapping)
        shm_mapping_release(peer, remote->mapping);
    free(remote);
    if (--peer->nremotes == 0)
        shm_free_retired(context, peer);
}

void *shm_map(void *context, tb_remote *remote) {
    (void)context;
    return remote->mapping ? (char *)remote->mapping->base + remote->offset : NULL;
}

bool shm_is_valid(void *context, const tb_remote *remote) {
    (void)context;
    return !atomic_load(&remote->peer->is_lost) &&
           atomic_load(&remote->peer->control->memory[remote->id]) == remote->epoch;
}

static tb_status check_valid(const tb_remote *remote) {
    int32_t rank = remote->peer->rank;
    if (atomic_load(&remote->peer->is_lost))
        return tb__fail(TB_LOST, "rank %" PRId32 " is lost: %s", rank, remote->peer->why);
    if (!shm_is_valid(NULL, remote))
        return tb__fail(TB_INVALID, "memory %" PRIu32 " of rank %" PRId32 " has been unregistered", remote->id, rank);
    return TB_OK;
}

/* A position in a list of local pieces, or of ranges relative to `base` in another process. */
typedef struct cursor {
    bool is_remote;
    const tb_piece *pieces;
    const tb_range *ranges;
    uint64_t base;
    size_t count, at, skip; /* the next byte is `skip` bytes into item `at` */
} cursor;

static struct iovec cursor_item(const cursor *c, size_t i) {
    if (!c->is_remote)
        return (struct iovec){c->pieces[i].base, c->pieces[i].nbytes};
    uint64_t address = c->base + c->ranges[i].offset;
    return (struct iovec){(void *)(uintptr_t)address, c->ranges[i].nbytes}; // NOLINT(performance-no-int-to-ptr)
}

static void advance_cursor(cursor *c, size_t nbytes) {
    c->skip += nbytes;
    for (size_t n; c->at < c->count && c->skip >= (n = cursor_item(c, c->at).iov_len); c->at++)
        c->skip -= n;
}

/* Lists the next bytes, at most nbytes and as many pieces as one call takes. */
static size_t fill_iov(const cursor *c, size_t nbytes, struct iovec out[SHM_MAX_IOV]) {
    size_t count = 0, skip = c->skip;
    for (size_t i = c->at; i < c->count && nbytes > 0 && count < SHM_MAX_IOV; i++, skip = 0) {
        struct iovec v = cursor_item(c, i);
        size_t n = v.iov_len - skip < nbytes ? v.iov_len - skip : nbytes;
        if (n > 0)
            out[count++] = (struct iovec){(char *)v.iov_base + skip, n};
        nbytes -= n;
    }
    return count;
}

tb_status shm_process_read(const shm_peer *peer, const tb_piece *pieces, size_t npieces, uint64_t base,
                           const tb_range *ranges, size_t nranges, size_t skip, size_t nbytes) {
    cursor local = {.pieces = pieces, .count = npieces};
    cursor remote = {.is_remote = true, .ranges = ranges, .base = base, .count = nranges};
    advance_cursor(&local, skip);
    advance_cursor(&remote, skip);
    while (nbytes > 0) {
        struct iovec here[SHM_MAX_IOV], there[SHM_MAX_IOV];
        size_t nhere = fill_iov(&local, nbytes, here), nthere = fill_iov(&remote, nbytes, there);
        ssize_t n = process_vm_readv(peer->pid, here, nhere, there, nthere, 0);
        if (n <= 0)
            return tb__fail(n < 0 && errno == ESRCH ? TB_LOST : TB_IO, "reading rank %" PRId32 "'s memory: %s",
                            peer->rank, n < 0 ? strerror(errno) : "nothing there");
        advance_cursor(&local, (size_t)n);
        advance_cursor(&remote, (size_t)n);
        nbytes -= (size_t)n;
    }
    return TB_OK;
}

tb_status shm_read(void *context, tb_remote *remote, const tb_range *ranges, size_t nranges, const tb_piece *pieces,
                   size_t npieces) {
    (void)context;
    const shm_peer *peer = remote->peer;
    TB_TRY(check_valid(remote));
    TB_TRY(tb__ranges_check(ranges, nranges, pieces, npieces, remote->nbytes, peer->rank));
    tb_status status = TB_OK;
    if (remote->mapping)
        tb__ranges_copy(shm_map(NULL, remote), ranges, nranges, pieces, npieces);
    else if (!peer->can_read)
        status = tb__fail(TB_REFUSED, "the system does not let us read rank %" PRId32 "'s memory", peer->rank);
    else
        status =
            shm_process_read(peer, pieces, npieces, remote->base, ranges, nranges, 0, tb__pieces_size(pieces, npieces));
    if (status != TB_OK && shm_is_valid(NULL, remote))
        return status;
    return check_valid(remote); /* data read during an unregister is not valid */
}
