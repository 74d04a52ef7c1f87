/* What cmocka lacks for functions that return a tb_status: a failure shows its sentence. */
#ifndef TB_TESTS_ASSERTS_H
#define TB_TESTS_ASSERTS_H

#include "tensorbus/tensorbus.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>

#define assert_ok(call)                                                                                                \
    do {                                                                                                               \
        tb_status ok_status_ = (call);                                                                                 \
        if (ok_status_ != TB_OK)                                                                                       \
            fail_msg("%s: %s: %s", #call, tb_status_string(ok_status_), tb_error_detail());                            \
    } while (0)

#define assert_fails(call, wanted, text)                                                                               \
    do {                                                                                                               \
        tb_status fails_status_ = (call);                                                                              \
        if (fails_status_ != (wanted) || !strstr(tb_error_detail(), text))                                             \
            fail_msg("%s: %s: %s", #call, tb_status_string(fails_status_), tb_error_detail());                         \
    } while (0)

#endif
