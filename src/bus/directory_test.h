/* What the directory's tests share: waiting for what others do, and short forms. */
#ifndef TB_BUS_DIRECTORY_TEST_H
#define TB_BUS_DIRECTORY_TEST_H

#include "bus/directory.h"
#include "bus/directory_keys.h"
#include "bus/store/store_test.h"

#include <pthread.h>

/* Counts what `changed` says. */
typedef struct ear {
    pthread_mutex_t lock;
    pthread_cond_t heard;
    uint64_t count;
    uint64_t nlosses; /* of the calls, those that found the store lost */
    tb__directory *directory;
    tb_status (*answer)(tb__directory *directory); /* called once, by the following thread */
    tb_status answered;
} ear;

static inline void ear_init(ear *e) {
    *e = (ear){.answered = TB_INTERNAL};
    pthread_mutex_init(&e->lock, NULL);
    tb__monotonic_cond_init(&e->heard);
}

static inline void ear_changed(void *arg) {
    ear *e = arg;
    pthread_mutex_lock(&e->lock);
    tb__directory *directory = e->directory;
    tb_status (*answer)(tb__directory *) = directory ? e->answer : NULL;
    if (answer)
        e->answer = NULL;
    pthread_mutex_unlock(&e->lock);
    bool is_lost = directory && !tb__directory_is_connected(directory);
    tb_status answered = answer ? answer(directory) : TB_OK;
    pthread_mutex_lock(&e->lock);
    e->count++;
    e->nlosses += is_lost;
    if (answer)
        e->answered = answered;
    pthread_cond_broadcast(&e->heard);
    pthread_mutex_unlock(&e->lock);
}

static inline tb_status open_with_ear(const char *url, const char *group, int32_t index, int32_t size, ear *e) {
    tb__directory *directory;
    TB_TRY(tb__directory_open(
        url, group, index, size,
        &(tb__directory_opts){.token = TOKEN, .timeout_ms = PATIENCE_MS, .changed = ear_changed, .arg = e},
        &directory));
    pthread_mutex_lock(&e->lock);
    e->directory = directory;
    pthread_mutex_unlock(&e->lock);
    return TB_OK;
}

/* Sleeps until the claim holds; false if that takes too long. */
static inline bool ear_await(ear *e, bool (*claim)(tb__directory *directory, const void *arg), const void *arg) {
    struct timespec deadline = tb__time_of_ms(tb__now_ms() + PATIENCE_MS);
    for (;;) {
        pthread_mutex_lock(&e->lock);
        uint64_t before = e->count;
        pthread_mutex_unlock(&e->lock);
        if (claim(e->directory, arg))
            return true;
        bool is_late = false;
        pthread_mutex_lock(&e->lock);
        while (e->count == before && !is_late)
            is_late = pthread_cond_timedwait(&e->heard, &e->lock, &deadline) == ETIMEDOUT;
        pthread_mutex_unlock(&e->lock);
        if (is_late)
            return false;
    }
}

static inline tb_status try_open(const char *url, const char *group, int32_t index, int32_t size, tb__directory **out) {
    return tb__directory_open(url, group, index, size, &(tb__directory_opts){.token = TOKEN, .timeout_ms = PATIENCE_MS},
                              out);
}

static inline tb__directory *open_directory(const char *url, const char *group, int32_t index, int32_t size) {
    tb__directory *directory = NULL;
    assert_ok(try_open(url, group, index, size, &directory));
    return directory;
}

static inline int32_t present(tb__directory *directory, const char *group) {
    tb__roster roster;
    if (tb__directory_roster(directory, group, &roster) != TB_OK)
        return -1;
    int32_t count = roster.npresent;
    tb__roster_fini(&roster);
    return count;
}

typedef struct expected {
    const char *name;
    int64_t count;
} expected;

/* Claims for ear_await. */
static inline bool has_members(tb__directory *directory, const void *arg) {
    const expected *want = arg;
    return present(directory, want->name) == want->count;
}

static inline bool has_notes(tb__directory *directory, const void *arg) {
    const expected *want = arg;
    tb__notes notes;
    tb__directory_notes(directory, want->name, &notes);
    bool is_so = (int64_t)notes.count == want->count;
    tb__notes_fini(&notes);
    return is_so;
}

static inline bool is_lost(tb__directory *directory, const void *arg) {
    (void)arg;
    return !tb__directory_is_connected(directory);
}

static inline void await_members(ear *e, const char *group, int64_t count) {
    assert_true(ear_await(e, has_members, &(expected){group, count}));
}

static inline void await_notes(ear *e, const char *topic, int64_t count) {
    assert_true(ear_await(e, has_notes, &(expected){topic, count}));
}

#endif
