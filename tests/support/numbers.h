/* What casts and reductions should give, worked out one number at a time from the formats' definitions. */
#ifndef TB_TESTS_NUMBERS_H
#define TB_TESTS_NUMBERS_H

#include "random_case.h"

size_t number_size(tb_dtype dtype); /* bytes */
uint64_t number_load(tb_dtype dtype, const void *at);
void number_store(tb_dtype dtype, void *at, uint64_t bits);

/* The value of a float's bits. */
double number_value(tb_dtype dtype, uint64_t bits);

/* A float's bits in another format, by way of f32; or an integer's, modulo its width. */
uint64_t number_cast(tb_dtype from, tb_dtype to, uint64_t bits);

/* All of a copy's arithmetic: reduced, divided if divisor > 1, rounded to `wire`, cast to `to`. */
uint64_t number_reduce(tb_dtype from, tb_dtype wire, tb_dtype to, tb_reduce_op op, uint64_t divisor,
                       const uint64_t *bits, size_t n);

/* Bits to compute with: zeros, infinities, NaN, subnormals and tiny integers more often than chance would have them. */
uint64_t number_random(tb_dtype dtype, rng *r);

#endif
