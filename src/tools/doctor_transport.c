/* Transports: whether they open, as in a world, and the hosts that UCX and NVSHMEM reach. */
#include "tools/doctor.h"

#include "tools/gpu.h"
#include "transport/transport.h"

#include <dirent.h>
#include <net/if.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

static void ignore_loss(void *arg, int32_t peer, const char *why) {
    (void)arg;
    (void)peer;
    (void)why;
}

/* The same call as a world's, so that errors are those of a world. For ucx it writes the lanes. */
static bool open_transport(const void *arg, int out) {
    const tb_transport_ops *ops = arg;
    tb_transport transport;
    tb_transport_env env = {.size = sizeof env, .rank = 0, .lost = ignore_loss};
    tb__text lanes = {0};
    if (tb__transport_open(ops->name, &env, &transport) != TB_OK) {
        (void)!write(out, tb_error_detail(), strlen(tb_error_detail()));
        return false;
    }
    if (ops == &tb__ucx_ops)
        tb__ucx_list_lanes(&transport, &lanes);
    if (lanes.count > 0)
        (void)!write(out, lanes.data, lanes.count);
    tb__text_fini(&lanes);
    tb__transport_close(&transport);
    return true;
}

/* ---- UCX ------------------------------------------------------------------------------------------------------- */

/* arg: a pointer to tb__ucx_found, or another such function. */
static bool find_library(const void *arg, int out) {
    const char *found = (*(const char *(*const *)(void))arg)();
    return *found && write(out, found, strlen(found)) > 0;
}

/* "; UCX 1.13.1, /usr/lib/...; UCX_TLS=tcp", and so on: settings of the environment may leave it without a lane. Leaves
 * out what was reported already. */
static void describe_ucx(const doctor_answer *version, const char *said, char *out, size_t room, bool *has_settings) {
    size_t n = version->is_ok ? (size_t)snprintf(out, room, "; UCX %.300s", version->said) : 0;
    *has_settings = false;
    out[n] = '\0';
    for (char *const *at = environ; *at && n < room; at++) {
        if (strncmp(*at, "UCX_", 4) != 0)
            continue;
        *has_settings = true;
        if (!strstr(said, *at))
            n += (size_t)snprintf(out + n, room - n, "; %s", *at);
    }
}

static const char *remedy_of_ucx(const doctor_answer *version, bool has_settings) {
    int major = 0, minor = 0;
    if (!version->is_ok)
        return "apt-get install libucx0; without it only processes of this host reach one another";
    if (sscanf(version->said, "%d.%d", &major, &minor) == 2 && (major != TB__UCX_MAJOR || minor < TB__UCX_MINOR))
        return "install a later one, and let TENSORBUS_UCX name its libucp.so.0; until then only processes of this "
               "host reach one another";
    if (has_settings)
        return "change the variables, or unset them: as they are, UCX can't be opened";
    if (!doctor_has_dev_shm())
        return "mend /dev/shm, see below; until then UCX_TLS=tcp, or the lanes of an RDMA adapter, may work";
    return "`ucx_info -d`, of the package ucx-utils, shows what UCX has found";
}

/* Lists the lanes that lead to other hosts, or those that don't, separated by commas. */
static void pick_lanes(const char *lanes, bool is_far, tb__text *out) {
    char lane[128];
    int n;
    for (; sscanf(lanes, "%127s%n", lane, &n) == 1; lanes += n) {
        if (tb__ucx_lane_is_network(lane) == is_far)
            tb__text_add(out, "%s%s", out->count ? ", " : "", lane);
    }
}

/* Lanes of interfaces with a public address, and interfaces that were left out for theirs. */
static void find_public(const char *lanes, tb__text *used, tb__text *left_out) {
    struct if_nameindex *names = if_nameindex();
    for (const struct if_nameindex *at = names; at && at->if_index != 0; at++) {
        char address[TB__ADDRESS_TEXT], lane[IF_NAMESIZE + 8];
        if (!tb__interface_is_public(at->if_name, address))
            continue;
        snprintf(lane, sizeof lane, "tcp/%s", at->if_name);
        const char *found = strstr(lanes, lane);
        bool is_used = found && (found[strlen(lane)] == ' ' || !found[strlen(lane)]);
        tb__text *out = is_used ? used : left_out;
        tb__text_add(out, "%s%s (%s)", out->count ? ", " : "", at->if_name, address);
    }
    if (names)
        if_freenameindex(names);
}

