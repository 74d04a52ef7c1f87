/* The directory's keys and values. Other processes write them, so they may be malformed. */
#include "bus/directory_keys.h"

#include "base/text.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

_Static_assert(sizeof TB__NOW "notes/" + 2 * (2 * TB__DIRECTORY_MAX_NAME + 1) + 11 <= TB__STORE_MAX_KEY,
               "a key has room for two names that are all escapes, and an index");

tb_status tb__name_check(const char *what, const char *name) {
    size_t length = name ? strlen(name) : 0;
    if (length == 0)
        return tb__fail(TB_INVALID, "a %s needs a name", what);
    if (length > TB__DIRECTORY_MAX_NAME)
        return tb__fail(TB_INVALID, "a %s's name has %zu bytes; it may have at most %d bytes", what, length,
                        TB__DIRECTORY_MAX_NAME);
    for (size_t i = 0; i < length; i++) {
        unsigned char c = (unsigned char)name[i];
        if (c < 0x20 || c == 0x7F)
            return tb__fail(TB_INVALID, "a %s's name has a control character, 0x%02x, at byte %zu", what, c, i);
    }
    return TB_OK;
}

static char *append_text(char *at, const char *text) {
    size_t length = strlen(text);
    memcpy(at, text, length + 1);
    return at + length;
}

/* The name and a slash. */
static char *append_escaped_name(char *at, const char *name) {
    for (; *name; name++) {
        if (*name == '~' || *name == '/')
            at = append_text(at, *name == '~' ? "~0" : "~1");
        else
            *at++ = *name;
    }
    return append_text(at, "/");
}

static void append_index(char *at, int32_t index) {
    snprintf(at, 12, "%" PRId32, index);
}

tb__key tb__key_of_counter(const char *name, int32_t rank) {
    tb__key key = {0};
    snprintf(key.text, sizeof key.text, "%s/%" PRId32, name, rank);
    return key;
}

tb__key tb__key_of_rank(int32_t rank) {
    return tb__key_of_counter("ranks", rank);
}

tb__key tb__key_of_block(const char *group, int32_t size) {
    tb__key key = {0};
    append_index(append_escaped_name(append_text(key.text, "blocks/"), group), size);
    return key;
}

tb__key tb__key_of_group(const char *group) {
    tb__key key = {0};
    append_escaped_name(append_text(key.text, TB__NOW "groups/"), group);
    return key;
}

tb__key tb__key_of_seat(const char *group, int32_t index) {
    tb__key key = {0};
    append_index(append_escaped_name(append_text(key.text, TB__NOW "groups/"), group), index);
    return key;
}

tb__key tb__key_of_topic(const char *topic) {
    tb__key key = {0};
    append_escaped_name(append_text(key.text, TB__NOW "notes/"), topic);
    return key;
}

/* PREFIX/NAME/GROUP/INDEX */
static tb__key key_of_seat_in(const char *prefix, const char *name, const char *group, int32_t index) {
    tb__key key = {0};
    append_index(append_escaped_name(append_escaped_name(append_text(key.text, prefix), name), group), index);
    return key;
}

tb__key tb__key_of_note(const char *topic, const char *group, int32_t index) {
    return key_of_seat_in(TB__NOW "notes/", topic, group, index);
}

tb__key tb__key_of_hint(const char *pair, const char *group) {
    return key_of_seat_in(TB__HINTS, pair, group, 0);
}

tb__key tb__key_of_summary(const char *pair, const char *group) {
    return key_of_seat_in("summaries/", pair, group, 0);
}

void tb__hint_format(uint64_t state, char out[TB__HINT_TEXT]) {
    snprintf(out, TB__HINT_TEXT, "%016" PRIx64, state);
}

tb_status tb__key_of_decision(const char *question, tb__key *out) {
    int length = snprintf(out->text, sizeof out->text, "decisions/%s", question);
    return length < (int)sizeof out->text
               ? TB_OK
               : tb__fail(TB_TOO_BIG, "a question's name has at most %d bytes", TB__STORE_MAX_KEY - 10);
}

