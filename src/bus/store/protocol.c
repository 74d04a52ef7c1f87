/* Frames to messages and back, driven by one table of operations and one of fields. */
#include "bus/store/protocol.h"

#include "base/mem.h"
#include "bus/protocol/protocol.h"

#include <string.h>

enum { REPLY_BIT = 0x80, MAX_SENTENCE = 1024, LAST_STATUS = -TB_CONFLICT };

static const struct {
    const char *name, *request, *reply;
} ops[] = {
    [TB__STORE_HELLO] = {"hello", "mnx", "nxt"},
    [TB__STORE_PROVE] = {"prove", "to", ""},
    [TB__STORE_SET] = {"set", "kvb", "r"},
    [TB__STORE_GET] = {"get", "k", "rv"},
    [TB__STORE_COMPARE_AND_SET] = {"compare_and_set", "krvb", "r"}, /* r: the revision expected, 0 for no such key */
    [TB__STORE_CREATE_GUARDED] = {"create_guarded", "gwkv", "r"},
    [TB__STORE_DELETE] = {"delete", "k", "r"},
    [TB__STORE_COUNT] = {"count", "krc", "r"}, /* r: raised to at least this, c: what is added; the reply: before */
    [TB__STORE_LIST] = {"list", "p", "rl"},
    [TB__STORE_WAIT_CHANGE] = {"wait_change", "pr",
                               "rcl"}, /* r: changes after this one; c: 1: the list is not complete */
    [TB__STORE_CANCEL] = {"cancel", "", ""},
    [TB__STORE_TAKE_BLOCK] = {"take_block", "gkc", "rc"}, /* c: numbers; the reply: the first of them, the counter */
};

typedef struct field {
    char name;
    enum { NUMBER, RAW, BYTES, KEY, PREFIX } type; /* uint64_t; bytes in the struct; a tb__blob */
    size_t offset;                                 /* in the message */
    size_t width;                                  /* bytes of the number, of the bytes, of their length */
    size_t max;                                    /* length */
    const char *too_long;
} field;

#define AT(member) offsetof(tb__store_message, member)
static const field fields[] = {
    {'m', NUMBER, AT(magic), 4, 0, NULL},
    {'n', NUMBER, AT(version), 4, 0, NULL},
    {'r', NUMBER, AT(revision), 8, 0, NULL},
    {'c', NUMBER, AT(number), 8, 0, NULL},
    {'b', NUMBER, AT(lifetime), 1, 0, NULL},
    {'l', NUMBER, AT(nentries), 4, 0, NULL},
    {'x', RAW, AT(end), sizeof(tb__proof_end), 0, NULL},
    {'o', RAW, AT(secret), sizeof(tb__store_secret), 0, NULL},
    {'k', KEY, AT(key), 2, TB__STORE_MAX_WIRE_KEY, "a key is too long"},
    {'p', PREFIX, AT(key), 2, TB__STORE_MAX_WIRE_KEY, "a key is too long"},
    {'g', KEY, AT(guard), 2, TB__STORE_MAX_WIRE_KEY, "a key is too long"},
    {'v', BYTES, AT(value), 4, TB__STORE_MAX_VALUE, "a value is too long"},
    {'w', BYTES, AT(guard_value), 4, TB__STORE_MAX_VALUE, "a value is too long"},
    {'t', BYTES, AT(value), 2, TB__PROOF_NBYTES, "the proof is too long"},
    {'s', BYTES, AT(value), 2, MAX_SENTENCE, "the sentence is too long"},
};

static const field *field_of(char name) {
    const field *f = fields;
    while (f->name != name)
        f++;
    return f;
}

const char *tb__store_op_name(tb__store_op op) {
    return (unsigned)op < TB__STORE_NOPS ? ops[op].name : "unknown";
}

static const char *fields_of(const tb__store_message *m) {
    if (!m->is_reply)
        return ops[m->op].request;
    return m->status == TB_OK ? ops[m->op].reply : m->status == TB_CONFLICT ? "rv" : "s";
}

/* A cursor that ran out or met what is not allowed has a reason, and reads zeros from then on. */
typedef struct cursor {
    const uint8_t *at, *end;
    const char *wrong;
} cursor;

static void reject(cursor *c, bool is_wrong, const char *why) {
    if (is_wrong && !c->wrong)
        c->wrong = why;
}

/* Empty if it can't be had. */
static tb__blob take_bytes(cursor *c, size_t nbytes) {
    reject(c, (size_t)(c->end - c->at) < nbytes, "it ends too early");
    if (c->wrong)
        return (tb__blob){0};
    c->at += nbytes;
    return (tb__blob){.data = c->at - nbytes, .nbytes = nbytes};
}

static uint64_t take_number(cursor *c, size_t width) {
    tb__blob bytes = take_bytes(c, width);
    uint64_t value = 0;
    for (size_t i = 0; i < bytes.nbytes; i++)
        value |= (uint64_t)bytes.data[i] << (8 * i);
    return value;
}

static void take_field(cursor *c, char name, tb__store_message *m) {
    const field *f = field_of(name);
    void *at = (char *)m + f->offset;
    size_t width = f->type == RAW ? f->width : (size_t)take_number(c, f->width);
    if (f->type == NUMBER) {
        *(uint64_t *)at = width;
        return;
    }
    reject(c, f->type != RAW && width > f->max, f->too_long);
    tb__blob bytes = take_bytes(c, width);
    reject(c, f->type == KEY && bytes.nbytes == 0, "a key is empty");
    reject(c, f->type >= KEY && bytes.nbytes > 0 && memchr(bytes.data, 0, bytes.nbytes), "a key has a NUL in it");
    if (f->type != RAW)
        *(tb__blob *)at = bytes;
    else if (bytes.nbytes > 0)
        memcpy(at, bytes.data, bytes.nbytes);
}

