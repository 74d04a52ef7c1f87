"""Modules of FSDP2, with and without tensor parallelism and CPU offload, to another job with another layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jobs
import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import tensorbus as tb


class Block(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x)))


class Model(nn.Module):
    """Sizes that 4 ranks divide, and others that they do not."""

    def __init__(self, hidden: int = 16) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, 7)
        self.blocks = nn.ModuleList([Block(7, hidden), Block(7, hidden)])
        self.head = nn.Linear(7, 10, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def make_model(version: int, hidden: int) -> Model:
    torch.manual_seed(version)
    return Model(hidden)


def tensor_parallel(model: Model, mesh: DeviceMesh) -> None:
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    for block in model.blocks:
        parallelize_module(block, mesh, plan)


def shard(model: Model, kind: str) -> Model:
    if kind == "fsdp_tp":
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        tensor_parallel(model, mesh["tp"])
        options: dict[str, Any] = {"mesh": mesh["dp"]}
    elif kind == "hsdp":
        options = {"mesh": init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))}
    else:
        options = {"mesh": init_device_mesh("cpu", (4,))}
    if kind == "offload":
        options["offload_policy"] = CPUOffloadPolicy(pin_memory=False)
    if kind == "mixed":
        options["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    for block in model.blocks:
        fully_shard(block, **options)
    return fully_shard(model, **options)


def full(model: nn.Module) -> dict[str, torch.Tensor]:
    return {
        name: (p.full_tensor() if isinstance(p, DTensor) else p).detach().clone()
        for name, p in model.named_parameters()
    }


def train(model: Model, kind: str) -> None:
    if (kind, model.blocks[0].up.out_features) == ("fsdp_tp", 13):  # torch has no forward pass for uneven shards
        with torch.no_grad():
            for p in model.parameters():
                p *= 1.5
        return
    loss = model(torch.arange(10)[None]).float().sum()
    loss.backward()
    with torch.no_grad():
        for p in model.parameters():
            p -= 0.01 * p.grad
            p.grad = None


KINDS = [("fsdp", 9), ("fsdp_tp", 16), ("fsdp_tp", 13), ("offload", 9), ("mixed", 16), ("hsdp", 9)]
VERSIONS = 3


def trainer(seat: jobs.Seat) -> list[str]:
    with seat.join() as bus:
        pair = bus.pair("weights", "engine")
        return [said for kind, hidden in KINDS for said in send_versions(seat, bus, pair, kind, hidden)]


def send_versions(seat: jobs.Seat, bus: tb.Bus, pair: tb.Pair, kind: str, hidden: int) -> list[str]:
    model = shard(make_model(1, hidden), kind)
    if kind in ("fsdp", "fsdp_tp", "offload"):
        tb.share(model)  # training goes on in the memory that peers read
    # Plain tensors, beside DTensors, are replicated over the mesh that is given.
    everyone = DeviceMesh("cpu", list(range(seat.size)))
    batch = bus.batch(f"{kind} {hidden}")
    batch.add_module(pair, model, mesh=everyone)
    batch.register()
    for version in range(1, VERSIONS + 1):
        expected = full(model)
        if seat.index == 0:
            torch.save(expected, f"{seat.args['to']}/{kind}-{hidden}-{version}.pt")
        batch.send(timeout=60.0)
        train(model, kind)
    if kind == "fsdp":
        plain = make_model(1, hidden)
        plain.load_state_dict(full(model), strict=False)
        torch.testing.assert_close(model(torch.arange(10)[None]), plain(torch.arange(10)[None]))
        model.reshard()
    if kind != "fsdp":
        return []
    said = refuse_unsharded(batch, model)
    again = bus.batch("again")
    again.add_module(pair, model, mesh=everyone, reshard=True)
    model(torch.arange(10)[None])
    again.send(timeout=60.0)
    return [said]


def refuse_unsharded(batch: tb.Batch, model: Model) -> str:
    model(torch.arange(10)[None])  # the root stays unsharded
    with pytest.raises(tb.Refused) as refused:
        batch.send(timeout=60.0)
    model.reshard()
    return str(refused.value)


def engine(seat: jobs.Seat) -> dict[str, int]:
    with seat.join() as bus:
        pair = bus.pair("weights", "trainer")
        return {f"{kind} {hidden}": recv_versions(seat, bus, pair, kind, hidden) for kind, hidden in KINDS}


def recv_versions(seat: jobs.Seat, bus: tb.Bus, pair: tb.Pair, kind: str, hidden: int) -> int:
    model = make_model(2, hidden)
    if kind == "mixed":
        model = model.to(torch.bfloat16)  # cast on the way
    mesh = init_device_mesh("cpu", (seat.size,))
    tensor_parallel(model, mesh)
    equal = 0
    batch = bus.batch(f"{kind} {hidden}")
    batch.add_module(pair, model, mesh=mesh)
    for version in range(1, VERSIONS + 1):
        batch.recv(timeout=60.0)
        assert batch.version == version
        expected = torch.load(f"{seat.args['to']}/{kind}-{hidden}-{version}.pt")
        found = full(model)
        assert expected.keys() == found.keys()
        for name, value in expected.items():
            assert torch.equal(value.to(found[name].dtype), found[name]), (kind, hidden, version, name)
            equal += 1
    if kind == "fsdp":
        again = bus.batch("again")
        again.add_module(pair, model, mesh=mesh)
        again.recv(timeout=60.0)
    return equal


def test_versions(tmp_path: Path) -> None:
    found = jobs.run(tmp_path, __file__, {"trainer": (4, "trainer"), "engine": (2, "engine")}, to=str(tmp_path))
    assert found["engine"] == [{f"{kind} {hidden}": 27 for kind, hidden in KINDS}] * 2
    assert "'the root' is unsharded" in found["trainer"][0][0]
