/* Memory of GPUs: what is recognised, memory of our own, and host memory that is pinned. */
#include "../tests/support/cuda_program.h"

#include <sys/mman.h>
#include <unistd.h>

static tb__device *device;

static bool find(CUdeviceptr address, size_t nbytes, tb__memory *out) {
    return device->ops->find(device, (void *)address, nbytes, out);
}

static bool is_found(CUdeviceptr address, size_t nbytes) {
    tb__memory unused;
    return find(address, nbytes, &unused);
}

static tb__memory must_find(CUdeviceptr address, size_t nbytes) {
    tb__memory memory;
    assert_true(find(address, nbytes, &memory));
    return memory;
}

/* ---- Recognition ------------------------------------------------------------------------------------------------- */

static void test_legacy(void **state) {
    (void)state;
    CUdeviceptr p = alloc_legacy(100000);
    tb__memory memory = must_find(p + 5000, 1000);
    assert_true((CUdeviceptr)memory.base == p && memory.nbytes >= 100000);
    assert_true(memory.is_shareable);
    assert_int_equal(memory.index, 0);
    assert_false(is_found(p + 5000, memory.nbytes));
    assert_true(is_found(p + memory.nbytes - 1, 1));
    assert_false(is_found(p, SIZE_MAX));
    assert_string_equal(tb__device_unit_name(device, 0), "cuda:0");
    uint64_t epoch = memory.epoch;
    CUdeviceptr other = alloc_legacy(100000);
    assert_true(must_find(other, 1).epoch != epoch);
    assert_true(must_find(p, 1).epoch == epoch);
    free_legacy(p);
    free_legacy(other);
    assert_false(is_found(p, 1) && must_find(p, 1).epoch == epoch);
}

static void test_host_memory(void **state) {
    static char bytes[100];
    void *pinned;
    (void)state;
    assert_false(is_found((CUdeviceptr)bytes, sizeof bytes));
    assert_false(is_found((CUdeviceptr)&bytes, 0));
    assert_false(is_found(0, 1));
    set_context(primary_context(0));
    assert_cuda(tb__cuda.cuMemHostAlloc(&pinned, 4096, 0));
    assert_false(is_found((CUdeviceptr)pinned, 4096));
    assert_cuda(DRIVER_CALL("cuMemFreeHost", (void *), pinned));
    set_context(NULL);
}

static void test_vmm(void **state) {
    (void)state;
    CUdeviceptr p = alloc_vmm(4, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR);
    /* Pieces that the bytes are in, and no others. */
    tb__memory memory = must_find(p + PIECE + 10, 100);
    assert_true((CUdeviceptr)memory.base == p + PIECE && memory.nbytes == PIECE && memory.is_shareable);
    memory = must_find(p + 10, PIECE);
    assert_true((CUdeviceptr)memory.base == p && memory.nbytes == 2 * (size_t)PIECE && memory.is_shareable);
    tb__memory all = must_find(p, 4 * (size_t)PIECE);
    assert_true((CUdeviceptr)all.base == p && all.nbytes == 4 * (size_t)PIECE);
    assert_true(all.epoch != memory.epoch);
    /* Other memory at the same addresses. */
    assert_cuda(tb__cuda.cuMemUnmap(p + 2 * PIECE, PIECE));
    assert_false(is_found(p, 4 * (size_t)PIECE));
    assert_true(must_find(p + 10, PIECE).epoch == memory.epoch);
    map_vmm(p + 2 * PIECE, 1, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR);
    assert_true(must_find(p, 4 * (size_t)PIECE).epoch != all.epoch);
    /* Behind the last piece is nothing, or memory of others. */
    assert_false(is_found(p, (size_t)1 << 50));
    free_vmm(p, 4);
    assert_false(is_found(p, 1));
}

