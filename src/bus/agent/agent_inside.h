/* Shared by the files of the agent: agent.c (the loop), agent_session.c (connections), agent_job.c (commands that run,
 * and background work), agent_pair.c, agent_command.c and agent_transfer.c (the commands), agent_outcome.c (results of
 * transfers), agent_batch.c (tensors and their memory), agent_memory.c (device memory), agent_mirror.c (memory that is
 * not mapped), agent_report.c (the JSON report).
 *
 * The agent's lock guards everything here, unless a comment says otherwise. The loop holds it except while it sleeps,
 * so it is never held while waiting for a peer, the store or memory: that is done in the threads of jobs, which take
 * the lock to access shared state. Functions are called with the lock held, except those marked as a job's. The lock of
 * the world's loop may be taken with it held, not the other way round. */
#ifndef TB_BUS_AGENT_AGENT_INSIDE_H
#define TB_BUS_AGENT_AGENT_INSIDE_H

#include "base/mem.h"
#include "bus/agent/agent.h"
#include "bus/agent/client_process.h"
#include "bus/protocol/payload.h"
#include "bus/protocol/protocol.h"
#include "bus/store/connection.h"
#include "bus/world.h"
#include "loop/adopted.h"

#include <pthread.h>
#include <stdatomic.h>
#include <sys/queue.h>

enum {
    TB__AGENT_MAX_FDS = 4096,       /* of one frame */
    TB__AGENT_MAX_DEVICES = 8,      /* named in the report of a batch */
    TB__AGENT_MAX_PAST = 16,        /* ended transfers of a batch in its report */
    TB__AGENT_MAX_COMMANDS = 64,    /* commands of a client that run */
    TB__AGENT_MAX_THREADS = 1024,   /* commands of all clients that run; each has a thread */
    TB__AGENT_MAX_BACKGROUND = 64,  /* background jobs that run; the others wait */
    TB__AGENT_MAX_HELD = 256 << 20, /* bytes of a client's frames in use; beyond it, nothing is read from the client */
};

typedef struct agent_job agent_job;
typedef struct agent_session agent_session;
typedef TB_VEC(int) tb__fds;

/* Work for which no client waits: `run` without the lock, in a thread, and then `after` with it. */
typedef struct agent_work {
    SLIST_ENTRY(agent_work) link;
    tb__agent *agent;
    agent_session *session; /* that is kept until then; NULL: none */
    void (*run)(void *arg);
    void (*after)(void *arg); /* may free the work */
    void *arg;
} agent_work;

/* Device memory of a client, mapped once however many batches use it. */
typedef struct agent_memory {
    uint64_t id; /* the client's number of it */
    tb__adopted *adopted;
    size_t refs;
    LIST_ENTRY(agent_memory) link;
} agent_memory;

/* One client's connection. */
struct agent_session {
    tb__connection connection; /* first */
    LIST_ENTRY(agent_session) link;
    tb__agent *agent;
    uint64_t id;
    char *denial; /* the reason for refusing the connection, for the reply to its Hello; NULL: it is accepted */
    tb_status denied_with;
    bool has_greeted;
    uint64_t protocol;   /* the version that the client speaks */
    bool is_closing;     /* it is closed when all replies are sent */
    atomic_bool is_gone; /* nothing is read or sent any more; the loop releases what it has ... */
    bool has_released;   /* ... and it stays until its last job has ended. Then the connection is closed: the agent does
                          * not use the client's memory any more */
    int64_t deadline_ms; /* for its Hello, and, when is_closing, for taking its replies */
    char *name;
    tb__client_process process;
    pthread_mutex_t process_lock; /* jobs map and unmap files, and device memory */
    LIST_HEAD(agent_memories, agent_memory) memories;
    tb__fds fds;      /* of the next frame ... */
    tb__fds new_fds;  /* ... and of the last read: they belong to the last frame with bytes that have arrived */
    uint64_t nframes; /* so far; the next frame's `seq` */
    size_t njobs;
    size_t nbegun; /* among them: those that count for TB__AGENT_MAX_COMMANDS */
    size_t nbytes; /* of their frames that are still needed */
};

