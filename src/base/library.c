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
