"""Engines that come late, die, and come back; memory that is unmapped between updates; what can't be sent any more."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import engine_model as em
import pytest
import stand_in
import torch
from test_engine import hashes

import tensorbus as tb
from tensorbus import engine

CONFIG = em.Config(layers=1)
FIRST = em.random_checkpoint(CONFIG, 9)


def cold(version: int, size: int) -> list[dict[str, str]]:
    checkpoint = em.random_checkpoint(CONFIG, version)
    return [hashes(em.cold_load(CONFIG, checkpoint, rank, size)) for rank in range(size)]


def wrong(it: stand_in.Engine, version: int) -> list[str]:
    """The parameters that are not those of an engine that has loaded the version."""
    pairs = zip(it.remote.all("look"), cold(version, len(it.ranks)), strict=True)
    return [name for (_, found), wanted in pairs for name in wanted if found[name] != wanted[name]]


def has(it: stand_in.Engine, version: int) -> bool:
    return not wrong(it, version)


def fill(source: engine.Source, version: int) -> None:
    for name, tensor in em.random_checkpoint(CONFIG, version).items():
        source.tensors[name][0].copy_(tensor)


def make_source() -> engine.Source:
    return engine.Source({name: (torch.zeros_like(t), None) for name, t in FIRST.items()})


def start(folder: Path, name: str, size: int = 1, shadow: str = "device", **options: Any) -> stand_in.Engine:
    return stand_in.Engine(folder, name, CONFIG, FIRST, size, shadow, **options)


def test_engines_come_and_go(tmp_path: Path) -> None:
    a, b = start(tmp_path, "a"), start(tmp_path, "b", 2)
    source = make_source()
    with stand_in.engines(a, b):
        sender = engine.Sender(f"unix:{tmp_path}/bus", 0, 1, source, a.remote, engine="a", timeout=20.0)
        fill(source, 1)
        sender.send()
        assert has(a, 1)
        sender.add("b", b.remote)  # it comes late, and gets the current version
        assert not has(b, 1)
        sender.send(engine="b")
        assert has(b, 1)
        assert [version for version, _ in b.remote.all("look")] == [1, 1]
        fill(source, 2)
        sender.send()
        assert has(a, 2)
        assert has(b, 2)
        b.kill(1)  # one that dies does not stop the others
        fill(source, 3)
        with pytest.raises(tb.PeerLost, match="b 1"):
            sender.send()
        assert list(sender.failed) == ["b"]
        assert has(a, 3)
        b.close()
        b.start()  # it is started again
        sender.add("b", b.remote)
        sender.send(engine="b")
        assert has(b, 3)
        fill(source, 4)
        sender.send()
        assert has(a, 4)
        assert has(b, 4)
        sender.remove("a")
        fill(source, 5)
        sender.send()
        assert sender.engines == ["b"]
        assert has(a, 4)
        assert has(b, 5)
        with pytest.raises(tb.Invalid, match="there is no engine 'a'; there are b"):
            sender.send(engine="a")
        sender.close()


def test_an_engine_that_lives_is_met_again(tmp_path: Path) -> None:
    """As after the trainer's memory was unmapped and mapped again: the trainer adds the engine once more."""
    a = start(tmp_path, "a", 2)
    source = make_source()
    with stand_in.engines(a):
        sender = engine.Sender(f"unix:{tmp_path}/bus", 0, 1, source, a.remote, engine="a", timeout=20.0)
        for version in range(1, 8):
            fill(source, version)
            sender.send()
            assert has(a, version)
            for tensor, _ in source.tensors.values():
                sender.bus.invalidate(tensor)
            sender.add("a", a.remote)
        sender.close()


def _send_late(url: str, rank: int, size: int, remote: stand_in.Remote, version: int) -> None:
    """A rank of a trainer; its engine hears of it when the ranks have met the engine of before."""
    source = make_source()
    fill(source, version)

    class Late(stand_in.Remote):
        def init_weight_transfer_engine(self, info: dict[str, Any]) -> None:
            time.sleep(1.0)
            super().init_weight_transfer_engine(info)

    sender = engine.Sender(url, rank, size, source, Late(remote.sockets), engine="a", timeout=20.0)
    sender.send()
    sender.close()


def _keep_store(url: str, is_there: Any, is_over: Any) -> None:
    with tb.join(url, group="keeper", index=0, size=1):
        is_there.set()
        is_over.wait()


@pytest.fixture
def kept_store(tmp_path: Path) -> Iterator[None]:
    """A process of its own serves the store, which so outlives trainers and engines."""
    is_there, is_over = stand_in.FORK.Event(), stand_in.FORK.Event()
    keeper = stand_in.FORK.Process(target=_keep_store, args=(f"unix:{tmp_path}/bus", is_there, is_over))
    keeper.start()
    assert is_there.wait(20.0)
    yield
    is_over.set()
    keeper.join(20.0)


