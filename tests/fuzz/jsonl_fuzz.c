/* One line of JSON, as `tensorbus layout --jsonl` and `tensorbus plan --jsonl` take it, with "hosts" besides: the host
 * of rank 0, 1, ... A plan that was made must stand its own proof, its figures must fit together, and its IR must
 * survive being dumped and read. */
#include "base/wide.h"
#include "cost.h"
#include "fuzz.h"
#include "numbers.h"

/* Beyond these a plan is made, but not proved: that costs the whole world's traffic. */
enum { MOST_RANKS = 64, MOST_BOXES = 1 << 12 };

static bool is_small(const tb_layout *src, const tb_layout *dst, const tb_shape *shape) {
    if (src->nranks + dst->nranks > MOST_RANKS)
        return false;
    double boxes = (double)src->nranks * (double)dst->nranks;
    for (int d = 0; d < shape->ndim; d++)
        boxes *= count_segments(src, shape, d) + (dst == src ? 0 : count_segments(dst, shape, d));
    return boxes <= MOST_BOXES;
}

/* Whether a plan can be made quickly: Explicit lists are tabulated, those of a packed dtype are looked through. */
static bool is_cheap(const tb_layout *layout, const tb_shape *shape, tb_dtype dtype) {
    bool lists_all = has_explicit(layout) || tb_dtype_bits(dtype) < 8;
    return !lists_all || lists_are_short(layout, shape, tb_layout_nranks(layout));
}

static void check_stats(const tb_plan *plan, const tb_layout *src, const tb_layout *dst, const tb_plan_opts *opts) {
    tb_plan_stats s = {.size = sizeof s};
    tb__wide sent = 0, received = 0;
    if (!succeeded(tb_plan_stats_compute(plan, &s)))
        return;
    bool is_exact = s.total_bytes < INT64_MAX; /* else figures that are larger stay there */
    for (int32_t i = 0; i < s.nranks; i++) {
        expect(i == 0 || s.ranks[i - 1] < s.ranks[i]);
        expect(s.egress_bytes[i] <= s.send_bytes[i] && s.send_bytes[i] <= s.max_send);
        sent += (uint64_t)s.send_bytes[i];
        received += (uint64_t)s.recv_bytes[i];
    }
    expect(!is_exact || (sent == (uint64_t)s.total_bytes && received == (uint64_t)s.total_bytes));
    expect(s.max_send >= s.min_max_send);
    if (is_exact && !opts->hosts && !has_explicit(src) && !has_explicit(dst))
        expect(s.max_send - s.min_max_send <= s.max_slice);
    tb_plan_stats_fini(&s);
}

static void check_ir(int32_t rank, const tb_tensor_spec *spec, const tb_plan_opts *plan_opts) {
    int64_t nbytes;
    tb_ir *ir, *back;
    char *first, *second;
    expect(tb_shape_size(&spec->shape, spec->src_dtype, NULL, &nbytes) == TB_OK);
    /* Small tensors are cut, to see that too; of large ones there would be too many parts. */
    tb_ir_opts opts = {
        .size = sizeof opts, .bucket_size = 256, .staging_bytes = 1024, .direct = nbytes > 1 << 14, .plan = plan_opts};
    if (!succeeded(tb_ir_create(rank, spec, 1, NULL, &opts, &ir)))
        return;
    expect(tb_ir_dump_json(ir, &first) == TB_OK);
    expect(tb_ir_parse_json(first, strlen(first), &back) == TB_OK);
    expect(tb_ir_dump_json(back, &second) == TB_OK);
    expect(strcmp(first, second) == 0);
    free(first);
    free(second);
    tb_ir_destroy(ir);
    tb_ir_destroy(back);
}

static void check_plan(const tb_shape *shape, tb_dtype dtype, const tb_layout *src, const tb_layout *dst,
                       const tb_plan_opts *opts) {
    tb_plan *plan = NULL;
    if (!is_cheap(src, shape, dtype) || !is_cheap(dst, shape, dtype))
        return;
    if (!succeeded(tb_plan_create(src, dst, shape, dtype, opts, &plan))) {
        expect(!plan);
        return;
    }
    note_sizes(src, shape);
    note_sizes(dst, shape);
    if (is_small(src, dst, shape)) {
        tb_tensor_spec spec = {.size = sizeof spec,
                               .name = "tensor",
                               .shape = *shape,
                               .src = src,
                               .dst = dst,
                               .src_dtype = dtype,
                               .dst_dtype = dtype};
        expect(tb_plan_check(plan) == TB_OK);
        check_stats(plan, src, dst, opts);
        check_ir(tb_layout_rank_at(src, 0), &spec, opts);
        check_ir(tb_layout_rank_at(dst, tb_layout_nranks(dst) - 1), &spec, opts);
    }
    tb_plan_destroy(plan);
}

static void check_plan_line(const json_t *line, const tb_shape *shape, const tb_layout *src, const tb_layout *dst) {
    const char *name = json_string_value(json_object_get(line, "dtype"));
    const json_t *hosts = json_object_get(line, "hosts");
    int32_t host[MOST_RANKS];
    tb_plan_opts opts = {.size = sizeof opts};
    tb_dtype dtype;
    if (!name || !succeeded(tb_dtype_parse(name, &dtype)))
        return;
    check_plan(shape, dtype, src, dst, &opts);
    for (size_t i = 0; i < MOST_RANKS && i < json_array_size(hosts); i++) {
        host[i] = (int32_t)json_integer_value(json_array_get(hosts, i));
        opts = (tb_plan_opts){.size = sizeof opts, .hosts = host, .nhosts = i + 1};
    }
    if (opts.hosts)
        check_plan(shape, dtype, src, dst, &opts);
}

static void check_locals(const tb_layout *layout, const tb_shape *shape) {
    tb_local local;
    if (!is_cheap(layout, shape, TB_U8) || !succeeded(tb_layout_check(layout, shape)) ||
        !is_small(layout, layout, shape))
        return;
    for (int32_t i = 0; i < tb_layout_nranks(layout); i++) {
        expect(tb_layout_local(layout, shape, tb_layout_rank_at(layout, i), &local) == TB_OK);
        tb_local_fini(&local);
    }
}

static tb_layout *read_layout(const json_t *json) {
    tb_layout *layout = NULL;
    if (succeeded(tb__layout_from_json(json, &layout)))
        expect_text_form(layout);
    return layout;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    json_error_t error;
    json_t *line = json_loadb((const char *)data, size, JSON_REJECT_DUPLICATES, &error);
    tb_shape shape;
    if (line && succeeded(tb__shape_from_json(json_object_get(line, "shape"), &shape))) {
        tb_layout *layout = read_layout(line);
        tb_layout *src = read_layout(json_object_get(line, "src")), *dst = read_layout(json_object_get(line, "dst"));
        if (layout)
            check_locals(layout, &shape);
        if (src && dst)
            check_plan_line(line, &shape, src, dst);
        tb_layout_destroy(layout);
        tb_layout_destroy(src);
        tb_layout_destroy(dst);
    }
    json_decref(line);
    return 0;
}
