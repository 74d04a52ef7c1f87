/* Posts a semaphore that a client has made. The client may change, truncate or unlink it at any time; none of that
 * harms the agent. */
#ifndef TB_BUS_AGENT_SEMAPHORE_H
#define TB_BUS_AGENT_SEMAPHORE_H

#include "base/error.h"

/* Unlinks the named semaphore of this user, and posts it. */
tb_status tb__semaphore_post(const char *name);

/* Increments the semaphore's value and wakes one waiter. TB_IO if the memory is gone. */
tb_status tb__semaphore_raise(void *semaphore);

#endif
