/* The transport mpi: between the ranks of one communicator, by MPI's messages. */
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

/* ---- The end --------------------------------------------------------------------------------------------------- */

/* A communicator can't be freed while messages to it are under way: MPI would deliver them to whoever comes next. So an
 * endpoint that was closed stays until all ranks have said goodbye, which is the last that they say. Mostly all close
 * at the same time; where they don't, it is looked at again when others are opened or closed. */
static LIST_HEAD(endpoints, mpi) endpoints = LIST_HEAD_INITIALIZER(endpoints), parting = LIST_HEAD_INITIALIZER(parting);

/* Takes the memory of operations back from MPI, then says goodbye: whoever hears it may rely on nothing more coming. So
 * all that was sent is waited for, copies, too. */
static void stop(mpi *m) {
    int64_t deadline_ms = tb__now_ms() + CLOSE_MS;
    for (message *msg = TAILQ_FIRST(&m->all); msg; msg = TAILQ_NEXT(msg, all)) {
        bool has_chunks = msg->state == MESSAGE_RECEIVES || msg->state == MESSAGE_SENDS;
        bool is_waited_for = msg->state == MESSAGE_ENDS && msg->op;
        if ((has_chunks || is_waited_for) && mpi_release(m, msg, has_chunks, deadline_ms) != TB_OK)
            tb__log(TB_LOG_ERROR, "transport mpi: rank %d of the communicator: %s", msg->rank, tb_error_detail());
    }
    for (int i = 0; i < m->nranks; i++)
        mpi_send_bye(m, i);
    m->is_over = true;
}

static void free_endpoint(mpi *m) {
    message *msg;
    while ((msg = TAILQ_FIRST(&m->all)))
        mpi_leave_message(m, msg);
    tb__match_free(&m->arrivals, -1);
    tb__match_free(&m->early, -1);
    for (int i = 0; m->peers && i < m->nranks; i++)
        free(m->peers[i].why);
    mpi_requests_fini(m);
    tb__index_fini(&m->by_wire);
    free(m->ring);
    free(m->peers);
    free(m);
}

static tb_status look(mpi *m, bool *did);

/* Whether all is said that ever will be. */
static bool has_parted(mpi *m) {
    bool did = true;
    while (did && look(m, &did) == TB_OK)
        ;
    for (message *msg = TAILQ_FIRST(&m->all); msg; msg = TAILQ_NEXT(msg, all)) {
        if (msg->state == MESSAGE_FRAME)
            return false;
    }
    return m->nbyes == m->nranks;
}

static void leave(mpi *m) {
    LIST_REMOVE(m, link);
    if (m->is_freed)
        *m->is_freed = true;
    mpi_drop_ring(m);
}

static void part(void) {
    mpi *m;
    do {
        m = LIST_FIRST(&parting);
        while (m && !has_parted(m))
            m = LIST_NEXT(m, link);
        if (m) { /* out of the list first: others have their turn while the ring is dropped */
            leave(m);
            MPI_Comm_free(&m->seat.in);
            free_endpoint(m);
        }
    } while (m);
}

