/* What the tests of files share: a folder that goes away, files of any bytes, and checks of a failure's sentence. */
#ifndef TB_FORMAT_FORMAT_TEST_H
#define TB_FORMAT_FORMAT_TEST_H

#include "format/safetensors.h"

#include <dirent.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cmocka.h>

typedef struct folder {
    char path[64];
    TB_VEC(char *) files; /* paths that were asked for */
} folder;

static inline int folder_set_up(void **state) {
    folder *f = calloc(1, sizeof *f);
    strcpy(f->path, "/tmp/tb-format-XXXXXX");
    *state = f;
    return mkdtemp(f->path) ? 0 : -1;
}

/* How many entries a folder has. */
static inline int count_entries(const char *path) {
    int n = 0;
    DIR *dir = opendir(path);
    assert_non_null(dir);
    for (struct dirent *e; (e = readdir(dir));)
        n += strcmp(e->d_name, ".") != 0 && strcmp(e->d_name, "..") != 0;
    closedir(dir);
    return n;
}

static inline void remove_tree(const char *path) {
    DIR *dir = opendir(path);
    if (dir) {
        for (struct dirent *e; (e = readdir(dir));) {
            char *inner = NULL;
            assert_int_equal(tb__file_join(path, e->d_name, &inner), TB_OK);
            if (strcmp(e->d_name, ".") != 0 && strcmp(e->d_name, "..") != 0 && unlink(inner) != 0)
                remove_tree(inner);
            free(inner);
        }
        closedir(dir);
    }
    rmdir(path);
}

static inline int folder_tear_down(void **state) {
    folder *f = *state;
    remove_tree(f->path);
    for (size_t i = 0; i < f->files.count; i++)
        free(f->files.item[i]);
    free(f->files.item);
    free(f);
    return 0;
}

static inline const char *keep_path(folder *f, const char *dir, const char *name) {
    char *path = NULL;
    assert_int_equal(tb__file_join(dir, name, &path), TB_OK);
    assert_true(tb__vec_push(&f->files, path));
    return path;
}

static inline const char *path_in(folder *f, const char *name) {
    return keep_path(f, f->path, name);
}

static inline void write_bytes(const char *path, const void *bytes, size_t nbytes) {
    FILE *file = fopen(path, "wb");
    assert_non_null(file);
    assert_int_equal(fwrite(bytes, 1, nbytes, file), nbytes);
    assert_int_equal(fclose(file), 0);
}

static inline char *read_bytes(const char *path, size_t *nbytes) {
    struct stat about;
    FILE *file = fopen(path, "rb");
    assert_non_null(file);
    assert_int_equal(fstat(fileno(file), &about), 0);
    *nbytes = (size_t)about.st_size;
    char *bytes = malloc(*nbytes + 1);
    assert_int_equal(fread(bytes, 1, *nbytes, file), *nbytes);
    bytes[*nbytes] = '\0';
    fclose(file);
    return bytes;
}

/* A file with this header and so many bytes of data. */
static inline void write_file(const char *path, const char *header, size_t data_nbytes) {
    uint64_t length = strlen(header);
    FILE *file = fopen(path, "wb");
    assert_non_null(file);
    for (int i = 0; i < 8; i++)
        fputc((int)(length >> 8 * i & 0xFF), file);
    fputs(header, file);
    for (size_t i = 0; i < data_nbytes; i++)
        fputc(0, file);
    assert_int_equal(fclose(file), 0);
}

static inline void check_sentence(const char *text) {
    if (!strstr(tb_error_detail(), text))
        fail_msg("expected '%s' in: %s", text, tb_error_detail());
}

static inline void check_ok(tb_status status, const char *call) {
    if (status != TB_OK)
        fail_msg("%s: %s: %s", call, tb_status_string(status), tb_error_detail());
}

static inline void check_fails(tb_status status, tb_status wanted, const char *text, const char *call) {
    if (status != wanted)
        fail_msg("%s: %s: %s", call, tb_status_string(status), status == TB_OK ? "" : tb_error_detail());
    check_sentence(text);
}

#define assert_ok(call)                  check_ok(call, #call)
#define assert_fails(call, wanted, text) check_fails(call, wanted, text, #call)

/* The file in tests/golden/safetensors. */
static inline const char *golden(folder *f, const char *name) {
    const char *root = getenv("TB_GOLDEN");
    if (!root)
        skip();
    return keep_path(f, keep_path(f, root, "safetensors"), name);
}

/* Byte i of a tensor in the golden files, and of those that the tests write. */
static inline unsigned char byte_of(const char *name, int64_t i) {
    return (unsigned char)((7 * i + (int64_t)strlen(name)) % 251);
}

static inline unsigned char *bytes_of(const tb__safetensor *t, int64_t nbytes) {
    unsigned char *bytes = malloc((size_t)nbytes + 1);
    for (int64_t i = 0; i < nbytes; i++)
        bytes[i] = byte_of(t->name, i);
    return bytes;
}

static inline void assert_shape(const tb_shape *left, const tb_shape *right) {
    assert_int_equal(left->ndim, right->ndim);
    for (int d = 0; d < left->ndim; d++)
        assert_int_equal(left->dim[d], right->dim[d]);
}

static inline void assert_data(const tb__safetensors *file, const tb__safetensor *t) {
    unsigned char *bytes = malloc((size_t)t->nbytes + 1);
    assert_ok(tb__safetensors_read(file, t, 0, (size_t)t->nbytes, bytes));
    for (int64_t i = 0; i < t->nbytes; i++)
        assert_int_equal(bytes[i], byte_of(t->name, i));
    free(bytes);
}

#endif
