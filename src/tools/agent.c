/* tensorbus agent: a seat on the bus, for programs that are not on it themselves. */
#include "bus/agent/agent.h"
#include "tools/agents.h"
#include "tools/http.h"

#include "base/descriptors.h"

#include <errno.h>
#include <inttypes.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/un.h>

enum { NAME, RANK, SIZE, STORE, SOCKET, TOKEN_FILE, TIMEOUT, WORKERS, TRANSPORT, HOST, CHECKSUM, NO_GPU, HTTP };
enum { MOST_RANKS = 1 << 20 };

static const tool_option options[] = {
    [NAME] = {"name", "GROUP", "the group of the seat: trainer, inference, ..."},
    [RANK] = {"rank", "R", "the seat: 0 to N-1"},
    [SIZE] = {"size", "N", "the number of seats in the group"},
    [STORE] = {"store", "URL", "where ranks meet: unix:/run/bus.sock, tcp://host:7000, etcd://host:2379"},
    [SOCKET] = {"socket", "PATH", "where programs connect; default: $XDG_RUNTIME_DIR/tensorbus/GROUP-R.sock"},
    [TOKEN_FILE] = {"token-file", "FILE", "its first line is the token, for the store and for programs"},
    [TIMEOUT] = {"timeout", "SECONDS", "to join, and for commands that set no timeout; default: 30"},
    [WORKERS] = {"workers", "N", "threads that copy; default: the machine's cores divided by its ranks"},
    [TRANSPORT] = {"transport", "NAME",
                   "the only one to use: shm, ucx (auto: for each rank the fastest that gets there)"},
    [HOST] = {"host", "ID", "agents with equal ids share memory; default: the machine and its network namespace"},
    [CHECKSUM] = {"checksum", NULL, "send every bucket with a checksum, which the receiver compares"},
    [NO_GPU] = {"no-gpu", NULL, "use no GPU: programs copy their GPU tensors through host memory"},
    [HTTP] = {"http", "[ADDRESS:]PORT", "serve a page, /metrics and /status over HTTP; default address: 127.0.0.1"},
    {NULL, NULL, NULL},
};

static const char details[] =
    "Programs of the same user connect to the socket, and the agent moves their tensors; see\n"
    "docs/operations.md. On SIGTERM or SIGINT the agent accepts no new commands, and ends when the running ones\n"
    "have ended. If no process serves the store, and the URL is an address of this machine, the agent serves\n"
    "it. On a loopback address, --http needs no token: every user of the machine can read the page. Any other\n"
    "address needs --token-file; clients give the token as a bearer token, or as the password of any user. With\n"
    "port 0 the system chooses a free port, which the agent prints.\n";

enum { REPORT_MS = 5000 };

static tb__agent *running; /* for the signal handler */

static void on_signal(int number) {
    (void)number;
    tb__agent_stop(running);
}

static tb_status read_number(const char *option, const char *text, long most, long *out) {
    char *end;
    errno = 0;
    long n = strtol(text, &end, 10);
    if (errno || end == text || *end || n < 0 || n > most)
        return tb__fail(TB_INVALID, "--%s takes a number from 0 to %ld, not '%.60s'", option, most, text);
    *out = n;
    return TB_OK;
}

/* In the user's folder, which is made if it is not there. */
static tb_status choose_socket(const char *group, long rank, char *out, size_t room) {
    char folder[TOOL_MAX_FOLDER];
    if (strchr(group, '/') || *group == '.')
        return tb__fail(TB_INVALID,
                        "--name '%.60s' can't be the name of a socket: it %s; choose another, or give --socket", group,
                        *group == '.' ? "begins with a dot" : "has a slash");
    TB_TRY(tool_agents_make_folder(folder));
    int n = snprintf(out, room, "%s/%s-%ld.sock", folder, group, rank);
    return n > 0 && (size_t)n < room
               ? TB_OK
               : tb__fail(TB_INVALID,
                          "the path of the agent's socket has %d bytes, and may have %zu: %s...; choose a shorter "
                          "--name, or give --socket",
                          n, room - 1, out);
}

