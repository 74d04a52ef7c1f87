/* Payloads: layouts and tensors come back as they were, and what is wrong with them is said. */
#include "bus/protocol/payload.h"
#include "bus/protocol/protocol_test.h"
#include "bus/protocol/value.h"

static tb__blob blob_of(const tb__bytes *bytes) {
    return (tb__blob){.data = bytes->item, .nbytes = bytes->count};
}

static void expect_layout_back(const tb_layout *layout) {
    tb__bytes mesh = {0}, placements = {0}, again = {0};
    tb_layout *back, *on_mesh;
    assert_int_equal(tb__mesh_encode(layout, &mesh), TB_OK);
    assert_int_equal(tb__placements_encode(layout, &placements), TB_OK);
    assert_int_equal(tb__layout_decode(blob_of(&mesh), blob_of(&placements), &back), TB_OK);
    assert_true(tb_layout_equal(layout, back));
    assert_int_equal(tb__placements_decode(layout, blob_of(&placements), &on_mesh), TB_OK);
    assert_true(tb_layout_equal(layout, on_mesh));
    assert_int_equal(tb__placements_encode(back, &again), TB_OK);
    assert_int_equal(again.count, placements.count);
    assert_memory_equal(again.item, placements.item, again.count);
    tb_layout_destroy(back);
    tb_layout_destroy(on_mesh);
    free(mesh.item);
    free(placements.item);
    free(again.item);
}

static void test_layouts_come_back(void **state) {
    (void)state;
    static const char *const layouts[] = {
        "mesh=4 place=R",
        "mesh=2,2 place=S0,S-1",
        "mesh=2,2 place=P,R ranks=4..7",
        "mesh=3 place=Partial(product) ranks=9,1,1048575",
        "mesh=2,3 place=StridedShard(0,7),BlockShard(1,0,4611686018427387904)",
        "mesh=3 place=Explicit(-8, 0-3,5-6; ; 3-5,3-5)",
        "mesh=1,1,1,1,1,1,1,1 place=S0,S1,S2,S3,S4,S5,S6,S7",
    };
    for (size_t i = 0; i < sizeof layouts / sizeof *layouts; i++) {
        tb_layout *layout;
        assert_int_equal(tb_layout_parse(layouts[i], &layout), TB_OK);
        expect_layout_back(layout);
        tb_layout_destroy(layout);
    }
    uint64_t seed = test_seed();
    static random_case c;
    for (int64_t i = 0; i < test_cases(1000); i++) {
        random_case_make(&c, seed + (uint64_t)i);
        const side *sides[] = {&c.src, &c.dst};
        for (int s = 0; s < 2; s++) {
            tb_layout *layout;
            assert_int_equal(side_layout(sides[s], &layout), TB_OK);
            expect_layout_back(layout);
            tb_layout_destroy(layout);
        }
    }
}

static void test_layout_bytes(void **state) {
    (void)state;
    tb_layout *layout;
    tb__bytes mesh = {0}, placements = {0};
    assert_int_equal(tb_layout_parse("mesh=2,2 place=Explicit(0, 0-3; 3-300),StridedShard(-1,2) ranks=4..7", &layout),
                     TB_OK);
    assert_int_equal(tb__mesh_encode(layout, &mesh), TB_OK);
    assert_int_equal(tb__placements_encode(layout, &placements), TB_OK);
    char *m = hex_of(blob_of(&mesh)), *p = hex_of(blob_of(&placements));
    assert_string_equal(m, "82a57368617065920202a572616e6b739404050607");
    assert_string_equal(p, "9293a145009291920003919203cd012c93a25353ff02");
    free(m);
    free(p);
    free(mesh.item);
    free(placements.item);
    tb_layout_destroy(layout);
}

/* The bytes of "93a14500...", in a buffer of their own. */
static tb__blob bytes_of(const char *hex) {
    size_t n = strlen(hex) / 2;
    uint8_t *data = malloc(n ? n : 1);
    assert_non_null(data);
    for (size_t i = 0; i < n; i++) {
        unsigned byte;
        assert_int_equal(sscanf(hex + 2 * i, "%2x", &byte), 1);
        data[i] = (uint8_t)byte;
    }
    return (tb__blob){.data = data, .nbytes = n};
}

