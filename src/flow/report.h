/* What is told about a flow (report.c): why it is broken, why a leg fails, whom it waits for, and the dump. struct
 * report is written there only.
 *
 * All of this needs the loop's lock. */
#ifndef TB_FLOW_REPORT_H
#define TB_FLOW_REPORT_H

#include "flow/flow.h"

typedef struct member member;

enum { REASON_MS = 1000 }; /* how long to wait for another rank's report of the cause */

struct flow_report {
    tb__fault broken;  /* nothing moves any more */
    tb__fault failure; /* it is going to break ... */
    tb__task task;     /* ... by this, which tells those who have to hear of it */
};

/* Whether a leg can't end well without the member. */
bool tb__flow_needs(const tb__flow *flow, bool is_send, const member *m);
/* What has come about that ends the leg; TB_OK: nothing. `tells`: others have to hear of it. */
tb__fault tb__flow_find_reason(tb__flow *flow, bool is_send, bool *tells);
/* This rank's reason, for others. */
enum { TB__WORDS_MAX = TB__WHY_MAX + 256 };
const char *tb__flow_own_words(const tb__flow *flow, tb_status status, const char *why, char words[TB__WORDS_MAX]);
/* Breaks the flow in the driver's next turn: a leg must not end in the middle of what has failed. */
void tb__flow_fail_later(tb__flow *flow, tb_status status, const char *why);
/* The first reason counts. False: it was broken before. */
bool tb__flow_note_broken(tb__flow *flow, tb_status status, const char *why);
void tb__flow_fini_report(tb__flow *flow);

#endif
