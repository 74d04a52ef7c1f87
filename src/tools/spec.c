/* tensorbus spec: the spec of a resharding, for models of well-known families. */
#include "reshard/disk.h"
#include "reshard/model_spec.h"
#include "tools/model.h"

enum { FROM, TO, NOPTIONS = TO + 8 };

static const tool_option options[NOPTIONS + 1] = {
    [FROM] = {"from", "DIR", "the model: config.json and its files"},
    [TO] = TOOL_MODEL_OPTIONS,
};

static const char details[] =
    "Prints a spec for `tensorbus reshard`, which converts a model's files to those that another program loads,\n"
    "and checks it against the files. Families: Llama, Mistral, Qwen2, Qwen3, Qwen3-MoE, Mixtral, DeepSeek-V2\n"
    "and V3, Gemma, Gemma 2 and Gemma 3 (text). If config.json lacks something, the command reports it on\n"
    "standard error.\n"
    "\n"
    "  hf        Hugging Face's files: one rank\n"
    "  vllm      the weights of vLLM's load_format=\"sharded_state\": qkv_proj, gate_up_proj and experts fused\n"
    "  megatron  ranks of Megatron-Core with Transformer Engine: interleaved linear_qkv, stages, experts\n"
    "\n"
    "Examples:\n"
    "  tensorbus spec --from model --to vllm --tp 4 >spec.json\n"
    "  tensorbus spec --from step_100 --from-form megatron --from-tp 2 --from-pp 2 --to hf >spec.json\n";

static tb_status make(const char *const *value, tb__text *out) {
    json_t *json = NULL;
    tb__spec *spec = NULL;
    tb__disk *disk = NULL;
    if (!value[FROM] || !value[TO])
        return tb__fail(TB_INVALID, "--%s is missing; see `tensorbus spec --help`", value[FROM] ? "to" : "from");
    tb_status status = tool_model_spec(value[FROM], &options[TO], &value[TO], &json);
    if (status == TB_OK)
        status = tb__spec_from_json(json, &spec);
    if (status == TB_OK)
        status = tb__disk_open(spec, value[FROM], false, &disk);
    if (status == TB_OK)
        tb__model_spec_format(json, out);
    tb__disk_close(disk);
    tb__spec_destroy(spec);
    json_decref(json);
    return status;
}

static int run(const tb__config *config, const char *const *value) {
    (void)config;
    tb__text out = {0};
    tb_status status = make(value, &out);
    if (status == TB_OK)
        return tool_print(&out);
    tb__text_fini(&out);
    return tool_fail_status(status);
}

const tool_command tool_spec = {
    .name = "spec",
    .summary = "print the spec that reshards a model of a well-known family",
    .usage = "--from DIR --to FORM [--tp N] [--pp N] [--ep N] [--from-form FORM] [--from-tp N] ...",
    .details = details,
    .options = options,
    .run = run,
};
