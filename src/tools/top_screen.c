/* What `tensorbus top` shows: a screen of text, made from the reports of all agents and the ones before them. */
#include "tools/agents.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>
#include <time.h>

enum { BAR = 20 };

typedef const tool_agent_view *view_of;

static double gap(view_of view) {
    return view->before ? view->when - view->before_when : 0;
}

/* ---- Speeds ---------------------------------------------------------------------------------------------------- */

/* The item of a list whose member `key` is this text. */
static const json_t *find(const json_t *list, const char *key, const char *text) {
    size_t i;
    json_t *item;
    json_array_foreach(list, i, item) {
        if (strcmp(tool_json_text(item, key), text) == 0)
            return item;
    }
    return NULL;
}

/* Bytes that an agent had sent or received by then, of transfers that have ended and of those that have not. */
static double moved(const json_t *report, const char *direction) {
    const json_t *totals = json_object_get(report, "totals");
    double sum = tool_json_real(json_object_get(totals, direction), "bytes");
    size_t i, j;
    json_t *batch, *transfer;
    json_array_foreach(json_object_get(report, "batches"), i, batch) {
        json_array_foreach(json_object_get(batch, "transfers"), j, transfer) {
            if (strcmp(tool_json_text(transfer, "direction"), direction) == 0)
                sum += tool_json_real(transfer, "bytes_done");
        }
    }
    return sum;
}

/* What failed is taken back; it does not count as movement the other way. */
static double per_second(view_of view, double now, double before) {
    double seconds = gap(view);
    return seconds > 0 && now > before ? (now - before) / seconds / 1e9 : 0;
}

static double agent_speed(view_of view, const char *direction) {
    return view->before ? per_second(view, moved(view->report, direction), moved(view->before, direction)) : 0;
}

/* Since the report before, or since it began if that is later. */
static double transfer_speed(view_of view, const json_t *batch, const json_t *transfer) {
    const json_t *old = find(json_object_get(view->before, "batches"), "id", tool_json_text(batch, "id"));
    old = find(json_object_get(old, "transfers"), "direction", tool_json_text(transfer, "direction"));
    if (!old || tool_json_int(old, "attempt") != tool_json_int(transfer, "attempt"))
        return tool_json_real(transfer, "gb_per_s");
    return per_second(view, tool_json_real(transfer, "bytes_done"), tool_json_real(old, "bytes_done"));
}

/* Of a pair or a peer. */
static double speed_of(view_of view, const char *list, const char *key, const json_t *item) {
    const json_t *old = find(json_object_get(view->before, list), key, tool_json_text(item, key));
    return old ? per_second(view, tool_json_real(item, "sent") + tool_json_real(item, "received"),
                            tool_json_real(old, "sent") + tool_json_real(old, "received"))
               : 0;
}

/* ---- Tables ---------------------------------------------------------------------------------------------------- */

static void take_seat(tool_table *table, view_of view) {
    tb__text seat = {0};
    tool_add_seat(&seat, view->report);
    tool_table_take(table, &seat);
}

static void take_speed(tool_table *table, double gb_per_s) {
    if (gb_per_s > 0)
        tool_table_cell(table, "%.2f", gb_per_s);
    else
        tool_table_cell(table, "-");
}

static void add_agent_row(tool_table *table, view_of view) {
    const json_t *report = view->report, *totals = json_object_get(report, "totals");
    const json_t *send = json_object_get(totals, "send"), *recv = json_object_get(totals, "recv");
    bool is_connected = json_is_true(json_object_get(json_object_get(report, "store"), "connected"));
    tb__text uptime = {0};
    tool_add_duration(&uptime, tool_json_real(report, "uptime"));
    take_seat(table, view);
    tool_table_cell(table, "%s", tool_json_text(report, "state"));
    tool_table_take(table, &uptime);
    tool_table_cell(table, "%s", is_connected ? "connected" : "lost");
    tool_table_cell(table, "%zu", json_array_size(json_object_get(report, "clients")));
    tool_table_cell(table, "%zu of %zu", tool_count_alive(report), json_array_size(json_object_get(report, "peers")));
    tool_table_cell(table, "%" PRId64, tool_json_int(send, "transfers") + tool_json_int(recv, "transfers"));
    tool_table_cell(table, "%" PRId64, tool_json_int(send, "failures") + tool_json_int(recv, "failures"));
    tool_table_cell(table, "%s", tool_size(tool_json_int(send, "bytes")).text);
    tool_table_cell(table, "%s", tool_size(tool_json_int(recv, "bytes")).text);
    take_speed(table, agent_speed(view, "send") + agent_speed(view, "recv"));
}

