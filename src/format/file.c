/* Files that are read and written in pieces; drafts, which replace a file when they are complete. */
#include "format/file.h"

#include "base/descriptors.h"
#include "base/mem.h"
#include "base/text.h"

#include <ctype.h>
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

tb_status tb__file_fail_within(tb_status status, const char *path) {
    enum { MOST = 240 }; /* leaves room for the message */
    tb__saved_detail inner = tb__save_detail();
    size_t length = strlen(path);
    const char *end = length > MOST ? path + length - MOST : path;
    while (end > path && (*end & 0xC0) == 0x80) /* not in the middle of a character */
        end++;
    return tb__fail(status, "%s%s: %s", end > path ? "..." : "", end, inner.text);
}

tb_status tb__file_fail_errno(tb_status status, const char *path, const char *what) {
    return tb__file_fail(status, path, "%s: %s", what, tb__errno_text(errno));
}

tb_status tb__file_open(const char *path, int *fd, int64_t *nbytes) {
    struct stat about;
    int opened = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK); /* must not wait for the writer of a pipe */
    if (opened < 0) {
        bool is_missing = errno == ENOENT || errno == ENOTDIR || errno == ELOOP || errno == ENAMETOOLONG;
        return tb__file_fail_errno(is_missing ? TB_INVALID : TB_IO, path, "can't be opened");
    }
    tb_status status = TB_OK;
    if (fstat(opened, &about) != 0) {
        status = tb__file_fail_errno(TB_IO, path, "can't be looked at");
    } else if (!S_ISREG(about.st_mode)) {
        status = tb__file_fail(TB_INVALID, path, "it is %s, not a file",
                               S_ISDIR(about.st_mode) ? "a directory" : "a pipe or a device");
    }
    if (status != TB_OK) {
        close(opened);
        return status;
    }
    *fd = opened;
    *nbytes = about.st_size;
    return TB_OK;
}

tb_status tb__file_read(int fd, const char *path, int64_t offset, void *buffer, size_t nbytes) {
    for (size_t done = 0; done < nbytes;) {
        ssize_t n = pread(fd, (char *)buffer + done, nbytes - done, offset + (int64_t)done);
        if (n < 0 && errno == EINTR)
            continue;
        if (n < 0)
            return tb__file_fail_errno(TB_IO, path, "can't be read");
        if (n == 0)
            return tb__file_fail(TB_IO, path, "it ends at byte %" PRId64 "; it became shorter after it was opened",
                                 offset + (int64_t)done);
        done += (size_t)n;
    }
    return TB_OK;
}

tb_status tb__file_write(int fd, const char *path, int64_t offset, const void *bytes, size_t nbytes) {
    for (size_t done = 0; done < nbytes;) {
        ssize_t n = pwrite(fd, (const char *)bytes + done, nbytes - done, offset + (int64_t)done);
        if (n < 0 && errno == EINTR)
            continue;
        if (n <= 0) {
            errno = n == 0 ? ENOSPC : errno;
            return tb__file_fail_errno(TB_IO, path, "can't be written");
        }
        done += (size_t)n;
    }
    return TB_OK;
}

tb_status tb__file_join(const char *dir, const char *name, char **out) {
    tb__text text = {0};
    size_t length = strlen(dir);
    tb__text_add(&text, "%s%s%s", dir, length > 0 && dir[length - 1] == '/' ? "" : "/", name);
    return tb__text_take(&text, out);
}

/* The length of a path up to its last name. */
static size_t directory_length(const char *path) {
    const char *slash = strrchr(path, '/');
    return slash ? (size_t)(slash - path) + 1 : 0;
}

/* False: another process has removed the file as a leftover (tb__leftovers_remove), or is about to: it was not locked
 * yet. On a file system without locks nothing is removed as a leftover. */
static bool lock_new(int fd) {
    struct stat about;
    if (flock(fd, LOCK_EX | LOCK_NB) != 0 && errno == EWOULDBLOCK)
        return false;
    return fstat(fd, &about) == 0 && about.st_nlink > 0;
}

