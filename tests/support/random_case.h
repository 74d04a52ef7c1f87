/* Random layout pairs for property tests, and a naive evaluation of layouts that shares no code with the library. */
#ifndef TB_TESTS_RANDOM_CASE_H
#define TB_TESTS_RANDOM_CASE_H

#include "tensorbus/plan.h"

#include <stdint.h>

typedef struct rng {
    uint64_t state;
} rng;

uint64_t rng_next(rng *r);
int64_t rng_range(rng *r, int64_t lo, int64_t hi); /* inclusive */

/* TB_SEED from the environment, or one that differs from run to run; printed, so that a run can be repeated. */
uint64_t test_seed(void);
/* TB_CASES from the environment, or `usual`. */
int64_t test_cases(int64_t usual);

enum { CASE_MAX_RANKS = 64, CASE_MAX_SEGMENTS = 256 };

/* One side, as plain data. */
typedef struct side {
    int mesh_ndim;
    int64_t mesh[TB_MAX_DIMS];
    int32_t nranks;
    int32_t ranks[CASE_MAX_RANKS];
    tb_placement place[TB_MAX_DIMS];
    int64_t sizes[TB_MAX_DIMS][16]; /* behind the placements */
    size_t list_ends[TB_MAX_DIMS][16];
    tb_segment segments[TB_MAX_DIMS][CASE_MAX_SEGMENTS];
} side;

typedef struct random_case {
    uint64_t seed;
    tb_shape shape;
    tb_dtype dtype;
    side src, dst;
} random_case;

/* What it makes is valid, except that now and then an Explicit source holds not all that the target wants. */
void random_case_make(random_case *c, uint64_t seed);
tb_status side_layout(const side *s, tb_layout **out);
void random_case_print(const random_case *c);

/* The naive evaluation: the global indices that mesh index `m` holds in dim d, in local order. */
typedef struct naive_list {
    int64_t count;
    int64_t index[4096];
} naive_list;

void naive_local(const side *s, const tb_shape *shape, int32_t m, int d, naive_list *out);
void mesh_coords(const side *s, int32_t m, int64_t *coord);

#endif
