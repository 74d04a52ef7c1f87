"""An engine without vLLM: a process for each rank, which does what a client asks, and can be killed."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Client, Listener
from pathlib import Path
from typing import Any

import engine_model as em
import torch
from test_engine import hashes, trace

from tensorbus import engine

FORK = multiprocessing.get_context("fork")
torch.set_num_threads(1)  # ranks are forked


def call(socket: str, method: str, *args: Any) -> Any:
    with Client(socket, "AF_UNIX") as connection:
        connection.send((method, args))
        is_ok, value = connection.recv()
    if not is_ok:
        raise RuntimeError(value)
    return value


class Remote:
    """A client of all ranks, to which each call goes at once, as vLLM's do; one that fails ends with the error."""

    def __init__(self, sockets: list[str]) -> None:
        self.sockets = sockets

    def all(self, method: str, *args: Any) -> list[Any]:
        with ThreadPoolExecutor(len(self.sockets)) as pool:
            asked = [pool.submit(call, socket, method, *args) for socket in self.sockets]
            return [each.result() for each in asked]

    def init_weight_transfer_engine(self, info: dict[str, Any]) -> None:
        self.all("init", info)

    def start_weight_update(self) -> None:
        self.all("start")

    def update_weights(self, info: dict[str, Any]) -> None:
        self.all("update", info)

    def finish_weight_update(self) -> None:
        self.all("finish")


class Rank:
    """What a rank does when it is asked."""

    def __init__(self, model: em.Model, traces: list[Any], index: int, shadow: str, is_unmapped: bool) -> None:
        self.model, self.is_unmapped = model, is_unmapped
        self.receiver = engine.Receiver(model, traces, index, shadow, is_unmapped=is_unmapped)
        self.gave = False

    def init(self, info: dict[str, Any]) -> None:
        self.receiver.join(**info)

    def start(self) -> None:
        self.gave = False

    def update(self, info: dict[str, Any]) -> None:
        if (give := info.get("give")) is not None:
            self.receiver.give(**give)
            self.gave = True
        elif info["version"] == 0:
            raise RuntimeError("given up")
        else:
            self.receiver.receive()

    def finish(self) -> None:
        if not self.gave:
            self.receiver.commit()
            em.reload(self.model, self.receiver.whole, self.receiver.targets.reasons)

    def look(self) -> tuple[int, dict[str, str]]:
        return self.receiver.version, hashes(self.model)

    def forget(self) -> None:
        """The memory of the parameters is unmapped, and mapped again with other contents."""
        for p in self.model.parameters():
            p.data.view(-1).view(torch.uint8).fill_(0x5A)

    def close(self) -> None:
        self.receiver.close()


def _serve(socket: str, make: Callable[[], Rank]) -> None:
    torch.set_num_threads(1)
    rank = make()
    with Listener(socket + ".new", "AF_UNIX", backlog=8) as listener:
        os.rename(socket + ".new", socket)
        while True:
            with listener.accept() as connection, contextlib.suppress(EOFError, OSError):  # a client may be killed
                method, args = connection.recv()
                try:
                    connection.send((True, getattr(rank, method)(*args)))
                except Exception:
                    connection.send((False, traceback.format_exc()))
                if method == "close":
                    os._exit(0)


class Engine:
    """All ranks of an engine, which has loaded ``checkpoint``."""

    def __init__(
        self,
        folder: Path,
        name: str,
        config: em.Config,
        checkpoint: Any,
        size: int,
        shadow: str,
        *,
        is_unmapped: bool = False,
    ) -> None:
        models = [em.cold_load(config, checkpoint, rank, size) for rank in range(size)]
        traces = [trace(model, checkpoint) for model in models]
        self.remote = Remote([str(folder / f"{name}.{rank}.sock") for rank in range(size)])
        self._make = [
            lambda rank=rank: Rank(models[rank], traces, rank, shadow, is_unmapped)  # type: ignore[misc]
            for rank in range(size)
        ]
        self.start()

    def start(self) -> None:
        """Starts it; the models are those of this process, as they were loaded."""
        for socket in self.remote.sockets:
            Path(socket).unlink(missing_ok=True)
        self.ranks = [
            FORK.Process(target=_serve, args=each, daemon=True)
            for each in zip(self.remote.sockets, self._make, strict=True)
        ]
        for rank in self.ranks:
            rank.start()
        until = time.monotonic() + 60
        while not all(os.path.exists(socket) for socket in self.remote.sockets):
            assert time.monotonic() < until
            time.sleep(0.005)

    def kill(self, rank: int) -> None:
        os.kill(self.ranks[rank].pid, signal.SIGKILL)
        self.ranks[rank].join()

    def close(self) -> None:
        for rank in self.ranks:
            rank.kill()
            rank.join()


@contextlib.contextmanager
def engines(*made: Engine) -> Iterator[None]:
    try:
        yield
    finally:
        for each in made:
            each.close()
