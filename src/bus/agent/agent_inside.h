/* What the files of the agent share: agent.c (the loop), agent_session.c (connections), agent_job.c (work that takes
 * time, and its end), agent_pair.c, agent_command.c and agent_transfer.c (what commands do), agent_outcome.c (what has
 * become of transfers), agent_batch.c (tensors and
 * their memory), agent_mirror.c (memory that is not mapped), agent_report.c (what is told of all that). All but jobs'
 * own threads belongs to the loop's thread, which never waits for a peer or for the store. */
#ifndef TB_BUS_AGENT_AGENT_INSIDE_H
#define TB_BUS_AGENT_AGENT_INSIDE_H

#include "base/mem.h"
#include "bus/agent/agent.h"
#include "bus/agent/client_process.h"
#include "bus/protocol/payload.h"
#include "bus/protocol/protocol.h"
#include "bus/store/address.h"
#include "bus/world.h"

#include <pthread.h>
#include <stdatomic.h>
#include <sys/queue.h>

enum {
    TB__AGENT_MAX_FDS = 4096,       /* of one frame */
    TB__AGENT_MAX_COMMANDS = 64,    /* of a client that are begun and have not ended ... */
    TB__AGENT_MAX_THREADS = 1024,   /* ... and of all clients */
    TB__AGENT_MAX_BACKGROUND = 64,  /* that are done at once; the others wait */
    TB__AGENT_MAX_HELD = 256 << 20, /* bytes of a client's frames that are in use; beyond it no more is read */
};

typedef struct agent_job agent_job;
typedef TB_VEC(int) tb__fds;

/* One client's connection. */
typedef struct agent_session {
    LIST_ENTRY(agent_session) link;
    tb__agent *agent;
    int socket;
    uint64_t id;
    char *denial; /* it may not come in, for this reason, and is told so when it greets; NULL: it may */
    tb_status denied_with;
    bool has_greeted;
    bool is_closing;     /* what is to be sent is sent, then it is closed */
    bool is_gone;        /* nothing is read or sent any more; the loop buries it ... */
    bool has_released;   /* ... and it stays until its last job has ended */
    int64_t deadline_ms; /* for its Hello, and, once it is doomed, for taking what is to be sent */
    char *name;
    tb__client_process process;
    pthread_mutex_t process_lock; /* jobs map and unmap files */
    tb__frame_reader in;
    tb__fds fds;     /* of the next frame ... */
    tb__fds new_fds; /* ... and what came with the last read: of the last frame of which some has arrived */
    tb__bytes out;
    size_t nsent;
    unsigned watched; /* what epoll looks for */
    uint64_t nframes; /* so far: the next one's ordinal */
    size_t njobs;
    size_t nbegun;        /* among them: those that wait for others */
    atomic_size_t nbytes; /* of their frames, as far as they are still needed */
} agent_session;

/* A pair, however many clients have asked for it. */
typedef struct agent_pair {
    LIST_ENTRY(agent_pair) link;
    tb__agent *agent;
    char *name, *remote, *layout;
    enum { PAIR_MAKING, PAIR_MADE, PAIR_ENDING, PAIR_OVER } state; /* what is over is in no list; batches have it */
    tb_pair *pair;                                                 /* NULL: it is being made */
    agent_job *maker;                                              /* while it is being made */
    agent_job *waiting;                                            /* who asked for it meanwhile */
    atomic_bool is_cancelled;                                      /* whoever asked for it is gone before it was made */
    size_t nbatches;                                               /* that use it */
    size_t nchecks;                                                /* jobs that look whether it is still there */
    atomic_bool checks_cancelled;                                  /* they are to end */
    TB_VEC(uint64_t) users;                                        /* sessions */
    uint64_t moved[2];                                             /* bytes that were received and sent */
} agent_pair;

/* Memory that only the system reaches: kept in a mirror here. */
typedef struct agent_mirror {
    uint64_t address;
    size_t nbytes;
    char *data;                    /* tb_alloc's */
    TB_VEC(const tb_pair *) users; /* whose tensors are in it */
} agent_mirror;

