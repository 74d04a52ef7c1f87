/* Runs a check in a child process, because it may hang or crash. */
#include "tools/doctor.h"

#include "base/process.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

enum { PATIENCE_MS = 20000 };

static _Noreturn void be_child(bool (*look)(const void *arg, int out), const void *arg, int out, pid_t parent) {
    int null = open("/dev/null", O_RDWR | O_CLOEXEC);
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (null >= 0) {
        dup2(null, STDIN_FILENO);
        dup2(null, STDOUT_FILENO);
        dup2(null, STDERR_FILENO);
    }
    _exit(getppid() == parent && look(arg, out) ? 0 : 1);
}

/* Reads to the end, and discards what exceeds the buffer. False at the deadline. */
static bool read_all(int fd, char *out) {
    int64_t deadline = tb__now_ms() + PATIENCE_MS;
    size_t count = 0;
    out[0] = '\0';
    for (;;) {
        char piece[512];
        struct pollfd waiting = {.fd = fd, .events = POLLIN};
        int n = poll(&waiting, 1, tb__ms_until(deadline));
        if (n < 0 && errno == EINTR)
            continue;
        if (n <= 0)
            return false;
        ssize_t got = read(fd, piece, sizeof piece);
        if (got < 0 && errno == EINTR)
            continue;
        if (got <= 0)
            return true;
        size_t room = DOCTOR_SAID - 1 - count, kept = (size_t)got < room ? (size_t)got : room;
        memcpy(out + count, piece, kept);
        count += kept;
        out[count] = '\0';
    }
}

static void wait_for(pid_t pid, bool is_over, doctor_answer *out) {
    int how = 0;
    if (!is_over)
        kill(pid, SIGKILL);
    while (waitpid(pid, &how, 0) < 0 && errno == EINTR)
        continue;
    out->is_ok = is_over && WIFEXITED(how) && WEXITSTATUS(how) == 0;
    if (!is_over)
        snprintf(out->said, sizeof out->said, "it has not come to an end after %d s", PATIENCE_MS / 1000);
    else if (WIFSIGNALED(how))
        snprintf(out->said, sizeof out->said, "it was ended by signal %d (%s)", WTERMSIG(how),
                 strsignal(WTERMSIG(how)));
}

void doctor_probe(bool (*look)(const void *arg, int out), const void *arg, doctor_answer *out) {
    int ends[2];
    *out = (doctor_answer){.is_ok = false};
    if (pipe2(ends, O_CLOEXEC) != 0) {
        snprintf(out->said, sizeof out->said, "can't make a pipe: %s", strerror(errno));
        return;
    }
    pid_t parent = getpid(), pid = fork();
    if (pid == 0)
        be_child(look, arg, ends[1], parent);
    int error = errno;
    close(ends[1]);
    if (pid > 0)
        wait_for(pid, read_all(ends[0], out->said), out);
    else
        snprintf(out->said, sizeof out->said, "can't fork: %s", strerror(error));
    close(ends[0]);
}
