/* tensorbus: finds the subcommand, reads its options and the settings, and runs it. */
#include "tools/tools.h"

#include "bus/environment.h"

#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

static const tool_command *const commands[] = {
    &tool_layout, &tool_plan,   &tool_inspect, &tool_spec,   &tool_reshard, &tool_verify,
    &tool_diff,   &tool_agent,  &tool_run,     &tool_status, &tool_top,     &tool_dashboard,
    &tool_store,  &tool_config, &tool_doctor,  &tool_demo,   &tool_bench,   NULL};

static const tool_command *find_command(const char *name) {
    for (const tool_command *const *c = commands; *c; c++) {
        if (strcmp(name, (*c)->name) == 0)
            return *c;
    }
    return NULL;
}

static int unknown_command(const char *name) {
    if (strcmp(name, "explain") == 0)
        return tool_fail(TOOL_BAD_INPUT, "explain is a command of the Python package, where vLLM is installed: "
                                         "`python3 -m tensorbus explain --help`");
    tool_guess guess = {.given = name, .length = strlen(name)};
    for (const tool_command *const *c = commands; *c; c++)
        tool_guess_try(&guess, (*c)->name);
    tool_guess_try(&guess, "help");
    if (guess.word)
        return tool_fail(TOOL_BAD_INPUT, "there is no command '%s'; did you mean '%s'? `tensorbus --help` lists them",
                         name, guess.word);
    return tool_fail(TOOL_BAD_INPUT, "there is no command '%s'; `tensorbus --help` lists them", name);
}

static const char purpose[] =
    "Moves tensors between programs that shard them differently, and shows layouts, plans and checkpoints.";

static int print_overview(void) {
    tb__text out = {0};
    tb__text_add(&out, "usage: tensorbus COMMAND [OPTION...]\n\n%s\n\n", purpose);
    for (const tool_command *const *c = commands; *c; c++)
        tb__text_add(&out, "  %-9s  %s\n", (*c)->name, (*c)->summary);
    tb__text_add(&out, "\n  %-9s  %s\n", "help", "show this, or the help of a command: tensorbus help COMMAND");
    tb__text_add(&out, "\nOptions: --help, --version. `tensorbus config` lists the environment variables.\n");
    return tool_print(&out);
}

static int print_help(const tool_command *command) {
    tb__text out = {0};
    tool_add_help(&out, command);
    return tool_print(&out);
}

/* NULL: the page of the command as a whole. */
static int print_man(const tool_command *command) {
    tb__text out = {0};
    if (command)
        tool_add_man(&out, commands, command);
    else
        tool_add_man_overview(&out, commands, purpose);
    return tool_print(&out);
}

static int print_completion(const char *shell) {
    tb__text out = {0};
    if (shell && tool_add_completion(&out, commands, shell))
        return tool_print(&out);
    return tool_fail(TOOL_BAD_INPUT, "--completion takes the name of a shell: bash, zsh or fish");
}

static int help_command(char **argv) {
    if (argv[0] && strcmp(argv[0], "--completion") == 0)
        return print_completion(argv[1]);
    bool is_man = argv[0] && strcmp(argv[0], "--man") == 0;
    argv += is_man;
    if (!argv[0])
        return is_man ? print_man(NULL) : print_overview();
    const tool_command *command = find_command(argv[0]);
    if (!command)
        return unknown_command(argv[0]);
    if (argv[1])
        return tool_fail(TOOL_BAD_INPUT, "help takes one command, but '%s' follows '%s'", argv[1], argv[0]);
    return is_man ? print_man(command) : print_help(command);
}

static void log_line(void *arg, tb_log_level level, const char *line) {
    static const char *const names[] = {"", "error", "warning", "info", "debug"};
    (void)arg;
    fprintf(stderr, "tensorbus: %s: %s\n", names[level], line);
}

static int run(const tool_command *command, char **argv) {
    const char *value[TOOL_MAX_VALUES] = {NULL};
    bool wants_help = false;
    tool_set_command(command->name);
    int exit_status = tool_read_options(command, argv, value, &wants_help);
    if (exit_status != TOOL_OK)
        return exit_status;
    if (wants_help)
        return print_help(command);
    tb__config config;
    tb_status status = tb__config_load(&config);
    if (status == TB_OK)
        status = tb__environment_apply();
    if (status != TB_OK)
        return tool_fail_status(status);
    tb_log_set(tb__config_log(&config), log_line, NULL);
    exit_status = command->run(&config, value);
    tb_log_set(TB_LOG_OFF, NULL, NULL); /* writes the number of suppressed lines */
    return exit_status;
}

/* A file opened later must not take the place of a standard stream that the caller closed. Writing to such a stream
 * still fails. */
static void occupy_standard_streams(void) {
    if (fcntl(STDIN_FILENO, F_GETFD) < 0)
        open("/dev/null", O_WRONLY | O_CLOEXEC); // NOLINT: it becomes standard input, which can't be read
    int fd;
    do {
        fd = open("/dev/null", O_RDONLY | O_CLOEXEC);
    } while (fd >= 0 && fd <= STDERR_FILENO);
    if (fd >= 0)
        close(fd);
}

int main(int argc, char **argv) {
    occupy_standard_streams();
    signal(SIGPIPE, SIG_IGN); /* so that commands end in order: TOOL_UNREAD */
    signal(SIGXFSZ, SIG_IGN); /* a limit on the size of files is reported like a full disk */
    char **arguments = argv + (argc > 0);
    const char *name = arguments[0];
    if (!name)
        return print_overview();
    if (strcmp(name, "help") == 0 || strcmp(name, "--help") == 0 || strcmp(name, "-h") == 0)
        return help_command(arguments + 1);
    if (strcmp(name, "--version") == 0)
        return arguments[1] ? tool_fail(TOOL_BAD_INPUT, "--version stands alone, but '%s' follows it", arguments[1])
                            : tool_print_version();
    const tool_command *command = find_command(name);
    if (command)
        return run(command, arguments + 1);
    if (name[0] != '-')
        return unknown_command(name);
    static const tool_option options[] = {{.name = "version"}, {0}};
    static const tool_command none = {.name = NULL, .options = options};
    return tool_unknown_option(&none, name, strlen(name));
}
