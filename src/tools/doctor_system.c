/* What the system gives to tensorbus, and what it withholds. */
#include "tools/doctor.h"

#include "base/mem.h"
#include "device/host/kernel.h"

#include <dirent.h>
#include <errno.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/statvfs.h>
#include <sys/uio.h>
#include <unistd.h>

/* The first line of a file; false where it can't be read. */
static bool read_line(const char *path, char *out, size_t room) {
    FILE *file = fopen(path, "re");
    bool is_read = file && fgets(out, (int)room, file);
    if (file)
        fclose(file);
    if (is_read)
        out[strcspn(out, "\n")] = '\0';
    return is_read;
}

/* ---- Other processes' memory --------------------------------------------------------------------------------- */

typedef struct target {
    pid_t pid;
    uint64_t *word;
    uint64_t value;
} target;

/* Reads a word of the process that has forked it: as far as the rules go, two that are not related. A parent may read
 * its child where others may not. */
static bool read_parent(const void *arg, int out) {
    const target *t = arg;
    uint64_t found = 0;
    struct iovec here = {&found, sizeof found}, there = {t->word, sizeof *t->word};
    *t->word = 0; /* the child's own */
    if (process_vm_readv(t->pid, &here, 1, &there, 1, 0) == sizeof found)
        return found == t->value;
    const char *why = strerror(errno);
    (void)!write(out, why, strlen(why));
    return false;
}

static const char *remedy_of_scope(int scope) {
    switch (scope) {
    case 1:
        return "sysctl kernel.yama.ptrace_scope=0, or prctl(PR_SET_PTRACER, PR_SET_PTRACER_ANY) in the program, or "
               "memory of tb_alloc, which needs none of it";
    case 2:
        return "give agents CAP_SYS_PTRACE, or use memory of tb_alloc, which needs none of it";
    case 3:
        return "use memory of tb_alloc, which needs none of it; Yama lets nobody do it before the next boot";
    default:
        return "let the container's seccomp profile have process_vm_readv and process_vm_writev, or use memory of "
               "tb_alloc, which needs none of it";
    }
}

void doctor_process_vm(doctor *d, const char *name) {
    uint64_t word = 0x746f62656f72206f;
    target t = {.pid = getpid(), .word = &word, .value = word};
    doctor_answer answer;
    char line[32], yama[64] = "Yama is not active";
    int scope = -1;
    if (read_line("/proc/sys/kernel/yama/ptrace_scope", line, sizeof line) && sscanf(line, "%d", &scope) == 1)
        snprintf(yama, sizeof yama, "kernel.yama.ptrace_scope is %d", scope);
    doctor_probe(read_parent, &t, &answer);
    if (answer.is_ok)
        doctor_add(d, DOCTOR_OK, name, NULL, "processes may read one another's memory; %s", yama);
    else
        doctor_add(d, DOCTOR_LIMITED, name, remedy_of_scope(scope),
                   "memory that is not tb_alloc's goes through a buffer, and not through agents: %s; %s",
                   answer.said[0] ? answer.said : "what was read is wrong", yama);
}

/* ---- Memory -------------------------------------------------------------------------------------------------- */

void doctor_tb_alloc(doctor *d, const char *name) {
    enum { NBYTES = 1 << 20 };
    struct rlimit files;
    void *memory;
    if (tb_alloc(NBYTES, &memory) != TB_OK) {
        doctor_add(d, DOCTOR_FAILED, name, "raise RLIMIT_FSIZE (ulimit -f unlimited), and allow memfd_create", "%s",
                   tb_error_detail());
        return;
    }
    memset(memory, 1, NBYTES);
    tb_free(memory);
    if (getrlimit(RLIMIT_FSIZE, &files) == 0 && files.rlim_cur != RLIM_INFINITY)
        doctor_add(d, DOCTOR_LIMITED, name, "raise RLIMIT_FSIZE: ulimit -f unlimited",
                   "shared memory works, up to %s at a time: it counts as a file",
                   tool_size((int64_t)files.rlim_cur).text);
    else
        doctor_add(d, DOCTOR_OK, name, NULL, "shared memory works, without a limit on its size");
}

