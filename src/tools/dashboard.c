/* tensorbus dashboard: a page that shows what the agents of this user do, all of them together, and, with --store, who
 * is on the bus. */
#include "tools/agents.h"
#include "tools/http.h"

#include "base/descriptors.h"
#include "base/process.h"

#include <inttypes.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>

enum { STORE, SOCKET, LISTEN, TOKEN_FILE };

enum {
    ANSWER_MS = 1000,      /* what an agent gets to answer */
    STORE_MS = 5000,       /* what the store gets */
    REMEMBER_SECONDS = 600 /* how long a seat is shown that the store no longer has */
};

static const tool_option options[] = {
    [STORE] = {"store", "URL", "also show the whole bus: all machines and seats that this store knows"},
    [SOCKET] = {"socket", "PATH", "show only the agent at this socket"},
    [LISTEN] = {"listen", "[ADDRESS:]PORT", "where to serve the page; default: 127.0.0.1:9180; port 0: any free port"},
    [TOKEN_FILE] = {"token-file", "FILE",
                    "its first line is the token of the store and the agents, and browsers' password"},
    {NULL, NULL, NULL},
};

static const char details[] =
    "Prints \"page at URL\", and serves the page until SIGTERM or SIGINT. The page shows ranks, pairs, batches\n"
    "with their versions, transfers under way, bytes between ranks, and failures; it is at most a second old.\n"
    "Agents are found as by `tensorbus status`. With --store it also shows groups, pairs, batches and versions\n"
    "of the whole bus, with or without agents, and, of transfers under way, the part of each group's first\n"
    "rank. Bytes between ranks and times of phases are those of this user's agents on this machine.\n"
    "\n"
    "On a loopback address the page needs no token. With any other address --token-file is needed, and browsers\n"
    "ask for a user and a password: the user can be any, the password is the token. /status has the data as\n"
    "JSON.\n";

typedef struct dashboard {
    pthread_mutex_t lock;
    tool_agents agents;
    json_t *seats; /* by the path of its socket, where each agent that has answered sits */
    tool_bus bus;  /* without a URL: there is none */
    json_t *known; /* by "GROUP INDEX", the seats that the store had, and since when it does not ("gone") */
} dashboard;

static void remember_seat(dashboard *d, const tool_agent_view *agent) {
    static const char *const facts[] = {"group", "index", "size", "rank", "version", "pid"};
    json_t *seat = json_object();
    for (size_t i = 0; i < sizeof facts / sizeof *facts; i++)
        json_object_set(seat, facts[i], json_object_get(agent->report, facts[i]));
    json_object_set_new(d->seats, agent->path, seat);
}

/* Puts the seats that were there before into the bus, as lost: the store forgets who leaves or dies. */
static void add_gone_seats(dashboard *d, json_t *bus) {
    json_t *seats = json_object_get(bus, "seats"), *seat;
    int64_t now = tb__unix_seconds();
    json_t *present = json_object();
    size_t i;
    json_array_foreach(seats, i, seat) {
        char key[512];
        if (!json_is_true(json_object_get(seat, "joined")))
            continue;
        snprintf(key, sizeof key, "%s %" PRId64, tool_json_text(seat, "group"), tool_json_int(seat, "index"));
        json_object_set(present, key, seat);
    }
    json_object_update(d->known, present);
    const char *key;
    void *next;
    json_object_foreach_safe(d->known, next, key, seat) {
        if (json_object_get(present, key))
            continue;
        if (!json_object_get(seat, "gone"))
            json_object_set_new(seat, "gone", json_integer(now));
        if (now - tool_json_int(seat, "gone") > REMEMBER_SECONDS)
            json_object_del(d->known, key);
        else
            json_array_append(seats, seat);
    }
    json_decref(present);
}

/* The page goes on with agents while the store is silent, and says why. */
static json_t *look_at_bus(dashboard *d) {
    json_t *bus;
    if (tool_bus_look(&d->bus, &bus) != TB_OK)
        return json_pack("{s:s,s:s,s:[],s:[],s:[],s:[]}", "store", d->bus.url, "why", tb_error_detail(), "groups",
                         "seats", "pairs", "batches");
    add_gone_seats(d, bus);
    return bus;
}

static tb_status look(dashboard *d, char **out) {
    TB_TRY(tool_agents_find(&d->agents));
    tool_agents_ask(&d->agents, ANSWER_MS);
    json_t *view = tool_view_create(d->bus.url ? d->bus.url : "agents of this machine");
    if (d->bus.url)
        json_object_set_new(view, "bus", look_at_bus(d));
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
    char token[TB__TOKEN_ROOM] = "";
    tool_http *http;
    dashboard d = {.lock = PTHREAD_MUTEX_INITIALIZER,
                   .agents = {.socket = value[SOCKET], .name = "tensorbus dashboard"},
                   .bus = {.url = value[STORE], .timeout_ms = STORE_MS}};
    tool_http_opts opts = {.option = "listen",
                           .place = value[LISTEN] ? value[LISTEN] : "9180",
                           .report = take_view,
                           .view = take_view,
                           .arg = &d};
    if (tool_http_check("listen", opts.place) != TB_OK)
        return tool_fail(TOOL_BAD_INPUT, "%s", tb_error_detail());
    if (value[TOKEN_FILE]) {
        if (tool_read_token(value[TOKEN_FILE], token) != TB_OK)
            return tool_fail(TOOL_BAD_INPUT, "%s", tb_error_detail());
        d.agents.token = d.bus.token = opts.token = token;
    }
    d.seats = json_object();
    d.known = json_object();
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
    tool_bus_close(&d.bus);
    json_decref(d.seats);
    json_decref(d.known);
    return status == TB_OK ? TOOL_OK : tool_fail_status(status);
}

const tool_command tool_dashboard = {
    .name = "dashboard",
    .summary = "serve a web page that shows agents and the bus, and updates itself",
    .usage = "[--store URL] [--listen [ADDRESS:]PORT] [--socket PATH] [--token-file FILE]",
    .details = details,
    .options = options,
    .run = run,
};
