/* Status, metrics and a page over HTTP, for `agent` and `dashboard`. Each connection has a thread of libmicrohttpd. All
 * pages show the same document, which is made anew for a request when it is a second old. */
#include "tools/http.h"

#include "base/descriptors.h"
#include "base/process.h"
#include "base/sha256.h"
#include "tools/agents.h"

#include <arpa/inet.h>
#include <errno.h>
#include <microhttpd.h>
#include <netdb.h>
#include <netinet/in.h>
#include <poll.h>
#include <pthread.h>
#include <stdio.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

enum { PERIOD_MS = 1000, IDLE_SECONDS = 10, MOST_CONNECTIONS = 32 };

struct tool_http {
    tool_http_opts opts;
    bool is_local; /* it listens on loopback */
    int stopping;  /* an eventfd that is readable once the server stops */
    struct MHD_Daemon *daemon;
    char url[INET6_ADDRSTRLEN + 32];
    pthread_mutex_t lock; /* for the rest */
    int64_t made_ms;      /* when the view was made; 0: never */
    tb_status made_with;
    char *view; /* compact JSON, or an error message */
};

extern const char tool_page[], tool_page_end[];

/* ---- Answers --------------------------------------------------------------------------------------------------- */

static enum MHD_Result answer(struct MHD_Connection *connection, unsigned code, const char *type,
                              struct MHD_Response *response) {
    if (!response)
        return MHD_NO;
    MHD_add_response_header(response, MHD_HTTP_HEADER_CONTENT_TYPE, type);
    MHD_add_response_header(response, MHD_HTTP_HEADER_CACHE_CONTROL, "no-store");
    MHD_add_response_header(response, "X-Content-Type-Options", "nosniff");
    if (code == MHD_HTTP_METHOD_NOT_ALLOWED)
        MHD_add_response_header(response, MHD_HTTP_HEADER_ALLOW, "GET, HEAD");
    if (code == MHD_HTTP_UNAUTHORIZED)
        MHD_add_response_header(response, MHD_HTTP_HEADER_WWW_AUTHENTICATE, "Basic realm=\"tensorbus\"");
    enum MHD_Result result = MHD_queue_response(connection, code, response);
    MHD_destroy_response(response);
    return result;
}

static enum MHD_Result answer_text(struct MHD_Connection *connection, unsigned code, const char *type, tb__text *text) {
    struct MHD_Response *response =
        text->failed ? NULL : MHD_create_response_from_buffer(text->count, text->data, MHD_RESPMEM_MUST_COPY);
    tb__text_fini(text);
    return answer(connection, code, type, response);
}

