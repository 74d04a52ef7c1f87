/* What the demo relies on: a model of the size asked for, values that give every wrong element away, processes of which
 * none is left behind. */
#include "tools/demo.h"

#include "base/process.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

enum { PATIENCE_MS = 60000 };

/* The model */

static void model_has_the_size_asked_for(void **state) {
    static const int64_t sizes[] = {
        TOOL_MIN_MODEL,     100000,          1 << 20, (12 << 20) + 1, INT64_C(64) << 20, INT64_C(1) << 30,
        INT64_C(100) << 30, INT64_C(1) << 62};
    (void)state;
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
        tool_model model;
        assert_int_equal(tool_model_init(&model, sizes[i]), TB_OK);
        int64_t more = model.nelements - sizes[i] / TOOL_ELEMENT;
        assert_in_range(more, 0, 2 * model.hidden - 1); /* less than a row in each of both embeddings */
        assert_int_equal(model.weights.count, 9 * model.nlayers + 3);
        for (size_t j = 0; j < model.weights.count; j++) {
            const tool_weight *weight = &model.weights.item[j];
            assert_int_equal(weight->shape.ndim, weight->cut == TOOL_CUT_NORM ? 1 : 2);
            assert_true(strlen(weight->name) + 1 < sizeof weight->name);
            for (size_t k = 0; k < j; k++)
                assert_string_not_equal(weight->name, model.weights.item[k].name);
        }
        tool_model_fini(&model);
    }
    tool_model model;
    assert_int_equal(tool_model_init(&model, TOOL_MIN_MODEL - 1), TB_INVALID);
    assert_int_equal(tool_model_init(&model, 1 << 30), TB_OK);
    assert_int_equal(model.nlayers, 32);
    tool_model_fini(&model);
}

static void default_layouts_fit(void **state) {
    (void)state;
    tool_model model;
    assert_int_equal(tool_model_init(&model, 1 << 20), TB_OK);
    for (int32_t n = 1; n <= 9; n++) {
        tool_side side[TOOL_NSIDES];
        assert_int_equal(tool_side_init(&side[TOOL_SOURCE], TOOL_SOURCE, NULL, n), TB_OK);
        assert_int_equal(tool_side_init(&side[TOOL_TARGET], TOOL_TARGET, NULL, 10 - n), TB_OK);
        assert_int_equal(tool_sides_check(side, &model), TB_OK);
        for (int which = 0; which < TOOL_NSIDES; which++) {
            assert_int_equal(tb_layout_nranks(side[which].layout[TOOL_CUT_ROW]), side[which].nranks);
            tool_side_fini(&side[which]);
        }
    }
    tool_side side;
    assert_int_equal(tool_side_init(&side, TOOL_TARGET, NULL, 0), TB_OK);
    assert_string_equal(side.text[TOOL_CUT_ROW], "mesh=2,2 place=Replicate,Shard(1)");
    tool_side_fini(&side);
    tool_model_fini(&model);
}

static void given_layouts_are_looked_at(void **state) {
    (void)state;
    tool_side side;
    assert_int_equal(tool_side_init(&side, TOOL_TARGET, "mesh=2 place=S1 ranks=4,2", 0), TB_OK);
    assert_int_equal(side.nranks, 5);
    assert_string_equal(side.text[TOOL_CUT_NORM], "mesh=2 place=Replicate ranks=4,2");
    tool_side_fini(&side);
    assert_int_equal(tool_side_init(&side, TOOL_TARGET, "mesh=2 place=S0", 3), TB_OK);
    assert_string_equal(side.text[TOOL_CUT_NORM], "mesh=2 place=Shard(0)");
    tool_side_fini(&side);
    assert_int_equal(tool_side_init(&side, TOOL_TARGET, "mesh=4 place=S0", 3), TB_INVALID);
    assert_non_null(strstr(tb_error_detail(), "rank 3 is in the mesh, but the ranks of this side are 0 to 2"));
    assert_int_equal(tool_side_init(&side, TOOL_TARGET, "mesh=1 place=S0 ranks=1000", 0), TB_INVALID);
    assert_int_equal(tool_side_init(&side, TOOL_SOURCE, "mesh=2 place=P", 0), TB_REFUSED);
}

/* Values */

/* A rank's part of one tensor, as a layout has it. */
typedef struct held {
    tool_weight weight;
    tool_part part;
    uint16_t *data;
} held;

