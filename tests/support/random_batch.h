/* Random batches for tests that move tensors: random layout pairs over the seats of two groups, dtypes, casts, and what
 * every element must be in the end, one at a time. Side 0 is the source of a layout pair, side 1 its target; tensors
 * may be moved either way. */
#ifndef TB_TESTS_RANDOM_BATCH_H
#define TB_TESTS_RANDOM_BATCH_H

#include "random_case.h"

enum { BATCH_MAX_TENSORS = 5 };

typedef struct batch_tensor {
    tb_shape shape;
    side sides[2];     /* ranks are seats */
    tb_dtype dtype[2]; /* by side */
    tb_dtype wire[2];  /* what the side asks for when it sends */
    uint32_t group[2];
    bool takes_pair_layout[2]; /* the first tensor's may be the pair's, too */
} batch_tensor;

typedef struct random_batch {
    uint64_t seed;
    bool is_large;
    int ntensors;
    batch_tensor tensor[BATCH_MAX_TENSORS];
} random_batch;

void random_batch_make(random_batch *b, uint64_t seed, const int32_t nseats[2]);
void random_batch_print(const random_batch *b);

/* What becomes of moving the tensors away from a side: TB_OK, or how it is refused. */
tb_status random_batch_outcome(const random_batch *b, int from);

/* A seat's part of a tensor. */
typedef struct holding {
    tb_shape shape;   /* local; of a seat outside the mesh, all zero */
    int64_t count;    /* elements */
    int64_t *element; /* which one of the tensor, row-major on both sides */
    int64_t share;    /* which contribution, where the side is Partial */
    bool gets_zeros;  /* as a target */
} holding;

void holding_make(const batch_tensor *t, int which, int32_t seat, holding *out);
void holding_fini(holding *h);

/* What a holder of `share` has of an element before it is moved, and what arrives. Each version has other values. */
uint64_t batch_value(const random_batch *b, int tensor, int from, int version, int64_t element, int64_t share);
uint64_t batch_arrival(const random_batch *b, int tensor, int from, int version, int64_t element);

#endif
