"""The engine's side, of one rank: the tensors that it receives, beside or in the parameters, and the vote."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from .._bus import Bus, join
from .._errors import Refused
from ._sender import VOTE
from ._targets import Targets, make_targets
from ._trace import Trace, locate
from ._verify import Hashes, Verified, compare, hash_boxes

SHADOWS = ("device", "pinned", "off")


@dataclass(frozen=True, slots=True)
class Pause:
    """How long the parameters of this rank were not to be used, and the whole update, in seconds."""

    pause: float
    total: float


class Receiver:
    """Receives versions into a model that was traced on all ranks of the engine.

    With ``shadow`` "device" or "pinned", what arrives lies in other memory, as large as the parameters, which is there
    from now on; ``commit`` copies it. With "off", ``commit`` receives into the parameters themselves.
    """

    def __init__(self, model: Any, traces: Sequence[Trace], index: int, shadow: str) -> None:
        if shadow not in SHADOWS:
            raise Refused(f"shadow is {shadow!r}; there are {', '.join(map(repr, SHADOWS))}")
        self.targets: Targets = make_targets(traces)
        self._index, self._size, self._shadow = index, len(traces), shadow
        self._bus: Bus | None = None
        self.version = 0
        self._began = 0.0
        params = {name: p.data for name, p in model.named_parameters()} | dict(model.named_buffers())
        used = {t.pieces[index].param for t in self.targets.tensors if t.pieces is not None and index in t.pieces}
        self._live = {name: params[name] for name in sorted(used)}
        self._landing = {name: _shadow(live, shadow) for name, live in self._live.items()}
        device = next((p.device for p in self._live.values()), torch.device("cpu"))
        self.whole = {  # for the engine's own loader
            t.source: torch.empty(t.shape, dtype=traces[index].dtypes[t.source], device=device)
            for t in self.targets.tensors
            if t.pieces is None
        }

    @property
    def shadow_nbytes(self) -> int:
        """The memory beside the parameters."""
        landing = () if self._shadow == "off" else self._landing.values()
        return sum(t.numel() * t.element_size() for t in [*landing, *self.whole.values()])

    def join(self, url: str, group: str, engine: str, token: str | None, timeout: float) -> None:
        """Meets a trainer, and registers: names and shapes agree then, in both directions."""
        self.close()
        self._timeout = timeout
        self._bus = join(url, engine, self._index, self._size, token=token, timeout=timeout)
        try:
            pair = self._bus.pair("weights", group, timeout=timeout, wait=False)
            self._data = self._bus.batch("weights", ties=self.targets.ties, ignored=self.targets.unused)
            for target in self.targets.tensors:
                if target.pieces is None:
                    part = self.whole[target.source]
                elif self._index in target.pieces:
                    piece = target.pieces[self._index]
                    part = locate(piece, self._landing[piece.param])
                else:
                    continue
                self._data.add(pair, target.name, part, shape=target.shape, layout=target.layout)
            self._data.add_pair(pair)
            self._vote = self._bus.batch("vote", commit="shadow")
            self._number = torch.zeros(1, dtype=torch.int64)
            self._vote.add(pair, VOTE, self._number, layout=f"mesh={self._size} place=R")
            for batch in self._data, self._vote:
                batch.register(timeout=timeout)
        except BaseException:
            self.close()
            raise

    def receive(self) -> None:
        """Receives a version beside the parameters."""
        self._began = time.perf_counter()
        if self._bus is None:
            raise Refused("no trainer has called init_weight_transfer_engine")
        if self._shadow != "off":
            self._data.recv(timeout=self._timeout)

    def commit(self) -> Pause:
        """Votes for what this rank has received; when all ranks have voted, its parameters get the version.

        If it fails before that is decided, the parameters stay as they are, except with shadow="off".
        """
        began = time.perf_counter()
        if self._shadow == "off":
            self._data.recv(timeout=self._timeout)
        self._vote.recv(timeout=self._timeout)
        decided = time.perf_counter() if self._shadow != "off" else began
        if self._shadow != "off":
            with torch.no_grad():
                for name, live in self._live.items():
                    live.copy_(self._landing[name], non_blocking=True)
            if any(live.device.type != "cpu" for live in self._live.values()):
                torch.accelerator.synchronize()  # the next version may come at once
        self.version = int(self._number[0])
        now = time.perf_counter()
        return Pause(now - decided, now - self._began)

    def hashes(self) -> Hashes:
        """Of all that this rank has copied from the trainer's tensors, for ``verify``."""
        return hash_boxes(self._live, self.targets, self._index)

    def compare(self, folder: str | Path) -> Verified:
        """Whether this rank has what a checkpoint has."""
        return compare(self._live, self.targets, self._index, folder)

    def close(self) -> None:
        """Leaves the trainer."""
        if self._bus is not None:
            self._bus.close()
            self._bus = None


def _shadow(live: Any, shadow: str) -> Any:
    """Memory for what arrives. It begins as a copy, for constants that no version brings."""
    if shadow == "off":
        return live
    if shadow == "pinned" and live.device.type != "cpu":
        return torch.empty(live.shape, dtype=live.dtype, pin_memory=True).copy_(live)
    return live.detach().clone(memory_format=torch.contiguous_format)
