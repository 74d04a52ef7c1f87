/* A log of the transitions that a rank makes (commit_table.h), one file each, and what is read from it. */
#ifndef TB_BUS_TRACE_TEST_H
#define TB_BUS_TRACE_TEST_H

#include "bus/engine.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

enum { TRACED_VERSIONS = 600 };
enum { TRACED_COMMIT = 1, TRACED_ABORT = 2, TRACED_PREPARED = 4 };

static FILE *trace_file;

/* A line for each transition: nonce, version, and the names of the table. */
static inline void trace_transition(const tb__engine *engine, const char *const names[4]) {
    const tb__vector *v = &engine->current;
    fprintf(trace_file, "%016" PRIx64 "%016" PRIx64 " %" PRIu64 " %s %s %s %s\n", v->nonce.word[0], v->nonce.word[1],
            v->version, names[0], names[1], names[2], names[3]);
    fflush(trace_file);
}

static inline void trace_path(const char *base, int position, char out[160]) {
    snprintf(out, 160, "%s.%d", base, position);
}

/* All transitions of this process from now on. */
static inline bool trace_open(const char *base, int position) {
    char path[160];
    trace_path(base, position, path);
    trace_file = fopen(path, "w");
    tb__commit_on_transition = trace_file ? trace_transition : NULL;
    return trace_file != NULL;
}

/* outcomes[v]: whether the rank was prepared for version v, and has committed or aborted it. False: the log has a
 * transition that the table does not have, or states do not follow each other. A rank that was killed may have been
 * writing its last line. */
static inline bool trace_read(FILE *file, bool was_killed, unsigned char outcomes[TRACED_VERSIONS]) {
    char line[256], state[32] = "IDLE", from[32], input[32], next[32], output[32];
    uint64_t version;
    while (fgets(line, sizeof line, file)) {
        if (!strchr(line, '\n'))
            return was_killed;
        if (sscanf(line, "%*s %" SCNu64 " %31s %31s %31s %31s", &version, from, input, next, output) != 5)
            return false;
        const char *names[] = {from, input, next, output};
        if (!tb__commit_table_has(names) || strcmp(from, state) != 0 || version >= TRACED_VERSIONS)
            return false;
        memcpy(state, next, sizeof state);
        if (strcmp(next, "PREPARED") == 0)
            outcomes[version] |= TRACED_PREPARED;
        if (strcmp(next, "DECIDED") == 0 || strcmp(next, "APPLYING_LATE") == 0)
            outcomes[version] |= TRACED_COMMIT;
        if (strcmp(output, "DISCARD") == 0 || strcmp(output, "KEEP") == 0)
            outcomes[version] |= TRACED_ABORT;
    }
    return true;
}

#endif
