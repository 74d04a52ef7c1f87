/* Models of several files, sets of rank files, and writing them. */
#include "format/checkpoint.h"

#include "format/format_test.h"

#include "../tests/support/random_case.h"

static void write_text(const char *path, const char *text) {
    write_bytes(path, text, strlen(text));
}

/* Writes tensors, whose data is that of byte_of, as a model. */
static tb_status write_model(const char *dir, const tb__safetensor *tensors, size_t count,
                             const tb__safetensors_metadata *metadata, size_t nmetadata, int64_t max_nbytes,
                             bool sync) {
    tb__checkpoint_writer *writer = NULL;
    TB_TRY(tb__checkpoint_create(dir, tensors, count, metadata, nmetadata, max_nbytes, &(tb__leftovers){0}, &writer));
    tb_status status = TB_OK;
    for (size_t i = count; i-- > 0 && status == TB_OK;) {
        int64_t nbytes;
        assert_ok(tb_shape_size(&tensors[i].shape, tensors[i].dtype, NULL, &nbytes));
        unsigned char *bytes = bytes_of(&tensors[i], nbytes);
        status = tb__checkpoint_write(writer, i, 0, bytes, (size_t)nbytes);
        free(bytes);
    }
    if (status == TB_OK)
        status = tb__checkpoint_commit(writer, sync);
    tb__checkpoint_writer_destroy(writer);
    return status;
}

static const char *file_name(const tb__checkpoint *c, const char *tensor) {
    const tb__checkpoint_tensor *t = tb__checkpoint_find(c, tensor);
    assert_non_null(t);
    return strrchr(c->files[t->file]->path, '/') + 1;
}

static void official_model(void **state) {
    folder *f = *state;
    tb__checkpoint *c;
    assert_ok(tb__checkpoint_open(golden(f, "model"), &c));
    assert_int_equal(c->kind, TB__CHECKPOINT_INDEX);
    assert_int_equal(c->nfiles, 2);
    assert_int_equal(c->count, 4);
    assert_int_equal(c->nbytes, 96);
    assert_int_equal(c->index_nbytes, 96);
    assert_int_equal(c->nunindexed, 0);
    assert_string_equal(file_name(c, "layers.0.weight"), "model-00001-of-00002.safetensors");
    assert_string_equal(file_name(c, "layers.1.weight"), "model-00002-of-00002.safetensors");
    assert_null(tb__checkpoint_find(c, "layers.2.weight"));
    tb__safetensor tensors[4];
    for (size_t i = 0; i < 4; i++) {
        assert_true(i == 0 || strcmp(c->tensors[i - 1].tensor->name, c->tensors[i].tensor->name) < 0);
        assert_data(c->files[c->tensors[i].file], c->tensors[i].tensor);
        tensors[i] = *c->tensors[i].tensor;
    }

    /* written again, all files have the same bytes */
    static const char *const names[] = {"model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors",
                                        TB__MODEL_INDEX};
    const char *dir = path_in(f, "again");
    assert_ok(write_model(dir, tensors, 4, c->files[0]->header.metadata, 1, 66, true));
    tb__checkpoint_close(c);
    tb__checkpoint_close(NULL);
    assert_int_equal(count_entries(dir), 3);
    for (size_t i = 0; i < 3; i++) {
        size_t n, m;
        char *left = read_bytes(keep_path(f, dir, names[i]), &n);
        char *right = read_bytes(keep_path(f, golden(f, "model"), names[i]), &m);
        assert_int_equal(n, m);
        assert_memory_equal(left, right, n);
        free(left);
        free(right);
    }
}

#define U8(n, from, to) "{\"dtype\":\"U8\",\"shape\":[" #n "],\"data_offsets\":[" #from "," #to "]}"

