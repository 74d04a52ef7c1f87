/* tensorbus plan: what moves between two layouts of a tensor. */
#include "tools/tools.h"

#include "layout/layout.h"

#include <inttypes.h>
#include <string.h>

enum { SHAPE, DTYPE, SRC, DST, SPEC, IN, BANDWIDTH, HOSTS, RANK, BUCKETS, ALL, JSON, SVG, HTML, JSONL, NOPTIONS };

static const tool_option options[NOPTIONS + 1] = {
    [SHAPE] = {"shape", "N,N,...", "global shape of the tensor; '' is a scalar"},
    [DTYPE] = {"dtype", "DTYPE", "dtype, such as bf16"},
    [SRC] = {"src", "LAYOUT", "the layout of the source, such as 'mesh=4 place=S0'"},
    [DST] = {"dst", "LAYOUT", "the layout of the target, such as 'mesh=2,2 place=R,S1 ranks=4..7'"},
    [SPEC] = {"spec", "FILE", "plan a whole model instead: a spec of `tensorbus reshard`"},
    [IN] = {"in", "PATH", "with --spec: take names, shapes and dtypes from this checkpoint"},
    [BANDWIDTH] = {"bandwidth", "RATE,...",
                   "with --spec: bytes per second of a rank, a host, a link between hosts: 20GB,50GB"},
    [HOSTS] = {"hosts", "HOST,...",
               "host numbers of rank 0, 1, 2, ...; shows the bytes between hosts, and their routes"},
    [RANK] = {"rank", "RANK", "show only this rank, box by box"},
    [BUCKETS] = {"buckets", "SIZE",
                 "show buckets of up to SIZE (16MiB, 30MB; 1: one for each chunk; default: the setting)"},
    [ALL] = {"all", NULL, "show all rows, however many there are"},
    [JSON] = {"json", NULL, "print JSON"},
    [SVG] = {"svg", "FILE", "draw both sides and the traffic into FILE; -: print only the picture"},
    [HTML] = {"html", "FILE", "the same as a web page, with the transfers of each rank; not with --svg"},
    [JSONL] = {"jsonl", "FILE", "answer each line of FILE (-: standard input) with a line of JSON"},
};

static const char details[] =
    "Bytes and chunks are counted for every receiver. A copy within one rank is LOCAL, and counts as neither\n"
    "sent nor received. The lower bound is what the busiest sender would send if replicas divided the work\n"
    "evenly. Boxes are half-open ranges of indices in a rank's own part. Kinds: P2P; BROADCAST, one box for\n"
    "several ranks; LOCAL; NONE, for a rank that contributes to a reduction and sends nothing. `tensorbus\n"
    "layout --help` explains how layouts are written, `tensorbus config` shows the default size of buckets.\n"
    "\n"
    "With --spec all tensors are planned together, as one batch. The command prints what each rank and host\n"
    "sends and receives, the bytes from host to host, which of these is the busiest, and, with --bandwidth, the\n"
    "minimum time; bandwidths hold for each direction separately. Equal rank numbers on both sides mean the\n"
    "same process. If the target is in other processes, give its mesh other ranks in the spec: {\"mesh\": [32],\n"
    "\"ranks\": [64, 65, ...]}.\n"
    "\n"
    "A line for --jsonl has shape, dtype, src and dst, each of these with mesh, ranks and placements; the\n"
    "answer has check, chunks, send_bytes, recv_bytes, max_send and min_max_send, or error:\n"
    "  {\"shape\":[8],\"dtype\":\"bf16\",\"src\":{\"mesh\":[2],\"ranks\":[0,1],\"placements\":[[\"S\",0]]},\n"
    "   \"dst\":{\"mesh\":[1],\"ranks\":[2],\"placements\":[[\"R\"]]}}\n"
    "\n"
    "Example:\n"
    "  tensorbus plan --shape 4096,4096 --dtype bf16 --src 'mesh=4 place=S0' \\\n"
    "      --dst 'mesh=2,2 place=R,S1 ranks=4..7'\n";

