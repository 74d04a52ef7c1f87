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
#include <unistd.h>

/* Following sleeps until something changes or the connection ends; the longest round is only there to be finite. */
enum { ROUND_MS = 60000, RETRY_MS = 100, REOPEN_MS = 10 };

typedef struct own_seat {
    char group[TB__DIRECTORY_MAX_NAME + 1];
    int32_t index, size;
} own_seat;

struct tb__directory {
    tb__store *store;
    tb__store_server *server; /* NULL: somebody else serves */
    tb__directory_opts opts;  /* without the token */
    tb__seat self;            /* what all seats have in common */
    pid_t owner;
    pthread_t follower;

    /* These belong to whoever has the turn. */
    TB_VEC(own_seat) seats;
    uint8_t contact[TB__DIRECTORY_MAX_CONTACT];

    pthread_mutex_t lock; /* for all that follows */
    pthread_cond_t freed; /* the turn is free, or the directory is closing */
    bool is_taken;        /* the turn: one call at a time changes what this process says */
    bool is_closing;
    bool is_lost;
    char why[512];
    tb__view *view;
};

static void note_loss(tb__directory *d) {
    pthread_mutex_lock(&d->lock);
    if (!d->is_lost)
        snprintf(d->why, sizeof d->why, "%s", tb_error_detail());
    d->is_lost = true;
    pthread_mutex_unlock(&d->lock);
}

static uint64_t viewed_revision(tb__directory *d) {
    pthread_mutex_lock(&d->lock);
    uint64_t revision = d->view ? tb__view_revision(d->view) : 0;
    pthread_mutex_unlock(&d->lock);
    return revision;
}

/* Looks at the store. Afterwards the view is at least as new as the call. */
static tb_status look(tb__directory *d) {
    tb__store_entries entries;
    tb__view *view;
    TB_TRY(tb__store_list(d->store, TB__NOW, &entries));
    TB_TRY(tb__view_create(&entries, viewed_revision(d), &view));
    pthread_mutex_lock(&d->lock);
    if (!d->view || tb__view_revision(view) > tb__view_revision(d->view)) {
        tb__view *before = d->view;
        d->view = view;
        view = before;
    }
    pthread_mutex_unlock(&d->lock);
    tb__view_destroy(view);
    return TB_OK;
}

