/* Semaphores that are what they should be wake who waits; all others harm nobody. */
#include "bus/agent/semaphore.h"

#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <semaphore.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include <cmocka.h>

enum { WAITERS = 3, PATIENCE_S = 20, ROUNDS = 2000 };

static char name[64], path[96];

static int make_name(void **state) {
    (void)state;
    snprintf(name, sizeof name, "/tensorbus-semaphore-%d", (int)getpid());
    snprintf(path, sizeof path, "/dev/shm/sem.%s", name + 1);
    return 0;
}

static int remove_file(void **state) {
    (void)state;
    unlink(path);
    return 0;
}

static void make_file(const void *data, size_t nbytes) {
    int fd = open(path, O_CREAT | O_EXCL | O_WRONLY | O_CLOEXEC, 0600);
    assert_true(fd >= 0 && write(fd, data, nbytes) == (ssize_t)nbytes);
    close(fd);
}

static void *wait_for_it(void *arg) {
    struct timespec deadline;
    clock_gettime(CLOCK_REALTIME, &deadline);
    deadline.tv_sec += PATIENCE_S;
    return sem_timedwait(arg, &deadline) == 0 ? arg : NULL;
}

static void test_wakes(void **state) {
    (void)state;
    pthread_t thread[WAITERS];
    void *woken;
    int value;
    sem_t *s = sem_open(name, O_CREAT | O_EXCL, 0600, 0);
    assert_true(s != SEM_FAILED);
    assert_int_equal(tb__semaphore_post(name), TB_OK);
    assert_int_equal(access(path, F_OK), -1);
    assert_true(sem_getvalue(s, &value) == 0 && value == 1);
    assert_int_equal(sem_trywait(s), 0);
    for (int i = 0; i < WAITERS; i++)
        assert_int_equal(pthread_create(&thread[i], NULL, wait_for_it, s), 0);
    for (int i = 0; i < WAITERS; i++)
        assert_int_equal(tb__semaphore_raise(s), TB_OK);
    for (int i = 0; i < WAITERS; i++)
        assert_true(pthread_join(thread[i], &woken) == 0 && woken);
    assert_true(sem_getvalue(s, &value) == 0 && value == 0);
    sem_close(s);
}

static void test_garbage(void **state) {
    (void)state;
    unsigned char bytes[sizeof(sem_t)];
    for (int fill = 0; fill < 256; fill += 51) {
        memset(bytes, fill, sizeof bytes);
        make_file(bytes, sizeof bytes);
        assert_int_equal(tb__semaphore_post(name), TB_OK);
        assert_int_equal(access(path, F_OK), -1);
    }
}

static void test_no_semaphore(void **state) {
    (void)state;
    static const char *const names[] = {"", "/", "..", "/../x", "/a/b", "/tensorbus-is-not-there"};
    char longer[PATH_MAX] = "/";
    for (size_t i = 0; i < sizeof names / sizeof *names; i++)
        assert_true(tb__semaphore_post(names[i]) != TB_OK);
    memset(longer + 1, 'x', sizeof longer - 2);
    assert_true(tb__semaphore_post(longer) != TB_OK);
    make_file("short", 5);
    assert_int_equal(tb__semaphore_post(name), TB_INVALID);
    unlink(path);
    make_file(longer, sizeof longer);
    assert_int_equal(tb__semaphore_post(name), TB_INVALID);
    unlink(path);
    assert_int_equal(mkfifo(path, 0600), 0);
    assert_int_equal(tb__semaphore_post(name), TB_INVALID);
    unlink(path);
    assert_int_equal(symlink("/etc/passwd", path), 0);
    assert_int_equal(tb__semaphore_post(name), TB_IO);
    unlink(path);
}

/* Memory that is gone before it is touched. */
static void test_cut_short(void **state) {
    (void)state;
    int fd = memfd_create("semaphore", MFD_CLOEXEC);
    assert_true(fd >= 0 && ftruncate(fd, sizeof(sem_t)) == 0);
    void *memory = mmap(NULL, sizeof(sem_t), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    assert_true(memory != MAP_FAILED);
    assert_int_equal(tb__semaphore_raise(memory), TB_OK);
    assert_int_equal(ftruncate(fd, 0), 0);
    assert_int_equal(tb__semaphore_raise(memory), TB_IO);
    munmap(memory, sizeof(sem_t));
    close(fd);
}

static void *shrink(void *arg) {
    const atomic_bool *is_over = arg;
    while (!atomic_load(is_over)) {
        int fd = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
        for (int i = 0; fd >= 0 && i < 50; i++) {
            if (ftruncate(fd, sizeof(sem_t)) != 0 || ftruncate(fd, 0) != 0)
                break;
        }
        if (fd >= 0)
            close(fd);
    }
    return NULL;
}

/* Whatever becomes of each, whoever posts lives. */
static void test_shrinking(void **state) {
    (void)state;
    atomic_bool is_over = false;
    pthread_t thread;
    assert_int_equal(pthread_create(&thread, NULL, shrink, &is_over), 0);
    for (int i = 0; i < ROUNDS; i++)
        (void)tb__semaphore_post(name);
    atomic_store(&is_over, true);
    assert_int_equal(pthread_join(thread, NULL), 0);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_teardown(test_wakes, remove_file),        cmocka_unit_test_teardown(test_garbage, remove_file),
        cmocka_unit_test_teardown(test_no_semaphore, remove_file), cmocka_unit_test(test_cut_short),
        cmocka_unit_test_teardown(test_shrinking, remove_file),
    };
    return cmocka_run_group_tests(tests, make_name, NULL);
}
