/* Communicators: how their ranks agree on what all of them do together, and how they fail. */
#include "transport/nvshmem/nvshmem.h"

#include "base/log.h"
#include "base/mem.h"
#include "transport/transport.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/random.h>

enum { ALIGNMENT = 512 };

/* ---- Finding ----------------------------------------------------------------------------------------------------- */

static size_t find_rank(const int32_t *ranks, size_t n, int32_t rank) {
    for (size_t i = 0; i < n; i++) {
        if (ranks[i] == rank)
            return i;
    }
    return SIZE_MAX;
}

size_t nvshmem_find(const tb_comm *c, int32_t rank) {
    return find_rank(c->ranks, c->nranks, rank);
}

static tb_comm *find_comm(const nvshmem *u, uint64_t key) {
    tb_comm *c = u->comms;
    while (c && c->key != key)
        c = c->next;
    return c;
}

static bool leads(const tb_comm *c) {
    return c->pe == 0;
}

static bool has_set(const tb_comm *c, const int32_t *ranks, size_t n) {
    return c->nranks == n && memcmp(c->ranks, ranks, n * sizeof *ranks) == 0;
}

/* ---- Telling ----------------------------------------------------------------------------------------------------- */

static void tell_rank(const nvshmem *u, int32_t peer, uint64_t key, nvshmem_message *m) {
    bool has_tail = m->kind == TELL_INIT || m->kind == TELL_FAIL;
    m->key = key;
    u->env.tell(u->env.arg, peer, m, has_tail ? sizeof *m : NVSHMEM_MESSAGE_HEAD);
}

void nvshmem_tell(const tb_comm *c, int32_t peer, nvshmem_message *m) {
    tell_rank(c->owner, peer, c->key, m);
}

static void tell_others(const tb_comm *c, nvshmem_message *m) {
    for (size_t i = 0; i < c->nranks; i++) {
        if (i != c->pe)
            nvshmem_tell(c, c->ranks[i], m);
    }
}

/* ---- Failing ----------------------------------------------------------------------------------------------------- */

void nvshmem_fail(tb_comm *c, tb_status status, int32_t lost, bool is_told, const char *why) {
    if (c->status != TB_OK)
        return;
    c->status = status;
    c->lost = lost;
    snprintf(c->why, sizeof c->why, "%s", why);
    nvshmem_message m = {.kind = TELL_FAIL, .tag = (uint64_t)-status, .id = (uint64_t)(int64_t)lost};
    snprintf(m.why, sizeof m.why, "%.*s", (int)sizeof m.why - 1, why);
    if (!is_told || leads(c))
        tell_others(c, &m);
    nvshmem_end_all(c);
}

static void fail_all(nvshmem *u, tb_status status, const char *why) {
    tb_comm *c;
    for (c = u->comms; c; c = c->next)
        nvshmem_fail(c, status, TB_NO_RANK, false, why);
}

/* ---- Doing things together: the leader tells, and all ranks do it in that order ---------------------------------- */

static bool add_job(nvshmem *u, nvshmem_job like) {
    nvshmem_job *job = tb__malloc(1, sizeof *job);
    if (!job) {
        nvshmem_library_lose("there was no memory");
        fail_all(u, TB_IO, "there was no memory");
        return false;
    }
    *job = like;
    job->device = u->device;
    u->njobs++;
    nvshmem_library_add(job);
    return true;
}

static void do_init(nvshmem *u, const tb_comm *c, const nvshmem_uid *uid) {
    if (u->is_connected || c->lost != TB_NO_RANK)
        return;
    free(u->ranks);
    u->ranks = tb__memdup(c->ranks, c->nranks, sizeof *c->ranks);
    u->nranks = u->ranks ? c->nranks : 0;
    u->is_connected = true;
    add_job(u, (nvshmem_job){.kind = JOB_INIT, .uid = *uid, .pe = (int)c->pe, .npes = (int)c->nranks});
}

static void do_alloc(nvshmem *u, tb_comm *c) {
    if (c->is_agreed || !u->is_connected)
        return;
    c->is_agreed = true;
    add_job(u, (nvshmem_job){.kind = JOB_ALLOC, .key = c->key, .nbytes = c->capacity});
}

static void do_free(nvshmem *u, tb_comm *c) {
    if (!c->is_agreed || !c->is_destroyed || c->is_over)
        return;
    add_job(u, (nvshmem_job){.kind = JOB_FREE, .key = c->key});
    c->is_over = true;
}

