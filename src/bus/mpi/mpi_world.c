/* tb_world_from_mpi: the ranks of a communicator agree on a store and join it.
 *
 * All that MPI does here it does without blocking, so that the deadline holds even if a rank never calls. A collective
 * that was begun can't be taken back: what it may still write to is then left to MPI. */
#include "tensorbus/mpi.h"

#include "base/index.h"
#include "base/mem.h"
#include "base/opts.h"
#include "base/process.h"
#include "bus/mpi/meeting.h"
#include "bus/world.h"
#include "transport/mpi/mpi.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

enum { DEFAULT_TIMEOUT_MS = 30000, SENTENCE = 512 };

typedef struct convention {
    MPI_Comm comm; /* the duplicate */
    int rank, nranks;
    int64_t deadline_ms;
    int decision[2], decisions[2]; /* a status, and whose it is: the least of all */
    uint64_t hosts[4], least[4];   /* the host, and its id; of each the complement, whose least tells the greatest */
    bool has_one_host, has_one_id;
    char sentence[SENTENCE];
    tb__invitation invitation;
    bool has_entered;
    tb__store_server *server;
    tb__mpi_comms comms;
    struct convention *next;
} convention;

/* Those that a collective of MPI's may still write to. */
static convention *left_to_mpi;

/* ---- Collectives with a deadline -------------------------------------------------------------------------------- */

static tb_status finish(const convention *c, MPI_Request *request, int code) {
    int is_done = 0;
    for (int64_t nap_ns = 1000; code == MPI_SUCCESS && !is_done; nap_ns += nap_ns < 1000000 ? nap_ns / 2 : 0) {
        code = MPI_Test(request, &is_done, MPI_STATUS_IGNORE);
        if (is_done || code != MPI_SUCCESS)
            break;
        if (tb__now_ms() >= c->deadline_ms)
            return tb__fail(TB_TIMEOUT, "not all ranks of the communicator have called tb_world_from_mpi in time");
        nanosleep(&(struct timespec){.tv_nsec = nap_ns}, NULL);
    }
    return code == MPI_SUCCESS ? TB_OK : mpi_failed("tb_world_from_mpi", code);
}

/* Whether `status` is TB_OK on all ranks; if not, what it is on the one where it is worst. `is_broken`: a collective
 * did not come to its end. */
static tb_status agree(convention *c, tb_status status, bool *is_broken) {
    MPI_Request request;
    c->decision[0] = status;
    c->decision[1] = c->rank;
    if (status != TB_OK)
        snprintf(c->sentence, sizeof c->sentence, "%s", tb_error_detail());
    *is_broken = true;
    TB_TRY(finish(c, &request, MPI_Iallreduce(c->decision, c->decisions, 1, MPI_2INT, MPI_MINLOC, c->comm, &request)));
    if (c->decisions[0] != TB_OK)
        TB_TRY(finish(c, &request, MPI_Ibcast(c->sentence, SENTENCE, MPI_CHAR, c->decisions[1], c->comm, &request)));
    *is_broken = false;
    if (c->decisions[0] == TB_OK)
        return TB_OK;
    return c->decisions[1] == c->rank
               ? tb__fail((tb_status)c->decisions[0], "%s", c->sentence)
               : tb__fail((tb_status)c->decisions[0], "rank %d of the communicator: %s", c->decisions[1], c->sentence);
}

/* ---- Steps ----------------------------------------------------------------------------------------------------- */

/* Not even the others can be told of this: that takes MPI. */
static tb_status check_this_thread(void) {
    int level = MPI_THREAD_SINGLE, is_main = 1;
    MPI_Query_thread(&level);
    MPI_Is_thread_main(&is_main);
    if (level < MPI_THREAD_SERIALIZED && !is_main)
        return tb__fail(TB_REFUSED,
                        "only the thread that has initialised MPI may call it, and this is another one: call "
                        "from that one, or initialise MPI with MPI_THREAD_SERIALIZED, or more");
    return TB_OK;
}

