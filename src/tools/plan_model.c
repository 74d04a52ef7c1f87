/* A whole model's plan: what each rank, machine and link has to carry, which of them is the busiest, and how long that
 * takes at given speeds. The tensors are those of a spec of `reshard`, or of a checkpoint that it is for. */
#include "format/checkpoint.h"
#include "reshard/spec.h"
#include "tools/tools.h"

#include "base/int.h"

#include <inttypes.h>
#include <string.h>

enum { MOST_ROWS = 32 };

/* What has a speed of its own. */
enum { RANK, MACHINE, LINK, NKINDS };

typedef struct busiest {
    int64_t nbytes;
    int32_t from, to;  /* the rank, the machine, or both ends of the link */
    const char *how;   /* "sends", "receives" */
    int64_t bandwidth; /* bytes a second; 0: not given */
} busiest;

typedef struct machine {
    int32_t number;
    int64_t sends, receives;
} machine;

typedef struct model {
    const tool_model_plan *plan;
    tb__spec *spec;
    tb__checkpoint *checkpoint; /* NULL: the spec has the shapes */
    TB_VEC(tb_tensor_spec) tensors;
    TB_VEC(tb_layout *) layouts; /* of the tensors, on the ranks of their layers and experts */
    tb__arena arena;
    int64_t nbytes;        /* of the tensors, each once */
    TB_VEC(int32_t) ranks; /* of all layouts, ascending */
    tool_load load;
    TB_VEC(machine) machines; /* by number */
    busiest most[NKINDS];
} model;

static void model_fini(model *m) {
    tool_load_fini(&m->load);
    for (size_t i = 0; i < m->layouts.count; i++)
        tb_layout_destroy(m->layouts.item[i]);
    free(m->layouts.item);
    tb__arena_fini(&m->arena);
    free(m->tensors.item);
    free(m->ranks.item);
    free(m->machines.item);
    tb__checkpoint_close(m->checkpoint);
    tb__spec_destroy(m->spec);
}

/* ---- Tensors --------------------------------------------------------------------------------------------------- */

/* Tensors with the same layout share it: that it is the same is found out by comparing pointers. */
static tb_status add_layout(model *m, const tb__spec_mesh *mesh, const tb__spec_form *form, const tb_layout *layout,
                            const char *name, const tb_layout **out) {
    *out = layout;
    if (!mesh->numbers[TB__SPEC_LAYERS].pattern && !mesh->numbers[TB__SPEC_EXPERTS].pattern && !form->has_stage)
        return TB_OK;
    if (!tb__vec_reserve(&m->layouts, 1))
        return TB_NO_MEMORY;
    TB_TRY(tb__spec_layout(mesh, form, layout, name, &m->layouts.item[m->layouts.count]));
    *out = m->layouts.item[m->layouts.count++];
    return TB_OK;
}

static tb_status add_tensor(model *m, const char *name, const tb__spec_rule *rule, const tb_shape *shape,
                            tb_dtype dtype) {
    int64_t nbytes;
    const char *target;
    if (rule->src_quant.kind || rule->dst_quant.kind)
        return tb__fail(TB_REFUSED, "tensor '%.200s' is quantised (%s); a plan has numbers of plain dtypes only", name,
                        rule->where);
    if (rule->src_form.view || rule->dst_form.view || rule->is_more || tb__spec_more(m->spec, rule))
        return tb__fail(TB_REFUSED,
                        "tensor '%.200s' has a view, or becomes several (%s); a plan has tensors that stay whole", name,
                        rule->where);
    if (dtype == TB_DTYPE_NONE)
        return tb__fail(TB_INVALID, "tensor '%.200s' has no dtype in the spec (%s); give --in CHECKPOINT", name,
                        rule->where);
    TB_TRY(tb_shape_size(shape, dtype, NULL, &nbytes));
    if (__builtin_add_overflow(m->nbytes, nbytes, &m->nbytes))
        return tb__fail(TB_TOO_BIG, "the tensors have more than 2^63 bytes");
    TB_TRY(tb__spec_expand(rule, name, rule->dst_form.name, &m->arena, &target));
    tb_tensor_spec tensor = {.size = sizeof tensor,
                             .name = name,
                             .shape = *shape,
                             .src_dtype = dtype,
                             .dst_dtype = rule->dst_dtype == TB_DTYPE_NONE ? dtype : rule->dst_dtype};
    TB_TRY(add_layout(m, &m->spec->src_mesh, &rule->src_form, rule->src, name, &tensor.src));
    TB_TRY(add_layout(m, &m->spec->dst_mesh, &rule->dst_form, rule->dst, target ? target : name, &tensor.dst));
    return tb__vec_push(&m->tensors, tensor) ? TB_OK : TB_NO_MEMORY;
}

