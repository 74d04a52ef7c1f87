#include "base/library.h"

#include <dlfcn.h>
#include <stdio.h>
#include <string.h>

void *tb__library_load(const char *name, const tb__symbol *symbols, size_t nsymbols, char *why, size_t room) {
    void *library = dlopen(name, RTLD_NOW | RTLD_LOCAL);
    for (size_t i = 0; library && i < nsymbols; i++) {
        void *function = dlsym(library, symbols[i].name);
        if (!function)
            library = NULL;
        else
            memcpy(symbols[i].slot, &function, symbols[i].nbytes);
    }
    if (!library)
        snprintf(why, room, "%s", dlerror());
    return library;
}

void *tb__library_load_first(const tb__library_choice *choice, const tb__symbol *symbols, size_t nsymbols, char *why,
                             size_t room) {
    const char *list = choice->list;
    void *library = NULL;
    if (!list || !*list || dlopen(choice->usual, RTLD_NOW | RTLD_LOCAL | RTLD_NOLOAD))
        list = choice->usual;
    for (size_t n; !library && *list; list += n + (list[n] == ':')) {
        char name[512];
        n = strcspn(list, ":");
        snprintf(name, sizeof name, "%.*s", (int)n, list);
        choice->look(name);
        library = tb__library_load(name, symbols, nsymbols, why, room);
    }
    if (library)
        why[0] = '\0';
    return library;
}