@pytest.mark.parametrize("is_kept", [True, False])
def test_a_trainer_meets_the_engine_of_another(tmp_path: Path, request: Any, is_kept: bool) -> None:
    """Trainers come one after the other to one address; the engine leaves the last one when it hears of the next."""
    if is_kept:
        request.getfixturevalue("kept_store")
    a = start(tmp_path, "a", 2)
    with stand_in.engines(a):
        for version, size in enumerate((2, 2, 3, 1, 2), 1):
            args = [(f"unix:{tmp_path}/bus", rank, size, a.remote, version) for rank in range(size)]
            ranks = [stand_in.FORK.Process(target=_send_late, args=each) for each in args]
            for rank in ranks:
                rank.start()
            for rank in ranks:
                rank.join(60.0)
            assert {rank.exitcode for rank in ranks} == {0}
            assert has(a, version)


@pytest.mark.parametrize("shadow", ["device", "off"])
def test_an_engine_gives_its_version_to_another(tmp_path: Path, shadow: str) -> None:
    a, b = start(tmp_path, "a", 2, shadow), start(tmp_path, "b", 2)
    source = make_source()
    with stand_in.engines(a, b):
        with pytest.raises(
            tb.Error, match=r"engine 'giver' has failed in update_weights: .*has received no version that it could give"
        ):
            engine.pass_on(a.remote, b.remote, f"unix:{tmp_path}/early", timeout=1.0)
        sender = engine.Sender(f"unix:{tmp_path}/bus", 0, 1, source, a.remote, timeout=20.0)
        for version in 1, 2:
            fill(source, version)
            sender.send()
        sender.close()
        engine.pass_on(a.remote, b.remote, f"unix:{tmp_path}/between", timeout=20.0)
        assert has(a, 2)
        assert has(b, 2)
        assert [version for version, _ in b.remote.all("look")] == [2, 2]


def test_memory_that_is_unmapped_between_updates(tmp_path: Path) -> None:
    """As in sleep mode: nobody uses the parameters' memory then, and each update registers it again."""
    a, b = start(tmp_path, "a", 2, "off", is_unmapped=True), start(tmp_path, "b")
    source = make_source()
    with stand_in.engines(a, b):
        sender = engine.Sender(f"unix:{tmp_path}/bus", 0, 1, source, a.remote, engine="a", timeout=20.0)
        sender.add("b", b.remote)
        for version in 1, 2, 3:
            a.remote.all("forget")
            fill(source, version)
            sender.send()
            assert not wrong(a, version)
            assert not wrong(b, version)
        sender.close()


@pytest.mark.parametrize("shadow", ["device", "off"])
def test_a_tensor_that_is_missing_or_has_another_shape(tmp_path: Path, shadow: str) -> None:
    """When it is registered, and later: the engine's parameters stay as they are, and the sentence names it."""
    a = start(tmp_path, "a", 2, shadow)
    with stand_in.engines(a):
        for change in "missing", "shape", "more":
            source = make_source()
            if change == "missing":
                del source.tensors["layers.0.o.weight"]
            elif change == "shape":
                source.tensors["layers.0.o.weight"] = (torch.zeros(16, 15), None)
            else:
                source.tensors["layers.0.x.weight"] = (torch.zeros(3), None)
            with pytest.raises(tb.Conflict, match=r"layers\.0\.[ox]\.weight"):
                engine.Sender(f"unix:{tmp_path}/{change}", 0, 1, source, a.remote, timeout=20.0)
            assert has(a, 9)
        named = {re.sub(r"\W", "_", name): name for name in FIRST}
        holder = torch.nn.ParameterDict({key: torch.zeros_like(FIRST[name]) for key, name in named.items()})
        source = engine.from_module(holder)
        source.tensors = {named[key]: tensor for key, tensor in source.tensors.items()}
        sender = engine.Sender(f"unix:{tmp_path}/bus", 0, 1, source, a.remote, timeout=20.0)

        def fill_module(version: int) -> None:
            for key, name in named.items():
                holder[key].data = em.random_checkpoint(CONFIG, version)[name]  # in other memory, each time

        fill_module(1)
        sender.send()
        assert has(a, 1)
        fill_module(2)
        kept = holder["layers_0_o_weight"]
        for wrong in None, torch.nn.Parameter(torch.zeros(16, 15)):
            holder._parameters["layers_0_o_weight"] = wrong
            with pytest.raises(tb.Refused, match="layers_0_o_weight"):
                sender.send()
            assert has(a, 1)
        holder._parameters["layers_0_o_weight"] = kept
        sender.send()
        assert has(a, 2)
        sender.close()