/* As vLLM's sleep mode and torch_memory_saver make it. */
static void test_not_shareable(void **state) {
    (void)state;
    tb__memory_key key = {0};
    CUdeviceptr p = alloc_vmm(2, CU_MEM_HANDLE_TYPE_NONE);
    tb__memory memory = must_find(p, 2 * (size_t)PIECE);
    assert_false(memory.is_shareable);
    assert_int_equal(tb__device_share(device, &memory, &key), TB_REFUSED);
    memory.is_shareable = true; /* even so */
    assert_fails(tb__device_share(device, &memory, &key), TB_REFUSED, "cuda:0");
    assert_int_equal(key.bytes.count + key.fds.count, 0);
    /* A piece among others that can be shared. */
    assert_cuda(tb__cuda.cuMemUnmap(p, PIECE));
    map_vmm(p, 1, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR);
    assert_true(must_find(p, PIECE).is_shareable);
    assert_false(must_find(p, PIECE + 1).is_shareable);
    free_vmm(p, 2);
}

/* Memory of cudaMallocAsync is shareable if its pool was made so. */
static void test_pools(void **state) {
    (void)state;
    if (!has_shared_pools())
        skip();
    CUmemoryPool pools[] = {make_pool_on(0, CU_MEM_HANDLE_TYPE_NONE),
                            make_pool_on(0, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR)};
    CUdeviceptr p[4];
    for (int i = 0; i < 4; i++)
        p[i] = alloc_from_pool_on(0, pools[i % 2], 3 * PIECE);
    for (int i = 0; i < 4; i++) {
        tb__memory_key key = {0};
        tb__memory memory = must_find(p[i] + 100, PIECE);
        assert_true((CUdeviceptr)memory.base == p[i] && memory.nbytes >= 3 * (size_t)PIECE);
        assert_int_equal(memory.is_shareable, i % 2);
        assert_int_equal(tb__device_share(device, &memory, &key), i % 2 ? TB_OK : TB_REFUSED);
        assert_int_equal(key.fds.count, i % 2);
        tb__memory_key_fini(&key);
        assert_false(is_found(p[i], memory.nbytes + 1) && must_find(p[i], memory.nbytes + 1).is_shareable);
    }
    for (int i = 0; i < 4; i++)
        free_legacy(p[i]);
    for (int i = 0; i < 2; i++)
        assert_cuda(tb__cuda.cuMemPoolDestroy(pools[i]));
    assert_null(current_context());
}

/* ---- Memory of our own ------------------------------------------------------------------------------------------- */

static void *alloc(size_t nbytes) {
    void *p = NULL;
    assert_ok(device->ops->alloc(device, 0, nbytes, &p));
    return p;
}

static void test_kept_memory(void **state) {
    const fake_cuda_control *control = need_fake();
    (void)state;
    void *p = alloc(7 << 20), *other = alloc(7 << 20);
    tb__memory memory = must_find((CUdeviceptr)p, 7 << 20);
    assert_true(memory.is_shareable && memory.base == p && memory.nbytes == 7 << 20);
    assert_false(is_found((CUdeviceptr)p, memory.nbytes + 1));
    device->ops->free(device, p);
    assert_false(is_found((CUdeviceptr)p, 1));
    assert_true(is_found((CUdeviceptr)other, 7 << 20));
    long ncalls = control->count_calls("cuMemCreate"), nunmapped = control->count_calls("cuMemUnmap");
    for (int i = 0; i < 100; i++) {
        void *again = alloc(i % 2 ? 7 << 20 : 8 << 20);
        assert_true(again == p);
        device->ops->free(device, again);
    }
    assert_int_equal(control->count_calls("cuMemCreate"), ncalls);
    assert_int_equal(control->count_calls("cuMemUnmap"), nunmapped);
    void *small = alloc(1); /* not of a block that is much larger */
    assert_true(small != p);
    device->ops->free(device, small);
    device->ops->free(device, other);
}

/* The kept memory is bounded. */
static void test_bound(void **state) {
    const fake_cuda_control *control = need_fake();
    enum { N = 100 };
    void *p[N];
    (void)state;
    for (int i = 0; i < N; i++)
        p[i] = alloc((size_t)20 << 20);
    long ncreated = control->count_calls("cuMemCreate"), nunmapped = control->count_calls("cuMemUnmap");
    for (int i = 0; i < N; i++)
        device->ops->free(device, p[i]);
    assert_true(control->count_calls("cuMemUnmap") - nunmapped > N / 3);
    for (int i = 0; i < N / 4; i++)
        p[i] = alloc((size_t)20 << 20);
    assert_int_equal(control->count_calls("cuMemCreate"), ncreated);
    for (int i = 0; i < N / 4; i++)
        device->ops->free(device, p[i]);
}

