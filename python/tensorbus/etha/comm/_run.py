"""Runs of buckets: the ranks of the process group tell each other what they have, and each executes its IR.

In Etha, what a rank sends and what another receives belong together by their order, and a receiver does not know the
dtype of what is sent. Here a chunk has a number, the same everywhere, and both dtypes. So the ranks first tell each
other, over a copy service, which chunks they have for whom. That is remembered: a rank whose buckets are those of an
earlier run executes their IR at once. If another rank has other buckets, that run is a Conflict on all ranks before any
data is written, and they tell each other again.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import threading
import weakref
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.distributed as dist

import tensorbus as tb

from ... import _ir, _meet, _tensors, _values
from ..._c import TB_MAX_DIMS, Dims, tb_bucket_step, tb_chunk

if TYPE_CHECKING:
    from .ir import Bucket, Chunk

DEADLINE_S = 1800.0  # that of torch.distributed
_LOOK_S = 0.001  # how long a step is waited for before the answer is "not yet"

Key = tuple[Any, ...]  # of a channel: source, targets, contributors, operation, divisor; the same on all of its ranks


@dataclass(frozen=True, slots=True)
class _Channel:
    """What the source of a channel has told: the number of its first chunk, and their dtypes."""

    first: int
    dtypes: list[int]


@dataclass(frozen=True, slots=True)
class _Told:
    """What all ranks have told."""

    channels: dict[Key, _Channel]
    count: int  # of chunks, in all channels


class _World:
    """The bus and the copy service of the default process group."""

    def __init__(self, timeout: float) -> None:
        group = dist.group.WORLD
        if group is None:
            raise RuntimeError("torch.distributed is not initialised")
        self.group = weakref.ref(group)
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self._bus = _meet.join(None, self.rank, self.size, timeout)
        self.service = tb.copy_service(self._bus, name="etha.comm", timeout=timeout)
        self._told: dict[tuple[int, ...], _Told] = {}
        self.nothing: Schedule | None = None  # of a rank without buckets

    def close(self) -> None:
        self.service.close()
        self._bus.close()

    def forget(self) -> None:
        self._told.clear()

    def exchange(self, mine: bytes, timeout: float) -> _Told:
        """What all ranks tell; all call it."""
        body = torch.frombuffer(bytearray(mine), dtype=torch.uint8)
        digest = int.from_bytes(hashlib.blake2b(mine, digest_size=7).digest(), "big")
        heads = torch.empty(self.size, 2, dtype=torch.int64)
        heads[self.rank] = torch.tensor([len(body), digest])
        self._gather(list(heads), timeout)
        digests = tuple(heads.flatten().tolist())
        if digests not in self._told:
            bodies = [torch.empty(int(n), dtype=torch.uint8) for n in heads[:, 0]]
            bodies[self.rank] = body
            self._gather(bodies, timeout)
            if len(self._told) >= 64:
                self._told.clear()
            self._told[digests] = _merge([json.loads(each.numpy().tobytes()) for each in bodies])
        return self._told[digests]

    def _gather(self, rows: list[torch.Tensor], timeout: float) -> None:
        others = [rank for rank in range(self.size) if rank != self.rank]
        for rank in others:
            self.service.submit_send(rows[self.rank], rank)
            self.service.submit_recv(rows[rank], rank)
        if others:
            self.service.run(timeout)


_world: _World | None = None


def _find_world(timeout: float) -> _World:
    """That of the current process group; all ranks come here for the first time together."""
    global _world
    if _world is None or _world.group() is not dist.group.WORLD:
        if _world is not None:
            _world.close()
        _world = _World(timeout)
    return _world


def _merge(told: list[Any]) -> _Told:
    """Numbers all chunks; a channel of which two ranks have different chunks is a Conflict, on all ranks."""
    channels: dict[Key, _Channel] = {}
    sizes: dict[Key, dict[int, tuple[int, int, int]]] = {}
    count = 0
    for rank, its in enumerate(told):
        for source, targets, contributors, op, divisor, nchunks, nbytes, where, dtypes in its:
            key = source, tuple(targets), tuple(contributors), op, divisor
            sizes.setdefault(key, {})[rank] = nchunks, nbytes, where
            if rank == source:
                channels[key] = _Channel(count, dtypes)
                count += nchunks
    for key, by_rank in sizes.items():
        source, targets, contributors, *_ = key
        for rank in (source, *targets, *contributors):
            has, wanted = by_rank.get(rank, (0, 0, 0)), by_rank.get(source, (0, 0, 0))
            if has != wanted:
                raise tb.Conflict(
                    f"rank {source} has {wanted[0]} chunks of {wanted[1]} bytes for {list(targets)}, and rank {rank} "
                    f"has {has[0]} of {has[1]}, or those of tensors with other global shapes; sizes that a mesh can't "
                    "divide need global_shape in m2m_to_chunks"
                )
    return _Told(channels, count)


class Schedule:
    """A list of buckets as an IR with its memory."""

    def __init__(self, world: _World, buckets: list[Bucket], told: _Told, max_in_flight: int) -> None:
        self._world, self._buckets, self._max_in_flight = weakref.ref(world), buckets, max_in_flight
        by_key: dict[Key, list[Bucket]] = {}
        for bucket in buckets:
            by_key.setdefault(_key(bucket), []).append(bucket)
        parts: dict[int, tuple[_tensors.View | None, _tensors.View | None]] = {}
        views: dict[int, _tensors.View] = {}
        channels = []
        for key, its in by_key.items():
            channel = told.channels[key]
            numbers = itertools.count()
            ranks = _ir.ranks_of(key[1]), _ir.ranks_of(key[2])
            channels.append([[_describe(chunk, channel, next(numbers), ranks) for chunk in b.chunks] for b in its])
            for i, chunk in enumerate(itertools.chain(*[b.chunks for b in its])):
                parts[channel.first + i] = _parts(chunk, views)
        self.order = [bucket for its in by_key.values() for bucket in its]  # as in the IR
        self._views = list(views.values())
        self.ir = _ir.build(world.rank, [f"{i:09d}" for i in range(told.count)], channels, max_in_flight)
        self.bound = _ir.bind(self.ir, parts)

    def is_of(self, world: _World, buckets: Sequence[Bucket], max_in_flight: int) -> bool:
        is_like = self._world() is world and self._max_in_flight == max_in_flight and len(self._buckets) == len(buckets)
        return is_like and all(a is b for a, b in zip(self._buckets, buckets, strict=True))

    def synchronize(self) -> None:
        for view in self._views:
            if view.look_again is not None:
                view.look_again()
        for device in {view.device for view in self._views} - {"host"}:
            torch.cuda.current_stream(device).synchronize()


def _key(bucket: Bucket) -> Key:
    key: Key = bucket.key[:-1]  # without the transport, which is NONE for those who only contribute
    return key


def _tell(rank: int, buckets: Sequence[Bucket]) -> bytes:
    """What the others have to know: of each channel, how much it is, where it is, and its source's dtypes."""
    channels: dict[Key, list[Chunk]] = {}
    for bucket in buckets:
        channels.setdefault(_key(bucket), []).extend(bucket.chunks)
    found = []
    for key, chunks in channels.items():
        dtypes = [_values.dtype("its dtype", chunk.source_tensor.dtype) for chunk in chunks] if key[0] == rank else []
        boxes = [chunk.box for chunk in chunks]
        where = zlib.crc32(repr([(box.global_shape, box.src_idx) for box in boxes]).encode())
        found.append([*key, len(boxes), sum(box.nbytes for box in boxes), where, dtypes])
    return json.dumps(found).encode()


