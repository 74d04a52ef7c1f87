/* Asks the store, in a thread of its own, whether receives are committed: the engine never waits for the store. */
#ifndef TB_BUS_DECIDER_H
#define TB_BUS_DECIDER_H

#include "bus/directory.h"
#include "exec/flow.h"

typedef struct tb__decider tb__decider;

/* The thread is started by the first question. `engine` and `directory` must outlive it. */
tb_status tb__decider_create(tb__engine *engine, tb__directory *directory, tb__decider **out);
/* Waits for the question that is being asked, no longer than the store is given for its answer. NULL is allowed. */
void tb__decider_destroy(tb__decider *decider);

/* All below: with the engine's lock. */

/* Proposes a verdict; the answer goes to the flow. TB_LOST if the store with this number is known to be gone:
 * nothing is asked then. */
tb_status tb__decider_propose(tb__decider *decider, tb__flow *flow, uint64_t store_number, const char *question,
                              uint64_t attempt, tb__verdict verdict, tb_status status, const char *why);
/* Nobody will ask this again. What can't be forgotten stays in the store. */
void tb__decider_forget(tb__decider *decider, const char *question);
/* The flow goes: answers to it are dropped. */
void tb__decider_drop(tb__decider *decider, const tb__flow *flow);

#endif
