"""explain with the real vLLM: what it tells of a tiny Llama, from its headers alone."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import families
from test_end_to_end import START_S


def test_llama(tmp_path: Path) -> None:
    model = families.make("Llama", tmp_path, 1)
    command = [sys.executable, "-m", "tensorbus", "explain", "--trainer", "fsdp:4", "--engine", f"vllm:{model},tp=2"]
    command += ["--bandwidth", "10", "--svg", str(tmp_path / "picture.svg"), "--json"]
    env = os.environ | {"PYTHONPATH": str(Path(__file__).parents[1])}
    ran = subprocess.run(command, env=env, capture_output=True, text=True, timeout=START_S, check=False)
    assert ran.returncode == 0, ran.stderr[-4000:]
    told = json.loads(ran.stdout)  # what vLLM logs is not there
    by_name = {p["name"]: p for p in told["parameters"]}
    assert {p["way"] for p in by_name.values()} == {"direct"}
    fused = by_name["model.layers.1.self_attn.qkv_proj.weight"]
    assert fused["sources"] == [f"model.layers.1.self_attn.{n}_proj.weight" for n in "kqv"]
    assert fused["nbytes"][0] == fused["nbytes"][1]
    assert (told["trainer"], told["engine"], told["whole"], told["only_in_checkpoint"]) == (4, 2, 0, [])
    received = [sum(row[r] for row in told["traffic"]) for r in range(2)]
    padding = 2 * 32 * 256 * 2  # of two vocabularies of 96 rows, padded to 128
    assert told["shadow"] == [received[0], received[1] + padding]
    assert told["seconds"] == max([*received, *told["egress"]]) / 1e10
    assert (tmp_path / "picture.svg").read_text().startswith("<svg")
