/* Several hosts for `tensorbus bench --hosts`: the namespaces of tests/hosts/bed, which stay for as long as a program
 * that it runs has its standard input. So they go when this process does, however it ends. */
#include "bench/bench.h"

#include "base/descriptors.h"
#include "base/process.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/mount.h>
#include <sys/wait.h>
#include <unistd.h>

enum { START_MS = 60000, STOP_MS = 30000, LOOK_MS = 100 };

static _Noreturn void become_bed(const char *script, const char *count, int in, int out, const tool_guard *guard) {
    static const char hold[] = "env | grep ^BED; echo ready; exec cat >/dev/null";
    setpgid(0, 0);
    tool_guard_drop(guard);
    signal(SIGPIPE, SIG_DFL);
    if (dup2(in, STDIN_FILENO) >= 0 && dup2(out, STDOUT_FILENO) >= 0 && dup2(out, STDERR_FILENO) >= 0)
        execl(script, script, count, "--", "sh", "-c", hold, (char *)NULL);
    _exit(1);
}

/* One "BED_ADDR_0=10.77.0.1": for the script, when it is called again, and for us. */
static void take_variable(bench_bed *bed, char *line) {
    char *equals = strchr(line, '=');
    int i;
    if (!equals)
        return;
    *equals = '\0';
    setenv(line, equals + 1, 1);
    if (sscanf(line, "BED_HOST_%d", &i) == 1 && i >= 0 && i < BENCH_MAX_HOSTS)
        snprintf(bed->host[i], sizeof bed->host[i], "%s", equals + 1);
    else if (sscanf(line, "BED_ADDR_%d", &i) == 1 && i >= 0 && i < BENCH_MAX_HOSTS)
        snprintf(bed->address[i], sizeof bed->address[i], "%s", equals + 1);
}

/* What is neither a variable nor the end of them may be a warning of the shell's, or why there are no hosts: the end
 * tells. */
static tb_status read_variables(bench_bed *bed, int fd, tool_guard *guard) {
    char line[512], said[512] = "there are no hosts";
    size_t length = 0;
    int64_t deadline = tb__now_ms() + START_MS;
    while (tb__now_ms() < deadline) {
        struct pollfd waiting = {.fd = fd, .events = POLLIN};
        TB_TRY(tool_guard_check(guard));
        if (poll(&waiting, 1, LOOK_MS) <= 0)
            continue;
        ssize_t n = read(fd, line + length, 1);
        if (n <= 0 && errno == EINTR)
            continue;
        if (n <= 0)
            return tb__fail(TB_REFUSED, "%s", length ? line : said);
        line[length + 1] = '\0';
        if (line[length] != '\n') {
            length += length + 2 < sizeof line;
            continue;
        }
        line[length] = '\0';
        if (strcmp(line, "ready") == 0)
            return TB_OK;
        if (strncmp(line, "BED", 3) == 0)
            take_variable(bed, line);
        else
            snprintf(said, sizeof said, "%s", line);
        length = 0;
    }
    return tb__fail(TB_TIMEOUT, "the hosts are not there after %d s", START_MS / 1000);
}

static tb_status start(bench_bed *bed, int count, tool_guard *guard) {
    int in[2], out[2];
    char number[16];
    snprintf(number, sizeof number, "%d", count);
    if (pipe2(in, O_CLOEXEC) != 0)
        return tb__fail(TB_IO, "can't make a pipe: %s", tb__errno_text(errno));
    bed->input = in[1];
    if (pipe2(out, O_CLOEXEC) != 0) {
        close(in[0]);
        return tb__fail(TB_IO, "can't make a pipe: %s", tb__errno_text(errno));
    }
    bed->pid = fork();
    if (bed->pid == 0)
        become_bed(bed->script, number, in[0], out[1], guard);
    close(in[0]);
    close(out[1]);
    tb_status status =
        bed->pid < 0 ? tb__fail(TB_IO, "can't fork: %s", strerror(errno)) : read_variables(bed, out[0], guard);
    close(out[0]);
    return status;
}

tb_status bench_bed_start(bench_bed *bed, int count, tool_guard *guard) {
    *bed = (bench_bed){.pid = -1, .input = -1, .count = count};
    if (geteuid() != 0)
        return tb__fail(TB_DENIED, "--hosts makes network namespaces, which takes root");
    if (!bench_find_file("bed", bed->script, sizeof bed->script))
        return tb__fail(TB_IO, "bed, which makes the hosts, is not where it was installed");
    tb_status status = start(bed, count, guard);
    if (status != TB_OK)
        bench_bed_stop(bed);
    return status;
}

void bench_bed_stop(bench_bed *bed) {
    if (bed->input >= 0)
        close(bed->input);
    int64_t deadline = tb__now_ms() + STOP_MS;
    while (bed->pid > 0) {
        pid_t ended = waitpid(bed->pid, NULL, WNOHANG);
        if (ended == bed->pid || (ended < 0 && errno != EINTR))
            break;
        if (tb__now_ms() >= deadline)
            kill(bed->pid, SIGTERM);
        poll(NULL, 0, LOOK_MS);
    }
    bed->pid = -1;
    bed->input = -1;
}

/* /sys shows the network devices of the namespace that it was mounted in. */
tb_status bench_bed_enter(const bench_bed *bed, int host) {
    char path[96];
    const char *name = bed->host[host];
    snprintf(path, sizeof path, "/run/netns/%s", name);
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    bool is_in = fd >= 0 && setns(fd, CLONE_NEWNET) == 0 && unshare(CLONE_NEWNS | CLONE_NEWUTS) == 0 &&
                 mount("", "/", "none", MS_SLAVE | MS_REC, NULL) == 0 && umount2("/sys", MNT_DETACH) == 0 &&
                 mount(name, "/sys", "sysfs", 0, NULL) == 0 && sethostname(name, strlen(name)) == 0;
    int error = errno;
    if (fd >= 0)
        close(fd);
    return is_in ? TB_OK : tb__fail(TB_IO, "can't enter host %s: %s", name, strerror(error));
}

tb_status bench_bed_sent(const bench_bed *bed, int host, tool_guard *guard, int64_t *nbytes) {
    char number[16];
    snprintf(number, sizeof number, "%d", host);
    const char *const argv[] = {bed->script, "sent", number, NULL};
    tb__text said = {0}, reason = {0};
    tb_status status = bench_program_run(argv, "/tmp", guard, "", &said, &reason);
    long long count = 0;
    if (status == TB_OK && (reason.count || !said.data || sscanf(said.data, "%lld", &count) != 1))
        status = tb__fail(TB_IO, "bytes sent by host %d: %s", host, reason.count ? reason.data : "not told");
    *nbytes = count;
    tb__text_fini(&said);
    tb__text_fini(&reason);
    return status;
}
