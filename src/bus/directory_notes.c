/* The notes that this process publishes.
 *
 * A withdrawn note stays in the list until the store has confirmed its deletion, so that withdrawing need not wait for
 * a store that does not answer. What is left is deleted by the thread that follows the store, or when a lost store is
 * rejoined. */
#include "bus/directory_inner.h"

#include <inttypes.h>
#include <string.h>

/* MAX_UNLISTED: longer notes are listed by who publishes them, to find out whether they are too long together. */
enum { MAX_UNLISTED = 512 };

/* To publish a note. */
typedef struct note_request {
    const char *topic, *group;
    int32_t index;
    const void *data;
    size_t nbytes;
} note_request;

void tb__directory_free_notes(tb__directory *d) {
    for (size_t i = 0; i < d->notes.count; i++) {
        free(d->notes.item[i].key);
        free(d->notes.item[i].data);
    }
    free(d->notes.item);
}

/* By the active call, or with the lock held. */
static tb__own_note *find_own_note(const tb__directory *d, const char *key) {
    for (size_t i = 0; i < d->notes.count; i++) {
        if (strcmp(d->notes.item[i].key, key) == 0)
            return &d->notes.item[i];
    }
    return NULL;
}

/* By the active call. */
static tb__own_note *add_own_note(tb__directory *d, const char *key) {
    char *copy = tb__strdup(key);
    tb__own_note *note = NULL;
    pthread_mutex_lock(&d->lock);
    if (copy && tb__vec_reserve(&d->notes, 1)) {
        note = &d->notes.item[d->notes.count++];
        *note = (tb__own_note){.key = copy};
    }
    pthread_mutex_unlock(&d->lock);
    if (!note)
        free(copy);
    return note;
}

/* By the active call. */
static void drop_note(tb__directory *d, tb__own_note *note) {
    tb__own_note gone = *note;
    pthread_mutex_lock(&d->lock);
    *note = d->notes.item[--d->notes.count];
    pthread_mutex_unlock(&d->lock);
    free(gone.key);
    free(gone.data);
}

/* By the active call: the first note that has to be deleted. */
static tb__own_note *first_withdrawn(tb__directory *d) {
    tb__own_note *owed = NULL;
    pthread_mutex_lock(&d->lock);
    for (size_t i = 0; i < d->notes.count && !owed; i++)
        owed = d->notes.item[i].is_withdrawn ? &d->notes.item[i] : NULL;
    pthread_mutex_unlock(&d->lock);
    return owed;
}

tb_status tb__directory_delete_withdrawn(tb__directory *d, const tb__store_deadline *deadline) {
    for (tb__own_note *note; (note = first_withdrawn(d));) {
        TB_TRY(tb__store_deadline_apply(deadline));
        TB_TRY(tb__store_delete(d->store, note->key));
        drop_note(d, note);
    }
    return TB_OK;
}

/* With the lock held. If another process has taken this one's rank or seat, nothing is left to delete. */
static bool has_withdrawn_notes(const tb__directory *d) {
    bool is_owing = false;
    for (size_t i = 0; i < d->notes.count && d->state != TB_CONFLICT; i++)
        is_owing |= d->notes.item[i].is_withdrawn;
    return is_owing;
}

/* One that only follows hints lists when it publishes the note again, if then. */
static tb_status delete_withdrawn_and_refresh(tb__directory *d, const tb__store_deadline *deadline) {
    TB_TRY(tb__directory_delete_withdrawn(d, deadline));
    return tb__directory_reads(d, &d->must_follow) ? tb__directory_refresh_within(d, deadline) : TB_OK;
}

bool tb__directory_retry_withdrawals(tb__directory *d) {
    pthread_mutex_lock(&d->lock);
    bool is_owing = has_withdrawn_notes(d), is_silent = d->is_silent;
    pthread_mutex_unlock(&d->lock);
    if (!is_owing)
        return is_silent;
    tb__store_deadline deadline = tb__directory_deadline(d->opts.timeout_ms);
    tb_status status = tb__directory_begin_call(d, &deadline, true);
    if (status == TB_OK)
        status = tb__directory_end_call(d, delete_withdrawn_and_refresh(d, &deadline));
    pthread_mutex_lock(&d->lock);
    d->is_silent &= status != TB_OK;
    pthread_mutex_unlock(&d->lock);
    return status != TB_OK;
}

