/* A client's process. Its pid is only believed while the process that connected still has it. */
#include "bus/agent/guest.h"

#include "base/descriptors.h"
#include "base/mem.h"
#include "base/process.h"
#include "device/host/memory.h"

#include <errno.h>
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

tb_status tb__guest_init(tb__guest *guest, int socket) {
    struct ucred who;
    socklen_t length = sizeof who;
    *guest = (tb__guest){.pidfd = -1};
    if (getsockopt(socket, SOL_SOCKET, SO_PEERCRED, &who, &length) != 0)
        return tb__fail(TB_IO, "SO_PEERCRED: %s", strerror(errno));
    if (who.uid != geteuid())
        return tb__fail(TB_DENIED, "user %u may not use the agent of user %u", (unsigned)who.uid, (unsigned)geteuid());
    guest->pid = who.pid;
    guest->pidfd = (int)syscall(SYS_pidfd_open, who.pid, 0);
    tb_status status = read_start_time(guest->pid, &guest->start_time);
    if (status != TB_OK)
        tb__guest_fini(guest);
    return status;
}

void tb__guest_fini(tb__guest *guest) {
    while (guest->files) {
        guest->files->refs = 1;
        tb__guest_put_file(guest, guest->files);
    }
    tb__fd_close(guest->pidfd);
    guest->pidfd = -1;
}

/* ---- Files ----------------------------------------------------------------------------------------------------- */

tb_status tb__guest_take_file(tb__guest *guest, int fd, tb__guest_file **out) {
    struct stat info;
    if (fstat(fd, &info) != 0)
        return tb__fail(TB_INVALID, "a descriptor: %s", strerror(errno));
    for (tb__guest_file *file = guest->files; file; file = file->next) {
        if (file->device == info.st_dev && file->inode == info.st_ino) {
            file->refs++;
            *out = file;
            return TB_OK;
        }
    }
    tb__guest_file *file = tb__calloc(1, sizeof *file);
    if (!file)
        return TB_NO_MEMORY;
    tb_status status = tb__memory_adopt(fd, &file->base, &file->nbytes);
    if (status != TB_OK) {
        free(file);
        return status;
    }
    file->device = info.st_dev;
    file->inode = info.st_ino;
    file->refs = 1;
    file->next = guest->files;
    guest->files = file;
    *out = file;
    return TB_OK;
}

void tb__guest_put_file(tb__guest *guest, tb__guest_file *file) {
    if (--file->refs > 0)
        return;
    for (tb__guest_file **at = &guest->files; *at; at = &(*at)->next) {
        if (*at == file) {
            *at = file->next;
            break;
        }
    }
    tb__memory_abandon(file->base);
    free(file);
}

/* ---- Addresses ------------------------------------------------------------------------------------------------- */

/* Whether the pid is still that of the process that connected. */
static tb_status check_alive(const tb__guest *guest) {
    struct pollfd end = {.fd = guest->pidfd, .events = POLLIN};
    uint64_t start_time;
    if (guest->pidfd >= 0 && poll(&end, 1, 0) > 0)
        return tb__fail(TB_LOST, "process %ld is gone", (long)guest->pid);
    TB_TRY(read_start_time(guest->pid, &start_time));
    return start_time == guest->start_time ? TB_OK : tb__fail(TB_LOST, "process %ld is gone", (long)guest->pid);
}

tb_status tb__guest_check(const tb__guest *guest, uint64_t address, size_t nbytes, bool writes) {
    char path[64], line[512];
    uint64_t at = address, stop;
    if (__builtin_add_overflow(address, nbytes, &stop))
        return tb__fail(TB_INVALID, "%zu bytes at 0x%" PRIx64 " are no memory", nbytes, address);
    TB_TRY(check_alive(guest));
    snprintf(path, sizeof path, "/proc/%ld/maps", (long)guest->pid);
    FILE *maps = fopen(path, "re");
    if (!maps)
        return tb__fail(TB_DENIED, "%s: %s", path, tb__errno_text(errno));
    while (at < stop && fgets(line, sizeof line, maps)) {
        char *rest;
        uint64_t first = strtoull(line, &rest, 16), last = *rest == '-' ? strtoull(rest + 1, &rest, 16) : 0;
        bool may = rest[0] == ' ' && rest[1] == 'r' && (!writes || rest[2] == 'w');
        while (!strchr(line, '\n') && fgets(line, sizeof line, maps)) /* the rest of a long line */
            continue;
        if (at >= first && at < last && may)
            at = last;
        else if (first > at)
            break;
    }
    fclose(maps);
    return at >= stop ? TB_OK
                      : tb__fail(TB_INVALID,
                                 "%zu bytes at 0x%" PRIx64 " run past what process %ld may %s: it ends at 0x%" PRIx64,
                                 nbytes, address, (long)guest->pid, writes ? "write" : "read", at);
}

/* After a call of the system that was to move so many bytes; the sentence names the address where it stopped. */
static tb_status check_moved(const tb__guest *guest, ssize_t moved, uint64_t address, const char *what) {
    if (moved > 0)
        return TB_OK;
    int error = moved < 0 ? errno : 0;
    return tb__fail(error == EPERM   ? TB_DENIED
                    : error == ESRCH ? TB_LOST
                                     : TB_IO,
                    "memory of process %ld at 0x%" PRIx64 " can't be %s: %s%s", (long)guest->pid, address, what,
                    moved == 0 ? "nothing was moved" : strerror(error),
                    error == EPERM ? "; use memory of tb_alloc" : "");
}

tb_status tb__guest_read(const tb__guest *guest, uint64_t address, void *to, size_t nbytes) {
    TB_TRY(check_alive(guest));
    for (size_t at = 0; at < nbytes;) {
        size_t n = nbytes - at < MOST_AT_ONCE ? nbytes - at : MOST_AT_ONCE;
        struct iovec here = {(char *)to + at, n};
        struct iovec there = {(void *)(uintptr_t)(address + at), n}; // NOLINT(performance-no-int-to-ptr)
        ssize_t moved = process_vm_readv(guest->pid, &here, 1, &there, 1, 0);
        TB_TRY(check_moved(guest, moved, address + at, "read"));
        at += (size_t)moved;
    }
    return TB_OK;
}

tb_status tb__guest_write(const tb__guest *guest, uint64_t address, const void *from, const size_t *offsets, size_t n,
                          size_t nbytes) {
    TB_TRY(check_alive(guest));
    for (size_t i = 0, at = 0; i < n;) {
        struct iovec here[TB__GUEST_PIECES], there[TB__GUEST_PIECES];
        size_t count = 0, most = MOST_AT_ONCE;
        for (size_t j = i, from_at = at; j < n && count < TB__GUEST_PIECES && most > 0; j++, from_at = 0) {
            size_t length = nbytes - from_at < most ? nbytes - from_at : most;
            here[count] = (struct iovec){(char *)from + offsets[j] + from_at, length};
            there[count++] = (struct iovec){(void *)(uintptr_t)(address + offsets[j] + from_at),
                                            length}; // NOLINT: of another process
            most -= length;
        }
        ssize_t moved = process_vm_writev(guest->pid, here, count, there, count, 0);
        TB_TRY(check_moved(guest, moved, address + offsets[i] + at, "written"));
        at += (size_t)moved; /* perhaps the end of one piece, and some after it */
        i += at / nbytes;
        at %= nbytes;
    }
    return TB_OK;
}
