/* How the directory's facts look in the store: keys and what stands behind them. Pure functions.
 *
 *   next_rank                     the first bus rank that belongs to no group
 *   incarnations/RANK             how often the rank has been taken
 *   blocks/GROUP/SIZE             the rank of the group's first seat; the others have those that follow
 *   decisions/QUESTION            what was decided; deleted when no rank can ask for it any more
 *   ranks/RANK                    ephemeral: the rank is in use; a sentence about who has it
 *   now/groups/GROUP/INDEX        ephemeral: the seat is taken; see tb__seat_record
 *   now/notes/TOPIC/GROUP/INDEX   ephemeral: a note, its bytes as they are
 *   now/pairs/PAIR/GROUP/0        ephemeral: a hint, which changes when ranks that make the pair have to look at the
 *                                 notes; written by the first rank of the group
 *   summaries/PAIR/GROUP/0        ephemeral: what it knows of the pair then; see tb__summary
 *   reports/RANK                  ephemeral: what a rank tells whoever looks at the store; see world_report.c
 *
 * All that is followed lies under "now/". In names '~' is written "~0" and '/' "~1", as in JSON pointers. */
#ifndef TB_BUS_DIRECTORY_KEYS_H
#define TB_BUS_DIRECTORY_KEYS_H

#include "bus/directory.h"
#include "bus/store/store.h"

#define TB__NOW   "now/"
#define TB__HINTS TB__NOW "pairs/"

enum { TB__MAX_HOST = 64 };

typedef struct tb__key {
    char text[TB__STORE_MAX_KEY + 1];
} tb__key;

/* Names must have been checked. */
tb__key tb__key_of_counter(const char *name, int32_t rank);
tb__key tb__key_of_rank(int32_t rank);
#define TB__REPORTS "reports"
tb__key tb__key_of_block(const char *group, int32_t size);
tb__key tb__key_of_group(const char *group); /* the prefix of its seats */
tb__key tb__key_of_seat(const char *group, int32_t index);
tb__key tb__key_of_hint(const char *pair, const char *group);
tb__key tb__key_of_summary(const char *pair, const char *group);
tb__key tb__key_of_topic(const char *topic); /* the prefix of the notes about it */
tb__key tb__key_of_note(const char *topic, const char *group, int32_t index);

/* A hint, as text. */
enum { TB__HINT_TEXT = 24 };
void tb__hint_format(uint64_t state, char out[TB__HINT_TEXT]);

/* The question is used verbatim. */
tb_status tb__key_of_decision(const char *question, tb__key *out);

/* A key under "now/". */
typedef struct tb__key_parts {
    bool is_note;
    char topic[TB__DIRECTORY_MAX_NAME + 1]; /* "" for a seat */
    char group[TB__DIRECTORY_MAX_NAME + 1];
    int32_t index;
} tb__key_parts;

/* False if the directory writes no such key. */
bool tb__key_split(const char *key, tb__key_parts *out);

/* The process in a seat. In the store: a line of numbers and the host's name, then the contact's bytes. */
typedef struct tb__seat_record {
    int32_t size; /* of the group, as this process was told */
    int32_t rank; /* TB_NO_RANK: not known yet */
    uint64_t incarnation;
    int64_t pid;
    char host[TB__MAX_HOST + 1];
    bool is_announced;
    const void *contact; /* points into what was decoded */
    size_t contact_nbytes;
} tb__seat_record;

typedef struct tb__seat_bytes {
    size_t nbytes;
    char data[TB__MAX_HOST + 128 + TB__DIRECTORY_MAX_CONTACT];
} tb__seat_bytes;

void tb__seat_encode(const tb__seat_record *seat, tb__seat_bytes *out);

/* False if there is no value, it is malformed, or its group has no seat `index`. It must have come from the store. */
bool tb__seat_decode(const tb__store_value *value, int32_t index, tb__seat_record *out);

/* "process 1234 on host node3 (bus rank 2)" */
typedef struct tb__seat_name {
    char text[TB__MAX_HOST + 80];
} tb__seat_name;

tb__seat_name tb__seat_describe(const tb__seat_record *seat);

#endif
