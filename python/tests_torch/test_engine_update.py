"""Updates of an engine: versions from a trainer of two ranks, a trainer that dies, names that do not agree."""

from __future__ import annotations

import itertools
import os
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import engine_model as em
import jobs
import pytest
import stand_in
import torch
from test_engine import hashes, trace

import tensorbus as tb
from tensorbus import engine
from tensorbus._tensors import read

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


HEADS, KEY_HEADS, WIDTH = 4, 2, 6


def _titan(version: int) -> Any:
    """A module with the names of torchtitan's Llama."""
    torch.manual_seed(version)
    sizes = {"wq": (HEADS * 8, WIDTH), "wk": (KEY_HEADS * 8, WIDTH), "wv": (KEY_HEADS * 8, WIDTH), "wo": (WIDTH, 32)}
    linear = {name: torch.nn.Linear(n, m, bias=False) for name, (m, n) in sizes.items()}
    norm = torch.nn.RMSNorm(WIDTH)
    layer = torch.nn.ModuleDict({"attention": torch.nn.ModuleDict(linear), "attention_norm": norm})
    return torch.nn.ModuleDict({"layers": torch.nn.ModuleDict({"0": layer})})


def _in_checkpoint(version: int) -> dict[str, Any]:
    """The same as a checkpoint has it."""
    made = {}
    for plain, p in _titan(version).named_parameters():
        part = plain.split(".")[-2]
        t = p.detach()
        if part in ("wq", "wk"):
            heads = HEADS if part == "wq" else KEY_HEADS
            t = t.view(heads, 4, 2, WIDTH).transpose(1, 2).reshape(t.shape)
        name = f"self_attn.{part[1]}_proj" if part.startswith("w") else "input_layernorm"
        made[f"model.layers.0.{name}.weight"] = t
    return made


def _send_titan(url: str, rank: int, is_sharded: bool) -> None:
    """One of three ranks; where the module is sharded, it has a third of each parameter's rows."""
    source = engine.from_torchtitan(_titan(5), heads=HEADS, key_heads=KEY_HEADS)
    if is_sharded:
        plain = [p.detach() for p in _titan(5).parameters()]
        for (name, (view, _)), p in zip(list(source.tensors.items()), plain, strict=True):
            part = read(p.tensor_split([-(-len(p) * i // 3) for i in (1, 2)])[rank].clone())
            text = (view.layout or "mesh=3 place=R").replace("SIZE", "3").removesuffix("R")
            starts = [-(-len(p) * i // 3) for i in range(4)]
            lists = ";".join(f"{a}-{b}" for a, b in itertools.pairwise(starts))
            cut = replace(part, global_shape=tuple(p.shape), layout=f"{text}Explicit(0,{lists})")
            source.tensors[name] = (cut, None)
    with tb.join(url, group="trainer", index=rank, size=3, timeout=60.0) as bus:
        pair, batch = bus.pair("p", "engine"), bus.batch("b")
        source.add_to(batch, pair)
        batch.send(timeout=60.0, wait="committed")
    os._exit(0)


@pytest.mark.parametrize("is_sharded", [True, False])
def test_torchtitan(tmp_path: Path, is_sharded: bool) -> None:
    url = f"unix:{tmp_path}/bus"
    ranks = [stand_in.FORK.Process(target=_send_titan, args=(url, i, is_sharded)) for i in range(3)]
    for rank in ranks:
        rank.start()
    wanted = _in_checkpoint(5)
    got = {name: torch.zeros_like(t) for name, t in wanted.items()}
    with tb.join(url, group="engine", index=0, size=1, timeout=60.0) as bus:
        pair, batch = bus.pair("p", "trainer"), bus.batch("b")
        for name, t in got.items():
            batch.add(pair, name, t, layout="mesh=1 place=R")
        batch.recv(timeout=60.0)
    for rank in ranks:
        rank.join()
    assert [name for name in wanted if not torch.equal(got[name], wanted[name])] == []
