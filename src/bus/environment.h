/* What tb_world_join takes from the environment: where processes meet, this one's seat, and how it copies. */
#ifndef TB_BUS_ENVIRONMENT_H
#define TB_BUS_ENVIRONMENT_H

#include "base/proof.h"

typedef struct tb__joining {
    const char *url;     /* a store's; NULL: the environment tells it, or an agent's socket */
    const char *agent;   /* the agent's socket; NULL: there is none */
    const char *group;   /* NULL: the environment tells it */
    int32_t index, size; /* a size of 0: likewise, or whoever has started this process */
    const char *token;   /* NULL: that of the file that the environment names, if there was no URL */
    char token_text[TB__TOKEN_ROOM];
} tb__joining;

/* Fills in what is missing; with an agent, whose seat it is, group and size may stay so. */
tb_status tb__joining_read(tb__joining *joining);

/* Has this process copy as the environment says, if it does. */
tb_status tb__environment_apply(void);

#endif
