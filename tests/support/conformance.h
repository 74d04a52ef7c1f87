/* What every transport must do. A transport's own test makes two endpoints that are connected to each other (`self`:
 * the same one twice) and hands them to these. */
#ifndef TB_TESTS_CONFORMANCE_H
#define TB_TESTS_CONFORMANCE_H

#include "transport/transport.h"

typedef struct endpoints {
    tb_transport a, b;
    int32_t rank_a, rank_b;
} endpoints;

/* All of the suite, on endpoints that `make` opens and `unmake` closes again for each part. Asserts with cmocka. */
void conformance(void (*make)(endpoints *e), void (*unmake)(endpoints *e));

/* All but one part, for a second run that could not tell anything new about it. */
void conformance_without(const char *part, void (*make)(endpoints *e), void (*unmake)(endpoints *e));

/* Lets both ends work, asleep in between, until `count` of the operations are done. Fails the test after a minute. */
void work_until_done(endpoints *e, tb_op *const *ops, size_t count);

/* Cancels the operation while a thread works for the other end, which cancelling may wait for. NULL: closes the
 * endpoint. */
void cancel_or_close(tb_transport *t, tb_op *op, const tb_transport *other);

/* Sends the key of b's memory to a, and imports it there. */
tb_remote *import_memory(endpoints *e, tb_mem *mem);

/* A memfd sealed against shrinking, and where it is mapped. */
unsigned char *make_file(const char *name, size_t nbytes, int *fd);

/* A tag that no other message has had. */
uint64_t new_tag(void);

/* An operation that remembers that it is done. A long SEND is expected. */
void make_op(tb_op *op, tb_op_kind kind, int32_t peer, uint64_t tag, const tb_piece *pieces, size_t npieces);
bool is_done(const tb_op *op);

#endif
