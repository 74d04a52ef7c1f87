/* The document that the page shows: what some agents say of themselves, and what the store says of the bus. */
#include "tools/agents.h"

#include <time.h>

json_t *tool_view_create(const char *title) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    return json_pack("{s:s,s:f,s:[],s:n}", "title", title, "time", (double)now.tv_sec + (double)now.tv_nsec / 1e9,
                     "agents", "bus");
}

/* The peers of each agent would make the document grow with the square of the ranks. Of many agents, only those are
 * listed that have something to tell: bytes, or a loss. */
static json_t *list_telling_peers(const json_t *report) {
    json_t *kept = json_array(), *peer;
    size_t i;
    json_array_foreach(json_object_get(report, "peers"), i, peer) {
        if (tool_json_int(peer, "sent") > 0 || tool_json_int(peer, "received") > 0 || !tool_json_int(peer, "alive"))
            json_array_append(kept, peer);
    }
    return kept;
}

void tool_view_add_agent(json_t *view, const char *where, const json_t *report, const char *why, bool has_ended,
                         const json_t *seat) {
    json_t *agents = json_object_get(view, "agents"), *shown = report ? json_copy((json_t *)(uintptr_t)report) : NULL;
    if (shown && json_array_size(json_object_get(report, "peers")) > 64)
        json_object_set_new(shown, "peers", list_telling_peers(report));
    json_array_append_new(agents, json_pack("{s:s,s:o?,s:s,s:b,s:O?}", "where", where, "report", shown, "why", why,
                                            "has_ended", has_ended, "seat", seat));
}

tb_status tool_view_dump(json_t *view, char **out) {
    *out = view ? json_dumps(view, JSON_COMPACT | JSON_REAL_PRECISION(12)) : NULL;
    json_decref(view);
    return *out ? TB_OK : tb__fail(TB_NO_MEMORY, "no memory for the page");
}
