/* The event loop of a process: its open transports, its peers, the messages they exchange, and tasks that run in steps.
 *
 * One lock guards the loop and its users (flows, transfers). One thread at a time is the *driver*: it makes progress on
 * the transports, which call back with the lock held, gives submitted work to the devices, and steps the tasks. Copies
 * are asynchronous: a task submits them, and the driver calls `done` when a device has finished; the lock is free while
 * devices make progress. The driver is the loop's own thread; in a manual loop, any thread that waits or calls
 * tb__loop_progress. It sleeps on file descriptors. */
#ifndef TB_LOOP_LOOP_H
#define TB_LOOP_LOOP_H

#include "base/index.h"
#include "base/pack.h"
#include "base/process.h"
#include "device/device.h"
#include "transport/transport.h"

typedef struct tb__loop tb__loop;

/* Work that is done in steps. `step` is called by the driver, with the lock held, after every event and at the
 * deadline; it returns whether it made progress. It may release the lock with tb__loop_unlock. */
typedef struct tb__task tb__task;
struct tb__task {
    bool (*step)(tb__task *task);
    int64_t deadline_ms; /* INT64_MAX: none */
    bool is_stepping;
    tb__task *next;
};

/* Work for a device. The driver gives it to the device, and calls `done` once, with the lock held, never from inside of
 * another function here; the fence has the result. The memory that `run` points to must stay until then. */
typedef struct tb__submitted tb__submitted;
struct tb__submitted {
    tb__device *device;
    tb__job *job; /* NULL: the checksum of some bytes */
    tb__run run;
    const void *bytes;
    size_t nbytes;
    uint64_t sum;
    void (*done)(tb__submitted *submitted);
    tb__fence fence;

    /* Written by the loop. */
    bool is_begun, is_cancelled;
    tb__submitted *next;
};

/* A connection with another process on the bus, or with this one. It exists as long as the loop. A lost process that is
 * connected again is a new peer; users of the old connection do not continue on the new one. */
typedef struct tb__peer {
    tb__loop *loop;
    int32_t rank; /* bus rank */
    uint64_t incarnation;
    int32_t transport_rank; /* its rank in transports; no other incarnation has it */
    uint64_t contact;       /* a hash of it */
    const tb_transport *transport;
    /* In memory after the struct, because most peers are never connected, and there may be thousands. */
    const char *label;   /* "rank 6 (inference 2)" */
    const char *host;    /* id of its machine */
    const void *address; /* in `transport` */
    size_t address_nbytes;
    bool is_open; /* connected; it is when either end has first used the connection */
    bool is_met;  /* it has connected to this process, which has to connect to it, too */
    bool is_lost;
    char *why;
    char *expected_loss;  /* why it will be lost once its messages have been received; NULL: it won't */
    size_t nunsent;       /* messages to it that the transport has not taken yet */
    bool loss_reported;   /* to all ports */
    bool is_disconnected; /* the transport has reported the loss, too */
    uint64_t moved[2];    /* tensor bytes received from it, and sent to it */
    /* Buckets that were packed on a device and sent to it, and timed (flow/device_stage.c): how many, and the best
     * bytes per second; through host memory, and from the device. */
    struct tb__timed {
        uint32_t count;
        double rate;
    } timed[2];
    struct tb__next_receive *receive; /* NULL: it was never connected */
    unsigned char *inbox, *message_bytes;
    bool is_receiving;             /* the first receive was posted */
    bool is_in_message;            /* the inbox holds the frame of a long message whose parts follow */
    size_t received;               /* bytes of them, in message_bytes */
    bool is_receive_due;           /* posting the next receive failed for lack of memory */
    struct tb__outgoing *unposted; /* a message whose parts could not all be posted for lack of memory; NULL: none */
    tb__task retry_task;           /* posts both again */
    struct tb__peer *next;
} tb__peer;

/* A destination of messages in a process. The loop assigns ids, never twice; users send them to peers in messages. */
typedef struct tb__port tb__port;
struct tb__port {
    uint32_t id;
    /* Both are called by the driver, with the lock held, and never from inside of another function here. They must not
     * remove ports. */
    void (*message)(tb__port *port, tb__peer *from, tb__unpack *message);
    void (*lost)(tb__port *port, tb__peer *peer);
    tb__port *next;
};

typedef struct tb__loop_opts {
    int32_t rank;
    uint64_t incarnation;
    const char *token;     /* of the bus; NULL: none */
    const char *transport; /* "auto", or the only one */
    const char *host;      /* id that all processes of this machine share; NULL: read from the system */
    bool is_local;         /* all processes are on this machine: "auto" opens no network transports */
    bool manual;
} tb__loop_opts;

enum {
    TB__PORT_LOOP = 0,       /* the loop's own */
    TB__PORT_WORLD = 1,      /* the first port that is added */
    TB__CONTACT_PREFIX = 64, /* first bytes of a contact; equal for processes on one machine */
};
#define TB__PORT_TRANSPORTS UINT32_MAX /* of transports with communicators (comm.h) */

tb_status tb__loop_create(const tb__loop_opts *opts, tb__loop **out);
/* Tasks and ports must have been removed. */
void tb__loop_destroy(tb__loop *loop);

/* The addresses of this process, for peers; the caller frees it. */
tb_status tb__loop_contact(tb__loop *loop, tb__pack *out);

void tb__loop_lock(tb__loop *loop);
void tb__loop_unlock(tb__loop *loop);

