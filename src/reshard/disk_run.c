/* Runs a resharding on disk: each thread takes the next stretch of a target rank's tensor, gathers it band by band, and
 * writes it or, when verifying, compares it with the written data. */
#include "reshard/disk_inside.h"

#include "base/dtype.h"
#include "base/int.h"
#include "base/process.h"
#include "layout/layout.h"

#include <inttypes.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

enum {
    MAX_THREADS = 16,          /* more do not make a disk faster */
    BAND_BYTES = 1 << 20,      /* stays in the cache between the read and the write */
    MIN_BAND_BYTES = 16 << 10, /* where there is little memory */
    MIN_STAGE_BYTES = 4 << 10, /* so that many ranks can be combined */
    STRETCH_BYTES = 64 << 20,  /* what a thread takes at a time */
    LOOK_MS = 100,             /* between two calls of progress */
    BUFFERS = 3,               /* of a thread: the band, what it is quantised to, and the stage */
};

/* Shared by the threads. */
typedef struct job {
    const tb__disk *disk;
    tb__disk_output *output;
    bool is_verifying;
    bool is_comparing;      /* replicas of the source; in the first pass */
    bool is_looking;        /* for the largest magnitudes, before anything is written or compared */
    _Atomic uint32_t *amax; /* bits of the magnitudes, which are ordered like the magnitudes */
    int64_t band_bytes;
    int64_t buffer_bytes; /* of a band, or more if scales cover more */
    pthread_mutex_t lock;
    pthread_cond_t ended;
    /* Under the lock: the next stretch, and how it went. */
    size_t tensor;
    size_t part;                    /* whose replicas are next */
    tb__disk_comparison comparison; /* before the targets, whose reads find the first replica in the page cache */
    int32_t target;                 /* index in the tensor's target mesh */
    int64_t band;
    int nrunning;
    tb_status status;
    char sentence[1024];
    atomic_bool is_stopped;
    atomic_int_fast64_t bytes_done;
} job;

typedef struct worker {
    job *job;
    pthread_t thread;
    tb__disk_gather gather;
    unsigned char *band, *quantised; /* NULL if no tensor is quantised */
    /* Of the current part. */
    size_t tensor;
    int32_t rank;
    tb__disk_bands bands;
    tb_routes *routes;
    tb__disk_pieces pieces;
    tb__arena arena;
} worker;

static void fail_job(job *j, tb_status status) {
    pthread_mutex_lock(&j->lock);
    if (j->status == TB_OK) {
        j->status = status;
        snprintf(j->sentence, sizeof j->sentence, "%s", tb_error_detail());
    }
    atomic_store(&j->is_stopped, true);
    pthread_mutex_unlock(&j->lock);
}

static tb_status take_part(worker *w, size_t tensor, int32_t rank) {
    if (w->tensor == tensor && w->rank == rank)
        return TB_OK;
    w->tensor = SIZE_MAX; /* none, should this fail */
    w->rank = rank;
    tb__arena_reset(&w->arena);
    TB_TRY(tb__disk_list_pieces(&w->job->disk->tensors[tensor], rank, !w->job->is_verifying, w->routes, &w->pieces,
                                &w->arena));
    w->tensor = tensor;
    return TB_OK;
}

static tb_status part_shape(const tb__disk_tensor *t, int32_t rank, tb_shape *out) {
    tb_local local;
    TB_TRY(tb_layout_local(t->dst, &t->shape, rank, &local));
    *out = local.shape;
    tb_local_fini(&local);
    return TB_OK;
}

static const char *name_of(const tb__disk_tensor *t, size_t slot) {
    const char *const names[TB__DISK_SLOTS] = {t->name, t->dst_quant.scales_name, t->dst_quant.scale_name};
    return names[slot % TB__DISK_SLOTS];
}

