/* The message that goes with a status: the first function that sees an error writes it, callers pass the status on. */
#ifndef TB_BASE_ERROR_H
#define TB_BASE_ERROR_H

#include "tensorbus/tensorbus.h"

/* tb__fail(status, format, ...): sets the message of tb_error_detail(); its value is `status`. */
#define tb__fail(status, ...) (tb__set_detail(__VA_ARGS__), (status))

/* tb__fail_within(status, format, ...): puts "prefix: " before the message, to say where the failure was; its value is
 * `status`. */
#define tb__fail_within(status, ...) (tb__prefix_detail(__VA_ARGS__), (status))

/* TB_API here and in other headers of this folder: exported to the other libraries of tensorbus. */
TB_API void tb__set_detail(const char *format, ...) __attribute__((format(printf, 1, 2)));
TB_API void tb__prefix_detail(const char *format, ...) __attribute__((format(printf, 1, 2)));

/* A copy of the message, to keep it over other calls. */
typedef struct tb__saved_detail {
    char text[512];
} tb__saved_detail;

tb__saved_detail tb__save_detail(void);

#define TB_TRY(expr)                                                                                                   \
    do {                                                                                                               \
        tb_status try_status_ = (expr);                                                                                \
        if (try_status_ != TB_OK)                                                                                      \
            return try_status_;                                                                                        \
    } while (0)

#endif