static void kinds(void **state) {
    folder *f = *state;
    tb__checkpoint_kind kind;
    tb__checkpoint *c = NULL;
    assert_fails(tb__checkpoint_look(f->path, &kind), TB_INVALID,
                 "it holds no model.safetensors, no model.safetensors");
    check_sentence(f->path);
    assert_fails(tb__checkpoint_open(path_in(f, "none"), &c), TB_INVALID, "/none: can't be opened: No such file");

    write_file(path_in(f, "rank_0.safetensors"), "{\"r\":" U8(1, 0, 1) "}", 1);
    assert_ok(tb__checkpoint_look(f->path, &kind));
    assert_int_equal(kind, TB__CHECKPOINT_RANKS);
    assert_fails(tb__checkpoint_open(f->path, &c), TB_INVALID, "a file for each rank, not a model");

    write_file(path_in(f, "part"), "{\"p\":" U8(2, 0, 2) "}", 2);
    write_text(path_in(f, TB__MODEL_INDEX), "{\"weight_map\":{\"p\":\"part\"}}");
    assert_ok(tb__checkpoint_open(f->path, &c));
    assert_int_equal(c->kind, TB__CHECKPOINT_INDEX);
    assert_non_null(tb__checkpoint_find(c, "p"));
    assert_int_equal(c->index_nbytes, -1);
    tb__checkpoint_close(c);

    write_file(path_in(f, TB__MODEL_FILE), "{\"m\":" U8(3, 0, 3) "}", 3);
    assert_ok(tb__checkpoint_open(f->path, &c)); /* as transformers does, the single file comes first */
    assert_int_equal(c->kind, TB__CHECKPOINT_MODEL);
    assert_non_null(tb__checkpoint_find(c, "m"));
    assert_int_equal(c->nbytes, 3);
    tb__checkpoint_close(c);

    assert_ok(tb__checkpoint_open(path_in(f, "part"), &c));
    assert_int_equal(c->kind, TB__CHECKPOINT_FILE);
    assert_int_equal(c->count, 1);
    tb__checkpoint_close(c);
}

static void indices(void **state) {
    folder *f = *state;
    static const struct {
        const char *index;
        tb_status status;
        const char *file, *sentence;
    } cases[] = {
        {"", TB_INVALID, "/" TB__MODEL_INDEX ": ", "it is not JSON, at byte 0"},
        {"[]", TB_INVALID, "/" TB__MODEL_INDEX ": ", "'weight_map' is missing or not an object"},
        {"{\"weight_map\":[]}", TB_INVALID, "/" TB__MODEL_INDEX ": ", "'weight_map' is missing or not an object"},
        {"{\"weight_map\":{\"a\":1}}", TB_INVALID, "/" TB__MODEL_INDEX ": ", "no file name for tensor 'a'"},
        {"{\"weight_map\":{\"a\":\"one\",\"a\":\"one\"}}", TB_INVALID, "/" TB__MODEL_INDEX ": ", "duplicate"},
        {"{\"weight_map\":{\"a\":\"../one\"}}", TB_INVALID, "/" TB__MODEL_INDEX ": ",
         "tensor 'a' is in '../one', which is not a file of the directory"},
        {"{\"weight_map\":{\"a\":\"..\"}}", TB_INVALID, "/" TB__MODEL_INDEX ": ", "not a file of the directory"},
        {"{\"weight_map\":{\"a\":\"/etc/passwd\"}}", TB_INVALID, "/" TB__MODEL_INDEX ": ", "not a file of"},
        {"{\"weight_map\":{\"a\":\"\"}}", TB_INVALID, "/" TB__MODEL_INDEX ": ", "not a file of the directory"},
        {"{\"weight_map\":{\"a\":\"one\",\"x\":\"three\"}}", TB_INVALID, "/three: ", "can't be opened: No such file"},
        {"{\"weight_map\":{\"a\":\"one\",\"c\":\"one\"}}", TB_INVALID,
         "/one: ", "tensor 'c' is not in it, but the index says so"},
        {"{\"weight_map\":{\"a\":\"bad\"}}", TB_INVALID, "/bad: ", "tensor 'a': its shape and dtype take 1 bytes"},
        {"{\"weight_map\":{\"a\":\"one\",\"c\":\"two\"},\"metadata\":{\"total_size\":-1}}", TB_OK, NULL, NULL},
        {"{\"weight_map\":{\"a\":\"one\",\"c\":\"two\"},\"metadata\":3}", TB_OK, NULL, NULL},
        {"{\"weight_map\":{}}", TB_OK, NULL, NULL},
    };
    write_file(path_in(f, "one"), "{\"a\":" U8(1, 0, 1) ",\"b\":" U8(2, 1, 3) "}", 3);
    write_file(path_in(f, "two"), "{\"c\":" U8(3, 0, 3) ",\"a\":" U8(2, 3, 5) "}", 5);
    write_file(path_in(f, "bad"), "{\"a\":" U8(1, 0, 2) "}", 2);
    const char *path = path_in(f, TB__MODEL_INDEX);
    tb__checkpoint *c = NULL;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        write_text(path, cases[i].index);
        if (cases[i].status == TB_OK) {
            assert_ok(tb__checkpoint_open(f->path, &c));
            assert_int_equal(c->index_nbytes, -1);
            tb__checkpoint_close(c);
            c = NULL;
            continue;
        }
        assert_fails(tb__checkpoint_open(f->path, &c), cases[i].status, cases[i].sentence);
        check_sentence(cases[i].file);
        assert_null(c);
    }

    /* the index decides which of two is meant, and what else there is does not count */
    write_text(path, "{\"metadata\":{\"total_size\":5.0},\"weight_map\":{\"c\":\"two\",\"a\":\"two\",\"b\":\"one\"}}");
    assert_ok(tb__checkpoint_open(f->path, &c));
    assert_string_equal(file_name(c, "a"), "two");
    assert_int_equal(tb__checkpoint_find(c, "a")->tensor->nbytes, 2);
    assert_int_equal(c->nbytes, 7);
    assert_int_equal(c->index_nbytes, 5);
    assert_int_equal(c->nunindexed, 1);
    assert_string_equal(c->unindexed[0].name, "a");
    assert_string_equal(c->unindexed[0].file, "one");
    assert_string_equal(c->unindexed[0].indexed_in, "two");
    assert_int_equal(c->count, 3);
    assert_fails(tb__checkpoint_refuse_unindexed(c, f->path), TB_INVALID, "tensor 'a' is in 'one', but");
    tb__checkpoint_close(c);
}