static void expect_no_layout(const char *mesh, const char *placements, const char *sentence) {
    tb__blob m = bytes_of(mesh), p = bytes_of(placements);
    tb_layout *layout;
    tb_status status = tb__layout_decode(m, p, &layout);
    assert_true(status == TB_INVALID || status == TB_TOO_BIG);
    assert_string_equal(tb_error_detail(), sentence);
    free((void *)m.data);
    free((void *)p.data);
}

/* A value of one byte takes many in memory, so that their number is limited. */
static void test_many_values(void **state) {
    (void)state;
    tb__blob mesh = bytes_of("82a573686170659102a572616e6b73c0"), head = bytes_of("91dd00200000a2425300");
    size_t count = 2 << 20;
    uint8_t *bytes = malloc(head.nbytes + count - 2);
    tb_layout *layout = NULL;
    assert_non_null(bytes);
    memcpy(bytes, head.data, head.nbytes);
    memset(bytes + head.nbytes, 1, count - 2);
    assert_int_equal(tb__layout_decode(mesh, (tb__blob){bytes, head.nbytes + count - 2}, &layout), TB_TOO_BIG);
    assert_string_equal(tb_error_detail(), "placements: they have more than 1048576 values");
    free(bytes);
    free((void *)mesh.data);
    free((void *)head.data);
}

static void test_wrong_layouts(void **state) {
    (void)state;
    const char *two = "82a573686170659102a572616e6b73c0", *replicate = "9191a152";
    expect_no_layout("", replicate, "mesh: MessagePack that ends in the middle of a value");
    expect_no_layout("c0", replicate, "mesh is nil; it must be a map");
    expect_no_layout("81a572616e6b73c0", replicate, "mesh: shape is missing");
    expect_no_layout("82a5736861706590a572616e6b73c0", replicate, "mesh: it has 0 dims; there must be 1 to 8");
    expect_no_layout("82a573686170659100a572616e6b73c0", replicate,
                     "mesh: dim 0 has size 0; sizes are at least 1, and ranks at most 1048576");
    expect_no_layout("82a5736861706592ce00100000ce00100000a572616e6b73c0", replicate,
                     "mesh: dim 1 has size 1048576; sizes are at least 1, and ranks at most 1048576");
    expect_no_layout("82a573686170659102a572616e6b739101", replicate, "mesh: 1 ranks for a mesh of 2");
    expect_no_layout("82a573686170659102a572616e6b7392ff01", replicate, "mesh: rank -1 is not between 0 and 1048575");
    expect_no_layout("82a573686170659102a572616e6b73920101", replicate, "rank 1 is in the mesh twice");
    expect_no_layout("82a573686170659102a572616e6b739201a0", replicate,
                     "mesh: ranks is a string; it must be an array of numbers");
    expect_no_layout("82a5736861706591cfffffffffffffffffa572616e6b73c0", replicate,
                     "mesh: shape has 18446744073709551615 in it");
    expect_no_layout(two, "90", "placements: 0 of them for a mesh of 1 dims");
    expect_no_layout(two, "9191a152c0", "placements: 1 bytes after the MessagePack value");
    expect_no_layout(two, "ddffffffff", "placements: MessagePack that ends in the middle of a value");
    expect_no_layout(two, "91dd7fffffff00", "placements: MessagePack that ends in the middle of a value");
    expect_no_layout(two, "9190",
                     "placements: mesh dim 0: a placement is one of [\"R\"], [\"S\",dim], [\"SS\",dim,split_factor], "
                     "[\"BS\",dim,size,...], [\"E\",dim,lists], [\"P\",op]");
    expect_no_layout(two, "9192a15308", "placements: mesh dim 0: a placement's dim, 8, is out of range");
    expect_no_layout(two, "9192a150a3786f72", "placements: mesh dim 0: [\"P\",op] takes sum, avg, min, max or product");
    expect_no_layout(two, "9193a2535300a0", "placements: mesh dim 0: a split factor is not an integer");
    expect_no_layout(two, "9193a2535300ff", "mesh dim 0: StridedShard's split factor is -1; it must be at least 1");
    expect_no_layout(two, "9193a1450091919100",
                     "placements: mesh dim 0: [\"E\",dim,lists]: list 0, segment 0 is not [start,stop]");
    expect_no_layout(two, "9193a2535300cf8000000000000000", "placements: mesh dim 0: a split factor is not an integer");
    expect_no_layout(two, "9193a253530082a161c0a162c0", "placements: mesh dim 0: a split factor is not an integer");
    expect_no_layout(two, "9192a2425300", "mesh dim 0: BlockShard has no block sizes");
    expect_no_layout(two, "82a161c0a162c0", "placements: they must be an array");
    expect_no_layout(two, "9193a145009191920001", "mesh dim 0: Explicit has 1 lists for 2 coordinates");
    expect_no_layout(two, "9193a14500929192050190", "mesh dim 0: Explicit segment 5-1 is not a range");
}

