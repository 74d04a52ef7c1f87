/* The same transfer as row_col, written by hand for this one case: the shards are in mappings that all processes have,
 * and each target copies its columns out of them. Each loop here was chosen by measuring. */
#include "bench/bench.h"

#include "base/mem.h"
#include "base/process.h"

#include <errno.h>
#include <inttypes.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#ifdef __x86_64__
#include <immintrin.h>
#endif

/* Shards that begin at the same place of a page slow each other down on some processors. */
enum { SKEW = 5 * 4096, SIDE = TOOL_DEFAULT_RANKS };

/* Before glibc 2.37. */
#ifndef MADV_COLLAPSE
#define MADV_COLLAPSE 25
#endif

static tb_status map(size_t nbytes, uint32_t **out) {
    int fd = tb__fd_own(memfd_create("by-hand", MFD_CLOEXEC));
    void *mapping =
        fd >= 0 && ftruncate(fd, (off_t)nbytes) == 0 ? tb__map_shared(fd, nbytes, PROT_READ | PROT_WRITE) : NULL;
    int error = errno;
    if (fd >= 0)
        tb__fd_close(fd);
    if (!mapping)
        return tb__fail(TB_NO_MEMORY, "can't map %zu bytes for the hand-written loops: %s", nbytes, strerror(error));
    madvise(mapping, nbytes, MADV_HUGEPAGE);
    *out = mapping;
    return TB_OK;
}

/* Once all of it is there: huge pages where the kernel makes them, as tensors of tb_alloc have. */
static void make_huge(void *memory, size_t nbytes) {
    (void)madvise(memory, nbytes, MADV_COLLAPSE);
}

tb_status bench_hand_init(bench_hand *hand, const tb_shape *shape) {
    *hand = (bench_hand){.rows = shape->dim[0] / SIDE, .columns = shape->dim[1]};
    hand->shard_bytes = (size_t)hand->rows * (size_t)hand->columns * sizeof(uint32_t);
    for (int i = 0; i < SIDE; i++) {
        tb_status status = map(hand->shard_bytes + SKEW, &hand->shard[i]);
        if (status != TB_OK) {
            bench_hand_fini(hand);
            return status;
        }
    }
    return TB_OK;
}

void bench_hand_fini(bench_hand *hand) {
    for (int i = 0; i < SIDE; i++) {
        if (hand->shard[i])
            munmap(hand->shard[i], hand->shard_bytes + SKEW);
    }
    if (hand->block)
        munmap(hand->block, hand->shard_bytes);
    *hand = (bench_hand){0};
}

tb_status bench_hand_prepare(bench_hand *hand, bool is_source, int32_t rank) {
    if (hand->rows == 0)
        return TB_OK;
    if (!is_source && !hand->block)
        TB_TRY(map(hand->shard_bytes, &hand->block));
    if (!is_source) {
        memset(hand->block, 0xa5, hand->shard_bytes);
        make_huge(hand->block, hand->shard_bytes);
        return TB_OK;
    }
    uint32_t *word = hand->shard[rank], first = (uint32_t)(rank * hand->rows * hand->columns);
    for (size_t i = 0; i < hand->shard_bytes / sizeof *word; i++)
        word[i] = first + (uint32_t)i;
    make_huge(word, hand->shard_bytes);
    return TB_OK;
}

static void copy_rows(char *dst, size_t dst_step, const char *src, size_t src_step, size_t run, int64_t rows) {
    for (int64_t r = 0; r < rows; r++)
        memcpy(dst + (size_t)r * dst_step, src + (size_t)r * src_step, run);
}

#ifdef __x86_64__
/* Four rows at a time: one row is too short for the processor's prefetching to get going. Stores go past the cache. */
__attribute__((target("avx2"))) static void stream_rows(char *dst, size_t dst_step, const char *src, size_t src_step,
                                                        size_t run, int64_t rows) {
    for (int64_t r = 0; r + 4 <= rows; r += 4) {
        char *to = dst + (size_t)r * dst_step;
        const char *from = src + (size_t)r * src_step;
        for (size_t i = 0; i < run; i += 64) {
            for (size_t k = 0; k < 4; k++) {
                const __m256i *in = (const __m256i *)(from + k * src_step + i);
                __m256i *out = (__m256i *)(to + k * dst_step + i), low = in[0], high = in[1];
                _mm256_stream_si256(out, low);
                _mm256_stream_si256(out + 1, high);
            }
        }
    }
    int64_t done = rows / 4 * 4;
    copy_rows(dst + (size_t)done * dst_step, dst_step, src + (size_t)done * src_step, src_step, run, rows - done);
    _mm_sfence();
}
#endif

void bench_hand_run(const bench_hand *hand, int32_t rank) {
    size_t step = (size_t)hand->columns * sizeof(uint32_t), run = step / SIDE;
    void (*copy)(char *, size_t, const char *, size_t, size_t, int64_t) = copy_rows;
#ifdef __x86_64__
    if (run % 64 == 0 && __builtin_cpu_supports("avx2"))
        copy = stream_rows;
#endif
    for (int s = 0; s < SIDE; s++)
        copy((char *)hand->block + (size_t)s * (size_t)hand->rows * run, run,
             (const char *)hand->shard[s] + (size_t)rank * run, step, run, hand->rows);
}

tb_status bench_hand_verify(const bench_hand *hand, int32_t rank) {
    int64_t width = hand->columns / SIDE;
    const uint32_t *word = hand->block;
    for (int s = 0; s < SIDE; s++) {
        for (int64_t r = 0; r < hand->rows; r++) {
            uint32_t expected = (uint32_t)((s * hand->rows + r) * hand->columns + rank * width);
            for (int64_t c = 0; c < width; c++) {
                if (*word++ != expected + (uint32_t)c)
                    return tb__fail(TB_INTERNAL, "the hand-written loops: element %" PRId64 ",%" PRId64 " is wrong",
                                    s * hand->rows + r, rank * width + c);
            }
        }
    }
    return TB_OK;
}