static tb_status check_mpi(MPI_Comm comm) {
    int is_initialised = 0, is_finalised = 0, is_inter = 0;
    MPI_Initialized(&is_initialised);
    MPI_Finalized(&is_finalised);
    if (!is_initialised || is_finalised)
        return tb__fail(TB_INVALID, is_finalised ? "MPI is finalised already" : "MPI is not initialised yet");
    TB_TRY(check_this_thread());
    if (comm == MPI_COMM_NULL)
        return tb__fail(TB_INVALID, "a world needs a communicator, not MPI_COMM_NULL");
    if (MPI_Comm_test_inter(comm, &is_inter) != MPI_SUCCESS || is_inter)
        return tb__fail(TB_INVALID, "an intercommunicator has two groups of ranks; a world needs one: merge them");
    return TB_OK;
}

static tb_status check_threads(bool is_manual) {
    int level = MPI_THREAD_SINGLE;
    MPI_Query_thread(&level);
    if (!is_manual && level < MPI_THREAD_MULTIPLE)
        return tb__fail(TB_REFUSED, "the world's thread calls MPI beside the program's own: initialise MPI with "
                                    "MPI_Init_thread and MPI_THREAD_MULTIPLE, or make the world manual");
    if (is_manual && level < MPI_THREAD_FUNNELED)
        return tb__fail(TB_REFUSED, "the world has threads, though they don't call MPI: initialise MPI with "
                                    "MPI_Init_thread and MPI_THREAD_FUNNELED, or more");
    return TB_OK;
}

/* What this rank can say about its own arguments. */
static tb_status check_own(const char *group, const tb_world_opts *opts, tb_world_opts *o) {
    TB_TRY(tb__opts_read(o, sizeof *o, opts));
    if (!group || !*group || strlen(group) >= MEETING_NAME)
        return tb__fail(TB_INVALID, "a group needs a name, of less than %d bytes", MEETING_NAME);
    if (o->timeout_ms < 0)
        return tb__fail(TB_INVALID, "timeout_ms can't be negative");
    TB_TRY(check_threads(o->manual));
    return tb_transport_register(&tb__mpi_ops);
}

static tb_status duplicate(convention *c, MPI_Comm comm) {
    MPI_Request request;
    TB_TRY(finish(c, &request, MPI_Comm_idup(comm, &c->comm, &request)));
    MPI_Comm_set_errhandler(c->comm, MPI_ERRORS_RETURN);
    MPI_Comm_rank(c->comm, &c->rank);
    MPI_Comm_size(c->comm, &c->nranks);
    return TB_OK;
}

/* Whether a socket in a folder reaches all, and whether all reach one another by shm: ids may tell apart what is one
 * machine. */
static tb_status compare_hosts(convention *c, const char *id) {
    MPI_Request request;
    c->hosts[0] = c->hosts[2] = tb__meeting_host();
    for (; id && *id; id++)
        c->hosts[2] = tb__hash(c->hosts[2], (unsigned char)*id);
    c->hosts[1] = ~c->hosts[0];
    c->hosts[3] = ~c->hosts[2];
    TB_TRY(finish(c, &request, MPI_Iallreduce(c->hosts, c->least, 4, MPI_UINT64_T, MPI_MIN, c->comm, &request)));
    c->has_one_host = c->least[0] == ~c->least[1];
    c->has_one_id = c->least[2] == ~c->least[3];
    return TB_OK;
}

