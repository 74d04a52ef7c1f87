/* Patterns for names. */
#include "reshard/pattern.h"

#include "base/mem.h"

#include <string.h>

/* Behind the ] of a set that begins here: [abc], [a-z], [!abc]; NULL: there is none. */
static const char *set_end(const char *p) {
    if (*p != '[')
        return NULL;
    p += p[1] == '!' || p[1] == '^' ? 2 : 1;
    const char *end = *p ? strchr(p + 1, ']') : NULL; /* a ] at its beginning is one of the characters */
    return end ? end + 1 : NULL;
}

static bool is_in_set(const char *p, char c) {
    const char *end = set_end(p) - 1;
    bool is_not = p[1] == '!' || p[1] == '^', is_found = false;
    for (p += is_not ? 2 : 1; p < end; p++) {
        bool is_range = p[1] == '-' && p + 2 < end;
        unsigned char low = (unsigned char)*p, high = (unsigned char)p[is_range ? 2 : 0], at = (unsigned char)c;
        is_found = is_found || (low <= at && at <= high);
        p += is_range ? 2 : 0;
    }
    return is_found != is_not;
}

static tb_status init(tb__pattern *pattern, const char *text, bool has_sets) {
    *pattern = (tb__pattern){.is_regex = text && *text == '^', .has_sets = has_sets};
    if (!text || !*text)
        return tb__fail(TB_INVALID, "a pattern is empty");
    if (pattern->is_regex) {
        int error = regcomp(&pattern->regex, text, REG_EXTENDED);
        if (error) {
            char why[160];
            regerror(error, &pattern->regex, why, sizeof why);
            return tb__fail(error == REG_ESPACE ? TB_NO_MEMORY : TB_INVALID, "pattern '%.200s': %s", text, why);
        }
        pattern->ncaptures = pattern->regex.re_nsub < TB__CAPTURES ? (int)pattern->regex.re_nsub : TB__CAPTURES - 1;
    } else {
        for (const char *p = text, *end; *p && pattern->ncaptures < TB__CAPTURES - 1; p = end) {
            end = has_sets ? set_end(p) : NULL;
            pattern->ncaptures += end || *p == '*' || *p == '?';
            end = end ? end : has_sets && *p == '\\' && p[1] ? p + 2 : p + 1;
        }
    }
    pattern->text = tb__strdup(text);
    if (pattern->text)
        return TB_OK;
    if (pattern->is_regex)
        regfree(&pattern->regex);
    return TB_NO_MEMORY;
}

tb_status tb__pattern_init(tb__pattern *pattern, const char *text) {
    return init(pattern, text, false);
}

tb_status tb__pattern_init_shell(tb__pattern *pattern, const char *text) {
    return init(pattern, text, true);
}

void tb__pattern_fini(tb__pattern *pattern) {
    if (pattern->text && pattern->is_regex)
        regfree(&pattern->regex);
    free(pattern->text);
    *pattern = (tb__pattern){0};
}

static void set_capture(tb__capture *captures, int i, const char *start, const char *stop) {
    if (i < TB__CAPTURES)
        captures[i] = (tb__capture){start, (size_t)(stop - start)};
}

/* Stars take as little as they can, from left to right; only the last one ever has to take more. */
static bool match_glob(const char *p, const char *s, bool has_sets, tb__capture *captures) {
    const char *star = NULL, *from = NULL, *taken = NULL; /* the last star, and what it has taken */
    int n = 0, star_capture = 0;
    for (;;) {
        const char *end = has_sets ? set_end(p) : NULL;
        bool is_escaped = has_sets && *p == '\\' && p[1];
        if (*p == '*') {
            star = p++;
            from = taken = s;
            star_capture = ++n;
            set_capture(captures, n, from, taken);
        } else if (*s && (*p == '?' || (end && is_in_set(p, *s)))) {
            set_capture(captures, ++n, s, s + 1);
            p = end ? end : p + 1;
            s++;
        } else if (*p && !end && p[is_escaped] == *s) {
            p += is_escaped ? 2 : 1;
            s++;
        } else if (!*p && !*s) {
            return true;
        } else if (star && *taken) {
            s = ++taken;
            p = star + 1;
            n = star_capture;
            set_capture(captures, n, from, taken);
        } else {
            return false;
        }
    }
}

