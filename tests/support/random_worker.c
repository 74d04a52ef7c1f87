/* Random batches, as one process of a pool sees them. */
#include "random_worker.h"

#include "numbers.h"
#include "plan/plan.h"
#include "random_batch.h"
#include "tensor_memory.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { CASES_PER_WORLD = 125, GUARD = 192, NPASSES = 3 };

static const char *const group_names[2] = {"src", "dst"};

/* Memory with guards around what tensors use, and what must be in it. */
typedef struct block {
    char *memory, *image;
    size_t nbytes;
    bool is_bus; /* of tb_alloc */
    bool has[2]; /* tensors of each side */
} block;

/* One tensor on one side, at this process. */
typedef struct part {
    holding h;
    int64_t strides[TB_MAX_DIMS];
    bool is_contiguous;
    size_t nbytes, origin; /* that it spans, and where its first element is in that */
    block *block;
    size_t offset; /* of the span in the block */
    bool is_null;
} part;

typedef struct worker {
    const random_pool *pool;
    uint64_t case_seed;
    const char *step;
    rng own, common; /* of this process's choices, and of those that all make alike */
    tb_world *world;
    int32_t nseats[2], seat[2]; /* -1: not in the group */
    int first;                  /* the group it joined with */
    random_batch b;
    part parts[2][BATCH_MAX_TENSORS];
    block blocks[2 * BATCH_MAX_TENSORS];
    size_t nblocks;
    bool may_alias, is_aliased; /* sources and targets share memory: somewhere, here */
    tb_batch_opts opts;
    bool has_window;
    tb_pair *pair[2];
    tb_batch *batch;
} worker;

static void at(worker *w, const char *step) {
    w->step = step;
    if (w->pool->at)
        w->pool->at(w->case_seed, step);
}

/* broken(w, format, ...): says what is wrong, and ends. */
#define broken(w, ...) (snprintf(complaint, sizeof complaint, __VA_ARGS__), complain(w))

static char complaint[1500];

static void complain(const worker *w) __attribute__((noreturn));

static void complain(const worker *w) {
    if (w->pool->is_first_to_fail()) {
        fprintf(stderr, "worker %d (src %" PRId32 ", dst %" PRId32 "), %s: %s\n", w->pool->number, w->seat[0],
                w->seat[1], w->step, complaint);
        fprintf(stderr, "TB_SEED=%" PRIu64 " TB_CASES=1 repeats this case\n", w->case_seed);
        const tb_batch_opts *o = &w->opts;
        fprintf(stderr,
                "here: bucket_size %" PRId64 ", staging_bytes %" PRId64 ", max_in_flight %" PRIu32
                ", group_window %" PRIu32 "%s%s%s%s%s\n",
                o->bucket_size, o->staging_bytes, o->max_in_flight, o->group_window, o->staged ? ", staged" : "",
                o->snapshot ? ", snapshot" : "", o->commit == TB_SHADOW ? ", shadow" : "",
                o->checksum ? ", checksums" : "", w->is_aliased ? ", source and target share memory" : "");
        random_batch_print(&w->b);
    }
    w->pool->give_up();
    abort();
}

static void must(const worker *w, tb_status status) {
    if (status != TB_OK)
        broken(w, "%s: %s", tb_status_string(status), tb_error_detail());
}

/* ---- Memory ---------------------------------------------------------------------------------------------------- */

/* Row-major, or dims in another order, with gaps, or backwards. */
static void choose_strides(worker *w, part *p, size_t itemsize) {
    int order[TB_MAX_DIMS], ndim = p->h.shape.ndim;
    int64_t stride = 1, back = 0;
    p->is_contiguous = rng_range(&w->own, 0, 1);
    bool is_permuted = !p->is_contiguous && rng_range(&w->own, 0, 1);
    for (int d = 0; d < ndim; d++)
        order[d] = d;
    for (int d = ndim - 1; d > 0 && is_permuted; d--) {
        int other = (int)rng_range(&w->own, 0, d), swap = order[d];
        order[d] = order[other];
        order[other] = swap;
    }
    for (int d = ndim - 1; d >= 0; d--) {
        int64_t length = p->h.shape.dim[order[d]];
        bool is_backwards = !p->is_contiguous && length > 0 && rng_range(&w->own, 0, 5) == 0;
        p->strides[order[d]] = is_backwards ? -stride : stride;
        back += is_backwards ? (length - 1) * stride : 0;
        stride *= length + (p->is_contiguous ? 0 : rng_range(&w->own, 0, 2));
    }
    p->nbytes = p->h.count ? (size_t)stride * itemsize : 0;
    p->origin = p->h.count ? (size_t)back * itemsize : 0;
}

