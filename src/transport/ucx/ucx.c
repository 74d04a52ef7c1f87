/* The ucx transport: opening and closing, peers and their loss, progress. */
#include "transport/ucx/ucx.h"

#include "base/checksum.h"
#include "base/descriptors.h"
#include "base/log.h"
#include "base/process.h"

#include <dirent.h>
#include <errno.h>
#include <inttypes.h>
#include <poll.h>
#include <sched.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/random.h>
#include <sys/timerfd.h>
#include <unistd.h>

enum {
    MAX_PROGRESS_CALLS = 256, /* of UCX in one progress */
    CLOSE_TIMEOUT_MS = 1000,  /* for frames in flight when we close */
};

ucx_peer *ucx_find(const ucx *u, int32_t rank) {
    size_t probe = 0, i;
    while ((i = tb__index_next(&u->by_rank, tb__hash(0, (uint32_t)rank), &probe)) != TB__NOWHERE) {
        if (u->peers.item[i]->rank == rank)
            return u->peers.item[i];
    }
    return NULL;
}

ucx_peer *ucx_find_or_add(ucx *u, int32_t rank) {
    ucx_peer *peer = ucx_find(u, rank);
    if (peer)
        return peer;
    peer = tb__calloc(1, sizeof *peer);
    if (!peer)
        return NULL;
    peer->owner = u;
    peer->rank = rank;
    peer->number = 1;
    peer->max_unanswered_beats = UCX_HELLO_BEATS;
    if (!tb__vec_reserve(&u->peers, 1) || !tb__index_add(&u->by_rank, tb__hash(0, (uint32_t)rank), u->peers.count)) {
        free(peer);
        return NULL;
    }
    u->peers.item[u->peers.count++] = peer;
    return peer;
}

void ucx_wake(ucx *u) {
    if (!u->is_awake)
        eventfd_write(u->wake, 1);
    u->is_awake = true;
}

/* A GPU that has failed can't be entered: then UCX's requests fail. */
bool ucx_enter_device(const ucx *u, tb_mem_kind memory, int device) {
    return memory != TB_MEM_HOST && u->env.enter_device(u->env.arg, memory, device) == TB_OK;
}

void ucx_leave_device(const ucx *u, bool is_entered) {
    if (is_entered)
        u->env.leave_device(u->env.arg, u->memory);
}

bool ucx_enter(ucx *u) {
    pthread_mutex_lock(&u->lock);
    return ucx_enter_device(u, u->memory, u->device);
}

void ucx_leave(ucx *u, bool is_entered) {
    ucx_leave_device(u, is_entered);
    pthread_mutex_unlock(&u->lock);
}

void ucx_fail_peer(ucx_peer *peer, const char *why) {
    if (ucx_has_failed(peer))
        return;
    peer->why = why;
    ucx_drop_queued(peer);
    ucx_wake(peer->owner);
}

void ucx_fail_peer_by_status(ucx_peer *peer, ucs_status_t status) {
    if (ucx_has_failed(peer))
        return;
    snprintf(peer->why_text, sizeof peer->why_text, "its connection ended (UCX: %s)",
             peer->owner->call->status_string(status));
    ucx_fail_peer(peer, peer->why_text);
}

int ucx_try_descriptors(size_t needed) {
    int fds[64], error = 0;
    size_t count = 0;
    while (count < needed && error == 0) {
        int fd = eventfd(0, EFD_CLOEXEC);
        error = fd < 0 ? errno : 0;
        if (fd >= 0)
            fds[count++] = fd;
    }
    while (count > 0)
        close(fds[--count]);
    return error;
}

/* UCX does not report that a descriptor could not be opened. */
static bool is_out_of_descriptors(void) {
    return tb__is_out_of_descriptors(ucx_try_descriptors(1));
}

static tb_status fail_by_status(const ucx *u, const char *what, ucs_status_t status) {
    return tb__fail(TB_IO, "%s: %s", what,
                    is_out_of_descriptors() ? tb__errno_text(EMFILE) : u->call->status_string(status));
}

tb_status ucx_fail_by_choice(const ucx *u, const char *what, ucs_status_t status, tb_status out) {
    const char *devices = getenv("UCX_NET_DEVICES"), *kinds = getenv("UCX_TLS");
    if (is_out_of_descriptors())
        return tb__fail(TB_REFUSED, "%s: %s", what, tb__errno_text(EMFILE));
    return tb__fail(out, "%s: %s (UCX_NET_DEVICES=%.200s, UCX_TLS=%.200s)", what, u->call->status_string(status),
                    devices ? devices : "all", kinds ? kinds : "all");
}

