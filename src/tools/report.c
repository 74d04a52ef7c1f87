/* Output of the program: error messages on standard error, results on standard output or in a file. */
#include "tools/tools.h"

#include "base/log.h"

#include <ctype.h>
#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

static const char *command_name;
static bool is_line_shown;

void tool_set_command(const char *name) {
    command_name = name;
}

void tool_hide_line(void) {
    if (is_line_shown)
        fprintf(stderr, "\r\033[K");
    is_line_shown = false;
}

void tool_show_line(const char *format, ...) {
    const char *terminal = getenv("TERM");
    if (!isatty(STDERR_FILENO) || !terminal || strcmp(terminal, "dumb") == 0)
        return;
    tool_hide_line();
    va_list args;
    va_start(args, format);
    vfprintf(stderr, format, args);
    fflush(stderr);
    va_end(args);
    is_line_shown = true;
}

static void say(const char *format, va_list args) __attribute__((format(printf, 1, 0)));
static void say(const char *format, va_list args) {
    char sentence[1024];
    tool_hide_line();
    vsnprintf(sentence, sizeof sentence, format, args);
    for (char *c = sentence; *c; c++) { /* quoted arguments may contain anything; a message is one line */
        if (iscntrl((unsigned char)*c))
            *c = '?';
    }
    fprintf(stderr, "tensorbus%s%s: %s\n", command_name ? " " : "", command_name ? command_name : "", sentence);
}

void tool_say(const char *format, ...) {
    va_list args;
    va_start(args, format);
    say(format, args);
    va_end(args);
}

int tool_fail(int exit_status, const char *format, ...) {
    va_list args;
    va_start(args, format);
    say(format, args);
    va_end(args);
    return exit_status;
}

int tool_fail_status(tb_status status) {
    bool is_input = status == TB_INVALID || status == TB_TOO_BIG || status == TB_REFUSED;
    return tool_fail(is_input ? TOOL_BAD_INPUT : TOOL_FAILED, "%s", tb_error_detail());
}

/* Consumes the text; prints error messages itself. */
static int write_to(FILE *file, const char *name, tb__text *text) {
    if (text->failed) {
        tb__text_fini(text);
        return tool_fail(TOOL_FAILED, "out of memory");
    }
    bool ok = text->count == 0 || fwrite(text->data, 1, text->count, file) == text->count;
    ok = fflush(file) == 0 && ok;
    int error = errno;
    tb__text_fini(text);
    if (!ok && error == EPIPE && file == stdout)
        return TOOL_UNREAD;
    return ok ? TOOL_OK : tool_fail(TOOL_FAILED, "can't write to %s: %s", name, strerror(error));
}

int tool_print(tb__text *text) {
    tool_hide_line();
    return write_to(stdout, "standard output", text);
}

static int write_file(const char *path, tb__text *text) {
    FILE *file = fopen(path, "we");
    if (!file) {
        int error = errno;
        tb__text_fini(text);
        return tool_fail(TOOL_BAD_INPUT, "can't write to %s: %s", path, strerror(error));
    }
    size_t nbytes = text->count;
    int exit_status = write_to(file, path, text);
    if (fclose(file) != 0 && exit_status == TOOL_OK)
        exit_status = tool_fail(TOOL_FAILED, "can't write to %s: %s", path, strerror(errno));
    if (exit_status == TOOL_OK)
        tb__log(TB_LOG_INFO, "wrote %s, %zu bytes", path, nbytes);
    return exit_status;
}

int tool_deliver(tb__text *text, tb__text *picture, const char *path) {
    bool is_picture_printed = path && strcmp(path, "-") == 0;
    int exit_status = path && !is_picture_printed ? write_file(path, picture) : TOOL_OK;
    if (exit_status == TOOL_OK)
        exit_status = tool_print(is_picture_printed ? picture : text);
    tb__text_fini(text);
    tb__text_fini(picture);
    return exit_status;
}
