/* The thread that follows the store: keeps the view up to date, and rejoins a store that was lost. */
#include "bus/directory_inner.h"

#include "base/index.h"
#include "base/int.h"
#include "base/log.h"

#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <string.h>
#include <sys/random.h>

/* ROUND_MS bounds a wait that otherwise ends with a change, or with the connection. There is no notification when a
 * lost store is back, so the delays between attempts to reach it grow. */
enum {
    ROUND_MS = 60000,
    REPORTER_ROUND_MS = 5000, /* the same where a report may be due that just missed the wait */
    REPORT_MS = 1000,         /* from one report to the next, at least */
    SILENT_MS = 1000,         /* the same while the store does not answer */
    RETRY_MS = 100,
    FIRST_DELAY_MS = 10,
    LONGEST_DELAY_MS = 2000,
    REACH_MS = 2000,
    PATIENCE_MS = 500,
    COALESCE_MS = 50 /* from one look at the store to the next, at least */
};

static _Thread_local bool is_following;

bool tb__directory_is_follower(void) {
    return is_following;
}

void tb__directory_set_state(tb__directory *d, tb_status state) {
    pthread_mutex_lock(&d->lock);
    bool is_new = d->state != state, is_closing = d->is_closing;
    if (is_new && state != TB_OK)
        snprintf(d->why, sizeof d->why, "%s", tb_error_detail());
    d->state = state;
    pthread_cond_broadcast(&d->freed);
    pthread_mutex_unlock(&d->lock);
    if (!is_new || is_closing)
        return;
    /* Processes that end together lose the store, too: a warning is logged only if the loss lasts. */
    if (state == TB_OK)
        tb__log(d->has_warned ? TB_LOG_WARN : TB_LOG_INFO, "directory: the store is back");
    else
        tb__log(state == TB_CONFLICT ? TB_LOG_WARN : TB_LOG_INFO, "directory: the store is lost%s: %s",
                state == TB_CONFLICT ? " for good" : "", tb_error_detail());
    if (state == TB_OK)
        d->has_warned = false;
}

tb_status tb__directory_identify_store(tb__directory *d, const tb__store_deadline *deadline) {
    uint64_t number[2];
    char mark[33] = "";
    tb__store_value present = {0};
    if (getrandom(number, sizeof number, 0) != (ssize_t)sizeof number)
        return tb__fail(TB_IO, "getrandom: %s", strerror(errno));
    snprintf(mark, sizeof mark, "%016" PRIx64 "%016" PRIx64, number[0], number[1]);
    TB_TRY(tb__store_deadline_apply(deadline));
    tb_status status =
        tb__store_compare_and_set(deadline->store, "mark", 0, mark, strlen(mark), TB__STORE_ONCE, NULL, &present);
    if (status == TB_CONFLICT) {
        snprintf(mark, sizeof mark, "%s", present.data ? (const char *)present.data : "");
        tb__store_value_fini(&present);
    } else {
        TB_TRY(status);
    }
    pthread_mutex_lock(&d->lock);
    snprintf(d->mark, sizeof d->mark, "%s", mark);
    d->store_number = tb__hash_string(0, mark);
    pthread_mutex_unlock(&d->lock);
    return TB_OK;
}

uint64_t tb__directory_store_number(tb__directory *d) {
    pthread_mutex_lock(&d->lock);
    uint64_t number = d->store_number;
    pthread_mutex_unlock(&d->lock);
    return number;
}

static uint64_t viewed_revision(tb__directory *d) {
    pthread_mutex_lock(&d->lock);
    uint64_t revision = d->view ? tb__directory_view_revision(d->view) : 0;
    pthread_mutex_unlock(&d->lock);
    return revision;
}

tb_status tb__directory_refresh(tb__directory *d, bool is_other_store) {
    tb__store_entries entries;
    TB_TRY(tb__store_list(d->store, TB__NOW, &entries));
    return tb__directory_replace_view(d, &entries, is_other_store);
}

