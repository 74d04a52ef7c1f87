"""Updates of an engine: versions from a trainer of two ranks, a trainer that dies, names that do not agree."""

from __future__ import annotations

import os
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import engine_model as em
import jobs
import pytest
import torch
from test_engine import hashes, trace

import tensorbus as tb
from tensorbus import engine

CONFIG = em.Config(layers=1, dtype=torch.bfloat16)
SENT = replace(CONFIG, dtype=torch.float32)  # cast on the way
OLD = 9


class Client:
    """The engine's calls, which its ranks make by themselves here."""

    def init_weight_transfer_engine(self, info: dict[str, Any]) -> None: ...
    def start_weight_update(self) -> None: ...
    def update_weights(self, info: dict[str, Any]) -> None: ...
    def finish_weight_update(self) -> None: ...


def _source(seat: jobs.Seat) -> engine.Source:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (seat.size,))
    checkpoint = em.random_checkpoint(SENT, 0)
    return engine.Source({n: (distribute_tensor(t, mesh, [Shard(0)]), None) for n, t in checkpoint.items()})


def _fill(source: engine.Source, version: int) -> None:
    from torch.distributed.tensor import distribute_tensor

    for name, t in em.random_checkpoint(SENT, version).items():
        held = source.tensors[name][0]
        held.copy_(distribute_tensor(t, held.device_mesh, held.placements))


def train(seat: jobs.Seat) -> list[str]:
    source = _source(seat)
    sender = engine.Sender(seat.url, seat.index, seat.size, source, Client(), timeout=60.0)
    for version in (1, 2):
        _fill(source, version)
        sender.send()
    if seat.args["dies"]:
        _fill(source, 3)
        link = sender._links["engine"]
        with link.data.send(timeout=60.0, wait="committed"):  # the engine has all of it, and votes
            if seat.index == 1:
                Path(seat.url.removeprefix("unix:")).parent.joinpath(f"{seat.group}.1.json").write_text("[]")
                os._exit(0)
        with pytest.raises((tb.PeerLost, tb.Cancelled)) as lost:
            link.vote.send(timeout=60.0, wait="committed")
        return [str(lost.value)]
    sender.close()
    return []


def serve(seat: jobs.Seat) -> list[str]:
    """A rank of the engine: what it has after every version, "cold" if that is what loading from disk gives."""
    import torch.distributed as dist

    old = em.random_checkpoint(CONFIG, OLD)
    model = em.cold_load(CONFIG, old, seat.index, seat.size)
    traces: list[Any] = [None] * seat.size
    dist.all_gather_object(traces, trace(model, old))
    receiver = engine.Receiver(model, traces, seat.index, seat.args["shadow"])
    receiver.join(seat.url, "trainer", "engine", None, 60.0)
    versions = {
        v: hashes(em.cold_load(CONFIG, em.random_checkpoint(CONFIG, v), seat.index, seat.size)) for v in (1, 2, 3)
    }
    found = []

    def look() -> str:
        now = hashes(model)
        return ",".join(str(v) for v, cold in versions.items() if cold == now)

    for _ in range(2):
        receiver.receive()
        assert (look() or "0") == str(receiver.version)  # nothing has changed yet
        done = receiver.commit()
        assert 0 <= done.pause <= done.total
        em.reload(model, receiver.whole, receiver.targets.reasons)
        found.append(look())
    if seat.args["dies"]:
        receiver.receive()
        try:
            receiver.commit()
        except (tb.PeerLost, tb.Cancelled) as error:
            found.append(re.sub(r".*(trainer 1).*", r"\1", str(error)))
        found.append(look())
    receiver.close()
    return found


@pytest.mark.parametrize(("size", "shadow", "dies"), [(4, "device", False), (2, "device", True), (1, "off", False)])
def test_versions(tmp_path: Path, size: int, shadow: str, dies: bool) -> None:
    found = jobs.run(tmp_path, __file__, {"trainer": (2, "train"), "engine": (size, "serve")}, shadow=shadow, dies=dies)
    wanted = ["1", "2"] + (["trainer 1", "2"] if dies else [])
    assert found["engine"] == [wanted] * size


def _refused(seat: jobs.Seat, source: engine.Source) -> str:
    with pytest.raises(tb.Conflict) as refused:
        engine.Sender(seat.url, seat.index, seat.size, source, Client(), timeout=60.0)
    return str(refused.value)


def train_wrong(seat: jobs.Seat) -> list[str]:
    source = _source(seat)
    shape = source.tensors["layers.0.o.weight"]
    left_out = source.tensors.pop("layers.0.up.weight")
    found = [_refused(seat, source)]
    source.tensors["layers.0.up.weight"] = left_out
    source.tensors["layers.0.other.weight"] = left_out
    found.append(_refused(seat, source))
    del source.tensors["layers.0.other.weight"]
    source.tensors["layers.0.o.weight"] = left_out
    found.append(_refused(seat, source))
    source.tensors["layers.0.o.weight"] = shape
    return found


def serve_wrong(seat: jobs.Seat) -> list[str]:
    old = em.random_checkpoint(CONFIG, OLD)
    model = em.cold_load(CONFIG, old)
    before = hashes(model)
    receiver = engine.Receiver(model, [trace(model, old)], 0, "device")
    found = []
    for _ in range(3):
        with pytest.raises(tb.Conflict) as refused:
            receiver.join(seat.url, "trainer", "engine", None, 60.0)
        found.append(str(refused.value))
    assert hashes(model) == before
    return found


def test_names_and_shapes_that_do_not_agree(tmp_path: Path) -> None:
    found = jobs.run(tmp_path, __file__, {"trainer": (2, "train_wrong"), "engine": (1, "serve_wrong")})
    for said in *found["trainer"], *found["engine"]:
        assert [re.search(r"layers\.0\.\w+\.weight", sentence)[0] for sentence in said] == [  # type: ignore[index]
            "layers.0.up.weight",
            "layers.0.other.weight",
            "layers.0.o.weight",
        ]
