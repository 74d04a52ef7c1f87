/* HTTP by libcurl. Each call runs a connection of its own in the caller's thread; tb__gateway_stop wakes all of them.
 */
#include "bus/store/gateway.h"

#include "base/mem.h"
#include "base/traffic.h"
#include "bus/store/address.h"
#include "bus/store/curl.h"
#include "bus/store/etcd_token.h"

#include <errno.h>
#include <fcntl.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

/* An endpoint that does not answer must not use up the time in which another would. */
enum { ATTEMPT_MS = 2000, FIRST_DELAY_MS = 10, LONGEST_DELAY_MS = 500, MAX_REPLY = 48 << 20, MOST_CALLS = 32 };

static const char login_path[] = "/v3/auth/authenticate";
#define NO_LOGIN UINT64_MAX

/* A libcurl handle with its connection, and the multi handle that runs it. */
typedef struct connection {
    LIST_ENTRY(connection) link;
    CURLM *multi;
    CURL *easy;
    char error[CURL_ERROR_SIZE];
    struct curl_slist *headers;
    uint64_t login; /* that is in the headers */
    const tb__gateway_user *user;
} connection;

LIST_HEAD(connection_list, connection);

struct tb__gateway {
    const tb__curl *curl;
    tb__store_url at;
    const char *url; /* at.base, for messages */
    size_t nendpoints;
    char endpoints[TB__GATEWAY_MAX_ENDPOINTS][300];
    atomic_size_t current;    /* the endpoint that answered last */
    atomic_bool has_answered; /* an endpoint has answered as etcd does */

    pthread_mutex_t lock; /* for all that follows */
    struct connection_list busy, idle;
    size_t ncalls;          /* under way, streams aside */
    pthread_cond_t freed;   /* one has ended, or the gateway or a user is stopped */
    atomic_bool is_stopped; /* for the reason: */
    char why[256];
    _Atomic uint64_t login; /* how often it has logged in */
    char *header;           /* of the last login */

    pthread_mutex_t logging_in; /* held while it does */
};

static tb_status add_endpoint(tb__gateway *g, const char *text, size_t length) {
    static const char allowed[] = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789.-_:[]";
    char host_port[TB__STORE_MAX_URL + 1];
    tb__address address = {0};
    snprintf(host_port, sizeof host_port, "%.*s", (int)length, text);
    if (strspn(text, allowed) < length || length == 0)
        return tb__fail(TB_INVALID, "store '%s': '%s' is not host:port", g->url, host_port);
    tb_status status = tb__host_port_parse(host_port, &address);
    if (status == TB_OK && strcmp(address.port, "0") == 0)
        status = tb__fail(TB_INVALID, "port 0 is out of range: ports are 1 to 65535");
    if (status != TB_OK) {
        tb__saved_detail why = tb__save_detail();
        return tb__fail(status, "store '%s': '%s': %s", g->url, host_port, why.text);
    }
    if (g->nendpoints == TB__GATEWAY_MAX_ENDPOINTS)
        return tb__fail(TB_TOO_BIG, "store '%s': more than %d endpoints", g->url, TB__GATEWAY_MAX_ENDPOINTS);
    bool is_ipv6 = strchr(address.host, ':') != NULL;
    snprintf(g->endpoints[g->nendpoints++], sizeof *g->endpoints, "http%s://%s%s%s:%s", *g->at.ca ? "s" : "",
             is_ipv6 ? "[" : "", address.host, is_ipv6 ? "]" : "", address.port);
    return TB_OK;
}

static tb_status read_endpoints(tb__gateway *g) {
    static const char scheme[] = "etcd://";
    if (strncmp(g->url, scheme, sizeof scheme - 1) != 0)
        return tb__fail(TB_INVALID, "store '%s' is not etcd://host:port", g->url);
    for (const char *at = g->url + sizeof scheme - 1;;) {
        size_t length = strcspn(at, ",");
        TB_TRY(add_endpoint(g, at, length));
        if (!at[length])
            return TB_OK;
        at += length + 1;
    }
}