/* Writes bytes of a slot from `offset` on, or compares them with the written ones. */
static tb_status write_or_verify(worker *w, size_t slot, int64_t offset, const unsigned char *bytes, size_t nbytes) {
    const tb__disk_tensor *t = &w->job->disk->tensors[w->tensor];
    if (!w->job->is_verifying)
        TB_TRY(tb__disk_output_write(w->job->output, w->rank, slot, offset, bytes, nbytes));
    for (size_t done = 0; w->job->is_verifying && done < nbytes;) {
        size_t n = nbytes - done < w->gather.stage_nbytes ? nbytes - done : w->gather.stage_nbytes;
        unsigned char *written = w->gather.stage; /* the band is complete: the stage is free */
        TB_TRY(tb__disk_output_read(w->job->output, w->rank, slot, offset + (int64_t)done, written, n));
        if (memcmp(bytes + done, written, n) != 0) {
            while (bytes[done] == *written) {
                done++;
                written++;
            }
            return tb__fail(TB_INTERNAL,
                            "tensor '%.100s' of rank %" PRId32 " is not what the source has, at byte %" PRId64,
                            name_of(t, slot), w->rank, offset + (int64_t)done);
        }
        done += n;
    }
    atomic_fetch_add(&w->job->bytes_done, (int_fast64_t)nbytes);
    return TB_OK;
}

/* Fails for a band; the message has its position. */
static tb_status fail_band(const worker *w, const tb__disk_tensor *t, const tb__disk_band *band, tb_status status) {
    return tb__fail_within(status, "tensor '%.100s' of rank %" PRId32 ", from element %" PRId64 " on", t->name, w->rank,
                           band->first);
}

static tb_status part_scale(const job *j, const tb__disk_tensor *t, int32_t rank, float *out) {
    uint32_t bits = atomic_load(&j->amax[tb__disk_amax_of(t, rank)]);
    float amax;
    memcpy(&amax, &bits, sizeof amax);
    return tb__quant_scale(&t->dst_quant.format, amax, out);
}

static tb_status do_quantised(worker *w, const tb__disk_tensor *t, const tb__disk_band *band) {
    tb__disk_quantised q;
    size_t slot = TB__DISK_SLOTS * w->tensor;
    float scale = 0;
    if (t->dst_quant.scale_name)
        TB_TRY(part_scale(w->job, t, w->rank, &scale));
    tb_status status = tb__disk_quantise(t, &w->bands, band, scale, w->band, w->quantised, &q);
    if (status != TB_OK)
        return fail_band(w, t, band, status);
    TB_TRY(write_or_verify(w, slot + TB__DISK_DATA, q.data_offset, q.data, q.data_nbytes));
    if (!t->dst_quant.scales_name)
        return TB_OK;
    return write_or_verify(w, slot + TB__DISK_SCALES, q.scale_offset, q.scales, q.scale_nbytes);
}

static tb_status measure_band(worker *w, const tb__disk_tensor *t, const tb__disk_band *band) {
    _Atomic uint32_t *most = &w->job->amax[tb__disk_amax_of(t, w->rank)];
    uint32_t bits, before = atomic_load(most);
    float amax;
    tb_status status = tb__disk_band_amax(t, &w->bands, band, w->band, &amax);
    if (status != TB_OK)
        return fail_band(w, t, band, status);
    memcpy(&bits, &amax, sizeof bits);
    while (bits > before && !atomic_compare_exchange_weak(most, &before, bits)) {
    }
    atomic_fetch_add(&w->job->bytes_done, (int_fast64_t)tb__dtype_bytes(t->dst_dtype, band->nelements));
    return TB_OK;
}

static tb_status do_band(worker *w, int64_t i) {
    const tb__disk_tensor *t = &w->job->disk->tensors[w->tensor];
    tb__disk_band band;
    tb__disk_bands_at(&w->bands, i, &band);
    TB_TRY(tb__disk_gather_band(&w->gather, t, &w->pieces, &band, w->band));
    if (w->job->is_looking)
        return measure_band(w, t, &band);
    if (t->dst_quant.format.kind)
        return do_quantised(w, t, &band);
    return write_or_verify(w, TB__DISK_SLOTS * w->tensor, tb__dtype_bytes(t->dst_dtype, band.first), w->band,
                           (size_t)tb__dtype_bytes(t->dst_dtype, band.nelements));
}

