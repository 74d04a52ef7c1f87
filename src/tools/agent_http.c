/* The agent over HTTP, for what collects metrics: libmicrohttpd's thread asks the agent's loop for a report, and gives
 * it away as it is, or as metrics. */
#include "bus/agent/agent.h"

#include "base/descriptors.h"
#include "tools/agents.h"

#include <arpa/inet.h>
#include <errno.h>
#include <inttypes.h>
#include <microhttpd.h>
#include <netdb.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

enum { REPORT_MS = 5000, IDLE_SECONDS = 10, MOST_CONNECTIONS = 32 };

struct tool_http {
    tb__agent *agent;
    struct MHD_Daemon *daemon;
    char url[INET6_ADDRSTRLEN + 32];
};

/* ---- Answers --------------------------------------------------------------------------------------------------- */

static enum MHD_Result answer(struct MHD_Connection *connection, unsigned code, const char *type, tb__text *text) {
    if (text->failed) {
        tb__text_fini(text);
        return MHD_NO;
    }
    struct MHD_Response *response = MHD_create_response_from_buffer(text->count, text->data, MHD_RESPMEM_MUST_COPY);
    tb__text_fini(text);
    if (!response)
        return MHD_NO;
    MHD_add_response_header(response, MHD_HTTP_HEADER_CONTENT_TYPE, type);
    if (code == MHD_HTTP_METHOD_NOT_ALLOWED)
        MHD_add_response_header(response, MHD_HTTP_HEADER_ALLOW, "GET, HEAD");
    enum MHD_Result result = MHD_queue_response(connection, code, response);
    MHD_destroy_response(response);
    return result;
}

static enum MHD_Result refuse(struct MHD_Connection *connection, unsigned code, const char *why) {
    tb__text text = {0};
    tb__text_add(&text, "%s\n", why);
    return answer(connection, code, "text/plain; charset=utf-8", &text);
}

static tb_status make_metrics(const char *report, tb__text *out) {
    json_error_t error;
    json_t *parsed = json_loads(report, 0, &error);
    if (!parsed)
        return tb__fail(TB_INTERNAL, "the report can't be read: %s", error.text);
    tool_add_metrics(out, parsed);
    json_decref(parsed);
    return TB_OK;
}

static enum MHD_Result on_request(void *arg, struct MHD_Connection *connection, const char *url, const char *method,
                                  const char *version, const char *upload, size_t *upload_size, void **state) {
    const tool_http *http = arg;
    static int seen;
    (void)version;
    (void)upload;
    if (!*state) { /* the first call has the headers only; what comes after them is not wanted */
        *state = &seen;
        return MHD_YES;
    }
    if (*upload_size > 0) {
        *upload_size = 0;
        return MHD_YES;
    }
    bool is_metrics = strcmp(url, "/metrics") == 0, is_health = strcmp(url, "/healthz") == 0;
    if (strcmp(method, MHD_HTTP_METHOD_GET) != 0 && strcmp(method, MHD_HTTP_METHOD_HEAD) != 0)
        return refuse(connection, MHD_HTTP_METHOD_NOT_ALLOWED, "only GET and HEAD");
    if (!is_metrics && !is_health && strcmp(url, "/status") != 0)
        return refuse(connection, MHD_HTTP_NOT_FOUND, "there are /metrics, /status and /healthz");
    char *report = NULL;
    tb__text text = {0};
    tb_status status = tb__agent_report(http->agent, REPORT_MS, &report);
    if (status == TB_OK && is_metrics)
        status = make_metrics(report, &text);
    else if (status == TB_OK) /* an agent that can make its report is well */
        tb__text_add(&text, "%s\n", is_health ? "ok" : report);
    free(report);
    if (status != TB_OK) {
        tb__text_fini(&text);
        return refuse(connection, MHD_HTTP_SERVICE_UNAVAILABLE, tb_error_detail());
    }
    const char *type = is_metrics  ? "text/plain; version=0.0.4; charset=utf-8"
                       : is_health ? "text/plain; charset=utf-8"
                                   : "application/json";
    return answer(connection, MHD_HTTP_OK, type, &text);
}

