/* Models of one file or several, seen as one set of tensors. */
#include "format/checkpoint.h"

#include <errno.h>
#include <inttypes.h>
#include <jansson.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

static tb_status has_file(const char *dir, const char *name, bool *out) {
    char *path;
    struct stat about;
    TB_TRY(tb__file_join(dir, name, &path));
    *out = stat(path, &about) == 0;
    free(path);
    return TB_OK;
}

static tb_status look_into(const char *dir, tb__checkpoint_kind *out) {
    bool has_model, has_index;
    TB_TRY(has_file(dir, TB__MODEL_FILE, &has_model));
    TB_TRY(has_file(dir, TB__MODEL_INDEX, &has_index));
    if (has_model || has_index) {
        *out = has_model ? TB__CHECKPOINT_MODEL : TB__CHECKPOINT_INDEX;
        return TB_OK;
    }
    tb__rank_files ranks;
    TB_TRY(tb__rank_files_init(dir, &ranks));
    bool has_ranks = ranks.count > 0;
    tb__rank_files_fini(&ranks);
    if (!has_ranks)
        return tb__file_fail(TB_INVALID, dir,
                             "it holds no " TB__MODEL_FILE ", no " TB__MODEL_INDEX
                             " and no rank_0.safetensors or the like");
    *out = TB__CHECKPOINT_RANKS;
    return TB_OK;
}

tb_status tb__checkpoint_look(const char *path, tb__checkpoint_kind *out) {
    struct stat about;
    if (stat(path, &about) != 0) {
        bool is_missing = errno == ENOENT || errno == ENOTDIR || errno == ELOOP || errno == ENAMETOOLONG;
        return tb__file_fail_errno(is_missing ? TB_INVALID : TB_IO, path, "can't be opened");
    }
    if (S_ISDIR(about.st_mode))
        return look_into(path, out);
    const char *slash = strrchr(path, '/');
    if (strcmp(slash ? slash + 1 : path, TB__MODEL_INDEX) == 0)
        return tb__file_fail(TB_INVALID, path, "it is an index; the model is the directory that it is in");
    *out = TB__CHECKPOINT_FILE;
    return TB_OK;
}

/* A line of the index. */
typedef struct entry {
    const char *name, *file;
} entry;

static int compare_entries(const void *left, const void *right) {
    const entry *a = left, *b = right;
    int order = strcmp(a->file, b->file);
    return order ? order : strcmp(a->name, b->name);
}

static int compare_tensors(const void *left, const void *right) {
    const tb__checkpoint_tensor *a = left, *b = right;
    return strcmp(a->tensor->name, b->tensor->name);
}

static bool make_room(tb__checkpoint *c, size_t nfiles, size_t ntensors, tb__checkpoint_tensor **tensors) {
    c->files = tb__arena_alloc(&c->arena, nfiles, sizeof *c->files);
    *tensors = tb__arena_alloc(&c->arena, ntensors, sizeof **tensors);
    c->tensors = *tensors;
    return c->files && *tensors;
}

static tb_status open_single(tb__checkpoint *c, const char *path) {
    tb__safetensors *file;
    tb__checkpoint_tensor *tensors;
    TB_TRY(tb__safetensors_open(path, &file));
    if (!make_room(c, 1, file->header.count, &tensors)) {
        tb__safetensors_close(file);
        return TB_NO_MEMORY;
    }
    c->files[c->nfiles++] = file;
    for (size_t i = 0; i < file->header.count; i++)
        tensors[c->count++] = (tb__checkpoint_tensor){file->header.by_name[i], 0};
    c->nbytes = file->header.data_nbytes;
    return TB_OK;
}

static tb_status read_entries(const json_t *json, entry *entries) {
    const json_t *map = json_object_get(json, "weight_map");
    for (void *it = json_object_iter((json_t *)map); it; it = json_object_iter_next((json_t *)map, it)) {
        entry e = {json_object_iter_key(it), json_string_value(json_object_iter_value(it))};
        if (!e.file)
            return tb__fail(TB_INVALID, "'weight_map' has no file name for tensor '%.100s'", e.name);
        if (!*e.file || strchr(e.file, '/') || strcmp(e.file, ".") == 0 || strcmp(e.file, "..") == 0)
            return tb__fail(TB_INVALID, "tensor '%.100s' is in '%.100s', which is not a file of the directory", e.name,
                            e.file);
        *entries++ = e;
    }
    return TB_OK;
}