/* Kept memory is given up when there is no other memory. */
static void test_shortage(void **state) {
    const fake_cuda_control *control = need_fake();
    void *p = alloc(7 << 20), *big = NULL;
    (void)state;
    device->ops->free(device, p);
    control->fail_call("cuMemCreate", 0, CUDA_ERROR_OUT_OF_MEMORY);
    long nunmapped = control->count_calls("cuMemUnmap");
    big = alloc((size_t)200 << 20);
    assert_true(control->count_calls("cuMemUnmap") > nunmapped);
    control->fail_call("cuMemCreate", 0, CUDA_ERROR_OUT_OF_MEMORY);
    assert_fails(device->ops->alloc(device, 0, (size_t)300 << 20, &p), TB_NO_MEMORY, "CUDA_ERROR_OUT_OF_MEMORY");
    device->ops->free(device, big);
    assert_fails(device->ops->alloc(device, 0, (size_t)1 << 62, &p), TB_NO_MEMORY, "cuda:0");
    assert_fails(device->ops->alloc(device, 99, 1, &p), TB_INVALID, "cuda:99");
    assert_fails(device->ops->alloc(device, -1, 1, &p), TB_INVALID, "cuda:-1");
}

/* Without VMM, or without the right to share its memory. */
static void test_without_vmm(void **state) {
    const fake_cuda_control *control = need_fake();
    (void)state;
    for (int i = 0; i < 2; i++) {
        if (i == 0)
            setenv("FAKE_CUDA_NO_VMM", "1", 1);
        else
            control->fail_call("cuMemCreate", 1, CUDA_ERROR_NOT_SUPPORTED); /* the first try is refused as it is */
        size_t nbytes = (size_t)(i ? 300 : 50) << 20;
        void *p = alloc(nbytes);
        tb__memory memory = must_find((CUdeviceptr)p, nbytes);
        tb__memory_piece piece = {0};
        assert_true(memory.is_shareable && tb__memory_find_piece((CUdeviceptr)p, &piece));
        assert_int_equal(piece.kind, TB__SHARE_LEGACY);
        device->ops->free(device, p);
        assert_true(alloc(nbytes) == p);
        device->ops->free(device, p);
        unsetenv("FAKE_CUDA_NO_VMM");
    }
}

/* Whichever call fails, there is an error message, and nothing leaks. */
static void test_failed_calls(void **state) {
    const fake_cuda_control *control = need_fake();
    static const char *const calls[] = {"cuMemAddressReserve", "cuMemMap", "cuMemSetAccess"};
    void *p = NULL, *first = alloc((size_t)40 << 20);
    (void)state;
    for (int i = 0; i < 3; i++) {
        control->fail_call(calls[i], 0, CUDA_ERROR_INVALID_VALUE);
        assert_fails(device->ops->alloc(device, 0, (size_t)90 << 20, &p), TB_IO, "CUDA_ERROR_INVALID_VALUE");
    }
    assert_true(control->count_calls("cuMemAddressReserve") - control->count_calls("cuMemAddressFree") <=
                control->count_calls("cuMemCreate"));
    p = alloc((size_t)90 << 20);
    device->ops->free(device, p);
    device->ops->free(device, first);
    assert_null(current_context());
}

/* ---- Pinned memory ----------------------------------------------------------------------------------------------- */

static tb__gpu *gpu;
static size_t page;

static long count_registered(const fake_cuda_control *control) {
    return control->count_calls("cuMemHostRegister") - control->count_calls("cuMemHostUnregister");
}

static tb__cuda_pin *pin(void *base, size_t nbytes) {
    tb__cuda_pin *out;
    assert_ok(tb__cuda_pin_bytes(gpu, base, nbytes, &out));
    return out;
}

static bool is_host_pinned(const void *address) {
    uint64_t type = 0;
    CUpointer_attribute what = CU_POINTER_ATTRIBUTE_MEMORY_TYPE;
    void *where = &type;
    assert_cuda(tb__cuda.cuPointerGetAttributes(1, &what, &where, (CUdeviceptr)address));
    return type == CU_MEMORYTYPE_HOST;
}

/* All bytes between, and none beside. */
static void check_pinned(const char *base, size_t first, size_t last, size_t npages) {
    for (size_t i = 0; i < npages; i++)
        assert_int_equal(is_host_pinned(base + i * page), i >= first && i < last);
}

