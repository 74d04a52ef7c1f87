/* Files of registered memory. A process keeps thousands of tensors in a few memfds, so files are sent and mapped, not
 * tensors: a peer gets the descriptor once and maps the whole file once; registrations are offsets in it. When a file
 * has no registration left, peers are told to unmap it: at once, or, if it may stay mapped, when several others have
 * lost their last registration since. Mapping memory again costs a page fault for each few pages, which takes longer
 * than to copy them. */
#include "transport/shm/shm.h"

#include "base/descriptors.h"
#include "base/log.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

enum { IDLE_FILES = 4 }; /* that peers keep mapped; each takes a descriptor */

static bool is_sealed(int fd) {
    int seals = fcntl(fd, F_GET_SEALS);
    bool is = seals >= 0 && seals & F_SEAL_SHRINK;
    if (!is)
        tb__set_detail("its memory is not a memfd that is sealed against shrinking");
    return is;
}

/* Reading a ring that is too short, or shrinks, would be a SIGBUS. Older versions do not seal it, so this end does. */
unsigned char *shm_map_ring(int fd) {
    const size_t nbytes = (size_t)SHM_RING_SLOTS * SHM_RING_SLOT_SIZE;
    struct stat info;
    (void)fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK);
    if (!is_sealed(fd))
        return NULL;
    if (fstat(fd, &info) != 0 || info.st_size < (off_t)nbytes) {
        tb__set_detail("its ring has less than the %zu bytes of one", nbytes);
        return NULL;
    }
    unsigned char *ring = shm_map_fd(fd, nbytes);
    if (!ring)
        tb__set_detail("mapping its ring: %s", strerror(errno));
    return ring;
}

/* A free index in the list of files; SIZE_MAX: no memory. */
static size_t free_slot(shm *s) {
    for (size_t i = 0; i < s->files.count; i++) {
        if (!s->files.item[i])
            return i;
    }
    return tb__vec_push(&s->files, NULL) ? s->files.count - 1 : SIZE_MAX;
}

static tb_status add_file(shm *s, int fd, const struct stat *info, shm_file **out) {
    size_t slot = free_slot(s);
    shm_file *file = slot < SIZE_MAX ? tb__calloc(1, sizeof *file) : NULL;
    if (!file)
        return TB_NO_MEMORY;
    /* While a descriptor is open, the inode number can't be reused. */
    int copy = tb__fd_own(fcntl(fd, F_DUPFD_CLOEXEC, 0));
    if (copy < 0) {
        free(file);
        return tb__fail(TB_IO, "memory's descriptor: %s", tb__errno_text(errno));
    }
    *file = (shm_file){.id = ++s->next_file,
                       .slot = slot,
                       .dev = info->st_dev,
                       .ino = info->st_ino,
                       .nbytes = (size_t)info->st_size,
                       .fd = copy};
    s->files.item[slot] = file;
    *out = file;
    return TB_OK;
}

tb_status shm_file_take(shm *s, const tb_mem_desc *desc, shm_file **out) {
    struct stat info;
    if (fstat(desc->fd, &info) != 0)
        return tb__fail(TB_INVALID, "memory's descriptor %d: %s", desc->fd, strerror(errno));
    if (!is_sealed(desc->fd))
        return tb__fail(TB_REFUSED, "memory's descriptor %d is not a memfd that is sealed against shrinking", desc->fd);
    if (desc->offset > SIZE_MAX - desc->nbytes || desc->offset + desc->nbytes > (uint64_t)info.st_size)
        return tb__fail(TB_INVALID, "memory of %zu bytes at %zu of a file that has %" PRId64, desc->nbytes,
                        desc->offset, (int64_t)info.st_size);
    shm_file *file = NULL;
    for (size_t i = 0; i < s->files.count && !file; i++) {
        shm_file *f = s->files.item[i];
        /* A file that has grown counts as a new one: peers have mapped the old size. */
        if (f && f->dev == info.st_dev && f->ino == info.st_ino && desc->offset + desc->nbytes <= f->nbytes)
            file = f;
    }
    if (!file)
        TB_TRY(add_file(s, desc->fd, &info, &file));
    file->refs++;
    file->idle_since = 0;
    file->may_stay_mapped = desc->may_stay_mapped;
    *out = file;
    return TB_OK;
}

static void free_file(shm *s, shm_file *file) {
    s->files.item[file->slot] = NULL;
    tb__fd_close(file->fd);
    free(file);
}

static bool is_sent(const shm_peer *peer, const shm_file *file) {
    return file->slot < peer->sent.count && peer->sent.item[file->slot] == file->id;
}

static void forget_file(shm *s, shm_file *file) {
    for (size_t i = 0; i < s->peers.count; i++) {
        shm_peer *peer = s->peers.item[i];
        if (is_sent(peer, file))
            shm_link_send(s, &peer->out, &(shm_frame){.kind = SHM_FORGET, .serial = file->id}, NULL, 0);
    }
    free_file(s, file);
}

