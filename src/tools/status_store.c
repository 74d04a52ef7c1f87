/* tensorbus status --store: the bus as its store knows it (bus_view.c), as JSON or as tables. */
#include "tools/agents.h"

#include "base/int.h"
#include "base/process.h"
#include "loop/loop.h"

#include <inttypes.h>
#include <string.h>
#include <unistd.h>

enum { MOST_NAMED = 12, MOST_RUNS = 8 };

/* ---- Tables ---------------------------------------------------------------------------------------------------- */

/* "0,4..7" */
static void add_indices(tb__text *out, const json_t *list) {
    int32_t indices[1024];
    size_t n = 0, i;
    json_t *index;
    json_array_foreach(list, i, index) {
        if (n < sizeof indices / sizeof *indices)
            indices[n++] = (int32_t)json_integer_value(index);
    }
    tool_add_ranks(out, indices, n, MOST_RUNS);
}

static void add_groups(tb__text *out, const json_t *bus) {
    tool_table table = {0};
    size_t i;
    json_t *group;
    tool_table_columns(&table, "group", "#seats", "#here", "missing");
    json_array_foreach(json_object_get(bus, "groups"), i, group) {
        tb__text missing = {0};
        const json_t *list = json_object_get(group, "missing");
        bool differ = json_is_true(json_object_get(group, "sizes_differ"));
        tool_table_cell(&table, "%s", tool_json_text(group, "name"));
        tool_table_cell(&table, "%" PRId64, tool_json_int(group, "size"));
        tool_table_cell(&table, "%" PRId64, tool_json_int(group, "present"));
        if (json_array_size(list) > 0)
            add_indices(&missing, list);
        tb__text_add(&missing, "%s%s", differ && missing.count ? "; " : "",
                     differ ? "members disagree about the number of seats" : "");
        tool_table_take(&table, &missing);
    }
    tool_table_finish_below(&table, out);
}

/* Seats of one machine, which have the same version and transports. */
typedef struct machine_row {
    const json_t *first;
    TB_VEC(const json_t *) seats;
} machine_row;

typedef TB_VEC(machine_row) machine_rows;

static bool is_same(const json_t *a, const json_t *b, const char *key) {
    return strcmp(tool_json_text(a, key), tool_json_text(b, key)) == 0;
}

static bool collect_machines(const json_t *bus, machine_rows *rows) {
    size_t i;
    json_t *seat;
    json_array_foreach(json_object_get(bus, "seats"), i, seat) {
        machine_row *row = NULL;
        for (size_t k = 0; k < rows->count && !row; k++) {
            const json_t *first = rows->item[k].first;
            if (is_same(first, seat, "machine") && is_same(first, seat, "machine_id") &&
                is_same(first, seat, "version") && is_same(first, seat, "transports"))
                row = &rows->item[k];
        }
        if (!row) {
            if (!tb__vec_push(rows, ((machine_row){.first = seat})))
                return false;
            row = &rows->item[rows->count - 1];
        }
        if (!tb__vec_push(&row->seats, seat))
            return false;
    }
    return true;
}

/* "trainer 0..3, engine 0": they are in the order of groups and seats. */
static void take_seats(tool_table *table, const machine_row *row) {
    tb__text text = {0};
    for (size_t i = 0, end; i < row->seats.count; i = end) {
        const char *group = tool_json_text(row->seats.item[i], "group");
        json_t *list = json_array();
        for (end = i; end < row->seats.count && strcmp(tool_json_text(row->seats.item[end], "group"), group) == 0;
             end++)
            json_array_append(list, json_object_get(row->seats.item[end], "index"));
        tb__text_add(&text, "%s%s ", i ? ", " : "", group);
        add_indices(&text, list);
        json_decref(list);
    }
    tool_table_take(table, &text);
}