tb_status tb__gateway_create(const tb__store_url *url, tb__gateway **out) {
    tb__gateway *g = tb__calloc(1, sizeof *g);
    if (!g)
        return TB_NO_MEMORY;
    g->at = *url;
    g->url = g->at.base;
    pthread_mutex_init(&g->lock, NULL);
    pthread_mutex_init(&g->logging_in, NULL);
    tb__monotonic_cond_init(&g->freed);
    LIST_INIT(&g->busy);
    LIST_INIT(&g->idle);
    tb_status status = read_endpoints(g);
    if (status == TB_OK && *g->at.ca && access(g->at.ca, R_OK) != 0)
        status = tb__fail(TB_INVALID, "%s: can't read the CA %s: %s", g->url, g->at.ca, strerror(errno));
    if (status == TB_OK)
        status = tb__curl_load(&g->curl);
    if (status != TB_OK) {
        tb__gateway_destroy(g);
        return status;
    }
    *out = g;
    return TB_OK;
}

static void destroy_connection(const tb__gateway *g, connection *l) {
    if (l->easy)
        g->curl->easy_cleanup(l->easy);
    if (l->multi)
        g->curl->multi_cleanup(l->multi);
    if (l->headers)
        g->curl->slist_free_all(l->headers);
    free(l);
}

/* The header makes a member that has lost the others report that instead of letting a watch sleep on; a large body is
 * sent at once. Needs the lock. */
static bool make_headers(const tb__gateway *g, connection *l, bool has_login) {
    const char *const lines[] = {"Content-Type: application/json", "Grpc-Metadata-hasleader: true",
                                 "Expect:", has_login ? g->header : NULL};
    struct curl_slist *list = NULL;
    for (size_t i = 0; i < sizeof lines / sizeof *lines && lines[i]; i++) {
        struct curl_slist *longer = g->curl->slist_append(list, lines[i]);
        if (!longer) {
            g->curl->slist_free_all(list);
            return false;
        }
        list = longer;
    }
    g->curl->easy_setopt(l->easy, CURLOPT_HTTPHEADER, list);
    if (l->headers)
        g->curl->slist_free_all(l->headers);
    l->headers = list;
    l->login = has_login ? g->login : NO_LOGIN;
    return true;
}

/* libcurl's callbacks: its sockets go neither with an exec nor with a fork. */
static int on_socket(void *arg, curl_socket_t fd, curlsocktype purpose) {
    (void)arg;
    (void)purpose;
    fcntl(fd, F_SETFD, FD_CLOEXEC);
    tb__fd_mark(fd);
    return CURL_SOCKOPT_OK;
}

static int on_socket_closed(void *arg, curl_socket_t fd) {
    (void)arg;
    tb__fd_close(fd);
    return 0;
}

static tb_status create_connection(const tb__gateway *g, connection **out) {
    connection *l = tb__calloc(1, sizeof *l);
    if (!l)
        return TB_NO_MEMORY;
    l->multi = g->curl->multi_init();
    l->easy = g->curl->easy_init();
    if (!l->multi || !l->easy || !make_headers(g, l, false)) {
        destroy_connection(g, l);
        return tb__fail(TB_NO_MEMORY, "no memory for a connection");
    }
    g->curl->multi_setopt(l->multi, CURLMOPT_MAXCONNECTS, 1L);
    g->curl->easy_setopt(l->easy, CURLOPT_ERRORBUFFER, l->error);
    g->curl->easy_setopt(l->easy, CURLOPT_HTTP_VERSION, (long)CURL_HTTP_VERSION_1_1);
    if (*g->at.ca)
        g->curl->easy_setopt(l->easy, CURLOPT_CAINFO, g->at.ca);
    g->curl->easy_setopt(l->easy, CURLOPT_NOSIGNAL, 1L);
    g->curl->easy_setopt(l->easy, CURLOPT_SOCKOPTFUNCTION, on_socket);
    g->curl->easy_setopt(l->easy, CURLOPT_CLOSESOCKETFUNCTION, on_socket_closed);
    g->curl->easy_setopt(l->easy, CURLOPT_TCP_KEEPALIVE, 1L);
    g->curl->easy_setopt(l->easy, CURLOPT_TCP_KEEPIDLE, 10L);
    g->curl->easy_setopt(l->easy, CURLOPT_TCP_KEEPINTVL, 5L);
    /* Proxies of the environment are meant for the program's own requests. */
    g->curl->easy_setopt(l->easy, CURLOPT_PROXY, "");
    *out = l;
    return TB_OK;
}

