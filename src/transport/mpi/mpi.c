/* The mpi transport: between the ranks of one communicator, by MPI messages. */
#include "transport/mpi/mpi.h"

#include "base/log.h"
#include "base/process.h"

#include <errno.h>
#include <inttypes.h>
#include <sched.h>
#include <string.h>
#include <unistd.h>

typedef struct address {
    unsigned char uid[MPI_UID_SIZE];
    int32_t rank;
} address;

/* ---- Closing --------------------------------------------------------------------------------------------------- */

/* A communicator can't be freed while messages to it are in flight: MPI might deliver them to the next one. So a closed
 * endpoint stays until all ranks have sent their goodbye, which is their last frame. Mostly all close at the same time;
 * otherwise it is checked again when endpoints are opened or closed. */
static LIST_HEAD(endpoints, mpi) endpoints = LIST_HEAD_INITIALIZER(endpoints), closing = LIST_HEAD_INITIALIZER(closing);

/* Waits until MPI has released the memory of operations, then sends goodbyes. A goodbye promises that nothing follows,
 * so all sends are waited for, copies, too. */
static void stop_endpoint(mpi *m) {
    int64_t deadline_ms = tb__now_ms() + CLOSE_MS;
    for (message *msg = TAILQ_FIRST(&m->all); msg; msg = TAILQ_NEXT(msg, all)) {
        bool has_chunks = msg->state == MESSAGE_RECEIVES || msg->state == MESSAGE_SENDS;
        bool is_waited_for = msg->state == MESSAGE_ENDS && msg->op;
        if ((has_chunks || is_waited_for) && mpi_reclaim_memory(m, msg, has_chunks, deadline_ms) != TB_OK)
            tb__log(TB_LOG_ERROR, "transport mpi: rank %d of the communicator: %s", msg->rank, tb_error_detail());
    }
    for (int i = 0; i < m->nranks; i++)
        mpi_send_bye(m, i);
    m->is_closed = true;
}

static void free_endpoint(mpi *m) {
    message *msg;
    while ((msg = TAILQ_FIRST(&m->all)))
        mpi_abandon_message(m, msg);
    tb__match_free(&m->unexpected, -1);
    tb__match_free(&m->early, -1);
    for (int i = 0; m->peers && i < m->nranks; i++)
        free(m->peers[i].why);
    mpi_requests_fini(m);
    tb__index_fini(&m->by_transport_rank);
    free(m->ring);
    free(m->peers);
    free(m);
}

static tb_status test_once(mpi *m, bool *did);

/* Whether all ranks have sent their goodbye, and this one's are sent. */
static bool has_all_goodbyes(mpi *m) {
    bool did = true;
    while (did && test_once(m, &did) == TB_OK)
        ;
    for (message *msg = TAILQ_FIRST(&m->all); msg; msg = TAILQ_NEXT(msg, all)) {
        if (msg->state == MESSAGE_FRAME)
            return false;
    }
    return m->ngoodbyes == m->nranks;
}

static void unlink_endpoint(mpi *m) {
    LIST_REMOVE(m, link);
    if (m->is_freed)
        *m->is_freed = true;
    mpi_drop_ring(m);
}

static void free_closed_endpoints(void) {
    mpi *m;
    do {
        m = LIST_FIRST(&closing);
        while (m && !has_all_goodbyes(m))
            m = LIST_NEXT(m, link);
        if (m) { /* out of the list first: mpi_drop_ring yields the lock */
            unlink_endpoint(m);
            MPI_Comm_free(&m->comms.in);
            free_endpoint(m);
        }
    } while (m);
}

/* MPI_Finalize calls this first. */
static int on_finalize(MPI_Comm comm, int keyval, void *value, void *extra) {
    (void)comm;
    (void)keyval;
    (void)value;
    (void)extra;
    mpi *m;
    mpi_lock();
    mpi_stop_yielding();
    for (m = LIST_FIRST(&endpoints); m; m = LIST_NEXT(m, link)) {
        if (m->is_closed)
            continue;
        stop_endpoint(m);
        mpi_drop_ring(m);
        m->has_to_report = true;
        mpi_set_timer(m);
    }
    while ((m = LIST_FIRST(&closing))) {
        unlink_endpoint(m);
        free_endpoint(m); /* MPI_Finalize frees the communicator */
    }
    mpi_unlock();
    return MPI_SUCCESS;
}