static void test_pin(void **state) {
    char *p = aligned_alloc(page, 16 * page);
    (void)state;
    tb__cuda_pin *a = pin(p + 2 * page, page + 5), *b = pin(p + 3 * page, 10), *c = pin(p + page, 8 * page);
    check_pinned(p, 1, 9, 16);
    tb__cuda_pin *d = pin(p + 12 * page, page), *e = pin(p, 16 * page);
    check_pinned(p, 0, 16, 16);
    tb__cuda_unpin(c);
    check_pinned(p, 0, 16, 16);
    tb__cuda_unpin(e);
    assert_true(is_host_pinned(p + 2 * page) && is_host_pinned(p + 3 * page) && is_host_pinned(p + 12 * page));
    assert_false(is_host_pinned(p) || is_host_pinned(p + 13 * page) || is_host_pinned(p + 10 * page));
    tb__cuda_unpin(a);
    assert_true(is_host_pinned(p + 3 * page));
    tb__cuda_unpin(b);
    tb__cuda_unpin(d);
    check_pinned(p, 0, 0, 16);
    tb__cuda_unpin(NULL);
    /* And again, at the same addresses. */
    tb__cuda_unpin(pin(p, 16 * page));
    check_pinned(p, 0, 0, 16);
    free(p);
    assert_null(current_context());
}

/* The program can copy from and to what is pinned, and what lies beside it in the same pages. */
static void test_pin_and_copy(void **state) {
    enum { N = 3000, PINS = 3 };
    CUdeviceptr there = alloc_legacy((size_t)10 * N);
    char *p = aligned_alloc(page, 16 * page);
    tb__cuda_pin *pins[PINS];
    (void)state;
    for (int i = 0; i < PINS; i++)
        pins[i] = pin(p + page / 2 + (size_t)(2 * i) * N, N);
    for (int i = 0; i < 2 * PINS; i++) {
        memset(p, i, 16 * page);
        write_gpu(0, there, p + page / 2 + i * N, N);
        memset(p, 77, 16 * page);
        read_gpu(0, there, p + page / 2 + i * N, N);
        for (size_t k = 0; k < 16 * page; k++)
            assert_int_equal(p[k], k - page / 2 - (size_t)i * N < N ? i : 77);
    }
    for (int i = 0; i < PINS; i++)
        tb__cuda_unpin(pins[i]);
    read_gpu(0, there, p, (size_t)10 * N);
    free(p);
    free_legacy(there);
}

/* Memory of tb_alloc is pinned by arenas: no copy of an allocation is in the way of that. */
static void test_pin_arena(void **state) {
    enum { N = 3000 };
    CUdeviceptr there = alloc_legacy(N);
    void *p[3], *large;
    tb__cuda_pin *few, *many;
    (void)state;
    for (int i = 0; i < 3; i++)
        assert_ok(tb_alloc(N, &p[i]));
    assert_ok(tb_alloc((size_t)100 << 20, &large));
    uintptr_t first = (uintptr_t)p[1] + 5, last = first + 10;
    assert_ok(tb__cuda_pin_host(gpu, &first, &last, &few));
    assert_true(first <= (uintptr_t)p[0] && (uintptr_t)p[2] + N <= last);
    first = (uintptr_t)large + 5, last = first + 10;
    assert_ok(tb__cuda_pin_host(gpu, &first, &last, &many));
    assert_true(first <= (uintptr_t)large && (uintptr_t)large + ((size_t)100 << 20) <= last);
    for (int i = 0; i < 3; i++)
        read_gpu(0, there, p[i], N);
    tb_free(large); /* the arena is still there */
    assert_true(is_host_pinned(large));
    tb__cuda_unpin(many);
    assert_false(is_host_pinned(large));
    tb__cuda_unpin(few);
    assert_true(is_host_pinned(p[0])); /* for the next job */
    for (int i = 0; i < 3; i++)
        tb_free(p[i]);
    free_legacy(there);
}