/* Writes the scales of whole parts, once everything has been measured. */
static tb_status deliver_scales(worker *w) {
    for (size_t i = 0; i < w->job->disk->count; i++) {
        const tb__disk_tensor *t = &w->job->disk->tensors[i];
        for (int32_t k = 0; t->dst_quant.scale_name && k < tb_layout_nranks(t->dst); k++) {
            float scale;
            w->tensor = i;
            w->rank = tb_layout_rank_at(t->dst, k);
            TB_TRY(part_scale(w->job, t, w->rank, &scale));
            TB_TRY(write_or_verify(w, TB__DISK_SLOTS * i + TB__DISK_SCALE, 0, (const unsigned char *)&scale,
                                   sizeof scale));
        }
    }
    return TB_OK;
}

/* The work that a thread takes at a time: a comparison, or bands first .. end-1 of a target rank's part. */
typedef struct stretch {
    bool is_over; /* there is nothing left */
    size_t tensor;
    const tb__disk_stored *compared; /* NULL: none is */
    tb__disk_comparison comparison;
    int32_t rank;
    int64_t first, end;
} stretch;

/* The next comparison of replicas of what a tensor reads first; NULL: there is none. */
static const tb__disk_stored *next_comparison(job *j, const tb__disk_tensor *t, tb__disk_comparison *out) {
    for (; j->is_comparing && j->part < t->nparts; j->part++, j->comparison = (tb__disk_comparison){0}) {
        tb__disk_stored *stored = t->parts[j->part].from;
        bool is_seen = stored->reader != j->tensor;
        for (size_t i = 0; i < j->part && !is_seen && t->nparts > 1; i++)
            is_seen = t->parts[i].from == stored;
        if (!is_seen && tb__disk_next_comparison(j->disk->input, stored, &j->comparison, out))
            return stored;
    }
    return NULL;
}

/* The next stretch that no worker has taken. */
static tb_status take_stretch(worker *w, stretch *out) {
    job *j = w->job;
    tb_status status = TB_OK;
    *out = (stretch){.is_over = false};
    pthread_mutex_lock(&j->lock);
    for (;;) {
        const tb__disk_tensor *t = &j->disk->tensors[j->tensor];
        tb_shape shape;
        out->is_over = j->tensor == j->disk->count;
        if (out->is_over)
            break;
        out->tensor = j->tensor;
        out->compared = next_comparison(j, t, &out->comparison);
        if (out->compared)
            break;
        if (j->target == tb_layout_nranks(t->dst)) {
            j->tensor++;
            j->target = 0;
            j->part = 0;
            j->comparison = (tb__disk_comparison){0};
            continue;
        }
        out->rank = tb_layout_rank_at(t->dst, j->target);
        if (j->is_looking && !tb__disk_is_looked_at(t, out->rank)) {
            j->target++;
            continue;
        }
        status = part_shape(t, out->rank, &shape);
        if (status != TB_OK)
            break;
        tb__disk_bands_init(&w->bands, t, &shape, j->band_bytes);
        int64_t most = STRETCH_BYTES / j->band_bytes;
        out->first = j->band;
        out->end = w->bands.count - j->band < most ? w->bands.count : j->band + most;
        j->band = out->end;
        if (j->band >= w->bands.count) {
            j->band = 0;
            j->target++;
        }
        if (out->first < out->end)
            break;
    }
    pthread_mutex_unlock(&j->lock);
    return status;
}

static tb_status run_bands(worker *w) {
    job *j = w->job;
    const tb__disk_comparer comparer = {.gather = &w->gather,
                                        .one = w->band,
                                        .other = w->quantised,
                                        .nbytes = (size_t)j->band_bytes,
                                        .is_stopped = &j->is_stopped,
                                        .bytes_done = &j->bytes_done};
    while (!atomic_load(&j->is_stopped)) {
        stretch s;
        TB_TRY(take_stretch(w, &s));
        if (s.is_over)
            break;
        if (s.compared) {
            TB_TRY(tb__disk_compare(&comparer, s.compared, &s.comparison));
            continue;
        }
        TB_TRY(take_part(w, s.tensor, s.rank));
        for (int64_t i = s.first; i < s.end && !atomic_load(&j->is_stopped); i++)
            TB_TRY(do_band(w, i));
    }
    return TB_OK;
}

