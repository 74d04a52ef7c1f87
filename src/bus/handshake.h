/* A handshake among all ranks of an exchange or a copy service, found by a name (the key) that all of them use. Each
 * rank sends every rank a *manifest*. Manifests go to the world's port, because the ports of the handshake are not
 * known yet; a manifest tells the port of its sender. A manifest that arrives before this process has made the
 * handshake is kept until then. The receiver of a manifest confirms it. A peer is *confirmed* when it has confirmed our
 * manifest: the manifest of an earlier handshake with the same name never leads to that. A rank that leaves sends a
 * goodbye to all.
 *
 * Embedded in its owner. All functions need the loop's lock. */
#ifndef TB_BUS_HANDSHAKE_H
#define TB_BUS_HANDSHAKE_H

#include "base/mem.h"
#include "flow/flow.h"

typedef struct tb__handshake tb__handshake;
struct tb__handshake {
    tb__port port; /* first. Its callbacks are the owner's */
    tb_world *world;
    char *key; /* the same on all ranks */
    size_t npeers;
    tb__peer **peers;   /* each rank once, ascending, this one too */
    uint32_t *ports;    /* 0: not known */
    bool *is_confirmed; /* the peer has our manifest, so its own belongs to this handshake */
    bool *must_resend;  /* our manifest is sent again when its next one arrives */
    bool *is_gone;
    size_t nunconfirmed; /* peers that are not confirmed */
    tb_status status;    /* not TB_OK: it has failed, and whoever sends a manifest is told why */
    char why[TB__WHY_MAX];
    /* Callbacks, from the driver. The last argument is what the peer added to its message. `on_broken` is optional. */
    tb_status (*send_manifest)(tb__handshake *handshake, size_t peer); /* calls tb__handshake_send_manifest */
    void (*on_manifest)(tb__handshake *handshake, size_t peer, tb__unpack *manifest);
    void (*on_confirmed)(tb__handshake *handshake, size_t peer); /* the peer is confirmed */
    void (*on_broken)(tb__handshake *handshake, size_t peer, tb_status status,
                      const char *why); /* the peer says that the handshake has failed */
    void (*on_gone)(tb__handshake *handshake, size_t peer, tb__unpack *goodbye);
    tb__handshake *next;
};

/* A manifest for a handshake that this process has not made yet. */
typedef struct tb__early_manifest {
    tb__peer *from;
    char *key;
    uint32_t port;
    unsigned char *data;
    size_t nbytes;
} tb__early_manifest;

/* The callbacks must have been set. A peer may be listed twice. `what` names the owner in error messages. After a
 * failure, too, tb__handshake_fini has to be called. */
tb_status tb__handshake_init(tb__handshake *handshake, tb_world *world, const char *key, const char *what,
                             tb__peer *const *peers, size_t npeers);
/* For `send_manifest`. Takes over the pack. */
tb_status tb__handshake_send_manifest(tb__handshake *handshake, size_t to, tb__pack *manifest);
/* Sends our manifest to all peers, and takes manifests that arrived early. */
tb_status tb__handshake_announce(tb__handshake *handshake);
/* The peer has left, and may come again: drops what it has sent. */
void tb__handshake_forget(tb__handshake *handshake, size_t peer);
/* Marks it as failed, for the reason in tb_error_detail. `tell`: also informs the peers. */
void tb__handshake_break(tb__handshake *handshake, tb_status status, bool tell);
void tb__handshake_send_broken(tb__handshake *handshake); /* informs the peers, if that was not done at once */
/* Sends a goodbye to all peers. */
void tb__handshake_leave(tb__handshake *handshake, const tb__pack *goodbye);
void tb__handshake_fini(tb__handshake *handshake);

size_t tb__handshake_find(const tb__handshake *handshake, const tb__peer *peer); /* TB__NOWHERE: not in it */
bool tb__handshake_exists(const tb_world *world, const char *key);

/* Called by the world. */
void tb__handshake_on_message(tb__port *world_port, tb__peer *from, tb__unpack *message);
void tb__handshake_on_lost(tb_world *world, const tb__peer *peer);
void tb__early_manifest_fini(tb__early_manifest *early);

#endif