/* Memory that the program has pinned is not registered again, nor unregistered. */
static void test_pinned_by_program(void **state) {
    void *pinned;
    (void)state;
    set_context(primary_context(0));
    assert_cuda(tb__cuda.cuMemHostAlloc(&pinned, 4 * page, 0));
    tb__cuda_pin *a = pin((char *)pinned + 100, 3 * page), *b = pin(pinned, 4 * page);
    tb__cuda_unpin(a);
    tb__cuda_unpin(b);
    assert_true(is_host_pinned(pinned));
    assert_cuda(DRIVER_CALL("cuMemFreeHost", (void *), pinned));
    set_context(NULL);
    char *p = aligned_alloc(page, 8 * page);
    set_context(primary_context(0));
    assert_cuda(tb__cuda.cuMemHostRegister(p, 2 * page, 0));
    tb__cuda_unpin(pin(p, 2 * page));
    assert_true(is_host_pinned(p));
    /* A part of what is wanted, at either end and in the middle. */
    assert_cuda(tb__cuda.cuMemHostRegister(p + 5 * page, page, 0));
    a = pin(p, 8 * page);
    check_pinned(p, 0, 8, 8);
    b = pin(p + 4 * page, 3 * page);
    tb__cuda_unpin(a);
    for (size_t i = 4; i < 7; i++)
        assert_true(is_host_pinned(p + i * page));
    tb__cuda_unpin(b);
    for (size_t i = 0; i < 8; i++)
        assert_int_equal(is_host_pinned(p + i * page), i < 2 || i == 5);
    assert_cuda(tb__cuda.cuMemHostUnregister(p));
    assert_cuda(tb__cuda.cuMemHostUnregister(p + 5 * page));
    assert_true(current_context() == primary_context(0)); /* the program's own */
    set_context(NULL);
    free(p);
}

/* Memory of peers is mapped without the right to write. */
static void test_pin_read_only(void **state) {
    int has = 0;
    (void)state;
    assert_cuda(tb__cuda.cuDeviceGetAttribute(&has, CU_DEVICE_ATTRIBUTE_READ_ONLY_HOST_REGISTER_SUPPORTED, 0));
    if (!has)
        skip();
    int fd = memfd_create("x", 0);
    assert_int_equal(ftruncate(fd, (off_t)(4 * page)), 0);
    char *p = mmap(NULL, 4 * page, PROT_READ, MAP_SHARED, fd, 0);
    tb__cuda_unpin(pin(p, 4 * page));
    munmap(p, 4 * page);
    close(fd);
}

static void test_pin_fails(void **state) {
    const fake_cuda_control *control = need_fake();
    char *p = aligned_alloc(page, 16 * page);
    tb__cuda_pin *a = pin(p + 4 * page, page), *none = NULL;
    (void)state;
    long n = count_registered(control);
    for (int i = 0; i < 2; i++) {
        control->fail_call("cuMemHostRegister", i, CUDA_ERROR_OUT_OF_MEMORY);
        assert_fails(tb__cuda_pin_bytes(gpu, p, 16 * page, &none), TB_NO_MEMORY, "OUT_OF_MEMORY");
        check_pinned(p, 4, 5, 16);
    }
    assert_null(none);
    assert_true(count_registered(control) > n); /* calls that failed count */
    tb__cuda_unpin(a);
    check_pinned(p, 0, 0, 16);
    free(p);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_legacy),        cmocka_unit_test(test_host_memory),
        cmocka_unit_test(test_vmm),           cmocka_unit_test(test_not_shareable),
        cmocka_unit_test(test_pools),         cmocka_unit_test(test_kept_memory),
        cmocka_unit_test(test_bound),         cmocka_unit_test(test_shortage),
        cmocka_unit_test(test_without_vmm),   cmocka_unit_test(test_failed_calls),
        cmocka_unit_test(test_pin),           cmocka_unit_test(test_pin_and_copy),
        cmocka_unit_test(test_pin_arena),     cmocka_unit_test(test_pinned_by_program),
        cmocka_unit_test(test_pin_read_only), cmocka_unit_test(test_pin_fails),
    };
    need_gpu();
    page = (size_t)sysconf(_SC_PAGESIZE);
    if (tb__device_open("cuda", &device) != TB_OK || tb__gpu_get(0, &gpu) != TB_OK) {
        printf("%s\n", tb_error_detail());
        return 1;
    }
    int nfailed = cmocka_run_group_tests(tests, NULL, NULL);
    tb__device_close(device);
    return nfailed;
}
