/* Frames to messages and back, driven by one table of operations. */
#include "bus/store/protocol.h"

#include "base/mem.h"

#include <string.h>

enum { HEADER = 4, REPLY_BIT = 0x80, MAX_SENTENCE = 1024, LAST_STATUS = -TB_CONFLICT };

static const struct {
    const char *name, *request, *reply;
} ops[] = {
    [TB__STORE_HELLO] = {"hello", "mnt", "n"},
    [TB__STORE_SET] = {"set", "kvb", "r"},
    [TB__STORE_GET] = {"get", "k", "rv"},
    [TB__STORE_WAIT] = {"wait", "k", "rv"},
    [TB__STORE_COMPARE_AND_SET] = {"compare_and_set", "krvb", "r"}, /* r: the revision expected, 0 for no such key */
    [TB__STORE_DELETE] = {"delete", "k", "r"},
    [TB__STORE_DELETE_PREFIX] = {"delete_prefix", "p", "r"},
    [TB__STORE_LIST] = {"list", "p", "rl"},
    [TB__STORE_WAIT_CHANGE] = {"wait_change", "pr", "r"}, /* r: a change after this one */
    [TB__STORE_CANCEL] = {"cancel", "", ""},
};

const char *tb__store_op_name(tb__store_op op) {
    return (unsigned)op < TB__STORE_NOPS ? ops[op].name : "unknown";
}

static const char *fields_of(const tb__store_message *m) {
    if (!m->is_reply)
        return ops[m->op].request;
    return m->status == TB_OK ? ops[m->op].reply : m->status == TB_CONFLICT ? "rv" : "s";
}

/* Reading. A cursor that ran out or met what is not allowed has a reason, and reads zeros from then on. */
typedef struct cursor {
    const uint8_t *at, *end;
    const char *wrong;
} cursor;

static uint64_t get_uint(cursor *c, size_t nbytes) {
    if ((size_t)(c->end - c->at) < nbytes && !c->wrong)
        c->wrong = "it ends too early";
    if (c->wrong)
        return 0;
    uint64_t value = 0;
    for (size_t i = 0; i < nbytes; i++)
        value |= (uint64_t)c->at[i] << (8 * i);
    c->at += nbytes;
    return value;
}

static tb__span get_span(cursor *c, size_t length_nbytes, size_t max, const char *too_long) {
    size_t nbytes = (size_t)get_uint(c, length_nbytes);
    if (!c->wrong && nbytes > max)
        c->wrong = too_long;
    if (!c->wrong && (size_t)(c->end - c->at) < nbytes)
        c->wrong = "it ends too early";
    if (c->wrong)
        return (tb__span){0};
    tb__span span = {.data = c->at, .nbytes = nbytes};
    c->at += nbytes;
    return span;
}

static tb__span get_key(cursor *c, bool may_be_empty) {
    tb__span key = get_span(c, 2, TB__STORE_MAX_WIRE_KEY, "a key is too long");
    if (!c->wrong && key.nbytes == 0 && !may_be_empty)
        c->wrong = "a key is empty";
    if (!c->wrong && key.nbytes > 0 && memchr(key.data, 0, key.nbytes))
        c->wrong = "a key has a NUL in it";
    return key;
}

static tb__span get_value(cursor *c) {
    return get_span(c, 4, TB__STORE_MAX_VALUE, "a value is too long");
}

static void get_entries(cursor *c, tb__store_message *m) {
    m->nentries = (uint32_t)get_uint(c, 4);
    const uint8_t *first = c->at;
    for (uint32_t i = 0; i < m->nentries && !c->wrong; i++) {
        get_key(c, false);
        get_uint(c, 8);
        get_value(c);
    }
    m->entries = (tb__span){.data = first, .nbytes = (size_t)(c->at - first)};
}

static void get_field(cursor *c, char field, tb__store_message *m) {
    switch (field) {
    case 'm':
        if (get_uint(c, 4) != TB__STORE_MAGIC && !c->wrong)
            c->wrong = "it does not begin like a tensorbus store's hello";
        break;
    case 'n':
        m->version = (uint32_t)get_uint(c, 4);
        break;
    case 't':
        m->value = get_span(c, 2, TB__STORE_MAX_TOKEN, "the token is too long");
        break;
    case 'k':
    case 'p':
        m->key = get_key(c, field == 'p');
        break;
    case 'v':
        m->value = get_value(c);
        break;
    case 's':
        m->value = get_span(c, 2, MAX_SENTENCE, "the sentence is too long");
        break;
    case 'r':
        m->revision = get_uint(c, 8);
        break;
    case 'l':
        get_entries(c, m);
        break;
    case 'b': {
        uint64_t lifetime = get_uint(c, 1);
        if (lifetime > TB__STORE_EPHEMERAL && !c->wrong)
            c->wrong = "no such lifetime";
        m->lifetime = lifetime == TB__STORE_EPHEMERAL ? TB__STORE_EPHEMERAL : TB__STORE_PERMANENT;
        break;
    }
    }
}