def _parts(chunk: Chunk, views: dict[int, _tensors.View]) -> tuple[_tensors.View | None, _tensors.View | None]:
    """The chunk's boxes: as tensors of their own, so that no two of a rank are in one memory."""

    def box(tensor: torch.Tensor, slices: tuple[slice, ...]) -> _tensors.View:
        if id(tensor) not in views:
            views[id(tensor)] = _tensors.read(tensor.detach())
        view = views[id(tensor)]
        strides = view.strides or _tensors.row_major(view.shape)
        starts = [each.start or 0 for each in slices]
        if len(strides) != len(chunk.chunk_shape) or any(
            a + n > most for a, n, most in zip(starts, chunk.chunk_shape, view.shape, strict=False)
        ):
            raise tb.Invalid(f"{chunk!r} is not in its tensor of {view.shape}, at {starts}")
        offset = sum(a * stride for a, stride in zip(starts, strides, strict=False)) * tensor.itemsize
        return replace(view, address=view.address + offset, shape=chunk.chunk_shape, strides=strides)

    return (
        box(chunk.source_tensor, chunk.src_slice) if chunk.is_source else None,
        box(chunk.tensor, chunk.dst_slice) if chunk.is_target else None,
    )


def _describe(chunk: Chunk, channel: _Channel, i: int, ranks: tuple[Any, Any]) -> tb_chunk:
    from .ir import MODES

    number, shape = channel.first + i, chunk.chunk_shape
    if len(shape) > TB_MAX_DIMS:
        raise tb.Invalid(f"{chunk!r} has more than {TB_MAX_DIMS} dims")
    return tb_chunk(
        mode=MODES[chunk.transport],
        is_source=chunk.is_source,
        is_target=chunk.is_target,
        tensor=number,
        id=number,
        source=chunk.src_rank,
        ntargets=len(ranks[0]),
        targets=ranks[0],
        ncontributors=len(ranks[1]),
        contributors=ranks[1],
        op=chunk.op,
        divisor=chunk.divisor,
        ndim=len(shape),
        len=Dims(*shape),
        src_dtype=channel.dtypes[i],
        wire_dtype=_values.dtype("transfer_dtype", chunk.transfer_dtype),
        nbytes=chunk.nbytes,
    )