static tb_status fail_stopped(const tb__gateway *g) {
    return tb__fail(TB_LOST, "%s: the connection was lost: %s", g->url,
                    g->is_stopped ? g->why : "this side has hung up");
}

static bool is_limited(const tb__gateway_call *call) {
    return !call->on_result && !call->is_urgent;
}

static bool is_call_stopped(const tb__gateway *g, const tb__gateway_call *call) {
    return !call->ignores_stop && (g->is_stopped || (call->user && call->user->is_stopped));
}

/* With the lock held: waits until fewer calls are under way. */
static tb_status await_turn(tb__gateway *g, const tb__gateway_call *call) {
    struct timespec until = tb__time_of_ms(call->deadline_ms);
    bool is_late = false;
    while (!is_late && is_limited(call) && g->ncalls >= MOST_CALLS && !is_call_stopped(g, call))
        is_late = pthread_cond_timedwait(&g->freed, &g->lock, &until) != 0;
    if (!is_late && !is_call_stopped(g, call))
        return TB_OK;
    pthread_cond_signal(&g->freed); /* it may be another one's turn */
    return is_late ? tb__fail(TB_TIMEOUT, "%s: %d calls are under way, and none has ended in time", g->url, MOST_CALLS)
                   : fail_stopped(g);
}

static tb_status take_connection(tb__gateway *g, const tb__gateway_call *call, connection **out) {
    bool has_login = strcmp(call->path, login_path) != 0; /* one that has expired would be refused */
    pthread_mutex_lock(&g->lock);
    tb_status status = await_turn(g, call);
    connection *l = status == TB_OK ? LIST_FIRST(&g->idle) : NULL;
    if (l)
        LIST_REMOVE(l, link);
    else if (status == TB_OK)
        status = create_connection(g, &l);
    if (status == TB_OK && l->login != (has_login ? g->login : NO_LOGIN) && !make_headers(g, l, has_login)) {
        LIST_INSERT_HEAD(&g->idle, l, link);
        status = tb__fail(TB_NO_MEMORY, "no memory for HTTP headers");
    }
    if (status == TB_OK) {
        l->user = call->user;
        g->ncalls += is_limited(call);
        LIST_INSERT_HEAD(&g->busy, l, link);
    }
    pthread_mutex_unlock(&g->lock);
    if (status == TB_OK)
        *out = l;
    return status;
}

static void release_connection(tb__gateway *g, const tb__gateway_call *call, connection *l) {
    pthread_mutex_lock(&g->lock);
    g->ncalls -= is_limited(call);
    pthread_cond_signal(&g->freed);
    LIST_REMOVE(l, link);
    LIST_INSERT_HEAD(&g->idle, l, link);
    pthread_mutex_unlock(&g->lock);
}

void tb__gateway_destroy(tb__gateway *gateway) {
    if (!gateway)
        return;
    while (!LIST_EMPTY(&gateway->idle)) {
        connection *l = LIST_FIRST(&gateway->idle);
        LIST_REMOVE(l, link);
        destroy_connection(gateway, l);
    }
    if (gateway->header)
        explicit_bzero(gateway->header, strlen(gateway->header));
    free(gateway->header);
    pthread_cond_destroy(&gateway->freed);
    pthread_mutex_destroy(&gateway->lock);
    pthread_mutex_destroy(&gateway->logging_in);
    free(gateway);
}