static void take_entry(cursor *c, tb__store_message *out) {
    for (const char *name = "krv"; *name; name++)
        take_field(c, *name, out);
}

static void take_entries(cursor *c, tb__store_message *m) {
    tb__store_message entry = {0};
    const uint8_t *first = c->at;
    for (uint64_t i = 0; i < m->nentries && !c->wrong; i++)
        take_entry(c, &entry);
    m->entries = (tb__blob){.data = first, .nbytes = (size_t)(c->at - first)};
}

static void take_message(cursor *c, tb__store_message *m) {
    m->id = take_number(c, 8);
    unsigned op = (unsigned)take_number(c, 1);
    m->is_reply = (op & REPLY_BIT) != 0;
    op &= ~(unsigned)REPLY_BIT;
    reject(c, op >= TB__STORE_NOPS, "no such operation");
    if (c->wrong)
        return;
    m->op = (tb__store_op)op;
    int status = m->is_reply ? (int)take_number(c, 1) : 0;
    reject(c, status > LAST_STATUS, "no such status");
    m->status = (tb_status)-status;
    for (const char *name = fields_of(m); *name && !c->wrong; name++) {
        take_field(c, *name, m);
        reject(c, *name == 'm' && m->magic != TB__STORE_MAGIC, "it does not begin like a tensorbus store's hello");
        reject(c, *name == 'b' && m->lifetime > TB__STORE_ONCE, "no such lifetime");
        if (*name == 'l')
            take_entries(c, m);
        /* The rest is defined by that version. */
        if (*name == 'n' && !m->is_reply && m->version != TB__STORE_VERSION && !c->wrong)
            return;
    }
    reject(c, c->at != c->end, "bytes follow its last field");
}

tb_status tb__store_decode(tb__blob frame, tb__store_message *out) {
    cursor c = {.at = frame.data, .end = frame.data + frame.nbytes};
    tb__store_message m = {0};
    take_message(&c, &m);
    *out = m;
    if (c.wrong)
        *out = (tb__store_message){.id = m.id};
    return c.wrong ? tb__fail(TB_INVALID, "a malformed %s frame of %zu bytes: %s", m.is_reply ? "reply" : "request",
                              frame.nbytes, c.wrong)
                   : TB_OK;
}

/* Writes into space that was reserved. */
static void put_number(tb__bytes *out, uint64_t value, size_t width) {
    for (size_t i = 0; i < width; i++)
        out->item[out->count++] = (uint8_t)(value >> (8 * i));
}

static void put_bytes(tb__bytes *out, const void *data, size_t nbytes) {
    if (nbytes > 0)
        memcpy(out->item + out->count, data, nbytes);
    out->count += nbytes;
}

static void put_field(tb__bytes *out, char name, const tb__store_message *m) {
    const field *f = field_of(name);
    const void *at = (const char *)m + f->offset;
    if (f->type == NUMBER) {
        put_number(out, name == 'm' ? TB__STORE_MAGIC : *(const uint64_t *)at, f->width);
    } else if (f->type == RAW) {
        put_bytes(out, at, f->width);
    } else {
        const tb__blob *bytes = at;
        put_number(out, bytes->nbytes, f->width);
        put_bytes(out, bytes->data, bytes->nbytes);
    }
    if (name == 'l')
        put_bytes(out, m->entries.data, m->entries.nbytes);
}

tb_status tb__store_encode(const tb__store_message *message, tb__bytes *out) {
    if (!tb__vec_reserve(out, 128 + message->guard.nbytes + message->guard_value.nbytes + message->key.nbytes +
                                  message->value.nbytes + message->entries.nbytes))
        return TB_NO_MEMORY;
    size_t start = out->count;
    put_number(out, 0, TB__FRAME_HEADER);
    put_number(out, message->id, 8);
    put_number(out, (unsigned)message->op | (message->is_reply ? REPLY_BIT : 0), 1);
    if (message->is_reply)
        put_number(out, (uint64_t)-message->status, 1);
    for (const char *name = fields_of(message); *name; name++)
        put_field(out, *name, message);
    put_number(&(tb__bytes){.item = out->item + start}, out->count - start - TB__FRAME_HEADER, TB__FRAME_HEADER);
    return TB_OK;
}

tb_status tb__store_add_entry(tb__bytes *entries, tb__blob key, uint64_t revision, tb__blob value) {
    tb__store_message m = {.key = key, .revision = revision, .value = value};
    if (!tb__vec_reserve(entries, 64 + key.nbytes + value.nbytes))
        return TB_NO_MEMORY;
    for (const char *name = "krv"; *name; name++)
        put_field(entries, *name, &m);
    return TB_OK;
}

bool tb__store_next_entry(tb__blob *entries, tb__blob *key, uint64_t *revision, tb__blob *value) {
    tb__store_message m = {0};
    if (entries->nbytes == 0)
        return false;
    cursor c = {.at = entries->data, .end = entries->data + entries->nbytes};
    take_entry(&c, &m);
    *key = m.key;
    *revision = m.revision;
    *value = m.value;
    *entries = (tb__blob){.data = c.at, .nbytes = (size_t)(c.end - c.at)};
    return !c.wrong;
}