static tb_status add_tensors(model *m) {
    TB_TRY(tb__spec_load(m->plan->spec, m->plan->in, NULL, &m->spec));
    if (m->plan->in) {
        TB_TRY(tb__checkpoint_open(m->plan->in, &m->checkpoint));
        for (size_t i = 0; i < m->checkpoint->count; i++) {
            const tb__safetensor *t = m->checkpoint->tensors[i].tensor;
            const tb__spec_rule *rule = tb__spec_find(m->spec, t->name);
            if (!rule)
                return tb__fail(TB_INVALID, "nothing in %s is for tensor '%.200s'", m->plan->spec, t->name);
            if (!rule->is_skipped)
                TB_TRY(add_tensor(m, t->name, rule, &t->shape, t->dtype));
        }
    } else {
        for (size_t i = 0; i < m->spec->ntensors; i++) {
            const tb__spec_rule *rule = &m->spec->tensors[i];
            if (rule->is_skipped)
                continue;
            if (!rule->has_shape)
                return tb__fail(TB_INVALID, "%s has no shape; give --in CHECKPOINT", rule->where);
            TB_TRY(add_tensor(m, rule->match, rule, &rule->shape, rule->src_dtype));
        }
        if (m->spec->nrules > 0 && m->spec->ntensors == 0)
            return tb__fail(TB_INVALID, "%s has rules only, which tell no shapes; give --in CHECKPOINT", m->plan->spec);
    }
    return m->tensors.count ? TB_OK : tb__fail(TB_INVALID, "%s: there is no tensor to move", m->plan->spec);
}

/* Most tensors have the layouts of the one before. */
static tb_status add_ranks(model *m) {
    const tb_layout *last[2] = {NULL, NULL};
    for (size_t i = 0; i < m->tensors.count; i++) {
        const tb_layout *layout[2] = {m->tensors.item[i].src, m->tensors.item[i].dst};
        for (int side = 0; side < 2; side++) {
            for (int32_t k = 0; layout[side] != last[side] && k < tb_layout_nranks(layout[side]); k++) {
                if (!tb__vec_push(&m->ranks, tb_layout_rank_at(layout[side], k)))
                    return TB_NO_MEMORY;
            }
            last[side] = layout[side];
        }
        if (m->ranks.count > TB_MAX_RANKS || i + 1 == m->tensors.count) { /* each once */
            size_t n = 0;
            qsort(m->ranks.item, m->ranks.count, sizeof *m->ranks.item, tb__compare_int32);
            for (size_t k = 0; k < m->ranks.count; k++) {
                if (n == 0 || m->ranks.item[n - 1] != m->ranks.item[k])
                    m->ranks.item[n++] = m->ranks.item[k];
            }
            m->ranks.count = n;
        }
    }
    const tb_plan_opts *opts = m->plan->ir->plan;
    int32_t most = m->ranks.item[m->ranks.count - 1];
    if (opts->hosts && (size_t)most >= opts->nhosts)
        return tb__fail(TB_INVALID, "the host map covers %zu ranks, but rank %" PRId32 " is in a mesh", opts->nhosts,
                        most);
    return TB_OK;
}

