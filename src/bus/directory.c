/* The directory: this process's seats in the store, and the calls that use the store, one at a time.
 *
 * A thread that has listed a newer state replaces the view as a whole, under the lock. A call that changes something
 * lists afterwards, so that it sees its own change, whatever the following thread is doing. */
#include "bus/directory_inner.h"

#include "base/int.h"

#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <string.h>
#include <sys/random.h>

enum { REOPEN_MS = 10, LOOK_AGAIN_MS = 50 };

/* With the lock held: why a call could not begin by its deadline. */
static tb_status fail_begin_call(const tb__directory *d, const tb__store_deadline *deadline) {
    if (d->state == TB_CONFLICT)
        return tb__fail(TB_CONFLICT, "the store is lost for good: %s", d->why);
    if (d->state == TB_LOST)
        return tb__fail(TB_LOST, "the store is lost: %s", d->why);
    return tb__fail(TB_TIMEOUT, "%s: nothing within %d ms: another call has had no answer from it", d->url,
                    deadline->timeout_ms);
}

/* The following thread does not wait for the store to come back: only it can bring the store back. */
tb_status tb__directory_begin_call(tb__directory *d, tb__store_deadline *deadline, bool needs_store) {
    struct timespec until = tb__time_of_ms(deadline->deadline_ms + 1);
    tb_status status = TB_OK;
    bool is_late = false;
    pthread_mutex_lock(&d->lock);
    while (!is_late && !d->is_closing &&
           (d->is_call_active || (needs_store && !tb__directory_is_follower() && d->state == TB_LOST)))
        is_late = pthread_cond_timedwait(&d->freed, &d->lock, &until) == ETIMEDOUT;
    if (d->is_closing)
        status = tb__fail(TB_LOST, "the directory is being closed");
    else if (d->is_call_active || (needs_store && d->state != TB_OK))
        status = fail_begin_call(d, deadline);
    else
        d->is_call_active = true;
    deadline->store = d->store;
    pthread_mutex_unlock(&d->lock);
    return status;
}

void tb__directory_set_silent(tb__directory *d) {
    pthread_mutex_lock(&d->lock);
    d->is_silent = true;
    pthread_mutex_unlock(&d->lock);
}

tb_status tb__directory_end_call(tb__directory *d, tb_status status) {
    tb__store_set_timeout(d->store, d->opts.timeout_ms);
    if (status == TB_LOST)
        tb__directory_set_state(d, TB_LOST);
    pthread_mutex_lock(&d->lock);
    d->is_silent |= status == TB_TIMEOUT;
    d->is_call_active = false;
    pthread_cond_broadcast(&d->freed);
    pthread_mutex_unlock(&d->lock);
    return status;
}