/* Needs the lock. Makes the calls of a user, or all, check whether they have to end. */
static void wake_calls(tb__gateway *g, const tb__gateway_user *user) {
    for (connection *l = LIST_FIRST(&g->busy); l; l = LIST_NEXT(l, link)) {
        if (!user || l->user == user)
            g->curl->multi_wakeup(l->multi);
    }
    pthread_cond_broadcast(&g->freed);
}

void tb__gateway_stop(tb__gateway *gateway, const char *why) {
    pthread_mutex_lock(&gateway->lock);
    if (!gateway->is_stopped)
        snprintf(gateway->why, sizeof gateway->why, "%s", why);
    gateway->is_stopped = true;
    wake_calls(gateway, NULL);
    pthread_mutex_unlock(&gateway->lock);
}

void tb__gateway_stop_user(tb__gateway *gateway, tb__gateway_user *user) {
    pthread_mutex_lock(&gateway->lock);
    user->is_stopped = true;
    wake_calls(gateway, user);
    pthread_mutex_unlock(&gateway->lock);
}

void tb__gateway_interrupt(tb__gateway *gateway, tb__gateway_user *user) {
    pthread_mutex_lock(&gateway->lock);
    user->ninterrupts++;
    wake_calls(gateway, user);
    pthread_mutex_unlock(&gateway->lock);
}

typedef enum outcome {
    ANSWERED,
    FAILED,     /* not to be tried again; the status is the attempt's */
    UNREACHED,  /* no connection: the request was not sent */
    SILENT,     /* no answer, and the request was not sent */
    UNANSWERED, /* no answer, and the request may have been received */
} outcome;

typedef struct attempt {
    tb__gateway *gateway;
    tb__gateway_call *call;
    connection *connection;
    const char *body;
    const char *to;                                  /* an endpoint */
    tb__bytes in;                                    /* the answer so far; of a stream, of the next object */
    bool has_begun, is_enough, is_broken, timed_out; /* timed_out: its time was up */
    int64_t begun_ms;
    tb_status status; /* of what was received */
} attempt;

static json_t *parse_json(const char *text, size_t nbytes) {
    json_error_t error;
    return json_loadb(text, nbytes, JSON_REJECT_DUPLICATES | JSON_ALLOW_NUL, &error);
}

/* Handles one object of a stream; false: the stream has to end. */
static bool take_object(attempt *a, const char *text, size_t nbytes) {
    json_t *object = parse_json(text, nbytes);
    json_t *result = json_object_get(object, "result");
    if (!result) {
        const char *message = json_string_value(json_object_get(json_object_get(object, "error"), "message"));
        tb__set_detail("%s: the stream broke off: %.200s", a->gateway->url, message ? message : "no JSON of etcd's");
        a->is_broken = true;
    } else {
        a->has_begun = true;
        a->is_enough = a->call->on_result(a->call->arg, result);
    }
    json_decref(object);
    return !a->is_broken && !a->is_enough;
}

static bool take_objects(attempt *a) {
    const char *at = (const char *)a->in.item;
    size_t left = a->in.count;
    for (const char *end; (end = memchr(at, '\n', left)) != NULL;) {
        if (!take_object(a, at, (size_t)(end - at)))
            return false;
        left -= (size_t)(end + 1 - at);
        at = end + 1;
    }
    if (left > 0)
        memmove(a->in.item, at, left);
    a->in.count = left;
    return true;
}

/* libcurl's callback: anything but `count` ends the transfer. */
static size_t on_bytes(char *data, size_t size, size_t count, void *arg) {
    (void)size; /* always 1 */
    attempt *a = arg;
    long http = 0;
    if (count > MAX_REPLY - a->in.count) {
        a->status = tb__fail(TB_TOO_BIG, "%s: an answer of more than %d bytes", a->gateway->url, MAX_REPLY);
        return 0;
    }
    if (!tb__vec_reserve(&a->in, count)) {
        a->status = TB_NO_MEMORY;
        return 0;
    }
    memcpy(a->in.item + a->in.count, data, count);
    a->in.count += count;
    a->gateway->curl->easy_getinfo(a->connection->easy, CURLINFO_RESPONSE_CODE, &http);
    if (a->call->on_result && http == 200 && !take_objects(a))
        return 0;
    return count;
}

