/* The transport "cut": shm's messages, and an end that a test chooses. Peers reach no memory, so tensors are staged.
 *
 * From a given call on, an endpoint finds its peers gone. If that call is a post, it fails with TB_LOST, and so do all
 * later ones; the endpoint's next progress completes what is under way and tells of every peer that it is lost. This is
 * what a transport does whose library was shut down in the middle. If the call is a cancel, the peer is lost there and
 * then, inside of it. The peers learn of it in their own next progress. */
#ifndef TB_TESTS_CUT_TRANSPORT_H
#define TB_TESTS_CUT_TRANSPORT_H

#include <stdbool.h>
#include <stdint.h>

void cut_register(void);

/* Of the endpoint that this thread opened last: the n-th post or cancel from now on, counted from 1, is the one. */
void cut_arm(uint64_t n);

/* Of the endpoint that this thread opened last: from now on, a cancelled long message completes with TB_TIMEOUT, as if
 * a library below had not given back its memory. cut_has_happened tells whether one has. */
void cut_hold_cancelled(void);

/* Two ranks lose each other, each in its own next progress. Any thread. */
void cut_link(int32_t one, int32_t other);

/* Whether an endpoint has come to that call since the last cut_arm or cut_hold_cancelled. Any thread. */
bool cut_has_happened(void);

#endif
