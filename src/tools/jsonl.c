/* Files of JSON lines: one line of output for each, flushed at once, so that the tool can be used in a pipe. A bad line
 * does not affect the others. */
#include "tools/tools.h"

#include <ctype.h>
#include <errno.h>
#include <stdio.h>
#include <string.h>

static bool is_blank(const char *line, size_t length) {
    for (size_t i = 0; i < length; i++) {
        if (!isspace((unsigned char)line[i]))
            return false;
    }
    return true;
}

static tb_status answer_line(const char *line, size_t length, tb_status (*answer)(const json_t *, tb__text *),
                             tb__text *out) {
    json_error_t error;
    if (is_blank(line, length))
        return tb__fail(TB_INVALID, "the line is blank");
    json_t *json = json_loadb(line, length, JSON_REJECT_DUPLICATES, &error);
    if (!json)
        return tb__fail(TB_INVALID, "not JSON, at byte %d (column %d): %s", error.position, error.column, error.text);
    tb_status status =
        json_is_object(json) ? answer(json, out) : tb__fail(TB_INVALID, "the line is JSON, but not an object");
    json_decref(json);
    if (status == TB_OK && out->failed)
        return tb__fail(TB_NO_MEMORY, "out of memory while writing the answer");
    return status;
}

int tool_answer_lines(const char *path, tb_status (*answer)(const json_t *line, tb__text *out)) {
    bool is_stdin = strcmp(path, "-") == 0;
    FILE *file = is_stdin ? stdin : fopen(path, "re");
    if (!file)
        return tool_fail(TOOL_BAD_INPUT, "can't read %s: %s", path, strerror(errno));
    char *line = NULL;
    size_t capacity = 0;
    int exit_status = TOOL_OK;
    ssize_t length;
    while (exit_status == TOOL_OK && (errno = 0, length = getline(&line, &capacity, file)) >= 0) {
        bool is_tail = line[length - 1] != '\n'; /* what follows the last line, unless it is one itself */
        if (is_tail && is_blank(line, (size_t)length))
            break;
        tb__text out = {0};
        if (answer_line(line, (size_t)length, answer, &out) != TB_OK) {
            tb__text_fini(&out);
            tb__text_add(&out, "{\"error\":");
            tb__text_add_json(&out, tb_error_detail());
            tb__text_add(&out, "}");
        }
        tb__text_add(&out, "\n");
        exit_status = tool_print(&out);
    }
    if (exit_status == TOOL_OK && !feof(file))
        exit_status = tool_fail(TOOL_BAD_INPUT, "can't read %s: %s", is_stdin ? "standard input" : path,
                                strerror(errno ? errno : EIO));
    free(line);
    if (!is_stdin)
        fclose(file);
    return exit_status;
}