/* All have left all communicators, whose memory goes with it. */
static void do_finalize(nvshmem *u) {
    tb_comm *c;
    for (c = u->comms; c; c = c->next)
        c->is_over |= c->is_agreed;
    if (u->is_connected)
        add_job(u, (nvshmem_job){.kind = JOB_FINALIZE});
    u->is_connected = u->is_end_wanted = false;
    eventfd_write(u->event, 1);
}

static bool have_all_joined(const tb_comm *c) {
    for (size_t i = 0; i < c->nranks; i++) {
        if (!c->members[i].has_joined)
            return false;
    }
    return true;
}

static bool have_all_left(const tb_comm *c) {
    for (size_t i = 0; i < c->nranks; i++) {
        if (!c->members[i].has_left)
            return false;
    }
    return true;
}

/* Leader: what all have left is freed when all ranks are known to be there, and not while they may be about to end. */
static void free_left(nvshmem *u) {
    tb_comm *c;
    for (c = u->comms; c; c = c->next) {
        if (!leads(c) || !c->is_agreed || c->is_over || !have_all_left(c))
            continue;
        tell_others(c, &(nvshmem_message){.kind = TELL_FREE});
        do_free(u, c);
    }
}

/* Leader: allocates memory for communicators that all ranks have joined; first it initialises NVSHMEM. */
static void agree(nvshmem *u) {
    tb_comm *c;
    for (c = u->comms; c; c = c->next) {
        if (!leads(c) || c->is_agreed || c->status != TB_OK || c->is_destroyed || !have_all_joined(c))
            continue;
        if (!u->is_up && !u->is_starting)
            u->is_starting = add_job(u, (nvshmem_job){.kind = JOB_UID});
        if (!u->is_up)
            return;
        free_left(u);
        tell_others(c, &(nvshmem_message){.kind = TELL_ALLOC});
        do_alloc(u, c);
    }
}

static void start(nvshmem *u, const nvshmem_uid *uid) {
    tb_comm *c;
    for (c = u->comms; c; c = c->next) {
        if (!leads(c) || c->status != TB_OK || c->is_destroyed || !have_all_joined(c))
            continue;
        tell_others(c, &(nvshmem_message){.kind = TELL_INIT, .uid = *uid});
        u->is_up = true;
        do_init(u, c, uid);
        agree(u);
        return;
    }
}

/* ---- What the thread has done ------------------------------------------------------------------------------------ */

static void take_memory(nvshmem *u, const nvshmem_job *job) {
    tb_comm *c = find_comm(u, job->key);
    if (!c)
        return;
    c->memory = job->memory;
    c->is_ready = c->status == TB_OK;
}

static void take_failure(nvshmem *u, const nvshmem_job *job) {
    bool is_harmless = job->kind == JOB_UID;
    if (!is_harmless)
        nvshmem_library_lose(job->why);
    fail_all(u, TB_IO, job->why);
}

void nvshmem_take_jobs(nvshmem *u) {
    nvshmem_job *job;
    while ((job = nvshmem_library_done())) {
        u->njobs--;
        if (job->kind == JOB_UID)
            u->is_starting = false;
        if (job->status != TB_OK)
            take_failure(u, job);
        else if (job->kind == JOB_UID)
            start(u, &job->uid);
        else if (job->kind == JOB_ALLOC)
            take_memory(u, job);
        free(job);
    }
}

/* ---- Creating ---------------------------------------------------------------------------------------------------- */

static int compare_ranks(const void *a, const void *b) {
    int32_t x = *(const int32_t *)a, y = *(const int32_t *)b;
    return (x > y) - (x < y);
}

tb_status nvshmem_comm_id(void *context, unsigned char id[TB_COMM_ID_SIZE]) {
    (void)context;
    memset(id, 0, TB_COMM_ID_SIZE);
    return getrandom(id, sizeof(uint64_t), 0) == sizeof(uint64_t) ? TB_OK
                                                                  : tb__fail(TB_IO, "there are no random numbers");
}

void nvshmem_free_comm(tb_comm *c) {
    free(c->ranks);
    free(c->members);
    free(c);
}

