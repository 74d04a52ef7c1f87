/* An agent's report in the text form of Prometheus, version 0.0.4. */
#include "tools/agents.h"

#include <inttypes.h>
#include <string.h>

static void add_head(tb__text *out, const char *name, const char *type, const char *help) {
    tb__text_add(out, "# HELP tensorbus_%s %s\n# TYPE tensorbus_%s %s\n", name, help, name, type);
}

/* ="value" of a label */
static void add_value(tb__text *out, const char *value) {
    tb__text_add(out, "=\"");
    for (const char *c = value; *c; c++) {
        if (*c == '\n')
            tb__text_add(out, "\\n");
        else
            tb__text_add(out, "%s%c", *c == '\\' || *c == '"' ? "\\" : "", *c);
    }
    tb__text_add(out, "\"");
}

static void add_gauge(tb__text *out, const char *name, const char *help, int64_t value) {
    add_head(out, name, "gauge", help);
    tb__text_add(out, "tensorbus_%s %" PRId64 "\n", name, value);
}

static void add_agent(tb__text *out, const json_t *report) {
    add_head(out, "agent_info", "gauge", "The agent's seat, as labels.");
    tb__text_add(out, "tensorbus_agent_info{group");
    add_value(out, tool_json_text(report, "group"));
    tb__text_add(out, ",version");
    add_value(out, tool_json_text(report, "version"));
    tb__text_add(out, ",index=\"%" PRId64 "\",rank=\"%" PRId64 "\",incarnation=\"%" PRId64 "\"} 1\n",
                 tool_json_int(report, "index"), tool_json_int(report, "rank"), tool_json_int(report, "incarnation"));
    add_head(out, "uptime_seconds", "gauge", "Seconds since the agent began.");
    tb__text_add(out, "tensorbus_uptime_seconds %.3f\n", tool_json_real(report, "uptime"));
    size_t npeers = json_array_size(json_object_get(report, "peers")), nalive = tool_count_alive(report);
    add_gauge(out, "store_connected", "Whether the agent is connected to the store.",
              json_is_true(json_object_get(json_object_get(report, "store"), "connected")));
    add_gauge(out, "clients", "Programs that are connected.",
              (int64_t)json_array_size(json_object_get(report, "clients")));
    add_gauge(out, "peers_alive", "Ranks that were met and are alive.", (int64_t)nalive);
    add_gauge(out, "peers_lost", "Ranks that were met and have been lost.", (int64_t)(npeers - nalive));
}

static const char *const directions[] = {"send", "recv"};

/* `key` has the bounds and counts, `sum` what all values make together. */
static void add_histogram(tb__text *out, const json_t *totals, const char *name, const char *key, const char *sum,
                          const char *help) {
    add_head(out, name, "histogram", help);
    for (int d = 0; d < 2; d++) {
        const json_t *total = json_object_get(totals, directions[d]), *counts = json_object_get(total, key);
        const char *direction = directions[d];
        int64_t count = tool_json_int(total, "transfers");
        size_t i;
        json_t *bucket;
        json_array_foreach(counts, i, bucket) {
            tb__text_add(out, "tensorbus_%s_bucket{direction=\"%s\",le=\"%.12g\"} %" JSON_INTEGER_FORMAT "\n", name,
                         direction, json_number_value(json_array_get(bucket, 0)),
                         json_integer_value(json_array_get(bucket, 1)));
        }
        tb__text_add(out, "tensorbus_%s_bucket{direction=\"%s\",le=\"+Inf\"} %" PRId64 "\n", name, direction, count);
        tb__text_add(out, "tensorbus_%s_sum{direction=\"%s\"} %.15g\n", name, direction,
                     json_number_value(json_object_get(total, sum)));
        tb__text_add(out, "tensorbus_%s_count{direction=\"%s\"} %" PRId64 "\n", name, direction, count);
    }
}

