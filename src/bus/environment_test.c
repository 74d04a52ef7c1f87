/* A seat that the environment tells: by our variables, and by those of whoever starts processes. */
#include "bus/bus_test.h"

typedef struct variable {
    const char *name, *value;
} variable;

#define STORE                                                                                                          \
    { "TENSORBUS_STORE", "unix:/nowhere/at/all" }
#define GROUP                                                                                                          \
    { "TENSORBUS_GROUP", "a" }

enum { MOST = 6 };

static const char *const all[] = {"TENSORBUS_STORE",
                                  "TENSORBUS_AGENT",
                                  "TENSORBUS_GROUP",
                                  "TENSORBUS_INDEX",
                                  "TENSORBUS_SIZE",
                                  "RANK",
                                  "WORLD_SIZE",
                                  "OMPI_COMM_WORLD_RANK",
                                  "PMI_RANK",
                                  "OMPI_COMM_WORLD_SIZE",
                                  "PMI_SIZE",
                                  "SLURM_STEP_NUM_TASKS",
                                  "SLURM_PROCID",
                                  "LWS_WORKER_INDEX",
                                  "LWS_GROUP_SIZE",
                                  "SLURM_NTASKS",
                                  "JOB_COMPLETION_INDEX",
                                  "TENSORBUS_TOKEN_FILE"};

static void set_variables(const variable *list) {
    for (size_t i = 0; i < sizeof all / sizeof *all; i++)
        unsetenv(all[i]);
    for (; list->name; list++)
        setenv(list->name, list->value, 1);
}

static int make_scene(void **state) {
    scene *s = calloc(1, sizeof *s);
    scene_init(s);
    *state = s;
    return 0;
}

static int remove_scene(void **state) {
    set_variables((const variable[]){{0}});
    scene_fini(*state);
    free(*state);
    return 0;
}

static void test_seats(void **state) {
    const scene *s = *state;
    static const struct {
        variable list[MOST];
        int32_t index, size;
    } cases[] = {
        {{{"TENSORBUS_INDEX", "2"}, {"TENSORBUS_SIZE", "3"}, {"RANK", "4"}, {"WORLD_SIZE", "5"}}, 2, 3},
        {{{"RANK", "4"}, {"WORLD_SIZE", "5"}, {"SLURM_PROCID", "0"}, {"SLURM_STEP_NUM_TASKS", "1"}}, 4, 5},
        {{{"RANK", "4"}, {"OMPI_COMM_WORLD_RANK", "1"}, {"OMPI_COMM_WORLD_SIZE", "6"}}, 1, 6}, /* RANK has no size */
        {{{"PMI_RANK", "0"}, {"PMI_SIZE", "1"}}, 0, 1},
        {{{"SLURM_PROCID", "7"}, {"SLURM_STEP_NUM_TASKS", "8"}, {"SLURM_NTASKS", "16"}}, 7, 8},
        {{{"LWS_WORKER_INDEX", "1"}, {"LWS_GROUP_SIZE", "2"}}, 1, 2},
        {{{"JOB_COMPLETION_INDEX", "3"}, {"TENSORBUS_SIZE", "4"}}, 3, 4},
        {{{"RANK", "3"}, {"WORLD_SIZE", "8"}, {"TENSORBUS_SIZE", "12"}}, 3, 12},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        tb_world *world = NULL;
        const char *group;
        int32_t index, size;
        char name[16];
        set_variables(cases[i].list);
        snprintf(name, sizeof name, "group %zu", i);
        setenv("TENSORBUS_GROUP", name, 1);
        setenv("TENSORBUS_STORE", s->url, 1);
        check_ok(tb_world_join(NULL, NULL, 0, 0, NULL, &world));
        tb_world_seat(world, &group, &index, &size);
        assert_string_equal(group, name);
        assert_int_equal(index, cases[i].index);
        assert_int_equal(size, cases[i].size);
        tb_world_destroy(world);
    }
}