static void rank_sets(void **state) {
    folder *f = *state;
    static const char *const others[] = {"rank_3.bin", "rank_3", "xrank_4.safetensors", "rank.safetensors"};
    tb__rank_files ranks;
    assert_ok(tb__rank_files_init(f->path, &ranks));
    assert_int_equal(ranks.count, 0);
    tb__rank_files_fini(&ranks);
    for (size_t i = 0; i < sizeof others / sizeof *others; i++)
        write_text(path_in(f, others[i]), "");
    static const int32_t there[] = {10, 0, 1048575, 2};
    for (size_t i = 0; i < 4; i++) {
        char *path;
        assert_ok(tb__rank_file_path(f->path, there[i], &path));
        write_file(path, "{}", 0);
        free(path);
    }
    assert_ok(tb__rank_files_init(f->path, &ranks));
    assert_int_equal(ranks.count, 4);
    static const int32_t sorted[] = {0, 2, 10, 1048575};
    for (size_t i = 0; i < 4; i++)
        assert_int_equal(ranks.files[i].rank, sorted[i]);
    assert_string_equal(ranks.files[2].path, path_in(f, "rank_10.safetensors"));
    assert_int_equal(ranks.nothers, 2);
    assert_string_equal(ranks.others[0], "rank.safetensors");
    assert_string_equal(ranks.others[1], "xrank_4.safetensors");
    tb__rank_files_fini(&ranks);

    static const char *const wrong[] = {"rank_07.safetensors",      "rank_x.safetensors", "rank_-1.safetensors",
                                        "rank_1048576.safetensors", "rank_.safetensors",  "rank_+1.safetensors",
                                        "rank_ 1.safetensors",      "rank_1x.safetensors"};
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
        const char *path = path_in(f, wrong[i]);
        write_text(path, "");
        assert_fails(tb__rank_files_init(f->path, &ranks), TB_INVALID, wrong[i]);
        check_sentence("stands for no rank");
        assert_int_equal(unlink(path), 0);
    }
    assert_fails(tb__rank_files_init(path_in(f, "none"), &ranks), TB_INVALID, "/none: can't be opened");
}

/* u8 tensors a, b, c, ... of these sizes. */
static size_t make_tensors(const char *sizes, tb__safetensor *out) {
    static const char *const names[] = {"a", "b", "c", "d", "e", "f"};
    size_t n = 0;
    for (; sizes[n]; n++)
        out[n] = (tb__safetensor){.name = names[n], .dtype = TB_U8, .shape = {1, {sizes[n] - '0'}}};
    return n;
}

