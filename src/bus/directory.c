/* The directory: this process's seats and notes in the store, and the thread that follows everybody's.
 *
 * The view of the store is replaced as a whole, under the lock, by whichever thread has listed a newer one. A call that
 * changes something lists afterwards, so that it sees its own change whatever the following thread is doing. */
#include "bus/directory.h"

#include "base/log.h"
#include "base/mem.h"
#include "base/process.h"
#include "bus/directory_claim.h"
#include "bus/directory_view.h"
#include "bus/store/server.h"

#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <string.h>
#include <sys/random.h>
#include <unistd.h>

/* Following sleeps until something changes or the connection ends; the longest round is only there to be finite.
 * Nothing tells when a lost store is back, so the waits between attempts to reach it grow. */
enum { ROUND_MS = 60000, RETRY_MS = 100, REOPEN_MS = 10, FIRST_NAP_MS = 10, LONGEST_NAP_MS = 2000, REACH_MS = 5000 };

typedef struct own_seat {
    char group[TB__DIRECTORY_MAX_NAME + 1];
    int32_t index, size;
} own_seat;

typedef struct own_note {
    char *key;
    void *data;
    size_t nbytes;
} own_note;

struct tb__directory {
    char *url, *token;
    tb__directory_opts opts; /* without the token */
    char holder[600];        /* who has the rank: in words, with a number that only this process has */
    tb__seat self;           /* what all seats have in common */
    pid_t owner;
    pthread_t follower;

    /* These belong to whoever has the turn. The following thread alone replaces the store and the server, with the turn
     * and the lock, and may use them without. */
    tb__store *store;
    tb__store_server *server; /* NULL: somebody else serves */
    TB_VEC(own_seat) seats;
    TB_VEC(own_note) notes;
    uint8_t contact[TB__DIRECTORY_MAX_CONTACT];

    pthread_mutex_t lock; /* for all that follows */
    pthread_cond_t freed; /* the turn is free, the state is another, or the directory is closing */
    bool is_taken;        /* the turn: one call at a time changes what this process says */
    bool is_closing;
    tb_status state; /* TB_OK, TB_LOST, TB_CONFLICT */
    char why[512];
    tb__view *view;
};

/* Whether this is the thread that follows the store. */
static _Thread_local bool is_following;

/* For a failure, `why` is in tb_error_detail. */
static void set_state(tb__directory *d, tb_status state) {
    pthread_mutex_lock(&d->lock);
    bool is_new = d->state != state, is_closing = d->is_closing;
    if (is_new && state != TB_OK)
        snprintf(d->why, sizeof d->why, "%s", tb_error_detail());
    d->state = state;
    pthread_cond_broadcast(&d->freed);
    pthread_mutex_unlock(&d->lock);
    if (!is_new || is_closing)
        return;
    if (state == TB_OK)
        tb__log(TB_LOG_WARN, "directory: the store is back");
    else
        tb__log(TB_LOG_WARN, "directory: the store is lost%s: %s", state == TB_CONFLICT ? " for good" : "",
                tb_error_detail());
}

static uint64_t viewed_revision(tb__directory *d) {
    pthread_mutex_lock(&d->lock);
    uint64_t revision = d->view ? tb__view_revision(d->view) : 0;
    pthread_mutex_unlock(&d->lock);
    return revision;
}

/* Looks at the store. Afterwards the view is at least as new as the call. The revisions of another store say nothing
 * about which view is newer. */
static tb_status look(tb__directory *d, bool is_other_store) {
    tb__store_entries entries;
    tb__view *view;
    TB_TRY(tb__store_list(d->store, TB__NOW, &entries));
    TB_TRY(tb__view_create(&entries, is_other_store ? 0 : viewed_revision(d), &view));
    pthread_mutex_lock(&d->lock);
    if (!d->view || is_other_store || tb__view_revision(view) > tb__view_revision(d->view)) {
        tb__view *before = d->view;
        d->view = view;
        view = before;
    }
    pthread_mutex_unlock(&d->lock);
    tb__view_destroy(view);
    return TB_OK;
}