/* ---- Figures --------------------------------------------------------------------------------------------------- */

static void note(busiest *b, int64_t nbytes, int32_t from, int32_t to, const char *how) {
    if (nbytes > b->nbytes)
        *b = (busiest){nbytes, from, to, how, b->bandwidth};
}

static tb_status add_machine_bytes(model *m, int32_t number, int64_t sends, int64_t receives) {
    size_t at = 0;
    TB_BISECT(at, m->machines.count, m->machines.item[at].number >= number);
    if (at == m->machines.count || m->machines.item[at].number != number) {
        if (!tb__vec_reserve(&m->machines, 1))
            return TB_NO_MEMORY;
        memmove(m->machines.item + at + 1, m->machines.item + at, (m->machines.count++ - at) * sizeof(machine));
        m->machines.item[at] = (machine){.number = number};
    }
    m->machines.item[at].sends += sends; /* sums of what has been added up without overflow */
    m->machines.item[at].receives += receives;
    return TB_OK;
}

static tb_status find_busiest(model *m) {
    const int32_t *hosts = m->plan->ir->plan->hosts;
    for (size_t i = 0; i < m->load.nranks; i++) {
        const tool_rank_load *r = &m->load.ranks[i];
        note(&m->most[RANK], r->sends, r->rank, 0, "sends");
        note(&m->most[RANK], r->receives, r->rank, 0, "receives");
        if (hosts)
            TB_TRY(add_machine_bytes(m, hosts[r->rank], 0, 0));
    }
    for (size_t i = 0; i < m->load.host_links.count; i++) {
        const tool_link *l = &m->load.host_links.item[i];
        note(&m->most[LINK], l->nbytes, l->from, l->to, NULL);
        TB_TRY(add_machine_bytes(m, l->from, l->nbytes, 0));
        TB_TRY(add_machine_bytes(m, l->to, 0, l->nbytes));
    }
    for (size_t i = 0; i < m->machines.count; i++) {
        const machine *c = &m->machines.item[i];
        note(&m->most[MACHINE], c->sends, c->number, 0, "sends");
        note(&m->most[MACHINE], c->receives, c->number, 0, "receives");
    }
    return TB_OK;
}

/* "20GB", "20GB,50GB", "20GB,50GB,25GB": of a rank, a machine, a link between two. */
static tb_status read_bandwidths(model *m) {
    const char *at = m->plan->bandwidth;
    for (int kind = RANK; at; kind++) {
        char text[32];
        size_t length = strcspn(at, ",");
        if (kind == NKINDS)
            return tb__fail(TB_INVALID,
                            "--bandwidth: '%.40s' is one too many: bytes a second of a rank, of a machine, "
                            "of a link between two",
                            at);
        if (kind > RANK && !m->plan->ir->plan->hosts)
            return tb__fail(TB_INVALID, "--bandwidth: that of machines needs --hosts");
        snprintf(text, sizeof text, "%.*s", (int)(length < sizeof text ? length : sizeof text - 1), at);
        tb_status status = tb__read_size(text, &m->most[kind].bandwidth);
        if (status == TB_OK && m->most[kind].bandwidth < 1)
            status = tb__fail(TB_INVALID, "it must be at least 1 byte a second");
        if (status != TB_OK)
            return tb__fail_within(status, "--bandwidth");
        at = at[length] ? at + length + 1 : NULL;
    }
    return TB_OK;
}

static double seconds_of(const busiest *b) {
    return b->bandwidth ? (double)b->nbytes / (double)b->bandwidth : 0;
}

static int slowest(const model *m) {
    int kind = RANK;
    for (int k = MACHINE; k < NKINDS; k++)
        kind = seconds_of(&m->most[k]) > seconds_of(&m->most[kind]) ? k : kind;
    return kind;
}