static enum MHD_Result refuse(struct MHD_Connection *connection, unsigned code, const char *why) {
    tb__text text = {0};
    tb__text_add(&text, "%s\n", why);
    return answer_text(connection, code, "text/plain; charset=utf-8", &text);
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

static enum MHD_Result answer_report(const tool_http *http, struct MHD_Connection *connection, const char *url) {
    bool is_metrics = strcmp(url, "/metrics") == 0, is_health = strcmp(url, "/healthz") == 0;
    char *report = NULL;
    tb__text text = {0};
    tb_status status = http->opts.report(http->opts.arg, &report);
    if (status == TB_OK && is_metrics)
        status = make_metrics(report, &text);
    else if (status == TB_OK) /* a process that can make a report is healthy */
        tb__text_add(&text, "%s\n", is_health ? "ok" : report);
    free(report);
    if (status != TB_OK) {
        tb__text_fini(&text);
        return refuse(connection, MHD_HTTP_SERVICE_UNAVAILABLE, tb_error_detail());
    }
    return answer_text(connection, MHD_HTTP_OK,
                       is_metrics  ? "text/plain; version=0.0.4; charset=utf-8"
                       : is_health ? "text/plain; charset=utf-8"
                                   : "application/json",
                       &text);
}

static enum MHD_Result answer_page(struct MHD_Connection *connection) {
    uintptr_t begin = (uintptr_t)tool_page, end = (uintptr_t)tool_page_end;
    struct MHD_Response *page =
        MHD_create_response_from_buffer(end - begin, (void *)begin, MHD_RESPMEM_PERSISTENT); // NOLINT
    if (page)
        MHD_add_response_header(page, "Content-Security-Policy",
                                "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; "
                                "connect-src 'self'; frame-ancestors 'none'");
    return answer(connection, MHD_HTTP_OK, "text/html; charset=utf-8", page);
}

/* ---- Events ---------------------------------------------------------------------------------------------------- */

/* A browser that looks at the page. */
typedef struct watcher {
    tool_http *http;
    int64_t made_ms; /* of the document that it got last */
    char *text;      /* an event, of which `sent` bytes are on their way */
    size_t nbytes, sent;
} watcher;

/* Makes the document unless it is new enough. Needs the lock. */
static void refresh(tool_http *http) {
    if (http->made_ms != 0 && tb__now_ms() < http->made_ms + PERIOD_MS)
        return;
    char *view = NULL;
    http->made_with = http->opts.view(http->opts.arg, &view);
    if (http->made_with != TB_OK)
        view = tb__strdup(tb_error_detail());
    free(http->view);
    http->view = view;
    http->made_ms = tb__now_ms();
}

/* The next event: the document, or the reason why there is none. False: no memory. */
static bool take_event(watcher *w) {
    tool_http *http = w->http;
    tb__text text = {0};
    pthread_mutex_lock(&http->lock);
    refresh(http);
    w->made_ms = http->made_ms;
    for (char *at = http->made_with == TB_OK ? NULL : http->view; at && *at; at++)
        *at = *at == '\n' ? ' ' : *at;
    tb__text_add(&text, "%s", http->made_with == TB_OK ? "data: " : "event: trouble\ndata: ");
    tb__text_add(&text, "%s", http->view ? http->view : "no memory");
    tb__text_add(&text, "\n\n");
    pthread_mutex_unlock(&http->lock);
    free(w->text);
    w->text = text.data;
    w->nbytes = text.count;
    w->sent = 0;
    return !text.failed;
}

/* Blocks until the next event is due: each connection has its own thread. */
static ssize_t give_events(void *arg, uint64_t position, char *out, size_t room) {
    watcher *w = arg;
    (void)position;
    if (w->sent == w->nbytes) {
        struct pollfd stopping = {.fd = w->http->stopping, .events = POLLIN};
        int64_t wait_ms = w->made_ms == 0 ? 0 : w->made_ms + PERIOD_MS - tb__now_ms();
        if (poll(&stopping, 1, wait_ms > 0 ? (int)wait_ms : 0) != 0 || !take_event(w))
            return MHD_CONTENT_READER_END_OF_STREAM;
    }
    size_t n = w->nbytes - w->sent < room ? w->nbytes - w->sent : room;
    memcpy(out, w->text + w->sent, n);
    w->sent += n;
    return (ssize_t)n;
}

static void free_watcher(void *arg) {
    watcher *w = arg;
    free(w->text);
    free(w);
}

static enum MHD_Result answer_events(tool_http *http, struct MHD_Connection *connection) {
    watcher *w = tb__calloc(1, sizeof *w);
    if (!w)
        return MHD_NO;
    w->http = http;
    struct MHD_Response *response =
        MHD_create_response_from_callback(MHD_SIZE_UNKNOWN, 65536, give_events, w, free_watcher);
    if (!response)
        free_watcher(w);
    return answer(connection, MHD_HTTP_OK, "text/event-stream", response);
}

/* ---- Requests -------------------------------------------------------------------------------------------------- */

/* A page of another site must not read loopback through a name of its own that resolves to it. */
static bool names_this_machine(const char *host) {
    static const char *const names[] = {"localhost", "127.", "[::1]", "[::ffff:127."};
    for (size_t i = 0; host && i < sizeof names / sizeof *names; i++) {
        if (strncasecmp(host, names[i], strlen(names[i])) == 0)
            return true;
    }
    return !host;
}

static bool is_token(const tool_http *http, const char *given) {
    size_t length = strlen(http->opts.token);
    return given && strlen(given) == length && tb__is_equal_in_constant_time(given, http->opts.token, length);
}

/* As `Authorization: Bearer TOKEN`, or as the password of any user, which is what browsers ask for. */
static bool has_token(const tool_http *http, struct MHD_Connection *connection) {
    static const char bearer[] = "Bearer ";
    const char *header = MHD_lookup_connection_value(connection, MHD_HEADER_KIND, MHD_HTTP_HEADER_AUTHORIZATION);
    if (header && strncasecmp(header, bearer, sizeof bearer - 1) == 0)
        return is_token(http, header + sizeof bearer - 1);
    char *password = NULL, *user = MHD_basic_auth_get_username_password(connection, &password);
    bool is_right = is_token(http, password);
    MHD_free(user);
    MHD_free(password);
    return is_right;
}

static enum MHD_Result on_request(void *arg, struct MHD_Connection *connection, const char *url, const char *method,
                                  const char *version, const char *upload, size_t *upload_size, void **state) {
    tool_http *http = arg;
    static int seen;
    (void)version;
    (void)upload;
    if (!*state) { /* the first call has the headers only; request bodies are ignored */
        *state = &seen;
        return MHD_YES;
    }
    if (*upload_size > 0) {
        *upload_size = 0;
        return MHD_YES;
    }
    if (strcmp(method, MHD_HTTP_METHOD_GET) != 0 && strcmp(method, MHD_HTTP_METHOD_HEAD) != 0)
        return refuse(connection, MHD_HTTP_METHOD_NOT_ALLOWED, "only GET and HEAD");
    if (http->is_local &&
        !names_this_machine(MHD_lookup_connection_value(connection, MHD_HEADER_KIND, MHD_HTTP_HEADER_HOST)))
        return refuse(connection, MHD_HTTP_FORBIDDEN, "ask for localhost: this listens on loopback only");
    if (strcmp(url, "/healthz") == 0) /* contains nothing secret */
        return answer_report(http, connection, url);
    if (http->opts.token && !http->is_local && !has_token(http, connection))
        return refuse(connection, MHD_HTTP_UNAUTHORIZED,
                      "the token is missing or wrong: it is the password of any user, or a bearer token");
    if (strcmp(url, "/") == 0)
        return answer_page(connection);
    if (strcmp(url, "/events") == 0)
        return answer_events(http, connection);
    if (strcmp(url, "/status") == 0 || (http->opts.has_metrics && strcmp(url, "/metrics") == 0))
        return answer_report(http, connection, url);
    return refuse(connection, MHD_HTTP_NOT_FOUND,
                  http->opts.has_metrics ? "there are / (a page), /metrics, /status and /healthz"
                                         : "there are / (a page), /status and /healthz");
}

/* ---- Where it listens ------------------------------------------------------------------------------------------ */

/* "9100", "127.0.0.1:9100", "[::1]:9100" */
static tb_status read_place(const char *option, const char *place, char host[128], const char **port) {
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
        return tb__fail(TB_INVALID, "--%s takes [ADDRESS:]PORT, not '%.60s'", option, place);
    snprintf(host, 128, "%.*s", (int)length, name);
    if (!colon)
        snprintf(host, 128, "127.0.0.1");
    return TB_OK;
}

tb_status tool_http_check(const char *option, const char *place) {
    char host[128];
    const char *port;
    return read_place(option, place, host, &port);
}

static tb_status open_socket(const char *option, const char *place, int *out) {
    char host[128];
    const char *port;
    struct addrinfo *found, hints = {.ai_socktype = SOCK_STREAM, .ai_flags = AI_PASSIVE | AI_NUMERICSERV};
    TB_TRY(read_place(option, place, host, &port));
    int error = getaddrinfo(host, port, &hints, &found);
    if (error != 0)
        return tb__fail(TB_INVALID, "--%s %.100s: %s", option, place, gai_strerror(error));
    int fd = socket(found->ai_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0), on = 1;
    bool listens = fd >= 0 && setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on) == 0 &&
                   bind(fd, found->ai_addr, found->ai_addrlen) == 0 && listen(fd, MOST_CONNECTIONS) == 0;
    error = errno;
    freeaddrinfo(found);
    if (!listens) {
        if (fd >= 0)
            close(fd);
        return tb__fail(TB_IO, "--%s %.100s: %s", option, place, tb__errno_text(error));
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

static bool is_loopback(int fd) {
    struct sockaddr_storage address = {0};
    socklen_t length = sizeof address;
    getsockname(fd, (struct sockaddr *)&address, &length);
    struct sockaddr_in v4;
    struct sockaddr_in6 v6;
    memcpy(&v4, &address, sizeof v4);
    memcpy(&v6, &address, sizeof v6);
    return address.ss_family == AF_INET ? ntohl(v4.sin_addr.s_addr) >> 24 == 127
                                        : memcmp(&v6.sin6_addr, &in6addr_loopback, sizeof v6.sin6_addr) == 0;
}

static void free_http(tool_http *http) {
    if (http->stopping >= 0)
        close(http->stopping);
    pthread_mutex_destroy(&http->lock);
    free(http->view);
    free(http);
}

tb_status tool_http_start(const tool_http_opts *opts, tool_http **out) {
    int fd = -1;
    tool_http *http = tb__calloc(1, sizeof *http);
    if (!http)
        return TB_NO_MEMORY;
    http->opts = *opts;
    pthread_mutex_init(&http->lock, NULL);
    http->stopping = tb__fd_own(eventfd(0, EFD_CLOEXEC));
    tb_status status = http->stopping < 0 ? tb__fail(TB_IO, "eventfd: %s", tb__errno_text(errno)) : TB_OK;
    if (status == TB_OK)
        status = open_socket(opts->option, opts->place, &fd);
    http->is_local = status == TB_OK && is_loopback(fd);
    if (status == TB_OK && !http->is_local && !opts->token) {
        close(fd);
        status =
            tb__fail(TB_DENIED,
                     "--%s %.100s: other machines could read what is served: give --token-file, or listen on loopback",
                     opts->option, opts->place);
    }
    if (status == TB_OK) {
        write_url(fd, http->url, sizeof http->url);
        unsigned flags = MHD_USE_INTERNAL_POLLING_THREAD | MHD_USE_THREAD_PER_CONNECTION | MHD_USE_AUTO;
        http->daemon = MHD_start_daemon(flags, 0, NULL, NULL, on_request, http, MHD_OPTION_LISTEN_SOCKET, fd,
                                        MHD_OPTION_CONNECTION_TIMEOUT, (unsigned)IDLE_SECONDS,
                                        MHD_OPTION_CONNECTION_LIMIT, (unsigned)MOST_CONNECTIONS, MHD_OPTION_END);
        if (!http->daemon) {
            close(fd);
            status = tb__fail(TB_IO, "--%s %.100s: libmicrohttpd could not start", opts->option, opts->place);
        }
    }
    if (status != TB_OK) {
        free_http(http);
        return status;
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
    (void)eventfd_write(http->stopping, 1);
    MHD_stop_daemon(http->daemon); /* closes the socket */
    free_http(http);
}
