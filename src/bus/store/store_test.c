/* The store's operations, over every kind of socket, and in etcd: one process, one and several threads. */
#include "bus/store/etcd_test.h"
#include "bus/store/gateway.h"
#include "bus/store/table.h"

#include <netinet/tcp.h>
#include <stdatomic.h>

typedef struct fixture {
    place at;
    const char *kind;
    char url[128];
    tb__store_server *server;
    tb__store *a, *b;
} fixture;

static bool is_etcd(const fixture *f) {
    return strcmp(f->kind, "etcd") == 0;
}

static int set_up(void **state) {
    fixture *f = calloc(1, sizeof *f);
    f->kind = *state;
    place_make(&f->at);
    if (!is_etcd(f))
        assert_ok(tb__store_server_start(strcmp(f->kind, "unix") == 0 ? f->at.url : f->kind, TOKEN, &f->server));
    snprintf(f->url, sizeof f->url, "%s", is_etcd(f) ? the_etcd.url : tb__store_server_url(f->server));
    f->a = open_store(f->url);
    f->b = open_store(f->url);
    *state = f;
    return 0;
}

static int tear_down(void **state) {
    fixture *f = *state;
    if (is_etcd(f))
        delete_all(f->a, "");
    tb__store_close(f->a);
    tb__store_close(f->b);
    tb__store_server_stop(f->server);
    place_remove(&f->at);
    *state = (void *)(uintptr_t)f->kind;
    free(f);
    return 0;
}

static void assert_text(tb__store *store, const char *key, const char *text) {
    tb__store_value value;
    assert_ok(tb__store_get(store, key, &value));
    if (text) {
        assert_true(value.revision > 0);
        assert_string_equal(value.data, text);
        assert_int_equal(value.nbytes, strlen(text));
    } else {
        assert_int_equal(value.revision, 0);
        assert_null(value.data);
    }
    tb__store_value_fini(&value);
}

static void set_and_get(void **state) {
    fixture *f = *state;
    uint64_t first = 0, second = 0;
    assert_text(f->b, "k", NULL);
    assert_ok(tb__store_set(f->a, "k", "one", 3, TB__STORE_PERMANENT, &first));
    assert_text(f->b, "k", "one");
    assert_ok(tb__store_set(f->a, "k", "", 0, TB__STORE_PERMANENT, &second));
    assert_true(second > first);
    assert_text(f->b, "k", "");
    assert_ok(tb__store_delete(f->a, "k"));
    assert_ok(tb__store_delete(f->a, "k"));
    assert_text(f->b, "k", NULL);
    assert_fails(tb__store_set(f->a, "", "x", 1, TB__STORE_PERMANENT, NULL), TB_INVALID, "empty");
}

static void largest(void **state) {
    fixture *f = *state;
    char key[TB__STORE_MAX_KEY + 2];
    memset(key, 'k', sizeof key);
    key[TB__STORE_MAX_KEY + 1] = '\0';
    uint8_t *bytes = malloc(TB__STORE_MAX_VALUE + 1);
    for (size_t i = 0; i <= TB__STORE_MAX_VALUE; i++)
        bytes[i] = (uint8_t)(i * 7 + i / 256);
    assert_fails(tb__store_set(f->a, key, "x", 1, TB__STORE_PERMANENT, NULL), TB_TOO_BIG, "1025 bytes");
    key[TB__STORE_MAX_KEY] = '\0';
    assert_fails(tb__store_set(f->a, key, bytes, TB__STORE_MAX_VALUE + 1, TB__STORE_PERMANENT, NULL), TB_TOO_BIG,
                 "1048577 bytes");
    assert_ok(tb__store_set(f->a, key, bytes, TB__STORE_MAX_VALUE, TB__STORE_PERMANENT, NULL));
    tb__store_value value;
    assert_ok(await_key(f->b, key, PATIENCE_MS, &value));
    assert_int_equal(value.nbytes, TB__STORE_MAX_VALUE);
    assert_memory_equal(value.data, bytes, TB__STORE_MAX_VALUE);
    tb__store_value_fini(&value);

    /* Sixteen of them are more than one list carries. */
    char name[16];
    for (int i = 0; i < 16; i++) {
        snprintf(name, sizeof name, "big/%d", i);
        assert_ok(tb__store_set(f->a, name, bytes, TB__STORE_MAX_VALUE, TB__STORE_PERMANENT, NULL));
    }
    tb__store_entries entries;
    assert_fails(tb__store_list(f->b, "big/", &entries), TB_TOO_BIG, "longer prefixes");
    assert_ok(tb__store_list(f->b, "big/1", &entries));
    assert_int_equal(entries.count, 7);
    tb__store_entries_fini(&entries);
    for (int i = 0; i < 16; i++) { /* so that what is left can be listed */
        snprintf(name, sizeof name, "big/%d", i);
        assert_ok(tb__store_delete(f->a, name));
    }
    free(bytes);
}

