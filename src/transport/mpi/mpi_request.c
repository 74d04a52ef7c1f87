/* Requests under way, in one table, so that one call tests all of them; and the polling timer.
 *
 * MPI has no descriptor to sleep on, so a timer tells when to poll. It is off while nothing is waited for. While MPI
 * has requests it is always due, because MPI makes progress only when called, until HOT_NS after the last event.
 * Otherwise it fires every few microseconds after an event, and then less and less often: after an eighth of the time
 * since the last event, but at least every SLOWEST_NS. So waiting costs little CPU time and little latency. */
#include "transport/mpi/mpi.h"

#include "base/descriptors.h"
#include "base/process.h"

#include <errno.h>
#include <string.h>
#include <sys/timerfd.h>
#include <time.h>
#include <unistd.h>

enum { HOT_NS = 10000000, FASTEST_NS = 20000, YIELD_NS = 20000, SLOWEST_NS = 2000000, QUIET_SHARE = 8 };

/* ---- The lock -------------------------------------------------------------------------------------------------- */

static pthread_mutex_t lock = PTHREAD_RECURSIVE_MUTEX_INITIALIZER_NP;
static int depth;     /* of recursion */
static int nyielding; /* threads in mpi_yield_lock */
static bool may_yield = true;

void mpi_lock(void) {
    pthread_mutex_lock(&lock);
    depth++;
}

void mpi_unlock(void) {
    depth--;
    pthread_mutex_unlock(&lock);
}

/* A callback may call in again and yield there, so all levels are unlocked. */
static void sleep_unlocked(void) {
    int n = depth;
    for (int i = 0; i < n; i++)
        mpi_unlock();
    nanosleep(&(struct timespec){.tv_nsec = YIELD_NS}, NULL);
    for (int i = 0; i < n; i++)
        mpi_lock();
}

void mpi_yield_lock(void) {
    if (!may_yield)
        return;
    nyielding++;
    sleep_unlocked();
    nyielding--;
}

void mpi_stop_yielding(void) {
    may_yield = false;
    while (nyielding > 0) /* a thread that wakes up keeps the lock until it is done */
        sleep_unlocked();
}

tb_status mpi_failed(const char *what, int code) {
    char text[MPI_MAX_ERROR_STRING];
    int length = 0;
    if (MPI_Error_string(code, text, &length) != MPI_SUCCESS)
        length = 0;
    return tb__fail(TB_IO, "%s: %.*s", what, length, text);
}

static int64_t now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

tb_status mpi_requests_init(mpi *m) {
    m->timer = timerfd_create(CLOCK_MONOTONIC, TFD_CLOEXEC | TFD_NONBLOCK);
    return m->timer >= 0 ? TB_OK : tb__fail(TB_IO, "timerfd: %s", tb__errno_text(errno));
}

void mpi_requests_fini(mpi *m) {
    free(m->requests.item);
    free(m->owners.item);
    free(m->spare.item);
    free(m->outcomes);
    free(m->statuses);
    if (m->timer >= 0)
        close(m->timer);
}

/* ---- The timer ------------------------------------------------------------------------------------------------- */

void mpi_record_event(mpi *m) {
    m->event_ns = now_ns();
}

static int64_t wanted_interval(const mpi *m) {
    if (m->is_closed)
        return m->has_to_report;
    if (!TAILQ_EMPTY(&m->ready))
        return 1;
    if (m->nunder_way + m->nwaiting == 0)
        return 0;
    int64_t quiet_ns = now_ns() - m->event_ns, interval = FASTEST_NS, wanted = quiet_ns / QUIET_SHARE;
    if (m->nunder_way > 0 && quiet_ns < HOT_NS)
        return 1;
    while (interval < wanted && interval < SLOWEST_NS)
        interval *= 2; /* in steps, so that the timer is not set each time */
    return interval < SLOWEST_NS ? interval : SLOWEST_NS;
}

void mpi_set_timer(mpi *m) {
    int64_t interval = wanted_interval(m);
    if (interval == m->interval_ns)
        return;
    m->interval_ns = interval;
    struct itimerspec when = {.it_interval.tv_nsec = interval, .it_value.tv_nsec = interval};
    timerfd_settime(m->timer, 0, &when, NULL);
}

/* ---- The table ------------------------------------------------------------------------------------------------- */

