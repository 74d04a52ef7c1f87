/* GPUs: the driver, the properties of each, and what a container lacks. */
#include "tools/doctor.h"

#include "tools/gpu.h"
#include "tools/mirror.h"

#include <dlfcn.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

static const char untried[] = "peer access, NVLink, fabric handles, MIG and MPS were not tried by those who wrote this";

/* ---- The driver ---------------------------------------------------------------------------------------------- */

static bool is_library(const void *arg, int out) {
    (void)out;
    return dlopen(arg, RTLD_LAZY | RTLD_LOCAL) != NULL;
}

#ifdef TB_HAS_CUDA
static const char *remedy_of_driver(void) {
    doctor_answer library;
    bool has_files = access("/dev/nvidiactl", F_OK) == 0;
    doctor_probe(is_library, "libcuda.so.1", &library);
    if (has_files && access("/dev/nvidiactl", R_OK | W_OK) != 0)
        return "let this user read and write /dev/nvidia*";
    if (has_files && !library.is_ok)
        return "mount the driver's libraries, too: docker run --gpus all, NVIDIA_DRIVER_CAPABILITIES=compute,utility";
    if (library.is_ok && !has_files)
        return "let the container have /dev/nvidia*: docker run --gpus all, a resource nvidia.com/gpu";
    if (has_files && access("/dev/nvidia-uvm", F_OK) != 0)
        return "let the container have /dev/nvidia-uvm (on the machine itself: modprobe nvidia-uvm)";
    if (has_files)
        return "see whether nvidia-smi lists the GPU, and CUDA_VISIBLE_DEVICES; a driver for CUDA 12.4 or later is "
               "needed";
    return "nothing, if tensors are in host memory; else install NVIDIA's driver, in a container docker run --gpus all";
}
#else
static const char *remedy_of_driver(void) {
    (void)is_library;
    return "nothing, if tensors are in host memory; else build again where nvcc is: a CUDA toolkit, or "
           "pip install nvidia-cuda-nvcc";
}
#endif

static void add_driver(doctor *d, const char *name, const tool_gpus *gpus) {
    const char *visible = getenv("CUDA_VISIBLE_DEVICES"), *mps = getenv("CUDA_MPS_PIPE_DIRECTORY");
    bool has_mps = access(mps && *mps ? mps : "/tmp/nvidia-mps", F_OK) == 0;
    doctor_add(d, DOCTOR_OK, name, NULL, "driver for CUDA %d.%d, %d GPU%s%s%s%s; %s", gpus->driver.version / 1000,
               gpus->driver.version % 1000 / 10, gpus->driver.ngpus, gpus->driver.ngpus == 1 ? "" : "s",
               visible ? "; CUDA_VISIBLE_DEVICES is " : "", visible ? visible : "",
               has_mps ? "; an MPS server has been started" : "", untried);
}

/* ---- Each GPU ------------------------------------------------------------------------------------------------ */

static void add_gpu(doctor *d, const tool_gpus *gpus, int i) {
    const tb__cuda_gpu *gpu = &gpus->gpu[i];
    char name[32];
    bool is_shared = gpu->has_vmm && gpu->has_vmm_fd;
    snprintf(name, sizeof name, "cuda:%d", i);
    doctor_add(d, is_shared && gpu->has_ipc ? DOCTOR_OK : DOCTOR_LIMITED, name,
               is_shared && gpu->has_ipc ? NULL : "none; tensors that can't be shared go through staging memory",
               "%s, %s, %s, compute capability %d.%d; CUDA IPC: %s; VMM: %s%s", gpu->name, gpu->uuid,
               tool_size((int64_t)gpu->nbytes).text, gpu->capability / 10, gpu->capability % 10,
               gpu->has_ipc ? "yes" : "no",
               !gpu->has_vmm     ? "no"
               : gpu->has_vmm_fd ? "by descriptors"
                                 : "not shareable",
               gpu->has_fabric ? ", by fabric handles" : "");
}

