/* Communicators: see tensorbus/transport.h. One carries messages in memory of one device between a fixed set of peers,
 * which are connected by another transport for everything else.
 *
 * All of this needs the loop's lock. */
#ifndef TB_LOOP_COMM_H
#define TB_LOOP_COMM_H

#include "loop/loop.h"

typedef struct tb__comm tb__comm;
struct tb__comm {
    tb__task task; /* first */
    tb__loop *loop;
    const tb_transport *transport;
    tb_comm *handle;
    tb__device *device;
    int unit;          /* of the device */
    size_t nbytes;     /* of its memory, if the transport gives any */
    bool is_requested; /* the program has named the transport */
    bool is_ready, has_failed;
    int64_t report_ms; /* when a failure is reported */
    tb_status status;  /* of the failure */
    void (*changed)(tb__comm *comm);
    void *arg;
};

typedef struct tb__comm_opts {
    uint32_t carriers;       /* that all ranks have */
    const unsigned char *id; /* the first rank's */
    tb__peer *const *peers;  /* in the same order on all ranks */
    size_t npeers, self;
    tb__device *device;
    int unit;
    size_t nbytes;
    /* Called once by the driver, when the communicator is ready (is_ready), and once when it has failed (has_failed),
     * with the reason in tb_error_detail. A failure is reported a moment later, because its cause, a lost rank, may be
     * about to be reported. Must not destroy the communicator. */
    void (*changed)(tb__comm *comm);
    void *arg;
} tb__comm_opts;

/* The open transports that take memory of the device, as bits by their order in the loop; of them, all ranks use the
 * lowest one that all have. If transports with communicators were opened although none was requested, they are not
 * among those for peers that are all near. */
uint32_t tb__comm_carriers(const tb__loop *loop, const tb__device *device, bool are_near);
/* If the program has named a transport with communicators: the device whose memory it takes, and the unit of it that
 * this thread uses. NULL: none. Without the lock. */
tb__device *tb__comm_find_device(tb__loop *loop, int *unit);
/* As names, since other ranks have other transports. */
void tb__comm_pack_carriers(const tb__loop *loop, uint32_t carriers, tb__pack *out);
uint32_t tb__comm_unpack_carriers(const tb__loop *loop, tb__unpack *message);
/* An id for a communicator by one of these, whose first rank is this one; zeros if none has communicators, or makes an
 * id. */
void tb__comm_make_id(const tb__loop *loop, uint32_t carriers, unsigned char id[TB_COMM_ID_SIZE]);

/* *out is NULL if there is no carrier, or the one that is used needs none. */
tb_status tb__comm_create(tb__loop *loop, const tb__comm_opts *opts, tb__comm **out);
void tb__comm_destroy(tb__comm *comm); /* NULL is allowed */

/* Memory of the communicator that its messages have to be in: `nbytes` of opts, once it is ready; NULL: any of the
 * device. */
void *tb__comm_memory(const tb__comm *comm);
/* Whether it takes messages to and from the peer; those of one machine have faster ways. */
bool tb__comm_reaches(const tb__comm *comm, const tb__peer *peer);
/* As tb__peer_post, for one piece of the device's memory. */
tb_status tb__comm_post(const tb__comm *comm, tb__peer *peer, tb_op *op);

/* ---- For the loop ----------------------------------------------------------------------------------------------- */

/* False: the message is malformed. */
bool tb__comms_on_message(tb__peer *from, tb__unpack *message);
void tb__comms_on_lost(const tb__peer *peer);
/* For tb_transport_env; `arg` is its tb__loop_transport. */
tb_status tb__comm_tell(void *arg, int32_t transport_rank, const void *bytes, size_t nbytes);

#endif