static void add_totals(tb__text *out, const json_t *totals) {
    add_head(out, "transfers_total", "counter", "Transfers that have ended, by direction and outcome.");
    for (int i = 0; i < 2; i++) {
        const json_t *total = json_object_get(totals, directions[i]);
        tb__text_add(out,
                     "tensorbus_transfers_total{direction=\"%s\",outcome=\"success\"} %" PRId64
                     "\ntensorbus_transfers_total{direction=\"%s\",outcome=\"failure\"} %" PRId64 "\n",
                     directions[i], tool_json_int(total, "transfers"), directions[i], tool_json_int(total, "failures"));
    }
    add_head(out, "bytes_total", "counter", "Bytes that successful transfers have moved here.");
    for (int i = 0; i < 2; i++)
        tb__text_add(out, "tensorbus_bytes_total{direction=\"%s\"} %" PRId64 "\n", directions[i],
                     tool_json_int(json_object_get(totals, directions[i]), "bytes"));
    add_head(out, "transfer_seconds_total", "counter", "Seconds that successful transfers have taken.");
    for (int i = 0; i < 2; i++)
        tb__text_add(out, "tensorbus_transfer_seconds_total{direction=\"%s\"} %.6f\n", directions[i],
                     tool_json_real(json_object_get(totals, directions[i]), "seconds"));
    add_histogram(out, totals, "transfer_duration_seconds", "by_seconds", "seconds",
                  "Seconds that successful transfers have taken, each.");
    add_histogram(out, totals, "transfer_size_bytes", "by_bytes", "bytes",
                  "Bytes that successful transfers have moved here, each.");
}

static void add_pairs(tb__text *out, const json_t *pairs) {
    size_t i;
    json_t *pair;
    add_head(out, "pair_ready", "gauge", "Whether all ranks of the pair have come and are alive.");
    json_array_foreach(pairs, i, pair) {
        tb__text_add(out, "tensorbus_pair_ready{pair");
        add_value(out, tool_json_text(pair, "name"));
        tb__text_add(out, ",remote");
        add_value(out, tool_json_text(pair, "remote"));
        tb__text_add(out, "} %d\n", *tool_json_text(pair, "state") == 'r');
    }
    add_head(out, "pair_bytes_total", "counter", "Bytes that successful transfers have moved here, by pair.");
    json_array_foreach(pairs, i, pair) {
        for (int is_recv = 0; is_recv < 2; is_recv++) {
            tb__text_add(out, "tensorbus_pair_bytes_total{pair");
            add_value(out, tool_json_text(pair, "name"));
            tb__text_add(out, ",direction=\"%s\"} %" PRId64 "\n", is_recv ? "recv" : "send",
                         tool_json_int(pair, is_recv ? "received" : "sent"));
        }
    }
}

/* The bytes sent to a rank or received from it, summed over its incarnations. */
static int64_t sum_of(const json_t *peers, const char *label, const char *key) {
    size_t i;
    json_t *peer;
    int64_t sum = 0;
    json_array_foreach(peers, i, peer) {
        sum += strcmp(tool_json_text(peer, "label"), label) == 0 ? tool_json_int(peer, key) : 0;
    }
    return sum;
}

static bool is_first(const json_t *peers, size_t at, const char *label) {
    size_t i = 0;
    while (i < at && strcmp(tool_json_text(json_array_get(peers, i), "label"), label) != 0)
        i++;
    return i == at;
}

static void add_peers(tb__text *out, const json_t *peers) {
    size_t i;
    json_t *peer;
    add_head(out, "peer_bytes_total", "counter", "Bytes of tensors that went to a rank, or came from it.");
    json_array_foreach(peers, i, peer) {
        const char *label = tool_json_text(peer, "label");
        for (int is_recv = 0; is_recv < 2 && is_first(peers, i, label); is_recv++) {
            tb__text_add(out, "tensorbus_peer_bytes_total{peer");
            add_value(out, label);
            tb__text_add(out, ",direction=\"%s\"} %" PRId64 "\n", is_recv ? "recv" : "send",
                         sum_of(peers, label, is_recv ? "received" : "sent"));
        }
    }
}

