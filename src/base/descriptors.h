/* The limit of file descriptors: what is said when it is reached, and how a program raises it. */
#ifndef TB_BASE_DESCRIPTORS_H
#define TB_BASE_DESCRIPTORS_H

#include "base/error.h"

#include <errno.h>

/* strerror, for calls that open descriptors. Where there are none left it says whose limit that is, how high it is, and
 * what to do. The text is the thread's, until the next call. */
TB_API const char *tb__errno_text(int error);

/* Whether it says that there are none left, in the process or in the machine. */
static inline bool tb__is_out_of_descriptors(int error) {
    return error == EMFILE || error == ENFILE;
}

/* ---- Listening without them ------------------------------------------------------------------------------------- */

/* Who can't accept a connection stops listening for this long: those that wait would keep the loop awake. */
enum { TB__RELISTEN_MS = 100 };

/* Whether a connection could not be accepted because something is short, and may be later. */
static inline bool tb__is_shortage(int error) {
    return tb__is_out_of_descriptors(error) || error == ENOBUFS || error == ENOMEM;
}

/* Whether the epoll set, which has the listener with this data, reports connections that wait. */
void tb__listener_enable(int epoll, int listener, const void *data, bool listens);

/* Whether a shortage is to be logged now: every ten seconds. *again_ms is 0 at first. */
bool tb__may_warn(int64_t *again_ms);

/* ---- The limit -------------------------------------------------------------------------------------------------- */

/* RLIMIT_NOFILE: what this process may have now. */
TB_API unsigned long long tb__descriptor_limit(void);

/* A transport could not do something ("accept a connection", a string that stays) for want of descriptors or memory,
 * and tries again. To be called at each try, at least twice a second. Any thread. */
void tb__shortage_record(const char *what, int error);

/* "; this process can't accept a connection: REASON" while a transport notes that, else "". For the error of a wait
 * that has timed out: the peer may have done its part. The text is the thread's, until the next call. */
const char *tb__shortage_text(void);

/* Raises the soft limit to the hard one. For programs of our own: in a library's host there may be select(), which
 * can't deal with descriptors above 1023. */
void tb__descriptor_limit_raise(void);

#endif