/* "rank 3 sends 12 MiB", "host 0 to host 1: 96 MiB" */
static void add_busiest(tb__text *out, const busiest *b, int kind) {
    if (kind == LINK)
        tb__text_add(out, "host %" PRId32 " to host %" PRId32 ": %s", b->from, b->to, tool_size(b->nbytes).text);
    else
        tb__text_add(out, "%s %" PRId32 " %s %s", kind == RANK ? "rank" : "host", b->from, b->how,
                     tool_size(b->nbytes).text);
}

/* ---- Text ------------------------------------------------------------------------------------------------------ */

static int compare_loads(const void *left, const void *right) {
    const tool_rank_load *a = left, *b = right;
    int64_t x = a->sends > a->receives ? a->sends : a->receives, y = b->sends > b->receives ? b->sends : b->receives;
    return x != y ? (x < y ? 1 : -1) : (a->rank > b->rank) - (a->rank < b->rank);
}

static void add_bytes(tool_table *table, int64_t nbytes) {
    tool_table_cell(table, "%" PRId64, nbytes);
    tool_table_cell(table, "%s", nbytes >= 1024 ? tool_size(nbytes).text : "");
}

static tool_table make_table(const char *what, bool has_kept) {
    tool_table table = {0};
    const char *titles[] = {what, "sends", "", "receives", "", "keeps", ""};
    for (size_t i = 0; i < (has_kept ? 7 : 5); i++)
        tool_table_column(&table, titles[i], true);
    return table;
}

/* The busiest first where not all are shown. */
static tb_status add_rank_table(tb__text *out, const model *m) {
    size_t n = m->load.nranks, shown = m->plan->all || n <= MOST_ROWS ? n : MOST_ROWS;
    tool_rank_load *ranks = tb__malloc(n, sizeof *ranks);
    if (!ranks)
        return TB_NO_MEMORY;
    memcpy(ranks, m->load.ranks, n * sizeof *ranks);
    if (shown < n)
        qsort(ranks, n, sizeof *ranks, compare_loads);
    tool_table table = make_table("rank", true);
    for (size_t i = 0; i < shown; i++) {
        tool_table_cell(&table, "%" PRId32, ranks[i].rank);
        add_bytes(&table, ranks[i].sends);
        add_bytes(&table, ranks[i].receives);
        add_bytes(&table, ranks[i].keeps);
    }
    free(ranks);
    tool_table_finish(&table, out);
    if (shown < n)
        tb__text_add(out, "%sthe busiest %zu of %zu ranks; --all shows the others%s\n", tool_dim(), shown, n,
                     tool_plain());
    tb__text_add(out, "\n");
    return TB_OK;
}

static void add_machine_table(tb__text *out, const model *m) {
    tool_table table = make_table("host", false);
    for (size_t i = 0; i < m->machines.count; i++) {
        tool_table_cell(&table, "%" PRId32, m->machines.item[i].number);
        add_bytes(&table, m->machines.item[i].sends);
        add_bytes(&table, m->machines.item[i].receives);
    }
    tool_table_finish(&table, out);
}

static tb_status add_text(tb__text *out, const model *m) {
    tb__text_add(out, "%s%s%s: %zu tensor%s, %s, %zu ranks\n\n", tool_bold(), m->plan->spec, tool_plain(),
                 m->tensors.count, m->tensors.count == 1 ? "" : "s", tool_size(m->nbytes).text, m->load.nranks);
    TB_TRY(add_rank_table(out, m));
    if (m->machines.count > 0) {
        add_machine_table(out, m);
        tool_add_load(out, &m->load, m->plan->all);
    }
    tb__text_add(out, "moves     ");
    tool_add_size(out, tool_load_total(&m->load));
    tb__text_add(out, " between ranks\n");
    for (int kind = RANK; kind < NKINDS; kind++) {
        if (m->most[kind].nbytes == 0)
            continue;
        tb__text_add(out, "busiest   ");
        add_busiest(out, &m->most[kind], kind);
        if (m->most[kind].bandwidth)
            tb__text_add(out, ", %.3g s at %s/s", seconds_of(&m->most[kind]), tool_size(m->most[kind].bandwidth).text);
        tb__text_add(out, "\n");
    }
    if (m->plan->bandwidth)
        tb__text_add(out, "time      at least %.3g s\n", seconds_of(&m->most[slowest(m)]));
    return TB_OK;
}