/* Adds one number of each batch. */
static void add_batch_gauge(tb__text *out, const json_t *batches, const char *name, const char *key, const char *help) {
    size_t i;
    json_t *batch;
    add_head(out, name, "gauge", help);
    json_array_foreach(batches, i, batch) {
        tb__text_add(out, "tensorbus_%s{batch", name);
        add_value(out, tool_json_text(batch, "id"));
        tb__text_add(out, "} %" PRId64 "\n", tool_json_int(batch, key));
    }
}

/* Adds the seconds of each batch's last transfer, or those of its phases. */
static void add_last(tb__text *out, const json_t *batches, bool by_phase) {
    size_t i;
    json_t *batch;
    json_array_foreach(batches, i, batch) {
        const json_t *last = json_object_get(batch, "last");
        for (int p = 0; json_is_object(last) && p < (by_phase ? (int)TB_PHASE_COUNT : 1); p++) {
            const char *phase = tb_phase_name((tb_phase)p);
            tb__text_add(out, "tensorbus_transfer_%sseconds{batch", by_phase ? "phase_" : "");
            add_value(out, tool_json_text(batch, "id"));
            tb__text_add(out, ",direction");
            add_value(out, tool_json_text(last, "direction"));
            if (by_phase)
                tb__text_add(out, ",phase=\"%s\"} %.6f\n", phase,
                             tool_json_real(json_object_get(last, "phases"), phase));
            else
                tb__text_add(out, "} %.6f\n", tool_json_real(last, "seconds"));
        }
    }
}

static void add_plans(tb__text *out, const json_t *plans) {
    static const char *const outcomes[] = {"hits", "misses"};
    add_gauge(out, "plan_bytes", "Memory of plans that are kept.", tool_json_int(plans, "bytes"));
    add_gauge(out, "plan_bytes_limit", "The most memory of plans that are kept.", tool_json_int(plans, "limit"));
    add_head(out, "plan_requests_total", "counter", "How often a plan was kept, and how often it had to be made.");
    for (int i = 0; i < 2; i++)
        tb__text_add(out, "tensorbus_plan_requests_total{outcome=\"%s\"} %" PRId64 "\n", outcomes[i],
                     tool_json_int(plans, outcomes[i]));
    add_head(out, "plans_evicted_total", "counter", "Plans that were dropped to keep the limit.");
    tb__text_add(out, "tensorbus_plans_evicted_total %" PRId64 "\n", tool_json_int(plans, "evicted"));
}

void tool_add_metrics(tb__text *out, const json_t *report) {
    const json_t *batches = json_object_get(report, "batches");
    size_t i, nmoving = 0;
    json_t *batch;
    json_array_foreach(batches, i, batch) {
        nmoving += json_array_size(json_object_get(batch, "transfers"));
    }
    add_agent(out, report);
    add_totals(out, json_object_get(report, "totals"));
    add_gauge(out, "transfers_under_way", "Transfers that have begun and not ended.", (int64_t)nmoving);
    add_plans(out, json_object_get(report, "plans"));
    add_pairs(out, json_object_get(report, "pairs"));
    add_peers(out, json_object_get(report, "peers"));
    add_batch_gauge(out, batches, "batch_version", "version",
                    "The last version that all pairs of the batch had together.");
    add_batch_gauge(out, batches, "batch_mixed", "mixed", "Whether the pairs of the batch have different versions.");
    add_batch_gauge(out, batches, "batch_torn", "torn", "Whether tensors have parts of a version that failed.");
    add_batch_gauge(out, batches, "batch_in_doubt", "in_doubt",
                    "Whether it is not known if a version of the batch is committed.");
    add_batch_gauge(out, batches, "batch_bytes", "bytes", "Bytes of this rank's part of the batch's tensors.");
    add_head(out, "transfer_seconds", "gauge", "Seconds that the batch's last transfer took.");
    add_last(out, batches, false);
    add_head(out, "transfer_phase_seconds", "gauge", "Seconds of the batch's last transfer, by phase.");
    add_last(out, batches, true);
}
