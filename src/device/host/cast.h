/* Casts of rows. */
#ifndef TB_DEVICE_HOST_CAST_H
#define TB_DEVICE_HOST_CAST_H

#include "tensorbus/tensorbus.h"

/* Between two dtypes that tb__dtype_can_cast allows, or the same. The rows don't overlap, unless they are the same. */
void tb__cast_row(void *dst, tb_dtype to, const void *src, tb_dtype from, size_t n);

#endif
