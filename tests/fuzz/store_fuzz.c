/* The store's frames as the server and its clients read them: one after the other until one is incomplete or refused.
 * What is read is written back to the same bytes, and requests are carried out on a table of keys. */
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
    tb__span rest = message->entries, key, value;
    uint64_t revision;
    uint32_t count = 0;
    while (tb__store_next_entry(&rest, &key, &revision, &value)) {
        expect(key.nbytes > 0 && key.nbytes <= TB__STORE_MAX_WIRE_KEY);
        expect(value.nbytes <= TB__STORE_MAX_VALUE);
        count++;
    }
    expect(count == message->nentries && rest.nbytes == 0);
}

static void check_table(const tb__store_table *table) {
    size_t first, last;
    tb__store_table_range(table, (tb__span){0}, &first, &last);
    expect(first == 0 && last == table->records.count);
    for (size_t i = 0; i < last; i++) {
        tb__span key = tb__record_key(table->records.item[i]);
        expect(tb__store_table_find(table, key) == table->records.item[i]);
    }
}

static void apply(tb__store_table *table, const tb__store_message *m) {
    uint64_t before = table->revision;
    switch (m->op) {
    case TB__STORE_SET:
    case TB__STORE_COMPARE_AND_SET:
        if (!succeeded(tb__store_table_set(table, m->key, m->value, m->lifetime == TB__STORE_EPHEMERAL)))
            break;
        expect(tb__store_table_find(table, m->key)->revision == before + 1);
        expect(tb__store_table_changed_since(table, m->key, before));
        break;
    case TB__STORE_DELETE:
        tb__store_table_remove(table, m->key);
        expect(!tb__store_table_find(table, m->key));
        break;
    case TB__STORE_DELETE_PREFIX:
        tb__store_table_remove_prefix(table, m->key);
        expect(tb__store_table_changed_since(table, m->key, before) == (table->revision > before));
        break;
    default:
        (void)tb__store_table_changed_since(table, m->key, m->revision);
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    static tb__store_table kept;
    static const tb__store_table clean;
    tb__store_table *table = &kept;
    table->max_nbytes = 1 << 20;
    tb__store_message message;
    for (size_t done = 0, used; done < size; done += used) {
        if (!succeeded(tb__store_decode(data + done, size - done, TB__STORE_MAX_REQUEST, &message, &used)))
            break;
        expect(used <= size - done);
        if (used == 0)
            break;
        check_round_trip(&message, data + done, used);
        check_entries(&message);
        if (!message.is_reply)
            apply(table, &message);
    }
    if (table->revision == 0)
        return 0;
    check_table(table);
    tb__store_table_remove_owner(table, 1);
    check_table(table);
    tb__store_table_fini(table);
    *table = clean; /* its log is long, and most inputs don't get this far */
    return 0;
}
