/* How fast quantisers are, next to plain memcpy that reads and writes as many bytes with as many threads, in the same
 * run. Figures are of traffic: bytes read and written. Each line takes turns with memcpy; medians of five. --size MIB
 * is how much bf16 there is, --threads N says with how many, else as many as there are cores. */
#include "measure.h"

#include "device/host/quant.h"
#include "device/host/workers.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

enum { REPEATS = 5, COLUMNS = 8192 };
#define MIB ((size_t)1 << 20)

static tb__quant_rows src;
static int64_t rows;
static char *data, *scales;

static void copy_part(void *arg, int64_t from, int64_t to) {
    (void)arg;
    memcpy(data + (size_t)from * MIB, (const char *)src.data + (size_t)from * MIB, (size_t)(to - from) * MIB);
}

static void check(tb_status status) {
    if (status == TB_OK)
        return;
    fprintf(stderr, "bench/quant: %s\n", tb_error_detail());
    exit(1);
}

typedef struct line {
    const char *what;
    tb__quant_format format;
    bool is_back;
    double wanted; /* the ratio to memcpy that it must reach; 0: any */
} line;

static void run(const line *l, const tb__quant_tensor *t) {
    check(l->is_back ? tb__quant_dequantise(t, 0, rows, &src) : tb__quant_quantise(t, 0, rows, &src));
}

static bool measure(const line *l) {
    tb__quant_size size;
    check(tb__quant_measure(&l->format, rows, COLUMNS, &size));
    tb__quant_tensor t = {.format = l->format, .rows = rows, .columns = COLUMNS, .data = data, .scales = scales};
    t.scale = 0.01F;
    double traffic = (double)(rows * COLUMNS * 2) + (double)size.data_nbytes + (double)size.scale_nbytes;
    /* As much as fits: a rate is what counts. */
    int64_t mib = rows * COLUMNS / (int64_t)MIB;
    double ours[REPEATS], theirs[REPEATS];
    run(l, &t);
    tb__workers_for(mib, copy_part, NULL);
    for (int r = 0; r < REPEATS; r++) {
        double start = now();
        tb__workers_for(mib, copy_part, NULL);
        theirs[r] = now() - start;
        start = now();
        run(l, &t);
        ours[r] = now() - start;
    }
    double rate = traffic / median(ours, REPEATS),
           memcpy_rate = 2.0 * (double)mib * (double)MIB / median(theirs, REPEATS);
    bool ok = rate >= l->wanted * memcpy_rate;
    printf("  %-40s  %6.2f GB/s  memcpy %6.2f GB/s  %5.2f", l->what, 1e-9 * rate, 1e-9 * memcpy_rate,
           rate / memcpy_rate);
    if (l->wanted > 0)
        printf("  (at least %.2f) %s", l->wanted, ok ? "ok" : "TOO SLOW");
    printf("\n");
    return ok;
}

/* Numbers about 1, of both signs, that differ. */
static void fill(void *arg, int64_t from, int64_t to) {
    (void)arg;
    uint16_t *out = src.data;
    for (int64_t i = from * COLUMNS; i < to * COLUMNS; i++) {
        uint32_t x = (uint32_t)i * 2654435761U;
        out[i] = (uint16_t)((0x3c00 + (x >> 22)) | (x & 1) << 15);
    }
}

static int64_t number(const char *text, int64_t least, int64_t most) {
    char *end;
    int64_t n = strtoll(text, &end, 10);
    if (end != text && *end == '\0' && n >= least && n <= most)
        return n;
    fprintf(stderr, "bench/quant: '%s' is not a number from %" PRId64 " to %" PRId64 "\n", text, least, most);
    exit(2);
}

int main(int argc, char **argv) {
    int64_t mib = 1024, threads = sysconf(_SC_NPROCESSORS_ONLN);
    for (int i = 1; i < argc; i += 2) {
        if (i + 1 < argc && strcmp(argv[i], "--size") == 0) {
            mib = number(argv[i + 1], 16, 1 << 20);
        } else if (i + 1 < argc && strcmp(argv[i], "--threads") == 0) {
            threads = number(argv[i + 1], 1, TB__WORKERS_MAX);
        } else {
            fprintf(stderr, "usage: quant [--size MIB] [--threads N]\n");
            return 2;
        }
    }
    rows = mib * (int64_t)MIB / (2 * COLUMNS);
    src = (tb__quant_rows){.data = aligned_alloc(2 * MIB, (size_t)mib * MIB), .dtype = TB_BF16, .stride = COLUMNS};
    data = aligned_alloc(2 * MIB, (size_t)mib * MIB / 2);
    scales = aligned_alloc(2 * MIB, (size_t)mib * MIB / 16 + 4 * MIB);
    if (!src.data || !data || !scales)
        return 1;
    tb__workers_set((int)threads);
    tb__workers_for(rows, fill, NULL);
    memset(data, 1, (size_t)mib * MIB / 2);
    memset(scales, 1, (size_t)mib * MIB / 16);
    printf("bf16 [%" PRId64 ", %d], %" PRId64 " MiB, and back: traffic, and its ratio to memcpy's, with %d threads\n",
           rows, COLUMNS, mib, tb__workers_count());
    static const line lines[] = {
        {"to mxfp8", {.kind = TB__QUANT_MXFP8}, false, 0.6},
        {"to mxfp8, scales in tiles", {.kind = TB__QUANT_MXFP8, .is_swizzled = true}, false, 0},
        {"to fp8, one scale", {.kind = TB__QUANT_FP8_TENSOR}, false, 0},
        {"to fp8, blocks of 128 x 128", {.kind = TB__QUANT_FP8_BLOCK}, false, 0},
        {"to nvfp4", {.kind = TB__QUANT_NVFP4}, false, 0},
        {"from nvfp4", {.kind = TB__QUANT_NVFP4}, true, 0},
        {"from mxfp8", {.kind = TB__QUANT_MXFP8}, true, 0},
    };
    bool ok = true;
    for (size_t i = 0; i < sizeof lines / sizeof *lines; i++)
        ok = measure(&lines[i]) && ok;
    free(src.data);
    free(data);
    free(scales);
    return ok ? 0 : 1;
}
