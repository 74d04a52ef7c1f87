/* tensorbus bench: how fast tensors move between processes of this machine, next to what the machine can do. */
#include "bench/bench.h"

#include "base/descriptors.h"
#include "tools/gpu.h"

#include <fcntl.h>
#include <glob.h>
#include <string.h>
#include <sys/file.h>
#include <unistd.h>

enum { MIN_SIZE = 1 << 20 };
#define MAX_SIZE ((int64_t)1 << 40)

enum { ONLY, ROUNDS, SIZE, STAGED, CHECKSUM, PEERS, HOSTS, GPU, TRANSPORT, BETWEEN, STORE, TOKEN_FILE, CHECK, JSON };

static const tool_option options[] = {
    [ONLY] = {"only", "NAME,...", "these lines only"},
    [ROUNDS] = {"rounds", "N", "how often each line is measured (5, with --gpu 15; fewer where that would take long)"},
    [SIZE] = {"size", "BYTES", "what the sources hold together (1GiB, with --gpu 2GiB; in small, a quarter of it)"},
    [STAGED] = {"staged", NULL, "pack, send and unpack everything, as between machines"},
    [CHECKSUM] = {"checksum", NULL, "every bucket goes with a sum of its bytes, which is compared where it arrives"},
    [PEERS] = {"peers", NULL, "row_col also with MPI and torch, tiny with torch; with --gpu, most with torch"},
    [HOSTS] = {"hosts", NULL, "measure the lines of several hosts instead (needs root, and iperf3)"},
    [GPU] = {"gpu", NULL, "measure the lines of tensors in GPU memory instead"},
    [BETWEEN] = {"between", NULL, "measure between two machines: start it in a shell on each, with one --store"},
    [STORE] = {"store", "URL", "with --between: where the two meet; the first one serves it, if nobody does"},
    [TOKEN_FILE] = {"token-file", "FILE", "with --between: its first line is the token of the store"},
    [TRANSPORT] = {"transport", "NAME", "with --gpu: measure the line of this transport instead: ucx, nccl or nvshmem"},
    [CHECK] = {"check", NULL, "fail if a ratio misses its mark"},
    [JSON] = {"json", NULL, "print one JSON object per line"},
    {NULL, NULL, NULL},
};

/* A line's time, unless it is told how often it is measured. Sixteen lines take less than twelve minutes then, also
 * where they exceed it by what can't be cut short. */
#define LINE_NS ((int64_t)15 * 1000000000)

/* ---- Names --------------------------------------------------------------------------------------------------- */

static bool is_called(const char *known, const char *name, size_t length) {
    return strlen(known) == length && strncmp(known, name, length) == 0;
}

static bool is_known(const char *name, size_t length) {
    for (size_t i = 0; i < bench_ncases; i++) {
        for (int l = 0; l < bench_cases[i].nlines; l++) {
            if (is_called(bench_cases[i].line[l].name, name, length))
                return true;
        }
    }
    return is_called(BENCH_LIMIT, name, length) || is_called(BENCH_REFIT, name, length) ||
           bench_disk_is_line(name, length) || is_called(BENCH_QUANT, name, length) ||
           is_called(BENCH_FIRST, name, length) || is_called(BENCH_BUS, name, length) ||
           is_called(BENCH_RTT, name, length);
}

static bool is_of_hosts(const char *name, size_t length) {
    return is_called(BENCH_NET_ROW_COL, name, length) || is_called(BENCH_NET_REPLICATE, name, length) ||
           is_called(BENCH_MPI_ROW_COL, name, length) || is_called(BENCH_AUTO_ROW_COL, name, length);
}

/* The lines of one run. */
typedef enum set { UNKNOWN, PLAIN, OF_HOSTS, OF_GPUS, OF_CARRIED, OF_BETWEEN } set;

static set set_of(const char *name, size_t length) {
    if (is_of_hosts(name, length))
        return OF_HOSTS;
    if (bench_gpu_is_line(name, length))
        return OF_GPUS;
    if (bench_between_is_line(name, length))
        return OF_BETWEEN;
    return is_known(name, length) ? PLAIN : UNKNOWN;
}

