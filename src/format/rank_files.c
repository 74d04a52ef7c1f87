/* Directories with a safetensors file for each rank. */
#include "format/checkpoint.h"

#include <dirent.h>
#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>

static int compare_ranks(const void *left, const void *right) {
    const tb__rank_file *a = left, *b = right;
    return a->rank != b->rank ? (a->rank > b->rank) - (a->rank < b->rank) : strcmp(a->path, b->path);
}

static int compare_names(const void *left, const void *right) {
    const char *const *a = left, *const *b = right;
    return strcmp(*a, *b);
}

tb_status tb__rank_file_path(const char *dir, int32_t rank, char **out) {
    char name[48];
    snprintf(name, sizeof name, "rank_%" PRId32 ".safetensors", rank);
    return tb__file_join(dir, name, out);
}

tb_status tb__vllm_file_path(const char *dir, int32_t rank, char **out) {
    char name[64];
    snprintf(name, sizeof name, "model-rank-%" PRId32 "-part-0.safetensors", rank);
    return tb__file_join(dir, name, out);
}

/* Whether a number that is not negative stands at *at, without sign and leading zeros; *at is behind it then. */
static bool read_plain(const char **at, int64_t *out) {
    char again[24]; /* a name that is written otherwise, 07 or +7, would be a second one for the same rank */
    const char *begin = *at;
    if (!tb__read_int(at, out) || *out < 0 || *out >= TB_MAX_RANKS)
        return false;
    snprintf(again, sizeof again, "%" PRId64, *out);
    return strncmp(begin, again, strlen(again)) == 0 && begin + strlen(again) == *at;
}

/* Whether the name has the form of a rank's file; then *rank is the rank, or TB_NO_RANK if it stands for none. */
static bool is_rank_file(const char *name, int32_t *rank) {
    static const char *const heads[] = {"rank_", "model-rank-"};
    static const char tail[] = ".safetensors", part[] = "-part-";
    size_t length = strlen(name);
    for (size_t i = 0; i < sizeof heads / sizeof *heads; i++) {
        const char *at = name + strlen(heads[i]);
        int64_t value, number;
        if (length < strlen(heads[i]) + strlen(tail) || strncmp(name, heads[i], strlen(heads[i])) != 0 ||
            strcmp(name + length - strlen(tail), tail) != 0)
            continue;
        bool is_rank = read_plain(&at, &value);
        if (is_rank && i == 1) {
            is_rank = strncmp(at, part, strlen(part)) == 0;
            at += is_rank ? strlen(part) : 0;
            is_rank = is_rank && read_plain(&at, &number);
        }
        *rank = is_rank && strcmp(at, tail) == 0 ? (int32_t)value : TB_NO_RANK;
        return true;
    }
    return false;
}

typedef struct found_files {
    tb__arena *arena; /* for names */
    TB_VEC(tb__rank_file) ranks;
    TB_VEC(const char *) others;
} found_files;

static tb_status add_file(found_files *found, const char *dir, const char *name, int32_t rank) {
    char *path;
    TB_TRY(tb__file_join(dir, name, &path));
    const char *kept = tb__arena_strdup(found->arena, path);
    free(path);
    return kept && tb__vec_push(&found->ranks, ((tb__rank_file){rank, kept})) ? TB_OK : TB_NO_MEMORY;
}

static tb_status add_other(found_files *found, const char *dir, const char *name) {
    char *path;
    struct stat about;
    TB_TRY(tb__file_join(dir, name, &path));
    bool is_dir = stat(path, &about) == 0 && S_ISDIR(about.st_mode);
    free(path);
    if (is_dir)
        return TB_OK;
    const char *kept = tb__arena_strdup(found->arena, name);
    return kept && tb__vec_push(&found->others, kept) ? TB_OK : TB_NO_MEMORY;
}

static tb_status list_files(found_files *found, const char *dir, DIR *stream) {
    for (;;) {
        int32_t rank;
        errno = 0;
        const struct dirent *e = readdir(stream);
        if (!e && errno != 0)
            return tb__file_fail_errno(TB_IO, dir, "can't be listed");
        if (!e)
            return TB_OK;
        if (!is_rank_file(e->d_name, &rank)) {
            if (tb__checkpoint_is_part(e))
                TB_TRY(add_other(found, dir, e->d_name));
            continue;
        }
        if (rank == TB_NO_RANK)
            return tb__file_fail(TB_INVALID, dir, "'%.100s' has the form of a rank's file, but stands for no rank",
                                 e->d_name);
        TB_TRY(add_file(found, dir, e->d_name, rank));
    }
}

/* Copies them into the arena, sorted. */
static tb_status sort_found(const found_files *found, tb__rank_files *out) {
    size_t count = found->ranks.count, nothers = found->others.count;
    tb__rank_file *files = tb__arena_alloc(&out->arena, count, sizeof *files);
    out->others = tb__arena_alloc(&out->arena, nothers, sizeof *out->others);
    if (!files || !out->others)
        return TB_NO_MEMORY;
    if (count > 0) {
        memcpy(files, found->ranks.item, count * sizeof *files);
        qsort(files, count, sizeof *files, compare_ranks);
    }
    if (nothers > 0) {
        memcpy(out->others, found->others.item, nothers * sizeof *out->others);
        qsort(out->others, nothers, sizeof *out->others, compare_names);
    }
    out->count = count;
    out->files = files;
    out->nothers = nothers;
    return TB_OK;
}

tb_status tb__rank_files_init(const char *dir, tb__rank_files *out) {
    tb__rank_files made = {0};
    found_files found = {.arena = &made.arena};
    DIR *stream = opendir(dir);
    if (!stream) {
        bool is_missing = errno == ENOENT || errno == ENOTDIR;
        return tb__file_fail_errno(is_missing ? TB_INVALID : TB_IO, dir, "can't be opened");
    }
    tb_status status = list_files(&found, dir, stream);
    closedir(stream);
    if (status == TB_OK)
        status = sort_found(&found, &made);
    free(found.ranks.item);
    free(found.others.item);
    if (status != TB_OK) {
        tb__rank_files_fini(&made);
        return status;
    }
    *out = made;
    return TB_OK;
}

void tb__rank_files_fini(tb__rank_files *files) {
    tb__arena_fini(&files->arena);
    *files = (tb__rank_files){0};
}