void shm_file_drop(shm *s, shm_file *file) {
    shm_file *longest = NULL;
    size_t nidle = 0;
    if (--file->refs > 0)
        return;
    if (!file->may_stay_mapped) {
        forget_file(s, file);
        return;
    }
    file->idle_since = ++s->nidled;
    for (size_t i = 0; i < s->files.count; i++) {
        shm_file *f = s->files.item[i];
        if (f && f->idle_since) {
            nidle++;
            longest = !longest || f->idle_since < longest->idle_since ? f : longest;
        }
    }
    if (nidle > IDLE_FILES)
        forget_file(s, longest);
}

tb_status shm_file_send(shm *s, const shm_file *file, shm_peer *peer) {
    if (is_sent(peer, file))
        return TB_OK;
    while (peer->sent.count <= file->slot) {
        if (!tb__vec_push(&peer->sent, 0))
            return TB_NO_MEMORY;
    }
    TB_TRY(shm_link_send_copies(s, &peer->out, &(shm_frame){.kind = SHM_FILE, .serial = file->id}, &file->fd, 1));
    peer->sent.item[file->slot] = file->id;
    return TB_OK;
}

void shm_files_close(shm *s) {
    for (size_t i = 0; i < s->files.count; i++) {
        if (s->files.item[i])
            free_file(s, s->files.item[i]);
    }
    free(s->files.item);
}

shm_mapping *shm_mapping_find(const shm_peer *peer, uint64_t file) {
    for (size_t i = 0; i < peer->mappings.count; i++) {
        if (peer->mappings.item[i]->file == file)
            return peer->mappings.item[i];
    }
    return NULL;
}

void shm_on_resend(shm *s, shm_peer *peer, const shm_frame *frame) {
    for (size_t i = 0; i < s->files.count && i < peer->sent.count; i++) {
        if (peer->sent.item[i] == frame->serial)
            peer->sent.item[i] = 0;
    }
}

/* The file's descriptor was lost, so it can't be mapped: its tensors are sent instead. */
static void record_shortage(shm_peer *peer, shm_mapping *mapping) {
    mapping->error = EMFILE;
    tb__log(TB_LOG_WARN, "memory of rank %" PRId32 " can't be mapped, and will be sent: %s", peer->rank,
            tb__errno_text(EMFILE));
    shm_link_send(peer->owner, peer->in, &(shm_frame){.kind = SHM_RESEND, .serial = mapping->file}, NULL, 0);
}

bool shm_on_file(shm_peer *peer, const shm_frame *frame, int fd) {
    struct stat info;
    shm_mapping *mapping = shm_mapping_find(peer, frame->serial);
    bool is_resent = mapping && !mapping->base && mapping->error == EMFILE;
    if (fd == -1 || frame->serial == 0 || (mapping && !is_resent))
        return false;
    if (fd != SHM_FD_LOST && (!is_sealed(fd) || fstat(fd, &info) != 0))
        return false; /* its owner could shrink it, and cause a SIGBUS here */
    if (!mapping) {
        mapping = tb__calloc(1, sizeof *mapping);
        if (!mapping || !tb__vec_push(&peer->mappings, mapping)) {
            free(mapping);
            return false;
        }
        mapping->file = frame->serial;
    }
    if (fd == SHM_FD_LOST) {
        record_shortage(peer, mapping);
        return true;
    }
    mapping->base = shm_map_fd(fd, (size_t)info.st_size);
    if (mapping->base)
        mapping->nbytes = (size_t)info.st_size;
    else
        mapping->error = errno; /* for shm_import_key */
    return true;
}

static void free_mapping(shm_mapping *mapping) {
    if (mapping->base)
        munmap(mapping->base, mapping->nbytes);
    free(mapping);
}

/* Unmaps the file if its owner has forgotten it and no remote refers to it. */
static void unmap_if_unused(shm_peer *peer, shm_mapping *mapping) {
    if (!mapping->is_forgotten || mapping->refs > 0)
        return;
    for (size_t i = 0; i < peer->mappings.count; i++) {
        if (peer->mappings.item[i] == mapping)
            peer->mappings.item[i] = peer->mappings.item[--peer->mappings.count];
    }
    free_mapping(mapping);
}

void shm_on_forget(shm_peer *peer, const shm_frame *frame) {
    shm_mapping *mapping = shm_mapping_find(peer, frame->serial);
    if (!mapping)
        return;
    mapping->is_forgotten = true;
    unmap_if_unused(peer, mapping);
}

void shm_mapping_release(shm_peer *peer, shm_mapping *mapping) {
    mapping->refs--;
    unmap_if_unused(peer, mapping);
}

void shm_mappings_forget(shm_peer *peer) {
    size_t kept = 0;
    for (size_t i = 0; i < peer->mappings.count; i++) {
        shm_mapping *mapping = peer->mappings.item[i];
        mapping->is_forgotten = true;
        if (mapping->refs > 0)
            peer->mappings.item[kept++] = mapping;
        else
            free_mapping(mapping);
    }
    peer->mappings.count = kept;
}

void shm_mappings_close(shm_peer *peer) {
    for (size_t i = 0; i < peer->mappings.count; i++)
        free_mapping(peer->mappings.item[i]);
    free(peer->mappings.item);
    free(peer->sent.item);
}
