/* tensorbus store: serves the embedded store until it is told to end. */
#include "base/descriptors.h"
#include "base/process.h"
#include "bus/store/server.h"
#include "tools/agents.h"

#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { LISTEN, TOKEN_FILE, INSECURE, WAIT, NOPTIONS };

enum { MOST_SECONDS = 1000000000, RETRY_MS = 100 };

static const tool_option options[NOPTIONS + 1] = {
    [LISTEN] = {"listen", "URL", "unix:/path/to.sock or tcp://host:port; port 0: any free port"},
    [TOKEN_FILE] = {"token-file", "FILE", "its first line is the token; clients without it are refused"},
    [INSECURE] = {"insecure", NULL, "accept all clients without a token, also from other machines"},
    [WAIT] = {"wait", "SECONDS", "how long to wait if another process serves the URL; default: 0"},
};

static int read_wait(const char *text, int64_t *out) {
    char *end;
    errno = 0;
    long seconds = strtol(text, &end, 10);
    if (errno || end == text || *end || seconds < 0 || seconds > MOST_SECONDS)
        return tool_fail(TOOL_BAD_INPUT, "--wait takes a number from 0 to %d, not '%.60s'", MOST_SECONDS, text);
    *out = (int64_t)seconds * 1000;
    return TOOL_OK;
}

/* Serves as soon as nobody else does. TB_CANCELLED: it was told to end before. */
static tb_status serve(const char *url, const char *token, bool is_insecure, int64_t wait_ms, const sigset_t *ends,
                       tb__store_server **out) {
    const struct timespec nap = {.tv_nsec = RETRY_MS * 1000000};
    int64_t deadline_ms = tb__now_ms() + wait_ms;
    tb_status status;
    bool has_told = false;
    while ((status = is_insecure ? tb__store_server_start_insecure(url, out)
                                 : tb__store_server_start(url, token, out)) == TB_CONFLICT &&
           tb__now_ms() < deadline_ms) {
        if (!has_told)
            tool_fail(TOOL_OK, "%s; waiting until it ends", tb_error_detail());
        has_told = true;
        if (sigtimedwait(ends, NULL, &nap) > 0)
            return TB_CANCELLED;
    }
    return status;
}

static int run(const tb__config *config, const char *const *value) {
    (void)config;
    char token[TB__TOKEN_ROOM] = "";
    int64_t wait_ms = 0;
    if (!value[LISTEN])
        return tool_fail(TOOL_BAD_INPUT, "--listen is missing; see `tensorbus store --help`");
    if (value[TOKEN_FILE] && value[INSECURE])
        return tool_fail(TOOL_BAD_INPUT, "--insecure is for a store without a token: leave out one of the two");
    if (value[TOKEN_FILE] && tool_read_token(value[TOKEN_FILE], token) != TB_OK)
        return tool_fail(TOOL_BAD_INPUT, "%s", tb_error_detail());
    if (value[WAIT]) {
        int exit_status = read_wait(value[WAIT], &wait_ms);
        if (exit_status != TOOL_OK)
            return exit_status;
    }
    tb__descriptor_limit_raise(); /* one for each client */
    /* Before the first thread, and before anybody can know that it serves. */
    sigset_t ends;
    sigemptyset(&ends);
    sigaddset(&ends, SIGTERM);
    sigaddset(&ends, SIGINT);
    sigprocmask(SIG_BLOCK, &ends, NULL);
    tb__store_server *server;
    tb_status status = serve(value[LISTEN], token, value[INSECURE] != NULL, wait_ms, &ends, &server);
    if (status == TB_CANCELLED)
        return TOOL_OK;
    if (status != TB_OK)
        return tool_fail_status(status);
    tb__text out = {0};
    tb__text_add(&out, "serving %s\n", tb__store_server_url(server));
    int exit_status = tool_print(&out), number = 0;
    while (exit_status == TOOL_OK && sigwait(&ends, &number) != 0)
        ;
    tb__store_server_stop(server);
    return exit_status;
}

const tool_command tool_store = {
    .name = "store",
    .summary = "serve the store where processes find each other",
    .usage = "--listen URL [--token-file FILE | --insecure] [--wait SECONDS]",
    .details =
        "Processes that join with the same URL are on one bus. Without this command the first of them serves the\n"
        "store, and if it ends, another one does. The store is kept in memory only: when it comes back empty, the\n"
        "processes write their entries again.\n"
        "\n"
        "Prints \"serving URL\", and runs until SIGTERM or SIGINT. Only processes of the same user can connect to a\n"
        "Unix socket. If another process serves the URL, for example one that has taken over from a store that\n"
        "ended, the command fails; with --wait it prints that, and waits until the other process ends.\n"
        "\n"
        "A token has 32 to 510 bytes; `openssl rand -hex 32` makes one. It is never sent over the network. A store\n"
        "that other machines can connect to needs a token, or --insecure. A namespace in the URL is ignored here.\n"
        "etcd can be used instead of this command: give all processes etcd://host:port.\n",
    .options = options,
    .run = run,
};
