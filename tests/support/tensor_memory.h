/* Memory for tensors of tests. Built with TB_SLOW_DEVICE, a test has it where TB_TEST_DEVICE says: on the slow device
 * (the default), with "mixed" every second time, with "cuda" on a GPU, if the build has the CUDA device, and with
 * "cuda_mixed" every second time; else it is memory of tb_alloc.
 *
 * A test reads and writes tensors through tensor_bytes. Memory of a GPU has a copy for that (cuda_tensors.c). */
#ifndef TB_TESTS_TENSOR_MEMORY_H
#define TB_TESTS_TENSOR_MEMORY_H

#include "tensorbus/tensorbus.h"

#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

#ifdef TB_SLOW_DEVICE
#include "slow_device.h"

static inline bool is_test_device(const char *name) {
    const char *device = getenv("TB_TEST_DEVICE");
    return device && strcmp(device, name) == 0;
}

static inline bool is_test_on_gpu(void) {
    return is_test_device("cuda") || is_test_device("cuda_mixed");
}

__attribute__((constructor)) static void use_slow_device(void) {
    if (!is_test_on_gpu())
        slow_device_install();
}

/* Whether the next tensor is on the device, and not on the host. */
static inline bool next_is_on_device(void) {
    static _Atomic unsigned count;
    return !(is_test_device("mixed") || is_test_device("cuda_mixed")) || count++ % 2;
}

static inline bool is_slow_memory(const void *p) {
    return slow_device_bytes(p) != p;
}
#else
static inline bool is_slow_memory(const void *p) {
    (void)p;
    return false;
}
#endif

#if defined(TB_SLOW_DEVICE) && defined(TB_TEST_CUDA)
/* cuda_tensors.c */
void *cuda_tensor_alloc(size_t nbytes); /* NULL: there is no memory */
bool cuda_tensor_free(void *p);         /* false: it is not such memory, here and below */
bool cuda_tensor_bytes(const void *p, void **bytes);
bool is_cuda_tensor(const void *p);
void cuda_tensors_flush(void);
void *cuda_stream_create(void);
void cuda_stream_sync(void *stream);
void cuda_stream_destroy(void *stream);
#endif

/* Zeros, or anything. NULL: there is no memory. */
static inline void *tensor_alloc(size_t nbytes) {
    void *p;
#ifdef TB_SLOW_DEVICE
    bool is_on_device = next_is_on_device();
    if (is_on_device && !is_test_on_gpu())
        return slow_device_alloc(nbytes);
#ifdef TB_TEST_CUDA
    if (is_on_device)
        return cuda_tensor_alloc(nbytes);
#endif
#endif
    return tb_alloc(nbytes, &p) == TB_OK ? p : NULL;
}

/* The same; with "mixed", every fifth time on the slow device, in memory that can't be shared with other processes. */
static inline void *tensor_alloc_any(size_t nbytes) {
#ifdef TB_SLOW_DEVICE
    static _Atomic unsigned count;
    if (is_test_device("mixed") && count++ % 5 == 4)
        return slow_device_alloc_on(0, false, nbytes);
#endif
    return tensor_alloc(nbytes);
}

/* Where the test can use what tensor_alloc gave, while the library does not, until the thread's next call
 * of the library. */
static inline void *tensor_bytes(const void *p) {
    void *bytes = (void *)(uintptr_t)p;
#ifdef TB_SLOW_DEVICE
#ifdef TB_TEST_CUDA
    if (cuda_tensor_bytes(p, &bytes))
        return bytes;
#endif
    bytes = slow_device_bytes(p);
#endif
    return bytes;
}

/* For functions that the library calls: this thread has looked, and the library may go on. */
static inline void tensors_flush(void) {
#if defined(TB_SLOW_DEVICE) && defined(TB_TEST_CUDA)
    cuda_tensors_flush();
#endif
}

/* Where it is, as tb_tensor.memory has it. */
static inline const char *tensor_device(const void *p) {
#if defined(TB_SLOW_DEVICE) && defined(TB_TEST_CUDA)
    if (is_cuda_tensor(p))
        return "cuda:0";
#endif
    return is_slow_memory(p) ? "slow:0" : "host";
}

static inline void tensor_free(void *p) {
#ifdef TB_SLOW_DEVICE
    if (p && is_slow_memory(p)) {
        slow_device_free(p);
        return;
    }
#ifdef TB_TEST_CUDA
    if (p && cuda_tensor_free(p))
        return;
#endif
#endif
    tb_free(p);
}

#endif