/* The tensors entries[0 .. n-1] are all in one file, which is opened. */
static tb_status open_part(tb__checkpoint *c, const char *dir, const entry *entries, size_t n,
                           tb__checkpoint_tensor *tensors) {
    char *path;
    TB_TRY(tb__file_join(dir, entries->file, &path));
    tb_status status = tb__safetensors_open(path, &c->files[c->nfiles]);
    free(path);
    TB_TRY(status);
    const tb__safetensors *file = c->files[c->nfiles++];
    for (size_t i = 0; i < n; i++) {
        const tb__safetensor *t = tb__safetensors_find(&file->header, entries[i].name);
        if (!t)
            return tb__file_fail(TB_INVALID, file->path, "tensor '%.100s' is not in it, but the index says so",
                                 entries[i].name);
        tensors[i] = (tb__checkpoint_tensor){t, c->nfiles - 1};
        if (t->nbytes > (INT64_C(1) << 62) - c->nbytes)
            return tb__fail(TB_TOO_BIG, "the tensors have more than 2^62 bytes together");
        c->nbytes += t->nbytes;
    }
    return TB_OK;
}

static tb_status open_parts(tb__checkpoint *c, const char *dir, const entry *entries, size_t count) {
    size_t nfiles = 0;
    tb__checkpoint_tensor *tensors;
    for (size_t i = 0; i < count; i++)
        nfiles += i == 0 || strcmp(entries[i - 1].file, entries[i].file) != 0;
    if (!make_room(c, nfiles, count, &tensors))
        return TB_NO_MEMORY;
    for (size_t i = 0; i < count;) {
        size_t n = 1;
        while (i + n < count && strcmp(entries[i].file, entries[i + n].file) == 0)
            n++;
        TB_TRY(open_part(c, dir, entries + i, n, tensors + i));
        i += n;
    }
    c->count = count;
    qsort(tensors, count, sizeof *tensors, compare_tensors);
    return TB_OK;
}

static tb_status read_index(const char *path, json_t **out) {
    int fd = -1;
    int64_t nbytes = 0;
    json_error_t error;
    TB_TRY(tb__file_open(path, &fd, &nbytes));
    char *text = NULL;
    tb_status status = TB_OK;
    if (nbytes > TB__SAFETENSORS_MAX_HEADER) {
        status = tb__file_fail(TB_INVALID, path, "an index of %" PRId64 " bytes is more than is read (%d)", nbytes,
                               TB__SAFETENSORS_MAX_HEADER);
    } else if (!(text = tb__malloc((size_t)nbytes, 1))) {
        status = TB_NO_MEMORY;
    } else {
        status = tb__file_read(fd, path, 0, text, (size_t)nbytes);
    }
    close(fd);
    if (status == TB_OK && !(*out = json_loadb(text, (size_t)nbytes, JSON_REJECT_DUPLICATES, &error)))
        status = tb__file_fail(json_error_code(&error) == json_error_out_of_memory ? TB_NO_MEMORY : TB_INVALID, path,
                               "it is not JSON, at byte %d: %s", error.position, error.text);
    free(text);
    return status;
}

static tb_status open_index(tb__checkpoint *c, const char *dir, const char *path, const json_t *json) {
    const json_t *map = json_object_get(json, "weight_map");
    const json_t *total = json_object_get(json_object_get(json, "metadata"), "total_size");
    if (!json_is_object(map))
        return tb__file_fail(TB_INVALID, path, "'weight_map' is missing or not an object");
    if (json_is_integer(total) && json_integer_value(total) >= 0)
        c->index_nbytes = json_integer_value(total);
    else if (json_is_real(total) && json_real_value(total) >= 0 && json_real_value(total) < 0x1p62)
        c->index_nbytes = (int64_t)json_real_value(total); /* some programs write 1e9 */
    size_t count = json_object_size(map);
    entry *entries = tb__malloc(count, sizeof *entries);
    if (!entries)
        return TB_NO_MEMORY;
    tb_status status = read_entries(json, entries);
    if (status != TB_OK)
        tb__file_fail_within(status, path);
    if (status == TB_OK) {
        qsort(entries, count, sizeof *entries, compare_entries);
        status = open_parts(c, dir, entries, count);
    }
    free(entries);
    return status;
}

/* ---- Unindexed tensors --------------------------------------------------------------------------------------- */

typedef TB_VEC(tb__unindexed) unindexed_list;

static const char *base_name(const tb__safetensors *file) {
    const char *slash = strrchr(file->path, '/');
    return slash ? slash + 1 : file->path;
}

static const char *indexed_in(const tb__checkpoint *c, const char *name) {
    const tb__checkpoint_tensor *found = tb__checkpoint_find(c, name);
    return found ? base_name(c->files[found->file]) : NULL;
}

