/* Settings that come from the environment: one table of names, environment names, defaults and help.
 *
 * Only programs read them, once, at start; the library's layers get values as options. Those that tell a process its
 * seat are read by tb_world_join, where it is asked to. */
#ifndef TB_BASE_CONFIG_H
#define TB_BASE_CONFIG_H

#include "base/text.h"

typedef enum tb__config_key {
    TB__CONFIG_LOG,
    TB__CONFIG_BUCKET_SIZE,
    TB__CONFIG_STAGING_BYTES,
    TB__CONFIG_MAX_IN_FLIGHT,
    TB__CONFIG_PLAN_BYTES,
    TB__CONFIG_COPY,
    TB__CONFIG_STORE,
    TB__CONFIG_AGENT,
    TB__CONFIG_GROUP,
    TB__CONFIG_INDEX,
    TB__CONFIG_SIZE,
    TB__CONFIG_TOKEN_FILE,
    TB__CONFIG_UCX,
    TB__CONFIG_NCCL,
    TB__CONFIG_NVSHMEM,
    TB__CONFIG_COUNT
} tb__config_key;

typedef enum tb__config_kind {
    TB__CONFIG_IS_LEVEL,  /* off, error, warn, info, debug */
    TB__CONFIG_IS_SIZE,   /* bytes, such as 16MiB; at least 1 */
    TB__CONFIG_IS_NUMBER, /* at least 1 */
    TB__CONFIG_IS_TEXT,   /* read, and checked, where it is used: bus/environment.h, transport/ucx */
} tb__config_kind;

typedef struct tb__config_entry {
    const char *name, *env;
    const char *initial; /* the default, in the environment's notation */
    tb__config_kind kind;
    const char *help;
} tb__config_entry;

extern const tb__config_entry tb__config_table[TB__CONFIG_COUNT];

typedef struct tb__config {
    int64_t value[TB__CONFIG_COUNT];
    const char *text[TB__CONFIG_COUNT]; /* of those that are text */
    bool from_environment[TB__CONFIG_COUNT];
} tb__config;

/* Reads the environment. A variable that is empty counts as not set; one that is malformed fails, by name. */
tb_status tb__config_load(tb__config *out);

/* Appends a value in the environment's notation. */
void tb__config_add(const tb__config *config, tb__config_key key, tb__text *text);

static inline tb_log_level tb__config_log(const tb__config *config) {
    return (tb_log_level)config->value[TB__CONFIG_LOG];
}

static inline int64_t tb__config_bucket_size(const tb__config *config) {
    return config->value[TB__CONFIG_BUCKET_SIZE];
}

static inline int64_t tb__config_staging_bytes(const tb__config *config) {
    return config->value[TB__CONFIG_STAGING_BYTES];
}

static inline uint32_t tb__config_max_in_flight(const tb__config *config) {
    return (uint32_t)config->value[TB__CONFIG_MAX_IN_FLIGHT];
}

static inline int64_t tb__config_plan_bytes(const tb__config *config) {
    return config->value[TB__CONFIG_PLAN_BYTES];
}

#endif