tb_status tb__directory_replace_view(tb__directory *d, tb__store_entries *entries, bool is_other_store) {
    tb__directory_view *view;
    TB_TRY(tb__directory_view_create(entries, is_other_store ? 0 : viewed_revision(d), &view));
    pthread_mutex_lock(&d->lock);
    if (!d->view || is_other_store || tb__directory_view_revision(view) > tb__directory_view_revision(d->view)) {
        tb__directory_view *before = d->view;
        d->view = view;
        view = before;
        tb__directory_drop_summaries(d, is_other_store);
    }
    d->is_silent = false;
    pthread_mutex_unlock(&d->lock);
    tb__directory_view_unref(view);
    return TB_OK;
}

/* True: the directory is closing. */
static bool sleep_unless_closing(tb__directory *d, int ms) {
    struct timespec until = tb__time_of_ms(tb__now_ms() + ms);
    pthread_mutex_lock(&d->lock);
    while (!d->is_closing && pthread_cond_timedwait(&d->freed, &d->lock, &until) != ETIMEDOUT)
        ;
    bool is_closing = d->is_closing;
    pthread_mutex_unlock(&d->lock);
    return is_closing;
}

/* A call of this process may refresh the view while the callback runs, which may not see that: it is called again. */
static void notify_changed(tb__directory *d) {
    d->told = viewed_revision(d);
    if (d->opts.changed)
        d->opts.changed(d->opts.arg);
}

tb__store_deadline tb__directory_deadline(int timeout_ms) {
    return (tb__store_deadline){.deadline_ms = tb__now_ms() + timeout_ms, .timeout_ms = timeout_ms};
}

tb__seat_record tb__directory_seat_record(const tb__directory *d, int32_t size) {
    tb__seat_record seat = d->self;
    seat.size = size;
    return seat;
}

/* Writes all that this process has published again. The store may be empty, or, with etcd, still have the old keys. */
static tb_status republish_all(tb__directory *d, const tb__store_deadline *deadline) {
    for (size_t i = 0; i < d->seats.count; i++) {
        tb__own_seat *own = &d->seats.item[i];
        tb__seat_record seat = tb__directory_seat_record(d, own->size);
        TB_TRY(tb__seat_claim(deadline, own->group, own->index, &seat, true, &own->revision));
        TB_TRY(tb__seat_check_size(deadline, own, &seat, NULL, NULL));
    }
    TB_TRY(tb__directory_delete_withdrawn(d, deadline));
    for (size_t i = 0; i < d->notes.count; i++) {
        const tb__own_note *note = &d->notes.item[i];
        TB_TRY(tb__store_deadline_apply(deadline));
        TB_TRY(tb__store_set(d->store, note->key, note->data, note->nbytes, TB__STORE_EPHEMERAL, NULL));
    }
    TB_TRY(tb__store_deadline_apply(deadline));
    TB_TRY(tb__directory_refresh(d, true));
    pthread_mutex_lock(&d->lock);
    for (size_t i = 0; i < d->notes.count; i++)
        d->notes.item[i].revision = 0;
    pthread_mutex_unlock(&d->lock);
    return TB_OK;
}

/* By the active call. */
static tb_status rejoin_store(tb__directory *d) {
    tb__store *store;
    tb__store_server *server = NULL;
    TB_TRY(tb__store_try_open_or_serve(d->url, d->token, &d->secret, REACH_MS, &store, &server));
    pthread_mutex_lock(&d->lock);
    tb__store *before = d->store;
    int32_t next_rank = tb__directory_view_next_rank(d->view);
    next_rank = next_rank > d->claimed.next ? next_rank : d->claimed.next;
    d->store = store;
    if (server)
        d->server = server;
    if (d->is_closing)
        tb__store_hang_up(store);
    pthread_mutex_unlock(&d->lock);
    tb__store_close(before);
    tb__store_deadline deadline = tb__directory_deadline(d->opts.timeout_ms);
    deadline.store = store;
    TB_TRY(tb__ranks_reserve(&deadline, &d->seats.item[0], d->claimed.first,
                             next_rank > d->self.rank ? next_rank : d->self.rank + 1));
    TB_TRY(tb__directory_identify_store(d, &deadline));
    TB_TRY(tb__rank_reclaim(&deadline, d->holder, d->self.rank, d->self.incarnation));
    return republish_all(d, &deadline);
}

