/* The limit of file descriptors: messages about it, pausing listeners, raising it. */
#ifndef TB_BASE_DESCRIPTORS_H
#define TB_BASE_DESCRIPTORS_H

#include "base/error.h"

#include <errno.h>

/* strerror, for calls that open descriptors. If none are left, the text says which limit was reached, how high it is,
 * and what to do. Valid in this thread until the next call. */
TB_API const char *tb__errno_text(int error);

/* Whether the process or the machine has no descriptors left. */
static inline bool tb__is_out_of_descriptors(int error) {
    return error == EMFILE || error == ENFILE;
}

/* ---- Listeners ------------------------------------------------------------------------------------------------- */

/* A listener that can't accept is not polled for this long: waiting connections would keep the loop busy. */
enum { TB__RELISTEN_MS = 100 };

/* Whether accept failed for a lack of resources, and may succeed later. */
static inline bool tb__is_shortage(int error) {
    return tb__is_out_of_descriptors(error) || error == ENOBUFS || error == ENOMEM;
}

/* Turns reports of waiting connections on or off. The epoll set must already have the listener, with this data. */
void tb__listener_enable(int epoll, int listener, const void *data, bool listens);

/* Whether to log a shortage now: at most every ten seconds. *again_ms is 0 at first. */
bool tb__may_warn(int64_t *again_ms);

/* ---- The limit -------------------------------------------------------------------------------------------------- */

/* The soft limit RLIMIT_NOFILE. */
TB_API unsigned long long tb__descriptor_limit(void);

/* Records that a transport failed to do `what` ("accept a connection", a static string) for lack of descriptors or
 * memory. Call it at each retry, at least twice a second. Any thread. */
void tb__shortage_record(const char *what, int error);

/* "; this process can't accept a connection: REASON" while a transport records that, else "". For timeout messages:
 * this process may be the cause. Valid in this thread until the next call. */
const char *tb__shortage_text(void);

/* Raises the soft limit to the hard one. For programs of our own: a program that uses the library may call select(),
 * which can't handle descriptors above 1023. */
void tb__descriptor_limit_raise(void);

#endif
