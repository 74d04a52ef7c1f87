"""The checkpoint engine in a process for each worker, in verl's registry: what arrives, and what fails."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import multiprocessing
import os
import signal
import time
import traceback
from collections.abc import Iterable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from verl.checkpoint_engine import CheckpointEngineManager, CheckpointEngineRegistry, CheckpointEngineWorker, base
from verl.utils.import_utils import import_external_libs
from verl.workers.config import CheckpointEngineConfig

import_external_libs("tensorbus.verl")  # what custom_backend_module does
BUCKET_NBYTES = 4096


def weights(seed: int) -> Iterator[tuple[str, torch.Tensor]]:
    """Tensors that fit, that are larger than a bucket, that are empty, scalars, not contiguous, and of many dtypes."""
    generator = torch.Generator().manual_seed(seed)
    shapes: list[tuple[int, ...]] = [(3,), (5, 7), (100, 33), (), (0, 4), (4096,), (1,), (64, 64), (2, 3, 5)]
    dtypes = [torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.float64]
    for i in range(60):
        tensor = torch.randn(shapes[i % len(shapes)], generator=generator).mul(50).to(dtypes[i % len(dtypes)])
        yield f"layers.{i}.weight", tensor.t() if tensor.dim() == 2 and i % 2 else tensor


def digest(tensor: torch.Tensor) -> tuple[str, list[int], str]:
    data = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return str(tensor.dtype), list(tensor.shape), hashlib.sha256(data).hexdigest()


def work(channel: Any, is_actor: bool, is_master: bool, options: dict[str, Any]) -> None:
    """A worker: does what the driver asks."""
    torch.set_num_threads(1)
    options = options | ({"is_master": is_master} if is_actor else {})
    engine = CheckpointEngineRegistry.new("tensorbus", bucket_size=BUCKET_NBYTES, **options)

    class Server:
        """In the place of the adapter of an inference engine's server."""

        async def update_weights(self, weights: Any, global_steps: int, **_options: Any) -> None:
            self.found = [(name, digest(tensor)) async for name, tensor in weights]
            self.step = global_steps

    worker = object.__new__(CheckpointEngineWorker)
    worker.checkpoint_engine, worker.server_adapter = engine, Server()

    def receive(step: int) -> list[Any]:
        asyncio.run(CheckpointEngineWorker.update_weights.__wrapped__(worker, global_steps=step))
        assert worker.server_adapter.step == step
        return worker.server_adapter.found

    def broken() -> Iterator[tuple[str, torch.Tensor]]:
        for i, each in enumerate(weights(1)):
            if i == 40:
                raise KeyError("layers.40")
            yield each

    own: dict[str, Any] = {
        "send": lambda seed: asyncio.run(engine.send_weights(weights(seed), global_steps=seed)),
        "send_broken": lambda: asyncio.run(engine.send_weights(broken())),
        "receive": receive,
        "found": lambda: worker.server_adapter.found,
    }
    while True:
        method, args, kwargs = channel.recv()
        try:
            channel.send((True, (own.get(method) or getattr(engine, method))(*args, **kwargs)))
        except Exception as error:
            channel.send((False, (type(error).__name__, str(error), traceback.format_exc())))


class Group:
    """A worker group, as verl's driver sees it: a call returns what ``ray.get`` takes."""

    def __init__(self, workers: Workers, which: range) -> None:
        self._workers, self._which, self.world_size = workers, which, len(which)

    def execute_checkpoint_engine(self, method: list[str], **columns: list[Any]) -> list[int]:
        each = [{key: column[n] for key, column in columns.items()} for n in range(self.world_size)]
        self._workers.ask(self._which, method[0], each=each)
        return list(self._which)

    def update_weights(self, global_steps: int, mode: str = "") -> list[int]:
        self._workers.ask(self._which, "send" if mode else "receive", global_steps)
        return list(self._which)


