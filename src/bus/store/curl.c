/* Finds libcurl's functions. */
#include "bus/store/curl.h"

#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <string.h>

static pthread_once_t once = PTHREAD_ONCE_INIT;
static tb__curl curl;
static char failure[256]; /* empty: it is loaded */

#define SLOT(name)                                                                                                     \
    { "curl_" #name, &curl.name, sizeof curl.name }

static void load(void) {
    const struct {
        const char *name;
        void *slot;
        size_t nbytes;
    } slots[] = {
        SLOT(global_init),         SLOT(easy_init),     SLOT(easy_cleanup), SLOT(easy_setopt),
        SLOT(easy_getinfo),        SLOT(easy_strerror), SLOT(slist_append), SLOT(slist_free_all),
        SLOT(multi_init),          SLOT(multi_cleanup), SLOT(multi_setopt), SLOT(multi_add_handle),
        SLOT(multi_remove_handle), SLOT(multi_perform), SLOT(multi_poll),   SLOT(multi_wakeup),
        SLOT(multi_info_read),
    };
    void *library = dlopen("libcurl.so.4", RTLD_NOW | RTLD_LOCAL);
    if (!library) {
        snprintf(failure, sizeof failure, "%s", dlerror());
        return;
    }
    for (size_t i = 0; i < sizeof slots / sizeof *slots; i++) {
        void *function = dlsym(library, slots[i].name);
        if (!function) {
            snprintf(failure, sizeof failure, "%s", dlerror());
            return;
        }
        memcpy(slots[i].slot, &function, slots[i].nbytes);
    }
    CURLcode code = curl.global_init(CURL_GLOBAL_DEFAULT);
    if (code != CURLE_OK)
        snprintf(failure, sizeof failure, "curl_global_init: %s", curl.easy_strerror(code));
}

tb_status tb__curl_load(const tb__curl **out) {
    pthread_once(&once, load);
    if (failure[0])
        return tb__fail(TB_IO, "etcd is reached through libcurl, which can't be loaded: %s", failure);
    *out = &curl;
    return TB_OK;
}
