/* What the files of the suite share. */
#ifndef TB_TESTS_CONFORMANCE_INSIDE_H
#define TB_TESTS_CONFORMANCE_INSIDE_H

#include "conformance.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdint.h>

#include <cmocka.h>

static inline void post(const tb_transport *t, tb_op *op) {
    if (tb__transport_post(t, op) != TB_OK)
        fail_msg("post: %s", tb_error_detail());
}

static inline unsigned char pattern(size_t i, uint64_t salt) {
    return (unsigned char)((i * 2654435761U + salt) >> 7);
}

static inline void fill(unsigned char *memory, size_t n, uint64_t salt) {
    for (size_t i = 0; i < n; i++)
        memory[i] = pattern(i, salt);
}

static inline void check(const unsigned char *memory, size_t n, uint64_t salt) {
    for (size_t i = 0; i < n; i++) {
        if (memory[i] != pattern(i, salt))
            fail_msg("byte %zu of %zu is wrong", i, n);
    }
}

/* conformance_memory.c */
void conformance_memory(endpoints *e);
void conformance_scattered(endpoints *e);
void conformance_many_registrations(endpoints *e);

/* conformance_fds.c */
void conformance_fds(endpoints *e);
size_t count_descriptors(void); /* that this process has open */

#endif
