/* The `tensorbus` command: what its subcommands share.
 *
 * A subcommand works out everything first, builds its output as text, and prints it at the end; so whatever fails
 * leaves nothing on standard output but one sentence on standard error. What takes minutes, like `bench`, prints each
 * result when it is there. */
#ifndef TB_TOOLS_TOOLS_H
#define TB_TOOLS_TOOLS_H

#include "base/config.h"
#include "base/mem.h"
#include "tensorbus/plan.h"

#include <jansson.h>

/* Exit statuses. The last is that of a program which SIGPIPE ended, as shells have it: nobody reads the output any
 * more, and nothing is said about it. */
enum { TOOL_OK = 0, TOOL_FAILED = 1, TOOL_BAD_INPUT = 2, TOOL_UNREAD = 128 + 13 };

/* ---- Commands (main.c, options.c, man.c) --------------------------------------------------------------------- */

typedef struct tool_option {
    const char *name;     /* without the dashes */
    const char *argument; /* what it takes, as the help calls it; NULL: nothing */
    const char *help;
} tool_option;

enum { TOOL_MAX_OPTIONS = 24, TOOL_OPERAND = TOOL_MAX_OPTIONS, TOOL_SECOND_OPERAND, TOOL_MAX_VALUES };

typedef struct tool_command {
    const char *name, *summary;
    const char *usage;          /* one line per form, without the program's name */
    const char *operand;        /* what must stand there without an option, as the help calls it; NULL: nothing may */
    bool has_second_operand;    /* another one may follow */
    bool takes_program;         /* the operand is a program, and all behind it is for that; "--" may stand before it */
    const char *details;        /* what the help says below the options; may be NULL */
    const char *more;           /* and below that, where it is more than a string of C may have; may be NULL */
    const tool_option *options; /* up to one without a name */
    /* value[i] is the argument of options[i]; NULL if it was not given; "" for an option that takes none;
     * value[TOOL_OPERAND] is the operand, value[TOOL_SECOND_OPERAND] the second one. */
    int (*run)(const tb__config *config, const char *const *value);
} tool_command;

extern const tool_command tool_agent, tool_bench, tool_config, tool_dashboard, tool_demo, tool_diff, tool_doctor,
    tool_inspect, tool_layout, tool_plan, tool_reshard, tool_run, tool_spec, tool_status, tool_store, tool_top,
    tool_verify;

/* Fills in `value`; returns an exit status. *wants_help is set where --help is among the arguments. */
int tool_read_options(const tool_command *command, char **argv, const char **value, bool *wants_help);
void tool_add_help(tb__text *out, const tool_command *command);

/* A man page as roff: of a command, or of `tensorbus` itself. `commands` ends with NULL. */
void tool_add_man(tb__text *out, const tool_command *const *commands, const tool_command *command);
void tool_add_man_overview(tb__text *out, const tool_command *const *commands, const char *purpose);

/* What a shell reads to complete the command's words; false: there is none for this shell. */
bool tool_add_completion(tb__text *out, const tool_command *const *commands, const char *shell);

/* The program, and its arguments, of a command that takes one; up to NULL. */
char **tool_program(void);

/* What may have been meant by an unknown word: the nearest of those tried, or NULL if none is near. */
typedef struct tool_guess {
    const char *given;
    size_t length; /* of what counts in `given` */
    const char *word;
    size_t distance;
} tool_guess;

void tool_guess_try(tool_guess *guess, const char *word);

/* Says so, and which one may have been meant; a command without a name is `tensorbus` itself. */
int tool_unknown_option(const tool_command *command, const char *argument, size_t length);

/* For an option that goes with no other: returns an exit status. */
int tool_expect_alone(const tool_option *options, const char *const *value, int alone);

tb_status tool_read_rank(const char *text, int32_t *out);

/* ---- Reporting (report.c) ------------------------------------------------------------------------------------ */

/* The subcommand whose name sentences begin with; NULL: none. */
void tool_set_command(const char *name);

/* Prints one sentence on standard error. */
void tool_say(const char *format, ...) __attribute__((format(printf, 1, 2)));

/* The same for what ends the command; returns `exit_status`. */
int tool_fail(int exit_status, const char *format, ...) __attribute__((format(printf, 2, 3)));

/* The same for the last failed call of the library, whose status tells the exit status. */
int tool_fail_status(tb_status status);

/* A line that tells how far things are, on standard error if that is a terminal. The next one takes its place, and what
 * is printed by the functions here. */