static tb_status watch_finalize(void) {
    static bool is_watched;
    int keyval = MPI_KEYVAL_INVALID;
    if (is_watched)
        return TB_OK;
    int code = MPI_Comm_create_keyval(MPI_COMM_NULL_COPY_FN, on_finalize, &keyval, NULL);
    if (code == MPI_SUCCESS)
        code = MPI_Comm_set_attr(MPI_COMM_SELF, keyval, NULL);
    if (code != MPI_SUCCESS)
        return mpi_failed("watch for MPI_Finalize", code);
    MPI_Comm_free_keyval(&keyval); /* the attribute keeps it */
    is_watched = true;
    return TB_OK;
}

/* ---- Open and close -------------------------------------------------------------------------------------------- */

static _Thread_local tb__mpi_comms *next_comms;

void tb__mpi_set_next_comms(tb__mpi_comms *comms) {
    next_comms = comms;
}

/* The ring comes last, so that no failure has to cancel it. */
static tb_status open_locked(mpi *m) {
    int code = MPI_Comm_rank(m->comms.out, &m->rank);
    if (code == MPI_SUCCESS)
        code = MPI_Comm_size(m->comms.out, &m->nranks);
    if (code != MPI_SUCCESS)
        return mpi_failed("MPI_Comm_rank", code);
    m->peers = tb__calloc((size_t)m->nranks, sizeof *m->peers);
    m->ring = tb__calloc(RING, sizeof *m->ring);
    if (!m->peers || !m->ring)
        return TB_NO_MEMORY;
    for (size_t i = 0; i < RING; i++)
        m->ring[i].request = NO_REQUEST;
    TB_TRY(watch_finalize());
    TB_TRY(mpi_requests_init(m));
    for (size_t i = 0; i < RING; i++)
        TB_TRY(mpi_post_ring_receive(m, i));
    return TB_OK;
}

static tb_status mpi_open(const tb_transport_env *env, void **context) {
    if (!next_comms)
        return tb__fail(TB_REFUSED, "transport mpi is for worlds that tb_world_from_mpi makes");
    mpi *m = tb__calloc(1, sizeof *m);
    if (!m)
        return TB_NO_MEMORY;
    m->env = *env;
    m->comms = *next_comms;
    m->timer = -1;
    TAILQ_INIT(&m->all);
    TAILQ_INIT(&m->ready);
    mpi_lock();
    free_closed_endpoints();
    tb_status status = open_locked(m);
    if (status == TB_OK) {
        next_comms->is_taken = true;
        LIST_INSERT_HEAD(&endpoints, m, link);
        *context = m;
    } else {
        mpi_drop_ring(m);
        free_endpoint(m);
    }
    mpi_unlock();
    return status;
}

static void mpi_close(void *context) {
    mpi *m = context;
    mpi_lock();
    bool is_finalised = m->is_closed;
    if (!is_finalised)
        stop_endpoint(m);
    LIST_REMOVE(m, link);
    message *msg = TAILQ_FIRST(&m->all);
    while (msg) {
        bool has_op = msg->op != NULL;
        if (has_op)
            mpi_abort_message(m, msg, TB_CANCELLED);
        msg = has_op ? TAILQ_FIRST(&m->all) : TAILQ_NEXT(msg, all); /* completing it changes the list */
    }
    m->env.lost = NULL;
    if (is_finalised) {
        free_endpoint(m);
    } else {
        int64_t deadline_ms = tb__now_ms() + CLOSING_MS;
        bool is_freed = false; /* by this thread, or another one in free_closed_endpoints */
        m->is_freed = &is_freed;
        LIST_INSERT_HEAD(&closing, m, link);
        for (free_closed_endpoints(); !is_freed && tb__now_ms() < deadline_ms; free_closed_endpoints())
            mpi_yield_lock();
        if (!is_freed)
            m->is_freed = NULL;
    }
    mpi_unlock();
}

/* ---- Peers ----------------------------------------------------------------------------------------------------- */

static tb_status mpi_address(void *context, void *buffer, size_t *nbytes) {
    mpi *m = context;
    address mine = {.rank = m->rank};
    if (*nbytes < sizeof mine)
        return tb__fail(TB_TOO_BIG, "the address needs %zu bytes", sizeof mine);
    memcpy(mine.uid, m->comms.uid, sizeof mine.uid);
    memcpy(buffer, &mine, sizeof mine);
    *nbytes = sizeof mine;
    return TB_OK;
}

static bool mpi_reaches(void *context, const void *bytes, size_t nbytes) {
    mpi *m = context;
    address there;
    if (nbytes != sizeof there)
        return false;
    memcpy(&there, bytes, sizeof there);
    return memcmp(there.uid, m->comms.uid, sizeof there.uid) == 0 && there.rank >= 0 && there.rank < m->nranks;
}