/* Leaves the deletion to the following thread. */
static void leave_to_follower(tb__directory *d) {
    pthread_mutex_lock(&d->lock);
    if (has_withdrawn_notes(d) && !d->is_closing)
        tb__store_interrupt(d->store);
    pthread_mutex_unlock(&d->lock);
}

static tb_status check_note(const tb__directory *d, const char *group, int32_t index) {
    const tb__own_seat *own = tb__directory_find_seat(d, group);
    if (!own || own->index != index)
        return tb__fail(TB_INVALID, "seat %" PRId32 " of group '%s' is not this process's", index, group);
    return TB_OK;
}

/* Whether the group's first rank passes changes on: it has a note that says so, or none yet. */
static tb_status look_at_lead(tb__directory *d, const tb__store_deadline *deadline, const note_request *request,
                              bool *is_relied_on) {
    tb__store_value value;
    *is_relied_on = false;
    if (!d->opts.is_lead || request->index == 0 || request->nbytes > MAX_UNLISTED ||
        tb__directory_reads(d, &d->must_follow))
        return TB_OK;
    TB_TRY(tb__store_deadline_apply(deadline));
    TB_TRY(tb__store_get(d->store, tb__key_of_note(request->topic, request->group, 0).text, &value));
    tb__note note = {.group = request->group, .data = value.data, .nbytes = value.nbytes};
    *is_relied_on = !value.data || d->opts.is_lead(&note);
    tb__store_value_fini(&value);
    return TB_OK;
}

static tb_status write_note(tb__directory *d, const tb__store_deadline *deadline, const char *key,
                            const note_request *request) {
    bool is_relied_on;
    uint64_t revision;
    TB_TRY(tb__store_deadline_apply(deadline));
    TB_TRY(tb__store_set(d->store, key, request->data, request->nbytes, TB__STORE_EPHEMERAL, &revision));
    pthread_mutex_lock(&d->lock);
    find_own_note(d, key)->revision = revision;
    pthread_mutex_unlock(&d->lock);
    TB_TRY(look_at_lead(d, deadline, request, &is_relied_on));
    if (is_relied_on)
        return TB_OK;
    tb_status status = tb__directory_refresh_within(d, deadline);
    if (status != TB_TOO_BIG)
        return status;
    /* All notes together are too long to be listed: no process would see any of them. */
    tb__saved_detail why = tb__save_detail();
    if (tb__store_deadline_apply(deadline) == TB_OK)
        (void)tb__store_delete(d->store, key);
    return tb__fail(TB_TOO_BIG, "%s", why.text);
}

static tb_status publish_note(tb__directory *d, const tb__store_deadline *deadline, const note_request *request) {
    tb__key key = tb__key_of_note(request->topic, request->group, request->index);
    const size_t nbytes = request->nbytes;
    TB_TRY(check_note(d, request->group, request->index));
    void *copy = tb__malloc(nbytes + 1, 1);
    tb__own_note *note = copy ? find_own_note(d, key.text) : NULL;
    if (copy && !note)
        note = add_own_note(d, key.text);
    if (!note) {
        free(copy);
        return TB_NO_MEMORY;
    }
    if (nbytes > 0)
        memcpy(copy, request->data, nbytes);
    tb_status status = write_note(d, deadline, key.text, request);
    pthread_mutex_lock(&d->lock);
    if (status == TB_OK) {
        void *before = note->data;
        note->data = copy;
        note->nbytes = nbytes;
        note->is_withdrawn = false;
        copy = before;
    } else if (!note->data) {
        note->is_withdrawn = true; /* the store may have it nevertheless */
    }
    pthread_mutex_unlock(&d->lock);
    free(copy);
    return status;
}

