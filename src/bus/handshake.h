/* A handshake: processes that have agreed to meet under a name. Each sends all of them a *manifest*, to the world's
 * port, because it does not know theirs yet, and learns their ports from what they send. What comes before this process
 * has the handshake is kept until it has. Who receives a manifest says so, and a manifest *counts* once its sender has
 * ours: one that is left over from a handshake of the same name never does. Whoever leaves tells the others.
 *
 * Embedded in what is met about. All of this needs the loop's lock. */
#ifndef TB_BUS_HANDSHAKE_H
#define TB_BUS_HANDSHAKE_H

#include "base/mem.h"
#include "flow/flow.h"

typedef struct tb__handshake tb__handshake;
struct tb__handshake {
    tb__port port; /* first. Its callbacks are the owner's */
    tb_world *world;
    char *key; /* the name, alike for all who meet */
    size_t npeers;
    tb__peer **peers;   /* each rank once, ascending, this one too */
    uint32_t *ports;    /* 0: not known */
    bool *is_confirmed; /* its manifest is about this very handshake */
    bool *must_resend;  /* has to be told our manifest again, when it comes back */
    bool *is_gone;
    size_t nunconfirmed; /* whose manifests do not count yet */
    tb_status status;    /* of one that failed; those who come later are told why */
    char why[TB__WHY_MAX];
    /* Called by the driver, with what the peer added to its message. Only `broken` is optional. */
    tb_status (*send_manifest)(tb__handshake *handshake, size_t peer); /* our manifest */
    void (*on_manifest)(tb__handshake *handshake, size_t peer, tb__unpack *manifest);
    void (*on_confirmed)(tb__handshake *handshake, size_t peer); /* its manifest counts now */
    void (*on_broken)(tb__handshake *handshake, size_t peer, tb_status status, const char *why); /* for this peer */
    void (*on_gone)(tb__handshake *handshake, size_t peer, tb__unpack *goodbye);
    tb__handshake *next;
};

/* A manifest of a handshake that this process does not have yet. */
typedef struct tb__early_manifest {
    tb__peer *from;
    char *key;
    uint32_t port;
    unsigned char *data;
    size_t nbytes;
} tb__early_manifest;

/* Peers may be listed twice. The callbacks must have been set. `what` is for sentences. After a failure, too, there is
 * something to leave. */
tb_status tb__handshake_init(tb__handshake *handshake, tb_world *world, const char *key, const char *what,
                             tb__peer *const *peers, size_t npeers);
/* For `tell`. Takes over what is packed. */
tb_status tb__handshake_send_manifest(tb__handshake *handshake, size_t to, tb__pack *manifest);
/* Tells everybody, and takes what came early. */
tb_status tb__handshake_announce(tb__handshake *handshake);
/* What the peer has said does not count any more: it may come again. */
void tb__handshake_forget(tb__handshake *handshake, size_t peer);
/* It has failed, for the reason in tb_error_detail. With `tell` the others hear of it. */
void tb__handshake_break(tb__handshake *handshake, tb_status status, bool tell);
void tb__handshake_send_broken(tb__handshake *handshake); /* one that has failed without that: now */
/* Says goodbye to all. */
void tb__handshake_leave(tb__handshake *handshake, const tb__pack *goodbye);
void tb__handshake_fini(tb__handshake *handshake);

size_t tb__handshake_find(const tb__handshake *handshake, const tb__peer *peer); /* TB__NOWHERE: not in it */
bool tb__handshake_exists(const tb_world *world, const char *key);

/* For the world. */
void tb__handshake_on_message(tb__port *world_port, tb__peer *from, tb__unpack *message);
void tb__handshake_on_lost(tb_world *world, const tb__peer *peer);
void tb__early_manifest_fini(tb__early_manifest *early);

#endif
