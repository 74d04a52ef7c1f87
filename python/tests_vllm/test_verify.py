"""The real vLLM compared with its checkpoint: an element of one worker that is changed is named."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import families
from test_end_to_end import HERE, START_S, _environment


def test_an_element_of_one_worker(tmp_path: Path) -> None:
    model = families.make("Llama", tmp_path, 1)
    command = [sys.executable, str(HERE / "verify_program.py"), str(model)]
    ran = subprocess.run(command, env=_environment(tmp_path), capture_output=True, text=True, timeout=2 * START_S)
    assert ran.returncode == 0, ran.stdout[-3000:] + ran.stderr[-6000:]
    (line,) = [line for line in ran.stdout.splitlines() if line.startswith("found: ")]
    before, after, by_workers = json.loads(line.removeprefix("found: "))
    assert before == []
    # Rank 1 has rows 64 to 127 of each matrix; row 70 of the two together is row 6 of the second.
    where = "'model.layers.1.mlp.gate_up_proj.weight' of rank 1 differs from 'model.layers.1.mlp.up_proj.weight' in "
    assert len(after) == 1
    assert after[0].startswith(where + "[64:128, 0:256]: its hash is ")
    assert by_workers == [[], [where + "[70:71, 5:6]: 1 of 16384 elements"]]