static bool match_regex(const regex_t *regex, const char *name, size_t length, tb__capture *captures) {
    regmatch_t match[TB__CAPTURES];
    /* of the matches that begin at the first character regexec finds the longest, so the whole name if that matches */
    if (regexec(regex, name, TB__CAPTURES, match, 0) || match[0].rm_so != 0 || (size_t)match[0].rm_eo != length)
        return false;
    for (int i = 1; i < TB__CAPTURES; i++) {
        bool is_used = match[i].rm_so >= 0;
        set_capture(captures, i, name + (is_used ? match[i].rm_so : 0), name + (is_used ? match[i].rm_eo : 0));
    }
    return true;
}

bool tb__pattern_match(const tb__pattern *pattern, const char *name, tb__capture captures[TB__CAPTURES]) {
    size_t length = strlen(name);
    captures[0] = (tb__capture){name, length};
    return pattern->is_regex ? match_regex(&pattern->regex, name, length, captures)
                             : match_glob(pattern->text, name, pattern->has_sets, captures);
}

tb_status tb__replacement_check(const tb__pattern *pattern, const char *replacement) {
    if (!*replacement)
        return tb__fail(TB_INVALID, "the rule for '%.200s' has an empty name", pattern->text);
    for (const char *p = replacement; *p; p++) {
        if (*p != '\\')
            continue;
        p++;
        if (*p == '\\')
            continue;
        if (*p < '0' || *p > '9')
            return tb__fail(TB_INVALID, "the name '%.200s' has a \\ that no digit follows", replacement);
        if (*p - '0' > pattern->ncaptures)
            return tb__fail(TB_INVALID, "the name '%.200s' uses \\%c, but '%.200s' captures %d", replacement, *p,
                            pattern->text, pattern->ncaptures);
    }
    return TB_OK;
}

void tb__name_add(tb__text *text, const char *bytes, size_t count) {
    if (text->failed)
        return;
    if (text->capacity - text->count <= count &&
        !tb__vec_grow((void **)&text->data, &text->capacity, text->count + count + 1, 1)) {
        text->failed = true;
        return;
    }
    memcpy(text->data + text->count, bytes, count);
    text->count += count;
    text->data[text->count] = 0;
}

void tb__replacement_expand(const char *replacement, const tb__capture captures[TB__CAPTURES], tb__text *out) {
    for (const char *p = replacement; *p;) {
        size_t plain = strcspn(p, "\\");
        if (plain) {
            tb__name_add(out, p, plain);
            p += plain;
        } else if (p[1] == '\\') {
            tb__name_add(out, "\\", 1);
            p += 2;
        } else {
            const tb__capture *c = &captures[p[1] - '0'];
            tb__name_add(out, c->start, c->length);
            p += 2;
        }
    }
}

tb_status tb__number_check(const char *pattern) {
    const char *number = strchr(pattern, '#');
    if (!number || strchr(number + 1, '#'))
        return tb__fail(TB_INVALID, "'%.200s' does not say where the number stands: it needs one #, as in layers.#.",
                        pattern);
    return TB_OK;
}

static bool match_number(const char *p, const char *s, tb__capture *out) {
    for (; *p; p++) {
        if (*p == '#') {
            size_t n = strspn(s, "0123456789");
            if (n == 0)
                return false;
            *out = (tb__capture){s, n};
            s += n;
        } else if (*p == '*') {
            for (;; s++) {
                if (match_number(p + 1, s, out))
                    return true;
                if (!*s || *s == '.')
                    return false;
            }
        } else if (*p == *s) {
            s++;
        } else {
            return *p == '.' && !p[1] && !*s;
        }
    }
    return true;
}

bool tb__number_find(const char *pattern, const char *name, tb__capture *out) {
    for (const char *at = name; at; at = strchr(at, '.'), at = at ? at + 1 : NULL) {
        /* most components begin with another letter */
        if ((*at == *pattern || *pattern == '*' || *pattern == '#') && match_number(pattern, at, out))
            return true;
    }
    return false;
}
