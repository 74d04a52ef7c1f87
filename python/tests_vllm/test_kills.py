"""Ranks of trainers that are killed at any time of an update; a living vLLM has the old version or the new one.

And workers of vLLM, which ends it: the trainer is told whom it has lost, and a vLLM that is started again gets the
current version.
"""

from __future__ import annotations

import itertools
import multiprocessing
import os
import random
import signal
import threading
import time
from pathlib import Path
from typing import Any

import families
import pytest
import simulate
from engine_program import Remote
from test_end_to_end import PROMPT, Engine

import tensorbus as tb
from tensorbus import engine as tb_engine

CASES = int(os.environ.get("TB_CASES", "10"))
TIMEOUT_S = 10.0
VERSIONS = (1, 2, 3)


def _send(url: str, rank: int, socket: str, path: str) -> None:
    """A rank of a trainer that has a checkpoint."""
    from tensorbus import engine

    sender = engine.Sender(url, rank, 2, engine.from_checkpoint(path), Remote(socket), timeout=TIMEOUT_S)
    sender.send()
    sender.close()


def start(url: str, socket: str, path: Path) -> list[Any]:
    context = multiprocessing.get_context("fork")
    ranks = [context.Process(target=_send, args=(url, rank, socket, str(path))) for rank in range(2)]
    for rank in ranks:
        rank.start()
    return ranks


def finish(ranks: list[Any]) -> list[int]:
    """Their exit codes; one that does not end has not kept its deadline."""
    until = time.monotonic() + 12 * TIMEOUT_S
    for rank in ranks:
        rank.join(max(0.1, until - time.monotonic()))
    stuck = [rank for rank in ranks if rank.is_alive()]
    for rank in stuck:
        rank.kill()
    assert not stuck
    return [rank.exitcode for rank in ranks]


@pytest.mark.parametrize("size", [1])
def test_killed_trainers(tmp_path: Path, size: int, record_property: Any) -> None:
    """A rank of a trainer is killed at any time of an update: a living vLLM has the old version or the new one, as a
    whole, and takes the next update.
    """
    seed = int(os.environ.get("TB_SEED", str(time.time_ns() % 2**32)))
    print(f"seed {seed} (TB_SEED={seed} repeats this run)")
    rng = random.Random(seed)
    simulate.begin()
    paths = {v: families.make("Llama", tmp_path, v) for v in VERSIONS}
    versions = {
        v: [simulate.hashes(simulate.cold_load(p, rank, size)[0]) for rank in range(size)] for v, p in paths.items()
    }
    engine = Engine(tmp_path, paths[1], size, "device")

    def look() -> int:
        now = engine.remote.call("hashes")
        found = [v for v, cold in versions.items() if cold == now]
        assert len(found) == 1, "parts of several versions"
        return found[0]

    try:
        current, seconds, counts = look(), 1.0, {"old version": 0, "new version": 0, "too late": 0}
        for case in itertools.count():
            if counts["old version"] + counts["new version"] == CASES:
                break
            wanted = current % len(VERSIONS) + 1
            ranks = start(f"unix:{tmp_path}/bus{case}", engine.socket, paths[wanted])
            time.sleep(rng.uniform(0.0, seconds))
            victim = rng.choice(ranks)
            ended = victim.exitcode is not None
            if not ended:
                os.kill(victim.pid, signal.SIGKILL)
            finish(ranks)
            now = look()
            assert now in (current, wanted), case
            counts["too late" if ended else "old version" if now == current else "new version"] += 1
            current = now % len(VERSIONS) + 1  # and the next update works
            began = time.monotonic()
            assert finish(start(f"unix:{tmp_path}/again{case}", engine.socket, paths[current])) == [0, 0], case
            seconds = time.monotonic() - began
            assert look() == current
        engine.remote.call("generate", PROMPT)
        found = ", ".join(f"{what} {count}" for what, count in counts.items())
        found = f"{CASES} kills inside an update: {found}"
        print(found)
        record_property("found", found)
    finally:
        engine.close()


class Killer(Remote):
    """A client that kills a worker in one of its calls."""

    def __init__(self, socket: str) -> None:
        super().__init__(socket)
        self.victim, self.call_to_kill_in = 0, ""

    def call(self, method: str, *args: Any) -> Any:
        if method != self.call_to_kill_in:
            return super().call(method, *args)
        delay = random.uniform(0.0, 0.01) if method == "update_weights" else 0.0
        killer = threading.Timer(delay, os.kill, (self.victim, signal.SIGKILL))
        killer.start()
        if delay == 0.0:
            killer.join()
        try:
            return super().call(method, *args)
        finally:
            killer.join()  # on a busy machine the call may end first; the next one comes too late for the worker


def test_killed_workers(tmp_path: Path) -> None:
    """A worker of vLLM is killed in each of the calls of an update, which ends vLLM: the trainer says whom it has lost,
    and a vLLM that is started again gets the current version.
    """
    simulate.begin()
    paths = {v: families.make("Llama", tmp_path, v) for v in VERSIONS}
    versions = {v: [simulate.hashes(simulate.cold_load(p, rank, 2)[0]) for rank in range(2)] for v, p in paths.items()}
    source = tb_engine.from_checkpoint(paths[1])
    contents = {v: tb_engine.from_checkpoint(p) for v, p in paths.items()}

    def fill(version: int) -> None:
        for name, (tensor, _) in source.tensors.items():
            tensor.copy_(contents[version].tensors[name][0])

    def start(life: int) -> tuple[Engine, Killer]:
        folder = tmp_path / f"life{life}"
        folder.mkdir()
        began = time.monotonic()
        made = Engine(folder, paths[1], 2, "device")
        print(f"vLLM has started in {time.monotonic() - began:.0f} s", flush=True)
        return made, Killer(made.socket)

    engine, client = start(0)
    sender = tb_engine.Sender(f"unix:{tmp_path}/bus", 0, 1, source, client, timeout=60.0)
    try:
        fill(2)
        sender.send()
        assert client.call("hashes") == versions[2]
        for life, call in enumerate(("update_weights", "finish_weight_update", "start_weight_update"), 1):
            version = 2 + life % 2
            fill(version)
            client.victim, client.call_to_kill_in = client.call("pids")[life % 2], call
            with pytest.raises(tb.Error) as lost:
                sender.send()
            print(f"a worker killed in {call}: {type(lost.value).__name__}: {lost.value}", flush=True)
            assert lost.value.group == "engine" or str(lost.value).startswith("engine 'engine' has failed in ")
            engine.kill()
            engine, client = start(life)
            assert client.call("hashes") == versions[1]
            sender.add("engine", client)
            sender.send(engine="engine")
            assert client.call("hashes") == versions[version]
        sender.close()
    finally:
        engine.kill()
