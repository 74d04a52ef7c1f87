"""Ranks of trainers that are killed at any time of an update; a living vLLM has the old version or the new one."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import time
from pathlib import Path
from typing import Any

import families
import pytest
import simulate
from engine_program import Remote
from test_end_to_end import PROMPT, Engine

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
def test_killed_trainers(tmp_path: Path, size: int) -> None:
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
        current, seconds, counts = look(), 1.0, {"old": 0, "new": 0, "before the kill": 0}
        for case in range(CASES):
            wanted = current % len(VERSIONS) + 1
            ranks = start(f"unix:{tmp_path}/bus{case}", engine.socket, paths[wanted])
            time.sleep(rng.uniform(0.0, 1.2 * seconds))
            victim = rng.choice(ranks)
            ended = victim.exitcode is not None
            if not ended:
                os.kill(victim.pid, signal.SIGKILL)
            finish(ranks)
            now = look()
            assert now in (current, wanted), case
            counts["before the kill" if ended else "old" if now == current else "new"] += 1
            current = now % len(VERSIONS) + 1  # and the next update works
            began = time.monotonic()
            assert finish(start(f"unix:{tmp_path}/again{case}", engine.socket, paths[current])) == [0, 0], case
            seconds = time.monotonic() - began
            assert look() == current
        engine.remote.call("generate", PROMPT)
        print(f"{CASES} kills: {counts}")
    finally:
        engine.close()
