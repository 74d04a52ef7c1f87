/* A client's process. Its pid is trusted only while the process that connected still has it. */
#include "bus/agent/client_process.h"

#include "base/descriptors.h"
#include "base/int.h"
#include "base/mem.h"
#include "base/process.h"
#include "device/host/memory.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <poll.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

enum { MOST_AT_ONCE = 1 << 30 }; /* a call of the system moves at most 2 GiB */

static tb_status read_start_time(pid_t pid, uint64_t *out) {
    if (tb__process_start_time(pid, out))
        return TB_OK;
    return errno == ENOENT ? tb__fail(TB_LOST, "process %ld is gone", (long)pid)
                           : tb__fail(TB_IO, "/proc/%ld/stat: %s", (long)pid, tb__errno_text(errno));
}

tb_status tb__client_process_init(tb__client_process *process, int socket) {
    struct ucred who;
    socklen_t length = sizeof who;
    *process = (tb__client_process){.pidfd = -1};
    if (getsockopt(socket, SOL_SOCKET, SO_PEERCRED, &who, &length) != 0)
        return tb__fail(TB_IO, "SO_PEERCRED: %s", strerror(errno));
    if (who.uid != geteuid())
        return tb__fail(TB_DENIED, "user %u may not use the agent of user %u", (unsigned)who.uid, (unsigned)geteuid());
    process->pid = who.pid;
    process->pidfd = (int)syscall(SYS_pidfd_open, who.pid, 0);
    tb_status status = read_start_time(process->pid, &process->start_time);
    if (status != TB_OK)
        tb__client_process_fini(process);
    return status;
}

void tb__client_process_fini(tb__client_process *process) {
    while (process->files) {
        process->files->refs = 1;
        tb__client_process_unmap_file(process, process->files);
    }
    tb__fd_close(process->pidfd);
    process->pidfd = -1;
}

/* A file that may shrink. */
static tb_status keep_descriptor(int fd, const struct stat *info, int flags, tb__client_file *out) {
    if (!S_ISREG(info->st_mode))
        return tb__fail(TB_DENIED, "the memory's descriptor is not that of a file");
    if (info->st_uid != geteuid())
        return tb__fail(TB_DENIED, "the memory's file belongs to user %u, not to %u", (unsigned)info->st_uid,
                        (unsigned)geteuid());
    if (flags & O_PATH || (flags & O_ACCMODE) == O_WRONLY)
        return tb__fail(TB_DENIED, "the memory's descriptor was not opened for reading");
    if (flags & O_APPEND)
        return tb__fail(TB_DENIED, "the memory's descriptor was opened for appending");
    out->fd = fcntl(fd, F_DUPFD_CLOEXEC, 0);
    if (out->fd < 0)
        return tb__fail(TB_IO, "fcntl: %s", tb__errno_text(errno));
    return TB_OK;
}

/* TB_DENIED says that it may shrink, or can't be written. */
static tb_status open_file(int fd, const struct stat *info, int flags, tb__client_file *out) {
    out->fd = -1;
    tb_status status = tb__memory_adopt(fd, &out->base, &out->nbytes);
    return status == TB_DENIED ? keep_descriptor(fd, info, flags, out) : status;
}

tb_status tb__client_process_map_file(tb__client_process *process, int fd, tb__client_file **out) {
    struct stat info;
    int flags = fcntl(fd, F_GETFL);
    if (fstat(fd, &info) != 0)
        return tb__fail(TB_INVALID, "a descriptor: %s", strerror(errno));
    for (tb__client_file *file = process->files; file; file = file->next) {
        if (file->device == info.st_dev && file->inode == info.st_ino && (file->base || file->flags == flags)) {
            file->refs++;
            *out = file;
            return TB_OK;
        }
    }
    tb__client_file *file = tb__calloc(1, sizeof *file);
    if (!file)
        return TB_NO_MEMORY;
    tb_status status = open_file(fd, &info, flags, file);
    if (status != TB_OK) {
        free(file);
        return status;
    }
    file->device = info.st_dev;
    file->inode = info.st_ino;
    file->flags = flags;
    file->refs = 1;
    file->next = process->files;
    process->files = file;
    *out = file;
    return TB_OK;
}

void tb__client_process_unmap_file(tb__client_process *process, tb__client_file *file) {
    if (--file->refs > 0)
        return;
    for (tb__client_file **at = &process->files; *at; at = &(*at)->next) {
        if (*at == file) {
            *at = file->next;
            break;
        }
    }
    if (file->base)
        tb__memory_abandon(file->base);
    tb__fd_close(file->fd);
    free(file);
}

tb_status tb__client_file_size(const tb__client_file *file, size_t *out) {
    struct stat info;
    if (!file->base && fstat(file->fd, &info) != 0)
        return tb__fail(TB_IO, "fstat: %s", strerror(errno));
    *out = file->base ? file->nbytes : (size_t)info.st_size;
    return TB_OK;
}

/* Whether the pid is still that of the process that connected: it is not reused before its pidfd reports the end. */
static tb_status check_alive(const tb__client_process *process) {
    struct pollfd end = {.fd = process->pidfd, .events = POLLIN};
    uint64_t start_time = process->start_time;
    if (process->pidfd < 0)
        TB_TRY(read_start_time(process->pid, &start_time));
    bool is_gone = process->pidfd >= 0 ? poll(&end, 1, 0) > 0 : start_time != process->start_time;
    return is_gone ? tb__fail(TB_LOST, "process %ld is gone", (long)process->pid) : TB_OK;
}