typedef TB_VEC(int32_t) rank_list;

/* What is asked for. */
typedef struct request {
    int32_t rank; /* TB_NO_RANK: all of them */
    rank_list hosts;
    tb_plan_opts plan;
    tb_ir_opts ir;
    tool_plan_view view;
} request;

static tb_status read_hosts(const char *text, rank_list *out) {
    const char *at = text;
    do {
        int64_t host;
        const char *begin = at;
        if (!tb__read_int(&at, &host) || host < 0 || host > INT32_MAX)
            return tb__fail(TB_INVALID, "--hosts: expected a host number at '%.40s'", begin);
        if (out->count == TB_MAX_RANKS)
            return tb__fail(TB_TOO_BIG, "--hosts: more than %d hosts are listed", TB_MAX_RANKS);
        if (!tb__vec_push(out, (int32_t)host))
            return TB_NO_MEMORY;
    } while (tb__accept(&at, ','));
    tb__skip_space(&at);
    return *at ? tb__fail(TB_INVALID, "--hosts: unexpected '%.40s'", at) : TB_OK;
}

static tb_status read_layouts(const char *const *value, tb_layout **src, tb_layout **dst) {
    tb_status status = tb_layout_parse(value[SRC], src);
    if (status != TB_OK)
        return tb__fail_within(status, "--src");
    status = tb_layout_parse(value[DST], dst);
    if (status != TB_OK) {
        tb_layout_destroy(*src);
        return tb__fail_within(status, "--dst");
    }
    return TB_OK;
}

static tb_status read_ways(const tb__config *config, const char *const *value, request *r) {
    *r = (request){.rank = TB_NO_RANK,
                   .plan.size = sizeof r->plan,
                   .ir = {.size = sizeof r->ir,
                          .bucket_size = tb__config_bucket_size(config),
                          .staging_bytes = tb__config_staging_bytes(config),
                          .max_in_flight = tb__config_max_in_flight(config),
                          .plan = &r->plan}};
    if (value[RANK])
        TB_TRY(tool_read_rank(value[RANK], &r->rank));
    if (value[HOSTS]) {
        TB_TRY(read_hosts(value[HOSTS], &r->hosts));
        r->plan.hosts = r->hosts.item;
        r->plan.nhosts = r->hosts.count;
    }
    if (value[BUCKETS] && strcmp(value[BUCKETS], "default") != 0) {
        tb_status status = tb__read_size(value[BUCKETS], &r->ir.bucket_size);
        if (status == TB_OK && r->ir.bucket_size < 1)
            status = tb__fail(TB_INVALID, "a bucket is at least 1 byte");
        if (status != TB_OK)
            return tb__fail_within(status, "--buckets");
    }
    return TB_OK;
}

static tb_status read_request(const tb__config *config, const char *const *value, request *r) {
    tb_shape shape;
    tb_dtype dtype;
    tb_layout *src, *dst;
    TB_TRY(read_ways(config, value, r));
    TB_TRY(tb_shape_parse(value[SHAPE], &shape));
    TB_TRY(tb_dtype_parse(value[DTYPE], &dtype));
    TB_TRY(read_layouts(value, &src, &dst));
    return tool_plan_view_init(&r->view, src, dst, &shape, dtype, &r->plan);
}

static tb_status add_buckets(tb__text *out, const request *r, tb_plan_cache *cache, int32_t rank, bool as_json) {
    const tool_plan_view *v = &r->view;
    tb_tensor_spec spec = {.size = sizeof spec,
                           .name = "tensor",
                           .shape = v->shape,
                           .src = v->src,
                           .dst = v->dst,
                           .src_dtype = v->dtype,
                           .dst_dtype = v->dtype};
    tb_ir *ir;
    char *dump;
    TB_TRY(tb_ir_create(rank, &spec, 1, cache, &r->ir, &ir));
    tb_status status = as_json ? tb_ir_dump_json(ir, &dump) : tb_ir_dump_text(ir, &dump);
    tb_ir_destroy(ir);
    if (status != TB_OK)
        return status;
    size_t length = strlen(dump);
    while (length > 0 && dump[length - 1] == '\n')
        dump[--length] = '\0';
    tb__text_add(out, "%s", dump);
    free(dump);
    return TB_OK;
}

