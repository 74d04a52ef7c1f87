/* tensorbus status --store: the bus as its store knows it. Seats and pairs are what all ranks write there; batches are
 * what the first ranks of groups report (bus/world_report.c). All is read at once, made into JSON, and shown as that or
 * as tables. */
#include "bus/directory_keys.h"
#include "bus/pair_notes.h"
#include "tools/agents.h"

#include "base/int.h"
#include "base/process.h"
#include "loop/loop.h"

#include <inttypes.h>
#include <string.h>
#include <unistd.h>

enum { MOST_NAMED = 12, MOST_RUNS = 8 };

/* ---- Reading --------------------------------------------------------------------------------------------------- */

/* The object of an array in which these two members are so; it is added if there is none. `b` may be NULL. */
static json_t *find_or_add(json_t *all, const char *key_a, const char *a, const char *key_b, const char *b) {
    size_t i;
    json_t *item;
    json_array_foreach(all, i, item) {
        if (strcmp(tool_json_text(item, key_a), a) == 0 && (!b || strcmp(tool_json_text(item, key_b), b) == 0))
            return item;
    }
    item = json_object();
    json_object_set_new(item, key_a, json_string(a));
    if (b)
        json_object_set_new(item, key_b, json_string(b));
    json_array_append_new(all, item);
    return item;
}

static json_t *member_array(json_t *object, const char *key) {
    if (!json_object_get(object, key))
        json_object_set_new(object, key, json_array());
    return json_object_get(object, key);
}

static void add_seat(json_t *bus, const char *name, int32_t index, const tb__store_value *value, int64_t now) {
    tb__seat_record seat;
    tb__contact contact;
    if (!tb__seat_decode(value, index, &seat))
        return;
    json_t *group = find_or_add(json_object_get(bus, "groups"), "name", name, NULL, NULL);
    if (!json_object_get(group, "size"))
        json_object_set_new(group, "size", json_integer(seat.size));
    else if (tool_json_int(group, "size") != seat.size)
        json_object_set_new(group, "sizes_differ", json_true());
    bool is_known = seat.is_announced && tb__contact_read(seat.contact, seat.contact_nbytes, &contact);
    json_t *row = json_pack("{s:s,s:i,s:s,s:I,s:b}", "group", name, "index", (int)index, "machine", seat.host, "pid",
                            (json_int_t)seat.pid, "joined", (int)seat.is_announced);
    if (seat.rank != TB_NO_RANK)
        json_object_set_new(row, "rank", json_integer(seat.rank));
    json_object_set_new(row, "incarnation", json_integer((json_int_t)seat.incarnation));
    if (is_known) {
        json_object_set_new(row, "machine_id", json_string(contact.host));
        json_object_set_new(row, "version", json_string(contact.version));
        json_object_set_new(row, "transports", json_string(contact.transports));
        if (contact.begun > 0)
            json_object_set_new(row, "age", json_integer(tb__max64(now - contact.begun, 0)));
    }
    json_array_append_new(json_object_get(bus, "seats"), row);
}

static void add_note(json_t *bus, const tb__key_parts *key, const tb__store_value *value) {
    tb__pair_note read;
    tb__note note = {
        .topic = key->topic, .group = key->group, .index = key->index, .data = value->data, .nbytes = value->nbytes};
    if (!value->data || !tb__pair_read_note(&note, &read))
        return;
    json_t *pair = find_or_add(json_object_get(bus, "pairs"), "name", key->topic, NULL, NULL);
    json_t *side = find_or_add(member_array(pair, "sides"), "group", key->group, NULL, NULL);
    find_or_add(member_array(pair, "sides"), "group", read.remote, NULL, NULL);
    if (read.refusal.status != TB_OK) {
        json_object_set_new(pair, "why", json_string(read.why));
        return;
    }
    json_array_append_new(member_array(side, "come"), json_integer(key->index));
    if (!json_object_get(side, "layout"))
        json_object_set_new(side, "layout", json_string(read.layout));
}

