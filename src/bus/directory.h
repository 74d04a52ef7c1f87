/* The members of the bus, as the store lists them: bus ranks, incarnations, the seats of groups, and notes that members
 * publish (values that the ranks of a pair have to agree on). A *seat* is an index in a group: the group's rank of that
 * number.
 *
 * A thread follows the store and keeps a copy of all of this, so that queries never wait; after a change it calls
 * `changed`. Entries of this process disappear from the store when it closes the directory or dies. Calls may come from
 * several threads at once.
 *
 * If the store is lost, the copy stays as it is, and the thread tries to reach the store again, with growing delays. If
 * no process serves an embedded store any more, the first process that finds this out serves it. When the store is
 * back, the process claims its rank and seats again, with the same incarnation, and rewrites its contact and notes.
 * Calls that need the store wait for that, and fail with TB_LOST at their deadline. If another process has taken the
 * rank or a seat meanwhile, the directory stays lost, and they fail with TB_CONFLICT. */
#ifndef TB_BUS_DIRECTORY_H
#define TB_BUS_DIRECTORY_H

#include "base/error.h"
#include "base/text.h"

typedef struct tb__directory tb__directory;
typedef struct tb__directory_view tb__directory_view;

enum {
    TB__DIRECTORY_MAX_NAME = 200, /* bytes of a group's or a topic's name: any UTF-8 text without control characters */
    TB__DIRECTORY_MAX_CONTACT = 4 << 10,
    TB__DIRECTORY_MAX_NOTE = 64 << 10,
};

/* `what` names it in the message: "group", "topic". */
tb_status tb__name_check(const char *what, const char *name);

typedef struct tb__note {
    const char *topic, *group;
    int32_t index;
    const void *data;
    size_t nbytes;
} tb__note;

typedef struct tb__directory_opts {
    const char *token;
    int timeout_ms; /* for opening, and for calls that ask the store and have no timeout of their own */
    /* Called by the following thread, without locks, after any change, and when the store is lost or back; perhaps
     * before open returns. It may call the directory, but not close it; calls that need the store fail at once while it
     * is lost. May be NULL. */
    void (*changed)(void *arg);
    void *arg;
    /* Until tb__directory_follow_all, rosters and notes are only read when a hint changes (tb__directory_hint): of many
     * ranks that make a pair, a few follow all changes, and pass them on to the others. `is_lead`: whether this note of
     * a group's first rank says that it passes changes on; NULL: none does. */
    bool only_hints;
    bool (*is_lead)(const tb__note *note);
    /* Adds this process's report for readers of the store, as JSON; nothing: there is no report. Called by the
     * following thread, without locks, after tb__directory_report. NULL: no reports. */
    void (*report)(void *arg, tb__text *out);
} tb__directory_opts;

/* Connects to the store, or serves it if no process does, and takes a bus rank: that of the seat in the group's block
 * of ranks, with the next incarnation, or a new one if a living process has that. TB_CONFLICT, naming the other
 * process, if the seat is taken or a member of the group says that it has another size; a dead process is given time to
 * disappear first (half a second, with etcd a few seconds). Others see this process after tb__directory_announce, which
 * compares the sizes if only hints are followed. */
tb_status tb__directory_open(const char *url, const char *group, int32_t index, int32_t size,
                             const tb__directory_opts *opts, tb__directory **out);

/* Waits for a `changed` callback that is running, for an attempt to reach a lost store (2 s at most), and with etcd for
 * revoking the lease (1 s at most). If this process serves the store, all others lose it, and one of them serves it
 * anew. No other call may be running. NULL is allowed. */
void tb__directory_close(tb__directory *directory);

int32_t tb__directory_rank(const tb__directory *directory);
uint64_t tb__directory_incarnation(const tb__directory *directory);

/* Takes a seat in another group, under the same bus rank; a process has one seat in a group. TB_CONFLICT as above. */
tb_status tb__directory_enter(tb__directory *directory, const char *group, int32_t index, int32_t size);

/* Makes this process visible in all its seats, also those that it takes later; `contact` tells how to reach it. A
 * second call replaces the contact. */
tb_status tb__directory_announce(tb__directory *directory, const void *contact, size_t nbytes, int timeout_ms);

/* The process in a seat. */
typedef struct tb__member {
    int32_t rank; /* TB_NO_RANK: the seat is empty, and the rest is zero */
    uint64_t incarnation;
    const void *contact;
    size_t contact_nbytes;
} tb__member;