static void counters(void **state) {
    fixture *f = *state;
    uint64_t before = 99;
    assert_ok(tb__store_count(f->a, "c", 0, 1, &before));
    assert_int_equal(before, 0);
    assert_ok(tb__store_count(f->b, "c", 0, 4, &before));
    assert_int_equal(before, 1);
    assert_ok(tb__store_count(f->a, "c", 3, 0, &before));
    assert_int_equal(before, 5);
    assert_ok(tb__store_count(f->b, "c", 7, 1, &before));
    assert_int_equal(before, 7);
    assert_text(f->a, "c", "8");
    assert_fails(tb__store_count(f->a, "c", 0, INT64_MAX, &before), TB_TOO_BIG, "count 'c'");
    set_text(f->a, "d", "-1");
    assert_fails(tb__store_count(f->a, "d", 0, 1, &before), TB_INVALID, "it is not a counter");
    assert_int_equal(before, 7);
}

static void blocks(void **state) {
    fixture *f = *state;
    uint64_t first = 99, next = 99;
    assert_ok(tb__store_take_block(f->a, "next", "blocks/x", 5, &first, &next));
    assert_int_equal(first, 0);
    assert_int_equal(next, 5);
    assert_ok(tb__store_take_block(f->b, "next", "blocks/y", 2, &first, &next));
    assert_int_equal(first, 5);
    assert_int_equal(next, 7);
    assert_ok(tb__store_take_block(f->b, "next", "blocks/x", 5, &first, &next));
    assert_int_equal(first, 0);
    assert_int_equal(next, 7);
    assert_ok(tb__store_count(f->a, "next", 100, 0, &next));
    assert_ok(tb__store_take_block(f->a, "next", "blocks/z", 1, &first, &next));
    assert_int_equal(first, 100);
    assert_text(f->b, "next", "101");
    assert_ok(tb__store_count(f->a, "blocks/w", 40, 0, &next)); /* a block that is known from elsewhere */
    assert_ok(tb__store_take_block(f->b, "next", "blocks/w", 3, &first, &next));
    assert_int_equal(first, 40);
    assert_int_equal(next, 101);
    assert_fails(tb__store_take_block(f->a, "next", "blocks/v", INT64_MAX, &first, &next), TB_TOO_BIG, "blocks/v");
    set_text(f->a, "text", "-1");
    assert_fails(tb__store_take_block(f->a, "next", "text", 1, &first, &next), TB_INVALID, "it is not a counter");
    assert_fails(tb__store_take_block(f->a, "text", "blocks/v", 1, &first, &next), TB_INVALID, "it is not a counter");
    assert_int_equal(first, 40);
}

