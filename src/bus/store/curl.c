/* Finds libcurl's functions. */
#include "bus/store/curl.h"

#include "base/library.h"

#include <pthread.h>
#include <stdio.h>

static pthread_once_t once = PTHREAD_ONCE_INIT;
static tb__curl curl;
static char failure[256]; /* empty: it is loaded */

#define SLOT(name)                                                                                                     \
    { "curl_" #name, &curl.name, sizeof curl.name }

static void load_curl(void) {
    const tb__symbol slots[] = {
        SLOT(global_init),         SLOT(easy_init),     SLOT(easy_cleanup), SLOT(easy_setopt),
        SLOT(easy_getinfo),        SLOT(easy_strerror), SLOT(slist_append), SLOT(slist_free_all),
        SLOT(multi_init),          SLOT(multi_cleanup), SLOT(multi_setopt), SLOT(multi_add_handle),
        SLOT(multi_remove_handle), SLOT(multi_perform), SLOT(multi_poll),   SLOT(multi_wakeup),
        SLOT(multi_info_read),
    };
    if (!tb__library_load("libcurl.so.4", slots, sizeof slots / sizeof *slots, failure, sizeof failure))
        return;
    CURLcode code = curl.global_init(CURL_GLOBAL_DEFAULT);
    if (code != CURLE_OK)
        snprintf(failure, sizeof failure, "curl_global_init: %s", curl.easy_strerror(code));
}

tb_status tb__curl_load(const tb__curl **out) {
    pthread_once(&once, load_curl);
    if (failure[0])
        return tb__fail(TB_IO, "etcd is reached through libcurl, which can't be loaded: %s", failure);
    *out = &curl;
    return TB_OK;
}
