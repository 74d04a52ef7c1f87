/* How long 8 trainers and 8 engines take to register a batch of 37,000 tensors, from the first call of
 * tb_batch_register until the last one returns: as many as a model with hundreds of experts in each layer has. */
#include "../tests/support/ranks.h"

enum { RANKS = 16, TENSORS = 37000, MOST_SECONDS = 3 };

static void body(fleet_rank *r) {
    fleet_join(r);
    must(fleet_pair(r, NULL), "pair");
    fleet_add(r, RANKS_COLUMNS);
    fleet_meet(r);
    must(tb_batch_register(r->batch, 0), "register");
    fleet_meet(r);
    fleet_leave(r);
}

int main(int argc, char **argv) {
    char folder[] = "/tmp/tb-bench-XXXXXX", url[64];
    tb__store_server *server;
    if (!mkdtemp(folder))
        return 1;
    snprintf(url, sizeof url, "unix:%s/s", folder);
    must(tb__store_server_start(url, NULL, &server), "store");
    fleet f = {.url = url, .nranks = RANKS, .ntensors = argc > 1 ? atoi(argv[1]) : TENSORS, .body = body};
    run_fleet(&f);
    tb__store_server_stop(server);
    rmdir(folder);
    double seconds = f.meetings[2].at - f.meetings[1].at, cpu = f.meetings[2].cpu - f.meetings[1].cpu;
    printf("  %d tensors on 8 + 8 ranks: registered in %.2f s, %.2f s of CPU time   (at most %d s) %s\n", f.ntensors,
           seconds, cpu, MOST_SECONDS, seconds <= MOST_SECONDS ? "ok" : "TOO SLOW");
    return seconds <= MOST_SECONDS ? 0 : 1;
}
