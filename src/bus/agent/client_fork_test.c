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
    return strstr(tb_error_detail(), words) && strstr(tb_error_detail(), "connect again");
}

#define child_check(claim)                                                                                             \
    do {                                                                                                               \
        if (!(claim))                                                                                                  \
            child_fails(__LINE__, #claim);                                                                             \
    } while (0)

#define refused(call, what) child_check(tb_error_set(TB_OK, "") == TB_OK && (call) == TB_REFUSED && is_explained(what))

static void use_all(const client_setup *s) {
    tb_client_batch *other = NULL;
    tb_client_status status = {.size = sizeof status};
    tb_client_pair_state pair = {.size = sizeof pair};
    tb_tensor w = part_tensor(&s->w);
    refused(tb_client_init_pair(s->client, "q", "b", "mesh=1 place=R", 0), "client");
    refused(tb_client_batch_create(s->client, "other", NULL, &other), "client");
    child_check(tb_client_fd(s->client) == -1);
    child_check(tb_client_rank(s->client) >= 0 && *tb_client_group(s->client) == 'a');
    refused(tb_client_batch_add(s->batch, "p", "v", &w), "batch");
    refused(tb_client_batch_add_pair(s->batch, "p"), "batch");
    refused(tb_client_register(s->batch, 0), "batch");
    refused(tb_client_batch_remove_pair(s->batch, "p"), "batch");
    refused(tb_client_transfer(s->batch, true, NULL), "batch");
    refused(tb_client_wait(s->batch, true, TB_COMMITTED, -1), "batch");
    refused(tb_client_proceed(s->batch), "batch");
    refused(tb_client_query(s->batch, &status), "batch");
    refused(tb_client_query_pair(s->batch, "p", &pair), "batch");
    refused(tb_client_cleanup(s->batch), "batch");
}

/* A client of its own, at the same agent. */
static void connect_again(const rank *r) {
    tb_client *own = NULL;
    tb_client_opts opts = {.size = sizeof opts, .timeout_ms = PATIENCE_MS};
    child_check(tb_client_connect(seat_of(r)->path, &opts, &own) == TB_OK);
    child_check(tb_client_rank(own) >= 0);
    tb_client_close(own);
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
                tb_client_close(s->client);
            if (i < 3)
                tb_client_batch_destroy(s->batch);
            if (i == 1 || i == 2)
                tb_client_close(s->client);
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
    tb_client_transfer_opts no_wait = {.size = sizeof no_wait, .no_wait = true};
    move_in(r, &s, "mesh=1 place=R", "mesh=2 place=S0", ROWS, COLUMNS);
    client_exchange(r, &s, "a", 1);
    meet(r);
    if (is_a(r)) {
        part_fill(&s.w, 2);
        check_ok(tb_client_transfer(s.batch, true, &no_wait));
        let_children_use(r, &s);
    } else {
        part_poison(&s.w);
    }
    meet(r);
    if (is_a(r))
        check_ok(tb_client_wait(s.batch, true, TB_COMMITTED, -1));
    else
        check_ok(tb_client_transfer(s.batch, false, NULL));
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
