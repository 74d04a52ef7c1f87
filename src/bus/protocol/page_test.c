/* docs/protocol.md against the tables: each section has the fields of its message, and an example with its bytes. What
 * a section should have is printed where it is missing, to be put there. */
#include "bus/protocol/payload.h"
#include "bus/protocol/protocol_test.h"
#include "bus/protocol/value.h"

#include "base/text.h"

#include <inttypes.h>

static char *page;
static int nexamples;

static int read_page(void **state) {
    (void)state;
    char path[4096];
    const char *golden = getenv("TB_GOLDEN");
    if (!golden)
        return -1;
    (void)snprintf(path, sizeof path, "%s/../../docs/protocol.md", golden);
    FILE *file = fopen(path, "r");
    if (!file)
        return -1;
    tb__text text = {0};
    for (int c; (c = getc(file)) != EOF;)
        tb__text_add(&text, "%c", c);
    fclose(file);
    return tb__text_take(&text, &page) == TB_OK ? 0 : -1;
}

static int free_page(void **state) {
    (void)state;
    free(page);
    return 0;
}

/* From the heading, "### Transfer", to the next one. To be freed by the caller. */
static char *section(const char *heading) {
    char line[128];
    (void)snprintf(line, sizeof line, "\n### %s\n", heading);
    const char *start = strstr(page, line);
    if (!start)
        fail_msg("the page has no section '### %s'", heading);
    start += strlen(line);
    const char *end = strstr(start, "\n##");
    char *copy = strndup(start, end ? (size_t)(end - start + 1) : strlen(start));
    assert_non_null(copy);
    return copy;
}

static void expect_in_section(const char *heading, tb__text *text) {
    char *wanted, *here = section(heading);
    assert_int_equal(tb__text_take(text, &wanted), TB_OK);
    if (!strstr(here, wanted)) {
        fprintf(stderr, "### %s should have:\n\n%s\n", heading, wanted);
        fail();
    }
    free(wanted);
    free(here);
}

static const char *const type_texts[] = {
    [TB__FIELD_TEXT] = "str",
    [TB__FIELD_SENTENCE] = "str",
    [TB__FIELD_DTYPE] = "str",
    [TB__FIELD_STATUS] = "uint",
    [TB__FIELD_UINT] = "uint",
    [TB__FIELD_UINT32] = "uint",
    [TB__FIELD_FLOAT] = "float",
    [TB__FIELD_BOOL] = "bool",
    [TB__FIELD_UNLESS] = "bool",
    [TB__FIELD_MAYBE_UINT] = "uint",
    [TB__FIELD_MAYBE_FLOAT] = "float",
    [TB__FIELD_MAYBE_BOOL] = "bool",
    [TB__FIELD_BIN] = "bin",
    [TB__FIELD_MAP] = "map",
    [TB__FIELD_ARRAY] = "array",
    [TB__FIELD_INTS] = "array of int",
    [TB__FIELD_TEXTS] = "array of str",
    [TB__FIELD_TIES] = "array of [str, str]",
    [TB__FIELD_ENTRIES] = "array of [str, bin]",
    [TB__FIELD_OUTCOMES] = "array of [str, uint, str, uint, bool]",
};

/* "str", "float or nil", "`send` or `recv`", "uint, optional". */
static void write_type(tb__text *text, const tb__field *field) {
    static const char *const rules[] = {[TB__REQUIRED] = "", [TB__NILABLE] = " or nil", [TB__OPTION] = ", optional"};
    const char *const *choices = field->type == TB__FIELD_CHOICE ? field->choices : NULL;
    for (size_t i = 0; choices && choices[i]; i++)
        tb__text_add(text, "%s`%s`", i == 0 ? "" : choices[i + 1] ? ", " : " or ", *choices[i] ? choices[i] : "\"\"");
    tb__text_add(text, "%s%s", choices ? "" : type_texts[field->type], rules[field->rule]);
}

