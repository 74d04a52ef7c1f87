/* Chooses where each tensor is converted, and converts it: when it is packed, unpacked, or gathered. */
#include "reshard/convert_inside.h"

#include "base/dtype.h"
#include "base/int.h"

#include <inttypes.h>
#include <string.h>

enum { MAX_AMAXES = 4 }; /* of a rank */

/* ---- The user's transforms ------------------------------------------------------------------------------------- */

static tb_transform_piece piece_of(const entry *e, int ndim, const int64_t *len) {
    tb_transform_piece piece = {.size = sizeof piece, .name = e->name, .dtype = e->dtype, .ndim = ndim};
    memcpy(piece.shape, len, (size_t)ndim * sizeof *len);
    return piece;
}

/* The size of a piece by this process's transform, which also sets the offsets of its buffers. Negative: the
 * transform's answer is invalid. */
static int64_t measure_piece(const entry *e, tb_transform_piece *piece) {
    const tb_transform *t = e->how.transform;
    int64_t n = 1, at = 0;
    piece->nbuffers = 1;
    for (int d = 0; d < piece->ndim; d++)
        n *= piece->shape[d];
    if (t && t->list_buffers) {
        int count = t->list_buffers(t->arg, piece, piece->buffer_nbytes);
        piece->nbuffers = count < 1 || count > TB_MAX_BUFFERS ? 0 : (size_t)count;
    } else {
        piece->buffer_nbytes[0] = t && t->prepare_recv ? t->prepare_recv(t->arg, piece) : tb__dtype_bytes(e->dtype, n);
    }
    for (size_t i = 0; i < piece->nbuffers; i++) {
        if (piece->buffer_nbytes[i] < 1 || piece->buffer_nbytes[i] > INT64_C(1) << 58)
            return -1;
        piece->buffer_offset[i] = tb__align(at, 64);
        at = piece->buffer_offset[i] + piece->buffer_nbytes[i];
    }
    return piece->nbuffers ? at : -1;
}

/* If only one side transforms a tensor, the wire has its elements. */
static int64_t user_nbytes(const void *arg, int ndim, const int64_t *len) {
    const entry *e = arg;
    tb_transform_piece piece = piece_of(e, ndim, len);
    int64_t n = 1;
    for (int d = 0; d < ndim; d++)
        n *= len[d];
    return e->how.is_sent_transformed && e->how.is_received_transformed ? measure_piece(e, &piece)
                                                                        : tb__dtype_bytes(e->dtype, n);
}

static tb_status read_piece(const entry *e, const tb_chunk *chunk, tb_transform_piece *out) {
    *out = piece_of(e, chunk->ndim, chunk->len);
    memcpy(out->src_start, chunk->src.start, sizeof out->src_start);
    memcpy(out->dst_start, chunk->dst.start, sizeof out->dst_start);
    int64_t nbytes = measure_piece(e, out);
    if (nbytes == chunk->nbytes)
        return TB_OK;
    if (e->how.is_sent_transformed && e->how.is_received_transformed)
        return tb__fail(TB_INVALID, "its transform has %" PRId64 " bytes for a piece that had %" PRId64 " before",
                        nbytes, chunk->nbytes);
    return tb__fail(TB_INVALID,
                    "its transform has %" PRId64 " bytes for a piece of %" PRId64
                    " bytes, and the other side does not transform it: then the bytes are those of the elements",
                    nbytes, chunk->nbytes);
}

static tb_status user_pack(void *arg, const tb_chunk *chunk, const tb_binding *src, void *wire) {
    const entry *e = arg;
    tb_transform_piece piece;
    TB_TRY(read_piece(e, chunk, &piece));
    for (size_t i = 1; i < piece.nbuffers; i++) {
        int64_t end = piece.buffer_offset[i - 1] + piece.buffer_nbytes[i - 1];
        memset((char *)wire + end, 0, (size_t)(piece.buffer_offset[i] - end));
    }
    return e->how.transform->prepare_send(e->how.transform->arg, &piece, src, wire);
}

static tb_status user_unpack(void *arg, const tb_chunk *chunk, const tb_binding *dst, const void *wire) {
    const entry *e = arg;
    tb_transform_piece piece;
    TB_TRY(read_piece(e, chunk, &piece));
    return e->how.transform->finalize_recv(e->how.transform->arg, &piece, dst, wire);
}

/* ---- Encodings ------------------------------------------------------------------------------------------------- */

