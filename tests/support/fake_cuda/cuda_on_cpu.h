/* The parts of CUDA C++ that the kernels use, for a compiler of C++: keywords, intrinsics, and threads in blocks.
 *
 * Blocks are executed one after the other, and so are the threads of a block, each up to its end or to the next point
 * where it waits for others: a barrier or a shuffle. A thread that waits keeps its stack, and another one is taken.
 * Only one thread of the process may execute blocks. */
#ifndef TB_TESTS_FAKE_CUDA_ON_CPU_H
#define TB_TESTS_FAKE_CUDA_ON_CPU_H

#include "launch.h"

#include <math.h>
#include <stdint.h>
#include <string.h>
#include <ucontext.h>

static struct { uint32_t x; } threadIdx, blockIdx;

/* ---- Threads ----------------------------------------------------------------------------------------------------- */

enum { MOST_THREADS = 256, WARP = 32, STACK_NBYTES = 64 << 10 };

typedef void gpu_kernel(const tb__cuda_args args);

/* Where execution goes on: what __builtin_setjmp keeps. Unlike swapcontext it makes no system call, and unlike longjmp
 * no sanitizer looks at it. Callers of what switches stacks must assume that it changes any variable: noipa. */
struct resume_point {
    void *words[5];
};

/* A stack on which threads are executed, one after the other until one waits. */
struct fiber {
    resume_point at;
    bool is_started;
    fiber *next_free;
    alignas(16) char stack[STACK_NBYTES];
};

enum thread_state : uint8_t { AT_BARRIER, AT_SHUFFLE, ENDED };

struct gpu_thread {
    thread_state state;
    fiber *on;
    uint32_t value, lane_mask, received; /* of a shuffle */
};

static struct {
    gpu_kernel *kernel;
    const tb__cuda_args *args;
    uint32_t nthreads, nstarted;
    gpu_thread threads[MOST_THREADS];
    fiber *current, *free;
    resume_point scheduler;
} gpu_block;

[[noreturn]] static __attribute__((noipa)) void go_to(resume_point *to) {
    __builtin_longjmp(to->words, 1);
}

static __attribute__((noipa)) void leave_for(resume_point *from, resume_point *to) {
    if (!__builtin_setjmp(from->words))
        go_to(to);
}

static void execute_threads(void) {
    for (;;) {
        while (gpu_block.nstarted < gpu_block.nthreads) {
            threadIdx.x = gpu_block.nstarted++;
            gpu_block.kernel(*gpu_block.args);
            gpu_block.threads[threadIdx.x].state = ENDED;
        }
        fiber *self = gpu_block.current;
        self->next_free = gpu_block.free;
        gpu_block.free = self;
        leave_for(&self->at, &gpu_block.scheduler);
    }
}

/* Returns when the threads on it wait or have ended. */
static __attribute__((noipa)) void resume(fiber *f) {
    gpu_block.current = f;
    if (f->is_started) {
        leave_for(&gpu_block.scheduler, &f->at);
        return;
    }
    ucontext_t context;
    f->is_started = true;
    getcontext(&context);
    context.uc_stack.ss_sp = f->stack;
    context.uc_stack.ss_size = sizeof f->stack;
    makecontext(&context, execute_threads, 0);
    if (!__builtin_setjmp(gpu_block.scheduler.words))
        setcontext(&context);
}

static fiber *take_fiber(void) {
    static fiber fibers[MOST_THREADS];
    static uint32_t nused;
    fiber *f = gpu_block.free;
    if (!f)
        return &fibers[nused++];
    gpu_block.free = f->next_free;
    return f;
}

static void wait_at(thread_state state) {
    uint32_t thread = threadIdx.x;
    gpu_block.threads[thread].state = state;
    gpu_block.threads[thread].on = gpu_block.current;
    leave_for(&gpu_block.current->at, &gpu_block.scheduler);
    threadIdx.x = thread;
}

static bool is_any(uint32_t first, uint32_t count, thread_state state) {
    for (uint32_t i = first; i < first + count; i++) {
        if (gpu_block.threads[i].state == state)
            return true;
    }
    return false;
}

/* Shuffles of a warp until it is at a barrier or at its end. */
static void execute_warp(uint32_t first) {
    gpu_thread *lanes = &gpu_block.threads[first];
    while (is_any(first, WARP, AT_SHUFFLE)) {
        if (is_any(first, WARP, AT_BARRIER) || is_any(first, WARP, ENDED))
            die("a kernel shuffles, but not all threads of the warp take part");
        for (uint32_t i = 0; i < WARP; i++)
            lanes[i].received = lanes[i ^ lanes[i].lane_mask].value;
        for (uint32_t i = 0; i < WARP; i++)
            resume(lanes[i].on);
    }
}

