/* Writes a model into one file or several. All files get their names at the end. */
#include "format/checkpoint.h"

#include "base/text.h"
#include "format/folder.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

/* Where a tensor is written: its file, and its position among the tensors of that file. */
typedef struct slot {
    size_t file, place;
    int64_t nbytes;
} slot;

typedef struct part {
    char name[64];
    char *path; /* kept, so that the file can be removed without allocating memory */
    tb__safetensors_writer *writer;
    bool is_committed;
} part;

struct tb__checkpoint_writer {
    tb__folder folder;
    size_t count, nparts;
    const char **names; /* of the tensors */
    slot *slots;
    part *parts;
    bool is_committed;
    tb__arena arena;
};

/* Assigns each tensor to a file, by the rule of huggingface_hub: the first tensor that does not fit closes a file; a
 * tensor larger than the limit has its own file, before the one that is being filled. Files are numbered when they are
 * closed. */
static tb_status deal_out(tb__checkpoint_writer *w, int64_t max_nbytes) {
    size_t *number = tb__malloc(w->count, sizeof *number); /* of a file, in the order of creation */
    if (!number)
        return TB_NO_MEMORY;
    size_t nbegun = 0, nclosed = 0, current = SIZE_MAX;
    int64_t filled = 0;
    for (size_t i = 0; i < w->count; i++) {
        int64_t nbytes = w->slots[i].nbytes;
        if (nbytes > max_nbytes) {
            w->slots[i].file = nbegun;
            number[nbegun++] = nclosed++;
            continue;
        }
        if (current != SIZE_MAX && nbytes > max_nbytes - filled) {
            number[current] = nclosed++;
            current = SIZE_MAX;
        }
        if (current == SIZE_MAX) {
            current = nbegun++;
            filled = 0;
        }
        w->slots[i].file = current;
        filled += nbytes;
    }
    if (current != SIZE_MAX)
        number[current] = nclosed++;
    for (size_t i = 0; i < w->count; i++)
        w->slots[i].file = number[w->slots[i].file];
    free(number);
    w->nparts = nclosed ? nclosed : 1;
    return TB_OK;
}

static tb_status take_tensors(tb__checkpoint_writer *w, const tb__safetensor *tensors, size_t count) {
    w->count = count;
    w->names = tb__arena_alloc(&w->arena, count, sizeof *w->names);
    w->slots = tb__arena_alloc(&w->arena, count, sizeof *w->slots);
    if (!w->names || !w->slots)
        return TB_NO_MEMORY;
    int64_t total = 0;
    for (size_t i = 0; i < count; i++) {
        const char *name = w->names[i] = tb__arena_strdup(&w->arena, tensors[i].name);
        if (!name)
            return TB_NO_MEMORY;
        w->slots[i] = (slot){0};
        tb_status status = tb__safetensor_size(&tensors[i], &w->slots[i].nbytes);
        if (status != TB_OK)
            return tb__fail_within(status, "tensor '%.100s'", name);
        if (w->slots[i].nbytes > (INT64_C(1) << 62) - total)
            return tb__fail(TB_TOO_BIG, "the tensors have more than 2^62 bytes together");
        total += w->slots[i].nbytes;
    }
    return TB_OK;
}

/* Each file's writer checks only the names in its own file. */
static tb_status check_names(const tb__checkpoint_writer *w) {
    const char **sorted = tb__memdup(w->names, w->count, sizeof *sorted);
    if (!sorted)
        return TB_NO_MEMORY;
    tb_status status = TB_OK;
    qsort(sorted, w->count, sizeof *sorted, tb__compare_strings);
    for (size_t i = 1; i < w->count && status == TB_OK; i++) {
        if (strcmp(sorted[i - 1], sorted[i]) == 0)
            status = tb__fail(TB_INVALID, "there are two tensors '%.100s'", sorted[i]);
    }
    free(sorted);
    return status;
}

static tb_status create_part(tb__checkpoint_writer *w, size_t k, const tb__safetensor *tensors,
                             const tb__safetensors_metadata *metadata, size_t nmetadata) {
    part *p = &w->parts[k];
    size_t n = 0;
    tb__safetensor *mine = tb__malloc(w->count, sizeof *mine);
    if (!mine)
        return TB_NO_MEMORY;
    for (size_t i = 0; i < w->count; i++) {
        if (w->slots[i].file == k) {
            w->slots[i].place = n;
            mine[n++] = tensors[i];
        }
    }
    tb_status status = tb__file_join(w->folder.path, p->name, &p->path);
    if (status == TB_OK)
        status = tb__safetensors_create(p->path, mine, n, metadata, nmetadata, &p->writer);
    free(mine);
    return status;
}

/* Removes files that a killed run left under names of the model, because they are written anew. */
static tb_status clear_folder(const tb__checkpoint_writer *w, tb__leftovers *removed) {
    const char **names = tb__malloc(w->nparts, sizeof *names);
    if (!names)
        return TB_NO_MEMORY;
    for (size_t k = 0; k < w->nparts; k++)
        names[k] = w->parts[k].name;
    tb_status status = tb__folder_clear(&w->folder, names, w->nparts > 1 ? w->nparts : 0, removed);
    free(names);
    return status;
}

