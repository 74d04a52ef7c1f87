/* tensorbus dashboard: a page that shows what the agents of this user do, all of them together. */
#include "tools/agents.h"
#include "tools/http.h"

#include "base/descriptors.h"

#include <signal.h>
#include <stdio.h>
#include <string.h>

enum { SOCKET, LISTEN, TOKEN_FILE };

enum { ANSWER_MS = 1000 }; /* what an agent gets to answer */

static const tool_option options[] = {
    [SOCKET] = {"socket", "PATH", "only the agent that listens there"},
    [LISTEN] = {"listen", "[ADDRESS:]PORT", "where browsers find the page (127.0.0.1:9180); port 0 is any"},
    [TOKEN_FILE] = {"token-file", "FILE", "its first line is the agents' token, and that of browsers elsewhere"},
    {NULL, NULL, NULL},
};

static const char details[] =
    "Prints \"page at URL\" once it serves, and runs until SIGTERM or SIGINT. The page shows ranks, pairs,\n"
    "batches and their versions, transfers under way, bytes between ranks, and failures, and is up to date\n"
    "within a second. It finds agents as `tensorbus status` does. It listens on loopback unless told\n"
    "otherwise. Elsewhere, browsers are asked for a password, which is the token; any user name will do.\n"
    "/status has the same as JSON.\n";

typedef struct dashboard {
    pthread_mutex_t lock;
    tool_agents agents;
    json_t *seats; /* by the path of its socket, where each agent that has answered sits */
} dashboard;

static void remember_seat(dashboard *d, const tool_agent_view *agent) {
    static const char *const facts[] = {"group", "index", "size", "rank", "version", "pid"};
    json_t *seat = json_object();
    for (size_t i = 0; i < sizeof facts / sizeof *facts; i++)
        json_object_set(seat, facts[i], json_object_get(agent->report, facts[i]));
    json_object_set_new(d->seats, agent->path, seat);
}

static tb_status look(dashboard *d, char **out) {
    TB_TRY(tool_agents_find(&d->agents));
    tool_agents_ask(&d->agents, ANSWER_MS);
    json_t *view = tool_view_create("agents of this machine");
    for (size_t i = 0; i < d->agents.list.count; i++) {
        const tool_agent_view *agent = &d->agents.list.item[i];
        if (agent->report)
            remember_seat(d, agent);
        const json_t *seat = json_object_get(d->seats, agent->path);
        bool has_ended = tool_agent_has_ended(agent);
        if (agent->report || seat || !has_ended) /* sockets that were left behind before say nothing */
            tool_view_add_agent(view, agent->path, agent->report, agent->why, has_ended, seat);
    }
    return tool_view_dump(view, out);
}

static tb_status take_view(void *arg, char **out) {
    dashboard *d = arg;
    pthread_mutex_lock(&d->lock);
    tb_status status = look(d, out);
    pthread_mutex_unlock(&d->lock);
    return status;
}

static int run(const tb__config *config, const char *const *value) {
    (void)config;
    char token[TOOL_MAX_TOKEN] = "";
    tool_http *http;
    dashboard d = {.lock = PTHREAD_MUTEX_INITIALIZER,
                   .agents = {.socket = value[SOCKET], .name = "tensorbus dashboard"},
                   .seats = json_object()};
    tool_http_opts opts = {.option = "listen",
                           .place = value[LISTEN] ? value[LISTEN] : "9180",
                           .needs_token = true,
                           .report = take_view,
                           .view = take_view,
                           .arg = &d};
    if (tool_http_check("listen", opts.place) != TB_OK)
        return tool_fail(TOOL_BAD_INPUT, "%s", tb_error_detail());
    if (value[TOKEN_FILE]) {
        if (tool_read_token(value[TOKEN_FILE], token) != TB_OK)
            return tool_fail(TOOL_BAD_INPUT, "%s", tb_error_detail());
        d.agents.token = opts.token = token;
    }
    tb__descriptor_limit_raise();
    sigset_t ends; /* before the first thread */
    sigemptyset(&ends);
    sigaddset(&ends, SIGTERM);
    sigaddset(&ends, SIGINT);
    sigprocmask(SIG_BLOCK, &ends, NULL);
    tb_status status = tool_http_start(&opts, &http);
    if (status == TB_OK) {
        tb__text out = {0};
        tb__text_add(&out, "page at %s/\n", tool_http_url(http));
        int number = 0, printed = tool_print(&out);
        while (printed == TOOL_OK && sigwait(&ends, &number) != 0)
            ;
        tool_http_stop(http);
    }
    tool_agents_fini(&d.agents);
    json_decref(d.seats);
    return status == TB_OK ? TOOL_OK : tool_fail_status(status);
}

const tool_command tool_dashboard = {
    .name = "dashboard",
    .summary = "serve a live page of what agents do",
    .usage = "[--listen [ADDRESS:]PORT] [--socket PATH] [--token-file FILE]",
    .details = details,
    .options = options,
    .run = run,
};