static void *run_disk_worker(void *arg) {
    worker *w = arg;
    tb_status status = run_bands(w);
    if (status != TB_OK)
        fail_job(w->job, status);
    pthread_mutex_lock(&w->job->lock);
    w->job->nrunning--;
    pthread_cond_signal(&w->job->ended);
    pthread_mutex_unlock(&w->job->lock);
    return NULL;
}

static tb_status worker_init(worker *w, job *j) {
    size_t nbytes = (size_t)j->buffer_bytes;
    size_t stage_nbytes = j->band_bytes > MIN_STAGE_BYTES ? (size_t)j->band_bytes : MIN_STAGE_BYTES;
    *w = (worker){.job = j, .tensor = SIZE_MAX, .gather = {.input = j->disk->input, .stage_nbytes = stage_nbytes}};
    w->band = tb__malloc(nbytes, BUFFERS - 1);
    w->gather.stage = tb__malloc(stage_nbytes, 1);
    if (!w->band || !w->gather.stage)
        return TB_NO_MEMORY;
    w->quantised = w->band + nbytes;
    return tb_routes_create(&w->routes);
}

static void worker_fini(worker *w) {
    tb__disk_gather_fini(&w->gather);
    tb_routes_destroy(w->routes);
    tb__arena_fini(&w->arena);
    free(w->pieces.list.item);
    free(w->pieces.reach.item);
    free(w->gather.stage);
    free(w->band);
}

/* Until all threads have ended, or progress ends the run. */
static void report_progress(job *j, const tb__disk_opts *opts) {
    bool is_over = false;
    while (!is_over) {
        int64_t compared = j->is_verifying || opts->trust_replicas ? 0 : j->disk->replica_nbytes;
        const tb__disk_state state = {j->is_verifying, atomic_load(&j->bytes_done),
                                      j->disk->dst_nbytes + j->disk->amax_nbytes + compared};
        tb_status status = opts->progress ? opts->progress(opts->arg, &state) : TB_OK;
        if (status != TB_OK)
            fail_job(j, status);
        const struct timespec until = tb__time_of_ms(tb__now_ms() + LOOK_MS);
        pthread_mutex_lock(&j->lock);
        if (j->nrunning > 0)
            pthread_cond_timedwait(&j->ended, &j->lock, &until);
        is_over = j->nrunning == 0;
        pthread_mutex_unlock(&j->lock);
    }
}

static tb_status run_pass(job *j, const tb__disk_opts *opts, worker *workers, int nworkers) {
    int started = 0;
    j->tensor = 0;
    j->part = 0;
    j->comparison = (tb__disk_comparison){0};
    j->target = 0;
    j->band = 0;
    for (; started < nworkers; started++) {
        worker *w = &workers[started];
        w->tensor = SIZE_MAX;
        pthread_mutex_lock(&j->lock);
        j->nrunning++;
        pthread_mutex_unlock(&j->lock);
        tb_status status = tb__start_thread(&w->thread, "tb-reshard", run_disk_worker, w);
        if (status != TB_OK) {
            fail_job(j, status);
            pthread_mutex_lock(&j->lock);
            j->nrunning--;
            pthread_mutex_unlock(&j->lock);
            break;
        }
    }
    report_progress(j, opts);
    for (int i = 0; i < started; i++)
        pthread_join(workers[i].thread, NULL);
    j->is_comparing = false;
    return j->status == TB_OK ? TB_OK : tb__fail(j->status, "%s", j->sentence);
}