/* False: the deadline has passed. */
bool tb__loop_lock_until(tb__loop *loop, int64_t deadline_ms);
/* Whether this thread is the driver, in a function that the driver calls. With or without the lock. */
bool tb__loop_is_driver(const tb__loop *loop);
/* In a forked child: whether no thread held the lock at the fork, so that the loop's state is consistent. */
bool tb__loop_was_unlocked(tb__loop *loop);

/* All below: with the lock held, unless it says otherwise. */

void tb__loop_add_port(tb__loop *loop, tb__port *port);
void tb__loop_remove_port(tb__loop *loop, tb__port *port);
void tb__loop_add_task(tb__loop *loop, tb__task *task);
/* Waits until no step of it is running. */
void tb__loop_remove_task(tb__loop *loop, tb__task *task);

/* A process's properties in its contact. */
typedef struct tb__contact {
    char host[TB__CONTACT_PREFIX + 1]; /* id of its machine */
    char version[32];
    char transports[96]; /* to others: "shm,ucx" */
    int64_t begun;       /* when it joined, in seconds since 1970; 0: unknown */
} tb__contact;

/* False: it is malformed. Any thread. */
bool tb__contact_read(const void *contact, size_t nbytes, tb__contact *out);

/* TB_REFUSED if the process has another minor version, which may have another protocol. Any thread. */
tb_status tb__contact_check_version(const void *contact, size_t nbytes, const char *label);

/* Adds a process, given its contact. It is connected when a message is first sent to it, or has come from it, or by
 * tb__peer_open; with a transport that does not report strangers, at once. A known rank and incarnation gives the same
 * peer; an existing connection is tested (tb__peer_is_reached). If that peer was lost, it is connected again as a new
 * peer; where the transport can't do that, or not now, *out is the lost peer. */
tb_status tb__loop_meet(tb__loop *loop, int32_t rank, uint64_t incarnation, const void *contact, size_t nbytes,
                        const char *label, tb__peer **out);
/* Connects the peer, if that has not been done. A peer that is gone is marked as lost. */
tb_status tb__peer_open(tb__peer *peer);
/* Another process reports that the peer is lost. If there is no connection with the peer, it is lost once its messages
 * have been received. */
void tb__peer_report_lost(tb__peer *peer, const char *why);

/* The last connection with it; NULL: none. */
tb__peer *tb__loop_find_peer(tb__loop *loop, int32_t rank, uint64_t incarnation);
/* Whether tb__loop_meet can connect the peer again after a loss. */
bool tb__peer_can_reconnect(const tb__peer *peer);
/* False after a tb__loop_meet of a known or lost peer until the peer has answered. Waiters are woken when that
 * changes. */
bool tb__peer_is_reached(const tb__peer *peer);
/* Whether messages to and from the peer can be in memory of the device. */
bool tb__peer_carries(const tb__peer *peer, const tb__device *device);
/* As tb__transport_post, but fails if the peer is lost: its transport rank may belong to a newer connection. */
tb_status tb__peer_post(tb__peer *peer, tb_op *op);
tb__peer *tb__loop_peers(const tb__loop *loop); /* a list, newest first */
/* Whether further losses will be reported to ports in this step of the driver. */
bool tb__loop_has_unreported_losses(const tb__loop *loop);
/* The number of ranks on this machine that are known and not lost, this one included. */
int32_t tb__loop_count_near(const tb__loop *loop);

/* Sends a message to one of the peer's ports; takes ownership of `message`. A message to a lost peer is dropped; ports
 * hear of the loss in the driver's next step. Messages to one peer arrive in order. */
tb_status tb__loop_send(tb__peer *peer, uint32_t port, tb__pack *message);

/* The device that owns the memory. From the first time on that it is not the host, the process counts as a user of that
 * device. Any thread, with or without the lock. */
tb__device *tb__loop_find_device(tb__loop *loop, const void *address, size_t nbytes);
tb__device *tb__loop_find_memory(tb__loop *loop, const void *address, size_t nbytes, tb__memory *out);
/* Whether CPUs and transports can access the memory directly. */
bool tb__loop_is_host_memory(tb__loop *loop, const void *address);
void tb__loop_submit(tb__loop *loop, tb__submitted *submitted);
/* The same for work that the device has begun. */
void tb__loop_follow(tb__loop *loop, tb__submitted *submitted);
/* `done` is called soon, with TB_CANCELLED or another status. */
void tb__loop_cancel(tb__loop *loop, tb__submitted *submitted);

/* A new tag for a data message. */
uint64_t tb__loop_new_tag(tb__loop *loop);

/* Makes the driver step all tasks (again). */
void tb__loop_wake(tb__loop *loop);

/* Wakes all threads in tb__loop_wait, to check their conditions. */
void tb__loop_signal(tb__loop *loop);

/* Waits until `is_true`; false at the deadline. Drives the loop if no other thread does. */
bool tb__loop_wait(tb__loop *loop, bool (*is_true)(void *arg), void *arg, int64_t deadline_ms);

/* The same for a condition that depends on submitted work which devices have begun. */
bool tb__loop_wait_begun(tb__loop *loop, bool (*is_true)(void *arg), void *arg, int64_t deadline_ms);

/* Sets how long the driver polls before it sleeps. */
void tb__loop_set_spin(tb__loop *loop, int microseconds);

/* Readable when the loop needs progress. Without the lock. */
int tb__loop_fd(const tb__loop *loop);
/* One step of a manual loop. Without the lock. */
void tb__loop_progress(tb__loop *loop);

/* Seconds of CLOCK_MONOTONIC, for timings. */
double tb__seconds(void);

/* Equal for processes that shared memory connects: `given`, or else the machine and its network namespace. */
void tb__get_machine_id(const char *given, char host[TB__CONTACT_PREFIX]);

#endif
