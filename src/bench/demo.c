/* tensorbus demo: a model goes from a trainer to an inference engine, between processes, and every element that arrives
 * is verified. */
#include "bench/demo.h"

#include "base/descriptors.h"
#include "layout/layout.h"
#include "tools/gpu.h"

#include <inttypes.h>
#include <stdio.h>

enum { SIZE, RANKS, SRC, DST, STAGED, CHECKSUM, BUS, GPU, NOPTIONS };

static const tool_option options[NOPTIONS + 1] = {
    [SIZE] = {"size", "SIZE", "size of the model, such as 64MiB; default: 1GiB, with --bus 256MiB"},
    [RANKS] = {"ranks", "N[,M]", "processes of the source, and of the target; default: 4"},
    [SRC] = {"src", "LAYOUT", "the layout of the source; default: 'mesh=4 place=Shard(0)'"},
    [DST] = {"dst", "LAYOUT", "the layout of the target; default: each weight as for tensor parallelism"},
    [STAGED] = {"staged", NULL, "pack, send and unpack everything, as between machines"},
    [CHECKSUM] = {"checksum", NULL, "send every bucket with a checksum, which the receiver compares"},
    [BUS] = {"bus", NULL, "use agents, and kill one of them in the middle"},
    [GPU] = {"gpu", NULL, "put tensors into memory of the first GPU, which all processes share"},
};

static const char details[] =
    "Forks the processes of a trainer and of an inference engine, which meet through a store in a temporary\n"
    "folder. The trainer has a model shaped like a small Llama, cut by rows over its ranks, as by FSDP. The\n"
    "engine has it tensor parallel and, from 4 ranks on, in two replicas (data parallel). Three versions are\n"
    "sent. The value of each element follows from version, tensor and index. Before each version the targets\n"
    "are filled with wrong values; after it, every rank verifies every element, and the first wrong one is\n"
    "named.\n"
    "\n"
    "--src and --dst hold for all weights. Norms are vectors, and are replicated where a layout cuts a second\n"
    "dimension. Ranks in a layout are the processes of that side, from 0. See `tensorbus layout --help`.\n"
    "\n"
    "With --bus each rank is a client of an agent: the tensors are in the rank's memory, and the agents move\n"
    "them. While version 2 is under way, an agent of the engine is killed (SIGKILL). The version fails on every\n"
    "rank; the output has the time at which each rank was told, and the error message. Then the agent is\n"
    "started again, its client connects again, all make the pair and register their tensors under the same\n"
    "names, and version 2 is sent again.\n"
    "\n"
    "With --gpu all tensors are in GPU memory. Values are written and verified in host memory, and copied.\n"
    "\n"
    "The time is measured from when all ranks are ready until the last one has its data, or its memory back;\n"
    "with --bus, until the version is committed. Times of phases are in ms, each that of the slowest rank.\n"
    "memcpy is measured after the transfers, with a thread for each core, unless tensors are on a GPU.\n"
    "`tensorbus config` lists the settings.\n";

static const int64_t default_size = INT64_C(1) << 30, default_bus_size = INT64_C(256) << 20;

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

static tb_status refuse_partial(const tb_layout *layout) {
    for (int i = 0; i < layout->ndim; i++) {
        if (layout->place[i].kind == TB_PARTIAL)
            return tb__fail(TB_REFUSED, "Partial is not for the demo, which checks that elements arrive as they were");
    }
    return TB_OK;
}

static tb_status read_options(demo *d, const char *const *value) {
    static const char *const groups[TOOL_NSIDES] = {"trainer", "inference"};
    int32_t nranks[TOOL_NSIDES] = {0};
    int64_t size = d->bus ? default_bus_size : default_size;
    tb_status status = value[SIZE] ? tb__read_size(value[SIZE], &size) : TB_OK;
    if (status == TB_OK)
        status = tool_llama_add(&d->job.tensors, size, &d->llama);
    if (status != TB_OK)
        return tb__fail_within(status, "--size");
    status = value[RANKS] ? read_ranks(value[RANKS], nranks) : TB_OK;
    if (status != TB_OK)
        return tb__fail_within(status, "--ranks");
    for (int which = 0; which < TOOL_NSIDES; which++) {
        int option = which == TOOL_SOURCE ? SRC : DST;
        tool_side *side = &d->job.side[which];
        status = tool_side_init(side, which, groups[which], value[option], nranks[which]);
        if (status == TB_OK)
            status = refuse_partial(side->layout[TOOL_CUT_COLUMN]);
        if (status != TB_OK)
            return tb__fail_within(status, "--%s", options[option].name);
    }
    TB_TRY(tool_job_check(&d->job));
    return tool_job_weigh(&d->job);
}

static tb_status work(void *arg, int rank, int step, tool_slot *slot) {
    demo *d = arg;
    if (step == TOOL_ALLOCATE)
        tool_mover_init(&d->mover, &d->job, rank);
    return d->bus ? demo_bus_work(d, rank, step, slot) : tool_mover_do(&d->mover, (tool_step)step, slot);
}

static void show_progress(void *arg) {
    demo *d = arg;
    demo_show_progress(d);
    if (d->bus)
        demo_bus_tick(d);
}

tb_status demo_do(demo *d, int step, double *seconds) {
    d->step = step;
    return tool_ranks_step(d->ranks, step, seconds);
}