/* True if it is time to end. */
static bool pause_following(tb__directory *d, int ms) {
    struct timespec until = tb__time_of_ms(tb__now_ms() + ms);
    pthread_mutex_lock(&d->lock);
    while (!d->is_closing && pthread_cond_timedwait(&d->freed, &d->lock, &until) != ETIMEDOUT)
        ;
    bool is_closing = d->is_closing;
    pthread_mutex_unlock(&d->lock);
    return is_closing;
}

static bool is_closing(tb__directory *d) {
    pthread_mutex_lock(&d->lock);
    bool result = d->is_closing;
    pthread_mutex_unlock(&d->lock);
    return result;
}

static void tell(const tb__directory *d) {
    if (d->opts.changed)
        d->opts.changed(d->opts.arg);
}

/* What a call has until its timeout is over. */
static tb__inquiry begin(const tb__directory *d) {
    return (tb__inquiry){.deadline_ms = tb__now_ms() + d->opts.timeout_ms, .timeout_ms = d->opts.timeout_ms};
}

/* With the lock held: why a call that has waited until its deadline has not had its turn. */
static tb_status fail_turn(const tb__directory *d) {
    if (d->state == TB_CONFLICT)
        return tb__fail(TB_CONFLICT, "the store is lost for good: %s", d->why);
    if (d->state == TB_LOST)
        return tb__fail(TB_LOST, "the store is lost: %s", d->why);
    return tb__fail(TB_TIMEOUT, "another thread's call has not ended within %d ms", d->opts.timeout_ms);
}

/* Waits for the calls before it and, if it needs the store, until that is there. The following thread can't wait for
 * what only itself can bring about. */
static tb_status take_turn(tb__directory *d, tb__inquiry *inquiry, bool needs_store) {
    struct timespec until = tb__time_of_ms(inquiry->deadline_ms + 1);
    tb_status status = TB_OK;
    bool is_late = false;
    pthread_mutex_lock(&d->lock);
    while (!is_late && (d->is_taken || (needs_store && !is_following && d->state == TB_LOST)))
        is_late = pthread_cond_timedwait(&d->freed, &d->lock, &until) == ETIMEDOUT;
    if (d->is_taken || (needs_store && d->state != TB_OK))
        status = fail_turn(d);
    else
        d->is_taken = true;
    inquiry->store = d->store;
    pthread_mutex_unlock(&d->lock);
    return status;
}

/* Its value is `status`. */
static tb_status end_turn(tb__directory *d, tb_status status) {
    tb__store_set_timeout(d->store, d->opts.timeout_ms);
    if (status == TB_LOST)
        set_state(d, TB_LOST);
    pthread_mutex_lock(&d->lock);
    d->is_taken = false;
    pthread_cond_broadcast(&d->freed);
    pthread_mutex_unlock(&d->lock);
    return status;
}

/* A call that the store was lost under does what it does once more when the store is back. */
static bool is_worth_another_turn(const tb__inquiry *inquiry, tb_status status) {
    return status == TB_LOST && !is_following && tb__ms_until(inquiry->deadline_ms) > 0;
}

static tb_status check_seat(const char *group, int32_t index, int32_t size) {
    TB_TRY(tb__name_check("group", group));
    if (size < 1)
        return tb__fail(TB_INVALID, "group '%s' has %" PRId32 " seats; it must have at least 1", group, size);
    if (size > TB_MAX_RANKS)
        return tb__fail(TB_TOO_BIG, "group '%s' has %" PRId32 " seats; %d are allowed", group, size, TB_MAX_RANKS);
    if (index < 0 || index >= size)
        return tb__fail(TB_INVALID, "seat %" PRId32 " of group '%s' is not between 0 and %" PRId32, index, group,
                        size - 1);
    return TB_OK;
}

