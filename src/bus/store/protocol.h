/* The bytes between a store's client and the embedded server. Pure functions: bytes in, messages out, and back.
 *
 * Both directions carry frames, as between clients and agents (bus/protocol): a u32 with the length of what follows;
 * integers are little endian:
 *
 *   u64 request id, chosen by the client
 *   u8  operation; replies have the top bit set
 *   u8  status, in replies only: a tb_status without its sign
 *   the fields of the operation, one after the other
 *
 * A reply has the id of its request; replies come in any order. The tables in protocol.c list each operation's fields:
 *
 *   m u32 magic, "TBKV"            k key: u16 length, 1 to 1152 bytes without NUL
 *   n u32 protocol version         p prefix: as a key, but may be empty
 *   t proof: u16 length, bytes     v value: u32 length, at most 1 MiB
 *   r u64 revision                 l u32 count, then for each entry: k r v; r 0: it was deleted
 *   b u8 lifetime                  s sentence: u16 length, text
 *   x id and nonce, 16 bytes each  o the process's secret: 16 bytes; zeros: it will write nothing
 *   c u64 number                   g, w key and value of the guard; g: also a counter
 *
 * A reply with a status other than 0 has a sentence instead of its fields; a conflict has "rv", the present value
 * (revision 0: none). The same "rv" with revision 0 is get's reply for a key that is not there.
 *
 * The first request is a hello, the second a prove (base/proof.h). The client's id is the beginning of its secret's
 * SHA-256. The hello's reply has the server's proof, as "server"; the prove has the client's, as "client".
 *
 * A hello's id, operation, magic and version look the same in every version, so that a server
 * can name both numbers when it refuses. A cancel has the id of the wait that it ends; neither gets a reply. What is
 * malformed gets a reply (id 0 if none could be read), then the connection is closed. */
#ifndef TB_BUS_STORE_PROTOCOL_H
#define TB_BUS_STORE_PROTOCOL_H

#include "base/bytes.h"
#include "base/proof.h"
#include "bus/store/store.h"

enum {
    TB__STORE_MAGIC = 0x564b4254, /* "TBKV" */
    TB__STORE_VERSION = 5,
    TB__STORE_MAX_WIRE_KEY = TB__STORE_MAX_NAMESPACE + 1 + TB__STORE_MAX_KEY,
    TB__STORE_MAX_HELLO = 1024, /* bytes of a request of a client that has proved nothing yet */
    TB__STORE_MAX_REQUEST = TB__STORE_MAX_VALUE + 2048,
    TB__STORE_MAX_REPLY = 16 << 20,
};

typedef enum tb__store_op {
    TB__STORE_HELLO,
    TB__STORE_PROVE,
    TB__STORE_SET,
    TB__STORE_GET,
    TB__STORE_COMPARE_AND_SET,
    TB__STORE_CREATE_GUARDED,
    TB__STORE_DELETE,
    TB__STORE_COUNT,
    TB__STORE_LIST,
    TB__STORE_WAIT_CHANGE,
    TB__STORE_CANCEL,
    TB__STORE_TAKE_BLOCK,
    TB__STORE_NOPS
} tb__store_op;

/* What keys of proofs are derived for. */
#define TB__STORE_PURPOSE "store"

const char *tb__store_op_name(tb__store_op op);

/* Only the fields of the operation count. */
typedef struct tb__store_message {
    uint64_t id;
    tb__store_op op;
    bool is_reply;
    tb_status status;
    uint64_t magic, version;     /* m, which the encoder fills in; n */
    tb__blob key;                /* k, p */
    tb__blob value;              /* v, t, s */
    uint64_t revision, number;   /* r, c */
    tb__proof_end end;           /* x */
    tb__store_secret secret;     /* o */
    uint64_t lifetime;           /* b: a tb__store_lifetime */
    tb__blob guard, guard_value; /* g, w */
    uint64_t nentries;           /* l: their bytes, checked */
    tb__blob entries;
} tb__store_message;

/* Reads a frame without its length; the message points into it. On failure its id is what could be read of it, or 0. */
tb_status tb__store_decode(tb__blob frame, tb__store_message *out);

/* Appends a frame. */
tb_status tb__store_encode(const tb__store_message *message, tb__bytes *out);

/* The entries of an `l` field: adds one, takes the first off; false when there is none. */
tb_status tb__store_add_entry(tb__bytes *entries, tb__blob key, uint64_t revision, tb__blob value);
bool tb__store_next_entry(tb__blob *entries, tb__blob *key, uint64_t *revision, tb__blob *value);

/* The result of an operation: the revision, of the change or of the store; count: the number before; take_block: the
 * first number of the block, and the counter's; the value of get, and, with TB_CONFLICT, the present one; the entries
 * of list and wait_change. */
typedef struct tb__store_result {
    uint64_t revision, number;
    tb__store_value value;
    tb__store_entries entries;
} tb__store_result;

/* Every slot may be called from several threads at once, except close. */
typedef struct tb__store_ops {
    /* Not HELLO, PROVE and CANCEL. Keys and prefixes are checked, and have the namespace before them and a NUL behind.
     * The result is empty before; its contents, only after TB_OK and TB_CONFLICT, belong to the caller. */
    tb_status (*call)(void *context, const tb__store_message *request, int timeout_ms, tb__store_result *out);
    void (*hang_up)(void *context);
    void (*interrupt)(void *context);
    void (*close)(void *context);
    int linger_ms; /* how long entries of a dead process may still be there */
} tb__store_ops;

struct tb__store_url;

/* Opens an implementation by the deadline (of CLOCK_MONOTONIC). */
typedef tb_status tb__store_open_fn(const struct tb__store_url *url, const char *token, const tb__store_secret *secret,
                                    int64_t deadline_ms, const tb__store_ops **ops, void **context);

tb__store_open_fn tb__socket_store_open, tb__etcd_store_open;

#endif