static tb__payload_memory random_memory(rng *r, uint64_t nbytes) {
    tb__payload_memory m = {.kind = (tb__memory_kind)rng_range(r, TB__MEMORY_FD, TB__MEMORY_DEVICE), .nbytes = nbytes};
    if (m.kind != TB__MEMORY_ADDRESS) {
        m.fd = (uint32_t)rng_range(r, 0, TB__MAX_FDS - 1);
        m.offset = rng_next(r) >> rng_range(r, 2, 63);
    } else {
        m.address = rng_next(r) >> rng_range(r, 2, 63);
    }
    return m;
}

/* A tensor of the case's shape and layout, which is the caller's. */
static void random_tensor(rng *r, const random_case *c, tb_layout *layout, tb__tensor_payload *out) {
    *out = (tb__tensor_payload){.name = "model.layers.7.w", .dtype = c->dtype, .shape = c->shape, .layout = layout};
    out->has_strides = rng_range(r, 0, 1);
    for (int d = 0; out->has_strides && d < c->shape.ndim; d++)
        out->strides[d] = rng_range(r, -1000000, 1000000);
    out->view = rng_range(r, 0, 1) ? "split(0, 2, -1)" : NULL;
    out->encode = rng_range(r, 0, 1) ? "mxfp8(floor)" : NULL;
    out->scale_group = rng_range(r, 0, 1) ? "local:w13" : NULL;
    out->group = (uint32_t)rng_next(r) >> rng_range(r, 0, 31);
    out->wire_dtype = (tb_dtype)rng_range(r, 0, TB_DTYPE_COUNT - 1);
    uint64_t nbytes = rng_next(r) >> rng_range(r, 4, 63);
    if (rng_range(r, 0, 4))
        out->data = random_memory(r, nbytes);
    if (rng_range(r, 0, 1))
        out->scales = random_memory(r, nbytes / 32);
    if (rng_range(r, 0, 1))
        out->scale = random_memory(r, 4);
}

static bool same_memory(const tb__payload_memory *a, const tb__payload_memory *b) {
    return a->kind == b->kind && a->fd == b->fd && a->offset == b->offset && a->address == b->address &&
           a->nbytes == b->nbytes;
}

static bool same_text(const char *a, const char *b) {
    return a && b ? strcmp(a, b) == 0 : a == b;
}

static void expect_same(const tb__tensor_payload *a, const tb__tensor_payload *b) {
    assert_string_equal(a->name, b->name);
    assert_true(a->dtype == b->dtype && a->wire_dtype == b->wire_dtype && a->group == b->group);
    assert_true(a->shape.ndim == b->shape.ndim && a->has_strides == b->has_strides);
    for (int d = 0; d < a->shape.ndim; d++)
        assert_true(a->shape.dim[d] == b->shape.dim[d] && a->strides[d] == b->strides[d]);
    assert_true(same_text(a->view, b->view) && same_text(a->encode, b->encode));
    assert_true(same_text(a->scale_group, b->scale_group));
    assert_true(same_memory(&a->data, &b->data) && same_memory(&a->scales, &b->scales));
    assert_true(same_memory(&a->scale, &b->scale));
    assert_true(!a->layout == !b->layout && (!a->layout || tb_layout_equal(a->layout, b->layout)));
}

/* Refused with a sentence, or written again to bytes that say the same. */
static bool accepts(tb__blob payload, const tb_layout *pair, tb__arena *arena) {
    tb__tensor_payload tensor, again;
    tb_status status = tb__tensor_decode(payload, pair, arena, &tensor);
    if (status != TB_OK) {
        assert_true(status == TB_INVALID || status == TB_TOO_BIG);
        assert_true(*tb_error_detail());
        return false;
    }
    tb__bytes bytes = {0};
    assert_int_equal(tb__tensor_encode(&tensor, pair, &bytes), TB_OK);
    assert_int_equal(tb__tensor_decode(blob_of(&bytes), pair, arena, &again), TB_OK);
    expect_same(&tensor, &again);
    tb_layout_destroy(tensor.layout);
    tb_layout_destroy(again.layout);
    free(bytes.item);
    return true;
}