class Workers:
    """The actor's and the rollout's workers, and verl's CheckpointEngineManager, which has no Ray under it."""

    def __init__(self, actors: int, rollouts: int, **options: Any) -> None:
        context = multiprocessing.get_context("fork")
        self.actors, self.rollouts = actors, rollouts
        self._all = []
        for i in range(actors + rollouts):
            ours, theirs = context.Pipe()
            arguments = (theirs, i < actors, i == 0, {"address": "127.0.0.1", "timeout": 20.0, **options})
            process = context.Process(target=work, args=arguments, daemon=True)
            process.start()
            theirs.close()
            self._all.append((process, ours))

        async def nothing(**_options: Any) -> None:
            """What a replica without servers does."""

        calls = ("abort_all_requests", "release_kv_cache", "resume_kv_cache", "resume_generation")
        replica = SimpleNamespace(workers=list(self.rollout), **dict.fromkeys(calls, nothing))
        config = CheckpointEngineConfig(backend="tensorbus", custom_backend_module="tensorbus.verl")
        self._manager = CheckpointEngineManager(config, Group(self, self.actor), [replica])

    def ask(self, which: range, method: str, *args: Any, each: list[dict[str, Any]] | None = None) -> None:
        for n, i in enumerate(which):
            self._all[i][1].send((method, args, each[n] if each else {}))

    def answers(self, which: Iterable[int]) -> list[Any]:
        found = []
        for i in which:
            try:
                found.append(self._all[i][1].recv())
            except EOFError:
                found.append((False, ("gone", "", "")))
        return found

    def values(self, which: Iterable[int]) -> list[Any]:
        found = self.answers(which)
        for is_ok, value in found:
            assert is_ok, value[2]
        return [value for _, value in found]

    @property
    def actor(self) -> range:
        return range(self.actors)

    @property
    def rollout(self) -> range:
        return range(self.actors, self.actors + self.rollouts)

    def meet(self) -> None:
        with self._without_ray() as rollout:
            self._manager.build_process_group(rollout)

    def update(self, seed: int) -> list[Any]:
        with self._without_ray():
            metrics = self._manager.update_weights(global_steps=seed)
        assert metrics["tensorbus/send_bytes"] > 10 * BUCKET_NBYTES
        self.ask(self.rollout, "found")
        return self.values(self.rollout)

    @contextlib.contextmanager
    def _without_ray(self) -> Iterator[Group]:
        rollout = Group(self, self.rollout)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(base, "RayWorkerGroup", lambda **_options: rollout)
            patch.setattr(base, "ray", SimpleNamespace(get=self.values))
            yield rollout

    def kill(self, i: int) -> None:
        os.kill(self._all[i][0].pid, signal.SIGKILL)

    def close(self) -> None:
        for process, _ in self._all:
            process.kill()


@pytest.fixture
def workers() -> Iterator[Any]:
    made: list[Workers] = []

    def make(*args: Any, **options: Any) -> Workers:
        made.append(Workers(*args, **options))
        return made[-1]

    yield make
    for each in made:
        each.close()


@pytest.mark.parametrize(("actors", "rollouts"), [(1, 1), (2, 3)])
def test_updates(workers: Any, actors: int, rollouts: int) -> None:
    """Three updates, tensors of six dtypes that are smaller and larger than a bucket."""
    its = workers(actors, rollouts)
    for seed in (1, 2, 3):
        wanted = [(name, digest(tensor)) for name, tensor in weights(seed)]
        assert its.update(seed) == [wanted] * rollouts


def test_an_actor_that_fails_is_named_by_the_rollout(workers: Any) -> None:
    """The rollout says with what the actor has failed; the next update works."""
    its = workers(1, 2)
    its.meet()
    its.ask(its.actor, "send_broken")
    its.ask(its.rollout, "receive", 1)
    ((is_ok, (kind, _, _)),) = its.answers(its.actor)
    assert (is_ok, kind) == (False, "KeyError")
    for is_ok, (kind, sentence, _) in its.answers(its.rollout):
        assert (is_ok, kind) == (False, "Refused")
        assert sentence == "the actor has given the update up: KeyError: 'layers.40'"
    assert its.update(2) == [[(name, digest(tensor)) for name, tensor in weights(2)]] * 2  # and the next one works


def test_a_worker_that_dies_is_named(workers: Any) -> None:
    """The actor says which worker of the rollout it has lost."""
    its = workers(1, 2, timeout=10.0)
    its.meet()
    its.kill(2)
    began = time.monotonic()
    its.ask(its.actor, "send", 1)
    its.ask(range(1, 2), "receive", 1)
    ((is_ok, (kind, sentence, _)),) = its.answers(its.actor)
    assert (is_ok, kind) == (False, "PeerLost")
    assert "rollout 1" in sentence
    assert not its.answers(range(1, 2))[0][0]
    assert time.monotonic() - began < 25


def test_a_worker_that_does_not_come_is_named(workers: Any) -> None:
    """Who does not come is named when the deadline is over."""
    its = workers(1, 1, timeout=2.0)
    its.ask(range(2), "prepare")
    where = its.values(range(2))[0]
    its.ask(range(1), "init_process_group", each=[{"group": "actor", "seat": 0, "rollout_size": 2, **where}])
    its.ask(range(1, 2), "init_process_group", each=[{"group": "rollout", "seat": 0, "rollout_size": 2, **where}])
    for is_ok, (kind, sentence, _) in its.answers(range(2)):
        assert (is_ok, kind) == (False, "Timeout")
        assert "rollout" in sentence