static void expect_table(const char *heading, const tb__schema *schema) {
    tb__text text = {0};
    tb__text_add(&text, "| field | type | |\n|---|---|---|\n");
    for (size_t i = 0; i < schema->nfields; i++) {
        assert_true(schema->fields[i].about && *schema->fields[i].about);
        tb__text_add(&text, "| `%s` | ", schema->fields[i].name);
        write_type(&text, &schema->fields[i]);
        tb__text_add(&text, " | %s |\n", schema->fields[i].about);
    }
    tb__text_add(&text, "\n");
    expect_in_section(heading, &text);
}

static void test_every_field_is_documented(void **state) {
    (void)state;
    for (int kind = 0; kind < TB__MESSAGE_KINDS; kind++)
        expect_table(tb__message_schema((tb__message_kind)kind)->name, tb__message_schema((tb__message_kind)kind));
    expect_table("A mesh", &tb__mesh_schema);
    expect_table("A tensor", &tb__tensor_schema);
    expect_table("Memory", &tb__memory_schema);
    expect_table("Device memory", &tb__device_memory_schema);
    expect_table("A state", &tb__state_schema);
}

/* A value as text: JSON, but for bytes, which are <hex>. */
static void write_value(tb__text *text, tb__cursor *from) {
    tb__value value;
    assert_int_equal(tb__value_take(from, &value), TB_OK);
    switch (value.type) {
    case TB__VALUE_NIL:
        tb__text_add(text, "nil");
        break;
    case TB__VALUE_BOOL:
        tb__text_add(text, value.is_true ? "true" : "false");
        break;
    case TB__VALUE_UINT:
        tb__text_add(text, "%" PRIu64, value.positive);
        break;
    case TB__VALUE_NEGATIVE:
        tb__text_add(text, "%" PRId64, value.negative);
        break;
    case TB__VALUE_FLOAT:
        tb__text_add(text, "%.17g", value.number);
        break;
    case TB__VALUE_STR:
        tb__text_add(text, "\"%.*s\"", (int)value.bytes.nbytes, (const char *)value.bytes.data);
        break;
    case TB__VALUE_BIN: {
        char *hex = hex_of(value.bytes);
        tb__text_add(text, "<%s>", hex);
        free(hex);
        break;
    }
    case TB__VALUE_ARRAY:
        tb__text_add(text, "[");
        for (uint32_t i = 0; i < value.count; i++) {
            tb__text_add(text, "%s", i ? ", " : "");
            write_value(text, from);
        }
        tb__text_add(text, "]");
        break;
    case TB__VALUE_MAP:
        tb__text_add(text, "{");
        for (uint32_t i = 0; i < value.count; i++) {
            tb__text_add(text, "%s", i ? ", " : "");
            write_value(text, from);
            tb__text_add(text, ": ");
            write_value(text, from);
        }
        tb__text_add(text, "}");
        break;
    case TB__VALUE_EXT:
        fail_msg("no message has an extension");
    }
}

/* Broken after commas where lines would be longer than the page is wide. */
static void add_wrapped(tb__text *text, const char *line) {
    enum { WIDTH = 110 };
    while (strlen(line) > WIDTH) {
        int length = WIDTH;
        while (length > 1 && strncmp(line + length - 2, ", ", 2) != 0)
            length--;
        length = length > 1 ? length : WIDTH;
        tb__text_add(text, "%.*s\n", line[length - 1] == ' ' ? length - 1 : length, line);
        line += length;
    }
    tb__text_add(text, "%s\n", line);
}

static void expect_example(const char *heading, tb__blob header, tb__blob value) {
    tb__text text = {0}, block = {0};
    tb__cursor from = tb__cursor_over(value);
    write_value(&text, &from);
    char *shown, *length = hex_of(header), *hex = hex_of(value);
    assert_int_equal(tb__text_take(&text, &shown), TB_OK);
    tb__text_add(&block, "```\n");
    add_wrapped(&block, shown);
    tb__text_add(&block, "\n%s%s", length, header.nbytes ? "\n" : "");
    add_wrapped(&block, hex);
    tb__text_add(&block, "```\n");
    expect_in_section(heading, &block);
    nexamples++;
    free(shown);
    free(length);
    free(hex);
}

