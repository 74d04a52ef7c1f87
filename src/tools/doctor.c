/* tensorbus doctor: what is there, what is not, and what to do about it. */
#include "tools/doctor.h"

#include "bus/store/curl.h"
#include "loop/loop_inside.h"
#include "tools/agents.h"

#include <dlfcn.h>
#include <microhttpd.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

enum { STORE, TOKEN_FILE, JSON, NOPTIONS };

static const tool_option options[NOPTIONS + 1] = {
    [STORE] = {"store", "URL", "also check whether this store answers"},
    [TOKEN_FILE] = {"token-file", "FILE", "its first line is the token of the store"},
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

/* ---- Libraries ----------------------------------------------------------------------------------------------- */

static bool is_library(const void *arg, int out) {
    (void)out;
    return dlopen(arg, RTLD_LAZY | RTLD_LOCAL) != NULL;
}

/* Its ABI is its own, so one that is there is of use only to a tensorbus that was built with it. */
static void add_mpi(doctor *d, const char *name) {
    static const struct {
        const char *name, *library, *title, *remedy;
    } known[] = {
        {"openmpi", "libmpi.so.40", "Open MPI (libmpi.so.40)",
         "apt-get install openmpi-bin, where MPI is to start the ranks"},
        {"mpich", "libmpich.so.12", "MPICH (libmpich.so.12)", "apt-get install mpich, where MPI is to start the ranks"},
    };
    const char *remedy = NULL;
    char usable[160] = "", unusable[160] = "";
    for (size_t i = 0; i < sizeof known / sizeof *known; i++) {
        doctor_answer answer;
        bool is_built = strstr(TB_BUILT_MPIS, known[i].name);
        char *out = is_built ? usable : unusable;
        size_t n = strlen(out);
        doctor_probe(is_library, known[i].library, &answer);
        if (answer.is_ok)
            snprintf(out + n, sizeof usable - n, "%s%s", n ? ", " : "", known[i].title);
        if (is_built && !remedy)
            remedy = known[i].remedy;
    }
    if (!remedy)
        remedy = "build tensorbus again, where libopenmpi-dev or libmpich-dev is, if MPI is to start the ranks";
    if (*usable)
        doctor_add(d, DOCTOR_OK, name, NULL, "%s%s%s", usable, *unusable ? "; built without " : "", unusable);
    else if (*unusable)
        doctor_add(d, DOCTOR_LIMITED, name, remedy, "%s: there, but this tensorbus was built without", unusable);
    else
        doctor_add(d, DOCTOR_LIMITED, name, remedy,
                   "no MPI that it was built with is there; only tb_world_from_mpi "
                   "needs one");
}

static void add_curl(doctor *d, const char *name) {
    const tb__curl *curl;
    if (tb__curl_load(&curl) == TB_OK)
        doctor_add(d, DOCTOR_OK, name, NULL, "libcurl is installed");
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
    tb__get_machine_id(NULL, id);
    gethostname(called, sizeof called - 1);
    doctor_add(d, DOCTOR_OK, name, NULL, "'%s', host name %s; ranks with the same id use shm", id, called);
}

/* ---- The command --------------------------------------------------------------------------------------------- */

static const struct {
    const char *name;
    void (*look)(doctor *d, const char *name);
} checks[] = {
    {"descriptors", doctor_descriptors}, /* without some there is nothing to be found out */
    {"transport", doctor_transports},
    {"mpi", add_mpi},
    {"host id", add_host},
    {"store", doctor_store},
    {"process_vm", doctor_process_vm},
    {"tb_alloc", doctor_tb_alloc},
    {"huge pages", doctor_huge_pages},
    {"/dev/shm", doctor_dev_shm},
    {"locked memory", doctor_memlock},
    {"cores", doctor_cores},
    {"vector instructions", doctor_vectors},
    {"large copies", doctor_copies},
    {"CUDA", doctor_gpus},
    {"etcd", add_curl},
    {"HTTP", add_http},
};

static void add_table(tb__text *out, const doctor *d) {
    tool_table table = {0};
    tool_table_columns(&table, "state", "what", "found");
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
    char token[TB__TOKEN_ROOM];
    tb_status status = TB_OK;
    if (value[TOKEN_FILE] && !value[STORE])
        return tool_fail(TOOL_BAD_INPUT, "--token-file is for --store, which is missing");
    if (value[TOKEN_FILE]) {
        status = tool_read_token(value[TOKEN_FILE], token);
        d.token = token;
    }
    if (status != TB_OK)
        return tool_fail(TOOL_BAD_INPUT, "%s", tb_error_detail());
    for (size_t i = 0; i < sizeof checks / sizeof *checks && !d.is_refused && !d.is_over; i++)
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
    .summary = "check whether this machine has what tensorbus needs, and what to do if not",
    .usage = "[--store URL [--token-file FILE]] [--json]",
    .details =
        "Each line is the result of one check:\n"
        "\n"
        "  ok       it works\n"
        "  limited  something is slower or not possible; the next line says what to do\n"
        "  failed   tensorbus does not work without it\n"
        "\n"
        "Transports are opened in the same way as by a program, so their errors are those that a program would get.\n"
        "Two unrelated processes try to read each other's memory, and a copy to a GPU and back is made. The exit\n"
        "status is 1 if a check has failed; with --store, that includes a store that does not answer.\n",
    .options = options,
    .run = run,
};