static tb_status join(convention *c, const char *group, tb_world_opts o, tb_world **out) {
    char url[MEETING_URL];
    if (strcmp(group, c->invitation.group) != 0)
        return tb__fail(TB_CONFLICT, "it says group '%s', rank 0 says '%s'", group, c->invitation.group);
    TB_TRY(tb__meeting_enter(&c->invitation));
    c->has_entered = true;
    /* Who fails here tells the others, who wait until the deadline. */
    int left_ms = tb__ms_until(c->deadline_ms) / 4 * 3;
    TB_TRY(tb__meeting_find(&c->invitation, tb__now_ms() + left_ms, url));
    c->comms = (tb__mpi_comms){.out = c->comm, .in = c->comm};
    memcpy(c->comms.uid, c->invitation.uid, sizeof c->comms.uid);
    o.size = sizeof o;
    o.token = c->invitation.token;
    int timeout_ms = o.timeout_ms > 0 ? o.timeout_ms : DEFAULT_TIMEOUT_MS;
    o.timeout_ms = left_ms > 0 ? left_ms : 1;
    tb__mpi_set_next_comms(&c->comms);
    tb_status status = tb__world_join(url, group, c->rank, c->nranks, c->has_one_id, &o, out);
    tb__mpi_set_next_comms(NULL);
    if (status == TB_OK)
        (*out)->timeout_ms = timeout_ms;
    return status;
}

static void leave(convention *c) {
    bool has_folder = c->has_entered || c->server;
    tb__store_server_stop(c->server);
    if (has_folder)
        tb__meeting_leave(&c->invitation);
}

static void dissolve(void *arg) {
    convention *c = arg;
    int is_finalised = 0;
    leave(c);
    mpi_lock();
    MPI_Finalized(&is_finalised);
    if (!is_finalised && c->comm != MPI_COMM_NULL && !c->comms.is_taken)
        MPI_Comm_free(&c->comm);
    mpi_unlock();
    free(c);
}

/* Everything after the ranks have found each other. `is_broken` as in agree. */
static tb_status convene(convention *c, tb_status own, const char *group, const tb_world_opts *o, tb_world **world,
                         bool *is_broken) {
    MPI_Request request;
    TB_TRY(agree(c, own, is_broken));
    *is_broken = true;
    TB_TRY(compare_hosts(c, o->host));
    tb_status status = TB_OK;
    if (c->rank == 0)
        status = tb__meeting_serve(group, c->has_one_host, &c->invitation, &c->server);
    TB_TRY(agree(c, status, is_broken));
    *is_broken = true;
    TB_TRY(finish(c, &request, MPI_Ibcast(&c->invitation, (int)sizeof c->invitation, MPI_BYTE, 0, c->comm, &request)));
    status = join(c, group, *o, world);
    return agree(c, status, is_broken);
}

tb_status tb_world_from_mpi(MPI_Comm comm, const char *group, const tb_world_opts *opts, tb_world **out) {
    TB_TRY(check_mpi(comm));
    tb_world_opts o = {0};
    tb_status own = check_own(group, opts, &o);
    convention *c = tb__calloc(1, sizeof *c);
    if (!c)
        return TB_NO_MEMORY;
    char why[SENTENCE]; /* what follows may have sentences of its own */
    snprintf(why, sizeof why, "%s", own == TB_OK ? "" : tb_error_detail());
    c->comm = MPI_COMM_NULL;
    c->deadline_ms = tb__now_ms() + (o.timeout_ms > 0 ? o.timeout_ms : DEFAULT_TIMEOUT_MS);
    tb_world *world = NULL;
    bool is_broken = true;
    tb_status status = duplicate(c, comm);
    if (status == TB_OK && own != TB_OK)
        tb__set_detail("%s", why);
    if (status == TB_OK)
        status = convene(c, own, group, &o, &world, &is_broken);
    if (status == TB_OK) {
        tb__world_at_end(world, dissolve, c);
        *out = world;
        return TB_OK;
    }
    snprintf(why, sizeof why, "%s", tb_error_detail());
    tb_world_destroy(world);
    if (is_broken) {
        leave(c);
        mpi_lock();
        c->next = left_to_mpi;
        left_to_mpi = c;
        mpi_unlock();
    } else {
        dissolve(c);
    }
    return tb__fail(status, "%s", why);
}