/* The process in one of its seats, as others see it. */
static tb__seat seat_of(const tb__directory *d, int32_t size) {
    tb__seat seat = d->self;
    seat.size = size;
    return seat;
}

static tb_status write_seat(const tb__directory *d, const tb__inquiry *inquiry, const own_seat *own) {
    tb__seat_bytes bytes = {0};
    tb__seat seat = seat_of(d, own->size);
    tb__seat_encode(&seat, &bytes);
    TB_TRY(tb__inquiry_continue(inquiry));
    return tb__store_set(d->store, tb__key_of_seat(own->group, own->index).text, bytes.data, bytes.nbytes,
                         TB__STORE_EPHEMERAL, NULL);
}

static tb_status look_within(tb__directory *d, const tb__inquiry *inquiry) {
    TB_TRY(tb__inquiry_continue(inquiry));
    return look(d, false);
}

/* Once the seat is claimed: the rank, for the first one, and what others see. */
static tb_status settle(tb__directory *d, const tb__inquiry *inquiry, const own_seat *own) {
    if (d->self.rank == TB_NO_RANK)
        TB_TRY(tb__rank_claim(inquiry, own->group, own->index, d->holder, &d->self.rank, &d->self.incarnation));
    TB_TRY(tb__seat_remember(inquiry, own->group, own->index, d->self.rank));
    if (d->self.is_announced)
        TB_TRY(write_seat(d, inquiry, own));
    return look_within(d, inquiry);
}

/* There must be room in `seats`. */
static tb_status sit(tb__directory *d, const tb__inquiry *inquiry, const char *group, int32_t index, int32_t size) {
    own_seat own = {.index = index, .size = size};
    memcpy(own.group, group, strlen(group) + 1);
    tb__seat claim = seat_of(d, size);
    claim.is_announced = false;
    claim.contact_nbytes = 0;
    TB_TRY(tb__seat_claim(inquiry, group, index, &claim, false));
    tb_status status = settle(d, inquiry, &own);
    if (status != TB_OK)
        return tb__seat_give_up(inquiry, group, index, status);
    d->seats.item[d->seats.count++] = own;
    return TB_OK;
}

/* ---- Losing the store and coming back ---------------------------------------------------------------------------- */

/* Everything that this process says, once more. The store may have forgotten all of it, or in etcd still have what was
 * written before. */
static tb_status say_again(tb__directory *d, const tb__inquiry *inquiry) {
    for (size_t i = 0; i < d->seats.count; i++) {
        const own_seat *own = &d->seats.item[i];
        tb__seat seat = seat_of(d, own->size);
        TB_TRY(tb__seat_claim(inquiry, own->group, own->index, &seat, true));
        TB_TRY(tb__seat_remember(inquiry, own->group, own->index, d->self.rank));
    }
    for (size_t i = 0; i < d->notes.count; i++) {
        const own_note *note = &d->notes.item[i];
        TB_TRY(tb__inquiry_continue(inquiry));
        TB_TRY(tb__store_set(d->store, note->key, note->data, note->nbytes, TB__STORE_EPHEMERAL, NULL));
    }
    TB_TRY(tb__inquiry_continue(inquiry));
    return look(d, true);
}

/* With the turn. */
static tb_status come_back(tb__directory *d) {
    tb__store *store;
    tb__store_server *server = NULL;
    TB_TRY(tb__store_try_open_or_serve(d->url, d->token, REACH_MS, &store, &server));
    pthread_mutex_lock(&d->lock);
    tb__store *before = d->store;
    int32_t next_rank = tb__view_next_rank(d->view);
    d->store = store;
    if (server)
        d->server = server;
    if (d->is_closing)
        tb__store_hang_up(store);
    pthread_mutex_unlock(&d->lock);
    tb__store_close(before);
    tb__inquiry inquiry = begin(d);
    inquiry.store = store;
    TB_TRY(tb__ranks_reserve(&inquiry, next_rank > d->self.rank ? next_rank : d->self.rank + 1));
    TB_TRY(tb__rank_reclaim(&inquiry, d->holder, d->self.rank, d->self.incarnation));
    return say_again(d, &inquiry);
}