void tool_show_line(const char *format, ...) __attribute__((format(printf, 1, 2)));
void tool_hide_line(void);

/* Prints the text on standard output, at once, and frees it. */
int tool_print(tb__text *text);

/* Writes the picture to the file at `path`, if that is not NULL, then prints the text; a path of "-" prints the
 * picture instead of the text. Frees both. */
int tool_deliver(tb__text *text, tb__text *picture, const char *path);

/* ---- Text (format.c) ----------------------------------------------------------------------------------------- */

typedef struct tool_size_text {
    char text[24];
} tool_size_text;

tool_size_text tool_size(int64_t nbytes); /* "16 MiB", "1.5 KiB", "768 B" */

/* Bytes behind a key of one of the kernel's lists, "MemAvailable:" of /proc/meminfo; 0: not told. */
int64_t tool_read_kib(const char *path, const char *key);

void tool_add_size(tb__text *out, int64_t nbytes); /* "16 MiB (16777216 bytes)" */
void tool_add_shape(tb__text *out, const tb_shape *shape);
/* "0,2,4..7"; what is beyond `most` runs is counted: "0,2,4..7, 12 more". */
void tool_add_ranks(tb__text *out, const int32_t *ranks, size_t count, size_t most);
/* "[0:4, 8:16]", half-open, as buckets are dumped. */
void tool_add_box(tb__text *out, int ndim, const int64_t *start, const int64_t *len);
void tool_add_name(tb__text *out, const char *name); /* control characters become ? */
/* How many tensors in the directory of a model are not part of it, and the first of them; all, as a JSON array. */
struct tb__checkpoint;
void tool_add_unindexed(tb__text *out, const struct tb__checkpoint *model);
void tool_add_unindexed_json(tb__text *out, const struct tb__checkpoint *model);
/* The same for files beside those of ranks. */
struct tb__rank_files;
void tool_add_others(tb__text *out, const struct tb__rank_files *ranks);
void tool_add_others_json(tb__text *out, const struct tb__rank_files *ranks);
/* The layout as text, cut short where it has long lists. */
void tool_add_layout(tb__text *out, const tb_layout *layout);

/* ---- Tables (table.c) ---------------------------------------------------------------------------------------- */

enum { TOOL_MAX_COLUMNS = 16 };

/* Cells are added row by row; a column is as wide as its widest cell. */
typedef struct tool_table {
    int ncolumns;
    struct {
        const char *title;
        bool is_number; /* stands at the right of its column */
        int width;      /* at least */
    } column[TOOL_MAX_COLUMNS];
    TB_VEC(char *) cells;
    bool is_begun; /* the titles were added */
    bool failed;
} tool_table;

void tool_table_column(tool_table *table, const char *title, bool is_number);
/* Several; the titles of numbers have a # in front. */
void tool_table_add_columns(tool_table *table, const char *const *titles, size_t ntitles);
#define tool_table_columns(table, ...)                                                                                 \
    tool_table_add_columns(table, (const char *const[]){__VA_ARGS__},                                                  \
                           sizeof((const char *const[]){__VA_ARGS__}) / sizeof(const char *))
void tool_table_width(tool_table *table, int width); /* of the last column, at least */
void tool_table_cell(tool_table *table, const char *format, ...) __attribute__((format(printf, 2, 3)));
void tool_table_take(tool_table *table, tb__text *cell);        /* empties `cell` */
void tool_table_flush(tool_table *table, tb__text *out);        /* adds the rows so far to the text; more may follow */
void tool_table_finish(tool_table *table, tb__text *out);       /* adds the table to the text and frees it */
void tool_table_finish_below(tool_table *table, tb__text *out); /* the same after an empty line */

/* Whether standard output is a terminal that wants colours; the codes are "" where it is not. */
const char *tool_bold(void);
const char *tool_dim(void);
const char *tool_plain(void);

/* ---- What was built in (version.c) --------------------------------------------------------------------------- */

/* Returns an exit status. */
int tool_print_version(void);

/* ---- JSON lines (jsonl.c) ------------------------------------------------------------------------------------ */

/* Answers each line of the file ("-": standard input) with one line: what `answer` adds, or {"error":"..."}. */
int tool_answer_lines(const char *path, tb_status (*answer)(const json_t *line, tb__text *out));

/* ---- Plans (traffic.c, plan_report.c, rank_report.c) --------------------------------------------------------- */

