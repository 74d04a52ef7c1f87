/* What moving tensors between processes relies on: a model of the size asked for, and values that give every wrong
 * element away. */
#include "bench/move.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>

/* The model */

static void model_has_the_size_asked_for(void **state) {
    static const int64_t sizes[] = {
        TOOL_MIN_LLAMA,     100000,          1 << 20, (12 << 20) + 1, INT64_C(64) << 20, INT64_C(1) << 30,
        INT64_C(100) << 30, INT64_C(1) << 62};
    (void)state;
    tool_llama llama;
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
        tool_tensors tensors = {0};
        assert_int_equal(tool_llama_add(&tensors, sizes[i], &llama), TB_OK);
        int64_t more = (llama.nbytes - sizes[i]) / 2;
        assert_in_range(more, 0, 2 * llama.hidden - 1); /* less than a row in each of both embeddings */
        assert_int_equal(tensors.count, 9 * llama.nlayers + 3);
        for (size_t j = 0; j < tensors.count; j++) {
            const tool_tensor *tensor = &tensors.item[j];
            assert_int_equal(tensor->shape.ndim, tensor->cut == TOOL_CUT_NORM ? 1 : 2);
            assert_true(strlen(tensor->name) + 1 < sizeof tensor->name);
            for (size_t k = 0; k < j; k++)
                assert_string_not_equal(tensor->name, tensors.item[k].name);
        }
        free(tensors.item);
    }
    tool_tensors tensors = {0};
    assert_int_equal(tool_llama_add(&tensors, TOOL_MIN_LLAMA - 1, &llama), TB_INVALID);
    assert_int_equal(tool_llama_add(&tensors, 1 << 30, &llama), TB_OK);
    assert_int_equal(llama.nlayers, 32);
    free(tensors.item);
}

static void init_job(tool_job *job, int64_t nbytes, int32_t nsources, int32_t ntargets) {
    tool_llama llama;
    *job = (tool_job){0};
    assert_int_equal(tool_llama_add(&job->tensors, nbytes, &llama), TB_OK);
    assert_int_equal(tool_side_init(&job->side[TOOL_SOURCE], TOOL_SOURCE, "from", NULL, nsources), TB_OK);
    assert_int_equal(tool_side_init(&job->side[TOOL_TARGET], TOOL_TARGET, "to", NULL, ntargets), TB_OK);
}

static void default_layouts_fit(void **state) {
    (void)state;
    for (int32_t n = 1; n <= 9; n++) {
        tool_job job;
        init_job(&job, 1 << 20, n, 10 - n);
        assert_int_equal(tool_job_check(&job), TB_OK);
        assert_int_equal(tool_job_weigh(&job), TB_OK);
        assert_int_equal(job.nranks, 10);
        assert_string_equal(job.names[n].text, "to 0");
        for (int which = 0; which < TOOL_NSIDES; which++)
            assert_int_equal(tb_layout_nranks(job.side[which].layout[TOOL_CUT_ROW]), job.side[which].nranks);
        tool_job_fini(&job);
    }
    tool_side side;
    assert_int_equal(tool_side_init(&side, TOOL_TARGET, "to", NULL, 0), TB_OK);
    assert_string_equal(side.text[TOOL_CUT_ROW], "mesh=2,2 place=Replicate,Shard(1)");
    tool_side_fini(&side);
}

static void given_layouts_are_looked_at(void **state) {
    (void)state;
    tool_side side;
    assert_int_equal(tool_side_init(&side, TOOL_TARGET, "to", "mesh=2 place=S1 ranks=4,2", 0), TB_OK);
    assert_int_equal(side.nranks, 5);
    assert_string_equal(side.text[TOOL_CUT_NORM], "mesh=2 place=Replicate ranks=4,2");
    tool_side_fini(&side);
    assert_int_equal(tool_side_init(&side, TOOL_TARGET, "to", "mesh=2 place=S0", 3), TB_OK);
    assert_string_equal(side.text[TOOL_CUT_NORM], "mesh=2 place=Shard(0)");
    tool_side_fini(&side);
    assert_int_equal(tool_side_init(&side, TOOL_TARGET, "to", "mesh=4 place=S0", 3), TB_INVALID);
    assert_non_null(strstr(tb_error_detail(), "rank 3 is in the mesh, but the ranks of this side are 0 to 2"));
    assert_int_equal(tool_side_init(&side, TOOL_TARGET, "to", "mesh=1 place=S0 ranks=1000", 0), TB_INVALID);
}

