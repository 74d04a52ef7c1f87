"""The engine's side, of one rank: the tensors that it receives, beside or in the parameters, and the vote."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from .._batch import Batch
from .._bus import Bus, join
from .._errors import Conflict, Error, Refused
from .._pair import Pair
from ._sender import VOTE, has_old_number
from ._targets import Targets, make_targets
from ._trace import Trace, locate
from ._verify import Hashes, Loaded, Verified, compare, hash_boxes, load_again

SHADOWS = ("device", "pinned", "off")


@dataclass(frozen=True, slots=True)
class Pause:
    """How long the parameters of this rank were not to be used, and the whole update, in seconds."""

    pause: float
    total: float


class Receiver:
    """Receives versions into a model that was traced on all ranks of the engine.

    With ``shadow`` "device" or "pinned", what arrives lies in other memory, as large as the parameters, which is there
    from now on; ``commit`` copies it. With "off", ``commit`` receives into the parameters themselves. ``is_unmapped``
    says that the memory that is received into may be unmapped between updates, and mapped again at the same addresses,
    with other contents or none: each update registers it then, and nobody uses it after the update.
    """

    def __init__(
        self, model: Any, traces: Sequence[Trace], index: int, shadow: str, *, is_unmapped: bool = False
    ) -> None:
        if shadow not in SHADOWS:
            raise Refused(f"shadow is {shadow!r}; there are {', '.join(map(repr, SHADOWS))}")
        self.targets: Targets = make_targets(traces)
        self._index, self._size, self._shadow = index, len(traces), shadow
        self._bus: Bus | None = None
        self._place: tuple[str, str, str | None] = "", "", None  # of the bus: address, this engine's name, token
        self._pair: Pair
        self._data: Batch
        self._vote: Batch
        self._is_unmapped, self._is_whole, self._is_filled = is_unmapped, False, False
        self.version = 0
        self._began = 0.0
        params = {name: p.data for name, p in model.named_parameters()} | dict(model.named_buffers())
        pieces = [t.pieces[index] for t in self.targets.tensors if t.pieces is not None and index in t.pieces]
        self._live = {name: params[name] for name in sorted({piece.param for piece in pieces})}
        # Modules that do not go the direct way, and for which of them each whole tensor is.
        self._model, mine = model, traces[index]
        self.by_loader = [name for name in self.targets.reasons if name in mine.modules]
        self._modules = {source: name for name in self.by_loader for source in mine.modules[name].sources}
        self._landing = {name: _shadow(live, shadow) for name, live in self._live.items()}
        device = next((p.device for p in self._live.values()), torch.device("cpu"))
        self.whole = {  # for the engine's own loader
            t.source: torch.empty(t.shape, dtype=traces[index].dtypes[t.source], device=device)
            for t in self.targets.tensors
            if t.pieces is None
        }
        # Constants, which no version brings, have to be kept where memory loses its contents.
        direct = {name for name in mine.modules if name not in self.targets.reasons}
        constants = {n: p.numel() for n, p in params.items() if n.rpartition(".")[0] in direct}
        for piece in pieces:
            constants[piece.param] -= math.prod(piece.size)
        is_lost = is_unmapped and shadow == "off"
        self._kept = [
            (params[n], params[n].to("cpu", copy=True)) for n, count in constants.items() if count and is_lost
        ]

    @property
    def shadow_nbytes(self) -> int:
        """The memory beside the parameters."""
        landing = () if self._shadow == "off" else self._landing.values()
        return sum(t.numel() * t.element_size() for t in [*landing, *self.whole.values()])

    def join(
        self,
        url: str,
        group: str,
        engine: str,
        token: str | None,
        timeout: float,
        *,
        is_in_update: bool = False,
        is_same_kind: bool = False,
    ) -> None:
        """Meets a trainer, and registers: names and shapes agree then, in both directions.

        ``is_in_update``: a version follows at once. ``is_same_kind``: the other side is an engine that has been traced
        alike, and calls the pieces as this one does.
        """
        self._timeout = timeout
        place = url, engine, token
        try:
            if place == self._place and self._stays(group):
                try:
                    self._meet(group, engine, is_same_kind)
                except Conflict as conflict:
                    if not has_old_number(conflict):
                        raise
                    self.close()
            else:
                self.close()
            if self._bus is None:
                self._bus = join(url, engine, self._index, self._size, token=token, timeout=timeout)
                self._place = place
                self._meet(group, engine, is_same_kind)
            if self._is_unmapped and not is_in_update:
                self._unregister()
        except BaseException:
            self.close()
            raise

    def _stays(self, group: str) -> bool:
        """Whether the trainer finds this rank where it is.

        A rank that left and came back would be lost for a trainer that is there already; and the store with it, if this
        rank serves that.
        """
        if self._bus is None:
            return False
        for open_ in self._data, self._vote, self._pair:
            open_.close()
        try:
            return group in self._bus.groups(self._timeout)
        except Error:
            return False

    def _meet(self, group: str, engine: str, is_same_kind: bool) -> None:
        assert self._bus is not None
        self._pair = self._bus.pair(f"weights {engine}", group, timeout=self._timeout, wait=False)
        ties = {} if is_same_kind else self.targets.ties
        ignored = () if is_same_kind else self.targets.unused
        self._data = self._bus.batch(f"weights {engine}", ties=ties, ignored=ignored)
        self._vote = self._bus.batch(f"vote {engine}", commit="shadow")
        self._number = torch.zeros(1, dtype=torch.int64)
        self._add(self._data, self._vote, self._pair, self._landing, self._number)
        for batch in self._data, self._vote:
            batch.register(timeout=self._timeout)

    def _add(self, data: Batch, vote: Batch, pair: Pair, params: dict[str, Any], number: Any) -> None:
        """Adds this rank's tensors, of which ``params`` has the memory."""
        data.add_pair(pair)
        for target in self.targets.tensors:
            if target.pieces is None:
                part = self.whole[target.source]
            elif self._index in target.pieces:
                piece = target.pieces[self._index]
                part = locate(piece, params[piece.param])
            else:
                continue
            data.add(pair, target.name, part, shape=target.shape, layout=target.layout)
        vote.add(pair, VOTE, number, layout=f"mesh={self._size} place=R")

    def _unregister(self) -> None:
        """Nobody uses the memory when this returns. The next transfer fails, which says that it is to be registered."""
        assert self._bus is not None
        for tensor in self._registered():
            self._bus.invalidate(tensor)

    def _registered(self) -> Iterator[Any]:
        yield from (tensor for tensor in self._landing.values() if tensor.numel() > 0)
        yield from (tensor for tensor in self.whole.values() if tensor.numel() > 0)

    def receive(self) -> None:
        """Receives a version beside the parameters."""
        self._began = time.perf_counter()
        if self._bus is None:
            raise Refused("no trainer has called init_weight_transfer_engine")
        self._is_whole = self._is_filled = False
        if self._shadow != "off":
            self._data.recv(timeout=self._timeout)

    def commit(self) -> Pause:
        """Votes for what this rank has received; when all ranks have voted, its parameters get the version.

        If it fails before that is decided, the parameters stay as they are, except with shadow="off".
        """
        if self._bus is None:
            raise Refused("no trainer has called init_weight_transfer_engine")
        began = time.perf_counter()
        if self._shadow == "off":
            for live, kept in self._kept:
                live.copy_(kept)
            self._data.recv(timeout=self._timeout)
        self._vote.recv(timeout=self._timeout)
        decided = time.perf_counter() if self._shadow != "off" else began
        if self._shadow != "off":
            with torch.no_grad():
                for name, live in self._live.items():
                    live.copy_(self._landing[name], non_blocking=True)
            if any(live.device.type != "cpu" for live in self._live.values()):
                torch.accelerator.synchronize()  # the next version may come at once
        self.version, self._is_whole = int(self._number[0]), True
        now = time.perf_counter()
        if self._is_unmapped:
            self._unregister()
        return Pause(now - decided, now - self._began)

    def fill(self, tensors: Mapping[str, Any]) -> None:
        """Says what the engine's own loader has loaded when the engine was made."""
        for name, whole in self.whole.items():
            whole.copy_(tensors[name])
        self._is_filled = True

    def hashes(self, load: Callable[[], None] | None = None) -> Hashes:
        """Of all that this rank has of the trainer's tensors, for ``verify``.

        ``load`` is the engine's own loader of ``whole``. It is run again, to see that modules that do not go the direct
        way have what it makes of these tensors; nobody may use the model meanwhile.
        """
        return hash_boxes(self._live, self.targets, self._index, self._load_again(load))

    def compare(self, folder: str | Path, load: Callable[[], None] | None = None) -> Verified:
        """Whether this rank has what a checkpoint has."""
        return compare(self._live, self.targets, self._index, folder, self._load_again(load))

    def _load_again(self, load: Callable[[], None] | None) -> Loaded | None:
        """None: they were not compared."""
        if load is None or not (self._is_whole or self._is_filled):
            return None
        return load_again(self._model, list(self.by_loader), self.whole, self._modules, load)

    def give(self, url: str, group: str, engine: str, token: str | None, timeout: float) -> None:
        """Sends the version that this engine has to one of the same kind, as group ``group``, in a trainer's place."""
        if self.version == 0:
            raise Refused("this engine has received no version that it could give")
        if not self._is_whole and (self.whole or self._shadow == "off"):
            raise Refused(f"this engine has parts of a version after {self.version}, since its last update has failed")
        with join(url, group, self._index, self._size, token=token, timeout=timeout) as bus:
            pair = bus.pair(f"weights {engine}", engine, timeout=timeout, wait=False)
            data, vote = bus.batch(f"weights {engine}"), bus.batch(f"vote {engine}")
            self._add(data, vote, pair, self._live, torch.tensor([self.version]))
            for batch in data, vote:
                batch.register(timeout=timeout)
            for batch in data, vote:
                batch.send(timeout=timeout, wait="committed", whole_group=True)

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
