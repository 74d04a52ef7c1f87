/* sem_post aborts on an invalid semaphore, and accessing a mapping of a truncated file raises SIGBUS. So a single futex
 * call, which fails instead, both increments and wakes. */
#include "bus/agent/semaphore.h"

#include "base/descriptors.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/futex.h>
#include <semaphore.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

/* glibc's semaphores on 64-bit machines: 8 bytes, the value in the lower half, the number of waiters in the upper
 * half. */
_Static_assert(sizeof(long) == 8 && sizeof(sem_t) == 32, "semaphores of another kind");
enum { VALUE_AT = __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__ ? 0 : 4 };

tb_status tb__semaphore_raise(void *semaphore) {
    void *value = (char *)semaphore + VALUE_AT;
    unsigned add_one = (unsigned)FUTEX_OP(FUTEX_OP_ADD, 1, FUTEX_OP_CMP_EQ, 0);
    /* Wakes one waiter at the first address, and none at the second, where it adds. */
    while (syscall(SYS_futex, value, FUTEX_WAKE_OP, 1, (void *)0, value, add_one) < 0) {
        if (errno != EINTR && errno != EAGAIN)
            return tb__fail(TB_IO, "the semaphore can't be posted: %s", strerror(errno));
    }
    return TB_OK;
}

/* The path of glibc's named semaphores. */
static tb_status format_semaphore_path(const char *name, char *path, size_t nbytes) {
    name += strspn(name, "/");
    int n = snprintf(path, nbytes, "/dev/shm/sem.%s", name);
    return *name && !strchr(name, '/') && n > 0 && (size_t)n < nbytes
               ? TB_OK
               : tb__fail(TB_INVALID, "a semaphore's name has no slash but the first, and at most 286 bytes");
}

static tb_status post_and_unlink(const char *path, int fd) {
    struct stat info;
    if (fstat(fd, &info) != 0)
        return tb__fail(TB_IO, "fstat: %s", strerror(errno));
    if (!S_ISREG(info.st_mode) || info.st_uid != geteuid() || info.st_size != (off_t)sizeof(sem_t))
        return tb__fail(TB_INVALID, "it is not a file of %zu bytes that belongs to this user", sizeof(sem_t));
    void *memory = mmap(NULL, sizeof(sem_t), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (memory == MAP_FAILED)
        return tb__fail(TB_IO, "mmap: %s", strerror(errno));
    unlink(path); /* first, so that the waiter finds it gone */
    tb_status status = tb__semaphore_raise(memory);
    munmap(memory, sizeof(sem_t));
    return status;
}

tb_status tb__semaphore_post(const char *name) {
    char path[300];
    TB_TRY(format_semaphore_path(name, path, sizeof path));
    int fd = open(path, O_RDWR | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC);
    if (fd < 0)
        return tb__fail(TB_IO, "it can't be opened: %s", tb__errno_text(errno));
    tb_status status = post_and_unlink(path, fd);
    close(fd);
    return status;
}