static tb_status decode_pack(void *arg, const tb_chunk *chunk, const tb_binding *src, tb__mapping *mapping,
                             int64_t offset, tb__move_list *out) {
    const entry *e = arg;
    (void)src;
    (void)mapping;
    return tb__encoded_list_read(e->how.src, chunk->ndim, chunk->src.start, chunk->len, offset, chunk->wire_dtype,
                                 e->name, out);
}

static int64_t mxfp8_nbytes(const void *arg, int ndim, const int64_t *len) {
    (void)arg;
    return tb__mxfp8_wire_nbytes(ndim, len);
}

static tb_status mxfp8_pack(void *arg, const tb_chunk *chunk, const tb_binding *src, tb__mapping *mapping,
                            int64_t offset, tb__move_list *out) {
    const entry *e = arg;
    return tb__mxfp8_list_pack(&e->dst_encoding.format, src, mapping, chunk->dst.start[chunk->ndim - 1], offset,
                               e->name, out);
}

static tb_status mxfp8_unpack(void *arg, const tb_chunk *chunk, int64_t offset, tb__move_list *out) {
    const entry *e = arg;
    return tb__mxfp8_list_unpack(e->how.dst, chunk->ndim, chunk->dst.start, chunk->len, offset, out);
}

static bool is_plain_float(tb_dtype dtype) {
    return dtype == TB_F32 || dtype == TB_F16 || dtype == TB_BF16;
}

/* The dtype that a quantised source is dequantised to. mxfp8 fits into bf16 exactly. */
static tb_dtype decoded_dtype(const entry *e, tb_dtype dst) {
    if (e->how.dst_encoding)
        return e->src_encoding.format.kind == TB__QUANT_MXFP8 ? TB_BF16 : TB_F32;
    return is_plain_float(dst) ? dst : TB_F32;
}

static tb_status choose_transformed(entry *e, tb__flow_tensor *t) {
    const tb_transform *own = e->how.transform;
    if (e->how.src_encoding || e->how.dst_encoding)
        return tb__fail(TB_REFUSED, "it is encoded, and a transform is to convert it, too");
    e->dtype = t->spec.src_dtype;
    t->spec.coded = true;
    t->spec.coded_nbytes = user_nbytes;
    t->spec.coded_arg = e;
    t->spec.whole = e->how.is_whole;
    e->codec.call_pack = own && own->prepare_send && e->how.is_sent_transformed ? user_pack : NULL;
    e->codec.call_unpack = own && own->finalize_recv && e->how.is_received_transformed ? user_unpack : NULL;
    e->codec.unpacks_last = e->codec.call_unpack && own->whole;
    return TB_OK;
}

static tb_status choose_encoded(entry *e, tb__flow_tensor *t) {
    tb_tensor_spec *spec = &t->spec;
    const tb__encoding *to = e->how.dst_encoding;
    if (e->how.src_encoding) {
        spec->src_dtype = decoded_dtype(e, spec->dst_dtype);
        spec->coded = true;
        e->codec.list_pack = decode_pack;
        e->codec.reads_more = true;
    } else if (!is_plain_float(spec->src_dtype)) {
        return tb__fail(TB_REFUSED, "%s is made of f32, f16 or bf16, not of %s", tb__quant_name(to->format.kind),
                        tb_dtype_name(spec->src_dtype));
    }
    e->dtype = spec->src_dtype;
    if (!to)
        return TB_OK;
    spec->dst_dtype = spec->src_dtype;
    /* A sender that casts first can't quantise: the wire has the cast numbers. */
    bool casts = spec->wire_dtype != TB_DTYPE_NONE && spec->wire_dtype != spec->src_dtype;
    t->is_gathered = !to->by_sender || e->how.src_encoding || casts;
    if (!t->is_gathered) {
        spec->coded = true;
        spec->coded_nbytes = mxfp8_nbytes;
        e->codec.packs_rows = true;
        e->codec.list_pack = mxfp8_pack;
        e->codec.list_unpack = mxfp8_unpack;
    }
    return TB_OK;
}

static tb_status choose_conversion(entry *e, tb__flow_tensor *t) {
    e->name = tb__strdup(t->spec.name);
    e->codec.arg = e;
    if (!e->name)
        return TB_NO_MEMORY;
    if (e->how.src_encoding)
        e->src_encoding = *e->how.src_encoding;
    if (e->how.dst_encoding)
        e->dst_encoding = *e->how.dst_encoding;
    tb_status status = TB_OK;
    if (e->how.is_sent_transformed || e->how.is_received_transformed)
        status = choose_transformed(e, t);
    else if (e->how.src_encoding || e->how.dst_encoding)
        status = choose_encoded(e, t);
    t->codec = t->spec.coded ? &e->codec : NULL;
    return status == TB_OK ? TB_OK : tb__fail_within(status, "tensor '%.100s'", e->name);
}

