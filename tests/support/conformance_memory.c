/* What every transport must do that lets peers reach memory. */
#include "conformance_inside.h"

#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

/* Sends keys of b's memory to a, and imports them there. */
static void import_all(endpoints *e, tb_mem *const *mem, size_t n, tb_remote **remote) {
    tb_mem_key *key = calloc(n, sizeof *key), *got = calloc(n, sizeof *got);
    tb_piece out = {key, n * sizeof *key}, in = {got, n * sizeof *got};
    tb_op send, receive;
    for (size_t i = 0; i < n; i++)
        assert_int_equal(e->b.ops->mem_export(e->b.context, mem[i], e->rank_a, &key[i]), TB_OK);
    uint64_t tag = new_tag();
    make_op(&send, TB_OP_SEND, e->rank_a, tag, &out, 1);
    make_op(&receive, TB_OP_RECV, e->rank_b, tag, &in, 1);
    post(&e->a, &receive);
    post(&e->b, &send);
    work_until_done(e, (tb_op *[]){&send, &receive}, 2);
    for (size_t i = 0; i < n; i++)
        assert_int_equal(e->a.ops->mem_import(e->a.context, e->rank_b, &got[i], &remote[i]), TB_OK);
    free(key);
    free(got);
}

tb_remote *import_memory(endpoints *e, tb_mem *mem) {
    tb_remote *remote;
    import_all(e, &mem, 1, &remote);
    return remote;
}

unsigned char *make_file(const char *name, size_t nbytes, int *fd) {
    *fd = memfd_create(name, MFD_CLOEXEC | MFD_ALLOW_SEALING);
    assert_true(*fd >= 0);
    assert_int_equal(ftruncate(*fd, (off_t)nbytes), 0);
    assert_int_equal(fcntl(*fd, F_ADD_SEALS, F_SEAL_SHRINK), 0);
    unsigned char *base = mmap(NULL, nbytes, PROT_READ | PROT_WRITE, MAP_SHARED, *fd, 0);
    assert_true(base != MAP_FAILED);
    return base;
}

/* As many bytes as the pieces have, from one place. */
static tb_status read_at(endpoints *e, tb_remote *remote, size_t offset, const tb_piece *pieces, size_t npieces) {
    tb_range range = {offset, tb__pieces_size(pieces, npieces)};
    return tb__transport_read(&e->a, remote, &range, 1, pieces, npieces);
}

/* b's memory, read from a, and read and written through a mapping where there is one. */
static void memory_of(endpoints *e, unsigned char *base, size_t n, int fd) {
    tb_mem_desc desc = {.size = sizeof desc, .base = base, .nbytes = n, .kind = TB_MEM_HOST, .fd = fd};
    tb_mem *mem;
    static unsigned char buffer[50000];
    tb_piece pieces[2] = {{buffer, 20000}, {buffer + 20000, 30000}};
    fill(base, n, 0);
    assert_int_equal(e->b.ops->mem_register(e->b.context, &desc, &mem), TB_OK);
    tb_remote *remote = import_memory(e, mem);
    assert_true(tb__transport_is_valid(&e->a, remote));
    if (e->a.ops->mem_read) {
        memset(buffer, 0xEE, sizeof buffer);
        assert_int_equal(read_at(e, remote, 2000, pieces, 2), TB_OK);
        assert_memory_equal(buffer, base + 2000, sizeof buffer);
        assert_int_equal(read_at(e, remote, n - 10, pieces, 2), TB_INVALID);
        assert_int_equal(read_at(e, remote, SIZE_MAX - 5, pieces, 2), TB_INVALID);
    }
    unsigned char *mapped = tb__transport_map(&e->a, remote);
    if (fd >= 0)
        assert_non_null(mapped);
    if (mapped) {
        assert_memory_equal(mapped, base, n);
        mapped[n - 1] ^= 0xFF;
        assert_int_equal(mapped[n - 1], base[n - 1]);
    }
    e->b.ops->mem_unregister(e->b.context, mem); /* from now on nothing gets through */
    assert_false(tb__transport_is_valid(&e->a, remote));
    assert_int_not_equal(read_at(e, remote, 0, pieces, 2), TB_OK);
    if (e->a.ops->mem_read)
        assert_non_null(strstr(tb_error_detail(), "unregistered"));
    e->a.ops->mem_release(e->a.context, remote);
}

/* Some transports only carry messages, and say so. */
static bool offers_memory(const endpoints *e) {
    unsigned char byte = 0;
    tb_mem_desc desc = {.size = sizeof desc, .base = &byte, .nbytes = 1, .fd = -1};
    tb_mem *mem;
    tb_remote *remote;
    if (e->a.ops->mem_register)
        return true;
    assert_int_equal(tb__transport_register(&e->b, &desc, &mem), TB_REFUSED);
    assert_int_equal(tb__transport_import(&e->a, e->rank_b, &(tb_mem_key){.nbytes = 8}, &remote), TB_REFUSED);
    printf("    not offered\n");
    return false;
}

void conformance_memory(endpoints *e) {
    if (!offers_memory(e))
        return;
    size_t n = 3 << 20;
    unsigned char *plain = malloc(n);
    memory_of(e, plain, n, -1);
    free(plain);
    int fd;
    unsigned char *shared = make_file("conformance", n, &fd);
    memory_of(e, shared, n, fd);
    memory_of(e, shared, n, fd); /* the same allocation, registered anew */
    munmap(shared, n);
    close(fd);
}

enum { RANGES = 5000, STRIDE = 200, PIECES = 7000 };

/* Lists of as many bytes on both sides, in `flat` one after the other. They are cut at different places, some ranges
 * are empty, and ranges are not in the order of memory. Between the pieces there are gaps. Returns the bytes in all. */
