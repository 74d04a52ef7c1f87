/* Temporary files: what killed processes leave is removed, what a process writes is not, however the two meet. */
#include "format/file.h"

#include "format/format_test.h"

#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <sys/wait.h>

static void remove_all(const char *dir, size_t expected) {
    tb__leftovers found;
    assert_ok(tb__leftovers_remove(dir, &found));
    assert_int_equal(found.count, expected);
    assert_int_equal(found.nstuck, 0);
}

static void names(void **state) {
    folder *f = *state;
    static const char *const ours[] = {".rank_0.safetensors.1.0.tmp", ".model-00001-of-00002.safetensors.4711.12.tmp",
                                       ".model.safetensors.index.json.99.1.tmp"};
    static const char *const others[] = {
        "rank_0.safetensors",
        "rank_0.safetensors.1.0.tmp",
        ".rank_0.safetensors.1.tmp",
        ".rank_0.safetensors.1.0.tmp2",
        ".rank_0.safetensors.1..tmp",
        ".safetensors.1.0.tmp",
        ".notes.txt.1.0.tmp",
        ".rank_0.safetensors.1.0x.tmp",
        ".tmp",
        ".1.0.tmp",
        "..rank_0.safetensors.-1.0.tmp",
        ".rank_0.safetensors",
    };
    enum { OURS = sizeof ours / sizeof *ours, OTHERS = sizeof others / sizeof *others };
    for (int i = 0; i < OURS; i++)
        write_bytes(path_in(f, ours[i]), "x", 1);
    for (int i = 0; i < OTHERS; i++)
        write_bytes(path_in(f, others[i]), "x", 1);
    assert_int_equal(mkdir(path_in(f, ".rank_1.safetensors.1.0.tmp"), 0777), 0);
    assert_int_equal(symlink("rank_0.safetensors", path_in(f, ".rank_2.safetensors.1.0.tmp")), 0);
    remove_all(f->path, OURS);
    assert_int_equal(count_entries(f->path), OTHERS + 2);
    remove_all(path_in(f, "none"), 0);
}

/* From its beginning until it has its name, whatever was flushed before. */
static void held(void **state) {
    folder *f = *state;
    tb__draft draft;
    assert_ok(tb__draft_init(&draft, path_in(f, "rank_0.safetensors"), 1 << 20));
    remove_all(f->path, 0);
    assert_ok(tb__draft_flush(&draft, false));
    remove_all(f->path, 0);
    assert_ok(tb__draft_flush(&draft, true));
    remove_all(f->path, 0);
    assert_int_equal(count_entries(f->path), 1);
    assert_ok(tb__draft_commit(&draft));
    tb__draft_fini(&draft);
    remove_all(f->path, 0);
    assert_int_equal(access(path_in(f, "rank_0.safetensors"), F_OK), 0);
    assert_int_equal(count_entries(f->path), 1);
}

static void killed(void **state) {
    folder *f = *state;
    const char *path = path_in(f, "rank_0.safetensors");
    int ready[2];
    char byte;
    assert_int_equal(pipe(ready), 0);
    pid_t pid = fork();
    if (pid == 0) {
        tb__draft draft;
        (void)!write(ready[1], tb__draft_init(&draft, path, 1 << 20) == TB_OK ? "y" : "n", 1);
        pause();
        _exit(0);
    }
    assert_true(pid > 0);
    assert_int_equal(read(ready[0], &byte, 1), 1);
    assert_int_equal(byte, 'y');
    remove_all(f->path, 0);
    assert_int_equal(count_entries(f->path), 1);
    kill(pid, SIGKILL);
    assert_int_equal(waitpid(pid, NULL, 0), pid);
    tb__leftovers found;
    assert_ok(tb__leftovers_remove(f->path, &found));
    assert_int_equal(found.count, 1);
    assert_true(found.nbytes >= 0);
    assert_int_equal(count_entries(f->path), 0);
    close(ready[0]);
    close(ready[1]);
}

typedef struct sweeper {
    const char *dir;
    atomic_bool is_over;
} sweeper;

static void *sweep(void *arg) {
    sweeper *s = arg;
    tb__leftovers found;
    while (!atomic_load(&s->is_over)) {
        if (tb__leftovers_remove(s->dir, &found) != TB_OK)
            abort();
    }
    return NULL;
}

/* One process begins files while another looks for leftovers, all the time: each file gets its name. */
static void both_at_once(void **state) {
    folder *f = *state;
    enum { FILES = 500 };
    sweeper s = {.dir = f->path};
    pthread_t thread;
    assert_int_equal(pthread_create(&thread, NULL, sweep, &s), 0);
    const char *path = path_in(f, "rank_0.safetensors");
    for (int i = 0; i < FILES; i++) {
        tb__draft draft;
        assert_ok(tb__draft_init(&draft, path, 1));
        assert_ok(tb__file_write(draft.fd, path, 0, "x", 1));
        assert_ok(tb__draft_flush(&draft, false));
        assert_ok(tb__draft_commit(&draft));
        tb__draft_fini(&draft);
    }
    atomic_store(&s.is_over, true);
    pthread_join(thread, NULL);
    assert_int_equal(count_entries(f->path), 1);
}

#define in_folder(test) cmocka_unit_test_setup_teardown(test, folder_set_up, folder_tear_down)

int main(void) {
    const struct CMUnitTest tests[] = {in_folder(names), in_folder(held), in_folder(killed), in_folder(both_at_once)};
    return cmocka_run_group_tests_name("files", tests, NULL, NULL);
}