/* Values */

/* A rank's part of one tensor, as a layout has it. */
typedef struct held {
    tool_tensor tensor;
    tool_part part;
    uint16_t *data;
} held;

static void hold_kind(held *h, const tool_tensor *tensor, int which, const char *text, int32_t rank) {
    tb_layout *layout;
    *h = (held){.tensor = *tensor};
    assert_int_equal(tb_layout_parse(text, &layout), TB_OK);
    h->part = (tool_part){.tensor = &h->tensor, .number = 7, .which = which, .rank = rank};
    tb_local *local = &h->part.local;
    assert_int_equal(tb_layout_local(layout, &tensor->shape, rank, local), TB_OK);
    assert_int_equal(tb_shape_size(&local->shape, tensor->dtype[which], &h->part.nelements, &h->part.nbytes), TB_OK);
    tb_layout_destroy(layout);
    h->data = calloc(1, (size_t)h->part.nbytes + sizeof *h->data);
    assert_non_null(h->data);
    h->part.host = h->data;
}

static void hold(held *h, const char *shape, const char *text, int32_t rank) {
    tool_tensor tensor = {.name = "w", .dtype = {TB_BF16, TB_BF16}};
    assert_int_equal(tb_shape_parse(shape, &tensor.shape), TB_OK);
    hold_kind(h, &tensor, TOOL_TARGET, text, rank);
}

static void drop(held *h) {
    tb_local_fini(&h->part.local);
    free(h->data);
}

static bool is_right(held *h, uint32_t version, tool_wrong *wrong) {
    return tool_part_check(&h->part, version, wrong);
}

/* The elements that the mesh's first rank has under "Shard(1) of 3 columns" and the like, picked one by one from a
 * tensor that was filled as a whole. */
static void parts_agree_with_the_whole(void **state) {
    (void)state;
    enum { ROWS = 211, COLUMNS = 700 }; /* more than two blocks of 65536 */
    static const int listed[] = {650, 651, 652, 10, 11, 699, 10};
    held whole, part;
    tool_wrong wrong;
    hold(&whole, "211,700", "mesh=1 place=R", 0);
    tool_part_fill(&whole.part, 3);
    assert_true(is_right(&whole, 3, &wrong));

    hold(&part, "211,700", "mesh=3 place=Shard(1)", 1); /* columns 234 to 467 */
    assert_int_equal(part.part.nelements, ROWS * 234);
    for (int i = 0; i < ROWS; i++)
        memcpy(part.data + i * 234, whole.data + i * COLUMNS + 234, 234 * sizeof *part.data);
    assert_true(is_right(&part, 3, &wrong));
    drop(&part);

    hold(&part, "211,700", "mesh=2,2 place=Shard(0),StridedShard(1,2)", 2); /* rows from 106, columns of two pieces */
    for (int i = 106, n = 0; i < ROWS; i++) {
        for (int j = 0; j < 2; j++, n += 175)
            memcpy(part.data + n, whole.data + i * COLUMNS + j * 350, 175 * sizeof *part.data);
    }
    assert_true(is_right(&part, 3, &wrong));
    drop(&part);

    hold(&part, "211,700", "mesh=1 place=Explicit(1, 650-653,10-12,699-700,10-11)", 0);
    assert_int_equal(part.part.nelements, ROWS * 7);
    for (int n = 0; n < ROWS * 7; n++)
        part.data[n] = whole.data[n / 7 * COLUMNS + listed[n % 7]];
    assert_true(is_right(&part, 3, &wrong));
    drop(&part);
    drop(&whole);

    hold(&part, "8", "mesh=2 place=S0", 5); /* not in the mesh */
    tool_part_fill(&part.part, 1);
    assert_true(is_right(&part, 1, &wrong));
    assert_int_equal(part.data[0], 0);
    drop(&part);
    hold(&part, "", "mesh=1 place=R", 0);
    tool_part_poison(&part.part, 1);
    assert_false(is_right(&part, 1, &wrong));
    tool_part_fill(&part.part, 1);
    assert_true(is_right(&part, 1, &wrong));
    drop(&part);
}

