/* The source of a resharding: files of ranks, or a model that counts as one rank. */
#include "reshard/disk_inside.h"

#include "base/text.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

typedef struct rank_file {
    int32_t rank;
    tb__safetensors *file;
} rank_file;

struct tb__disk_input {
    tb__checkpoint *model; /* NULL: files of ranks */
    size_t nranks;
    rank_file *ranks;     /* ascending */
    tb__rank_files found; /* what the directory has */
};

static int compare_ranks(const void *left, const void *right) {
    const rank_file *a = left, *b = right;
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

static tb_status open_ranks(tb__disk_input *input, const char *dir, const int32_t *ranks, size_t nranks,
                            bool ignore_unindexed) {
    input->ranks = tb__calloc(nranks, sizeof *input->ranks);
    if (!input->ranks)
        return TB_NO_MEMORY;
    for (size_t i = 0; i < nranks; i++) {
        char *path;
        TB_TRY(tb__rank_file_path(dir, ranks[i], &path));
        tb_status status = tb__safetensors_open(path, &input->ranks[i].file);
        free(path);
        TB_TRY(status);
        input->ranks[i].rank = ranks[i];
        input->nranks++;
    }
    TB_TRY(tb__rank_files_init(dir, &input->found));
    TB_TRY(check_unwanted_files(&input->found, ranks, nranks));
    return ignore_unindexed ? TB_OK : refuse_others(&input->found, dir);
}

static tb_status open_kind(tb__disk_input *input, const char *dir, const int32_t *ranks, size_t nranks,
                           bool ignore_unindexed) {
    tb__checkpoint_kind kind;
    TB_TRY(tb__checkpoint_look(dir, &kind));
    if (kind == TB__CHECKPOINT_RANKS)
        return open_ranks(input, dir, ranks, nranks, ignore_unindexed);
    TB_TRY(tb__checkpoint_open(dir, &input->model));
    return ignore_unindexed ? TB_OK : tb__checkpoint_refuse_unindexed(input->model, dir);
}

tb_status tb__disk_input_open(const char *dir, const int32_t *ranks, size_t nranks, bool ignore_unindexed,
                              tb__disk_input **out) {
    tb__disk_input *input = tb__calloc(1, sizeof *input);
    if (!input)
        return TB_NO_MEMORY;
    tb_status status = open_kind(input, dir, ranks, nranks, ignore_unindexed);
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
    for (size_t i = 0; i < input->nranks; i++)
        tb__safetensors_close(input->ranks[i].file);
    tb__rank_files_fini(&input->found);
    free(input->ranks);
    free(input);
}

const tb__checkpoint *tb__disk_input_model(const tb__disk_input *input) {
    return input->model;
}

const tb__rank_files *tb__disk_input_ranks(const tb__disk_input *input) {
    return &input->found;
}

tb__disk_source tb__disk_input_find(const tb__disk_input *input, int32_t rank, const char *name) {
    if (input->model) {
        const tb__checkpoint_tensor *t = tb__checkpoint_find(input->model, name);
        const tb__safetensors *first = input->model->nfiles ? input->model->files[0] : NULL;
        return (tb__disk_source){t ? input->model->files[t->file] : first, t ? t->tensor : NULL};
    }
    const rank_file key = {.rank = rank};
    const rank_file *found = bsearch(&key, input->ranks, input->nranks, sizeof key, compare_ranks);
    if (!found)
        return (tb__disk_source){0};
    return (tb__disk_source){found->file, tb__safetensors_find(&found->file->header, name)};
}

tb_status tb__disk_input_names(const tb__disk_input *input, const char ***names, size_t *count) {
    size_t total = input->model ? input->model->count : 0, n = 0;
    for (size_t i = 0; i < input->nranks; i++)
        total += input->ranks[i].file->header.count;
    const char **list = tb__malloc(total, sizeof *list);
    if (!list)
        return TB_NO_MEMORY;
    for (size_t i = 0; input->model && i < input->model->count; i++)
        list[n++] = input->model->tensors[i].tensor->name;
    for (size_t i = 0; i < input->nranks; i++) {
        const tb__safetensors_header *header = &input->ranks[i].file->header;
        for (size_t k = 0; k < header->count; k++)
            list[n++] = header->by_name[k]->name;
    }
    *names = list;
    *count = tb__sort_unique(list, n, sizeof *list, tb__compare_strings);
    return TB_OK;
}

const char *tb__disk_input_stranger(const tb__disk_input *input, const tb_layout *layout, const char *name) {
    for (size_t i = 0; i < input->nranks; i++) {
        const tb__safetensors *file = input->ranks[i].file;
        if (tb_layout_index_of(layout, input->ranks[i].rank) < 0 && tb__safetensors_find(&file->header, name))
            return file->path;
    }
    return NULL;
}

const tb__safetensors *tb__disk_input_first(const tb__disk_input *input) {
    if (input->model)
        return input->model->nfiles ? input->model->files[0] : NULL;
    return input->nranks ? input->ranks[0].file : NULL;
}
