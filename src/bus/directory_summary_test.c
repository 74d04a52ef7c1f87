/* Summaries of a pair: what is packed comes back, of the pair only; what is malformed is refused, whatever it is. */
#include "bus/directory_summary.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

enum { RANKS = 12, ROOM = 256, LONG = 65000 };

static const char *const groups[2] = {"a", "b/c"};

typedef struct listed {
    tb__store_entry entries[4 * RANKS + 2];
    char keys[4 * RANKS + 2][ROOM];
    size_t count;
} listed;

static void add_entry(listed *l, const char *key, const void *data, size_t nbytes) {
    char *copy = calloc(1, nbytes + 1);
    memcpy(copy, data, nbytes);
    snprintf(l->keys[l->count], ROOM, "%s", key);
    l->entries[l->count] = (tb__store_entry){l->keys[l->count], {.data = copy, .nbytes = nbytes, .revision = 1}};
    l->count++;
}

/* Two groups and notes about pair "p", and of each kind one that does not belong to it. */
static void fill_list(listed *l, size_t note_nbytes) {
    char *note = malloc(note_nbytes);
    l->count = 0;
    for (int side = 0; side < 2; side++) {
        for (int32_t i = 0; i < RANKS; i++) {
            char contact[64];
            tb__seat_bytes bytes;
            int n = snprintf(contact, sizeof contact, "machine-1 address %d%d", side, i * 37);
            tb__seat_record seat = {.size = RANKS,
                                    .rank = side * RANKS + i,
                                    .incarnation = 1,
                                    .pid = 1000 + i * 100,
                                    .host = "h",
                                    .is_announced = true,
                                    .contact = contact,
                                    .contact_nbytes = (size_t)n};
            tb__seat_encode(&seat, &bytes);
            add_entry(l, tb__key_of_seat(groups[side], i).text, bytes.data, bytes.nbytes);
        }
    }
    add_entry(l, tb__key_of_seat("other", 0).text, "1 77 1 5 1 h\n", 13);
    for (int side = 0; side < 2; side++) {
        for (int32_t i = 0; i < RANKS; i++) {
            for (size_t k = 0; k < note_nbytes; k++)
                note[k] = (char)(k % 7 < 3 ? k / 7 * (size_t)(side * RANKS + i + 1) : k);
            add_entry(l, tb__key_of_note("p", groups[side], i).text, note, note_nbytes - (size_t)i % 2);
        }
    }
    add_entry(l, tb__key_of_note("p2", "a", 0).text, "x", 1);
    free(note);
}

static void free_list(listed *l) {
    for (size_t i = 0; i < l->count; i++)
        free(l->entries[i].value.data);
    free(l);
}

static void pack_list(const listed *l, tb__pack *pack) {
    tb__store_entries entries = {.count = l->count, .item = (tb__store_entry *)l->entries, .revision = 99};
    tb__summary_pack(pack, &entries, "p", groups, 5);
    assert_false(pack->failed);
}

static void test_round_trip(void **state) {
    (void)state;
    static const size_t sizes[] = {1, 2, 20, 200, 3000};
    for (size_t s = 0; s < sizeof sizes / sizeof *sizes; s++) {
        listed *l = calloc(1, sizeof *l);
        tb__pack pack = {0};
        tb__summary summary;
        tb__roster roster;
        tb__notes notes;
        fill_list(l, sizes[s]);
        pack_list(l, &pack);
        assert_true(tb__summary_unpack(&(tb__store_value){pack.data, pack.count, 7}, "p", &summary));
        assert_int_equal(summary.state, 5);
        assert_int_equal(summary.revision, 7);
        assert_int_equal(tb__directory_view_revision(summary.view), 99);
        for (int side = 0; side < 2; side++) {
            assert_string_equal(summary.groups[side], groups[side]);
            assert_int_equal(tb__directory_view_roster(summary.view, groups[side], &roster), TB_OK);
            assert_int_equal(roster.npresent, RANKS);
            for (int32_t i = 0; i < RANKS; i++)
                assert_int_equal(roster.member[i].rank, side * RANKS + i);
            tb__roster_fini(&roster);
        }
        const tb__store_entries *had = tb__directory_view_entries(summary.view);
        assert_int_equal(had->count, 4 * RANKS);
        for (size_t i = 0, j = 0; i < l->count; i++) {
            if (i == 2 * RANKS || i == l->count - 1)
                continue;
            assert_string_equal(had->item[j].key, l->keys[i]);
            assert_int_equal(had->item[j].value.nbytes, l->entries[i].value.nbytes);
            assert_memory_equal(had->item[j].value.data, l->entries[i].value.data, l->entries[i].value.nbytes);
            j++;
        }
        tb__directory_view_notes(summary.view, "p", &notes);
        assert_int_equal(notes.count, 2 * RANKS);
        tb__notes_fini(&notes);
        tb__directory_view_unref(summary.view);
        tb__pack_fini(&pack);
        free_list(l);
    }
}

static void test_malformed(void **state) {
    (void)state;
    listed *l = calloc(1, sizeof *l);
    tb__pack pack = {0};
    tb__summary summary;
    fill_list(l, 20);
    pack_list(l, &pack);
    for (size_t n = 0; n < pack.count; n++) { /* a copy, so that a read behind the end is noticed */
        unsigned char *cut = malloc(n + 1);
        memcpy(cut, pack.data, n);
        assert_false(tb__summary_unpack(&(tb__store_value){cut, n, 7}, "p", &summary));
        free(cut);
    }
    for (size_t i = 0; i < pack.count; i++) { /* whatever it is then, it is read without harm */
        unsigned char kept = pack.data[i];
        for (int k = 0; k < 3; k++) {
            pack.data[i] = (unsigned char)(k == 0 ? 0xff : k == 1 ? 0 : kept + 1);
            if (tb__summary_unpack(&(tb__store_value){pack.data, pack.count, 7}, "p", &summary))
                tb__directory_view_unref(summary.view);
        }
        pack.data[i] = kept;
    }
    tb__pack_fini(&pack);
    free_list(l);
}

/* The ranks are told to list the store themselves. */
static void test_too_long(void **state) {
    (void)state;
    listed *l = calloc(1, sizeof *l);
    tb__pack pack = {0};
    tb__summary summary;
    fill_list(l, LONG);
    pack_list(l, &pack);
    assert_true(pack.count < TB__STORE_MAX_VALUE);
    assert_true(tb__summary_unpack(&(tb__store_value){pack.data, pack.count, 7}, "p", &summary));
    assert_null(summary.view);
    assert_int_equal(summary.state, 5);
    tb__pack_fini(&pack);
    free_list(l);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_round_trip),
        cmocka_unit_test(test_malformed),
        cmocka_unit_test(test_too_long),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
