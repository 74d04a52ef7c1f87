/* What strains an agent: invalid commands, semaphores that are none, descriptors without end, clients that
 * do not read. Raw connections only, since no client of ours would do that. */
#include "bus/agent/agent_test.h"

#include <dirent.h>
#include <fcntl.h>
#include <semaphore.h>

/* ---- Semaphores ------------------------------------------------------------------------------------------------ */

static sem_t *new_semaphore(const char *name) {
    sem_t *semaphore = sem_open(name, O_CREAT | O_EXCL, 0600, 0);
    check(semaphore != SEM_FAILED);
    return semaphore;
}

/* It is posted once, and its name is gone. */
static void expect_posted(const char *name, sem_t *semaphore) {
    int value = -1;
    check(sem_getvalue(semaphore, &value) == 0 && value == 1);
    check(sem_open(name, 0) == SEM_FAILED);
    sem_close(semaphore);
}

static void post_map(raw *c, const char *map, size_t nbytes) {
    char frame[256] = {(char)nbytes};
    memcpy(frame + 4, map, nbytes);
    check(raw_send(c, frame, 4 + nbytes, NULL, 0));
    c->nframes++;
}

/* Whoever waits for a command is woken, also where the agent could not make sense of the rest. */
static void semaphores(rank *r) {
    static const char *const maps[] = {
        "\x82\xa4type\xa4Nope",     /* no such command */
        "\x82\xa4type\x07",         /* nor any other */
        "\x82\xa4type\xa8Transfer", /* fields are missing */
        "\x84\xa4type\xa8Transfer\xa8"
        "batch_id\xa1x\xadtransfer_type\xa8sideways", /* a choice is wrong */
        "\x83\xa4type\xa7Proceed\xa8"
        "batch_id\x07", /* and a type */
    };
    raw c;
    tb__message reply;
    char name[32], map[256];
    raw_greet(&c, seat_of(r)->path);
    for (size_t i = 0; i < sizeof maps / sizeof *maps; i++) {
        int n = snprintf(name, sizeof name, "/tb-test-%07d-%zu", (int)getpid() % 10000000, i);
        sem_t *semaphore = new_semaphore(name);
        int nbytes = snprintf(map, sizeof map, "%s\xaesemaphore_name%c%s", maps[i], 0xa0 | n, name);
        post_map(&c, map, (size_t)nbytes);
        check(raw_reply(&c, &reply) && reply.status == TB_INVALID);
        (void)raw_call(&c, &(tb__message){.kind = TB__INSPECT}); /* it comes after that */
        expect_posted(name, semaphore);
    }

    /* Where the agent keeps no promise: bytes that are no semaphore, which only their owner suffers from. */
    char file[64];
    unsigned char garbage[sizeof(sem_t)];
    memset(garbage, 0xff, sizeof garbage);
    snprintf(file, sizeof file, "/dev/shm/sem.%s", name + 1);
    int fd = open(file, O_CREAT | O_EXCL | O_WRONLY | O_CLOEXEC, 0600);
    check(fd >= 0 && write(fd, garbage, sizeof garbage) == (ssize_t)sizeof garbage);
    close(fd);
    check(raw_call(&c, &(tb__message){.kind = TB__INSPECT, .semaphore_name = name}).status == TB_OK);
    check(raw_call(&c, &(tb__message){.kind = TB__INSPECT}).status == TB_OK);
    check(access(file, F_OK) != 0);
    raw_close(&c);

    /* A stranger can't have any posted. */
    sem_t *semaphore = new_semaphore(name);
    int value = -1;
    raw_open(&c, seat_of(r)->path);
    check(raw_call(&c, &(tb__message){.kind = TB__INSPECT, .semaphore_name = name}).status == TB_INVALID);
    check(!raw_reply(&c, &reply));
    check(sem_getvalue(semaphore, &value) == 0 && value == 0);
    sem_close(semaphore);
    check(sem_unlink(name) == 0);
    raw_close(&c);
}

static void test_semaphores(void **state) {
    (void)state;
    run_agents(semaphores, 1, 0);
}

/* ---- Descriptors, answers -------------------------------------------------------------------------------------- */

static int count_files(void) {
    DIR *folder = opendir("/proc/self/fd");
    int count = 0;
    check(folder);
    while (readdir(folder))
        count++;
    closedir(folder);
    return count;
}

/* Waits for the agent to have given everything back. */
static void expect_files(int count) {
    int64_t deadline_ms = tb__now_ms() + PATIENCE_MS;
    while (count_files() != count && tb__now_ms() < deadline_ms)
        usleep(1000);
    check(count_files() == count);
}

static void strain(rank *r) {
    const char *path = seat_of(r)->path;
    int before = count_files(), fds[250];
    tb__message reply, query = {.kind = TB__QUERY_STATUS, .batch_id = "none"};
    raw c;

    /* More descriptors than a frame may have. */
    raw_greet(&c, path);
    for (int i = 0; i < 250; i++)
        fds[i] = STDIN_FILENO;
    for (int i = 0; i < 17 && raw_send(&c, "\1", 1, fds, 250); i++)
        continue;
    check(raw_reply(&c, &reply) && reply.status == TB_TOO_BIG && strstr(reply.message, "descriptors"));
    check(!raw_reply(&c, &reply));
    raw_close(&c);
    /* And some of a frame that never comes. */
    raw_greet(&c, path);
    check(raw_send(&c, "\x10", 1, fds, 250));
    raw_close(&c);
    expect_files(before);

    /* A file that is no semaphore. */
    char name[64], file[96];
    snprintf(name, sizeof name, "/tensorbus-test-%d-short", (int)getpid());
    snprintf(file, sizeof file, "/dev/shm/sem.%s", name + 1);
    int fd = open(file, O_CREAT | O_EXCL | O_WRONLY | O_CLOEXEC, 0600);
    check(fd >= 0);
    close(fd);
    raw_greet(&c, path);
    query.semaphore_name = name;
    check(raw_call(&c, &query).status == TB_INVALID);
    query.semaphore_name = "/../../etc/passwd";
    check(raw_call(&c, &query).status == TB_INVALID);
    query.semaphore_name = NULL;
    unlink(file);

    /* One that asks and asks, and never reads an answer. */
    tb__bytes frame = {0};
    check_ok(tb__message_encode(&query, &frame));
    check(fcntl(c.fd, F_SETFL, O_NONBLOCK) == 0);
    size_t sent = 0;
    struct pollfd writable = {.fd = c.fd, .events = POLLOUT};
    while (poll(&writable, 1, SOON_MS) == 1 && sent < (size_t)256 << 20) {
        ssize_t n = send(c.fd, frame.item, frame.count, MSG_NOSIGNAL);
        check(n > 0);
        sent += (size_t)n;
        if ((size_t)n < frame.count)
            break;
    }
    free(frame.item);
    check(sent < (size_t)256 << 20); /* the agent has stopped to read */
    program *other = open_client(r);
    program_close(other);
    raw_close(&c);
    expect_files(before);
}

static void test_strain(void **state) {
    (void)state;
    run_agents(strain, 1, 0);
}

int main(void) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_semaphores), cmocka_unit_test(test_strain)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
