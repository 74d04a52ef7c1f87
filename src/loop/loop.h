/* What drives a process's share of the bus: open transports, peers, the messages they exchange, and work to be done
 * step by step.
 *
 * One lock guards all of it, and everything that hangs on it (flows, transfers). One thread at a time is the *driver*:
 * it moves the transports on, which calls back with the lock held, and steps the tasks, which may let go of the lock
 * while they copy. The driver is a thread of the loop's own, or, in a manual loop, whoever waits or calls
 * tb__loop_progress. It sleeps on file descriptors. */
#ifndef TB_LOOP_LOOP_H
#define TB_LOOP_LOOP_H

#include "base/index.h"
#include "base/pack.h"
#include "base/process.h"
#include "device/device.h"
#include "transport/transport.h"

typedef struct tb__loop tb__loop;

/* Something that is done in steps. `step` is called by the driver, with the lock held, whenever anything has happened
 * and at the deadline; it returns whether it did anything. It may let go of the lock with tb__loop_unlock. */
typedef struct tb__task tb__task;
struct tb__task {
    bool (*step)(tb__task *task);
    int64_t deadline_ms; /* INT64_MAX: none */
    bool is_stepping;
    tb__task *next;
};

/* Work for a device. The driver gives it to the device, and calls `done` once, with the lock held, never from inside of
 * another function here; the fence says how it went. What `run` points to stays until then. */
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

    /* The loop's. */
    bool is_begun, is_cancelled;
    tb__submitted *next;
};

/* A connection with another process on the bus, or with this one. Lasts as long as the loop. A process that was lost,
 * and is connected again, is another peer: what used the connection before does not go on. */
typedef struct tb__peer {
    tb__loop *loop;
    int32_t rank; /* bus rank */
    uint64_t incarnation;
    int32_t wire;     /* what transports call it: no other incarnation has that number */
    uint64_t contact; /* a hash of it */
    const tb_transport *transport;
    char *label;  /* "rank 6 (inference 2)" */
    char *host;   /* the host's id */
    bool is_lost; /* and why */
    char *why;
    size_t nunsent;    /* messages to it that the transport has not taken yet */
    bool is_told;      /* the ports have been told so */
    bool is_over;      /* the transport has said that it is lost, too */
    uint64_t moved[2]; /* bytes of tensors that came from it, and that went to it */
    tb_op receive;     /* of the next message */
    tb_piece receive_piece;
    unsigned char *inbox, *body;
    bool is_in_message;            /* the frame in the inbox announces a message of which parts are to come */
    size_t received;               /* of them, in `body` */
    bool is_receive_due;           /* there was no memory to receive the next part or frame */
    struct tb__outgoing *unposted; /* a message of which there was no memory to post all parts; NULL: none */
    tb__task again;                /* tries both once more */
    struct tb__peer *next;
} tb__peer;

/* Where messages go in a process: numbers are given by the loop, told to peers by messages, and never used twice. */
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
    const char *transport; /* "auto", or the only one */
    const char *host;      /* what processes of this host have in common; NULL: what the system says */
    bool is_local;         /* nobody is on another host: "auto" need not open transports that get there */
    bool manual;
} tb__loop_opts;

enum {
    TB__PORT_WORLD = 1,      /* the first port that is added */
    TB__CONTACT_PREFIX = 64, /* bytes of a contact that are equal for processes on one host */
};

tb_status tb__loop_create(const tb__loop_opts *opts, tb__loop **out);
/* Tasks and ports must have been removed. */
void tb__loop_destroy(tb__loop *loop);

/* How others reach this process; to be freed. */
tb_status tb__loop_contact(tb__loop *loop, tb__pack *out);

void tb__loop_lock(tb__loop *loop);
void tb__loop_unlock(tb__loop *loop);

/* Gives up at the deadline: then false. */
bool tb__loop_lock_until(tb__loop *loop, int64_t deadline_ms);
/* Whether this thread is the driver, in a function that the driver calls. With or without the lock. */
bool tb__loop_is_driver(const tb__loop *loop);
/* In a forked child: whether no thread had the lock when it was forked, so that what it guards is whole. */
bool tb__loop_was_unlocked(tb__loop *loop);

/* All below: with the lock held, unless it says otherwise. */

void tb__loop_add_port(tb__loop *loop, tb__port *port);
void tb__loop_remove_port(tb__loop *loop, tb__port *port);
void tb__loop_add_task(tb__loop *loop, tb__task *task);
/* Returns when no step of it is under way. */
void tb__loop_remove_task(tb__loop *loop, tb__task *task);

/* TB_REFUSED if the process has another minor version: what ranks say to each other may change with it. Any thread. */
tb_status tb__contact_check_version(const void *contact, size_t nbytes, const char *label);

/* A process by its contact; the same one for the same rank and incarnation, but for one that was lost: it is connected
 * again, if its transport can do that. If not, or not now, the peer is the lost one. Its messages are received from
 * then on. */
tb_status tb__loop_connect(tb__loop *loop, int32_t rank, uint64_t incarnation, const void *contact, size_t nbytes,
                           const char *label, tb__peer **out);

/* The last connection with it; NULL: none. */
tb__peer *tb__loop_find_peer(tb__loop *loop, int32_t rank, uint64_t incarnation);
/* Whether tb__loop_connect may connect it again if it is lost. */
bool tb__peer_can_reconnect(const tb__peer *peer);
/* False while a connection that was there before the last tb__loop_connect, or takes the place of a lost one, has not
 * carried an answer of the peer since then. Waiters are woken when that changes. */
bool tb__peer_is_reached(const tb__peer *peer);
/* As tb__transport_post, but nothing is posted to a peer that is lost: there may be another connection by then. */
tb_status tb__peer_post(const tb__peer *peer, tb_op *op);
const tb__peer *tb__loop_peers(const tb__loop *loop); /* the last one met; the others follow */

/* Sends a message to one of the peer's ports; takes over what is packed. To a peer that is lost it goes nowhere: loss
 * is told through the ports, in the driver's next turn. Messages to one peer arrive in order. */
tb_status tb__loop_send(tb__peer *peer, uint32_t port, tb__pack *message);

/* The device that the memory is of. */
tb__device *tb__loop_find_device(const tb__loop *loop, const void *address, size_t nbytes);
/* Whether this process, its peers and its transports can use it as they find it. */
bool tb__loop_is_host_memory(const tb__loop *loop, const void *address);
void tb__loop_submit(tb__loop *loop, tb__submitted *submitted);
/* It is done soon, one way or the other. */
void tb__loop_cancel(tb__loop *loop, tb__submitted *submitted);

/* A tag for a message of data that this process has used for no other. */
uint64_t tb__loop_new_tag(tb__loop *loop);

/* The driver is to look at its tasks (again). */
void tb__loop_wake(tb__loop *loop);
/* The same from any thread, without the lock. */
void tb__loop_poke(tb__loop *loop);

/* Something that others may be waiting for has come about. */
void tb__loop_signal(tb__loop *loop);

/* Waits until `is_true`, or the deadline: false. Drives where nobody else does. */
bool tb__loop_wait(tb__loop *loop, bool (*is_true)(void *arg), void *arg, int64_t deadline_ms);

/* Sets how long the driver looks before it sleeps. */
void tb__loop_set_spin(tb__loop *loop, int microseconds);

/* Readable when there is something to drive. Without the lock. */
int tb__loop_fd(const tb__loop *loop);
/* One turn of a manual loop. Without the lock. */
void tb__loop_progress(tb__loop *loop);

/* Seconds of CLOCK_MONOTONIC, for timings. */
double tb__seconds(void);

#endif