static tb_status check_names(const char *list, set wanted, const char *transport) {
    static const char *const how[] = {[PLAIN] = "without --hosts, --gpu and --between",
                                      [OF_HOSTS] = "with --hosts",
                                      [OF_GPUS] = "with --gpu",
                                      [OF_BETWEEN] = "with --between"};
    for (const char *at = list; at; at = strchr(at, ','), at = at ? at + 1 : NULL) {
        int length = (int)strcspn(at, ",");
        bool is_carried = wanted == OF_CARRIED && /* --between has ucx_row_col, too */
                          is_called(bench_gpu_carried_name(transport).text, at, (size_t)length);
        set theirs = is_carried ? OF_CARRIED : set_of(at, (size_t)length);
        if (theirs == UNKNOWN)
            return tb__fail(TB_INVALID, "--only: there is no line '%.*s'; `tensorbus bench --help` lists them",
                            length < 40 ? length : 40, at);
        if (theirs != wanted)
            return tb__fail(TB_INVALID, "--only: '%.*s' is measured %s", length, at, how[theirs]);
    }
    return TB_OK;
}

/* ---- The command --------------------------------------------------------------------------------------------- */

static tb_status read_between(const char *const *value, bench *b) {
    for (int i = STORE; i <= TOKEN_FILE; i++) {
        if (value[i] && !b->with_between)
            return tb__fail(TB_INVALID, "--%s goes with --between", options[i].name);
    }
    if (!b->with_between)
        return TB_OK;
    if (b->with_hosts || b->with_peers || b->with_gpu)
        return tb__fail(TB_INVALID, "--between does not go with --%s",
                        b->with_hosts   ? "hosts"
                        : b->with_peers ? "peers"
                                        : "gpu");
    if (!value[STORE])
        return tb__fail(TB_INVALID, "--between needs --store, the same in both shells, such as tcp://HOST:7000");
    b->store = value[STORE];
    b->budget_ns = 0; /* both sides have as many rounds */
    b->size = (int64_t)1 << 28;
    return value[TOKEN_FILE] ? tb__token_read(value[TOKEN_FILE], b->token) : TB_OK;
}

static tb_status read_options(const char *const *value, bench *b) {
    b->only = value[ONLY];
    b->rounds = value[GPU] ? 15 : 5; /* on a GPU they are short */
    b->budget_ns = value[ROUNDS] ? 0 : LINE_NS;
    b->size = (int64_t)1 << 30;
    b->is_size_given = value[SIZE] != NULL;
    b->is_json = value[JSON] != NULL;
    b->with_peers = value[PEERS] != NULL;
    b->with_hosts = value[HOSTS] != NULL;
    b->with_gpu = value[GPU] != NULL;
    b->with_between = value[BETWEEN] != NULL;
    if (b->with_hosts && (b->with_peers || b->with_gpu))
        return tb__fail(TB_INVALID, "--hosts does not go with --%s", b->with_peers ? "peers" : "gpu");
    TB_TRY(read_between(value, b));
    b->transport = value[TRANSPORT];
    if (b->transport && (!b->with_gpu || b->with_peers))
        return tb__fail(TB_INVALID, "--transport goes with --gpu, and without --peers");
    if (b->transport && strcmp(b->transport, "ucx") != 0 && strcmp(b->transport, "nccl") != 0 &&
        strcmp(b->transport, "nvshmem") != 0)
        return tb__fail(TB_INVALID, "--transport is ucx, nccl or nvshmem, not '%.40s'", b->transport);
    TB_TRY(check_names(b->only,
                       b->with_between ? OF_BETWEEN
                       : b->with_hosts ? OF_HOSTS
                       : b->transport  ? OF_CARRIED
                       : b->with_gpu   ? OF_GPUS
                                       : PLAIN,
                       b->transport));
    if (value[ROUNDS]) {
        const char *at = value[ROUNDS];
        int64_t rounds;
        if (!tb__read_int(&at, &rounds) || *at || rounds < 1 || rounds > BENCH_MAX_ROUNDS)
            return tb__fail(TB_INVALID, "--rounds: '%.40s' is not a number between 1 and %d", value[ROUNDS],
                            BENCH_MAX_ROUNDS);
        b->rounds = (int)rounds;
    }
    if (value[SIZE]) {
        tb_status status = tb__read_size(value[SIZE], &b->size);
        if (status != TB_OK)
            return tb__fail_within(status, "--size");
        if (b->size < MIN_SIZE || b->size > MAX_SIZE)
            return tb__fail(TB_INVALID, "--size: %.40s is not between 1MiB and 1TiB", value[SIZE]);
    }
    return TB_OK;
}

