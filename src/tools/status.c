/* tensorbus status: what agents of this machine do, or who is on the bus, as tables or as JSON. */
#include "tools/agents.h"

#include <errno.h>
#include <inttypes.h>
#include <string.h>

enum { STORE, SOCKET, ALL, TOKEN_FILE, TIMEOUT, WATCH, INTERVAL, JSON };

static const tool_option options[] = {
    [STORE] = {"store", "URL", "show the whole bus: all machines and seats that this store knows"},
    [SOCKET] = {"socket", "PATH", "show only the agent at this socket"},
    [ALL] = {"all", NULL, "also show the sockets of killed agents; with --store, show each seat"},
    [TOKEN_FILE] = {"token-file", "FILE", "its first line is the token of the store, or of the agents"},
    [TIMEOUT] = {"timeout", "SECONDS", "how long to wait for an answer of an agent or the store; default: 5"},
    [WATCH] = {"watch", NULL, "with --store: repeat until interrupted"},
    [INTERVAL] = {"interval", "SECONDS", "with --watch: the time between two reports; default: 2"},
    [JSON] = {"json", NULL, "print JSON: the agents' reports; with --store, the bus as one line"},
    {NULL, NULL, NULL},
};

static const char details[] =
    "With --store the report has: groups, with their taken and missing seats; machines by host name, with\n"
    "devices, transports, versions, and the time since they joined; pairs, with the ranks that have not made\n"
    "them; batches, with the version that each group has. Each group's first rank reports its batches, at most\n"
    "once a second.\n"
    "\n"
    "Without --store and --socket the report is about all agents of this user: those that have a socket in\n"
    "$XDG_RUNTIME_DIR/tensorbus, or, if that variable is not set, in /tmp/tensorbus-UID. If an agent does not\n"
    "answer, the others are shown, and the exit status is 1. docs/protocol.md describes the reports.\n";

/* ---- Tables ---------------------------------------------------------------------------------------------------- */

static void add_heading(tb__text *out, const char *path, const json_t *report) {
    const json_t *store = json_object_get(report, "store");
    tb__text_add(out, "%s", tool_bold());
    tool_add_seat(out, report);
    tb__text_add(out, "%s of %" PRId64 ", bus rank %" PRId64 ", incarnation %" PRId64 ", pid %" PRId64 ", %s for ",
                 tool_plain(), tool_json_int(report, "size"), tool_json_int(report, "rank"),
                 tool_json_int(report, "incarnation"), tool_json_int(report, "pid"), tool_json_text(report, "state"));
    tool_add_duration(out, tool_json_real(report, "uptime"));
    tb__text_add(out, "\nsocket  %s\n", path);
    if (json_is_true(json_object_get(store, "connected")))
        tb__text_add(out, "store   connected\n");
    else
        tb__text_add(out, "store   lost: %s\n", tool_json_text(store, "why"));
    static const char *const names[] = {"send", "recv"};
    for (int i = 0; i < 2; i++) {
        const json_t *total = json_object_get(json_object_get(report, "totals"), names[i]);
        tb__text_add(out, "%s %" PRId64 " transfers, %s, %" PRId64 " failed\n", i ? "recv   " : "sent   ",
                     tool_json_int(total, "transfers"), tool_size(tool_json_int(total, "bytes")).text,
                     tool_json_int(total, "failures"));
    }
    const json_t *plans = json_object_get(report, "plans");
    if (plans) /* not in reports of agents of 0.1.0 */
        tb__text_add(out, "plans   %" PRId64 " kept, %s of %s, %" PRId64 " dropped\n", tool_json_int(plans, "kept"),
                     tool_size(tool_json_int(plans, "bytes")).text, tool_size(tool_json_int(plans, "limit")).text,
                     tool_json_int(plans, "evicted"));
}

