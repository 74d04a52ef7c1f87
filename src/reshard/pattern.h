/* Patterns for names: globs and regular expressions with captures, and the place of a number in a name.
 *
 * A pattern that begins with ^ is a POSIX extended regular expression. Any other is a glob, in which * stands for any
 * characters and ? for one; as the shell has it, also [abc], [a-z] or [!abc] for one of these, or none of them, and a
 * backslash for what follows it. Either has to match the whole
 * name. What the wildcards of a glob or the groups of an expression matched is captured, in their order; the first nine
 * count. */
#ifndef TB_RESHARD_PATTERN_H
#define TB_RESHARD_PATTERN_H

#include "base/error.h"
#include "base/text.h"

#include <regex.h>

enum { TB__CAPTURES = 10 }; /* number 0 is the whole name */

typedef struct tb__pattern {
    char *text;
    bool is_regex;
    bool has_sets; /* as the shell has it */
    regex_t regex;
    int ncaptures; /* 1 to 9 can be used this far */
} tb__pattern;

typedef struct tb__capture {
    const char *start;
    size_t length;
} tb__capture;

tb_status tb__pattern_init(tb__pattern *pattern, const char *text);
tb_status tb__pattern_init_shell(tb__pattern *pattern, const char *text);
void tb__pattern_fini(tb__pattern *pattern);
bool tb__pattern_match(const tb__pattern *pattern, const char *name, tb__capture captures[TB__CAPTURES]);

/* A replacement is text with \0 to \9 for captures, and \\ for a backslash. */
tb_status tb__replacement_check(const tb__pattern *pattern, const char *replacement);
void tb__replacement_expand(const char *replacement, const tb__capture captures[TB__CAPTURES], tb__text *out);

/* Appends bytes without formatting, faster than tb__text_add: there may be tens of thousands of names. */
void tb__name_add(tb__text *text, const char *bytes, size_t count);

/* "layers.#.": finds a number at the beginning of the name or after a dot. # matches the number, * any characters but
 * dots, and a final dot also the end of the name. The first match is used. */
tb_status tb__number_check(const char *pattern);
bool tb__number_find(const char *pattern, const char *name, tb__capture *out);

#endif