static void damage(rng *r, const tb__bytes *bytes, const tb_layout *pair, tb__arena *arena) {
    for (size_t n = 0; n < bytes->count; n += bytes->count / 100 + 1) {
        tb__blob cut = copy_of(bytes->item, n);
        assert_false(accepts(cut, pair, arena));
        free((void *)cut.data);
    }
    for (int i = 0; i < 100; i++) {
        tb__blob other = copy_of(bytes->item, bytes->count);
        for (int64_t k = rng_range(r, 1, 3); k > 0; k--)
            ((uint8_t *)other.data)[rng_range(r, 0, (int64_t)other.nbytes - 1)] = (uint8_t)rng_next(r);
        (void)accepts(other, pair, arena);
        free((void *)other.data);
    }
}

static void test_tensors_come_back(void **state) {
    (void)state;
    uint64_t seed = test_seed();
    static random_case c;
    tb__arena arena = {0};
    for (int64_t i = 0; i < test_cases(300); i++) {
        rng r = {seed + (uint64_t)i};
        random_case_make(&c, seed + (uint64_t)i);
        tb_layout *src, *dst;
        assert_int_equal(side_layout(&c.src, &src), TB_OK);
        assert_int_equal(side_layout(&c.dst, &dst), TB_OK);
        tb_layout *const own[] = {NULL, src, dst}; /* the pair's, on the pair's mesh, on another */
        tb__tensor_payload tensor, back;
        random_tensor(&r, &c, own[rng_range(&r, 0, 2)], &tensor);
        tb__bytes bytes = {0};
        assert_int_equal(tb__tensor_encode(&tensor, src, &bytes), TB_OK);
        assert_int_equal(tb__tensor_decode(blob_of(&bytes), src, &arena, &back), TB_OK);
        expect_same(&tensor, &back);
        tb_layout_destroy(back.layout);
        damage(&r, &bytes, src, &arena);
        free(bytes.item);
        tb_layout_destroy(src);
        tb_layout_destroy(dst);
        tb__arena_reset(&arena);
    }
    tb__arena_fini(&arena);
}

/* What the pair's mesh says already is not said again. */
static void test_mesh_is_left_out(void **state) {
    (void)state;
    tb_layout *pair, *same, *other;
    tb__value value;
    assert_int_equal(tb_layout_parse("mesh=2,2 place=R,S0 ranks=4..7", &pair), TB_OK);
    assert_int_equal(tb_layout_parse("mesh=2,2 place=S1,R ranks=4..7", &same), TB_OK);
    assert_int_equal(tb_layout_parse("mesh=2,2 place=S1,R ranks=4,5,7,6", &other), TB_OK);
    tb_layout *const own[] = {NULL, same, other};
    for (int i = 0; i < 3; i++) {
        tb__tensor_payload tensor = {.name = "w", .dtype = TB_F32, .layout = own[i]};
        tb__bytes bytes = {0};
        assert_int_equal(tb__tensor_encode(&tensor, pair, &bytes), TB_OK);
        assert_int_equal(tb__map_find(blob_of(&bytes), "placements", &value), i > 0);
        assert_int_equal(tb__map_find(blob_of(&bytes), "mesh", &value), i == 2);
        free(bytes.item);
    }
    tb_layout_destroy(pair);
    tb_layout_destroy(same);
    tb_layout_destroy(other);
}

static void expect_no_tensor(const char *hex, const char *sentence) {
    tb_layout *pair;
    tb__arena arena = {0};
    tb__tensor_payload tensor;
    assert_int_equal(tb_layout_parse("mesh=2 place=S0", &pair), TB_OK);
    tb__blob payload = bytes_of(hex);
    tb_status status = tb__tensor_decode(payload, pair, &arena, &tensor);
    assert_true(status == TB_INVALID || status == TB_TOO_BIG);
    assert_string_equal(tb_error_detail(), sentence);
    free((void *)payload.data);
    tb__arena_fini(&arena);
    tb_layout_destroy(pair);
}

/* name "w", dtype "f32", shape [4], nbytes 16 and what else is given; so many keys in all. */
#define TENSOR(nkeys, more) #nkeys "a46e616d65a177a56474797065a3663332a573686170659104a66e627974657310" more
#define MEM                 "a36d656d"