static tb_status list_part(const tb__checkpoint *c, size_t file, unindexed_list *out) {
    const tb__safetensors_header *header = &c->files[file]->header;
    for (size_t i = 0; i < header->count; i++) {
        const char *name = header->by_name[i]->name;
        const tb__checkpoint_tensor *found = tb__checkpoint_find(c, name);
        if (found && found->file == file)
            continue;
        if (!tb__vec_push(out, (tb__unindexed){base_name(c->files[file]), name, indexed_in(c, name)}))
            return TB_NO_MEMORY;
    }
    return TB_OK;
}

/* Lists the tensors of a file that is not part of the model. */
static tb_status list_stray(tb__checkpoint *c, const char *dir, const char *name, unindexed_list *out) {
    char *path;
    struct stat about;
    tb__safetensors *file = NULL;
    tb__unindexed item = {0};
    TB_TRY(tb__file_join(dir, name, &path));
    bool is_dir = stat(path, &about) == 0 && S_ISDIR(about.st_mode);
    tb_status status = is_dir ? TB_OK : tb__safetensors_open(path, &file);
    free(path);
    if (is_dir || status == TB_NO_MEMORY)
        return status;
    item.file = tb__arena_strdup(&c->arena, name);
    bool has_room = item.file && (file || tb__vec_push(out, item));
    for (size_t i = 0; file && i < file->header.count && has_room; i++) {
        item.name = tb__arena_strdup(&c->arena, file->header.by_name[i]->name);
        item.indexed_in = item.name ? indexed_in(c, item.name) : NULL;
        has_room = item.name && tb__vec_push(out, item);
    }
    tb__safetensors_close(file);
    return has_room ? TB_OK : TB_NO_MEMORY;
}

int tb__checkpoint_is_part(const struct dirent *e) {
    static const char tail[] = ".safetensors";
    size_t length = strlen(e->d_name);
    return e->d_name[0] != '.' && length > strlen(tail) && strcmp(e->d_name + length - strlen(tail), tail) == 0;
}

static tb_status list_strays(tb__checkpoint *c, const char *dir, unindexed_list *out) {
    struct dirent **entries;
    int n = scandir(dir, &entries, tb__checkpoint_is_part, alphasort);
    if (n < 0)
        return tb__file_fail_errno(errno == ENOMEM ? TB_NO_MEMORY : TB_IO, dir, "can't be listed");
    tb_status status = TB_OK;
    for (int i = 0; i < n; i++) {
        bool is_named = false;
        for (size_t k = 0; k < c->nfiles && !is_named; k++)
            is_named = strcmp(base_name(c->files[k]), entries[i]->d_name) == 0;
        if (!is_named && status == TB_OK)
            status = list_stray(c, dir, entries[i]->d_name, out);
        free(entries[i]);
    }
    free(entries);
    return status;
}

/* Lists the tensors that an index beside a model in one file has, and the file has not. */
static tb_status list_other_index(tb__checkpoint *c, const char *dir, unindexed_list *out) {
    char *path;
    json_t *json = NULL;
    bool is_there;
    TB_TRY(has_file(dir, TB__MODEL_INDEX, &is_there));
    if (!is_there)
        return TB_OK;
    TB_TRY(tb__file_join(dir, TB__MODEL_INDEX, &path));
    tb_status status = read_index(path, &json);
    free(path);
    if (status == TB_NO_MEMORY)
        return status;
    const json_t *map = json_object_get(json, "weight_map");
    bool has_room = json_is_object(map) || tb__vec_push(out, (tb__unindexed){.file = TB__MODEL_INDEX});
    for (void *it = json_object_iter((json_t *)map); it && has_room; it = json_object_iter_next((json_t *)map, it)) {
        const char *name = json_object_iter_key(it), *file = json_string_value(json_object_iter_value(it));
        if (!file || tb__checkpoint_find(c, name))
            continue;
        tb__unindexed item = {.file = tb__arena_strdup(&c->arena, file), .name = tb__arena_strdup(&c->arena, name)};
        has_room = item.file && item.name && tb__vec_push(out, item);
    }
    json_decref(json);
    return has_room ? TB_OK : TB_NO_MEMORY;
}

/* Tensors that the model does not have come first. */
static int compare_unindexed(const void *left, const void *right) {
    const tb__unindexed *a = left, *b = right;
    if (!a->indexed_in != !b->indexed_in)
        return a->indexed_in ? 1 : -1;
    int order = strcmp(a->file, b->file);
    return order ? order : strcmp(a->name ? a->name : "", b->name ? b->name : "");
}