static char *block_alloc(const worker *w, const block *b) {
    char *memory = b->is_bus ? tensor_alloc_any(b->nbytes) : malloc(b->nbytes);
    if (!memory)
        broken(w, "no memory");
    return memory;
}

static void block_free(const block *b, char *memory) {
    if (b->is_bus)
        tensor_free(memory);
    else
        free(memory);
}

static block *new_block(worker *w) {
    block *b = &w->blocks[w->nblocks++];
    *b = (block){.nbytes = GUARD};
    return b;
}

static void put(worker *w, part *p, block *b, size_t *offset, bool is_target) {
    p->block = b;
    p->offset = *offset;
    p->is_null = p->nbytes == 0 && rng_range(&w->own, 0, 1);
    *offset += (p->nbytes + 7) / 8 * 8 + 8 * (size_t)rng_range(&w->own, 0, 3);
    b->nbytes = *offset + GUARD > b->nbytes ? *offset + GUARD : b->nbytes;
    b->has[is_target] = true;
}

/* Where each side's tensors are: each in memory of its own, all in one, or those of both sides in one. */
static void place_parts(worker *w) {
    bool is_shared[2] = {rng_range(&w->own, 0, 2) == 0, rng_range(&w->own, 0, 2) == 0};
    w->may_alias = rng_range(&w->common, 0, 1);
    w->is_aliased = w->may_alias && w->seat[0] >= 0 && w->seat[1] >= 0 && rng_range(&w->own, 0, 1);
    block *common = NULL;
    for (int s = 0; s < 2; s++) {
        size_t offset = GUARD;
        if (w->is_aliased && common) /* anywhere beside, or across, what is there */
            offset += 8 * (size_t)rng_range(&w->own, 0, (int64_t)(common->nbytes - GUARD) / 8);
        else
            common = NULL;
        for (int i = 0; w->seat[s] >= 0 && i < w->b.ntensors; i++) {
            part *p = &w->parts[s][i];
            *p = (part){0};
            holding_make(&w->b.tensor[i], s, w->seat[s], &p->h);
            choose_strides(w, p, number_size(w->b.tensor[i].dtype[s]));
            if (!common || !(is_shared[s] || w->is_aliased)) {
                common = new_block(w);
                offset = GUARD + 8 * (size_t)rng_range(&w->own, 0, 3);
            }
            put(w, p, common, &offset, s);
        }
    }
    for (size_t i = 0; i < w->nblocks; i++) {
        block *b = &w->blocks[i];
        b->is_bus = rng_range(&w->own, 0, 1);
        if (w->pool->has_agents && w->seat[0] >= 0 && w->seat[1] >= 0)
            b->is_bus = true; /* agents do not send and receive other memory at the same time */
#ifdef TB_SLOW_DEVICE
        /* Tensors that overlap in other host memory are pinned one by one. compute-sanitizer takes an element that is
         * in the pinned bytes of two of them for out of bounds. */
        b->is_bus |= w->is_aliased && is_test_on_gpu();
#endif
        b->image = malloc(b->nbytes);
        if (!b->image)
            broken(w, "no memory");
        b->memory = block_alloc(w, b);
    }
}

static void remove_parts(worker *w) {
    for (int s = 0; s < 2; s++) {
        for (int i = 0; i < w->b.ntensors; i++)
            holding_fini(&w->parts[s][i].h);
    }
    for (size_t i = 0; i < w->nblocks; i++) {
        free(w->blocks[i].image);
        block_free(&w->blocks[i], w->blocks[i].memory);
    }
    w->nblocks = 0;
}

/* Where element i of the part is in its block, in bytes. */
static size_t offset_of(const part *p, size_t itemsize, int64_t i) {
    int64_t offset = 0;
    for (int d = p->h.shape.ndim - 1; d >= 0; d--) {
        offset += i % p->h.shape.dim[d] * p->strides[d];
        i /= p->h.shape.dim[d];
    }
    return p->offset + p->origin + (size_t)(offset * (int64_t)itemsize);
}

