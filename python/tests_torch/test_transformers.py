"""What `tensorbus reshard --to hf` writes, loaded by transformers: random models of every described family go through
vLLM's form and Megatron's, and back, and transformers loads what it saved, bit for bit."""

from __future__ import annotations

import subprocess
from pathlib import Path

import families
import pytest
import torch
import transformers

from tensorbus import _c


def reshard(source: Path, target: Path, *options: str) -> None:
    command = [_c.find("tensorbus"), "reshard", *options, "--in", source, "--out", target]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("family", families.DESCRIBED)
def test_there_and_back(family: str, tmp_path: Path) -> None:
    source, vllm, megatron, target = (tmp_path / name for name in ("hf", "vllm", "megatron", "back"))
    families.make(family, tmp_path, 1).rename(source)
    wanted = transformers.AutoModelForCausalLM.from_pretrained(source).state_dict()
    sizes = ["--ep", "2"] if any(".experts." in name for name in wanted) else []
    from_sizes = [option.replace("--", "--from-") for option in sizes]
    reshard(source, vllm, "--to", "vllm", "--tp", "4", *sizes)
    from_vllm = ["--from-form", "vllm", "--from-tp", "4", *from_sizes]
    reshard(vllm, megatron, *from_vllm, "--to", "megatron", "--tp", "2", "--pp", "2", *sizes)
    from_megatron = ["--from-form", "megatron", "--from-tp", "2", "--from-pp", "2", *from_sizes]
    reshard(megatron, target, *from_megatron, "--to", "hf")
    model, report = transformers.AutoModelForCausalLM.from_pretrained(target, output_loading_info=True)
    assert not any(report.values()), report
    got = model.state_dict()
    assert list(got) == list(wanted)
    for name, tensor in wanted.items():
        assert got[name].dtype == tensor.dtype, name
        assert torch.equal(got[name].view(torch.int32), tensor.view(torch.int32)), name
