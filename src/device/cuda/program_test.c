/* Memory of tb_alloc_on on GPUs, and pinned host memory: without a world, with and without a context. */
#include "../tests/support/cuda_program.h"

#include <sys/wait.h>
#include <unistd.h>

static tb__device *device;

static tb__memory must_find(const void *address, size_t nbytes) {
    tb__memory memory;
    assert_true(device->ops->find(device, address, nbytes, &memory));
    return memory;
}

static void test_units(void **state) {
    void *p = NULL;
    char name[32];
    (void)state;
    for (int i = 0; i < tb__gpu_count(); i++) {
        snprintf(name, sizeof name, "cuda:%d", i);
        assert_ok(tb_alloc_on(name, 100000, &p));
        tb__memory memory = must_find(p, 100000);
        assert_int_equal(memory.index, i);
        assert_true(memory.base == p && memory.is_shareable);
        tb_free(p);
    }
    assert_ok(tb_alloc_on("cuda:0", 0, &p));
    tb_free(p);
    p = NULL;
    snprintf(name, sizeof name, "cuda:%d", tb__gpu_count());
    assert_fails(tb_alloc_on(name, 100, &p), TB_REFUSED, name);
    assert_fails(tb_alloc_on("cuda:0", (size_t)1 << 60, &p), TB_NO_MEMORY, "cuda:0");
    assert_null(p);
}

/* As PyTorch calls them, which has no place for a status. */
static void test_torch(void **state) {
    (void)state;
    int last = tb__gpu_count() - 1;
    void *p = tb_torch_alloc(100000, last, NULL);
    assert_int_equal(must_find(p, 100000).index, last);
    tb_torch_free(p, 100000, last, NULL);
    assert_null(tb_torch_alloc(100, last + 1, NULL));
    assert_null(tb_torch_alloc(100, -1, NULL));
    assert_null(tb_torch_alloc(-1, 0, NULL));
}

/* The unit that the thread uses, and no other; the first where it uses none. */
static void test_current(void **state) {
    void *p;
    (void)state;
    assert_null(current_context());
    assert_ok(tb_alloc_on("cuda", 100, &p));
    assert_int_equal(must_find(p, 100).index, 0);
    tb_free(p);
    if (tb__gpu_count() < 2)
        return;
    set_context(primary_context(1));
    assert_ok(tb_alloc_on("cuda", 100, &p));
    assert_int_equal(must_find(p, 100).index, 1);
    tb_free(p);
    set_context(NULL);
}

/* Memory can be written and read; freed memory is not found any more, and is not freed twice. */
static void test_use(void **state) {
    enum { N = 1000 };
    char bytes[N], back[N];
    void *p;
    (void)state;
    memset(bytes, 5, N);
    assert_ok(tb_alloc_on("cuda:0", N, &p));
    write_gpu(0, (CUdeviceptr)p, bytes, N);
    read_gpu(0, (CUdeviceptr)p, back, N);
    assert_memory_equal(bytes, back, N);
    assert_false(tb__cuda_free_on((char *)p + 1));
    tb_free(p);
    assert_false(tb__cuda_free_on(p));
    CUdeviceptr programs = alloc_legacy(N);
    assert_false(tb__cuda_free_on((void *)programs)); /* the program's own */
    free_legacy(programs);
}

static void run_copy(void *to, const void *from, size_t nbytes) {
    static const int64_t unit[1][TB_MAX_DIMS] = {{1}};
    tb__job *job = NULL;
    tb__fence fence = {0};
    tb__move move = {.ndim = 1,
                     .len = {(int64_t)nbytes},
                     .dst = to,
                     .dst_stride = {1},
                     .nsrc = 1,
                     .src = &from,
                     .src_stride = unit,
                     .src_dtype = TB_U8,
                     .wire_dtype = TB_U8,
                     .dst_dtype = TB_U8};
    assert_ok(device->ops->prepare(device, &move, 1, &job));
    assert_ok(device->ops->run(device, job, &(tb__run){0}, &fence));
    while (!fence.is_done)
        (void)device->ops->progress(device);
    assert_int_equal(fence.status, TB_OK);
    device->ops->release(device, job);
}

