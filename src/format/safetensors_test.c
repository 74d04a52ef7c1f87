/* Safetensors files: those of the official library, those of ours, and all that is refused. */
#include "format/format_test.h"

#include "../tests/support/random_case.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <sys/resource.h>

/* Writes tensors, whose data is that of byte_of, whole. */
static tb_status write_all(const char *path, const tb__safetensor *tensors, size_t count,
                           const tb__safetensors_metadata *metadata, size_t nmetadata) {
    tb__safetensors_writer *writer = NULL;
    TB_TRY(tb__safetensors_create(path, tensors, count, metadata, nmetadata, &writer));
    tb_status status = TB_OK;
    for (size_t i = count; i-- > 0 && status == TB_OK;) {
        int64_t nbytes = 0;
        status = tb_shape_size(&tensors[i].shape, tensors[i].dtype, NULL, &nbytes);
        unsigned char *bytes = bytes_of(&tensors[i], nbytes);
        if (status == TB_OK)
            status = tb__safetensors_write(writer, i, 0, bytes, (size_t)nbytes);
        free(bytes);
    }
    if (status == TB_OK)
        status = tb__safetensors_commit(writer);
    tb__safetensors_writer_destroy(writer);
    return status;
}

static void assert_same_bytes(const char *left, const char *right) {
    size_t n, m;
    char *a = read_bytes(left, &n), *b = read_bytes(right, &m);
    assert_int_equal(n, m);
    assert_memory_equal(a, b, n);
    free(a);
    free(b);
}

static void official_files(void **state) {
    folder *f = *state;
    static const struct {
        const char *name;
        size_t count, nmetadata;
    } files[] = {{"every_dtype.safetensors", 19, 1}, {"names.safetensors", 6, 1}, {"empty.safetensors", 0, 0}};
    for (size_t k = 0; k < sizeof files / sizeof *files; k++) {
        const char *path = golden(f, files[k].name), *copy = path_in(f, "copy");
        tb__safetensors *file;
        assert_ok(tb__safetensors_open(path, &file));
        const tb__safetensors_header *h = &file->header;
        assert_int_equal(h->count, files[k].count);
        assert_int_equal(h->nmetadata, files[k].nmetadata);
        for (size_t i = 0; i < h->count; i++) {
            const tb__safetensor *t = &h->tensors[i];
            assert_ptr_equal(tb__safetensors_find(h, t->name), t);
            assert_data(file, t);
        }
        assert_null(tb__safetensors_find(h, "no such tensor"));
        assert_ok(write_all(copy, h->tensors, h->count, h->metadata, h->nmetadata));
        tb__safetensors_close(file);
        assert_same_bytes(path, copy);
    }
}

static void official_header(void **state) {
    folder *f = *state;
    tb__safetensors *file;
    assert_ok(tb__safetensors_open(golden(f, "every_dtype.safetensors"), &file));
    const tb__safetensors_header *h = &file->header;
    assert_string_equal(h->metadata[0].key, "format");
    assert_string_equal(h->metadata[0].value, "pt");
    assert_string_equal(h->by_name[0]->name, "a.bf16");
    assert_string_equal(h->tensors[0].name, "a.u64");
    const tb__safetensor *t = tb__safetensors_find(h, "a.f4");
    assert_int_equal(t->dtype, TB_F4E2M1);
    assert_int_equal(t->shape.ndim, 2);
    assert_int_equal(t->shape.dim[1], 4); /* elements, of which two share a byte */
    assert_int_equal(t->nbytes, 4);
    assert_int_equal(tb__safetensors_find(h, "a.f32")->shape.ndim, 0);
    assert_int_equal(tb__safetensors_find(h, "b.f32")->nbytes, 0);
    assert_int_equal(tb__safetensors_find(h, "a.f8e4m3")->dtype, TB_F8E4M3);
    char byte;
    assert_fails(tb__safetensors_read(file, t, 4, 1, &byte), TB_INVALID, "not in tensor 'a.f4', which has 4");
    assert_fails(tb__safetensors_read(file, t, -1, 1, &byte), TB_INVALID, "from byte -1");
    assert_fails(tb__safetensors_read(file, t, 1, SIZE_MAX, &byte), TB_INVALID, "not in tensor");
    assert_ok(tb__safetensors_read(file, t, 4, 0, &byte));
    tb__safetensors_close(file);
    tb__safetensors_close(NULL);
}