/* The opposite of append_escaped_name. */
static bool consume_name(const char **at, char *name) {
    size_t length = 0;
    for (; **at && **at != '/'; (*at)++) {
        char c = **at;
        if (c == '~') {
            (*at)++;
            if (**at != '0' && **at != '1')
                return false;
            c = **at == '0' ? '~' : '/';
        }
        if (length == TB__DIRECTORY_MAX_NAME)
            return false;
        name[length++] = c;
    }
    name[length] = '\0';
    return *(*at)++ == '/' && tb__name_check("key", name) == TB_OK;
}

static bool consume_text(const char **at, const char *text) {
    size_t length = strlen(text);
    if (strncmp(*at, text, length) != 0)
        return false;
    *at += length;
    return true;
}

bool tb__key_split(const char *key, tb__key_parts *out) {
    int64_t index;
    const char *at = key;
    out->topic[0] = '\0';
    out->is_note = consume_text(&at, TB__NOW "notes/");
    if (!out->is_note && !consume_text(&at, TB__NOW "groups/"))
        return false;
    if ((out->is_note && !consume_name(&at, out->topic)) || !consume_name(&at, out->group))
        return false;
    /* Only the canonical form of a number is valid: not "07", " 7", "+7". */
    const char *digits = at;
    if (*at < '0' || *at > '9' || !tb__read_int(&at, &index) || *at || index >= TB_MAX_RANKS)
        return false;
    out->index = (int32_t)index;
    return *digits != '0' || !digits[1];
}

void tb__seat_encode(const tb__seat_record *seat, tb__seat_bytes *out) {
    int length = snprintf(out->data, sizeof out->data, "%" PRId32 " %" PRId32 " %" PRIu64 " %" PRId64 " %d %s\n",
                          seat->size, seat->rank, seat->incarnation, seat->pid, seat->is_announced, seat->host);
    out->nbytes = (size_t)length + seat->contact_nbytes;
    if (seat->contact_nbytes > 0)
        memcpy(out->data + length, seat->contact, seat->contact_nbytes);
}

static bool consume_number(const char **at, int64_t min, int64_t max, int64_t *out) {
    return tb__read_int(at, out) && *out >= min && *out <= max;
}

bool tb__seat_decode(const tb__store_value *value, int32_t index, tb__seat_record *out) {
    int64_t size, rank, incarnation, pid, is_announced;
    if (!value->data)
        return false;
    const char *at = value->data, *end = at + value->nbytes;
    /* The numbers end at the NUL behind the value, if not before. */
    if (!consume_number(&at, 1, TB_MAX_RANKS, &size) || !consume_number(&at, TB_NO_RANK, TB_MAX_RANKS - 1, &rank) ||
        !consume_number(&at, 0, INT64_MAX, &incarnation) || !consume_number(&at, 0, INT64_MAX, &pid) ||
        !consume_number(&at, 0, 1, &is_announced) || *at != ' ')
        return false;
    at++;
    const char *line_end = memchr(at, '\n', (size_t)(end - at));
    if (!line_end || line_end - at > TB__MAX_HOST || end - line_end - 1 > TB__DIRECTORY_MAX_CONTACT)
        return false;
    if (index >= size || (is_announced && (rank == TB_NO_RANK || incarnation == 0)))
        return false;
    *out = (tb__seat_record){.size = (int32_t)size,
                             .rank = (int32_t)rank,
                             .incarnation = (uint64_t)incarnation,
                             .pid = pid,
                             .is_announced = is_announced == 1,
                             .contact = line_end + 1,
                             .contact_nbytes = (size_t)(end - line_end - 1)};
    memcpy(out->host, at, (size_t)(line_end - at));
    return true;
}

tb__seat_name tb__seat_describe(const tb__seat_record *seat) {
    tb__seat_name name;
    int length = snprintf(name.text, sizeof name.text, "process %" PRId64 " on host %s", seat->pid, seat->host);
    if (seat->rank != TB_NO_RANK)
        snprintf(name.text + length, sizeof name.text - (size_t)length, " (bus rank %" PRId32 ")", seat->rank);
    return name;
}