/* Creates what is not there, while the guard stays as it is. */
static void create_guarded(void **state) {
    fixture *f = *state;
    tb__store_value present = {0};
    assert_fails(tb__store_create_guarded(f->a, "g", "one", "k", "a", 1, &present), TB_REFUSED, "guards");
    assert_ok(tb__store_set(f->a, "g", "one", 3, TB__STORE_PERMANENT, NULL));
    assert_fails(tb__store_create_guarded(f->a, "g", "on", "k", "a", 1, &present), TB_REFUSED, "guards");
    assert_ok(tb__store_create_guarded(f->a, "g", "one", "k", "a", 1, &present));
    assert_fails(tb__store_create_guarded(f->b, "g", "one", "k", "b", 1, &present), TB_CONFLICT, "exists");
    assert_string_equal(present.data, "a");
    tb__store_value_fini(&present);
    assert_ok(tb__store_set(f->a, "g", "two", 3, TB__STORE_PERMANENT, NULL));
    assert_fails(tb__store_create_guarded(f->b, "g", "one", "k", "b", 1, &present), TB_REFUSED, "guards");
    assert_fails(tb__store_create_guarded(f->b, "g", "one", "l", "b", 1, &present), TB_REFUSED, "guards");
    assert_ok(tb__store_get(f->a, "l", &present));
    assert_null(present.data);
}

static void compare_and_set(void **state) {
    fixture *f = *state;
    uint64_t revision = 0, next = 0;
    tb__store_value present;
    assert_ok(tb__store_compare_and_set(f->a, "k", 0, "a", 1, TB__STORE_PERMANENT, &revision, &present));
    assert_fails(tb__store_compare_and_set(f->b, "k", 0, "b", 1, TB__STORE_PERMANENT, NULL, &present), TB_CONFLICT,
                 "compare and set 'k'");
    assert_string_equal(present.data, "a");
    assert_int_equal(present.revision, revision);
    assert_ok(tb__store_compare_and_set(f->a, "k", present.revision, "b", 1, TB__STORE_PERMANENT, &next, NULL));
    tb__store_value_fini(&present);
    assert_int_equal(tb__store_compare_and_set(f->a, "k", revision, "c", 1, TB__STORE_PERMANENT, NULL, NULL),
                     TB_CONFLICT);
    assert_text(f->a, "k", "b");
    assert_ok(tb__store_delete(f->a, "k"));
    assert_int_equal(tb__store_compare_and_set(f->a, "k", next, "c", 1, TB__STORE_PERMANENT, NULL, &present),
                     TB_CONFLICT);
    assert_null(present.data);
    assert_int_equal(present.revision, 0);
}

static void prefixes(void **state) {
    fixture *f = *state;
    tb__store_entries entries;
    assert_ok(tb__store_list(f->b, "", &entries));
    assert_int_equal(entries.count, 0);
    tb__store_entries_fini(&entries);
    static const char *const keys[] = {"b/2", "a/1", "b/1", "b", "c", "b/10", "b0"};
    for (size_t i = 0; i < sizeof keys / sizeof *keys; i++)
        set_text(f->a, keys[i], keys[i]);
    assert_ok(tb__store_list(f->b, "b/", &entries));
    assert_int_equal(entries.count, 3);
    static const char *const sorted[] = {"b/1", "b/10", "b/2"};
    for (size_t i = 0; i < 3; i++) {
        assert_string_equal(entries.item[i].key, sorted[i]);
        assert_string_equal(entries.item[i].value.data, sorted[i]);
        assert_true(entries.item[i].value.revision > 0 && entries.item[i].value.revision <= entries.revision);
    }
    tb__store_entries_fini(&entries);
    delete_all(f->a, "b/");
    assert_ok(tb__store_list(f->b, "", &entries));
    assert_int_equal(entries.count, 4);
    assert_string_equal(entries.item[3].key, "c");
    tb__store_entries_fini(&entries);
    delete_all(f->a, "");
    assert_text(f->b, "c", NULL);
}