/* With --check, whether the marks were reached; all has been printed. */
static int conclude(const bench *b, const char *const *value) {
    int nmarks = 0, nmissed = 0, nunknown = 0;
    for (size_t i = 0; i < b->results.count; i++) {
        nmarks += bench_has_mark(&b->results.item[i]);
        nmissed += !bench_is_reached(&b->results.item[i]);
        nunknown += bench_has_mark(&b->results.item[i]) && b->results.item[i].reason;
    }
    if (value[CHECK] && nunknown > 0)
        return tool_fail(TOOL_FAILED, "%d of %d ratios miss their marks, %d of which were not measured", nmissed,
                         nmarks, nunknown);
    if (value[CHECK] && nmissed > 0)
        return tool_fail(TOOL_FAILED, "%d of %d ratios miss their marks", nmissed, nmarks);
    return b->nfailed > 0 ? TOOL_FAILED : TOOL_OK;
}

/* Removes the folders of runs that were killed, which may hold gigabytes: those with a lock that nobody holds. */
static void remove_leftovers(void) {
    char pattern[512];
    glob_t found;
    const char *base = getenv("TMPDIR");
    snprintf(pattern, sizeof pattern, "%s/tensorbus-*/" TOOL_FOLDER_LOCK, base && *base ? base : "/tmp");
    if (glob(pattern, 0, NULL, &found) != 0)
        return;
    for (size_t i = 0; i < found.gl_pathc; i++) {
        char *folder = found.gl_pathv[i];
        int fd = open(folder, O_RDWR | O_CLOEXEC | O_NOFOLLOW);
        if (fd >= 0 && flock(fd, LOCK_EX | LOCK_NB) == 0) {
            *strrchr(folder, '/') = '\0';
            tool_say("removing %s, which a run that was killed left", folder);
            tool_folder_remove(folder);
        }
        if (fd >= 0)
            close(fd);
    }
    globfree(&found);
}

static tb_status run_gpu(bench *b) {
#ifdef TB_HAS_CUDA
    return bench_gpu_run(b);
#else
    tool_gpus none;
    (void)b;
    return tool_gpus_look(&none);
#endif
}

static int run(const tb__config *config, const char *const *value) {
    bench b = {.batch = tool_batch_opts(config, value[STAGED], value[CHECKSUM])};
    tb_status status = read_options(value, &b);
    tb__descriptor_limit_raise();
    if (status == TB_OK)
        status = tool_guard_init(&b.guard);
    if (status != TB_OK)
        return tool_fail_status(status);
    remove_leftovers();
    bench_table_init(&b.table, b.with_gpu);
    status = b.with_gpu ? run_gpu(&b) : b.with_between ? bench_between_run(&b) : bench_run(&b);
    tool_buffers_fini(&b.buffers);
    int exit_status = b.output_status; /* what can't be printed was told of */
    if (status == TB_OK)
        exit_status = conclude(&b, value);
    else if (exit_status == TOOL_OK)
        exit_status = tool_fail(TOOL_FAILED, "%s", tb_error_detail());
    free(b.table.cells.item);
    for (size_t i = 0; i < b.results.count; i++)
        free(b.results.item[i].reason);
    free(b.results.item);
    tool_guard_fini(&b.guard);
    return exit_status;
}