#define INFO(dtype, shape, offsets) "{\"dtype\":" dtype ",\"shape\":" shape ",\"data_offsets\":" offsets "}"
#define ONE(dtype, shape, offsets)  "{\"a\":" INFO(dtype, shape, offsets) "}"

static void bad_headers(void **state) {
    folder *f = *state;
    static const struct {
        const char *header;
        size_t data_nbytes;
        tb_status status;
        const char *sentence;
    } cases[] = {
        {"", 0, TB_INVALID, "does not begin with {"},
        {"[]", 0, TB_INVALID, "does not begin with {"},
        {" {}", 0, TB_INVALID, "does not begin with {"},
        {"{", 0, TB_INVALID, "the header is not JSON, at byte 1"},
        {"{}x", 0, TB_INVALID, "the header is not JSON"},
        {"{\"a\xFF\":1}", 0, TB_INVALID, "the header is not JSON"},
        {"{\"a\":1}", 0, TB_INVALID, "tensor 'a': it is not described by a JSON object"},
        {"{\"a\":{}}", 0, TB_INVALID, "tensor 'a': 'dtype' is missing"},
        {"{\"a\\u0000b\":{}}", 0, TB_INVALID, "the header is not JSON"},
        {"{\"a\":" INFO("\"U8\"", "[1]", "[0,1]") ",\"a\":" INFO("\"U8\"", "[1]", "[0,1]") "}", 1, TB_INVALID,
         "duplicate object key"},
        {ONE("1", "[1]", "[0,4]"), 4, TB_INVALID, "tensor 'a': 'dtype' is missing or not a string"},
        {ONE("\"\"", "[1]", "[0,4]"), 4, TB_INVALID, "tensor 'a': dtype '' is not one that the format may have"},
        {ONE("\"F 3\"", "[1]", "[0,4]"), 4, TB_INVALID, "dtype 'F 3' is not one"},
        {ONE("\"C64\"", "[0]", "[0,8]"), 8, TB_INVALID, "tensor 'a': 0 elements of C64 can't take 8 bytes"},
        {ONE("\"C64\"", "[2]", "[0,0]"), 0, TB_INVALID, "tensor 'a': 2 elements of C64 can't take 0 bytes"},
        {ONE("\"C64\"", "[2]", "[0,16]"), 8, TB_INVALID, "tensor 'a' has bytes 0 to 16"},
        {ONE("\"f32\"", "[1]", "[0,4]"), 4, TB_INVALID, "dtype 'f32' is not one"},
        {ONE("\"float32\"", "[1]", "[0,4]"), 4, TB_INVALID, "dtype 'float32' is not one"},
        {ONE("\"F32\"", "1", "[0,4]"), 4, TB_INVALID, "tensor 'a': 'shape' is missing or not an array"},
        {ONE("\"F32\"", "[1.0]", "[0,4]"), 4, TB_INVALID, "tensor 'a': dim 0 of its shape is not a size"},
        {ONE("\"F32\"", "[1,-1]", "[0,4]"), 4, TB_INVALID, "dim 1 of its shape is not a size"},
        {ONE("\"F32\"", "[\"1\"]", "[0,4]"), 4, TB_INVALID, "dim 0 of its shape is not a size"},
        {ONE("\"F32\"", "[99999999999999999999]", "[0,4]"), 4, TB_INVALID, "the header is not JSON"},
        {ONE("\"U8\"", "[1,1,1,1,1,1,1,1,1]", "[0,1]"), 1, TB_TOO_BIG, "tensor 'a': it has 9 dims"},
        {ONE("\"U8\"", "[4294967296,4294967296]", "[0,1]"), 1, TB_TOO_BIG, "tensor 'a': the dims"},
        {ONE("\"F64\"", "[4611686018427387904]", "[0,1]"), 1, TB_TOO_BIG, "tensor 'a': the tensor has more than"},
        {ONE("\"F32\"", "[1]", "[0]"), 4, TB_INVALID, "tensor 'a': 'data_offsets' is missing or not two integers"},
        {ONE("\"F32\"", "[1]", "[0,4,8]"), 4, TB_INVALID, "not two integers"},
        {ONE("\"F32\"", "[1]", "[0,4.0]"), 4, TB_INVALID, "not two integers"},
        {ONE("\"F32\"", "[1]", "null"), 4, TB_INVALID, "not two integers"},
        {ONE("\"F32\"", "[1]", "[-4,0]"), 4, TB_INVALID, "its data can't be from byte -4 to byte 0"},
        {ONE("\"F32\"", "[1]", "[-4,9223372036854775807]"), 4, TB_INVALID, "its data can't be from byte -4"},
        {ONE("\"F32\"", "[1]", "[4,0]"), 4, TB_INVALID, "its data can't be from byte 4 to byte 0"},
        {ONE("\"F32\"", "[2]", "[0,4]"), 4, TB_INVALID,
         "tensor 'a': its shape and dtype take 8 bytes, but its data has 4"},
        {ONE("\"F32\"", "[0]", "[0,4]"), 4, TB_INVALID, "take 0 bytes, but its data has 4"},
        {ONE("\"F4\"", "[3]", "[0,2]"), 2, TB_INVALID, "tensor 'a': 3 elements of f4e2m1 do not fill whole bytes"},
        {ONE("\"F32\"", "[1]", "[4,8]"), 8, TB_INVALID,
         "tensor 'a' begins at byte 4 of the data, but bytes from 0 on belong to no tensor"},
        {ONE("\"F32\"", "[2]", "[0,8]"), 7, TB_INVALID,
         "tensor 'a' has bytes 0 to 8 of the data, but the file has only 7"},
        {ONE("\"F32\"", "[2]", "[0,8]"), 9, TB_INVALID,
         "tensor 'a' is the last and ends at byte 8 of the data, but 1 bytes"},
        {ONE("\"U8\"", "[4611686018427387904]", "[4611686018427387903,9223372036854775807]"), 0, TB_INVALID,
         "tensor 'a' begins at byte 4611686018427387903"},
        {"{}", 1, TB_INVALID, "it has no tensors, but 1 bytes of data"},
        {"{\"a\":" INFO("\"U8\"", "[4]", "[0,4]") ",\"b\":" INFO("\"U8\"", "[4]", "[3,7]") "}", 7, TB_INVALID,
         "tensors 'a' and 'b' overlap: one ends at byte 4 of the data, the other begins at 3"},
        {"{\"a\":" INFO("\"U8\"", "[4]", "[0,4]") ",\"b\":" INFO("\"U8\"", "[4]", "[0,4]") "}", 4, TB_INVALID,
         "tensors 'a' and 'b' overlap"},
        {"{\"a\":" INFO("\"U8\"", "[4]", "[0,4]") ",\"b\":" INFO("\"U8\"", "[0]", "[2,2]") "}", 4, TB_INVALID,
         "tensors 'a' and 'b' overlap"},
        {"{\"a\":" INFO("\"U8\"", "[4]", "[0,4]") ",\"b\":" INFO("\"U8\"", "[4]", "[5,9]") "}", 9, TB_INVALID,
         "tensor 'b' begins at byte 5 of the data, but bytes from 4 on belong to no tensor"},
        {"{\"__metadata__\":[]}", 0, TB_INVALID, "'__metadata__' is not an object"},
        {"{\"__metadata__\":{\"k\":1}}", 0, TB_INVALID, "'k' in '__metadata__' is not a string"},
    };
    const char *path = path_in(f, "bad.safetensors");
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        tb__safetensors *file = NULL;
        write_file(path, cases[i].header, cases[i].data_nbytes);
        assert_fails(tb__safetensors_open(path, &file), cases[i].status, cases[i].sentence);
        check_sentence("/bad.safetensors: ");
        assert_null(file);
    }
}