/* The buckets of one rank, or of every rank in turn, which in JSON is an array. */
static tb_status add_all_buckets(tb__text *out, const request *r, bool as_json) {
    tb_plan_cache *cache;
    TB_TRY(tb_plan_cache_create(&cache));
    tb_status status = TB_OK;
    if (r->rank != TB_NO_RANK) {
        status = add_buckets(out, r, cache, r->rank, as_json);
    } else {
        const tb_plan_stats *s = &r->view.stats;
        tb__text_add(out, as_json ? "[" : "");
        for (int32_t i = 0; i < s->nranks && status == TB_OK; i++) {
            tb__text_add(out, "%s", i == 0 ? "" : as_json ? ",\n" : "\n\n");
            status = add_buckets(out, r, cache, s->ranks[i], as_json);
        }
        tb__text_add(out, as_json ? "]" : "");
    }
    tb__text_add(out, "\n");
    tb_plan_cache_destroy(cache);
    return status;
}

/* Everything but the printing. */
static tb_status prepare(const tb__config *config, const char *const *value, request *r, tb__text *out,
                         tb__text *picture) {
    TB_TRY(read_request(config, value, r));
    r->view.hosts = r->hosts.item;
    bool is_whole = r->rank == TB_NO_RANK || value[SVG] || value[HTML];
    if (is_whole)
        TB_TRY(tool_plan_view_fill(&r->view));
    if (value[SVG])
        TB_TRY(tool_draw_plan(picture, &r->view));
    if (value[HTML])
        TB_TRY(tool_draw_plan_page(picture, &r->view));
    if (value[BUCKETS])
        return add_all_buckets(out, r, value[JSON] != NULL);
    if (r->rank != TB_NO_RANK)
        return value[JSON] ? tool_add_rank_json(out, &r->view, r->rank)
                           : tool_add_rank(out, &r->view, r->rank, value[ALL] != NULL);
    if (!value[JSON]) {
        tool_add_plan(out, &r->view, value[ALL] != NULL);
        return value[HOSTS] ? tool_add_hosts(out, &r->view, &r->ir, value[ALL] != NULL) : TB_OK;
    }
    char *hosts = NULL;
    if (value[HOSTS])
        TB_TRY(tool_hosts_json(&r->view, &r->ir, &hosts));
    tool_add_plan_json(out, &r->view, hosts);
    free(hosts);
    return TB_OK;
}

static void add_map(tb__text *out, const char *key, const tb_plan_stats *s, const int64_t *bytes) {
    tb__text_add(out, ",\"%s\":{", key);
    for (int32_t i = 0; i < s->nranks; i++)
        tb__text_add(out, "%s\"%" PRId32 "\":%" PRId64, i ? "," : "", s->ranks[i], bytes[i]);
    tb__text_add(out, "}");
}

static tb_status answer_plan(const tb_plan *plan, tb__text *out) {
    tb_plan_stats s = {.size = sizeof s};
    TB_TRY(tb_plan_check(plan));
    TB_TRY(tb_plan_stats_compute(plan, &s));
    tb__text_add(out, "{\"check\":\"ok\",\"chunks\":%" PRId64, s.nchunks);
    add_map(out, "send_bytes", &s, s.send_bytes);
    add_map(out, "recv_bytes", &s, s.recv_bytes);
    tb__text_add(out, ",\"max_send\":%" PRId64 ",\"min_max_send\":%" PRId64 "}", s.max_send, s.min_max_send);
    tb_plan_stats_fini(&s);
    return TB_OK;
}