static tb_status create_parts(tb__checkpoint_writer *w, const tb__safetensor *tensors,
                              const tb__safetensors_metadata *metadata, size_t nmetadata, tb__leftovers *removed) {
    w->parts = tb__arena_alloc(&w->arena, w->nparts, sizeof *w->parts);
    if (!w->parts)
        return TB_NO_MEMORY;
    for (size_t k = 0; k < w->nparts; k++) {
        w->parts[k] = (part){.name = TB__MODEL_FILE};
        if (w->nparts > 1)
            snprintf(w->parts[k].name, sizeof w->parts[k].name, "model-%05zu-of-%05zu.safetensors", k + 1, w->nparts);
    }
    TB_TRY(clear_folder(w, removed));
    for (size_t k = 0; k < w->nparts; k++)
        TB_TRY(create_part(w, k, tensors, metadata, nmetadata));
    return TB_OK;
}

tb_status tb__checkpoint_create(const char *dir, const tb__safetensor *tensors, size_t count,
                                const tb__safetensors_metadata *metadata, size_t nmetadata, int64_t max_file_nbytes,
                                tb__leftovers *removed, tb__checkpoint_writer **out) {
    tb__checkpoint_writer *w = tb__calloc(1, sizeof *w);
    if (!w)
        return TB_NO_MEMORY;
    tb_status status = take_tensors(w, tensors, count);
    if (status == TB_OK)
        status = check_names(w);
    if (status == TB_OK)
        status = deal_out(w, max_file_nbytes > 0 ? max_file_nbytes : INT64_MAX);
    if (status == TB_OK)
        status = tb__folder_take(&w->folder, dir);
    if (status == TB_OK)
        status = create_parts(w, tensors, metadata, nmetadata, removed);
    if (status != TB_OK)
        tb__checkpoint_writer_destroy(w);
    else
        *out = w;
    return status;
}

tb_status tb__checkpoint_write(tb__checkpoint_writer *w, size_t i, int64_t offset, const void *bytes, size_t nbytes) {
    return tb__safetensors_write(w->parts[w->slots[i].file].writer, w->slots[i].place, offset, bytes, nbytes);
}

tb_status tb__checkpoint_read_back(const tb__checkpoint_writer *w, size_t i, int64_t offset, size_t nbytes,
                                   void *buffer) {
    const slot *s = &w->slots[i];
    return tb__safetensors_read_back(w->parts[s->file].writer, s->place, offset, nbytes, buffer);
}

/* A line of the index. */
typedef struct entry {
    const char *name, *file;
} entry;

static int compare_entries(const void *left, const void *right) {
    return strcmp(((const entry *)left)->name, ((const entry *)right)->name);
}

/* With the white space and the order of transformers. */
static tb_status index_text(const tb__checkpoint_writer *w, tb__text *out) {
    int64_t total = 0;
    entry *entries = tb__malloc(w->count, sizeof *entries);
    if (!entries)
        return TB_NO_MEMORY;
    for (size_t i = 0; i < w->count; i++) {
        total += w->slots[i].nbytes;
        entries[i] = (entry){w->names[i], w->parts[w->slots[i].file].name};
    }
    qsort(entries, w->count, sizeof *entries, compare_entries);
    tb__text_add(out, "{\n  \"metadata\": {\n    \"total_size\": %" PRId64 "\n  },\n  \"weight_map\": {", total);
    for (size_t i = 0; i < w->count; i++) {
        tb__text_add(out, "%s\n    ", i ? "," : "");
        tb__safetensors_add_string(out, entries[i].name);
        tb__text_add(out, ": \"%s\"", entries[i].file);
    }
    tb__text_add(out, "\n  }\n}\n");
    free(entries);
    return out->failed ? tb__fail(TB_NO_MEMORY, "out of memory while writing an index") : TB_OK;
}

static tb_status write_index(const tb__checkpoint_writer *w, bool sync, tb__draft *draft) {
    char *path;
    tb__text text = {0};
    tb_status status = index_text(w, &text);
    if (status == TB_OK)
        status = tb__file_join(w->folder.path, TB__MODEL_INDEX, &path);
    if (status == TB_OK) {
        status = tb__draft_init(draft, path, (int64_t)text.count);
        if (status == TB_OK)
            status = tb__file_write(draft->fd, path, 0, text.data, text.count);
        if (status == TB_OK)
            status = tb__draft_flush(draft, sync);
        free(path);
    }
    tb__text_fini(&text);
    return status;
}

static tb_status commit_parts(tb__checkpoint_writer *w) {
    for (size_t k = 0; k < w->nparts; k++) {
        TB_TRY(tb__safetensors_commit(w->parts[k].writer));
        w->parts[k].is_committed = true;
    }
    return TB_OK;
}

tb_status tb__checkpoint_commit(tb__checkpoint_writer *w, bool sync) {
    tb__draft index = {.fd = -1};
    for (size_t k = 0; k < w->nparts; k++)
        TB_TRY(tb__safetensors_finish(w->parts[k].writer, sync));
    tb_status status = w->nparts > 1 ? write_index(w, sync, &index) : TB_OK;
    if (status == TB_OK)
        status = commit_parts(w);
    if (status == TB_OK && w->nparts > 1)
        status = tb__draft_commit(&index);
    tb__draft_fini(&index);
    TB_TRY(status);
    w->is_committed = true;
    return tb__folder_keep(&w->folder, sync);
}

void tb__checkpoint_writer_destroy(tb__checkpoint_writer *w) {
    if (!w)
        return;
    for (size_t k = 0; w->parts && k < w->nparts; k++) {
        if (w->parts[k].is_committed && !w->is_committed)
            unlink(w->parts[k].path);
        tb__safetensors_writer_destroy(w->parts[k].writer);
        free(w->parts[k].path);
    }
    tb__folder_fini(&w->folder);
    tb__arena_fini(&w->arena);
    free(w);
}