static void namespaces(void **state) {
    fixture *f = *state;
    char url[192];
    snprintf(url, sizeof url, "%s?namespace=job", f->url);
    tb__store *job = open_store(url);
    tb__store_value value;
    tb__store_entries entries;
    set_text(job, "k", "mine");
    set_text(f->a, "k", "other");
    assert_text(job, "k", "mine");
    assert_text(f->a, "job/k", "mine");
    assert_ok(tb__store_list(job, "", &entries));
    assert_int_equal(entries.count, 1);
    assert_string_equal(entries.item[0].key, "k");
    tb__store_entries_fini(&entries);
    int status = await_key(job, "absent", 0, &value);
    assert_int_equal(status, TB_TIMEOUT);
    assert_non_null(strstr(tb_error_detail(), "'absent'"));
    delete_all(job, "");
    assert_text(job, "k", NULL);
    assert_text(f->a, "k", "other");
    tb__store_close(job);
    snprintf(url, sizeof url, "%s?namespace=", f->url);
    assert_fails(tb__store_open(url, TOKEN, PATIENCE_MS, &job), TB_INVALID, "namespace");
    snprintf(url, sizeof url, "%s?timeout=3", f->url);
    assert_fails(tb__store_open(url, TOKEN, PATIENCE_MS, &job), TB_INVALID, "only ?namespace");
}

static void deadlines(void **state) {
    fixture *f = *state;
    tb__store_value value;
    uint64_t revision;
    static const int64_t timeouts[] = {0, 1, 120};
    for (size_t i = 0; i < sizeof timeouts / sizeof *timeouts; i++) {
        int64_t start = tb__now_ms();
        assert_fails(tb__store_wait_change(f->a, "never", 0, (int)timeouts[i], &revision), TB_TIMEOUT,
                     "wait for a change of 'never'");
        int64_t took = tb__now_ms() - start;
        assert_true(took >= timeouts[i] && took < PATIENCE_MS);
    }
    assert_fails(tb__store_wait_change(f->a, "never", 0, -1, &revision), TB_INVALID, "-1 ms");
    /* What timed out is forgotten: the key that comes later wakes nobody, and the connection goes on. */
    set_text(f->b, "never", "now");
    assert_text(f->a, "never", "now");
    assert_ok(await_key(f->a, "never", PATIENCE_MS, &value));
    tb__store_value_fini(&value);
}

/* Makes the store forget what was changed until now. */
static void forget_changes(const fixture *f) {
    if (!is_etcd(f)) {
        for (int i = 0; i <= TB__STORE_LOG; i++)
            set_text(f->a, "q/1", "y");
        return;
    }
    uint64_t revision;
    char text[64];
    tb__gateway *gateway;
    json_t *reply;
    for (int i = 0; i < 2; i++)
        assert_ok(tb__store_set(f->a, "q/1", "y", 1, TB__STORE_PERMANENT, &revision));
    snprintf(text, sizeof text, "{\"revision\":\"%llu\"}", (unsigned long long)revision);
    tb__gateway_call call = {.path = "/v3/kv/compaction", .deadline_ms = tb__now_ms() + PATIENCE_MS};
    tb__store_url parts;
    assert_ok(tb__store_url_split(f->url, &parts));
    assert_ok(tb__gateway_create(&parts, &gateway));
    assert_ok(tb__gateway_post(gateway, &call, json_loads(text, 0, NULL), &reply));
    json_decref(reply);
    tb__gateway_destroy(gateway);
}

static void changes(void **state) {
    fixture *f = *state;
    uint64_t revision = 0, since;
    tb__store_entries entries;
    set_text(f->a, "p/1", "x");
    assert_ok(tb__store_list(f->b, "p/", &entries));
    since = entries.revision;
    tb__store_entries_fini(&entries);
    set_text(f->a, "q/1", "x");
    assert_int_equal(tb__store_wait_change(f->b, "p/", since, 20, &revision), TB_TIMEOUT);
    assert_ok(tb__store_wait_change(f->b, "", since, PATIENCE_MS, &revision));
    assert_true(revision > since);
    assert_ok(tb__store_delete(f->a, "p/1"));
    assert_ok(tb__store_wait_change(f->b, "p/", since, PATIENCE_MS, &revision));
    assert_int_equal(tb__store_wait_change(f->b, "p/", revision, 20, &revision), TB_TIMEOUT);
    /* A number from another life of the store. */
    assert_ok(tb__store_wait_change(f->b, "p/", UINT64_MAX, PATIENCE_MS, &revision));
    /* More has happened than is remembered: that counts as a change. */
    forget_changes(f);
    since = revision;
    assert_ok(tb__store_wait_change(f->b, "p/", since, PATIENCE_MS, &revision));
    assert_int_equal(tb__store_wait_change(f->b, "p/", revision, 20, &revision), TB_TIMEOUT);
}

