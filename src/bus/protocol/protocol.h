/* The bus protocol: the messages between a client and its agent, over a socket. Pure functions: bytes in, messages out,
 * and back. docs/protocol.md has every frame with its bytes.
 *
 * A frame is a length (4 bytes, little endian) and a MessagePack map of so many bytes. The client's first frame is a
 * Hello; then come commands. Each frame of a client is answered by a Reply whose `seq` counts the client's frames: 0 is
 * the Hello, 1 the first command. Replies come when the work is done, in any order. Events tell of a Transfer that
 * asked for them.
 *
 * message.c has one table for each message, and nothing else knows the names of fields. To add an option to a command:
 * a member in tb__message, whose zero is the default, and a line at the end of the command's table. Agents that do not
 * know it skip it, so an option that must not be skipped needs a new version. The messages that only version 2 has are
 * those from TB__ENTER on. */
#ifndef TB_BUS_PROTOCOL_PROTOCOL_H
#define TB_BUS_PROTOCOL_PROTOCOL_H

#include "bus/protocol/codec.h"

enum {
    TB__PROTOCOL_VERSION = 2,
    TB__OLDEST_PROTOCOL = 1, /* that an agent accepts */
    TB__FRAME_HEADER = 4,
    TB__FRAME_MAX = 64 << 20, /* bytes of a map */
    TB__HELLO_MAX = 4 << 10,  /* bytes of a map before the Hello is accepted */
};

typedef enum tb__message_kind {
    TB__HELLO,
    TB__INIT_PAIR,
    TB__REGISTER_TENSORS,
    TB__TRANSFER,
    TB__QUERY_STATUS,
    TB__CLEANUP_BATCH,
    TB__PROCEED,
    TB__INSPECT,
    TB__REPLY,
    TB__EVENT,
    TB__ENTER,
    TB__AWAIT_MEMBERS,
    TB__CLEANUP_PAIR,
    TB__AWAIT_TENSORS,
    TB__CANCEL,
    TB__INVALIDATE,
    TB__DUMP,
    TB__LIST_GROUPS,
    TB__MESSAGE_KINDS
} tb__message_kind;

const tb__schema *tb__message_schema(tb__message_kind kind);

typedef enum tb__direction { TB__SEND, TB__RECV } tb__direction;
typedef enum tb__asked_direction { TB__ASKED_NONE, TB__ASKED_SEND, TB__ASKED_RECV } tb__asked_direction;
typedef enum tb__commit_mode { TB__COMMIT_UNSAID, TB__IN_PLACE, TB__SHADOW } tb__commit_mode;
typedef enum tb__state_name {
    TB__STATE_ALL,
    TB__STATE_TRANSFER_SIGNAL,
    TB__STATE_PROGRESS,
    TB__STATE_VERSION,
    TB__STATE_ERROR,
} tb__state_name;
typedef enum tb__event_name {
    TB__EVENT_RELEASED,
    TB__EVENT_ARRIVED,
    TB__EVENT_COMMITTING,
    TB__EVENT_COMMITTED,
    TB__EVENT_FAILED,
    TB__EVENT_PROGRESS,
    TB__EVENT_NAMES
} tb__event_name;

const char *tb__event_name_text(tb__event_name name);