/* What the call gives counts, whatever the environment says. */
static void test_call_first(void **state) {
    const scene *s = *state;
    tb_world *world = NULL;
    const char *group;
    int32_t index, size;
    set_variables((const variable[]){{"TENSORBUS_STORE", "unix:/nowhere/at/all"},
                                     {"TENSORBUS_GROUP", "b"},
                                     {"TENSORBUS_INDEX", "1"},
                                     {"TENSORBUS_SIZE", "2"},
                                     {0}});
    check_ok(tb_world_join(s->url, "a", 3, 4, NULL, &world));
    tb_world_seat(world, &group, &index, &size);
    assert_string_equal(group, "a");
    assert_int_equal(index, 3);
    assert_int_equal(size, 4);
    tb_world_destroy(world);
    check_ok(tb_world_join(s->url, NULL, 0, 4, NULL, &world));
    tb_world_seat(world, &group, &index, &size);
    assert_string_equal(group, "b");
    assert_int_equal(index, 0);
    tb_world_destroy(world);
}

static void test_token(void **state) {
    const scene *s = *state;
    tb_world *a = NULL, *b = NULL;
    char path[64];
    snprintf(path, sizeof path, "%s/token", s->folder);
    FILE *file = fopen(path, "we");
    fputs("a token of more than 32 bytes, which is enough\n", file);
    fclose(file);
    set_variables(
        (const variable[]){{"TENSORBUS_STORE", s->url}, {"TENSORBUS_GROUP", "a"}, {"TENSORBUS_TOKEN_FILE", path}, {0}});
    check_ok(tb_world_join(NULL, NULL, 0, 2, NULL, &a));
    check_fails(tb_world_join(s->url, NULL, 1, 2, NULL, &b), TB_DENIED, "token");
    check_ok(tb_world_join(NULL, NULL, 1, 2, NULL, &b));
    tb_world_destroy(b);
    tb_world_destroy(a);
    unlink(path);
    check_fails(tb_world_join(NULL, NULL, 1, 2, NULL, &b), TB_INVALID,
                "TENSORBUS_TOKEN_FILE in the environment: can't");
}

static void test_refusals(void **state) {
    (void)state;
    static const struct {
        variable list[MOST];
        const char *words;
    } cases[] = {
        {{{0}}, "set TENSORBUS_STORE to the URL"},
        {{STORE, {0}}, "set TENSORBUS_GROUP"},
        {{STORE, GROUP}, "set TENSORBUS_INDEX and TENSORBUS_SIZE, or start it by `tensorbus run`"},
        {{STORE, GROUP, {"SLURM_NTASKS", "4"}}, "set TENSORBUS_INDEX and"},
        {{STORE, GROUP, {"TENSORBUS_INDEX", ""}, {"TENSORBUS_SIZE", "4"}}, "set TENSORBUS_INDEX and"},
        {{STORE, GROUP, {"JOB_COMPLETION_INDEX", "4"}}, "JOB_COMPLETION_INDEX is set, but nothing tells the size"},
        {{STORE, GROUP, {"TENSORBUS_INDEX", "1"}}, "TENSORBUS_INDEX is set, but nothing tells the size"},
        {{STORE, GROUP, {"RANK", "1x"}, {"WORLD_SIZE", "2"}}, "RANK in the environment: '1x' is not a number"},
        {{STORE, GROUP, {"RANK", "2"}, {"WORLD_SIZE", "2"}}, "'2' is not a number from 0 to 1"},
        {{STORE, GROUP, {"RANK", "0"}, {"WORLD_SIZE", "0"}}, "WORLD_SIZE in the environment: '0' is not"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        tb_world *world = NULL;
        set_variables(cases[i].list);
        check_fails(tb_world_join(NULL, NULL, 0, 0, NULL, &world), TB_INVALID, cases[i].words);
        assert_null(world);
    }
    tb_world *world = NULL;
    set_variables((const variable[]){{"TENSORBUS_AGENT", "/nowhere/agent.sock"}, {0}});
    check_fails(
        tb_world_join(NULL, NULL, 0, 0, &(tb_world_opts){.size = sizeof(tb_world_opts), .timeout_ms = 10}, &world),
        TB_IO, "/nowhere/agent.sock");
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(test_seats, make_scene, remove_scene),
        cmocka_unit_test_setup_teardown(test_call_first, make_scene, remove_scene),
        cmocka_unit_test_setup_teardown(test_token, make_scene, remove_scene),
        cmocka_unit_test_setup_teardown(test_refusals, make_scene, remove_scene),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
