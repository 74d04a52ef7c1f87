/* A queue of proposals, and the thread that makes them one by one; deletions wait until there are none.
 * In the store an answer is "commit", or "abort", the number of the reason's status, and the reason. */
#include "bus/commit.h"

#include "base/log.h"
#include "base/mem.h"
#include "base/process.h"

#include <stdio.h>
#include <string.h>

enum { ANSWER_MS = 3000 };

typedef struct question {
    tb__commit *commit; /* guarded by the loop's lock; NULL: the answer is not needed any more */
    bool forgets;
    char text[TB__QUESTION_ROOM];
    uint64_t proposal, store_number;
    char answer[TB__WHY_MAX + 32]; /* that is proposed */
    struct question *next;
} question;

struct tb__commit_log {
    tb__loop *loop;
    tb__directory *directory;
    pthread_t thread;
    bool has_thread;
    pthread_mutex_t lock; /* for all that follows; may be taken with the loop's */
    pthread_cond_t changed;
    bool is_stopping;
    question *first; /* questions that wait; deletions come after all of them, in any order */
    question *asked; /* the one that is being asked */
};

tb_status tb__commit_log_create(tb__loop *loop, tb__directory *directory, tb__commit_log **out) {
    tb__commit_log *d = tb__calloc(1, sizeof *d);
    if (!d)
        return TB_NO_MEMORY;
    d->loop = loop;
    d->directory = directory;
    pthread_mutex_init(&d->lock, NULL);
    tb__monotonic_cond_init(&d->changed);
    *out = d;
    return TB_OK;
}

/* False: the answer is neither "commit" nor "abort". */
static bool parse_answer(const char *answer, tb__decision *decision, tb_status *status, const char **why) {
    int code = 0, length = 0;
    *why = "";
    *status = TB_OK;
    *decision = TB__DECISION_COMMIT;
    if (strcmp(answer, "commit") == 0)
        return true;
    *decision = TB__DECISION_ABORT;
    if (sscanf(answer, "abort %2d %n", &code, &length) != 1 || length == 0 || code < 1 || code > 64)
        return false;
    *status = (tb_status)-code;
    *why = answer + length;
    return true;
}

static void ask_store(tb__commit_log *d, const question *q) {
    char *answer = NULL;
    const char *why = "";
    tb__decision decision = TB__DECISION_NONE;
    tb_status reason = TB_OK;
    tb_status status = tb__directory_decide(d->directory, q->store_number, q->text, q->answer, ANSWER_MS, &answer);
    if (status == TB_OK && !parse_answer(answer, &decision, &reason, &why))
        status = tb__fail(TB_INVALID, "the store's answer '%.40s' is neither \"commit\" nor \"abort\"", answer);
    if (status != TB_OK) {
        decision = TB__DECISION_NONE;
        reason = status;
        why = tb_error_detail();
    }
    tb__loop_lock(d->loop);
    if (q->commit)
        tb__commit_answer(q->commit, q->proposal, decision, reason, why);
    tb__loop_unlock(d->loop);
    free(answer);
}

static void *commit_log_thread(void *arg) {
    tb__commit_log *d = arg;
    pthread_mutex_lock(&d->lock);
    while (!d->is_stopping) {
        question *q = d->first;
        if (!q) {
            pthread_cond_wait(&d->changed, &d->lock);
            continue;
        }
        d->first = q->next;
        d->asked = q;
        pthread_mutex_unlock(&d->lock);
        if (!q->forgets)
            ask_store(d, q);
        else if (tb__directory_forget(d->directory, q->text, ANSWER_MS) != TB_OK)
            tb__log(TB_LOG_INFO, "the decision about %s stays in the store: %s", q->text, tb_error_detail());
        pthread_mutex_lock(&d->lock);
        d->asked = NULL;
        free(q);
    }
    pthread_mutex_unlock(&d->lock);
    return NULL;
}

static tb_status enqueue_question(tb__commit_log *d, question *q) {
    tb_status status = TB_OK;
    pthread_mutex_lock(&d->lock);
    if (!d->has_thread)
        status = tb__start_thread(&d->thread, "tb-commit_log", commit_log_thread, d);
    d->has_thread |= status == TB_OK;
    question **at = &d->first;
    while (*at && !(*at)->forgets)
        at = &(*at)->next;
    q->next = *at;
    if (status == TB_OK)
        *at = q;
    pthread_cond_signal(&d->changed);
    pthread_mutex_unlock(&d->lock);
    if (status != TB_OK)
        free(q);
    return status;
}

tb_status tb__commit_log_propose(tb__commit_log *d, tb__commit *commit, uint64_t store_number, const char *text,
                                 uint64_t proposal, tb__decision decision, tb_status status, const char *why) {
    if (!tb__directory_is_connected(d->directory))
        return tb__fail_within(TB_LOST, "the store, which has to decide it");
    if (tb__directory_store_number(d->directory) != store_number)
        return tb__fail(TB_LOST, "the store that has to decide it has been lost, and another one is in its place");
    question *q = tb__calloc(1, sizeof *q);
    if (!q)
        return TB_NO_MEMORY;
    q->commit = commit;
    q->proposal = proposal;
    q->store_number = store_number;
    snprintf(q->text, sizeof q->text, "%s", text);
    if (decision == TB__DECISION_COMMIT)
        snprintf(q->answer, sizeof q->answer, "commit");
    else
        snprintf(q->answer, sizeof q->answer, "abort %d %s", -(int)status, why);
    return enqueue_question(d, q);
}

void tb__commit_log_forget(tb__commit_log *d, const char *text) {
    question *q = tb__directory_is_connected(d->directory) ? tb__calloc(1, sizeof *q) : NULL;
    if (!q)
        return;
    q->forgets = true;
    snprintf(q->text, sizeof q->text, "%s", text);
    (void)enqueue_question(d, q);
}

void tb__commit_log_drop(tb__commit_log *d, const tb__commit *commit) {
    pthread_mutex_lock(&d->lock);
    if (d->asked && d->asked->commit == commit)
        d->asked->commit = NULL;
    for (question *q = d->first; q; q = q->next) {
        if (q->commit == commit)
            q->commit = NULL;
    }
    pthread_mutex_unlock(&d->lock);
}

void tb__commit_log_destroy(tb__commit_log *d) {
    if (!d)
        return;
    if (d->has_thread) {
        pthread_mutex_lock(&d->lock);
        d->is_stopping = true;
        pthread_cond_signal(&d->changed);
        pthread_mutex_unlock(&d->lock);
        pthread_join(d->thread, NULL);
    }
    for (question *q; (q = d->first);) {
        d->first = q->next;
        free(q);
    }
    pthread_cond_destroy(&d->changed);
    pthread_mutex_destroy(&d->lock);
    free(d);
}