static char *bytes_of(const block *b) {
    return tensor_bytes(b->memory);
}

/* Everything is poisoned but the sources. */
static void fill(worker *w, int from, int version) {
    for (size_t i = 0; i < w->nblocks; i++)
        memset(tensor_bytes(w->blocks[i].memory), 0xA5 + version, w->blocks[i].nbytes);
    for (int i = 0; w->seat[from] >= 0 && i < w->b.ntensors; i++) {
        const part *p = &w->parts[from][i];
        tb_dtype dtype = w->b.tensor[i].dtype[from];
        for (int64_t e = 0; e < p->h.count; e++)
            number_store(dtype, bytes_of(p->block) + offset_of(p, number_size(dtype), e),
                         batch_value(&w->b, i, from, version, p->h.element[e], p->h.share));
    }
    for (size_t i = 0; i < w->nblocks; i++)
        memcpy(w->blocks[i].image, bytes_of(&w->blocks[i]), w->blocks[i].nbytes);
}

static void expect(worker *w, int from, int version) {
    for (int i = 0; w->seat[!from] >= 0 && i < w->b.ntensors; i++) {
        const part *p = &w->parts[!from][i];
        tb_dtype dtype = w->b.tensor[i].dtype[!from];
        for (int64_t e = 0; e < p->h.count; e++)
            number_store(dtype, p->block->image + offset_of(p, number_size(dtype), e),
                         p->h.gets_zeros ? 0 : batch_arrival(&w->b, i, from, version, p->h.element[e]));
    }
}

static void check_elements(const worker *w, int s) {
    for (int i = 0; w->seat[s] >= 0 && i < w->b.ntensors; i++) {
        const part *p = &w->parts[s][i];
        tb_dtype dtype = w->b.tensor[i].dtype[s];
        for (int64_t e = 0; e < p->h.count; e++) {
            size_t offset = offset_of(p, number_size(dtype), e);
            uint64_t got = number_load(dtype, bytes_of(p->block) + offset);
            uint64_t wanted = number_load(dtype, p->block->image + offset);
            if (got != wanted)
                broken(w, "%s tensor t%d, local element %" PRId64 " (%" PRId64 " of all): %" PRIx64 ", not %" PRIx64,
                       group_names[s], i, e, p->h.element[e], got, wanted);
        }
    }
}

static void check_block(const worker *w, const block *b) {
    if (memcmp(bytes_of(b), b->image, b->nbytes) == 0)
        return;
    check_elements(w, 0);
    check_elements(w, 1);
    for (size_t i = 0; i < b->nbytes; i++) {
        if (bytes_of(b)[i] != b->image[i])
            broken(w, "byte %zu of %zu in block %td, which is no tensor's, was written", i, b->nbytes, b - w->blocks);
    }
}

/* ---- Transfers ------------------------------------------------------------------------------------------------- */

static tb_transfer *begin(worker *w, bool is_send, int from) {
    int as = is_send ? from : !from, usual = is_send ? w->first : !w->first;
    tb_transfer_opts opts = {.size = sizeof opts, .whole_group = w->b.seed % 3 == 0};
    tb_transfer *t = NULL;
    if (w->seat[0] >= 0 && w->seat[1] >= 0 && (as != usual || rng_range(&w->own, 0, 1)))
        opts.group = group_names[as];
    must(w, (is_send ? tb_send : tb_recv)(w->batch, &opts, &t));
    return t;
}

/* Sources may change as soon as they are released. */
static void end_send(worker *w, tb_transfer *t, int from) {
    must(w, tb_wait(t, TB_RELEASED, -1));
    for (size_t i = 0; i < w->nblocks; i++) {
        const block *b = &w->blocks[i];
        if (b->has[!from])
            continue;
        check_block(w, b);
        memset(bytes_of(b), 0x3C, b->nbytes);
        memset(b->image, 0x3C, b->nbytes);
    }
    must(w, tb_wait(t, TB_COMMITTED, -1));
}

static void end_receive(worker *w, tb_transfer *t, int from, int version) {
    for (uint32_t group = 0; w->has_window && group < 20; group += 7)
        must(w, tb_wait_group(t, group, RANDOM_PATIENCE_MS));
    must(w, tb_wait(t, TB_ARRIVED, -1));
    must(w, tb_wait(t, TB_COMMITTED, -1));
    /* Its sources may have been scribbled over; else they are as they were. */
    expect(w, from, version);
    for (size_t i = 0; i < w->nblocks; i++) {
        if (w->blocks[i].has[!from])
            check_block(w, &w->blocks[i]);
    }
}

