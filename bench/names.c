/* How long it takes to resolve and match the names of a model with 10,000 experts, and to work out its views. Each case
 * prints its figure, what it must not exceed, and whether it does; the exit status tells too. */
#include "measure.h"

#include "tensorbus/plan.h"

#include <stdio.h>
#include <stdlib.h>
#include <time.h>

enum { EXPERTS = 10000, KINDS = 3, PARAMS = EXPERTS * KINDS, REPEATS = 7 };

static void must(tb_status status) {
    if (status != TB_OK) {
        fprintf(stderr, "bench/names: %s: %s\n", tb_status_string(status), tb_error_detail());
        exit(1);
    }
}

static bool decision(const char *what, double milliseconds, double limit) {
    bool ok = milliseconds <= limit;
    printf("  %-58s %9.4f ms   (at most %g) %s\n", what, milliseconds, limit, ok ? "ok" : "TOO SLOW");
    return ok;
}

static char text[PARAMS][64];
static const char *params[PARAMS], *names[2][PARAMS];

/* Both sides' names in the whole model, and which is which: what a refit with a new map of experts has to do again. */
static double resolve_and_match(void) {
    static const tb_rule rules[2][2] = {
        {{"layers.*.mlp.experts.*.w1", "model.\\1.\\2.gate", NULL}, {"layers.*", "model.\\1", NULL}},
        {{"layers.*.mlp.experts.*.w1", "model.\\1.\\2.gate", NULL}, {"layers.*", "model.\\1", NULL}},
    };
    static int64_t map[2][EXPERTS];
    for (int64_t i = 0; i < EXPERTS; i++) {
        map[0][i] = i;
        map[1][i] = i * 7919 % EXPERTS;
    }
    double begin = now();
    tb_names *resolver[2];
    tb_parts parts[2];
    tb_match match = {.size = sizeof match};
    for (int side = 0; side < 2; side++) {
        must(tb_names_create(&(tb_names_opts){.size = sizeof(tb_names_opts),
                                              .stage = 1,
                                              .nstages = 2,
                                              .nlayers = 32,
                                              .nexperts = EXPERTS,
                                              .expert_map = map[side],
                                              .nexpert_map = EXPERTS,
                                              .rules = rules[side],
                                              .nrules = 2},
                             &resolver[side]));
        must(tb_names_resolve(resolver[side], params, PARAMS, &parts[side]));
        for (size_t i = 0; i < PARAMS; i++)
            names[side][i] = parts[side].part[i].name;
    }
    must(tb_match_names(names[0], PARAMS, names[1], PARAMS, NULL, &match));
    double seconds = now() - begin;
    tb_match_fini(&match);
    for (int side = 0; side < 2; side++) {
        tb_parts_fini(&parts[side]);
        tb_names_destroy(resolver[side]);
    }
    return seconds;
}

/* Layout and binding of q in a linear_qkv that 64 ranks share. */
static double view_qkv(void) {
    tb_shape shape = {2, {(int64_t)64 * 10 * 128, 8192}}, local = {2, {(int64_t)10 * 128, 8192}}, canonical;
    tb_layout *layout, *viewed;
    tb_view *view;
    tb_binding binding, bound;
    must(tb_layout_parse("mesh=64 place=S0", &layout));
    must(tb_view_parse("split(0,64,10,128) slice(1,0,8)", &view));
    must(tb_binding_contiguous(NULL, 0, TB_BF16, &local, &binding));
    double begin = now();
    must(tb_view_apply(view, &shape, layout, &canonical, &viewed));
    must(tb_view_bind(view, &shape, layout, 5, &binding, &bound));
    double seconds = now() - begin;
    tb_layout_destroy(viewed);
    tb_view_destroy(view);
    tb_layout_destroy(layout);
    return seconds;
}

static double best_of(double (*run)(void)) {
    double best = run();
    for (int i = 1; i < REPEATS; i++) {
        double seconds = run();
        best = seconds < best ? seconds : best;
    }
    return 1e3 * best;
}

int main(void) {
    static const char *const kinds[] = {"w1", "w2", "w3"};
    for (int i = 0; i < PARAMS; i++) {
        snprintf(text[i], sizeof text[i], "layers.3.mlp.experts.%d.%s", i / KINDS, kinds[i % KINDS]);
        params[i] = text[i];
    }
    printf("names:\n");
    bool ok = decision("10,000 experts of 3 parameters, both sides", best_of(resolve_and_match), 50);
    ok = decision("view and binding of q, 64 ranks", best_of(view_qkv), 1) && ok;
    return ok ? 0 : 1;
}