static void expect_message(const tb__message *message) {
    tb__bytes frame = {0};
    assert_int_equal(tb__message_encode(message, &frame), TB_OK);
    expect_example(tb__message_schema(message->kind)->name, (tb__blob){frame.item, TB__FRAME_HEADER}, map_of(&frame));
    free(frame.item);
}

static void expect_payload(const char *heading, tb__bytes *bytes) {
    expect_example(heading, (tb__blob){NULL, 0}, (tb__blob){bytes->item, bytes->count});
}

static void test_layouts(void **state) {
    (void)state;
    tb__bytes mesh = {0}, placements = {0};
    tb_layout *layout;
    assert_int_equal(tb_layout_parse("mesh=2,2 place=R,S0", &layout), TB_OK);
    assert_int_equal(tb__mesh_encode(layout, &mesh), TB_OK);
    assert_int_equal(tb__placements_encode(layout, &placements), TB_OK);
    expect_payload("A mesh", &mesh);
    expect_payload("Placements", &placements);
    expect_message(&(tb__message){.kind = TB__INIT_PAIR,
                                  .pair_name = "weights",
                                  .local_name = "trainer",
                                  .expected_world_size = 4,
                                  .remote_name = "inference",
                                  .mesh = {mesh.item, mesh.count},
                                  .placements = {placements.item, placements.count},
                                  .timeout_ms = 5000});
    free(mesh.item);
    free(placements.item);
    tb_layout_destroy(layout);
}

static void test_tensors(void **state) {
    (void)state;
    tb__bytes memory = {0}, payload = {0};
    tb_layout *own;
    assert_int_equal(tb_layout_parse("mesh=2,2 place=S0,S1", &own), TB_OK);
    tb__tensor_payload tensor = {.name = "w",
                                 .dtype = TB_BF16,
                                 .shape = {2, {4096, 4096}},
                                 .group = 1,
                                 .data = {.kind = TB__MEMORY_FD, .offset = 4096, .nbytes = 8388608}};
    assert_int_equal(tb__tensor_encode(&tensor, own, &payload), TB_OK);
    tb__entry entry = {.pair_name = "weights", .payload = {payload.item, payload.count}};
    expect_message(&(tb__message){.kind = TB__REGISTER_TENSORS,
                                  .batch_id = "b0",
                                  .tensors = {.count = 1, .item = &entry},
                                  .bucket_size = tb__some_uint(16 << 20),
                                  .commit = TB__SHADOW});
    tensor.layout = own;
    tensor.encode = "mxfp8";
    tensor.dtype = TB_F8E4M3;
    tensor.data.nbytes /= 2;
    tensor.scales = (tb__payload_memory){.kind = TB__MEMORY_ADDRESS, .address = 0x7f5500001000, .nbytes = 131072};
    assert_int_equal(tb__tensor_encode(&tensor, own, &memory), TB_OK);
    expect_payload("A tensor", &memory);
    memory.count = 0;
    tb__device_memory device = {.id = 3, .fd = 2, .nfds = 1, .key = {(const uint8_t *)"\x01\x02\x03\x04", 4}};
    assert_int_equal(tb__map_encode(&tb__device_memory_schema, &device, &memory), TB_OK);
    expect_payload("Device memory", &memory);
    memory.count = 0;
    tb__state_payload all = {.message = "",
                             .state = {.events = TB_ARRIVED | TB_COMMITTED,
                                       .attempt = 8,
                                       .version = 8,
                                       .bytes_done = 8388608,
                                       .bytes_total = 8388608,
                                       .seconds = 0.25},
                             .received = 8};
    assert_int_equal(tb__map_encode(&tb__state_schema, &all, &memory), TB_OK);
    expect_payload("A state", &memory);
    free(memory.item);
    free(payload.item);
    tb_layout_destroy(own);
}

