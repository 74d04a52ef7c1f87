"""The real vLLM compared with its checkpoint: an element of one worker that is changed is named."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import families
import pytest
from test_end_to_end import HERE, START_S, _environment

# Rank 1 has rows 64 to 127 of each matrix; row 70 of the two together is row 6 of the second.
CASES = [
    (
        "Llama",
        ("model.layers.1.mlp.gate_up_proj.weight", "70", "5"),
        "'model.layers.1.mlp.up_proj.weight' in [64:128, 0:256]: its hash is ",
        "'model.layers.1.mlp.up_proj.weight' in [70:71, 5:6]: 1 of 16384 elements",
    ),
    (  # whose experts vLLM loads itself, and packs
        "Qwen3-MoE",
        ("model.layers.1.mlp.experts.routed_experts.w13_weight", "2", "7", "5"),
        *2 * ("what the engine's own loader makes of its tensors in [2:3, 7:8, 5:6]: 1 of ",),
    ),
]


@pytest.mark.parametrize(("family", "poke", "by_hashes", "by_workers"), CASES, ids=[case[0] for case in CASES])
def test_an_element_of_one_worker(
    tmp_path: Path, family: str, poke: tuple[str, ...], by_hashes: str, by_workers: str
) -> None:
    model = families.make(family, tmp_path, 1)
    command = [sys.executable, str(HERE / "verify_program.py"), str(model), *poke]
    ran = subprocess.run(command, env=_environment(tmp_path), capture_output=True, text=True, timeout=2 * START_S)
    assert ran.returncode == 0, ran.stdout[-3000:] + ran.stderr[-6000:]
    (line,) = [line for line in ran.stdout.splitlines() if line.startswith("found: ")]
    found: Any = json.loads(line.removeprefix("found: "))
    assert found[:2] == [[], {}]
    (one,), ((), (its,)) = found[2:]
    assert one.startswith(f"'{poke[0]}' of rank 1 differs from {by_hashes}")
    assert its.startswith(f"'{poke[0]}' of rank 1 differs from {by_workers}")