static void bad_files(void **state) {
    folder *f = *state;
    tb__safetensors *file = NULL;
    const char *path = path_in(f, "bad.safetensors");
    assert_fails(tb__safetensors_open(path, &file), TB_INVALID, "bad.safetensors: can't be opened: No such file");
    assert_fails(tb__safetensors_open(f->path, &file), TB_INVALID, "it is a directory, not a file");
    write_bytes(path, "", 0);
    assert_fails(tb__safetensors_open(path, &file), TB_INVALID, "it has 0 bytes, too few");
    write_bytes(path, "\2\0\0\0\0\0\0", 7);
    assert_fails(tb__safetensors_open(path, &file), TB_INVALID, "it has 7 bytes, too few");
    write_bytes(path, "\3\0\0\0\0\0\0\0{}", 10);
    assert_fails(tb__safetensors_open(path, &file), TB_INVALID, "should have 3 bytes, but the file has only 10");
    write_bytes(path, "\1\xE1\xF5\5\0\0\0\0{}", 10);
    assert_fails(tb__safetensors_open(path, &file), TB_INVALID, "a header of 100000001 bytes is beyond");
    write_bytes(path, "\xFF\xFF\xFF\xFF\xFF\xFF\xFF\xFF{}", 10);
    assert_fails(tb__safetensors_open(path, &file), TB_INVALID, "a header of 18446744073709551615 bytes is beyond");
    assert_int_equal(unlink(path), 0);
    assert_int_equal(mkfifo(path, 0600), 0);
    assert_fails(tb__safetensors_open(path, &file), TB_INVALID, "it is a pipe or a device");
    assert_null(file);

    /* of a long path, the end is what tells files apart */
    char longer[400];
    memset(longer, 'd', sizeof longer);
    longer[0] = '/';
    snprintf(longer + 300, 50, "/the_file.safetensors");
    assert_fails(tb__safetensors_open(longer, &file), TB_INVALID, "/the_file.safetensors: can't be opened: ");
    assert_int_equal(strncmp(tb_error_detail(), "...ddd", 6), 0);
}

