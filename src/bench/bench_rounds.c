/* How often lines are measured, and how much they move, so that all of them together take minutes everywhere. */
#include "bench/bench.h"

bench_rounds bench_rounds_begin(int most, int64_t budget_ns, int64_t now_ns) {
    return (bench_rounds){.most = most, .budget_ns = budget_ns, .began_ns = now_ns};
}

bool bench_rounds_next(bench_rounds *r, int64_t now_ns) {
    if (r->is_last)
        return false;
    if (r->done > 0 && now_ns - r->round_ns > r->longest_ns)
        r->longest_ns = now_ns - r->round_ns;
    r->round_ns = now_ns;
    r->done++;
    /* It has to be known before the round whether it is the last: that one is verified. */
    bool is_late = r->budget_ns > 0 && now_ns - r->began_ns + 2 * r->longest_ns > r->budget_ns;
    r->is_last = r->done == r->most || is_late;
    return true;
}

int64_t bench_fit_size(int64_t size, int64_t took_ns, int64_t budget_ns) {
    enum { LEAST = 64 << 20 };
    for (; took_ns > budget_ns && size / 2 >= LEAST; took_ns /= 2)
        size /= 2;
    return size;
}

static int compare_doubles(const void *left, const void *right) {
    double a = *(const double *)left, b = *(const double *)right;
    return (a > b) - (a < b);
}

double bench_median(double *value, int n) {
    qsort(value, (size_t)n, sizeof *value, compare_doubles);
    return n % 2 ? value[n / 2] : (value[n / 2 - 1] + value[n / 2]) / 2;
}