static void set_devices(json_t *bus, const json_t *report) {
    const char *group = tool_json_text(report, "group");
    size_t i;
    json_t *run, *seat;
    json_int_t begin = 0;
    json_array_foreach(json_object_get(report, "devices"), i, run) {
        const char *devices = json_string_value(json_array_get(run, 0));
        json_int_t end = begin + json_integer_value(json_array_get(run, 1));
        size_t j;
        json_array_foreach(json_object_get(bus, "seats"), j, seat) {
            json_int_t index = tool_json_int(seat, "index");
            if (devices && *devices && index >= begin && index < end &&
                strcmp(tool_json_text(seat, "group"), group) == 0)
                json_object_set_new(seat, "devices", json_string(devices));
        }
        begin = end;
    }
}

static void add_report(json_t *bus, const tb__store_value *value, int64_t now) {
    json_error_t error;
    json_t *report = json_loadb(value->data, value->nbytes, JSON_REJECT_DUPLICATES, &error), *row;
    size_t i;
    json_array_foreach(json_object_get(report, "batches"), i, row) {
        json_t *batch = find_or_add(json_object_get(bus, "batches"), "name", tool_json_text(row, "batch"), "pair",
                                    tool_json_text(row, "pair"));
        json_t *side = json_object();
        static const char *const keys[] = {"group", "state",    "why",     "sent",    "version",
                                           "torn",  "in_doubt", "missing", "nmissing"};
        for (size_t k = 0; k < sizeof keys / sizeof *keys; k++)
            json_object_set(side, keys[k], json_object_get(row, keys[k]));
        if (tool_json_int(row, "ended") > 0)
            json_object_set_new(side, "age", json_integer(tb__max64(now - tool_json_int(row, "ended"), 0)));
        if (tool_json_int(row, "tensors") > 0) {
            json_object_set(batch, "tensors", json_object_get(row, "tensors"));
            json_object_set(batch, "bytes", json_object_get(row, "bytes"));
        }
        json_array_append_new(member_array(batch, "sides"), side);
        set_devices(bus, row);
    }
    json_decref(report);
}

/* The indices from 0 to size - 1 that are not in `present`. */
static json_t *find_missing(const json_t *present, json_int_t size) {
    json_t *missing = json_array(), *index;
    char *is_here = tb__calloc((size_t)tb__max64(size, 1), 1);
    size_t i;
    json_array_foreach(present, i, index) {
        json_int_t at = json_integer_value(index);
        if (is_here && at >= 0 && at < size)
            is_here[at] = 1;
    }
    for (json_int_t at = 0; is_here && at < size; at++) {
        if (!is_here[at])
            json_array_append_new(missing, json_integer(at));
    }
    free(is_here);
    return missing;
}

static void finish_groups(json_t *bus) {
    size_t i, j;
    json_t *group, *seat;
    json_array_foreach(json_object_get(bus, "groups"), i, group) {
        json_t *present = json_array();
        json_array_foreach(json_object_get(bus, "seats"), j, seat) {
            if (json_is_true(json_object_get(seat, "joined")) &&
                strcmp(tool_json_text(seat, "group"), tool_json_text(group, "name")) == 0)
                json_array_append(present, json_object_get(seat, "index"));
        }
        json_object_set_new(group, "present", json_integer((json_int_t)json_array_size(present)));
        json_object_set_new(group, "missing", find_missing(present, tool_json_int(group, "size")));
        json_decref(present);
    }
}

static json_int_t size_of_group(const json_t *bus, const char *name) {
    size_t i;
    json_t *group;
    json_array_foreach(json_object_get(bus, "groups"), i, group) {
        if (strcmp(tool_json_text(group, "name"), name) == 0)
            return tool_json_int(group, "size");
    }
    return 0;
}