/* MPI calls this first of all when it is finalised. */
static int on_finalize(MPI_Comm comm, int keyval, void *value, void *extra) {
    (void)comm;
    (void)keyval;
    (void)value;
    (void)extra;
    mpi *m;
    mpi_lock();
    mpi_end_naps();
    for (m = LIST_FIRST(&endpoints); m; m = LIST_NEXT(m, link)) {
        if (m->is_over)
            continue;
        stop(m);
        mpi_drop_ring(m);
        m->has_to_tell = true;
        mpi_set_timer(m);
    }
    while ((m = LIST_FIRST(&parting))) {
        leave(m);
        free_endpoint(m); /* MPI frees the communicator */
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

/* ---- Life ------------------------------------------------------------------------------------------------------ */

static _Thread_local tb__mpi_seat *offered_seat;

void tb__mpi_take_seat(tb__mpi_seat *seat) {
    offered_seat = seat;
}

/* The ring comes last: nothing that follows it fails. */
static tb_status open_locked(mpi *m) {
    int code = MPI_Comm_rank(m->seat.out, &m->rank);
    if (code == MPI_SUCCESS)
        code = MPI_Comm_size(m->seat.out, &m->nranks);
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
        TB_TRY(mpi_fill_place(m, i));
    return TB_OK;
}

static tb_status mpi_open(const tb_transport_env *env, void **context) {
    if (!offered_seat)
        return tb__fail(TB_REFUSED, "transport mpi is for worlds that tb_world_from_mpi makes");
    mpi *m = tb__calloc(1, sizeof *m);
    if (!m)
        return TB_NO_MEMORY;
    m->env = *env;
    m->seat = *offered_seat;
    m->timer = -1;
    TAILQ_INIT(&m->all);
    TAILQ_INIT(&m->ripe);
    mpi_lock();
    part();
    tb_status status = open_locked(m);
    if (status == TB_OK) {
        offered_seat->is_taken = true;
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
    bool is_finalised = m->is_over;
    if (!is_finalised)
        stop(m);
    LIST_REMOVE(m, link);
    message *msg = TAILQ_FIRST(&m->all);
    while (msg) {
        bool has_op = msg->op != NULL;
        if (has_op)
            mpi_give_up(m, msg, TB_CANCELLED);
        msg = has_op ? TAILQ_FIRST(&m->all) : TAILQ_NEXT(msg, all); /* callbacks change the list */
    }
    m->env.lost = NULL;
    if (is_finalised) {
        free_endpoint(m);
    } else {
        int64_t deadline_ms = tb__now_ms() + PART_MS;
        bool is_freed = false; /* by this thread, or another one that looks after those that part */
        m->is_freed = &is_freed;
        LIST_INSERT_HEAD(&parting, m, link);
        for (part(); !is_freed && tb__now_ms() < deadline_ms; part())
            mpi_nap();
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
    memcpy(mine.uid, m->seat.uid, sizeof mine.uid);
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
    return memcmp(there.uid, m->seat.uid, sizeof there.uid) == 0 && there.rank >= 0 && there.rank < m->nranks;
}

static int find_rank(const mpi *m, int32_t wire) {
    size_t probe = 0, at;
    while ((at = tb__index_next(&m->by_wire, (uint64_t)wire, &probe)) != TB__NOWHERE) {
        if (m->peers[at].wire == wire)
            return (int)at;
    }
    return -1;
}

static tb_status mpi_connect(void *context, int32_t wire, const void *bytes, size_t nbytes) {
    mpi *m = context;
    address there;
    if (!mpi_reaches(m, bytes, nbytes))
        return tb__fail(TB_INVALID, "it has no place in this world's communicator");
    memcpy(&there, bytes, sizeof there);
    peer *p = &m->peers[there.rank];
    if (p->is_connected)
        return p->wire == wire ? TB_OK
                               : tb__fail(TB_CONFLICT, "rank %" PRId32 " of the communicator is taken", there.rank);
    if (p->is_lost || m->is_over)
        return tb__fail(TB_LOST, "%s", m->is_over ? "MPI was finalised" : mpi_why(p));
    if (!tb__index_add(&m->by_wire, (uint64_t)wire, (size_t)there.rank))
        return TB_NO_MEMORY;
    p->wire = wire;
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
    if (m->is_over)
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
    if (m->is_over)
        mpi_give_up(m, op->state, TB_CANCELLED);
    else
        mpi_cancel_message(m, op->state);
    mpi_unlock();
}

/* One look. Whether anything came of it. */
static tb_status look(mpi *m, bool *did) {
    TB_TRY(mpi_test_requests(m, did));
    TB_TRY(mpi_open_frames(m));
    message *msg;
    while ((msg = TAILQ_FIRST(&m->ripe))) {
        mpi_go_on(m, msg);
        *did = true;
    }
    mpi_lose_leavers(m);
    if (m->ending_ms != 0 && tb__now_ms() >= m->ending_ms)
        mpi_end_late(m);
    return TB_OK;
}

static tb_status mpi_progress(void *context) {
    mpi *m = context;
    enum { LOOKS = 64 }; /* then others have their turn */
    uint64_t expirations;
    bool did = true;
    tb_status status = TB_OK;
    mpi_lock();
    ssize_t unused = read(m->timer, &expirations, sizeof expirations);
    (void)unused;
    /* Nobody waits for anything: what comes can wait, too. */
    if (m->nwaiting + m->nunder_way == 0 && TAILQ_EMPTY(&m->ripe))
        did = false;
    for (int i = 0; i < LOOKS && did && status == TB_OK && !m->is_over; i++) {
        status = look(m, &did);
        if (did)
            mpi_note_event(m);
    }
    if (m->has_to_tell)
        mpi_end_late(m);
    for (int i = 0; i < m->nranks && m->has_to_tell; i++) {
        if (m->peers[i].is_connected)
            mpi_lose(m, i, "MPI was finalised before the world was destroyed");
    }
    m->has_to_tell = false;
    mpi_set_timer(m);
    bool is_hot = m->interval_ns == 1;
    mpi_unlock();
    if (is_hot) /* whoever is at the other end may need this core */
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