static void ephemerals(void **state) {
    fixture *f = *state;
    tb__store *c = open_store(f->url);
    uint64_t revision = 0;
    tb__store_entries entries;
    assert_ok(tb__store_set(c, "e/1", "x", 1, TB__STORE_EPHEMERAL, NULL));
    assert_ok(tb__store_set(c, "e/2", "x", 1, TB__STORE_EPHEMERAL, NULL));
    assert_ok(tb__store_compare_and_set(c, "e/3", 0, "x", 1, TB__STORE_EPHEMERAL, NULL, NULL));
    assert_ok(tb__store_set(c, "e/4", "x", 1, TB__STORE_PERMANENT, NULL));
    set_text(c, "e/2", "kept");
    assert_text(f->b, "e/1", "x");
    tb__store_close(c);
    do {
        assert_ok(tb__store_list(f->a, "e/", &entries));
        size_t count = entries.count;
        revision = entries.revision;
        tb__store_entries_fini(&entries);
        if (count == 2)
            break;
        assert_ok(tb__store_wait_change(f->a, "e/", revision, PATIENCE_MS, &revision));
    } while (true);
    assert_text(f->a, "e/2", "kept");
    assert_text(f->a, "e/4", "x");
}

/* Threads. Assertions of cmocka are for the main thread, so these count what went wrong. */
typedef struct job {
    tb__store *store;
    int index;
    int nfailures;
} job;

enum { NTHREADS = 8, NROUNDS = 50 };

static void *add_up(void *arg) {
    job *j = arg;
    for (int i = 0; i < NROUNDS; i++)
        j->nfailures += tb__store_count(j->store, "sum", 0, 1, NULL) != TB_OK;
    return NULL;
}

static void run_jobs(fixture *f, void *(*run)(void *), job jobs[NTHREADS], pthread_t threads[NTHREADS]) {
    for (int i = 0; i < NTHREADS; i++) {
        jobs[i] = (job){.store = i % 2 ? f->a : f->b, .index = i};
        assert_int_equal(pthread_create(&threads[i], NULL, run, &jobs[i]), 0);
    }
}

static void join_jobs(const job jobs[NTHREADS], const pthread_t threads[NTHREADS]) {
    for (int i = 0; i < NTHREADS; i++) {
        pthread_join(threads[i], NULL);
        assert_int_equal(jobs[i].nfailures, 0);
    }
}

static void many_threads(void **state) {
    fixture *f = *state;
    job jobs[NTHREADS];
    pthread_t threads[NTHREADS];
    run_jobs(f, add_up, jobs, threads);
    join_jobs(jobs, threads);
    uint64_t sum = 0;
    assert_ok(tb__store_count(f->a, "sum", 0, 0, &sum));
    assert_int_equal(sum, NTHREADS * NROUNDS);
}

/* Writes and deletes a few keys at random, last of all "changing/~end". */
static void *change_at_random(void *arg) {
    job *j = arg;
    unsigned seed = 7;
    char key[32], value[32];
    for (int i = 0; i < 300; i++) {
        snprintf(key, sizeof key, "changing/%d", rand_r(&seed) % 20);
        snprintf(value, sizeof value, "%d", i);
        size_t nbytes = rand_r(&seed) % 4 ? strlen(value) : 0;
        tb_status status = rand_r(&seed) % 3 ? tb__store_set(j->store, key, value, nbytes, TB__STORE_PERMANENT, NULL)
                                             : tb__store_delete(j->store, key);
        j->nfailures += status != TB_OK;
        if (rand_r(&seed) % 8 == 0)
            tb__sleep_ms(2);
    }
    j->nfailures += tb__store_set(j->store, "changing/~end", "", 0, TB__STORE_PERMANENT, NULL) != TB_OK;
    return NULL;
}

