/* Random batches between processes. A pool of workers goes through the same cases, each of which follows from its seed,
 * so that nothing has to be said between them; each fills its sources, and knows every byte that must be in its memory
 * afterwards. What the processes are, and how they meet, is the test's. */
#ifndef TB_TESTS_RANDOM_WORKER_H
#define TB_TESTS_RANDOM_WORKER_H

#include "tensorbus/tensorbus.h"

enum {
    RANDOM_MAX_WORKERS = 8,
    RANDOM_PATIENCE_MS = 60000, /* long enough for any machine; only a hang takes it */
};

typedef struct random_pool {
    int number, nworkers; /* which of them this process is */
    void (*barrier)(void);
    /* A world with this seat in it, which is the first of its seats in "src" and "dst"; and with this host's id. */
    tb_status (*join)(const char *group, int32_t seat, int32_t nseats, const char *host, tb_world **out);
    void (*leave)(void);                         /* after a world is destroyed; may be NULL */
    bool has_agents;                             /* worlds have an agent's seat */
    void (*at)(uint64_t seed, const char *step); /* may be NULL */
    bool (*is_first_to_fail)(void);              /* the others need not say so, too */
    void (*give_up)(void);                       /* does not return */
} random_pool;

/* Ends by `give_up` if anything is wrong, having said what. */
void random_work(const random_pool *pool, uint64_t seed, int64_t ncases);

#endif
