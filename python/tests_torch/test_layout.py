"""Layouts of DTensors without processes: against torch's own rules, and against data that torch has written."""

from __future__ import annotations

import json
import os
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import cases
import pytest
import torch
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import _MaskPartial, _StridedShard

import tensorbus as tb
from tensorbus import _dtensor

SEED = int(os.environ.get("TB_SEED", "7"))
NCASES = int(os.environ.get("TB_CASES", "3000"))


def indices(text: str, shape: tuple[int, ...], rank: int) -> list[list[int]]:
    return [[i for s in segments for i in range(*s)] for segments in tb.layout(text).local(shape, rank)]


class FakeMesh:
    """What reading split factors needs of a DeviceMesh."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        self.shape = shape

    def size(self, dim: int) -> int:
        return self.shape[dim]


@pytest.mark.parametrize("any_factor", [False, True])
def test_random(any_factor: bool) -> None:
    rng = random.Random(SEED)
    meshes = cases.make_meshes(12, rng, extra=4)
    for number in range(NCASES // 2):
        shape = tuple(rng.randint(1, 13) for _ in range(rng.randint(1, 3)))
        case = cases.make_case(rng, rng.choice(meshes), len(shape), any_factor=any_factor)
        order = cases.order_of(case, FakeMesh(case.mesh_shape))
        text = _dtensor.layout_text(case.mesh_shape, case.ranks, case.placements, case.shard_order)
        whole = torch.arange(torch.Size(shape).numel()).reshape(shape)
        for rank in range(12):
            part = cases.cut(case, whole, rank, order)
            mine = whole
            for dim, index in enumerate(indices(text, shape, rank)):
                mine = mine.index_select(dim, torch.tensor(index, dtype=torch.int64))
            assert torch.equal(part, mine) or (part.numel() == mine.numel() == 0), (SEED, number, case, shape, rank)


def test_reference() -> None:
    """torch's function for checkpoints, which reads placements from left to right."""
    rng = random.Random(SEED + 1)
    meshes = cases.make_meshes(12, rng)
    for number in range(NCASES // 10):
        shape = tuple(rng.randint(1, 13) for _ in range(rng.randint(1, 3)))
        case = cases.make_case(rng, rng.choice(meshes), len(shape), any_factor=True)
        text = _dtensor.layout_text(case.mesh_shape, case.ranks, case.placements, None, strided_is_order=False)
        for rank in case.ranks:
            at = list(cases.coordinate(case, rank) or ())
            local, offset = _compute_local_shape_and_global_offset(shape, case.mesh_shape, at, case.placements)
            mine = indices(text, shape, rank)
            assert tuple(map(len, mine)) == local, (SEED, number, case, shape, rank)
            if 0 not in local:
                assert tuple(i[0] for i in mine) == offset, (SEED, number, case, shape, rank)


def golden() -> Path | None:
    for folder in (Path(__file__).parents[2] / "tests/golden", Path(__file__).parents[3] / "shared/golden"):
        if (folder / "dtensor_layouts.jsonl").exists():
            return folder / "dtensor_layouts.jsonl"
    return None


def _placement(said: list[Any]) -> Any:
    if said[0] == "R":
        return Replicate()
    return Shard(said[1]) if said[0] == "S" else _StridedShard(said[1], split_factor=said[2])


@pytest.mark.skipif(golden() is None, reason="there is no golden data")
def test_golden() -> None:
    path = golden()
    assert path is not None
    for line in path.read_text().splitlines():
        case = json.loads(line)
        shape = tuple(case["shape"])
        places = [_placement(said) for said in case["placements"]]
        text = _dtensor.layout_text(case["mesh"], case["ranks"], places, None, strided_is_order=False)
        for rank, local in case["locals"].items():
            mine = tb.layout(text).local(shape, int(rank))
            if local["dims"] is None:
                assert 0 in tb.layout(text).local_shape(shape, int(rank))
            else:
                assert [[list(s) for s in d] for d in mine] == local["dims"], line


def test_fsdp_over_tp() -> None:
    """7 rows: tensor parallelism cuts first, into 4 and 3; FSDP then cuts these. From left to right would be wrong."""
    text = _dtensor.layout_text((3, 2), range(6), (_StridedShard(0, split_factor=2), Shard(0)))
    assert [indices(text, (7,), rank)[0] for rank in range(6)] == [[0, 1], [4], [2, 3], [5], [], [6]]


def test_refusals() -> None:
    with pytest.raises(tb.Refused, match="MaskPartial"):
        _dtensor.layout_text((2,), (0, 1), (_MaskPartial(offset_shape=torch.Size([2]), offset_dim=0),))
    with pytest.raises(tb.Invalid, match="1 placements for a mesh of 2 dims"):
        _dtensor.layout_text((2, 2), range(4), (Partial(),))
    mesh = SimpleNamespace(mesh=torch.tensor([4, 5]))
    assert _dtensor.mesh_ranks(mesh, {4: 1, 5: 0}) == [1, 0]
    with pytest.raises(tb.Invalid, match="no seat for rank 5"):
        _dtensor.mesh_ranks(mesh, [0, 1, 2, 3, 4])


def test_sub_meshes() -> None:
    """Of a mesh for FSDP and tensor parallelism, each part for FSDP has a copy."""

    def say(ranks: Any, *within: Any) -> str:
        spec = SimpleNamespace(mesh=SimpleNamespace(mesh=ranks), placements=(Shard(0),) * ranks.ndim)
        return _dtensor.spec_layout(spec, within=[SimpleNamespace(mesh=w) for w in within])

    whole = torch.arange(8).reshape(2, 2, 2)
    for rank in range(8):
        found = say(whole[rank // 4, :, rank % 2], whole.flatten(), whole)  # it is no sub-mesh of the first
        assert found == "mesh=4,2 place=R,Shard(0) ranks=0,2,1,3..4,6,5,7"
    assert say(whole[1, :, 1]) == "mesh=2 place=Shard(0) ranks=5,7"
    assert say(whole, whole) == "mesh=2,2,2 place=Shard(0),Shard(0),Shard(0)"
    assert say(whole[0].flatten(), whole) == "mesh=2,4 place=R,Shard(0)"
    assert say(torch.arange(3), whole) == "mesh=3 place=Shard(0)"
