"""Tiny models of well-known families with random weights, made from configurations of transformers in code."""

from __future__ import annotations

from pathlib import Path
from typing import Any

SIZES = {
    "hidden_size": 256,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "vocab_size": 96,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_MLA = {
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "moe_intermediate_size": 32,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "num_key_value_heads": 8,
}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {  # the configuration's class, and options
    "Llama": ("LlamaConfig", {}),
    "Llama, tied": ("LlamaConfig", {"tie_word_embeddings": True}),
    "Qwen2": ("Qwen2Config", {}),
    "Qwen3": ("Qwen3Config", {"head_dim": 32}),
    "Qwen3-MoE": (
        "Qwen3MoeConfig",
        {"head_dim": 32, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
    ),
    "Mixtral": ("MixtralConfig", {"num_local_experts": 4}),
    "OLMoE": ("OlmoeConfig", {"num_experts": 8, "num_experts_per_tok": 2}),
    "DeepSeek-V2": ("DeepseekV2Config", {**_MLA, "q_lora_rank": None, "n_group": 1, "topk_group": 1}),
    "DeepSeek-V3": (
        "DeepseekV3Config",
        {**_MLA, "q_lora_rank": 24, "n_group": 2, "topk_group": 1, "topk_method": "noaux_tc"},
    ),
    "Gemma": ("GemmaConfig", {"head_dim": 32}),
    "Gemma 2": ("Gemma2Config", {"head_dim": 32}),
    "Gemma 3": ("Gemma3TextConfig", {"head_dim": 32}),
    "Phi-3": ("Phi3Config", {"head_dim": 32}),
    "GPT-OSS": (
        "GptOssConfig",
        {"head_dim": 32, "num_key_value_heads": 4, "num_local_experts": 4, "num_experts_per_tok": 2},
    ),
    "Mistral": ("MistralConfig", {"head_dim": 32}),
    "Granite": ("GraniteConfig", {}),
    "GLM-4": ("Glm4Config", {"head_dim": 32}),
}

# Those that `tensorbus spec` knows.
DESCRIBED = [name for name in FAMILIES if name not in {"OLMoE", "Phi-3", "GPT-OSS", "Granite", "GLM-4"}]


def make(family: str, folder: Path, seed: int) -> Path:
    """A checkpoint of the family with random weights; the same for the same seed."""
    import torch
    import transformers

    kind, options = FAMILIES[family]
    path = folder / f"{family.replace(' ', '').replace(',', '-')}-{seed}"
    if path.exists():
        return path
    config = getattr(transformers, kind)(**{**SIZES, **options})
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for tensor in [*model.parameters(), *model.buffers()]:
            if tensor.is_floating_point():
                tensor.copy_(torch.randn(tensor.shape) * 0.1)
    model.save_pretrained(path)
    return path