class Run:
    """One transfer of a list of buckets; all ranks of the process group do theirs."""

    def __init__(self, buckets: list[Bucket], max_in_flight: int = 2, timeout: float = DEADLINE_S) -> None:
        self._buckets, self._max_in_flight, self._timeout = buckets, max_in_flight, timeout
        self._steps: dict[Bucket, int] = {}  # how many of each have been told
        self._changed = threading.Condition()
        self._error: BaseException | None = None
        self._thread: threading.Thread | None = None

    def execute(self, shows_steps: bool = False) -> None:
        """Does it, in this thread."""
        world = _find_world(self._timeout)
        try:
            schedule = self._known(world)
            try:
                if schedule is not None:
                    self._move(world, schedule, shows_steps)
                    return
                told = world.exchange(_tell(world.rank, self._buckets), self._timeout)
            except tb.Conflict:  # some ranks know their schedules, and others do not, or know those of other runs
                told = world.exchange(_tell(world.rank, self._buckets), self._timeout)
            self._move(world, self._make(world, told), shows_steps)
        except BaseException:
            world.forget()  # what ranks remember is the same on all, also if one of them has come further
            raise

    def _move(self, world: _World, schedule: Schedule, shows_steps: bool) -> None:
        schedule.synchronize()
        order = schedule.order

        def tell(bucket: int, step: tb_bucket_step) -> None:
            with self._changed:
                self._steps[order[bucket]] = step + 1
                self._changed.notify_all()

        progress = tell if shows_steps else None
        world.service._execute(schedule.ir, schedule.bound, self._timeout, progress)

    def _known(self, world: _World) -> Schedule | None:
        """That of an earlier run of the same buckets."""
        schedule = self._buckets[0]._schedule if self._buckets else world.nothing
        is_same = schedule is not None and schedule.is_of(world, self._buckets, self._max_in_flight)
        return schedule if is_same else None

    def _make(self, world: _World, told: _Told) -> Schedule:
        try:
            schedule = Schedule(world, self._buckets, told, self._max_in_flight)
        except Exception:
            with contextlib.suppress(tb.Error):  # fails on all ranks: others have chunks for this one
                nothing = _ir.build(world.rank, [], [], 1)
                world.service._execute(nothing, _ir.bind(nothing, {}), self._timeout, None)
            raise
        if self._buckets:
            self._buckets[0]._schedule = schedule
        else:
            world.nothing = schedule
        return schedule

    def start(self) -> None:
        """Does it in another thread, and tells the steps."""
        _find_world(self._timeout)
        self._thread = threading.Thread(target=self._main, daemon=True)
        self._thread.start()

    def _main(self) -> None:
        try:
            self.execute(shows_steps=True)
        except BaseException as error:
            with self._changed:
                self._error = error
                self._changed.notify_all()

    def has_reached(self, bucket: Bucket, step: Literal["launched", "complete", "finalised"]) -> bool:
        """Whether the bucket has come so far; raises why the run failed."""
        wanted = tb_bucket_step[f"TB_BUCKET_{step.upper()}"] + 1
        with self._changed:
            if self._error is None and self._steps.get(bucket, 0) < wanted:
                self._changed.wait(_LOOK_S)
            if self._error is not None:
                raise self._error
            return self._steps.get(bucket, 0) >= wanted

    def finish(self, bucket: Bucket) -> None:
        """Waits until the bucket is in the tensors; the run's deadline ends the wait."""
        while not self.has_reached(bucket, "finalised"):
            pass
        ends = (self._steps.get(each, 0) for each in self._buckets)
        if self._thread is not None and all(end > tb_bucket_step.TB_BUCKET_FINALISED for end in ends):
            self._thread.join()