/* Waits for the call that has the turn, which can't last: it has a deadline, and the connection is gone. */
static tb_status come_back_in_turn(tb__directory *d) {
    pthread_mutex_lock(&d->lock);
    while (d->is_taken)
        pthread_cond_wait(&d->freed, &d->lock);
    d->is_taken = true;
    pthread_mutex_unlock(&d->lock);
    tb_status status = come_back(d);
    tb__store_set_timeout(d->store, d->opts.timeout_ms);
    /* First the state, so that whoever gets the turn finds it. */
    if (status == TB_OK || status == TB_CONFLICT)
        set_state(d, status);
    pthread_mutex_lock(&d->lock);
    d->is_taken = false;
    pthread_cond_broadcast(&d->freed);
    pthread_mutex_unlock(&d->lock);
    return status;
}

/* False if it is time to end, or another process is in this one's place. */
static bool recover(tb__directory *d) {
    unsigned seed = (unsigned)d->self.rank * 2654435761u + (unsigned)getpid();
    for (int nap_ms = FIRST_NAP_MS;; nap_ms = nap_ms * 2 < LONGEST_NAP_MS ? nap_ms * 2 : LONGEST_NAP_MS) {
        tb_status status = come_back_in_turn(d);
        if (status == TB_OK)
            return true;
        if (status == TB_CONFLICT) {
            tb__store_hang_up(d->store); /* what it has taken again is for others */
            return false;
        }
        tb__log(TB_LOG_DEBUG, "directory: the store is not back: %s", tb_error_detail());
        /* Many that have lost it at once do not come all at once. */
        if (pause_following(d, nap_ms / 2 + rand_r(&seed) % (nap_ms / 2 + 1)))
            return false;
    }
}

static void *follow(void *arg) {
    tb__directory *d = arg;
    is_following = true;
    uint64_t told = viewed_revision(d), revision = 0;
    bool has_warned = false;
    while (!is_closing(d)) {
        tb_status status = tb__store_wait_change(d->store, TB__NOW, told, ROUND_MS, &revision);
        if (status == TB_TIMEOUT)
            continue;
        /* A call of this process may have been here already. */
        if (status == TB_OK && viewed_revision(d) < revision)
            status = look(d, false);
        if (status == TB_LOST) {
            set_state(d, TB_LOST);
            if (is_closing(d))
                break;
            tell(d);
            bool is_back = recover(d);
            if (is_closing(d))
                break;
            tell(d);
            if (!is_back)
                break;
            status = TB_OK;
        } else if (status == TB_OK) {
            tell(d);
        }
        if (status == TB_OK) {
            told = viewed_revision(d);
            has_warned = false;
            continue;
        }
        if (!has_warned)
            tb__log(TB_LOG_WARN, "directory: the view of the bus is old: %s", tb_error_detail());
        has_warned = true;
        if (pause_following(d, RETRY_MS))
            break;
    }
    return NULL;
}

static void forget_note(own_note *note) {
    free(note->key);
    free(note->data);
}

/* The threads are gone, or were never there. */
static void destroy(tb__directory *d) {
    tb__store_close(d->store);
    tb__store_server_stop(d->server);
    tb__view_destroy(d->view);
    pthread_cond_destroy(&d->freed);
    pthread_mutex_destroy(&d->lock);
    free(d->seats.item);
    for (size_t i = 0; i < d->notes.count; i++)
        forget_note(&d->notes.item[i]);
    free(d->notes.item);
    free(d->url);
    free(d->token);
    free(d);
}

