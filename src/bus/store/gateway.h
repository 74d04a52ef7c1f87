/* A client of etcd's JSON gateway: posts a JSON object to an endpoint that answers, and receives one, or a stream of
 * them.
 *
 * Calls may come from several threads at once; each uses a connection of its own, which is kept for later calls. A few
 * dozen are under way at a time, streams aside; the others wait for their turn. */
#ifndef TB_BUS_STORE_GATEWAY_H
#define TB_BUS_STORE_GATEWAY_H

#include "base/process.h"
#include "bus/store/protocol.h"

#include <jansson.h>

typedef struct tb__gateway tb__gateway;

enum { TB__GATEWAY_MAX_ENDPOINTS = 16 };

/* "etcd://host:port,host:port,..." Does not connect yet. With a CA it speaks TLS. With a user it logs in before the
 * first call, and again when etcd does not accept the login any more. */
tb_status tb__gateway_create(const struct tb__store_url *url, tb__gateway **out);

/* No call may be under way. NULL is allowed. */
void tb__gateway_destroy(tb__gateway *gateway);

/* Makes every running call, and all later ones, return TB_LOST with this reason. Only the first reason counts. */
void tb__gateway_stop(tb__gateway *gateway, const char *why);

/* One of several users of a gateway. Zero-initialised; outlives its calls. */
typedef struct tb__gateway_user {
    _Atomic bool is_stopped;
    _Atomic uint64_t ninterrupts;
} tb__gateway_user;

/* The same for the calls of this user: "this side has hung up". */
void tb__gateway_stop_user(tb__gateway *gateway, tb__gateway_user *user);

/* Ends the user's streams that are under way, with TB_TIMEOUT. */
void tb__gateway_interrupt(tb__gateway *gateway, tb__gateway_user *user);

/* gRPC codes with which etcd refuses a request. */
typedef enum tb__etcd_code {
    TB__ETCD_OK = 0,
    TB__ETCD_NOT_FOUND = 5, /* there is no such lease */
    TB__ETCD_TOO_LARGE = 8, /* a message, or the database */
    TB__ETCD_INVALID = 3,
    TB__ETCD_OUT_OF_RANGE = 11,    /* a revision that is compacted, or has not come yet */
    TB__ETCD_UNAUTHENTICATED = 16, /* the login has expired */
} tb__etcd_code;

typedef struct tb__gateway_call {
    const char *path;
    int64_t deadline_ms;
    tb__gateway_user *user; /* NULL: none in particular */
    bool is_urgent;         /* does not wait for its turn, where many calls are under way */
    bool is_not_repeatable; /* once it may have been received, it is not sent again */
    bool is_first;          /* TB_IO at once if no endpoint is there */
    bool ignores_stop;      /* runs although the gateway was stopped */
    /* For a stream: gets the "result" of each object, and returns true to end the stream. After a lost connection the
     * request is sent again, and the stream starts over. */
    bool (*on_result)(void *arg, json_t *result);
    void *arg;

    tb__etcd_code code; /* output: the code with which etcd refused it */
} tb__gateway_call;

/* Tries all endpoints again and again until the deadline: TB_TIMEOUT. Takes the request over; NULL: there was no memory
 * for it. `reply` is for json_decref, and NULL after a stream. */
tb_status tb__gateway_post(tb__gateway *gateway, tb__gateway_call *call, json_t *request, json_t **reply);

#endif