/* What others may leave out or add, as the official library has it. */
static void liberties(void **state) {
    folder *f = *state;
    tb__safetensors *file;
    const char *path = path_in(f, "odd.safetensors");
    write_file(
        path,
        "{\"b\":{\"data_offsets\":[4,5],\"shape\":[1],\"dtype\":\"U8\",\"extra\":null}, \"z\":" INFO(
            "\"F32\"", "[3,0]", "[4,4]") ",\n\"a\":" INFO("\"F32\"", "[]", "[0,4]") ",\"__metadata__\":{}} \n\t ",
        5);
    assert_ok(tb__safetensors_open(path, &file));
    assert_int_equal(file->header.count, 3);
    assert_string_equal(file->header.tensors[0].name, "a");
    assert_string_equal(file->header.tensors[1].name, "z");
    assert_string_equal(file->header.tensors[2].name, "b");
    assert_string_equal(file->header.by_name[1]->name, "b");
    assert_int_equal(file->header.nmetadata, 0);
    tb__safetensors_close(file);
}

static void shrinking_file(void **state) {
    folder *f = *state;
    const char *path = path_in(f, "shrinks.safetensors");
    tb__safetensors *file;
    char data[64];
    write_file(path, ONE("\"U8\"", "[64]", "[0,64]"), 64);
    assert_ok(tb__safetensors_open(path, &file));
    assert_ok(tb__safetensors_read(file, file->header.tensors, 0, 64, data));
    assert_int_equal(truncate(path, file->data_start + 10), 0);
    assert_ok(tb__safetensors_read(file, file->header.tensors, 0, 10, data));
    assert_fails(tb__safetensors_read(file, file->header.tensors, 0, 64, data), TB_IO, "it became shorter");
    check_sentence("/shrinks.safetensors: it ends at byte ");
    tb__safetensors_close(file);
}