static void hold(held *h, const char *shape, const char *text, int32_t rank) {
    tb_layout *layout;
    *h = (held){.weight = {.name = "w"}};
    assert_int_equal(tb_shape_parse(shape, &h->weight.shape), TB_OK);
    assert_int_equal(tb_layout_parse(text, &layout), TB_OK);
    h->part = (tool_part){.tensor = 7, .weight = &h->weight};
    assert_int_equal(tb_layout_local(layout, &h->weight.shape, rank, &h->part.local), TB_OK);
    assert_int_equal(tb_shape_size(&h->part.local.shape, TB_BF16, &h->part.nelements, NULL), TB_OK);
    tb_layout_destroy(layout);
    h->data = calloc((size_t)h->part.nelements + 1, sizeof *h->data);
    assert_non_null(h->data);
}

static void drop(held *h) {
    tb_local_fini(&h->part.local);
    free(h->data);
}

static bool is_right(held *h, uint32_t version, tool_wrong *wrong) {
    return tool_part_check(&h->part, version, h->data, wrong);
}

/* The elements that the mesh's first rank has under "Shard(1) of 3 columns" and the like, picked one by one from a
 * tensor that was filled as a whole. */
static void parts_agree_with_the_whole(void **state) {
    (void)state;
    enum { ROWS = 211, COLUMNS = 700 }; /* more than two blocks of 65536 */
    static const int listed[] = {650, 651, 652, 10, 11, 699, 10};
    held whole, part;
    tool_wrong wrong;
    hold(&whole, "211,700", "mesh=1 place=R", 0);
    tool_part_fill(&whole.part, 3, whole.data);
    assert_true(is_right(&whole, 3, &wrong));

    hold(&part, "211,700", "mesh=3 place=Shard(1)", 1); /* columns 234 to 467 */
    assert_int_equal(part.part.nelements, ROWS * 234);
    for (int i = 0; i < ROWS; i++)
        memcpy(part.data + i * 234, whole.data + i * COLUMNS + 234, 234 * sizeof *part.data);
    assert_true(is_right(&part, 3, &wrong));
    drop(&part);

    hold(&part, "211,700", "mesh=2,2 place=Shard(0),StridedShard(1,2)", 2); /* rows from 106, columns of two pieces */
    for (int i = 106, n = 0; i < ROWS; i++) {
        for (int j = 0; j < 2; j++, n += 175)
            memcpy(part.data + n, whole.data + i * COLUMNS + j * 350, 175 * sizeof *part.data);
    }
    assert_true(is_right(&part, 3, &wrong));
    drop(&part);

    hold(&part, "211,700", "mesh=1 place=Explicit(1, 650-653,10-12,699-700,10-11)", 0);
    assert_int_equal(part.part.nelements, ROWS * 7);
    for (int n = 0; n < ROWS * 7; n++)
        part.data[n] = whole.data[n / 7 * COLUMNS + listed[n % 7]];
    assert_true(is_right(&part, 3, &wrong));
    drop(&part);
    drop(&whole);

    hold(&part, "8", "mesh=2 place=S0", 5); /* not in the mesh */
    tool_part_fill(&part.part, 1, part.data);
    assert_true(is_right(&part, 1, &wrong));
    assert_int_equal(part.data[0], 0);
    drop(&part);
    hold(&part, "", "mesh=1 place=R", 0);
    tool_part_poison(&part.part, 1, part.data);
    assert_false(is_right(&part, 1, &wrong));
    tool_part_fill(&part.part, 1, part.data);
    assert_true(is_right(&part, 1, &wrong));
    drop(&part);
}

static void every_wrong_element_is_found(void **state) {
    (void)state;
    held h;
    tool_wrong wrong;
    hold(&h, "40,25", "mesh=2,2 place=Shard(0),Shard(1)", 3); /* rows from 20, columns from 13 */
    tool_part_fill(&h.part, 2, h.data);
    for (int64_t i = 0; i < h.part.nelements; i++) {
        uint16_t right = h.data[i];
        h.data[i] ^= (uint16_t)(1 << i % 16);
        assert_false(is_right(&h, 2, &wrong));
        assert_int_equal(wrong.count, 1);
        assert_int_equal(wrong.index[0], 20 + i / 12);
        assert_int_equal(wrong.index[1], 13 + i % 12);
        assert_int_equal(wrong.expected, right);
        assert_int_equal(wrong.found, h.data[i]);
        h.data[i] = right;
    }
    assert_true(is_right(&h, 2, &wrong));
    drop(&h);
}