/* All boxes that one source sends to the same targets. */
typedef struct tool_transfer {
    int32_t source; /* TB_NO_RANK: the targets are filled with zeros */
    uint32_t ntargets;
    int32_t *targets;
    uint32_t ncontributors; /* of a Partial source */
    int64_t nboxes;
    int64_t nbytes;                               /* that each target gets */
    int64_t start[TB_MAX_DIMS], len[TB_MAX_DIMS]; /* at the source, of the first box */
} tool_transfer;

/* A plan with all that is told of it: everybody's traffic, by source, then target. */
typedef struct tool_plan_view {
    tb_shape shape;
    tb_dtype dtype;
    tb_layout *src, *dst;
    tb_plan *plan;
    tb_plan_stats stats;
    const int32_t *hosts; /* of the ranks, for the picture; NULL: not told */
    TB_VEC(tool_transfer) transfers;
    tb__arena arena;
} tool_plan_view;

bool tool_is_local(const tool_transfer *transfer);

/* Takes the layouts over, also when it fails. */
tb_status tool_plan_view_init(tool_plan_view *view, tb_layout *src, tb_layout *dst, const tb_shape *shape,
                              tb_dtype dtype, const tb_plan_opts *opts);
/* Checks the plan and works out the figures and the traffic; costs the whole world's traffic. */
tb_status tool_plan_view_fill(tool_plan_view *view);
void tool_plan_view_fini(tool_plan_view *view);

void tool_add_plan_heading(tb__text *out, const tool_plan_view *view);
void tool_add_plan(tb__text *out, const tool_plan_view *view, bool all);
void tool_add_plan_json(tb__text *out, const tool_plan_view *view, const char *more); /* members; NULL: none */
/* What the ranks of a batch do (load.c): what they send is sent to receivers, those of relays included. */
typedef struct tool_rank_load {
    int32_t rank;
    int64_t sends, receives, keeps;
} tool_rank_load;

typedef struct tool_link {
    int32_t from, to; /* ranks, or hosts */
    int64_t nbytes;
} tool_link;

typedef TB_VEC(tool_link) tool_links;

/* A broadcast that is handed on. */
typedef struct tool_way {
    char *text; /* "0 > 4 > 8,9": who sends to whom */
    int64_t nbytes;
} tool_way;

typedef struct tool_load {
    size_t nranks;
    tool_rank_load *ranks;             /* ascending */
    tool_links rank_links, host_links; /* by from, then to; between hosts if the plan's options have them */
    TB_VEC(tool_way) ways;
} tool_load;

/* `ranks` are all that the layouts name, ascending. To be ended with fini whatever the status is. */
tb_status tool_load_fill(tool_load *load, const tb_tensor_spec *tensors, size_t ntensors, const int32_t *ranks,
                         size_t nranks, const tb_ir_opts *opts);
void tool_load_fini(tool_load *load);
int64_t tool_load_total(const tool_load *load);                     /* that is sent */
void tool_add_load(tb__text *out, const tool_load *load, bool all); /* links of hosts, and ways (host_report.c) */

/* A whole model (plan_model.c). `bandwidth` as --bandwidth has it; NULL: no estimates. */
typedef struct tool_model_plan {
    const char *spec, *in, *bandwidth; /* `in` may be NULL */
    const tb_ir_opts *ir;
    bool all, is_json, wants_picture;
} tool_model_plan;

tb_status tool_plan_model(const tool_model_plan *plan, tb__text *out, tb__text *picture);

/* With a host map (host_report.c): what goes between hosts, and how it is handed on. In JSON: two members. */
tb_status tool_add_hosts(tb__text *out, const tool_plan_view *view, const tb_ir_opts *opts, bool all);
tb_status tool_hosts_json(const tool_plan_view *view, const tb_ir_opts *opts, char **out);
tb_status tool_add_rank(tb__text *out, const tool_plan_view *view, int32_t rank, bool all);
tb_status tool_add_rank_json(tb__text *out, const tool_plan_view *view, int32_t rank);

/* ---- Pictures (svg.c) ---------------------------------------------------------------------------------------- */

tb_status tool_draw_layout(tb__text *out, const tb_layout *layout, const tb_shape *shape, tb_dtype dtype);
tb_status tool_draw_plan(tb__text *out, const tool_plan_view *view);
/* The traffic of a model; hosts may be NULL. */
tb_status tool_draw_load(tb__text *out, const char *title, const char *figures, const tool_load *load,
                         const int32_t *hosts);
tb_status tool_draw_plan_page(tb__text *out, const tool_plan_view *view); /* of HTML (plan_html.c) */

#endif
