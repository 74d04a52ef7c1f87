/* Dumps of the transfer IR: what parses is dumped, and the dump parses back to one of the same bytes. */
#include "fuzz.h"
#include "numbers.h"

static void note_chunks(const tb_ir *ir) {
    for (size_t i = 0; i < ir->nchunks; i++) {
        const tb_chunk *c = &ir->chunks[i];
        for (int d = 0; d < c->ndim; d++) {
            note_magnitude(0, c->len[d]);
            note_magnitude(1, c->src.start[d]);
            note_magnitude(2, c->dst.start[d]);
        }
        note_magnitude(3, c->nbytes);
        note_magnitude(4, c->order);
    }
    for (size_t i = 0; i < ir->nentries; i++)
        note_magnitude(5, ir->entries[i].offset);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    tb_ir *ir = NULL, *back;
    char *text, *first, *second;
    if (!succeeded(tb_ir_parse_json((const char *)data, size, &ir))) {
        expect(!ir);
        return 0;
    }
    note_chunks(ir);
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
