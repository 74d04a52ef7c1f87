/* The operations of worlds, pairs, batches and transfers, which are the public calls of their names. There are two
 * implementations: the process is on the bus itself (tb__local_...), or an agent is for it (tb__remote_..., in
 * client/). Each of these objects begins with a tb__bus_object, which points to the table of its own; pairs and batches
 * given to one call have the same table.
 *
 * api.c makes the calls, after the checks that both have in common: the object is this process's own, options are
 * complete and valid, names are given. Those below LOCKED are called with the object's lock held. Queries write all of
 * the state, whatever its size says. */
#ifndef TB_BUS_OPS_H
#define TB_BUS_OPS_H

#include "base/process.h"
#include "tensorbus/plan.h"

#include <stdatomic.h>

/* The plan caches of a world, or of its agent. */
typedef struct tb__plans_state {
    size_t kept;          /* plans of models */
    size_t nbytes, limit; /* of them, and of the plans of single tensors */
    uint64_t hits, misses, evicted;
} tb__plans_state;

/* The type, name and parameters of each. */
#define TB__BUS_OPS(OP)                                                                                                \
    OP(tb_status, world_enter, (tb_world * world, const char *group, int32_t index, int32_t size))                     \
    OP(void, world_destroy, (tb_world * world))                                                                        \
    OP(void, world_seat, (const tb_world *world, const char **group, int32_t *index, int32_t *size))                   \
    OP(int32_t, world_rank, (const tb_world *world))                                                                   \
    OP(uint64_t, world_incarnation, (const tb_world *world))                                                           \
    OP(tb_status, world_wait, (tb_world * world, const char *group, int timeout_ms))                                   \
    OP(tb_status, world_groups, (tb_world * world, int timeout_ms, char **out))                                        \
    OP(int, world_fd, (const tb_world *world))                                                                         \
    OP(tb_status, world_progress, (tb_world * world))                                                                  \
    OP(tb_status, world_invalidate, (tb_world * world, const void *base, size_t nbytes))                               \
    OP(void, world_plans, (const tb_world *world, tb__plans_state *out))                                               \
    /* Those with `cancelled`, which may be NULL, fail with TB_CANCELLED once it is set and `wake` was called. */      \
    OP(tb_status, pair_create,                                                                                         \
       (tb_world * world, const char *name, const char *remote_group, const char *layout, const tb_pair_opts *opts,    \
        const atomic_bool *cancelled, tb_pair **out))                                                                  \
    OP(void, pair_destroy, (tb_pair * pair))                                                                           \
    OP(tb_status, batch_create, (tb_world * world, const char *name, const tb_batch_opts *opts, tb_batch **out))       \
    OP(tb_status, batch_add, (tb_batch * batch, tb_pair * pair, const char *name, const tb_tensor *tensor))            \
    OP(tb_status, batch_register, (tb_batch * batch, int timeout_ms, const atomic_bool *cancelled))                    \
    OP(tb_status, batch_signal, (tb_batch * batch, const char *group, uint64_t question, int timeout_ms, bool *out))   \
    OP(void, batch_destroy, (tb_batch * batch))                                                                        \
    OP(tb_status, begin, (tb_batch * batch, bool is_send, const tb_transfer_opts *opts, tb_transfer **out))            \
    OP(tb_status, stream_wait, (tb_transfer * transfer, tb_event event, const void *stream))                           \
    OP(int, transfer_fd, (const tb_transfer *transfer))                                                                \
    OP(void, transfer_destroy, (tb_transfer * transfer))                                                               \
    /* LOCKED */                                                                                                       \
    OP(tb_status, batch_add_pair, (tb_batch * batch, tb_pair * pair))                                                  \
    OP(tb_status, batch_dump, (tb_batch * batch, bool is_send, char **out))                                            \
    OP(tb_status, batch_ir, (tb_batch * batch, bool is_send, tb_ir **out))                                             \
    OP(tb_status, batch_remove_pair, (tb_batch * batch, tb_pair * pair))                                               \
    OP(tb_status, batch_rebind, (tb_batch * batch, const tb_rebinding *tensors, size_t count))                         \
    OP(uint64_t, batch_epoch, (tb_batch * batch))                                                                      \
    OP(tb_status, batch_version, (tb_batch * batch, const tb_pair *pair, uint64_t *version, bool *is_torn))            \
    OP(tb_status, batch_query, (tb_batch * batch, tb_batch_state * out))                                               \
    /* For tb_reshard_execute, of a registered batch: whether this process sends, receives, or both, if `from` is the  \
     * sending group; *to is the receiving one. */                                                                     \
    OP(tb_status, batch_roles, (tb_batch * batch, const char *from, bool *sends, bool *receives, const char **to))     \
    OP(tb_status, wait, (tb_transfer * transfer, tb_event event, int timeout_ms))                                      \
    OP(tb_status, proceed, (tb_transfer * transfer))                                                                   \
    OP(tb_status, wait_group, (tb_transfer * transfer, uint32_t group, int timeout_ms))                                \
    OP(tb_status, transfer_query, (const tb_transfer *transfer, tb_transfer_state *out))                               \
    OP(tb_status, transfer_pair, (const tb_transfer *transfer, const tb_pair *pair, tb_transfer_state *out))           \
    OP(void, cancel, (tb_transfer * transfer))

/* The first member of each of the objects. Objects of a world share the world's. */
typedef struct tb__bus_object {
    const struct tb__bus_ops *ops;
    tb__owner owner;
    void *guard; /* that lock and unlock take */
} tb__bus_object;

typedef struct tb__bus_ops {
    void (*lock)(void *guard);
    void (*unlock)(void *guard);
    void (*wake)(void *guard); /* makes all calls that wait look again; with the lock held */
#define TB__OP(type, name, parameters) type(*name) parameters; // NOLINT(bugprone-macro-parentheses)
    TB__BUS_OPS(TB__OP)
#undef TB__OP
} tb__bus_ops;

#define TB__OP(type, name, parameters)                                                                                 \
    type tb__local_##name parameters;                                                                                  \
    type tb__remote_##name parameters;
TB__BUS_OPS(TB__OP)
#undef TB__OP

extern const tb__bus_ops tb__local_ops, tb__remote_ops;

/* The table of a world, pair, batch or transfer. */
static inline const tb__bus_ops *tb__ops_of(const void *object) {
    return ((const tb__bus_object *)object)->ops;
}

/* Calls batch_roles. */
tb_status tb__batch_roles(tb_batch *batch, const char *from, bool *sends, bool *receives, const char **to);

/* Fails if a transfer of this kind has no such event. *what is a verb for messages. */
tb_status tb__event_check(tb_event event, bool is_send, bool hold, const char **what);

/* As tb_world_join, for the URL "agent:PATH". */
tb_status tb__agent_world_join(const char *path, const char *group, int32_t index, int32_t size,
                               const tb_world_opts *opts, tb_world **out);

#endif
