/* The bus as its store knows it, as JSON: what `status --store` prints and `dashboard --store` shows. Seats and pairs
 * are what all ranks write there; batches are what the first ranks of groups report (bus/world_report.c). */
#include "bus/directory_keys.h"
#include "bus/pair_notes.h"
#include "tools/agents.h"

#include "base/int.h"
#include "base/process.h"

#include <inttypes.h>
#include <string.h>

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
        static const char *const keys[] = {"group", "state",    "why",     "sent",     "version",
                                           "torn",  "in_doubt", "missing", "nmissing", "transfers"};
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

tb_status tool_bus_look(tool_bus *bus, json_t **out) {
    if (!bus->opened)
        TB_TRY(tb__store_open(bus->url, bus->token, bus->timeout_ms, &bus->opened));
    tb_status status = read_bus(bus->opened, bus->url, out);
    if (status != TB_OK) {
        tb__saved_detail why = tb__save_detail();
        tool_bus_close(bus);
        return tb__fail(status, "%s", why.text);
    }
    return TB_OK;
}

void tool_bus_close(tool_bus *bus) {
    tb__store_close(bus->opened);
    bus->opened = NULL;
}
