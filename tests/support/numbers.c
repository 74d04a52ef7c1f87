/* Reference arithmetic. Rounding is a search in the sorted list of a format's values, so that it shares no idea with
 * the kernels it is there to check. */
#include "numbers.h"

#include <math.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

typedef struct format {
    int exponent, mantissa; /* bits */
    bool has_infinity;      /* f8e4m3 has none, and one NaN: all ones */
    bool saturates;
    uint32_t nan;   /* what a NaN becomes; f16 and bf16 keep the payload too */
    double *values; /* of the finite positive codes, ascending, then what would come next */
    uint32_t nvalues;
} format;

static format formats[TB_DTYPE_COUNT] = {
    [TB_F16] = {5, 10, true, false, 0x7e00, NULL, 0},     [TB_BF16] = {8, 7, true, false, 0x7fc0, NULL, 0},
    [TB_F32] = {8, 23, true, false, 0x7fc00000, NULL, 0}, [TB_F8E4M3] = {4, 3, false, true, 0x7f, NULL, 0},
    [TB_F8E5M2] = {5, 2, true, true, 0x7f, NULL, 0},
};

size_t number_size(tb_dtype dtype) {
    return tb_dtype_bits(dtype) / 8;
}

uint64_t number_load(tb_dtype dtype, const void *at) {
    uint64_t bits = 0;
    for (size_t i = 0; i < number_size(dtype); i++)
        bits |= (uint64_t)((const uint8_t *)at)[i] << (8 * i);
    return bits;
}

void number_store(tb_dtype dtype, void *at, uint64_t bits) {
    for (size_t i = 0; i < number_size(dtype); i++)
        ((uint8_t *)at)[i] = (uint8_t)(bits >> (8 * i));
}

static double magnitude(const format *f, uint32_t code) {
    uint32_t fraction = code & ((1U << f->mantissa) - 1), exponent = code >> f->mantissa;
    int bias = (1 << (f->exponent - 1)) - 1;
    if (exponent == 0)
        return ldexp(fraction, 1 - bias - f->mantissa);
    return ldexp((double)(fraction + (1U << f->mantissa)), (int)exponent - bias - f->mantissa);
}

/* The first code that is not finite. */
static uint32_t first_special(const format *f) {
    uint32_t all = (1U << (f->exponent + f->mantissa)) - 1;
    return f->has_infinity ? ((1U << f->exponent) - 1) << f->mantissa : all;
}

double number_value(tb_dtype dtype, uint64_t bits) {
    if (dtype == TB_F64) {
        double x;
        memcpy(&x, &bits, sizeof x);
        return x;
    }
    const format *f = &formats[dtype];
    uint32_t code = (uint32_t)bits & ((1U << (f->exponent + f->mantissa)) - 1);
    double x = NAN;
    if (code < first_special(f))
        x = magnitude(f, code);
    else if (f->has_infinity && code == first_special(f))
        x = INFINITY;
    return bits >> (f->exponent + f->mantissa) & 1 ? -x : x;
}

static void list_values(format *f) {
    f->nvalues = first_special(f);
    f->values = malloc((f->nvalues + 1) * sizeof *f->values);
    if (!f->values)
        abort();
    for (uint32_t i = 0; i <= f->nvalues; i++)
        f->values[i] = magnitude(f, i);
}

static void list_all_values(void) {
    for (int i = 0; i < TB_DTYPE_COUNT; i++) {
        if (formats[i].exponent && i != TB_F32)
            list_values(&formats[i]);
    }
}

/* The code nearest to x >= 0; of two as near, the even one. */
static uint32_t nearest(const format *f, double x) {
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, list_all_values);
    uint32_t last = f->nvalues, low = 0, high = last;
    if (x >= f->values[last]) {
        low = last;
    } else {
        while (high - low > 1) {
            uint32_t middle = (low + high) / 2;
            if (f->values[middle] <= x)
                low = middle;
            else
                high = middle;
        }
        double below = x - f->values[low], above = f->values[low + 1] - x;
        if (above < below || (above == below && low % 2))
            low++;
    }
    /* `last` is infinity where there is one. */
    return low == last && f->saturates ? last - 1 : low;
}

static uint64_t narrow(tb_dtype to, uint32_t bits) {
    const format *f = &formats[to];
    uint32_t sign = (bits >> 31) << (f->exponent + f->mantissa);
    if ((bits & 0x7fffffff) > 0x7f800000) {
        uint32_t payload = f->saturates ? 0 : (bits & 0x7fffff) >> (23 - f->mantissa);
        return sign | f->nan | payload;
    }
    return sign | nearest(f, fabs(number_value(TB_F32, bits)));
}

static uint32_t f32_bits(double value) {
    float x = (float)value;
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}

/* The hardware's casts make NaN quiet. */
static uint32_t f32_of_f64(uint64_t bits) {
    double value = number_value(TB_F64, bits);
    return isnan(value) ? (uint32_t)(bits >> 63 << 31 | 0x7fc00000 | (bits & ~(UINT64_MAX << 51)) >> 29)
                        : f32_bits(value);
}

static uint64_t f64_of_f32(uint32_t bits) {
    double value = number_value(TB_F32, bits);
    uint64_t result = (uint64_t)(bits >> 31) << 63 | 0x7ff8000000000000 | (uint64_t)(bits & 0x3fffff) << 29;
    if (!isnan(value))
        memcpy(&result, &value, sizeof result);
    return result;
}

