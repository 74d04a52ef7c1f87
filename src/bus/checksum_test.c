/* Checksums: a byte that changes on its way is found before anything is written, and told with where it was. */
#include "bus/bus_test.h"

#include "base/checksum.h"
#include "flow/flow.h"

#include <stdatomic.h>

static atomic_int narrivals, spoiled; /* of buckets; which of them is changed, from 1: 0: none */
static atomic_int nrefused;           /* ranks that were told */

static void on_arrival(void *bytes, size_t nbytes) {
    if (atomic_fetch_add(&narrivals, 1) + 1 == atomic_load(&spoiled))
        ((unsigned char *)bytes)[nbytes / 2] ^= 0x10;
}

static void test_sum(void **state) {
    (void)state;
    /* xxHash's own test vectors. */
    check(tb__checksum("", 0) == 0x2d06800538d394c2U);
    check(tb__checksum("a", 1) != tb__checksum("b", 1));
    enum { BLOCK = 65536 };
    static const size_t lengths[] = {1, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK, 3 * BLOCK + 7};
    static unsigned char bytes[3 * BLOCK + 7];
    for (size_t i = 0; i < sizeof bytes; i++)
        bytes[i] = (unsigned char)(i * 2654435761U >> 24);
    for (size_t i = 0; i < sizeof lengths / sizeof *lengths; i++) {
        uint64_t sums[4];
        size_t n = 0;
        for (size_t at = 0; at < lengths[i]; at += BLOCK)
            sums[n++] = tb__checksum_block(bytes + at, lengths[i] - at < BLOCK ? lengths[i] - at : BLOCK);
        check(tb__checksum(bytes, lengths[i]) == tb__checksum_block(sums, n * sizeof *sums));
    }
}

/* Who asks: 0: a sender, 1: a receiver. Nobody else does. */
typedef struct asking {
    int side;
    const char *layout_a;
    tb_commit commit;
} asking;

static void spoil(rank *r) {
    const asking *ask = r->scene->shared;
    setup s;
    tb_batch_opts opts = {.size = sizeof opts, .bucket_size = 256, .commit = ask->commit};
    opts.checksum = r->index == 1 && ask->side == !is_a(r);
    set_up(r, &s, ask->layout_a, "mesh=2 place=S1", 32, 16, &opts);
    for (uint32_t version = 1; version <= 3; version++) {
        tb_transfer *t = NULL;
        bool is_bad = version == 2;
        meet(r);
        if (is_a(r) && r->index == 0) {
            atomic_store(&narrivals, 0);
            atomic_store(&spoiled, is_bad ? 1 : 0);
        }
        meet(r);
        if (is_a(r))
            part_fill(&s.w, version);
        bool is_first = is_a(r) && r->index == 0;
        if (!is_first)
            check_ok((is_a(r) ? tb_send : tb_recv)(s.batch, NULL, &t));
        meet(r); /* who comes when it is given up waits for the next one */
        if (is_first)
            check_ok(tb_send(s.batch, NULL, &t));
        if (is_bad) {
            /* In place a rank may have all it needs and be through before another finds the fault. */
            tb_status status = tb_wait(t, TB_COMMITTED, -1);
            check(status == TB_IO || (status == TB_OK && ask->commit == TB_IN_PLACE));
            if (status != TB_OK) {
                check(strstr(tb_error_detail(), "of batch 'step', which begins with tensor 'w', has come from rank "));
                check(strstr(tb_error_detail(), "(a "));
                atomic_fetch_add(&nrefused, 1);
            }
            meet(r);
            check(atomic_load(&nrefused) >= (ask->commit == TB_SHADOW ? 4 : 1));
            meet(r);
            atomic_store(&nrefused, 0);
        } else {
            check_ok(tb_wait(t, TB_COMMITTED, -1));
            check(atomic_load(&narrivals) > 0);
        }
        tb_transfer_destroy(t);
        if (!is_a(r) && (!is_bad || ask->commit == TB_SHADOW) && !strstr(ask->layout_a, "=P"))
            check(part_holds(&s.w, is_bad ? version - 1 : version));
    }
    meet(r);
    tear_down(&s);
}

static void test_spoiled(void **state) {
    (void)state;
    tb__flow_on_arrival = on_arrival;
    for (int i = 0; i < 8; i++) {
        asking ask = {.side = i % 2,
                      .commit = i / 2 % 2 ? TB_SHADOW : TB_IN_PLACE,
                      .layout_a = i / 4 ? "mesh=2 place=P" : "mesh=2 place=S0"};
        run_ranks(spoil, 2, 2, &ask);
    }
    tb__flow_on_arrival = NULL;
}

int main(void) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_sum), cmocka_unit_test(test_spoiled)};
    return cmocka_run_group_tests_name("checksum", tests, NULL, NULL);
}