static void assert_same_entries(const tb__store_entries *a, const tb__store_entries *b) {
    assert_int_equal(a->count, b->count);
    for (size_t i = 0; i < a->count; i++) {
        assert_string_equal(a->item[i].key, b->item[i].key);
        assert_int_equal(a->item[i].value.revision, b->item[i].value.revision);
        assert_string_equal(a->item[i].value.data, b->item[i].value.data);
    }
}

/* Whoever lists once and applies what changes has what whoever lists at the end has. */
static void followed_changes(void **state) {
    fixture *f = *state;
    tb__store_entries now, changes, next;
    pthread_t thread;
    job writer = {.store = f->a};
    set_text(f->a, "changing/0", "before");
    assert_ok(tb__store_list(f->b, "changing/", &now));
    assert_int_equal(now.count, 1);
    assert_int_equal(pthread_create(&thread, NULL, change_at_random, &writer), 0);
    for (bool is_over = false; !is_over;) {
        assert_ok(tb__store_wait_changes(f->b, "changing/", now.revision, PATIENCE_MS, &changes));
        assert_false(changes.must_list);
        assert_true(changes.count > 0 && changes.revision > now.revision);
        assert_ok(tb__store_apply_changes(&now, &changes, &next));
        tb__store_entries_fini(&changes);
        tb__store_entries_fini(&now);
        now = next;
        is_over = now.count > 0 && strcmp(now.item[now.count - 1].key, "changing/~end") == 0;
    }
    pthread_join(thread, NULL);
    assert_int_equal(writer.nfailures, 0);
    assert_ok(tb__store_list(f->b, "changing/", &next));
    assert_same_entries(&now, &next);
    for (size_t i = 0; i < next.count; i++)
        assert_ok(tb__store_delete(f->a, next.item[i].key));
    assert_ok(tb__store_wait_changes(f->b, "changing/", next.revision, PATIENCE_MS, &changes));
    assert_true(changes.count > 0 && !changes.item[0].value.data);
    tb__store_entries_fini(&changes);
    tb__store_entries_fini(&next);
    tb__store_entries_fini(&now);
}

/* An embedded server remembers so many changes; after these, and for a revision of another store, one has to list. */
static void forgotten_changes(void **state) {
    fixture *f = *state;
    uint64_t since;
    tb__store_entries changes;
    assert_ok(tb__store_set(f->a, "changing/0", "x", 1, TB__STORE_PERMANENT, &since));
    for (int i = 0; i <= TB__STORE_LOG && !is_etcd(f); i++)
        set_text(f->a, "other", "x");
    assert_ok(
        tb__store_wait_changes(f->b, "changing/", is_etcd(f) ? since + 1000000 : since - 1, PATIENCE_MS, &changes));
    assert_true(changes.must_list && changes.count == 0 && changes.revision >= since);
    tb__store_entries_fini(&changes);
    assert_ok(tb__store_delete(f->a, "changing/0"));
}

static void *wait_for_rounds(void *arg) {
    job *j = arg;
    char key[32];
    for (int i = 0; i < NROUNDS; i++) {
        tb__store_value value = {0};
        snprintf(key, sizeof key, "round/%d", i);
        if (await_key(j->store, key, PATIENCE_MS, &value) != TB_OK)
            j->nfailures++;
        tb__store_value_fini(&value);
        snprintf(key, sizeof key, "seen/%d/%d", i, j->index);
        if (tb__store_set(j->store, key, "", 0, TB__STORE_PERMANENT, NULL) != TB_OK)
            j->nfailures++;
    }
    return NULL;
}

/* The threads that wait and those that set share their connections. */
static void waiting_threads(void **state) {
    fixture *f = *state;
    job jobs[NTHREADS];
    pthread_t threads[NTHREADS];
    char key[32];
    tb__store_value value;
    run_jobs(f, wait_for_rounds, jobs, threads);
    for (int i = 0; i < NROUNDS; i++) {
        snprintf(key, sizeof key, "round/%d", i);
        set_text(f->a, key, "go");
        for (int t = 0; t < NTHREADS; t++) {
            snprintf(key, sizeof key, "seen/%d/%d", i, t);
            assert_ok(await_key(f->b, key, PATIENCE_MS, &value));
            tb__store_value_fini(&value);
        }
    }
    join_jobs(jobs, threads);
}