/* A pair, shared by all clients that have asked for it. Names, index and layout do not change. */
typedef struct agent_pair {
    LIST_ENTRY(agent_pair) link;
    tb__agent *agent;
    char *name, *local, *remote, *layout;
    int32_t index; /* the agent's seat in the group `local` */
    enum {
        PAIR_MAKING,
        PAIR_MADE,
        PAIR_ENDING,
        PAIR_OVER
    } state;                /* OVER: it is in no list, but batches or requests still use it */
    tb_pair *pair;          /* NULL: it is being made, or over */
    const agent_job *maker; /* the job that makes it */
    agent_work ending;
    size_t nbatches;        /* that use it */
    size_t nrequests;       /* jobs that wait for it, or ping its ranks */
    TB_VEC(uint64_t) users; /* sessions */
    uint64_t moved[2];      /* bytes that were received and sent */
    tb_status status;       /* why it could not be made */
    char why[TB__WHY_MAX];
} agent_pair;

/* A copy of client memory that can't be mapped: process_vm_readv and process_vm_writev reach it, or pread and pwrite.
 */
typedef struct agent_mirror {
    const tb__client_file *file; /* NULL: it is at the client's address */
    uint64_t at;                 /* the address, or where it is in the file */
    size_t nbytes;
    char *data; /* tb_alloc's */
    size_t refs;
} agent_mirror;

/* Memory of the client with tensors of a pair; the pair holds a reference to one of these. */
typedef struct agent_area {
    tb__client_file *file;
    agent_memory *memory;
    agent_mirror *mirror;
} agent_area;

/* A pair in a batch. */
typedef struct agent_batch_pair {
    agent_pair *pair;
    tb_pair *held;  /* a reference: the agent_pair may end before the batch */
    uint64_t round; /* the RegisterTensors that added it */
    TB_VEC(agent_area) areas;
    size_t ntensors;
    uint64_t nbytes;       /* of this rank's part of them */
    uint64_t moved[2];     /* bytes, by the last receive and the last send */
    tb_status status;      /* of the last transfer ... */
    char why[TB__WHY_MAX]; /* ... and its error message */
    uint64_t version;      /* of the last completed transfer; for a receive, delivered to the client */
    uint64_t received;     /* the same of receives only */
    uint64_t committed;    /* the version that the tensors here have; the client has it, too, unless is_undelivered */
    bool is_undelivered;   /* writing the client's memory failed, perhaps half-way */
    bool is_torn;
} agent_batch_pair;

/* A transfer that has ended. */
typedef struct agent_past {
    tb_transfer_state state;
    bool is_send;
    tb_status status;
    double when; /* in seconds since 1970 */
} agent_past;

typedef struct agent_batch {
    LIST_ENTRY(agent_batch) link;
    char *id;
    agent_session *session;
    tb_batch *batch;                      /* NULL: it is being registered */
    TB_VEC(agent_batch_pair) batch_pairs; /* change only between transfers */
    TB_VEC(agent_mirror *) mirrors;       /* by file and place in it */
    size_t nmapped;                       /* areas of its pairs that are not mirrors */
    /* The file with the batch's mark; NULL: there is none. */
    tb__client_file *mark_file;
    uint64_t round;           /* the number of RegisterTensors */
    bool is_changing;         /* pairs are being added or removed */
    size_t njobs;             /* that use it */
    agent_job *cleanup_job;   /* the job that is answered when the batch is gone */
    atomic_bool is_cancelled; /* a registration or question that is under way has to end */
    tb_batch *registering;    /* the batch, while it or a further pair is being registered */
    agent_work ending;
    bool is_ending;                          /* to be destroyed when its last job has ended */
    char devices[TB__AGENT_MAX_DEVICES][64]; /* that its tensors are on: "host", "cuda:0" */
    agent_job *busy[2];                      /* the job of a transfer, by direction; NULL: there is none ... */
    tb_transfer *transfers[2];               /* ... and its transfer, once it has begun */
    bool is_given_up[2];                     /* it has to end */
    size_t nawaiting;                        /* jobs that wait for groups of tensors of transfers[0] ... */
    uint64_t ngroups;                        /* ... and how many groups they have written to the client's memory */
    bool is_delivering;                      /* the client's memory is being written */
    bool is_delivered;                       /* the client's memory has the data of the last receive */
    agent_past past[TB__AGENT_MAX_PAST];     /* transfers that ended: number n is at n % TB__AGENT_MAX_PAST ... */
    uint64_t npast;                          /* ... and how many there have been */
    uint64_t version;                        /* the last that all pairs had together */
    bool is_mixed;                           /* the pairs' versions differ */
    tb_batch_state received;                 /* of receives only, as delivered to the client */
    bool is_abandoned;       /* the client's connection has ended: its memory must not be written any more */
    char error[TB__WHY_MAX]; /* of the last one, if it failed */
} agent_batch;