/* How huggingface_hub deals them out. */
static void splitting(void **state) {
    folder *f = *state;
    static const struct {
        const char *sizes;
        int64_t max_nbytes;
        const char *files; /* the number of the file of each */
    } cases[] = {
        {"123", 0, "111"},   {"123", 6, "111"},     {"123", 5, "112"}, {"123", 1, "312"}, {"333", 3, "123"},
        {"0003", 1, "2221"}, {"19191", 4, "31323"}, {"", 4, ""},       {"9", 4, "1"},     {"2222", 4, "1122"},
    };
    for (size_t k = 0; k < sizeof cases / sizeof *cases; k++) {
        char name[16];
        snprintf(name, sizeof name, "model%zu", k);
        const char *dir = path_in(f, name);
        tb__safetensor tensors[6];
        size_t n = make_tensors(cases[k].sizes, tensors);
        char last = '1';
        for (const char *at = cases[k].files; *at; at++)
            last = *at > last ? *at : last;
        assert_ok(write_model(dir, tensors, n, NULL, 0, cases[k].max_nbytes, false));
        assert_int_equal(count_entries(dir), last == '1' ? 1 : last - '0' + 1);
        tb__checkpoint *c;
        assert_ok(tb__checkpoint_open(dir, &c));
        assert_int_equal(c->count, n);
        for (size_t i = 0; i < n; i++) {
            char expected[48] = TB__MODEL_FILE;
            if (last > '1')
                snprintf(expected, sizeof expected, "model-0000%c-of-0000%c.safetensors", cases[k].files[i], last);
            assert_string_equal(file_name(c, tensors[i].name), expected);
            const tb__checkpoint_tensor *t = tb__checkpoint_find(c, tensors[i].name);
            assert_data(c->files[t->file], t->tensor);
        }
        tb__checkpoint_close(c);
    }
}

static void random_models(void **state) {
    folder *f = *state;
    uint64_t seed = test_seed();
    for (int64_t k = 0; k < test_cases(40); k++) {
        rng r = {seed + (uint64_t)k};
        enum { MOST = 40 };
        char names[MOST][32];
        tb__safetensor tensors[MOST];
        int64_t total = 0, max_nbytes = rng_range(&r, 1, 400);
        size_t n = (size_t)rng_range(&r, 1, MOST);
        for (size_t i = 0; i < n; i++) {
            int64_t nbytes;
            snprintf(names[i], sizeof names[i], "layers.%d.weight", (int)(MOST - i));
            tensors[i] = (tb__safetensor){.name = names[i], .dtype = (tb_dtype)rng_range(&r, TB_BOOL, TB_E8M0)};
            tensors[i].shape = (tb_shape){.ndim = 2, .dim = {rng_range(&r, 0, 5), rng_range(&r, 1, 5)}};
            assert_ok(tb_shape_size(&tensors[i].shape, tensors[i].dtype, NULL, &nbytes));
            total += nbytes;
        }
        const char *dir = path_in(f, "model");
        assert_ok(write_model(dir, tensors, n, NULL, 0, max_nbytes, false));
        tb__checkpoint *c;
        assert_ok(tb__checkpoint_open(dir, &c));
        assert_int_equal(c->count, n);
        assert_int_equal(c->nbytes, total);
        assert_int_equal(c->nunindexed, 0);
        assert_int_equal(c->index_nbytes, c->kind == TB__CHECKPOINT_INDEX ? total : -1);
        for (size_t i = 0; i < c->nfiles; i++)
            assert_true(c->files[i]->header.data_nbytes <= max_nbytes || c->files[i]->header.count == 1);
        for (size_t i = 0; i < n; i++) {
            const tb__checkpoint_tensor *t = tb__checkpoint_find(c, names[i]);
            assert_non_null(t);
            assert_shape(&t->tensor->shape, &tensors[i].shape);
            assert_data(c->files[t->file], t->tensor);
        }
        tb__checkpoint_close(c);
        remove_tree(dir);
    }
}

