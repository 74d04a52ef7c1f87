/* tb_world_from_mpi: the ranks of a communicator agree on a store and join it.
 *
 * All MPI calls are non-blocking, so that the deadline holds even if a rank never calls. A collective that has begun
 * can't be cancelled: memory that it may still write to is kept for MPI. */
#include "tensorbus/mpi.h"

#include "base/index.h"
#include "base/mem.h"
#include "base/opts.h"
#include "base/process.h"
#include "bus/mpi/bootstrap.h"
#include "bus/world.h"
#include "transport/mpi/mpi.h"

#include <stdio.h>
#include <string.h>

enum { DEFAULT_TIMEOUT_MS = 30000, SENTENCE = 512 };

typedef struct bootstrap {
    MPI_Comm comm; /* the duplicate */
    int rank, nranks;
    int64_t deadline_ms;
    int decision[2], decisions[2]; /* a status and its rank, for MPI_MINLOC */
    uint64_t hosts[4],
        least[4]; /* machine hash and host id, each also complemented: MPI_MIN then gives the least and the greatest */
    bool has_one_host, has_one_id;
    char sentence[SENTENCE];
    tb__bootstrap_info info;
    bool has_entered;
    tb__store_server *server;
    tb__mpi_comms comms;
    struct bootstrap *next;
} bootstrap;

/* States that a collective may still write to. */
static bootstrap *left_to_mpi;

static tb_status wait_collective(const bootstrap *c, MPI_Request *request, int code) {
    int is_done = 0;
    for (int64_t delay_ns = 1000; code == MPI_SUCCESS && !is_done; delay_ns += delay_ns < 1000000 ? delay_ns / 2 : 0) {
        code = MPI_Test(request, &is_done, MPI_STATUS_IGNORE);
        if (is_done || code != MPI_SUCCESS)
            break;
        if (tb__now_ms() >= c->deadline_ms)
            return tb__fail(TB_TIMEOUT, "not all ranks of the communicator have called tb_world_from_mpi in time");
        nanosleep(&(struct timespec){.tv_nsec = delay_ns}, NULL);
    }
    return code == MPI_SUCCESS ? TB_OK : mpi_failed("tb_world_from_mpi", code);
}

/* TB_OK if `status` is TB_OK on all ranks; else the lowest status of all. `is_broken`: a collective has not completed.
 */
static tb_status agree_on_status(bootstrap *c, tb_status status, bool *is_broken) {
    MPI_Request request;
    c->decision[0] = status;
    c->decision[1] = c->rank;
    if (status != TB_OK)
        snprintf(c->sentence, sizeof c->sentence, "%s", tb_error_detail());
    *is_broken = true;
    TB_TRY(wait_collective(c, &request,
                           MPI_Iallreduce(c->decision, c->decisions, 1, MPI_2INT, MPI_MINLOC, c->comm, &request)));
    if (c->decisions[0] != TB_OK)
        TB_TRY(wait_collective(c, &request,
                               MPI_Ibcast(c->sentence, SENTENCE, MPI_CHAR, c->decisions[1], c->comm, &request)));
    *is_broken = false;
    if (c->decisions[0] == TB_OK)
        return TB_OK;
    return c->decisions[1] == c->rank
               ? tb__fail((tb_status)c->decisions[0], "%s", c->sentence)
               : tb__fail((tb_status)c->decisions[0], "rank %d of the communicator: %s", c->decisions[1], c->sentence);
}

/* Other ranks can't be told of this failure, because that takes MPI. */
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

/* Checks this rank's arguments. */
static tb_status check_arguments(const char *group, const tb_world_opts *opts, tb_world_opts *o) {
    TB_TRY(tb__opts_read(o, sizeof *o, opts));
    if (!group || !*group || strlen(group) >= BOOTSTRAP_NAME)
        return tb__fail(TB_INVALID, "a group needs a name, of less than %d bytes", BOOTSTRAP_NAME);
    if (o->timeout_ms < 0)
        return tb__fail(TB_INVALID, "timeout_ms can't be negative");
    TB_TRY(check_threads(o->manual));
    return tb_transport_register(&tb__mpi_ops);
}

static tb_status duplicate_comm(bootstrap *c, MPI_Comm comm) {
    MPI_Request request;
    TB_TRY(wait_collective(c, &request, MPI_Comm_idup(comm, &c->comm, &request)));
    MPI_Comm_set_errhandler(c->comm, MPI_ERRORS_RETURN);
    MPI_Comm_rank(c->comm, &c->rank);
    MPI_Comm_size(c->comm, &c->nranks);
    return TB_OK;
}

