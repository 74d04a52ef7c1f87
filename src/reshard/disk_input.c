/* The source of a resharding: files of ranks, or a model that counts as one rank. */
#include "reshard/disk_inside.h"

#include "base/text.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

/* A tensor in a rank's file, by its name in the whole model. */
typedef struct held {
    const char *name;
    tb__disk_source source;
} held;

typedef struct rank_held {
    int32_t rank;
    size_t count;
    held *tensors;                /* by name */
    const tb__safetensors *first; /* of its files */
} rank_held;

struct tb__disk_input {
    tb__checkpoint *model; /* NULL: files of ranks */
    size_t nranks;
    rank_held *ranks; /* ascending */
    size_t nfiles;
    tb__safetensors **files; /* those of found */
    tb__rank_files found;    /* what the directory has */
    tb__arena arena;
};

static int compare_ranks(const void *left, const void *right) {
    const rank_held *a = left, *b = right;
    return (a->rank > b->rank) - (a->rank < b->rank);
}

/* A file of a rank that is in no mesh is an error: the spec may be that of another checkpoint. */
static tb_status check_unwanted_files(const tb__rank_files *found, const int32_t *ranks, size_t nranks) {
    for (size_t i = 0, k = 0; i < found->count; i++) {
        while (k < nranks && ranks[k] < found->files[i].rank)
            k++;
        if (k == nranks || ranks[k] != found->files[i].rank)
            return tb__file_fail(TB_INVALID, found->files[i].path, "rank %" PRId32 " is in no source mesh of the spec",
                                 found->files[i].rank);
    }
    return TB_OK;
}

static tb_status refuse_others(const tb__rank_files *found, const char *dir) {
    char more[48] = "";
    if (found->nothers == 0)
        return TB_OK;
    if (found->nothers > 1)
        snprintf(more, sizeof more, ", and so for %zu more", found->nothers - 1);
    return tb__file_fail(TB_INVALID, dir,
                         "'%.100s' is the file of no rank and is not read%s; --ignore-unindexed goes on without",
                         found->others[0], more);
}

static int compare_held(const void *left, const void *right) {
    const held *a = left, *b = right;
    return strcmp(a->name, b->name);
}

/* All tensors of a rank, whichever of its files they are in: those from files[first] on. */
static tb_status list_held(tb__disk_input *input, const tb__spec_mesh *mesh, size_t first, size_t end, rank_held *out) {
    size_t total = 0, n = 0;
    for (size_t i = first; i < end; i++)
        total += input->files[i]->header.count;
    out->tensors = tb__arena_alloc(&input->arena, total, sizeof *out->tensors);
    if (!out->tensors)
        return TB_NO_MEMORY;
    for (size_t i = first; i < end; i++) {
        const tb__safetensors *file = input->files[i];
        for (size_t k = 0; k < file->header.count; k++) {
            held *one = &out->tensors[n++];
            one->source = (tb__disk_source){file, file->header.by_name[k]};
            tb_status status =
                tb__spec_whole_name(mesh, out->rank, one->source.tensor->name, &input->arena, &one->name);
            if (status != TB_OK)
                return tb__file_fail_within(status, file->path);
        }
    }
    if (n > 0)
        qsort(out->tensors, n, sizeof *out->tensors, compare_held);
    for (size_t i = 1; i < n; i++) {
        if (strcmp(out->tensors[i - 1].name, out->tensors[i].name) == 0)
            return tb__file_fail(TB_INVALID, out->tensors[i].source.file->path,
                                 "rank %" PRId32 " has tensor '%.100s' twice", out->rank, out->tensors[i].name);
    }
    out->count = n;
    out->first = input->files[first];
    return TB_OK;
}

/* Opens the files of a rank, which are next to one another. */
static tb_status open_rank(tb__disk_input *input, const char *dir, const tb__spec_mesh *mesh, rank_held *out) {
    const tb__rank_files *found = &input->found;
    size_t first = input->nfiles, at = 0;
    while (at < found->count && found->files[at].rank != out->rank)
        at++;
    if (at == found->count) { /* says that it is not there */
        char *path;
        TB_TRY(tb__rank_file_path(dir, out->rank, &path));
        tb__safetensors *file;
        tb_status status = tb__safetensors_open(path, &file);
        free(path);
        if (status == TB_OK)
            tb__safetensors_close(file);
        return status == TB_OK ? tb__file_fail(TB_INVALID, dir, "files came while it was listed") : status;
    }
    for (; at < found->count && found->files[at].rank == out->rank; at++) {
        TB_TRY(tb__safetensors_open(found->files[at].path, &input->files[input->nfiles]));
        input->nfiles++;
    }
    return list_held(input, mesh, first, input->nfiles, out);
}