/* Whether tb_alloc gets one, from wherever. */
static bool has_huge_page(void) {
    char line[256];
    void *memory;
    unsigned long from, to;
    long kib;
    bool is_inside = false, is_huge = false;
    if (tb_alloc(2 * (size_t)TB__HUGE_PAGE, &memory) != TB_OK)
        return false;
    uintptr_t middle = (uintptr_t)memory + TB__HUGE_PAGE;
    memset(memory, 1, 2 * (size_t)TB__HUGE_PAGE);
    FILE *maps = fopen("/proc/self/smaps", "re");
    while (maps && !is_huge && fgets(line, sizeof line, maps)) {
        if (sscanf(line, "%lx-%lx ", &from, &to) == 2)
            is_inside = middle >= from && middle < to;
        else if (is_inside && (sscanf(line, "ShmemPmdMapped: %ld kB", &kib) == 1 ||
                               sscanf(line, "Shared_Hugetlb: %ld kB", &kib) == 1 ||
                               sscanf(line, "Private_Hugetlb: %ld kB", &kib) == 1))
            is_huge = kib > 0;
    }
    if (maps)
        fclose(maps);
    tb_free(memory);
    return is_huge;
}

void doctor_huge_pages(doctor *d, const char *name) {
    char line[64] = "0", shmem[128] = "not told";
    long count = 0;
    if (read_line("/sys/kernel/mm/hugepages/hugepages-2048kB/free_hugepages", line, sizeof line))
        count = strtol(line, NULL, 10);
    (void)read_line("/sys/kernel/mm/transparent_hugepage/shmem_enabled", shmem, sizeof shmem);
    bool is_given = has_huge_page();
    const char *start = strchr(shmem, '[');
    int length = start ? (int)strcspn(start + 1, "]") : (int)strlen(shmem);
    doctor_add(d, is_given ? DOCTOR_OK : DOCTOR_LIMITED, name,
               is_given ? NULL
                        : "Linux 6.1, or echo advise >/sys/kernel/mm/transparent_hugepage/shmem_enabled, or reserve "
                          "some: sysctl vm.nr_hugepages=N",
               "tb_alloc gets %s; %ld of 2 MiB are reserved and free, transparent ones for shared memory: %.*s",
               is_given ? "them" : "none", count, length, start ? start + 1 : shmem);
}

/* How many bytes are free there; 0: nothing can be written, for the reason in errno. */
static uint64_t room_in_dev_shm(void) {
    struct statvfs about;
    if (access("/dev/shm", W_OK) != 0 || statvfs("/dev/shm", &about) != 0)
        return 0;
    errno = ENOSPC; /* if it is full */
    return (uint64_t)about.f_bavail * about.f_frsize;
}

enum { ENOUGH_MIB = 256 };

bool doctor_has_dev_shm(void) {
    return room_in_dev_shm() >> 20 >= ENOUGH_MIB;
}

void doctor_dev_shm(doctor *d, const char *name) {
    static const char remedy[] = "mount a larger one: docker run --shm-size=1g, an emptyDir of medium Memory";
    uint64_t room = room_in_dev_shm();
    if (room == 0) {
        doctor_add(d, DOCTOR_LIMITED, name, errno == ENOSPC ? remedy : "mount a tmpfs there that may be written to",
                   "semaphores, UCX and MPI need it: %s", strerror(errno));
        return;
    }
    bool is_enough = room >> 20 >= ENOUGH_MIB;
    doctor_add(d, is_enough ? DOCTOR_OK : DOCTOR_LIMITED, name, is_enough ? NULL : remedy,
               "%s are free, for semaphores, UCX and MPI; tb_alloc does not use it", tool_size((int64_t)room).text);
}

/* Devices that take memory only if it is locked. */
static int count_rdma_devices(void) {
    int count = 0;
    DIR *folder = opendir("/sys/class/infiniband");
    for (struct dirent *entry; folder && (entry = readdir(folder));)
        count += entry->d_name[0] != '.';
    if (folder)
        closedir(folder);
    return count;
}

