/* Finding agents, asking them, and reading what they say. */
#include "tools/agents.h"

#include "base/process.h"
#include "bus/client/link.h"
#include "loop/loop.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

enum { RETRY_MS = 5000 };

/* ---- Sockets --------------------------------------------------------------------------------------------------- */

tb_status tool_read_token(const char *path, char out[TB__TOKEN_ROOM]) {
    return tb__token_read(path, out) == TB_OK ? TB_OK : tb__fail_within(TB_INVALID, "--token-file");
}

tb_status tool_agents_folder(char out[TOOL_MAX_FOLDER]) {
    const char *runtime = getenv("XDG_RUNTIME_DIR");
    int n = runtime && *runtime ? snprintf(out, TOOL_MAX_FOLDER, "%s/tensorbus", runtime)
                                : snprintf(out, TOOL_MAX_FOLDER, "/tmp/tensorbus-%u", (unsigned)geteuid());
    if (n < 0 || n >= TOOL_MAX_FOLDER)
        return tb__fail(TB_INVALID, "XDG_RUNTIME_DIR is too long for a socket in it; unset it, or give --socket");
    return TB_OK;
}

tb_status tool_check_private(const char *folder) {
    struct stat info;
    if (lstat(folder, &info) != 0 || !S_ISDIR(info.st_mode) || info.st_uid != geteuid() || (info.st_mode & 077) != 0)
        return tb__fail(TB_DENIED, "the folder %s is not this user's alone; give --socket", folder);
    return TB_OK;
}

tb_status tool_agents_make_folder(char out[TOOL_MAX_FOLDER]) {
    TB_TRY(tool_agents_folder(out));
    if (mkdir(out, 0700) != 0 && errno != EEXIST)
        return tb__fail(TB_IO, "can't make the folder %s: %s", out, strerror(errno));
    return tool_check_private(out);
}

static int compare_views(const void *left, const void *right) {
    const tool_agent_view *a = left, *b = right;
    return strverscmp(a->path, b->path);
}

static tb_status add_path(tool_agents *agents, const char *path) {
    for (size_t i = 0; i < agents->list.count; i++) {
        if (strcmp(agents->list.item[i].path, path) == 0)
            return TB_OK;
    }
    tool_agent_view view = {.path = tb__strdup(path)};
    if (view.path && tb__vec_push(&agents->list, view))
        return TB_OK;
    free(view.path);
    return TB_NO_MEMORY;
}

static void free_view(tool_agent_view *view) {
    tb__link_close(view->link);
    json_decref(view->report);
    json_decref(view->before);
    free(view->path);
}

/* Those whose sockets are gone ended as they should. */
static void drop_missing(tool_agents *agents) {
    size_t kept = 0;
    for (size_t i = 0; i < agents->list.count; i++) {
        if (access(agents->list.item[i].path, F_OK) == 0)
            agents->list.item[kept++] = agents->list.item[i];
        else
            free_view(&agents->list.item[i]);
    }
    agents->list.count = kept;
}

tb_status tool_agents_find(tool_agents *agents) {
    static const char ending[] = ".sock";
    if (agents->socket)
        return add_path(agents, agents->socket);
    TB_TRY(tool_agents_folder(agents->folder));
    drop_missing(agents);
    DIR *folder = opendir(agents->folder);
    if (!folder && errno == ENOENT)
        return TB_OK;
    if (!folder)
        return tb__fail(TB_IO, "%s: %s", agents->folder, strerror(errno));
    tb_status status = tool_check_private(agents->folder);
    for (const struct dirent *entry; status == TB_OK && (entry = readdir(folder));) {
        size_t length = strlen(entry->d_name);
        char path[TOOL_MAX_FOLDER + sizeof entry->d_name + 1];
        if (length < sizeof ending || strcmp(entry->d_name + length - (sizeof ending - 1), ending) != 0)
            continue;
        snprintf(path, sizeof path, "%s/%s", agents->folder, entry->d_name);
        status = add_path(agents, path);
    }
    closedir(folder);
    if (agents->list.count > 1)
        qsort(agents->list.item, agents->list.count, sizeof *agents->list.item, compare_views);
    return status;
}

/* ---- Reports --------------------------------------------------------------------------------------------------- */

/* The sentence is in tb_error_detail. */
static void give_up(tool_agent_view *view, tb_status status) {
    snprintf(view->why, sizeof view->why, "%s", tb_error_detail());
    view->status = status;
    view->retry_ms = status == TB_TIMEOUT ? tb__now_ms() + RETRY_MS : 0; /* others fail at once */
    view->is_asked = false;
    tb__link_close(view->link);
    view->link = NULL;
    json_decref(view->report);
    json_decref(view->before);
    view->report = view->before = NULL;
}

static void ask(tool_agent_view *view, bool lists_tensors, int64_t deadline_ms) {
    tb__message question = {.kind = TB__INSPECT, .lists_tensors = lists_tensors};
    tb__link_lock(view->link);
    tb_status status = tb__link_post(view->link, &question, NULL, 0, deadline_ms, &view->seq);
    tb__link_unlock(view->link);
    view->is_asked = status == TB_OK;
    if (status != TB_OK)
        give_up(view, status);
}