static void take_devices(tool_table *table, const machine_row *row) {
    tb__text text = {0};
    size_t named = 0;
    for (size_t i = 0; i < row->seats.count; i++) {
        const char *devices = tool_json_text(row->seats.item[i], "devices");
        bool is_known = !*devices;
        for (size_t k = 0; k < i && !is_known; k++)
            is_known = is_same(row->seats.item[k], row->seats.item[i], "devices");
        if (is_known)
            continue;
        if (named++ < MOST_NAMED)
            tb__text_add(&text, "%s%s", named > 1 ? "," : "", devices);
    }
    if (named > MOST_NAMED)
        tb__text_add(&text, ", %zu more", named - MOST_NAMED);
    tool_table_take(table, &text);
}

/* "12 s", "12 s..5 min" */
static void take_ages(tool_table *table, const json_t *const *objects, size_t count) {
    tb__text least = {0}, most = {0};
    json_int_t youngest = -1, oldest = -1;
    for (size_t i = 0; i < count; i++) {
        const json_t *age = json_object_get(objects[i], "age");
        json_int_t seconds = json_integer_value(age);
        if (!age)
            continue;
        youngest = youngest < 0 || seconds < youngest ? seconds : youngest;
        oldest = seconds > oldest ? seconds : oldest;
    }
    if (oldest >= 0) {
        tool_add_duration(&least, (double)youngest);
        tool_add_duration(&most, (double)oldest);
        if (least.data && most.data && strcmp(least.data, most.data) != 0)
            tb__text_add(&least, "..%s", most.data);
    }
    tb__text_fini(&most);
    tool_table_take(table, &least);
}

static void add_machines(tb__text *out, const json_t *bus) {
    tool_table table = {0};
    machine_rows rows = {0};
    tool_table_columns(&table, "machine", "seats", "devices", "transports", "version", "age");
    out->failed |= !collect_machines(bus, &rows);
    for (size_t i = 0; i < rows.count; i++) {
        const machine_row *row = &rows.item[i];
        bool has_joined = json_is_true(json_object_get(row->first, "joined"));
        tool_table_cell(&table, "%s", tool_json_text(row->first, "machine"));
        take_seats(&table, row);
        take_devices(&table, row);
        tool_table_cell(&table, "%s", tool_json_text(row->first, "transports"));
        tool_table_cell(&table, "%s", has_joined ? tool_json_text(row->first, "version") : "joining");
        take_ages(&table, row->seats.item, row->seats.count);
        free(row->seats.item);
    }
    free(rows.item);
    tool_table_finish_below(&table, out);
}

static void add_seats(tb__text *out, const json_t *bus) {
    tool_table table = {0};
    size_t i;
    json_t *seat;
    tool_table_columns(&table, "seat", "#rank", "#incarnation", "machine", "#pid", "devices", "transports", "version",
                       "age");
    json_array_foreach(json_object_get(bus, "seats"), i, seat) {
        const json_t *one = seat;
        bool has_joined = json_is_true(json_object_get(seat, "joined"));
        tool_table_cell(&table, "%s %" PRId64, tool_json_text(seat, "group"), tool_json_int(seat, "index"));
        if (json_object_get(seat, "rank"))
            tool_table_cell(&table, "%" PRId64, tool_json_int(seat, "rank"));
        else
            tool_table_cell(&table, "-");
        tool_table_cell(&table, "%" PRId64, tool_json_int(seat, "incarnation"));
        tool_table_cell(&table, "%s", tool_json_text(seat, "machine"));
        tool_table_cell(&table, "%" PRId64, tool_json_int(seat, "pid"));
        tool_table_cell(&table, "%s", tool_json_text(seat, "devices"));
        tool_table_cell(&table, "%s", tool_json_text(seat, "transports"));
        tool_table_cell(&table, "%s", has_joined ? tool_json_text(seat, "version") : "joining");
        take_ages(&table, &one, 1);
    }
    tool_table_finish_below(&table, out);
}

