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

typedef struct tb__library_choice {
    const char *list;               /* names, separated by colons; NULL or empty: the usual one */
    const char *usual;              /* its name in most places */
    void (*look)(const char *name); /* is called with each name that is tried, before */
} tb__library_choice;

/* Loads the first library of the list that can be loaded. But one of the usual name that the process has loaded already
 * is used instead: a second one would get libraries of the first, which have the same names. */
void *tb__library_load_first(const tb__library_choice *choice, const tb__symbol *symbols, size_t nsymbols, char *why,
                             size_t room);

#endif
