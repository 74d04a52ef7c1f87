/* tensorbus doctor: what is there, what is not, and what to do about it. */
#include "tools/doctor.h"

#include "bus/store/address.h"
#include "bus/store/curl.h"
#include "bus/store/store.h"
#include "exec/engine_inside.h"
#include "tools/agents.h"
#include "transport/transport.h"

#include <dlfcn.h>
#include <microhttpd.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

enum { STORE, TOKEN_FILE, JSON, NOPTIONS };

static const tool_option options[NOPTIONS + 1] = {
    [STORE] = {"store", "URL", "also see whether this store answers"},
    [TOKEN_FILE] = {"token-file", "FILE", "its first line is the store's token"},
    [JSON] = {"json", NULL, "print JSON"},
};

static const char *const state_names[] = {
    [DOCTOR_OK] = "ok",
    [DOCTOR_LIMITED] = "limited",
    [DOCTOR_FAILED] = "failed",
};

void doctor_add(doctor *d, doctor_state state, const char *name, const char *remedy, const char *format, ...) {
    doctor_finding finding = {.name = tb__strdup(name), .remedy = remedy, .state = state};
    va_list args;
    va_start(args, format);
    if (vasprintf(&finding.found, format, args) < 0)
        finding.found = NULL;
    va_end(args);
    if (finding.name && finding.found && tb__vec_push(&d->findings, finding))
        return;
    free(finding.name);
    free(finding.found);
    d->has_failed = true;
}

/* ---- Transports ---------------------------------------------------------------------------------------------- */

static void ignore_loss(void *arg, int32_t peer, const char *why) {
    (void)arg;
    (void)peer;
    (void)why;
}

/* The same call as a world's, so that what is told is what a world would say. */
static bool open_transport(const void *arg, int out) {
    tb_transport transport;
    tb_transport_env env = {.rank = 0, .lost = ignore_loss};
    if (tb__transport_open(arg, &env, &transport) != TB_OK) {
        (void)!write(out, tb_error_detail(), strlen(tb_error_detail()));
        return false;
    }
    tb__transport_close(&transport);
    return true;
}

static void add_transports(doctor *d, const char *name) {
    for (const tb_transport_ops *const *ops = tb__transports; *ops; ops++) {
        char title[64];
        doctor_answer answer;
        bool is_essential = *ops == &tb__self_ops || (*ops)->caps & TB_NEAR_ONLY;
        snprintf(title, sizeof title, "%s %s", name, (*ops)->name);
        doctor_probe(open_transport, (*ops)->name, &answer);
        if (answer.is_ok)
            doctor_add(d, DOCTOR_OK, title, NULL, "%s",
                       is_essential ? "opens; for processes of this host" : "opens; for other hosts, too");
        else
            doctor_add(d, is_essential ? DOCTOR_FAILED : DOCTOR_LIMITED, title,
                       is_essential ? NULL
                                    : "see ucx, below; without it the processes of this host reach one another, and "
                                      "nobody else",
                       "%s", answer.said);
    }
}

/* "tcp/eth0, tcp/lo, posix/memory": what stands in lines such as "# Transport: tcp" and "# Device: eth0". */
static bool list_lanes(const void *arg, int out) {
    (void)arg;
    char line[256], word[64], transport[64] = "";
    FILE *said = popen("ucx_info -d 2>/dev/null", "re");
    bool is_any = false;
    while (said && fgets(line, sizeof line, said)) {
        if (sscanf(line, "# Transport: %63s", transport) != 1 && sscanf(line, "# Device: %63s", word) == 1) {
            dprintf(out, "%s%s/%s", is_any ? ", " : "", transport, word);
            is_any = true;
        }
    }
    return said && pclose(said) == 0 && is_any;
}

/* A world needs none of this to say what UCX lacks; it tells what UCX could use. */
static bool get_ucx_version(const void *arg, int out) {
    (void)arg;
    void *library = dlopen("libucp.so.0", RTLD_NOW | RTLD_LOCAL);
    const char *(*version)(void) = NULL;
    void *function = library ? dlsym(library, "ucp_get_version_string") : NULL;
    memcpy(&version, &function, sizeof version);
    return version && write(out, version(), strlen(version())) > 0;
}

/* "; UCX_TLS=tcp", and so on: what the environment tells it, which may leave it without a lane. */
static void list_ucx_settings(char *out, size_t room) {
    size_t n = 0;
    out[0] = '\0';
    for (char *const *at = environ; *at && n < room; at++) {
        if (strncmp(*at, "UCX_", 4) == 0)
            n += (size_t)snprintf(out + n, room - n, "; %s", *at);
    }
}

