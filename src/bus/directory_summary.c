/* Packs and unpacks summaries. Entries of many ranks are nearly equal: each key and value is packed as what differs
 * from the one before. Another process writes summaries, so they may be malformed. */
#include "bus/directory_summary.h"

#include "base/mem.h"

#include <stdio.h>
#include <string.h>

/* SAME: so many equal bytes end a difference: where it costs less to begin another one. */
enum { SAME = 4, MAX_NBYTES = 16 << 20 };

typedef struct text {
    const char *data;
    size_t nbytes;
} text;

static size_t count_same(text a, text b, size_t from) {
    size_t i = from, n = a.nbytes < b.nbytes ? a.nbytes : b.nbytes;
    while (i < n && a.data[i] == b.data[i])
        i++;
    return i - from;
}

/* Lengths are short: seven bits a byte, the lowest first, and the eighth says that more follow. */
static void pack_length(tb__pack *pack, size_t length) {
    for (; length > 127; length >>= 7)
        tb__pack_raw(pack, &(uint8_t){(uint8_t)(length | 128)}, 1);
    tb__pack_raw(pack, &(uint8_t){(uint8_t)length}, 1);
}

static size_t unpack_length(tb__unpack *u) {
    size_t length = 0;
    for (unsigned shift = 0; shift < 32; shift += 7) {
        const uint8_t *byte = tb__unpack_raw(u, 1);
        if (!byte)
            return 0;
        length |= (size_t)(*byte & 127) << shift;
        if (*byte < 128)
            return length;
    }
    u->failed = true;
    return 0;
}

/* The length; then, until that is reached: how many bytes are equal, how many differ, and these. */
static void pack_difference(tb__pack *pack, text before, text now) {
    pack_length(pack, now.nbytes);
    for (size_t at = 0; at < now.nbytes;) {
        size_t first = at + count_same(before, now, at), end = first, same = 0;
        while (end < now.nbytes && same < SAME) {
            end += same ? same : 1;
            same = count_same(before, now, end);
        }
        pack_length(pack, first - at);
        pack_length(pack, end - first);
        tb__pack_raw(pack, now.data + first, end - first);
        at = end;
    }
}

/* Writes to *at, with a NUL behind, and advances it. A text that equals the one before is that one. */
static text unpack_difference(tb__unpack *u, text before, char **at, const char *end) {
    size_t nbytes = unpack_length(u), done = 0;
    char *out = *at;
    u->failed |= nbytes >= (size_t)(end - out);
    while (done < nbytes && !u->failed) {
        size_t same = unpack_length(u), differ = unpack_length(u);
        const void *data = tb__unpack_raw(u, differ);
        u->failed |=
            same > nbytes - done || done + same > before.nbytes || differ > nbytes - done - same || same + differ == 0;
        if (u->failed)
            break;
        if (same == nbytes && same == before.nbytes)
            return before;
        if (same > 0 && before.data)
            memcpy(out + done, before.data + done, same);
        if (differ > 0 && data)
            memcpy(out + done + same, data, differ);
        done += same + differ;
    }
    if (u->failed)
        return (text){0};
    out[nbytes] = '\0';
    *at += nbytes + 1;
    return (text){out, nbytes};
}

typedef struct prefixes {
    tb__key groups[2], notes;
} prefixes;

static bool is_about(const char *key, const prefixes *p) {
    return strncmp(key, p->groups[0].text, strlen(p->groups[0].text)) == 0 ||
           strncmp(key, p->groups[1].text, strlen(p->groups[1].text)) == 0 ||
           strncmp(key, p->notes.text, strlen(p->notes.text)) == 0;
}

void tb__summary_pack(tb__pack *pack, const tb__store_entries *entries, const char *pair, const char *const groups[2],
                      uint64_t state) {
    prefixes p = {{tb__key_of_group(groups[0]), tb__key_of_group(groups[1])}, tb__key_of_topic(pair)};
    text key = {0}, value = {0};
    uint32_t count = 0;
    size_t nbytes = 0;
    for (size_t i = 0; i < entries->count; i++) {
        bool is_in = is_about(entries->item[i].key, &p);
        count += is_in;
        nbytes += is_in ? strlen(entries->item[i].key) + entries->item[i].value.nbytes + 2 : 0;
    }
    tb__pack_u64(pack, state);
    tb__pack_u64(pack, entries->revision);
    tb__pack_string(pack, groups[0]);
    tb__pack_string(pack, groups[1]);
    tb__pack_u32(pack, count);
    size_t head = pack->count;
    tb__pack_u64(pack, nbytes);
    for (size_t i = 0; i < entries->count; i++) {
        const tb__store_entry *e = &entries->item[i];
        text next_key = {e->key, strlen(e->key)}, next_value = {e->value.data, e->value.nbytes};
        if (!is_about(e->key, &p))
            continue;
        pack_difference(pack, key, next_key);
        pack_difference(pack, value, next_value);
        key = next_key;
        value = next_value;
    }
    if (!pack->failed && (pack->count > TB__STORE_MAX_VALUE || nbytes > MAX_NBYTES)) {
        pack->count = head;
        tb__pack_u64(pack, 0); /* they have to be listed */
    }
}

static bool unpack_entries(tb__unpack *u, uint32_t count, uint64_t nbytes, tb__store_entries *out) {
    text key = {0}, value = {0};
    /* an entry has two lengths in the summary, and two NULs here */
    if (nbytes > MAX_NBYTES || count > (size_t)(u->end - u->at) / 2 || count > nbytes / 2)
        return false;
    out->item = tb__malloc(1, count * sizeof *out->item + nbytes);
    if (!out->item)
        return false;
    char *at = (char *)(out->item + count), *end = at + nbytes;
    for (; out->count < count && !u->failed; out->count++) {
        key = unpack_difference(u, key, &at, end);
        value = unpack_difference(u, value, &at, end);
        out->item[out->count] =
            (tb__store_entry){.key = key.data, .value = {.data = (void *)value.data, .nbytes = value.nbytes}};
    }
    return tb__unpack_is_done(u);
}

bool tb__summary_unpack(const tb__store_value *value, const char *pair, tb__summary *out) {
    tb__unpack u = {value->data, (const unsigned char *)value->data + value->nbytes, false};
    tb__store_entries entries = {0};
    *out = (tb__summary){.revision = value->revision, .state = tb__unpack_u64(&u)};
    entries.revision = tb__unpack_u64(&u);
    snprintf(out->pair, sizeof out->pair, "%s", pair);
    for (int i = 0; i < 2; i++)
        snprintf(out->groups[i], sizeof out->groups[i], "%s", tb__unpack_string(&u));
    uint32_t count = tb__unpack_u32(&u);
    uint64_t nbytes = tb__unpack_u64(&u);
    if (u.failed || nbytes == 0)
        return !u.failed;
    if (!unpack_entries(&u, count, nbytes, &entries)) {
        tb__store_entries_fini(&entries);
        return false;
    }
    return tb__directory_view_create(&entries, UINT64_MAX, &out->view) == TB_OK;
}
