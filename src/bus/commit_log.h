/* Proposes decisions to the store in a thread of its own, so that the loop never waits for the store. */
#ifndef TB_BUS_COMMIT_LOG_H
#define TB_BUS_COMMIT_LOG_H

#include "bus/directory.h"
#include "loop/loop.h"

typedef struct tb__commit_log tb__commit_log;
typedef struct tb__commit tb__commit;

typedef enum tb__decision { TB__DECISION_NONE, TB__DECISION_COMMIT, TB__DECISION_ABORT } tb__decision;

enum { TB__QUESTION_ROOM = 128 };

/* The first question starts the thread. `loop` and `directory` must outlive it. */
tb_status tb__commit_log_create(tb__loop *loop, tb__directory *directory, tb__commit_log **out);
/* Waits for the proposal that the store is being asked about, at most as long as the store has to answer. NULL is
 * allowed. */
void tb__commit_log_destroy(tb__commit_log *commit_log);

/* All below: with the loop's lock. */

/* Proposes a decision, with the reason if it is to abort; the answer goes to tb__commit_answer. TB_LOST if the store
 * with this number is known to be gone. If this fails, nothing is proposed. */
tb_status tb__commit_log_propose(tb__commit_log *commit_log, tb__commit *commit, uint64_t store_number,
                                 const char *question, uint64_t proposal, tb__decision decision, tb_status status,
                                 const char *why);
/* No rank will ask this question again: deletes its answer from the store, if the store can be reached. */
void tb__commit_log_forget(tb__commit_log *commit_log, const char *question);
/* Drops answers that are still to come for it. */
void tb__commit_log_drop(tb__commit_log *commit_log, const tb__commit *commit);

#endif