static void test_wrong_tensors(void **state) {
    (void)state;
    expect_no_tensor(TENSOR(84, ""), "tensor 'w': mem is missing, and there are 16 bytes");
    expect_no_tensor(TENSOR(85, MEM "80"),
                     "tensor 'w': mem has none of `fd` and `memory`; it must have one of them, or an `address`");
    expect_no_tensor(TENSOR(85, MEM "82a2666400a66d656d6f727901"),
                     "tensor 'w': mem has `fd` and `memory`; it must have one of them, or an `address`");
    expect_no_tensor(TENSOR(85, MEM "82a66f666673657401a76164647265737301"),
                     "tensor 'w': mem has `offset` with `address`");
    expect_no_tensor(TENSOR(85, MEM "81a761646472657373cffffffffffffffff8"),
                     "tensor 'w': mem: 16 bytes from 0xfffffffffffffff8 on run past the last address");
    expect_no_tensor(TENSOR(85, MEM "81a26664ce00010000"), "tensor 'w': mem: fd is 65536; it is at most 65535");
    expect_no_tensor(TENSOR(85, MEM "07"), "tensor: mem is a number; it must be a map");
    expect_no_tensor(TENSOR(86, MEM "81a2666400a773747269646573920101"),
                     "tensor 'w': 2 strides for a tensor of 1 dims");
    expect_no_tensor(TENSOR(86, MEM "81a2666400a46d65736882a573686170659102a572616e6b73c0"),
                     "tensor 'w': it has a mesh and no placements");
    expect_no_tensor(TENSOR(86, MEM "81a2666400aa706c6163656d656e747390"),
                     "tensor 'w': placements: 0 of them for a mesh of 1 dims");
    expect_no_tensor("84a46e616d65a0a56474797065a3663332a573686170659104a66e627974657300", "tensor: name is empty");
    expect_no_tensor(
        "84a46e616d65a177a56474797065a3663333a573686170659104a66e627974657300",
        "tensor: dtype: 'f33' is not a dtype; there are bool, u8..u64, i8..i64, f16, bf16, f32, f64, f8e4m3, "
        "f8e5m2, e8m0, f4e2m1");
    expect_no_tensor("84a46e616d65a177a56474797065a3663332a5736861706599010101010101010101a66e627974657300",
                     "tensor 'w': shape has 9 dims; there are at most 8");
    expect_no_tensor("83a46e616d65a177a56474797065a3663332a573686170659104", "tensor: nbytes is missing");
}

static void test_memory_may_be_short(void **state) {
    (void)state;
    tb_layout *pair, *own;
    assert_int_equal(tb_layout_parse("mesh=2 place=S0", &pair), TB_OK);
    assert_int_equal(tb_layout_parse("mesh=2,2 place=Explicit(0, 0-1; 1-4),BlockShard(1,2,2) ranks=3,1,2,0", &own),
                     TB_OK);
    tb__tensor_payload tensor = {.name = "w", .dtype = TB_F32, .shape = {2, {4, 4}}, .layout = own}, back;
    tb__arena arena = {0};
    tb__bytes bytes = {0};
    int failures = 0;
    tb_status status = TB_NO_MEMORY;
    for (long n = 0; status != TB_OK; n++, failures++) {
        tb__mem_fail_after(n);
        status = tb__tensor_encode(&tensor, pair, &bytes);
        tb__mem_fail_after(-1);
        assert_true(status == TB_OK || (status == TB_NO_MEMORY && bytes.count == 0));
    }
    assert_true(failures > 3);
    status = TB_NO_MEMORY;
    for (long n = 0; status != TB_OK; n++, failures++) {
        tb__mem_fail_after(n);
        status = tb__tensor_decode(blob_of(&bytes), pair, &arena, &back);
        tb__mem_fail_after(-1);
        assert_true(status == TB_OK || status == TB_NO_MEMORY);
        if (status == TB_OK)
            expect_same(&tensor, &back);
        tb__arena_fini(&arena);
        arena = (tb__arena){0};
    }
    assert_true(failures > 8);
    tb_layout_destroy(back.layout);
    tb_layout_destroy(pair);
    tb_layout_destroy(own);
    free(bytes.item);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_layouts_come_back), cmocka_unit_test(test_layout_bytes),
        cmocka_unit_test(test_wrong_layouts),     cmocka_unit_test(test_many_values),
        cmocka_unit_test(test_tensors_come_back), cmocka_unit_test(test_mesh_is_left_out),
        cmocka_unit_test(test_wrong_tensors),     cmocka_unit_test(test_memory_may_be_short),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
