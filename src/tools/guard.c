/* Cleaning up: signals are delayed until the parent has cleaned up, and its folder is removed. */
#include "tools/guard.h"

#include "base/descriptors.h"
#include "base/mem.h"

#include <errno.h>
#include <fcntl.h>
#include <ftw.h>
#include <stdio.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/signalfd.h>
#include <time.h>
#include <unistd.h>

int64_t tool_now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

/* Signals */

tb_status tool_guard_init(tool_guard *guard) {
    static const int ending[] = {SIGINT, SIGTERM, SIGHUP, SIGQUIT};
    sigset_t watched;
    guard->caught = 0;
    sigemptyset(&guard->ending);
    for (size_t i = 0; i < sizeof ending / sizeof *ending; i++) {
        struct sigaction action;
        if (sigaction(ending[i], NULL, &action) == 0 && action.sa_handler != SIG_IGN)
            sigaddset(&guard->ending, ending[i]);
    }
    watched = guard->ending;
    sigaddset(&watched, SIGCHLD);
    guard->fd = signalfd(-1, &watched, SFD_NONBLOCK | SFD_CLOEXEC);
    if (guard->fd < 0)
        return tb__fail(TB_IO, "signalfd: %s", tb__errno_text(errno));
    /* The parent process may ignore it; then exit statuses of children would be lost. */
    sigaction(SIGCHLD, &(struct sigaction){.sa_handler = SIG_DFL}, &guard->child_action);
    sigprocmask(SIG_BLOCK, &watched, &guard->before);
    return TB_OK;
}

tb_status tool_guard_check(tool_guard *guard) {
    struct signalfd_siginfo info;
    while (read(guard->fd, &info, sizeof info) == (ssize_t)sizeof info) {
        if (info.ssi_signo != SIGCHLD && guard->caught == 0)
            guard->caught = (int)info.ssi_signo;
    }
    if (guard->caught == 0)
        return TB_OK;
    return tb__fail(TB_CANCELLED, "ended by signal %d (%s)", guard->caught, strsignal(guard->caught));
}

void tool_guard_fini(tool_guard *guard) {
    (void)tool_guard_check(guard);
    close(guard->fd);
    sigaction(SIGCHLD, &guard->child_action, NULL);
    if (guard->caught != 0)
        raise(guard->caught);
    sigprocmask(SIG_SETMASK, &guard->before, NULL); /* a signal that was raised takes effect here */
}

void tool_guard_drop(const tool_guard *guard) {
    close(guard->fd);
    sigaction(SIGCHLD, &guard->child_action, NULL);
    sigprocmask(SIG_SETMASK, &guard->before, NULL);
}

/* Folders */

/* For the folders that this process has made: the file that it keeps locked. */
typedef struct folder_lock {
    char *path;
    int fd;
} folder_lock;

static TB_VEC(folder_lock) locks;

/* The file is locked before it gets the name by which others find it. On a file system without locks, it never gets
 * that name. */
static tb_status lock_folder(const char *path) {
    char unlocked[256], locked[256];
    snprintf(unlocked, sizeof unlocked, "%s/lock", path);
    snprintf(locked, sizeof locked, "%s/" TOOL_FOLDER_LOCK, path);
    folder_lock lock = {tb__strdup(path), open(unlocked, O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0600)};
    tb_status status = lock.path ? TB_OK : TB_NO_MEMORY;
    if (status == TB_OK && lock.fd < 0)
        status = tb__fail(TB_IO, "can't make %s: %s", unlocked, tb__errno_text(errno));
    if (status == TB_OK && flock(lock.fd, LOCK_EX | LOCK_NB) == 0 && rename(unlocked, locked) != 0)
        status = tb__fail(TB_IO, "can't make %s: %s", locked, strerror(errno));
    if (status == TB_OK && !tb__vec_push(&locks, lock))
        status = TB_NO_MEMORY;
    if (status != TB_OK) {
        free(lock.path);
        if (lock.fd >= 0)
            close(lock.fd);
    }
    return status;
}

static void unlock_folder(const char *path) {
    for (size_t i = 0; i < locks.count; i++) {
        if (strcmp(locks.item[i].path, path) != 0)
            continue;
        close(locks.item[i].fd);
        free(locks.item[i].path);
        locks.item[i] = locks.item[--locks.count];
        return;
    }
}

tb_status tool_folder_make(char *path, size_t size) {
    const char *base = getenv("TMPDIR");
    int length = snprintf(path, size, "%s/tensorbus-XXXXXX", base && *base ? base : "/tmp");
    tb_status status = TB_OK;
    if (length < 0 || (size_t)length >= size)
        status = tb__fail(TB_INVALID, "TMPDIR is too long for the name of a socket: %.200s", base);
    else if (!mkdtemp(path))
        status = tb__fail(TB_IO, "can't make a folder %s: %s", path, strerror(errno));
    else if ((status = lock_folder(path)) != TB_OK)
        tool_folder_remove(path);
    if (status != TB_OK)
        *path = '\0';
    return status;
}

static int remove_entry(const char *path, const struct stat *about, int kind, struct FTW *where) {
    (void)about;
    (void)kind;
    (void)where;
    (void)remove(path); /* the rest has to be removed, too */
    return 0;
}

void tool_folder_remove(char *path) {
    enum { MAX_OPEN = 8 };
    if (*path) {
        nftw(path, remove_entry, MAX_OPEN, FTW_DEPTH | FTW_PHYS);
        unlock_folder(path);
    }
    *path = '\0';
}

/* Shared memory */

tb_status tool_share(size_t nbytes, void **out) {
    void *memory = mmap(NULL, nbytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED)
        return tb__fail(TB_NO_MEMORY, "can't map %zu bytes of shared memory: %s", nbytes, strerror(errno));
    *out = memory;
    return TB_OK;
}

void tool_unshare(void *ptr, size_t nbytes) {
    if (ptr)
        munmap(ptr, nbytes);
}