tb_status demo_move_version(demo *d) {
    demo_version *version = &d->version[d->nmoved];
    TB_TRY(demo_do(d, TOOL_PREPARE, NULL));
    TB_TRY(demo_do(d, TOOL_MOVE, &version->seconds));
    for (int rank = 0; rank < d->job.nranks; rank++) {
        const double *theirs = tool_ranks_slot(d->ranks, rank)->phase;
        for (int phase = 0; phase < TB_PHASE_COUNT; phase++)
            version->phase[phase] = theirs[phase] > version->phase[phase] ? theirs[phase] : version->phase[phase];
    }
    TB_TRY(demo_do(d, TOOL_VERIFY, NULL));
    for (int rank = 0; rank < d->job.nranks; rank++)
        d->nverified += atomic_load(&tool_ranks_slot(d->ranks, rank)->done);
    d->nmoved++;
    /* All ranks said that they verified all they got; this looks whether that was all there is. */
    if (d->nverified != d->nmoved * d->job.nbytes[TOOL_TARGET])
        return tb__fail(TB_INTERNAL, "%" PRId64 " bytes were verified instead of %" PRId64, d->nverified,
                        d->nmoved * d->job.nbytes[TOOL_TARGET]);
    return TB_OK;
}

static tb_status move_versions(demo *d) {
    TB_TRY(demo_do(d, TOOL_ALLOCATE, NULL));
    TB_TRY(demo_do(d, TOOL_PREPARE, NULL)); /* a program's tensors have values when they are registered */
    TB_TRY(tool_job_connect(&d->job, d->ranks));
    while (d->nmoved < DEMO_NVERSIONS)
        TB_TRY(demo_move_version(d));
    return demo_do(d, TOOL_CLOSE, NULL);
}

/* The fastest of some rounds, of about as much as is delivered. */
static tb_status measure_memcpy(demo *d) {
    enum { SMALLEST = 32 << 20, LARGEST = 256 << 20, ROUNDS = 4 };
    tool_buffers buffers;
    int64_t size = d->job.nbytes[TOOL_TARGET];
    size = size < SMALLEST ? SMALLEST : size > LARGEST ? LARGEST : size;
    TB_TRY(tool_buffers_init(&buffers, (size_t)size));
    tb_status status = TB_OK;
    for (int i = 0; i < ROUNDS && status == TB_OK; i++) {
        double gb_per_s = 0;
        status = tool_memcpy(&buffers, &gb_per_s);
        d->memcpy_gb_per_s = gb_per_s > d->memcpy_gb_per_s ? gb_per_s : d->memcpy_gb_per_s;
    }
    d->nthreads = buffers.nthreads;
    tool_buffers_fini(&buffers);
    return status;
}

static tb_status run_plain(demo *d, const tool_ranks_opts *opts, tool_guard *guard) {
    TB_TRY(tool_job_start(&d->job, opts, guard, &d->ranks));
    tb_status status = move_versions(d);
    tool_ranks_destroy(d->ranks);
    return status;
}

static tb_status run_demo(demo *d, tool_guard *guard) {
    tool_ranks_opts opts = {.work = work, .tick = show_progress, .arg = d};
    tb_status status = d->bus ? demo_bus_run(d, &opts, guard) : run_plain(d, &opts, guard);
    return status == TB_OK && !d->gpu[0] ? measure_memcpy(d) : status;
}

static tb_status use_gpu(demo *d) {
    tool_gpus gpus;
    TB_TRY(tool_gpus_look(&gpus));
    snprintf(d->gpu, sizeof d->gpu, "%s", gpus.gpu[0].name);
    d->job.memory[TOOL_SOURCE] = d->job.memory[TOOL_TARGET] = "cuda:0";
    return TB_OK;
}

static int run(const tb__config *config, const char *const *value) {
    demo_bus bus = {0};
    demo d = {.job.batch = tool_batch_opts(config, value[STAGED], value[CHECKSUM]), .bus = value[BUS] ? &bus : NULL};
    tool_guard guard;
    tb__text out = {0};
    tb_status status = read_options(&d, value);
    tb__descriptor_limit_raise();
    if (status == TB_OK)
        status = tool_guard_init(&guard);
    if (status != TB_OK) {
        tool_job_fini(&d.job);
        return tool_fail_status(status);
    }
    int exit_status;
    status = value[GPU] ? use_gpu(&d) : TB_OK;
    bool has_gpu = status == TB_OK;
    if (status == TB_OK)
        status = run_demo(&d, &guard);
    if (status == TB_OK)
        demo_add_report(&out, &d);
    demo_bus_fini(&bus, d.job.nranks);
    tool_job_fini(&d.job);
    if (status == TB_OK)
        exit_status = tool_print(&out);
    else
        exit_status = has_gpu ? tool_fail_status(status) : tool_fail(TOOL_FAILED, "%s", tb_error_detail());
    tool_guard_fini(&guard);
    return exit_status;
}

const tool_command tool_demo = {
    .name = "demo",
    .summary = "move a model from a trainer to an inference engine and verify every element",
    .usage = "[--size SIZE] [--ranks N[,M]] [--src LAYOUT] [--dst LAYOUT] [OPTION...]",
    .details = details,
    .options = options,
    .run = run,
};
