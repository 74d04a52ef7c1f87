/* Tables with aligned columns, and optional colours. */
#include "tools/tools.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

static const char *code(const char *escape) {
    const char *no_color = getenv("NO_COLOR"), *terminal = getenv("TERM");
    bool is_wanted = isatty(STDOUT_FILENO) && !(no_color && *no_color) && terminal && strcmp(terminal, "dumb") != 0;
    return is_wanted ? escape : "";
}

const char *tool_bold(void) {
    return code("\033[1m");
}

const char *tool_dim(void) {
    return code("\033[2m");
}

const char *tool_plain(void) {
    return code("\033[0m");
}

void tool_table_column(tool_table *table, const char *title, bool is_number) {
    table->column[table->ncolumns].title = title;
    table->column[table->ncolumns].is_number = is_number;
    table->column[table->ncolumns].width = (int)strlen(title);
    table->ncolumns++;
}

void tool_table_add_columns(tool_table *table, const char *const *titles, size_t ntitles) {
    for (size_t i = 0; i < ntitles; i++)
        tool_table_column(table, titles[i] + (*titles[i] == '#'), *titles[i] == '#');
}

void tool_table_width(tool_table *table, int width) {
    table->column[table->ncolumns - 1].width = width;
}

static void add_cell(tool_table *table, char *cell) {
    if (!cell || !tb__vec_push(&table->cells, cell)) {
        free(cell);
        table->failed = true;
    }
}

void tool_table_cell(tool_table *table, const char *format, ...) {
    char *cell = NULL;
    va_list args;
    va_start(args, format);
    if (vasprintf(&cell, format, args) < 0)
        cell = NULL;
    va_end(args);
    add_cell(table, cell);
}

void tool_table_take(tool_table *table, tb__text *cell) {
    char *string = NULL;
    add_cell(table, tb__text_take(cell, &string) == TB_OK ? string : NULL);
}

static void add_row(const tool_table *table, const char *const *cells, tb__text *out) {
    int blanks = 0; /* held back, so that no line ends in blanks */
    for (int c = 0; c < table->ncolumns; c++) {
        int length = (int)strlen(cells[c]), padding = table->column[c].width - length;
        bool is_number = table->column[c].is_number;
        padding = padding > 0 ? padding : 0;
        blanks += is_number ? padding : 0;
        if (length > 0) {
            tb__text_add(out, "%*s%s", blanks, "", cells[c]);
            blanks = 0;
        }
        blanks += (is_number ? 0 : padding) + 2;
    }
    tb__text_add(out, "\n");
}

void tool_table_flush(tool_table *table, tb__text *out) {
    const char *titles[TOOL_MAX_COLUMNS] = {NULL};
    size_t n = (size_t)table->ncolumns;
    for (size_t c = 0; c < n; c++) {
        titles[c] = table->column[c].title;
        for (size_t i = c; i < table->cells.count; i += n) {
            int length = (int)strlen(table->cells.item[i]);
            table->column[c].width = length > table->column[c].width ? length : table->column[c].width;
        }
    }
    if (!table->is_begun) {
        tb__text_add(out, "%s", tool_bold());
        add_row(table, titles, out);
        tb__text_add(out, "%s", tool_plain());
        table->is_begun = true;
    }
    for (size_t i = 0; i + n <= table->cells.count; i += n)
        add_row(table, (const char *const *)table->cells.item + i, out);
    out->failed |= table->failed;
    for (size_t i = 0; i < table->cells.count; i++)
        free(table->cells.item[i]);
    table->cells.count = 0;
}

void tool_table_finish(tool_table *table, tb__text *out) {
    tool_table_flush(table, out);
    free(table->cells.item);
    *table = (tool_table){0};
}

void tool_table_finish_below(tool_table *table, tb__text *out) {
    tb__text_add(out, "\n");
    tool_table_finish(table, out);
}