/* Unwritten: all of them. Moved by any distance within a block: all of them. */
static void systematic_errors_are_found(void **state) {
    (void)state;
    enum { N = 65536, STEP = 1021 };
    held h;
    tool_wrong wrong;
    hold(&h, "65536", "mesh=1 place=R", 0);
    tool_part_poison(&h.part, 1, h.data);
    assert_false(is_right(&h, 1, &wrong));
    assert_int_equal(wrong.count, N);
    tool_part_fill(&h.part, 1, h.data);
    assert_true(is_right(&h, 1, &wrong));
    uint16_t *moved = calloc(N, sizeof *moved);
    assert_non_null(moved);
    for (int by = 1; by < N; by += STEP) {
        for (int i = 0; i < N; i++)
            moved[i] = h.data[(i + by) % N];
        assert_false(tool_part_check(&h.part, 1, moved, &wrong));
        assert_int_equal(wrong.count, N);
    }
    free(moved);

    /* Another version, another tensor: nearly all differ. */
    assert_false(is_right(&h, 2, &wrong));
    assert_true(wrong.count > N - 100);
    h.part.tensor++;
    assert_false(is_right(&h, 1, &wrong));
    assert_true(wrong.count > N - 100);
    drop(&h);

    /* A shift by exactly one block. */
    hold(&h, "131072", "mesh=1 place=R", 0);
    tool_part_fill(&h.part, 1, h.data);
    memmove(h.data, h.data + N, N * sizeof *h.data);
    assert_false(is_right(&h, 1, &wrong));
    assert_true(wrong.count > N - 100);
    drop(&h);
}

static void the_sentence_names_the_element(void **state) {
    (void)state;
    tool_model model;
    tool_side side;
    tool_parts parts;
    _Atomic int64_t done = 0;
    assert_int_equal(tool_model_init(&model, 1 << 20), TB_OK);
    assert_int_equal(tool_side_init(&side, TOOL_TARGET, NULL, 4), TB_OK);
    assert_int_equal(tool_parts_init(&parts, &model, &side, 1), TB_OK);
    char *memory = calloc(1, (size_t)parts.nbytes);
    assert_non_null(memory);
    for (size_t i = 0; i < parts.count; i++)
        tool_part_fill(&parts.part[i], 2, memory + parts.part[i].offset);
    assert_int_equal(tool_parts_check(&parts, 2, memory, &done), TB_OK);
    assert_int_equal(done, parts.nelements * TOOL_ELEMENT);

    assert_string_equal(model.weights.item[4].name, "model.layers.0.self_attn.o_proj.weight");
    assert_int_equal(model.weights.item[4].cut, TOOL_CUT_ROW);
    uint16_t *o_proj = (uint16_t *)(memory + parts.part[4].offset);
    o_proj[model.hidden / 2 + 3] ^= 1; /* the second row, of those cut in two */
    char expected[64];
    snprintf(expected, sizeof expected, "o_proj.weight is wrong at [1,%d]: expected 0x", (int)model.hidden / 2 + 3);
    assert_int_equal(tool_parts_check(&parts, 2, memory, &done), TB_INTERNAL);
    assert_non_null(strstr(tb_error_detail(), expected));
    assert_non_null(strstr(tb_error_detail(), "version 2 of model.layers.0.self_attn"));
    free(memory);
    tool_parts_fini(&parts);
    tool_side_fini(&side);
    tool_model_fini(&model);
}

/* Processes */

static const char *const names[] = {"red", "green", "blue", "white"};

enum { CREW = sizeof names / sizeof *names };

typedef struct scene {
    tool_barrier barrier;
    int nrounds;
    _Atomic int sum[8];
    int lines; /* in the parent */
    char line[512];
} scene;

static void hang(void) {
    for (;;)
        pause();
}