tb_status mpi_reserve_request(mpi *m) {
    if (m->spare.count > 0)
        return TB_OK;
    size_t n = m->requests.count + 1;
    if (!tb__vec_reserve(&m->requests, 1) || !tb__vec_reserve(&m->owners, 1))
        return TB_NO_MEMORY;
    if (m->spare.capacity < n && !tb__vec_grow((void **)&m->spare.item, &m->spare.capacity, n, sizeof(size_t)))
        return TB_NO_MEMORY;
    if (m->noutcomes < n) {
        size_t room = 2 * n;
        int *outcomes = tb__realloc(m->outcomes, room, sizeof *outcomes);
        if (!outcomes)
            return TB_NO_MEMORY;
        m->outcomes = outcomes;
        MPI_Status *statuses = tb__realloc(m->statuses, room, sizeof *statuses);
        if (!statuses)
            return TB_NO_MEMORY;
        m->statuses = statuses;
        m->noutcomes = room;
    }
    m->requests.item[m->requests.count++] = MPI_REQUEST_NULL;
    m->owners.item[m->owners.count++] = (owner){0};
    m->spare.item[m->spare.count++] = n - 1;
    return TB_OK;
}

size_t mpi_keep_request(mpi *m, MPI_Request request, owner whose) {
    size_t at = m->spare.item[--m->spare.count];
    m->requests.item[at] = request;
    m->owners.item[at] = whose;
    m->nunder_way += whose.message != NULL;
    return at;
}

static void drop_request(mpi *m, size_t at) {
    m->nunder_way -= m->owners.item[at].message != NULL;
    m->requests.item[at] = MPI_REQUEST_NULL;
    m->owners.item[at] = (owner){0};
    m->spare.item[m->spare.count++] = at;
}

static void record_frame(mpi *m, ring_slot *p, const MPI_Status *status, int error) {
    int n = 0;
    MPI_Get_count(status, MPI_BYTE, &n);
    p->request = NO_REQUEST;
    p->is_done = true;
    p->rank = status->MPI_SOURCE;
    p->error = error;
    p->nbytes = n > 0 ? (size_t)n : 0;
    m->ndone++;
}

/* Only records it: handling calls back, which may change the table. */
static void record_completion(mpi *m, size_t at, const MPI_Status *status, int error) {
    owner o = m->owners.item[at];
    int is_cancelled = 0;
    drop_request(m, at);
    if (!o.message) {
        record_frame(m, &m->ring[o.at], status, error);
        return;
    }
    chunk *c = &o.message->chunks[o.at];
    if (c->cancel_requested && error == MPI_SUCCESS)
        MPI_Test_cancelled(status, &is_cancelled);
    c->request = NO_REQUEST;
    c->is_done = !is_cancelled;
    if (error != MPI_SUCCESS)
        o.message->error = error;
    mpi_mark_ready(m, o.message);
}

tb_status mpi_test_requests(mpi *m, bool *did) {
    int n = 0;
    int code = MPI_Testsome((int)m->requests.count, m->requests.item, &n, m->outcomes, m->statuses);
    *did = n != MPI_UNDEFINED && n > 0;
    if (code != MPI_SUCCESS && code != MPI_ERR_IN_STATUS)
        return mpi_failed("MPI_Testsome", code);
    for (int i = 0; *did && i < n; i++) {
        size_t at = (size_t)m->outcomes[i];
        record_completion(m, at, &m->statuses[i], code == MPI_SUCCESS ? MPI_SUCCESS : m->statuses[i].MPI_ERROR);
    }
    return TB_OK;
}

void mpi_cancel_request(mpi *m, size_t at) {
    MPI_Cancel(&m->requests.item[at]);
}

tb_status mpi_end_request(mpi *m, size_t at, int64_t deadline_ms, bool *was_cancelled) {
    int is_done = 0, is_cancelled = 0;
    for (;;) {
        MPI_Status status;
        int code = MPI_Test(&m->requests.item[at], &is_done, &status);
        if (code == MPI_SUCCESS && is_done)
            MPI_Test_cancelled(&status, &is_cancelled);
        if (code != MPI_SUCCESS || is_done)
            break;
        if (tb__now_ms() >= deadline_ms)
            return tb__fail(TB_TIMEOUT, "a message stands still half-way, and MPI can't take it back");
        mpi_yield_lock();
    }
    *was_cancelled = is_cancelled;
    drop_request(m, at);
    return TB_OK;
}
