"""The data of a transfer, by Etha's names: routes between two meshes, chunks of tensors, and the buckets they go in."""

from __future__ import annotations

import enum
import functools
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

import tensorbus as tb

from ..._c import tb_chunk_mode, tb_reduce_op
from ._run import Run, Schedule

_ALIGN = 64  # of chunks in a bucket


class Transport(enum.Enum):
    """How a chunk's bytes cross ranks. What the rank does with it, is_source and is_target, is told apart from it."""

    P2P = "p2p"
    BROADCAST = "broadcast"
    LOCAL = "local"  # within a rank
    NONE = "none"  # takes part in a reduction, and ships nothing


TRANSPORTS = {mode: Transport[mode.name.removeprefix("TB_")] for mode in tb_chunk_mode}
MODES = {transport: mode for mode, transport in TRANSPORTS.items()}


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A rank, and the cell of the map's grid in its part."""

    rank: int
    cell: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Route:
    """Where one cell of a source goes."""

    src: Endpoint
    dsts: tuple[Endpoint, ...]
    kind: Transport  # NONE, P2P or BROADCAST: a target on the source's own rank is a LOCAL chunk of it


@dataclass(slots=True)
class M2MMap:
    """From which mesh to which; shapes do not matter yet.

    The grid has as many cells along each dim as both sides' cuts need, so that every part is a number of whole cells.
    """

    source: tb.Layout
    target: tb.Layout
    grid: tuple[int, ...]
    source_num_slicers: list[int]  # cells in a part, along each dim
    target_num_slicers: list[int]
    source_partial_reductions: list[tuple[int, str]] = field(default_factory=list)
    known: dict[Any, list[Box]] = field(default_factory=dict, repr=False)  # what tensors like those before are cut into

    @property
    def routes(self) -> list[Route]:
        """All routes of all ranks, by source and cell. Chunks do not need them: each rank finds its own."""
        return _routes(self.source, self.target, self.grid)


@functools.lru_cache(maxsize=64)
def _routes(source: tb.Layout, target: tb.Layout, grid: tuple[int, ...]) -> list[Route]:
    plan = tb.plan(source, target, grid, "u8")
    found: dict[Endpoint, list[Endpoint]] = {}
    for rank in sorted({*source.ranks, *target.ranks}):
        for route in plan.routes(rank):
            cells = list(itertools.product(*map(range, route.lengths)))
            assert route.source is not None
            if rank not in route.targets:
                for cell in cells if rank in route.contributors and rank != route.source else ():
                    found.setdefault(Endpoint(rank, _shifted(cell, route.source_start)), [])
                continue
            for cell in cells:
                there = Endpoint(route.source, _shifted(cell, route.source_start))
                found.setdefault(there, []).append(Endpoint(rank, _shifted(cell, route.target_start)))
    kinds = (Transport.NONE, Transport.P2P)
    return [
        Route(src, tuple(dsts), kinds[len(dsts)] if len(dsts) < 2 else Transport.BROADCAST)
        for src, dsts in sorted(found.items(), key=lambda item: (item[0].rank, item[0].cell))
    ]


def _shifted(cell: Sequence[int], start: Sequence[int]) -> tuple[int, ...]:
    return tuple(a + b for a, b in zip(cell, start, strict=True))


@dataclass(frozen=True, slots=True, kw_only=True)
class Box:
    """All of a chunk but its tensors: tensors that are alike share it."""

    transport: Transport
    is_source: bool
    is_target: bool
    src_rank: int
    dst_ranks: tuple[int, ...]  # of NONE, those to whom src_rank ships
    chunk_shape: tuple[int, ...]
    transfer_dtype: torch.dtype  # on the wire
    src_slice: tuple[slice, ...] = ()  # read here if is_source
    dst_slice: tuple[slice, ...] = ()  # written here if is_target
    src_idx: tuple[int, ...] = ()  # where the box begins in the source's part
    dst_idx: tuple[int, ...] | None = None  # and in the target's, if this rank is one
    contributors: tuple[int, ...] = ()  # of a Partial source, in the order they are combined
    op: tb_reduce_op = tb_reduce_op.TB_SUM
    divisor: int = 1
    global_shape: tuple[int, ...] = ()  # of the tensor, as this rank has it
    nbytes: int = field(init=False)  # on the wire
    bucket_key: tuple[Any, ...] = field(init=False)  # what chunks of one bucket have in common

    def __post_init__(self) -> None:
        object.__setattr__(self, "nbytes", math.prod(self.chunk_shape) * self.transfer_dtype.itemsize)
        key = self.src_rank, tuple(self.dst_ranks), self.contributors, int(self.op), self.divisor, self.transport
        object.__setattr__(self, "bucket_key", key)