bool tb__directory_should_retry(const tb__store_deadline *deadline, tb_status status) {
    return status == TB_LOST && !tb__directory_is_follower() && tb__ms_until(deadline->deadline_ms) > 0;
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

static tb_status write_seat(const tb__directory *d, const tb__store_deadline *deadline, const tb__own_seat *own) {
    tb__seat_bytes bytes = {0};
    tb__seat_record seat = tb__directory_seat_record(d, own->size);
    tb__seat_encode(&seat, &bytes);
    TB_TRY(tb__store_deadline_apply(deadline));
    return tb__store_set(d->store, tb__key_of_seat(own->group, own->index).text, bytes.data, bytes.nbytes,
                         TB__STORE_EPHEMERAL, NULL);
}

tb_status tb__directory_refresh_within(tb__directory *d, const tb__store_deadline *deadline) {
    TB_TRY(tb__store_deadline_apply(deadline));
    return tb__directory_refresh(d, false);
}

/* After a seat was claimed: claims a rank, if this is the first seat, and makes the seat visible. */
static tb_status publish_claimed_seat(tb__directory *d, const tb__store_deadline *deadline, const tb__own_seat *own) {
    if (d->self.rank == TB_NO_RANK) {
        TB_TRY(tb__rank_claim(deadline, own, d->holder, &d->claimed));
        d->self.rank = d->claimed.rank;
        d->self.incarnation = d->claimed.incarnation;
    }
    if (d->self.is_announced)
        TB_TRY(write_seat(d, deadline, own));
    return d->must_follow || d->self.is_announced ? tb__directory_refresh_within(d, deadline) : TB_OK;
}

/* The size of the first seat's group, when only hints are followed: the more ranks have the group's first rank to
 * compare with, the fewer list the groups. */
static tb_status check_size_late(tb__directory *d, const tb__store_deadline *deadline) {
    const tb__own_seat *own = &d->seats.item[0];
    tb__seat_record seat = tb__directory_seat_record(d, own->size);
    tb__store_entries seats = {0};
    tb__store_value_fini(&d->lead);
    if (own->index == 0)
        return tb__seat_check_size(deadline, own, &seat, NULL, NULL);
    TB_TRY(tb__seat_check_size(deadline, own, &seat, &d->lead, &seats));
    return d->lead.data ? TB_OK : tb__directory_replace_view(d, &seats, false);
}

/* `seats` must have room for one more. */
static tb_status claim_seat(tb__directory *d, const tb__store_deadline *deadline, const char *group, int32_t index,
                            int32_t size) {
    tb__own_seat own = {.index = index, .size = size};
    memcpy(own.group, group, strlen(group) + 1);
    tb__seat_record claim = tb__directory_seat_record(d, size);
    claim.is_announced = false;
    claim.contact_nbytes = 0;
    TB_TRY(tb__seat_claim(deadline, group, index, &claim, false, &own.revision));
    if (d->seats.count > 0 || !d->opts.only_hints)
        TB_TRY(tb__seat_check_size(deadline, &own, &claim, NULL, NULL));
    if (d->seats.count == 0) /* later, the thread that follows the store has it */
        d->told = own.revision;
    tb_status status = publish_claimed_seat(d, deadline, &own);
    if (status != TB_OK)
        return tb__seat_give_up(deadline, group, index, status);
    d->seats.item[d->seats.count++] = own;
    return TB_OK;
}

/* The threads have ended, or were never started. */
static void free_directory(tb__directory *d) {
    tb__store_close(d->store);
    tb__store_server_stop(d->server);
    tb__directory_drop_summaries(d, true);
    free(d->summaries.item);
    tb__directory_view_unref(d->view);
    pthread_cond_destroy(&d->freed);
    pthread_mutex_destroy(&d->lock);
    free(d->seats.item);
    tb__store_value_fini(&d->lead);
    tb__directory_free_notes(d);
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
    d->must_follow = !opts->only_hints;
    d->self = (tb__seat_record){.rank = TB_NO_RANK, .pid = getpid()};
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
        status = tb__directory_view_create(&(tb__store_entries){0}, 0, &d->view);
    if (status == TB_OK)
        status = tb__store_secret_make(&d->secret);
    if (status == TB_OK)
        status =
            tb__store_open_or_serve(url, opts->token, &d->secret, tb__ms_until(deadline_ms), &d->store, &d->server);
    tb__store_deadline deadline = {.store = d->store, .deadline_ms = deadline_ms, .timeout_ms = opts->timeout_ms};
    if (status == TB_OK)
        status = tb__directory_identify_store(d, &deadline);
    if (status == TB_OK)
        status = claim_seat(d, &deadline, group, index, size);
    if (status == TB_OK) {
        tb__store_set_timeout(d->store, opts->timeout_ms);
        if (d->must_follow)
            d->told = tb__directory_view_revision(d->view);
        status = tb__start_thread(&d->follower, "tb-directory", tb__directory_follow, d);
    }
    if (status != TB_OK) {
        free_directory(d);
        return status;
    }
    *out = d;
    return TB_OK;
}

tb_status tb__directory_open(const char *url, const char *group, int32_t index, int32_t size,
                             const tb__directory_opts *opts, tb__directory **out) {
    TB_TRY(check_seat(group, index, size));
    if (opts->timeout_ms < 1)
        return tb__fail(TB_INVALID, "a timeout of %d ms", opts->timeout_ms);
    int64_t deadline_ms = tb__now_ms() + opts->timeout_ms;
    for (;;) {
        tb_status status = open_until(url, group, index, size, opts, deadline_ms, out);
        /* The process that serves the store may end just then; the next one that connects serves, perhaps this one. */
        if (status != TB_LOST || tb__ms_until(deadline_ms) <= REOPEN_MS)
            return status;
        tb__sleep_ms(REOPEN_MS);
    }
}

void tb__directory_close(tb__directory *directory) {
    tb__directory *d = directory;
    /* A forked child has neither the threads nor the connection, and the locks may be held. */
    if (!d || d->owner != getpid())
        return;
    pthread_mutex_lock(&d->lock);
    d->is_closing = true;
    pthread_cond_broadcast(&d->freed);
    tb__store_hang_up(d->store);
    pthread_mutex_unlock(&d->lock);
    pthread_join(d->follower, NULL);
    free_directory(d);
}

int32_t tb__directory_rank(const tb__directory *directory) {
    return directory->self.rank;
}

uint64_t tb__directory_incarnation(const tb__directory *directory) {
    return directory->self.incarnation;
}

const tb__own_seat *tb__directory_find_seat(const tb__directory *d, const char *group) {
    for (size_t i = 0; i < d->seats.count; i++) {
        if (strcmp(d->seats.item[i].group, group) == 0)
            return &d->seats.item[i];
    }
    return NULL;
}

static tb_status enter_group(tb__directory *d, const tb__store_deadline *deadline, const char *group, int32_t index,
                             int32_t size) {
    const tb__own_seat *own = tb__directory_find_seat(d, group);
    if (own)
        return tb__fail(TB_CONFLICT, "this process already has seat %" PRId32 " of group '%s'", own->index, group);
    if (!tb__vec_reserve(&d->seats, 1))
        return TB_NO_MEMORY;
    return claim_seat(d, deadline, group, index, size);
}

tb_status tb__directory_enter(tb__directory *directory, const char *group, int32_t index, int32_t size) {
    TB_TRY(check_seat(group, index, size));
    tb__store_deadline deadline = tb__directory_deadline(directory->opts.timeout_ms);
    tb_status status;
    do {
        TB_TRY(tb__directory_begin_call(directory, &deadline, true));
        status = tb__directory_end_call(directory, enter_group(directory, &deadline, group, index, size));
    } while (tb__directory_should_retry(&deadline, status));
    return status;
}

static tb_status write_contact(tb__directory *d, const tb__store_deadline *deadline, const void *contact,
                               size_t nbytes) {
    if (d->opts.only_hints && !d->self.is_announced)
        TB_TRY(check_size_late(d, deadline));
    if (nbytes > 0)
        memcpy(d->contact, contact, nbytes);
    d->self.contact = d->contact;
    d->self.contact_nbytes = nbytes;
    d->self.is_announced = true;
    for (size_t i = 0; i < d->seats.count; i++)
        TB_TRY(write_seat(d, deadline, &d->seats.item[i]));
    return d->seats.item[0].index > 0 && !tb__directory_reads(d, &d->must_follow)
               ? TB_OK
               : tb__directory_refresh_within(d, deadline);
}

tb_status tb__directory_announce(tb__directory *directory, const void *contact, size_t nbytes, int timeout_ms) {
    if (nbytes > TB__DIRECTORY_MAX_CONTACT)
        return tb__fail(TB_TOO_BIG, "a contact of %zu bytes; %d are allowed", nbytes, TB__DIRECTORY_MAX_CONTACT);
    tb__store_deadline deadline = tb__directory_deadline(timeout_ms);
    tb_status status;
    do {
        TB_TRY(tb__directory_begin_call(directory, &deadline, true));
        status = tb__directory_end_call(directory, write_contact(directory, &deadline, contact, nbytes));
    } while (tb__directory_should_retry(&deadline, status));
    return status;
}

tb_status tb__directory_roster(tb__directory *directory, const char *group, tb__roster *out) {
    TB_TRY(tb__name_check("group", group));
    pthread_mutex_lock(&directory->lock);
    tb_status status = tb__directory_view_roster(tb__directory_view_of(directory, group, NULL), group, out);
    pthread_mutex_unlock(&directory->lock);
    return status;
}

/* The first rank of the group, if this process has relied on it when it joined, and has not looked at all others. */
static tb_status check_lead(const tb__directory *d,
                            tb_status (*check)(const void *contact, size_t nbytes, const char *label)) {
    char label[TB__DIRECTORY_MAX_NAME + 40];
    tb__seat_record lead;
    if (!tb__seat_decode(&d->lead, 0, &lead))
        return TB_OK;
    snprintf(label, sizeof label, "rank %" PRId32 " (%s 0)", lead.rank, d->seats.item[0].group);
    return check(lead.contact, lead.contact_nbytes, label);
}

tb_status tb__directory_check_members(tb__directory *directory, int64_t deadline_ms,
                                      tb_status (*check)(const void *contact, size_t nbytes, const char *label)) {
    int64_t begun_ms = tb__now_ms();
    for (;;) {
        pthread_mutex_lock(&directory->lock);
        tb_status status = tb__directory_view_check_members(directory->view, check);
        if (status == TB_OK && directory->lead.data)
            status = check_lead(directory, check);
        int64_t until_ms = tb__min64(begun_ms + tb__store_linger_ms(directory->store), deadline_ms);
        pthread_mutex_unlock(&directory->lock);
        if (status == TB_OK || tb__ms_until(until_ms) == 0)
            return status;
        tb__sleep_ms(LOOK_AGAIN_MS);
    }
}

void tb__directory_list_groups(tb__directory *directory, tb__text *out) {
    pthread_mutex_lock(&directory->lock);
    tb__directory_view_list_groups(directory->view, out);
    pthread_mutex_unlock(&directory->lock);
}

int32_t tb__directory_count_contacts(tb__directory *directory, const void *prefix, size_t nbytes) {
    pthread_mutex_lock(&directory->lock);
    int32_t count = tb__directory_view_count_contacts(directory->view, prefix, nbytes);
    for (size_t i = 0; i < directory->summaries.count; i++) {
        int32_t n = tb__directory_view_count_contacts(directory->summaries.item[i].view, prefix, nbytes);
        count = n > count ? n : count;
    }
    pthread_mutex_unlock(&directory->lock);
    return count;
}

static tb_status fail_other_store(void) {
    return tb__fail(TB_IN_DOUBT, "the store that would know has been lost, and another one is in its place");
}

/* In one transaction with the check of the mark: the store may have been emptied since it was identified. */
static tb_status write_decision(const tb__directory *d, const tb__store_deadline *deadline, const char *key,
                                const char *answer, char **out) {
    tb__store_value present;
    TB_TRY(tb__store_deadline_apply(deadline));
    tb_status status = tb__store_create_guarded(d->store, "mark", d->mark, key, answer, strlen(answer), &present);
    if (status == TB_REFUSED)
        return fail_other_store();
    if (status == TB_CONFLICT) {
        *out = present.data ? tb__strdup(present.data) : NULL;
        tb__store_value_fini(&present);
        return *out ? TB_OK : tb__fail(TB_NO_MEMORY, "no memory for what was decided");
    }
    TB_TRY(status);
    *out = tb__strdup(answer);
    return *out ? TB_OK : TB_NO_MEMORY;
}

tb_status tb__directory_decide(tb__directory *directory, uint64_t store_number, const char *question,
                               const char *answer, int timeout_ms, char **out) {
    tb__store_deadline deadline = tb__directory_deadline(timeout_ms);
    tb__key key = {0};
    TB_TRY(tb__key_of_decision(question, &key));
    TB_TRY(tb__directory_begin_call(directory, &deadline, true));
    if (tb__directory_store_number(directory) != store_number)
        return tb__directory_end_call(directory, fail_other_store());
    return tb__directory_end_call(directory, write_decision(directory, &deadline, key.text, answer, out));
}

static tb_status delete_decision(const tb__directory *d, const tb__store_deadline *deadline, const char *key) {
    TB_TRY(tb__store_deadline_apply(deadline));
    return tb__store_delete(d->store, key);
}

tb_status tb__directory_forget(tb__directory *directory, const char *question, int timeout_ms) {
    tb__store_deadline deadline = tb__directory_deadline(timeout_ms);
    tb__key key = {0};
    TB_TRY(tb__key_of_decision(question, &key));
    TB_TRY(tb__directory_begin_call(directory, &deadline, true));
    return tb__directory_end_call(directory, delete_decision(directory, &deadline, key.text));
}

bool tb__directory_reads(tb__directory *d, const bool *flag) {
    pthread_mutex_lock(&d->lock);
    bool is_set = *flag;
    pthread_mutex_unlock(&d->lock);
    return is_set;
}

tb_status tb__directory_follow_all(tb__directory *directory, int timeout_ms) {
    tb__directory *d = directory;
    tb__store_deadline deadline = tb__directory_deadline(timeout_ms);
    pthread_mutex_lock(&d->lock);
    bool is_following = d->must_follow;
    d->must_follow = true;
    while (!d->is_following_all && !d->is_closing && d->state == TB_OK && tb__ms_until(deadline.deadline_ms) > 0) {
        struct timespec until = tb__time_of_ms(tb__now_ms() + REOPEN_MS);
        tb__store_interrupt(d->store);
        pthread_cond_timedwait(&d->freed, &d->lock, &until);
    }
    pthread_mutex_unlock(&d->lock);
    if (is_following)
        return TB_OK;
    TB_TRY(tb__directory_begin_call(d, &deadline, true));
    return tb__directory_end_call(d, tb__directory_refresh_within(d, &deadline));
}

static tb_status write_hint(tb__directory *d, const tb__store_deadline *deadline, const char *pair,
                            const char *const groups[2], uint64_t state) {
    char hint[TB__HINT_TEXT];
    tb__pack summary = {0};
    tb__hint_format(state, hint);
    pthread_mutex_lock(&d->lock);
    tb__summary_pack(&summary, tb__directory_view_entries(d->view), pair, groups, state);
    pthread_mutex_unlock(&d->lock);
    tb_status status = summary.failed ? TB_NO_MEMORY : tb__store_deadline_apply(deadline);
    if (status == TB_OK)
        status = tb__store_set(d->store, tb__key_of_summary(pair, groups[0]).text, summary.data, summary.count,
                               TB__STORE_EPHEMERAL, NULL);
    tb__pack_fini(&summary);
    TB_TRY(status);
    TB_TRY(tb__store_deadline_apply(deadline));
    return tb__store_set(d->store, tb__key_of_hint(pair, groups[0]).text, hint, strlen(hint), TB__STORE_EPHEMERAL,
                         NULL);
}

tb_status tb__directory_hint(tb__directory *directory, const char *pair, const char *const groups[2], uint64_t state,
                             int timeout_ms) {
    tb__store_deadline deadline = tb__directory_deadline(timeout_ms);
    TB_TRY(tb__directory_begin_call(directory, &deadline, true));
    return tb__directory_end_call(directory, write_hint(directory, &deadline, pair, groups, state));
}

/* If another call is active, that one uses the store. */
void tb__directory_probe_store(tb__directory *directory, int timeout_ms) {
    tb__store_value mark = {0};
    if (!tb__directory_is_connected(directory))
        return;
    tb__store_deadline deadline = tb__directory_deadline(timeout_ms);
    if (tb__directory_begin_call(directory, &deadline, true) != TB_OK)
        return;
    tb_status status = tb__store_deadline_apply(&deadline);
    if (status == TB_OK)
        status = tb__store_get(deadline.store, "mark", &mark);
    if (status == TB_OK)
        tb__store_value_fini(&mark);
    tb__directory_end_call(directory, status);
}

void tb__directory_report(tb__directory *d) {
    if (!d->opts.report)
        return;
    pthread_mutex_lock(&d->lock);
    if (!d->is_report_due && d->state == TB_OK && !d->is_closing)
        tb__store_interrupt(d->store);
    d->is_report_due = true;
    pthread_mutex_unlock(&d->lock);
}

tb_status tb__directory_state(tb__directory *directory) {
    pthread_mutex_lock(&directory->lock);
    tb_status state = directory->state;
    if (state != TB_OK)
        tb__set_detail("%s", directory->why);
    pthread_mutex_unlock(&directory->lock);
    return state;
}