static void warn_of_public(doctor *d, const char *title, const char *lanes) {
    tb__text used = {0}, left_out = {0};
    find_public(lanes, &used, &left_out);
    if (used.count > 0)
        doctor_add(d, DOCTOR_LIMITED, title,
                   "let UCX_NET_DEVICES name private interfaces only: UCX trusts whoever can connect to it",
                   "listens at a public address: %s", used.data);
    if (left_out.count > 0)
        doctor_add(d, DOCTOR_OK, title, "set UCX_NET_DEVICES to use it nevertheless",
                   "does not use interfaces with a public address: %s", left_out.data);
    d->has_failed |= used.failed || left_out.failed;
    tb__text_fini(&used);
    tb__text_fini(&left_out);
}

/* What carries memory of GPUs, where there is one. Without cuda_copy, UCX knows of none. */
static void add_ucx_of_gpus(doctor *d, const char *title, const char *lanes) {
    static const char *const kinds[] = {"cuda_copy/", "cuda_ipc/", "gdr_copy/"};
    tool_gpus gpus;
    tb__text has = {0}, lacks = {0};
    if (tool_gpus_look(&gpus) != TB_OK)
        return;
    for (size_t i = 0; i < sizeof kinds / sizeof *kinds; i++) {
        tb__text *out = strstr(lanes, kinds[i]) ? &has : &lacks;
        tb__text_add(out, "%s%.*s", out->count ? ", " : "", (int)strlen(kinds[i]) - 1, kinds[i]);
    }
    if (strstr(lanes, kinds[0]))
        doctor_add(d, DOCTOR_OK, title, NULL, "takes memory of GPUs: %s%s%s", has.data,
                   lacks.count ? "; it lacks " : "", lacks.count ? lacks.data : "");
    else
        doctor_add(d, DOCTOR_LIMITED, title,
                   "a UCX with CUDA, such as that of pip install libucx-cu13: let TENSORBUS_UCX name its libucp.so.0",
                   "takes no memory of GPUs, which passes through host memory: it lacks %s", lacks.data);
    d->has_failed |= has.failed || lacks.failed;
    tb__text_fini(&has);
    tb__text_fini(&lacks);
}

static void add_ucx(doctor *d, const char *title, const doctor_answer *answer) {
    char about[1024];
    bool has_settings;
    doctor_answer version;
    tb__text far = {0}, near = {0};
    const char *(*const find)(void) = tb__ucx_found;
    doctor_probe(find_library, &find, &version);
    describe_ucx(&version, answer->said, about, sizeof about, &has_settings);
    pick_lanes(answer->is_ok ? answer->said : "", true, &far);
    pick_lanes(answer->is_ok ? answer->said : "", false, &near);
    if (!answer->is_ok)
        doctor_add(d, DOCTOR_LIMITED, title, remedy_of_ucx(&version, has_settings), "%s%s", answer->said, about);
    else if (far.count > 0)
        doctor_add(d, DOCTOR_OK, title, NULL, "opens; for other hosts, too: %s%s", far.data, about);
    else if (near.count > 0)
        doctor_add(d, DOCTOR_LIMITED, title,
                   has_settings
                       ? "let the variables allow tcp or an RDMA adapter, and a device that reaches the other hosts"
                       : "other hosts need a network interface that is up, or an RDMA adapter",
                   "opens, but has no lane to other hosts: %s%s", near.data, about);
    else
        doctor_add(d, DOCTOR_OK, title, NULL, "opens; UCX does not list its lanes%s", about);
    if (answer->is_ok)
        warn_of_public(d, title, answer->said);
    if (answer->is_ok)
        add_ucx_of_gpus(d, title, answer->said);
    d->has_failed |= far.failed || near.failed;
    tb__text_fini(&far);
    tb__text_fini(&near);
}

/* ---- NCCL ------------------------------------------------------------------------------------------------------- */