/* "; engine: 1,3 missing" */
static void add_side_missing(tb__text *out, const json_t *side, bool has_joined) {
    const char *comma = out->count ? "; " : "";
    if (!has_joined) {
        tb__text_add(out, "%snobody has joined group '%s'", comma, tool_json_text(side, "group"));
    } else if (json_array_size(json_object_get(side, "missing")) > 0) {
        tb__text_add(out, "%s%s ", comma, tool_json_text(side, "group"));
        add_indices(out, json_object_get(side, "missing"));
        tb__text_add(out, " missing");
    }
}

static void add_pairs(tb__text *out, const json_t *bus) {
    tool_table table = {0};
    size_t i, j;
    json_t *pair, *side;
    tool_table_columns(&table, "pair", "groups and layouts", "state");
    json_array_foreach(json_object_get(bus, "pairs"), i, pair) {
        tb__text sides = {0}, state = {0}, missing = {0};
        json_array_foreach(json_object_get(pair, "sides"), j, side) {
            const char *layout = tool_json_text(side, "layout");
            tb__text_add(&sides, "%s%s%s%s%s", j ? ", " : "", tool_json_text(side, "group"), *layout ? " [" : "",
                         layout, *layout ? "]" : "");
            add_side_missing(&missing, side, tool_json_int(side, "size") > 0);
        }
        const char *why = tool_json_text(pair, "why"), *more = *why ? why : missing.data ? missing.data : "";
        tb__text_add(&state, "%s%s%s", tool_json_text(pair, "state"), *more ? ": " : "", more);
        tb__text_fini(&missing);
        tool_table_cell(&table, "%s", tool_json_text(pair, "name"));
        tool_table_take(&table, &sides);
        tool_table_take(&table, &state);
    }
    if (json_array_size(json_object_get(bus, "pairs")) > 0)
        tool_table_finish_below(&table, out);
    else
        tool_table_finish(&table, &(tb__text){.failed = true});
}

/* "engine has version 3, 12 s ago": what a side has sent or received last. */
static void add_side_version(tb__text *out, const json_t *side) {
    tb__text age = {0};
    bool sends = tool_json_int(side, "sent") > 0;
    bool receives =
        tool_json_int(side, "version") > 0 || tool_json_int(side, "torn") || tool_json_int(side, "in_doubt");
    if (!receives && !sends)
        return;
    tb__text_add(out, "%s%s ", out->count ? "; " : "", tool_json_text(side, "group"));
    if (sends)
        tb__text_add(out, "sent %" PRId64 "%s", tool_json_int(side, "sent"), receives ? ", " : "");
    if (receives)
        tb__text_add(out, "has %" PRId64 "%s%s", tool_json_int(side, "version"),
                     tool_json_int(side, "torn") ? " (torn)" : "",
                     tool_json_int(side, "in_doubt") ? " (in doubt)" : "");
    if (json_object_get(side, "age")) {
        tool_add_duration(&age, tool_json_real(side, "age"));
        tb__text_add(out, ", %s ago", age.data ? age.data : "?");
    }
    tb__text_fini(&age);
}

/* "; trainer 0 sends 13: 1 MiB of 3.7 GiB" */
static void add_transfers(tb__text *out, const json_t *side) {
    size_t i;
    json_t *t;
    json_array_foreach(json_object_get(side, "transfers"), i, t) {
        tb__text_add(out, "; %s 0 %s", tool_json_text(side, "group"),
                     strcmp(tool_json_text(t, "direction"), "send") == 0 ? "sends" : "receives");
        if (tool_json_int(t, "attempt") > 0)
            tb__text_add(out, " %" PRId64, tool_json_int(t, "attempt"));
        tb__text_add(out, ": %s of %s", tool_size(tool_json_int(t, "bytes_done")).text,
                     tool_size(tool_json_int(t, "bytes_total")).text);
    }
}