/* A side is complete when all seats of its group have asked for the pair. */
static void finish_pairs(json_t *bus) {
    size_t i, j;
    json_t *pair, *side;
    json_array_foreach(json_object_get(bus, "pairs"), i, pair) {
        bool is_complete = true;
        json_array_foreach(json_object_get(pair, "sides"), j, side) {
            json_int_t size = size_of_group(bus, tool_json_text(side, "group"));
            json_t *missing = find_missing(json_object_get(side, "come"), size);
            is_complete &= size > 0 && json_array_size(missing) == 0;
            json_object_set_new(side, "size", json_integer(size));
            json_object_set_new(side, "missing", missing);
            json_object_del(side, "come");
        }
        json_object_set_new(pair, "state",
                            json_string(json_object_get(pair, "why") ? "refused"
                                        : is_complete                ? "ready"
                                                                     : "waiting"));
    }
}

/* Both sides of the pair report; one that does not has nothing registered on its first rank. */
static void finish_batches(json_t *bus) {
    size_t i, j, k;
    json_t *batch, *side, *pair, *half;
    json_array_foreach(json_object_get(bus, "batches"), i, batch) {
        const char *state = "ready";
        json_array_foreach(json_object_get(batch, "sides"), j, side) {
            const char *own = tool_json_text(side, "state");
            if (strcmp(own, "failed") == 0 || (strcmp(own, "ready") != 0 && strcmp(state, "failed") != 0))
                state = own;
        }
        json_array_foreach(json_object_get(bus, "pairs"), j, pair) {
            if (strcmp(tool_json_text(pair, "name"), tool_json_text(batch, "pair")) != 0)
                continue;
            json_array_foreach(json_object_get(pair, "sides"), k, half) {
                size_t n = json_array_size(json_object_get(batch, "sides"));
                json_t *found =
                    find_or_add(json_object_get(batch, "sides"), "group", tool_json_text(half, "group"), NULL, NULL);
                if (json_array_size(json_object_get(batch, "sides")) == n)
                    continue;
                json_object_set_new(found, "state", json_string("not registered"));
                state = strcmp(state, "ready") == 0 ? "waiting" : state;
            }
        }
        json_object_set_new(batch, "state", json_string(state));
    }
}

static int compare_seats(const void *a, const void *b) {
    const json_t *const *x = a, *const *y = b;
    int order = strcmp(tool_json_text(*x, "group"), tool_json_text(*y, "group"));
    json_int_t i = tool_json_int(*x, "index"), j = tool_json_int(*y, "index");
    return order != 0 ? order : (i > j) - (i < j);
}

/* The store lists keys as text, where seat 10 comes before seat 2. */
static void sort_seats(json_t *seats) {
    size_t n = json_array_size(seats);
    json_t **all = tb__malloc(n + 1, sizeof *all);
    if (!all)
        return;
    for (size_t i = 0; i < n; i++)
        all[i] = json_incref(json_array_get(seats, i));
    qsort(all, n, sizeof *all, compare_seats);
    json_array_clear(seats);
    for (size_t i = 0; i < n; i++)
        json_array_append_new(seats, all[i]);
    free(all);
}

/* A process may have several seats, and a machine several processes. */
static void count_machines(json_t *bus) {
    json_t *machines = json_array(), *processes = json_array(), *seat;
    size_t i;
    json_array_foreach(json_object_get(bus, "seats"), i, seat) {
        char pid[32];
        const char *machine = tool_json_text(seat, "machine_id");
        if (!*machine)
            continue;
        snprintf(pid, sizeof pid, "%" PRId64 "/%" PRId64, tool_json_int(seat, "rank"), tool_json_int(seat, "pid"));
        find_or_add(machines, "id", machine, NULL, NULL);
        find_or_add(processes, "pid", pid, NULL, NULL);
    }
    json_object_set_new(bus, "machines", json_integer((json_int_t)json_array_size(machines)));
    json_object_set_new(bus, "processes", json_integer((json_int_t)json_array_size(processes)));
    json_decref(machines);
    json_decref(processes);
}

