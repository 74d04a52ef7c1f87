/* How fast others do what row_col and tiny do. Their programs are files beside the tool; what they need may not be
 * there, which is told in one line and is no failure. */
#include "base/descriptors.h"
#include "base/process.h"
#include "bench/bench.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

enum { PEER_TIMEOUT_MS = 300000, LOOK_MS = 200, NOT_FOUND = 127 };

/* From the folder of the tool: where `cmake --install` puts the programs, and where they are in the source tree and in
 * the build's folder. */
static const char *const places[] = {TB_PEERS_INSTALLED, "../../bench/peers", "../../tests/hosts", "bench"};

bool bench_find_file(const char *name, char *path, size_t size) {
    char tool[512];
    ssize_t length = readlink("/proc/self/exe", tool, sizeof tool - 1);
    if (length < 0)
        return false;
    tool[length] = '\0';
    char *slash = strrchr(tool, '/');
    if (slash)
        *slash = '\0';
    for (size_t i = 0; i < sizeof places / sizeof *places; i++) {
        int n = snprintf(path, size, "%s/%s/%s", tool, places[i], name);
        if (n > 0 && (size_t)n < size && access(path, R_OK) == 0)
            return true;
    }
    return false;
}

typedef struct place {
    char folder[80]; /* for what the program writes */
    tool_guard *guard;
} place;

static _Noreturn void become(const char *const *argv, int out, int err, const place *where, pid_t parent) {
    /* For Open MPI, which refuses root, and more ranks than cores, unless told otherwise; others ignore them. */
    static const char *const settings[][2] = {
        {"OMPI_ALLOW_RUN_AS_ROOT", "1"},
        {"OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1"},
        {"OMPI_MCA_rmaps_base_oversubscribe", "1"},
        {"PRTE_MCA_rmaps_default_mapping_policy", ":oversubscribe"},
    };
    prctl(PR_SET_PDEATHSIG, SIGTERM);
    setpgid(0, 0);
    tool_guard_drop(where->guard);
    signal(SIGPIPE, SIG_DFL);
    for (size_t i = 0; i < sizeof settings / sizeof *settings; i++)
        setenv(settings[i][0], settings[i][1], 1);
    setenv("TMPDIR", where->folder, 1);
    int in = open("/dev/null", O_RDONLY | O_CLOEXEC);
    if (getppid() == parent && in >= 0 && dup2(in, STDIN_FILENO) >= 0 && dup2(out, STDOUT_FILENO) >= 0 &&
        dup2(err, STDERR_FILENO) >= 0)
        execvp(argv[0], (char *const *)argv);
    _exit(NOT_FOUND);
}

/* Ends the program, if it is not over, and what it started; softly first, so that it can take its own files away. The
 * group is killed before its leader is reaped, while nobody else can have its number. Returns what waitpid tells. */
static int end_program(pid_t pid, bool is_over) {
    enum { PATIENCE_MS = 5000, NAP_MS = 20 };
    int how = 0;
    if (!is_over)
        kill(-pid, SIGTERM);
    for (int waited = 0; waited < PATIENCE_MS; waited += NAP_MS) {
        siginfo_t about = {0};
        if (waitid(P_PID, (id_t)pid, &about, WEXITED | WNOHANG | WNOWAIT) == 0 && about.si_pid == pid)
            break;
        poll(NULL, 0, NAP_MS);
    }
    kill(-pid, SIGKILL);
    while (waitpid(pid, &how, 0) < 0 && errno == EINTR)
        continue;
    return how;
}

/* What a program says, and what it complains of: warnings must not get between its figures. */
typedef struct words {
    tb__text said, complaints;
} words;

static void words_clear(words *w) {
    tb__text_fini(&w->said);
    tb__text_fini(&w->complaints);
    *w = (words){0};
}

/* Takes what is there. -1 in *fd once that was the end. */
static tb_status listen_once(int *fd, tb__text *said) {
    char piece[4096];
    ssize_t n = read(*fd, piece, sizeof piece);
    if (n > 0)
        tb__text_add(said, "%.*s", (int)n, piece);
    else if (n == 0)
        *fd = -1;
    else if (errno != EINTR)
        return tb__fail(TB_IO, "can't read what it says: %s", strerror(errno));
    return TB_OK;
}

