/* Dumps of the transfer IR: what parses is dumped, and the dump parses back to one of the same bytes. */
#include "fuzz.h"
#include "numbers.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    tb_ir *ir = NULL, *back;
    char *text, *first, *second;
    if (!succeeded(tb_ir_parse_json((const char *)data, size, &ir))) {
        expect(!ir);
        return 0;
    }
    expect(tb_ir_dump_json(ir, &first) == TB_OK);
    expect(tb_ir_dump_text(ir, &text) == TB_OK);
    expect(tb_ir_parse_json(first, strlen(first), &back) == TB_OK);
    expect(tb_ir_dump_json(back, &second) == TB_OK);
    expect(strcmp(first, second) == 0);
    free(text);
    free(first);
    free(second);
    tb_ir_destroy(ir);
    tb_ir_destroy(back);
    return 0;
}
