/* The bytes between a store's client and the embedded server. Pure functions: bytes in, messages out, and back.
 *
 * Both directions carry frames; integers are little endian:
 *
 *   u32 length of what follows
 *   u64 request id, chosen by the client
 *   u8  operation; replies have the top bit set
 *   u8  status, in replies only: a tb_status without its sign
 *   the fields of the operation, one after the other
 *
 * A reply has the id of its request; replies come in any order. The table in protocol.c lists each operation's fields:
 *
 *   m u32 magic, "TBKV"            k key: u16 length, 1 to 1152 bytes without NUL
 *   n u32 protocol version         p prefix: as a key, but may be empty
 *   t token: u16 length, bytes     v value: u32 length, at most 1 MiB
 *   r u64 revision                 l u32 count, then for each entry: k r v
 *   b u8 lifetime                  s sentence: u16 length, text
 *
 * A reply with a status other than 0 has a sentence instead of its fields; a conflict has "rv", the present value
 * (revision 0: none). The same "rv" with revision 0 is get's reply for a key that is not there.
 *
 * The first request is a hello. Its id, operation, magic and version look the same in every version, so that a server
 * can name both numbers when it refuses. A cancel has the id of the wait that it ends; neither gets a reply. What is
 * malformed gets a reply (id 0 if none could be read), then the connection is closed. */
#ifndef TB_BUS_STORE_PROTOCOL_H
#define TB_BUS_STORE_PROTOCOL_H

#include "base/bytes.h"
#include "bus/store/store.h"

enum {
    TB__STORE_MAGIC = 0x564b4254, /* "TBKV" */
    TB__STORE_VERSION = 1,
    TB__STORE_MAX_WIRE_KEY = TB__STORE_MAX_NAMESPACE + 1 + TB__STORE_MAX_KEY,
    TB__STORE_MAX_TOKEN = 510,
    TB__STORE_MAX_HELLO = 1024, /* bytes of a request before the hello is accepted */
    TB__STORE_MAX_REQUEST = TB__STORE_MAX_VALUE + 2048,
    TB__STORE_MAX_REPLY = 16 << 20,
};

typedef enum tb__store_op {
    TB__STORE_HELLO,
    TB__STORE_SET,
    TB__STORE_GET,
    TB__STORE_WAIT,
    TB__STORE_COMPARE_AND_SET,
    TB__STORE_DELETE,
    TB__STORE_DELETE_PREFIX,
    TB__STORE_LIST,
    TB__STORE_WAIT_CHANGE,
    TB__STORE_CANCEL,
    TB__STORE_NOPS
} tb__store_op;

const char *tb__store_op_name(tb__store_op op);

/* Bytes that it does not own. */
typedef struct tb__span {
    const uint8_t *data;
    size_t nbytes;
} tb__span;

/* Only the fields of the operation count. */
typedef struct tb__store_message {
    uint64_t id;
    tb__store_op op;
    bool is_reply;
    tb_status status;
    uint32_t version;  /* n; the magic is checked and filled in by the codec */
    tb__span key;      /* k, p */
    tb__span value;    /* v, t, s */
    uint64_t revision; /* r */
    tb__store_lifetime lifetime;
    uint32_t nentries; /* l: their bytes, checked */
    tb__span entries;
} tb__store_message;

/* Reads the frame that the bytes begin with, if all of it is there: `used` is its size, or 0 for "more is needed". The
 * message points into the bytes. A frame that claims to be longer than max_nbytes is refused at once; on failure the
 * message's id is what could be read of it, or 0. */
tb_status tb__store_decode(const uint8_t *data, size_t nbytes, size_t max_nbytes, tb__store_message *out, size_t *used);

/* Appends a frame. */
tb_status tb__store_encode(const tb__store_message *message, tb__bytes *out);

/* The entries of an `l` field: adds one, takes the first off; false when there is none. */
tb_status tb__store_add_entry(tb__bytes *entries, tb__span key, uint64_t revision, tb__span value);
bool tb__store_next_entry(tb__span *entries, tb__span *key, uint64_t *revision, tb__span *value);

#endif