static tb_status open_ranks(tb__disk_input *input, const char *dir, const tb__spec_mesh *mesh, const int32_t *ranks,
                            size_t nranks, bool ignore_unindexed) {
    TB_TRY(tb__rank_files_init(dir, &input->found));
    input->ranks = tb__calloc(nranks, sizeof *input->ranks);
    input->files = tb__calloc(input->found.count, sizeof(tb__safetensors *));
    if (!input->ranks || !input->files)
        return TB_NO_MEMORY;
    for (size_t i = 0; i < nranks; i++) {
        input->ranks[i].rank = ranks[i];
        TB_TRY(open_rank(input, dir, mesh, &input->ranks[i]));
        input->nranks++;
    }
    TB_TRY(check_unwanted_files(&input->found, ranks, nranks));
    return ignore_unindexed ? TB_OK : refuse_others(&input->found, dir);
}

static tb_status open_kind(tb__disk_input *input, const char *dir, const tb__spec_mesh *mesh, const int32_t *ranks,
                           size_t nranks, bool ignore_unindexed) {
    tb__checkpoint_kind kind;
    TB_TRY(tb__checkpoint_look(dir, &kind));
    if (kind == TB__CHECKPOINT_RANKS)
        return open_ranks(input, dir, mesh, ranks, nranks, ignore_unindexed);
    TB_TRY(tb__checkpoint_open(dir, &input->model));
    return ignore_unindexed ? TB_OK : tb__checkpoint_refuse_unindexed(input->model, dir);
}

tb_status tb__disk_input_open(const char *dir, const tb__spec_mesh *mesh, const int32_t *ranks, size_t nranks,
                              bool ignore_unindexed, tb__disk_input **out) {
    tb__disk_input *input = tb__calloc(1, sizeof *input);
    if (!input)
        return TB_NO_MEMORY;
    tb_status status = open_kind(input, dir, mesh, ranks, nranks, ignore_unindexed);
    if (status != TB_OK)
        tb__disk_input_close(input);
    else
        *out = input;
    return status;
}

void tb__disk_input_close(tb__disk_input *input) {
    if (!input)
        return;
    tb__checkpoint_close(input->model);
    for (size_t i = 0; i < input->nfiles; i++)
        tb__safetensors_close(input->files[i]);
    tb__rank_files_fini(&input->found);
    tb__arena_fini(&input->arena);
    free(input->files);
    free(input->ranks);
    free(input);
}

const tb__checkpoint *tb__disk_input_model(const tb__disk_input *input) {
    return input->model;
}

const tb__rank_files *tb__disk_input_ranks(const tb__disk_input *input) {
    return &input->found;
}

static const held *find_held(const rank_held *rank, const char *name) {
    const held key = {.name = name};
    return rank->count ? bsearch(&key, rank->tensors, rank->count, sizeof key, compare_held) : NULL;
}

tb__disk_source tb__disk_input_find(const tb__disk_input *input, int32_t rank, const char *name) {
    if (input->model) {
        const tb__checkpoint_tensor *t = tb__checkpoint_find(input->model, name);
        const tb__safetensors *first = input->model->nfiles ? input->model->files[0] : NULL;
        return (tb__disk_source){t ? input->model->files[t->file] : first, t ? t->tensor : NULL};
    }
    const rank_held key = {.rank = rank};
    const rank_held *found = bsearch(&key, input->ranks, input->nranks, sizeof key, compare_ranks);
    if (!found)
        return (tb__disk_source){0};
    const held *one = find_held(found, name);
    return one ? one->source : (tb__disk_source){found->first, NULL};
}

tb_status tb__disk_input_names(const tb__disk_input *input, const char ***names, size_t *count) {
    size_t total = input->model ? input->model->count : 0, n = 0;
    for (size_t i = 0; i < input->nranks; i++)
        total += input->ranks[i].count;
    const char **list = tb__malloc(total, sizeof *list);
    if (!list)
        return TB_NO_MEMORY;
    for (size_t i = 0; input->model && i < input->model->count; i++)
        list[n++] = input->model->tensors[i].tensor->name;
    for (size_t i = 0; i < input->nranks; i++) {
        for (size_t k = 0; k < input->ranks[i].count; k++)
            list[n++] = input->ranks[i].tensors[k].name;
    }
    *names = list;
    *count = tb__sort_unique(list, n, sizeof *list, tb__compare_strings);
    return TB_OK;
}

const char *tb__disk_input_stranger(const tb__disk_input *input, const tb_layout *layout, const char *name) {
    for (size_t i = 0; i < input->nranks; i++) {
        const rank_held *rank = &input->ranks[i];
        const held *one = tb_layout_index_of(layout, rank->rank) < 0 ? find_held(rank, name) : NULL;
        if (one)
            return one->source.file->path;
    }
    return NULL;
}

const tb__safetensors *tb__disk_input_first(const tb__disk_input *input) {
    if (input->model)
        return input->model->nfiles ? input->model->files[0] : NULL;
    return input->nranks ? input->ranks[0].first : NULL;
}
