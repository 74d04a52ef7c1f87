/* Who is on the bus, as the store tells it: bus ranks, incarnations, the seats of groups, and notes that members
 * publish (what a pair's ranks have to agree on).
 *
 * A thread follows the store and keeps a copy of all of it, so that asking never waits; when something has changed it
 * calls `changed`. What this process published disappears from the store when it closes the directory or dies. Calls
 * may come from several threads at once.
 *
 * If the store is lost, what was known stays known, and the thread tries to reach it again, less and less often. Where
 * nobody serves an embedded store any more, whoever comes first does. Once it is back the process takes its rank and
 * seats again, with the same incarnation, and rewrites its contact and notes; others do the same, each in its time.
 * Calls that need the store wait for that, and fail with TB_LOST when their time is up. If another process has taken
 * the rank or a seat meanwhile, the directory stays lost, and they fail with TB_CONFLICT. */
#ifndef TB_BUS_DIRECTORY_H
#define TB_BUS_DIRECTORY_H

#include "base/error.h"

typedef struct tb__directory tb__directory;

enum {
    TB__DIRECTORY_MAX_NAME = 200, /* bytes of a group's or a topic's name: any UTF-8 text without control characters */
    TB__DIRECTORY_MAX_CONTACT = 4 << 10,
    TB__DIRECTORY_MAX_NOTE = 64 << 10,
};

typedef struct tb__directory_opts {
    const char *token;
    int timeout_ms; /* for opening, and for calls that ask the store and are given none of their own */
    /* Called by the following thread, which holds no lock, after any change, and when the store is lost or back; the
     * first time perhaps before open returns. It may call the directory, but not close it; what needs the store fails
     * at once while that is lost. May be NULL. */
    void (*changed)(void *arg);
    void *arg;
} tb__directory_opts;

/* Connects to the store, or serves it where nobody does, and takes a bus rank: the one that this seat had last time,
 * with the next incarnation, or a new one where a living process has that. TB_CONFLICT, naming who has it, if the seat
 * is taken, and naming who says so, if the group has another size: both after the time in which the dead disappear:
 * half a second, or in etcd a few. The member is visible to others after tb__directory_announce. */
tb_status tb__directory_open(const char *url, const char *group, int32_t index, int32_t size,
                             const tb__directory_opts *opts, tb__directory **out);

/* Waits for nobody but a `changed` that is under way, for an attempt to reach a lost store (two seconds at most), and
 * in etcd a second at most for giving the lease back. If this process serves the store, all others lose it, and one of
 * them serves it anew. No other call may be under way. NULL is allowed. */
void tb__directory_close(tb__directory *directory);

int32_t tb__directory_rank(const tb__directory *directory);
uint64_t tb__directory_incarnation(const tb__directory *directory);

/* Takes a seat in another group, under the same bus rank; a process has one seat in a group. TB_CONFLICT as above. */
tb_status tb__directory_enter(tb__directory *directory, const char *group, int32_t index, int32_t size);

/* Lets others see this process in all seats it has and will take; `contact` is how to reach it. Calling it again
 * replaces the contact. */
tb_status tb__directory_announce(tb__directory *directory, const void *contact, size_t nbytes, int timeout_ms);

/* A process in its seat. */
typedef struct tb__member {
    int32_t rank; /* TB_NO_RANK: nobody there, and the rest is zero */
    uint64_t incarnation;
    const void *contact;
    size_t contact_nbytes;
} tb__member;

/* A group as it is now: who has announced himself. One allocation, freed with tb__roster_fini. */
typedef struct tb__roster {
    int32_t size;     /* 0: nobody has come */
    int32_t npresent; /* members with a rank */
    tb__member *member;
    bool sizes_differ; /* members disagree on the group's size; `size` is what the lowest index says */
} tb__roster;

tb_status tb__directory_roster(tb__directory *directory, const char *group, tb__roster *out);
void tb__roster_fini(tb__roster *roster);

/* Asks `check` about every member that has announced itself, and returns its first failure. A member that fails is
 * given the time in which the dead disappear. */
tb_status tb__directory_check_members(tb__directory *directory, int64_t deadline_ms,
                                      tb_status (*check)(const void *contact, size_t nbytes, const char *label));

/* How many processes that have announced themselves have a contact beginning with these bytes, by distinct rank. */
int32_t tb__directory_count_contacts(tb__directory *directory, const void *prefix, size_t nbytes);

/* Publishes a note about `topic` in the name of one of this process's seats; it replaces the one before. Others see it
 * until it is withdrawn or this process is gone; this process sees it when the call returns. TB_TOO_BIG also if all
 * contacts and notes on the bus together come close to 16 MiB. A new note that could not be published does not stay: if
 * the store has it all the same, it is withdrawn.
 *
 * Withdrawing while the store is lost does not wait: the note is not written again. A store that is there but has not
 * answered within the timeout (TB_TIMEOUT) is told when it answers, and until then withdrawing other notes does not
 * wait for it at all, but fails as well; nothing is left to be done by the caller. */
tb_status tb__directory_publish(tb__directory *directory, const char *topic, const char *group, int32_t index,
                                const void *data, size_t nbytes, int timeout_ms);
tb_status tb__directory_withdraw(tb__directory *directory, const char *topic, const char *group, int32_t index,
                                 int timeout_ms);

typedef struct tb__note {
    const char *group;
    int32_t index;
    const void *data;
    size_t nbytes;
} tb__note;

/* All notes about a topic, by group, then index. One allocation, freed with tb__notes_fini. */
typedef struct tb__notes {
    size_t count;
    tb__note *item;
} tb__notes;

tb_status tb__directory_notes(tb__directory *directory, const char *topic, tb__notes *out);
void tb__notes_fini(tb__notes *notes);

/* Tells stores apart, and is the same for all processes that are at one: it is another when another one, empty, took
 * the place of one that was lost. While the store is lost it is that one's. */
uint64_t tb__directory_store_number(tb__directory *directory);

/* Decides a question, named so that nobody ever uses the name for another one: the first answer that anybody gives
 * holds, and `out`, to be freed, is that one. TB_TIMEOUT and TB_LOST leave open whether this one was given; so does
 * TB_IN_DOUBT, where the store is not the one with this number any more. */
tb_status tb__directory_decide(tb__directory *directory, uint64_t store_number, const char *question,
                               const char *answer, int timeout_ms, char **out);
/* The question is open again, so nobody may ask it any more. */
tb_status tb__directory_forget(tb__directory *directory, const char *question, int timeout_ms);

/* For a caller that waits for what others write, and has waited for a while: asks the store something. A connection
 * that is silent where a new one is answered is lost by that, and then there is a new one. Ends when the store has
 * answered, at once while it is lost. */
void tb__directory_probe_store(tb__directory *directory, int timeout_ms);

/* TB_OK, or with the reason in tb_error_detail: TB_LOST while the store is lost, TB_CONFLICT if it stays lost because
 * another process is in this one's place. */
tb_status tb__directory_state(tb__directory *directory);

/* Whether that is TB_OK. */
bool tb__directory_is_connected(tb__directory *directory);

#endif
