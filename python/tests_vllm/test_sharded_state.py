"""What `tensorbus reshard --to vllm` writes is read by vLLM's own loader of sharded_state, whose tensors are then those
that vLLM has of Hugging Face's files."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import families
import pytest
import simulate
import torch

from tensorbus import _c

EXPERTS = ["Qwen3-MoE", "Mixtral", "DeepSeek-V2", "DeepSeek-V3"]


@pytest.fixture(scope="module", autouse=True)
def vllm_process() -> Iterator[None]:
    simulate.begin()
    with simulate.plain_experts():
        yield


def compare(family: str, tmp_path: Path, size: int, *, ep: bool) -> None:
    source, target = families.make(family, tmp_path, 1), tmp_path / "vllm"
    sizes = ["--tp", str(size), *(["--ep", str(size)] if ep else [])]
    subprocess.run(
        [_c.find("tensorbus"), "reshard", "--to", "vllm", *sizes, "--in", source, "--out", target, "--verify"],
        check=True,
        stdout=subprocess.DEVNULL,
    )
    for rank in range(size):
        wanted, _ = simulate.cold_load(source, rank, size, enable_expert_parallel=ep)
        got, _ = simulate.cold_load(target, rank, size, enable_expert_parallel=ep, load_format="sharded_state")
        tensors = got.state_dict()
        assert list(tensors) == list(wanted.state_dict())
        for name, tensor in wanted.state_dict().items():
            assert tensors[name].dtype == tensor.dtype, name
            assert torch.equal(tensors[name].view(torch.int32), tensor.view(torch.int32)), f"rank {rank}: {name}"


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("family", families.DESCRIBED)
def test_loader(family: str, size: int, tmp_path: Path) -> None:
    compare(family, tmp_path, size, ep=False)


@pytest.mark.parametrize("family", EXPERTS)
def test_loader_with_expert_parallelism(family: str, tmp_path: Path) -> None:
    compare(family, tmp_path, 2, ep=True)