static tb_status read_all(const char *const *value, tb__agent_opts *o, char *socket, size_t room,
                          char token[TB__TOKEN_ROOM]) {
    long rank, size, number = 0;
    for (int i = NAME; i <= STORE; i++) {
        if (!value[i])
            return tb__fail(TB_INVALID, "--%s is missing; see `tensorbus agent --help`", options[i].name);
    }
    if (value[HTTP])
        TB_TRY(tool_http_check("http", value[HTTP]));
    TB_TRY(read_number("rank", value[RANK], MOST_RANKS - 1, &rank));
    TB_TRY(read_number("size", value[SIZE], MOST_RANKS, &size));
    if (rank >= size)
        return tb__fail(TB_INVALID, "--rank %ld is none of the %ld seats of --size", rank, size);
    *o = (tb__agent_opts){.store = value[STORE], .group = value[NAME], .index = (int32_t)rank, .size = (int32_t)size};
    if (!value[SOCKET])
        TB_TRY(choose_socket(value[NAME], rank, socket, room));
    o->socket = value[SOCKET] ? value[SOCKET] : socket;
    if (value[TOKEN_FILE]) {
        TB_TRY(tool_read_token(value[TOKEN_FILE], token));
        o->token = token;
    }
    if (value[TIMEOUT])
        TB_TRY(read_number("timeout", value[TIMEOUT], 86400, &number));
    o->timeout_ms = (int)number * 1000;
    number = 0;
    if (value[WORKERS])
        TB_TRY(read_number("workers", value[WORKERS], 256, &number));
    o->workers = (int)number;
    o->transport = value[TRANSPORT];
    o->host = value[HOST];
    o->checksum = value[CHECKSUM] != NULL;
    o->no_gpu = value[NO_GPU] != NULL;
    return TB_OK;
}

/* ---- HTTP ------------------------------------------------------------------------------------------------------ */

static tb_status report(void *arg, char **out) {
    return tb__agent_report(arg, REPORT_MS, out);
}

static tb_status view(void *arg, char **out) {
    char *text, title[128];
    json_error_t error;
    TB_TRY(report(arg, &text));
    json_t *parsed = json_loads(text, 0, &error);
    free(text);
    if (!parsed)
        return tb__fail(TB_INTERNAL, "the report can't be read: %s", error.text);
    snprintf(title, sizeof title, "agent %.80s %" PRId64, tool_json_text(parsed, "group"),
             tool_json_int(parsed, "index"));
    json_t *made = tool_view_create(title);
    tool_view_add_agent(made, title, parsed, "", false, NULL);
    json_decref(parsed);
    return tool_view_dump(made, out);
}

/* ---- Serving --------------------------------------------------------------------------------------------------- */

static int run(const tb__config *config, const char *const *value) {
    tb__agent_opts opts;
    char socket[sizeof((struct sockaddr_un *)0)->sun_path], token[TB__TOKEN_ROOM];
    tool_http *http = NULL;
    tb_status status = read_all(value, &opts, socket, sizeof socket, token);
    opts.plan_bytes = tb__config_plan_bytes(config);
    tb__descriptor_limit_raise(); /* clients hand over descriptors of their memory, and there may be many */
    if (status == TB_OK)
        status = tb__agent_create(&opts, &running);
    if (status == TB_OK && value[HTTP])
        status = tool_http_start(&(tool_http_opts){.option = "http",
                                                   .place = value[HTTP],
                                                   .token = opts.token,
                                                   .has_metrics = true,
                                                   .report = report,
                                                   .view = view,
                                                   .arg = running},
                                 &http);
    if (status != TB_OK) {
        int failed = tool_fail_status(status);
        tb__agent_destroy(running);
        return failed;
    }
    struct sigaction action = {.sa_handler = on_signal};
    sigaction(SIGTERM, &action, NULL);
    sigaction(SIGINT, &action, NULL);
    printf("agent %s %" PRId32 " of %" PRId32 ", bus rank %" PRId32 ", listens at %s\n", opts.group, opts.index,
           opts.size, tb__agent_rank(running), opts.socket);
    if (http)
        printf("metrics at %s/metrics\npage at %s/\n", tool_http_url(http), tool_http_url(http));
    fflush(stdout);
    tb__agent_run(running);
    tool_http_stop(http);
    tb__agent_destroy(running);
    return TOOL_OK;
}

const tool_command tool_agent = {
    .name = "agent",
    .summary = "hold a seat on the bus, and move tensors for programs on this machine",
    .usage = "--name GROUP --rank R --size N --store URL [--socket PATH] [OPTION...]",
    .details = details,
    .options = options,
    .run = run,
};
