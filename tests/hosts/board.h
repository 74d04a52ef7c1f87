/* What the processes of a test between hosts share: which step is next, and what has become of it at each of the seats,
 * six unless BOARD_SEATS says otherwise, the last of which is the one that something happens to. The first process
 * leads; the others do the steps. */
#ifndef TB_TESTS_HOSTS_BOARD_H
#define TB_TESTS_HOSTS_BOARD_H

#include "base/process.h"
#include "tests/support/hosts.h"

#include "tensorbus/tensorbus.h"

#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <time.h>

#ifndef BOARD_SEATS
#define BOARD_SEATS 6
#endif

enum { NSEATS = BOARD_SEATS, VICTIM = NSEATS - 1 };
enum { DEADLINE_MS = 30000, SLACK_MS = 20000, JOIN_MS = 60000, LOOK_MS = 5 };

typedef struct board {
    _Atomic int next;
    struct {
        const char *name;
        _Atomic int done;   /* steps */
        _Atomic bool moves; /* some bytes of the version under way are there */
        tb_status status;   /* of the last step */
        char sentence[512];
    } seat[NSEATS];
} board;

static board *shared;

static inline const char *name_of(int seat) {
    return shared->seat[seat].name;
}

/* Before there are other processes. */
static inline void board_make(const char *const names[NSEATS]) {
    shared = mmap(NULL, sizeof *shared, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (shared == MAP_FAILED)
        exit(1);
    for (int i = 0; i < NSEATS; i++)
        shared->seat[i].name = names[i];
}

static inline void nap(void) {
    nanosleep(&(struct timespec){.tv_nsec = LOOK_MS * 1000000}, NULL);
}

/* A seat says what has become of a step; if it is not well, tb_error_detail has the sentence. */
static inline void note_status(int seat, tb_status status) {
    shared->seat[seat].status = status;
    snprintf(shared->seat[seat].sentence, sizeof shared->seat[0].sentence, "%s",
             status == TB_OK ? "" : tb_error_detail());
}

/* ---- In the first process ---------------------------------------------------------------------------------------- */

static inline void show_status(FILE *to, int seat) {
    const char *sentence = shared->seat[seat].sentence;
    fprintf(to, "%s%s%s\n", tb_status_string(shared->seat[seat].status), *sentence ? ": " : "", sentence);
}

static void fail(const char *format, ...) __attribute__((format(printf, 1, 2), noreturn));

static void fail(const char *format, ...) {
    va_list args;
    va_start(args, format);
    fprintf(stderr, "FAILED: ");
    vfprintf(stderr, format, args);
    fprintf(stderr, "\n");
    va_end(args);
    for (int i = 0; i < NSEATS; i++) {
        fprintf(stderr, "  %s: %d done, ", name_of(i), atomic_load(&shared->seat[i].done));
        show_status(stderr, i);
    }
    exit(1);
}

static inline void must_do(const char *what) {
    if (!hosts_do(what))
        fail("the bed can't do '%s'", what);
}

static inline void begin(int step) {
    for (int i = 0; i < NSEATS; i++)
        atomic_store(&shared->seat[i].moves, false);
    atomic_store(&shared->next, step);
}

/* Until bytes are at one of the seats from this one on. */
static inline void await_middle(int seat) {
    bool moves = false;
    for (int64_t deadline_ms = tb__now_ms() + DEADLINE_MS; !moves; nap()) {
        if (tb__now_ms() > deadline_ms)
            fail("nothing moves");
        for (int i = seat; i < NSEATS; i++)
            moves |= atomic_load(&shared->seat[i].moves);
    }
}

/* Everybody has been told of what happened then. */
static inline void tell_all(int64_t since_ms) {
    printf("all were told after %.1f s\n", 1e-3 * (double)(tb__now_ms() - since_ms));
    for (int i = 0; i < NSEATS; i++) {
        printf("  %s: ", name_of(i));
        show_status(stdout, i);
    }
}

#endif