/* Members of a group that have announced themselves. Freed with tb__roster_fini. */
typedef struct tb__roster {
    int32_t size;     /* 0: the group has no members */
    int32_t npresent; /* members with a rank */
    tb__member *member;
    bool sizes_differ;        /* members disagree on the group's size; `size` is that of the lowest index */
    tb__directory_view *view; /* has the contacts */
} tb__roster;

tb_status tb__directory_roster(tb__directory *directory, const char *group, tb__roster *out);
void tb__roster_fini(tb__roster *roster);

/* Calls `check` for every member that has announced itself, and returns the first failure. A member that fails may be
 * dead: it is given time to disappear. */
tb_status tb__directory_check_members(tb__directory *directory, int64_t deadline_ms,
                                      tb_status (*check)(const void *contact, size_t nbytes, const char *label));

/* "1 2 trainer" and a newline for each group: the seats that are taken, all seats, and the name. */
void tb__directory_list_groups(tb__directory *directory, tb__text *out);

/* The number of distinct ranks whose contact begins with these bytes. */
int32_t tb__directory_count_contacts(tb__directory *directory, const void *prefix, size_t nbytes);

/* Publishes a note about `topic` for one of this process's seats, in place of an earlier one. Others see it until it is
 * withdrawn or this process is gone; this process sees it when the call returns. But if only hints are followed, and
 * the group's first rank has no note about the topic, or one that `is_lead` accepts, it sees all notes when that one
 * hints at a change. TB_TOO_BIG also if all contacts and notes on the bus together come close to 16 MiB. If the call
 * fails, a note that was new is deleted in the background.
 *
 * Withdrawing while the store is lost does not wait: the note is not written again. If the store does not answer within
 * the timeout, the call fails with TB_TIMEOUT, and the note is deleted in the background when the store answers. Until
 * then withdrawing other notes fails at once, with the same effect. */
tb_status tb__directory_publish(tb__directory *directory, const char *topic, const char *group, int32_t index,
                                const void *data, size_t nbytes, int timeout_ms);
tb_status tb__directory_withdraw(tb__directory *directory, const char *topic, const char *group, int32_t index,
                                 int timeout_ms);

/* All notes about a topic, by group, then index. Freed with tb__notes_fini. */
typedef struct tb__notes {
    size_t count;
    const tb__note *item;
    tb__directory_view *view; /* has them */
} tb__notes;

void tb__directory_notes(tb__directory *directory, const char *topic, tb__notes *out);
/* False: the known notes are older than this process's own one about the topic, because they rely on a hint. */
bool tb__directory_is_current(tb__directory *directory, const char *topic);
void tb__notes_fini(tb__notes *notes);

/* Identifies the store: the same number on all processes that use it, and another one when an empty store has replaced
 * it. While the store is lost, the number of the lost one. */
uint64_t tb__directory_store_number(tb__directory *directory);

/* Decides a question. The first write wins; later writers get the winner. `out`, to be freed, is the answer that won. A
 * question's name must never be used for another question. After TB_TIMEOUT and TB_LOST it is unknown whether our
 * answer was written; so it is after TB_IN_DOUBT, if the store does not have this number any more. */
tb_status tb__directory_decide(tb__directory *directory, uint64_t store_number, const char *question,
                               const char *answer, int timeout_ms, char **out);
/* Deletes the answer. No process may ask the question any more. */
tb_status tb__directory_forget(tb__directory *directory, const char *question, int timeout_ms);

/* With only_hints, all changes are followed from this call on. TB_TIMEOUT if the store does not answer; then the known
 * entries are old, but are followed later. */
tb_status tb__directory_follow_all(tb__directory *directory, int timeout_ms);
/* Changes the hint about a pair, as the first rank of the first of its groups, together with a summary of the pair: the
 * members of both groups, and the notes. */
tb_status tb__directory_hint(tb__directory *directory, const char *pair, const char *const groups[2], uint64_t state,
                             int timeout_ms);

/* For a caller that has waited long for entries of others: sends the store a request, which finds out whether the
 * connection is dead and replaces it then. Returns when the store has answered, at once while it is lost. */
void tb__directory_probe_store(tb__directory *directory, int timeout_ms);

/* The report has changed: the following thread calls `report` soon, once a second at most, and writes the
 * result. */
void tb__directory_report(tb__directory *directory);

/* TB_OK, or, with the reason in tb_error_detail, TB_LOST while the store is lost and TB_CONFLICT if another process has
 * taken this one's rank or seat. */
tb_status tb__directory_state(tb__directory *directory);

static inline bool tb__directory_is_connected(tb__directory *directory) {
    return tb__directory_state(directory) == TB_OK;
}

#endif
