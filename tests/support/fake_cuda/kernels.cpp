/* The kernels of the CUDA device, executed from their own source. Addresses in descriptors are the GPU's: a launch has
 * copies of the descriptors, with addresses of this process.
 *
 * A kernel that does what a GPU would not allow, such as a load that is not aligned, ends the process by an illegal
 * instruction (cmake/Cuda.cmake). */
#include "cuda_on_cpu.h"

#include "device/cuda/kernels/kernels.cu"

#include <stdlib.h>

struct launch {
    const char *name;
    tb__cuda_args args; /* as the kernel gets them */
    void *(*translate)(uint64_t address);
};

static bool is_kernel(const launch &l, const char *prefix) {
    return strncmp(l.name + strlen("tb__"), prefix, strlen(prefix)) == 0;
}

/* Copies of pieces, or of the heap: what the launch uses of them, and else zeros. */
static struct {
    char *bytes;
    size_t nbytes;
} copies;

static void *copy_descriptor(size_t offset, const void *from, size_t nbytes) {
    if (offset + nbytes > copies.nbytes) {
        size_t more = 2 * (offset + nbytes);
        copies.bytes = (char *)realloc(copies.bytes, more);
        if (!copies.bytes)
            die("no memory");
        memset(copies.bytes + copies.nbytes, 0, more - copies.nbytes);
        copies.nbytes = more;
    }
    return memcpy(copies.bytes + offset, from, nbytes);
}

/* Kernels add the base to the address. */
static void translate_address(const launch &l, uint64_t *address, uint64_t base) {
    *address = (uint64_t)l.translate(*address + base) - base;
}

static void copy_piece(const launch &l, uint32_t item) {
    size_t offset = item * sizeof(tb__cuda_piece);
    tb__cuda_piece *piece =
        (tb__cuda_piece *)copy_descriptor(offset, (const char *)l.args.items + offset, sizeof *piece);
    if (!(piece->flags & TB__CUDA_ZERO))
        translate_address(l, &piece->src, src_base(l.args, piece->flags));
    translate_address(l, &piece->dst, dst_base(l.args, piece->flags));
}

/* The number of its slots, as tiles of so many count them. */
static uint64_t copy_box(const launch &l, size_t offset, const tb__cuda_box *from, uint32_t slots) {
    size_t nmore = from->nsrc > 1 ? from->nsrc - 1 : 0, words = 2 + from->ndim; /* of each source after the first */
    size_t nbytes = sizeof *from + from->ndim * sizeof(tb__cuda_dim);
    tb__cuda_box *box = (tb__cuda_box *)copy_descriptor(offset, from, nbytes + nmore * words * sizeof(uint64_t));
    uint64_t *more = (uint64_t *)((char *)box + nbytes);
    if (!(box->flags & TB__CUDA_ZERO))
        translate_address(l, &box->src, src_base(l.args, box->flags));
    translate_address(l, &box->dst, dst_base(l.args, box->flags));
    for (size_t k = 0; k < nmore; k++)
        translate_address(l, &more[k * words], src_base(l.args, (uint32_t)more[k * words + 1]));
    return box->flags & TB__CUDA_ROW_TILES ? (uint64_t)box->nrows * box->per_row.by * slots : box->nslots;
}

static uint64_t copy_matrix(const launch &l, size_t offset, const void *from, uint32_t slots) {
    tb__cuda_matrix *m = (tb__cuda_matrix *)copy_descriptor(offset, from, sizeof *m);
    bool is_back = is_kernel(l, "dequantise");
    uint64_t tensor_base = is_back ? 0 : dst_base(l.args, m->flags);
    translate_address(l, &m->rows_at, is_back ? dst_base(l.args, m->flags) : src_base(l.args, m->flags));
    if (!is_kernel(l, "amax")) {
        translate_address(l, &m->data, tensor_base);
        if (m->kind != TB__QUANT_FP8_TENSOR)
            translate_address(l, &m->scales, tensor_base);
        translate_address(l, &m->scale, 0);
    }
    return m->flags & TB__CUDA_ROW_TILES ? (uint64_t)m->nrows * m->per_row.by * slots : m->nslots;
}

static void copy_pieces(launch *l) {
    for (uint32_t i = 0; i < l->args.nitems; i++)
        copy_piece(*l, find_item(l->args, i));
    l->args.items = (uint64_t)copies.bytes;
}

/* Boxes or matrices, whose items have so many slots, and their tiles, of which a block takes one. */
static void copy_heap(launch *l, uint32_t slots, uint32_t tile_slots) {
    bool is_box = is_kernel(*l, "copy") || is_kernel(*l, "transpose") || is_kernel(*l, "cast") ||
                  is_kernel(*l, "reduce") || is_kernel(*l, "number");
    uint64_t nslots = 0;
    uint32_t last = ~0U; /* place */
    for (uint32_t i = 0; i < l->args.nitems; i++) {
        tb__cuda_tile tile = find_tile(l->args, i);
        size_t offset = (size_t)tile.place * TB__CUDA_HEAP_UNIT;
        if (tile.place != last) {
            const void *from = l->translate(l->args.heap + offset);
            nslots = is_box ? copy_box(*l, offset, (const tb__cuda_box *)from, tile_slots)
                            : copy_matrix(*l, offset, from, tile_slots);
        }
        last = tile.place;
        if ((uint64_t)tile.tile * slots >= nslots)
            die("%s: a tile beyond its box or matrix", l->name);
    }
    l->args.heap = (uint64_t)copies.bytes;
}

bool launch_kernel(const char *name, unsigned grid, const tb__cuda_args *args, void *(*translate)(uint64_t address)) {
    static const struct {
        const char *name;
        gpu_kernel *kernel;
        uint32_t threads, blocks, slots;
    } kernels[] = {
#define KERNEL(name, threads, blocks, slots) {"tb__" #name, tb__##name, threads, blocks, slots},
        TB__CUDA_KERNELS(KERNEL)};
    uint32_t i = 0;
    while (i < TB__CUDA_NKERNELS && strcmp(kernels[i].name, name) != 0)
        i++;
    if (i == TB__CUDA_NKERNELS)
        return false;
    launch l = {name, *args, translate};
    l.args.items = (uint64_t)translate(args->items);
    l.args.list = (uint64_t)translate(args->list);
    l.args.results = (uint64_t)translate(args->results);
    bool has_pieces = i <= TB__CUDA_copy_shifted_pieces;
    bool has_heap = !has_pieces && i < TB__CUDA_checksum;
    if (has_heap && grid != args->nitems * kernels[i].blocks)
        die("%s: not as many blocks as items", name);
    if (has_pieces)
        copy_pieces(&l);
    if (has_heap)
        copy_heap(&l, kernels[i].slots, kernels[i].slots / kernels[i].blocks);
    execute_kernel(kernels[i].kernel, grid, kernels[i].threads, &l.args);
    free(copies.bytes);
    copies = {nullptr, 0};
    return true;
}
