/* Status codes, the thread's error message, the version. */
#include "base/error.h"
#include "base/text.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

enum { DETAIL_SIZE = sizeof(tb__saved_detail) };

static _Thread_local char detail[DETAIL_SIZE];

const char *tb_version_string(void) {
    return TB_VERSION_STRING;
}

const char *tb_status_string(tb_status status) {
    switch (status) {
    case TB_OK:
        return "ok";
    case TB_INVALID:
        return "invalid";
    case TB_NO_MEMORY:
        return "out of memory";
    case TB_TOO_BIG:
        return "too big";
    case TB_REFUSED:
        return "refused";
    case TB_IO:
        return "input/output";
    case TB_INTERNAL:
        return "internal error";
    case TB_TIMEOUT:
        return "timed out";
    case TB_LOST:
        return "a peer or a connection was lost";
    case TB_DENIED:
        return "not allowed";
    case TB_CONFLICT:
        return "in conflict with others";
    case TB_CANCELLED:
        return "cancelled";
    case TB_IN_DOUBT:
        return "whether it is committed is not known";
    case TB_SUPERSEDED:
        return "superseded by a higher version";
    }
    return "unknown status";
}

const char *tb_error_detail(void) {
    return detail;
}

tb_status tb_error_set(tb_status status, const char *sentence) {
    tb__set_detail("%s", sentence);
    return status;
}

/* Messages contain names from other processes, and go to terminals and logs: control characters are replaced. */
void tb__set_detail(const char *format, ...) {
    va_list args;
    va_start(args, format);
    vsnprintf(detail, sizeof detail, format, args);
    va_end(args);
    tb__text_tame(detail);
}

tb__saved_detail tb__save_detail(void) {
    tb__saved_detail kept;
    memcpy(kept.text, detail, sizeof kept.text);
    return kept;
}

void tb__prefix_detail(const char *format, ...) {
    char inner[DETAIL_SIZE];
    memcpy(inner, detail, sizeof inner);
    va_list args;
    va_start(args, format);
    char prefix[128];
    vsnprintf(prefix, sizeof prefix, format, args);
    va_end(args);
    snprintf(detail, sizeof detail, "%s: %.*s", prefix, DETAIL_SIZE - (int)sizeof prefix - 3, inner);
    tb__text_tame(detail);
}