static void add_clients(tb__text *out, const json_t *list) {
    tool_table table = {0};
    size_t i;
    json_t *client;
    tool_table_columns(&table, "client", "#pid", "#commands", "#under way");
    json_array_foreach(list, i, client) {
        tool_table_cell(&table, "%s", tool_json_text(client, "name"));
        tool_table_cell(&table, "%" PRId64, tool_json_int(client, "pid"));
        tool_table_cell(&table, "%" PRId64, tool_json_int(client, "commands"));
        tool_table_cell(&table, "%" PRId64, tool_json_int(client, "under_way"));
    }
    tool_table_finish_below(&table, out);
}

static void add_pairs(tb__text *out, const json_t *list) {
    tool_table table = {0};
    size_t i;
    json_t *pair;
    tool_table_columns(&table, "pair", "with", "here", "there", "#sent", "#received", "state");
    json_array_foreach(list, i, pair) {
        tb__text state = {0};
        tool_add_pair_state(&state, pair);
        tool_table_cell(&table, "%s", tool_json_text(pair, "name"));
        tool_table_cell(&table, "%s", tool_json_text(pair, "remote"));
        tool_table_cell(&table, "%s", tool_json_text(pair, "layout"));
        tool_table_cell(&table, "%s", tool_json_text(pair, "remote_layout"));
        tool_table_cell(&table, "%s", tool_size(tool_json_int(pair, "sent")).text);
        tool_table_cell(&table, "%s", tool_size(tool_json_int(pair, "received")).text);
        tool_table_take(&table, &state);
    }
    tool_table_finish_below(&table, out);
}

static void take_names(tool_table *table, const json_t *list) {
    tb__text text = {0};
    size_t i;
    json_t *name;
    json_array_foreach(list, i, name) {
        tb__text_add(&text, "%s%s", i ? "," : "", json_string_value(name));
    }
    tool_table_take(table, &text);
}

static void add_batches(tb__text *out, const json_t *list) {
    tool_table table = {0};
    size_t i;
    json_t *batch;
    tool_table_columns(&table, "batch", "client", "pairs", "#tensors", "memory", "#size", "#version", "state");
    json_array_foreach(list, i, batch) {
        const char *error = tool_json_text(batch, *tool_json_text(batch, "why") ? "why" : "error");
        tool_table_cell(&table, "%s", tool_json_text(batch, "id"));
        tool_table_cell(&table, "%s (%" PRId64 ")", tool_json_text(batch, "client"), tool_json_int(batch, "pid"));
        take_names(&table, json_object_get(batch, "pairs"));
        tool_table_cell(&table, "%" PRId64, tool_json_int(batch, "tensors"));
        tool_table_cell(&table, "%s", tool_json_text(batch, "memory"));
        tool_table_cell(&table, "%s", tool_size(tool_json_int(batch, "bytes")).text);
        tool_take_version(&table, batch);
        tool_table_cell(&table, "%s%s%s", tool_json_text(batch, "state"), *error ? ": " : "", error);
    }
    tool_table_finish_below(&table, out);
}

static void add_transfer(tool_table *table, const json_t *batch, const json_t *transfer, const char *state) {
    const json_t *phases = json_object_get(transfer, "phases");
    tool_table_cell(table, "%s", tool_json_text(batch, "id"));
    tool_table_cell(table, "%s, %s", tool_json_text(transfer, "direction"), state);
    tool_table_cell(table, "%" PRId64, tool_json_int(transfer, "attempt"));
    tool_table_cell(table, "%s", tool_size(tool_json_int(transfer, "bytes_done")).text);
    tool_table_cell(table, "%.1f", tool_json_real(transfer, "seconds") * 1e3);
    tool_table_cell(table, "%.2f", tool_json_real(transfer, "gb_per_s"));
    for (int phase = 0; phase < TB_PHASE_COUNT; phase++)
        tool_table_cell(table, "%.1f", tool_json_real(phases, tb_phase_name((tb_phase)phase)) * 1e3);
}

