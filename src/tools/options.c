/* Options: the table of a command both reads its arguments and writes its help. */
#include "tools/tools.h"

#include "base/int.h"

#include <ctype.h>
#include <string.h>

/* The index of the option with this name, or -1. */
static int find_option(const tool_command *command, const char *name, size_t length) {
    for (int i = 0; command->options[i].name; i++) {
        if (strlen(command->options[i].name) == length && strncmp(command->options[i].name, name, length) == 0)
            return i;
    }
    return -1;
}

enum { LONGEST_WORD = 32 };

/* The number of characters that must be inserted, removed, replaced or swapped with the next one to turn one word into
 * the other. */
static size_t word_distance(const char *a, size_t na, const char *b, size_t nb) {
    size_t row[3][LONGEST_WORD + 1];
    for (size_t j = 0; j <= nb; j++)
        row[0][j] = j;
    for (size_t i = 1; i <= na; i++) {
        size_t *here = row[i % 3], *above = row[(i - 1) % 3];
        here[0] = i;
        for (size_t j = 1; j <= nb; j++) {
            here[j] = tb__min_size(above[j - 1] + (a[i - 1] != b[j - 1]), tb__min_size(above[j], here[j - 1]) + 1);
            if (i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1])
                here[j] = tb__min_size(here[j], row[(i - 2) % 3][j - 2] + 1);
        }
    }
    return row[na % 3][nb];
}

void tool_guess_try(tool_guess *guess, const char *word) {
    size_t n = guess->length, length = strlen(word);
    if (n < 2 || n > LONGEST_WORD || length > LONGEST_WORD)
        return;
    bool is_beginning = n >= 3 && strncmp(guess->given, word, n) == 0;
    size_t distance = is_beginning ? length > n : word_distance(guess->given, n, word, length);
    if (distance > (n < 6 ? 1 : n / 3) || (guess->word && distance >= guess->distance))
        return;
    guess->word = word;
    guess->distance = distance;
}

int tool_unknown_option(const tool_command *command, const char *argument, size_t length) {
    size_t ndashes = tb__min_size(strspn(argument, "-"), length);
    tool_guess guess = {.given = argument + ndashes, .length = length - ndashes};
    for (const tool_option *o = command->options; o->name; o++)
        tool_guess_try(&guess, o->name);
    tool_guess_try(&guess, "help");
    const char *name = command->name ? command->name : "", *space = command->name ? " " : "";
    if (guess.word)
        return tool_fail(TOOL_BAD_INPUT, "unknown option '%.*s'; did you mean '--%s'? See `tensorbus%s%s --help`",
                         (int)length, argument, guess.word, space, name);
    return tool_fail(TOOL_BAD_INPUT, "unknown option '%.*s'; see `tensorbus%s%s --help`", (int)length, argument, space,
                     name);
}

static char **program;

char **tool_program(void) {
    return program;
}

int tool_read_options(const tool_command *command, char **argv, const char **value, bool *wants_help) {
    for (char **arg = argv; *arg; arg++) {
        if (strcmp(*arg, "--help") == 0 || strcmp(*arg, "-h") == 0) {
            *wants_help = true;
            return TOOL_OK;
        }
        if (command->takes_program && (**arg != '-' || strcmp(*arg, "--") == 0)) {
            program = arg + (**arg == '-');
            value[TOOL_OPERAND] = *program;
            break;
        }
        if (**arg != '-' && command->operand && !value[TOOL_OPERAND]) {
            value[TOOL_OPERAND] = *arg;
            continue;
        }
        if (**arg != '-' && command->has_second_operand && !value[TOOL_SECOND_OPERAND]) {
            value[TOOL_SECOND_OPERAND] = *arg;
            continue;
        }
        if (**arg != '-')
            return tool_fail(TOOL_BAD_INPUT, "unexpected argument '%s'; see `tensorbus %s --help`", *arg,
                             command->name);
        size_t length = strcspn(*arg, "=");
        const char *given = (*arg)[length] ? *arg + length + 1 : NULL;
        int i = strncmp(*arg, "--", 2) == 0 ? find_option(command, *arg + 2, length - 2) : -1;
        if (i < 0)
            return tool_unknown_option(command, *arg, length);
        const tool_option *option = &command->options[i];
        if (value[i])
            return tool_fail(TOOL_BAD_INPUT, "--%s is given twice", option->name);
        if (!option->argument && given)
            return tool_fail(TOOL_BAD_INPUT, "--%s takes no value, but is given '%s'", option->name, given);
        if (!option->argument)
            value[i] = "";
        else if (given)
            value[i] = given;
        else if (arg[1])
            value[i] = *++arg;
        else
            return tool_fail(TOOL_BAD_INPUT, "--%s needs a value: --%s %s", option->name, option->name,
                             option->argument);
    }
    if (command->operand && !value[TOOL_OPERAND])
        return tool_fail(TOOL_BAD_INPUT, "%s is missing; see `tensorbus %s --help`", command->operand, command->name);
    return TOOL_OK;
}

static void add_option(tb__text *out, const tool_option *option, int width) {
    const char *argument = option->argument ? option->argument : "";
    int used = (int)(strlen(option->name) + strlen(argument));
    tb__text_add(out, "  --%s %s%*s  %s\n", option->name, argument, width - used, "", option->help);
}

void tool_add_help(tb__text *out, const tool_command *command) {
    static const tool_option help = {"help", NULL, "show this"};
    const char *line = command->usage;
    for (const char *prefix = "usage:"; line; prefix = "      ") {
        int length = (int)strcspn(line, "\n");
        tb__text_add(out, "%s tensorbus %s%s%.*s\n", prefix, command->name, length ? " " : "", length, line);
        line = line[length] ? line + length + 1 : NULL;
    }
    tb__text_add(out, "\n%c%s.\n\n", toupper((unsigned char)command->summary[0]), command->summary + 1);
    int width = (int)strlen(help.name);
    for (const tool_option *o = command->options; o->name; o++) {
        int used = (int)(strlen(o->name) + (o->argument ? strlen(o->argument) : 0));
        width = used > width ? used : width;
    }
    for (const tool_option *o = command->options; o->name; o++)
        add_option(out, o, width);
    add_option(out, &help, width);
    if (command->details)
        tb__text_add(out, "\n%s", command->details);
    if (command->more)
        tb__text_add(out, "\n%s", command->more);
}

int tool_expect_alone(const tool_option *options, const char *const *value, int alone) {
    for (int i = 0; options[i].name; i++) {
        if (i != alone && value[i])
            return tool_fail(TOOL_BAD_INPUT, "--%s does not go with --%s", options[alone].name, options[i].name);
    }
    return TOOL_OK;
}

tb_status tool_read_rank(const char *text, int32_t *out) {
    const char *at = text;
    int64_t rank;
    bool is_number = tb__read_int(&at, &rank);
    tb__skip_space(&at);
    if (!is_number || *at || rank < 0 || rank >= TB_MAX_RANKS)
        return tb__fail(TB_INVALID, "--rank: '%.40s' is not a rank between 0 and %d", text, TB_MAX_RANKS - 1);
    *out = (int32_t)rank;
    return TB_OK;
}