static void get_body(cursor *c, tb__store_message *m) {
    m->id = get_uint(c, 8);
    unsigned op = (unsigned)get_uint(c, 1);
    m->is_reply = (op & REPLY_BIT) != 0;
    op &= ~(unsigned)REPLY_BIT;
    if (!c->wrong && op >= TB__STORE_NOPS)
        c->wrong = "no such operation";
    if (c->wrong)
        return;
    m->op = (tb__store_op)op;
    if (m->is_reply) {
        int status = (int)get_uint(c, 1);
        if (status > LAST_STATUS && !c->wrong)
            c->wrong = "no such status";
        m->status = (tb_status)-status;
    }
    for (const char *field = fields_of(m); *field && !c->wrong; field++) {
        get_field(c, *field, m);
        /* The rest is defined by that version. */
        if (*field == 'n' && !m->is_reply && m->version != TB__STORE_VERSION && !c->wrong)
            return;
    }
    if (!c->wrong && c->at != c->end)
        c->wrong = "it goes on after its last field";
}

tb_status tb__store_decode(const uint8_t *data, size_t nbytes, size_t max_nbytes, tb__store_message *out,
                           size_t *used) {
    *out = (tb__store_message){0};
    *used = 0;
    if (nbytes < HEADER)
        return TB_OK;
    cursor c = {.at = data, .end = data + HEADER};
    size_t length = (size_t)get_uint(&c, HEADER);
    if (length > max_nbytes - HEADER)
        return tb__fail(TB_TOO_BIG, "a frame of %zu bytes where at most %zu are allowed", length, max_nbytes - HEADER);
    if (nbytes - HEADER < length)
        return TB_OK;
    c.end = data + HEADER + length;
    tb__store_message m = {0};
    get_body(&c, &m);
    if (c.wrong) {
        out->id = m.id;
        return tb__fail(TB_INVALID, "a malformed %s frame of %zu bytes: %s", m.is_reply ? "reply" : "request", length,
                        c.wrong);
    }
    *out = m;
    *used = HEADER + length;
    return TB_OK;
}

/* Writing, into space that was reserved. */
static void put_little_endian(tb__bytes *out, uint64_t value, size_t nbytes) {
    for (size_t i = 0; i < nbytes; i++)
        out->item[out->count++] = (uint8_t)(value >> (8 * i));
}

static void put_bytes(tb__bytes *out, tb__span span) {
    if (span.nbytes > 0)
        memcpy(out->item + out->count, span.data, span.nbytes);
    out->count += span.nbytes;
}

static void put_store_field(tb__bytes *out, char field, const tb__store_message *m) {
    switch (field) {
    case 'm':
        put_little_endian(out, TB__STORE_MAGIC, 4);
        break;
    case 'n':
        put_little_endian(out, m->version, 4);
        break;
    case 'k':
    case 'p':
        put_little_endian(out, m->key.nbytes, 2);
        put_bytes(out, m->key);
        break;
    case 'v':
        put_little_endian(out, m->value.nbytes, 4);
        put_bytes(out, m->value);
        break;
    case 't':
    case 's':
        put_little_endian(out, m->value.nbytes, 2);
        put_bytes(out, m->value);
        break;
    case 'r':
        put_little_endian(out, m->revision, 8);
        break;
    case 'b':
        put_little_endian(out, (uint64_t)m->lifetime, 1);
        break;
    case 'l':
        put_little_endian(out, m->nentries, 4);
        put_bytes(out, m->entries);
        break;
    }
}

tb_status tb__store_encode(const tb__store_message *message, tb__bytes *out) {
    if (!tb__vec_reserve(out, 64 + message->key.nbytes + message->value.nbytes + message->entries.nbytes))
        return TB_NO_MEMORY;
    size_t start = out->count;
    put_little_endian(out, 0, HEADER);
    put_little_endian(out, message->id, 8);
    put_little_endian(out, (unsigned)message->op | (message->is_reply ? REPLY_BIT : 0), 1);
    if (message->is_reply)
        put_little_endian(out, (uint64_t)-message->status, 1);
    for (const char *field = fields_of(message); *field; field++)
        put_store_field(out, *field, message);
    tb__bytes length = {.item = out->item + start};
    put_little_endian(&length, out->count - start - HEADER, HEADER);
    return TB_OK;
}

tb_status tb__store_add_entry(tb__bytes *entries, tb__span key, uint64_t revision, tb__span value) {
    tb__store_message m = {.key = key, .revision = revision, .value = value};
    if (!tb__vec_reserve(entries, 64 + key.nbytes + value.nbytes))
        return TB_NO_MEMORY;
    put_store_field(entries, 'k', &m);
    put_store_field(entries, 'r', &m);
    put_store_field(entries, 'v', &m);
    return TB_OK;
}

bool tb__store_next_entry(tb__span *entries, tb__span *key, uint64_t *revision, tb__span *value) {
    if (entries->nbytes == 0)
        return false;
    cursor c = {.at = entries->data, .end = entries->data + entries->nbytes};
    *key = get_key(&c, false);
    *revision = get_uint(&c, 8);
    *value = get_value(&c);
    *entries = (tb__span){.data = c.at, .nbytes = (size_t)(c.end - c.at)};
    return !c.wrong;
}
