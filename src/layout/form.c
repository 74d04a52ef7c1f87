/* Which values a linear form takes. A term whose step is at most the interval's length leaves no gap, and only widens
 * the interval; a common divisor of all other steps narrows it; two terms are decided as in the Euclidean algorithm.
 * With more terms, the values of the outermost index are tried for which the others can reach the interval: few, if
 * dims are nested as usual. */
#include "layout/form.h"

#include "base/wide.h"

#include <string.h>

static int64_t gcd(int64_t a, int64_t b) {
    while (b != 0) {
        int64_t rest = a % b;
        a = b;
        b = rest;
    }
    return a;
}

/* Neither is negative. */
static int64_t divide_up(int64_t a, int64_t b) {
    return a / b + (a % b != 0);
}

/* The least x with lo <= a*x mod m <= hi, where 0 < lo <= hi < m and 0 <= a < m; -1: none. */
static int64_t first_between(int64_t a, int64_t m, int64_t lo, int64_t hi) {
    if (a == 0)
        return -1;
    if (a > m - a)
        return first_between(m - a, m, m - hi, m - lo);
    int64_t x = divide_up(lo, a);
    if (x <= hi / a)
        return x;
    /* No multiple of a is in the interval; a*x - m*y is, for the least y for which m*y is close enough below a
     * multiple. */
    int64_t y = first_between(m % a, a, (a - hi % a) % a, (a - lo % a) % a);
    return y < 0 ? -1 : (int64_t)(((tb__wide)m * (uint64_t)y + (uint64_t)lo + (uint64_t)a - 1) / (uint64_t)a);
}

/* Whether a multiple of the term is in the interval. */
static bool one_reaches(tb__term term, int64_t lo, int64_t hi) {
    int64_t x = lo > 0 ? divide_up(lo, term.step) : 0;
    return hi >= 0 && x <= term.most && x <= hi / term.step;
}

/* The interval is shorter than both steps, and lo > 0. */
static bool two_reach(tb__term inner, tb__term outer, int64_t lo, int64_t hi) {
    int64_t end = inner.step * inner.most;
    if (one_reaches(outer, lo, hi) || one_reaches(outer, lo - end, hi - end))
        return true;
    /* Otherwise the interval lies between the inner term's ends, for these x, where any multiple of its step will
     * do. */
    int64_t x = hi >= end ? (hi - end) / outer.step + 1 : 0, last = (lo - 1) / outer.step;
    if (last > outer.most)
        last = outer.most;
    if (x > last)
        return false;
    int64_t beyond = (hi - outer.step * x) % inner.step; /* of hi, above a multiple */
    if (beyond <= hi - lo)
        return true;
    int64_t falls = (inner.step - outer.step % inner.step) % inner.step; /* `beyond` falls by so much with each x,
                                                                          * modulo the inner step */
    int64_t more = first_between(falls, inner.step, inner.step - beyond, inner.step - beyond + (hi - lo));
    return more >= 0 && more <= last - x;
}

tb_status tb__form_reaches(const tb__term *terms, int count, int64_t lo, int64_t hi, int64_t *steps, bool *reaches) {
    tb__term left[2 * TB_MAX_DIMS];
    int64_t sum, divisor;
    int n = count;
    memcpy(left, terms, sizeof *left * (size_t)count);
    for (;;) {
        int gapless = 0;
        while (gapless < n && left[gapless].step <= hi - lo + 1) {
            lo -= left[gapless].step * left[gapless].most;
            gapless++;
        }
        n -= gapless;
        memmove(left, left + gapless, sizeof *left * (size_t)n);
        sum = divisor = 0;
        for (int i = 0; i < n; i++) {
            sum += left[i].step * left[i].most;
            divisor = divisor == 1 ? 1 : gcd(left[i].step, divisor);
        }
        *reaches = hi >= 0 && lo <= sum && (lo <= 0 || hi >= sum);
        if (*reaches || hi < 0 || lo > sum)
            return TB_OK;
        if (divisor == 1)
            break;
        lo = divide_up(lo, divisor);
        hi = hi / divisor;
        if (lo > hi)
            return TB_OK;
        for (int i = 0; i < n; i++)
            left[i].step /= divisor;
    }
    if (n == 2) {
        *reaches = two_reach(left[0], left[1], lo, hi);
        return TB_OK;
    }
    tb__term outer = left[n - 1];
    int64_t rest = sum - outer.step * outer.most;
    int64_t x = lo > rest ? divide_up(lo - rest, outer.step) : 0;
    for (; x <= outer.most && x <= hi / outer.step && !*reaches; x++) {
        if ((*steps)-- <= 0)
            return TB_TOO_BIG;
        TB_TRY(tb__form_reaches(left, n - 1, lo - outer.step * x, hi - outer.step * x, steps, reaches));
    }
    return TB_OK;
}