static void test_other_messages(void **state) {
    (void)state;
    expect_message(&(tb__message){.kind = TB__HELLO, .protocol = TB__PROTOCOL_VERSION, .client = "trainer/0"});
    expect_message(&(tb__message){.kind = TB__TRANSFER, .batch_id = "b0", .direction = TB__SEND});
    expect_message(&(tb__message){.kind = TB__TRANSFER,
                                  .batch_id = "b0",
                                  .direction = TB__RECV,
                                  .timestamp = tb__some_float(1700000000.5),
                                  .semaphore_name = "/b0.done",
                                  .no_wait = true});
    expect_message(&(tb__message){.kind = TB__QUERY_STATUS, .batch_id = "b0", .state_name = TB__STATE_PROGRESS});
    expect_message(&(tb__message){.kind = TB__CLEANUP_BATCH, .batch_id = "b"});
    expect_message(&(tb__message){.kind = TB__PROCEED, .batch_id = "b0"});
    expect_message(&(tb__message){.kind = TB__INSPECT});
    expect_message(&(tb__message){.kind = TB__ENTER, .group_name = "eval", .seat = 0, .seats = 2});
    expect_message(&(tb__message){.kind = TB__AWAIT_MEMBERS, .group_name = "inference", .timeout_ms = 5000});
    expect_message(&(tb__message){.kind = TB__CLEANUP_PAIR, .pair_name = "weights", .local_name = "trainer"});
    expect_message(&(tb__message){.kind = TB__AWAIT_TENSORS, .batch_id = "b0", .group = tb__some_uint(7)});
    expect_message(&(tb__message){.kind = TB__CANCEL, .batch_id = "b0", .direction = TB__RECV});
    expect_message(&(tb__message){.kind = TB__INVALIDATE, .address = 0x7f5500001000, .nbytes = 4096});
    expect_message(&(tb__message){.kind = TB__DUMP, .batch_id = "b0", .direction = TB__SEND});
    expect_message(&(tb__message){.kind = TB__LIST_GROUPS, .timeout_ms = 5000});
    expect_message(&(tb__message){.kind = TB__REPLY,
                                  .message = "",
                                  .version = tb__some_uint(TB__PROTOCOL_VERSION),
                                  .rank = tb__some_uint(2),
                                  .name = "trainer",
                                  .index = tb__some_uint(2),
                                  .size = tb__some_uint(4),
                                  .timeout_ms = 30000});
    expect_message(&(tb__message){.kind = TB__REPLY,
                                  .seq = 3,
                                  .message = "",
                                  .version = tb__some_uint(7),
                                  .attempt = tb__some_uint(8),
                                  .bytes = tb__some_uint(8388608),
                                  .seconds = tb__some_float(0.25)});
    expect_message(&(tb__message){.kind = TB__REPLY, .seq = 4, .status = TB_LOST, .message = "rank 6 was lost"});
    expect_message(&(tb__message){
        .kind = TB__EVENT, .seq = 3, .event = TB__EVENT_ARRIVED, .message = "", .version = tb__some_uint(7)});
    tb__outcome pairs[] = {{"east", TB_OK, "", 8, false}, {"west", TB_LOST, "rank 6 was lost", 7, false}};
    expect_message(
        &(tb__message){.kind = TB__REPLY, .seq = 5, .message = "", .attempt = tb__some_uint(8), .pairs = {2, pairs}});
}

/* Every code that there is has its line. */
static void test_codes(void **state) {
    (void)state;
    const char *none = tb_status_string((tb_status)-127);
    for (int code = 0; strcmp(tb_status_string((tb_status)-code), none) != 0; code++) {
        tb__text row = {0};
        tb__text_add(&row, "| %d | %s |", code, tb_status_string((tb_status)-code));
        expect_in_section("Codes", &row);
    }
}

/* What the tests above have not looked for is out of date. */
static void test_no_other_examples(void **state) {
    (void)state;
    int nfences = 0;
    for (const char *at = page; (at = strstr(at, "```\n")) != NULL; at++)
        nfences++;
    assert_int_equal(nfences, 2 * nexamples);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_every_field_is_documented),
        cmocka_unit_test(test_layouts),
        cmocka_unit_test(test_tensors),
        cmocka_unit_test(test_other_messages),
        cmocka_unit_test(test_codes),
        cmocka_unit_test(test_no_other_examples),
    };
    return cmocka_run_group_tests(tests, read_page, free_page);
}
