/* The messages: a table of fields for each, and the table that a map belongs to. */
#include "bus/protocol/protocol.h"

#include "base/text.h"
#include "bus/protocol/value.h"

#include <inttypes.h>
#include <limits.h>
#include <string.h>

enum { MOST_RANKS = TB_MAX_RANKS, MOST_STATUS = 127 };

#define MOST_BYTES (UINT64_C(1) << 62)

static const char *const directions[] = {[TB__SEND] = "send", [TB__RECV] = "recv", NULL};
static const char *const commits[] = {[TB__IN_PLACE - 1] = "in_place", [TB__SHADOW - 1] = "shadow", NULL};
static const char *const state_names[] = {[TB__STATE_ALL] = "",
                                          [TB__STATE_TRANSFER_SIGNAL] = "transfer_signal",
                                          [TB__STATE_PROGRESS] = "progress",
                                          [TB__STATE_VERSION] = "version",
                                          [TB__STATE_ERROR] = "error",
                                          NULL};

static const char *const events[] = {[TB__EVENT_RELEASED] = "released",
                                     [TB__EVENT_ARRIVED] = "arrived",
                                     [TB__EVENT_COMMITTING] = "committing",
                                     [TB__EVENT_COMMITTED] = "committed",
                                     [TB__EVENT_FAILED] = "failed",
                                     [TB__EVENT_PROGRESS] = "progress",
                                     NULL};

const char *tb__event_name_text(tb__event_name name) {
    return events[name];
}

