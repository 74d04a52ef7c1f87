/* What the tests of resharding on disk share: files of ranks that are filled tensor by tensor, and runs. */
#ifndef TB_RESHARD_DISK_TEST_H
#define TB_RESHARD_DISK_TEST_H

#include "format/format_test.h"
#include "reshard/disk.h"

#include "../tests/support/random_case.h"

#include <jansson.h>

/* What the ranks of a source hold, before it is written. */
typedef struct stock {
    TB_VEC(struct stocked {
        int32_t rank;
        tb__safetensor about;
        void *bytes;
    })
    tensors;
} stock;

/* Takes `bytes`, which are malloc's. */
static inline void stock_add(stock *s, int32_t rank, const char *name, tb_dtype dtype, const tb_shape *shape,
                             void *bytes) {
    tb__safetensor about = {.name = tb__strdup(name), .dtype = dtype, .shape = *shape};
    assert_ok(tb_shape_size(shape, dtype, NULL, &about.nbytes));
    assert_true(tb__vec_push(&s->tensors, (struct stocked){rank, about, bytes}));
}

static inline void write_rank(const stock *s, const char *dir, int32_t rank) {
    TB_VEC(size_t) mine = {0};
    TB_VEC(tb__safetensor) about = {0};
    for (size_t i = 0; i < s->tensors.count; i++) {
        if (s->tensors.item[i].rank == rank) {
            assert_true(tb__vec_push(&mine, i));
            assert_true(tb__vec_push(&about, s->tensors.item[i].about));
        }
    }
    char *path;
    tb__safetensors_writer *writer;
    assert_ok(tb__rank_file_path(dir, rank, &path));
    assert_ok(tb__safetensors_create(path, about.item, about.count, NULL, 0, &writer));
    for (size_t i = 0; i < mine.count; i++)
        assert_ok(
            tb__safetensors_write(writer, i, 0, s->tensors.item[mine.item[i]].bytes, (size_t)about.item[i].nbytes));
    assert_ok(tb__safetensors_commit(writer));
    tb__safetensors_writer_destroy(writer);
    free(path);
    free(mine.item);
    free(about.item);
}

/* Writes files of ranks 0 to nranks-1, some of which may be empty, and forgets everything. */
static inline void stock_write(stock *s, const char *dir, int32_t nranks) {
    assert_int_equal(mkdir(dir, 0777), 0);
    for (int32_t rank = 0; rank < nranks; rank++)
        write_rank(s, dir, rank);
    for (size_t i = 0; i < s->tensors.count; i++) {
        free((char *)s->tensors.item[i].about.name);
        free(s->tensors.item[i].bytes);
    }
    free(s->tensors.item);
    *s = (stock){0};
}

enum { MOST_RANKS = 256 };

/* What a target holds. */
typedef struct target_files {
    tb__safetensors *ranks[MOST_RANKS]; /* opened when they are asked for */
    const char *dir;
} target_files;

/* The bytes of a tensor, which must have this dtype and shape; to be freed. */
static inline unsigned char *target_files_get(target_files *s, int32_t rank, const char *name, tb_dtype dtype,
                                              const tb_shape *shape) {
    assert_true(rank < MOST_RANKS);
    if (!s->ranks[rank]) {
        char *path;
        assert_ok(tb__rank_file_path(s->dir, rank, &path));
        assert_ok(tb__safetensors_open(path, &s->ranks[rank]));
        free(path);
    }
    const tb__safetensor *t = tb__safetensors_find(&s->ranks[rank]->header, name);
    if (!t)
        fail_msg("%s has no '%s'", s->ranks[rank]->path, name);
    assert_int_equal(t->dtype, dtype);
    assert_shape(&t->shape, shape);
    unsigned char *bytes = malloc((size_t)t->nbytes + 1);
    assert_ok(tb__safetensors_read(s->ranks[rank], t, 0, (size_t)t->nbytes, bytes));
    return bytes;
}

static inline void target_files_fini(target_files *s) {
    for (int i = 0; i < MOST_RANKS; i++)
        tb__safetensors_close(s->ranks[i]);
    *s = (target_files){0};
}

/* Reshards by a spec of text. */
static inline tb_status reshard_text(const char *text, const char *in, const char *out, const tb__disk_opts *opts) {
    tb__spec *spec = NULL;
    tb__disk *disk = NULL;
    tb_status status = tb__spec_parse(text, strlen(text), &spec);
    if (status == TB_OK)
        status = tb__disk_open(spec, in, false, &disk);
    if (status == TB_OK)
        status = tb__disk_run(disk, out, opts);
    tb__disk_close(disk);
    tb__spec_destroy(spec);
    return status;
}

/* The run fails with this status and sentence, and nothing is there afterwards. */
static inline void check_refused(folder *f, const char *spec, const char *in, tb_status wanted, const char *sentence) {
    const char *out = path_in(f, "refused");
    assert_fails(reshard_text(spec, in, out, &(tb__disk_opts){.verify = true}), wanted, sentence);
    assert_int_equal(access(out, F_OK), -1);
}

/* Adds a spec's entry for a tensor; takes the sides. */
static inline void add_entry(json_t *tensors, const char *name, const tb_shape *shape, tb_dtype dtype, json_t *src,
                             json_t *dst) {
    json_t *dims = json_array();
    for (int d = 0; d < shape->ndim; d++)
        json_array_append_new(dims, json_integer(shape->dim[d]));
    json_object_set_new(
        tensors, name,
        json_pack("{s:o,s:s,s:o,s:o}", "shape", dims, "dtype", tb_dtype_name(dtype), "src", src, "dst", dst));
}

/* Reshards by entries, which it takes. */
static inline void reshard_entries(json_t *tensors, const char *in, const char *out, const tb__disk_opts *opts) {
    json_t *root = json_pack("{s:o,s:[]}", "tensors", tensors, "rules");
    char *text = json_dumps(root, 0);
    assert_ok(reshard_text(text, in, out, opts));
    free(text);
    json_decref(root);
}

#endif
