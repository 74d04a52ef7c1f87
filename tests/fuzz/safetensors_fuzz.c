/* Safetensors files in memory. What is accepted is covered by its tensors from end to end, and what we write of it
 * reads back as the same.
 *
 * An input is read in two ways: as a file, and as a header that follows 8 bytes with the size of the data. In the
 * second a mutation that changes the header's length does no harm. */
#include "format/safetensors.h"
#include "fuzz.h"
#include "numbers.h"

static void check_header(const tb__safetensors_header *h, int64_t data_nbytes) {
    int64_t end = 0;
    expect(h->data_nbytes == data_nbytes);
    for (size_t i = 0; i < h->count; i++) {
        const tb__safetensor *t = &h->tensors[i];
        int64_t nbytes;
        expect(t->offset == end && t->nbytes >= 0);
        expect(tb__safetensor_size(t, &nbytes) == TB_OK && nbytes == t->nbytes);
        expect(tb__safetensors_find(h, t->name) == t);
        expect(i == 0 || strcmp(h->by_name[i - 1]->name, h->by_name[i]->name) < 0);
        end += t->nbytes;
        note_magnitude(0, t->nbytes);
        note_magnitude(1, t->shape.ndim ? t->shape.dim[0] : 0);
        note_magnitude(2, t->shape.ndim);
    }
    expect(end == data_nbytes);
    for (size_t i = 1; i < h->nmetadata; i++)
        expect(strcmp(h->metadata[i - 1].key, h->metadata[i].key) < 0);
    note_magnitude(3, (int64_t)h->count);
    note_magnitude(4, (int64_t)h->nmetadata);
}

/* Written by us, it has the same tensors and notes; written again, the same bytes. */
static void check_round_trip(const tb__safetensors_header *h) {
    tb__safetensors_plan plan, again;
    tb__safetensors_header back;
    tb__safetensor *tensors = malloc((h->count + 1) * sizeof *tensors);
    expect(tensors);
    for (size_t i = 0; i < h->count; i++)
        tensors[i] = h->tensors[i];
    if (succeeded(tb__safetensors_format(tensors, h->count, h->metadata, h->nmetadata, &plan))) {
        size_t length;
        int64_t file_nbytes = (int64_t)plan.head_nbytes + plan.data_nbytes;
        expect(plan.data_nbytes == h->data_nbytes && plan.head_nbytes % 8 == 0);
        expect(tb__safetensors_length(plan.head, file_nbytes, &length) == TB_OK && length + 8 == plan.head_nbytes);
        expect(tb__safetensors_parse(plan.head + 8, length, plan.data_nbytes, &back) == TB_OK);
        check_header(&back, h->data_nbytes);
        expect(back.count == h->count && back.nmetadata == h->nmetadata);
        for (size_t i = 0; i < h->count; i++) {
            const tb__safetensor *t = tb__safetensors_find(&back, tensors[i].name);
            expect(t && t->dtype == tensors[i].dtype && t->offset == tensors[i].offset);
            expect(strcmp(tb__safetensor_dtype_name(t), tb__safetensor_dtype_name(&tensors[i])) == 0);
            expect(t->shape.ndim == tensors[i].shape.ndim);
            for (int d = 0; d < t->shape.ndim; d++)
                expect(t->shape.dim[d] == tensors[i].shape.dim[d]);
        }
        for (size_t i = 0; i < h->count; i++)
            tensors[i] = back.tensors[i];
        for (size_t i = 0; i < h->nmetadata; i++) {
            expect(strcmp(back.metadata[i].key, h->metadata[i].key) == 0);
            expect(strcmp(back.metadata[i].value, h->metadata[i].value) == 0);
        }
        expect(tb__safetensors_format(tensors, back.count, back.metadata, back.nmetadata, &again) == TB_OK);
        expect(again.head_nbytes == plan.head_nbytes && memcmp(again.head, plan.head, plan.head_nbytes) == 0);
        free(again.head);
        free(plan.head);
        tb__safetensors_header_fini(&back);
    }
    free(tensors);
}

static void check_text(const uint8_t *text, size_t length, int64_t data_nbytes) {
    tb__safetensors_header header;
    char *exact = malloc(length ? length : 1); /* so that a read past its end is seen */
    expect(exact);
    memcpy(exact, text, length);
    if (succeeded(tb__safetensors_parse(exact, length, data_nbytes, &header))) {
        check_header(&header, data_nbytes);
        check_round_trip(&header);
        tb__safetensors_header_fini(&header);
    }
    free(exact);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    size_t length;
    uint64_t claimed = 0;
    if (size < TB__SAFETENSORS_LENGTH)
        return 0;
    if (succeeded(tb__safetensors_length(data, (int64_t)size, &length))) {
        expect(length <= size - TB__SAFETENSORS_LENGTH);
        check_text(data + TB__SAFETENSORS_LENGTH, length, (int64_t)(size - TB__SAFETENSORS_LENGTH - length));
    }
    memcpy(&claimed, data, sizeof claimed);
    check_text(data + TB__SAFETENSORS_LENGTH, size - TB__SAFETENSORS_LENGTH, (int64_t)(claimed >> 1));
    return 0;
}