static const tb__safetensor two[] = {{.name = "w", .dtype = TB_F32, .shape = {2, {2, 3}}},
                                     {.name = "b", .dtype = TB_U8, .shape = {1, {5}}}};

static void writing(void **state) {
    folder *f = *state;
    const char *path = path_in(f, "out.safetensors");
    tb__safetensors_writer *writer;
    assert_ok(tb__safetensors_create(path, two, 2, NULL, 0, &writer));
    assert_int_equal(access(path, F_OK), -1); /* only under its temporary name */
    assert_int_equal(count_entries(f->path), 1);
    unsigned char *bytes = bytes_of(&two[0], 24);
    assert_ok(tb__safetensors_write(writer, 0, 20, bytes + 20, 4));
    assert_ok(tb__safetensors_write(writer, 0, 0, bytes, 19));
    assert_fails(tb__safetensors_write(writer, 0, 20, bytes, 5), TB_INVALID, "not in tensor 'w', which has 24");
    assert_fails(tb__safetensors_write(writer, 0, -1, bytes, 1), TB_INVALID, "from byte -1");
    assert_fails(tb__safetensors_commit(writer), TB_INVALID, "tensor 'w' has 24 bytes, but 23 were written");
    check_sentence("/out.safetensors: ");
    assert_ok(tb__safetensors_write(writer, 0, 19, bytes + 19, 1));
    free(bytes);
    assert_fails(tb__safetensors_commit(writer), TB_INVALID, "tensor 'b' has 5 bytes, but 0 were written");
    bytes = bytes_of(&two[1], 5);
    assert_ok(tb__safetensors_write(writer, 1, 0, bytes, 5));
    assert_ok(tb__safetensors_finish(writer, true));
    assert_fails(tb__safetensors_write(writer, 1, 0, bytes, 5), TB_INVALID, "its file is finished");
    assert_int_equal(access(path, F_OK), -1);
    assert_ok(tb__safetensors_commit(writer));
    free(bytes);
    tb__safetensors_writer_destroy(writer);
    assert_int_equal(count_entries(f->path), 1);

    tb__safetensors *old, *file;
    assert_ok(tb__safetensors_open(path, &old));
    assert_int_equal(old->header.count, 2);
    assert_data(old, tb__safetensors_find(&old->header, "w"));
    assert_data(old, tb__safetensors_find(&old->header, "b"));

    /* another one takes its place, and who reads the old one is not disturbed */
    assert_ok(write_all(path, two + 1, 1, NULL, 0));
    assert_data(old, tb__safetensors_find(&old->header, "w"));
    tb__safetensors_close(old);
    assert_ok(tb__safetensors_open(path, &file));
    assert_int_equal(file->header.count, 1);
    tb__safetensors_close(file);

    struct stat about;
    mode_t mask = umask(0);
    umask(mask);
    assert_int_equal(stat(path, &about), 0);
    assert_int_equal(about.st_mode & 0777, 0666 & ~mask);
}

static void abandoning(void **state) {
    folder *f = *state;
    tb__safetensors_writer *writer;
    assert_ok(tb__safetensors_create(path_in(f, "out.safetensors"), two, 2, NULL, 0, &writer));
    assert_int_equal(count_entries(f->path), 1);
    tb__safetensors_writer_destroy(writer);
    assert_int_equal(count_entries(f->path), 0);
    tb__safetensors_writer_destroy(NULL);
}