/* ---- Opening -------------------------------------------------------------------------------------------------- */

static bool has_rdma(void) {
    DIR *dir = opendir("/sys/class/infiniband");
    bool has = false;
    for (const struct dirent *entry; dir && !has && (entry = readdir(dir));)
        has = entry->d_name[0] != '.';
    if (dir)
        closedir(dir);
    return has;
}

/* Sets an option of UCX, unless the environment does. Older versions accept unknown names, with a message in their
 * log. */
static bool set_config(const ucx *u, ucp_config_t *config, const char *variable, const char *name, const char *value) {
    return getenv(variable) || u->call->config_modify(config, name, value) == UCS_OK;
}

/* RDMA lanes detect the end of an idle peer only by UCX's keepalive. TCP has the kernel's, which works only while no
 * data is in flight: keepalives of UCX would keep it from detecting a loss.
 *
 * By default UCX connects over TCP in a blocking way, up to two minutes, which would delay all other peers. The option
 * has the first name in UCX 1.13, the second one in 1.18. */
static void make_settings(const ucx *u, ucp_config_t *config) {
    bool is_set = set_config(u, config, "UCX_KEEPALIVE_INTERVAL", "KEEPALIVE_INTERVAL", has_rdma() ? "2s" : "inf");
    bool is_old = set_config(u, config, "UCX_TCP_CONN_NB", "CONN_NB", "y");
    is_set &= set_config(u, config, "UCX_TCP_CONN_NB", "TCP_CONN_NB", "y") || is_old;
    tb__text devices = {0};
    if (ucx_list_private_devices(&devices) && devices.data && !devices.failed)
        is_set &= set_config(u, config, "UCX_NET_DEVICES", "NET_DEVICES", devices.data);
    if (!is_set)
        tb__log(TB_LOG_WARN, "ucx: it does not accept UCX_KEEPALIVE_INTERVAL, UCX_TCP_CONN_NB or UCX_NET_DEVICES");
    tb__text_fini(&devices);
}

static tb_status open_context(ucx *u) {
    ucp_config_t *config;
    ucs_status_t status = u->call->config_read(NULL, NULL, &config);
    if (status != UCS_OK)
        return fail_by_status(u, "reading UCX's settings", status);
    make_settings(u, config);
    ucp_params_t params = {.field_mask = UCP_PARAM_FIELD_FEATURES,
                           .features = UCP_FEATURE_AM | UCP_FEATURE_TAG | UCP_FEATURE_WAKEUP};
    status = u->call->init_version(UCP_API_MAJOR, UCP_API_MINOR, &params, config, &u->context);
    u->call->config_release(config);
    if (status != UCS_OK)
        return ucx_fail_by_choice(u, "opening UCX", status, TB_IO);
    ucp_context_attr_t attr = {.field_mask = UCP_ATTR_FIELD_MEMORY_TYPES};
    u->carries_cuda = u->env.enter_device && u->call->context_query(u->context, &attr) == UCS_OK &&
                      attr.memory_types & UCS_BIT(UCS_MEMORY_TYPE_CUDA);
    return TB_OK;
}

/* UCX's callback. Hellos are tagged messages, which have a code. */
static ucs_status_t on_active_message(void *arg, const void *header, size_t header_length, void *data, size_t nbytes,
                                      const ucp_am_recv_param_t *param) {
    uint16_t kind = UCX_HELLO;
    if (header_length >= sizeof kind)
        memcpy(&kind, header, sizeof kind);
    return kind == UCX_HELLO ? UCS_OK : ucx_on_active_message(arg, header, header_length, data, nbytes, param);
}

