/* The spec of a resharding. Every rule that is accepted is found by its own name, and has both layouts or is skipped.
 */
#include "fuzz.h"
#include "reshard/spec.h"

static void check_rule(const tb__spec_rule *rule) {
    expect(rule->match && *rule->where);
    expect(rule->is_skipped || (rule->src && rule->dst));
    if (rule->is_skipped)
        return;
    expect_text_form(rule->src);
    expect_text_form(rule->dst);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    tb__spec *spec = NULL;
    char *text = fuzz_string(data, size);
    if (size <= 4096 && succeeded(tb__spec_parse(text, size, &spec))) {
        for (size_t i = 0; i < spec->ntensors; i++) {
            check_rule(&spec->tensors[i]);
            expect(tb__spec_find(spec, spec->tensors[i].match) == &spec->tensors[i]);
        }
        for (size_t i = 0; i < spec->nrules; i++)
            check_rule(&spec->rules[i]);
        const tb__spec_rule *found = tb__spec_find(spec, "model.layers.0.mlp.up_proj.weight");
        tb__arena arena = {0};
        const char *group = NULL;
        if (found && !found->is_skipped)
            (void)succeeded(tb__spec_group(found, "model.layers.0.mlp.up_proj.weight", &arena, &group));
        tb__arena_fini(&arena);
        tb__spec_destroy(spec);
    }
    free(text);
    return 0;
}