/* ---- Where it listens ------------------------------------------------------------------------------------------ */

/* "9100", "127.0.0.1:9100", "[::1]:9100" */
static tb_status read_place(const char *place, char host[128], const char **port) {
    const char *colon = strrchr(place, ':');
    int64_t number;
    const char *at = *port = colon ? colon + 1 : place;
    size_t length = colon ? (size_t)(colon - place) : 0;
    const char *name = place;
    if (length >= 2 && place[0] == '[' && place[length - 1] == ']') {
        name++;
        length -= 2;
    } else if (memchr(place, ':', length)) {
        length = 0; /* an address of many colons needs its brackets */
        at = "";
    }
    bool is_port = *at >= '0' && *at <= '9' && tb__read_int(&at, &number) && !*at && number <= 65535;
    if (!is_port || (colon && length == 0) || length >= 128)
        return tb__fail(TB_INVALID, "--http takes [ADDRESS:]PORT, not '%.60s'", place);
    snprintf(host, 128, "%.*s", (int)length, name);
    if (!colon)
        snprintf(host, 128, "127.0.0.1");
    return TB_OK;
}

tb_status tool_http_check(const char *place) {
    char host[128];
    const char *port;
    return read_place(place, host, &port);
}

static tb_status open_socket(const char *place, int *out) {
    char host[128];
    const char *port;
    struct addrinfo *found, hints = {.ai_socktype = SOCK_STREAM, .ai_flags = AI_PASSIVE | AI_NUMERICSERV};
    TB_TRY(read_place(place, host, &port));
    int error = getaddrinfo(host, port, &hints, &found);
    if (error != 0)
        return tb__fail(TB_INVALID, "--http %.100s: %s", place, gai_strerror(error));
    int fd = socket(found->ai_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0), on = 1;
    bool listens = fd >= 0 && setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on) == 0 &&
                   bind(fd, found->ai_addr, found->ai_addrlen) == 0 && listen(fd, MOST_CONNECTIONS) == 0;
    error = errno;
    freeaddrinfo(found);
    if (!listens) {
        if (fd >= 0)
            close(fd);
        return tb__fail(TB_IO, "--http %.100s: %s", place, tb__errno_text(error));
    }
    *out = fd;
    return TB_OK;
}

static void write_url(int fd, char *out, size_t room) {
    struct sockaddr_storage address = {0};
    socklen_t length = sizeof address;
    char host[INET6_ADDRSTRLEN] = "", port[8] = "";
    getsockname(fd, (struct sockaddr *)&address, &length);
    getnameinfo((struct sockaddr *)&address, length, host, sizeof host, port, sizeof port,
                NI_NUMERICHOST | NI_NUMERICSERV);
    snprintf(out, room, strchr(host, ':') ? "http://[%s]:%s" : "http://%s:%s", host, port);
}

tb_status tool_http_start(tb__agent *agent, const char *place, tool_http **out) {
    int fd;
    tool_http *http = tb__calloc(1, sizeof *http);
    if (!http)
        return TB_NO_MEMORY;
    tb_status status = open_socket(place, &fd);
    if (status != TB_OK) {
        free(http);
        return status;
    }
    http->agent = agent;
    write_url(fd, http->url, sizeof http->url);
    http->daemon = MHD_start_daemon(MHD_USE_INTERNAL_POLLING_THREAD | MHD_USE_AUTO, 0, NULL, NULL, on_request, http,
                                    MHD_OPTION_LISTEN_SOCKET, fd, MHD_OPTION_CONNECTION_TIMEOUT, (unsigned)IDLE_SECONDS,
                                    MHD_OPTION_CONNECTION_LIMIT, (unsigned)MOST_CONNECTIONS, MHD_OPTION_END);
    if (!http->daemon) {
        close(fd);
        free(http);
        return tb__fail(TB_IO, "--http %.100s: libmicrohttpd could not start", place);
    }
    *out = http;
    return TB_OK;
}

const char *tool_http_url(const tool_http *http) {
    return http->url;
}

void tool_http_stop(tool_http *http) {
    if (!http)
        return;
    MHD_stop_daemon(http->daemon); /* closes the socket */
    free(http);
}
