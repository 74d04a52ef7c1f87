/* A growing string, and a cursor for reading one. */
#ifndef TB_BASE_TEXT_H
#define TB_BASE_TEXT_H

#include "base/error.h"

/* Zero-initialised: empty. After a failed append it stays failed; check once, at the end. */
typedef struct tb__text {
    char *data;
    size_t count, capacity;
    bool failed;
} tb__text;

void tb__text_add(tb__text *text, const char *format, ...) __attribute__((format(printf, 2, 3)));
void tb__text_add_json(tb__text *text, const char *string); /* a JSON string; invalid UTF-8 becomes ? */
bool tb__is_utf8(const char *string);
void tb__text_tame(char *string);        /* white space becomes a blank, other control characters become ? */
int tb__utf8_length(const char *string); /* of the first character; 0 if that is not UTF-8 */
void tb__text_fini(tb__text *text);

/* Gives the string to the caller, who frees it; fails if an append failed. */
tb_status tb__text_take(tb__text *text, char **out);

int tb__compare_strings(const void *a, const void *b); /* for qsort of an array of const char * */

/* Reading: `at` advances past the accepted text. */
void tb__skip_space(const char **at);
bool tb__accept(const char **at, char c);                /* skips space before it */
bool tb__read_int(const char **at, int64_t *out);        /* decimal, a sign allowed; false on overflow too */
tb_status tb__read_size(const char *text, int64_t *out); /* "16MiB", "4k", "30MB", "1.5GiB", "1048576": bytes */

#endif