static tb_status open_temporary(tb__draft *draft) {
    static atomic_uint next;
    enum { ATTEMPTS = 1000 }; /* an existing name was left by a killed process with the same id */
    size_t dir = directory_length(draft->path);
    for (int i = 0; i < ATTEMPTS; i++) {
        tb__text name = {0};
        tb__text_add(&name, "%.*s.%.200s.%ld.%u.tmp", (int)dir, draft->path, draft->path + dir, (long)getpid(),
                     atomic_fetch_add(&next, 1));
        free(draft->temporary);
        draft->temporary = NULL;
        TB_TRY(tb__text_take(&name, &draft->temporary));
        draft->fd = open(draft->temporary, O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
        if (draft->fd >= 0 && lock_new(draft->fd))
            return TB_OK;
        if (draft->fd >= 0)
            close(draft->fd);
        else if (errno != EEXIST)
            break;
        draft->fd = -1;
        errno = EEXIST;
    }
    free(draft->temporary);
    draft->temporary = NULL;
    return tb__file_fail_errno(TB_IO, draft->path, "can't be created");
}

/* Only a lack of space is a failure: not every file system can reserve it. */
static tb_status reserve_blocks(const tb__draft *draft, int64_t nbytes) {
    if (nbytes > 0 && fallocate(draft->fd, 0, 0, nbytes) == 0)
        return TB_OK;
    if (nbytes > 0 && (errno == ENOSPC || errno == EDQUOT || errno == EFBIG))
        return tb__file_fail_errno(TB_IO, draft->path, "can't be written");
    if (ftruncate(draft->fd, nbytes) != 0)
        return tb__file_fail_errno(TB_IO, draft->path, "can't be written");
    return TB_OK;
}

tb_status tb__draft_init(tb__draft *draft, const char *path, int64_t nbytes) {
    struct stat about;
    tb__draft made = {.fd = -1, .path = tb__strdup(path)};
    if (!made.path)
        return TB_NO_MEMORY;
    tb_status status = TB_OK;
    if (stat(path, &about) == 0 && !S_ISREG(about.st_mode))
        status = tb__file_fail(TB_IO, path, "can't be created: something that is not a file is there");
    if (status == TB_OK)
        status = open_temporary(&made);
    if (status == TB_OK)
        status = reserve_blocks(&made, nbytes);
    if (status != TB_OK)
        tb__draft_fini(&made);
    else
        *draft = made;
    return status;
}

tb_status tb__draft_flush(tb__draft *draft, bool sync) {
    if (draft->fd < 0)
        return TB_OK;
    if (sync && fsync(draft->fd) != 0)
        return tb__file_fail_errno(TB_IO, draft->path, "can't be written to the disk");
    /* Some file systems report earlier errors at close. The lock stays with the other descriptor. */
    int fd = fcntl(draft->fd, F_DUPFD_CLOEXEC, 0);
    bool ok = fd >= 0 && (close(fd) == 0 || errno == EINTR);
    return ok ? TB_OK : tb__file_fail_errno(TB_IO, draft->path, "can't be written");
}

tb_status tb__file_sync_name(const char *path) {
    tb__text text = {0};
    char *dir;
    size_t length = strlen(path);
    while (length > 1 && path[length - 1] == '/')
        length--;
    while (length > 0 && path[length - 1] != '/')
        length--;
    tb__text_add(&text, "%.*s", length ? (int)length : 1, length ? path : ".");
    TB_TRY(tb__text_take(&text, &dir));
    int fd = open(dir, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    bool ok = fd >= 0 && (fsync(fd) == 0 || errno == EINVAL); /* some file systems have nothing to sync there */
    tb_status status = ok ? TB_OK : tb__file_fail_errno(TB_IO, dir, "can't be written to the disk");
    if (fd >= 0)
        close(fd);
    free(dir);
    return status;
}

tb_status tb__draft_commit(tb__draft *draft) {
    if (!draft->temporary)
        return TB_OK;
    if (rename(draft->temporary, draft->path) != 0)
        return tb__file_fail_errno(TB_IO, draft->path, "can't be put in its place");
    free(draft->temporary);
    draft->temporary = NULL;
    close(draft->fd);
    draft->fd = -1;
    return TB_OK;
}

void tb__draft_fini(tb__draft *draft) {
    if (draft->temporary)
        unlink(draft->temporary);
    if (draft->fd >= 0)
        close(draft->fd);
    free(draft->temporary);
    free(draft->path);
    *draft = (tb__draft){.fd = -1};
}

/* ".NUMBER" before `end`; where it begins, or NULL. */
static const char *number_before(const char *start, const char *end) {
    const char *at = end;
    while (at > start && isdigit((unsigned char)at[-1]))
        at--;
    return at < end && at > start && at[-1] == '.' ? at - 1 : NULL;
}

static bool ends_in(const char *start, const char *end, const char *tail) {
    size_t length = strlen(tail);
    return (size_t)(end - start) > length && memcmp(end - length, tail, length) == 0;
}

int tb__leftovers_is_one(const struct dirent *e) {
    const char *start = e->d_name + 1, *end = e->d_name + strlen(e->d_name);
    if (e->d_name[0] != '.' || !ends_in(start, end, ".tmp"))
        return false;
    end = number_before(start, end - strlen(".tmp"));
    end = end ? number_before(start, end) : NULL;
    return end && (ends_in(start, end, ".safetensors") || ends_in(start, end, ".safetensors.index.json"));
}

/* A process holds the lock of the file that it writes. A process that gets the lock may delete the file: no process
 * opens another one's, as the name contains the process id. */
static void remove_leftover(const char *path, tb__leftovers *out) {
    struct stat about;
    int fd = open(path, O_RDWR | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK);
    if (fd < 0) {
        out->nstuck += errno == EACCES || errno == EPERM || errno == EROFS;
        return;
    }
    bool is_locked = flock(fd, LOCK_EX | LOCK_NB) == 0;
    out->nheld += !is_locked && errno == EWOULDBLOCK;
    if (is_locked && fstat(fd, &about) == 0 && S_ISREG(about.st_mode)) {
        if (unlink(path) == 0) {
            out->count++;
            out->nbytes += (int64_t)about.st_blocks * 512;
        } else {
            out->nstuck += errno != ENOENT; /* it was committed meanwhile */
        }
    }
    close(fd);
}

tb_status tb__leftovers_remove(const char *dir, tb__leftovers *out) {
    struct dirent **entries;
    *out = (tb__leftovers){0};
    int n = scandir(dir, &entries, tb__leftovers_is_one, NULL);
    if (n < 0)
        return errno == ENOENT || errno == ENOTDIR ? TB_OK : tb__file_fail_errno(TB_IO, dir, "can't be listed");
    tb_status status = TB_OK;
    for (int i = 0; i < n; i++) {
        char *path;
        if (status == TB_OK)
            status = tb__file_join(dir, entries[i]->d_name, &path);
        if (status == TB_OK) {
            remove_leftover(path, out);
            free(path);
        }
        free(entries[i]);
    }
    free(entries);
    return status;
}
