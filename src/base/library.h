/* Libraries that are loaded on first use, so that tensorbus works without them. */
#ifndef TB_BASE_LIBRARY_H
#define TB_BASE_LIBRARY_H

#include <stddef.h>

/* A function to look up, and the pointer that receives its address. */
typedef struct tb__symbol {
    const char *name;
    void *slot;
    size_t nbytes; /* of the slot */
} tb__symbol;

/* Loads the library, for good, and looks up all functions. Returns NULL on failure, with the reason in `why`. */
void *tb__library_load(const char *name, const tb__symbol *symbols, size_t nsymbols, char *why, size_t room);

#endif