static void bad_tensors(void **state) {
    folder *f = *state;
    static const struct {
        tb__safetensor tensor;
        tb_status status;
        const char *sentence;
    } cases[] = {
        {{.name = "b", .dtype = TB_F32}, TB_INVALID, "there are two tensors 'b'"},
        {{.name = "__metadata__", .dtype = TB_F32}, TB_INVALID, "keeps this name for itself"},
        {{.name = "x\xFF", .dtype = TB_F32}, TB_INVALID, "its name is not UTF-8"},
        {{.name = "x"}, TB_INVALID, "tensor 'x': 0 is not a dtype"},
        {{.name = "x", .dtype = TB_F32, .shape = {9, {1}}}, TB_INVALID, "0 to 8 dims, not 9"},
        {{.name = "x", .dtype = TB_F32, .shape = {1, {-1}}}, TB_INVALID, "negative"},
        {{.name = "x", .dtype = TB_F4E2M1, .shape = {1, {3}}}, TB_INVALID, "tensor 'x': 3 elements of f4e2m1"},
        {{.name = "x", .dtype = TB_U8, .shape = {1, {INT64_C(1) << 62}}}, TB_TOO_BIG, "more than 2^62 bytes together"},
    };
    const char *path = path_in(f, "out.safetensors");
    tb__safetensors_writer *writer = NULL;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        tb__safetensor tensors[] = {cases[i].tensor, {.name = "b", .dtype = TB_U8, .shape = {1, {4}}}};
        assert_fails(tb__safetensors_create(path, tensors, 2, NULL, 0, &writer), cases[i].status, cases[i].sentence);
        check_sentence("/out.safetensors: ");
    }
    static const tb__safetensors_metadata twice[] = {{"k", "1"}, {"k", "2"}}, wrong[] = {{"k", "\x80"}};
    assert_fails(tb__safetensors_create(path, two, 2, twice, 2, &writer), TB_INVALID, "'k' is twice in the metadata");
    assert_fails(tb__safetensors_create(path, two, 2, wrong, 1, &writer), TB_INVALID,
                 "'k' in the metadata is not UTF-8");
    char *longest = malloc(TB__SAFETENSORS_MAX_HEADER + 1);
    memset(longest, 'x', TB__SAFETENSORS_MAX_HEADER);
    longest[TB__SAFETENSORS_MAX_HEADER] = '\0';
    const tb__safetensors_metadata large = {"k", longest};
    assert_fails(tb__safetensors_create(path, two, 2, &large, 1, &writer), TB_TOO_BIG, "beyond the format's limit");
    free(longest);
    assert_null(writer);
    assert_int_equal(count_entries(f->path), 0);
}

static void bad_places(void **state) {
    folder *f = *state;
    tb__safetensors_writer *writer = NULL;
    assert_fails(tb__safetensors_create(path_in(f, "no/such.safetensors"), two, 2, NULL, 0, &writer), TB_IO,
                 "/no/such.safetensors: can't be created: No such file");
    assert_fails(tb__safetensors_create(f->path, two, 2, NULL, 0, &writer), TB_IO, "not a file is there");
    assert_null(writer);
    assert_int_equal(count_entries(f->path), 0);
}

static void unwritable_folder(void **state) {
    folder *f = *state;
    enum { NOBODY = 65534 };
    tb__safetensors_writer *writer = NULL;
    const char *path = path_in(f, "out.safetensors");
    bool is_root = geteuid() == 0; /* who may write anywhere */
    assert_int_equal(chmod(f->path, 0555), 0);
    if (is_root && seteuid(NOBODY) != 0)
        skip();
    tb_status status = tb__safetensors_create(path, two, 2, NULL, 0, &writer);
    assert_int_equal(is_root ? seteuid(0) : 0, 0);
    assert_int_equal(chmod(f->path, 0700), 0);
    assert_fails(status, TB_IO, "/out.safetensors: can't be created: Permission denied");
    assert_null(writer);
    assert_int_equal(count_entries(f->path), 0);
}