/* Adds what the program says until it closes its outputs. */
static tb_status listen_to(int out, int err, tool_guard *guard, words *w) {
    int64_t deadline = tb__now_ms() + PEER_TIMEOUT_MS;
    while (out >= 0 || err >= 0) {
        struct pollfd waiting[] = {
            {.fd = out, .events = POLLIN}, {.fd = err, .events = POLLIN}, {.fd = guard->fd, .events = POLLIN}};
        TB_TRY(tool_guard_check(guard));
        if (tb__now_ms() >= deadline)
            return tb__fail(TB_TIMEOUT, "not done after %d seconds", PEER_TIMEOUT_MS / 1000);
        if (poll(waiting, 3, LOOK_MS) <= 0)
            continue;
        if (waiting[0].revents)
            TB_TRY(listen_once(&out, &w->said));
        if (waiting[1].revents)
            TB_TRY(listen_once(&err, &w->complaints));
    }
    return TB_OK;
}

static tb_status run_between(const char *const *argv, const place *where, const int out[2], const int err[2], words *w,
                             int *how) {
    pid_t parent = getpid(), pid = fork();
    if (pid == 0)
        become(argv, out[1], err[1], where, parent);
    int error = errno;
    close(out[1]);
    close(err[1]);
    if (pid < 0)
        return tb__fail(TB_IO, "can't fork: %s", strerror(error));
    setpgid(pid, pid); /* here too, because either may come first */
    tb_status status = listen_to(out[0], err[0], where->guard, w);
    *how = end_program(pid, status == TB_OK);
    return status;
}

/* Runs a program to its end; *how is what waitpid tells of it. */
static tb_status run_program(const char *const *argv, const place *where, words *w, int *how) {
    int out[2], err[2];
    if (pipe2(out, O_CLOEXEC) != 0)
        return tb__fail(TB_IO, "can't make a pipe: %s", tb__errno_text(errno));
    if (pipe2(err, O_CLOEXEC) != 0) {
        tb_status status = tb__fail(TB_IO, "can't make a pipe: %s", tb__errno_text(errno));
        close(out[0]);
        close(out[1]);
        return status;
    }
    tb_status status = run_between(argv, where, out, err, w, how);
    close(out[0]);
    close(err[0]);
    return status;
}

/* The last line that is not empty: the cause, as programs go. */
static void add_last_line(tb__text *out, const tb__text *said) {
    size_t end = said->count;
    while (end > 0 && strchr(" \n\r-", said->data[end - 1]))
        end--;
    size_t start = end;
    while (start > 0 && said->data[start - 1] != '\n')
        start--;
    tb__text_add(out, "%.*s", end - start < 300 ? (int)(end - start) : 300, said->data ? said->data + start : "");
}

static tb_status try_program(const char *const *argv, const place *where, const char *missing, tb__text *said,
                             tb__text *reason) {
    int how = 0;
    words w = {0};
    tb_status status = run_program(argv, where, &w, &how);
    if (status == TB_CANCELLED || status == TB_NO_MEMORY) {
        words_clear(&w);
        return status;
    }
    if (status != TB_OK) {
        tb__text_add(reason, "%s: %s", argv[0], tb_error_detail());
    } else if (WIFEXITED(how) && WEXITSTATUS(how) == NOT_FOUND) {
        tb__text_add(reason, "%s", missing);
    } else if (!WIFEXITED(how) || WEXITSTATUS(how) != 0) {
        tb__text_add(reason, "%s failed: ", argv[0]);
        add_last_line(reason, w.complaints.count ? &w.complaints : &w.said);
    }
    tb__text_fini(said);
    *said = w.said;
    w.said = (tb__text){0};
    words_clear(&w);
    return TB_OK;
}

tb_status bench_program_run(const char *const *argv, const char *folder, tool_guard *guard, const char *missing,
                            tb__text *said, tb__text *reason) {
    place where = {.guard = guard};
    snprintf(where.folder, sizeof where.folder, "%s", folder);
    return try_program(argv, &where, missing, said, reason);
}

typedef struct figures {
    char rows[24], columns[24], rounds[24];
} figures;