static void every_wrong_element_is_found(void **state) {
    (void)state;
    held h;
    tool_wrong wrong;
    hold(&h, "40,25", "mesh=2,2 place=Shard(0),Shard(1)", 3); /* rows from 20, columns from 13 */
    tool_part_fill(&h.part, 2);
    for (int64_t i = 0; i < h.part.nelements; i++) {
        uint16_t right = h.data[i];
        h.data[i] ^= (uint16_t)(1 << i % 16);
        assert_false(is_right(&h, 2, &wrong));
        assert_int_equal(wrong.count, 1);
        assert_int_equal(wrong.index[0], 20 + i / 12);
        assert_int_equal(wrong.index[1], 13 + i % 12);
        assert_int_equal(wrong.expected, right);
        assert_int_equal(wrong.found, h.data[i]);
        h.data[i] = right;
    }
    assert_true(is_right(&h, 2, &wrong));
    drop(&h);
}

/* Unwritten: all of them. Moved by any distance within a block: all of them. */
static void systematic_errors_are_found(void **state) {
    (void)state;
    enum { N = 65536, STEP = 1021 };
    held h;
    tool_wrong wrong;
    hold(&h, "65536", "mesh=1 place=R", 0);
    tool_part_poison(&h.part, 1);
    assert_false(is_right(&h, 1, &wrong));
    assert_int_equal(wrong.count, N);
    tool_part_fill(&h.part, 1);
    assert_true(is_right(&h, 1, &wrong));
    uint16_t *moved = calloc(N, sizeof *moved);
    assert_non_null(moved);
    for (int by = 1; by < N; by += STEP) {
        for (int i = 0; i < N; i++)
            moved[i] = h.data[(i + by) % N];
        h.part.host = moved;
        assert_false(is_right(&h, 1, &wrong));
        assert_int_equal(wrong.count, N);
    }
    h.part.host = h.data;
    free(moved);

    /* Another version, another tensor: nearly all differ. */
    assert_false(is_right(&h, 2, &wrong));
    assert_true(wrong.count > N - 100);
    h.part.number++;
    assert_false(is_right(&h, 1, &wrong));
    assert_true(wrong.count > N - 100);
    drop(&h);

    /* A shift by exactly one block. */
    hold(&h, "131072", "mesh=1 place=R", 0);
    tool_part_fill(&h.part, 1);
    memmove(h.data, h.data + N, N * sizeof *h.data);
    assert_false(is_right(&h, 1, &wrong));
    assert_true(wrong.count > N - 100);
    drop(&h);
}

