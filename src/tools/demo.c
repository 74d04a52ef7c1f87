/* tensorbus demo: three plans that show what resharding is about. */
#include "tools/tools.h"

static const struct {
    const char *title, *explanation;
    const char *shape, *dtype, *src, *dst;
} cases[] = {
    {"From a trainer to an inference engine",
     "A trainer keeps a weight cut by rows over 8 ranks, as FSDP does. An engine on 4 other ranks wants it cut by\n"
     "columns two ways (tensor parallel), twice over (data parallel): equal pieces go out as one broadcast.",
     "4096,4096", "bf16", "mesh=8 place=Shard(0)", "mesh=2,2 place=Replicate,Shard(1) ranks=8..11"},
    {"Uneven, strided, and on ranks that partly overlap",
     "1001 rows do not divide evenly, and the source holds two stripes a rank. Ranks 2 and 3 are in both\n"
     "meshes: what they already have is copied, not sent.",
     "1001,64", "f32", "mesh=4 place=StridedShard(0,2)", "mesh=3 place=Shard(0) ranks=2,3,5"},
    {"Replicas that share the work",
     "Three source ranks hold the same tensor, and eight targets want all of it. The bytes are dealt out so that no\n"
     "replica sends more than its share; what goes whole to several ranks is one broadcast.",
     "1536,1024", "bf16", "mesh=3 place=Replicate", "mesh=8 place=Replicate ranks=4..11"},
};

enum { NCASES = sizeof cases / sizeof *cases };

static tb_status add_case(tb__text *out, size_t i) {
    tb_shape shape;
    tb_dtype dtype;
    tb_layout *src, *dst;
    tool_plan_view view;
    TB_TRY(tb_shape_parse(cases[i].shape, &shape));
    TB_TRY(tb_dtype_parse(cases[i].dtype, &dtype));
    TB_TRY(tb_layout_parse(cases[i].src, &src));
    tb_status status = tb_layout_parse(cases[i].dst, &dst);
    if (status != TB_OK) {
        tb_layout_destroy(src);
        return status;
    }
    TB_TRY(tool_plan_view_init(&view, src, dst, &shape, dtype, NULL));
    status = tool_plan_view_fill(&view);
    if (status == TB_OK) {
        tb__text_add(out, "%s%s%zu. %s%s\n%s\n\n", i ? "\n\n" : "", tool_bold(), i + 1, cases[i].title, tool_plain(),
                     cases[i].explanation);
        tool_add_plan(out, &view, false);
    }
    tool_plan_view_fini(&view);
    return status;
}

static int run(const tb__config *config, const char *const *value) {
    (void)config;
    (void)value;
    tb__text out = {0};
    for (size_t i = 0; i < NCASES; i++) {
        tb_status status = add_case(&out, i);
        if (status != TB_OK) {
            tb__text_fini(&out);
            tb__prefix_detail("case %zu", i + 1);
            return tool_fail_status(status);
        }
    }
    tb__text_add(&out,
                 "\n%sAll %d plans were made and checked; no data was moved.%s Try your own: tensorbus plan --help\n",
                 tool_bold(), NCASES, tool_plain());
    return tool_print(&out);
}

const tool_command tool_demo = {
    .name = "demo",
    .summary = "make three telling plans, check them and show them; no data moves",
    .usage = "",
    .details = NULL,
    .options = (const tool_option[]){{NULL, NULL, NULL}},
    .run = run,
};
