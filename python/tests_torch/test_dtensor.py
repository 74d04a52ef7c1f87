"""DTensors between two jobs, on random meshes and with random placements, compared with full_tensor() at both ends."""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import Any

import cases
import jobs
import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

import tensorbus as tb
from tensorbus import _dtensor
from tensorbus.etha.comm import get_m2m_map

SEED = int(os.environ.get("TB_SEED", "1"))
NCASES = int(os.environ.get("TB_CASES", "320"))
PER_BATCH = 20
SIZES = {"trainer": 4, "engine": 3}
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.int32, torch.int64]


class Side:
    """What one job makes of the cases; both jobs draw the same ones."""

    def __init__(self, seat: jobs.Seat, rng: random.Random) -> None:
        self.seat = seat
        found = {group: cases.make_meshes(size, rng, extra=1, ascending=True) for group, size in SIZES.items()}
        self.choices = found
        # Every rank of the job makes all meshes, in the same order.
        self.meshes = {
            mesh: DeviceMesh("cpu", torch.tensor(mesh[1]).reshape(mesh[0])) for mesh in dict.fromkeys(found[seat.group])
        }

    def make(self, case: cases.Case, whole: torch.Tensor, seed: int, zero: bool) -> DTensor:
        mesh = self.meshes[case.mesh_shape, case.ranks]
        local = cases.part_of(case, whole, self.seat.index, seed, cases.order_of(case, mesh))
        meta = TensorMeta(whole.shape, whole.stride(), whole.dtype)
        spec = DTensorSpec(mesh, case.placements, tensor_meta=meta, shard_order=case.shard_order)
        return DTensor(torch.zeros_like(local) if zero else local, spec, requires_grad=False)


def draw(rng: random.Random, choices: dict[str, Any]) -> tuple[Any, ...]:
    shape = tuple(rng.randint(1, 11) for _ in range(rng.randint(1, 3)))
    dtype = rng.choice(DTYPES)
    partial = rng.choice(["sum", "avg", "min", "max"]) if rng.random() < 0.25 else None
    if partial == "avg" and not dtype.is_floating_point:
        partial = "sum"
    target = rng.choice(["sum", "max"]) if rng.random() < 0.1 else None
    source = cases.make_case(rng, rng.choice(choices["trainer"]), len(shape), partial=partial)
    return source, cases.make_case(rng, rng.choice(choices["engine"]), len(shape), partial=target), shape, dtype


def move(seat: jobs.Seat) -> dict[str, int]:
    rng = random.Random(seat.args["seed"])
    side = Side(seat, rng)
    is_source = seat.group == "trainer"
    counts = {"cases": 0, "partial": 0, "strided": 0, "ordered": 0, "uneven": 0}
    with seat.join() as bus:
        pair = bus.pair("weights", "engine" if is_source else "trainer")
        for first in range(0, seat.args["ncases"], PER_BATCH):
            batch = bus.batch(f"b{first}", staged=first % (3 * PER_BATCH) == 0)
            held = []
            for number in range(first, first + PER_BATCH):
                *both, shape, dtype = draw(rng, side.choices)
                case = both[not is_source]
                g = torch.Generator().manual_seed(seat.args["seed"] * 100_000 + number)
                whole = torch.randint(-40, 40, shape, generator=g).to(dtype)
                tensor = side.make(case, whole, number, zero=not is_source)
                if is_source and seat.index in case.ranks:
                    assert torch.equal(tensor.full_tensor(), whole), (number, case, shape)  # torch reads it alike
                batch.add(pair, f"case {number}", tensor)
                held.append((number, case, whole, tensor))
                counts["cases"] += 1
                counts["partial"] += any(isinstance(p, Partial) for p in case.placements)
                counts["strided"] += case.is_strided
                default = DTensorSpec.compute_default_shard_order(case.placements)
                counts["ordered"] += case.shard_order not in (None, default)
                counts["uneven"] += tensor._local_tensor.numel() * len(case.ranks) != whole.numel()
            if is_source:
                batch.send(timeout=60.0)
            else:
                batch.recv(timeout=60.0)
                for number, case, whole, tensor in held:
                    if seat.index in case.ranks:
                        assert torch.equal(tensor.full_tensor(), whole), (number, case, tuple(whole.shape))
            batch.close()
    return counts


def test_random_layouts(tmp_path: Path) -> None:
    found = jobs.run(
        tmp_path,
        __file__,
        {"trainer": (SIZES["trainer"], "move"), "engine": (SIZES["engine"], "move")},
        seed=SEED,
        ncases=NCASES,
    )
    print(found["trainer"][0], found["engine"][0])
    assert found["engine"][0]["cases"] == NCASES
    assert min(found["trainer"][0].values()) > NCASES // 20


def descend(seat: jobs.Seat) -> None:
    mesh, numbers = DeviceMesh("cpu", torch.tensor([1, 0])), torch.arange(4)
    scattered = distribute_tensor(numbers, mesh, (Shard(0),))
    whole = DTensor.from_local(numbers, mesh, (Replicate(),), run_check=False)
    by_coordinate = whole.redistribute(mesh, (Shard(0),)).to_local()
    assert by_coordinate.tolist() == [[2, 3], [0, 1]][seat.index]
    if torch.equal(scattered.to_local(), by_coordinate):  # a later torch, whose process groups have the mesh's order
        assert _dtensor.spec_layout(scattered._spec) == "mesh=2 place=Shard(0) ranks=1,0"
        return
    with pytest.raises(tb.Refused, match=rf"number {1 - seat.index} of the device mesh \[1, 0\] along dim 0"):
        _dtensor.spec_layout(scattered._spec)
    with pytest.raises(tb.Refused, match="ranks ascend"):
        get_m2m_map(mesh, (Shard(0),), mesh, (Replicate(),))


def test_mesh_whose_order_torch_does_not_keep(tmp_path: Path) -> None:
    jobs.run_forked(tmp_path, __file__, 2, "descend")
