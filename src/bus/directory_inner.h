/* What the directory's files share: the calls are in directory.c and directory_notes.c, the thread that follows the
 * store in directory_follow.c. */
#ifndef TB_BUS_DIRECTORY_INNER_H
#define TB_BUS_DIRECTORY_INNER_H

#include "base/mem.h"
#include "base/process.h"
#include "bus/directory_claim.h"
#include "bus/directory_view.h"
#include "bus/store/server.h"

#include <unistd.h>

typedef struct tb__own_seat {
    char group[TB__DIRECTORY_MAX_NAME + 1];
    int32_t index, size;
} tb__own_seat;

typedef struct tb__own_note {
    char *key;
    void *data; /* NULL: it is being written for the first time, or that has failed */
    size_t nbytes;
    bool is_withdrawn; /* it is still to be deleted; guarded by the lock */
} tb__own_note;

struct tb__directory {
    char *url, *token;
    tb__directory_opts opts; /* without the token */
    char holder[600];        /* who has the rank: in words, with a number that only this process has */
    tb__seat_record self;    /* what all seats have in common */
    pid_t owner;
    pthread_t follower;

    /* These belong to whoever has the turn. The following thread alone replaces the store and the server, with the turn
     * and the lock, and may use them without. */
    tb__store *store;
    tb__store_server *server; /* NULL: somebody else serves */
    TB_VEC(tb__own_seat) seats;
    TB_VEC(tb__own_note) notes; /* changed with the lock, too */
    uint8_t contact[TB__DIRECTORY_MAX_CONTACT];

    pthread_mutex_t lock; /* for all that follows */
    pthread_cond_t freed; /* the turn is free, the state is another, or the directory is closing */
    bool is_call_active;  /* the turn: one call at a time changes what this process says */
    bool is_closing;
    bool is_silent;   /* the last call that asked the store had no answer in its time */
    pthread_t helper; /* makes up for notes that could not be withdrawn */
    bool has_helper;
    tb_status state; /* TB_OK, TB_LOST, TB_CONFLICT */
    char why[512];
    bool has_warned;       /* of the loss */
    uint64_t store_number; /* made of the mark that this store has, and one that takes its place does not */
    tb__directory_view *view;
};

/* The state and, for a failure, tb_error_detail as the reason. */
void tb__directory_set_state(tb__directory *d, tb_status state);

/* Looks at the store. Afterwards the view is at least as new as the call. The revisions of another store say nothing
 * about which view is newer. */
tb_status tb__directory_refresh(tb__directory *d, bool is_other_store);

/* Finds out whether this is the store that it was before. With the turn. */
tb_status tb__directory_identify_store(tb__directory *d, const tb__store_deadline *deadline);

/* The same by the deadline's deadline. */
tb_status tb__directory_refresh_within(tb__directory *d, const tb__store_deadline *deadline);

/* Waits for the calls before it and, if it needs the store, until that is there. */
tb_status tb__directory_begin_call(tb__directory *d, tb__store_deadline *deadline, bool needs_store);
/* Its value is `status`, that of the call. */
tb_status tb__directory_end_call(tb__directory *d, tb_status status);
/* A call that the store was lost under does what it does once more when the store is back. */
bool tb__directory_should_retry(const tb__store_deadline *deadline, tb_status status);

void tb__directory_set_silent(tb__directory *d, bool is_silent);

/* NULL: none in that group. With the turn. */
const tb__own_seat *tb__directory_find_seat(const tb__directory *d, const char *group);

/* Deletes what was withdrawn. With the turn. */
tb_status tb__directory_delete_withdrawn(tb__directory *d, const tb__store_deadline *deadline);
/* Has that done as soon as the store answers. */
void tb__directory_retry_withdrawals(tb__directory *d);
void tb__directory_free_notes(tb__directory *d);

/* What a call has until its timeout is over. */
tb__store_deadline tb__directory_deadline(int timeout_ms);

/* The process in one of its seats, as others see it. */
tb__seat_record tb__directory_seat_record(const tb__directory *d, int32_t size);

/* The thread, and whether this is it. */
void *tb__directory_follow(void *directory);
bool tb__directory_is_follower(void);

#endif
