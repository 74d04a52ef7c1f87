/* One rank, in a process of its own: it has its parts of the tensors, a seat in the world, and does what the parent
 * says until that is gone. */
#include "tools/bench.h"

#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/prctl.h>
#include <unistd.h>

enum { TRANSFER_TIMEOUT_MS = 120000, LOOK_MS = 1000 };

/* What a rank is in one of the groups. */
typedef struct side {
    bool is_source;
    int32_t index;
    const bench_job *job;
    bench_part *parts; /* one per tensor */
    tb_pair *pair;
    tb_transfer *transfer;
} side;

typedef struct rank {
    const bench_job *job;
    bench_hand *hand;
    const char *folder;
    int32_t index;
    int nsides;
    side sides[2];
    tb_world *world;
    tb_batch *batch;
} rank;

static const char *group_of(bool is_source) {
    return is_source ? "from" : "to";
}

static tb_status allocate_part(const bench_case *c, bench_part *part) {
    TB_TRY(bench_part_size(part));
    if (part->nbytes == 0)
        return TB_OK;
    if (!c->is_foreign) {
        TB_TRY(tb_alloc((size_t)part->nbytes, &part->data));
    } else if (!(part->data = tb__malloc((size_t)part->nbytes, 1))) {
        return TB_NO_MEMORY;
    }
    return bench_part_fill(part);
}

static tb_status allocate(rank *r) {
    for (int s = 0; s < r->nsides; s++) {
        side *own = &r->sides[s];
        own->parts = tb__calloc(r->job->tensors.count, sizeof *own->parts);
        if (!own->parts)
            return TB_NO_MEMORY;
        for (size_t i = 0; i < r->job->tensors.count; i++) {
            own->parts[i] = (bench_part){.tensor = &r->job->tensors.item[i],
                                         .number = (uint32_t)i,
                                         .rank = own->index,
                                         .is_source = own->is_source};
            TB_TRY(allocate_part(r->job->c, &own->parts[i]));
        }
        if (r->hand->rows > 0)
            TB_TRY(bench_hand_fill(r->hand, own->is_source, own->index));
    }
    return TB_OK;
}

/* A rank that is in both groups does not wait for itself. */
static tb_status open_side(rank *r, int number) {
    side *s = &r->sides[number];
    const bench_case *c = s->job->c;
    tb_pair_opts opts = {.size = sizeof opts, .group = group_of(s->is_source), .no_wait = number + 1 < r->nsides};
    TB_TRY(tb_pair_create(r->world, "bench", group_of(!s->is_source), s->is_source ? c->src : c->dst, &opts, &s->pair));
    for (size_t i = 0; i < s->job->tensors.count; i++) {
        const bench_tensor *t = &s->job->tensors.item[i];
        tb_tensor tensor = {
            .data = s->parts[i].data,
            .dtype = s->is_source ? t->src_dtype : t->dst_dtype,
            .ndim = t->shape.ndim,
            .layout = s->is_source ? t->src_layout : t->dst_layout,
        };
        memcpy(tensor.shape, t->shape.dim, sizeof tensor.shape);
        TB_TRY(tb_batch_add(r->batch, s->pair, t->name, &tensor));
    }
    return TB_OK;
}

static tb_status connect_rank(rank *r) {
    char url[256];
    snprintf(url, sizeof url, "unix:%s/bus.sock", r->folder);
    TB_TRY(tb_world_join(url, group_of(r->sides[0].is_source), r->index, BENCH_SIDE, NULL, &r->world));
    if (r->nsides == 2)
        TB_TRY(tb_world_enter(r->world, group_of(r->sides[1].is_source), r->index, BENCH_SIDE));
    TB_TRY(tb_batch_create(r->world, "bench", NULL, &r->batch));
    for (int s = 0; s < r->nsides; s++)
        TB_TRY(open_side(r, s));
    return tb_batch_register(r->batch, 0);
}