/* ---- Gathered groups ------------------------------------------------------------------------------------------- */

/* The rows of a tensor's part that are in the slot. */
static int64_t rows_in(const entry *e, const unit *u, uint32_t group, int64_t *first) {
    const tb__encoded *to = e->how.dst;
    *first = 0;
    if (!to || to->rows == 0)
        return 0;
    int64_t length = to->part.shape.ndim > 1 ? to->part.shape.dim[0] : 1, each = to->rows / length;
    int64_t band = e->band ? e->band : length, at = (int64_t)(group - u->group) * band;
    if (at >= length)
        return 0;
    *first = at * each;
    return (length - at < band ? length - at : band) * each;
}

/* Lists the move that finds the largest magnitude of a unit in the slot. */
static tb_status list_amax(const tb__convert *c, unit *u, const char *slot, tb__move_list *out) {
    for (size_t i = 0; slot && i < u->count; i++) {
        const entry *e = &c->entries[c->order[u->first + i]];
        int64_t first, rows = rows_in(e, u, u->group, &first);
        tb_binding box;
        if (rows == 0)
            continue;
        tb_shape shape = {.ndim = 2, .dim = {rows, e->how.dst->columns}};
        TB_TRY(tb_binding_contiguous((char *)(uintptr_t)slot, (int64_t)e->slot_offset, e->dtype, &shape, &box));
        TB_TRY(tb__encoded_list_amax(&shape, (const int64_t[]){0, 0}, &box, NULL, &u->amax, e->name, out));
    }
    return TB_OK;
}

/* Lists the moves of a unit's global scale to its tensors, which may share it. */
static tb_status list_scale(const tb__convert *c, const unit *u, tb__move_list *out) {
    const float *before = NULL;
    for (size_t i = 0; i < u->count; i++) {
        const tb__encoded *to = c->entries[c->order[u->first + i]].how.dst;
        bool is_known = !to || !to->scale || to->scale == before;
        for (size_t j = 0; !is_known && j < i; j++) {
            const tb__encoded *other = c->entries[c->order[u->first + j]].how.dst;
            is_known = other && other->scale == to->scale;
        }
        if (is_known)
            continue;
        TB_TRY(tb__encoded_list_scale(&u->scale, to->scale, out));
        before = to->scale;
    }
    return TB_OK;
}

/* Lists the moves that quantise the slot into the unit's tensors. */
static tb_status list_write(const tb__convert *c, const unit *u, uint32_t group, const char *slot, tb__move_list *out) {
    for (size_t i = 0; slot && i < u->count; i++) {
        const entry *e = &c->entries[c->order[u->first + i]];
        int64_t first, rows = rows_in(e, u, group, &first);
        if (rows > 0)
            TB_TRY(tb__encoded_list_write(e->how.dst, first, rows, slot + e->slot_offset, e->dtype,
                                          u->is_global ? &u->scale : NULL, e->name, out));
    }
    return u->is_global ? list_scale(c, u, out) : TB_OK;
}

static bool record_peer_amax(unit *u, peer_amax new) {
    size_t oldest = TB__NOWHERE, count = 0;
    for (size_t i = 0; i < u->peer_amaxes.count; i++) {
        if (u->peer_amaxes.item[i].rank != new.rank)
            continue;
        count++;
        if (oldest == TB__NOWHERE || u->peer_amaxes.item[i].attempt < u->peer_amaxes.item[oldest].attempt)
            oldest = i;
    }
    if (count == MAX_AMAXES) {
        u->peer_amaxes.item[oldest] = new;
        return true;
    }
    return tb__vec_push(&u->peer_amaxes, new);
}

static void send_amax(const tb__convert *c, const unit *u, tb__flow *flow, uint64_t attempt, float amax) {
    uint32_t bits;
    memcpy(&bits, &amax, sizeof bits);
    for (size_t i = 0; i < u->nranks; i++) {
        if (u->ranks[i] == c->rank)
            continue;
        tb__pack pack = {0};
        tb__pack_u32(&pack, (uint32_t)(u - c->units.item));
        tb__pack_u32(&pack, bits);
        tb__flow_send_gather_message(flow, u->ranks[i], attempt, &pack);
        tb__pack_fini(&pack);
    }
}

