/* The log. Costs one comparison if the level is off. */
#ifndef TB_BASE_LOG_H
#define TB_BASE_LOG_H

#include "tensorbus/tensorbus.h"

TB_API void tb__log(tb_log_level level, const char *format, ...) __attribute__((format(printf, 2, 3)));

#endif
