/* A forked child and the clients it inherits: every call on them fails at once, closing them harms nobody, and the
 * parent goes on with its agent. */
#include "bus/agent/agent_test.h"

#include <sys/wait.h>

enum { ROWS = 40, COLUMNS = 24, CHILD_S = 60 };

static bool is_child;

#ifdef __SANITIZE_ADDRESS__
/* LeakSanitizer asks. In a child it does not see what the stacks of the parent's other threads point to. */
TB_API int __lsan_is_turned_off(void); // NOLINT(bugprone-reserved-identifier)
int __lsan_is_turned_off(void) {       // NOLINT(bugprone-reserved-identifier)
    return is_child;
}
#endif

static void child_fails(int line, const char *what) {
    fprintf(stderr, "%s:%d: in the child: %s; the last sentence is: %s\n", __FILE__, line, what, tb_error_detail());
    _exit(1);
}

static bool is_explained(const char *what) {
    char words[80];
    snprintf(words, sizeof words, "this %s belongs to process %d; a forked child can't use it", what, (int)getppid());
    return strstr(tb_error_detail(), words) && strstr(tb_error_detail(), "join again");
}

#define child_check(claim)                                                                                             \
    do {                                                                                                               \
        if (!(claim))                                                                                                  \
            child_fails(__LINE__, #claim);                                                                             \
    } while (0)

#define refused(call, what) child_check(tb_error_set(TB_OK, "") == TB_OK && (call) == TB_REFUSED && is_explained(what))

static void use_all(const client_setup *s) {
    tb_world *world = s->client->world;
    tb_batch *batch = s->batch->batch, *other = NULL;
    tb_pair *pair = program_find_pair(s->client, "p"), *second = NULL;
    tb_transfer *transfer = s->batch->last[1], *next = NULL;
    tb_transfer_state state = {.size = sizeof state};
    tb_batch_state received = {.size = sizeof received};
    uint64_t version;
    bool is_torn;
    char *text;
    tb_tensor w = part_tensor(&s->w);
    refused(tb_pair_create(world, "q", "b", "mesh=1 place=R", NULL, &second), "world");
    refused(tb_batch_create(world, "other", NULL, &other), "world");
    refused(tb_world_enter(world, "c", 0, 1), "world");
    refused(tb_world_wait(world, "a", 0), "world");
    refused(tb_world_invalidate(world, &w, sizeof w), "world");
    child_check(tb_world_rank(world) >= 0 && *s->client->group == 'a');
    refused(tb_batch_add(batch, pair, "v", &w), "batch");
    refused(tb_batch_add_pair(batch, pair), "batch");
    refused(tb_batch_register(batch, 0), "batch");
    refused(tb_batch_remove_pair(batch, pair), "batch");
    refused(tb_batch_dump(batch, true, &text), "batch");
    refused(tb_send(batch, NULL, &next), "batch");
    refused(tb_batch_query(batch, &received), "batch");
    refused(tb_batch_version(batch, pair, &version, &is_torn), "batch");
    refused(tb_wait(transfer, TB_COMMITTED, -1), "transfer");
    refused(tb_proceed(transfer), "transfer");
    refused(tb_transfer_query(transfer, &state), "transfer");
    refused(tb_transfer_pair(transfer, pair, &state), "transfer");
    child_check(tb_transfer_fd(transfer) == -1);
    tb_cancel(transfer);
}

/* A client of its own, at the same agent. */
static void connect_again(const rank *r) {
    program *own = NULL;
    tb_world_opts opts = {.size = sizeof opts, .timeout_ms = PATIENCE_MS};
    child_check(program_connect(seat_of(r)->path, &opts, &own) == TB_OK);
    child_check(tb_world_rank(own->world) >= 0);
    program_close(own);
}

static void let_children_use(const rank *r, client_setup *s) {
    for (int i = 0; i < 4; i++) {
        fflush(NULL);
        pid_t pid = fork();
        check(pid >= 0);
        if (pid == 0) {
            is_child = true;
            alarm(CHILD_S);
            use_all(s);
            connect_again(r);
            if (i == 0)
                program_close(s->client);
            if (i < 3)
                program_batch_destroy(s->batch);
            if (i == 1 || i == 2)
                program_close(s->client);
            if (i % 2)
                exit(0);
            _exit(0);
        }
        int status = 0;
        check(waitpid(pid, &status, 0) == pid);
        check(WIFEXITED(status) && WEXITSTATUS(status) == 0);
    }
}

static void go_on(rank *r) {
    client_setup s;
    program_transfer_opts no_wait = {.no_wait = true};
    move_in(r, &s, "mesh=1 place=R", "mesh=2 place=S0", ROWS, COLUMNS);
    client_exchange(r, &s, "a", 1);
    meet(r);
    if (is_a(r)) {
        part_fill(&s.w, 2);
        check_ok(program_transfer(s.batch, true, &no_wait));
        let_children_use(r, &s);
    } else {
        part_poison(&s.w);
    }
    meet(r);
    if (is_a(r))
        check_ok(program_wait(s.batch, true, TB_COMMITTED, -1));
    else
        check_ok(program_transfer(s.batch, false, NULL));
    check(part_holds(&s.w, 2));
    meet(r);
    client_exchange(r, &s, "b", 3);
    move_out(&s);
}

static void test_children(void **state) {
    (void)state;
    run_agents(go_on, 1, 2);
}

int main(void) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_children)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
