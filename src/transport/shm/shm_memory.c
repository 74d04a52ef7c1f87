/* Memory that peers reach: mapped where it has a descriptor, else read and written through the kernel. */
#include "transport/shm/shm.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

/* What a key holds. */
typedef struct key {
    uint32_t id, has_fd;
    uint64_t epoch, base, nbytes, offset;
} key;

_Static_assert(sizeof(key) <= TB_MEM_KEY_MAX, "a key fits");

tb_status shm_register(void *context, const tb_mem_desc *desc, tb_mem **out) {
    shm *s = context;
    if (desc->kind == TB_MEM_CUDA)
        return tb__fail(TB_REFUSED, "transport shm carries host memory only");
    uint32_t id = 0;
    while (id < SHM_REGISTRATIONS && atomic_load(&s->control->memory[(s->next_memory + id) % SHM_REGISTRATIONS]))
        id++;
    if (id == SHM_REGISTRATIONS)
        return tb__fail(TB_TOO_BIG, "more than %d registrations", SHM_REGISTRATIONS);
    tb_mem *mem = tb__calloc(1, sizeof *mem);
    if (!mem)
        return TB_NO_MEMORY;
    mem->desc = *desc;
    mem->id = (s->next_memory + id) % SHM_REGISTRATIONS;
    mem->epoch = ++s->next_epoch;
    s->next_memory = mem->id + 1;
    atomic_store(&s->control->memory[mem->id], mem->epoch);
    *out = mem;
    return TB_OK;
}

void shm_unregister(void *context, tb_mem *mem) {
    shm *s = context;
    atomic_store(&s->control->memory[mem->id], 0);
    free(mem->sent_to.item);
    free(mem);
}

tb_status shm_export(void *context, tb_mem *mem, int32_t rank, tb_mem_key *out) {
    shm *s = context;
    shm_peer *peer = shm_find(s, rank);
    if (!peer || atomic_load(&peer->is_lost))
        return tb__fail(TB_LOST, "rank %" PRId32 " is not connected", rank);
    bool is_sent = mem->desc.fd < 0;
    for (size_t i = 0; i < mem->sent_to.count && !is_sent; i++)
        is_sent = mem->sent_to.item[i] == rank;
    if (!is_sent) {
        int fd = fcntl(mem->desc.fd, F_DUPFD_CLOEXEC, 0);
        if (fd < 0)
            return tb__fail(TB_IO, "memory's descriptor: %s", strerror(errno));
        if (!tb__vec_push(&mem->sent_to, rank)) {
            close(fd);
            return TB_NO_MEMORY;
        }
        shm_link_send(s, &peer->out, &(shm_frame){.kind = SHM_MEMFD, .slot = mem->id, .serial = mem->epoch}, fd);
    }
    key k = {.id = mem->id,
             .has_fd = mem->desc.fd >= 0,
             .epoch = mem->epoch,
             .base = (uint64_t)(uintptr_t)mem->desc.base,
             .nbytes = mem->desc.nbytes,
             .offset = mem->desc.offset};
    *out = (tb_mem_key){.nbytes = sizeof k};
    memcpy(out->bytes, &k, sizeof k);
    return TB_OK;
}

bool shm_on_memfd(shm_peer *peer, const shm_frame *frame, int fd) {
    if (fd < 0 || frame->slot >= SHM_REGISTRATIONS)
        return false;
    int seals = fcntl(fd, F_GET_SEALS);
    if (seals < 0 || !(seals & F_SEAL_SHRINK))
        return false; /* its owner could make us fault */
    shm_import *import = NULL;
    for (size_t i = 0; i < peer->imports.count && !import; i++) {
        shm_import *old = peer->imports.item[i];
        if (old->refs == 0 && old->id == frame->slot) { /* the registration before it is gone */
            if (old->map)
                munmap(old->map, old->map_size);
            close(old->fd);
            import = old;
        }
    }
    if (!import) {
        import = tb__calloc(1, sizeof *import);
        if (!import || !tb__vec_push(&peer->imports, import)) {
            free(import);
            return false;
        }
    }
    *import = (shm_import){.id = frame->slot, .epoch = frame->serial, .fd = fcntl(fd, F_DUPFD_CLOEXEC, 0)};
    return import->fd >= 0;
}

/* Maps the whole descriptor once; remotes of one allocation share the mapping. */
static bool map_import(shm_import *import, size_t needed) {
    struct stat info;
    if (import->map)
        return needed <= import->map_size;
    if (fstat(import->fd, &info) != 0 || (uint64_t)info.st_size < needed)
        return false;
    import->map = shm_map_fd(import->fd, (size_t)info.st_size);
    import->map_size = import->map ? (size_t)info.st_size : 0;
    return import->map != NULL;
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
    if (k.id >= SHM_REGISTRATIONS || k.offset > SIZE_MAX - k.nbytes)
        return tb__fail(TB_INVALID, "not a memory key of rank %" PRId32, rank);
    shm_import *import = NULL;
    for (size_t i = 0; i < peer->imports.count && k.has_fd; i++) {
        if (peer->imports.item[i]->id == k.id && peer->imports.item[i]->epoch == k.epoch)
            import = peer->imports.item[i];
    }
    if (k.has_fd && (!import || !map_import(import, k.offset + k.nbytes)))
        return tb__fail(TB_INVALID, "rank %" PRId32 "'s memory %" PRIu32 " can't be mapped", rank, k.id);
    tb_remote *remote = tb__malloc(1, sizeof *remote);
    if (!remote)
        return TB_NO_MEMORY;
    *remote = (tb_remote){.peer = peer,
                          .import = import,
                          .id = k.id,
                          .epoch = k.epoch,
                          .base = k.base,
                          .nbytes = k.nbytes,
                          .offset = k.offset};
    if (import)
        import->refs++;
    *out = remote;
    return TB_OK;
}

