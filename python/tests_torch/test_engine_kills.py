"""Ranks of trainers and engines that are killed at any time of an update, TB_CASES times; TB_SEED repeats a run.

What lives has the old version or the new one, whole and on all ranks; the next update works, and an engine that was
started again gets the current version.
"""

from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path
from typing import Any

import engine_model as em
import stand_in
from test_engine import hashes

from tensorbus import engine

CASES = int(os.environ.get("TB_CASES", "4"))
CONFIG = em.Config(layers=1)
NVERSIONS = 3
TIMEOUT_S = float(os.environ.get("TB_TIMEOUT_S", "20"))


def _train(url: str, rank: int, remotes: dict[str, stand_in.Remote], version: int) -> None:
    """A rank of a trainer, which begins anew for each case. Its exit code: how many engines have failed."""
    source = engine.Source({n: (t, None) for n, t in em.random_checkpoint(CONFIG, version).items()})
    sender = engine.Sender(url, rank, 2, source, engine=None, timeout=TIMEOUT_S)
    failed: dict[str, BaseException] = {}
    for name, remote in remotes.items():
        try:
            sender.add(name, remote)
        except Exception as error:  # the others get the version nevertheless
            failed[name] = error
    _ready(url).touch()
    began = time.monotonic()
    try:
        sender.send()
    except Exception:
        failed |= sender.failed
    _ready(url).write_text(str(time.monotonic() - began))
    for name, error in failed.items():
        print(
            f"trainer {rank}, engine '{name}': {type(error).__name__}: {str(error).strip().splitlines()[-1]}",
            flush=True,
        )
    sender.close()
    os._exit(len(failed))


def _ready(url: str) -> Path:
    """Is there when a rank begins to send, and has the seconds that it took."""
    return Path(url.removeprefix("unix:") + ".ready")


def _start(url: str, engines: dict[str, stand_in.Engine], version: int) -> list[Any]:
    remotes = {name: each.remote for name, each in engines.items()}
    ranks = [stand_in.FORK.Process(target=_train, args=(url, i, remotes, version)) for i in range(2)]
    for rank in ranks:
        rank.start()
    return ranks


def _finish(ranks: list[Any]) -> list[int]:
    until = time.monotonic() + 8 * TIMEOUT_S
    for rank in ranks:
        rank.join(max(0.1, until - time.monotonic()))
    stuck = [rank for rank in ranks if rank.is_alive()]
    for rank in stuck:
        rank.kill()
    assert not stuck, "a rank has not kept its deadline"
    return [rank.exitcode for rank in ranks]


def test_kills(tmp_path: Path) -> None:
    seed = int(os.environ.get("TB_SEED", str(time.time_ns() % 2**32)))
    print(f"seed {seed} (TB_SEED={seed} repeats this run)")
    rng = random.Random(seed)
    checkpoints = {v: em.random_checkpoint(CONFIG, v) for v in range(1, NVERSIONS + 1)}
    sizes = {"a": 2, "b": 1}
    cold = {
        (name, v): [hashes(em.cold_load(CONFIG, checkpoint, rank, size)) for rank in range(size)]
        for v, checkpoint in checkpoints.items()
        for name, size in sizes.items()
    }
    engines = {name: stand_in.Engine(tmp_path, name, CONFIG, checkpoints[1], n, "device") for name, n in sizes.items()}

    def look(name: str) -> int:
        now = [found for _, found in engines[name].remote.all("look")]
        (version,) = [v for v in checkpoints if cold[name, v] == now]
        return version

    current, seconds, sending = 1, 0.5, 0.1
    counts = {"trainer: old": 0, "trainer: new": 0, "engine": 0, "before the kill": 0}
    with stand_in.engines(*engines.values()):
        for case in range(CASES):
            wanted = current % NVERSIONS + 1
            url, again = f"unix:{tmp_path}/bus{case}", f"unix:{tmp_path}/again{case}"
            ranks = _start(url, engines, wanted)
            victim = rng.choice(["trainer", "a", "b"])
            index = rng.randrange(2 if victim == "trainer" else sizes[victim])
            if rng.random() < 0.7:
                while not _ready(url).exists():
                    time.sleep(0.001)
                time.sleep(rng.uniform(0.0, 1.2 * sending))
            else:
                time.sleep(rng.uniform(0.0, seconds))
            if victim == "trainer":
                ended = ranks[index].exitcode is not None
                if not ended:
                    os.kill(ranks[index].pid, signal.SIGKILL)
                _finish(ranks)
                found = {look(name) for name in engines}  # engines decide independently
                assert found <= {current, wanted}, case
                counts["before the kill" if ended else f"trainer: {'new' if found == {wanted} else 'old'}"] += 1
            else:
                engines[victim].kill(index)
                codes = _finish(ranks)
                (other,) = set(engines) - {victim}
                assert look(other) == wanted, (case, codes)
                counts["engine" if any(codes) else "before the kill"] += 1
                engines[victim].close()
                engines[victim].start()
            current = wanted % NVERSIONS + 1  # and the next update works, for one that was started again, too
            began = time.monotonic()
            assert _finish(_start(again, engines, current)) == [0, 0], case
            seconds, sending = time.monotonic() - began, float(_ready(again).read_text())
            assert {look(name) for name in engines} == {current}, case
    print(f"{CASES} kills: {counts}")
