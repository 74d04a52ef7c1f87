/* What `spec` and `reshard --to` share: options that say how the two sides have a model of a well-known family. */
#include "tools/model.h"
#include "reshard/model_config.h"
#include "reshard/model_spec.h"

#include "base/int.h"

#include <string.h>

enum { TO, SIZES = 3, FROM = SIZES + 1 };

static tb_status read_side(const tool_option *options, const char *const *value, tb__model_side *out) {
    int64_t *const sizes[] = {&out->tp, &out->pp, &out->ep};
    TB_TRY(tb__model_form_parse(value[0] ? value[0] : "hf", &out->form));
    for (int i = 0; i < SIZES; i++) {
        const char *at = value[i + 1];
        if (at && (!tb__read_int(&at, sizes[i]) || *at || *sizes[i] < 1 || *sizes[i] > 4096))
            return tb__fail(TB_INVALID, "--%s: '%.40s' is not a number between 1 and 4096", options[i + 1].name,
                            value[i + 1]);
    }
    return TB_OK;
}

void tool_say_notes(tb__text *notes) {
    char *at = notes->data, *end;
    for (; at && *at && (end = strchr(at, '\n')); at = end + 1)
        tool_say("note: %.*s", (int)(end - at), at);
    tb__text_fini(notes);
}

tb_status tool_model_spec(const char *dir, const tool_option *options, const char *const *value, json_t **out) {
    tb__model_side src = {0}, dst = {0};
    tb__text notes = {0};
    json_t *config;
    TB_TRY(read_side(&options[TO], &value[TO], &dst));
    TB_TRY(read_side(&options[FROM], &value[FROM], &src));
    TB_TRY(tb__model_config_load(dir, &config));
    tb_status status = tb__model_spec(config, NULL, &src, &dst, out, &notes);
    json_decref(config);
    tool_say_notes(&notes);
    return status;
}