static void add_peers(doctor *d, const tool_gpus *gpus) {
    tb__text without = {0};
    int npairs = 0, nreached = 0;
    for (int i = 0; i < gpus->n; i++) {
        for (int k = i + 1; k < gpus->n; k++) {
            bool is_reached = gpus->reaches[i][k] && gpus->reaches[k][i];
            npairs++;
            nreached += is_reached;
            if (!is_reached && without.count < 100)
                tb__text_add(&without, "%s%d-%d", without.count ? ", " : "", i, k);
        }
    }
    if (npairs > 0)
        doctor_add(d, nreached == npairs ? DOCTOR_OK : DOCTOR_LIMITED, "GPU peers",
                   nreached == npairs ? NULL : "none; what goes between the others is staged in host memory",
                   "%d of %d pairs reach each other's memory%s%s%s", nreached, npairs, without.count ? " (not " : "",
                   without.count ? without.data : "", without.count ? ")" : "");
    tb__text_fini(&without);
}

/* ---- Trying it ----------------------------------------------------------------------------------------------- */

/* Allocates, and has our kernels copy there and back. */
static bool try_copy(const void *arg, int out) {
    enum { NBYTES = 1 << 20 };
    tool_mirror mirror = {0};
    (void)arg;
    tb_status status = tool_mirror_init(&mirror, "cuda:0", NBYTES);
    for (int i = 0; status == TB_OK && i < NBYTES; i++)
        mirror.host[i] = (char)(i * 7 + i / 4096);
    if (status == TB_OK)
        status = tool_mirror_put(&mirror);
    if (status == TB_OK) {
        memset(mirror.host, 0, NBYTES);
        status = tool_mirror_get(&mirror);
    }
    for (int i = 0; status == TB_OK && i < NBYTES; i++) {
        if (mirror.host[i] != (char)(i * 7 + i / 4096))
            status = tb__fail(TB_INTERNAL, "byte %d that came back is wrong", i);
    }
    tool_mirror_fini(&mirror);
    if (status != TB_OK)
        (void)!write(out, tb_error_detail(), strlen(tb_error_detail()));
    return status == TB_OK;
}

static void read_namespace(const char *kind, char out[64]) {
    char path[32];
    snprintf(path, sizeof path, "/proc/self/ns/%s", kind);
    ssize_t n = readlink(path, out, 63);
    out[n > 0 ? n : 0] = '\0';
}

/* Sharing memory between processes: the conditions for containers. */
static void add_sharing(doctor *d) {
    char ipc[64], pid[64];
    read_namespace("ipc", ipc);
    read_namespace("pid", pid);
    doctor_add(d, DOCTOR_OK, "GPU sharing", NULL,
               "memory of cudaMalloc: between processes of the same namespaces %s and %s (docker run --ipc, --pid); "
               "that of tb_alloc_on, by descriptors, between any that reach each other by shm",
               ipc, pid);
}

void doctor_gpus(doctor *d, const char *name) {
    tool_gpus gpus;
    doctor_answer copied;
    if (tool_gpus_look(&gpus) != TB_OK) {
        doctor_add(d, DOCTOR_LIMITED, name, remedy_of_driver(), "no tensors in GPU memory: %s", tb_error_detail());
        return;
    }
    add_driver(d, name, &gpus);
    for (int i = 0; i < gpus.n; i++)
        add_gpu(d, &gpus, i);
    add_peers(d, &gpus);
    doctor_probe(try_copy, NULL, &copied);
    if (copied.is_ok)
        doctor_add(d, DOCTOR_OK, "GPU copies", NULL, "1 MiB went to cuda:0 and came back");
    else
        doctor_add(d, DOCTOR_LIMITED, "GPU copies", "see whether other programs can use the GPU, and nvidia-smi",
                   "memory of cuda:0 can't be used: %s", copied.said);
    add_sharing(d);
}
