/* Settings: defaults, values from the environment, and refused values. */
#include "base/config.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

static int clear_environment(void **state) {
    (void)state;
    for (int key = 0; key < TB__CONFIG_COUNT; key++)
        unsetenv(tb__config_table[key].env);
    return 0;
}

static void assert_value(const tb__config *config, tb__config_key key, const char *expected) {
    tb__text text = {0};
    char *written;
    tb__config_add(config, key, &text);
    assert_int_equal(tb__text_take(&text, &written), TB_OK);
    assert_string_equal(written, expected);
    free(written);
}

static void test_table_is_complete(void **state) {
    (void)state;
    for (int key = 0; key < TB__CONFIG_COUNT; key++) {
        const tb__config_entry *entry = &tb__config_table[key];
        assert_non_null(entry->name);
        assert_non_null(entry->help);
        assert_int_equal(strncmp(entry->env, "TENSORBUS_", 10), 0);
    }
}

static void test_defaults(void **state) {
    (void)state;
    tb__config config;
    assert_int_equal(tb__config_load(&config), TB_OK);
    assert_int_equal(tb__config_log(&config), TB_LOG_WARN);
    assert_int_equal(tb__config_bucket_size(&config), 16 << 20);
    assert_int_equal(tb__config_staging_bytes(&config), 256 << 20);
    assert_int_equal(tb__config_max_in_flight(&config), 2);
    assert_int_equal(tb__config_plan_bytes(&config), 64 << 20);
    for (int key = 0; key < TB__CONFIG_COUNT; key++) {
        assert_false(config.from_environment[key]);
        assert_value(&config, (tb__config_key)key, tb__config_table[key].initial);
    }
}

static void test_environment(void **state) {
    (void)state;
    tb__config config;
    setenv("TENSORBUS_LOG", "Debug", 1);
    setenv("TENSORBUS_BUCKET_SIZE", "1", 1);
    setenv("TENSORBUS_STAGING_BYTES", "1536 MiB", 1);
    setenv("TENSORBUS_MAX_IN_FLIGHT", "4294967295", 1);
    setenv("TENSORBUS_PLAN_BYTES", "3MiB", 1);
    for (int key = TB__CONFIG_COPY; key < TB__CONFIG_COUNT; key++)
        setenv(tb__config_table[key].env, "any text", 1);
    assert_int_equal(tb__config_load(&config), TB_OK);
    assert_int_equal(tb__config_log(&config), TB_LOG_DEBUG);
    assert_int_equal(tb__config_bucket_size(&config), 1);
    assert_int_equal(tb__config_staging_bytes(&config), INT64_C(1536) << 20);
    assert_int_equal(tb__config_max_in_flight(&config), 4294967295);
    assert_int_equal(tb__config_plan_bytes(&config), 3 << 20);
    for (int key = 0; key < TB__CONFIG_COUNT; key++)
        assert_true(config.from_environment[key]);
    assert_value(&config, TB__CONFIG_LOG, "debug");
    assert_value(&config, TB__CONFIG_BUCKET_SIZE, "1");
    assert_value(&config, TB__CONFIG_STAGING_BYTES, "1536MiB");
    assert_value(&config, TB__CONFIG_MAX_IN_FLIGHT, "4294967295");
    assert_value(&config, TB__CONFIG_GROUP, "any text");
}

static void test_empty_is_not_set(void **state) {
    (void)state;
    tb__config config;
    setenv("TENSORBUS_BUCKET_SIZE", "", 1);
    assert_int_equal(tb__config_load(&config), TB_OK);
    assert_int_equal(tb__config_bucket_size(&config), 16 << 20);
    assert_false(config.from_environment[TB__CONFIG_BUCKET_SIZE]);
}

static void test_malformed(void **state) {
    (void)state;
    static const struct {
        const char *env, *value;
    } cases[] = {
        {"TENSORBUS_LOG", "loud"},
        {"TENSORBUS_LOG", " "},
        {"TENSORBUS_BUCKET_SIZE", "0"},
        {"TENSORBUS_BUCKET_SIZE", "-1"},
        {"TENSORBUS_BUCKET_SIZE", "16MX"},
        {"TENSORBUS_BUCKET_SIZE", "9223372036854775808"},
        {"TENSORBUS_STAGING_BYTES", "much"},
        {"TENSORBUS_STAGING_BYTES", "8388608TiB"},
        {"TENSORBUS_MAX_IN_FLIGHT", "0"},
        {"TENSORBUS_MAX_IN_FLIGHT", "2x"},
        {"TENSORBUS_MAX_IN_FLIGHT", "4294967296"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        tb__config config = {.value = {-7}};
        setenv(cases[i].env, cases[i].value, 1);
        assert_int_not_equal(tb__config_load(&config), TB_OK);
        assert_non_null(strstr(tb_error_detail(), cases[i].env));
        assert_int_equal(config.value[0], -7);
        unsetenv(cases[i].env);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup(test_table_is_complete, clear_environment),
        cmocka_unit_test_setup(test_defaults, clear_environment),
        cmocka_unit_test_setup(test_environment, clear_environment),
        cmocka_unit_test_setup(test_empty_is_not_set, clear_environment),
        cmocka_unit_test_setup(test_malformed, clear_environment),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