static void bad_models(void **state) {
    folder *f = *state;
    tb__safetensor tensors[6];
    tb__checkpoint_writer *writer = NULL;
    const char *dir = path_in(f, "model");
    size_t n = make_tensors("123", tensors);

    /* incomplete: nothing appears, and what is abandoned is gone, the directory too */
    assert_ok(tb__checkpoint_create(dir, tensors, n, NULL, 0, 3, &(tb__leftovers){0}, &writer));
    assert_int_equal(count_entries(dir), 2);
    assert_ok(tb__checkpoint_write(writer, 2, 0, "123", 3));
    assert_ok(tb__checkpoint_write(writer, 0, 0, "1", 1));
    assert_fails(tb__checkpoint_commit(writer, true), TB_INVALID, "tensor 'b' has 2 bytes, but 0 were written");
    check_sentence("/model/model-00001-of-00002.safetensors: ");
    tb__checkpoint_writer_destroy(writer);
    assert_int_equal(count_entries(f->path), 0);
    tb__checkpoint_writer_destroy(NULL);

    tensors[2].name = "a";
    writer = NULL;
    assert_fails(tb__checkpoint_create(dir, tensors, n, NULL, 0, 3, &(tb__leftovers){0}, &writer), TB_INVALID,
                 "there are two tensors 'a'");
    tensors[2] = (tb__safetensor){.name = "c", .dtype = TB_U8, .shape = {1, {INT64_C(1) << 62}}};
    assert_fails(tb__checkpoint_create(dir, tensors, n, NULL, 0, 3, &(tb__leftovers){0}, &writer), TB_TOO_BIG,
                 "2^62 bytes together");
    tensors[2].dtype = TB_DTYPE_NONE;
    assert_fails(tb__checkpoint_create(dir, tensors, n, NULL, 0, 3, &(tb__leftovers){0}, &writer), TB_INVALID,
                 "tensor 'c': 0 is not a dtype");
    tensors[2] = (tb__safetensor){.name = "__metadata__", .dtype = TB_U8, .shape = {1, {3}}};
    assert_fails(tb__checkpoint_create(dir, tensors, n, NULL, 0, 3, &(tb__leftovers){0}, &writer), TB_INVALID,
                 "this name for itself");
    assert_int_equal(count_entries(f->path), 0); /* no directory either */

    n = make_tensors("123", tensors);
    assert_fails(tb__checkpoint_create(path_in(f, "no/model"), tensors, n, NULL, 0, 3, &(tb__leftovers){0}, &writer),
                 TB_IO, "/no/model: can't be created: No such file");
    write_text(path_in(f, "file"), "");
    assert_fails(tb__checkpoint_create(path_in(f, "file"), tensors, n, NULL, 0, 3, &(tb__leftovers){0}, &writer),
                 TB_INVALID, "/file: it is not a directory");
    assert_null(writer);

    /* a model that is there is not mixed with another one, and not touched */
    assert_ok(write_model(dir, tensors, n, NULL, 0, 3, false));
    assert_fails(write_model(dir, tensors, n, NULL, 0, 0, false), TB_REFUSED,
                 "/model: it holds model-00001-of-00002.safetensors, model-00002-of-00002.safetensors, ...; old and");
    assert_int_equal(count_entries(dir), 3);
    const char *single = path_in(f, "single");
    assert_ok(write_model(single, tensors, n, NULL, 0, 0, false));
    assert_fails(write_model(single, tensors, n, NULL, 0, 3, false), TB_REFUSED, "/single: it holds " TB__MODEL_FILE);
    assert_int_equal(count_entries(single), 1);
}

/* A second writer into the same directory has no file there before the first is done. */
static void two_writers(void **state) {
    folder *f = *state;
    tb__safetensor tensors[6];
    tb__checkpoint_writer *first, *second = NULL;
    tb__leftovers removed;
    const char *dir = path_in(f, "model");
    size_t n = make_tensors("12", tensors);
    for (int sizes = 0; sizes < 2; sizes++) {
        assert_ok(tb__checkpoint_create(dir, tensors, n, NULL, 0, 2, &removed, &first));
        assert_fails(tb__checkpoint_create(dir, tensors, n, NULL, 0, sizes ? 0 : 2, &removed, &second), TB_REFUSED,
                     "/model: another run writes into this directory");
        assert_null(second);
        assert_int_equal(count_entries(dir), 2);
        if (sizes) {
            assert_ok(tb__checkpoint_write(first, 0, 0, "1", 1));
            assert_ok(tb__checkpoint_write(first, 1, 0, "12", 2));
            assert_ok(tb__checkpoint_commit(first, true));
        }
        tb__checkpoint_writer_destroy(first);
        assert_int_equal(access(dir, F_OK), sizes ? 0 : -1);
    }
    assert_fails(tb__checkpoint_create(dir, tensors, n, NULL, 0, 2, &removed, &second), TB_REFUSED,
                 "/model: it holds model.safetensors.index.json; old and new files would be mixed");
    assert_int_equal(count_entries(dir), 3);
}