/* Only the members of its kind count. A member that two kinds share means the same in both. */
typedef struct tb__message {
    tb__message_kind kind;

    /* Hello */
    uint64_t protocol;  /* key `version`: the protocol's */
    const char *token;  /* NULL: none */
    const char *client; /* the name that `tensorbus status` shows */

    /* every command */
    tb__maybe_float timestamp;  /* seconds; the client's own */
    const char *semaphore_name; /* NULL: none */
    uint64_t timeout_ms;        /* of commands that wait; 0: the agent's, which is in the Reply to a Hello */

    /* InitPair; the pair's name in a CleanupBatch, too, NULL: the whole batch */
    const char *pair_name, *local_name, *remote_name;
    uint64_t expected_world_size; /* of the local group */
    tb__maybe_uint local_index;   /* key `index`: the seat in it */
    tb__blob mesh, placements;    /* payload.h reads them; both without data: seat i sends to seat i */

    /* RegisterTensors; the batch's name is in all that follow */
    const char *batch_id;
    tb__entries tensors;
    tb__maybe_uint bucket_size; /* 0: 16 MiB; not set: 1 */
    uint64_t staging_bytes;     /* 0: 256 MiB */
    uint64_t group_window;      /* 0: all */
    uint64_t max_in_flight;     /* 0: 2 */
    tb__ties ties;
    tb__texts ignored;
    bool snapshot, staged, sends;
    tb__texts sides;      /* the local groups of the tensors' pairs; none: those that the pairs were made for */
    tb__entries memories; /* of devices: each a device's name and a payload; one without a payload is not used */

    /* RegisterTensors for all transfers of the batch, Transfer for one, where it is said */
    tb__commit_mode commit;
    tb__maybe_bool checksum;

    /* Transfer */
    tb__direction direction; /* key `transfer_type` */
    bool no_wait;            /* key `blocking`, false: the reply comes at once, QueryStatus tells the rest */
    bool events;             /* Events are sent */
    bool hold;               /* waits for Proceed before the tensors change */
    bool skip_lost;
    bool whole_group;
    bool progress;          /* Events tell of that, too */
    const char *group_name; /* group of ranks: that the process acts for, NULL: the only one; Enter, AwaitMembers */

    /* QueryStatus */
    tb__state_name state_name;
    tb__asked_direction asked; /* key `transfer_type`: the transfer in `states` */
    uint64_t question; /* the transfer_signal is the group's answer to it; 0: this rank's own. Also in the Reply */

    /* Inspect */
    bool lists_tensors; /* key `tensors` */

    /* Enter */
    uint64_t seat, seats; /* keys `index` and `size` */

    /* AwaitTensors */
    tb__maybe_uint group; /* of tensors; unset: all groups may come, and nothing is waited for */

    /* Invalidate */
    uint64_t address, nbytes; /* of the client */

    /* Reply; all but the first three are there where the command returns them */
    uint64_t seq;
    tb_status status;
    const char *message;              /* "" where the status is 0 */
    tb__maybe_uint version;           /* of a Hello: the agent's protocol; of the others: what the transfer delivered */
    tb__maybe_uint rank, index, size; /* Hello: the agent's bus rank and its seat in the group `name` */
    const char *name;
    const char *state; /* QueryStatus: what the batch does */
    tb__maybe_uint attempt, bytes;
    tb__maybe_float seconds;
    tb__maybe_bool transfer_signal; /* a source is READY and not DONE */
    tb__maybe_uint bytes_done, bytes_total, groups_done, groups_total;
    const char *error;   /* of the batch's last transfer */
    tb__texts reached;   /* key `events`: of the transfer under way, or of the last */
    tb__maybe_bool torn; /* the tensors have parts of a version that did not arrive */
    tb__outcomes pairs;
    tb__maybe_bool mixed;       /* the pairs' versions differ */
    tb__blob report;            /* Inspect: a JSON object */
    tb__maybe_bool unmapped;    /* RegisterTensors has failed because device memory could not be mapped */
    tb__maybe_uint incarnation; /* Hello */
    tb__entries states;         /* by pair; that of all together has the name "" */
    tb__maybe_uint plan_hits, plan_misses, plan_bytes; /* Inspect */
    tb__maybe_bool in_doubt;                           /* a receive has ended with TB_IN_DOUBT */
    tb__maybe_uint mark;  /* RegisterTensors: the descriptor of a word that is set before tensors are written ... */
    uint64_t mark_offset; /* ... and where it is */

    /* Event: seq, status, message, version and states are as in a Reply */
    tb__event_name event;
} tb__message;

/* Appends a frame: length and map. On failure nothing is appended. */
tb_status tb__message_encode(const tb__message *message, tb__bytes *out);

/* Reads the map of one frame, all of which must be used. Text and arrays are the arena's, bytes point into the frame.
 * On failure only two members are valid: `kind`, TB__MESSAGE_KINDS if it is unknown, and `semaphore_name`, if the map
 * has one, because the client waits for it.
 *
 * Of a Hello of another version only `protocol` is read: that version defines the rest. */
tb_status tb__message_decode(tb__blob map, tb__arena *arena, tb__message *out);

/* Whether the Hello is of a version that agents speak; TB_REFUSED, with both numbers, if not. */
tb_status tb__hello_check(const tb__message *hello);

/* Splits a stream of bytes into frames. Its memory grows with the bytes that arrive, not with the lengths that frames
 * claim; a frame that claims more than max_nbytes is refused as soon as its length is known. Zero-initialised is ready
 * to use. */
typedef struct tb__frame_reader {
    tb__bytes bytes;
    size_t taken;      /* bytes of frames that were handed out */
    size_t max_nbytes; /* of a map; 0: TB__FRAME_MAX. May be changed between frames */
} tb__frame_reader;

/* Room for the next bytes, at least one and at most `nbytes`; tb__frame_filled tells how many were read. */
tb_status tb__frame_room(tb__frame_reader *reader, uint8_t **at, size_t *nbytes);
void tb__frame_filled(tb__frame_reader *reader, size_t nbytes);

/* Adds bytes that were read elsewhere, without more room than they take. */
tb_status tb__frame_add(tb__frame_reader *reader, const void *data, size_t nbytes);

/* The next complete frame's map, valid until room is called again; has_frame is false if more is needed. After
 * a failure the stream can't be trusted any more. */
tb_status tb__frame_next(tb__frame_reader *reader, tb__blob *map, bool *has_frame);

/* Whether the stream may end here: there is no incomplete frame. */
bool tb__frame_is_between(const tb__frame_reader *reader);

void tb__frame_reader_fini(tb__frame_reader *reader);

#endif
