/* tensorbus top: a live screen of what agents do. The terminal is used with plain ANSI codes, and given back as it was:
 * signals are read from a descriptor, so that every way out is the same. */
#include "tools/agents.h"

#include "base/descriptors.h"
#include "base/process.h"

#include <errno.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/signalfd.h>
#include <termios.h>
#include <unistd.h>

enum { SOCKET, INTERVAL, ONCE, TOKEN_FILE };

enum { ONCE_MS = 5000, LIVE_MS = 1000 }; /* what an agent gets to answer */

static const tool_option options[] = {
    [SOCKET] = {"socket", "PATH", "show only the agent at this socket"},
    [INTERVAL] = {"interval", "SECONDS", "time between two updates; default: 1"},
    [ONCE] = {"once", NULL, "print one screen without colours, and exit"},
    [TOKEN_FILE] = {"token-file", "FILE", "its first line is the token of the agents"},
    {NULL, NULL, NULL},
};

static const char details[] =
    "Shows all agents of this user, as `tensorbus status` finds them, until q or Ctrl-C is pressed. Speeds, in\n"
    "GB/s, are averages since the previous update; those of pairs and peers count completed transfers only.\n"
    "Data between two of these agents counts as sent and as received; the first line shows both. Peers are\n"
    "sorted by rank. If standard output is no terminal, the command prints one screen, as with --once.\n";

static tb_status look(tool_agents *agents, int timeout_ms) {
    TB_TRY(tool_agents_find(agents));
    tool_agents_ask(agents, timeout_ms);
    for (size_t i = 0; i < agents->list.count; i++)
        tool_json_clean(agents->list.item[i].report);
    return TB_OK;
}

/* ---- Once ------------------------------------------------------------------------------------------------------ */

static int show_once(tool_agents *agents) {
    size_t nreports = 0;
    const char *why = NULL;
    tb_status status = look(agents, ONCE_MS);
    if (status != TB_OK)
        return tool_fail_status(status);
    for (size_t i = 0; i < agents->list.count; i++) {
        const tool_agent_view *view = &agents->list.item[i];
        nreports += view->report != NULL;
        why = view->report ? why : view->why;
    }
    if (nreports == 0)
        return why ? tool_fail(TOOL_FAILED, "%s", why)
                   : tool_fail(TOOL_FAILED, "there is no agent in %s", agents->folder);
    tb__text out = {0};
    setenv("NO_COLOR", "1", 1);
    top_draw(&out, agents);
    return tool_print(&out);
}

/* ---- Live ------------------------------------------------------------------------------------------------------ */

typedef struct terminal {
    struct termios before;
    bool has_keys; /* standard input is a terminal, too */
    int signals;
} terminal;

static bool write_all(const char *data, size_t count) {
    while (count > 0) {
        ssize_t n = write(STDOUT_FILENO, data, count);
        if (n < 0 && errno != EINTR)
            return false;
        data += n > 0 ? n : 0;
        count -= n > 0 ? (size_t)n : 0;
    }
    return true;
}

/* Another screen than the shell's, no cursor, keys at once and unseen. */
static void take_terminal(terminal *t) {
    static const char begin[] = "\033[?1049h\033[?25l";
    t->has_keys = isatty(STDIN_FILENO) && tcgetattr(STDIN_FILENO, &t->before) == 0;
    if (t->has_keys) {
        struct termios raw = t->before;
        raw.c_lflag &= ~(tcflag_t)(ICANON | ECHO);
        tcsetattr(STDIN_FILENO, TCSANOW, &raw);
    }
    write_all(begin, sizeof begin - 1);
}

static void give_terminal_back(const terminal *t) {
    static const char end[] = "\033[?25h\033[?1049l";
    write_all(end, sizeof end - 1);
    if (t->has_keys)
        tcsetattr(STDIN_FILENO, TCSANOW, &t->before);
}

/* The lines that fit, each up to the last column; what was there before is overwritten. */
static bool paint(const char *text) {
    struct winsize size = {0};
    tb__text out = {0};
    if (ioctl(STDOUT_FILENO, TIOCGWINSZ, &size) != 0 || size.ws_row == 0 || size.ws_col == 0)
        size = (struct winsize){.ws_row = 24, .ws_col = 80};
    tb__text_add(&out, "\033[H");
    for (int row = 0; row < size.ws_row && *text; row++) {
        int column = 0;
        tb__text_add(&out, "%s", row ? "\r\n" : "");
        while (*text && *text != '\n') {
            int length = tb__utf8_length(text);
            if (*text == '\033')
                length = (int)strcspn(text, "m") + 1; /* a colour takes no room */
            else
                column++;
            length = length > 0 ? length : 1;
            if (column <= size.ws_col)
                tb__text_add(&out, "%.*s", length, text);
            text += length;
        }
        text += *text == '\n';
        tb__text_add(&out, "\033[K");
    }
    tb__text_add(&out, "\033[J");
    bool ok = !out.failed && write_all(out.data, out.count);
    tb__text_fini(&out);
    return ok;
}

