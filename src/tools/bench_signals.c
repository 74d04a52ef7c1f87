/* Signals that would end the parent: it ends its ranks first and takes its files away. */
#include "tools/bench.h"

#include <signal.h>

static const int signals[] = {SIGINT, SIGTERM, SIGHUP};
enum { NSIGNALS = sizeof signals / sizeof *signals };

static volatile sig_atomic_t caught;
static struct sigaction before[NSIGNALS];

static void note(int number) {
    caught = number;
}

void bench_signals_begin(void) {
    struct sigaction action = {.sa_handler = note}; /* no SA_RESTART: waits are to end */
    sigemptyset(&action.sa_mask);
    caught = 0;
    for (int i = 0; i < NSIGNALS; i++) {
        sigaction(signals[i], NULL, &before[i]);
        if (before[i].sa_handler != SIG_IGN)
            sigaction(signals[i], &action, NULL);
    }
}

void bench_signals_end(void) {
    for (int i = 0; i < NSIGNALS; i++)
        sigaction(signals[i], &before[i], NULL);
    if (caught)
        raise(caught);
}

void bench_signals_default(void) {
    for (int i = 0; i < NSIGNALS; i++)
        sigaction(signals[i], &before[i], NULL);
}

tb_status bench_signals_check(void) {
    return caught ? tb__fail(TB_CANCELLED, "interrupted") : TB_OK;
}