static const peer_amax *find_peer_amax(const unit *u, int32_t rank, uint64_t attempt) {
    for (size_t i = 0; i < u->peer_amaxes.count; i++) {
        if (u->peer_amaxes.item[i].rank == rank && u->peer_amaxes.item[i].attempt == attempt)
            return &u->peer_amaxes.item[i];
    }
    return NULL;
}

/* Computes the scale of a measured unit, once all ranks with parts of it have sent their largest magnitudes. */
static tb_status agree_on_scale(tb__convert *c, unit *u, tb__flow *flow, uint64_t attempt, bool *waits) {
    if (u->told != attempt) {
        if (!record_peer_amax(u, (peer_amax){c->rank, attempt, u->amax}))
            return TB_NO_MEMORY;
        send_amax(c, u, flow, attempt, u->amax);
        u->told = attempt;
    }
    float amax = find_peer_amax(u, c->rank, attempt)->amax;
    for (size_t i = 0; i < u->nranks; i++) {
        const peer_amax *n = find_peer_amax(u, u->ranks[i], attempt);
        if (!n) {
            *waits = true;
            c->awaited = u->ranks[i];
        }
        amax = n && n->amax > amax ? n->amax : amax;
    }
    return tb__quant_scale(&c->entries[c->order[u->first]].dst_encoding.format, amax, &u->scale);
}

/* Ranks without a part of a scale group do not get the others' magnitudes, and do not need them. */
static bool is_concerned(const tb__convert *c, const unit *u) {
    return u->nranks == 0 || tb__has_int32(u->ranks, u->nranks, c->rank);
}

/* The units of a group: first .. stop-1. */
static void find_units(const tb__convert *c, uint32_t group, size_t *first, size_t *stop) {
    *first = c->unit_of[group];
    *stop = c->unit_of[group + 1];
    if (*first < c->units.count && *stop == *first)
        ++*stop; /* one of several bands */
}

static tb_status list_step(void *arg, uint32_t group, tb__gather_step step, const char *slot, tb__move_list *out) {
    tb__convert *c = arg;
    size_t first, stop;
    find_units(c, group, &first, &stop);
    for (size_t i = first; i < stop; i++) {
        unit *u = &c->units.item[i];
        if (!is_concerned(c, u) || (step == TB__GATHER_MEASURE && !u->is_global))
            continue;
        TB_TRY(step == TB__GATHER_MEASURE ? list_amax(c, u, slot, out) : list_write(c, u, group, slot, out));
    }
    return TB_OK;
}

static tb_binding box_of(const entry *e, const tb_chunk *chunk, const void *src, const int64_t *strides) {
    tb_binding box = {.base = (void *)(uintptr_t)src, .dtype = e->dtype, .shape.ndim = chunk->ndim};
    memcpy(box.shape.dim, chunk->len, sizeof box.shape.dim);
    memcpy(box.strides, strides, sizeof box.strides);
    return box;
}

static bool can_list_chunk(void *arg, const tb_chunk *chunk, const int64_t *strides) {
    const entry *e = &((const tb__convert *)arg)->entries[chunk->tensor];
    tb_binding box = box_of(e, chunk, NULL, strides);
    return e->how.dst && chunk->wire_dtype == e->dtype && tb__encoded_takes_box(e->how.dst, chunk->dst.start, &box);
}

static tb_status list_chunk(void *arg, const tb_chunk *chunk, tb__gather_step step, const void *src,
                            const int64_t *strides, tb__mapping *mapping, tb__move_list *out) {
    tb__convert *c = arg;
    const entry *e = &c->entries[chunk->tensor];
    unit *u = &c->units.item[e->unit];
    tb_binding box = box_of(e, chunk, src, strides);
    if (step == TB__GATHER_WRITE)
        return tb__encoded_list_write_box(e->how.dst, chunk->dst.start, &box, mapping, u->is_global ? &u->scale : NULL,
                                          e->name, out);
    return u->is_global
               ? tb__encoded_list_amax(&e->how.dst->part.shape, chunk->dst.start, &box, mapping, &u->amax, e->name, out)
               : TB_OK;
}

static bool must_measure(void *arg, uint32_t group) {
    const tb__convert *c = arg;
    size_t first, stop;
    bool is_global = false;
    find_units(c, group, &first, &stop);
    for (size_t i = first; i < stop; i++)
        is_global |= c->units.item[i].is_global;
    return is_global;
}

static void begin_receive(void *arg) {
    tb__convert *c = arg;
    for (size_t i = 0; i < c->units.count; i++)
        c->units.item[i].amax = 0;
}