/* Waits for the active call, which ends soon: it has a deadline, and the connection is gone. */
static tb_status rejoin_store_exclusively(tb__directory *d) {
    pthread_mutex_lock(&d->lock);
    while (d->is_call_active)
        pthread_cond_wait(&d->freed, &d->lock);
    d->is_call_active = true;
    pthread_mutex_unlock(&d->lock);
    tb_status status = rejoin_store(d);
    tb__store_set_timeout(d->store, d->opts.timeout_ms);
    /* The state first, so that the next call sees it. */
    if (status == TB_OK || status == TB_CONFLICT)
        tb__directory_set_state(d, status);
    pthread_mutex_lock(&d->lock);
    d->is_call_active = false;
    pthread_cond_broadcast(&d->freed);
    pthread_mutex_unlock(&d->lock);
    return status;
}

/* False: the directory is closing, or another process has taken this one's rank or seat. */
static bool rejoin_until_closed(tb__directory *d) {
    int64_t lost_ms = tb__now_ms();
    unsigned seed = (unsigned)d->self.rank * 2654435761u + (unsigned)getpid();
    for (int delay_ms = FIRST_DELAY_MS;; delay_ms = delay_ms * 2 < LONGEST_DELAY_MS ? delay_ms * 2 : LONGEST_DELAY_MS) {
        tb_status status = rejoin_store_exclusively(d);
        if (status == TB_OK)
            return true;
        if (status == TB_CONFLICT) {
            tb__store_hang_up(d->store); /* releases what it has claimed again */
            return false;
        }
        if (!d->has_warned && tb__now_ms() - lost_ms > PATIENCE_MS)
            tb__log(TB_LOG_WARN, "directory: the store is lost: %s", d->why);
        d->has_warned |= tb__now_ms() - lost_ms > PATIENCE_MS;
        tb__log(TB_LOG_DEBUG, "directory: the store is not back: %s", tb_error_detail());
        /* A random delay, because many processes lose the store at once. */
        if (sleep_unless_closing(d, delay_ms / 2 + rand_r(&seed) % (delay_ms / 2 + 1)))
            return false;
    }
}

static const char *choose_prefix(tb__directory *d) {
    pthread_mutex_lock(&d->lock);
    bool is_new = d->must_follow && !d->is_following_all;
    d->is_following_all = d->must_follow;
    if (is_new)
        pthread_cond_broadcast(&d->freed);
    pthread_mutex_unlock(&d->lock);
    return d->is_following_all ? TB__NOW : TB__HINTS;
}

/* ---- Summaries -------------------------------------------------------------------------------------------------- */

tb__directory_view *tb__directory_view_of(const tb__directory *d, const char *group, const char *topic) {
    tb__directory_view *newest = d->view;
    for (size_t i = 0; i < d->summaries.count; i++) {
        const tb__summary *s = &d->summaries.item[i];
        bool has_it =
            topic ? strcmp(s->pair, topic) == 0 : strcmp(s->groups[0], group) == 0 || strcmp(s->groups[1], group) == 0;
        if (has_it && tb__directory_view_revision(s->view) > tb__directory_view_revision(newest))
            newest = s->view;
    }
    return newest;
}

void tb__directory_drop_summaries(tb__directory *d, bool are_all) {
    for (size_t i = d->summaries.count; i-- > 0;) {
        tb__summary *s = &d->summaries.item[i];
        if (!are_all && tb__directory_view_revision(s->view) > tb__directory_view_revision(d->view))
            continue;
        tb__directory_view_unref(s->view);
        *s = d->summaries.item[--d->summaries.count];
    }
}

/* Both first ranks of a pair give the same hint for the same state: one of them is enough. */
static bool is_known_hint(tb__directory *d, const tb__store_entries *hints) {
    char text[TB__HINT_TEXT];
    bool is_known = false;
    pthread_mutex_lock(&d->lock);
    for (size_t i = 0; i < d->summaries.count && hints->count == 1; i++) {
        tb__hint_format(d->summaries.item[i].state, text);
        is_known |= hints->item[0].value.data && strcmp(hints->item[0].value.data, text) == 0;
    }
    pthread_mutex_unlock(&d->lock);
    return is_known;
}