/* Those under way, and the last one of each batch; times in milliseconds. */
static void add_transfers(tb__text *out, const json_t *batches) {
    tool_table table = {0};
    size_t i, j;
    json_t *batch, *transfer;
    tool_table_columns(&table, "transfer", "what", "#attempt", "#moved", "#ms", "#GB/s");
    for (int phase = 0; phase < TB_PHASE_COUNT; phase++)
        tool_table_column(&table, tb_phase_name((tb_phase)phase), true);
    json_array_foreach(batches, i, batch) {
        const json_t *last = json_object_get(batch, "last");
        json_array_foreach(json_object_get(batch, "transfers"), j, transfer) {
            add_transfer(&table, batch, transfer, "under way");
        }
        if (json_is_object(last))
            add_transfer(&table, batch, last, *tool_json_text(batch, "error") ? "failed" : "done");
    }
    if (table.cells.count > 0)
        tool_table_finish_below(&table, out);
}

static void add_peers(tb__text *out, const json_t *list) {
    tool_table table = {0};
    size_t i;
    json_t *peer;
    tool_table_columns(&table, "peer", "host", "transport", "#sent", "#received", "state");
    json_array_foreach(list, i, peer) {
        bool is_alive = json_is_true(json_object_get(peer, "alive"));
        tool_table_cell(&table, "%s", tool_json_text(peer, "label"));
        tool_table_cell(&table, "%.8s", tool_json_text(peer, "host"));
        tool_table_cell(&table, "%s", tool_json_text(peer, "transport"));
        tool_table_cell(&table, "%s", tool_size(tool_json_int(peer, "sent")).text);
        tool_table_cell(&table, "%s", tool_size(tool_json_int(peer, "received")).text);
        tool_table_cell(&table, "%s%s", is_alive ? "alive" : "lost: ", tool_json_text(peer, "why"));
    }
    tool_table_finish_below(&table, out);
}

static void add_agent(tb__text *out, const char *path, const json_t *report) {
    static const struct {
        const char *key;
        void (*add)(tb__text *out, const json_t *list);
    } lists[] = {{"clients", add_clients},
                 {"pairs", add_pairs},
                 {"batches", add_batches},
                 {"batches", add_transfers},
                 {"peers", add_peers}};
    add_heading(out, path, report);
    for (size_t i = 0; i < sizeof lists / sizeof *lists; i++) {
        const json_t *list = json_object_get(report, lists[i].key);
        if (json_array_size(list) > 0)
            lists[i].add(out, list);
    }
}

/* ---- All of them ----------------------------------------------------------------------------------------------- */

static void add_tables(tb__text *out, tool_agents *agents) {
    bool is_first = true;
    for (size_t i = 0; i < agents->list.count; i++) {
        const tool_agent_view *view = &agents->list.item[i];
        if (!view->report)
            continue;
        tool_json_clean(view->report);
        tb__text_add(out, "%s", is_first ? "" : "\n\n");
        add_agent(out, view->path, view->report);
        is_first = false;
    }
}

static void add_json(tb__text *out, const tool_agents *agents, bool wants_ended) {
    const char *comma = "";
    tb__text_add(out, "{\"agents\":[");
    for (size_t i = 0; i < agents->list.count; i++) {
        const tool_agent_view *view = &agents->list.item[i];
        if (!view->report && tool_agent_has_ended(view) && !wants_ended && !agents->socket)
            continue;
        tb__text_add(out, "%s{\"socket\":", comma);
        tb__text_add_json(out, view->path);
        if (view->report) {
            char *text = json_dumps(view->report, JSON_COMPACT | JSON_EMBED | JSON_REAL_PRECISION(15));
            out->failed |= !text;
            tb__text_add(out, ",%s}", text ? text : "");
            free(text);
        } else {
            tb__text_add(out, ",\"error\":");
            tb__text_add_json(out, view->why);
            tb__text_add(out, "}");
        }
        comma = ",";
    }
    tb__text_add(out, "]}\n");
}