static void set_request_options(attempt *a) {
    const tb__curl *curl = a->gateway->curl;
    CURL *easy = a->connection->easy;
    char url[sizeof *a->gateway->endpoints + 64];
    snprintf(url, sizeof url, "%s%s", a->to, a->call->path);
    curl->easy_setopt(easy, CURLOPT_URL, url);
    curl->easy_setopt(easy, CURLOPT_POSTFIELDSIZE_LARGE, (curl_off_t)strlen(a->body));
    curl->easy_setopt(easy, CURLOPT_POSTFIELDS, a->body);
    curl->easy_setopt(easy, CURLOPT_WRITEFUNCTION, on_bytes);
    curl->easy_setopt(easy, CURLOPT_WRITEDATA, a);
    /* On a connection that was idle libcurl would send it a second time if that turns out to have been closed. */
    curl->easy_setopt(easy, CURLOPT_FRESH_CONNECT, (long)a->call->is_not_repeatable);
    a->connection->error[0] = '\0';
}

/* Runs the transfer until it ends, times out, or the gateway is stopped. If TB_OK, `code` is its result. */
static tb_status perform_transfer(attempt *a, int64_t attempt_ms, CURLcode *code) {
    tb__gateway *g = a->gateway;
    uint64_t ninterrupts = a->call->user ? a->call->user->ninterrupts : 0;
    for (;;) {
        int nrunning = 0, nleft = 0;
        g->curl->multi_perform(a->connection->multi, &nrunning);
        const CURLMsg *message = nrunning ? NULL : g->curl->multi_info_read(a->connection->multi, &nleft);
        if (nrunning == 0) {
            *code = message ? message->data.result : CURLE_FAILED_INIT;
            return TB_OK;
        }
        if (is_call_stopped(g, a->call))
            return fail_stopped(g);
        if (a->call->on_result && a->call->user && ninterrupts != a->call->user->ninterrupts)
            a->call->deadline_ms = tb__now_ms();
        int left = tb__ms_until(a->has_begun ? a->call->deadline_ms : attempt_ms);
        if (left == 0)
            return TB_TIMEOUT;
        g->curl->multi_poll(a->connection->multi, NULL, 0, left, NULL);
    }
}

/* Handles an HTTP status other than 200. */
static outcome read_http_error(attempt *a, long http) {
    json_t *reply = parse_json((const char *)a->in.item, a->in.count);
    const json_t *code = json_object_get(reply, "code");
    const char *message = json_string_value(json_object_get(reply, "message"));
    const char *url = a->gateway->url;
    outcome result = FAILED;
    a->call->code = (tb__etcd_code)json_integer_value(code);
    if (!reply && a->in.count > 0 && memmem(a->in.item, a->in.count, "HTTPS server", 12)) {
        a->status = tb__fail(TB_REFUSED, "%s: it speaks TLS: put ?ca=FILE with its CA behind the address", url);
    } else if (!code || !message) {
        a->status =
            tb__fail(TB_REFUSED, "%s: HTTP status %ld for %s: this is not etcd 3.4 or newer", url, http, a->call->path);
    } else {
        tb__set_detail("%s: etcd says: %.200s", url, message);
        switch ((int)a->call->code) {
        case 1:  /* cancelled */
        case 4:  /* its own deadline */
        case 14: /* no leader, or its members do not answer each other */
            result = UNANSWERED;
            break;
        case TB__ETCD_INVALID:
            a->status = TB_INVALID;
            break;
        case TB__ETCD_TOO_LARGE:
            a->status = TB_TOO_BIG;
            break;
        case 7:
        case TB__ETCD_UNAUTHENTICATED:
            a->status = TB_DENIED;
            break;
        default:
            a->status = TB_IO;
        }
    }
    json_decref(reply);
    return result;
}