/* True if it is time to end. */
static bool pause_following(tb__directory *d) {
    struct timespec until = tb__time_of_ms(tb__now_ms() + RETRY_MS);
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

static void *follow(void *arg) {
    tb__directory *d = arg;
    uint64_t told = viewed_revision(d), revision = 0;
    bool has_warned = false;
    while (!is_closing(d)) {
        tb_status status = tb__store_wait_change(d->store, TB__NOW, told, ROUND_MS, &revision);
        if (status == TB_TIMEOUT)
            continue;
        /* A call of this process may have been here already. */
        if (status == TB_OK && viewed_revision(d) < revision)
            status = look(d);
        if (status == TB_LOST) {
            note_loss(d);
            if (!is_closing(d))
                tell(d);
            break;
        }
        if (status == TB_OK) {
            told = viewed_revision(d);
            has_warned = false;
            tell(d);
            continue;
        }
        if (!has_warned)
            tb__log(TB_LOG_WARN, "directory: the view of the bus is old: %s", tb_error_detail());
        has_warned = true;
        if (pause_following(d))
            break;
    }
    return NULL;
}

static tb_status take_turn_within(tb__directory *d, int timeout_ms, tb__inquiry *inquiry) {
    *inquiry = (tb__inquiry){.store = d->store, .deadline_ms = tb__now_ms() + timeout_ms, .timeout_ms = timeout_ms};
    struct timespec until = tb__time_of_ms(inquiry->deadline_ms + 1);
    bool is_late = false;
    pthread_mutex_lock(&d->lock);
    while (d->is_taken && !is_late)
        is_late = pthread_cond_timedwait(&d->freed, &d->lock, &until) == ETIMEDOUT;
    bool is_mine = !d->is_taken;
    if (is_mine)
        d->is_taken = true;
    pthread_mutex_unlock(&d->lock);
    return is_mine ? TB_OK : tb__fail(TB_TIMEOUT, "another thread's call has not ended within %d ms", timeout_ms);
}

static tb_status take_turn(tb__directory *d, tb__inquiry *inquiry) {
    return take_turn_within(d, d->opts.timeout_ms, inquiry);
}

/* Its value is `status`. */
static tb_status end_turn(tb__directory *d, tb_status status) {
    tb__store_set_timeout(d->store, d->opts.timeout_ms);
    if (status == TB_LOST)
        note_loss(d);
    pthread_mutex_lock(&d->lock);
    d->is_taken = false;
    pthread_cond_broadcast(&d->freed);
    pthread_mutex_unlock(&d->lock);
    return status;
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
    return look(d);
}

/* Once the seat is claimed: the rank, for the first one, and what others see. */
static tb_status settle(tb__directory *d, const tb__inquiry *inquiry, const own_seat *own, const tb__seat *claim) {
    if (d->self.rank == TB_NO_RANK)
        TB_TRY(tb__rank_claim(inquiry, own->group, own->index, claim, &d->self.rank, &d->self.incarnation));
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
    TB_TRY(tb__seat_claim(inquiry, group, index, &claim));
    tb_status status = settle(d, inquiry, &own, &claim);
    if (status != TB_OK)
        return tb__seat_give_up(inquiry, group, index, status);
    d->seats.item[d->seats.count++] = own;
    return TB_OK;
}

/* The threads are gone, or were never there. */
static void destroy(tb__directory *d) {
    tb__store_close(d->store);
    tb__store_server_stop(d->server);
    tb__view_destroy(d->view);
    pthread_cond_destroy(&d->freed);
    pthread_mutex_destroy(&d->lock);
    free(d->seats.item);
    free(d);
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
    tb_status status = tb__vec_reserve(&d->seats, 1) ? TB_OK : TB_NO_MEMORY;
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
    pthread_mutex_unlock(&d->lock);
    tb__store_hang_up(d->store);
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
    tb__inquiry inquiry;
    TB_TRY(check_seat(group, index, size));
    TB_TRY(take_turn(directory, &inquiry));
    return end_turn(directory, enter(directory, &inquiry, group, index, size));
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
    tb__inquiry inquiry;
    if (nbytes > TB__DIRECTORY_MAX_CONTACT)
        return tb__fail(TB_TOO_BIG, "a contact of %zu bytes; %d are allowed", nbytes, TB__DIRECTORY_MAX_CONTACT);
    TB_TRY(take_turn(directory, &inquiry));
    return end_turn(directory, announce(directory, &inquiry, contact, nbytes));
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

static tb_status publish(tb__directory *d, const tb__inquiry *inquiry, const char *topic, const char *group,
                         int32_t index, const void *data, size_t nbytes) {
    tb__key key = tb__key_of_note(topic, group, index);
    TB_TRY(check_note(d, group, index));
    TB_TRY(tb__inquiry_continue(inquiry));
    TB_TRY(tb__store_set(d->store, key.text, data, nbytes, TB__STORE_EPHEMERAL, NULL));
    tb_status status = look_within(d, inquiry);
    if (status != TB_TOO_BIG)
        return status;
    /* All notes together are more than can be listed, and nobody could see anything any more. */
    char why[512];
    snprintf(why, sizeof why, "%s", tb_error_detail());
    (void)tb__store_delete(d->store, key.text);
    return tb__fail(TB_TOO_BIG, "%s", why);
}

tb_status tb__directory_publish(tb__directory *directory, const char *topic, const char *group, int32_t index,
                                const void *data, size_t nbytes) {
    tb__inquiry inquiry;
    TB_TRY(tb__name_check("topic", topic));
    TB_TRY(tb__name_check("group", group));
    if (nbytes > TB__DIRECTORY_MAX_NOTE)
        return tb__fail(TB_TOO_BIG, "a note of %zu bytes; %d are allowed", nbytes, TB__DIRECTORY_MAX_NOTE);
    TB_TRY(take_turn(directory, &inquiry));
    return end_turn(directory, publish(directory, &inquiry, topic, group, index, data, nbytes));
}

static tb_status withdraw(tb__directory *d, const tb__inquiry *inquiry, const char *topic, const char *group,
                          int32_t index) {
    TB_TRY(check_note(d, group, index));
    TB_TRY(tb__inquiry_continue(inquiry));
    TB_TRY(tb__store_delete(d->store, tb__key_of_note(topic, group, index).text));
    return look_within(d, inquiry);
}

tb_status tb__directory_withdraw(tb__directory *directory, const char *topic, const char *group, int32_t index) {
    tb__inquiry inquiry;
    TB_TRY(tb__name_check("topic", topic));
    TB_TRY(tb__name_check("group", group));
    TB_TRY(take_turn(directory, &inquiry));
    return end_turn(directory, withdraw(directory, &inquiry, topic, group, index));
}

tb_status tb__directory_notes(tb__directory *directory, const char *topic, tb__notes *out) {
    TB_TRY(tb__name_check("topic", topic));
    pthread_mutex_lock(&directory->lock);
    tb_status status = tb__view_notes(directory->view, topic, out);
    pthread_mutex_unlock(&directory->lock);
    return status;
}

static tb_status decide(const tb__directory *d, const tb__inquiry *inquiry, const char *key, const char *answer,
                        char **out) {
    tb__store_value present;
    TB_TRY(tb__inquiry_continue(inquiry));
    tb_status status =
        tb__store_compare_and_set(d->store, key, 0, answer, strlen(answer), TB__STORE_PERMANENT, NULL, &present);
    if (status == TB_CONFLICT) {
        *out = present.data ? tb__strdup(present.data) : NULL;
        tb__store_value_fini(&present);
        return *out ? TB_OK : tb__fail(TB_NO_MEMORY, "no memory for what was decided");
    }
    TB_TRY(status);
    *out = tb__strdup(answer);
    return *out ? TB_OK : TB_NO_MEMORY;
}

tb_status tb__directory_decide(tb__directory *directory, const char *question, const char *answer, int timeout_ms,
                               char **out) {
    tb__inquiry inquiry;
    tb__key key = {0};
    TB_TRY(tb__key_of_decision(question, &key));
    TB_TRY(take_turn_within(directory, timeout_ms, &inquiry));
    return end_turn(directory, decide(directory, &inquiry, key.text, answer, out));
}

static tb_status forget(const tb__directory *d, const tb__inquiry *inquiry, const char *key) {
    TB_TRY(tb__inquiry_continue(inquiry));
    return tb__store_delete(d->store, key);
}

tb_status tb__directory_forget(tb__directory *directory, const char *question, int timeout_ms) {
    tb__inquiry inquiry;
    tb__key key = {0};
    TB_TRY(tb__key_of_decision(question, &key));
    TB_TRY(take_turn_within(directory, timeout_ms, &inquiry));
    return end_turn(directory, forget(directory, &inquiry, key.text));
}

bool tb__directory_is_connected(tb__directory *directory) {
    pthread_mutex_lock(&directory->lock);
    bool is_lost = directory->is_lost;
    if (is_lost)
        tb__set_detail("%s", directory->why);
    pthread_mutex_unlock(&directory->lock);
    return !is_lost;
}