typedef enum why_awake { TIME, END, STOP, RESIZE } why_awake;

static why_awake read_signal(const terminal *t) {
    struct signalfd_siginfo info;
    if (read(t->signals, &info, sizeof info) != (ssize_t)sizeof info)
        return END;
    return info.ssi_signo == SIGTSTP ? STOP : info.ssi_signo == SIGWINCH ? RESIZE : END;
}

static why_awake sleep_until(const terminal *t, int64_t when_ms) {
    for (;;) {
        struct pollfd fds[] = {{.fd = t->signals, .events = POLLIN},
                               {.fd = t->has_keys ? STDIN_FILENO : -1, .events = POLLIN}};
        int n = poll(fds, 2, tb__ms_until(when_ms));
        char key;
        if (n == 0)
            return TIME;
        if (n < 0 && errno != EINTR)
            return END;
        if (n > 0 && fds[0].revents)
            return read_signal(t);
        if (n > 0 && fds[1].revents && (read(STDIN_FILENO, &key, 1) != 1 || key == 'q'))
            return END;
    }
}

static tb_status watch_signals(terminal *t) {
    static const int numbers[] = {SIGINT, SIGTERM, SIGHUP, SIGQUIT, SIGTSTP, SIGWINCH};
    sigset_t set;
    sigemptyset(&set);
    for (size_t i = 0; i < sizeof numbers / sizeof *numbers; i++)
        sigaddset(&set, numbers[i]);
    sigprocmask(SIG_BLOCK, &set, NULL);
    t->signals = signalfd(-1, &set, SFD_CLOEXEC);
    return t->signals >= 0 ? TB_OK : tb__fail(TB_IO, "signalfd: %s", tb__errno_text(errno));
}

static tb_status show_live(tool_agents *agents, int interval_ms) {
    terminal t = {0};
    TB_TRY(watch_signals(&t));
    take_terminal(&t);
    tb_status status = TB_OK;
    for (why_awake why = TIME; why != END && status == TB_OK;) {
        int64_t next_ms = tb__now_ms() + interval_ms;
        tb__text out = {0};
        char *screen = NULL;
        status = look(agents, LIVE_MS);
        if (status == TB_OK) {
            top_draw(&out, agents);
            if (agents->list.count == 0)
                tb__text_add(&out, "\nthere is no agent in %s\n", agents->folder);
            status = tb__text_take(&out, &screen);
        }
        if (status == TB_OK && !paint(screen))
            status = tb__fail(TB_IO, "can't write to standard output: %s", strerror(errno));
        while (status == TB_OK && (why = sleep_until(&t, next_ms)) != TIME && why != END) {
            if (why == STOP) {
                give_terminal_back(&t);
                raise(SIGSTOP);
                take_terminal(&t);
            }
            paint(screen);
        }
        free(screen);
    }
    give_terminal_back(&t);
    close(t.signals);
    return status;
}

/* ---- The command ----------------------------------------------------------------------------------------------- */

static tb_status read_interval(const char *text, int *out) {
    char *end;
    errno = 0;
    double seconds = strtod(text, &end);
    if (errno || end == text || *end || !(seconds >= 0.1 && seconds <= 3600))
        return tb__fail(TB_INVALID, "--interval takes seconds from 0.1 to 3600, not '%.60s'", text);
    *out = (int)(seconds * 1e3);
    return TB_OK;
}

static int run(const tb__config *config, const char *const *value) {
    (void)config;
    const char *kind = getenv("TERM");
    bool is_live = !value[ONCE] && isatty(STDOUT_FILENO) && kind && strcmp(kind, "dumb") != 0;
    char token[TB__TOKEN_ROOM];
    int interval_ms = 1000, exit_status = TOOL_OK;
    tool_agents agents = {.socket = value[SOCKET], .name = "tensorbus top"};
    tb_status status = value[INTERVAL] ? read_interval(value[INTERVAL], &interval_ms) : TB_OK;
    if (status == TB_OK && value[TOKEN_FILE]) {
        status = tool_read_token(value[TOKEN_FILE], token);
        agents.token = token;
    }
    if (status == TB_OK && is_live)
        status = show_live(&agents, interval_ms);
    else if (status == TB_OK)
        exit_status = show_once(&agents);
    tool_agents_fini(&agents);
    return status == TB_OK ? exit_status : tool_fail_status(status);
}

const tool_command tool_top = {
    .name = "top",
    .summary = "watch agents: transfers, speeds, pairs, clients",
    .usage = "[--socket PATH] [--interval SECONDS] [--once] [--token-file FILE]",
    .details = details,
    .options = options,
    .run = run,
};
