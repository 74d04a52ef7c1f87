/* What every transport must do that carries file descriptors. */
#include "conformance_inside.h"

#include <dirent.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

enum { NFILES = 3, MANY = 600, SETS = 300 };

size_t count_descriptors(void) {
    size_t count = 0;
    DIR *dir = opendir("/proc/self/fd");
    assert_non_null(dir);
    while (readdir(dir))
        count++;
    closedir(dir);
    return count;
}

/* b sends a message, which comes after the descriptors that it has sent. */
static void follow_with_message(endpoints *e) {
    unsigned char from = 1, to = 0;
    tb_piece out = {&from, 1}, in = {&to, 1};
    tb_op send, receive;
    uint64_t tag = new_tag();
    make_op(&send, TB_OP_SEND, e->rank_a, tag, &out, 1);
    make_op(&receive, TB_OP_RECV, e->rank_b, tag, &in, 1);
    post(&e->a, &receive);
    post(&e->b, &send);
    work_until_done(e, (tb_op *[]){&send, &receive}, 2);
}

static uint64_t send_fds(endpoints *e, const int *fds, size_t n) {
    uint64_t id;
    assert_int_equal(tb__transport_send_fds(&e->b, e->rank_a, fds, n, &id), TB_OK);
    return id;
}

static void assert_same_file(int one, int other) {
    struct stat a, b;
    assert_int_equal(fstat(one, &a), 0);
    assert_int_equal(fstat(other, &b), 0);
    assert_true(a.st_dev == b.st_dev && a.st_ino == b.st_ino);
}

static void take_fds(endpoints *e, uint64_t id, const int *sent, size_t n) {
    static int got[MANY];
    assert_int_equal(tb__transport_take_fds(&e->a, e->rank_b, id, got, n), TB_OK);
    for (size_t i = 0; i < n; i++) {
        assert_same_file(got[i], sent[i]);
        assert_int_equal(close(got[i]), 0);
    }
}

/* More than fit into the connection at once. */
static void many_sets(endpoints *e, const int *fds) {
    static uint64_t ids[SETS];
    for (size_t i = 0; i < SETS; i++)
        ids[i] = send_fds(e, fds + i % NFILES, 1);
    follow_with_message(e);
    for (size_t i = SETS; i-- > 0;)
        take_fds(e, ids[i], fds + i % NFILES, 1);
}

void conformance_fds(endpoints *e) {
    static int fds[MANY];
    unsigned char *maps[NFILES];
    uint64_t id;
    int got[2];
    if (!e->a.ops->fd_send) {
        assert_int_equal(tb__transport_send_fds(&e->b, e->rank_a, fds, 1, &id), TB_REFUSED);
        assert_int_equal(tb__transport_take_fds(&e->a, e->rank_b, 1, got, 1), TB_REFUSED);
        return;
    }
    follow_with_message(e);
    for (size_t i = 0; i < MANY; i++) {
        if (i < NFILES)
            maps[i] = make_file("conformance", 4096, &fds[i]);
        else
            fds[i] = fds[i % NFILES];
    }
    size_t before = count_descriptors(), counts[] = {1, 2, 250, 251, MANY};
    for (size_t i = 0; i < sizeof counts / sizeof *counts; i++) {
        id = send_fds(e, fds, counts[i]);
        follow_with_message(e);
        take_fds(e, id, fds, counts[i]);
        assert_int_equal(tb__transport_take_fds(&e->a, e->rank_b, id, got, 1), TB_INVALID); /* they are taken */
    }
    id = send_fds(e, fds, 3);
    follow_with_message(e);
    assert_int_equal(tb__transport_take_fds(&e->a, e->rank_b, id + 1, got, 2), TB_INVALID);
    assert_int_equal(tb__transport_take_fds(&e->a, e->rank_b, id, got, 2), TB_INVALID);
    many_sets(e, fds);
    id = send_fds(e, fds, 20); /* nobody takes them */
    follow_with_message(e);
    assert_true(count_descriptors() >= before + 20);
    bool is_one = e->a.context == e->b.context;
    size_t own = count_descriptors();
    tb__transport_close(&e->a);
    if (is_one)
        e->b = (tb_transport){0};
    assert_true(count_descriptors() + 20 <= own);
    for (size_t i = 0; i < NFILES; i++) {
        munmap(maps[i], 4096);
        close(fds[i]);
    }
}
