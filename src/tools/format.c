/* Formats figures, ranks, boxes, layouts and names. */
#include "tools/tools.h"

#include "format/checkpoint.h"

#include <ctype.h>
#include <inttypes.h>
#include <stdio.h>
#include <string.h>

tool_size_text tool_size(int64_t nbytes) {
    static const char *const units[] = {"B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"};
    tool_size_text out;
    int unit = 0;
    double value = (double)nbytes;
    for (; value >= 1024 && unit < 6; unit++)
        value /= 1024;
    if (nbytes == 0)
        snprintf(out.text, sizeof out.text, "0");
    else
        snprintf(out.text, sizeof out.text, "%.*f %s", value == (double)(int64_t)value || value >= 100 ? 0 : 1, value,
                 units[unit]);
    return out;
}

void tool_add_size(tb__text *out, int64_t nbytes) {
    if (nbytes >= 1024)
        tb__text_add(out, "%s (%" PRId64 " bytes)", tool_size(nbytes).text, nbytes);
    else
        tb__text_add(out, "%" PRId64 " byte%s", nbytes, nbytes == 1 ? "" : "s");
}

void tool_add_shape(tb__text *out, const tb_shape *shape) {
    if (shape->ndim == 0)
        tb__text_add(out, "scalar");
    for (int d = 0; d < shape->ndim; d++)
        tb__text_add(out, "%s%" PRId64, d ? "," : "", shape->dim[d]);
}

void tool_add_ranks(tb__text *out, const int32_t *ranks, size_t count, size_t most) {
    size_t i = 0;
    for (size_t shown = 0; i < count && shown < most; shown++) {
        size_t run = 1;
        while (i + run < count && ranks[i + run] == ranks[i] + (int32_t)run)
            run++;
        run = run > 2 ? run : 1; /* two neighbours are shorter as 4,5 */
        tb__text_add(out, "%s%" PRId32, i ? "," : "", ranks[i]);
        if (run > 1)
            tb__text_add(out, "..%" PRId32, ranks[i + run - 1]);
        i += run;
    }
    if (i < count)
        tb__text_add(out, ", %zu more", count - i);
}

void tool_add_box(tb__text *out, int ndim, const int64_t *start, const int64_t *len) {
    tb__text_add(out, "[");
    for (int d = 0; d < ndim; d++)
        tb__text_add(out, "%s%" PRId64 ":%" PRId64, d ? ", " : "", start[d], start[d] + len[d]);
    tb__text_add(out, "]");
}

/* Names may contain anything; control characters must not reach a terminal. */
void tool_add_name(tb__text *out, const char *name) {
    for (const char *c = name; *c; c++)
        tb__text_add(out, "%c", iscntrl((unsigned char)*c) ? '?' : *c);
}

void tool_add_unindexed(tb__text *out, const tb__checkpoint *model) {
    enum { MOST = 8 };
    size_t n = model->nunindexed;
    tb__text_add(out, "%zu tensor%s of %s:", n, n == 1 ? "" : "s",
                 model->kind == TB__CHECKPOINT_MODEL ? "files that are not read"
                                                     : "the files, which the index does not have");
    for (size_t i = 0; i < n && i < MOST; i++) {
        tb__text_add(out, i ? ", " : " ");
        tool_add_name(out, model->unindexed[i].name ? model->unindexed[i].name : "can't be read");
        tb__text_add(out, " (");
        tool_add_name(out, model->unindexed[i].file);
        tb__text_add(out, ")");
    }
    if (n > MOST)
        tb__text_add(out, " and %zu more", n - MOST);
}

void tool_add_unindexed_json(tb__text *out, const tb__checkpoint *model) {
    tb__text_add(out, "[");
    for (size_t i = 0; i < model->nunindexed; i++) {
        tb__text_add(out, i ? ",{\"file\":" : "{\"file\":");
        tb__text_add_json(out, model->unindexed[i].file);
        if (model->unindexed[i].name) {
            tb__text_add(out, ",\"name\":");
            tb__text_add_json(out, model->unindexed[i].name);
        }
        tb__text_add(out, "}");
    }
    tb__text_add(out, "]");
}

void tool_add_others(tb__text *out, const tb__rank_files *ranks) {
    enum { MOST = 8 };
    size_t n = ranks->nothers;
    tb__text_add(out, "%zu file%s of no rank:", n, n == 1 ? "" : "s");
    for (size_t i = 0; i < n && i < MOST; i++) {
        tb__text_add(out, i ? ", " : " ");
        tool_add_name(out, ranks->others[i]);
    }
    if (n > MOST)
        tb__text_add(out, " and %zu more", n - MOST);
}

void tool_add_others_json(tb__text *out, const tb__rank_files *ranks) {
    tb__text_add(out, "[");
    for (size_t i = 0; i < ranks->nothers; i++) {
        tb__text_add(out, i ? ",{\"file\":" : "{\"file\":");
        tb__text_add_json(out, ranks->others[i]);
        tb__text_add(out, "}");
    }
    tb__text_add(out, "]");
}

void tool_add_layout(tb__text *out, const tb_layout *layout) {
    enum { MOST = 160 };
    char *text;
    if (tb_layout_format(layout, &text) != TB_OK) {
        out->failed = true;
        return;
    }
    tb__text_add(out, strlen(text) > MOST ? "%.*s..." : "%.*s", MOST, text);
    free(text);
}

int64_t tool_read_kib(const char *path, const char *key) {
    char line[128];
    size_t length = strlen(key);
    int64_t kib = 0;
    FILE *file = fopen(path, "re");
    while (file && kib == 0 && fgets(line, sizeof line, file)) {
        const char *at = line + length;
        if (strncmp(line, key, length) == 0 && !tb__read_int(&at, &kib))
            kib = 0;
    }
    if (file)
        fclose(file);
    return kib * 1024;
}