static size_t make_lists(tb_range *ranges, tb_piece *pieces, unsigned char *gappy) {
    size_t nbytes = 0, at = 0;
    for (size_t i = 0; i < RANGES; i++) {
        ranges[i] = (tb_range){i * 1237 % RANGES * STRIDE + i % 7, i % 9 ? 1 + i % 90 : 0};
        nbytes += ranges[i].nbytes;
    }
    for (size_t i = 0; i < PIECES; i++) {
        size_t n = i * 31 % 50;
        if (n > nbytes - at || i == PIECES - 1)
            n = nbytes - at;
        pieces[i] = (tb_piece){gappy + at + i, n};
        at += n;
    }
    return nbytes;
}

/* Thousands of small ranges, read in one call. */
static void scattered_of(endpoints *e, unsigned char *base, size_t n, int fd) {
    static tb_range ranges[RANGES];
    static tb_piece pieces[PIECES];
    static unsigned char gappy[RANGES * STRIDE];
    tb_mem *mem;
    tb_mem_desc desc = {.size = sizeof desc, .base = base, .nbytes = n, .kind = TB_MEM_HOST, .fd = fd};
    size_t nbytes = make_lists(ranges, pieces, gappy);
    unsigned char *flat = malloc(nbytes), *got = malloc(nbytes);
    assert_int_equal(e->b.ops->mem_register(e->b.context, &desc, &mem), TB_OK);
    tb_remote *remote = import_memory(e, mem);
    fill(base, n, 3);
    if (e->a.ops->mem_read) {
        tb_range past = ranges[RANGES / 2];
        memset(gappy, 0xEE, sizeof gappy);
        ranges[RANGES / 2].offset = n - past.nbytes + 1;
        assert_int_equal(tb__transport_read(&e->a, remote, ranges, RANGES, pieces, PIECES), TB_INVALID);
        ranges[RANGES / 2] = past;
        assert_int_equal(tb__transport_read(&e->a, remote, ranges, RANGES - 1, pieces, PIECES), TB_INVALID);
        assert_int_equal(tb__transport_read(&e->a, remote, ranges, RANGES, pieces + 1, 10), TB_INVALID);
        for (size_t i = 0; i < sizeof gappy; i++)
            assert_int_equal(gappy[i], 0xEE);
        assert_int_equal(tb__transport_read(&e->a, remote, NULL, 0, NULL, 0), TB_OK);
        assert_int_equal(tb__transport_read(&e->a, remote, ranges, RANGES, pieces, PIECES), TB_OK);
        for (size_t i = 0, at = 0; i < RANGES; at += ranges[i++].nbytes)
            memcpy(flat + at, base + ranges[i].offset, ranges[i].nbytes);
        tb__pieces_gather(pieces, PIECES, 0, got, nbytes);
        assert_memory_equal(got, flat, nbytes);
        for (size_t i = 1; i < PIECES; i++)
            assert_int_equal(((unsigned char *)pieces[i].base)[-1], 0xEE);
    }
    e->a.ops->mem_release(e->a.context, remote);
    e->b.ops->mem_unregister(e->b.context, mem);
    free(flat);
    free(got);
}

void conformance_scattered(endpoints *e) {
    if (!offers_memory(e))
        return;
    size_t n = (size_t)RANGES * STRIDE;
    int fd;
    unsigned char *plain = malloc(n), *shared = make_file("conformance", n, &fd);
    scattered_of(e, plain, n, -1);
    scattered_of(e, shared, n, fd);
    free(plain);
    munmap(shared, n);
    close(fd);
}

/* A file with thousands of tensors in it, each of them registered. */
void conformance_many_registrations(endpoints *e) {
    if (!offers_memory(e))
        return;
    enum { N = 6000, SIZE = 96 };
    static tb_mem *mem[N];
    static tb_remote *remote[N];
    int fd;
    if (!offers_memory(e))
        return;
    unsigned char *base = make_file("conformance", (size_t)N * SIZE, &fd), got[SIZE];
    tb_piece piece = {got, SIZE};
    size_t before = count_descriptors();
    fill(base, (size_t)N * SIZE, 8);
    for (int round = 0; round < 2; round++) {
        for (size_t i = 0; i < N; i++) {
            tb_mem_desc desc = {
                .size = sizeof desc, .base = base + i * SIZE, .nbytes = SIZE, .fd = fd, .offset = i * SIZE};
            assert_int_equal(e->b.ops->mem_register(e->b.context, &desc, &mem[i]), TB_OK);
        }
        import_all(e, mem, N, remote);
        assert_true(count_descriptors() < before + 8);
        for (size_t i = 1; i < N; i += 2)
            e->b.ops->mem_unregister(e->b.context, mem[i]);
        unsigned char *first = tb__transport_map(&e->a, remote[0]);
        for (size_t i = 0; i < N; i++) {
            assert_int_equal(tb__transport_is_valid(&e->a, remote[i]), i % 2 == 0);
            if (i % 2 == 0 && first) /* one mapping, with the same distances */
                assert_ptr_equal(tb__transport_map(&e->a, remote[i]), first + i * SIZE);
            if (!e->a.ops->mem_read)
                continue;
            assert_int_equal(read_at(e, remote[i], 0, &piece, 1), i % 2 ? TB_INVALID : TB_OK);
            if (i % 2 == 0)
                assert_memory_equal(got, base + i * SIZE, SIZE);
        }
        for (size_t i = 0; i < N; i++) {
            if (i % 2 == 0)
                e->b.ops->mem_unregister(e->b.context, mem[i]);
            e->a.ops->mem_release(e->a.context, remote[i]);
        }
    }
    munmap(base, (size_t)N * SIZE);
    close(fd);
}