void shm_release(void *context, tb_remote *remote) {
    (void)context;
    if (remote->import)
        remote->import->refs--;
    free(remote);
}

void *shm_map(void *context, tb_remote *remote) {
    (void)context;
    return remote->import ? (char *)remote->import->map + remote->offset : NULL;
}

bool shm_is_valid(void *context, const tb_remote *remote) {
    (void)context;
    return !atomic_load(&remote->peer->is_lost) &&
           atomic_load(&remote->peer->control->memory[remote->id]) == remote->epoch;
}

static tb_status check_access(const tb_remote *remote, size_t offset, size_t nbytes) {
    int32_t rank = remote->peer->rank;
    if (atomic_load(&remote->peer->is_lost))
        return tb__fail(TB_LOST, "rank %" PRId32 " is lost", rank);
    if (!shm_is_valid(NULL, remote))
        return tb__fail(TB_INVALID, "memory %" PRIu32 " of rank %" PRId32 " has been unregistered", remote->id, rank);
    if (offset > remote->nbytes || nbytes > remote->nbytes - offset)
        return tb__fail(TB_INVALID, "%zu bytes from %zu of rank %" PRId32 "'s memory, which has %zu", nbytes, offset,
                        rank, remote->nbytes);
    return TB_OK;
}

/* Up to `room` pieces of a list of n, beginning `skip` bytes into it and covering at most nbytes. */
static size_t window(const struct iovec *list, size_t n, size_t skip, size_t nbytes, struct iovec *out, size_t room) {
    size_t count = 0;
    for (size_t i = 0; i < n && nbytes > 0 && count < room; i++) {
        if (skip >= list[i].iov_len) {
            skip -= list[i].iov_len;
            continue;
        }
        size_t take = list[i].iov_len - skip < nbytes ? list[i].iov_len - skip : nbytes;
        out[count++] = (struct iovec){(char *)list[i].iov_base + skip, take};
        nbytes -= take;
        skip = 0;
    }
    return count;
}

_Static_assert(sizeof(tb_piece) == sizeof(struct iovec), "pieces can be handed to the kernel");

tb_status shm_process_copy(const shm_peer *peer, const tb_piece *pieces, size_t npieces, const struct iovec *remote,
                           size_t nremote, size_t skip, size_t nbytes, bool is_write) {
    enum { ROOM = 64 };
    while (nbytes > 0) {
        struct iovec here[ROOM], there[ROOM];
        size_t nhere = window((const struct iovec *)pieces, npieces, skip, nbytes, here, ROOM);
        size_t nthere = window(remote, nremote, skip, nbytes, there, ROOM);
        ssize_t n = is_write ? process_vm_writev(peer->pid, here, nhere, there, nthere, 0)
                             : process_vm_readv(peer->pid, here, nhere, there, nthere, 0);
        if (n <= 0)
            return tb__fail(errno == ESRCH ? TB_LOST : TB_IO, "%s rank %" PRId32 "'s memory: %s",
                            is_write ? "writing" : "reading", peer->rank, n < 0 ? strerror(errno) : "nothing there");
        skip += (size_t)n;
        nbytes -= (size_t)n;
    }
    return TB_OK;
}

static tb_status copy(tb_remote *remote, size_t offset, const tb_piece *pieces, size_t npieces, bool is_write) {
    size_t nbytes = tb__pieces_size(pieces, npieces);
    TB_TRY(check_access(remote, offset, nbytes));
    if (remote->import) {
        char *there = (char *)remote->import->map + remote->offset + offset;
        if (is_write)
            tb__pieces_gather(pieces, npieces, 0, there, nbytes);
        else
            tb__pieces_scatter(pieces, npieces, 0, there, nbytes);
    } else if (!remote->peer->can_read) {
        return tb__fail(TB_REFUSED, "the system does not let us read rank %" PRId32 "'s memory", remote->peer->rank);
    } else {
        struct iovec there = {(void *)(uintptr_t)(remote->base + offset), nbytes}; // NOLINT(performance-no-int-to-ptr)
        TB_TRY(shm_process_copy(remote->peer, pieces, npieces, &there, 1, 0, nbytes, is_write));
    }
    return check_access(remote, offset, nbytes); /* what was withdrawn meanwhile is not believed */
}

tb_status shm_read(void *context, tb_remote *remote, size_t offset, const tb_piece *pieces, size_t npieces) {
    (void)context;
    return copy(remote, offset, pieces, npieces, false);
}

tb_status shm_write(void *context, tb_remote *remote, size_t offset, const tb_piece *pieces, size_t npieces) {
    (void)context;
    return copy(remote, offset, pieces, npieces, true);
}

void shm_drop_imports(shm_peer *peer) {
    for (size_t i = 0; i < peer->imports.count; i++) {
        shm_import *import = peer->imports.item[i];
        if (import->map)
            munmap(import->map, import->map_size);
        if (import->fd >= 0)
            close(import->fd);
        free(import);
    }
    free(peer->imports.item);
}
