/* Limits how often the same warning is written: TB__LOG_BURST lines a minute, then they are counted. "The same" is one
 * format, whatever its arguments are. No clock and no lock of its own. */
#ifndef TB_BASE_LOG_LIMIT_H
#define TB_BASE_LOG_LIMIT_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum { TB__LOG_BURST = 10, TB__LOG_PERIOD_MS = 60000, TB__LOG_KINDS = 64 };

typedef struct tb__log_kind {
    const char *format; /* NULL: free */
    int64_t began_ms;
    uint64_t nlines; /* since then, written or not */
    char last[256];  /* of those that were not written */
} tb__log_kind;

typedef struct tb__log_limit {
    tb__log_kind kinds[TB__LOG_KINDS];
} tb__log_limit;

/* Which line of its kind this is in its period; above TB__LOG_BURST it is not to be written. */
uint64_t tb__log_limit_count(tb__log_limit *limit, int64_t now_ms, const char *format, const char *line);

/* Ends a period that is over, in which lines were not written, and says how many; 0: there is none. `last` has room for
 * sizeof ((tb__log_kind *)0)->last bytes. */
uint64_t tb__log_limit_take(tb__log_limit *limit, int64_t now_ms, char *last);

#endif
