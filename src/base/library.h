/* Libraries that are loaded when they are first needed, so that tensorbus works where there are none. */
#ifndef TB_BASE_LIBRARY_H
#define TB_BASE_LIBRARY_H

#include <stddef.h>

/* A function of the library, and where its address goes. */
typedef struct tb__symbol {
    const char *name;
    void *slot;
    size_t nbytes; /* of the slot */
} tb__symbol;

/* Loads the library, for good, and finds all the functions. NULL: it can't be, and `why` says why. */
void *tb__library_load(const char *name, const tb__symbol *symbols, size_t nsymbols, char *why, size_t room);

#endif