void doctor_memlock(doctor *d, const char *name) {
    struct rlimit locked = {0};
    int ndevices = count_rdma_devices();
    getrlimit(RLIMIT_MEMLOCK, &locked);
    bool is_unlimited = locked.rlim_cur == RLIM_INFINITY;
    bool is_enough = is_unlimited || ndevices == 0;
    doctor_add(d, is_enough ? DOCTOR_OK : DOCTOR_LIMITED, name,
               is_enough ? NULL : "ulimit -l unlimited: limits.conf, LimitMEMLOCK=infinity, docker --ulimit memlock=-1",
               "%s may be locked; there %s %d RDMA device%s, which would need it",
               is_unlimited ? "any memory" : tool_size((int64_t)locked.rlim_cur).text, ndevices == 1 ? "is" : "are",
               ndevices, ndevices == 1 ? "" : "s");
}

/* ---- The rest ------------------------------------------------------------------------------------------------ */

void doctor_descriptors(doctor *d, const char *name) {
    enum { ENOUGH = 8192, LEAST = 64 }; /* a batch may bring 4096; UCX alone opens some 25 */
    struct rlimit files = {0};
    getrlimit(RLIMIT_NOFILE, &files);
    bool is_enough = files.rlim_max >= ENOUGH;
    d->is_over = files.rlim_cur < LEAST;
    if (d->is_over) {
        doctor_add(d, DOCTOR_FAILED, name,
                   "raise RLIMIT_NOFILE: ulimit -n 8192, limits.conf, LimitNOFILE=, docker --ulimit",
                   "%llu for a program; transports need more, and so does looking at the rest",
                   (unsigned long long)files.rlim_cur);
        return;
    }
    doctor_add(d, is_enough ? DOCTOR_OK : DOCTOR_LIMITED, name,
               is_enough ? NULL : "raise RLIMIT_NOFILE to 8192 or more: limits.conf, LimitNOFILE=, docker --ulimit",
               "%llu for a program, %llu for an agent", (unsigned long long)files.rlim_cur,
               (unsigned long long)files.rlim_max);
}

void doctor_cores(doctor *d, const char *name) {
    long all = sysconf(_SC_NPROCESSORS_ONLN);
    cpu_set_t mine;
    int count = sched_getaffinity(0, sizeof mine, &mine) == 0 ? CPU_COUNT(&mine) : (int)all;
    doctor_add(d, DOCTOR_OK, name, NULL, "%d of %ld; the ranks of a host share them, and each has at least 1 worker",
               count, all);
}

void doctor_vectors(doctor *d, const char *name) {
    const tb__kernels *sets[TB__KERNEL_SETS_MAX];
    if (tb__kernels_list(sets) == 1)
        doctor_add(d, DOCTOR_LIMITED, name, "a processor, or a virtual machine's model of one, that has AVX2 and F16C",
                   "casts and large copies are done in portable C, and slower");
    else
        doctor_add(d, DOCTOR_OK, name, NULL, "casts use AVX2, large copies, reductions and MXFP8 %s",
                   tb__kernels_avx512() ? "AVX-512" : "AVX2");
}

/* How this process would copy, and what each way does now. */
void doctor_copies(doctor *d, const char *name) {
    const tb__kernels *sets[TB__KERNEL_SETS_MAX];
    double rate[TB__KERNEL_SETS_MAX];
    char rates[256] = "";
    int nsets = tb__kernels_list(sets);
    tb__kernels_choose();
    if (tb__kernels_measure(sets, nsets, rate) != TB_OK) {
        doctor_add(d, DOCTOR_LIMITED, name, "free some memory", "%s", tb_error_detail());
        return;
    }
    for (int i = 0; i < nsets; i++) {
        size_t n = strlen(rates);
        snprintf(rates + n, sizeof rates - n, "%s%s %.1f", i ? ", " : "", sets[i]->name, rate[i]);
    }
    doctor_add(d, DOCTOR_OK, name, NULL, "%s, by %s; GB/s of a thread: %s", tb__kernels_get()->name,
               getenv("TENSORBUS_COPY") ? "TENSORBUS_COPY" : tb__kernels_file(), rates);
}
