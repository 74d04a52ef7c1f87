/* Limits repeated warnings: see log_limit.h. */
#include "base/log_limit.h"

#include <stdio.h>
#include <string.h>

static bool is_over(const tb__log_kind *kind, int64_t now_ms) {
    return now_ms - kind->began_ms >= TB__LOG_PERIOD_MS;
}

uint64_t tb__log_limit_count(tb__log_limit *limit, int64_t now_ms, const char *format, const char *line) {
    tb__log_kind *kind = NULL, *end = limit->kinds + TB__LOG_KINDS;
    for (tb__log_kind *k = limit->kinds; k < end; k++) {
        if (k->format == format) {
            kind = k;
            break;
        }
        bool is_free = !k->format || (is_over(k, now_ms) && k->nlines <= TB__LOG_BURST);
        if (!kind && is_free)
            kind = k;
    }
    if (!kind)
        return 1; /* the table is full: lines of this kind are not limited */
    if (kind->format != format || (is_over(kind, now_ms) && kind->nlines <= TB__LOG_BURST))
        *kind = (tb__log_kind){.format = format, .began_ms = now_ms};
    if (++kind->nlines > TB__LOG_BURST)
        snprintf(kind->last, sizeof kind->last, "%s", line);
    return kind->nlines;
}

uint64_t tb__log_limit_take(tb__log_limit *limit, int64_t now_ms, char *last) {
    for (tb__log_kind *k = limit->kinds; k < limit->kinds + TB__LOG_KINDS; k++) {
        if (!k->format || k->nlines <= TB__LOG_BURST || !is_over(k, now_ms))
            continue;
        uint64_t n = k->nlines - TB__LOG_BURST;
        memcpy(last, k->last, sizeof k->last);
        *k = (tb__log_kind){0};
        return n;
    }
    return 0;
}