static tb_status read_bus(tb__store *store, const char *url, json_t **out) {
    tb__store_entries now = {0}, reports = {0};
    TB_TRY(tb__store_list(store, TB__NOW, &now));
    tb_status status = tb__store_list(store, TB__REPORTS "/", &reports);
    if (status != TB_OK) {
        tb__store_entries_fini(&now);
        return status;
    }
    int64_t seconds = tb__unix_seconds();
    json_t *bus = json_pack("{s:s,s:I,s:[],s:[],s:[],s:[]}", "store", url, "at", (json_int_t)seconds, "groups", "seats",
                            "pairs", "batches");
    for (size_t i = 0; i < now.count; i++) {
        tb__key_parts key;
        if (!tb__key_split(now.item[i].key, &key))
            continue;
        if (key.is_note)
            add_note(bus, &key, &now.item[i].value);
        else
            add_seat(bus, key.group, key.index, &now.item[i].value, seconds);
    }
    sort_seats(json_object_get(bus, "seats"));
    for (size_t i = 0; i < reports.count; i++)
        add_report(bus, &reports.item[i].value, seconds);
    tb__store_entries_fini(&now);
    tb__store_entries_fini(&reports);
    count_machines(bus);
    finish_groups(bus);
    finish_pairs(bus);
    finish_batches(bus);
    *out = bus;
    return TB_OK;
}

/* ---- Tables ---------------------------------------------------------------------------------------------------- */

static void columns(tool_table *table, const char *const *titles) {
    for (; *titles; titles++) { /* numbers have a # before their titles */
        bool is_number = **titles == '#';
        tool_table_column(table, *titles + is_number, is_number);
    }
}

static void finish(tool_table *table, tb__text *out) {
    tb__text_add(out, "\n");
    tool_table_finish(table, out);
}

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
    columns(&table, (const char *const[]){"group", "#seats", "#here", "missing", NULL});
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
    finish(&table, out);
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
    columns(&table, (const char *const[]){"machine", "seats", "devices", "transports", "version", "age", NULL});
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
    finish(&table, out);
}

static void add_seats(tb__text *out, const json_t *bus) {
    tool_table table = {0};
    size_t i;
    json_t *seat;
    columns(&table, (const char *const[]){"seat", "#rank", "#incarnation", "machine", "#pid", "devices", "transports",
                                          "version", "age", NULL});
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
    finish(&table, out);
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
    columns(&table, (const char *const[]){"pair", "groups and layouts", "state", NULL});
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
        finish(&table, out);
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

static void add_batches(tb__text *out, const json_t *bus) {
    tool_table table = {0};
    size_t i, j, n = json_array_size(json_object_get(bus, "batches"));
    json_t *batch, *side;
    columns(&table, (const char *const[]){"batch", "pair", "#tensors", "#size", "versions", "state", NULL});
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
        }
        tool_table_cell(&table, "%s", tool_json_text(batch, "name"));
        tool_table_cell(&table, "%s", tool_json_text(batch, "pair"));
        tool_table_cell(&table, "%" PRId64, tool_json_int(batch, "tensors"));
        tool_table_cell(&table, "%s", tool_size(tool_json_int(batch, "bytes")).text);
        tool_table_take(&table, &versions);
        tool_table_take(&table, &state);
    }
    if (n > 0)
        finish(&table, out);
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

static tb_status look(const tool_store_status *s, tb__store **store, json_t **out) {
    if (!*store)
        TB_TRY(tb__store_open(s->store, s->token, s->timeout_ms, store));
    tb_status status = read_bus(*store, s->store, out);
    if (status != TB_OK) {
        tb__saved_detail why = tb__save_detail();
        tb__store_close(*store);
        *store = NULL;
        return tb__fail(status, "%s", why.text);
    }
    return TB_OK;
}

int tool_status_store(const tool_store_status *s) {
    tb__store *store = NULL;
    int exit_status;
    do {
        json_t *bus = NULL;
        tb__text out = {0};
        bool clears = s->watch_ms > 0 && !s->is_json && isatty(STDOUT_FILENO);
        tb_status status = look(s, &store, &bus);
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
    tb__store_close(store);
    return exit_status;
}
