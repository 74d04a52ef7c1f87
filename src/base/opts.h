/* Public structs that begin with `size`, the sizeof in the caller's header. Within a minor version they only grow at
 * the end, so the caller's struct may have fewer or more fields than ours. */
#ifndef TB_BASE_OPTS_H
#define TB_BASE_OPTS_H

#include "base/error.h"

/* Copies an options struct. Fields that the caller's struct lacks are zero, the default; NULL means all defaults.
 * TB_REFUSED if unknown fields are not zero. ours->size becomes `size`. */
TB_API tb_status tb__opts_read(void *ours, size_t size, const void *callers);

/* The same for any other struct, element i of an array whose elements have one size. `what` names it in messages. */
tb_status tb__struct_read(void *ours, size_t size, const void *callers, size_t i, const char *what);

/* Checks the size field of a struct that is to be filled in. */
tb_status tb__struct_check(const void *callers, const char *what);

/* Fills in the fields that the caller's struct has, and zeroes those that we do not know; its size stays. */
tb_status tb__struct_write(void *callers, const void *ours, size_t size, const char *what);

/* Moves the fields out of a filled-in struct, and zeroes them there; its size stays. */
void tb__struct_take(void *ours, size_t size, void *callers);

#endif
