/* tensorbus demo: a model goes from a trainer to an inference engine, between processes, and every element that arrives
 * is verified. */
#include "tools/demo.h"

#include <dirent.h>
#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

enum { SIZE, RANKS, SRC, DST, NOPTIONS };

static const tool_option options[NOPTIONS + 1] = {
    [SIZE] = {"size", "SIZE", "size of the model, such as 64MiB; 1GiB by default"},
    [RANKS] = {"ranks", "N[,M]", "processes of the source, and of the target; 4 by default"},
    [SRC] = {"src", "LAYOUT", "how the source is laid out, as in 'mesh=4 place=Shard(0)', which is the default"},
    [DST] = {"dst", "LAYOUT", "how the target is laid out; by default every weight as suits tensor parallelism"},
};

static const char details[] =
    "Forks the processes of a trainer and of an inference engine, which meet through a store in a temporary\n"
    "folder. The trainer has a model shaped like a small Llama, cut by rows over its ranks, as FSDP does. The\n"
    "engine wants it tensor parallel and, from 4 ranks on, twice over (data parallel). Three versions are sent.\n"
    "Each element has a value that tells its version, its tensor and its place; targets hold wrong values before\n"
    "a version comes, and every element is verified after it, on every rank. The first that is wrong is named.\n"
    "\n"
    "A layout that is given holds for all weights; norms are vectors, and are replicated where it cuts a\n"
    "second dimension. Its ranks are the processes of its side, from 0. See `tensorbus layout --help`.\n"
    "\n"
    "The time runs from when all ranks are ready until the last target has its data; the phases are those of\n"
    "the slowest rank, in ms; memcpy is measured when the transfers are over, by a thread per core.\n";

static const int64_t default_size = INT64_C(1) << 30;

static tb_status read_ranks(const char *text, int32_t nranks[TOOL_NSIDES]) {
    const char *at = text;
    int64_t n[TOOL_NSIDES];
    bool is_good = tb__read_int(&at, &n[TOOL_SOURCE]);
    n[TOOL_TARGET] = n[TOOL_SOURCE];
    if (is_good && tb__accept(&at, ','))
        is_good = tb__read_int(&at, &n[TOOL_TARGET]);
    tb__skip_space(&at);
    for (int i = 0; i < TOOL_NSIDES; i++)
        is_good = is_good && n[i] >= 1 && n[i] <= TOOL_MAX_SIDE;
    if (!is_good || *at)
        return tb__fail(TB_INVALID, "'%.40s' is not N or N,M, each between 1 and %d", text, TOOL_MAX_SIDE);
    nranks[TOOL_SOURCE] = (int32_t)n[TOOL_SOURCE];
    nranks[TOOL_TARGET] = (int32_t)n[TOOL_TARGET];
    return TB_OK;
}

static tb_status read_options(tool_job *job, const char *const *value) {
    int32_t nranks[TOOL_NSIDES] = {0};
    int64_t size = default_size;
    tb_status status = value[SIZE] ? tb__read_size(value[SIZE], &size) : TB_OK;
    if (status == TB_OK)
        status = tool_model_init(&job->model, size);
    if (status != TB_OK)
        return tb__fail_within(status, "--size");
    status = value[RANKS] ? read_ranks(value[RANKS], nranks) : TB_OK;
    if (status != TB_OK)
        return tb__fail_within(status, "--ranks");
    for (int which = 0; which < TOOL_NSIDES; which++) {
        int option = which == TOOL_SOURCE ? SRC : DST;
        status = tool_side_init(&job->side[which], which, value[option], nranks[which]);
        if (status != TB_OK)
            return tb__fail_within(status, "--%s", options[option].name);
    }
    return tool_sides_check(job->side, &job->model);
}

/* What can be had without pushing others out; 0: not known. */
static int64_t available_memory(void) {
    char line[128];
    int64_t kib = 0;
    FILE *file = fopen("/proc/meminfo", "re");
    while (file && kib == 0 && fgets(line, sizeof line, file)) {
        const char *at = line + strlen("MemAvailable:");
        if (strncmp(line, "MemAvailable:", strlen("MemAvailable:")) == 0 && !tb__read_int(&at, &kib))
            kib = 0;
    }
    if (file)
        fclose(file);
    return kib * 1024;
}

/* What every rank holds, and whether there is room for all of it. */
static tb_status weigh_parts(tool_job *job) {
    int64_t total = 0, available = available_memory();
    job->nranks = job->side[TOOL_SOURCE].nranks + job->side[TOOL_TARGET].nranks;
    job->nbytes = tb__calloc((size_t)job->nranks, sizeof *job->nbytes);
    if (!job->nbytes)
        return TB_NO_MEMORY;
    for (int rank = 0; rank < job->nranks; rank++) {
        int32_t seat;
        int which = tool_job_side(job, rank, &seat);
        tool_parts parts;
        TB_TRY(tool_parts_init(&parts, &job->model, &job->side[which], seat));
        job->nbytes[rank] = parts.nelements * TOOL_ELEMENT;
        total = parts.nbytes > INT64_MAX - total ? INT64_MAX : total + parts.nbytes;
        tool_parts_fini(&parts);
    }
    if (available > 0 && total > available)
        return tb__fail(TB_TOO_BIG, "the ranks would hold %s together, but only %s of memory are free",
                        tool_size(total).text, tool_size(available).text);
    int64_t patience_ms = 30000 + total / 100000; /* 100 MB/s is slower than any machine that has room for it */
    job->timeout_ms = (int)(patience_ms < 3600000 ? patience_ms : 3600000);
    return TB_OK;
}