static void end_refused(worker *w, tb_transfer *t, tb_status wanted) {
    tb_status status = t ? tb_wait(t, TB_COMMITTED, -1) : wanted;
    if (status != wanted)
        broken(w, "%s instead of %s%s%s", tb_status_string(status), tb_status_string(wanted), status ? ": " : "",
               status ? tb_error_detail() : "");
}

static void transfer(worker *w, int from, int version, tb_status outcome) {
    tb_transfer *sends = NULL, *receives = NULL;
    bool receives_first = rng_range(&w->own, 0, 1);
    fill(w, from, version);
    at(w, from ? "begins to move from dst to src" : "begins to move from src to dst");
    if (w->seat[!from] >= 0 && receives_first)
        receives = begin(w, false, from);
    if (w->seat[from] >= 0)
        sends = begin(w, true, from);
    if (w->seat[!from] >= 0 && !receives_first)
        receives = begin(w, false, from);
    at(w, from ? "moves from dst to src" : "moves from src to dst");
    if (outcome == TB_OK) {
        /* Groups must be taken for others to go on. */
        bool waits_for_send_first = !w->has_window && !w->is_aliased && rng_range(&w->own, 0, 1);
        if (sends && waits_for_send_first)
            end_send(w, sends, from);
        if (receives)
            end_receive(w, receives, from, version);
        if (sends && !waits_for_send_first)
            end_send(w, sends, from);
    } else {
        end_refused(w, sends, outcome);
        end_refused(w, receives, outcome);
        for (size_t i = 0; i < w->nblocks; i++) {
            if (!w->blocks[i].has[!from])
                check_block(w, &w->blocks[i]);
        }
    }
    tb_transfer_destroy(sends);
    tb_transfer_destroy(receives);
}

/* ---- Cases ----------------------------------------------------------------------------------------------------- */

static char *text_of(const worker *w, const side *s) {
    tb_layout *layout;
    char *text;
    must(w, side_layout(s, &layout));
    must(w, tb_layout_format(layout, &text));
    tb_layout_destroy(layout);
    return text;
}

static void make_pairs(worker *w) {
    char name[32];
    snprintf(name, sizeof name, "pair %" PRIu64, w->case_seed);
    int first = (int)rng_range(&w->own, 0, 1);
    at(w, "makes the pair");
    for (int i = 0; i < 2; i++) {
        int s = i ? !first : first;
        if (w->seat[s] < 0)
            continue;
        char *layout = text_of(w, &w->b.tensor[0].sides[s]);
        tb_pair_opts opts = {.size = sizeof opts, .group = group_names[s]};
        opts.no_wait = (i == 0 && w->seat[!s] >= 0) || rng_range(&w->own, 0, 3) == 0;
        must(w, tb_pair_create(w->world, name, group_names[!s], layout, &opts, &w->pair[s]));
        free(layout);
    }
}

static void add_tensors(worker *w) {
    int first = (int)rng_range(&w->own, 0, w->b.ntensors - 1);
    for (int n = 0; n < 2 * w->b.ntensors; n++) {
        int i = (first + n / 2) % w->b.ntensors, s = n % 2;
        if (w->seat[s] < 0)
            continue;
        const batch_tensor *from = &w->b.tensor[i];
        const part *p = &w->parts[s][i];
        tb_tensor t = {.size = sizeof t,
                       .dtype = from->dtype[s],
                       .ndim = from->shape.ndim,
                       .strides = p->is_contiguous ? NULL : p->strides,
                       .wire_dtype = from->wire[s],
                       .group = from->group[s]};
        char name[16], *layout = from->takes_pair_layout[s] ? NULL : text_of(w, &from->sides[s]);
        memcpy(t.shape, from->shape.dim, sizeof t.shape);
        t.layout = layout;
        t.data = p->is_null ? NULL : p->block->memory + p->offset + p->origin;
        snprintf(name, sizeof name, "t%d", i);
        must(w, tb_batch_add(w->batch, w->pair[s], name, &t));
        free(layout);
    }
}