static tb_comm *make_comm(nvshmem *u, const tb_comm_desc *desc) {
    tb_comm *c = tb__calloc(1, sizeof *c);
    if (!c)
        return NULL;
    c->owner = u;
    memcpy(&c->key, desc->id, sizeof c->key);
    c->ranks = tb__memdup(desc->ranks, desc->nranks, sizeof *desc->ranks);
    c->members = tb__calloc(desc->nranks, sizeof *c->members);
    if (!c->ranks || !c->members) {
        nvshmem_free_comm(c);
        return NULL;
    }
    c->nranks = desc->nranks;
    qsort(c->ranks, c->nranks, sizeof *c->ranks, compare_ranks);
    c->pe = nvshmem_find(c, u->env.rank);
    c->nbytes = desc->nbytes;
    c->capacity = (desc->nbytes + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
    c->device = desc->device;
    c->lost = TB_NO_RANK;
    return c;
}

static tb_status refuse_other_set(const tb_comm *other) {
    tb__text list = {0};
    for (size_t i = 0; i < other->nranks && i < 8; i++)
        tb__text_add(&list, "%s%" PRId32, i ? ", " : "", other->ranks[i]);
    tb_status status =
        tb__fail(TB_REFUSED, "NVSHMEM connects one set of ranks in a process, which is another one here%s%s",
                 list.count ? ": " : "", list.count ? list.data : "");
    tb__text_fini(&list);
    return status;
}

/* Whether this process can take part. */
static tb_status check_set(nvshmem *u, const tb_comm *c) {
    const tb_comm *other;
    TB_TRY(nvshmem_library_take(u, &u->env, u->event));
    for (other = u->comms; other; other = other->next) {
        if (!other->is_destroyed && !has_set(c, other->ranks, other->nranks))
            return refuse_other_set(other);
        if (!other->is_destroyed && other->device != c->device)
            return tb__fail(TB_REFUSED, "NVSHMEM uses one GPU in a process, which is GPU %d, not GPU %d", other->device,
                            c->device);
    }
    return TB_OK;
}

/* Whether NVSHMEM connects other ranks, or with another GPU, or will before it can know of this one. */
static bool must_wait(const nvshmem *u, const tb_comm *c) {
    const tb_comm *other;
    if (u->is_connected && (!has_set(c, u->ranks, u->nranks) || u->device != c->device))
        return true;
    for (other = u->comms; other; other = other->next) {
        if (other != c && !other->is_waiting &&
            (!has_set(c, other->ranks, other->nranks) || other->device != c->device))
            return true;
    }
    return false;
}

static void join(nvshmem *u, tb_comm *c) {
    c->is_waiting = false;
    c->members[c->pe].has_joined = true;
    u->device = c->device;
    if (!leads(c))
        nvshmem_tell(c, c->ranks[0], &(nvshmem_message){.kind = TELL_JOIN, .nbytes = c->nbytes, .offset = c->nranks});
    agree(u);
}

static void take_early(nvshmem *u, const tb_comm *c) {
    for (nvshmem_early **at = &u->early, *e; (e = *at);) {
        if (e->message.key != c->key) {
            at = &e->next;
            continue;
        }
        *at = e->next;
        u->nearly--;
        nvshmem_told_comm(u, e->from, &e->message);
        free(e);
    }
}

static tb_status refuse(tb_comm *c, tb_status status) {
    nvshmem_message m = {.kind = TELL_FAIL, .tag = (uint64_t)-status, .id = (uint64_t)(int64_t)TB_NO_RANK};
    snprintf(m.why, sizeof m.why, "rank %" PRId32 ": %.100s", c->owner->env.rank, tb_error_detail());
    tell_others(c, &m);
    nvshmem_free_comm(c);
    return status;
}

tb_status nvshmem_comm_create(void *context, const tb_comm_desc *desc, tb_comm **out) {
    nvshmem *u = context;
    if (desc->kind != TB_MEM_CUDA || desc->nranks < 2 || desc->nbytes == 0)
        return tb__fail(TB_INVALID, "a communicator of NVSHMEM needs two ranks, and memory of GPUs");
    tb_comm *c = make_comm(u, desc);
    if (!c)
        return TB_NO_MEMORY;
    if (c->pe == SIZE_MAX || find_comm(u, c->key)) {
        nvshmem_free_comm(c);
        return tb__fail(TB_INVALID, "a communicator without this rank, or with the id of another");
    }
    tb_status status = check_set(u, c);
    if (status != TB_OK)
        return refuse(c, status);
    tb_comm **last = &u->comms;
    while (*last)
        last = &(*last)->next;
    *last = c;
    c->is_waiting = true;
    take_early(u, c);
    eventfd_write(u->event, 1); /* it joins in progress */
    *out = c;
    return TB_OK;
}

tb_status nvshmem_comm_check(void *context, tb_comm *c, bool *is_ready) {
    (void)context;
    *is_ready = c->is_ready && c->status == TB_OK;
    return c->status == TB_OK || c->nposted > 0 ? TB_OK : tb__fail(c->status, "%s", c->why);
}

void *nvshmem_comm_memory(void *context, tb_comm *c) {
    (void)context;
    return c->is_ready ? c->memory.base : NULL;
}

/* ---- Being told -------------------------------------------------------------------------------------------------- */

static void keep_early(nvshmem *u, int32_t from, const nvshmem_message *m) {
    nvshmem_early **last = &u->early, *e = tb__malloc(1, sizeof *e);
    if (!e)
        return; /* its communicator is never ready */
    *e = (nvshmem_early){.from = from, .message = *m};
    while (*last)
        last = &(*last)->next;
    *last = e;
    if (++u->nearly <= NVSHMEM_MOST_EARLY)
        return;
    e = u->early;
    u->early = e->next;
    u->nearly--;
    free(e);
}

static void told_join(nvshmem *u, tb_comm *c, size_t from, const nvshmem_message *m) {
    char why[128];
    c->members[from].has_joined = true;
    if (m->nbytes != c->nbytes || m->offset != c->nranks) {
        snprintf(why, sizeof why, "rank %" PRId32 " has another communicator: %" PRIu64 " bytes, %" PRIu64 " ranks",
                 c->ranks[from], m->nbytes, m->offset);
        nvshmem_fail(c, TB_IO, TB_NO_RANK, false, why);
    }
    agree(u);
}

static void told_fail(tb_comm *c, size_t from, const nvshmem_message *m) {
    bool is_leader = from == 0;
    int32_t lost = (int32_t)m->id;
    c->is_told_over |= is_leader;
    if (m->tag == (uint64_t)-TB_LOST && c->is_agreed && memchr(m->why, '\0', sizeof m->why))
        nvshmem_library_lose(m->why);
    tb_status status =
        m->tag == (uint64_t)-TB_LOST || m->tag == (uint64_t)-TB_REFUSED ? (tb_status) - (int)m->tag : TB_IO;
    if (memchr(m->why, '\0', sizeof m->why))
        nvshmem_fail(c, status, nvshmem_find(c, lost) == SIZE_MAX ? TB_NO_RANK : lost, true, m->why);
}

static void told_leave(tb_comm *c, size_t from) {
    char why[80];
    c->members[from].has_left = true;
    c->is_told_over |= from == 0;
    if (from != c->pe)
        nvshmem_end_with(c, c->ranks[from]);
    if (c->is_agreed || c->is_destroyed || (!leads(c) && from != 0))
        return;
    snprintf(why, sizeof why, "rank %" PRId32 " has left before all were connected", c->ranks[from]);
    nvshmem_fail(c, TB_LOST, c->ranks[from], from == 0, why);
}

void nvshmem_told_comm(nvshmem *u, int32_t peer, const nvshmem_message *m) {
    tb_comm *c = find_comm(u, m->key);
    size_t from = c ? nvshmem_find(c, peer) : SIZE_MAX;
    if (m->kind == TELL_END && find_rank(u->ranks, u->nranks, peer) != SIZE_MAX) {
        u->is_end_wanted = true;
        eventfd_write(u->event, 1);
    }
    if (m->kind == TELL_FINALIZE && u->nranks > 0 && u->ranks[0] == peer)
        do_finalize(u);
    if (!c && (m->kind == TELL_JOIN || m->kind == TELL_FAIL || m->kind == TELL_LEAVE))
        keep_early(u, peer, m);
    if (from == SIZE_MAX)
        return;
    if (m->kind == TELL_JOIN && leads(c))
        told_join(u, c, from, m);
    else if (m->kind == TELL_INIT && from == 0)
        do_init(u, c, &m->uid);
    else if (m->kind == TELL_ALLOC && from == 0)
        do_alloc(u, c);
    else if (m->kind == TELL_FREE && from == 0)
        do_free(u, c);
    else if (m->kind == TELL_FAIL)
        told_fail(c, from, m);
    else if (m->kind == TELL_LEAVE)
        told_leave(c, from);
    eventfd_write(u->event, 1);
}

void nvshmem_forget_early(nvshmem *u, int32_t peer) {
    for (nvshmem_early **at = &u->early, *e; (e = *at);) {
        if (peer != TB_NO_RANK && e->from != peer) {
            at = &e->next;
            continue;
        }
        *at = e->next;
        u->nearly--;
        free(e);
    }
}

/* Whether the rank is still in a communicator that has been set up. */
static bool is_needed(const nvshmem *u, int32_t rank) {
    const tb_comm *c;
    for (c = u->comms; c; c = c->next) {
        size_t at = nvshmem_find(c, rank);
        if (at != SIZE_MAX && c->is_agreed && !c->is_destroyed && !c->members[at].has_left)
            return true;
    }
    return false;
}

/* A rank that has left is not missed, but for what all ranks do together. */
void nvshmem_lost(nvshmem *u, int32_t peer, const char *why) {
    char text[256];
    tb_comm *c;
    bool is_connected = (u->is_connected || u->njobs > 0) && find_rank(u->ranks, u->nranks, peer) != SIZE_MAX;
    bool is_missed = is_connected && (u->njobs > 0 || is_needed(u, peer));
    snprintf(text, sizeof text, "rank %" PRId32 " is lost: %.200s", peer, why);
    nvshmem_forget_early(u, peer);
    if (is_missed)
        nvshmem_library_lose(text);
    else if (is_connected)
        nvshmem_library_end(text);
    for (c = u->comms; c; c = c->next) {
        size_t at = nvshmem_find(c, peer);
        if (at == SIZE_MAX)
            continue;
        c->is_told_over |= at == 0;
        if (is_missed || !c->members[at].has_left)
            nvshmem_fail(c, TB_LOST, peer, false, text);
    }
    eventfd_write(u->event, 1);
}

/* ---- Destroying -------------------------------------------------------------------------------------------------- */

void nvshmem_comm_destroy(void *context, tb_comm *c) {
    nvshmem *u = context;
    const char *calling = c->is_agreed && !c->is_ready ? nvshmem_library_calling() : NULL;
    c->is_destroyed = true;
    nvshmem_cancel_all(c);
    if (calling)
        tb__log(TB_LOG_WARN, "nvshmem: a communicator is destroyed while a thread is in %s, and left behind there",
                calling);
    if (!nvshmem_drain(c))
        nvshmem_library_lose("a put did not end when its communicator was destroyed");
    if (nvshmem_library_is_lost()) {
        nvshmem_message m = {.kind = TELL_FAIL, .tag = (uint64_t)-TB_IO, .id = (uint64_t)(int64_t)TB_NO_RANK};
        snprintf(m.why, sizeof m.why, "rank %" PRId32 " can't use NVSHMEM any more", u->env.rank);
        tell_others(c, &m);
    } else {
        tell_others(c, &(nvshmem_message){.kind = TELL_LEAVE});
    }
    told_leave(c, c->pe);
    eventfd_write(u->event, 1);
}

static bool is_over(const tb_comm *c) {
    return c->is_destroyed && (c->is_over || c->is_waiting || nvshmem_library_is_over() ||
                               (!c->is_agreed && (leads(c) || c->is_told_over)));
}

/* The leader of the ranks that are connected: whether one of them needs others, and all have left what they had. */
static bool may_finalize(const nvshmem *u) {
    const tb_comm *c;
    for (c = u->comms; c; c = c->next) {
        if (has_set(c, u->ranks, u->nranks) && !(c->is_agreed && have_all_left(c)))
            return false;
    }
    return u->is_up && u->is_end_wanted;
}

static void finalize(nvshmem *u) {
    u->is_up = false;
    for (size_t i = 0; i < u->nranks; i++) {
        if (u->ranks[i] != u->env.rank)
            tell_rank(u, u->ranks[i], 0, &(nvshmem_message){.kind = TELL_FINALIZE});
    }
    do_finalize(u);
}

/* This rank waits for the end of the set that is connected. */
static void want_end(nvshmem *u) {
    if (!u->is_connected || u->is_end_wanted)
        return;
    u->is_end_wanted = true;
    if (u->ranks[0] != u->env.rank)
        tell_rank(u, u->ranks[0], 0, &(nvshmem_message){.kind = TELL_END});
}

void nvshmem_sweep(nvshmem *u) {
    tb_comm *c;
    for (tb_comm **at = &u->comms; (c = *at);) {
        if (is_over(c)) {
            *at = c->next;
            nvshmem_free_comm(c);
        } else {
            at = &c->next;
        }
    }
    for (c = u->comms; c; c = c->next) {
        if (c->is_waiting && c->status == TB_OK && must_wait(u, c))
            want_end(u);
        else if (c->is_waiting && c->status == TB_OK)
            join(u, c);
    }
    if (may_finalize(u))
        finalize(u);
    if (!u->comms && !u->is_connected && u->njobs == 0)
        nvshmem_library_leave(u);
}
