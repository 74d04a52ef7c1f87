/* The table of settings, and parsing of their values. */
#include "base/config.h"

#include <inttypes.h>
#include <stdlib.h>
#include <strings.h>

const tb__config_entry tb__config_table[TB__CONFIG_COUNT] = {
    [TB__CONFIG_LOG] = {"log", "TENSORBUS_LOG", "warn", TB__CONFIG_IS_LEVEL,
                        "messages on standard error: off, error, warn, info or debug"},
    [TB__CONFIG_BUCKET_SIZE] = {"bucket_size", "TENSORBUS_BUCKET_SIZE", "16MiB", TB__CONFIG_IS_SIZE,
                                "chunks are packed into buckets of up to this size; 1: a bucket for each chunk"},
    [TB__CONFIG_STAGING_BYTES] = {"staging_bytes", "TENSORBUS_STAGING_BYTES", "256MiB", TB__CONFIG_IS_SIZE,
                                  "staging memory of a rank; staged chunks larger than a quarter of it are cut"},
    [TB__CONFIG_MAX_IN_FLIGHT] = {"max_in_flight", "TENSORBUS_MAX_IN_FLIGHT", "2", TB__CONFIG_IS_NUMBER,
                                  "buckets of one channel under way at a time"},
    [TB__CONFIG_PLAN_BYTES] = {"plan_bytes", "TENSORBUS_PLAN_BYTES", "64MiB", TB__CONFIG_IS_SIZE,
                               "the most memory for plans that an agent keeps for batches that are made again"},
    [TB__CONFIG_COPY] = {"copy", "TENSORBUS_COPY", "auto", TB__CONFIG_IS_TEXT,
                         "how large tensors are copied; auto: as `tensorbus doctor` finds it fastest on this machine"},
    [TB__CONFIG_STORE] = {"store", "TENSORBUS_STORE", "", TB__CONFIG_IS_TEXT,
                          "the store of programs that join without a URL; `tensorbus run` sets it"},
    [TB__CONFIG_AGENT] = {"agent", "TENSORBUS_AGENT", "", TB__CONFIG_IS_TEXT,
                          "the agent's socket, for such programs; it is used instead of a store"},
    [TB__CONFIG_GROUP] = {"group", "TENSORBUS_GROUP", "", TB__CONFIG_IS_TEXT,
                          "the group of a program that joins without one"},
    [TB__CONFIG_INDEX] = {"index", "TENSORBUS_INDEX", "", TB__CONFIG_IS_TEXT,
                          "its seat; default: from torchrun, MPI, Slurm or Kubernetes"},
    [TB__CONFIG_SIZE] = {"size", "TENSORBUS_SIZE", "", TB__CONFIG_IS_TEXT,
                         "the number of seats in its group; default: likewise"},
    [TB__CONFIG_TOKEN_FILE] = {"token_file", "TENSORBUS_TOKEN_FILE", "", TB__CONFIG_IS_TEXT,
                               "the first line of this file is the token of a program that joins without a URL"},
    [TB__CONFIG_UCX] = {"ucx", "TENSORBUS_UCX", "libucp.so.0", TB__CONFIG_IS_TEXT,
                        "the file of UCX; several, separated by colons: the first of them that can be loaded"},
    [TB__CONFIG_NCCL] = {"nccl", "TENSORBUS_NCCL", "libnccl.so.2", TB__CONFIG_IS_TEXT, "the file of NCCL, likewise"},
    [TB__CONFIG_NVSHMEM] = {"nvshmem", "TENSORBUS_NVSHMEM", "libnvshmem_host.so.3", TB__CONFIG_IS_TEXT,
                            "the file of NVSHMEM's host library, likewise"},
};

static const char *const level_names[] = {[TB_LOG_OFF] = "off",
                                          [TB_LOG_ERROR] = "error",
                                          [TB_LOG_WARN] = "warn",
                                          [TB_LOG_INFO] = "info",
                                          [TB_LOG_DEBUG] = "debug"};

static tb_status read_level(const char *text, int64_t *out) {
    for (int level = TB_LOG_OFF; level <= TB_LOG_DEBUG; level++) {
        if (strcasecmp(text, level_names[level]) == 0) {
            *out = level;
            return TB_OK;
        }
    }
    return tb__fail(TB_INVALID, "'%.60s' is not one of off, error, warn, info and debug", text);
}

static tb_status read_size(const char *text, int64_t *out) {
    int64_t size;
    TB_TRY(tb__read_size(text, &size));
    if (size < 1)
        return tb__fail(TB_INVALID, "it must be at least 1");
    *out = size;
    return TB_OK;
}

static tb_status read_number(const char *text, int64_t *out) {
    const char *at = text;
    int64_t number;
    bool is_number = tb__read_int(&at, &number);
    tb__skip_space(&at);
    if (!is_number || *at)
        return tb__fail(TB_INVALID, "'%.60s' is not a number", text);
    if (number < 1 || number > UINT32_MAX)
        return tb__fail(TB_INVALID, "it must be between 1 and %" PRIu32, UINT32_MAX);
    *out = number;
    return TB_OK;
}

tb_status tb__config_load(tb__config *out) {
    static tb_status (*const read[])(const char *text, int64_t *out) = {
        [TB__CONFIG_IS_LEVEL] = read_level, [TB__CONFIG_IS_SIZE] = read_size, [TB__CONFIG_IS_NUMBER] = read_number};
    tb__config config = {0};
    for (int key = 0; key < TB__CONFIG_COUNT; key++) {
        const tb__config_entry *entry = &tb__config_table[key];
        const char *text = getenv(entry->env);
        config.from_environment[key] = text && *text;
        if (entry->kind == TB__CONFIG_IS_TEXT) {
            config.text[key] = config.from_environment[key] ? text : entry->initial;
            continue;
        }
        tb_status status = read[entry->kind](config.from_environment[key] ? text : entry->initial, &config.value[key]);
        if (status != TB_OK)
            return tb__fail_within(status, "%s in the environment", entry->env);
    }
    *out = config;
    return TB_OK;
}

void tb__config_add(const tb__config *config, tb__config_key key, tb__text *text) {
    static const char *const units[] = {"", "KiB", "MiB", "GiB", "TiB"};
    int64_t value = config->value[key];
    size_t unit = 0;
    switch (tb__config_table[key].kind) {
    case TB__CONFIG_IS_LEVEL:
        tb__text_add(text, "%s", level_names[value]);
        return;
    case TB__CONFIG_IS_SIZE:
        for (; value % 1024 == 0 && unit + 1 < sizeof units / sizeof *units; unit++)
            value /= 1024;
        break;
    case TB__CONFIG_IS_NUMBER:
        break;
    case TB__CONFIG_IS_TEXT:
        tb__text_add(text, "%s", config->text[key]);
        return;
    }
    tb__text_add(text, "%" PRId64 "%s", value, units[unit]);
}