static tb_status meet(void *arg, int rank) {
    scene *s = arg;
    for (int round = 0; round < s->nrounds; round++) {
        int64_t released_ns = 0;
        atomic_fetch_add(&s->sum[round], rank + 1);
        TB_TRY(tool_barrier_wait(&s->barrier, PATIENCE_MS, &released_ns));
        if (atomic_load(&s->sum[round]) != 1 + 2 + 3 + 4 || released_ns <= 0 || released_ns > tool_now_ns())
            return tb__fail(TB_INTERNAL, "round %d began too early", round);
    }
    return TB_OK;
}

static tb_status fail_one(void *arg, int rank) {
    (void)arg;
    if (rank == 2)
        return tb__fail(TB_REFUSED, "it is too late");
    hang();
    return TB_OK;
}

static tb_status kill_one(void *arg, int rank) {
    (void)arg;
    if (rank == 1)
        kill(getpid(), SIGKILL);
    hang();
    return TB_OK;
}

/* The last one fails for a reason of its own, the others because of it. */
static tb_status follow_one(void *arg, int rank) {
    scene *s = arg;
    int64_t released_ns;
    if (rank < CREW - 1) {
        TB_TRY(tool_barrier_wait(&s->barrier, PATIENCE_MS, &released_ns));
        return tb__fail(TB_LOST, "white is lost");
    }
    tb_status status = tb__fail(TB_IO, "the disk is full");
    tb_status met = tool_barrier_wait(&s->barrier, PATIENCE_MS, &released_ns);
    return met == TB_OK ? status : met;
}

static tb_status exit_one(void *arg, int rank) {
    (void)arg;
    if (rank == 0)
        _exit(23);
    hang();
    return TB_OK;
}

static tb_status speak(void *arg, int rank) {
    (void)arg;
    if (rank == 3)
        fprintf(stderr, "first\nsecond"); /* whose line does not end */
    return TB_OK;
}

static tb_status wait_in_vain(void *arg, int rank) {
    scene *s = arg;
    int64_t released_ns;
    return rank == 0 ? TB_OK : tool_barrier_wait(&s->barrier, 50, &released_ns);
}

static void hear(void *arg, const char *name, char *line) {
    scene *s = arg;
    s->lines++;
    snprintf(s->line, sizeof s->line, "%s: %s", name, line);
}

/* Runs a crew; afterwards this process must have no child. */
static tb_status run_crew(tb_status (*work)(void *, int), scene *s) {
    tool_guard guard;
    s->barrier.count = CREW;
    tool_crew crew = {.nranks = CREW, .names = names, .work = work, .said = hear, .arg = s};
    assert_int_equal(tool_guard_init(&guard), TB_OK);
    tb_status status = tool_crew_run(&crew, &guard);
    tool_guard_fini(&guard);
    assert_int_equal(waitpid(-1, NULL, WNOHANG), -1);
    assert_int_equal(errno, ECHILD);
    return status;
}

static scene *make_scene(void) {
    void *s;
    assert_int_equal(tool_share(sizeof(scene), &s), TB_OK);
    return s;
}

static void expect_failure(tb_status (*work)(void *, int), tb_status expected, const char *sentence) {
    scene *s = make_scene();
    assert_int_equal(run_crew(work, s), expected);
    assert_string_equal(tb_error_detail(), sentence);
    tool_unshare(s, sizeof *s);
}

static void a_crew_meets(void **state) {
    (void)state;
    scene *s = make_scene();
    s->nrounds = 8;
    assert_int_equal(run_crew(meet, s), TB_OK);
    assert_int_equal(s->lines, 0);
    tool_unshare(s, sizeof *s);
}

static void who_fails_is_named_and_the_others_are_ended(void **state) {
    (void)state;
    expect_failure(fail_one, TB_REFUSED, "blue: it is too late");
    expect_failure(kill_one, TB_LOST, "green was ended by signal 9 (Killed)");
    expect_failure(exit_one, TB_LOST, "red ended with exit status 23");
    expect_failure(follow_one, TB_IO, "white: the disk is full");
}

static void a_barrier_has_a_deadline(void **state) {
    (void)state;
    scene *s = make_scene();
    assert_int_equal(run_crew(wait_in_vain, s), TB_TIMEOUT);
    assert_non_null(strstr(tb_error_detail(), "of 4 ranks were ready within 50 ms"));
    tool_unshare(s, sizeof *s);
}

static void what_ranks_say_is_passed_on(void **state) {
    (void)state;
    scene *s = make_scene();
    assert_int_equal(run_crew(speak, s), TB_OK);
    assert_int_equal(s->lines, 2);
    assert_string_equal(s->line, "white: second");
    tool_unshare(s, sizeof *s);
}