/* A pair that a batch has. */
typedef struct agent_batch_pair {
    agent_pair *pair;
    tb_pair *held;         /* its own: a pair may be ended before the batch */
    uint64_t round;        /* which RegisterTensors brought it */
    size_t ntensors;       /* guarded by the batch's lock, like what follows */
    uint64_t nbytes;       /* of this rank's part of them */
    tb_status status;      /* of the last transfer ... */
    char why[TB__WHY_MAX]; /* ... and its sentence */
    uint64_t version;      /* of the last that was completed: for a receive, that the client has */
    uint64_t committed;    /* the version that its tensors have here; the client has it, or that failed: */
    bool is_undelivered;   /* the client's memory could not be written, or only in part */
    bool is_torn;
} agent_batch_pair;

/* A file of the client's that tensors are in. */
typedef struct agent_file {
    tb__client_file *file;
    uint64_t round; /* which RegisterTensors brought it: it goes with the last pair of that */
} agent_file;

typedef struct agent_batch {
    LIST_ENTRY(agent_batch) link;
    char *id;
    agent_session *session;
    tb_batch *batch;                      /* NULL: it is being registered */
    TB_VEC(agent_batch_pair) batch_pairs; /* they come and go while there is no transfer */
    TB_VEC(agent_file) files;
    TB_VEC(agent_mirror) mirrors;
    uint64_t round;            /* how many RegisterTensors there were */
    bool is_changing;          /* pairs are coming or going */
    size_t njobs;              /* that use it */
    agent_job *cleanup_job;    /* who is answered when it is gone */
    atomic_bool is_cancelled;  /* being registered, it gives up */
    pthread_mutex_t lock;      /* guards what follows */
    tb_batch *registering;     /* while it, or one more pair of it, is */
    bool is_ending;            /* to be destroyed when there are no jobs */
    bool is_busy[2];           /* there is a job, by direction ... */
    tb_transfer *transfers[2]; /* ... and its transfer, once it has begun */
    tb_transfer_state last;    /* the state of the last one that ended ... */
    bool was_send;             /* ... and its direction */
    uint64_t version;          /* the last that all pairs had together */
    bool is_mixed;             /* their versions differ by now */
    bool is_abandoned;         /* the client's connection has ended: its memory may be something else by now */
    char error[TB__WHY_MAX];   /* of the last one, if it failed */
} agent_batch;

/* A command that is being done. */
struct agent_job {
    agent_job *next;
    tb__agent *agent;
    agent_session *session;
    uint64_t seq;
    bool is_answered; /* the reply was sent before the end */
    bool is_begun;    /* it counts among those */
    unsigned char *frame;
    size_t nbytes; /* of it, or of what is kept of it */
    tb__arena arena;
    tb__message message;
    int *fds;
    size_t nfds;
    int64_t deadline_ms;
    agent_pair *pair;
    tb_pair *made; /* for it */
    agent_batch *batch;
    tb_batch *registered;             /* for it */
    size_t leaving;                   /* which of its batch_pairs is */
    int64_t *moved;                   /* bytes, by the batch's pairs; NULL: nobody knows */
    unsigned told;                    /* events that the client has heard of */
    agent_job *next_raised;           /* guarded by the agent's lock, like what follows */
    bool is_raised;                   /* there are events that the loop has not seen ... */
    unsigned raised;                  /* ... among these */
    uint64_t attempt;                 /* 0: not known yet */
    tb_status (*run)(agent_job *job); /* in a thread of its own */
    void (*work)(void *arg);          /* instead, of a chore: in the thread ... */
    void (*after)(void *arg);         /* ... and in the loop */
    void *arg;
    pthread_t thread;
    tb_status status;
    char why[TB__WHY_MAX];
    tb__message reply;
};