static tb_status describe_holder(tb__directory *d, const char *group, int32_t index) {
    uint64_t number;
    if (getrandom(&number, sizeof number, 0) != (ssize_t)sizeof number)
        return tb__fail(TB_IO, "getrandom: %s", strerror(errno));
    snprintf(d->holder, sizeof d->holder, "%s in seat %" PRId32 " of group '%s' (%016" PRIx64 ")",
             tb__seat_describe(&d->self).text, index, group, number);
    return TB_OK;
}

static tb_status open_until(const char *url, const char *group, int32_t index, int32_t size,
                            const tb__directory_opts *opts, int64_t deadline_ms, tb__directory **out) {
    tb__directory *d = tb__calloc(1, sizeof *d);
    if (!d)
        return TB_NO_MEMORY;
    d->opts = *opts;
    d->opts.token = NULL;
    d->self = (tb__seat){.rank = TB_NO_RANK, .pid = getpid()};
    if (gethostname(d->self.host, sizeof d->self.host - 1) != 0)
        snprintf(d->self.host, sizeof d->self.host, "?");
    d->owner = getpid();
    pthread_mutex_init(&d->lock, NULL);
    tb__monotonic_cond_init(&d->freed);
    d->url = tb__strdup(url);
    d->token = tb__strdup(opts->token ? opts->token : "");
    tb_status status = d->url && d->token && tb__vec_reserve(&d->seats, 1) ? TB_OK : TB_NO_MEMORY;
    if (status == TB_OK)
        status = describe_holder(d, group, index);
    if (status == TB_OK)
        status = tb__store_open_or_serve(url, opts->token, tb__ms_until(deadline_ms), &d->store, &d->server);
    tb__inquiry inquiry = {.store = d->store, .deadline_ms = deadline_ms, .timeout_ms = opts->timeout_ms};
    if (status == TB_OK)
        status = sit(d, &inquiry, group, index, size);
    if (status == TB_OK) {
        tb__store_set_timeout(d->store, opts->timeout_ms);
        status = tb__start_thread(&d->follower, "tb-directory", follow, d);
    }
    if (status != TB_OK) {
        destroy(d);
        return status;
    }
    *out = d;
    return TB_OK;
}

static void nap(int ms) {
    struct timespec left = tb__time_of_ms(ms);
    while (nanosleep(&left, &left) != 0 && errno == EINTR)
        ;
}

tb_status tb__directory_open(const char *url, const char *group, int32_t index, int32_t size,
                             const tb__directory_opts *opts, tb__directory **out) {
    TB_TRY(check_seat(group, index, size));
    if (opts->timeout_ms < 1)
        return tb__fail(TB_INVALID, "a timeout of %d ms", opts->timeout_ms);
    int64_t deadline_ms = tb__now_ms() + opts->timeout_ms;
    for (;;) {
        tb_status status = open_until(url, group, index, size, opts, deadline_ms, out);
        /* Who served may end just now; then whoever comes next serves, and that may be us. */
        if (status != TB_LOST || tb__ms_until(deadline_ms) <= REOPEN_MS)
            return status;
        nap(REOPEN_MS);
    }
}

void tb__directory_close(tb__directory *directory) {
    tb__directory *d = directory;
    /* A forked child has neither the threads nor the connection, and locks as they were at that moment. */
    if (!d || d->owner != getpid())
        return;
    pthread_mutex_lock(&d->lock);
    d->is_closing = true;
    pthread_cond_broadcast(&d->freed);
    tb__store_hang_up(d->store);
    pthread_mutex_unlock(&d->lock);
    pthread_join(d->follower, NULL);
    destroy(d);
}

int32_t tb__directory_rank(const tb__directory *directory) {
    return directory->self.rank;
}

uint64_t tb__directory_incarnation(const tb__directory *directory) {
    return directory->self.incarnation;
}