static void add_ucx(doctor *d, const char *name) {
    char settings[512];
    doctor_answer version, lanes;
    doctor_probe(get_ucx_version, NULL, &version);
    if (!version.is_ok) {
        doctor_add(d, DOCTOR_LIMITED, name, "apt-get install libucx0", "libucp.so.0 is not there: no other hosts");
        return;
    }
    doctor_probe(list_lanes, NULL, &lanes);
    list_ucx_settings(settings, sizeof settings);
    if (lanes.is_ok)
        doctor_add(d, DOCTOR_OK, name,
                   *settings ? "if somebody is not reached: what the variables say has to allow a lane that leads there"
                             : NULL,
                   "%s; lanes: %s%s", version.said, lanes.said, settings);
    else
        doctor_add(d, DOCTOR_OK, name, "apt-get install ucx-utils, for `ucx_info -d`, to see its lanes", "%s%s",
                   version.said, settings);
}

/* ---- Libraries ----------------------------------------------------------------------------------------------- */

static bool is_library(const void *arg, int out) {
    (void)out;
    return dlopen(arg, RTLD_LAZY | RTLD_LOCAL) != NULL;
}

static void add_mpi(doctor *d, const char *name) {
    static const struct {
        const char *library, *title;
    } known[] = {{"libmpi.so.40", "Open MPI (libmpi.so.40)"}, {"libmpich.so.12", "MPICH (libmpich.so.12)"}};
    char found[160] = "";
    for (size_t i = 0; i < sizeof known / sizeof *known; i++) {
        doctor_answer answer;
        size_t n = strlen(found);
        doctor_probe(is_library, known[i].library, &answer);
        if (answer.is_ok)
            snprintf(found + n, sizeof found - n, "%s%s", n ? ", " : "", known[i].title);
    }
    if (*found)
        doctor_add(d, DOCTOR_OK, name, NULL, "%s", found);
    else
        doctor_add(d, DOCTOR_LIMITED, name, "apt-get install openmpi-bin, or mpich, where MPI is to start the ranks",
                   "neither Open MPI nor MPICH is there; only tb_world_from_mpi needs one");
}

static void add_curl(doctor *d, const char *name) {
    const tb__curl *curl;
    if (tb__curl_load(&curl) == TB_OK)
        doctor_add(d, DOCTOR_OK, name, NULL, "libcurl is there");
    else
        doctor_add(d, DOCTOR_LIMITED, name, "apt-get install libcurl4, or use a store that is not etcd", "%s",
                   tb_error_detail());
}

static void add_http(doctor *d, const char *name) {
    doctor_add(d, DOCTOR_OK, name, NULL, "libmicrohttpd %s", MHD_get_version());
}

/* ---- Whom it meets ------------------------------------------------------------------------------------------- */

static void add_host(doctor *d, const char *name) {
    char id[TB__CONTACT_PREFIX + 1] = "", called[256] = "";
    tb__get_host(NULL, id);
    gethostname(called, sizeof called - 1);
    doctor_add(d, DOCTOR_OK, name, NULL, "'%s', called %s; who says the same is reached by shm", id, called);
}

static void add_store(doctor *d, const char *name) {
    enum { TIMEOUT_MS = 5000 };
    if (!d->store)
        return;
    tb__store *store = NULL;
    tb__store_value value = {0};
    tb_status status = tb__store_open(d->store, d->token, TIMEOUT_MS, &store);
    if (status == TB_OK)
        status = tb__store_get(store, "doctor", &value);
    tb__store_value_fini(&value);
    tb__store_close(store);
    d->is_refused = status == TB_INVALID;
    if (status == TB_OK)
        doctor_add(d, DOCTOR_OK, name, NULL, "%s answers%s", d->store,
                   tb__store_url_is_local(d->store) ? "; processes of other hosts can't reach it" : "");
    else if (!d->is_refused)
        doctor_add(d, DOCTOR_FAILED, name,
                   status == TB_DENIED ? "give the store's token: --token-file FILE"
                                       : "start it (tensorbus store --listen URL, or etcd), and open its port",
                   "%s", tb_error_detail());
}

/* ---- The command --------------------------------------------------------------------------------------------- */

