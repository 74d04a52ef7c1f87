"""What explain tells of an engine's stand-in: ways, casts, bytes of each rank; the command's options and refusals."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import engine_model as em
import pytest
import torch
from test_engine import FALLBACKS, headers, trace

import tensorbus as tb
from tensorbus import explain

CONFIG = em.Config(dtype=torch.bfloat16)


def _explain(trainer: str, size: int) -> explain.Explanation:
    checkpoint = em.random_checkpoint(CONFIG, 1)
    models = [em.cold_load(CONFIG, checkpoint, rank, size) for rank in range(size)]
    params = [
        {name: (str(p.dtype), p.numel() * p.element_size()) for name, p in model.named_parameters()} for model in models
    ]
    held = headers(em.random_checkpoint(replace(CONFIG, dtype=torch.float32), 1))
    traces = [trace(model, checkpoint) for model in models]
    return explain.explain(explain.parse_trainer(trainer), traces, params, held=held, bandwidth=1e9)


@pytest.mark.parametrize(("trainer", "ranks"), [("fsdp:4", 4), ("fsdp:2,tp:2", 4), ("tp:2", 2), ("plain:3", 3)])
@pytest.mark.parametrize("size", [1, 2])
def test_bytes(trainer: str, ranks: int, size: int) -> None:
    e = _explain(trainer, size)
    assert (e.trainer, e.engine, len(e.traffic)) == (ranks, size, ranks)
    fallbacks = {p.name.rsplit(".", 1)[0] for p in e.parameters if p.way == "fallback"}
    assert fallbacks == FALLBACKS
    by_name = {p.name: p for p in e.parameters}
    assert by_name["layers.0.o.weight"].casts == ["f32 to bf16"]
    assert by_name["layers.0.o.weight"].sources == ["layers.0.o.weight"]
    checkpoint = em.random_checkpoint(CONFIG, 1)
    # All that is in the parameters, in bf16, but 6 rows of padding in each of two, and biases of zeros, arrives.
    constant = {(1, 0): 384, (2, 0): 0, (2, 1): 448}
    direct = [sum(p.nbytes[r] for p in e.parameters if p.way == "direct") for r in range(size)]
    for r in range(size):
        assert sum(row[r] for row in e.traffic) == direct[r] + e.whole - constant[size, r]
        assert e.shadow[r] == direct[r] + e.whole - (64 if r > 0 else 0)  # those biases are not received
    assert e.whole == sum(checkpoint[f"{name}.weight"].numel() * 2 for name in FALLBACKS)
    assert sum(e.egress) <= sum(map(sum, e.traffic))
    assert e.seconds == max(*e.egress, *(sum(row[r] for row in e.traffic) for r in range(size))) / 1e9
    assert e.unused == ["rotary.inv_freq"]


def test_output() -> None:
    e = _explain("fsdp:2", 2)
    text = explain.to_text(e)
    assert "layers.*.norm.weight" in text
    assert "s at 1.0 GB/s a rank (given)" in text
    told = json.loads(e.to_json())
    assert len(told["parameters"]) == len(e.parameters)
    assert told["seconds"] == e.seconds
    picture = ElementTree.fromstring(explain.to_svg(e))
    assert len(picture.findall("{http://www.w3.org/2000/svg}rect")) == 4


def test_names_that_do_not_agree() -> None:
    checkpoint = em.random_checkpoint(CONFIG, 1)
    model = em.cold_load(CONFIG, checkpoint)
    params = [{name: (str(p.dtype), p.numel() * 2) for name, p in model.named_parameters()}]
    held = headers(checkpoint)
    held["other"] = held.pop("layers.0.o.weight")
    shape, dtype = held["layers.1.o.weight"]
    held["layers.1.o.weight"] = ((shape[0], shape[1] - 1), dtype)
    e = explain.explain(explain.Trainer(), [trace(model, checkpoint)], params, held=held)
    assert (e.only_in_trainer, e.only_in_checkpoint) == (["other"], ["layers.0.o.weight"])
    assert e.misshaped == ["layers.1.o.weight"]
    assert "in another shape: registration fails: layers.1.o.weight\n" in explain.to_text(e)
    assert e.bandwidth_is_measured
    assert e.bandwidth > 0


def test_engines(tmp_path: Path) -> None:
    model = tmp_path / "a,b=c"
    model.mkdir()
    (model / "config.json").write_text("{}")
    assert explain.parse_engine(f"vllm:{model}") == (model, 1)
    assert explain.parse_engine(f"vllm:{model},tp=4") == (model, 4)
    for wrong in f"vllm:{model},tp=0", f"vllm:{model},tp=", f"vllm:{model},pp=2", f"sglang:{model}", "vllm:":
        with pytest.raises(tb.Invalid, match="--engine "):
            explain.parse_engine(wrong)


@pytest.mark.parametrize("wrong", ["fsdp", "fsdp:0", "fsdp:2,fsdp:2", "plain:2,tp:2", "ddp:4", ""])
def test_trainers_that_there_are_not(wrong: str) -> None:
    with pytest.raises(tb.Invalid, match=r"--trainer "):
        explain.parse_trainer(wrong)


def test_command(tmp_path: Path) -> None:
    env = os.environ | {"PYTHONPATH": str(Path(tb.__file__).parents[1])}

    def run(*arguments: str) -> tuple[int, str]:
        command = [sys.executable, "-m", "tensorbus", "explain", *arguments]
        ran = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
        assert ran.stdout == ""
        return ran.returncode, ran.stderr.strip()

    model = tmp_path / "model"
    assert run("--trainer", "fsdp:2", "--engine", f"vllm:{model},tp=2")[1].endswith("has no config.json")
    model.mkdir()
    (model / "config.json").write_text("{}")
    assert run("--trainer", "fsdp:2", "--engine", "sglang:x")[0] == 2
    for wrong in "nan", "inf", "0", "-1":
        assert "it must be a number" in run("--trainer", "fsdp:2", "--engine", f"vllm:{model}", "--bandwidth", wrong)[1]
    assert run("--trainer", "fsdp:2", "--engine", f"vllm:{model},tp=2") == (
        1,
        "tensorbus explain: vLLM is not installed here, whose loaders say where weights go; run it where vLLM is",
    )
