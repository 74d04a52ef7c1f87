/* A growing string, and a cursor for reading one. */
#include "base/text.h"

#include "base/mem.h"

#include <ctype.h>
#include <errno.h>
#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <strings.h>

void tb__text_add(tb__text *text, const char *format, ...) {
    va_list args;
    for (int round = 0; round < 2 && !text->failed; round++) {
        size_t room = text->capacity - text->count;
        va_start(args, format);
        int n = vsnprintf(text->data ? text->data + text->count : NULL, text->data ? room : 0, format, args);
        va_end(args);
        if (n < 0) {
            text->failed = true;
        } else if ((size_t)n < room) {
            text->count += (size_t)n;
            return;
        } else if (!tb__vec_grow((void **)&text->data, &text->capacity, text->count + (size_t)n + 1, 1)) {
            text->failed = true;
        }
    }
}

/* The length of the UTF-8 character that begins here, or 0 if none does. */
static int utf8_length(const unsigned char *s) {
    int length = s[0] < 0x80 ? 1 : s[0] < 0xC2 ? 0 : s[0] < 0xE0 ? 2 : s[0] < 0xF0 ? 3 : s[0] < 0xF5 ? 4 : 0;
    for (int i = 1; i < length; i++) {
        if ((s[i] & 0xC0) != 0x80)
            return 0;
    }
    bool is_surrogate = s[0] == 0xED && length == 3 && s[1] >= 0xA0;
    bool is_overlong = (s[0] == 0xE0 && s[1] < 0xA0) || (s[0] == 0xF0 && s[1] < 0x90);
    bool is_beyond = s[0] == 0xF4 && length == 4 && s[1] >= 0x90;
    return is_surrogate || is_overlong || is_beyond ? 0 : length;
}

int tb__utf8_length(const char *string) {
    return utf8_length((const unsigned char *)string);
}

bool tb__is_utf8(const char *string) {
    for (int length; *string; string += length) {
        length = utf8_length((const unsigned char *)string);
        if (length == 0)
            return false;
    }
    return true;
}

void tb__text_tame(char *string) {
    for (unsigned char *s = (unsigned char *)string; *s; s++) {
        if (s[0] == 0xC2 && s[1] >= 0x80 && s[1] < 0xA0) /* U+0080 to U+009F, control characters for terminals, too */
            s[0] = s[1] = '?';
        else if (*s < 0x20 || *s == 0x7F)
            *s = isspace(*s) ? ' ' : '?';
    }
}

void tb__text_add_json(tb__text *text, const char *string) {
    tb__text_add(text, "\"");
    for (const char *s = string; *s;) {
        unsigned char c = (unsigned char)*s;
        int length = utf8_length((const unsigned char *)s);
        if (length == 0)
            tb__text_add(text, "?");
        else if (c == '"' || c == '\\')
            tb__text_add(text, "\\%c", c);
        else if (c < 0x20)
            tb__text_add(text, "\\u%04x", c);
        else
            tb__text_add(text, "%.*s", length, s);
        s += length ? length : 1;
    }
    tb__text_add(text, "\"");
}

void tb__text_fini(tb__text *text) {
    free(text->data);
    *text = (tb__text){0};
}

tb_status tb__text_take(tb__text *text, char **out) {
    tb__text_add(text, "%s", "");
    if (text->failed) {
        tb__text_fini(text);
        return tb__fail(TB_NO_MEMORY, "out of memory while writing text");
    }
    *out = text->data;
    *text = (tb__text){0};
    return TB_OK;
}

void tb__skip_space(const char **at) {
    while (isspace((unsigned char)**at))
        (*at)++;
}

bool tb__accept(const char **at, char c) {
    tb__skip_space(at);
    if (**at != c)
        return false;
    (*at)++;
    return true;
}

bool tb__read_int(const char **at, int64_t *out) {
    tb__skip_space(at);
    const char *digits = *at + (**at == '-' || **at == '+');
    if (!isdigit((unsigned char)*digits))
        return false;
    char *end;
    errno = 0;
    intmax_t value = strtoimax(*at, &end, 10);
    if (errno == ERANGE)
        return false;
    *at = end;
    *out = value;
    return true;
}

/* Bytes of a unit of this name; 0: there is none. */
static int64_t unit_nbytes(const char *unit) {
    static const struct {
        const char *name;
        int64_t nbytes;
    } units[] = {
        {"", 1},
        {"B", 1},
        {"k", 1 << 10},
        {"KiB", 1 << 10},
        {"M", 1 << 20},
        {"MiB", 1 << 20},
        {"G", 1 << 30},
        {"GiB", 1 << 30},
        {"T", 1LL << 40},
        {"TiB", 1LL << 40},
        {"kB", 1000},
        {"MB", 1000 * 1000},
        {"GB", 1000000000},
        {"TB", 1000000000000},
    };
    for (size_t i = 0; i < sizeof units / sizeof *units; i++) {
        if (strcasecmp(unit, units[i].name) == 0)
            return units[i].nbytes;
    }
    return 0;
}

tb_status tb__read_size(const char *text, int64_t *out) {
    const char *at = text, *fraction = NULL;
    size_t ndigits = 0;
    int64_t value, part = 0;
    bool is_size = tb__read_int(&at, &value) && value >= 0;
    if (is_size && *at == '.') {
        fraction = at + 1;
        ndigits = strspn(fraction, "0123456789");
        at = fraction + ndigits;
    }
    tb__skip_space(&at);
    int64_t scale = is_size ? unit_nbytes(at) : 0;
    if (scale == 0 || (fraction && (scale == 1 || ndigits == 0)))
        return tb__fail(TB_INVALID, "'%.60s' is not a size such as 1048576, 16MiB, 30MB or 1.5GiB", text);
    for (size_t i = ndigits; i > 0; i--) /* below `scale` after each digit; rounded down as a whole */
        part = ((fraction[i - 1] - '0') * scale + part) / 10;
    if (value > ((INT64_C(1) << 62) - part) / scale)
        return tb__fail(TB_TOO_BIG, "size '%.60s' is more than 2^62 bytes", text);
    *out = value * scale + part;
    return TB_OK;
}

int tb__compare_strings(const void *a, const void *b) {
    return strcmp(*(const char *const *)a, *(const char *const *)b);
}
