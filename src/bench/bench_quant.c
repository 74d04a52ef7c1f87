/* quant_mxfp8: bf16 in memory to MXFP8, next to memcpy with as many threads. GB/s are of traffic. To quantise n numbers
 * is to read 2n bytes and to write n + n/32; memcpy copies half of their sum, so that it reads and writes as many bytes
 * together, in the same memory. */
#include "bench/bench.h"

#include "device/host/quant.h"
#include "device/host/workers.h"

#include <inttypes.h>
#include <math.h>
#include <string.h>

enum { COLUMNS = 8192, BLOCK = 32, NAN_CODE = 127, NCHECKED = 4096 };

/* Both ways of working share the buffers. */
typedef struct quant {
    tool_buffers copied; /* as much of them as memcpy copies */
    tb__quant_rows from;
    tb__quant_tensor to;
    double traffic;
} quant;

/* Numbers of both signs; they lie between 2^-22 and 2^21, those of a block close together. */
static void fill(void *arg, int64_t from, int64_t to) {
    uint16_t *out = arg;
    for (int64_t i = from * COLUMNS; i < to * COLUMNS; i++) {
        uint32_t x = (uint32_t)i * 2654435761U, block = (uint32_t)(i / BLOCK) * 2246822519U >> 16;
        out[i] = (uint16_t)((x & 1) << 15 | (105 + block % 41) << 7 | (x >> 20 & 0x1ff));
    }
}

static tb_status quant_init(quant *q, const tool_buffers *buffers) {
    int64_t rows = (int64_t)buffers->nbytes / (2 * COLUMNS);
    tb__quant_format format = {.kind = TB__QUANT_MXFP8};
    tb__quant_size size;
    TB_TRY(tb__quant_measure(&format, rows, COLUMNS, &size));
    int64_t traffic = 2 * rows * COLUMNS + size.data_nbytes + size.scale_nbytes;
    *q = (quant){.copied = *buffers, .traffic = (double)traffic};
    q->copied.nbytes = (size_t)traffic / 2;
    q->from = (tb__quant_rows){.data = buffers->src, .dtype = TB_BF16, .stride = COLUMNS};
    q->to = (tb__quant_tensor){.format = format, .rows = rows, .columns = COLUMNS, .data = buffers->dst};
    q->to.scales = buffers->dst + size.data_nbytes;
    tb__workers_set(buffers->nthreads);
    tb__workers_for(rows, fill, buffers->src);
    return TB_OK;
}

static tb_status run_round(quant *q, bench_round *out) {
    TB_TRY(tool_memcpy(&q->copied, &out->theirs));
    out->theirs *= 2;
    int64_t began = tool_now_ns();
    TB_TRY(tb__quant_quantise(&q->to, 0, q->to.rows, &q->from));
    out->ours = q->traffic / (double)(tool_now_ns() - began);
    return TB_OK;
}

static double bf16_value(uint16_t bits) {
    uint32_t wide = (uint32_t)bits << 16;
    float value;
    memcpy(&value, &wide, sizeof value);
    return (double)value;
}

/* Of a code without its sign; 127 is NaN. */
static double e4m3_value(unsigned code) {
    unsigned exponent = code >> 3, mantissa = code & 7;
    return exponent == 0 ? ldexp(mantissa, -9) : ldexp(8 + mantissa, (int)exponent - 10);
}

/* Whether no other code is nearer to x, or as near and even. */
static bool is_nearest(unsigned code, double x) {
    double distance = fabs(e4m3_value(code) - x);
    for (unsigned other = code > 0 ? code - 1 : 0; other <= code + 1 && other < NAN_CODE; other++) {
        double there = fabs(e4m3_value(other) - x);
        if (there < distance || (there == distance && other != code && code % 2 == 1))
            return false;
    }
    return code < NAN_CODE;
}

/* By the definition of the format, in doubles, which are exact here. */
static bool is_block_right(const uint16_t *in, const uint8_t *out, uint8_t scale) {
    double amax = 0;
    for (int i = 0; i < BLOCK; i++)
        amax = fmax(amax, fabs(bf16_value(in[i])));
    int exponent = -127;
    while (ldexp(448, exponent) < amax)
        exponent++;
    if (scale != exponent + 127)
        return false;
    for (int i = 0; i < BLOCK; i++) {
        if (out[i] >> 7 != in[i] >> 15 || !is_nearest(out[i] & 127, fabs(ldexp(bf16_value(in[i]), -exponent))))
            return false;
    }
    return true;
}

/* Some thousand blocks, evenly spread; the step is odd, so that they lie in all columns. */
static tb_status verify(const quant *q) {
    const uint16_t *in = q->from.data;
    const uint8_t *data = q->to.data, *scales = q->to.scales;
    int64_t nblocks = q->to.rows * COLUMNS / BLOCK, step = nblocks / NCHECKED | 1;
    for (int64_t b = 0; b < nblocks; b += step) {
        if (!is_block_right(in + b * BLOCK, data + b * BLOCK, scales[b]))
            return tb__fail(TB_INTERNAL, "the block of row %" PRId64 ", column %" PRId64 " is wrong",
                            b * BLOCK / COLUMNS, b * BLOCK % COLUMNS);
    }
    return TB_OK;
}

/* The memory that is quantised to has just been copied to in every round, so what is verified is of the last one. */
static tb_status run_rounds(const tool_buffers *buffers, bench_rounds *rounds, tool_guard *guard, bench_round *out) {
    bench_round unused;
    quant q;
    tool_show_line(BENCH_QUANT ": warming up");
    TB_TRY(quant_init(&q, buffers));
    TB_TRY(run_round(&q, &unused));
    while (bench_rounds_next(rounds, tool_now_ns())) {
        TB_TRY(tool_guard_check(guard));
        tool_show_line(BENCH_QUANT ": round %d of %d", rounds->done, rounds->most);
        TB_TRY(run_round(&q, &out[rounds->done - 1]));
    }
    tool_show_line(BENCH_QUANT ": verifying");
    return verify(&q);
}

tb_status bench_quant_run(const tool_buffers *buffers, bench_rounds *rounds, tool_guard *guard, bench_round *out) {
    tb_status status = run_rounds(buffers, rounds, guard, out);
    tool_end_threads();
    return status;
}
