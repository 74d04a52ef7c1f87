/* Agents of this machine: where their sockets are, and what they tell of themselves; what `agent`, `status`, `top`
 * and `inspect` share. */
#ifndef TB_TOOLS_AGENTS_H
#define TB_TOOLS_AGENTS_H

#include "bus/client/link.h"
#include "bus/store/protocol.h"
#include "bus/store/store.h"
#include "tools/tools.h"

/* ---- Sockets (agents.c) -------------------------------------------------------------------------------------- */

enum { TOOL_MAX_FOLDER = 80 };

/* The first line of a file, or of standard input for "-": a token. */
tb_status tool_read_token(const char *path, char out[TB__TOKEN_ROOM]);

/* The folder that the system keeps for the user's sockets, or else a private one in /tmp. */
tb_status tool_agents_folder(char out[TOOL_MAX_FOLDER]);
/* The same, which is made if it is not there. */
tb_status tool_agents_make_folder(char out[TOOL_MAX_FOLDER]);
/* TB_DENIED unless it is this user's alone. */
tb_status tool_check_private(const char *folder);

/* ---- Reports (agents.c) -------------------------------------------------------------------------------------- */

typedef struct tool_agent_view {
    char *path;
    tb__link *link; /* kept; NULL: not connected */
    uint64_t seq;   /* of the question */
    bool is_asked;
    int64_t retry_ms; /* not to be asked before, as it was silent */
    json_t *report;   /* NULL: it gave none ... */
    tb_status status; /* ... and why */
    char why[512];    /* "" unless it failed */
    double when;      /* the report came, in seconds */
    json_t *before;   /* the one before; NULL: none */
    double before_when;
} tool_agent_view;

/* Zero but for the first three is ready to use. */
typedef struct tool_agents {
    const char *socket; /* the only one; NULL: all in the user's folder */
    const char *token;  /* NULL: none */
    const char *name;   /* whom agents show */
    bool lists_tensors; /* reports have a list of each batch's tensors */
    char folder[TOOL_MAX_FOLDER];
    TB_VEC(tool_agent_view) list;
} tool_agents;

/* Looks for sockets that are not in the list, which stays in the order of names. */
tb_status tool_agents_find(tool_agents *agents);

/* Asks all of them for a report, over connections that are kept. The timeout is each silent agent's that has to be
 * connected to, and that of all the others together. */
void tool_agents_ask(tool_agents *agents, int timeout_ms);

void tool_agents_fini(tool_agents *agents);

/* A socket that nobody listens at: its agent was killed. */
bool tool_agent_has_ended(const tool_agent_view *view);

/* ---- What reports say (agents.c) ----------------------------------------------------------------------------- */

/* Makes its strings fit for a terminal: control characters become ?. */
void tool_json_clean(json_t *value);
/* Members of an object; "" and 0 where they are not there. As a number, true is 1. */
const char *tool_json_text(const json_t *object, const char *key);
int64_t tool_json_int(const json_t *object, const char *key);
double tool_json_real(const json_t *object, const char *key);

/* "trainer 0" */
void tool_add_seat(tb__text *out, const json_t *report);
/* "12 s", "3 min", "5 h", "9 d" */
void tool_add_duration(tb__text *out, double seconds);
/* The state of a pair, and why it is not ready. */
void tool_add_pair_state(tb__text *out, const json_t *pair);
/* The version of a batch, and whether it is mixed, torn or in doubt. */
void tool_take_version(tool_table *table, const json_t *batch);
/* How many of the report's peers are alive. */
size_t tool_count_alive(const json_t *report);

/* ---- The bus, by its store (bus_view.c, status_store.c) -------------------------------------------------------- */

/* The first three are given. */
typedef struct tool_bus {
    const char *url, *token; /* NULL: none */
    int timeout_ms;
    tb__store *opened; /* kept from one look to the next; NULL: not open */
} tool_bus;

/* What the store has now, as docs/operations.md describes it. */
tb_status tool_bus_look(tool_bus *bus, json_t **out);
void tool_bus_close(tool_bus *bus);

typedef struct tool_store_status {
    const char *store, *token; /* NULL: none */
    int timeout_ms;
    int watch_ms; /* from one look to the next, for ever; 0: one look */
    bool is_json;
    bool all; /* each seat */
} tool_store_status;

/* Returns an exit status. */
int tool_status_store(const tool_store_status *opts);

/* ---- The screen of `top` (top_screen.c) ---------------------------------------------------------------------- */

void top_draw(tb__text *out, const tool_agents *agents);

/* ---- What `inspect` says of one agent's tensors (inspect_agent.c) --------------------------------------------- */

int tool_inspect_agent(const char *socket, const char *token_file, bool is_json);

/* ---- For HTTP (view.c, metrics.c) ------------------------------------------------------------------------------ */

/* The document that the page of `agent --http` and `dashboard` shows, as docs/operations.md describes it. */
json_t *tool_view_create(const char *title);
/* One agent of it: its report, which is not kept; NULL: there is none, and why. The seat says which one it was, if that
 * is known. */
void tool_view_add_agent(json_t *view, const char *where, const json_t *report, const char *why, bool has_ended,
                         const json_t *seat);
tb_status tool_view_dump(json_t *view, char **out); /* frees the view */

/* A report in the text form of Prometheus. */
void tool_add_metrics(tb__text *out, const json_t *report);

#endif
