/* What etcd's gateway answers, as the store reads it: a value, the pages of a list, a revision, the last key of a page.
 * An answer may be anything; what is accepted has the sizes that it was measured with. */
#include "bus/store/etcd_json.h"
#include "fuzz.h"

static void read_page(const json_t *page) {
    char key[TB__STORE_MAX_WIRE_KEY + 32];
    if (tb__etcd_read_last_key(page, key, sizeof key))
        expect(memchr(key, '\0', sizeof key));
    json_t *pages = json_array();
    expect(pages && json_array_append(pages, (json_t *)(uintptr_t)page) == 0);
    size_t count = 0, nbytes = 0;
    tb__store_entries entries = {0};
    tb_status status = tb__etcd_measure(pages, &count, &nbytes);
    if (status == TB_OK)
        status = tb__etcd_read_entries(pages, strlen(TB__ETCD_DATA), tb__etcd_read_revision(page), &entries);
    expect(status == TB_OK || *tb_error_detail());
    if (status == TB_OK) {
        expect(entries.count <= count);
        for (size_t i = 0; i < entries.count; i++)
            expect(((const char *)entries.item[i].value.data)[entries.item[i].value.nbytes] == '\0');
        tb__store_entries_fini(&entries);
    }
    json_decref(pages);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    json_error_t error;
    json_t *reply = json_loadb((const char *)data, size, JSON_REJECT_DUPLICATES | JSON_ALLOW_NUL, &error);
    if (!reply)
        return 0;
    (void)tb__etcd_read_revision(reply);
    (void)tb__etcd_read_number(reply, "TTL");
    (void)tb__etcd_read_number(json_object_get(reply, "result"), "compact_revision");
    const json_t *kvs = json_object_get(reply, "kvs"), *kv;
    size_t i;
    json_array_foreach(kvs, i, kv) {
        tb__store_value value = {0};
        if (tb__etcd_read_value(kv, &value) == TB_OK && value.data)
            expect(((const char *)value.data)[value.nbytes] == '\0');
        tb__store_value_fini(&value);
    }
    read_page(reply);
    json_decref(reply);
    return 0;
}