class Chunk:
    """A box of a tensor, and what this rank does with it. Pure data: buckets are what is transferred.

    It has the attributes of its box. Made by ``m2m_to_chunks``, or by hand from the fields of a Box and a tensor.
    """

    __slots__ = ("box", "source_tensor", "tensor")

    box: Box
    tensor: torch.Tensor
    source_tensor: torch.Tensor  # what is read: of a LOCAL chunk another than what is written

    def __init__(
        self,
        *,
        tensor: torch.Tensor,
        source_tensor: torch.Tensor | None = None,
        transfer_dtype: torch.dtype | None = None,
        source_partial_groups: Any = None,
        **fields: Any,
    ) -> None:
        self.box = Box(transfer_dtype=transfer_dtype or tensor.dtype, **fields)
        self.tensor, self.source_tensor = tensor, tensor if source_tensor is None else source_tensor
        if source_partial_groups and not self.box.contributors:
            raise ValueError(f"{self!r}: process groups do not tell who contributes; m2m_to_chunks does, from the map")

    def __getattr__(self, name: str) -> Any:
        return getattr(self.box, name)

    def __repr__(self) -> str:
        role = ("S" if self.is_source else "") + ("T" if self.is_target else "")
        return f"Chunk({self.transport.name}/{role or '-'}, {self.src_rank} to {self.dst_ranks}, {self.chunk_shape})"


def make_chunk(box: Box, tensor: torch.Tensor, source_tensor: torch.Tensor) -> Chunk:
    """A chunk of a box that is there."""
    chunk = Chunk.__new__(Chunk)
    chunk.box, chunk.tensor, chunk.source_tensor = box, tensor, source_tensor
    return chunk


@dataclass(frozen=True, slots=True)
class BucketEntry:
    """A chunk's place in its bucket."""

    chunk: Chunk
    offset: int
    nbytes: int


@dataclass(slots=True, kw_only=True, eq=False)
class Bucket:
    """The unit that is transferred: chunks with one key.

    ``bucket_comm`` does all steps of all buckets. A loop of one's own calls them bucket by bucket; what is under way
    then is the whole list that ``chunk_to_bucket_ops`` made, and the steps tell how far it is.
    """

    chunks: list[Chunk]
    device: torch.device | None = None
    _entries: list[BucketEntry] | None = field(init=False, repr=False, default=None)
    _list: list[Bucket] = field(init=False, repr=False)  # that it was made in
    _run: Run | None = field(init=False, repr=False, default=None)
    _schedule: Schedule | None = field(init=False, repr=False, default=None)  # of a list that it is the first of

    def __post_init__(self) -> None:
        self._list = [self]

    @property
    def entries(self) -> list[BucketEntry]:
        """Its chunks, with their places."""
        if self._entries is None:
            self._entries, end = [], 0
            for chunk in self.chunks:
                self._entries.append(BucketEntry(chunk, -(-end // _ALIGN) * _ALIGN, chunk.box.nbytes))
                end = self._entries[-1].offset + chunk.box.nbytes
        return self._entries

    @property
    def transport(self) -> Transport:
        """That of all its chunks."""
        return self.chunks[0].box.transport

    @property
    def is_source(self) -> bool:
        """Whether this rank reads its tensors."""
        return self.chunks[0].box.is_source

    @property
    def is_target(self) -> bool:
        """Whether this rank writes its tensors."""
        return self.chunks[0].box.is_target

    @property
    def src_rank(self) -> int:
        """The rank that ships."""
        return self.chunks[0].box.src_rank

    @property
    def dst_ranks(self) -> tuple[int, ...]:
        """Those that get it."""
        return self.chunks[0].box.dst_ranks

    @property
    def key(self) -> tuple[Any, ...]:
        """Buckets with one key follow one another."""
        return self.chunks[0].box.bucket_key

    @property
    def offsets(self) -> list[int]:
        """Of its chunks."""
        return [entry.offset for entry in self.entries]

    @property
    def total_bytes(self) -> int:
        """Of its buffer."""
        return self.entries[-1].offset + self.entries[-1].nbytes

    def __repr__(self) -> str:
        return f"Bucket({len(self.chunks)} of {self.chunks[0]!r})"

    def prepare(self) -> None:
        """Begins the transfer of the bucket's list, if it is not under way."""
        if self._run is not None:
            return
        if any(bucket._run for bucket in self._list):
            raise RuntimeError(f"{self!r} was finalised, and others of its list were not")
        run = Run(self._list)
        for bucket in self._list:
            bucket._run = run
        run.start()

    def _began(self) -> Run:
        if self._run is None:
            raise RuntimeError(f"{self!r} was not prepared")
        return self._run

    def launch(self) -> bool:
        """Whether its bytes are on their way; False: not yet."""
        return self._began().has_reached(self, "launched")

    def is_complete(self) -> bool:
        """Whether its bytes have come, or all others have them; False: not yet."""
        return self._began().has_reached(self, "complete")

    def finalize(self) -> None:
        """Waits until it is in the tensors; raises why the transfer failed."""
        self._began().finish(self)
        self._run = None