static const own_seat *find_seat(const tb__directory *d, const char *group) {
    for (size_t i = 0; i < d->seats.count; i++) {
        if (strcmp(d->seats.item[i].group, group) == 0)
            return &d->seats.item[i];
    }
    return NULL;
}

static tb_status enter(tb__directory *d, const tb__inquiry *inquiry, const char *group, int32_t index, int32_t size) {
    const own_seat *own = find_seat(d, group);
    if (own)
        return tb__fail(TB_CONFLICT, "this process already has seat %" PRId32 " of group '%s'", own->index, group);
    if (!tb__vec_reserve(&d->seats, 1))
        return TB_NO_MEMORY;
    return sit(d, inquiry, group, index, size);
}

tb_status tb__directory_enter(tb__directory *directory, const char *group, int32_t index, int32_t size) {
    TB_TRY(check_seat(group, index, size));
    tb__inquiry inquiry = begin(directory);
    tb_status status;
    do {
        TB_TRY(take_turn(directory, &inquiry, true));
        status = end_turn(directory, enter(directory, &inquiry, group, index, size));
    } while (is_worth_another_turn(&inquiry, status));
    return status;
}

static tb_status announce(tb__directory *d, const tb__inquiry *inquiry, const void *contact, size_t nbytes) {
    if (nbytes > 0)
        memcpy(d->contact, contact, nbytes);
    d->self.contact = d->contact;
    d->self.contact_nbytes = nbytes;
    d->self.is_announced = true;
    for (size_t i = 0; i < d->seats.count; i++)
        TB_TRY(write_seat(d, inquiry, &d->seats.item[i]));
    return look_within(d, inquiry);
}

tb_status tb__directory_announce(tb__directory *directory, const void *contact, size_t nbytes) {
    if (nbytes > TB__DIRECTORY_MAX_CONTACT)
        return tb__fail(TB_TOO_BIG, "a contact of %zu bytes; %d are allowed", nbytes, TB__DIRECTORY_MAX_CONTACT);
    tb__inquiry inquiry = begin(directory);
    tb_status status;
    do {
        TB_TRY(take_turn(directory, &inquiry, true));
        status = end_turn(directory, announce(directory, &inquiry, contact, nbytes));
    } while (is_worth_another_turn(&inquiry, status));
    return status;
}

tb_status tb__directory_roster(tb__directory *directory, const char *group, tb__roster *out) {
    TB_TRY(tb__name_check("group", group));
    pthread_mutex_lock(&directory->lock);
    tb_status status = tb__view_roster(directory->view, group, out);
    pthread_mutex_unlock(&directory->lock);
    return status;
}

int32_t tb__directory_count_contacts(tb__directory *directory, const void *prefix, size_t nbytes) {
    pthread_mutex_lock(&directory->lock);
    int32_t count = tb__view_count_contacts(directory->view, prefix, nbytes);
    pthread_mutex_unlock(&directory->lock);
    return count;
}

static tb_status check_note(const tb__directory *d, const char *group, int32_t index) {
    const own_seat *own = find_seat(d, group);
    if (!own || own->index != index)
        return tb__fail(TB_INVALID, "seat %" PRId32 " of group '%s' is not this process's", index, group);
    return TB_OK;
}

static void forget_note_at(tb__directory *d, const char *key) {
    for (size_t i = 0; i < d->notes.count; i++) {
        if (strcmp(d->notes.item[i].key, key) != 0)
            continue;
        forget_note(&d->notes.item[i]);
        d->notes.item[i] = d->notes.item[--d->notes.count];
        return;
    }
}

static tb_status write_note(tb__directory *d, const tb__inquiry *inquiry, const char *key, const void *data,
                            size_t nbytes) {
    TB_TRY(tb__inquiry_continue(inquiry));
    TB_TRY(tb__store_set(d->store, key, data, nbytes, TB__STORE_EPHEMERAL, NULL));
    tb_status status = look_within(d, inquiry);
    if (status != TB_TOO_BIG)
        return status;
    /* All notes together are more than can be listed, and nobody could see anything any more. */
    char why[512];
    snprintf(why, sizeof why, "%s", tb_error_detail());
    (void)tb__store_delete(d->store, key);
    return tb__fail(TB_TOO_BIG, "%s", why);
}

