"""Models of every family of `tensorbus spec`: there and back through vLLM's and Megatron's forms, bit for bit."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors import numpy as safetensors_numpy

from tensorbus import _c

Array = np.ndarray[Any, Any]
Shapes = dict[str, tuple[int, ...]]

SIZES: dict[str, Any] = {
    "hidden_size": 48,
    "intermediate_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 6,
    "vocab_size": 150,
}
MOE = {"moe_intermediate_size": 16}
DEEPSEEK = {
    **MOE,
    "num_key_value_heads": 8,
    "n_routed_experts": 4,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 10,
    "qk_rope_head_dim": 2,
    "qk_nope_head_dim": 4,
    "v_head_dim": 6,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama-tied": {"tie_word_embeddings": True},
    "mistral": {},
    "qwen2": {"bias": True},
    "qwen3": {"norms": True},
    "qwen3_moe": {"norms": True, **MOE, "num_experts": 4, "mlp_only_layers": [2]},
    "mixtral": {"num_local_experts": 4},
    "deepseek_v2": DEEPSEEK,
    "deepseek_v3": {**DEEPSEEK, "q_lora_rank": 12, "correction": True},
    "gemma": {"tie_word_embeddings": True},
    "gemma2": {"tie_word_embeddings": True},
    "gemma3_text": {"tie_word_embeddings": True, "norms": True},
}


def attention(c: dict[str, Any]) -> Shapes:
    h, d, q, kv = c["hidden_size"], c["head_dim"], c["num_attention_heads"], c["num_key_value_heads"]
    if "kv_lora_rank" not in c:
        out: Shapes = {"q_proj.weight": (q * d, h), "k_proj.weight": (kv * d, h), "v_proj.weight": (kv * d, h)}
        if c.get("bias"):
            out |= {"q_proj.bias": (q * d,), "k_proj.bias": (kv * d,), "v_proj.bias": (kv * d,)}
        if c.get("norms"):
            out |= {"q_norm.weight": (d,), "k_norm.weight": (d,)}
        return {**out, "o_proj.weight": (h, q * d)}
    rank, rope, nope, v = c["kv_lora_rank"], c["qk_rope_head_dim"], c["qk_nope_head_dim"], c["v_head_dim"]
    out = {
        "kv_a_proj_with_mqa.weight": (rank + rope, h),
        "kv_a_layernorm.weight": (rank,),
        "kv_b_proj.weight": (q * (nope + v), rank),
        "o_proj.weight": (h, q * v),
    }
    if low := c.get("q_lora_rank"):
        b = {"q_a_proj.weight": (low, h), "q_a_layernorm.weight": (low,), "q_b_proj.weight": (q * (nope + rope), low)}
        return out | b
    return out | {"q_proj.weight": (q * (nope + rope), h)}


def mlp(prefix: str, h: int, n: int, names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")) -> Shapes:
    shapes = [(n, h), (n, h), (h, n)]
    return {f"{prefix}.{name}.weight": shape for name, shape in zip(names, shapes, strict=True)}


def experts(c: dict[str, Any], family: str) -> Shapes:
    h, n = c["hidden_size"], c.get("moe_intermediate_size", c["intermediate_size"])
    count = c.get("num_experts") or c.get("num_local_experts") or c["n_routed_experts"]
    block, names = ("block_sparse_moe", ("w1", "w3", "w2")) if family == "mixtral" else ("mlp", mlp.__defaults__[0])  # type: ignore[index]
    out: Shapes = {f"{block}.gate.weight": (count, h)}
    for e in range(count):
        out |= mlp(f"{block}.experts.{e}", h, n, names)
    if c.get("correction"):
        out[f"{block}.gate.e_score_correction_bias"] = (count,)
    if shared := c.get("n_shared_experts"):
        out |= mlp("mlp.shared_experts", h, n * shared)
    return out


def model(family: str) -> tuple[dict[str, Any], Shapes]:
    c = {**SIZES, "model_type": family.removesuffix("-tied"), **FAMILIES[family]}
    h = c["hidden_size"]
    shapes: Shapes = {"model.embed_tokens.weight": (c["vocab_size"], h), "model.norm.weight": (h,)}
    if not c.get("tie_word_embeddings"):
        shapes["lm_head.weight"] = (c["vocab_size"], h)
    norms = ["input_layernorm", "post_attention_layernorm"]
    if family in {"gemma2", "gemma3_text"}:
        norms += ["pre_feedforward_layernorm", "post_feedforward_layernorm"]
    for layer in range(c["num_hidden_layers"]):
        is_moe = family.startswith(("mixtral", "qwen3_moe", "deepseek"))
        is_dense = layer < c.get("first_k_dense_replace", 0) or layer in c.get("mlp_only_layers", [])
        inside: Shapes = {f"self_attn.{name}": shape for name, shape in attention(c).items()}
        inside |= experts(c, family) if is_moe and not is_dense else mlp("mlp", h, c["intermediate_size"])
        inside |= {f"{norm}.weight": (h,) for norm in norms}
        shapes |= {f"model.layers.{layer}.{name}": shape for name, shape in inside.items()}
    return c, shapes


def run(*arguments: str | Path) -> str:
    done = subprocess.run([_c.find("tensorbus"), *map(str, arguments)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr + done.stdout
    return done.stdout


def make(family: str, folder: Path) -> dict[str, Array]:
    config, shapes = model(family)
    values = np.random.default_rng(7)
    tensors = {name: values.standard_normal(shape).astype(np.float16) for name, shape in shapes.items()}
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text("{}")
    safetensors_numpy.save_file(tensors, str(folder / "model.safetensors"))
    return tensors


@pytest.mark.parametrize("family", FAMILIES)
def test_there_and_back(family: str, tmp_path: Path) -> None:
    tensors = make(family, tmp_path / "hf")
    has_experts = any(".experts." in name for name in tensors)
    ep = ["--ep", "2"] if has_experts else []
    from_ep = ["--from-ep", "2"] if has_experts else []
    vllm = ["--from-form", "vllm", "--from-tp", "4", *from_ep]
    megatron = ["--from-form", "megatron", "--from-tp", "2", "--from-pp", "2", *from_ep]
    a, b, c, d = (tmp_path / name for name in ("hf", "vllm", "megatron", "back"))
    run("reshard", "--to", "vllm", "--tp", "4", *ep, "--in", a, "--out", b, "--verify")
    run("reshard", "--to", "megatron", "--tp", "2", "--pp", "2", *ep, *vllm, "--in", b, "--out", c, "--verify")
    spec = tmp_path / "spec.json"
    spec.write_text(run("spec", "--from", c, *megatron, "--to", "hf"))
    run("reshard", "--spec", spec, "--in", c, "--out", d, "--verify")
    back = safetensors_numpy.load_file(str(d / "model.safetensors"))
    assert sorted(back) == sorted(tensors)
    for name, array in tensors.items():
        assert back[name].dtype == array.dtype, name
        assert back[name].tobytes() == array.tobytes(), name
    assert (d / "config.json").read_text() == (a / "config.json").read_text()
    assert (d / "tokenizer.json").exists()
    assert len(list(b.glob("model-rank-*-part-0.safetensors"))) == 4
    assert "equal" in run("diff", a, d)


def test_what_vllm_gets(tmp_path: Path) -> None:
    tensors = make("llama", tmp_path / "hf")
    spec = {"model": "llama", "to": "vllm", "tp": 8, "rules": [{"match": "model.norm.weight", "dst": {"dtype": "f32"}}]}
    (tmp_path / "spec.json").write_text(json.dumps(spec))
    run("reshard", "--spec", tmp_path / "spec.json", "--in", tmp_path / "hf", "--out", tmp_path / "out")
    q, k, v = (tensors[f"model.layers.3.self_attn.{name}_proj.weight"] for name in "qkv")
    gate, up = (tensors[f"model.layers.3.mlp.{name}_proj.weight"] for name in ("gate", "up"))
    embedding = np.pad(tensors["model.embed_tokens.weight"], ((0, 42), (0, 0)))
    for rank in range(8):  # two ranks have the same key head
        got = safetensors_numpy.load_file(str(tmp_path / f"out/model-rank-{rank}-part-0.safetensors"))
        rows, head, n = (
            slice(6 * rank, 6 * rank + 6),
            slice(6 * (rank // 2), 6 * (rank // 2) + 6),
            slice(4 * rank, 4 * rank + 4),
        )
        assert np.array_equal(
            got["model.layers.3.self_attn.qkv_proj.weight"], np.concatenate([q[rows], k[head], v[head]])
        )
        assert np.array_equal(got["model.layers.3.mlp.gate_up_proj.weight"], np.concatenate([gate[n], up[n]]))
        assert np.array_equal(got["model.embed_tokens.weight"], embedding[24 * rank : 24 * rank + 24])
        assert got["model.norm.weight"].dtype == np.float32
        scales = [name for name in got if name.endswith("_scale")]
        assert len(scales) == 16
        assert all(got[name].shape == () and got[name] == np.float32(1) for name in scales)
    assert "equal" in run(
        "diff", tmp_path / "hf", tmp_path / "out", "--spec", tmp_path / "spec.json", "--rtol", "0.001"
    )


def test_constants_and_ranks_without_tensors(tmp_path: Path) -> None:
    a, spec = tmp_path / "a", tmp_path / "spec.json"
    a.mkdir()
    safetensors_numpy.save_file({"w": np.arange(6, dtype=np.int32)}, str(a / "model.safetensors"))
    rule = {"match": "w", "dst": {"mesh": [2], "ranks": [0, 2], "placements": "S0"}}
    spec.write_text(json.dumps({"dst_mesh": [4], "rules": [rule], "constants": {"one": 1, "half": 0.5}}))
    report = json.loads(run("reshard", "--spec", spec, "--in", a, "--out", tmp_path / "b", "--verify", "--json"))
    assert report["dst_bytes"] == sum(rank["bytes"] for rank in report["ranks"]) == 6 * 4 + 4 * 8
    for rank in range(4):
        got = safetensors_numpy.load_file(str(tmp_path / f"b/rank_{rank}.safetensors"))
        assert (got.pop("one"), got.pop("half")) == (1, 0.5)
        assert [x.tolist() for x in got.values()] == ([] if rank % 2 else [[0, 1, 2] if rank == 0 else [3, 4, 5]])
    spec.write_text(json.dumps({"rules": [{"match": "*"}], "constants": {"half": 0.5}}))
    run("reshard", "--spec", spec, "--in", a, "--out", tmp_path / "model", "--hf", "--max-file-size", "24")
    files = [safetensors_numpy.load_file(str(file)) for file in sorted((tmp_path / "model").glob("*.safetensors"))]
    assert [sorted(file) for file in files] in ([["half"], ["w"]], [["w"], ["half"]])
    spec.write_text(json.dumps({"rules": [{"match": "*"}], "constants": {"w": 1}}))
    done = subprocess.run(
        [_c.find("tensorbus"), "reshard", "--spec", spec, "--in", a, "--out", tmp_path / "c"],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2
    assert "constants 'w': a tensor of the target has this name" in done.stderr


def test_diff(tmp_path: Path) -> None:
    tensors = make("llama", tmp_path / "a")
    run("reshard", "--to", "vllm", "--tp", "4", "--in", tmp_path / "a", "--out", tmp_path / "tp4")
    name = "model.layers.2.self_attn.k_proj.weight"
    tensors[name][13, 5] += 2
    (tmp_path / "b").mkdir()
    safetensors_numpy.save_file(
        {key: x.astype(np.float32) for key, x in tensors.items() if key != "model.norm.weight"},
        str(tmp_path / "b/model.safetensors"),
    )
    (tmp_path / "spec.json").write_text(json.dumps({"model": "llama", "to": "vllm", "tp": 4}))
    tool = _c.find("tensorbus")

    def diff(*arguments: str | Path) -> tuple[int, dict[str, Any]]:
        done = subprocess.run([tool, "diff", *map(str, arguments), "--json"], capture_output=True, text=True)
        assert not done.stderr
        return done.returncode, json.loads(done.stdout)

    status, report = diff(tmp_path / "a", tmp_path / "b")
    first, second = report["tensors"]
    assert status == 1
    assert report["different"] == 2
    assert first["name"] == name
    assert first["index"] == [13, 5]
    assert first["different"] == 1
    assert abs(first["largest"] - 2) < 0.01
    assert abs(first["mean"] - first["largest"] / (24 * 48)) < 1e-9
    assert (first["a"], first["b"]) == ("f16", "f32")
    assert second == {"name": "model.norm.weight", "missing_in": "b"}
    assert diff(tmp_path / "a", tmp_path / "b", "--atol", "3")[1]["different"] == 1
    assert diff(tmp_path / "a", tmp_path / "tp4", "--spec", tmp_path / "spec.json")[0] == 0
