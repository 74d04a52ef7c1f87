/* Shared by the directory's files: the calls are in directory.c and directory_notes.c, the thread that follows the
 * store in directory_follow.c. */
#ifndef TB_BUS_DIRECTORY_INNER_H
#define TB_BUS_DIRECTORY_INNER_H

#include "base/mem.h"
#include "base/process.h"
#include "bus/directory_claim.h"
#include "bus/directory_summary.h"
#include "bus/store/server.h"

#include <unistd.h>

typedef struct tb__own_note {
    char *key;
    void *data; /* NULL: its first write is not confirmed */
    size_t nbytes;
    uint64_t revision; /* of the last write; 0: to another store. Guarded by the lock */
    bool is_withdrawn; /* it has to be deleted from the store; guarded by the lock */
} tb__own_note;

struct tb__directory {
    char *url, *token;
    tb__store_secret secret; /* with which a new connection to the store takes over from a lost one */
    tb__directory_opts opts; /* without the token */
    char holder[600];        /* describes this process, with a random number that only it has */
    tb__seat_record self;    /* this process's part of every seat record */
    tb__claimed_rank claimed;
    tb__store_value lead; /* the record of its group's first rank, if it was compared with that; else no data */
    pid_t owner;
    pthread_t follower;
    int64_t reported_ms; /* when the report was last made, and its hash, 0 if there is none; the following thread's */
    uint64_t reported;
    uint64_t told; /* the revision of the changes that `changed` was last called for; the following thread's */

    /* These belong to the active call (tb__directory_begin_call). Only the following thread replaces the store and the
     * server, as the active call and with the lock held; it may use them without. */
    tb__store *store;
    tb__store_server *server; /* NULL: another process serves the store */
    TB_VEC(tb__own_seat) seats;
    TB_VEC(tb__own_note) notes; /* changes need the lock, too */
    uint8_t contact[TB__DIRECTORY_MAX_CONTACT];

    pthread_mutex_t lock; /* guards what follows */
    pthread_cond_t freed; /* no call is active, the state has changed, or the directory is closing */
    bool is_call_active;  /* one call at a time changes what this process publishes */
    bool is_closing;
    bool must_follow; /* all changes under "now/" have to be followed, not only the hints */
    bool is_following_all;
    bool is_report_due; /* by the following thread */
    bool is_silent;     /* the last request to the store had no answer in time */
    tb_status state;    /* TB_OK, TB_LOST, TB_CONFLICT */
    char why[512];
    bool has_warned;               /* about the loss */
    char mark[33];                 /* the random text under the key "mark", which every store has */
    uint64_t store_number;         /* its hash */
    tb__directory_view *view;      /* the last list */
    TB_VEC(tb__summary) summaries; /* read since then */
};

/* Sets the state; for a failure, tb_error_detail is the reason. */
void tb__directory_set_state(tb__directory *d, tb_status state);

/* Lists the store and replaces the view, unless that is newer. `is_other_store`: revisions can't be compared. */
tb_status tb__directory_refresh(tb__directory *d, bool is_other_store);
/* The same with a list that was read. */
tb_status tb__directory_replace_view(tb__directory *d, tb__store_entries *entries, bool is_other_store);

/* The newest view that has the group or the notes about the topic; the other one is NULL. With the lock held. */
tb__directory_view *tb__directory_view_of(const tb__directory *d, const char *group, const char *topic);
/* Forgets those that are not newer than the view, or all of them. With the lock held, or when no thread is left. */
void tb__directory_drop_summaries(tb__directory *d, bool are_all);

/* Sets store_number. By the active call. */
tb_status tb__directory_identify_store(tb__directory *d, const tb__store_deadline *deadline);

/* The same, by the deadline. */
tb_status tb__directory_refresh_within(tb__directory *d, const tb__store_deadline *deadline);

/* Waits until no other call is active and, with needs_store, until the store is there; then this call is active. */
tb_status tb__directory_begin_call(tb__directory *d, tb__store_deadline *deadline, bool needs_store);
/* Ends the active call. Returns `status`, the result of the call. */
tb_status tb__directory_end_call(tb__directory *d, tb_status status);
/* Whether a call that failed because the store was lost can be repeated before its deadline. */
bool tb__directory_should_retry(const tb__store_deadline *deadline, tb_status status);

void tb__directory_set_silent(tb__directory *d);

/* A flag that the lock guards. */
bool tb__directory_reads(tb__directory *d, const bool *flag);

/* NULL: this process is not in the group. By the active call. */
const tb__own_seat *tb__directory_find_seat(const tb__directory *d, const char *group);

/* Deletes withdrawn notes from the store. By the active call. */
tb_status tb__directory_delete_withdrawn(tb__directory *d, const tb__store_deadline *deadline);
/* The same by the following thread, if it could not be done at once. Returns whether it has to be tried again soon,
 * because the store does not answer. */
bool tb__directory_retry_withdrawals(tb__directory *d);
void tb__directory_free_notes(tb__directory *d);

/* The deadline of a call with this timeout. */
tb__store_deadline tb__directory_deadline(int timeout_ms);

/* This process's record for a seat in a group of this size. */
tb__seat_record tb__directory_seat_record(const tb__directory *d, int32_t size);

/* The following thread's main function, and whether the caller is that thread. */
void *tb__directory_follow(void *directory);
bool tb__directory_is_follower(void);

#endif