/* A command that is being run. */
struct agent_job {
    tb__agent *agent;
    agent_session *session;
    uint64_t seq;
    bool is_answered; /* the reply was sent before the end */
    bool is_begun;    /* it counts in nbegun */
    unsigned char *frame;
    size_t nbytes; /* of the frame, or of the part of it that is kept */
    tb__arena arena;
    tb__message message;
    int *fds;
    size_t nfds;
    int64_t deadline_ms;
    LIST_ENTRY(agent_job) request_link; /* InitPair */
    atomic_bool is_cancelled;           /* InitPair: the client has given it up */
    agent_batch *batch;
    tb_batch *registered;             /* for it */
    bool signal;                      /* QueryStatus: the group's */
    char *text;                       /* referenced by the reply; NULL: none */
    size_t leaving;                   /* index of the pair that is being removed */
    unsigned told;                    /* events that were sent to the client */
    uint64_t attempt;                 /* of a transfer that has ended; 0: it is not known */
    atomic_bool has_progress;         /* that was not sent to the client */
    TB_VEC(agent_batch *) batches;    /* Invalidate: those that may use the memory */
    tb_status (*run)(agent_job *job); /* in a thread of its own, without the lock */
    tb_status status;
    char why[TB__WHY_MAX];
    tb__message reply;
};

/* How many values are at most `first`, at most 4 times that, and so on. */
enum { AGENT_BOUNDS = 14 };
typedef struct agent_histogram {
    uint64_t count[AGENT_BOUNDS];
} agent_histogram;

#define AGENT_FIRST_SECONDS 0.0001
#define AGENT_FIRST_NBYTES  1024.0

/* Transfers since the start, in one direction. */
typedef struct agent_totals {
    uint64_t ndone, nfailed, nbytes; /* bytes of those that succeeded */
    double seconds;                  /* the same */
    agent_histogram by_seconds, by_nbytes;
} agent_totals;

struct tb__agent {
    tb__endpoint endpoint; /* first */
    char *group, *token;
    int32_t index, size;
    int timeout_ms;
    bool checksum, no_gpu;
    tb_world *world;
    atomic_uint nstops; /* calls of tb__agent_stop */
    bool is_stopping;   /* no new commands; returns when the running ones have ended ... */
    bool is_forced;     /* ... or at once */
    pthread_mutex_t lock;
    pthread_cond_t changed; /* a pair, or in a batch nawaiting or is_delivering */
    uint64_t nsessions;     /* so far */
    LIST_HEAD(agent_sessions, agent_session) sessions;
    LIST_HEAD(agent_pairs, agent_pair) pairs;
    LIST_HEAD(agent_requests, agent_job) pair_requests; /* InitPairs that run */
    LIST_HEAD(agent_batches, agent_batch) batches;
    size_t njobs;
    size_t nbegun;                                  /* among them: commands that wait for others */
    atomic_size_t nthreads;                         /* of jobs and background work */
    size_t nbackground;                             /* work that runs ... */
    SLIST_HEAD(agent_works, agent_work) background; /* ... and that waits */
    pthread_mutex_t enter_lock;                     /* while a group is entered */
    int64_t begun_ms;
    agent_totals totals[2]; /* received and sent */
};