/* Writes everything, or compares it. When comparing, scales of whole parts are computed again, too. */
static tb_status run_workers(job *j, const tb__disk_opts *opts, worker *workers, int nworkers) {
    atomic_store(&j->bytes_done, tb__disk_constants_nbytes(j->disk) * (int64_t)j->disk->nranks);
    if (j->disk->namax > 0) {
        for (size_t i = 0; i < j->disk->namax; i++)
            atomic_store(&j->amax[i], 0);
        j->is_looking = true;
        TB_TRY(run_pass(j, opts, workers, nworkers));
        j->is_looking = false;
        TB_TRY(deliver_scales(&workers[0]));
    }
    return run_pass(j, opts, workers, nworkers);
}

static tb_status run_passes(job *j, const tb__disk_opts *opts, worker *workers, int nworkers) {
    j->is_comparing = !opts->trust_replicas;
    TB_TRY(run_workers(j, opts, workers, nworkers));
    if (opts->verify) {
        j->is_verifying = true;
        TB_TRY(run_workers(j, opts, workers, nworkers));
    }
    return tb__disk_output_commit(j->output, opts->sync);
}

static tb_status run_threads(job *j, const tb__disk_opts *opts, int nthreads) {
    worker workers[MAX_THREADS];
    int n = 0;
    tb_status status = TB_OK;
    for (; n < nthreads && status == TB_OK; n++)
        status = worker_init(&workers[n], j);
    if (status == TB_OK)
        status = run_passes(j, opts, workers, nthreads);
    while (n-- > 0)
        worker_fini(&workers[n]);
    return status;
}

/* Half of the memory is for buffers: the process and the files' headers need some, too. */
static tb_status choose_sizes(job *j, const tb__disk_opts *opts, int64_t memory, int *nthreads) {
    long cores = opts->threads > 0 ? opts->threads : sysconf(_SC_NPROCESSORS_ONLN);
    int n = cores < 1 ? 1 : cores > MAX_THREADS ? MAX_THREADS : (int)cores;
    j->band_bytes = opts->band_bytes ? opts->band_bytes : BAND_BYTES;
    while (j->band_bytes > MIN_BAND_BYTES && j->band_bytes * BUFFERS > memory / 2)
        j->band_bytes /= 2;
    j->buffer_bytes = j->band_bytes;
    for (size_t i = 0; i < j->disk->count; i++) {
        int64_t least = tb__disk_least_band(&j->disk->tensors[i]);
        if (least > memory / 2 / BUFFERS)
            return tb__fail(TB_TOO_BIG,
                            "tensor '%.100s': %s needs %" PRId64 " bytes of memory for what scales cover, three times",
                            j->disk->tensors[i].name, tb__quant_name(j->disk->tensors[i].dst_quant.format.kind), least);
        j->buffer_bytes = least > j->buffer_bytes ? least : j->buffer_bytes;
    }
    while (n > 1 && n * j->buffer_bytes * BUFFERS > memory / 2)
        n--;
    *nthreads = n;
    return TB_OK;
}

tb_status tb__disk_run(const tb__disk *disk, const char *dir, const tb__disk_opts *opts) {
    job j = {.disk = disk};
    int nthreads;
    int64_t memory = opts->memory ? opts->memory : INT64_C(1) << 30;
    if (memory < TB__DISK_MIN_MEMORY)
        return tb__fail(TB_INVALID, "%" PRId64 " bytes of memory are too few; it takes %d", memory,
                        TB__DISK_MIN_MEMORY);
    TB_TRY(choose_sizes(&j, opts, memory, &nthreads));
    if (disk->namax > 0 && !(j.amax = tb__calloc(disk->namax, sizeof *j.amax)))
        return TB_NO_MEMORY;
    tb_status status = tb__disk_output_create(disk, dir, opts, &j.output);
    if (status == TB_OK) {
        pthread_mutex_init(&j.lock, NULL);
        tb__monotonic_cond_init(&j.ended);
        status = run_threads(&j, opts, nthreads);
        pthread_cond_destroy(&j.ended);
        pthread_mutex_destroy(&j.lock);
    }
    tb__disk_output_destroy(j.output);
    free((void *)j.amax);
    return status;
}
