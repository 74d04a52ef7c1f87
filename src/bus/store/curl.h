/* libcurl, loaded when the first etcd store is opened. Linked in, it would bring some twenty libraries into every
 * program that uses tensorbus, and could not be had statically. */
#ifndef TB_BUS_STORE_CURL_H
#define TB_BUS_STORE_CURL_H

#include "base/error.h"

#include <curl/curl.h>

/* Its functions, without their prefix. The macros that check arguments do not apply. */
typedef struct tb__curl {
    __typeof__(&curl_global_init) global_init;
    __typeof__(&curl_easy_init) easy_init;
    __typeof__(&curl_easy_cleanup) easy_cleanup;
    CURLcode (*easy_setopt)(CURL *easy, CURLoption option, ...);
    CURLcode (*easy_getinfo)(CURL *easy, CURLINFO info, ...);
    __typeof__(&curl_easy_strerror) easy_strerror;
    __typeof__(&curl_slist_append) slist_append;
    __typeof__(&curl_slist_free_all) slist_free_all;
    __typeof__(&curl_multi_init) multi_init;
    __typeof__(&curl_multi_cleanup) multi_cleanup;
    CURLMcode (*multi_setopt)(CURLM *multi, CURLMoption option, ...);
    __typeof__(&curl_multi_add_handle) multi_add_handle;
    __typeof__(&curl_multi_remove_handle) multi_remove_handle;
    __typeof__(&curl_multi_perform) multi_perform;
    __typeof__(&curl_multi_poll) multi_poll;
    __typeof__(&curl_multi_wakeup) multi_wakeup;
    __typeof__(&curl_multi_info_read) multi_info_read;
} tb__curl;

/* Once loaded it stays. */
tb_status tb__curl_load(const tb__curl **out);

#endif
