/* Man pages, from the same tables as the help. */
#include "tools/tools.h"

#include <ctype.h>
#include <string.h>

/* Escapes characters that roff takes for commands, or turns into typographic ones. */
static void add_plain(tb__text *out, const char *text, size_t length) {
    static const char *const names[] = {
        ['\\'] = "\\(rs", ['-'] = "\\-",   ['\''] = "\\(aq", ['`'] = "\\(ga",
        ['^'] = "\\(ha",  ['~'] = "\\(ti", ['"'] = "\\(dq",
    };
    for (size_t i = 0; i < length; i++) {
        unsigned char c = (unsigned char)text[i];
        if (c < sizeof names / sizeof *names && names[c])
            tb__text_add(out, "%s", names[c]);
        else
            tb__text_add(out, "%s%c", c == '.' && i == 0 ? "\\&" : "", c);
    }
}

static void add(tb__text *out, const char *text) {
    add_plain(out, text, strlen(text));
}

static void add_heading(tb__text *out, const char *command) {
    tb__text_add(out, ".TH TENSORBUS");
    for (const char *c = command; *c; c++)
        tb__text_add(out, "%s%c", c == command ? "\\-" : "", toupper((unsigned char)*c));
    tb__text_add(out, " 1 \"\" \"tensorbus %s\" \"tensorbus\"\n.SH NAME\n", tb_version_string());
}

/* Unindented text may be filled; indented text is a table or an example, and is kept as it is. */
static void add_details(tb__text *out, const char *details) {
    bool is_table = false, is_new = true;
    for (const char *line = details; *line;) {
        size_t length = strcspn(line, "\n");
        bool was_table = is_table;
        is_table = *line == ' ';
        if (was_table && !is_table)
            tb__text_add(out, ".fi\n");
        is_new = is_new || is_table != was_table || length == 0;
        if (length > 0) {
            tb__text_add(out, "%s%s", is_new ? ".PP\n" : "", is_table && !was_table ? ".nf\n" : "");
            add_plain(out, line, length);
            tb__text_add(out, "\n");
            is_new = false;
        }
        line += length + (line[length] != '\0');
    }
    if (is_table)
        tb__text_add(out, ".fi\n");
}

static void add_option(tb__text *out, const tool_option *option) {
    tb__text_add(out, ".TP\n\\fB\\-\\-");
    add(out, option->name);
    tb__text_add(out, "\\fR");
    if (option->argument) {
        tb__text_add(out, " \\fI");
        add(out, option->argument);
        tb__text_add(out, "\\fR");
    }
    tb__text_add(out, "\n");
    add(out, option->help);
    tb__text_add(out, "\n");
}

static void add_usage(tb__text *out, const tool_command *command) {
    tb__text_add(out, ".SH SYNOPSIS\n.ad l\n.nh\n");
    for (const char *line = command->usage; line;) {
        size_t length = strcspn(line, "\n");
        tb__text_add(out, "%s\\fBtensorbus %s\\fR%s", line == command->usage ? "" : ".br\n", command->name,
                     length ? " " : "");
        add_plain(out, line, length);
        tb__text_add(out, "\n");
        line = line[length] ? line + length + 1 : NULL;
    }
    tb__text_add(out, ".hy\n.ad b\n");
}

static void add_exit_status(tb__text *out) {
    tb__text_add(out,
                 ".SH EXIT STATUS\n"
                 ".TP\n%d\nAll went well.\n"
                 ".TP\n%d\nSomething failed; the error message is on standard error.\n"
                 ".TP\n%d\nThe options or the input are wrong; one sentence on standard error says how.\n"
                 ".TP\n%d\nThe reader of standard output closed it early, as head(1) does; nothing is said.\n",
                 TOOL_OK, TOOL_FAILED, TOOL_BAD_INPUT, TOOL_UNREAD);
}

static void add_others(tb__text *out, const tool_command *const *commands, const tool_command *command) {
    tb__text_add(out, ".SH SEE ALSO\n");
    if (command)
        tb__text_add(out, ".BR tensorbus (1)");
    for (const tool_command *const *c = commands; *c; c++) {
        if (*c != command)
            tb__text_add(out, "%s.BR tensorbus\\-%s (1)", command || c != commands ? ",\n" : "", (*c)->name);
    }
    tb__text_add(out, "\n.PP\nThe document docs/NAME.md is /usr/share/doc/tensorbus/NAME.md, or lies under another "
                      "prefix that tensorbus was installed with.\n");
}

void tool_add_man(tb__text *out, const tool_command *const *commands, const tool_command *command) {
    static const tool_option help = {"help", NULL, "show the help"};
    add_heading(out, command->name);
    tb__text_add(out, "tensorbus\\-%s \\- ", command->name);
    add(out, command->summary);
    tb__text_add(out, "\n");
    add_usage(out, command);
    tb__text_add(out, ".SH DESCRIPTION\n%c", toupper((unsigned char)command->summary[0]));
    add(out, command->summary + 1);
    tb__text_add(out, ".\n");
    if (command->details)
        add_details(out, command->details);
    if (command->more)
        add_details(out, command->more);
    tb__text_add(out, ".SH OPTIONS\n");
    for (const tool_option *o = command->options; o->name; o++)
        add_option(out, o);
    add_option(out, &help);
    add_exit_status(out);
    tb__text_add(out, ".SH ENVIRONMENT\nThe variables are listed in\n.BR tensorbus (1).\n");
    add_others(out, commands, command);
}

static void add_environment(tb__text *out) {
    tb__text_add(out, ".SH ENVIRONMENT\n");
    for (int key = 0; key < TB__CONFIG_COUNT; key++) {
        const tb__config_entry *entry = &tb__config_table[key];
        tb__text_add(out, ".TP\n\\fB%s\\fR (%s)\n", entry->env, entry->initial);
        add(out, entry->help);
        tb__text_add(out, "\n");
    }
}

void tool_add_man_overview(tb__text *out, const tool_command *const *commands, const char *purpose) {
    static const tool_option help = {"help", NULL, "list the commands"};
    static const tool_option version = {"version", NULL, "print the version"};
    add_heading(out, "");
    tb__text_add(out, "tensorbus \\- move distributed tensors between programs whose layouts differ\n"
                      ".SH SYNOPSIS\n\\fBtensorbus\\fR \\fICOMMAND\\fR [\\fIOPTION\\fR...]\n.SH DESCRIPTION\n");
    add(out, purpose);
    tb__text_add(out, "\n.SH COMMANDS\n");
    for (const tool_command *const *c = commands; *c; c++) {
        tb__text_add(out, ".TP\n.BR tensorbus\\-%s (1)\n", (*c)->name);
        add(out, (*c)->summary);
        tb__text_add(out, "\n");
    }
    tb__text_add(out, ".TP\n\\fBtensorbus help\\fR [\\fB\\-\\-man\\fR] [\\fICOMMAND\\fR]\n"
                      "show the help of a command, or, with \\fB\\-\\-man\\fR, print its page as roff; without a "
                      "command, the list of them, or this page\n"
                      ".TP\n\\fBtensorbus help \\-\\-completion\\fR \\fISHELL\\fR\n"
                      "print what bash, zsh or fish reads to complete the words of this command\n.SH OPTIONS\n");
    add_option(out, &help);
    add_option(out, &version);
    add_exit_status(out);
    add_environment(out);
    add_others(out, commands, NULL);
}