/* Transfers since the start, in one direction. */
typedef struct agent_totals {
    uint64_t ndone, nfailed, nbytes; /* bytes of those that succeeded */
    double seconds;                  /* the same */
} agent_totals;

struct tb__agent {
    char *group, *token;
    int32_t index, size;
    int timeout_ms;
    bool checksum;
    tb_world *world;
    tb__listener listener;
    int epoll, wake, stop;
    int spare;          /* closed to accept one client and tell it that descriptors ran out; -1: closed */
    bool is_full;       /* there is none: the listener is not watched */
    bool is_stopping;   /* what is under way ends ... */
    bool is_forced;     /* ... or is ended */
    uint64_t nsessions; /* so far */
    LIST_HEAD(agent_sessions, agent_session) sessions;
    LIST_HEAD(agent_pairs, agent_pair) pairs;
    LIST_HEAD(agent_batches, agent_batch) batches;
    size_t njobs;
    size_t nbegun;         /* among them: commands that wait for others */
    size_t nbackground;    /* that are being done ... */
    agent_job *background; /* ... and those that wait for that */
    pthread_mutex_t done_lock;
    agent_job *done;        /* jobs whose threads have ended */
    agent_job *raised_jobs; /* transfers that have something to tell; the last comes first */
    int64_t begun_ms;
    agent_totals totals[2];      /* received and sent */
    pthread_mutex_t report_lock; /* guards what follows: other threads ask for reports */
    pthread_cond_t report_made;
    uint64_t nasked, nreports; /* reports that were asked for, and how many of these have been answered ... */
    char *report;              /* ... by this one; NULL: there was no memory for it */
};

/* agent_session.c */
void tb__agent_accept(tb__agent *agent);
/* Listens again if there are descriptors. */
void tb__agent_listen_again(tb__agent *agent);
void tb__agent_session_readable(agent_session *session);
void tb__agent_session_writable(agent_session *session);
void tb__agent_session_reply(agent_session *session, const tb__message *reply);
/* No more is read, and it is closed when all is sent. */
void tb__agent_session_close_when_sent(agent_session *session);
/* It is gone from now on, but nothing else changes before the loop buries it: whoever calls may be in the middle of
 * what the session has. */
void tb__agent_session_close(agent_session *session);
void tb__agent_session_release(agent_session *session);
void tb__agent_session_free(agent_session *session); /* of one that is buried and has no jobs */
/* What is read and sent of it, now: its jobs' frames may have gone meanwhile. */
void tb__agent_session_watch(agent_session *session);

/* What came last belongs to the next frame. False: no memory. */
bool tb__agent_session_keep_fds(agent_session *session);

/* agent_command.c: takes over the job, and answers it, now or later. */
void tb__agent_run_command(agent_job *job);
/* The client's own, and one that is not on its way out. */
tb_status tb__agent_get_batch(const agent_job *job, agent_batch **out);
void tb__agent_batch_job_ended(agent_batch *batch); /* of a job that ends */
/* What a thread has done. */
void tb__agent_finish_command(agent_job *job);
/* A client is gone. */
void tb__agent_drop_client(tb__agent *agent, agent_session *session);

/* agent_transfer.c */
void tb__agent_begin_transfer(agent_job *job);
void tb__agent_finish_transfer(agent_job *job);
void tb__agent_send_events(agent_job *job); /* the events that it has raised */
void tb__agent_query_status(agent_job *job);
void tb__agent_proceed(agent_job *job);

/* agent_outcome.c: what each pair of a batch has come to. */
/* The client gets the versions that are committed here and that it does not have: of a receive whose end was not known
 * before. */
tb_status tb__agent_deliver_late(agent_batch *batch);
/* The end of a transfer. It may not have begun (NULL); then `status`, whose sentence is `why`, is that of all pairs.
 * The client gets what was received through the pairs that succeeded, and nothing else. Returns the first failure to
 * write the client's memory. */
tb_status tb__agent_record_end(agent_batch *batch, const tb_transfer *transfer, bool is_send, tb_status status,
                               const char *why);