/* clang-format off */
#define FIELD(key, kind, how, member, ...)                                                                             \
    {.name = (key), .type = TB__FIELD_##kind, .rule = TB__##how, .offset = offsetof(tb__message, member), __VA_ARGS__}
#define ABOUT(text) .about = (text)
#define MAX(value) .max = (value)
#define CHOICES(list) .choices = (list)

/* Every command has these after its own fields; options follow. */
#define COMMON                                                                                                         \
    FIELD("timestamp", MAYBE_FLOAT, NILABLE, timestamp, ABOUT("the client's time, in seconds, or an int; the agent does not use it")),  \
    FIELD("semaphore_name", TEXT, NILABLE, semaphore_name, ABOUT("posted when the command has succeeded or failed"))
#define TIMEOUT                                                                                                        \
    FIELD("timeout_ms", UINT, OPTION, timeout_ms, MAX(INT_MAX), ABOUT("after which the command fails; default: the agent's own"))
#define HOW_TO_COMMIT(place, check)                                                                                    \
    FIELD("commit", CHOICE, OPTION, commit, CHOICES(commits),                                                          \
          ABOUT("where bytes land until all are in; default: " place)),                                                \
    FIELD("checksum", MAYBE_BOOL, OPTION, checksum, ABOUT("a checksum for every bucket; default: " check))
#define BATCH_ID FIELD("batch_id", TEXT, REQUIRED, batch_id, ABOUT("the batch's name"))

static const tb__field hello[] = {
    FIELD("version", UINT, REQUIRED, protocol, ABOUT("the protocol's version, 1 or 2")),
    FIELD("token", TEXT, NILABLE, token, ABOUT("what the agent wants to hear, if it was given a token")),
    FIELD("client", TEXT, REQUIRED, client, ABOUT("a name for the client, shown by `tensorbus status`")),
};

static const tb__field init_pair[] = {
    FIELD("pair_name", TEXT, REQUIRED, pair_name, ABOUT("the pair's name, the same on both sides")),
    FIELD("local_name", TEXT, REQUIRED, local_name, ABOUT("this side's group")),
    FIELD("expected_world_size", UINT, REQUIRED, expected_world_size, MAX(MOST_RANKS),
          ABOUT("ranks of this side's group")),
    FIELD("remote_name", TEXT, REQUIRED, remote_name, ABOUT("the other side's group")),
    FIELD("mesh_shape_payload", BIN, NILABLE, mesh, ABOUT("this side's mesh; ranks are seats of the group; nil: seat i sends to seat i")),
    FIELD("placements_payload", BIN, NILABLE, placements, ABOUT("a placement for each dim of the mesh; nil if the mesh is")),
    COMMON,
    TIMEOUT,
    FIELD("index", MAYBE_UINT, OPTION, local_index, MAX(MOST_RANKS), ABOUT("the agent's seat in `local_name`; default: that which it has, or which follows from `expected_world_size`")),
};

static const tb__field register_tensors[] = {
    BATCH_ID,
    FIELD("tensors", ENTRIES, REQUIRED, tensors, ABOUT("for each tensor its pair's name and the tensor payload; no payload: the pair, without tensors")),
    FIELD("bucket_size", MAYBE_UINT, NILABLE, bucket_size, MAX(MOST_BYTES), ABOUT("bytes sent together; 0: 16 MiB; nil: every chunk alone, as 1")),
    COMMON,
    TIMEOUT,
    FIELD("staging_bytes", UINT, OPTION, staging_bytes, MAX(MOST_BYTES),
          ABOUT("memory for what is not read in place; default: 256 MiB")),
    FIELD("ties", TIES, OPTION, ties, ABOUT("tied weights: a name and the canonical one")),
    FIELD("ignored", TEXTS, OPTION, ignored, ABOUT("patterns for what may be on one side only")),
    FIELD("group_window", UINT, OPTION, group_window, MAX(UINT32_MAX), ABOUT("groups under way at a time; default: all")),
    FIELD("snapshot", BOOL, OPTION, snapshot, ABOUT("a send copies the tensors first; default: false")),
    FIELD("staged", BOOL, OPTION, staged, ABOUT("everything goes through staging memory; default: false")),
    HOW_TO_COMMIT("`in_place`", "false"),
    FIELD("max_in_flight", UINT, OPTION, max_in_flight, MAX(UINT32_MAX), ABOUT("buckets under way per channel; default: 2")),
    FIELD("memories", ENTRIES, OPTION, memories, ABOUT("device memory that tensors are in: for each the device's name and the memory's payload")),
    FIELD("sides", TEXTS, OPTION, sides, ABOUT("for each of `tensors` this side's group; default: the agent's own, if it has made the pair for that, else the one that it has made it for")),
    FIELD("mark", MAYBE_UINT, OPTION, mark, MAX(UINT32_MAX), ABOUT("the descriptor with a word that is 1 when received data may have been written; default: none")),
    FIELD("mark_offset", UINT, OPTION, mark_offset, MAX(MOST_BYTES), ABOUT("where the word is in that memory")),
    FIELD("sends", BOOL, OPTION, sends, ABOUT("this side is going to send: prepare for that; default: false")),
};

static const tb__field transfer[] = {
    BATCH_ID,
    FIELD("transfer_type", CHOICE, REQUIRED, direction, CHOICES(directions), ABOUT("which way")),
    COMMON,
    TIMEOUT,
    FIELD("blocking", UNLESS, OPTION, no_wait, ABOUT("false: the reply comes at once; default: true")),
    HOW_TO_COMMIT("the batch's", "the batch's"),
    FIELD("events", BOOL, OPTION, events, ABOUT("Events tell how it goes; default: false")),
    FIELD("hold", BOOL, OPTION, hold, ABOUT("`recv` by `shadow`: waits for Proceed before the tensors change; default: false")),
    FIELD("skip_lost", BOOL, OPTION, skip_lost, ABOUT("goes without pairs that lost a rank; default: false")),
    FIELD("whole_group", BOOL, OPTION, whole_group, ABOUT("committed means that all ranks of this side are; all of them say so; default: false")),
    FIELD("progress", BOOL, OPTION, progress, ABOUT("with `events`: they tell of progress, too; default: false")),
    FIELD("group_name", TEXT, OPTION, group_name, ABOUT("as which group, where the agent is in both groups of a pair")),
};

static const tb__field query_status[] = {
    BATCH_ID,
    FIELD("state_name", CHOICE, REQUIRED, state_name, CHOICES(state_names), ABOUT("what to tell; `\"\"`: everything")),
    COMMON,
    FIELD("transfer_type", CHOICE, OPTION, asked, CHOICES(directions), ABOUT("the transfer that `states` in the Reply tells of")),
    FIELD("question", UINT, OPTION, question, ABOUT("a number from 1: `transfer_signal` is the same on all ranks of the group that ask it; default: this rank's own")),
    FIELD("group_name", TEXT, OPTION, group_name, ABOUT("with `question`: the group; default: the agent's own")),
    TIMEOUT,
};

static const tb__field cleanup_batch[] = {
    BATCH_ID,
    COMMON,
    FIELD("pair_name", TEXT, OPTION, pair_name, ABOUT("only this pair leaves the batch; default: all of it")),
};

static const tb__field proceed[] = {
    BATCH_ID,
    COMMON,
};

static const tb__field inspect[] = {
    COMMON,
    FIELD("tensors", BOOL, OPTION, lists_tensors, ABOUT("batches also have a `list` of their tensors; default: false")),
};

static const tb__field enter[] = {
    FIELD("group_name", TEXT, REQUIRED, group_name, ABOUT("a group of ranks")),
    FIELD("index", UINT, REQUIRED, seat, MAX(MOST_RANKS), ABOUT("the seat in it")),
    FIELD("size", UINT, REQUIRED, seats, MAX(MOST_RANKS), ABOUT("of how many")),
    COMMON,
    TIMEOUT,
};

static const tb__field await_members[] = {
    FIELD("group_name", TEXT, REQUIRED, group_name, ABOUT("a group of ranks")),
    COMMON,
    TIMEOUT,
};

static const tb__field cleanup_pair[] = {
    FIELD("pair_name", TEXT, REQUIRED, pair_name, ABOUT("the pair's name")),
    FIELD("local_name", TEXT, REQUIRED, local_name, ABOUT("this side's group")),
    COMMON,
};

static const tb__field await_tensors[] = {
    BATCH_ID,
    COMMON,
    TIMEOUT,
    FIELD("group", MAYBE_UINT, OPTION, group, MAX(UINT32_MAX - 1), ABOUT("of tensors; default: none is waited for, and all may come")),
};

static const tb__field cancel[] = {
    BATCH_ID,
    FIELD("transfer_type", CHOICE, REQUIRED, direction, CHOICES(directions), ABOUT("which transfer of the batch")),
    COMMON,
};

static const tb__field invalidate[] = {
    FIELD("address", UINT, REQUIRED, address, ABOUT("where the memory begins, in the client")),
    FIELD("nbytes", UINT, REQUIRED, nbytes, MAX(MOST_BYTES), ABOUT("how much it is")),
    COMMON,
    TIMEOUT,
};

static const tb__field dump[] = {
    BATCH_ID,
    FIELD("transfer_type", CHOICE, REQUIRED, direction, CHOICES(directions), ABOUT("which way")),
    COMMON,
};

static const tb__field list_groups[] = {
    COMMON,
    TIMEOUT,
};

static const tb__field reply[] = {
    FIELD("seq", UINT, REQUIRED, seq, ABOUT("which frame of the connection it answers; the Hello is 0")),
    FIELD("status", STATUS, REQUIRED, status, MAX(MOST_STATUS), ABOUT("0, or a code")),
    FIELD("message", SENTENCE, REQUIRED, message, ABOUT("what went wrong; empty if nothing did")),
    FIELD("version", MAYBE_UINT, OPTION, version, ABOUT("to a Hello the protocol's version, else the data's")),
    FIELD("rank", MAYBE_UINT, OPTION, rank, MAX(MOST_RANKS), ABOUT("Hello: the agent's bus rank")),
    FIELD("name", TEXT, OPTION, name, ABOUT("Hello: the agent's group")),
    FIELD("index", MAYBE_UINT, OPTION, index, MAX(MOST_RANKS), ABOUT("Hello: its seat in the group")),
    FIELD("size", MAYBE_UINT, OPTION, size, MAX(MOST_RANKS), ABOUT("Hello: seats of the group")),
    FIELD("state", TEXT, OPTION, state, ABOUT("QueryStatus: what the batch does")),
    FIELD("attempt", MAYBE_UINT, OPTION, attempt, ABOUT("the number that the senders gave the transfer")),
    FIELD("bytes", MAYBE_UINT, OPTION, bytes, ABOUT("what the transfer moved here")),
    FIELD("seconds", MAYBE_FLOAT, OPTION, seconds, ABOUT("how long it took")),
    FIELD("transfer_signal", MAYBE_BOOL, OPTION, transfer_signal, ABOUT("a source is READY and not DONE: this one, or one that this rank receives from")),
    FIELD("bytes_done", MAYBE_UINT, OPTION, bytes_done, ABOUT("progress of the transfer under way, or of the last")),
    FIELD("bytes_total", MAYBE_UINT, OPTION, bytes_total, ABOUT("of how many")),
    FIELD("groups_done", MAYBE_UINT, OPTION, groups_done, MAX(UINT32_MAX), ABOUT("groups of tensors that are done")),
    FIELD("groups_total", MAYBE_UINT, OPTION, groups_total, MAX(UINT32_MAX), ABOUT("of how many")),
    FIELD("error", SENTENCE, OPTION, error, ABOUT("why the last transfer failed; empty if it did not")),
    FIELD("report", BIN, OPTION, report, ABOUT("Inspect: what the agent does, a JSON object; Dump and ListGroups: the text")),
    FIELD("timeout_ms", UINT, OPTION, timeout_ms, MAX(INT_MAX), ABOUT("Hello: the timeout of commands that have none")),
    FIELD("events", TEXTS, OPTION, reached, ABOUT("QueryStatus: what Events have told, or would have")),
    FIELD("torn", MAYBE_BOOL, OPTION, torn, ABOUT("QueryStatus: the tensors have parts of a version that failed")),
    FIELD("pairs", OUTCOMES, OPTION, pairs, MAX(MOST_STATUS), ABOUT("by pair: its name, status and message of the last transfer, the last version, whether it is torn")),
    FIELD("mixed", MAYBE_BOOL, OPTION, mixed, ABOUT("QueryStatus: the pairs' versions differ; `version` is the last that all of them had together")),
    FIELD("unmapped", MAYBE_BOOL, OPTION, unmapped, ABOUT("RegisterTensors: it failed because device memory could not be mapped; the client has to copy it")),
    FIELD("incarnation", MAYBE_UINT, OPTION, incarnation, ABOUT("Hello: how often the agent's bus rank has been taken")),
    FIELD("states", ENTRIES, OPTION, states, ABOUT("a pair's name and the state of its part of the transfer; that of all together has the name `\"\"`")),
    FIELD("plan_hits", MAYBE_UINT, OPTION, plan_hits, ABOUT("Inspect: how often a batch found its plan ready")),
    FIELD("plan_misses", MAYBE_UINT, OPTION, plan_misses, ABOUT("Inspect: how often a plan had to be made")),
    FIELD("plan_bytes", MAYBE_UINT, OPTION, plan_bytes, ABOUT("Inspect: the memory of plans that are kept")),
    FIELD("in_doubt", MAYBE_BOOL, OPTION, in_doubt, ABOUT("QueryStatus: whether a version is committed is not known; the tensors have the one before")),
    FIELD("question", UINT, OPTION, question, ABOUT("QueryStatus: `transfer_signal` is the group's answer to this question")),
};

static const tb__field event[] = {
    FIELD("seq", UINT, REQUIRED, seq, ABOUT("which frame the Transfer was")),
    FIELD("event", CHOICE, REQUIRED, event, CHOICES(events), ABOUT("which event")),
    FIELD("status", STATUS, REQUIRED, status, MAX(MOST_STATUS), ABOUT("0, or the code of a failure")),
    FIELD("message", SENTENCE, REQUIRED, message, ABOUT("why it failed; empty if it did not")),
    FIELD("version", MAYBE_UINT, OPTION, version, ABOUT("the transfer's number, once it is known")),
    FIELD("states", ENTRIES, OPTION, states, ABOUT("as in a Reply: with `committed`, `failed` and `progress`, to clients of version 2")),
};

#define SCHEMA(key, table)                                                                                             \
    {.name = (key), .has_type = true, .fields = (table), .nfields = sizeof(table) / sizeof *(table),                   \
     .size = sizeof(tb__message)}
static const tb__schema schemas[] = {
    [TB__HELLO] = SCHEMA("Hello", hello),
    [TB__INIT_PAIR] = SCHEMA("InitPair", init_pair),
    [TB__REGISTER_TENSORS] = SCHEMA("RegisterTensors", register_tensors),
    [TB__TRANSFER] = SCHEMA("Transfer", transfer),
    [TB__QUERY_STATUS] = SCHEMA("QueryStatus", query_status),
    [TB__CLEANUP_BATCH] = SCHEMA("CleanupBatch", cleanup_batch),
    [TB__PROCEED] = SCHEMA("Proceed", proceed),
    [TB__INSPECT] = SCHEMA("Inspect", inspect),
    [TB__REPLY] = SCHEMA("Reply", reply),
    [TB__EVENT] = SCHEMA("Event", event),
    [TB__ENTER] = SCHEMA("Enter", enter),
    [TB__AWAIT_MEMBERS] = SCHEMA("AwaitMembers", await_members),
    [TB__CLEANUP_PAIR] = SCHEMA("CleanupPair", cleanup_pair),
    [TB__AWAIT_TENSORS] = SCHEMA("AwaitTensors", await_tensors),
    [TB__CANCEL] = SCHEMA("Cancel", cancel),
    [TB__INVALIDATE] = SCHEMA("Invalidate", invalidate),
    [TB__DUMP] = SCHEMA("Dump", dump),
    [TB__LIST_GROUPS] = SCHEMA("ListGroups", list_groups),
};
/* clang-format on */

const tb__schema *tb__message_schema(tb__message_kind kind) {
    return &schemas[kind];
}

tb_status tb__message_encode(const tb__message *message, tb__bytes *out) {
    if ((unsigned)message->kind >= TB__MESSAGE_KINDS)
        return tb__fail(TB_INVALID, "%d is not a message", (int)message->kind);
    enum { USUAL = 512 }; /* most frames are shorter */
    size_t start = out->count;
    if (!tb__vec_reserve(out, USUAL))
        return TB_NO_MEMORY;
    out->count += TB__FRAME_HEADER;
    tb_status status = tb__map_encode(&schemas[message->kind], message, out);
    size_t length = out->count - start - TB__FRAME_HEADER;
    if (status == TB_OK && length > TB__FRAME_MAX)
        status = tb__fail(TB_TOO_BIG, "%s: a frame of %zu bytes where at most %d are allowed",
                          schemas[message->kind].name, length, TB__FRAME_MAX);
    if (status != TB_OK) {
        out->count = start;
        return status;
    }
    for (int i = 0; i < TB__FRAME_HEADER; i++)
        out->item[start + (size_t)i] = (uint8_t)(length >> (8 * i));
    return TB_OK;
}

/* Which message the map is, by its `type`. */
static tb_status find_kind(tb__blob map, tb__message_kind *out) {
    tb__value type;
    if (map.nbytes == 0 || !tb__map_find(map, "type", &type))
        return tb__fail(TB_INVALID, "a message without a type");
    if (type.type != TB__VALUE_STR)
        return tb__fail(TB_INVALID, "a message's type is %s; it must be a string", tb__value_type_name(type.type));
    for (int i = 0; i < TB__MESSAGE_KINDS; i++) {
        if (tb__blob_is(type.bytes, schemas[i].name)) {
            *out = (tb__message_kind)i;
            return TB_OK;
        }
    }
    return tb__fail(TB_INVALID, "there is no command '%.*s'", (int)(type.bytes.nbytes < 40 ? type.bytes.nbytes : 40),
                    (const char *)type.bytes.data);
}

static tb_status decode_by_kind(tb__blob map, tb__arena *arena, tb__message *out) {
    TB_TRY(find_kind(map, &out->kind));
    tb__message message = {.kind = out->kind};
    tb__value version;
    if (out->kind == TB__HELLO && tb__map_find(map, "version", &version) && version.type == TB__VALUE_UINT &&
        (version.positive < TB__OLDEST_PROTOCOL || version.positive > TB__PROTOCOL_VERSION))
        message.protocol = version.positive;
    else
        TB_TRY(tb__map_decode_checked(&schemas[out->kind], map, arena, &message));
    *out = message;
    return TB_OK;
}

/* The semaphore's name; NULL if there is no valid one. */
static const char *find_semaphore(tb__blob map, tb__arena *arena) {
    tb__value name;
    if (!tb__map_find(map, "semaphore_name", &name) || name.type != TB__VALUE_STR || name.bytes.nbytes > TB__MAX_TEXT)
        return NULL;
    char *text = tb__arena_alloc(arena, name.bytes.nbytes + 1, 1);
    if (!text)
        return NULL;
    memcpy(text, name.bytes.data, name.bytes.nbytes);
    text[name.bytes.nbytes] = '\0';
    return strlen(text) == name.bytes.nbytes && tb__is_utf8(text) ? text : NULL;
}

tb_status tb__message_decode(tb__blob map, tb__arena *arena, tb__message *out) {
    *out = (tb__message){.kind = TB__MESSAGE_KINDS};
    if (map.nbytes > TB__FRAME_MAX)
        return tb__fail(TB_TOO_BIG, "a frame of %zu bytes where at most %d are allowed", map.nbytes, TB__FRAME_MAX);
    tb_status status = tb__value_check(map);
    if (status != TB_OK)
        return tb__fail_within(status, "a frame of %zu bytes", map.nbytes);
    status = decode_by_kind(map, arena, out);
    if (status != TB_OK)
        out->semaphore_name = find_semaphore(map, arena);
    return status;
}

tb_status tb__hello_check(const tb__message *hello_message) {
    if (hello_message->protocol >= TB__OLDEST_PROTOCOL && hello_message->protocol <= TB__PROTOCOL_VERSION)
        return TB_OK;
    return tb__fail(TB_REFUSED,
                    "the client speaks version %" PRIu64 " of the bus protocol, the agent versions %d to %d",
                    hello_message->protocol, TB__OLDEST_PROTOCOL, TB__PROTOCOL_VERSION);
}
