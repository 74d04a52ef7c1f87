/* Posting a semaphore that a client has made. The client owns its memory, may write anything to it, and may take it
 * away at any moment; none of that harms whoever posts. */
#ifndef TB_BUS_AGENT_SEMAPHORE_H
#define TB_BUS_AGENT_SEMAPHORE_H

#include "base/error.h"

/* Unlinks the named semaphore of this user, and posts it. */
tb_status tb__semaphore_post(const char *name);

/* Adds one to the number at the start of a semaphore, and wakes one who waits for it. TB_IO if the memory is gone. */
tb_status tb__semaphore_raise(void *semaphore);

#endif
