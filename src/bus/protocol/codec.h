/* Maps with named fields, described by tables: one encoder and one decoder for all messages and payloads.
 *
 * A schema lists a map's fields in the order in which they are written, and the place of each in a C struct. Required
 * fields are always written; those that may be nil are written as nil; options are left out when they have their
 * default, which is zero, NULL, false or "not set". Decoders accept keys in any order and skip unknown keys; fields
 * that may be nil may also be absent. They refuse a field that comes twice, is required and missing, or has the wrong
 * type, and name the map and the field. */
#ifndef TB_BUS_PROTOCOL_CODEC_H
#define TB_BUS_PROTOCOL_CODEC_H

#include "base/bytes.h"
#include "base/mem.h"

enum {
    TB__MAX_TEXT = 64 << 10,    /* bytes of a text */
    TB__MAX_SENTENCE = 4 << 10, /* the encoder truncates longer ones */
    TB__MAX_ITEMS = 1 << 20,    /* of an array */
};

/* A value that may be absent. */
typedef struct tb__maybe_uint {
    bool is_set;
    uint64_t value;
} tb__maybe_uint;

typedef struct tb__maybe_float {
    bool is_set;
    double value;
} tb__maybe_float;

typedef struct tb__maybe_bool {
    bool is_set, value;
} tb__maybe_bool;

static inline tb__maybe_uint tb__some_uint(uint64_t value) {
    return (tb__maybe_uint){.is_set = true, .value = value};
}

static inline tb__maybe_float tb__some_float(double value) {
    return (tb__maybe_float){.is_set = true, .value = value};
}

static inline tb__maybe_bool tb__some_bool(bool value) {
    return (tb__maybe_bool){.is_set = true, .value = value};
}

/* A tensor of a RegisterTensors: a pair's name and a payload. */
typedef struct tb__entry {
    const char *pair_name;
    tb__blob payload;
} tb__entry;

typedef struct tb__entries {
    size_t count;
    const tb__entry *item;
} tb__entries;

typedef struct tb__ties {
    size_t count;
    const tb_tie *item;
} tb__ties;

typedef struct tb__texts {
    size_t count;
    const char *const *item;
} tb__texts;

/* The result of one pair's part of a transfer. */
typedef struct tb__outcome {
    const char *pair_name;
    tb_status status;
    const char *message; /* "" if the status is 0 */
    uint64_t version;    /* the last that was completed; 0: none */
    bool is_torn;
} tb__outcome;

typedef struct tb__outcomes {
    size_t count;
    const tb__outcome *item;
} tb__outcomes;

typedef struct tb__ints {
    size_t count;
    const int64_t *item;
    bool is_set; /* where it may be nil */
} tb__ints;

/* The type of a field in the map, and in the struct. */
typedef enum tb__field_type {
    TB__FIELD_TEXT,        /* str, UTF-8 without NUL: const char *, NULL for none */
    TB__FIELD_SENTENCE,    /* the same; the encoder makes UTF-8 of anything */
    TB__FIELD_CHOICE,      /* str, one of `choices`: an enum, the index in them; of an option one more, 0 for none */
    TB__FIELD_DTYPE,       /* str: tb_dtype, TB_DTYPE_NONE for none */
    TB__FIELD_STATUS,      /* uint: tb_status, which has the other sign */
    TB__FIELD_UINT,        /* uint: uint64_t */
    TB__FIELD_UINT32,      /* uint: uint32_t; has a max */
    TB__FIELD_FLOAT,       /* float, or int: double */
    TB__FIELD_BOOL,        /* bool: bool */
    TB__FIELD_UNLESS,      /* bool: bool, the opposite */
    TB__FIELD_MAYBE_UINT,  /* uint: tb__maybe_uint */
    TB__FIELD_MAYBE_FLOAT, /* float, or int: tb__maybe_float */
    TB__FIELD_MAYBE_BOOL,  /* bool: tb__maybe_bool */
    TB__FIELD_BIN,         /* bin: tb__blob, into the input */
    TB__FIELD_MAP,         /* map: tb__blob, its MessagePack in the input; no bytes for none */
    TB__FIELD_ARRAY,       /* array: the same */
    TB__FIELD_INTS,        /* array of int: tb__ints */
    TB__FIELD_TEXTS,       /* array of str: tb__texts */
    TB__FIELD_TIES,        /* array of [str, str]: tb__ties */
    TB__FIELD_ENTRIES,     /* array of [str, bin]: tb__entries */
    TB__FIELD_OUTCOMES,    /* array of [str, uint, str, uint, bool]: tb__outcomes */
    TB__FIELD_INT,         /* in arrays only: int64_t */
} tb__field_type;

typedef enum tb__field_rule {
    TB__REQUIRED,
    TB__NILABLE, /* always written, perhaps as nil; where it is read, it may be absent */
    TB__OPTION,  /* left out when it has its default; nil says the same */
} tb__field_rule;

typedef struct tb__field {
    const char *name;
    tb__field_type type;
    tb__field_rule rule;
    size_t offset;              /* in the struct */
    uint64_t max;               /* UINT, MAYBE_UINT, STATUS, also of OUTCOMES: the largest; 0: any */
    const char *const *choices; /* CHOICE: ends with NULL */
    const char *about;          /* for docs/protocol.md */
} tb__field;

typedef struct tb__schema {
    const char *name;
    bool has_type; /* the map begins with "type", which is the name */
    const tb__field *fields;
    size_t nfields;
    size_t size; /* of the struct */
} tb__schema;

#define TB__SCHEMA(key, table, type)                                                                                   \
    { .name = (key), .fields = (table), .nfields = sizeof(table) / sizeof *(table), .size = sizeof(type) }

/* For a msgpack_packer that appends to a tb__bytes. */
int tb__append_packed(void *out, const char *bytes, size_t nbytes);

/* Appends the map. On failure nothing is appended; the error message names the field. */
tb_status tb__map_encode(const tb__schema *schema, const void *from, tb__bytes *out);
/* The same, with the arena's lifetime. */
tb_status tb__map_encode_kept(const tb__schema *schema, const void *from, tb__arena *arena, tb__blob *out);

/* Reads a map, which is all of the bytes, into the struct: its own fields are set, the others left alone. Text and
 * arrays are the arena's; bytes point into the input. */
tb_status tb__map_decode(const tb__schema *schema, tb__blob bytes, tb__arena *arena, void *out);
/* The same for bytes that tb__value_check has accepted. */
tb_status tb__map_decode_checked(const tb__schema *schema, tb__blob bytes, tb__arena *arena, void *out);

#endif