static uint32_t widen(tb_dtype from, uint64_t bits) {
    const format *f = &formats[from];
    int width = f->exponent + f->mantissa;
    double value = number_value(from, bits);
    if (!isnan(value))
        return f32_bits(value);
    uint32_t sign = (uint32_t)(bits >> width & 1) << 31;
    if (from == TB_F8E4M3)
        return sign | 0x7fc00000;
    /* A bf16 is half an f32, whatever is in it; the conversion of the others makes them quiet. */
    uint32_t payload = (uint32_t)(bits & ((1U << f->mantissa) - 1)) << (23 - f->mantissa);
    return sign | 0x7f800000 | payload | (from == TB_BF16 ? 0 : 0x400000);
}

static double apply(tb_reduce_op op, double a, double b) {
    if (op == TB_MIN || op == TB_MAX) {
        if (isnan(a) || isnan(b))
            return NAN;
        return (op == TB_MIN ? b < a : b > a) ? b : a;
    }
    return op == TB_PRODUCT ? a * b : a + b;
}

static uint64_t reduce_float(tb_dtype from, tb_reduce_op op, uint64_t divisor, const uint64_t *bits, size_t n) {
    bool is_double = from == TB_F64;
    double acc = number_value(from, bits[0]);
    for (size_t i = 1; i < n; i++) {
        acc = apply(op, acc, number_value(from, bits[i]));
        /* Twice rounded is once rounded here: a double has more than twice the bits of a float. */
        acc = is_double ? acc : (double)(float)acc;
    }
    if (divisor > 1)
        acc = is_double ? acc / (double)divisor : (double)(float)(acc / (double)(float)divisor);
    if (is_double) {
        uint64_t result = 0x7ff8000000000000;
        if (!isnan(acc))
            memcpy(&result, &acc, sizeof result);
        return result;
    }
    return isnan(acc) ? 0x7fc00000 : f32_bits(acc);
}

static int64_t as_signed(uint64_t x, unsigned bits) {
    return (int64_t)(x << (64 - bits)) >> (64 - bits);
}

static bool is_signed(tb_dtype dtype) {
    return dtype == TB_I8 || dtype == TB_I16 || dtype == TB_I32 || dtype == TB_I64;
}

uint64_t number_cast(tb_dtype from, tb_dtype to, uint64_t bits) {
    if (from == to)
        return bits;
    if (from != TB_F64 && !formats[from].exponent) {
        uint64_t value = is_signed(from) ? (uint64_t)as_signed(bits, tb_dtype_bits(from)) : bits;
        return value & (UINT64_MAX >> (64 - tb_dtype_bits(to)));
    }
    uint32_t wide = from == TB_F32 ? (uint32_t)bits : from == TB_F64 ? f32_of_f64(bits) : widen(from, bits);
    return to == TB_F32 ? wide : to == TB_F64 ? f64_of_f32(wide) : narrow(to, wide);
}

static uint64_t reduce_integer(tb_dtype from, tb_reduce_op op, const uint64_t *bits, size_t n) {
    unsigned width = tb_dtype_bits(from);
    uint64_t acc = bits[0];
    for (size_t i = 1; i < n; i++) {
        uint64_t b = bits[i];
        bool less = is_signed(from) ? as_signed(b, width) < as_signed(acc, width) : b < acc;
        if (op == TB_MIN)
            acc = less ? b : acc;
        else if (op == TB_MAX)
            acc = less ? acc : b;
        else
            acc = (op == TB_PRODUCT ? acc * b : acc + b) & (UINT64_MAX >> (64 - width));
    }
    return acc;
}

uint64_t number_reduce(tb_dtype from, tb_dtype wire, tb_dtype to, tb_reduce_op op, uint64_t divisor,
                       const uint64_t *bits, size_t n) {
    if (n == 1 && divisor <= 1)
        return number_cast(wire, to, number_cast(from, wire, bits[0]));
    bool is_small = formats[from].exponent, is_float = is_small || from == TB_F64;
    uint64_t acc = is_float ? reduce_float(from, op, divisor, bits, n) : reduce_integer(from, op, bits, n);
    return number_cast(wire, to, number_cast(is_small ? TB_F32 : from, wire, acc));
}

uint64_t number_random(tb_dtype dtype, rng *r) {
    unsigned bits = tb_dtype_bits(dtype);
    uint64_t mask = UINT64_MAX >> (64 - bits), x = rng_next(r) & mask;
    int mantissa = dtype == TB_F64 ? 52 : formats[dtype].mantissa;
    if (mantissa == 0)
        return x;
    uint64_t exponent = (mask >> 1) & ~((1ULL << mantissa) - 1), sign = x & ~(mask >> 1);
    switch (rng_range(r, 0, 11)) {
    case 0:
        return sign;
    case 1:
        return sign | exponent; /* infinity, or a large number */
    case 2:
        return x | exponent; /* NaN, mostly */
    case 3:
        return x & ~exponent; /* subnormal */
    case 4:
    case 5:
    case 6:
    case 7: /* about 1, so that sums cancel and tie */
        return sign | ((exponent >> 1) & exponent) | (x & ((1ULL << mantissa) - 1));
    default:
        return x;
    }
}