static void execute_block(void) {
    gpu_block.nstarted = 0;
    while (gpu_block.nstarted < gpu_block.nthreads)
        resume(take_fiber());
    for (;;) {
        for (uint32_t i = 0; i < gpu_block.nthreads; i += WARP)
            execute_warp(i);
        if (!is_any(0, gpu_block.nthreads, AT_BARRIER))
            return;
        for (uint32_t i = 0; i < gpu_block.nthreads; i++) {
            if (gpu_block.threads[i].state == AT_BARRIER)
                resume(gpu_block.threads[i].on);
        }
    }
}

static void execute_kernel(gpu_kernel *kernel, uint32_t nblocks, uint32_t nthreads, const tb__cuda_args *args) {
    gpu_block.kernel = kernel;
    gpu_block.args = args;
    gpu_block.nthreads = nthreads;
    for (blockIdx.x = 0; blockIdx.x < nblocks; blockIdx.x++)
        execute_block();
}

/* ---- Keywords and intrinsics ------------------------------------------------------------------------------------- */

#define __global__
#define __device__
#define __constant__ const
#define __shared__   static
#define __grid_constant__
#define __launch_bounds__(...)
#define __forceinline__ inline __attribute__((always_inline))
#define __noinline__    __attribute__((noinline))

struct alignas(8) uint2 {
    uint32_t x, y;
};
struct alignas(16) uint4 {
    uint32_t x, y, z, w;
};

static inline uint2 make_uint2(uint32_t x, uint32_t y) {
    return uint2{x, y};
}

static inline uint4 make_uint4(uint32_t x, uint32_t y, uint32_t z, uint32_t w) {
    return uint4{x, y, z, w};
}

static inline void __syncthreads(void) {
    wait_at(AT_BARRIER);
}

static inline uint32_t __shfl_xor_sync(uint32_t members, uint32_t value, uint32_t lane_mask) {
    gpu_thread *self = &gpu_block.threads[threadIdx.x];
    if (members != ~0U)
        die("a shuffle of a part of a warp, which the fake driver does not have");
    self->value = value;
    self->lane_mask = lane_mask;
    wait_at(AT_SHUFFLE);
    return self->received;
}

template <class T> static inline T __ldca(const T *p) {
    return *p;
}

template <class T> static inline void __stwb(T *p, T x) {
    *p = x;
}

template <class T> static inline void atomicMin(T *p, T x) {
    *p = x < *p ? x : *p;
}

template <class T> static inline void atomicMax(T *p, T x) {
    *p = x > *p ? x : *p;
}

template <class To, class From> static inline To bits_as(From x) {
    To y;
    static_assert(sizeof x == sizeof y);
    memcpy(&y, &x, sizeof y);
    return y;
}

static inline uint32_t __float_as_uint(float x) {
    return bits_as<uint32_t>(x);
}

static inline float __uint_as_float(uint32_t x) {
    return bits_as<float>(x);
}

static inline long long __double_as_longlong(double x) {
    return bits_as<long long>(x);
}

static inline double __longlong_as_double(long long x) {
    return bits_as<double>(x);
}

static inline float __fdiv_rn(float x, float y) {
    return x / y;
}

static inline float __frcp_rn(float x) {
    return 1 / x;
}

static inline float __fmaf_rn(float x, float y, float z) {
    return fmaf(x, y, z);
}

static inline uint64_t __umul64hi(uint64_t x, uint64_t y) {
    return (uint64_t)((unsigned __int128)x * y >> 64);
}

static inline uint32_t __funnelshift_r(uint32_t low, uint32_t high, uint32_t shift) {
    return (uint32_t)(((uint64_t)high << 32 | low) >> (shift & 31));
}

/* Bytes of the two words, the four that the lowest half bytes of `which` say. */
static inline uint32_t __byte_perm(uint32_t x, uint32_t y, uint32_t which) {
    uint32_t r = 0;
    for (int i = 0; i < 4; i++)
        r |= (uint32_t)(((uint64_t)y << 32 | x) >> (8 * (which >> (4 * i) & 7)) & 0xff) << (8 * i);
    return r;
}

/* The larger ones of two numbers of 16 bits each. */
static inline uint32_t __vmaxu2(uint32_t x, uint32_t y) {
    uint32_t low = (x & 0xffff) > (y & 0xffff) ? x : y, high = x >> 16 > y >> 16 ? x : y;
    return (low & 0xffff) | (high & 0xffff0000);
}

#endif