static inline void tb__agent_lock(tb__agent *agent) {
    pthread_mutex_lock(&agent->lock);
}

static inline void tb__agent_unlock(tb__agent *agent) {
    pthread_mutex_unlock(&agent->lock);
}

/* agent_session.c. The first two are the endpoint's functions, which take the lock. */
void tb__agent_accepted(tb__endpoint *agent, int fd, tb_status status);
void tb__agent_session_ready(tb__connection *session, uint32_t events);
void tb__agent_session_reply(agent_session *session, const tb__message *reply); /* for the loop to send */
void tb__agent_session_flush(agent_session *session); /* sends what can be sent, and updates what epoll watches */
/* Stops reading, and closes the connection when all replies are sent. */
void tb__agent_session_close_when_sent(agent_session *session);
/* Marks it as gone. The loop releases it later, since the caller may be using the session's objects. */
void tb__agent_session_close(agent_session *session);
void tb__agent_session_release(agent_session *session);
void tb__agent_session_free(agent_session *session); /* after its release, when it has no jobs */

/* The descriptors of the last read belong to the next frame. False: no memory. */
bool tb__agent_session_keep_fds(agent_session *session);

/* agent_command.c: runs a command. Takes over the job, and answers it, now or later. */
void tb__agent_run_command(agent_job *job);
/* The agent's seat in a group; false: it has none. With the lock or without. */
bool tb__agent_find_seat(const tb__agent *agent, const char *group, tb__membership *out);
/* Enters a group, unless the agent has this seat. A job's: it waits for the store. */
tb_status tb__agent_enter(tb__agent *agent, const char *group, int32_t index, int32_t size);
/* The local group of the pair of a tensor in a RegisterTensors whose pairs were found. */
const char *tb__agent_side_of(const agent_job *job, size_t tensor);
/* Sets the job's batch to the client's of this name, unless it is ending. */
tb_status tb__agent_get_batch(agent_job *job);
tb_status tb__agent_check_registered(const agent_batch *batch); /* TB_REFUSED: it is being registered */
void tb__agent_batch_job_ended(agent_batch *batch);             /* a job of the batch has ended */
/* At the end of a job's thread. */
void tb__agent_finish_command(agent_job *job);
/* Ends the batches and pairs of a client that is gone. */
void tb__agent_drop_client(tb__agent *agent, agent_session *session);

/* agent_transfer.c. These are the functions of commands, as agent_command.c has them. */
tb_status tb__agent_begin_transfer(agent_job *job);
void tb__agent_finish_transfer(agent_job *job);
void tb__agent_send_progress(tb__agent *agent); /* of all transfers that have made some */
tb_status tb__agent_query_status(agent_job *job);
void tb__agent_finish_query(agent_job *job);
tb_status tb__agent_proceed(agent_job *job);
tb_status tb__agent_cancel(agent_job *job);
tb_status tb__agent_await_tensors(agent_job *job);

/* agent_invalidate.c */
tb_status tb__agent_invalidate(agent_job *job);
void tb__agent_finish_invalidate(agent_job *job);

/* agent_outcome.c: the results of transfers, by pair. The first three are a job's, and give the lock up while they
 * write. */
/* Writes to the client's memory the versions that are committed here and not delivered: of receives whose outcome was
 * unknown before. */
tb_status tb__agent_deliver_late(agent_batch *batch);
/* Records the end of a transfer. If it has not begun (NULL), `status` and `why` are those of all pairs. Writes to the
 * client's memory what was received through the pairs that succeeded, and nothing else. The first failure to write it
 * becomes the status, if that was TB_OK. */
void tb__agent_record_end(agent_batch *batch, const tb_transfer *transfer, bool is_send, tb_status *status,
                          char why[TB__WHY_MAX]);
/* Writes to the client's memory what has arrived of groups of tensors up to this one. */
tb_status tb__agent_deliver_groups(agent_batch *batch, uint32_t group);
/* After pairs were added or removed. */
void tb__agent_update_version(agent_batch *batch);
/* Adds the pairs' results to the reply, in the job's arena; leaves them out if there is no memory. */
void tb__agent_put_outcomes(agent_job *job, agent_batch *batch, tb__message *reply);
/* Adds the state of a transfer to the message, of all pairs and by pair, in the job's arena; leaves it out if memory is
 * short. `events` are those that the client sees. NULL: without a transfer, only the received versions. */