/* The time is taken when this rank has its data, or has its memory back; what follows is for the next transfer. */
static tb_status transfer(rank *r, int64_t *finished_ns) {
    tb_transfer_opts opts = {.size = sizeof opts, .timeout_ms = TRANSFER_TIMEOUT_MS};
    for (int s = 0; s < r->nsides; s++) {
        side *own = &r->sides[s];
        TB_TRY(own->is_source ? tb_send(r->batch, &opts, &own->transfer) : tb_recv(r->batch, &opts, &own->transfer));
    }
    for (int s = r->nsides - 1; s >= 0; s--)
        TB_TRY(tb_wait(r->sides[s].transfer, r->sides[s].is_source ? TB_RELEASED : TB_ARRIVED, -1));
    *finished_ns = bench_now_ns();
    for (int s = 0; s < r->nsides; s++)
        TB_TRY(tb_wait(r->sides[s].transfer, TB_COMMITTED, -1));
    for (int s = 0; s < r->nsides; s++) {
        tb_transfer_destroy(r->sides[s].transfer);
        r->sides[s].transfer = NULL;
    }
    return TB_OK;
}

static tb_status each_target(rank *r, tb_status (*do_part)(const bench_part *)) {
    for (int s = 0; s < r->nsides; s++) {
        for (size_t i = 0; !r->sides[s].is_source && i < r->job->tensors.count; i++)
            TB_TRY(do_part(&r->sides[s].parts[i]));
    }
    return TB_OK;
}

static tb_status spoil(rank *r) {
    TB_TRY(each_target(r, bench_part_fill));
    bool is_by_hand = r->hand->rows > 0 && !r->sides[0].is_source;
    return is_by_hand ? bench_hand_fill(r->hand, false, r->index) : TB_OK;
}

static tb_status verify(rank *r) {
    TB_TRY(each_target(r, bench_part_verify));
    bool is_by_hand = r->hand->rows > 0 && !r->sides[0].is_source;
    return is_by_hand ? bench_hand_verify(r->hand, r->index) : TB_OK;
}

static void run_by_hand(const rank *r) {
    if (!r->sides[0].is_source)
        bench_hand_run(r->hand, r->index);
}

static void close_rank(rank *r) {
    tb_batch_destroy(r->batch);
    for (int s = 0; s < r->nsides; s++)
        tb_pair_destroy(r->sides[s].pair);
    tb_world_destroy(r->world);
    for (int s = 0; s < r->nsides; s++) {
        for (size_t i = 0; r->sides[s].parts && i < r->job->tensors.count; i++) {
            if (r->job->c->is_foreign)
                free(r->sides[s].parts[i].data);
            else
                tb_free(r->sides[s].parts[i].data);
        }
        free(r->sides[s].parts);
    }
}

static tb_status do_step(rank *r, bench_step step, int64_t *finished_ns) {
    switch (step) {
    case BENCH_ALLOCATE:
        return allocate(r);
    case BENCH_CONNECT:
        return connect_rank(r);
    case BENCH_TRANSFER:
        return transfer(r, finished_ns);
    case BENCH_BY_HAND:
        run_by_hand(r);
        return TB_OK;
    case BENCH_SPOIL:
        return spoil(r);
    case BENCH_VERIFY:
        return verify(r);
    case BENCH_CLOSE:
        close_rank(r);
        return TB_OK;
    }
    return tb__fail(TB_INTERNAL, "there is no step %d", (int)step);
}

_Noreturn void bench_rank_main(const bench_ranks *ranks, int i, pid_t parent) {
    bench_control *control = ranks->control;
    bench_slot *slot = &control->slot[i];
    rank r = {.job = ranks->job, .hand = ranks->hand, .folder = ranks->folder, .index = i % BENCH_SIDE};
    r.nsides = ranks->job->c->is_local ? 2 : 1;
    for (int s = 0; s < r.nsides; s++)
        r.sides[s] = (side){.is_source = s == 0 && i < BENCH_SIDE, .index = r.index, .job = ranks->job};
    bench_signals_default();
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    uint32_t turn = 0; /* the parent begins the first step when all have been forked; it may be before this runs */
    for (;;) {
        while (control->turn == turn) {
            if (getppid() != parent)
                _exit(0);
            bench_futex_wait(&control->turn, turn, LOOK_MS);
        }
        turn++;
        int64_t finished_ns = 0;
        tb_status status = do_step(&r, control->step, &finished_ns);
        if (status != TB_OK)
            snprintf(slot->sentence, sizeof slot->sentence, "%s", tb_error_detail());
        slot->finished_ns = finished_ns ? finished_ns : bench_now_ns();
        __atomic_store_n(&slot->status, status, __ATOMIC_RELEASE);
        control->ndone++;
        bench_futex_wake(&control->ndone);
    }
}
