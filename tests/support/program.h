/* A program that uses an agent, as the tests of agents see it: pairs by their names, and for each batch its last
 * transfer in either direction. All of it is made of the calls that programs have. */
#ifndef TB_TESTS_PROGRAM_H
#define TB_TESTS_PROGRAM_H

#include "tensorbus/tensorbus.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { PROGRAM_PAIRS = 16, PROGRAM_BATCHES = 64 };

typedef struct program_batch program_batch;

typedef struct program {
    tb_world *world;
    const char *group;
    int32_t index, size;
    size_t npairs;
    struct {
        char name[64];
        tb_pair *pair;
    } pairs[PROGRAM_PAIRS];
    program_batch *batches[PROGRAM_BATCHES];
} program;

struct program_batch {
    program *program; /* NULL: it was closed */
    tb_batch *batch;
    tb_transfer *last[2]; /* received, sent */
    bool was_send;
    uint64_t sent; /* the last version that was */
};

typedef struct program_transfer_opts {
    int timeout_ms;
    bool no_wait, skip_lost, hold;
    const void *stream;
} program_transfer_opts;

static inline tb_status program_connect(const char *path, const tb_world_opts *opts, program **out) {
    char address[400];
    program *g = calloc(1, sizeof *g);
    snprintf(address, sizeof address, "agent:%s", path);
    tb_status status = g ? tb_world_join(address, NULL, 0, 0, opts, &g->world) : TB_NO_MEMORY;
    if (status != TB_OK) {
        free(g);
        return status;
    }
    tb_world_seat(g->world, &g->group, &g->index, &g->size);
    *out = g;
    return TB_OK;
}

static inline tb_pair *program_find_pair(const program *g, const char *name) {
    for (size_t i = 0; g && i < g->npairs; i++) {
        if (strcmp(g->pairs[i].name, name) == 0)
            return g->pairs[i].pair;
    }
    return NULL;
}

static inline tb_status program_lacks_pair(const char *name) {
    char sentence[100];
    snprintf(sentence, sizeof sentence, "there is no pair '%s'", name);
    return tb_error_set(TB_INVALID, sentence);
}

/* One that was made before is made again. */
static inline tb_status program_pair(program *g, const char *name, const char *remote, const char *layout,
                                     int timeout_ms) {
    tb_pair_opts opts = {.size = sizeof opts, .timeout_ms = timeout_ms};
    size_t i = 0;
    while (i < g->npairs && strcmp(g->pairs[i].name, name) != 0)
        i++;
    if (i < g->npairs) {
        tb_pair_destroy(g->pairs[i].pair);
        g->pairs[i] = g->pairs[--g->npairs];
    }
    if (g->npairs == PROGRAM_PAIRS)
        return tb_error_set(TB_TOO_BIG, "the test has too many pairs");
    i = g->npairs;
    tb_status status = tb_pair_create(g->world, name, remote, layout, &opts, &g->pairs[i].pair);
    if (status != TB_OK)
        return status;
    snprintf(g->pairs[i].name, sizeof g->pairs[i].name, "%s", name);
    g->npairs++;
    return TB_OK;
}

static inline tb_status program_batch_create(program *g, const char *name, const tb_batch_opts *opts,
                                             program_batch **out) {
    program_batch *b = calloc(1, sizeof *b);
    size_t i = 0;
    while (i < PROGRAM_BATCHES && g->batches[i])
        i++;
    tb_status status = b && i < PROGRAM_BATCHES ? tb_batch_create(g->world, name, opts, &b->batch) : TB_NO_MEMORY;
    if (status != TB_OK) {
        free(b);
        return status;
    }
    b->program = g;
    g->batches[i] = b;
    *out = b;
    return TB_OK;
}

/* The agent has it no more. */
static inline void program_drop(program_batch *b) {
    tb_transfer_destroy(b->last[0]);
    tb_transfer_destroy(b->last[1]);
    b->last[0] = b->last[1] = NULL;
    tb_batch_destroy(b->batch);
    b->batch = NULL;
}

/* It can be made again by that name; of the batch nothing is left but to be destroyed. */
static inline tb_status program_cleanup(program_batch *b) {
    program_drop(b);
    return TB_OK;
}

static inline void program_batch_destroy(program_batch *b) {
    if (!b)
        return;
    for (size_t i = 0; b->program && i < PROGRAM_BATCHES; i++) {
        if (b->program->batches[i] == b)
            b->program->batches[i] = NULL;
    }
    if (b->batch)
        program_drop(b);
    free(b);
}

static inline void program_close(program *g) {
    if (!g)
        return;
    for (size_t i = 0; i < PROGRAM_BATCHES; i++) {
        if (g->batches[i]) {
            program_drop(g->batches[i]);
            g->batches[i]->program = NULL;
        }
    }
    for (size_t i = 0; i < g->npairs; i++)
        tb_pair_destroy(g->pairs[i].pair);
    tb_world_destroy(g->world);
    free(g);
}

/* Those that are under way stay. */
static inline void program_end_transfers(program_batch *b) {
    for (int i = 0; i < 2; i++) {
        tb_transfer_state state = {.size = sizeof state};
        if (b->last[i] && tb_transfer_query(b->last[i], &state) == TB_OK && state.status == TB_OK &&
            !(state.events & TB_COMMITTED))
            continue;
        tb_transfer_destroy(b->last[i]);
        b->last[i] = NULL;
    }
}

static inline tb_status program_add(program_batch *b, const char *pair, const char *name, const tb_tensor *tensor) {
    tb_pair *p = program_find_pair(b->program, pair);
    program_end_transfers(b);
    return p ? tb_batch_add(b->batch, p, name, tensor) : program_lacks_pair(pair);
}

