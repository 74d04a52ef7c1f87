/* A handshake among all ranks of an exchange or a copy service, found by a name (the key) that all of them
 * use. Each rank has a *manifest*, with its contribution and the port for messages. Ranks send their
 * manifests to their *lead*: the first rank of their side of a pair. The leads exchange the manifests they
 * get; when a lead has all manifests, of both sides, its owner has it send them to the members of its side
 * (tb__handshake_tell_members). So a rank sends one message, gets one, and is connected with its lead
 * only.
 *
 * Manifests go to the world's port, because the ports of the handshake are not known yet. One that arrives
 * before a lead has made the handshake is kept until then. A member that gets all manifests finds its own
 * among them, with its port: so they are of this handshake, and not of an earlier one with the same name.
 *
 * A rank that leaves says goodbye to its lead and to all connected peers, so that the goodbye comes after
 * its other messages; the lead informs the rest. When a lead leaves before a member has all manifests, the
 * member sends it its own again: it may come back. It is the same with failures.
 *
 * Embedded in its owner. All functions need the loop's lock. */
#ifndef TB_BUS_HANDSHAKE_H
#define TB_BUS_HANDSHAKE_H

#include "base/mem.h"
#include "flow/flow.h"
#include "loop/comm.h"

/* The state of one rank. */
typedef struct tb__handshake_rank {
    size_t lead;        /* the position of its lead */
    bool is_confirmed;  /* its manifest is here */
    bool is_gone;       /* it has left */
    uint32_t carriers;  /* transports for memory of devices that it has, too (loop/comm.h) */
    tb__pack manifest;  /* at leads, for their members */
    tb__pack goodbye;   /* of one that has left: at leads, and where it came before the manifest */
    uint32_t gone_port; /* 0: none; the port of such a goodbye */
} tb__handshake_rank;

typedef struct tb__handshake tb__handshake;
struct tb__handshake {
    tb__port port; /* first. Its callbacks are the owner's */
    tb_world *world;
    char *key; /* the same on all ranks */
    size_t npeers;
    tb__peer **peers; /* each rank once, ascending, this one too */
    uint32_t *ports;  /* theirs; 0: not known */
    tb__handshake_rank *ranks;
    size_t self;         /* this rank's position */
    size_t leads[2];     /* the same position twice if there is one */
    bool has_told;       /* the members of this lead have all manifests */
    size_t nunconfirmed; /* peers that are not confirmed */
    size_t missing;      /* by the lead's last answer: a rank that has not sent its manifest; npeers: no answer yet */
    size_t nhave;        /* likewise: how many ranks have */
    tb_status status;    /* not TB_OK: it has failed, and ranks that send a manifest get the reason */
    char why[TB__WHY_MAX];
    tb__device *device;                     /* whose memory messages may be in; set before the manifest is sent. ... */
    int unit;                               /* ... Its unit. NULL: none */
    unsigned char comm_id[TB_COMM_ID_SIZE]; /* of the first rank */
    tb__comm *comm;                         /* among all ranks; NULL: none */
    /* Callbacks, from the driver. The last argument is the owner's part of the message. `on_broken` is optional. */
    void (*pack_manifest)(tb__handshake *handshake, tb__pack *manifest);
    void (*on_manifest)(tb__handshake *handshake, size_t peer, tb__unpack *manifest);
    void (*on_confirmed)(tb__handshake *handshake, size_t peer); /* the peer is confirmed */
    void (*on_broken)(tb__handshake *handshake, size_t peer, tb_status status,
                      const char *why); /* the peer says that the handshake has failed */
    void (*on_gone)(tb__handshake *handshake, size_t peer, tb__unpack *goodbye);
    /* The communicator is ready, or has failed (tb__comm_opts.changed). */
    void (*on_comm)(tb__handshake *handshake);
    tb__handshake *next;
};

/* A manifest for a handshake that this process has not made yet. */
typedef struct tb__early_manifest {
    const tb__peer *from; /* the connection it came by */
    int32_t rank;         /* whose manifest it is */
    uint64_t incarnation;
    char *key;
    uint32_t port;
    unsigned char *data;
    size_t nbytes;
} tb__early_manifest;

/* The callbacks must have been set. A peer may be listed twice. sides[i] is 0 or 1 for peers[i]; the first peer of each
 * side is its lead. `what` names the owner in error messages. After a failure, too, tb__handshake_fini has to be
 * called. */
tb_status tb__handshake_init(tb__handshake *handshake, tb_world *world, const char *key, const char *what,
                             tb__peer *const *peers, const int *sides, size_t npeers);
/* Sends our manifest to the lead, and takes manifests that arrived early. */
tb_status tb__handshake_announce(tb__handshake *handshake);
bool tb__handshake_is_lead(const tb__handshake *handshake);
/* With all manifests: begins to make a communicator, if there is a transport for it that all ranks have. All ranks call
 * it with the same nbytes. */
tb_status tb__handshake_make_comm(tb__handshake *handshake, size_t nbytes);
/* Whether the communicator is not ready yet, or has never been. */
bool tb__handshake_awaits_comm(const tb__handshake *handshake);
/* At a lead that has all manifests: sends them to the members of its side, once. */
void tb__handshake_tell_members(tb__handshake *handshake);
/* The peer has left, and may come again: drops its messages. */
void tb__handshake_forget(tb__handshake *handshake, size_t peer);
/* Marks it as failed, for the reason in tb_error_detail. `tell`: also informs the peers. */
void tb__handshake_break(tb__handshake *handshake, tb_status status, bool tell);
void tb__handshake_send_broken(tb__handshake *handshake); /* informs the peers, if that was not done at once */
/* Sends a goodbye, which begins with a u32: whether this rank had agreed. */
void tb__handshake_leave(tb__handshake *handshake, const tb__pack *goodbye);
void tb__handshake_fini(tb__handshake *handshake);

/* As tb__loop_wait. Members ask their leads for missing ranks now and then, and shortly before the deadline, so that
 * tb__handshake_find_missing can name one. */
bool tb__handshakes_wait(tb_world *world, bool (*is_true)(void *arg), void *arg, int64_t deadline_ms);
/* A rank whose manifest is missing, as far as this one knows; a lead that has not answered counts as missing, too.
 * `nhave`: the number of ranks that have sent theirs. TB__NOWHERE: none is missing. */
size_t tb__handshake_find_missing(const tb__handshake *handshake, size_t *nhave);

/* Other handshakes for which this rank has the peer's manifest, but which it has not made itself: their keys, one a
 * call. *next is 0 at first. NULL: there are no more. Leads have those of their members, and of the other lead. */
const char *tb__handshake_next_early(const tb__handshake *handshake, size_t peer, size_t *next);

size_t tb__handshake_find(const tb__handshake *handshake, const tb__peer *peer); /* TB__NOWHERE: not in it */
bool tb__handshake_exists(const tb_world *world, const char *key);

/* Called by the world. */
void tb__handshake_on_message(tb__port *world_port, tb__peer *from, tb__unpack *message);
void tb__handshake_on_lost(tb_world *world, const tb__peer *peer);
void tb__early_manifest_fini(tb__early_manifest *early);

#endif