static void add_links_json(tb__text *out, const char *key, const tool_links *links) {
    tb__text_add(out, ",\"%s\":[", key);
    for (size_t i = 0; i < links->count; i++)
        tb__text_add(out, "%s{\"from\":%" PRId32 ",\"to\":%" PRId32 ",\"bytes\":%" PRId64 "}", i ? "," : "",
                     links->item[i].from, links->item[i].to, links->item[i].nbytes);
    tb__text_add(out, "]");
}

static void add_json(tb__text *out, const model *m) {
    tb__text_add(out, "{\"tensors\":%zu,\"bytes\":%" PRId64 ",\"moves\":%" PRId64 ",\"ranks\":[", m->tensors.count,
                 m->nbytes, tool_load_total(&m->load));
    for (size_t i = 0; i < m->load.nranks; i++)
        tb__text_add(out,
                     "%s{\"rank\":%" PRId32 ",\"sends\":%" PRId64 ",\"receives\":%" PRId64 ",\"keeps\":%" PRId64 "}",
                     i ? "," : "", m->load.ranks[i].rank, m->load.ranks[i].sends, m->load.ranks[i].receives,
                     m->load.ranks[i].keeps);
    tb__text_add(out, "]");
    add_links_json(out, "links", &m->load.rank_links);
    if (m->plan->ir->plan->hosts) {
        tb__text_add(out, ",\"hosts\":[");
        for (size_t i = 0; i < m->machines.count; i++)
            tb__text_add(out, "%s{\"host\":%" PRId32 ",\"sends\":%" PRId64 ",\"receives\":%" PRId64 "}", i ? "," : "",
                         m->machines.item[i].number, m->machines.item[i].sends, m->machines.item[i].receives);
        tb__text_add(out, "]");
        add_links_json(out, "host_links", &m->load.host_links);
    }
    if (m->plan->bandwidth)
        tb__text_add(out, ",\"seconds\":%.6g", seconds_of(&m->most[slowest(m)]));
    tb__text_add(out, "}\n");
}

static tb_status draw(const model *m, tb__text *picture) {
    tb__text title = {0}, figures = {0};
    tb__text_add(&title, "%zu tensor%s, %s", m->tensors.count, m->tensors.count == 1 ? "" : "s",
                 tool_size(m->nbytes).text);
    for (int kind = RANK; kind < NKINDS; kind++) {
        if (m->most[kind].nbytes == 0)
            continue;
        tb__text_add(&figures, "%s", figures.count ? "; " : "the busiest: ");
        add_busiest(&figures, &m->most[kind], kind);
    }
    tb_status status = title.failed || figures.failed
                           ? TB_NO_MEMORY
                           : tool_draw_load(picture, title.data, figures.data ? figures.data : "nothing moves",
                                            &m->load, m->plan->ir->plan->hosts);
    tb__text_fini(&title);
    tb__text_fini(&figures);
    return status;
}

static tb_status work_out(model *m, tb__text *out, tb__text *picture) {
    TB_TRY(read_bandwidths(m));
    TB_TRY(add_tensors(m));
    TB_TRY(add_ranks(m));
    TB_TRY(tool_load_fill(&m->load, m->tensors.item, m->tensors.count, m->ranks.item, m->ranks.count, m->plan->ir));
    TB_TRY(find_busiest(m));
    if (m->plan->wants_picture)
        TB_TRY(draw(m, picture));
    if (!m->plan->is_json)
        return add_text(out, m);
    add_json(out, m);
    return TB_OK;
}

tb_status tool_plan_model(const tool_model_plan *plan, tb__text *out, tb__text *picture) {
    model m = {.plan = plan};
    tb_status status = work_out(&m, out, picture);
    model_fini(&m);
    return status;
}
