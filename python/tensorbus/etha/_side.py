"""One side of a pair: which agents it has, in which order, and what its ranks tell each other before they register.

A side is a group on the bus. Its seats are taken as ranks come; then every rank tells its agent's rank and its own rank
in its program, which say who is where in a DeviceMesh. The same way the ranks tell the shapes of their parts, from
which global shapes follow, uneven ones as well.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

import tensorbus as tb

from .. import _dtensor
from .._handle import Deadline


def left(deadline: Deadline) -> float:
    """Seconds until then, for calls that take None for a default."""
    return deadline.left or 0.0


def _program_rank() -> int | None:
    """The rank of this process in its program, by which a DeviceMesh names it."""
    if dist.is_available() and dist.is_initialized():
        return int(dist.get_rank())
    rank = os.environ.get("RANK", "")
    return int(rank) if rank.isdecimal() else None


class Side:
    """The ranks of group ``name``, once all have come."""

    def __init__(self, bus: tb.Bus, agent_rank: int, name: str, size: int, deadline: Deadline) -> None:
        self._bus, self.name, self.size = bus, name, size
        self._everyone = f"{name} (everyone)"
        program = _program_rank()
        self.seat = self._take_seat(agent_rank if program is None else program, deadline)
        self._pairs: tuple[tb.Pair, tb.Pair] | None = None
        told = self.gather("ranks", [agent_rank, -1 if program is None else program], deadline)
        # The seats in the order of their agents; and by rank of the program, if that says who is who.
        self.order = sorted(range(size), key=lambda seat: told[seat][0])
        by_program = {rank: seat for seat, (_, rank) in enumerate(told)}
        self._by_program = by_program if len(by_program) == size and -1 not in by_program else {}

    def _take_seat(self, guess: int, deadline: Deadline) -> int:
        conflict: tb.Conflict | None = None
        for i in range(self.size):
            seat = (guess + i) % self.size
            try:
                self._bus.enter(self.name, seat, self.size)
                if self.size > 1:
                    self._bus.enter(self._everyone, seat, self.size)
                return seat
            except tb.Conflict as error:
                conflict = error
            if deadline.is_over:
                break
        raise RuntimeError(f"agent {self._bus.index} finds no seat among the {self.size} of '{self.name}': {conflict}")

    def gather(self, what: str, mine: Sequence[int], deadline: Deadline) -> list[list[int]]:
        """What each rank of the side tells, by seat; all tell as many numbers."""
        if self.size == 1:
            return [list(mine)]
        if self._pairs is None:
            n, pair = self.size, f"etha/{self.name}"
            out = self._bus.pair(pair, self._everyone, f"mesh={n} place=S0", group=self.name, wait=False)
            into = self._bus.pair(pair, self.name, f"mesh={n} place=R", group=self._everyone, wait=False)
            self._pairs = out, into
        out, into = self._pairs
        whole = (self.size, len(mine))
        row, rows = tb.empty((1, len(mine)), "i64"), tb.empty(whole, "i64")
        row.torch().copy_(torch.tensor([list(mine)]))
        with self._bus.batch(f"etha/{self.name}/{what}") as batch:
            batch.add(out, what, row, shape=whole)
            batch.add(into, what, rows, shape=whole)
            batch.register(left(deadline))
            sent = batch.send(left(deadline), wait=None, group=self.name)
            batch.recv(left(deadline), group=self._everyone)
            sent.wait("committed")
            told: list[list[int]] = rows.torch().tolist()
        return told

    def seats_of(self, mesh: Any) -> list[int]:
        """The seats of a DeviceMesh, row-major: by the program's ranks, or, if those are others, by their order."""
        ranks = _dtensor.own_ranks(mesh)
        if len(ranks) > self.size:
            raise ValueError(f"the mesh has {len(ranks)} ranks, and '{self.name}' {self.size}")
        if all(rank in self._by_program for rank in ranks):
            return [self._by_program[rank] for rank in ranks]
        ascending = sorted(ranks)
        return [self.order[ascending.index(rank)] for rank in ranks]


class Parts:
    """How a side's tensors of one pair are cut: a mesh and placements, or every rank for itself."""

    def __init__(self, side: Side, mesh: Any, placements: Sequence[Any] | None) -> None:
        self.side = side
        self.layout: tb.Layout | None = None
        if mesh is None or placements is None:
            return
        seats = side.seats_of(mesh)
        self.layout = tb.layout(_dtensor.layout_text(tuple(mesh.mesh.shape), seats, tuple(placements)))
        self._seats = torch.tensor(seats).view(tuple(mesh.mesh.shape))
        self._cuts = [getattr(placement, "dim", None) for placement in placements]

    @property
    def pair_layout(self) -> str:
        """That of the pair; ranks for themselves say theirs with each tensor."""
        return str(self.layout) if self.layout else f"mesh={self.side.size} place=R"

    def whole(self, what: str, parts: list[tuple[int, ...]]) -> tuple[int, ...]:
        """The global shape of a tensor whose parts have these shapes, by seat."""
        assert self.layout is not None
        mine = parts[self.layout.ranks[0]]
        shape = []
        for dim in range(len(mine)):
            one_of_each = tuple(slice(None) if cut == dim else 0 for cut in self._cuts)
            holders = self._seats[one_of_each].flatten().tolist()
            shape.append(sum(parts[seat][dim] if dim < len(parts[seat]) else 0 for seat in holders))
        for seat in self.layout.ranks:
            expected = self.layout.local_shape(tuple(shape), seat)
            if parts[seat] != expected and not (0 in parts[seat] and 0 in expected):
                raise ValueError(
                    f"{what}: rank {self.side.order.index(seat)} of '{self.side.name}' has {parts[seat]}, which is not "
                    f"its part, {expected}, of the {tuple(shape)} that all parts add up to in '{self.layout}'"
                )
        return tuple(shape)
