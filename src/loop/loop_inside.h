/* struct tb__loop, for the files of this folder. */
#ifndef TB_LOOP_LOOP_INSIDE_H
#define TB_LOOP_LOOP_INSIDE_H

#include "base/mem.h"
#include "loop/loop.h"

#include <stdatomic.h>

enum { TB__MAX_TRANSPORTS = 8, TB__MAX_DEVICES = 4 };

/* Tags: one for messages between loops, the rest for data. */
enum { TB__TAG_MESSAGE = 0 };
#define TB__TAG_DATA ((uint64_t)1 << 63)

/* What an open transport calls its tb_transport_env.arg. */
typedef struct tb__loop_transport {
    tb__loop *loop;
    const tb_transport *transport;
} tb__loop_transport;

struct tb__loop {
    int32_t rank, transport_rank;
    pthread_mutex_t lock;
    pthread_cond_t changed;
    pthread_t thread;
    bool has_thread, stopping;
    bool is_driven;               /* some thread is the driver */
    bool is_in_step;              /* the driver checks everything before it sleeps */
    _Atomic(const void *) driver; /* identifies the thread that runs a step; NULL: none does */
    bool step_again;
    int spin_us;
    int epoll, wake, timer;
    bool has_news;    /* `changed` is to be signalled when the lock is released */
    bool is_poked;    /* `wake` is readable */
    int64_t timer_ms; /* when the timer expires; INT64_MAX: it is not set */
    char host[TB__CONTACT_PREFIX];
    int64_t begun;                               /* in seconds since 1970 */
    tb_transport transports[TB__MAX_TRANSPORTS]; /* in order of preference */
    tb__loop_transport callers[TB__MAX_TRANSPORTS];
    size_t ntransports;
    bool is_transport_requested;             /* opts name one of them, which is used for all peers; or ... */
    const tb_transport_ops *requested_comms; /* ... one with communicators, and others for all else; NULL: not so */
    char missing[256];                       /* transports that could not be opened, and why */
    tb__device *devices[TB__MAX_DEVICES];    /* the host last */
    _Atomic bool is_device_used[TB__MAX_DEVICES]; /* memory of it was found in use */
    size_t ndevices;
    tb__submitted *submitted; /* not done yet */
    size_t nbegun_waiters;    /* threads to be woken when devices have begun some of it */
    tb__peer *peers;
    tb__arena peer_memory;        /* of the peers' structs */
    TB_VEC(tb__peer *) all_peers; /* the same, oldest first */
    tb__index peer_index;         /* of all_peers, by transport rank */
    TB_VEC(int32_t) strangers;    /* transport ranks of processes that have connected to this one and are unknown */
    TB_VEC(tb__peer *) met;       /* peers to be connected, because they have connected to this process */
    TB_VEC(tb__peer *) ending;    /* peers with an expected_loss */
    size_t nunreported;           /* lost peers that have not been reported to the ports */
    tb__port *ports;
    tb__task *tasks;
    struct tb__region **regions; /* by hash */
    size_t nregion_buckets, nregions;
    pthread_mutex_t adopted_lock; /* guards the list, in which any thread looks */
    struct tb__adopted *adopted;
    struct tb__quarantine *quarantine;
    bool is_all_in_quarantine; /* memory was too short to record which */
    struct tb__share *shares;
    struct tb__import *imports;
    struct tb__revocation_watch *revocation_watches;
    uint64_t last_share;
    uint64_t task_changes;
    uint32_t last_port;
    uint64_t last_tag;
};

int32_t tb__transport_rank(int32_t rank, uint64_t incarnation);
void tb__peer_on_lost(void *arg, int32_t transport_rank, const char *why);
/* Marks the first `count` of `ending` as lost. */
void tb__peers_mark_ended(tb__loop *loop, size_t count);
/* Reports lost peers to the ports. Not during a step of a task, because ports may end the task's work. */
void tb__peers_report_losses(tb__loop *loop);
void tb__peer_on_reached(void *arg, int32_t transport_rank);
/* Connects peers that have connected to this process. Not in a callback of a transport. */
void tb__peers_open_met(tb__loop *loop);
void tb__peers_free(tb__loop *loop);
tb__peer *tb__loop_find_by_transport_rank(tb__loop *loop, int32_t transport_rank); /* NULL: there is none */

#endif