static tb_status add_summary(tb__directory *d, const tb__summary *summary) {
    pthread_mutex_lock(&d->lock);
    for (size_t i = d->summaries.count; i-- > 0;) {
        tb__summary *s = &d->summaries.item[i];
        if (strcmp(s->pair, summary->pair) != 0)
            continue;
        tb__directory_view_unref(s->view);
        *s = d->summaries.item[--d->summaries.count];
    }
    bool is_added = tb__vec_push(&d->summaries, *summary);
    pthread_mutex_unlock(&d->lock);
    if (!is_added)
        tb__directory_view_unref(summary->view);
    return is_added ? TB_OK : TB_NO_MEMORY;
}

static uint64_t summary_revision(tb__directory *d, const char *pair) {
    uint64_t revision = 0;
    pthread_mutex_lock(&d->lock);
    for (size_t i = 0; i < d->summaries.count; i++)
        revision = strcmp(d->summaries.item[i].pair, pair) == 0 ? d->summaries.item[i].revision : revision;
    pthread_mutex_unlock(&d->lock);
    return revision;
}

/* Reads the summary of a pair, unless it is known. `must_list`: it is not there, or malformed; or too long. */
static tb_status read_summary(tb__directory *d, const tb__key_parts *note, bool is_hinted, bool *must_list) {
    tb__store_value value = {0};
    tb__summary summary = {0};
    TB_TRY(tb__store_get(d->store, tb__key_of_summary(note->topic, note->group).text, &value));
    bool is_new = value.data && value.revision != summary_revision(d, note->topic);
    bool is_read = is_new && tb__summary_unpack(&value, note->topic, &summary);
    if (is_new && !is_read)
        tb__log(TB_LOG_WARN, "directory: the summary of pair '%s' by the first rank of group '%s' is malformed",
                note->topic, note->group);
    /* After a hint of the remote group's first rank, that of this group's may still come. */
    *must_list |= value.data ? is_new && !summary.view : !is_hinted;
    tb__store_value_fini(&value);
    return summary.view ? add_summary(d, &summary) : TB_OK;
}

/* The i-th note of this process; false: there are no more. */
static bool get_own_note(tb__directory *d, size_t i, tb__key_parts *out) {
    pthread_mutex_lock(&d->lock);
    bool is_there = i < d->notes.count && tb__key_split(d->notes.item[i].key, out);
    pthread_mutex_unlock(&d->lock);
    return is_there;
}

/* Of many ranks, those that are no lead list the store only if no lead passes changes on to them. */
static tb_status look_at_summaries(tb__directory *d, bool is_hinted) {
    bool must_list = false;
    tb__key_parts note;
    for (size_t i = 0; !must_list && get_own_note(d, i, &note); i++)
        TB_TRY(read_summary(d, &note, is_hinted, &must_list));
    return must_list ? tb__directory_refresh(d, false) : TB_OK;
}

/* Applies changes to the view that they follow. A call of this process may have replaced it by a newer one. */
static tb_status apply_changes(tb__directory *d, const tb__store_entries *changes, uint64_t since) {
    tb__store_entries entries;
    pthread_mutex_lock(&d->lock);
    uint64_t viewed = tb__directory_view_revision(d->view);
    tb_status status =
        viewed == since ? tb__store_apply_changes(tb__directory_view_entries(d->view), changes, &entries) : TB_OK;
    pthread_mutex_unlock(&d->lock);
    TB_TRY(status);
    return viewed == since ? tb__directory_replace_view(d, &entries, false) : TB_OK;
}

/* The changes after `since`, from the last wait. */
static tb_status look_at_changes(tb__directory *d, const tb__store_entries *changes, uint64_t since) {
    if (!d->is_following_all)
        return look_at_summaries(d, changes->count > 0);
    if (changes->must_list || viewed_revision(d) < since)
        return tb__directory_refresh(d, false);
    return apply_changes(d, changes, since);
}

/* ---- Reports ---------------------------------------------------------------------------------------------------- */