/* After pairs have come or gone. */
void tb__agent_update_version(agent_batch *batch);
/* The pairs' outcomes, in the job's memory. Where there is none, nobody will know. */
void tb__agent_put_outcomes(agent_job *job, agent_batch *batch, tb__message *reply);
/* What went through each of the batch's pairs; the same holds. */
void tb__agent_record_moved(agent_job *job, const tb_transfer *transfer);
bool tb__agent_is_torn(const agent_batch *batch); /* with the batch's lock held */

/* agent_pair.c */
void tb__agent_init_pair(agent_job *job);
void tb__agent_finish_init_pair(agent_job *job);
agent_pair *tb__agent_find_pair(const tb__agent *agent, const char *name);
bool tb__agent_pair_has_user(const agent_pair *pair, const agent_session *session);
void tb__agent_pair_remove_batch(agent_pair *pair); /* of a batch that ends */
void tb__agent_drop_client_pairs(tb__agent *agent, const agent_session *session);
/* Answers those who have waited for a pair long enough; when to look again. */
int64_t tb__agent_pairs_expire(tb__agent *agent);

/* agent_job.c */
agent_job *tb__agent_job_create(agent_session *session, tb__blob map);
/* One that waits for others, while there are not too many of these; called once, before it starts. */
tb_status tb__agent_job_begin(agent_job *job);
void tb__agent_job_start(agent_job *job, tb_status (*run)(agent_job *job));
/* Keeps of the frame what the message points to. Of tensors that is all of it. */
void tb__agent_job_trim(agent_job *job);
/* The frame is not needed any more. In any thread. */
void tb__agent_job_drop_frame(agent_job *job);
/* Ends a job, with the sentence in tb_error_detail if it failed: answers, posts the semaphore, frees. */
void tb__agent_job_end(agent_job *job, tb_status status);
/* What is told of a job that goes on. */
void tb__agent_job_answer(agent_job *job, tb_status status);
/* Does `work` in a thread, then `after` in the loop; both at once where there is no thread to be had. Where too many
 * are being done it waits for others. The session, which may be NULL, stays until then. */
void tb__agent_run_in_background(tb__agent *agent, agent_session *session, void (*work)(void *arg),
                                 void (*after)(void *arg), void *arg);
void tb__agent_reap_jobs(tb__agent *agent);
int tb__agent_job_timeout(const agent_job *job);

/* agent_batch.c */
tb_status tb__agent_batch_fill(agent_job *job); /* in the job's thread */
/* A pair leaves: its tensors and what memory only they have. In the job's thread. */
tb_status tb__agent_batch_drop(agent_batch *batch, size_t batch_pair);
void tb__agent_batch_empty(agent_batch *batch); /* of one without jobs: gives up tensors and memory; in any thread */

/* agent_mirror.c */
/* The mirror of these bytes of the client, for a tensor of the pair. */
tb_status tb__agent_get_mirror(agent_batch *batch, const tb__payload_memory *memory, const tb_pair *pair,
                               agent_mirror **out);
/* The pair's tensors are gone, and mirrors that nobody else has. */
void tb__agent_mirrors_drop(agent_batch *batch, const tb_pair *pair);
/* From the client, all of it; and to the client, what was received through a pair. */
tb_status tb__agent_read_mirrors(const agent_batch *batch);
tb_status tb__agent_write_mirrors(const agent_batch *batch, const tb_pair *pair);
/* Whether all of the batch's memory is mirrored, and whether any is. */
bool tb__agent_is_mirrored(const agent_batch *batch);
bool tb__agent_has_mirrors(const agent_batch *batch);
void tb__agent_mirrors_free(agent_batch *batch);

/* agent_report.c: a JSON object, without the session that asks; to be freed by the caller. */
tb_status tb__agent_make_report(tb__agent *agent, const agent_session *asker, char **out);
/* Answers the threads that have asked. */
void tb__agent_serve_reports(tb__agent *agent);

#endif
