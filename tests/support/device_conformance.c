/* The suite's memory and runs, and the list of its parts. */
#include "device_conformance_inside.h"

#include "base/process.h"

#include <poll.h>
#include <stdio.h>
#include <stdlib.h>

tb__mapping *in_buffer[MOST_SOURCES];

bool progress_devices(suite *s) {
    bool did = s->device->ops->progress(s->device);
    return (!s->is_host && s->host->ops->progress(s->host)) || did;
}

void wait_for(suite *s, tb__fence *const *fences, size_t n) {
    int64_t deadline = tb__now_ms() + 60000;
    for (size_t i = 0; i < n;) {
        if (fences[i]->is_done) {
            i++;
            continue;
        }
        if (progress_devices(s))
            continue;
        struct pollfd fds[2] = {{.fd = s->device->ops->fd(s->device), .events = POLLIN},
                                {.fd = s->host->ops->fd(s->host), .events = POLLIN}};
        if (tb__now_ms() >= deadline)
            fail_msg("fence %zu of %zu is not done after a minute", i, n);
        poll(fds, 2, tb__ms_until(deadline));
    }
}

void wait_for_one(suite *s, tb__fence *fence) {
    wait_for(s, &fence, 1);
}

tb__fence try_moves(suite *s, tb__device *device, const tb__move *moves, size_t n) {
    tb__fence fence = {0};
    tb__job *job;
    assert_ok(device->ops->prepare(device, moves, n, &job));
    assert_ok(device->ops->run(device, job, &(tb__run){0}, &fence));
    assert_false(fence.is_done);
    wait_for_one(s, &fence);
    device->ops->release(device, job);
    return fence;
}

void run_moves(suite *s, tb__device *device, const tb__move *moves, size_t n, void *buffer) {
    tb__fence fence = {0};
    tb__job *job;
    assert_ok(device->ops->prepare(device, moves, n, &job));
    assert_ok(device->ops->run(device, job, &(tb__run){.src_buffer = buffer, .dst_buffer = buffer}, &fence));
    assert_false(fence.is_done); /* only progress does that */
    wait_for_one(s, &fence);
    if (fence.status != TB_OK)
        fail_msg("%s: %s", tb_status_string(fence.status), fence.why);
    device->ops->release(device, job);
}

tb__move byte_move(void *dst, const void *const *src, size_t nbytes) {
    static const int64_t unit[1][TB_MAX_DIMS] = {{1}};
    return (tb__move){.ndim = 1,
                      .len = {(int64_t)nbytes},
                      .dst = dst,
                      .dst_stride = {1},
                      .nsrc = 1,
                      .src = src,
                      .src_stride = unit,
                      .src_dtype = TB_U8,
                      .wire_dtype = TB_U8,
                      .dst_dtype = TB_U8};
}

/* ---- Memory ------------------------------------------------------------------------------------------------------ */

area make_area(suite *s, tb__device *owner, size_t nbytes) {
    area a = {.owner = owner, .nbytes = nbytes, .image = malloc(nbytes + 1)};
    void *at = NULL;
    int unit = owner == s->host || s->traits->nunits == 0 ? 0 : (int)(s->nareas++ % s->traits->nunits);
    assert_non_null(a.image);
    assert_ok(owner->ops->alloc(owner, unit, nbytes, &at));
    a.at = at;
    return a;
}

void free_area(area *a) {
    a->owner->ops->free(a->owner, a->at);
    free(a->image);
}

void put_area(suite *s, const area *a) {
    const void *from = a->image;
    tb__move move = byte_move(a->at, &from, a->nbytes);
    if (a->owner == s->host)
        memcpy(a->at, a->image, a->nbytes);
    else
        run_moves(s, a->owner, &move, 1, NULL);
}

void get_area(suite *s, const area *a, uint8_t *out) {
    const void *from = a->at;
    tb__move move = byte_move(out, &from, a->nbytes);
    if (a->owner == s->host)
        memcpy(out, a->at, a->nbytes);
    else
        run_moves(s, a->owner, &move, 1, NULL);
}

void check_area(suite *s, const area *a, const char *what) {
    uint8_t *got = malloc(a->nbytes + 1);
    assert_non_null(got);
    get_area(s, a, got);
    bool is_same = memcmp(got, a->image, a->nbytes) == 0;
    for (size_t i = 0; i < a->nbytes && !is_same; i++) {
        if (got[i] != a->image[i])
            fail_msg("%s: byte %zu of %zu is 0x%02x, not 0x%02x", what, i, a->nbytes, got[i], a->image[i]);
    }
    free(got);
}

void fill_random(suite *s, uint8_t *bytes, size_t nbytes) {
    for (size_t i = 0; i < nbytes; i += 8) {
        uint64_t eight = rng_next(&s->g);
        memcpy(bytes + i, &eight, nbytes - i < 8 ? nbytes - i : 8);
    }
}

/* ---- The suite --------------------------------------------------------------------------------------------------- */

static const struct {
    const char *name;
    void (*check)(suite *s);
} parts[] = {
    {"lifetimes", check_lifetimes},
    {"moves", check_moves},
    {"matrices", check_matrices},
    {"casts", check_casts},
    {"reductions", check_reductions},
    {"parts of jobs", check_parts_of_jobs},
    {"runs at once", check_runs_at_once},
    {"quantised", check_quantised},
    {"not finite", check_not_finite},
    {"checksums", check_checksums},
    {"order", check_order},
    {"cancel", check_cancel},
    {"refusals", check_refusals},
    {"shortage of memory", check_shortage},
    {"sharing", check_sharing},
    {"forged keys", check_forged_keys},
    {"a dead peer", check_dead_peer},
};

/* $TB_PARTS may name some of them, separated by commas. */
static bool is_wanted(const char *name) {
    const char *wanted = getenv("TB_PARTS"), *at = wanted ? strstr(wanted, name) : NULL;
    size_t length = strlen(name);
    return !wanted || !*wanted || (at && (at == wanted || at[-1] == ',') && (!at[length] || at[length] == ','));
}

/* How many that should be. */
static size_t count_wanted(void) {
    const char *wanted = getenv("TB_PARTS");
    size_t n = 1;
    if (!wanted || !*wanted)
        return sizeof parts / sizeof *parts;
    while ((wanted = strchr(wanted, ','))) {
        wanted++;
        n++;
    }
    return n;
}

void device_conformance(const device_traits *traits) {
    size_t nrun = 0;
    for (int i = 0; i < MOST_SOURCES; i++)
        in_buffer[i] = TB__IN_BUFFER;
    suite s = {.traits = traits, .g = {test_seed()}, .is_host = strcmp(traits->name, "host") == 0};
    start_peers(&s);
    assert_ok(tb__device_open(traits->name, &s.device));
    s.host = s.device;
    if (!s.is_host)
        assert_ok(tb__device_open("host", &s.host));
    for (size_t i = 0; i < sizeof parts / sizeof *parts; i++) {
        if (!is_wanted(parts[i].name))
            continue;
        int64_t began = tb__now_ms();
        printf("  %s: %s", traits->name, parts[i].name);
        fflush(stdout);
        parts[i].check(&s);
        printf(", %ld ms\n", (long)(tb__now_ms() - began));
        nrun++;
    }
    if (nrun != count_wanted())
        fail_msg("TB_PARTS=%s: only %zu of these parts are there", getenv("TB_PARTS"), nrun);
    if (!s.is_host)
        tb__device_close(s.host);
    tb__device_close(s.device);
    stop_peers(&s);
}