/* GPU 1 copies what the program itself has mapped for GPU 0: it is given access or, where the driver refuses that, gets
 * it through host memory. */
static void test_programs_mappings(void **state) {
    enum { NPIECES = 3, NBYTES = NPIECES * PIECE };
    unsigned char *bytes = malloc(NBYTES), *back = malloc(NBYTES);
    void *to;
    (void)state;
    if (tb__gpu_count() < 2)
        skip();
    const fake_cuda_control *fake = fake_cuda();
    for (int is_refused = 0; is_refused < (fake ? 2 : 1); is_refused++) {
        CUdeviceptr from = alloc_vmm(NPIECES, CU_MEM_HANDLE_TYPE_NONE);
        assert_ok(tb_alloc_on("cuda:1", NBYTES, &to));
        for (size_t i = 0; i < NBYTES; i++)
            bytes[i] = (unsigned char)(i * 31 + i / 4096 + (size_t)is_refused);
        write_gpu(0, from, bytes, NBYTES);
        if (is_refused) {
            fake->fail_call("cuMemSetAccess", 1, CUDA_ERROR_INVALID_VALUE);
            fake->fail_call("cuMemGetAccess", 0, CUDA_ERROR_INVALID_VALUE);
            setenv("FAKE_CUDA_NO_READ_ONLY", "1", 1);
        }
        run_copy(to, (const void *)from, NBYTES);
        if (is_refused) {
            unsetenv("FAKE_CUDA_NO_READ_ONLY");
            fake->mend();
        }
        read_gpu(1, (CUdeviceptr)to, back, NBYTES);
        assert_memory_equal(bytes, back, NBYTES);
        tb_free(to);
        free_vmm(from, NPIECES);
    }
    free(bytes);
    free(back);
}

static bool is_pinned(const void *p) {
    unsigned type = 0;
    CUpointer_attribute what[] = {CU_POINTER_ATTRIBUTE_MEMORY_TYPE};
    void *where[] = {&type};
    return tb__cuda.cuPointerGetAttributes(1, what, where, (CUdeviceptr)p) == CUDA_SUCCESS &&
           type == CU_MEMORYTYPE_HOST;
}

static void test_pinned(void **state) {
    void *p, *plain;
    (void)state;
    assert_ok(tb_alloc(100000, &plain));
    assert_ok(tb_alloc_on("pinned", 100000, &p));
    memset(p, 1, 100000);
    assert_true(is_pinned(p) && is_pinned((char *)p + 99999));
    assert_false(is_pinned(plain));
    assert_false(device->ops->find(device, p, 100000, &(tb__memory){0}));
    tb_free(p);
    assert_false(is_pinned(p));
    tb_free(plain);
}

/* In a forked child the memory is not there; freeing it does nothing, to the parent neither. */
static void test_fork(void **state) {
    void *p, *pinned;
    int how = -1;
    (void)state;
    assert_ok(tb_alloc_on("cuda:0", 100, &p));
    assert_ok(tb_alloc_on("pinned", 100, &pinned));
    pid_t pid = fork();
    if (pid == 0) {
        void *none = NULL;
        tb_free(p);
        tb_free(pinned);
        _exit(tb_alloc_on("cuda:0", 100, &none) != TB_OK && !none ? 0 : 1);
    }
    assert_true(waitpid(pid, &how, 0) == pid);
    assert_int_equal(how, 0);
    assert_int_equal(must_find(p, 100).index, 0);
    assert_true(is_pinned(pinned));
    tb_free(p);
    tb_free(pinned);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_units), cmocka_unit_test(test_torch),  cmocka_unit_test(test_current),
        cmocka_unit_test(test_use),   cmocka_unit_test(test_pinned), cmocka_unit_test(test_programs_mappings),
        cmocka_unit_test(test_fork),
    };
    need_gpu();
    if (tb__device_open("cuda", &device) != TB_OK) {
        printf("%s\n", tb_error_detail());
        return 1;
    }
    int nfailed = cmocka_run_group_tests(tests, NULL, NULL);
    tb__device_close(device);
    return nfailed;
}