static outcome read_http_answer(attempt *a, json_t **reply) {
    long http = 0;
    a->gateway->curl->easy_getinfo(a->connection->easy, CURLINFO_RESPONSE_CODE, &http);
    if (http != 200)
        return read_http_error(a, http);
    if (a->call->on_result) { /* a stream that ends by itself */
        if (!a->is_broken)
            tb__set_detail("%s: the stream ended", a->gateway->url);
        return UNANSWERED;
    }
    *reply = parse_json((const char *)a->in.item, a->in.count);
    if (*reply)
        return ANSWERED;
    a->status =
        tb__fail(TB_REFUSED, "%s: the answer to %s is not JSON: it is not etcd's", a->gateway->url, a->call->path);
    return FAILED;
}

/* Added to error messages while no endpoint has answered as etcd does. */
static const char *etcd_hint(const tb__gateway *g) {
    return atomic_load(&g->has_answered) ? "" : ": is it etcd?";
}

/* libcurl's own message does not name the cause. */
static void set_connect_detail(const attempt *a) {
    long error = 0;
    a->gateway->curl->easy_getinfo(a->connection->easy, CURLINFO_OS_ERRNO, &error);
    if (error == ECONNREFUSED)
        tb__set_detail("%s: connection refused, nobody listens at %s", a->gateway->url, a->to);
    else if (error)
        tb__set_detail("%s: connecting to %s: %s", a->gateway->url, a->to, strerror((int)error));
}

/* The transfer ended; `code` is libcurl's. */
static outcome classify_result(attempt *a, CURLcode code, json_t **reply) {
    const tb__curl *curl = a->gateway->curl;
    if (a->is_enough)
        return ANSWERED;
    if (a->status != TB_OK)
        return FAILED;
    if (a->is_broken)
        return UNANSWERED;
    if (code == CURLE_OK)
        return read_http_answer(a, reply);
    tb__set_detail("%s: %s", a->gateway->url,
                   a->connection->error[0] ? a->connection->error : curl->easy_strerror(code));
    switch (code) {
    case CURLE_COULDNT_CONNECT:
        set_connect_detail(a);
        return UNREACHED;
    case CURLE_COULDNT_RESOLVE_HOST:
        return UNREACHED;
    case CURLE_PEER_FAILED_VERIFICATION:
    case CURLE_SSL_CACERT_BADFILE:
        a->status = tb__fail(TB_DENIED, "%s: %s is not trusted with the CA %s: %s", a->gateway->url, a->to,
                             a->gateway->at.ca, a->connection->error);
        return FAILED;
    case CURLE_SSL_CONNECT_ERROR:
        a->status =
            tb__fail(TB_REFUSED, "%s: %s answers, but not in TLS: %s", a->gateway->url, a->to, a->connection->error);
        return FAILED;
    case CURLE_UNSUPPORTED_PROTOCOL:
    case CURLE_WEIRD_SERVER_REPLY:
        a->status =
            tb__fail(TB_REFUSED, "%s: %s answers, but not in HTTP%s", a->gateway->url, a->to, etcd_hint(a->gateway));
        return FAILED;
    case CURLE_GOT_NOTHING:
        tb__set_detail("%s: %s closes connections without an answer%s", a->gateway->url, a->to, etcd_hint(a->gateway));
        return UNANSWERED;
    case CURLE_OUT_OF_MEMORY:
        a->status = TB_NO_MEMORY;
        return FAILED;
    default:
        return UNANSWERED;
    }
}

static outcome classify_timeout(attempt *a) {
    long nsent = 0;
    a->timed_out = true;
    a->gateway->curl->easy_getinfo(a->connection->easy, CURLINFO_REQUEST_SIZE, &nsent);
    int waited_ms = (int)(tb__now_ms() - a->begun_ms);
    if (a->has_begun)
        tb__set_detail("%s", a->gateway->url);
    else if (nsent == 0 || atomic_load(&a->gateway->has_answered))
        tb__set_detail("%s: silent", a->gateway->url);
    else
        tb__set_detail("%s: silent, %s accepts connections but does not answer within %d ms: is it etcd?",
                       a->gateway->url, a->to, waited_ms);
    return nsent > 0 ? UNANSWERED : SILENT;
}

