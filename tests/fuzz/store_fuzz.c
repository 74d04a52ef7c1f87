/* The store's frames as the server and its clients read them: one after the other until one is incomplete or refused.
 * What is read is written back to the same bytes, and requests are carried out on a table of keys. */
#include "bus/protocol/protocol.h"
#include "bus/store/table.h"
#include "fuzz.h"

/* Only a hello of another version may have more in it than the message says. */
static void check_round_trip(const tb__store_message *message, const uint8_t *frame, size_t nbytes) {
    if (message->op == TB__STORE_HELLO && !message->is_reply && message->version != TB__STORE_VERSION)
        return;
    tb__bytes again = {0};
    expect(tb__store_encode(message, &again) == TB_OK);
    expect(again.count == nbytes);
    expect(memcmp(again.item, frame, nbytes) == 0);
    free(again.item);
}

static void check_entries(const tb__store_message *message) {
    tb__blob rest = message->entries, key, value;
    uint64_t revision;
    uint64_t count = 0;
    while (tb__store_next_entry(&rest, &key, &revision, &value)) {
        expect(key.nbytes > 0 && key.nbytes <= TB__STORE_MAX_WIRE_KEY);
        expect(value.nbytes <= TB__STORE_MAX_VALUE);
        count++;
    }
    expect(count == message->nentries && rest.nbytes == 0);
}

static void check_table(const tb__store_table *table) {
    size_t first, last;
    tb__store_table_range(table, (tb__blob){0}, &first, &last);
    expect(first == 0 && last == table->records.count);
    for (size_t i = 0; i < last; i++) {
        tb__blob key = tb__record_key(table->records.item[i]);
        expect(tb__store_table_find(table, key) == table->records.item[i]);
    }
}

static const tb__key_owner somebody = {{1}};

static void apply(tb__store_table *table, const tb__store_message *m) {
    uint64_t before = table->revision;
    switch (m->op) {
    case TB__STORE_SET:
    case TB__STORE_COMPARE_AND_SET:
        if (!succeeded(tb__store_table_set(table, m->key, m->value, &somebody, (tb__store_lifetime)m->lifetime)))
            break;
        expect(tb__store_table_find(table, m->key)->revision == before + 1);
        expect(tb__store_table_changed_since(table, m->key, before));
        break;
    case TB__STORE_DELETE:
        tb__store_table_remove(table, m->key);
        expect(!tb__store_table_find(table, m->key));
        break;
    case TB__STORE_COUNT: {
        uint64_t number = 0, again = 0;
        if (!succeeded(tb__store_table_count(table, m->key, m->revision, m->number, &number)))
            break;
        expect(number >= m->revision && tb__store_table_find(table, m->key)->is_counter);
        expect(tb__store_table_count(table, m->key, 0, 0, &again) == TB_OK && again == number + m->number);
        break;
    }
    case TB__STORE_TAKE_BLOCK: {
        uint64_t first = 0, again = 0, next = 0;
        if (!succeeded(tb__store_table_take_block(table, m->guard, m->key, m->number, &first, &next)))
            break;
        expect(tb__store_table_find(table, m->key)->is_counter);
        expect(tb__store_table_take_block(table, m->guard, m->key, m->number, &again, &next) == TB_OK);
        expect(again == first);
        break;
    }
    default:
        (void)tb__store_table_changed_since(table, m->key, m->revision);
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    static tb__store_table kept;
    static const tb__store_table clean;
    tb__store_table *table = &kept;
    table->max_nbytes = 1 << 20;
    tb__frame_reader reader = {.max_nbytes = TB__STORE_MAX_REQUEST};
    tb__store_message message;
    tb__blob frame;
    bool has_frame;
    expect(tb__frame_add(&reader, data, size) == TB_OK);
    while (succeeded(tb__frame_next(&reader, &frame, &has_frame)) && has_frame &&
           succeeded(tb__store_decode(frame, &message))) {
        expect(reader.taken <= size);
        check_round_trip(&message, frame.data - TB__FRAME_HEADER, frame.nbytes + TB__FRAME_HEADER);
        check_entries(&message);
        if (!message.is_reply)
            apply(table, &message);
    }
    tb__frame_reader_fini(&reader);
    if (table->revision == 0)
        return 0;
    check_table(table);
    tb__store_table_remove_ephemerals(table, &somebody);
    check_table(table);
    for (size_t i = 0; i < table->records.count; i++)
        expect(table->records.item[i]->lifetime != TB__STORE_EPHEMERAL);
    tb__store_table_fini(table);
    *table = clean; /* its log is long, and most inputs don't get this far */
    return 0;
}
