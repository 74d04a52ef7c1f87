"""Every family: the trace of vLLM's loaders, and the hash of every parameter after an update by it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import families
import pytest
import simulate
import torch

from tensorbus import engine
from tensorbus.vllm import _reload


@pytest.fixture(scope="module", autouse=True)
def vllm_process() -> Any:
    simulate.begin()
    with simulate.plain_experts():
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("family", list(families.FAMILIES))
def test_update_equals_cold_load(folder: Path, family: str, size: int, record_property: Any) -> None:
    from vllm.config import set_current_vllm_config

    old, new = families.make(family, folder, 1), families.make(family, folder, 2)
    checkpoint = simulate.read(new)
    headers = {name: (tuple(t.shape), t.dtype) for name, t in simulate.read(old).items()}
    ranks, traces = [], []
    for rank in range(size):
        model, config = simulate.cold_load(old, rank, size)
        before = simulate.hashes(model)
        with simulate.rank_of(rank, size), set_current_vllm_config(config):
            traces.append(
                engine.trace(
                    model, headers, restored=_reload.restored, process=_reload.process, loaded=simulate.read(old)
                )
            )
        assert simulate.hashes(model) == before
        ranks.append((model, config))
    targets = engine.make_targets(traces)
    by_loader = {t.source for t in targets.tensors if t.pieces is None}
    for rank, (model, config) in enumerate(ranks):
        with torch.no_grad(), simulate.rank_of(rank, size), set_current_vllm_config(config):
            params = {name: p.data for name, p in model.named_parameters()}
            for target in targets.tensors:
                if target.pieces is not None and rank in target.pieces:
                    engine.apply([target.pieces[rank]], checkpoint, params)
            by_loader_now = [(n, t.clone()) for n, t in checkpoint.items() if n in by_loader]
            _reload.load(model, config.model_config, by_loader_now, targets.reasons)
        cold, _ = simulate.cold_load(new, rank, size)
        got, wanted = simulate.hashes(model), simulate.hashes(cold)
        wrong = {n for n in wanted if got.get(n) != wanted[n]}
        assert not wrong, f"{wrong} of {len(wanted)}\n{traces[rank].report()}"
    record_property("direct", f"{traces[0].direct_share:.1%}")
    print(traces[0].report())