/* Rebinds the tensors of the blocks that have other memory than `before`. */
static tb_status rebind_blocks(worker *w, char *const *before) {
    tb_rebinding moved[2 * BATCH_MAX_TENSORS];
    char names[BATCH_MAX_TENSORS][16];
    size_t nmoved = 0;
    for (int n = 0; n < 2 * w->b.ntensors; n++) {
        const part *p = &w->parts[n % 2][n / 2];
        if (w->seat[n % 2] < 0 || p->is_null || !before[p->block - w->blocks])
            continue;
        snprintf(names[n / 2], sizeof names[0], "t%d", n / 2);
        moved[nmoved++] = (tb_rebinding){w->pair[n % 2], names[n / 2], p->block->memory + p->offset + p->origin};
    }
    return tb_batch_rebind(w->batch, moved, nmoved);
}

static void block_drop(const block *b, char *memory) {
    memset(tensor_bytes(memory), 0xEE, b->nbytes);
    block_free(b, memory);
}

/* Some blocks get other memory, and the old one is freed; with `invalidates`, the library hears that it is gone before
 * it hears of the new one. */
static void move_blocks(worker *w, bool invalidates) {
    char *before[2 * BATCH_MAX_TENSORS];
    at(w, "moves its tensors");
    for (size_t i = 0; i < w->nblocks; i++) {
        block *b = &w->blocks[i];
        before[i] = rng_range(&w->own, 0, 1) ? b->memory : NULL;
        if (!before[i])
            continue;
        b->memory = block_alloc(w, b);
        if (invalidates && !b->is_bus)
            must(w, tb_world_invalidate(w->world, before[i], b->nbytes));
    }
    tb_status status = rebind_blocks(w, before);
#ifdef TB_SLOW_DEVICE /* what tensor_alloc_any returns is not always of one kind; such blocks stay */
    if (status == TB_REFUSED && strstr(tb_error_detail(), "memory of another kind")) {
        for (size_t i = 0; i < w->nblocks; i++) {
            block *b = &w->blocks[i];
            if (!before[i] || !b->is_bus)
                continue;
            block_drop(b, b->memory);
            b->memory = before[i];
            before[i] = NULL;
        }
        status = rebind_blocks(w, before);
    }
#endif
    must(w, status);
    for (size_t i = 0; i < w->nblocks; i++) {
        if (before[i])
            block_drop(&w->blocks[i], before[i]);
    }
}

/* A batch, and a few transfers of it. How data goes differs from pass to pass; what arrives does not. */
static void run_pass(worker *w, int pass) {
    static const int64_t bucket_sizes[] = {0, 1, 1000};
    tb_batch_opts opts = {.size = sizeof opts, .bucket_size = bucket_sizes[rng_range(&w->common, 0, 2)]};
    w->has_window = rng_range(&w->common, 0, 2) == 0;
    /* What is overwritten is put aside, which takes as much memory as it has. */
    if (rng_range(&w->own, 0, 1) && !(w->may_alias && w->b.is_large))
        opts.staging_bytes = rng_range(&w->own, w->b.is_large ? 256 << 10 : 64 << 10, 1 << 20);
    opts.max_in_flight = (uint32_t)rng_range(&w->own, 0, 3);
    opts.group_window = w->has_window ? (uint32_t)rng_range(&w->own, 0, 2) : 0;
    opts.staged = pass == 2 ? rng_range(&w->own, 0, 1) : pass;
    opts.snapshot = rng_range(&w->own, 0, 3) == 0;
    opts.commit = rng_range(&w->common, 0, 2) == 0 ? TB_SHADOW : TB_IN_PLACE;
    opts.checksum = rng_range(&w->own, 0, 3 * w->pool->nworkers) == 0;
    opts.sends = rng_range(&w->own, 0, 1);
    w->opts = opts;
    at(w, "makes the batch");
    must(w, tb_batch_create(w->world, "batch", &opts, &w->batch));
    add_tensors(w);
    bool is_dead[2] = {false, false}; /* a direction that was refused */
    int ntransfers = w->b.is_large ? 1 : (int)rng_range(&w->common, 1, 3);
    for (int i = 0; i < ntransfers; i++) {
        int from = i > 0 && rng_range(&w->common, 0, 1);
        tb_status outcome = random_batch_outcome(&w->b, from);
        if (!w->pool->has_agents && rng_range(&w->own, 0, 1))
            move_blocks(w, rng_range(&w->own, 0, 1));
        if (!is_dead[from])
            transfer(w, from, i, outcome);
        is_dead[from] = outcome != TB_OK;
    }
    at(w, "is done with the batch");
    if (is_dead[0] || is_dead[1])
        w->pool->barrier(); /* whoever leaves early is an error of its own */
}