static tb_status open_worker(ucx *u) {
    ucp_worker_params_t params = {.field_mask = UCP_WORKER_PARAM_FIELD_THREAD_MODE,
                                  .thread_mode = UCS_THREAD_MODE_SERIALIZED};
    ucx_sockets_snapshot(u);
    ucs_status_t status = u->call->worker_create(u->context, &params, &u->worker);
    ucx_sockets_adopt_new(u);
    if (status != UCS_OK) {
        u->worker = NULL;
        return fail_by_status(u, "making a worker of UCX", status);
    }
    ucp_worker_attr_t attr = {.field_mask = UCP_WORKER_ATTR_FIELD_MAX_AM_HEADER};
    status = u->call->worker_query(u->worker, &attr);
    if (status != UCS_OK)
        return fail_by_status(u, "asking UCX's worker", status);
    if (attr.max_am_header < sizeof(ucx_frame))
        return tb__fail(TB_REFUSED, "UCX's headers have at most %zu bytes here; %zu are needed", attr.max_am_header,
                        sizeof(ucx_frame));
    ucp_am_handler_param_t handler = {.field_mask = UCP_AM_HANDLER_PARAM_FIELD_ID | UCP_AM_HANDLER_PARAM_FIELD_CB |
                                                    UCP_AM_HANDLER_PARAM_FIELD_ARG | UCP_AM_HANDLER_PARAM_FIELD_FLAGS,
                                      .id = UCX_ACTIVE_MESSAGE,
                                      .flags = UCP_AM_FLAG_WHOLE_MSG,
                                      .cb = on_active_message,
                                      .arg = u};
    status = u->call->worker_set_am_recv_handler(u->worker, &handler);
    return status == UCS_OK ? TB_OK : fail_by_status(u, "setting a handler of UCX", status);
}

static tb_status make_address(ucx *u) {
    ucp_address_t *bytes;
    size_t n;
    ucs_status_t status = u->call->worker_get_address(u->worker, &bytes, &n);
    if (status != UCS_OK)
        return fail_by_status(u, "asking UCX for an address", status);
    ucx_address head = {.magic = UCX_MAGIC, .version = UCX_VERSION, .id = u->id, .nbytes = n};
    head.checksum = tb__checksum(bytes, n);
    u->address_nbytes = sizeof head + n;
    u->address = tb__malloc(1, u->address_nbytes);
    if (u->address) {
        memcpy(u->address, &head, sizeof head);
        memcpy(u->address + sizeof head, bytes, n);
    }
    u->call->worker_release_address(u->worker, bytes);
    if (!u->address)
        return TB_NO_MEMORY;
    return u->address_nbytes <= TB_ADDRESS_MAX
               ? TB_OK
               : tb__fail(TB_TOO_BIG,
                          "UCX's address has %zu bytes, more than %d; fewer devices make it shorter "
                          "(UCX_NET_DEVICES, UCX_TLS)",
                          u->address_nbytes, TB_ADDRESS_MAX);
}

static tb_status watch_fd(ucx *u, int fd) {
    struct epoll_event event = {.events = EPOLLIN};
    return epoll_ctl(u->epoll, EPOLL_CTL_ADD, fd, &event) == 0 ? TB_OK : tb__fail(TB_IO, "epoll: %s", strerror(errno));
}

