/* Status, metrics and a page over HTTP. */
#ifndef TB_TOOLS_HTTP_H
#define TB_TOOLS_HTTP_H

#include "tools/tools.h"

typedef struct tool_http tool_http;

typedef struct tool_http_opts {
    const char *option; /* the option that sets the place, for messages: "http" */
    const char *place;  /* [ADDRESS:]PORT; the address is 127.0.0.1 if it is not given, and port 0 is any */
    const char *token;  /* required in all requests, unless it listens on loopback; NULL: it listens only there */
    bool has_metrics;
    /* For /status, /metrics and /healthz, and for the page: JSON that the caller frees. Called by several threads; the
     * second by only one at a time. */
    tb_status (*report)(void *arg, char **out);
    tb_status (*view)(void *arg, char **out);
    void *arg;
} tool_http_opts;

/* Checks that tool_http_start accepts the place. */
tb_status tool_http_check(const char *option, const char *place);

/* Serves in separate threads. The strings must stay until it has stopped. */
tb_status tool_http_start(const tool_http_opts *opts, tool_http **out);
const char *tool_http_url(const tool_http *http); /* "http://127.0.0.1:9100" */
void tool_http_stop(tool_http *http);             /* NULL is allowed */

#endif