static void add_batches(tb__text *out, const json_t *bus) {
    tool_table table = {0};
    size_t i, j, n = json_array_size(json_object_get(bus, "batches"));
    json_t *batch, *side;
    tool_table_columns(&table, "batch", "pair", "#tensors", "#size", "versions", "state");
    json_array_foreach(json_object_get(bus, "batches"), i, batch) {
        tb__text versions = {0}, state = {0};
        tb__text_add(&state, "%s", tool_json_text(batch, "state"));
        json_array_foreach(json_object_get(batch, "sides"), j, side) {
            const char *why = tool_json_text(side, "why");
            add_side_version(&versions, side);
            if (strcmp(tool_json_text(side, "state"), "not registered") == 0)
                tb__text_add(&state, "; %s 0 has not registered", tool_json_text(side, "group"));
            else if (*why)
                tb__text_add(&state, "; %s: %s", tool_json_text(side, "group"), why);
            else if (strcmp(tool_json_text(side, "state"), "waiting") == 0)
                add_side_missing(&state, side, true);
            add_transfers(&state, side);
        }
        tool_table_cell(&table, "%s", tool_json_text(batch, "name"));
        tool_table_cell(&table, "%s", tool_json_text(batch, "pair"));
        tool_table_cell(&table, "%" PRId64, tool_json_int(batch, "tensors"));
        tool_table_cell(&table, "%s", tool_size(tool_json_int(batch, "bytes")).text);
        tool_table_take(&table, &versions);
        tool_table_take(&table, &state);
    }
    if (n > 0)
        tool_table_finish_below(&table, out);
    else
        tool_table_finish(&table, &(tb__text){.failed = true});
}

static void add_tables(tb__text *out, json_t *bus, bool all) {
    tool_json_clean(bus);
    int64_t processes = tool_json_int(bus, "processes"), machines = tool_json_int(bus, "machines");
    tb__text_add(out, "%s%s%s: %" PRId64 " process%s on %" PRId64 " machine%s\n", tool_bold(),
                 tool_json_text(bus, "store"), tool_plain(), processes, processes == 1 ? "" : "es", machines,
                 machines == 1 ? "" : "s");
    if (json_array_size(json_object_get(bus, "groups")) > 0) {
        add_groups(out, bus);
        (all ? add_seats : add_machines)(out, bus);
    }
    add_pairs(out, bus);
    add_batches(out, bus);
}

static void add_json(tb__text *out, const json_t *bus) {
    char *text = json_dumps(bus, JSON_COMPACT);
    out->failed |= !text;
    tb__text_add(out, "%s\n", text ? text : "");
    free(text);
}

/* ---- The command ----------------------------------------------------------------------------------------------- */

int tool_status_store(const tool_store_status *s) {
    tool_bus from = {.url = s->store, .token = s->token, .timeout_ms = s->timeout_ms};
    int exit_status;
    do {
        json_t *bus = NULL;
        tb__text out = {0};
        bool clears = s->watch_ms > 0 && !s->is_json && isatty(STDOUT_FILENO);
        tb_status status = tool_bus_look(&from, &bus);
        if (status != TB_OK && (s->watch_ms == 0 || status == TB_INVALID || status == TB_DENIED)) {
            exit_status = tool_fail_status(status);
            break;
        }
        tb__text_add(&out, "%s", clears ? "\033[H\033[2J" : "");
        if (status != TB_OK && s->is_json) {
            tb__text_add(&out, "{\"error\":");
            tb__text_add_json(&out, tb_error_detail());
            tb__text_add(&out, "}\n");
        } else if (status != TB_OK) {
            tb__text_add(&out, "%s\n", tb_error_detail());
        } else if (s->is_json) {
            add_json(&out, bus);
        } else {
            add_tables(&out, bus, s->all);
        }
        if (s->watch_ms > 0 && !s->is_json && !clears)
            tb__text_add(&out, "\n");
        json_decref(bus);
        exit_status = tool_print(&out);
        if (s->watch_ms > 0)
            tb__sleep_ms(s->watch_ms);
    } while (s->watch_ms > 0 && exit_status == TOOL_OK);
    tool_bus_close(&from);
    return exit_status;
}