static tb_status read_report(const tool_agent_view *view, const tb__message *reply, json_t **out) {
    json_error_t error;
    json_t *report = json_loadb((const char *)reply->report.data, reply->report.nbytes, JSON_REJECT_DUPLICATES, &error);
    if (!json_is_object(report)) {
        json_decref(report);
        return tb__fail(TB_INTERNAL, "the agent at %s sent a report that can't be read: %s", view->path, error.text);
    }
    *out = report;
    return TB_OK;
}

static void take_answer(tool_agent_view *view, int64_t deadline_ms) {
    tb__link_reply *reply;
    json_t *report = NULL;
    tb__link_lock(view->link);
    tb_status status = tb__link_await_reply(view->link, view->seq, deadline_ms, "said what it does", &reply);
    tb__link_unlock(view->link);
    if (status == TB_OK)
        status = read_report(view, &reply->message, &report);
    else if (reply)
        status = tb__fail_within(status, "%s", view->path);
    tb__link_reply_free(reply);
    if (status != TB_OK) {
        give_up(view, status);
        return;
    }
    json_decref(view->before);
    view->before = view->report;
    view->before_when = view->when;
    view->report = report;
    view->when = tb__seconds();
    view->status = TB_OK;
    view->why[0] = '\0';
    view->is_asked = false;
}

void tool_agents_ask(tool_agents *agents, int timeout_ms) {
    for (size_t i = 0; i < agents->list.count; i++) {
        tool_agent_view *view = &agents->list.item[i];
        tb__link_opts opts = {.timeout_ms = timeout_ms, .token = agents->token, .name = agents->name};
        if (view->link || view->retry_ms > tb__now_ms())
            continue;
        tb_status status = tb__link_open(view->path, &opts, &view->link);
        if (status != TB_OK)
            give_up(view, status);
    }
    int64_t deadline_ms = tb__now_ms() + timeout_ms;
    for (size_t i = 0; i < agents->list.count; i++) {
        if (agents->list.item[i].link)
            ask(&agents->list.item[i], agents->lists_tensors, deadline_ms);
    }
    for (size_t i = 0; i < agents->list.count; i++) {
        if (agents->list.item[i].is_asked)
            take_answer(&agents->list.item[i], deadline_ms);
    }
}

void tool_agents_fini(tool_agents *agents) {
    for (size_t i = 0; i < agents->list.count; i++)
        free_view(&agents->list.item[i]);
    free(agents->list.item);
    agents->list.item = NULL;
    agents->list.count = agents->list.capacity = 0;
}

bool tool_agent_has_ended(const tool_agent_view *view) {
    return view->status == TB_IO;
}

/* ---- What they say --------------------------------------------------------------------------------------------- */

static json_t *clean_string(const char *from) {
    char *copy = tb__strdup(from);
    for (char *c = copy; c && *c; c++)
        *c = (unsigned char)*c < ' ' || *c == 127 ? '?' : *c;
    json_t *string = copy ? json_string(copy) : NULL;
    free(copy);
    return string;
}

void tool_json_clean(json_t *value) {
    size_t i;
    json_t *item;
    const char *key;
    if (json_is_string(value)) {
        json_t *clean = clean_string(json_string_value(value));
        json_string_set(value, clean ? json_string_value(clean) : "?");
        json_decref(clean);
    } else if (json_is_array(value)) {
        json_array_foreach(value, i, item) {
            tool_json_clean(item);
        }
    } else if (json_is_object(value)) {
        json_object_foreach(value, key, item) {
            tool_json_clean(item);
        }
    }
}

const char *tool_json_text(const json_t *object, const char *key) {
    const char *text = json_string_value(json_object_get(object, key));
    return text ? text : "";
}

int64_t tool_json_int(const json_t *object, const char *key) {
    const json_t *value = json_object_get(object, key);
    return json_is_true(value) ? 1 : json_integer_value(value);
}

double tool_json_real(const json_t *object, const char *key) {
    return json_number_value(json_object_get(object, key));
}

void tool_take_version(tool_table *table, const json_t *batch) {
    tool_table_cell(table, "%" PRId64 "%s%s%s", tool_json_int(batch, "version"),
                    tool_json_int(batch, "mixed") ? " (mixed)" : "", tool_json_int(batch, "torn") ? " (torn)" : "",
                    tool_json_int(batch, "in_doubt") ? " (in doubt)" : "");
}

void tool_add_seat(tb__text *out, const json_t *report) {
    tb__text_add(out, "%s %" PRId64, tool_json_text(report, "group"), tool_json_int(report, "index"));
}

void tool_add_duration(tb__text *out, double seconds) {
    static const struct {
        double seconds;
        const char *name;
    } units[] = {{86400, "d"}, {3600, "h"}, {60, "min"}, {1, "s"}};
    size_t i = 0;
    while (i + 1 < sizeof units / sizeof *units && seconds < 2 * units[i].seconds)
        i++;
    tb__text_add(out, "%.0f %s", seconds / units[i].seconds, units[i].name);
}

void tool_add_pair_state(tb__text *out, const json_t *pair) {
    const char *why = tool_json_text(pair, "why");
    tb__text_add(out, "%s%s%s", tool_json_text(pair, "state"), *why ? ": " : "", why);
}

size_t tool_count_alive(const json_t *report) {
    size_t i, count = 0;
    json_t *peer;
    json_array_foreach(json_object_get(report, "peers"), i, peer) {
        count += json_is_true(json_object_get(peer, "alive"));
    }
    return count;
}