static void frames(void **state) {
    (void)state;
    tb__bytes entries = {0}, bytes = {0};
    tb__store_message out;
    size_t used;
    assert_ok(tb__store_add_entry(&entries, blob_of("k"), 7, blob_of("v")));
    assert_ok(tb__store_add_entry(&entries, blob_of("key"), 8, blob_of("")));
    tb__store_message list = {.id = 5,
                              .op = TB__STORE_LIST,
                              .is_reply = true,
                              .revision = 9,
                              .nentries = 2,
                              .entries = {.data = entries.item, .nbytes = entries.count}};
    assert_ok(tb__store_encode(&list, &bytes));
    for (size_t n = 0; n < bytes.count; n++) {
        assert_ok(decode_frame(bytes.item, n, TB__STORE_MAX_REPLY, &out, &used));
        assert_int_equal(used, 0);
    }
    assert_ok(decode_frame(bytes.item, bytes.count, TB__STORE_MAX_REPLY, &out, &used));
    assert_int_equal(used, bytes.count);
    assert_int_equal(out.nentries, 2);
    assert_int_equal(out.revision, 9);
    assert_int_equal(out.entries.nbytes, entries.count);
    assert_memory_equal(out.entries.data, entries.item, entries.count);
    assert_fails(decode_frame(bytes.item, bytes.count, bytes.count - 5, &out, &used), TB_TOO_BIG, "at most");
    bytes.item[0]++;
    assert_true(tb__vec_push(&bytes, 0));
    assert_fails(decode_frame(bytes.item, bytes.count, TB__STORE_MAX_REPLY, &out, &used), TB_INVALID, "bytes follow");
    assert_int_equal(out.id, 5);
    free(entries.item);
    free(bytes.item);
    assert_string_equal(tb__store_op_name(TB__STORE_WAIT_CHANGE), "wait_change");
    assert_string_equal(tb__store_op_name(TB__STORE_NOPS), "unknown");
}

static void urls(void **state) {
    (void)state;
    static const char *const bad[] = {"",          "unix:",         "http://x:1",     "tcp://",     "tcp://host",
                                      "tcp://h:x", "tcp://h:65536", "tcp://::1:7000", "tcp://[::1", "tcp://h:-1"};
    tb__address address;
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        tb__store *store;
        assert_int_equal(tb__address_parse(bad[i], &address), TB_INVALID);
        assert_int_equal(tb__store_open(bad[i], NULL, PATIENCE_MS, &store), TB_INVALID);
    }
    assert_ok(tb__address_parse("tcp://[fe80::1]:80", &address));
    assert_string_equal(address.host, "fe80::1");
    assert_string_equal(address.port, "80");
    assert_ok(tb__address_parse("tcp://:7000", &address));
    assert_string_equal(address.host, "127.0.0.1");
    char path[256];
    memset(path, 'x', sizeof path);
    memcpy(path, "unix:", 5);
    path[sizeof path - 1] = '\0';
    assert_int_equal(tb__address_parse(path, &address), TB_TOO_BIG);
}

/* Whether somebody on another host could be there. */
static void local_urls(void **state) {
    (void)state;
    static const char *const local[] = {"unix:/tmp/s",           "tcp://127.0.0.1:7000",
                                        "tcp://localhost:0",     "tcp://[::1]:7000",
                                        "tcp://:7000",           "tcp://127.1.2.3:1?namespace=n",
                                        "etcd://127.0.0.1:2379", "etcd://localhost:1,[::1]:2?namespace=n"};
    static const char *const far[] = {"tcp://10.0.0.1:7000",
                                      "tcp://node0:7000",
                                      "tcp://localhost.example:1",
                                      "tcp://0.0.0.0:7000",
                                      "tcp://[::]:7000",
                                      "etcd://127.0.0.1:1,node1:2",
                                      "etcd://127.0.0.1:1,",
                                      "tcp://127:7000",
                                      "nonsense",
                                      ""};
    for (size_t i = 0; i < sizeof local / sizeof *local; i++)
        assert_true(tb__store_url_is_local(local[i]));
    for (size_t i = 0; i < sizeof far / sizeof *far; i++)
        assert_false(tb__store_url_is_local(far[i]));
}