tb_status tb__directory_publish(tb__directory *directory, const char *topic, const char *group, int32_t index,
                                const void *data, size_t nbytes, int timeout_ms) {
    TB_TRY(tb__name_check("topic", topic));
    TB_TRY(tb__name_check("group", group));
    if (nbytes > TB__DIRECTORY_MAX_NOTE)
        return tb__fail(TB_TOO_BIG, "a note of %zu bytes; %d are allowed", nbytes, TB__DIRECTORY_MAX_NOTE);
    tb__store_deadline deadline = tb__directory_deadline(timeout_ms);
    const note_request request = {topic, group, index, data, nbytes};
    tb_status status;
    do {
        TB_TRY(tb__directory_begin_call(directory, &deadline, true));
        status = tb__directory_end_call(directory, publish_note(directory, &deadline, &request));
    } while (tb__directory_should_retry(&deadline, status));
    if (status != TB_OK)
        leave_to_follower(directory);
    return status;
}

static tb_status withdraw_note(tb__directory *d, const tb__store_deadline *deadline, const char *key, const char *group,
                               int32_t index) {
    TB_TRY(check_note(d, group, index));
    tb__own_note *note = find_own_note(d, key);
    if (!note)
        return TB_OK; /* it was never published, or is deleted already */
    pthread_mutex_lock(&d->lock);
    note->is_withdrawn = true;
    bool is_there = d->state == TB_OK;
    pthread_mutex_unlock(&d->lock);
    return is_there ? delete_withdrawn_and_refresh(d, deadline) : TB_OK;
}

/* Withdraws a note without the store, if that is lost or does not answer; the latter is TB_TIMEOUT. `is_enough`:
 * nothing else is to be done. */
static tb_status withdraw_without_store(tb__directory *d, const char *key, bool *is_enough) {
    pthread_mutex_lock(&d->lock);
    tb__own_note *note = find_own_note(d, key);
    bool is_known = note && (note->data || note->is_withdrawn); /* not being written right now */
    if (is_known)
        note->is_withdrawn = true;
    tb_status state = d->state;
    *is_enough = is_known && (state != TB_OK || d->is_silent);
    pthread_mutex_unlock(&d->lock);
    if (!*is_enough || state != TB_OK)
        return TB_OK;
    return tb__fail(TB_TIMEOUT, "the store has not answered the last question either");
}

tb_status tb__directory_withdraw(tb__directory *directory, const char *topic, const char *group, int32_t index,
                                 int timeout_ms) {
    TB_TRY(tb__name_check("topic", topic));
    TB_TRY(tb__name_check("group", group));
    tb__key key = tb__key_of_note(topic, group, index);
    tb__store_deadline deadline = tb__directory_deadline(timeout_ms);
    bool is_over;
    tb_status status = withdraw_without_store(directory, key.text, &is_over);
    while (!is_over) {
        status = tb__directory_begin_call(directory, &deadline, false);
        if (status == TB_OK)
            status = tb__directory_end_call(directory, withdraw_note(directory, &deadline, key.text, group, index));
        else if (status == TB_TIMEOUT)
            tb__directory_set_silent(directory);
        is_over = !tb__directory_should_retry(&deadline, status);
    }
    if (status != TB_OK)
        leave_to_follower(directory);
    return status;
}

bool tb__directory_is_current(tb__directory *directory, const char *topic) {
    tb__key prefix = tb__key_of_topic(topic);
    bool is_current = true;
    pthread_mutex_lock(&directory->lock);
    uint64_t revision = tb__directory_view_revision(tb__directory_view_of(directory, NULL, topic));
    for (size_t i = 0; i < directory->notes.count; i++) {
        const tb__own_note *note = &directory->notes.item[i];
        is_current &= note->revision <= revision || strncmp(note->key, prefix.text, strlen(prefix.text)) != 0;
    }
    pthread_mutex_unlock(&directory->lock);
    return is_current;
}

void tb__directory_notes(tb__directory *directory, const char *topic, tb__notes *out) {
    pthread_mutex_lock(&directory->lock);
    tb__directory_view_notes(tb__directory_view_of(directory, NULL, topic), topic, out);
    pthread_mutex_unlock(&directory->lock);
}