static inline tb_status program_add_pair(program_batch *b, const char *pair) {
    tb_pair *p = program_find_pair(b->program, pair);
    return p ? tb_batch_add_pair(b->batch, p) : program_lacks_pair(pair);
}

static inline tb_status program_register(program_batch *b, int timeout_ms) {
    return tb_batch_register(b->batch, timeout_ms);
}

static inline tb_status program_remove_pair(program_batch *b, const char *pair) {
    tb_pair *p = program_find_pair(b->program, pair);
    program_end_transfers(b);
    return p ? tb_batch_remove_pair(b->batch, p) : program_lacks_pair(pair);
}

static inline tb_status program_wait(program_batch *b, bool is_send, tb_event event, int timeout_ms) {
    tb_transfer_state state = {.size = sizeof state};
    tb_status status = tb_wait(b->last[is_send], event, timeout_ms);
    if (status == TB_OK && is_send && event == TB_COMMITTED && tb_transfer_query(b->last[1], &state) == TB_OK)
        b->sent = state.version;
    return status;
}

static inline tb_status program_stream_wait(program_batch *b, bool is_send, tb_event event, const void *stream) {
    return tb_stream_wait(b->last[is_send], event, stream);
}

static inline tb_status program_proceed(program_batch *b) {
    return tb_proceed(b->last[0]);
}

static inline int program_fd(const program_batch *b, bool is_send) {
    return tb_transfer_fd(b->last[is_send]);
}

/* Begins, and waits for the end unless no_wait is set. An earlier transfer that has ended is destroyed before. */
static inline tb_status program_transfer(program_batch *b, bool is_send, const program_transfer_opts *opts) {
    tb_transfer_opts o = {.size = sizeof o};
    tb_transfer_state state = {.size = sizeof state};
    if (opts) {
        o.timeout_ms = opts->timeout_ms;
        o.skip_lost = opts->skip_lost;
        o.hold = opts->hold;
        o.stream = opts->stream;
    }
    if (b->last[is_send] && tb_transfer_query(b->last[is_send], &state) == TB_OK &&
        (state.status != TB_OK || state.events & TB_COMMITTED)) {
        tb_transfer_destroy(b->last[is_send]);
        b->last[is_send] = NULL;
    }
    tb_transfer *t = NULL;
    tb_status status = (is_send ? tb_send : tb_recv)(b->batch, &o, &t);
    if (status != TB_OK)
        return status;
    b->last[is_send] = t;
    b->was_send = is_send;
    return opts && opts->no_wait ? TB_OK : program_wait(b, is_send, TB_COMMITTED, -1);
}

typedef struct program_status {
    const char *state; /* "idle", "sending", "receiving", "failed" */
    bool transfer_signal;
    uint64_t version; /* the last that was received, or of a batch that was only sent, sent */
    uint64_t attempt;
    int64_t bytes_done, bytes_total;
    double seconds;
    char error[512];
    unsigned events;
    bool is_torn, is_mixed;
} program_status;

static inline tb_status program_query(program_batch *b, program_status *out) {
    tb_batch_state batch = {.size = sizeof batch};
    tb_transfer_state t = {.size = sizeof t}, other = {.size = sizeof other};
    bool is_send = b->was_send;
    *out = (program_status){.state = "idle"};
    if (b->last[!is_send] && tb_transfer_query(b->last[!is_send], &other) == TB_OK && other.status == TB_OK &&
        !(other.events & TB_COMMITTED))
        is_send = !is_send; /* it is still under way */
    tb_status status = b->last[is_send] ? tb_transfer_query(b->last[is_send], &t) : TB_OK;
    if (status == TB_OK && t.status != TB_OK)
        snprintf(out->error, sizeof out->error, "%s", tb_error_detail());
    if (status == TB_OK)
        status = tb_batch_query(b->batch, &batch);
    if (status != TB_OK)
        return status;
    bool is_moving = b->last[is_send] && t.status == TB_OK && !(t.events & TB_COMMITTED);
    if (is_send && t.version > 0)
        b->sent = t.version;
    out->state = is_moving ? is_send ? "sending" : "receiving" : t.status == TB_OK ? "idle" : "failed";
    out->transfer_signal = batch.transfer_signal;
    out->version = batch.version ? batch.version : b->sent;
    out->attempt = t.attempt;
    out->bytes_done = t.bytes_done;
    out->bytes_total = t.bytes_total;
    out->seconds = t.seconds;
    out->events = t.events;
    out->is_torn = batch.is_torn;
    out->is_mixed = batch.is_mixed;
    return TB_OK;
}

typedef struct program_pair_state {
    tb_status status;
    char error[512];
    uint64_t version;
    bool is_torn;
} program_pair_state;

/* The pair's part of the last transfer, and the version that it has. */
static inline tb_status program_query_pair(program_batch *b, const char *pair, program_pair_state *out) {
    tb_pair *p = program_find_pair(b->program, pair);
    tb_transfer_state t = {.size = sizeof t};
    *out = (program_pair_state){0};
    if (!p)
        return program_lacks_pair(pair);
    tb_status status = b->last[b->was_send] ? tb_transfer_pair(b->last[b->was_send], p, &t) : TB_OK;
    if (status == TB_OK && t.status != TB_OK)
        snprintf(out->error, sizeof out->error, "%s", tb_error_detail());
    out->status = t.status;
    if (status == TB_OK)
        status = tb_batch_version(b->batch, p, &out->version, &out->is_torn);
    if (status == TB_OK && b->was_send && out->version == 0)
        out->version = t.version;
    return status;
}

#endif