/* What fails between the first and the last name takes back those that were given. */
static void interrupted_commit(void **state) {
    folder *f = *state;
    tb__safetensor tensors[6];
    tb__checkpoint_writer *writer;
    const char *dir = path_in(f, "model");
    size_t n = make_tensors("12", tensors);
    assert_ok(tb__checkpoint_create(dir, tensors, n, NULL, 0, 2, &(tb__leftovers){0}, &writer));
    assert_ok(tb__checkpoint_write(writer, 0, 0, "1", 1));
    assert_ok(tb__checkpoint_write(writer, 1, 0, "12", 2));
    const char *in_the_way = keep_path(f, dir, "model-00002-of-00002.safetensors");
    assert_int_equal(mkdir(in_the_way, 0700), 0);
    assert_fails(tb__checkpoint_commit(writer, false), TB_IO, "/model-00002-of-00002.safetensors: can't be put in");
    tb__checkpoint_writer_destroy(writer);
    assert_int_equal(count_entries(dir), 1);
    assert_int_equal(rmdir(in_the_way), 0);
}

static void out_of_memory(void **state) {
    folder *f = *state;
    const char *dir = path_in(f, "model");
    tb__safetensor tensors[6];
    size_t n = make_tensors("1234", tensors);
    tb_status status = TB_NO_MEMORY;
    for (long after = 0; status != TB_OK; after++) {
        assert_true(after < 400);
        tb__mem_fail_after(after);
        status = write_model(dir, tensors, n, NULL, 0, 4, true);
        tb__mem_fail_after(-1);
        assert_true(status == TB_OK || status == TB_NO_MEMORY);
        if (status != TB_OK && access(dir, F_OK) == 0) {
            /* only the last step, which brings the names to the disk, can fail with the model in place */
            tb__checkpoint *c;
            assert_ok(tb__checkpoint_open(dir, &c));
            assert_int_equal(c->count, n);
            tb__checkpoint_close(c);
            remove_tree(dir);
        }
        assert_int_equal(count_entries(f->path), status == TB_OK);
    }
    tb__checkpoint *c = NULL;
    status = TB_NO_MEMORY;
    for (long after = 0; status != TB_OK; after++) {
        assert_true(after < 400);
        tb__mem_fail_after(after);
        status = tb__checkpoint_open(dir, &c);
        tb__mem_fail_after(-1);
        assert_true(status == TB_OK ? c != NULL : status == TB_NO_MEMORY && !c);
    }
    tb__checkpoint_close(c);
    for (int32_t rank = 0; rank < 3; rank++) {
        char *path;
        assert_ok(tb__rank_file_path(f->path, rank, &path));
        write_file(path, "{}", 0);
        free(path);
    }
    tb__rank_files ranks;
    status = TB_NO_MEMORY;
    for (long after = 0; status != TB_OK; after++) {
        assert_true(after < 400);
        tb__mem_fail_after(after);
        status = tb__rank_files_init(f->path, &ranks);
        tb__mem_fail_after(-1);
        assert_true(status == TB_OK || status == TB_NO_MEMORY);
    }
    assert_int_equal(ranks.count, 3);
    tb__rank_files_fini(&ranks);
}

#define in_folder(test) cmocka_unit_test_setup_teardown(test, folder_set_up, folder_tear_down)

int main(void) {
    const struct CMUnitTest tests[] = {
        in_folder(official_model),     in_folder(kinds),         in_folder(indices),    in_folder(rank_sets),
        in_folder(splitting),          in_folder(random_models), in_folder(bad_models), in_folder(two_writers),
        in_folder(interrupted_commit), in_folder(out_of_memory),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