static int find_rank(const mpi *m, int32_t transport_rank) {
    size_t probe = 0, at;
    while ((at = tb__index_next(&m->by_transport_rank, (uint64_t)transport_rank, &probe)) != TB__NOWHERE) {
        if (m->peers[at].transport_rank == transport_rank)
            return (int)at;
    }
    return -1;
}

static tb_status mpi_connect(void *context, int32_t transport_rank, const void *bytes, size_t nbytes) {
    mpi *m = context;
    address there;
    if (!mpi_reaches(m, bytes, nbytes))
        return tb__fail(TB_INVALID, "it is not a rank of this world's communicator");
    memcpy(&there, bytes, sizeof there);
    peer *p = &m->peers[there.rank];
    if (p->is_connected)
        return p->transport_rank == transport_rank
                   ? TB_OK
                   : tb__fail(TB_CONFLICT, "rank %" PRId32 " of the communicator is taken", there.rank);
    if (p->is_lost || m->is_closed)
        return tb__fail(TB_LOST, "%s", m->is_closed ? "MPI was finalised" : mpi_why(p));
    if (!tb__index_add(&m->by_transport_rank, (uint64_t)transport_rank, (size_t)there.rank))
        return TB_NO_MEMORY;
    p->transport_rank = transport_rank;
    p->is_connected = true;
    return TB_OK;
}

/* ---- Operations ------------------------------------------------------------------------------------------------ */

static tb_status mpi_post(void *context, tb_op *op) {
    mpi *m = context;
    int rank = find_rank(m, op->peer);
    if (rank < 0)
        return tb__fail(TB_LOST, "transport mpi is not connected to rank %" PRId32, op->peer);
    mpi_lock();
    tb_status status;
    if (m->is_closed)
        status = tb__fail(TB_LOST, "MPI was finalised");
    else if (m->peers[rank].is_lost)
        status = tb__fail(TB_LOST, "%s", mpi_why(&m->peers[rank]));
    else
        status = op->kind == TB_OP_SEND ? mpi_post_send(m, op, rank) : mpi_post_receive(m, op, rank);
    if (status == TB_OK)
        mpi_set_timer(m);
    mpi_unlock();
    return status;
}

static void mpi_cancel(void *context, tb_op *op) {
    mpi *m = context;
    if (!op->state)
        return;
    mpi_lock();
    if (m->is_closed)
        mpi_abort_message(m, op->state, TB_CANCELLED);
    else
        mpi_cancel_message(m, op->state);
    mpi_unlock();
}

/* Tests all requests once, and handles completions. *did: there were some. */
static tb_status test_once(mpi *m, bool *did) {
    TB_TRY(mpi_test_requests(m, did));
    TB_TRY(mpi_handle_frames(m));
    message *msg;
    while ((msg = TAILQ_FIRST(&m->ready))) {
        mpi_advance_message(m, msg);
        *did = true;
    }
    mpi_lose_leavers(m);
    if (m->ending_ms != 0 && tb__now_ms() >= m->ending_ms)
        mpi_complete_overdue(m);
    return TB_OK;
}

static tb_status mpi_progress(void *context) {
    mpi *m = context;
    enum { MAX_TESTS = 64 }; /* in one progress */
    uint64_t expirations;
    bool did = true;
    tb_status status = TB_OK;
    mpi_lock();
    ssize_t unused = read(m->timer, &expirations, sizeof expirations);
    (void)unused;
    /* No operation waits, so incoming frames can wait, too. */
    if (m->nwaiting + m->nunder_way == 0 && TAILQ_EMPTY(&m->ready))
        did = false;
    for (int i = 0; i < MAX_TESTS && did && status == TB_OK && !m->is_closed; i++) {
        status = test_once(m, &did);
        if (did)
            mpi_record_event(m);
    }
    if (m->has_to_report)
        mpi_complete_overdue(m);
    for (int i = 0; i < m->nranks && m->has_to_report; i++) {
        if (m->peers[i].is_connected)
            mpi_lose_peer(m, i, "MPI was finalised before the world was destroyed");
    }
    m->has_to_report = false;
    mpi_set_timer(m);
    bool is_hot = m->interval_ns == 1;
    mpi_unlock();
    if (is_hot) /* the peer may need this core */
        sched_yield();
    return status;
}

static int mpi_fd(void *context) {
    return ((mpi *)context)->timer;
}

const tb_transport_ops tb__mpi_ops = {
    .size = sizeof tb__mpi_ops,
    .name = "mpi",
    .memory = 1U << TB_MEM_HOST,
    .open = mpi_open,
    .close = mpi_close,
    .address = mpi_address,
    .reaches = mpi_reaches,
    .connect = mpi_connect,
    .post = mpi_post,
    .cancel = mpi_cancel,
    .progress = mpi_progress,
    .fd = mpi_fd,
};