static outcome try_endpoint(attempt *a, size_t index, json_t **reply) {
    tb__gateway *g = a->gateway;
    int64_t attempt_ms = a->call->deadline_ms;
    CURLcode code = CURLE_OK;
    if (g->nendpoints > 1 && tb__now_ms() + ATTEMPT_MS < attempt_ms)
        attempt_ms = tb__now_ms() + ATTEMPT_MS;
    a->to = g->endpoints[index];
    a->begun_ms = tb__now_ms();
    tb__count_message(&tb__traffic_total.store);
    set_request_options(a);
    if (g->curl->multi_add_handle(a->connection->multi, a->connection->easy) != CURLM_OK) {
        a->status = tb__fail(TB_NO_MEMORY, "no memory for a request");
        return FAILED;
    }
    tb_status status = perform_transfer(a, attempt_ms, &code);
    outcome result = FAILED;
    if (status == TB_OK)
        result = classify_result(a, code, reply);
    else if (status == TB_TIMEOUT)
        result = classify_timeout(a);
    else
        a->status = status;
    g->curl->multi_remove_handle(a->connection->multi, a->connection->easy);
    return result;
}

/* Whether to try again; if not, *status is the result of the call. */
static bool should_retry_call(const tb__gateway *g, const tb__gateway_call *call, outcome last, size_t ntried,
                              tb_status *status) {
    bool is_late = tb__ms_until(call->deadline_ms) == 0;
    if (last == UNANSWERED && call->is_not_repeatable) {
        *status = TB_TIMEOUT;
        return false;
    }
    if (call->is_first && last == UNREACHED && ntried >= g->nendpoints) {
        *status = TB_IO;
        return false;
    }
    *status = is_late ? TB_TIMEOUT : TB_OK;
    return !is_late;
}

/* Without a login. */
static tb_status post_call(tb__gateway *g, tb__gateway_call *call, const char *body, json_t **reply) {
    int given_ms = tb__ms_until(call->deadline_ms);
    attempt a = {.gateway = g, .call = call, .body = body};
    *reply = NULL;
    if (given_ms == 0)
        return tb__fail(TB_TIMEOUT, "%s: no time was left to ask it", g->url);
    TB_TRY(take_connection(g, call, &a.connection));
    tb_status status = TB_OK;
    int delay_ms = FIRST_DELAY_MS;
    char why[256] = "";
    for (size_t ntried = 1;; ntried++) {
        size_t index = g->current % g->nendpoints, seen = index;
        outcome result = try_endpoint(&a, index, reply);
        if (result == ANSWERED || result == FAILED) {
            status = result == ANSWERED ? TB_OK : a.status;
            tb__count_message(&tb__traffic_total.store);
            if (result == ANSWERED)
                atomic_store(&g->has_answered, true);
            break;
        }
        /* The first call that fails at this endpoint moves all calls on to the next one. */
        atomic_compare_exchange_strong(&g->current, &seen, (index + 1) % g->nendpoints);
        /* The message of an attempt that was cut short has less information than the one before. */
        bool names_time = result == UNANSWERED && a.timed_out && !a.has_begun && !g->has_answered && !why[0];
        if (!a.timed_out || !why[0])
            snprintf(why, sizeof why, "%s", tb_error_detail());
        if (!should_retry_call(g, call, result, ntried, &status)) {
            if (status == TB_TIMEOUT && result == UNANSWERED && call->is_not_repeatable)
                tb__set_detail("no answer to a change, which may have been made: %s", why);
            else if (status == TB_TIMEOUT && !names_time)
                tb__set_detail("nothing within %d ms: %s", given_ms, why);
            break;
        }
        if (a.has_begun)
            delay_ms = FIRST_DELAY_MS;
        a = (attempt){.gateway = g,
                      .call = call,
                      .body = body,
                      .connection = a.connection,
                      .in = {.item = a.in.item, .capacity = a.in.capacity}};
        if (ntried % g->nendpoints == 0) {
            int left = tb__ms_until(call->deadline_ms);
            /* Ends early when the gateway is stopped; the next attempt finds that out. */
            g->curl->multi_poll(a.connection->multi, NULL, 0, delay_ms < left ? delay_ms : left, NULL);
            delay_ms = delay_ms * 2 < LONGEST_DELAY_MS ? delay_ms * 2 : LONGEST_DELAY_MS;
        }
    }
    free(a.in.item);
    release_connection(g, call, a.connection);
    return status;
}

