/* The bus protocol. The first byte says what the rest is: a stream of frames as an agent reads it, the map of one
 * message, a layout (mesh, then placements), or a tensor. What is accepted is written again, reads the same, and is
 * then written to the same bytes; another MessagePack reader takes it, too. */
#include "../support/frame_feed.h"
#include "bus/protocol/payload.h"
#include "bus/protocol/protocol.h"
#include "bus/protocol/value.h"
#include "fuzz.h"

#include <msgpack.h>

static tb__blob blob_of(const tb__bytes *bytes) {
    return (tb__blob){.data = bytes->item, .nbytes = bytes->count};
}

static void expect_same_bytes(tb__bytes *a, tb__bytes *b) {
    expect(a->count == b->count && memcmp(a->item, b->item, a->count) == 0);
    free(a->item);
    free(b->item);
}

/* Claims were checked by then, so that the library allocates no more than a few times the input. */
static void expect_well_formed(tb__blob map) {
    msgpack_unpacked unpacked;
    msgpack_unpacked_init(&unpacked);
    size_t used = 0;
    expect(msgpack_unpack_next(&unpacked, (const char *)map.data, map.nbytes, &used) == MSGPACK_UNPACK_SUCCESS);
    expect(used == map.nbytes && unpacked.data.type == MSGPACK_OBJECT_MAP);
    msgpack_unpacked_destroy(&unpacked);
}

static void try_tensor(tb__blob payload, const tb_layout *pair, tb__arena *arena) {
    tb__tensor_payload tensor, back;
    if (!succeeded(tb__tensor_decode(payload, pair, arena, &tensor)))
        return;
    expect(*tensor.name && tensor.shape.ndim <= TB_MAX_DIMS);
    expect(tensor.data.kind != TB__MEMORY_NONE || tensor.data.nbytes == 0);
    expect(tb_shape_size(&tensor.shape, tensor.dtype, NULL, NULL) == TB_OK);
    tb__bytes first = {0}, second = {0};
    expect(tb__tensor_encode(&tensor, pair, &first) == TB_OK);
    expect(tb__tensor_decode(blob_of(&first), pair, arena, &back) == TB_OK);
    expect(!tensor.layout == !back.layout && (!back.layout || tb_layout_equal(tensor.layout, back.layout)));
    expect(tb__tensor_encode(&back, pair, &second) == TB_OK);
    expect_same_bytes(&first, &second);
    tb_layout_destroy(tensor.layout);
    tb_layout_destroy(back.layout);
}

static void try_layout(tb__blob mesh, tb__blob placements) {
    tb_layout *layout, *back;
    if (!succeeded(tb__layout_decode(mesh, placements, &layout)))
        return;
    tb__bytes first_mesh = {0}, first = {0}, second_mesh = {0}, second = {0};
    expect(tb__mesh_encode(layout, &first_mesh) == TB_OK && tb__placements_encode(layout, &first) == TB_OK);
    expect(tb__layout_decode(blob_of(&first_mesh), blob_of(&first), &back) == TB_OK);
    expect(tb_layout_equal(layout, back));
    expect(tb__mesh_encode(back, &second_mesh) == TB_OK && tb__placements_encode(back, &second) == TB_OK);
    expect_same_bytes(&first_mesh, &second_mesh);
    expect_same_bytes(&first, &second);
    tb_layout_destroy(layout);
    tb_layout_destroy(back);
}

static void try_message(tb__blob map, const tb_layout *pair, tb__arena *arena) {
    tb__message message, back;
    if (!succeeded(tb__message_decode(map, arena, &message)))
        return;
    expect((unsigned)message.kind < TB__MESSAGE_KINDS);
    expect_well_formed(map);
    if (message.kind == TB__HELLO && !succeeded(tb__hello_check(&message)))
        return;
    tb__bytes first = {0}, second = {0};
    expect(tb__message_encode(&message, &first) == TB_OK);
    tb__blob again = {.data = first.item + TB__FRAME_HEADER, .nbytes = first.count - TB__FRAME_HEADER};
    expect(tb__message_decode(again, arena, &back) == TB_OK);
    expect(tb__message_encode(&back, &second) == TB_OK);
    expect_same_bytes(&first, &second);
    if (message.kind == TB__INIT_PAIR)
        try_layout(message.mesh, message.placements);
    for (size_t i = 0; message.kind == TB__REGISTER_TENSORS && i < message.tensors.count; i++)
        try_tensor(message.tensors.item[i].payload, pair, arena);
}

/* In pieces of lengths that the bytes themselves say. */
static void try_stream(const uint8_t *data, size_t size, const tb_layout *pair, tb__arena *arena) {
    tb__frame_reader reader = {.max_nbytes = size > 100 ? 0 : TB__HELLO_MAX};
    bool is_open = true;
    size_t given = 0, taken = 0;
    while (is_open && given < size) {
        size_t n = 1 + data[given] % 64;
        n = n < size - given ? n : size - given;
        expect(frame_feed(&reader, data + given, n) == TB_OK);
        given += n;
        tb__blob map;
        bool has_frame = true;
        while (is_open && has_frame) {
            is_open = succeeded(tb__frame_next(&reader, &map, &has_frame));
            if (!is_open || !has_frame)
                break;
            expect(memcmp(map.data, data + taken + TB__FRAME_HEADER, map.nbytes) == 0);
            taken += TB__FRAME_HEADER + map.nbytes;
            try_message(map, pair, arena);
        }
        expect(taken <= given && tb__frame_is_between(&reader) == (taken == given));
    }
    tb__frame_reader_fini(&reader);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    static tb_layout *pair;
    if (!pair)
        expect(tb_layout_parse("mesh=2,2 place=R,S0 ranks=4..7", &pair) == TB_OK);
    if (size < 1)
        return 0;
    tb__arena arena = {0};
    tb__blob rest = {.data = data + 1, .nbytes = size - 1};
    switch (data[0] % 4) {
    case 0:
        try_stream(rest.data, rest.nbytes, pair, &arena);
        break;
    case 1:
        try_message(rest, pair, &arena);
        break;
    case 2: {
        tb__cursor from = tb__cursor_over(rest);
        if (!succeeded(tb__value_skip(&from, 0)))
            break;
        size_t n = (size_t)(from.at - rest.data);
        try_layout((tb__blob){rest.data, n}, (tb__blob){from.at, rest.nbytes - n});
        break;
    }
    default:
        try_tensor(rest, pair, &arena);
    }
    tb__arena_fini(&arena);
    return 0;
}