static tb_status read_side(const json_t *line, const char *key, tb_layout **out) {
    const json_t *side = json_object_get(line, key);
    if (!json_is_object(side))
        return tb__fail(TB_INVALID, "'%s' is not an object with mesh, ranks and placements", key);
    tb_status status = tb__layout_from_json(side, out);
    return status == TB_OK ? TB_OK : tb__fail_within(status, "'%s'", key);
}

static tb_status answer(const json_t *line, tb__text *out) {
    tb_shape shape;
    tb_dtype dtype;
    const char *dtype_name = json_string_value(json_object_get(line, "dtype"));
    TB_TRY(tb__shape_from_json(json_object_get(line, "shape"), &shape));
    if (!dtype_name)
        return tb__fail(TB_INVALID, "'dtype' is not a string");
    TB_TRY(tb_dtype_parse(dtype_name, &dtype));
    tb_layout *src = NULL, *dst = NULL;
    tb_plan *plan = NULL;
    tb_status status = read_side(line, "src", &src);
    if (status == TB_OK)
        status = read_side(line, "dst", &dst);
    if (status == TB_OK)
        status = tb_plan_create(src, dst, &shape, dtype, NULL, &plan);
    if (status == TB_OK)
        status = answer_plan(plan, out);
    tb_plan_destroy(plan);
    tb_layout_destroy(src);
    tb_layout_destroy(dst);
    return status;
}

static tb_status prepare_model(const tb__config *config, const char *const *value, request *r, tb__text *out,
                               tb__text *picture) {
    static const int others[] = {SHAPE, DTYPE, SRC, DST, RANK, HTML};
    for (size_t i = 0; i < sizeof others / sizeof *others; i++) {
        if (value[others[i]])
            return tb__fail(TB_INVALID, "--%s does not go with --spec", options[others[i]].name);
    }
    TB_TRY(read_ways(config, value, r));
    return tool_plan_model(&(tool_model_plan){.spec = value[SPEC],
                                              .in = value[IN],
                                              .bandwidth = value[BANDWIDTH],
                                              .ir = &r->ir,
                                              .all = value[ALL] != NULL,
                                              .is_json = value[JSON] != NULL,
                                              .wants_picture = value[SVG] != NULL},
                           out, picture);
}

static int run(const tb__config *config, const char *const *value) {
    static const int needed[] = {SHAPE, DTYPE, SRC, DST};
    if (value[JSONL]) {
        int exit_status = tool_expect_alone(options, value, JSONL);
        return exit_status == TOOL_OK ? tool_answer_lines(value[JSONL], answer) : exit_status;
    }
    if (!value[SPEC] && (value[IN] || value[BANDWIDTH]))
        return tool_fail(TOOL_BAD_INPUT, "--%s needs --spec", options[value[IN] ? IN : BANDWIDTH].name);
    for (size_t i = 0; !value[SPEC] && i < sizeof needed / sizeof *needed; i++) {
        if (!value[needed[i]])
            return tool_fail(TOOL_BAD_INPUT, "--%s is missing; see `tensorbus plan --help`", options[needed[i]].name);
    }
    if (value[SVG] && value[HTML])
        return tool_fail(TOOL_BAD_INPUT, "--html has the picture in it: give it or --svg, not both");
    request r = {0};
    tb__text out = {0}, picture = {0};
    tb_status status = (value[SPEC] ? prepare_model : prepare)(config, value, &r, &out, &picture);
    int exit_status = status == TB_OK ? tool_deliver(&out, &picture, value[SVG] ? value[SVG] : value[HTML])
                                      : tool_fail_status(status);
    tb__text_fini(&out);
    tb__text_fini(&picture);
    tool_plan_view_fini(&r.view);
    free(r.hosts.item);
    return exit_status;
}

const tool_command tool_plan = {
    .name = "plan",
    .summary = "show what moves between two layouts of a tensor, or of a model",
    .usage = "--shape N,N,... --dtype DTYPE --src LAYOUT --dst LAYOUT [OPTION...]\n"
             "--spec FILE [--in PATH] [--bandwidth RATE,...] [OPTION...]\n"
             "--jsonl FILE",
    .details = details,
    .options = options,
    .run = run,
};
