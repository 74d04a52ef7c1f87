/* The struct of a transfer, for transfer.c (its steps) and transfer_wait.c (its state, and waiting for it). Guarded by
 * the loop's lock. */
#ifndef TB_BUS_TRANSFER_INSIDE_H
#define TB_BUS_TRANSFER_INSIDE_H

#include "bus/exchange.h"

/* The part of a transfer that goes through one pair. */
typedef struct tb__transfer_part {
    tb__exchange *exchange;
    tb__engine *engine; /* of a receive; otherwise NULL */
    tb__engine *group;  /* of this process's own side */
    tb__flow *flow;     /* NULL: it is skipped ... */
    tb_status status;   /* ... for this reason */
    char *why;
} tb__transfer_part;

/* Holds a stream until an event. */
typedef struct tb__transfer_gate {
    tb_event event;
    tb__gate *gate;
    const tb__device_ops *ops;
} tb__transfer_gate;

struct tb_transfer {
    tb__bus_object base; /* first */
    tb__task task;
    tb_batch *batch;
    bool is_send;
    bool has_ended;
    bool is_late;
    bool has_told;       /* with whole_group: the lead knows that this rank's part has ended */
    bool is_undelivered; /* with whole_group: tb__transfer_delivered will inform the lead */
    tb_status status;    /* of one that has ended */
    char why[TB__WHY_MAX];
    const tb__leg *failed; /* the first leg that failed; the others go on */
    unsigned events;
    int64_t deadline_ms;
    double begun, ended;
    tb__phases phases;
    bool has_news; /* the state has changed since it was last told */
    int event;     /* an eventfd, readable while it has; -1: nobody has asked for it */
    tb_transfer_opts opts;
    int64_t told;         /* bytes_done at the last call of the progress function */
    size_t nended;        /* legs */
    uint32_t groups_done; /* of all pairs, at the last step */
    TB_VEC(tb__transfer_gate) gates;
    size_t nparts;
    tb__transfer_part parts[];
};

/* NULL: that part is skipped. */
static inline tb__leg *tb__transfer_leg(const tb_transfer *t, size_t i) {
    return t->parts[i].flow ? tb__flow_leg(t->parts[i].flow, t->is_send) : NULL;
}

/* Opens the gates whose events have happened; all, if the transfer has finished with the tensors. Needs the lock. */
void tb__transfer_open_gates(tb_transfer *t);
/* Records a point on the stream for a transfer of the batch; NULL: all of its tensors are in host memory. */
tb_status tb__batch_record_stream(tb_batch *batch, const void *stream, tb__stream_point **out);

/* The events (a set of tb_event) of a part that is not skipped. */
unsigned tb__part_events(const tb_transfer *t, const tb__transfer_part *p);

/* With the lock held. */
void tb__transfer_get_state(const tb_transfer *t, tb_transfer_state *out);

#endif