/* Whether all ranks share a machine (for a Unix socket), and a host id (for shm): ids may divide one machine. */
static tb_status compare_hosts(bootstrap *c, const char *id) {
    MPI_Request request;
    c->hosts[0] = c->hosts[2] = tb__bootstrap_machine_hash();
    for (; id && *id; id++)
        c->hosts[2] = tb__hash(c->hosts[2], (unsigned char)*id);
    c->hosts[1] = ~c->hosts[0];
    c->hosts[3] = ~c->hosts[2];
    TB_TRY(
        wait_collective(c, &request, MPI_Iallreduce(c->hosts, c->least, 4, MPI_UINT64_T, MPI_MIN, c->comm, &request)));
    c->has_one_host = c->least[0] == ~c->least[1];
    c->has_one_id = c->least[2] == ~c->least[3];
    return TB_OK;
}

static tb_status join_world(bootstrap *c, const char *group, tb_world_opts o, tb_world **out) {
    char url[BOOTSTRAP_URL];
    if (strcmp(group, c->info.group) != 0)
        return tb__fail(TB_CONFLICT, "it says group '%s', rank 0 says '%s'", group, c->info.group);
    TB_TRY(tb__bootstrap_enter_folder(&c->info));
    c->has_entered = true;
    /* Leaves a quarter of the time for telling the others of a failure. */
    int left_ms = tb__ms_until(c->deadline_ms) / 4 * 3;
    TB_TRY(tb__bootstrap_find(&c->info, tb__now_ms() + left_ms, url));
    c->comms = (tb__mpi_comms){.out = c->comm, .in = c->comm};
    memcpy(c->comms.uid, c->info.uid, sizeof c->comms.uid);
    o.size = sizeof o;
    o.token = c->info.token;
    int timeout_ms = o.timeout_ms > 0 ? o.timeout_ms : DEFAULT_TIMEOUT_MS;
    o.timeout_ms = left_ms > 0 ? left_ms : 1;
    tb__mpi_set_next_comms(&c->comms);
    tb_status status = tb__world_create(url, group, c->rank, c->nranks, c->has_one_id, &o, out);
    tb__mpi_set_next_comms(NULL);
    if (status == TB_OK)
        (*out)->timeout_ms = timeout_ms;
    return status;
}

static void leave_store(bootstrap *c) {
    bool has_folder = c->has_entered || c->server;
    tb__store_server_stop(c->server);
    if (has_folder)
        tb__bootstrap_leave_folder(&c->info);
}

static void free_bootstrap(void *arg) {
    bootstrap *c = arg;
    int is_finalised = 0;
    leave_store(c);
    mpi_lock();
    MPI_Finalized(&is_finalised);
    if (!is_finalised && c->comm != MPI_COMM_NULL && !c->comms.is_taken)
        MPI_Comm_free(&c->comm);
    mpi_unlock();
    free(c);
}

/* All steps after the duplicate communicator exists. `is_broken` as in agree_on_status. */
static tb_status run_bootstrap(bootstrap *c, tb_status own, const char *group, const tb_world_opts *o, tb_world **world,
                               bool *is_broken) {
    MPI_Request request;
    TB_TRY(agree_on_status(c, own, is_broken));
    *is_broken = true;
    TB_TRY(compare_hosts(c, o->host));
    tb_status status = TB_OK;
    if (c->rank == 0)
        status = tb__bootstrap_serve(group, c->has_one_host, &c->info, &c->server);
    TB_TRY(agree_on_status(c, status, is_broken));
    *is_broken = true;
    TB_TRY(wait_collective(c, &request, MPI_Ibcast(&c->info, (int)sizeof c->info, MPI_BYTE, 0, c->comm, &request)));
    status = join_world(c, group, *o, world);
    return agree_on_status(c, status, is_broken);
}

tb_status tb_world_from_mpi(MPI_Comm comm, const char *group, const tb_world_opts *opts, tb_world **out) {
    TB_TRY(check_mpi(comm));
    tb_world_opts o = {0};
    tb_status own = check_arguments(group, opts, &o);
    bootstrap *c = tb__calloc(1, sizeof *c);
    if (!c)
        return TB_NO_MEMORY;
    char why[SENTENCE]; /* later calls overwrite tb_error_detail */
    snprintf(why, sizeof why, "%s", own == TB_OK ? "" : tb_error_detail());
    c->comm = MPI_COMM_NULL;
    c->deadline_ms = tb__now_ms() + (o.timeout_ms > 0 ? o.timeout_ms : DEFAULT_TIMEOUT_MS);
    tb_world *world = NULL;
    bool is_broken = true;
    tb_status status = duplicate_comm(c, comm);
    if (status == TB_OK && own != TB_OK)
        tb__set_detail("%s", why);
    if (status == TB_OK)
        status = run_bootstrap(c, own, group, &o, &world, &is_broken);
    if (status == TB_OK) {
        tb__world_at_end(world, free_bootstrap, c);
        *out = world;
        return TB_OK;
    }
    snprintf(why, sizeof why, "%s", tb_error_detail());
    tb_world_destroy(world);
    if (is_broken) {
        leave_store(c);
        mpi_lock();
        c->next = left_to_mpi;
        left_to_mpi = c;
        mpi_unlock();
    } else {
        free_bootstrap(c);
    }
    return tb__fail(status, "%s", why);
}