static void take_bar(tool_table *table, double done, double total) {
    double part = total > 0 ? done / total : 0;
    int full = (int)((part > 1 ? 1 : part) * BAR);
    char bar[BAR + 1];
    memset(bar, '-', BAR);
    memset(bar, '#', (size_t)full);
    bar[BAR] = '\0';
    tool_table_cell(table, "[%s] %3.0f%%", bar, part * 100);
}

static void add_batch_row(tool_table *table, view_of view, const json_t *batch, const json_t *transfer) {
    const json_t *last = json_object_get(batch, "last");
    const char *direction = tool_json_text(transfer, "direction");
    take_seat(table, view);
    tool_table_cell(table, "%s", tool_json_text(batch, "id"));
    tool_table_cell(table, "%s", tool_json_text(batch, "memory"));
    tool_take_version(table, batch);
    tool_table_cell(table, "%s",
                    transfer ? (*direction == 's' ? "sending" : "receiving") : tool_json_text(batch, "state"));
    if (transfer) {
        double done = tool_json_real(transfer, "bytes_done"), total = tool_json_real(transfer, "bytes_total");
        take_bar(table, done, total);
        tool_table_cell(table, "%s of %s", tool_size((int64_t)done).text, tool_size((int64_t)total).text);
        take_speed(table, transfer_speed(view, batch, transfer));
    } else {
        tool_table_cell(table, "%s", "");
        tool_table_cell(table, "%s", tool_size(tool_json_int(batch, "bytes")).text);
        take_speed(table, 0);
    }
    take_speed(table, tool_json_real(last, "gb_per_s"));
    if (json_is_object(last))
        tool_table_cell(table, "%.1f", tool_json_real(last, "seconds") * 1e3);
    else
        tool_table_cell(table, "-");
}

static void add_batch_rows(tool_table *table, view_of view) {
    size_t i, j;
    json_t *batch, *transfer;
    json_array_foreach(json_object_get(view->report, "batches"), i, batch) {
        const json_t *transfers = json_object_get(batch, "transfers");
        json_array_foreach(transfers, j, transfer) {
            add_batch_row(table, view, batch, transfer);
        }
        if (json_array_size(transfers) == 0)
            add_batch_row(table, view, batch, NULL);
    }
}

static void add_pair_rows(tool_table *table, view_of view) {
    size_t i;
    json_t *pair;
    json_array_foreach(json_object_get(view->report, "pairs"), i, pair) {
        tb__text state = {0};
        tool_add_pair_state(&state, pair);
        take_seat(table, view);
        tool_table_cell(table, "%s", tool_json_text(pair, "name"));
        tool_table_cell(table, "%s", tool_json_text(pair, "remote"));
        tool_table_cell(table, "%s", tool_size(tool_json_int(pair, "sent")).text);
        tool_table_cell(table, "%s", tool_size(tool_json_int(pair, "received")).text);
        take_speed(table, speed_of(view, "pairs", "name", pair));
        tool_table_take(table, &state);
    }
}

static void add_client_rows(tool_table *table, view_of view) {
    size_t i;
    json_t *client;
    json_array_foreach(json_object_get(view->report, "clients"), i, client) {
        take_seat(table, view);
        tool_table_cell(table, "%s", tool_json_text(client, "name"));
        tool_table_cell(table, "%" PRId64, tool_json_int(client, "pid"));
        tool_table_cell(table, "%" PRId64, tool_json_int(client, "commands"));
        tool_table_cell(table, "%" PRId64, tool_json_int(client, "under_way"));
    }
}

static int compare_ranks(const void *left, const void *right) {
    int64_t a = tool_json_int(*(const json_t *const *)left, "rank");
    int64_t b = tool_json_int(*(const json_t *const *)right, "rank");
    return (a > b) - (a < b);
}

/* The peers of a report that are alive, or those that are not, by rank; to be freed by the caller. */
static const json_t **sort_peers(tool_table *table, view_of view, bool is_alive, size_t *count) {
    const json_t *peers = json_object_get(view->report, "peers");
    const json_t **sorted = tb__malloc(json_array_size(peers), sizeof *sorted);
    size_t i;
    json_t *peer;
    *count = 0;
    table->failed |= !sorted;
    json_array_foreach(peers, i, peer) {
        if (sorted && json_is_true(json_object_get(peer, "alive")) == is_alive)
            sorted[(*count)++] = peer;
    }
    if (*count > 0)
        qsort(sorted, *count, sizeof *sorted, compare_ranks);
    return sorted;
}

