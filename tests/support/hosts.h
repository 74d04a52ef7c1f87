/* Tests that tests/hosts/bed runs can put their processes on its hosts; elsewhere there are none, and all stay here. */
#ifndef TB_TESTS_HOSTS_H
#define TB_TESTS_HOSTS_H

#include <stdbool.h>
#include <stddef.h>

/* How many the bed has; 0: there is no bed. */
int hosts_count(void);

/* A store that processes of host 0 can serve, and all can reach. */
void hosts_store(char *url, size_t room);
extern const char hosts_token[]; /* of that store */

/* For a process without threads: it is on host `number` modulo their count from now on. UCX may use TCP only, because
 * it knows that all of this is one machine. Ends the process, with a sentence, if that can't be done. */
void hosts_enter(int number);

/* Ends the process as a skipped test where UCX is not installed: nothing else crosses hosts. */
void hosts_need_ucx(void);

/* Has the bed do something: "cut 2". False if it could not. */
bool hosts_do(const char *what);

#endif
