/* Checks shared by quantising and dequantising. */
#ifndef TB_DEVICE_HOST_QUANT_INSIDE_H
#define TB_DEVICE_HOST_QUANT_INSIDE_H

#include "device/host/quant.h"

tb_status tb__quant_check_rows(const tb__quant_rows *rows, int64_t count, int64_t columns);

/* `out` gets the size of the whole tensor. */
tb_status tb__quant_check_tensor(const tb__quant_tensor *tensor, int64_t first, int64_t rows, tb__quant_size *out);

#endif