/* A limit on the size of files is a full disk that needs no root. */
static void full_disk(void **state) {
    folder *f = *state;
    static const tb__safetensor big = {.name = "big", .dtype = TB_U8, .shape = {1, {1 << 20}}};
    const char *path = path_in(f, "out.safetensors");
    tb__safetensors_writer *writer = NULL;
    struct rlimit old, low;
    assert_int_equal(getrlimit(RLIMIT_FSIZE, &old), 0);
    low = old;
    low.rlim_cur = 1 << 16;
    void (*handler)(int) = signal(SIGXFSZ, SIG_IGN);
    assert_int_equal(setrlimit(RLIMIT_FSIZE, &low), 0);
    tb_status status = tb__safetensors_create(path, &big, 1, NULL, 0, &writer);
    assert_int_equal(setrlimit(RLIMIT_FSIZE, &old), 0);
    assert_fails(status, TB_IO, "/out.safetensors: can't be written: File too large");
    assert_null(writer);
    assert_int_equal(count_entries(f->path), 0);

    /* room that is gone only later */
    char *bytes = calloc(1 << 20, 1);
    assert_ok(tb__safetensors_create(path, &big, 1, NULL, 0, &writer));
    assert_int_equal(setrlimit(RLIMIT_FSIZE, &low), 0);
    status = tb__safetensors_write(writer, 0, 0, bytes, 1 << 20);
    assert_int_equal(setrlimit(RLIMIT_FSIZE, &old), 0);
    signal(SIGXFSZ, handler);
    free(bytes);
    assert_fails(status, TB_IO, "/out.safetensors: can't be written: File too large");
    assert_fails(tb__safetensors_commit(writer), TB_INVALID, "but 0 were written");
    tb__safetensors_writer_destroy(writer);
    assert_int_equal(count_entries(f->path), 0);
}

enum { WRITERS = 4, PIECE = 1000, PIECES = 50 };

typedef struct share {
    tb__safetensors_writer *writer;
    const unsigned char *bytes;
    int first;
    tb_status status;
} share;

static void *write_share(void *arg) {
    share *s = arg;
    for (int i = s->first; i < PIECES && s->status == TB_OK; i += WRITERS)
        s->status = tb__safetensors_write(s->writer, 0, i * PIECE, s->bytes + i * PIECE, PIECE);
    return NULL;
}

static void several_threads(void **state) {
    folder *f = *state;
    static const tb__safetensor t = {.name = "shared", .dtype = TB_U16, .shape = {1, {PIECE * PIECES / 2}}};
    const char *path = path_in(f, "out.safetensors");
    unsigned char *bytes = bytes_of(&t, PIECE * PIECES);
    tb__safetensors_writer *writer;
    tb__safetensors *file;
    pthread_t thread[WRITERS];
    share shares[WRITERS];
    assert_ok(tb__safetensors_create(path, &t, 1, NULL, 0, &writer));
    for (int i = 0; i < WRITERS; i++) {
        shares[i] = (share){writer, bytes, i, TB_OK};
        assert_int_equal(pthread_create(&thread[i], NULL, write_share, &shares[i]), 0);
    }
    for (int i = 0; i < WRITERS; i++) {
        pthread_join(thread[i], NULL);
        assert_int_equal(shares[i].status, TB_OK);
    }
    assert_ok(tb__safetensors_commit(writer));
    tb__safetensors_writer_destroy(writer);
    assert_ok(tb__safetensors_open(path, &file));
    assert_data(file, file->header.tensors);
    tb__safetensors_close(file);
    free(bytes);
}

static void random_name(rng *r, char *name, int unique) {
    static const char *const pieces[] = {"layers.", "w", "\"", "\\", "\n", "\x01", "\xC3\xA9", "/", " ", "7"};
    int n = snprintf(name, 16, "%d-", unique); /* so that no piece can make two alike */
    for (int64_t i = rng_range(r, 0, 6); i > 0; i--)
        n += snprintf(name + n, 16, "%s", pieces[rng_range(r, 0, 9)]);
}