static void run_case(worker *w, uint64_t seed) {
    w->case_seed = seed;
    at(w, "makes the case");
    random_batch_make(&w->b, seed, w->nseats);
    w->common = (rng){seed ^ 0xC0};
    w->own = (rng){seed * w->pool->nworkers * 2 + (uint64_t)w->pool->number};
    place_parts(w);
    make_pairs(w);
    int npasses = rng_range(&w->common, 0, 2) || w->b.is_large ? 2 : NPASSES;
    for (int pass = 0; pass < npasses; pass++) {
        run_pass(w, pass);
        bool pair_goes_first = pass == npasses - 1 && rng_range(&w->own, 0, 1);
        for (int s = 0; s < 2 && pair_goes_first; s++) {
            tb_pair_destroy(w->pair[s]);
            w->pair[s] = NULL;
        }
        tb_batch_destroy(w->batch);
    }
    at(w, "is done with the case");
    for (int s = 0; s < 2; s++) {
        tb_pair_destroy(w->pair[s]);
        w->pair[s] = NULL;
    }
    remove_parts(w);
}

/* Who sits where: each process in one of the groups or in both, on any seat. */
static void join(worker *w, uint64_t number) {
    rng r = {number};
    int32_t nobody = -1;
    int order[RANDOM_MAX_WORKERS] = {0}, shift[2];
    w->nseats[0] = w->nseats[1] = 0;
    w->seat[0] = w->seat[1] = nobody;
    for (int i = 0; i < w->pool->nworkers; i++) {
        int64_t where = rng_range(&r, 0, 3); /* both: half of them */
        order[i] = (int)rng_range(&r, 0, 1);
        bool is_in[2] = {where != 1 || i == 0, where != 0 || i == w->pool->nworkers - 1};
        for (int s = 0; s < 2; s++) {
            if (is_in[s] && i == w->pool->number)
                w->seat[s] = w->nseats[s];
            w->nseats[s] += is_in[s];
        }
    }
    for (int s = 0; s < 2; s++) {
        shift[s] = (int)rng_range(&r, 0, w->nseats[s] - 1);
        if (w->seat[s] >= 0)
            w->seat[s] = (w->seat[s] + shift[s]) % w->nseats[s];
    }
    w->first = w->seat[order[w->pool->number]] >= 0 ? order[w->pool->number] : !order[w->pool->number];
    at(w, "joins");
    /* Half of the worlds are on several hosts, as far as anybody can tell. */
    char host[8];
    int64_t nhosts = rng_range(&r, -2, 4);
    for (int i = 0; i <= w->pool->number; i++)
        snprintf(host, sizeof host, "h%d", (int)rng_range(&r, 1, nhosts < 1 ? 1 : nhosts));
    must(w, w->pool->join(group_names[w->first], w->seat[w->first], w->nseats[w->first], nhosts > 1 ? host : NULL,
                          &w->world));
    if (w->seat[!w->first] >= 0)
        must(w, tb_world_enter(w->world, group_names[!w->first], w->seat[!w->first], w->nseats[!w->first]));
}

void random_work(const random_pool *pool, uint64_t seed, int64_t ncases) {
    static worker w;
    w.pool = pool;
    tb__min_part_nbytes = 64; /* some of these small tensors are cut among replicas for other hosts, others are not */
    for (int64_t i = 0; i < ncases; i++) {
        uint64_t this = seed + (uint64_t)i;
        w.case_seed = this;
        if (!w.world)
            join(&w, this / CASES_PER_WORLD); /* so that a case alone finds the world it failed in */
        run_case(&w, this);
        if (i == ncases - 1 || (this + 1) % CASES_PER_WORLD == 0) {
            at(&w, "leaves");
            w.pool->barrier(); /* whoever serves the store takes it along */
            tb_world_destroy(w.world);
            w.world = NULL;
            if (w.pool->leave)
                w.pool->leave();
            w.pool->barrier();
        }
    }
}
