/* The parent's side of the ranks: it forks them, has them do a step together, and sees to it that a rank that fails,
 * dies or hangs ends the case with a sentence. */
#include "base/process.h"
#include "tools/bench.h"

#include <errno.h>
#include <inttypes.h>
#include <linux/futex.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

enum {
    STEP_TIMEOUT_MS = 180000,
    LOOK_MS = 200,  /* how often the parent looks for ranks that died */
    GRACE_MS = 500, /* for others to tell what they saw of the same failure */
};

void bench_futex_wait(_Atomic uint32_t *word, uint32_t seen, int timeout_ms) {
    struct timespec timeout = tb__time_of_ms(timeout_ms);
    syscall(SYS_futex, word, FUTEX_WAIT, seen, &timeout, NULL, 0);
}

void bench_futex_wake(_Atomic uint32_t *word) {
    syscall(SYS_futex, word, FUTEX_WAKE, INT32_MAX, NULL, NULL, 0);
}

bench_rank_name bench_name_rank(const bench_case *c, int i) {
    bench_rank_name name;
    const char *side = c->is_local ? "both" : i < BENCH_SIDE ? "from" : "to";
    snprintf(name.text, sizeof name.text, "%s %d", side, i % BENCH_SIDE);
    return name;
}

tb_status bench_ranks_start(bench_ranks *ranks, const bench_job *job, bench_hand *hand, const char *folder) {
    *ranks = (bench_ranks){.job = job, .hand = hand, .folder = folder};
    void *page = mmap(NULL, sizeof *ranks->control, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (page == MAP_FAILED)
        return tb__fail(TB_NO_MEMORY, "can't map a page to share with ranks: %s", strerror(errno));
    ranks->control = page;
    pid_t parent = getpid();
    fflush(NULL);
    for (int n = job->c->is_local ? BENCH_SIDE : BENCH_MAX_RANKS; ranks->n < n; ranks->n++) {
        pid_t pid = fork();
        if (pid == 0)
            bench_rank_main(ranks, ranks->n, parent);
        if (pid < 0) {
            int error = errno;
            bench_ranks_stop(ranks);
            return tb__fail(TB_IO, "can't fork: %s", strerror(error));
        }
        ranks->pid[ranks->n] = pid;
    }
    return TB_OK;
}

/* TB_LOST, with a sentence, if a rank has ended. */
static tb_status look_for_dead(bench_ranks *ranks) {
    for (int i = 0; i < ranks->n; i++) {
        int how;
        if (ranks->pid[i] == 0 || waitpid(ranks->pid[i], &how, WNOHANG) != ranks->pid[i])
            continue;
        pid_t pid = ranks->pid[i];
        ranks->pid[i] = 0;
        bench_rank_name name = bench_name_rank(ranks->job->c, i);
        if (WIFSIGNALED(how))
            return tb__fail(TB_LOST, "rank '%s' (process %d) was ended by signal %d (%s)", name.text, (int)pid,
                            WTERMSIG(how), strsignal(WTERMSIG(how)));
        return tb__fail(TB_LOST, "rank '%s' (process %d) ended with status %d", name.text, (int)pid, WEXITSTATUS(how));
    }
    return TB_OK;
}

/* One is told of; a rank that only lost a peer only if nobody knows better. */
static tb_status find_failure(const bench_ranks *ranks) {
    int first = -1;
    for (int i = 0; i < ranks->n; i++) {
        tb_status status = ranks->control->slot[i].status;
        bool is_better = first >= 0 && ranks->control->slot[first].status == TB_LOST && status != TB_LOST;
        if (status != TB_OK && (first < 0 || is_better))
            first = i;
    }
    if (first < 0)
        return TB_OK;
    const bench_slot *slot = &ranks->control->slot[first];
    return tb__fail(slot->status, "rank '%s': %.*s", bench_name_rank(ranks->job->c, first).text,
                    (int)sizeof slot->sentence, slot->sentence);
}

static tb_status tell_who_is_late(const bench_ranks *ranks) {
    char who[256] = "";
    for (int i = 0; i < ranks->n; i++) {
        size_t used = strlen(who);
        if (ranks->control->slot[i].finished_ns == 0)
            snprintf(who + used, sizeof who - used, "%s'%s'", used ? ", " : "", bench_name_rank(ranks->job->c, i).text);
    }
    return tb__fail(TB_TIMEOUT, "not ready after %d seconds: %s", STEP_TIMEOUT_MS / 1000, who);
}

static bool has_failure(const bench_ranks *ranks) {
    for (int i = 0; i < ranks->n; i++) {
        if (__atomic_load_n(&ranks->control->slot[i].status, __ATOMIC_ACQUIRE) != TB_OK)
            return true;
    }
    return false;
}

static tb_status wait_for_all(bench_ranks *ranks) {
    bench_control *control = ranks->control;
    int64_t deadline = tb__now_ms() + STEP_TIMEOUT_MS;
    bool is_cut_short = false;
    for (;;) {
        uint32_t ndone = control->ndone;
        if (ndone == (uint32_t)ranks->n)
            return find_failure(ranks);
        TB_TRY(bench_signals_check());
        if (tb__now_ms() >= deadline)
            return has_failure(ranks) ? find_failure(ranks) : tell_who_is_late(ranks);
        if (has_failure(ranks) && !is_cut_short) {
            deadline = tb__now_ms() + GRACE_MS;
            is_cut_short = true;
        }
        TB_TRY(look_for_dead(ranks));
        int left = tb__ms_until(deadline);
        bench_futex_wait(&control->ndone, ndone, left < LOOK_MS ? left : LOOK_MS);
    }
}

tb_status bench_ranks_step(bench_ranks *ranks, bench_step step, double *seconds) {
    bench_control *control = ranks->control;
    TB_TRY(bench_signals_check());
    for (int i = 0; i < ranks->n; i++)
        control->slot[i].finished_ns = 0;
    control->step = step;
    control->ndone = 0;
    int64_t start = bench_now_ns(), end = start;
    control->turn++;
    bench_futex_wake(&control->turn);
    TB_TRY(wait_for_all(ranks));
    for (int i = 0; i < ranks->n; i++)
        end = control->slot[i].finished_ns > end ? control->slot[i].finished_ns : end;
    if (seconds)
        *seconds = 1e-9 * (double)(end - start);
    return TB_OK;
}

int64_t bench_ranks_memory(const bench_ranks *ranks) {
    int64_t total = 0;
    for (int i = 0; i < ranks->n; i++) {
        char line[256], path[64];
        snprintf(path, sizeof path, "/proc/%d/smaps_rollup", (int)ranks->pid[i]);
        FILE *file = fopen(path, "re");
        int64_t kib = -1;
        while (file && kib < 0 && fgets(line, sizeof line, file)) {
            if (sscanf(line, "Pss: %" SCNd64, &kib) != 1)
                kib = -1;
        }
        if (file)
            fclose(file);
        if (kib < 0)
            return -1;
        total += kib * 1024;
    }
    return total;
}

void bench_ranks_stop(bench_ranks *ranks) {
    for (int i = 0; i < ranks->n; i++) {
        if (ranks->pid[i] > 0)
            kill(ranks->pid[i], SIGKILL);
    }
    for (int i = 0; i < ranks->n; i++) {
        while (ranks->pid[i] > 0 && waitpid(ranks->pid[i], NULL, 0) < 0 && errno == EINTR)
            continue;
    }
    if (ranks->control)
        munmap(ranks->control, sizeof *ranks->control);
    *ranks = (bench_ranks){0};
}
