/* What quantising should give, worked out one block and one number at a time from the formats' definitions. */
#ifndef TB_TESTS_QUANTISED_H
#define TB_TESTS_QUANTISED_H

#include "device/quant.h"
#include "numbers.h"

/* Fills data and scales of `to`, which are as large as tb__quant_measure says. The source is finite. */
void quantised_make(const tb__quant_tensor *to, const tb__quant_rows *from);

/* One element of it, as the bits of `dtype`. */
uint64_t quantised_value(const tb__quant_tensor *from, int64_t row, int64_t column, tb_dtype dtype);

/* The value of an E2M1 code. */
double quantised_e2m1(unsigned code);

#endif