static tb_status write_report(tb__directory *d, const tb__text *report) {
    tb__store_deadline deadline = tb__directory_deadline(REACH_MS);
    tb__key key = tb__key_of_counter(TB__REPORTS, d->self.rank);
    TB_TRY(tb__directory_begin_call(d, &deadline, true));
    tb_status status = tb__store_deadline_apply(&deadline);
    if (status == TB_OK && report->count > 0)
        status = tb__store_set(d->store, key.text, report->data, report->count, TB__STORE_EPHEMERAL, NULL);
    else if (status == TB_OK)
        status = tb__store_delete(d->store, key.text);
    return tb__directory_end_call(d, status);
}

static void make_report(tb__directory *d) {
    tb__text report = {0};
    pthread_mutex_lock(&d->lock);
    d->is_report_due = false;
    pthread_mutex_unlock(&d->lock);
    d->opts.report(d->opts.arg, &report);
    uint64_t hash = report.count > 0 ? tb__hash_string(0, report.data) | 1 : 0;
    if (!report.failed && hash != d->reported && write_report(d, &report) == TB_OK)
        d->reported = hash;
    d->reported_ms = tb__now_ms();
    tb__text_fini(&report);
}

/* Writes the report if that is due, and not too soon after the last one. Returns how long to wait for changes. */
static int report_if_due(tb__directory *d) {
    if (d->opts.report && tb__directory_reads(d, &d->is_report_due) && tb__now_ms() >= d->reported_ms + REPORT_MS)
        make_report(d);
    if (tb__directory_reads(d, &d->is_report_due)) /* too soon, or again */
        return (int)tb__max64(d->reported_ms + REPORT_MS - tb__now_ms(), 1);
    return d->reported ? REPORTER_ROUND_MS : ROUND_MS;
}

/* ---- Following -------------------------------------------------------------------------------------------------- */

void *tb__directory_follow(void *directory) {
    tb__directory *d = directory;
    is_following = true;
    uint64_t seen = 0; /* the hints up to this revision */
    bool has_warned = false;
    int64_t looked_ms = 0;
    while (!tb__directory_reads(d, &d->is_closing)) {
        /* A call of this process has refreshed the view. */
        if (viewed_revision(d) > d->told) {
            notify_changed(d);
            continue;
        }
        /* Many changes come together when a job starts: they are handled together. */
        int pause_ms = (int)(looked_ms + COALESCE_MS - tb__now_ms());
        if (pause_ms > 0 && pause_ms <= COALESCE_MS && sleep_unless_closing(d, pause_ms))
            break;
        tb__store_entries changes = {0};
        const char *prefix = choose_prefix(d);
        int wait_ms = tb__directory_retry_withdrawals(d) ? SILENT_MS : report_if_due(d);
        uint64_t since = !d->is_following_all && seen > d->told ? seen : d->told;
        tb_status status = tb__store_wait_changes(d->store, prefix, since, wait_ms, &changes);
        uint64_t revision = changes.revision;
        bool is_known = status == TB_OK && !d->is_following_all && is_known_hint(d, &changes);
        bool is_idle = is_known || status == TB_TIMEOUT;
        seen = is_known ? revision : seen;
        if (status == TB_OK && !is_known && viewed_revision(d) < revision) {
            looked_ms = tb__now_ms();
            status = look_at_changes(d, &changes, since);
            seen = status == TB_OK ? revision : seen;
        }
        tb__store_entries_fini(&changes);
        if (is_idle)
            continue;
        if (status == TB_LOST) {
            tb__directory_set_state(d, TB_LOST);
            if (tb__directory_reads(d, &d->is_closing))
                break;
            notify_changed(d);
            bool is_back = rejoin_until_closed(d);
            seen = 0; /* revisions of another store */
            if (d->reported)
                tb__directory_report(d);
            d->reported = 0;
            if (tb__directory_reads(d, &d->is_closing))
                break;
            notify_changed(d);
            if (!is_back)
                break;
            status = TB_OK;
        } else if (status == TB_OK) {
            notify_changed(d);
        }
        if (status == TB_OK) {
            has_warned = false;
            continue;
        }
        if (!has_warned)
            tb__log(TB_LOG_WARN, "directory: the view of the bus is old: %s", tb_error_detail());
        has_warned = true;
        if (sleep_unless_closing(d, RETRY_MS))
            break;
    }
    return NULL;
}