const tool_command tool_bench = {
    .name = "bench",
    .summary = "measure transfers between processes, compared with memcpy",
    .usage = "[--only NAME,...] [--rounds N] [--size BYTES] [--check] [OPTION...]\n"
             "--gpu [--only NAME,...] [--rounds N] [--size BYTES] [--peers] [--check] [OPTION...]\n"
             "--gpu --transport ucx|nccl|nvshmem [--rounds N] [--size BYTES] [--check] [OPTION...]\n"
             "--hosts [--only NAME,...] [--rounds N] [--size BYTES] [--check] [--json]\n"
             "--between --store URL [--token-file FILE] [--only NAME,...] [--rounds N] [OPTION...]",
    .details =
        "  name          what moves                                               against             at least\n"
        "  limit         the machine's best copy                                  memcpy\n"
        "  row_col       f32 matrix, Shard(0) to Shard(1), 4 to 4 ranks           memcpy         0.90 of limit\n"
        "  row_col_hand  the same                                                 hand-written loops      0.97\n"
        "  foreign       the same from and to malloc'ed memory                    memcpy                  0.45\n"
        "  model         a small Llama, Shard(0) over 4 to 2x2 DPxTP              memcpy                  0.90\n"
        "  replicate     f32 matrix, Shard(0) to Replicate, 4 to 4 ranks          memcpy                  0.90\n"
        "  local         f32 matrix, Shard(0) to Shard(0), the same 4 ranks       memcpy                  0.95\n"
        "  small         tensors of 64 KiB, 4 to 4 ranks                          memcpy                  0.75\n"
        "  tiny          65,536 tensors of 512 bytes, all to each target          memcpy\n"
        "  cast          f32 to bf16, Shard(0) to Shard(1), input bytes           the cast, 1 process     0.95\n"
        "  partial       bf16 Partial(sum) over 4 to Shard(0): 4 reads, 1 write   memcpy's traffic        0.85\n"
        "  refit         200 tensors, experts, pp2 tp2 ep2 to dp4 ep4, 4 to 4     memcpy                  0.80\n"
        "  quant_mxfp8   bf16 to MXFP8 in memory, one process: reads and writes   memcpy's traffic        0.80\n"
        "  first         the model for the first time, ranks anew in each round    the second time         0.80\n"
        "  bus_model     the model through agents, whose clients have it          without agents          0.95\n"
        "  command_rtt   QueryStatus to an agent and back: us                     bare Unix socket     at most 1.30\n"
        "  reshard_disk  `tensorbus reshard` of 4 times the size, tp4 to tp2      cp                      0.80\n"
        "  reshard_vllm  the same of a model, to vLLM's fused tp4                 cp                      0.80\n"
        "  reshard_fp8   the same of a model, bf16 to FP8 blocks: bytes read      cp                      0.50\n"
        "\n"
        "with --hosts, between network namespaces of this machine, a quarter of the size:\n"
        "  net_row_col   f32 matrix, Shard(0) to Shard(1), 2 ranks to 2           iperf3                  0.85\n"
        "  net_replicate f32 matrix to 3 other hosts: what leaves its own, GB     the matrix           at most 1.05\n"
        "  mpi_row_col   f32 matrix, rows to columns, 4 ranks of an MPI job       MPI_Alltoallw           0.90\n"
        "  auto_row_col  the same by the transport that suits, shm                MPI_Alltoallw           1.70\n"
        "\n"
        "with --between, started in a shell on each of two machines, with one --store; 256 MiB; the first one sends:\n"
        "  *_bandwidth   f32 matrix, 1 to 1 rank                                  a plain TCP socket\n"
        "  *_latency     4 KiB, until the sender knows that they have arrived: us  a plain TCP socket\n"
        "  *_row_col     f32 matrix, Shard(0) to Shard(1), 2 to 2 ranks           a plain TCP socket\n"
        "  *_model       a small Llama, Shard(0) over 4 to 2x2 DPxTP              a plain TCP socket\n"
        "* is a transport: ucx, and on one machine shm. Options of the first shell hold for both.\n"
        "\n"
        "GB/s (10^9) count delivered bytes, unless the line says otherwise; figures are medians over the rounds.\n"
        "Every rank is a process. memcpy is one process with a thread for each core, on warm memory, in turns with\n"
        "the transfer; the ratio is computed for each round. A transfer lasts from the moment the sleeping ranks\n"
        "are woken until the last is done; every element of the last one is verified. limit is the fastest of\n"
        "memcpy, `rep movsb` and the library's ways of copying, with 1 to all cores; `of limit` is a line's ratio\n"
        "to it. Extra memory is the most that all ranks have had beside the tensors. `tensorbus config` lists the\n"
        "settings; the marks are for the defaults, without --staged or --checksum. reshard_* work in TMPDIR, with\n"
        "files in the page cache; their extra memory is all memory of that process. quant_mxfp8 reads 2 bytes of\n"
        "each number and writes 33/32; memcpy copies half of their sum, with as many threads, in the same memory.\n",
    .more =
        "The ranks of bus_model move the same memory by themselves and through their agents, in turns, until the\n"
        "version is committed. command_rtt is the median of 2000 round trips on one core, measured in turns with a\n"
        "process that only answers messages of the same size.\n"
        "\n"
        "with --peers, others do the same work: row_col by MPI_Alltoallw and by Gloo, compared with memcpy; tiny by\n"
        "a loop of PyTorch's slice copies, compared with which tensorbus has to be at least 10.00 times as fast.\n"
        "\n"
        "with --gpu, tensors in GPU memory, 4 processes to 4 and 2 GiB unless the line says otherwise:\n"
        "  gpu_row_col         f32 matrix, Shard(0) to Shard(1)                   cuMemcpyAsync           0.95\n"
        "  gpu_model           a small Llama, Shard(0) over 4 to 2x2 DPxTP        cuMemcpyAsync           0.95\n"
        "  gpu_replicate       f32 matrix, Shard(0) to Replicate                  cuMemcpyAsync           0.95\n"
        "  gpu_small           4,096 tensors of 64 KiB, all to each target        cuMemcpyAsync           0.90\n"
        "  gpu_tiny            65,536 tensors of 512 bytes, all to each target    cuMemcpyAsync           0.85\n"
        "  gpu_tiny_1m         1 Mi tensors of 512 bytes, 1 process to 1          cuMemcpyAsync           0.85\n"
        "  gpu_rows4           f32 matrix to columns; rows at multiples of 4 B    cuMemcpyAsync           0.80\n"
        "  gpu_runs32          f32 matrix to columns; runs of 32 bytes            cuMemcpyAsync           0.60\n"
        "  gpu_cast            f32 to bf16, Shard(0) to Shard(1)                  as many reads, writes   0.95\n"
        "  gpu_mxfp8           bf16 to MXFP8                                      as many reads, writes   0.95\n"
        "  gpu_fp8_block       bf16 to FP8 in blocks of 128 x 128                 as many reads, writes   0.95\n"
        "  gpu_nvfp4           bf16 to NVFP4: 2 reads, 1 write                    as many reads, writes   0.70\n"
        "  gpu_partial         bf16 Partial(sum) over 4 to Shard(0)               as many reads, writes   0.95\n"
        "  gpu_transpose_f32   f32 matrix that its target keeps transposed        cuMemcpyAsync           0.85\n"
        "  gpu_transpose_bf16  the same in bf16                                   cuMemcpyAsync           0.80\n"
        "  gpu_to_host         f32 matrix to pinned memory                        cuMemcpyAsync           0.95\n"
        "  host_to_gpu         f32 matrix from pinned memory                      cuMemcpyAsync           0.95\n"
        "  gpu_launches        kernel launches for a target of gpu_small          one launch           at most 4.00\n"
        "  gpu_latency         a version of 4 KiB, 1 process to 1: us             cuMemcpyAsync, a flag\n"
        "  gpu_bus_model       gpu_model through agents                           without agents          0.95\n"
        "with --gpu --transport NAME, 1 process to 2, by the clock:\n"
        "  NAME_row_col        f32 matrix to columns, by that transport           contiguous messages\n"
        "ucx_row_col has a mark of 0.45, and of 0.90 without cuda_ipc in UCX_TLS, where a link limits.\n"
        "\n"
        "On a GPU the ratio is one of times between CUDA events. Targets receive one after the other; the time in\n"
        "which the GPU works for them is compared with that of cuMemcpyAsync of as many bytes, by the same\n"
        "processes, from another process's memory (CUDA IPC), or from or to pinned memory. If sizes change, it\n"
        "copies half of what is read and written in total. Ratio at once (wall_ratio) is one of wall times, with\n"
        "all targets receiving at the same time. Every element is verified in both cases. gpu_latency is from the\n"
        "start of the sender's write to the arrival; for most of it, about 290 us on an H200, the GPU switches\n"
        "between processes, as it does for cuMemcpyAsync, too. gpu_bus_model is wall time, of a model twice as\n"
        "large. Smaller GPUs get smaller sizes and counts.\n"
        "\n"
        "Each line is printed when it is measured; if one fails, with the reason. All together take a few minutes:\n"
        "without --rounds slow lines have fewer rounds, and without --size the lines after them move less.\n"
        "\n"
        "The exit status is 1 if something failed or a wrong element arrived; with --check also if a ratio misses\n"
        "its mark, or was not measured.\n",
    .options = options,
    .run = run,
};