/* Every rank tells that it is there, then holds on to its end of the pipe until it is ended. */
static int announcement[2];

static tb_status announce_and_hang(void *arg, int rank) {
    (void)arg;
    (void)rank;
    if (write(announcement[1], "!", 1) == 1)
        hang();
    return TB_OK;
}

static bool read_before_deadline(int fd, char *byte, ssize_t *n) {
    struct pollfd poll_fd = {.fd = fd, .events = POLLIN};
    if (poll(&poll_fd, 1, PATIENCE_MS) != 1)
        return false;
    *n = read(fd, byte, 1);
    return true;
}

/* A process with a crew gets the signal; how it ends is returned. The pipe's end tells that the ranks have ended, too.
 */
static int signal_parent(int number, bool whole_group) {
    char byte;
    ssize_t n;
    int wait_status;
    assert_int_equal(pipe(announcement), 0);
    pid_t parent = fork();
    assert_true(parent >= 0);
    if (parent == 0) {
        scene s = {0};
        tool_guard guard;
        setpgid(0, 0);
        close(announcement[0]);
        tool_crew crew = {.nranks = CREW, .names = names, .work = announce_and_hang, .said = hear, .arg = &s};
        if (tool_guard_init(&guard) != TB_OK)
            _exit(90);
        tb_status status = tool_crew_run(&crew, &guard);
        if (waitpid(-1, NULL, WNOHANG) != -1 || status != TB_CANCELLED)
            _exit(91);
        tool_guard_fini(&guard);
        _exit(92);
    }
    close(announcement[1]);
    for (int rank = 0; rank < CREW; rank++) {
        assert_true(read_before_deadline(announcement[0], &byte, &n));
        assert_int_equal(n, 1);
    }
    assert_int_equal(kill(whole_group ? -parent : parent, number), 0);
    assert_int_equal(waitpid(parent, &wait_status, 0), parent);
    assert_true(read_before_deadline(announcement[0], &byte, &n));
    assert_int_equal(n, 0);
    close(announcement[0]);
    assert_true(WIFSIGNALED(wait_status));
    return WTERMSIG(wait_status);
}

static void signals_leave_no_process(void **state) {
    (void)state;
    signal(SIGINT, SIG_DFL); /* whoever runs tests in the background ignores it */
    assert_int_equal(signal_parent(SIGINT, false), SIGINT);
    assert_int_equal(signal_parent(SIGINT, true), SIGINT);
    assert_int_equal(signal_parent(SIGTERM, false), SIGTERM);
    assert_int_equal(signal_parent(SIGTERM, true), SIGTERM);
    assert_int_equal(signal_parent(SIGKILL, false), SIGKILL);
}

static void ignored_signals_stay_ignored(void **state) {
    (void)state;
    scene *s = make_scene();
    s->nrounds = 1;
    signal(SIGHUP, SIG_IGN);
    tool_guard guard;
    assert_int_equal(tool_guard_init(&guard), TB_OK);
    raise(SIGHUP);
    s->barrier.count = CREW;
    tool_crew crew = {.nranks = CREW, .names = names, .work = meet, .said = hear, .arg = s};
    assert_int_equal(tool_crew_run(&crew, &guard), TB_OK);
    tool_guard_fini(&guard);
    signal(SIGHUP, SIG_DFL);
    tool_unshare(s, sizeof *s);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(model_has_the_size_asked_for),
        cmocka_unit_test(default_layouts_fit),
        cmocka_unit_test(given_layouts_are_looked_at),
        cmocka_unit_test(parts_agree_with_the_whole),
        cmocka_unit_test(every_wrong_element_is_found),
        cmocka_unit_test(systematic_errors_are_found),
        cmocka_unit_test(the_sentence_names_the_element),
        cmocka_unit_test(a_crew_meets),
        cmocka_unit_test(who_fails_is_named_and_the_others_are_ended),
        cmocka_unit_test(a_barrier_has_a_deadline),
        cmocka_unit_test(what_ranks_say_is_passed_on),
        cmocka_unit_test(signals_leave_no_process),
        cmocka_unit_test(ignored_signals_stay_ignored),
    };
    return cmocka_run_group_tests_name("demo", tests, NULL, NULL);
}
