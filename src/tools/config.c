/* tensorbus config: the settings, what is in force, and where it comes from. */
#include "tools/tools.h"

#include <inttypes.h>

enum { JSON, NOPTIONS };

static const tool_option options[NOPTIONS + 1] = {
    [JSON] = {"json", NULL, "print JSON; sizes are in bytes"},
};

static const char *origin(const tb__config *config, int key) {
    return config->from_environment[key] ? "environment" : "default";
}

static void add_json(tb__text *out, const tb__config *config) {
    tb__text_add(out, "[");
    for (int key = 0; key < TB__CONFIG_COUNT; key++) {
        const tb__config_entry *entry = &tb__config_table[key];
        tb__text_add(out, "%s{\"name\":\"%s\",\"env\":\"%s\",\"value\":", key ? "," : "", entry->name, entry->env);
        if (entry->kind == TB__CONFIG_IS_TEXT) {
            tb__text_add_json(out, config->text[key]);
        } else if (entry->kind == TB__CONFIG_IS_LEVEL) {
            tb__text_add(out, "\"");
            tb__config_add(config, (tb__config_key)key, out);
            tb__text_add(out, "\"");
        } else {
            tb__text_add(out, "%" PRId64, config->value[key]);
        }
        tb__text_add(out, ",\"source\":\"%s\",\"help\":", origin(config, key));
        tb__text_add_json(out, entry->help);
        tb__text_add(out, "}");
    }
    tb__text_add(out, "]\n");
}

static void add_table(tb__text *out, const tb__config *config) {
    tool_table table = {0};
    tool_table_columns(&table, "name", "environment", "value", "from", "");
    for (int key = 0; key < TB__CONFIG_COUNT; key++) {
        const tb__config_entry *entry = &tb__config_table[key];
        tb__text value = {0};
        tb__config_add(config, (tb__config_key)key, &value);
        tool_table_cell(&table, "%s", entry->name);
        tool_table_cell(&table, "%s", entry->env);
        tool_table_take(&table, &value);
        tool_table_cell(&table, "%s", origin(config, key));
        tool_table_cell(&table, "%s", entry->help);
    }
    tool_table_finish(&table, out);
}

static int run(const tb__config *config, const char *const *value) {
    tb__text out = {0};
    if (value[JSON])
        add_json(&out, config);
    else
        add_table(&out, config);
    return tool_print(&out);
}

const tool_command tool_config = {
    .name = "config",
    .summary = "show all settings, and where each value comes from",
    .usage = "[--json]",
    .details = "Each setting has an environment variable, which changes it; an empty variable counts as not set.\n",
    .options = options,
    .run = run,
};