static tb_status publish(tb__directory *d, const tb__inquiry *inquiry, const char *topic, const char *group,
                         int32_t index, const void *data, size_t nbytes) {
    tb__key key = tb__key_of_note(topic, group, index);
    TB_TRY(check_note(d, group, index));
    own_note note = {.key = tb__strdup(key.text), .data = tb__malloc(nbytes + 1, 1), .nbytes = nbytes};
    tb_status status = note.key && note.data && tb__vec_reserve(&d->notes, 1) ? TB_OK : TB_NO_MEMORY;
    if (status == TB_OK)
        status = write_note(d, inquiry, key.text, data, nbytes);
    if (status != TB_OK) {
        forget_note(&note);
        return status;
    }
    if (nbytes > 0)
        memcpy(note.data, data, nbytes);
    forget_note_at(d, key.text);
    d->notes.item[d->notes.count++] = note;
    return TB_OK;
}

tb_status tb__directory_publish(tb__directory *directory, const char *topic, const char *group, int32_t index,
                                const void *data, size_t nbytes) {
    TB_TRY(tb__name_check("topic", topic));
    TB_TRY(tb__name_check("group", group));
    if (nbytes > TB__DIRECTORY_MAX_NOTE)
        return tb__fail(TB_TOO_BIG, "a note of %zu bytes; %d are allowed", nbytes, TB__DIRECTORY_MAX_NOTE);
    tb__inquiry inquiry = begin(directory);
    tb_status status;
    do {
        TB_TRY(take_turn(directory, &inquiry, true));
        status = end_turn(directory, publish(directory, &inquiry, topic, group, index, data, nbytes));
    } while (is_worth_another_turn(&inquiry, status));
    return status;
}

static tb_status withdraw(tb__directory *d, const tb__inquiry *inquiry, const char *topic, const char *group,
                          int32_t index) {
    tb__key key = tb__key_of_note(topic, group, index);
    TB_TRY(check_note(d, group, index));
    forget_note_at(d, key.text);
    if (tb__directory_state(d) != TB_OK)
        return TB_OK; /* there is nothing to delete it from */
    TB_TRY(tb__inquiry_continue(inquiry));
    TB_TRY(tb__store_delete(d->store, key.text));
    return look_within(d, inquiry);
}

tb_status tb__directory_withdraw(tb__directory *directory, const char *topic, const char *group, int32_t index) {
    TB_TRY(tb__name_check("topic", topic));
    TB_TRY(tb__name_check("group", group));
    tb__inquiry inquiry = begin(directory);
    tb_status status;
    do {
        TB_TRY(take_turn(directory, &inquiry, false));
        status = end_turn(directory, withdraw(directory, &inquiry, topic, group, index));
    } while (is_worth_another_turn(&inquiry, status));
    return status;
}

tb_status tb__directory_notes(tb__directory *directory, const char *topic, tb__notes *out) {
    TB_TRY(tb__name_check("topic", topic));
    pthread_mutex_lock(&directory->lock);
    tb_status status = tb__view_notes(directory->view, topic, out);
    pthread_mutex_unlock(&directory->lock);
    return status;
}

tb_status tb__directory_state(tb__directory *directory) {
    pthread_mutex_lock(&directory->lock);
    tb_status state = directory->state;
    if (state != TB_OK)
        tb__set_detail("%s", directory->why);
    pthread_mutex_unlock(&directory->lock);
    return state;
}

bool tb__directory_is_connected(tb__directory *directory) {
    return tb__directory_state(directory) == TB_OK;
}