void tb__agent_put_states(agent_job *job, agent_batch *batch, const tb_transfer *transfer, unsigned events,
                          tb__message *message);
/* What the client has received. */
tb_batch_state tb__agent_get_received(agent_batch *batch);
bool tb__agent_is_torn(const agent_batch *batch);

/* agent_pair.c */
tb_status tb__agent_init_pair(agent_job *job);
void tb__agent_finish_init_pair(agent_job *job);
tb_status tb__agent_cleanup_pair(agent_job *job);
agent_pair *tb__agent_find_pair(const tb__agent *agent, const char *name, const char *local);
bool tb__agent_pair_has_user(const agent_pair *pair, const agent_session *session);
void tb__agent_pair_remove_batch(agent_pair *pair); /* a batch that had the pair has ended */
void tb__agent_drop_client_pairs(tb__agent *agent, const agent_session *session);

/* agent_job.c */
agent_job *tb__agent_job_create(agent_session *session, tb__blob map);
/* Counts a job that waits for others; TB_TOO_BIG if there are too many. Called once, before it starts. */
tb_status tb__agent_job_begin(agent_job *job);
/* Counts as one of the jobs of its batch, if it has one. */
void tb__agent_job_start(agent_job *job, tb_status (*run)(agent_job *job));
/* Frees the frame. */
void tb__agent_job_drop_frame(agent_job *job);
/* Ends a job: replies (a failure with tb_error_detail), posts the semaphore, frees. */
void tb__agent_job_end(agent_job *job, tb_status status);
void tb__agent_job_finish(agent_job *job); /* with what its thread has returned */
/* Replies, while the job goes on. */
void tb__agent_job_answer(agent_job *job, tb_status status);
/* Starts it, or queues it if too many run. */
void tb__agent_run_in_background(agent_work *work);
/* For the loop: does queued work if no thread can be started. */
void tb__agent_do_waiting_work(tb__agent *agent);
int tb__agent_job_timeout(const agent_job *job);

/* agent_batch.c: all a job's. */
tb_status tb__agent_batch_fill(agent_job *job);
/* Removes a pair, its tensors, and memory that only they use. */
tb_status tb__agent_batch_drop(agent_batch *batch, size_t batch_pair);
void tb__agent_batch_empty(agent_batch *batch); /* frees tensors and memory of a batch without jobs */

/* agent_memory.c: device memory of clients. A job's. */
/* Maps memory `index` of the frame, or takes another reference to it. If it can't be mapped, the reply says so. */
tb_status tb__agent_map_memory(agent_job *job, size_t index, agent_memory **out);
void tb__agent_unmap_memory(agent_session *session, agent_memory *memory);

/* agent_mirror.c: a job's, but the last two, for which the lock does not matter. */
/* Finds or makes the mirror of these bytes of the client, or of its file: a reference. */
tb_status tb__agent_get_mirror(agent_batch *batch, const tb__payload_memory *memory, const tb__client_file *file,
                               const tb__client_maps *maps, agent_mirror **out);
void tb__agent_put_mirror(agent_batch *batch, agent_mirror *mirror);
/* Copies all mirrors from the client; and copies data received through a pair to the client, of the groups of tensors
 * from `first` to before `last`. */
tb_status tb__agent_read_mirrors(const agent_batch *batch);
tb_status tb__agent_write_mirrors(const agent_batch *batch, const tb_pair *pair, uint64_t first, uint64_t last);
/* Whether all of the batch's memory is mirrored, and whether any is. */
bool tb__agent_is_mirrored(const agent_batch *batch);
bool tb__agent_has_mirrors(const agent_batch *batch);

/* agent_report.c: a JSON object, to be freed by the caller; `asker` is left out of its clients. */
tb_status tb__agent_make_report(tb__agent *agent, const agent_session *asker, bool lists_tensors, char **out);

#endif