static tb_status list_unindexed(tb__checkpoint *c, const char *dir) {
    unindexed_list list = {0};
    tb_status status = TB_OK;
    for (size_t i = 0; c->kind == TB__CHECKPOINT_INDEX && i < c->nfiles && status == TB_OK; i++)
        status = list_part(c, i, &list);
    if (status == TB_OK && c->kind == TB__CHECKPOINT_MODEL)
        status = list_other_index(c, dir, &list);
    if (status == TB_OK)
        status = list_strays(c, dir, &list);
    tb__vec_sort_unique(&list, compare_unindexed); /* index and file may both have a tensor in that file */
    tb__unindexed *kept = status == TB_OK ? tb__arena_alloc(&c->arena, list.count, sizeof *kept) : NULL;
    if (kept && list.count > 0)
        memcpy(kept, list.item, list.count * sizeof *kept);
    c->unindexed = kept;
    c->nunindexed = list.count;
    free(list.item);
    return status == TB_OK && !kept ? TB_NO_MEMORY : status;
}

tb_status tb__checkpoint_refuse_unindexed(const tb__checkpoint *c, const char *dir) {
    if (c->nunindexed == 0)
        return TB_OK;
    const tb__unindexed *first = c->unindexed;
    static const char advice[] = "; --ignore-unindexed goes on without";
    char more[96];
    snprintf(more, sizeof more, "%s", advice);
    if (c->nunindexed > 1)
        snprintf(more, sizeof more, ", and so for %zu more%s", c->nunindexed - 1, advice);
    if (c->kind == TB__CHECKPOINT_MODEL && !first->name)
        tb__set_detail("'%.60s' is beside " TB__MODEL_FILE " and can't be read%s", first->file, more);
    else if (c->kind == TB__CHECKPOINT_MODEL)
        tb__set_detail("tensor '%.100s' belongs to '%.60s', which is not read, since " TB__MODEL_FILE
                       " comes before it and %s the tensor%s",
                       first->name, first->file, first->indexed_in ? "has" : "does not have", more);
    else if (!first->name)
        tb__set_detail("'%.60s' is not in " TB__MODEL_INDEX " and can't be read%s", first->file, more);
    else if (first->indexed_in)
        tb__set_detail("tensor '%.100s' is in '%.60s', but " TB__MODEL_INDEX " has it in '%.60s'%s", first->name,
                       first->file, first->indexed_in, more);
    else
        tb__set_detail("tensor '%.100s' is in '%.60s', but not in " TB__MODEL_INDEX "%s", first->name, first->file,
                       more);
    return tb__file_fail_within(TB_INVALID, dir);
}

static tb_status open_kind(tb__checkpoint *c, const char *path) {
    char *inner;
    json_t *json = NULL;
    switch (c->kind) {
    case TB__CHECKPOINT_FILE:
        return open_single(c, path);
    case TB__CHECKPOINT_RANKS:
        return tb__file_fail(TB_INVALID, path, "it holds a file for each rank, not a model");
    case TB__CHECKPOINT_MODEL:
    case TB__CHECKPOINT_INDEX:
        break;
    }
    TB_TRY(tb__file_join(path, c->kind == TB__CHECKPOINT_MODEL ? TB__MODEL_FILE : TB__MODEL_INDEX, &inner));
    tb_status status = c->kind == TB__CHECKPOINT_MODEL ? open_single(c, inner) : read_index(inner, &json);
    if (status == TB_OK && json)
        status = open_index(c, path, inner, json);
    if (status == TB_OK)
        status = list_unindexed(c, path);
    json_decref(json);
    free(inner);
    return status;
}

tb_status tb__checkpoint_open(const char *path, tb__checkpoint **out) {
    tb__checkpoint *c = tb__calloc(1, sizeof *c);
    if (!c)
        return TB_NO_MEMORY;
    c->index_nbytes = -1;
    tb_status status = tb__checkpoint_look(path, &c->kind);
    if (status == TB_OK)
        status = open_kind(c, path);
    if (status != TB_OK)
        tb__checkpoint_close(c);
    else
        *out = c;
    return status;
}

void tb__checkpoint_close(tb__checkpoint *c) {
    if (!c)
        return;
    for (size_t i = 0; i < c->nfiles; i++)
        tb__safetensors_close(c->files[i]);
    tb__arena_fini(&c->arena);
    free(c);
}

const tb__checkpoint_tensor *tb__checkpoint_find(const tb__checkpoint *c, const char *name) {
    const tb__safetensor wanted = {.name = name};
    const tb__checkpoint_tensor key = {.tensor = &wanted};
    return c->count ? bsearch(&key, c->tensors, c->count, sizeof *c->tensors, compare_tensors) : NULL;
}