static float float_of(uint16_t bf16) {
    uint32_t bits = (uint32_t)bf16 << 16;
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

static float rounded_to_8_bits(float value) {
    int exponent;
    float fraction = frexpf(value, &exponent);
    return ldexpf(rintf(ldexpf(fraction, 8)), exponent - 8);
}

/* What is poison is as wrong here as anywhere else. */
static void fill_both(held *source, held *target) {
    tool_wrong wrong;
    tool_part_fill(&source->part, 1);
    tool_part_poison(&target->part, 1);
    assert_false(is_right(target, 1, &wrong));
    assert_int_equal(wrong.count, target->part.nelements);
    tool_part_fill(&target->part, 1);
    assert_true(is_right(target, 1, &wrong));
}

static void casts_and_sums_are_known(void **state) {
    (void)state;
    enum { ROWS = 300, COLUMNS = 301, N = ROWS * COLUMNS, SOURCES = 4 };
    held source, target;
    tool_tensor cast = {.name = "w", .shape = {2, {ROWS, COLUMNS}}, .dtype = {TB_F32, TB_BF16}, .values = TOOL_FLOATS};
    hold_kind(&source, &cast, TOOL_SOURCE, "mesh=1 place=R", 0);
    hold_kind(&target, &cast, TOOL_TARGET, "mesh=1 place=R", 0);
    fill_both(&source, &target);
    int nrounded = 0;
    for (int i = 0; i < N; i++) {
        float value = ((float *)(void *)source.data)[i];
        nrounded += rounded_to_8_bits(value) != value;
        assert_true(float_of(target.data[i]) == rounded_to_8_bits(value));
    }
    assert_in_range(nrounded, N / 2, N);
    drop(&source);
    drop(&target);

    tool_tensor sum = {.name = "w",
                       .shape = {2, {ROWS, COLUMNS}},
                       .dtype = {TB_BF16, TB_BF16},
                       .values = TOOL_TERMS,
                       .nterms = SOURCES};
    float *sums = calloc(N, sizeof *sums);
    assert_non_null(sums);
    hold_kind(&target, &sum, TOOL_TARGET, "mesh=1 place=R", 0);
    for (int rank = 0; rank < SOURCES; rank++) {
        hold_kind(&source, &sum, TOOL_SOURCE, "mesh=4 place=P", rank);
        fill_both(&source, &target);
        for (int i = 0; i < N; i++)
            sums[i] += float_of(source.data[i]);
        drop(&source);
    }
    for (int i = 0; i < N; i++)
        assert_true(float_of(target.data[i]) == sums[i]);
    free(sums);
    drop(&target);
}

static void wide_elements_are_checked_too(void **state) {
    (void)state;
    held h;
    tool_wrong wrong;
    tool_tensor words = {.name = "w", .shape = {1, {70000}}, .dtype = {TB_F32, TB_F32}};
    hold_kind(&h, &words, TOOL_TARGET, "mesh=1 place=R", 0);
    tool_part_fill(&h.part, 1);
    assert_true(is_right(&h, 1, &wrong));
    uint32_t *element = (uint32_t *)(void *)h.data + 65537;
    *element ^= 1u << 31;
    assert_false(is_right(&h, 1, &wrong));
    assert_int_equal(wrong.count, 1);
    assert_int_equal(wrong.index[0], 65537);
    assert_int_equal(wrong.expected ^ wrong.found, 1u << 31);
    drop(&h);
}

static void the_sentence_names_the_element(void **state) {
    (void)state;
    tool_job job;
    tool_parts parts;
    _Atomic int64_t done = 0;
    init_job(&job, 1 << 20, 4, 4);
    assert_int_equal(tool_parts_init(&parts, &job, TOOL_TARGET, 1), TB_OK);
    assert_int_equal(tool_parts_allocate(&parts), TB_OK);
    for (size_t i = 0; i < parts.count; i++)
        tool_part_fill(&parts.part[i], 2);
    assert_int_equal(tool_parts_check(&parts, 2, &done), TB_OK);
    assert_int_equal(done, parts.nbytes);

    const tool_tensor *tensor = &job.tensors.item[4];
    assert_string_equal(tensor->name, "model.layers.0.self_attn.o_proj.weight");
    assert_int_equal(tensor->cut, TOOL_CUT_ROW);
    int64_t half = tensor->shape.dim[1] / 2;
    uint16_t *o_proj = parts.part[4].data;
    o_proj[half + 3] ^= 1; /* the second row, of those cut in two */
    char expected[64];
    snprintf(expected, sizeof expected, "o_proj.weight is wrong at [1,%d]: expected 0x", (int)half + 3);
    assert_int_equal(tool_parts_check(&parts, 2, &done), TB_INTERNAL);
    assert_non_null(strstr(tb_error_detail(), expected));
    assert_non_null(strstr(tb_error_detail(), "version 2 of model.layers.0.self_attn"));
    tool_parts_fini(&parts);
    tool_job_fini(&job);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(model_has_the_size_asked_for),   cmocka_unit_test(default_layouts_fit),
        cmocka_unit_test(given_layouts_are_looked_at),    cmocka_unit_test(parts_agree_with_the_whole),
        cmocka_unit_test(every_wrong_element_is_found),   cmocka_unit_test(systematic_errors_are_found),
        cmocka_unit_test(casts_and_sums_are_known),       cmocka_unit_test(wide_elements_are_checked_too),
        cmocka_unit_test(the_sentence_names_the_element),
    };
    return cmocka_run_group_tests_name("move", tests, NULL, NULL);
}