static tb_status open_resources(ucx *u) {
    u->epoll = tb__fd_own(epoll_create1(EPOLL_CLOEXEC));
    u->wake = tb__fd_own(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
    u->timer = tb__fd_own(timerfd_create(CLOCK_MONOTONIC, TFD_CLOEXEC | TFD_NONBLOCK));
    u->guard = tb__fd_own(timerfd_create(CLOCK_MONOTONIC, TFD_CLOEXEC | TFD_NONBLOCK));
    if (u->epoll < 0 || u->wake < 0 || u->timer < 0 || u->guard < 0)
        return tb__fail(TB_IO, "epoll, eventfd and timerfd: %s", tb__errno_text(errno));
    if (getrandom(&u->id, sizeof u->id, 0) != sizeof u->id)
        return tb__fail(TB_IO, "getrandom: %s", strerror(errno));
    u->id |= 1; /* 0 means unknown */
    TB_TRY(ucx_load(&u->call));
    TB_TRY(ucx_begin_use());
    u->is_user = true;
    TB_TRY(open_context(u));
    TB_TRY(open_worker(u));
    TB_TRY(make_address(u));
    TB_TRY(ucx_receive_hellos(u));
    ucs_status_t status = u->call->worker_get_efd(u->worker, &u->worker_fd);
    if (status != UCS_OK)
        return fail_by_status(u, "asking UCX for a descriptor", status);
    TB_TRY(watch_fd(u, u->worker_fd));
    TB_TRY(watch_fd(u, u->wake));
    TB_TRY(watch_fd(u, u->timer));
    TB_TRY(watch_fd(u, u->guard));
    struct timespec often = tb__time_of_ms(UCX_GUARD_MS);
    timerfd_settime(u->guard, 0, &(struct itimerspec){often, often}, NULL);
    ucx_wake(u); /* the first progress arms UCX's descriptor */
    return TB_OK;
}

/* ---- Closing -------------------------------------------------------------------------------------------------- */

static void on_closed(void *request, ucs_status_t status, void *arg) {
    (void)status;
    ucx *u = arg;
    u->call->request_free(request);
    u->npending--;
}

/* Counts a request in npending, if it is under way. */
static void count_pending(ucx *u, ucs_status_ptr_t request) {
    if (request && !UCS_PTR_IS_ERR(request))
        u->npending++;
}

void ucx_close_endpoint(ucx_peer *peer) {
    ucx *u = peer->owner;
    ucp_ep_h ep = peer->ep;
    ucp_request_param_t param = {.op_attr_mask =
                                     UCP_OP_ATTR_FIELD_FLAGS | UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA,
                                 .flags = UCP_EP_CLOSE_FLAG_FORCE,
                                 .cb.send = on_closed,
                                 .user_data = u};
    peer->ep = NULL;
    if (ep)
        count_pending(u, u->call->ep_close_nbx(ep, &param));
}

bool ucx_progress_until_zero(ucx *u, const size_t *count, int timeout_ms) {
    for (int64_t deadline_ms = tb__now_ms() + timeout_ms; *count > 0 && tb__now_ms() < deadline_ms;) {
        if (u->call->worker_progress(u->worker) == 0 && *count > 0 && u->call->worker_arm(u->worker) == UCS_OK)
            poll(&(struct pollfd){.fd = u->worker_fd, .events = POLLIN}, 1, 10);
    }
    ucx_wake(u); /* so that the driver reports what has happened, and arms UCX's descriptor */
    return *count == 0;
}

/* Flushes what was sent, says goodbye to peers, and closes the endpoints. */
static void send_goodbyes(ucx *u) {
    ucp_request_param_t param = {
        .op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA, .cb.send = on_closed, .user_data = u};
    for (size_t i = 0; i < u->peers.count; i++)
        ucx_send(u->peers.item[i], &(ucx_frame){.kind = UCX_BYE});
    ucx_progress_until_zero(u, &u->nqueued, CLOSE_TIMEOUT_MS);
    for (size_t i = 0; i < u->peers.count; i++) {
        ucx_peer *peer = u->peers.item[i];
        if (peer->ep && !peer->why)
            count_pending(u, u->call->ep_flush_nbx(peer->ep, &param));
    }
    ucx_progress_until_zero(u, &u->npending, CLOSE_TIMEOUT_MS);
    for (size_t i = 0; i < u->peers.count; i++)
        ucx_close_endpoint(u->peers.item[i]);
    ucx_progress_until_zero(u, &u->npending, CLOSE_TIMEOUT_MS);
    for (size_t i = 0; i < u->peers.count; i++)
        ucx_progress_until_zero(u, &u->peers.item[i]->nrequests, CLOSE_TIMEOUT_MS);
}

static void ucx_close(void *context) {
    ucx *u = context;
    ucx_stop_backup_driver(u);
    bool is_entered = ucx_enter_device(u, u->memory, u->device);
    for (size_t i = 0; i < u->peers.count; i++)
        ucx_drop_messages(u, u->peers.item[i], TB_CANCELLED);
    if (u->worker) {
        send_goodbyes(u);
        ucx_stop_receiving_hellos(u);
        u->call->worker_destroy(u->worker);
    }
    ucx_complete_finished(u); /* after UCX has released their memory */
    if (u->context)
        u->call->cleanup(u->context);
    ucx_leave_device(u, is_entered);
    if (u->is_user)
        ucx_end_use();
    ucx_free_transfers(u);
    for (size_t i = 0; i < u->peers.count; i++) {
        ucx_peer *peer = u->peers.item[i];
        ucx_drop_messages(u, peer, TB_CANCELLED); /* posted or received meanwhile */
        ucx_free_peer(peer);
    }
    for (size_t i = 0; i < u->retired.count; i++)
        ucx_free_peer(u->retired.item[i]);
    tb__match_free(&u->early, -1);
    tb__fd_close(u->epoll);
    tb__fd_close(u->wake);
    tb__fd_close(u->timer);
    tb__fd_close(u->guard);
    free(u->descriptors.item);
    free(u->ports.item);
    free(u->listeners.item);
    free(u->peers.item);
    free(u->retired.item);
    tb__index_fini(&u->by_rank);
    free(u->hello);
    free(u->address);
    free(u);
}

/* UCX aborts the process if it gets no descriptor for its event thread. So check first that there are enough; it takes
 * some twenty with one network device. */
static tb_status check_descriptors(void) {
    enum { NEEDED = 32 };
    int error = ucx_try_descriptors(NEEDED);
    return error ? tb__fail(TB_IO, "opening UCX takes %d file descriptors: %s", NEEDED, tb__errno_text(error)) : TB_OK;
}

static tb_status ucx_open(const tb_transport_env *env, void **context) {
    TB_TRY(check_descriptors());
    ucx *u = tb__calloc(1, sizeof *u);
    if (!u)
        return TB_NO_MEMORY;
    u->env = *env;
    if (env->key)
        memcpy(u->key.bytes, env->key, sizeof u->key.bytes);
    u->env.key = NULL;
    u->epoll = u->wake = u->timer = u->guard = u->quit = -1;
    u->lock = (pthread_mutex_t)PTHREAD_RECURSIVE_MUTEX_INITIALIZER_NP;
    tb_status status = open_resources(u);
    if (status != TB_OK) {
        ucx_close(u);
        return status;
    }
    *context = u;
    return TB_OK;
}

/* ---- Peers ---------------------------------------------------------------------------------------------------- */

static tb_status ucx_get_address(void *context, void *buffer, size_t *nbytes) {
    ucx *u = context;
    if (*nbytes < u->address_nbytes)
        return tb__fail(TB_TOO_BIG, "the address needs %zu bytes", u->address_nbytes);
    memcpy(buffer, u->address, u->address_nbytes);
    *nbytes = u->address_nbytes;
    return TB_OK;
}

static tb_status connect_to(ucx *u, int32_t rank, const void *address, size_t nbytes) {
    ucx_address head;
    TB_TRY(ucx_check_address(address, nbytes, &head)); /* before a peer is added */
    ucx_peer *peer = ucx_find_or_add(u, rank);
    if (!peer)
        return TB_NO_MEMORY;
    if (peer->is_lost)
        peer = ucx_replace_peer(peer, peer->number + 1);
    if (!peer)
        return TB_NO_MEMORY;
    if (peer->is_stranger && peer->id != head.id)
        ucx_forget_stranger(peer);
    peer->is_stranger = false;
    bool was_there = peer->ep;
    TB_TRY(ucx_connect_endpoint(peer, address, nbytes));
    if (was_there)
        ucx_ping(peer);
    return TB_OK;
}

static tb_status ucx_connect(void *context, int32_t rank, const void *address, size_t nbytes) {
    ucx *u = context;
    bool is_entered = ucx_enter(u);
    tb_status status = connect_to(u, rank, address, nbytes);
    ucx_leave(u, is_entered);
    return status;
}

/* A peer without a loop thread answers only when its program waits, so its answer is not required. */
static bool ucx_is_reached(void *context, int32_t rank) {
    ucx *u = context;
    pthread_mutex_lock(&u->lock);
    const ucx_peer *peer = ucx_find(u, rank);
    bool is_reached = peer && !ucx_has_failed(peer) &&
                      (peer->has_hello ? !peer->is_driven || peer->last_pong == peer->last_ping : peer->number == 1);
    pthread_mutex_unlock(&u->lock);
    return is_reached;
}

static void ucx_disconnect(void *context, int32_t rank, const char *why) {
    ucx *u = context;
    bool is_entered = ucx_enter(u);
    ucx_peer *peer = ucx_find(u, rank);
    if (peer && !ucx_has_failed(peer)) {
        snprintf(peer->why_text, sizeof peer->why_text, "%s", why);
        ucx_fail_peer(peer, peer->why_text);
    }
    ucx_leave(u, is_entered);
}

static void lose_peer(ucx *u, ucx_peer *peer) {
    tb__log(TB_LOG_INFO, "rank %" PRId32 " is lost: %s", peer->rank, peer->why);
    ucx_close_endpoint(peer);
    if (!ucx_progress_until_zero(u, &peer->nrequests, UCX_LOSE_TIMEOUT_MS))
        tb__log(TB_LOG_ERROR, "ucx: %zu requests of rank %" PRId32 " have not completed", peer->nrequests, peer->rank);
    peer->is_lost = true;
    ucx_drop_messages(u, peer, TB_LOST);
    tb__match_free(&u->early, peer->rank);
    ucx_complete_finished(u);
    if (u->env.lost)
        u->env.lost(u->env.arg, peer->rank, peer->why);
    if (peer->successor && ucx_find(u, peer->rank) == peer)
        ucx_accept_successor(peer);
}

/* Messages that a peer sent before its loss are delivered first. */
static void report_events(ucx *u) {
    ucx_complete_finished(u);
    for (size_t i = 0; i < u->peers.count; i++) {
        ucx_peer *peer = u->peers.item[i];
        if (peer->why && !peer->is_lost) {
            lose_peer(u, peer);
        } else if (peer->reached_changed && u->env.reached) {
            peer->reached_changed = false;
            u->env.reached(u->env.arg, peer->rank);
        }
    }
    ucx_free_retired(u);
}

/* ---- Operations ----------------------------------------------------------------------------------------------- */

static tb_status post_locked(ucx *u, tb_op *op) {
    ucx_peer *peer = op->kind == TB_OP_RECV ? ucx_find_or_add(u, op->peer) : ucx_find(u, op->peer);
    /* A peer that is about to be lost still counts as connected: its last messages may lead to new operations, which
     * lose_peer ends. */
    bool is_lost = peer && peer->is_lost;
    if (!peer || is_lost || (op->kind == TB_OP_SEND && !peer->ep))
        return tb__fail(TB_LOST, "%s", is_lost ? peer->why : "it is not connected");
    return ucx_post_message(u, peer, op);
}

static tb_status ucx_post(void *context, tb_op *op) {
    ucx *u = context;
    pthread_mutex_lock(&u->lock);
    if (ucx_is_on_device(op)) {
        u->memory = op->memory;
        u->device = op->device;
    }
    bool is_entered = ucx_enter_device(u, u->memory, u->device);
    tb_status status = post_locked(u, op);
    ucx_leave(u, is_entered);
    return status;
}

static void ucx_cancel(void *context, tb_op *op) {
    ucx *u = context;
    bool is_entered = ucx_enter(u);
    if (op->state)
        ucx_cancel_message(u, op->state);
    ucx_leave(u, is_entered);
}

static void clear_wake(ucx *u) {
    eventfd_t unused;
    if (u->is_awake)
        eventfd_read(u->wake, &unused);
    u->is_awake = false;
}

void ucx_progress_worker(ucx *u) {
    for (int i = 0; i < MAX_PROGRESS_CALLS && u->call->worker_progress(u->worker) > 0; i++)
        ;
}

/* Until UCX is idle and its descriptor is armed; otherwise ours stays readable. So it does while there are requests in
 * memory of a GPU: a descriptor that a function on a stream makes readable is late, compared with a copy on the GPU. */
static tb_status progress_locked(ucx *u) {
    u->nprogress_calls++;
    ucx_sockets_guard(u);
    ucx_listen_again(u);
    for (int i = 0; i < MAX_PROGRESS_CALLS; i++) {
        clear_wake(u);
        unsigned did = u->call->worker_progress(u->worker);
        if (did == 0)
            ucx_heartbeat(u);
        report_events(u);
        if (did > 0 || u->is_awake)
            continue;
        if (u->ndevice > 0) {
            sched_yield(); /* the other end may need this core */
            break;
        }
        ucs_status_t status = u->call->worker_arm(u->worker);
        if (status == UCS_OK)
            return TB_OK;
        if (status != UCS_ERR_BUSY)
            return fail_by_status(u, "arming UCX's descriptor", status);
    }
    ucx_heartbeat(u);
    ucx_wake(u);
    return TB_OK;
}

static tb_status ucx_progress(void *context) {
    ucx *u = context;
    bool is_entered = ucx_enter(u);
    tb_status status = progress_locked(u);
    ucx_leave(u, is_entered);
    return status;
}

static bool ucx_carries(void *context, tb_mem_kind kind) {
    const ucx *u = context;
    return kind != TB_MEM_CUDA || u->carries_cuda;
}

static int ucx_fd(void *context) {
    return ((ucx *)context)->epoll;
}

const tb_transport_ops tb__ucx_ops = {
    .size = sizeof tb__ucx_ops,
    .name = "ucx",
    .reports_strangers = true,
    .memory = 1U << TB_MEM_HOST | 1U << TB_MEM_CUDA,
    .open = ucx_open,
    .close = ucx_close,
    .address = ucx_get_address,
    .connect = ucx_connect,
    .post = ucx_post,
    .cancel = ucx_cancel,
    .progress = ucx_progress,
    .fd = ucx_fd,
    .is_reached = ucx_is_reached,
    .disconnect = ucx_disconnect,
    .carries = ucx_carries,
};
