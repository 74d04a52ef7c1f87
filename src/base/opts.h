/* Structs of the public headers that begin with `size`: the sizeof that the caller's header gives them. Within a minor
 * version they grow at the end, so the caller's may have fewer fields than ours, or more. */
#ifndef TB_BASE_OPTS_H
#define TB_BASE_OPTS_H

#include "base/error.h"

/* Copies an options struct. Fields that the caller's lacks are zero, the default; NULL: all are. TB_REFUSED if the
 * caller's has fields that we do not know and that are not zero. ours->size becomes `size`. */
TB_API tb_status tb__opts_read(void *ours, size_t size, const void *callers);

/* The same for any other struct, which is the i-th of an array; all in it have one size. `what` is for messages. */
tb_status tb__struct_read(void *ours, size_t size, const void *callers, size_t i, const char *what);

/* Checks the size field of a struct that is to be filled in. */
tb_status tb__struct_check(const void *callers, const char *what);

/* Fills in the fields that the caller's struct has, and zeros for those that we do not know; its size stays. */
tb_status tb__struct_write(void *callers, const void *ours, size_t size, const char *what);

/* Moves the fields out of a filled-in struct, and zeroes them there; its size stays. */
void tb__struct_take(void *ours, size_t size, void *callers);

#endif
