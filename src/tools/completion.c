/* Completion for shells, from the same tables as the help. */
#include "tools/tools.h"

#include <string.h>

/* A quoted word: in sh and zsh a quote ends the quotes, in fish a backslash escapes it. */
static void add_quoted(tb__text *out, const char *text, bool is_fish) {
    tb__text_add(out, "'");
    for (const char *c = text; *c; c++) {
        if (*c == '\'')
            tb__text_add(out, "%s", is_fish ? "\\'" : "'\\''");
        else
            tb__text_add(out, "%s%c", *c == '\\' && is_fish ? "\\" : "", *c);
    }
    tb__text_add(out, "'");
}

static void add_bash(tb__text *out, const tool_command *const *commands) {
    tb__text_add(out, "_tensorbus() {\n    local words=\n    case $COMP_CWORD:${COMP_WORDS[1]} in\n    1:*) words=\"");
    for (const tool_command *const *c = commands; *c; c++)
        tb__text_add(out, "%s ", (*c)->name);
    tb__text_add(out, "help --help --version\" ;;\n");
    for (const tool_command *const *c = commands; *c; c++) {
        tb__text_add(out, "    *:%s) words=\"", (*c)->name);
        for (const tool_option *o = (*c)->options; o->name; o++)
            tb__text_add(out, "--%s ", o->name);
        tb__text_add(out, "--help\" ;;\n");
    }
    tb__text_add(out, "    *:help) words=\"");
    for (const tool_command *const *c = commands; *c; c++)
        tb__text_add(out, "%s%s", (*c)->name, c[1] ? " " : "");
    tb__text_add(out, "\" ;;\n    esac\n"
                      "    mapfile -t COMPREPLY < <(compgen -W \"$words\" -- \"${COMP_WORDS[COMP_CWORD]}\")\n"
                      "}\ncomplete -o default -F _tensorbus tensorbus\n");
}

static void add_zsh(tb__text *out, const tool_command *const *commands) {
    tb__text_add(out, "#compdef tensorbus\nlocal -a commands options\ncommands=(\n");
    for (const tool_command *const *c = commands; *c; c++) {
        tb__text_add(out, "    %s:", (*c)->name);
        add_quoted(out, (*c)->summary, false);
        tb__text_add(out, "\n");
    }
    tb__text_add(out, ")\nif (( CURRENT == 2 )) || [[ $words[2] == help ]]; then\n    _describe command commands\n"
                      "    return\nfi\ncase $words[2] in\n");
    for (const tool_command *const *c = commands; *c; c++) {
        tb__text_add(out, "%s)\n    options=(\n", (*c)->name);
        for (const tool_option *o = (*c)->options; o->name; o++) {
            tb__text_add(out, "        --%s:", o->name);
            add_quoted(out, o->help, false);
            tb__text_add(out, "\n");
        }
        tb__text_add(out, "    )\n    ;;\n");
    }
    tb__text_add(out, "esac\n_describe option options || _files\n");
}

static void add_fish(tb__text *out, const tool_command *const *commands) {
    for (const tool_command *const *c = commands; *c; c++) {
        tb__text_add(out, "complete -c tensorbus -f -n __fish_use_subcommand -a %s -d ", (*c)->name);
        add_quoted(out, (*c)->summary, true);
        tb__text_add(out, "\n");
        for (const tool_option *o = (*c)->options; o->name; o++) {
            tb__text_add(out, "complete -c tensorbus -n '__fish_seen_subcommand_from %s' -l %s%s -d ", (*c)->name,
                         o->name, o->argument ? " -r" : "");
            add_quoted(out, o->help, true);
            tb__text_add(out, "\n");
        }
    }
}

bool tool_add_completion(tb__text *out, const tool_command *const *commands, const char *shell) {
    static const struct {
        const char *name;
        void (*add)(tb__text *out, const tool_command *const *commands);
    } shells[] = {{"bash", add_bash}, {"zsh", add_zsh}, {"fish", add_fish}};
    for (size_t i = 0; i < sizeof shells / sizeof *shells; i++) {
        if (strcmp(shell, shells[i].name) != 0)
            continue;
        shells[i].add(out, commands);
        return true;
    }
    return false;
}
