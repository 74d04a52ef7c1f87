/* Connects to a store, or serves it if no process does. */
#include "bus/store/address.h"
#include "bus/store/server.h"

#include <stdio.h>

/* There is no notification when a server starts to listen, so attempts are repeated, with growing delays. */
enum { FIRST_DELAY_MS = 2, LONGEST_DELAY_MS = 100 };

/* A store that has not answered for this long does not answer; before that, the deadline may have come too early. */
enum { SILENT_MS = 1000 };

/* TB_IO: nobody listened. TB_LOST: the server ended just then. The next attempt may succeed. */
static bool should_retry_open(tb_status status) {
    return status == TB_IO || status == TB_LOST;
}

/* Another process was faster, or the address is another machine's. */
static bool is_for_others(tb_status status) {
    return status == TB_CONFLICT || status == TB_REFUSED;
}

static tb_status serve_and_open(const char *url, const char *token, const tb__store_secret *secret, int timeout_ms,
                                tb__store **store, tb__store_server **server) {
    tb__store_server *mine = NULL;
    if (!tb__store_is_embedded(url))
        return TB_REFUSED;
    /* The caller has just tried to connect. */
    TB_TRY(tb__store_server_start_limited(url, token, &(tb__store_limits){0}, &mine));
    tb_status status = tb__store_open_until(url, token, secret, tb__now_ms() + timeout_ms, timeout_ms, store);
    if (status != TB_OK) {
        tb__store_server_stop(mine);
        return tb__fail_within(TB_IO, "the store's own server does not answer");
    }
    *server = mine;
    return TB_OK;
}

/* `is_for_later`: no process serves yet, and this process can't. */
static tb_status open_or_serve_now(const char *url, const char *token, const tb__store_secret *secret,
                                   int64_t deadline_ms, int timeout_ms, tb__store **store, tb__store_server **server,
                                   bool *is_for_later) {
    tb_status status = tb__store_open_until(url, token, secret, deadline_ms, timeout_ms, store);
    *is_for_later = false;
    if (status == TB_OK)
        *server = NULL;
    if (!should_retry_open(status))
        return status;
    tb__saved_detail why = tb__save_detail();
    tb_status served = serve_and_open(url, token, secret, timeout_ms, store, server);
    *is_for_later = is_for_others(served);
    if (!*is_for_later)
        return served;
    char why_not[256] = "";
    if (served == TB_REFUSED && tb__store_is_embedded(url))
        snprintf(why_not, sizeof why_not, "; nor can this process serve it: %.200s", tb_error_detail());
    return tb__fail(status, "%.255s%s", why.text, why_not);
}

tb_status tb__store_try_open_or_serve(const char *url, const char *token, const tb__store_secret *secret,
                                      int timeout_ms, tb__store **store, tb__store_server **server) {
    bool is_for_later;
    return open_or_serve_now(url, token, secret, tb__now_ms() + timeout_ms, timeout_ms, store, server, &is_for_later);
}

tb_status tb__store_open_or_serve(const char *url, const char *token, const tb__store_secret *secret, int timeout_ms,
                                  tb__store **store, tb__store_server **server) {
    int64_t deadline_ms = tb__now_ms() + timeout_ms;
    char why[TB__STORE_MAX_URL + 256] = ""; /* of the last failed attempt */
    for (int delay_ms = FIRST_DELAY_MS;; delay_ms = delay_ms * 2 < LONGEST_DELAY_MS ? delay_ms * 2 : LONGEST_DELAY_MS) {
        bool is_for_later;
        int64_t begun_ms = tb__now_ms();
        tb_status status = open_or_serve_now(url, token, secret, deadline_ms, timeout_ms, store, server, &is_for_later);
        /* The message of an attempt that was cut short has less information than the one before. */
        bool is_cut = status == TB_TIMEOUT && *why && tb__now_ms() - begun_ms < SILENT_MS;
        if (!is_for_later && !is_cut)
            return status;
        if (!is_cut)
            snprintf(why, sizeof why, "%s", tb_error_detail());
        int left = tb__ms_until(deadline_ms);
        tb__sleep_ms(delay_ms < left ? delay_ms : left);
        if (tb__ms_until(deadline_ms) == 0)
            return tb__fail(TB_TIMEOUT, "no store within %d ms: %s", timeout_ms, why);
    }
}