tb_status tb__client_process_read_maps(const tb__client_process *process, tb__client_maps *out) {
    char path[64], line[512];
    TB_TRY(check_alive(process));
    snprintf(path, sizeof path, "/proc/%ld/maps", (long)process->pid);
    FILE *maps = fopen(path, "re");
    if (!maps)
        return tb__fail(TB_DENIED, "%s: %s", path, tb__errno_text(errno));
    *out = (tb__client_maps){.pid = process->pid};
    tb_status status = TB_OK;
    while (status == TB_OK && fgets(line, sizeof line, maps)) {
        char *rest;
        uint64_t first = strtoull(line, &rest, 16), last = *rest == '-' ? strtoull(rest + 1, &rest, 16) : 0;
        bool may_read = rest[0] == ' ' && rest[1] == 'r';
        while (!strchr(line, '\n') && fgets(line, sizeof line, maps)) /* the rest of a long line */
            continue;
        struct tb__client_range *before = out->count > 0 ? &out->item[out->count - 1] : NULL;
        if (may_read && before && before->last == first)
            before->last = last;
        else if (may_read && !tb__vec_push(out, ((struct tb__client_range){first, last})))
            status = TB_NO_MEMORY;
    }
    fclose(maps);
    return status;
}

tb_status tb__client_maps_check(const tb__client_maps *maps, uint64_t address, size_t nbytes) {
    size_t i = 0;
    uint64_t stop;
    if (__builtin_add_overflow(address, nbytes, &stop))
        return tb__fail(TB_INVALID, "%zu bytes at 0x%" PRIx64 " run past the last address", nbytes, address);
    TB_BISECT(i, maps->count, maps->item[i].last > address);
    const struct tb__client_range *r = i < maps->count ? &maps->item[i] : NULL;
    bool is_inside = r && r->first <= address;
    if (is_inside && stop <= r->last)
        return TB_OK;
    return tb__fail(TB_INVALID,
                    "%zu bytes at 0x%" PRIx64
                    " run past the memory that process %ld may read, which ends at 0x%" PRIx64,
                    nbytes, address, (long)maps->pid, is_inside ? r->last : address);
}

/* Fails because nothing was moved at this place. */
static tb_status fail_move(const tb__client_process *process, const tb__client_file *file, bool is_write, uint64_t at,
                           int error) {
    const char *what = is_write ? "written" : "read";
    if (file)
        return tb__fail(TB_IO, "the memory's file can't be %s at byte %" PRIu64 ": %s", what, at,
                        error ? strerror(error) : "it ends there now");
    return tb__fail(error == EPERM   ? TB_DENIED
                    : error == ESRCH ? TB_LOST
                                     : TB_IO,
                    "memory of process %ld at 0x%" PRIx64 " can't be %s: %s%s", (long)process->pid, at, what,
                    error ? strerror(error) : "nothing was moved", error == EPERM ? "; use memory of tb_alloc" : "");
}

static ssize_t move_pieces(const tb__client_process *process, const tb__client_file *file, bool is_write,
                           const struct iovec *here, const struct iovec *there, size_t count) {
    if (!file)
        return (is_write ? process_vm_writev : process_vm_readv)(process->pid, here, count, there, count, 0);
    off_t at = (off_t)(uintptr_t)there->iov_base;
    return is_write ? pwrite(file->fd, here->iov_base, here->iov_len, at)
                    : pread(file->fd, here->iov_base, here->iov_len, at);
}

/* Several pieces at once, unless they are in a file. Writing past the end of a file would make it longer. */
static tb_status move_all(const tb__client_process *process, const tb__client_file *file, bool is_write, uint64_t at,
                          char *local, const size_t *offsets, size_t n, size_t nbytes) {
    size_t pieces = file ? 1 : TB__CLIENT_PROCESS_PIECES, end = SIZE_MAX;
    TB_TRY(file ? tb__client_file_size(file, &end) : check_alive(process));
    for (size_t i = 0, done = 0; i < n;) {
        struct iovec here[TB__CLIENT_PROCESS_PIECES], there[TB__CLIENT_PROCESS_PIECES];
        size_t count = 0, most = MOST_AT_ONCE;
        for (size_t j = i, start = done; j < n && count < pieces && most > 0; j++, start = 0) {
            size_t length = nbytes - start < most ? nbytes - start : most, offset = offsets[j] + start;
            here[count] = (struct iovec){local + offset, length};
            there[count++] = (struct iovec){(void *)(uintptr_t)(at + offset), length}; // NOLINT: not an address here
            most -= length;
        }
        uint64_t first = at + offsets[i] + done;
        bool is_past = first + here->iov_len > end;
        ssize_t moved = is_past ? 0 : move_pieces(process, file, is_write, here, there, count);
        if (moved < 0 && errno == EINTR)
            continue;
        if (moved <= 0)
            return fail_move(process, file, is_write, is_past ? end : first, moved < 0 ? errno : 0);
        done += (size_t)moved; /* perhaps the end of one piece, and some after it */
        i += done / nbytes;
        done %= nbytes;
    }
    return TB_OK;
}

tb_status tb__client_read(const tb__client_process *process, const tb__client_file *file, uint64_t at, void *to,
                          size_t nbytes) {
    return move_all(process, file, false, at, to, &(size_t){0}, 1, nbytes);
}

tb_status tb__client_write(const tb__client_process *process, const tb__client_file *file, uint64_t at,
                           const void *from, const size_t *offsets, size_t n, size_t nbytes) {
    return move_all(process, file, true, at, (char *)(uintptr_t)from, offsets, n, nbytes);
}