static const struct {
    const char *name;
    void (*look)(doctor *d, const char *name);
} checks[] = {
    {"transport", add_transports},
    {"ucx", add_ucx},
    {"mpi", add_mpi},
    {"host id", add_host},
    {"store", add_store},
    {"process_vm", doctor_process_vm},
    {"tb_alloc", doctor_tb_alloc},
    {"huge pages", doctor_huge_pages},
    {"/dev/shm", doctor_dev_shm},
    {"locked memory", doctor_memlock},
    {"descriptors", doctor_descriptors},
    {"cores", doctor_cores},
    {"AVX2", doctor_avx2},
    {"etcd", add_curl},
    {"HTTP", add_http},
};

static void add_table(tb__text *out, const doctor *d) {
    tool_table table = {0};
    tool_table_column(&table, "state", false);
    tool_table_column(&table, "what", false);
    tool_table_column(&table, "found", false);
    for (size_t i = 0; i < d->findings.count; i++) {
        const doctor_finding *f = &d->findings.item[i];
        tool_table_cell(&table, "%s", state_names[f->state]);
        tool_table_cell(&table, "%s", f->name);
        tool_table_cell(&table, "%s", f->found);
        if (!f->remedy)
            continue;
        tool_table_cell(&table, "%s", "");
        tool_table_cell(&table, "%s", "");
        tool_table_cell(&table, "  -> %s", f->remedy);
    }
    tool_table_finish(&table, out);
}

static void add_json(tb__text *out, const doctor *d) {
    tb__text_add(out, "[");
    for (size_t i = 0; i < d->findings.count; i++) {
        const doctor_finding *f = &d->findings.item[i];
        tb__text_add(out, "%s{\"name\":", i ? ",\n" : "");
        tb__text_add_json(out, f->name);
        tb__text_add(out, ",\"state\":\"%s\",\"found\":", state_names[f->state]);
        tb__text_add_json(out, f->found);
        if (f->remedy) {
            tb__text_add(out, ",\"remedy\":");
            tb__text_add_json(out, f->remedy);
        }
        tb__text_add(out, "}");
    }
    tb__text_add(out, "]\n");
}

static int report(const doctor *d, bool is_json) {
    tb__text out = {0}, failed = {0};
    char *names = NULL;
    (is_json ? add_json : add_table)(&out, d);
    out.failed |= d->has_failed;
    int exit_status = tool_print(&out);
    for (size_t i = 0; i < d->findings.count; i++) {
        if (d->findings.item[i].state == DOCTOR_FAILED)
            tb__text_add(&failed, "%s%s", failed.count ? ", " : "", d->findings.item[i].name);
    }
    if (exit_status == TOOL_OK && tb__text_take(&failed, &names) == TB_OK && *names)
        exit_status = tool_fail(TOOL_FAILED, "essential, and not well: %s", names);
    free(names);
    tb__text_fini(&failed);
    return exit_status;
}

static int run(const tb__config *config, const char *const *value) {
    (void)config;
    doctor d = {.store = value[STORE]};
    char token[TOOL_MAX_TOKEN];
    tb_status status = TB_OK;
    if (value[TOKEN_FILE] && !value[STORE])
        return tool_fail(TOOL_BAD_INPUT, "--token-file is for --store, which is missing");
    if (value[TOKEN_FILE]) {
        status = tool_read_token(value[TOKEN_FILE], token);
        d.token = token;
    }
    if (status != TB_OK)
        return tool_fail(TOOL_BAD_INPUT, "%s", tb_error_detail());
    for (size_t i = 0; i < sizeof checks / sizeof *checks && !d.is_refused; i++)
        checks[i].look(&d, checks[i].name);
    int exit_status = d.is_refused ? tool_fail(TOOL_BAD_INPUT, "%s", tb_error_detail()) : report(&d, value[JSON]);
    for (size_t i = 0; i < d.findings.count; i++) {
        free(d.findings.item[i].name);
        free(d.findings.item[i].found);
    }
    free(d.findings.item);
    return exit_status;
}

const tool_command tool_doctor = {
    .name = "doctor",
    .summary = "look at what this machine gives to tensorbus, and say what to do about what is missing",
    .usage = "[--store URL [--token-file FILE]] [--json]",
    .details = "Each line says how it is with one thing:\n\n"
               "  ok       it is there\n"
               "  limited  something is slower without it, or can't be had; the line below says what to do\n"
               "  failed   tensorbus does not work without it\n\n"
               "Transports are opened as a world opens them, so that what is told is what a world would say. Whether\n"
               "processes may read one another's memory is tried out, by two that are not parent and child to the\n"
               "system. The exit status is 1 if something has failed: a store that was asked for has to answer.\n",
    .options = options,
    .run = run,
};