/* Says why some could not be shown; returns an exit status. */
static int tell_failures(const tool_agents *agents, bool wants_ended) {
    int exit_status = TOOL_OK;
    size_t nfound = 0;
    for (size_t i = 0; i < agents->list.count; i++) {
        const tool_agent_view *view = &agents->list.item[i];
        if (!view->report && tool_agent_has_ended(view) && !wants_ended && !agents->socket)
            continue;
        nfound++;
        if (!view->report)
            exit_status = tool_fail(TOOL_FAILED, "%s", view->why);
    }
    return nfound > 0 ? exit_status : tool_fail(TOOL_FAILED, "there is no agent in %s", agents->folder);
}

static tb_status read_seconds(const tool_option *option, double least, const char *text, int *out) {
    char *end;
    errno = 0;
    double seconds = strtod(text, &end);
    if (errno || end == text || *end || !(seconds >= least && seconds <= 3600))
        return tb__fail(TB_INVALID, "--%s takes seconds from %g to 3600, not '%.60s'", option->name, least, text);
    *out = (int)(seconds * 1e3);
    return TB_OK;
}

static int run(const tb__config *config, const char *const *value) {
    (void)config;
    char token[TB__TOKEN_ROOM];
    int timeout_ms = 5000, interval_ms = 2000;
    tool_agents agents = {.socket = value[SOCKET], .name = "tensorbus status"};
    if (value[SOCKET] && value[ALL])
        return tool_fail(TOOL_BAD_INPUT, "--all does not go with --socket");
    if (value[STORE] && value[SOCKET])
        return tool_fail(TOOL_BAD_INPUT, "--socket does not go with --store");
    if (!value[STORE] && value[WATCH])
        return tool_fail(TOOL_BAD_INPUT,
                         "--watch needs --store URL; `tensorbus top` watches the agents of this machine");
    if (!value[WATCH] && value[INTERVAL])
        return tool_fail(TOOL_BAD_INPUT, "--interval needs --watch");
    tb_status status = value[TIMEOUT] ? read_seconds(&options[TIMEOUT], 0.01, value[TIMEOUT], &timeout_ms) : TB_OK;
    if (status == TB_OK && value[INTERVAL])
        status = read_seconds(&options[INTERVAL], 0.1, value[INTERVAL], &interval_ms);
    if (status == TB_OK && value[TOKEN_FILE]) {
        status = tool_read_token(value[TOKEN_FILE], token);
        agents.token = token;
    }
    if (status == TB_OK && value[STORE])
        return tool_status_store(&(tool_store_status){.store = value[STORE],
                                                      .token = agents.token,
                                                      .timeout_ms = timeout_ms,
                                                      .watch_ms = value[WATCH] ? interval_ms : 0,
                                                      .is_json = value[JSON] != NULL,
                                                      .all = value[ALL] != NULL});
    if (status == TB_OK)
        status = tool_agents_find(&agents);
    if (status != TB_OK) {
        tool_agents_fini(&agents);
        return tool_fail_status(status);
    }
    tool_agents_ask(&agents, timeout_ms);
    tb__text out = {0};
    if (value[JSON])
        add_json(&out, &agents, value[ALL]);
    else
        add_tables(&out, &agents);
    int printed = tool_print(&out), told = tell_failures(&agents, value[ALL]);
    tool_agents_fini(&agents);
    return printed == TOOL_OK ? told : printed;
}

const tool_command tool_status = {
    .name = "status",
    .summary = "show the bus or its agents: groups, machines, pairs, batches, transfers",
    .usage = "--store URL [--all] [--watch] [--json] [OPTION...]\n[--all] [--json] [OPTION...]\n"
             "--socket PATH [--json] [OPTION...]",
    .details = details,
    .options = options,
    .run = run,
};