/* Units with a global scale are measured first; then their ranks exchange the results. */
static tb_status next_step(void *arg, tb__flow *flow, uint64_t attempt, uint32_t group, bool is_measured,
                           tb__gather_step *out) {
    tb__convert *c = arg;
    bool measures = false, waits = false;
    size_t first, stop;
    c->awaited = TB_NO_RANK;
    find_units(c, group, &first, &stop);
    for (size_t i = first; i < stop; i++) {
        unit *u = &c->units.item[i];
        if (!u->is_global || !is_concerned(c, u) || u->measured == attempt)
            continue;
        u->measured = attempt;
        measures |= !is_measured;
    }
    for (size_t i = first; i < stop && !measures; i++) {
        unit *u = &c->units.item[i];
        if (u->is_global && is_concerned(c, u))
            TB_TRY(agree_on_scale(c, u, flow, attempt, &waits));
    }
    *out = measures ? TB__GATHER_MEASURE : waits ? TB__GATHER_WAIT : TB__GATHER_WRITE;
    return TB_OK;
}

static int32_t awaited_rank(void *arg) {
    return ((const tb__convert *)arg)->awaited;
}

static bool on_peer_amax(void *arg, int32_t rank, uint64_t attempt, tb__unpack *message) {
    tb__convert *c = arg;
    uint32_t at = tb__unpack_u32(message), bits = tb__unpack_u32(message);
    peer_amax new = {.rank = rank, .attempt = attempt};
    memcpy(&new.amax, &bits, sizeof bits);
    return tb__unpack_is_done(message) && at < c->units.count && c->units.item[at].is_global &&
           record_peer_amax(&c->units.item[at], new);
}

/* ---- Set-up ---------------------------------------------------------------------------------------------------- */

static tb_status fill(tb__convert *c, tb__flow_opts *opts, tb__flow_tensor *tensors, const tb__convert_how *how) {
    bool gathers = false;
    for (size_t i = 0; i < c->nentries; i++) {
        c->entries[i].how = how[i];
        TB_TRY(choose_conversion(&c->entries[i], &tensors[i]));
        gathers |= tensors[i].is_gathered;
    }
    if (!gathers)
        return TB_OK;
    c->most_nbytes = opts->staging_bytes / 4;
    TB_TRY(tb__convert_steps(c, tensors));
    for (uint32_t i = 0; i < c->ngroups && (opts->staged || opts->checksum); i++) /* no group can do without a slot */
        TB_TRY(tb__convert_measure_slot(c, i, &(size_t){0}));
    opts->staging_bytes -= opts->staging_bytes / 4;
    opts->own_staging_bytes -= opts->own_staging_bytes / 4;
    opts->user_groups = c->user_groups;
    opts->gather = (tb__gather){.slots_nbytes = (size_t)c->most_nbytes,
                                .arg = c,
                                .measure_slot = tb__convert_measure_slot,
                                .begin = begin_receive,
                                .list = list_step,
                                .list_chunk = list_chunk,
                                .can_list_chunk = can_list_chunk,
                                .must_measure = must_measure,
                                .next = next_step,
                                .awaits = awaited_rank,
                                .on_message = on_peer_amax};
    return TB_OK;
}

tb_status tb__convert_create(tb__flow_opts *opts, tb__flow_tensor *tensors, const tb__convert_how *how,
                             tb__convert **out) {
    bool is_needed = false;
    *out = NULL;
    for (size_t i = 0; i < opts->ntensors; i++)
        is_needed |=
            how[i].src_encoding || how[i].dst_encoding || how[i].is_sent_transformed || how[i].is_received_transformed;
    if (!is_needed)
        return TB_OK;
    tb__convert *c = tb__calloc(1, sizeof *c);
    if (!c)
        return TB_NO_MEMORY;
    c->rank = opts->rank;
    c->awaited = TB_NO_RANK;
    c->nentries = opts->ntensors;
    c->entries = tb__calloc(c->nentries, sizeof *c->entries);
    tb_status status = c->entries ? fill(c, opts, tensors, how) : TB_NO_MEMORY;
    if (status != TB_OK) {
        tb__convert_destroy(c);
        return status;
    }
    *out = c;
    return TB_OK;
}

void tb__convert_destroy(tb__convert *c) {
    if (!c)
        return;
    for (size_t i = 0; c->entries && i < c->nentries; i++)
        free(c->entries[i].name);
    for (size_t i = 0; i < c->units.count; i++) {
        free(c->units.item[i].ranks);
        free(c->units.item[i].peer_amaxes.item);
    }
    free(c->units.item);
    free(c->entries);
    free(c->order);
    free(c->user_groups);
    free(c->unit_of);
    free(c->group_nbytes);
    free(c);
}