static void random_files(void **state) {
    folder *f = *state;
    const char *path = path_in(f, "out.safetensors"), *again = path_in(f, "again.safetensors");
    uint64_t seed = test_seed();
    for (int64_t c = 0; c < test_cases(200); c++) {
        rng r = {seed + (uint64_t)c};
        enum { MOST = 24 };
        char names[MOST][96];
        tb__safetensor tensors[MOST];
        size_t count = (size_t)rng_range(&r, 0, MOST);
        for (size_t i = 0; i < count; i++) {
            tensors[i] = (tb__safetensor){.name = names[i], .dtype = (tb_dtype)rng_range(&r, 1, TB_DTYPE_COUNT - 1)};
            random_name(&r, names[i], (int)i);
            tensors[i].shape.ndim = (int)rng_range(&r, tensors[i].dtype == TB_F4E2M1, 4);
            for (int d = 0; d < tensors[i].shape.ndim; d++)
                tensors[i].shape.dim[d] = rng_range(&r, 0, 5) * (tensors[i].dtype == TB_F4E2M1 ? 2 : 1);
        }
        const tb__safetensors_metadata metadata[] = {{"z", names[0]}, {"a\n", "b"}};
        size_t nmetadata = (size_t)rng_range(&r, 0, 2);
        random_name(&r, names[0], 0);
        assert_ok(write_all(path, tensors, count, metadata, nmetadata));
        tb__safetensors *file;
        assert_ok(tb__safetensors_open(path, &file));
        const tb__safetensors_header *h = &file->header;
        assert_int_equal(h->count, count);
        assert_int_equal(h->nmetadata, nmetadata);
        if (nmetadata == 2)
            assert_string_equal(h->metadata[1].value, names[0]);
        for (size_t i = 0; i < count; i++) {
            const tb__safetensor *t = tb__safetensors_find(h, names[i]);
            assert_non_null(t);
            assert_int_equal(t->dtype, tensors[i].dtype);
            assert_shape(&t->shape, &tensors[i].shape);
            assert_int_equal(tb_dtype_bits(t->dtype) >= 8 ? t->offset % (tb_dtype_bits(t->dtype) / 8) : 0, 0);
            assert_data(file, t);
        }
        assert_int_equal(file->data_start % 8, 0);
        assert_ok(write_all(again, h->tensors, h->count, h->metadata, h->nmetadata));
        assert_same_bytes(path, again);
        tb__safetensors_close(file);
    }
}

/* Each allocation fails in its turn: nothing leaks, nothing is half made. */
static void out_of_memory(void **state) {
    folder *f = *state;
    const char *path = path_in(f, "out.safetensors");
    static const tb__safetensors_metadata note = {"k", "v"};
    tb__safetensors_writer *writer = NULL;
    tb__safetensors *file = NULL;
    tb_status status = TB_NO_MEMORY;
    for (long n = 0; status != TB_OK; n++) {
        assert_true(n < 100);
        tb__mem_fail_after(n);
        status = tb__safetensors_create(path, two, 2, &note, 1, &writer);
        tb__mem_fail_after(-1);
        if (status != TB_OK) {
            assert_int_equal(status, TB_NO_MEMORY);
            assert_null(writer);
            assert_int_equal(count_entries(f->path), 0);
        }
    }
    tb__safetensors_writer_destroy(writer);
    assert_ok(write_all(path, two, 2, &note, 1));
    status = TB_NO_MEMORY;
    for (long n = 0; status != TB_OK; n++) {
        assert_true(n < 100);
        tb__mem_fail_after(n);
        status = tb__safetensors_open(path, &file);
        tb__mem_fail_after(-1);
        if (status != TB_OK) {
            assert_int_equal(status, TB_NO_MEMORY);
            assert_null(file);
        }
    }
    tb__safetensors_close(file);
}

#define in_folder(test) cmocka_unit_test_setup_teardown(test, folder_set_up, folder_tear_down)

int main(void) {
    const struct CMUnitTest tests[] = {
        in_folder(official_files),  in_folder(official_header), in_folder(bad_headers),       in_folder(bad_files),
        in_folder(liberties),       in_folder(shrinking_file),  in_folder(writing),           in_folder(abandoning),
        in_folder(bad_tensors),     in_folder(bad_places),      in_folder(unwritable_folder), in_folder(full_disk),
        in_folder(several_threads), in_folder(random_files),    in_folder(out_of_memory),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