static void fini_job(tool_job *job) {
    for (int which = 0; which < TOOL_NSIDES; which++)
        tool_side_fini(&job->side[which]);
    tool_model_fini(&job->model);
    free(job->nbytes);
}

/* The folder that the store's socket is in, and whatever else is put there. */

static tb_status make_folder(char *path, size_t size) {
    const char *base = getenv("TMPDIR");
    int length = snprintf(path, size, "%s/tensorbus-demo-XXXXXX", base && *base ? base : "/tmp");
    if (length < 0 || (size_t)length >= size)
        return tb__fail(TB_INVALID, "TMPDIR is too long for the name of a socket: %.200s", base);
    if (!mkdtemp(path))
        return tb__fail(TB_IO, "can't make a folder %s: %s", path, strerror(errno));
    return TB_OK;
}

static void remove_folder(const char *path) {
    DIR *folder = opendir(path);
    for (struct dirent *entry; folder && (entry = readdir(folder));)
        unlinkat(dirfd(folder), entry->d_name, 0); /* . and .. are directories, which it leaves */
    if (folder)
        closedir(folder);
    rmdir(path);
}

/* The moving line. */

static bool is_shown(void) {
    const char *terminal = getenv("TERM");
    return isatty(STDOUT_FILENO) && terminal && strcmp(terminal, "dumb") != 0;
}

static void show_line(const char *line) {
    if (!is_shown())
        return;
    printf("\r\033[K%s", line);
    fflush(stdout);
}

static void show_progress(void *arg) {
    const tool_job *job = arg;
    tb__text line = {0};
    tool_add_progress(&line, job);
    show_line(line.data ? line.data : "");
    tb__text_fini(&line);
}

static void pass_on(void *arg, const char *name, char *line) {
    (void)arg;
    show_line("");
    tool_fail(TOOL_FAILED, "%s: %s", name, line);
}

static tb_status run_ranks(tool_job *job, tool_guard *guard) {
    tb__arena arena = {0};
    const char **names = tb__arena_alloc(&arena, (size_t)job->nranks, sizeof *names);
    tb_status status = names ? TB_OK : TB_NO_MEMORY;
    for (int rank = 0; rank < job->nranks && status == TB_OK; rank++) {
        enum { LONGEST = 32 };
        int32_t seat;
        int which = tool_job_side(job, rank, &seat);
        char *name = tb__arena_alloc(&arena, LONGEST, 1);
        if (name)
            snprintf(name, LONGEST, "%s %" PRId32, job->side[which].group, seat);
        else
            status = TB_NO_MEMORY;
        names[rank] = name;
    }
    if (status == TB_OK) {
        tool_crew crew = {.nranks = job->nranks,
                          .names = names,
                          .work = tool_rank_work,
                          .tick = show_progress,
                          .said = pass_on,
                          .arg = job};
        status = tool_crew_run(&crew, guard);
        show_line("");
    }
    tb__arena_fini(&arena);
    return status;
}

static tb_status run_in_folder(tool_job *job, tool_guard *guard) {
    char folder[sizeof job->url - sizeof "unix:/store"];
    TB_TRY(make_folder(folder, sizeof folder));
    snprintf(job->url, sizeof job->url, "unix:%s/store", folder);
    tb_status status = run_ranks(job, guard);
    remove_folder(folder);
    return status;
}

/* All ranks said that they verified all they got; this looks whether that was all there is. */
static tb_status check_count(const tool_job *job) {
    int64_t nverified = 0, expected = tool_job_delivered(job) / TOOL_ELEMENT * TOOL_NVERSIONS;
    for (int rank = 0; rank < job->nranks; rank++)
        nverified += job->shared->rank[rank].nverified;
    if (nverified != expected)
        return tb__fail(TB_INTERNAL, "%" PRId64 " elements were verified instead of %" PRId64, nverified, expected);
    return TB_OK;
}

static tb_status run_job(tool_job *job, tool_guard *guard, tb__text *out) {
    size_t nbytes = sizeof(tool_shared) + (size_t)job->nranks * sizeof(tool_rank_state);
    void *shared;
    TB_TRY(tool_share(nbytes, &shared));
    job->shared = shared;
    job->shared->barrier.count = (uint32_t)job->nranks;
    double rate = 0;
    int nthreads = 0;
    tb_status status = run_in_folder(job, guard);
    if (status == TB_OK)
        status = check_count(job);
    if (status == TB_OK)
        status = tool_measure_memcpy(tool_job_delivered(job), &rate, &nthreads);
    if (status == TB_OK)
        tool_add_job(out, job, rate, nthreads);
    tool_unshare(shared, nbytes);
    return status;
}

static int run(const tb__config *config, const char *const *value) {
    tool_job job = {.config = config};
    tool_guard guard;
    tb__text out = {0};
    tb_status status = read_options(&job, value);
    if (status == TB_OK)
        status = weigh_parts(&job);
    if (status == TB_OK)
        status = tool_guard_init(&guard);
    if (status != TB_OK) {
        fini_job(&job);
        return tool_fail_status(status);
    }
    status = run_job(&job, &guard, &out);
    fini_job(&job);
    int exit_status = status == TB_OK ? tool_print(&out) : tool_fail_status(status);
    tool_guard_fini(&guard);
    return exit_status;
}

const tool_command tool_demo = {
    .name = "demo",
    .summary = "move a model from a trainer to an inference engine and verify every element",
    .usage = "[--size SIZE] [--ranks N[,M]] [--src LAYOUT] [--dst LAYOUT]",
    .details = details,
    .options = options,
    .run = run,
};