/* Those that have moved something. */
static void add_peer_rows(tool_table *table, view_of view) {
    size_t count;
    const json_t **peers = sort_peers(table, view, true, &count);
    for (size_t i = 0; i < count; i++) {
        const json_t *peer = peers[i];
        if (tool_json_int(peer, "sent") + tool_json_int(peer, "received") == 0)
            continue;
        take_seat(table, view);
        tool_table_cell(table, "%s", tool_json_text(peer, "label"));
        tool_table_cell(table, "%s", tool_json_text(peer, "transport"));
        tool_table_cell(table, "%s", tool_size(tool_json_int(peer, "sent")).text);
        tool_table_cell(table, "%s", tool_size(tool_json_int(peer, "received")).text);
        take_speed(table, speed_of(view, "peers", "label", peer));
    }
    free(peers);
}

static void add_lost_rows(tool_table *table, view_of view) {
    size_t count;
    const json_t **peers = sort_peers(table, view, false, &count);
    for (size_t i = 0; i < count; i++) {
        take_seat(table, view);
        tool_table_cell(table, "%s", tool_json_text(peers[i], "label"));
        tool_table_cell(table, "%s", tool_json_text(peers[i], "why"));
    }
    free(peers);
}

/* ---- The screen ------------------------------------------------------------------------------------------------ */

static const struct {
    const char *titles[12]; /* of numbers with a # before them */
    void (*add)(tool_table *table, view_of view);
} tables[] = {
    {{"agent", "state", "#up", "store", "#clients", "#peers", "#transfers", "#failed", "#sent", "#received", "#GB/s"},
     add_agent_row},
    {{"agent", "batch", "memory", "#version", "state", "progress", "#moved", "#GB/s now", "#GB/s last", "#ms last"},
     add_batch_rows},
    {{"agent", "pair", "with", "#sent", "#received", "#GB/s", "state"}, add_pair_rows},
    {{"agent", "client", "#pid", "#commands", "#under way"}, add_client_rows},
    {{"agent", "peer", "transport", "#sent", "#received", "#GB/s"}, add_peer_rows},
    {{"agent", "lost peer", "why"}, add_lost_rows},
};

static void add_summary(tb__text *out, const tool_agents *agents) {
    size_t nagents = 0, nclients = 0, nmoving = 0, i;
    double sent = 0, received = 0; /* not added up: what goes from one of these agents to another is in both */
    char now[16];
    time_t seconds = time(NULL);
    struct tm local;
    json_t *batch;
    for (size_t a = 0; a < agents->list.count; a++) {
        view_of view = &agents->list.item[a];
        if (!view->report)
            continue;
        nagents++;
        nclients += json_array_size(json_object_get(view->report, "clients"));
        sent += agent_speed(view, "send");
        received += agent_speed(view, "recv");
        json_array_foreach(json_object_get(view->report, "batches"), i, batch) {
            nmoving += json_array_size(json_object_get(batch, "transfers"));
        }
    }
    strftime(now, sizeof now, "%H:%M:%S", localtime_r(&seconds, &local));
    tb__text_add(out, "%s  agents %zu, clients %zu, transfers under way %zu, sent %.2f GB/s, received %.2f GB/s\n", now,
                 nagents, nclients, nmoving, sent, received);
}

void top_draw(tb__text *out, const tool_agents *agents) {
    add_summary(out, agents);
    for (size_t t = 0; t < sizeof tables / sizeof *tables; t++) {
        tool_table table = {0};
        for (const char *const *title = tables[t].titles; *title; title++)
            tool_table_columns(&table, *title);
        for (size_t i = 0; i < agents->list.count; i++) {
            if (agents->list.item[i].report)
                tables[t].add(&table, &agents->list.item[i]);
        }
        if (table.cells.count > 0)
            tool_table_finish_below(&table, out);
    }
    bool is_first = true;
    for (size_t i = 0; i < agents->list.count; i++) {
        view_of view = &agents->list.item[i];
        if (view->report || !*view->why)
            continue;
        tb__text_add(out, "%s%s\n", is_first ? "\n" : "", view->why);
        is_first = false;
    }
}