static tb_status run_mpi(const char *program, const place *where, const figures *f, tb__text *said, tb__text *reason) {
    static const char missing[] = "MPI is not installed: apt-get install openmpi-bin libopenmpi-dev";
    char binary[128];
    snprintf(binary, sizeof binary, "%s/row_col_mpi", where->folder);
    const char *const compile[] = {"mpicc", "-O3", "-o", binary, program, NULL};
    const char *const start[] = {"mpirun", "-np", "8", binary, f->rows, f->columns, f->rounds, NULL};
    TB_TRY(try_program(compile, where, missing, said, reason));
    return reason->count > 0 ? TB_OK : try_program(start, where, missing, said, reason);
}

static tb_status run_torch(const char *program, const place *where, const figures *f, tb__text *said,
                           tb__text *reason) {
    static const char missing[] = "python3 with torch is not installed: pip install torch";
    static const char look[] = "import sys, importlib.util\nsys.exit(0 if importlib.util.find_spec('torch') else 127)";
    const char *const ask[] = {"python3", "-c", look, NULL};
    const char *const start[] = {"python3", program, f->rows, f->columns, f->rounds, NULL};
    TB_TRY(try_program(ask, where, missing, said, reason));
    return reason->count > 0 ? TB_OK : try_program(start, where, missing, said, reason);
}

static const struct {
    const char *name, *work, *program;
    tb_status (*run)(const char *, const place *, const figures *, tb__text *, tb__text *);
    const char *line;
    double at_least;
} peers[BENCH_NPEERS] = {
    {"row_col_mpi", "row_col by MPI_Alltoallw", "row_col_mpi.c", run_mpi, "row_col", 0},
    {"row_col_gloo", "row_col by torch.distributed with Gloo", "row_col_gloo.py", run_torch, "row_col", 0},
    {"tiny_torch", "tiny, next to slice copies of PyTorch", "tiny_torch.py", run_torch, BENCH_TINY, 10},
};

static bool find_rate(const tb__text *said, bench_peer_result *out) {
    const char *line = said->data ? strstr(said->data, "GB/s ") : NULL;
    return line && sscanf(line, "GB/s %lf", &out->gb_per_s) == 1 && out->gb_per_s > 0;
}

static tb_status run_peer(int i, const figures *f, const place *where, bench_peer_result *out) {
    char program[640];
    tb__text said = {0}, reason = {0};
    tb_status status = TB_OK;
    if (bench_find_file(peers[i].program, program, sizeof program))
        status = peers[i].run(program, where, f, &said, &reason);
    else
        tb__text_add(&reason, "%s is not where it was installed", peers[i].program);
    if (status == TB_OK && reason.count == 0 && !find_rate(&said, out))
        tb__text_add(&reason, "it told no rate");
    if (status == TB_OK && reason.count > 0)
        status = tb__text_take(&reason, &out->reason);
    tb__text_fini(&said);
    tb__text_fini(&reason);
    return status;
}

bench_peer_result bench_peer_of(int i) {
    return (bench_peer_result){
        .name = peers[i].name, .work = peers[i].work, .line = peers[i].line, .at_least = peers[i].at_least};
}

/* What our line moves: a matrix, or so many tensors of so many bytes. */
static tb_status measure_work(const char *line, int64_t size, figures *f) {
    tool_job job;
    int64_t unused;
    TB_TRY(bench_job_init(bench_case_of(line), size, &job, &unused));
    const tb_shape *shape = &job.tensors.item[0].shape;
    bool is_many = job.tensors.count > 1 || shape->ndim == 1;
    snprintf(f->rows, sizeof f->rows, "%" PRId64, is_many ? (int64_t)job.tensors.count : shape->dim[0]);
    snprintf(f->columns, sizeof f->columns, "%" PRId64, is_many ? shape->dim[0] * 4 : shape->dim[1]);
    tool_job_fini(&job);
    return TB_OK;
}

tb_status bench_peer_run(int i, int64_t size, int rounds, tool_guard *guard, bench_peer_result *out) {
    place where = {.guard = guard};
    figures f;
    TB_TRY(measure_work(peers[i].line, size, &f));
    snprintf(f.rounds, sizeof f.rounds, "%d", rounds);
    TB_TRY(tool_folder_make(where.folder, sizeof where.folder));
    tb_status status = run_peer(i, &f, &where, out);
    tool_folder_remove(where.folder);
    return status;
}
