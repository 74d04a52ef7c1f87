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
    char last[256];  /* the last line that was not written */
} tb__log_kind;

typedef struct tb__log_limit {
    tb__log_kind kinds[TB__LOG_KINDS];
} tb__log_limit;

/* Counts the line; returns its number among lines of its kind in this period. Above TB__LOG_BURST: do not write it. */
uint64_t tb__log_limit_count(tb__log_limit *limit, int64_t now_ms, const char *format, const char *line);

/* Removes a kind whose period has ended and had suppressed lines, and returns their number; 0: there is none. Copies
 * the last of them to `last`, which has room for sizeof ((tb__log_kind *)0)->last bytes. */
uint64_t tb__log_limit_take(tb__log_limit *limit, int64_t now_ms, char *last);

#endif