static tb_status write_request(json_t *request, char **out) {
    *out = request ? json_dumps(request, JSON_COMPACT) : NULL;
    json_decref(request);
    return *out ? TB_OK : tb__fail(TB_NO_MEMORY, "no memory for a request to etcd");
}

/* It may have a password in it. */
static void free_request(char *body) {
    explicit_bzero(body, strlen(body));
    free(body);
}

static tb_status ask_login(tb__gateway *g, int64_t deadline_ms, bool is_first) {
    char user[TB__LOGIN_LINE], *body;
    json_t *request, *reply = NULL;
    TB_TRY(tb__login_make(g->at.user, g->at.password, user, &request));
    TB_TRY(write_request(request, &body));
    tb__gateway_call call = {.path = login_path, .deadline_ms = deadline_ms, .is_first = is_first};
    tb_status status = post_call(g, &call, body, &reply);
    free_request(body);
    if (status == TB_INVALID)
        status = tb__fail_within(TB_DENIED, "logging in as '%.60s'", user);
    const char *token = json_string_value(json_object_get(reply, "token"));
    char *header = NULL;
    if (status == TB_OK && (!token || asprintf(&header, "Authorization: %s", token) < 0))
        status = tb__fail(TB_REFUSED, "%s: etcd has answered a login without a token", g->url);
    json_decref(reply);
    if (status != TB_OK)
        return status;
    pthread_mutex_lock(&g->lock);
    free(g->header);
    g->header = header;
    g->login++;
    pthread_mutex_unlock(&g->lock);
    return TB_OK;
}

/* Logs in, unless another call has done so since this many logins. */
static tb_status log_in(tb__gateway *g, uint64_t seen, const tb__gateway_call *call) {
    pthread_mutex_lock(&g->logging_in);
    tb_status status = g->login == seen ? ask_login(g, call->deadline_ms, call->is_first) : TB_OK;
    pthread_mutex_unlock(&g->logging_in);
    return status;
}

/* Logins expire, and end when the permissions of etcd are changed, or with its process. */
static bool is_login_expired(tb_status status, const tb__gateway_call *call) {
    return status != TB_OK && (call->code == TB__ETCD_UNAUTHENTICATED ||
                               (call->code == TB__ETCD_INVALID && strstr(tb_error_detail(), "revision of auth store")));
}

static tb_status post_logged_in(tb__gateway *g, tb__gateway_call *call, const char *body, json_t **reply) {
    enum { MAX_LOGINS = 3 };
    for (int i = 0;; i++) {
        uint64_t seen = *g->at.user ? g->login : 1;
        if (seen == 0) {
            TB_TRY(log_in(g, 0, call));
            seen = 1;
        }
        call->code = TB__ETCD_OK;
        tb_status status = post_call(g, call, body, reply);
        if (!*g->at.user || !is_login_expired(status, call) || i == MAX_LOGINS)
            return status;
        TB_TRY(log_in(g, seen, call));
    }
}

tb_status tb__gateway_post(tb__gateway *gateway, tb__gateway_call *call, json_t *request, json_t **reply) {
    char *body;
    *reply = NULL;
    TB_TRY(write_request(request, &body));
    tb_status status = post_logged_in(gateway, call, body, reply);
    free_request(body);
    return status;
}