/* It carries memory of GPUs only, so there is nothing to say of a host without. */
static void add_nccl(doctor *d, const char *title) {
    const char *(*const find)(void) = tb__nccl_found;
    int major = 0, minor = 0;
    tool_gpus gpus;
    doctor_answer version;
    if (tool_gpus_look(&gpus) != TB_OK)
        return;
    doctor_probe(find_library, &find, &version);
    if (!version.is_ok)
        snprintf(version.said, sizeof version.said, "there is no libnccl.so.2");
    bool is_good = sscanf(version.said, "%d.%d", &major, &minor) == 2 && 10000 * major + 100 * minor >= TB__NCCL_OLDEST;
    doctor_add(d, is_good ? DOCTOR_OK : DOCTOR_LIMITED, title,
               is_good ? NULL
                       : "pip install nvidia-nccl-cu13, or let TENSORBUS_NCCL name the libnccl.so.2 of NCCL 2.19 or "
                         "later; until then memory of GPUs goes to other hosts by ucx",
               "%s%s",
               is_good         ? "memory of GPUs: NCCL "
               : version.is_ok ? "this is too old: NCCL "
                               : "",
               version.said);
}

/* ---- NVSHMEM ---------------------------------------------------------------------------------------------------- */

/* Writes the version, the path, and what lies beside it: how it starts, and the ways to other hosts. */
static bool find_nvshmem(const void *arg, int out) {
    static const char start[] = "nvshmem_bootstrap_uid.so", way[] = "nvshmem_transport_";
    const char *found = tb__nvshmem_found(), *path = strchr(found, '/'), *name = path ? strrchr(path, '/') : NULL;
    char folder[1024];
    tb__text ways = {0};
    bool can_start = false;
    (void)arg;
    snprintf(folder, sizeof folder, "%.*s", name ? (int)(name - path) : 1, name ? path : ".");
    DIR *entries = opendir(folder);
    for (struct dirent *e; entries && (e = readdir(entries));) {
        can_start |= strncmp(e->d_name, start, sizeof start - 1) == 0;
        if (strncmp(e->d_name, way, sizeof way - 1) == 0)
            tb__text_add(&ways, "%s%.*s", ways.count ? ", " : "", (int)strcspn(e->d_name + sizeof way - 1, "."),
                         e->d_name + sizeof way - 1);
    }
    if (entries)
        closedir(entries);
    if (*found)
        dprintf(out, "%s; to other hosts: %s%s", found, ways.count ? ways.data : "nothing beside it",
                can_start ? "" : "; it lacks nvshmem_bootstrap_uid.so, without which it can't start");
    tb__text_fini(&ways);
    return *found;
}

/* Where there is a GPU. It is used only if a program names it. */
static void add_nvshmem(doctor *d, const char *title) {
    static const char remedy[] =
        "pip install nvidia-nvshmem-cu13, and let TENSORBUS_NVSHMEM name its libnvshmem_host.so.3";
    tool_gpus gpus;
    doctor_answer answer;
    if (tool_gpus_look(&gpus) != TB_OK)
        return;
    doctor_probe(find_nvshmem, NULL, &answer);
    if (answer.is_ok)
        doctor_add(d, strstr(answer.said, "it lacks") ? DOCTOR_LIMITED : DOCTOR_OK, title,
                   strstr(answer.said, "it lacks") ? remedy : NULL, "NVSHMEM %.600s", answer.said);
    else
        doctor_add(d, DOCTOR_OK, title, remedy,
                   "there is no NVSHMEM %d; only programs that name this transport need it", TB__NVSHMEM_MAJOR);
}

/* ---- All of them ------------------------------------------------------------------------------------------------ */

void doctor_transports(doctor *d, const char *name) {
    for (const tb_transport_ops *const *ops = tb__transports; *ops; ops++) {
        char title[64];
        doctor_answer answer;
        snprintf(title, sizeof title, "%s %s", name, (*ops)->name);
        if (*ops == &tb__nccl_ops) {
            add_nccl(d, title);
            continue;
        }
        if (*ops == &tb__nvshmem_ops) {
            add_nvshmem(d, title);
            continue;
        }
        doctor_probe(open_transport, *ops, &answer);
        if (*ops == &tb__ucx_ops)
            add_ucx(d, title, &answer);
        else if (answer.is_ok)
            doctor_add(d, DOCTOR_OK, title, NULL, "opens; for processes of this host");
        else
            doctor_add(d, DOCTOR_FAILED, title,
                       "let processes have what it lacks: limits (ulimit -a), the container's seccomp profile", "%s",
                       answer.said);
    }
}