/* Every allocation of the caller's thread fails once. */
static void no_memory(void **state) {
    fixture *f = *state;
    tb_status status = TB_NO_MEMORY;
    for (long n = 0; status == TB_NO_MEMORY; n++) {
        tb__store *store = NULL;
        tb__store_value value = {0};
        tb__mem_fail_after(n);
        status = tb__store_open(f->url, TOKEN, PATIENCE_MS, &store);
        if (status == TB_OK)
            status = tb__store_set(store, "k", "v", 1, TB__STORE_PERMANENT, NULL);
        if (status == TB_OK)
            status = tb__store_get(store, "k", &value);
        tb__mem_fail_after(-1);
        tb__store_value_fini(&value);
        tb__store_close(store);
    }
    assert_int_equal(status, TB_OK);
    assert_alive(f->url);
}

static int option_of(int fd, int option) {
    int value = 0;
    socklen_t length = sizeof value;
    assert_int_equal(getsockopt(fd, IPPROTO_TCP, option, &value, &length), 0);
    return value;
}

/* A host that goes silent is found out as fast with a request under way as without: at both ends of each connection,
 * all of which this process has. */
static void silent_hosts(void **state) {
    (void)state;
    enum { NFILES = 256 };
    int nends = 0;
    for (int fd = 0; fd < NFILES; fd++) {
        struct sockaddr_storage peer;
        socklen_t length = sizeof peer;
        if (getpeername(fd, (struct sockaddr *)&peer, &length) != 0 || peer.ss_family != AF_INET)
            continue;
        nends++;
        int idle_s = option_of(fd, TCP_KEEPIDLE), probes_s = option_of(fd, TCP_KEEPCNT) * option_of(fd, TCP_KEEPINTVL);
        int unanswered_ms = option_of(fd, TCP_USER_TIMEOUT);
        assert_true(unanswered_ms > idle_s * 1000 && unanswered_ms < (idle_s + probes_s) * 1000);
    }
    assert_int_equal(nends, 4);
}

#define OVER(kind, test)                                                                                               \
    { #test " over " kind, test, set_up, tear_down, (void *)(uintptr_t)(kind) }
#define OVER_ETCD(test) OVER("etcd", test)
#define OVER_ALL(test)  OVER("unix", test), OVER("tcp://127.0.0.1:0", test)

/* What holds for every implementation. */
#define CONFORMANCE(OF)                                                                                                \
    OF(set_and_get), OF(largest), OF(compare_and_set), OF(create_guarded), OF(counters), OF(blocks), OF(prefixes),     \
        OF(namespaces), OF(deadlines), OF(changes), OF(ephemerals), OF(many_threads), OF(waiting_threads),             \
        OF(followed_changes), OF(forgotten_changes), OF(no_memory)

static int test_etcd(void) {
    const struct CMUnitTest tests[] = {CONFORMANCE(OVER_ETCD)};
    return etcd_is_missing() ? SKIPPED : cmocka_run_group_tests(tests, start_the_etcd, stop_the_etcd);
}

int main(int argc, char **argv) {
    if (argc == 2 && strcmp(argv[1], "etcd") == 0)
        return test_etcd();
    const struct CMUnitTest tests[] = {
        CONFORMANCE(OVER_ALL),  OVER("tcp://localhost:0", set_and_get), cmocka_unit_test(frames),
        cmocka_unit_test(urls), cmocka_unit_test(local_urls),           OVER("tcp://127.0.0.1:0", silent_hosts),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
