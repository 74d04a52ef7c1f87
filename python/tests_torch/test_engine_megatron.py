"""Models of megatron-core as what a trainer sends: every tensor under the name and in the order of checkpoints."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jobs
import pytest
import torch
import torch.distributed as dist

import tensorbus as tb
from tensorbus import engine
from tensorbus.megatron import _types

if not _types.HAS_MEGATRON:
    pytest.skip("megatron-core is not installed", allow_module_level=True)

import megatron_models as models

HEADS, GROUPS, CHANNELS, HIDDEN, INNER, VOCABULARY, EXPERTS = 8, 4, 6, 96, 192, 90, 4
VERSIONS = (1, 2)
FORM = {
    "num_attention_heads": HEADS,
    "num_query_groups": GROUPS,
    "kv_channels": CHANNELS,
    "normalization": "RMSNorm",
    "qk_layernorm": True,
    "moe_router_enable_expert_bias": False,
    "moe_router_score_function": "softmax",
}


def checkpoint(version: int, layers: int, experts: int | None, kind: str, is_tied: bool) -> dict[str, torch.Tensor]:
    """Random tensors, as a checkpoint of Qwen3, Qwen3-MoE or Mixtral has them."""
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (VOCABULARY, HIDDEN),
        "model.norm.weight": (HIDDEN,),
    }
    if not is_tied:
        shapes["lm_head.weight"] = (VOCABULARY, HIDDEN)
    mixtral = kind == "mixtral"
    for i in range(layers):
        p = f"model.layers.{i}."
        shapes |= {p + "input_layernorm.weight": (HIDDEN,), p + "post_attention_layernorm.weight": (HIDDEN,)}
        for name, heads in ("q", HEADS), ("k", GROUPS), ("v", GROUPS):
            shapes[f"{p}self_attn.{name}_proj.weight"] = (heads * CHANNELS, HIDDEN)
            shapes[f"{p}self_attn.{name}_proj.bias"] = (heads * CHANNELS,)
        shapes[p + "self_attn.o_proj.weight"] = (HIDDEN, HEADS * CHANNELS)
        shapes |= {p + "self_attn.q_norm.weight": (CHANNELS,), p + "self_attn.k_norm.weight": (CHANNELS,)}
        stems = {p + "mlp.": ("gate_proj", "up_proj", "down_proj")}
        if experts is not None:
            m = p + ("block_sparse_moe." if mixtral else "mlp.")
            shapes[m + "gate.weight"] = (experts, HIDDEN)
            names = ("w1", "w3", "w2") if mixtral else ("gate_proj", "up_proj", "down_proj")
            stems = {f"{m}experts.{e}.": names for e in range(experts)}
        for stem, (gate, up, down) in stems.items():
            shapes |= {f"{stem}{gate}.weight": (INNER, HIDDEN), f"{stem}{up}.weight": (INNER, HIDDEN)}
            shapes[f"{stem}{down}.weight"] = (HIDDEN, INNER)
    generator = torch.Generator().manual_seed(version)
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


@dataclass(frozen=True)
class Case:
    """A trainer, and the checkpoint that it has."""

    ranks: int
    tp: int
    pp: int = 1
    ep: int = 1
    experts: int | None = None
    kind: str = "qwen3"
    is_tied: bool = False

    def checkpoint(self, version: int) -> dict[str, torch.Tensor]:
        return checkpoint(version, 2, self.experts, self.kind, self.is_tied)


CASES = [
    Case(4, tp=2, pp=2),
    Case(4, tp=4, is_tied=True),  # a rank has one group of heads
    Case(2, tp=1, pp=2, is_tied=True),
    Case(4, tp=2, ep=2, experts=EXPERTS, kind="qwen3_moe"),
    Case(2, tp=1, ep=2, experts=EXPERTS, kind="mixtral"),
    Case(4, tp=2),  # and two replicas
]


def train(seat: jobs.Seat, case: Case, url: str, pgs: Any, ranks: Any) -> list[str]:
    with models.without_gpu():
        module = models.model(pgs, experts=case.experts, tied=case.is_tied, **FORM)
    source = engine.from_megatron(module, kind=case.kind, vocabulary=VOCABULARY, group=ranks)
    with tb.join(url, group="trainer", index=seat.index, size=case.ranks, timeout=60.0) as bus:
        pair, batch = bus.pair("p", "engine"), bus.batch("b")
        source.add_to(batch, pair)
        for version in VERSIONS:
            models.fill_from_checkpoint(module, case.checkpoint(version), case.is_tied)
            source.refresh()
            batch.send(timeout=60.0, wait="committed")
    whole = case.checkpoint(VERSIONS[-1])
    boxes = [[n, n, "float32", [0] * t.dim(), list(t.shape), tb.hash_tensor(t)] for n, t in whole.items()]

    def gather(mine: Any) -> list[Any]:
        found: list[Any] = [None] * case.ranks
        dist.all_gather_object(found, mine, group=ranks)
        return found

    hashes = [{"rank": 0, "boxes": boxes, "unchecked": {}}]
    verified = engine.verify(hashes, source, rank=seat.index, size=case.ranks, gather=gather)
    return [str(difference) for difference in verified.differences]


def receive(case: Case, url: str) -> list[str]:
    got = {name: torch.full_like(t, -7.0) for name, t in case.checkpoint(1).items()}
    with tb.join(url, group="engine", index=0, size=1, timeout=60.0) as bus:
        pair, batch = bus.pair("p", "trainer"), bus.batch("b")
        for name, t in got.items():
            batch.add(pair, name, t, layout="mesh=1 place=R")
        wrong = []
        for version in VERSIONS:
            batch.recv(timeout=60.0)
            wrong += [name for name, t in case.checkpoint(version).items() if not torch.equal(got[name], t)]
    return wrong


def run(seat: jobs.Seat) -> list[list[str]]:
    """The last rank is the engine."""
    found = []
    for i, case in enumerate(CASES):
        url = f"{seat.url}{i}"
        pgs, ranks = models.groups(case.tp, case.pp, case.ep, case.ranks), dist.new_group(list(range(case.ranks)))
        if seat.index == seat.size - 1:
            found.append(receive(case, url))
        elif seat.index < case.ranks:
            found.append(train(seat, case, url, pgs, ranks))
    return found


def test_every_tensor(tmp_path: Path) -> None:
    for wrong in jobs.run_forked(tmp_path, __file__, 5, "run"):
        assert not any(wrong)


def test_what_has_no_name_in_checkpoints(tmp_path: Path) -> None:
    jobs.run_forked(tmp_path, __file__, 1, "refuse")


def refuse(_seat: jobs.Seat) -> None:
    pgs = models.groups(1, 1, 1, 1)
    with models.without_gpu():
        norms = models.model(pgs, **FORM | {"normalization": "LayerNorm"})
        padded = models.model(pgs, **FORM)
    with pytest.raises(tb.Refused, match=r"parameter 'decoder\.layers\.0\.input_layernorm\.bias'"):
        engine.from_megatron(norms)
    with pytest.raises(tb.Invalid, match="fewer than vocabulary=97"):
        engine.from_megatron(padded, vocabulary=97)
    with pytest.raises(tb.Invalid, match="not Linear"):
        engine.from_megatron(torch.nn.Linear(2, 2))
