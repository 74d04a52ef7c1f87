"""Layouts and plans: who holds which part of a tensor, and what moves between two layouts. Nothing is sent here."""

from __future__ import annotations

import ctypes
import functools
import subprocess
from collections.abc import Callable, Sequence
from ctypes import byref, c_void_p
from dataclasses import dataclass
from typing import Any

from . import _values
from ._c import TB_MAX_RANKS, TB_NO_RANK, find, lib, take_text, tb_chunk_mode, tb_local, tb_plan_opts, tb_plan_stats
from ._errors import Error, Invalid, Refused

Segments = list[list[tuple[int, int]]]


class Layout:
    """A mesh of ranks, and for each of its dimensions what that does to a tensor; made by ``tb.layout``.

    It never changes. Layouts that say the same are equal, and have the same text.
    """

    def __init__(self, text: str) -> None:
        self._handle = c_void_p()
        lib.tb_layout_parse(_values.text("layout", text), byref(self._handle))
        self._text = take_text(lib.tb_layout_format, self._handle)

    def __str__(self) -> str:
        return self._text

    def __repr__(self) -> str:
        return f"tensorbus.layout({self._text!r})"

    def __eq__(self, other: object) -> bool:
        return self._text == other._text if isinstance(other, Layout) else NotImplemented

    def __hash__(self) -> int:
        return hash(self._text)

    def __reduce__(self) -> tuple[Any, ...]:
        return layout, (self._text,)

    @functools.cached_property
    def ranks(self) -> tuple[int, ...]:
        """The ranks of the mesh, row-major."""
        return tuple(lib.tb_layout_rank_at(self._handle, i) for i in range(lib.tb_layout_nranks(self._handle)))

    def check(self, shape: Any) -> None:
        """Raises ``Invalid`` if the layout does not fit tensors of this shape."""
        lib.tb_layout_check(self._handle, byref(_values.shape("shape", shape)))

    def local(self, shape: Any, rank: int) -> Segments:
        """Which indices of each dimension the rank holds, as segments (start, stop), in the order of its memory.

        >>> import tensorbus as tb
        >>> tb.layout("mesh=4 place=S0").local((10,), rank=3)
        [[(9, 10)]]
        """
        found = self._find_local(shape, rank)
        try:
            return [
                [(found.segments[d][i].start, found.segments[d][i].stop) for i in range(found.nsegments[d])]
                for d in range(found.shape.ndim)
            ]
        finally:
            lib.tb_local_fini(byref(found))

    def local_shape(self, shape: Any, rank: int) -> tuple[int, ...]:
        """The shape of what the rank holds; all zero for a rank outside of the mesh.

        >>> import tensorbus as tb
        >>> tb.layout("mesh=2,2 place=S0,S1").local_shape((600, 400), rank=1)
        (300, 200)
        """
        return part_shape(self, _values.dims("shape", shape), _values.integer("rank", rank, 0, TB_MAX_RANKS - 1))

    def _find_local(self, shape: Any, rank: int) -> tb_local:
        found = tb_local()
        rank = _values.integer("rank", rank, 0, TB_MAX_RANKS - 1)
        lib.tb_layout_local(self._handle, byref(_values.shape("shape", shape)), rank, byref(found))
        return found

    def __del__(self, destroy: Callable[..., None] = lib.tb_layout_destroy) -> None:
        if handle := getattr(self, "_handle", None):
            destroy(handle)


@functools.lru_cache(maxsize=4096)
def part_shape(layout: Layout, shape: tuple[int, ...], rank: int) -> tuple[int, ...]:
    """``layout.local_shape``, kept, for values that are known to be right."""
    found = layout._find_local(shape, rank)
    dims = tuple(found.shape.dim[: found.shape.ndim])
    lib.tb_local_fini(byref(found))
    return dims


@functools.lru_cache(maxsize=4096)
def _parse(text: str) -> Layout:
    return Layout(text)


def layout(text: str | Layout) -> Layout:
    """A layout from its text: a mesh, its ranks, and a placement for each of its dimensions.

    >>> import tensorbus as tb
    >>> tb.layout("mesh=2,2 place=R,S1 ranks=4..7").ranks
    (4, 5, 6, 7)
    """
    if isinstance(text, Layout):
        return text
    _values.text("layout", text)
    return _parse(text)


@dataclass(frozen=True, slots=True)
class Route:
    """A box that moves: from its place in the source's part to its place in each target's."""

    source: int | None  # None: the box is filled with zeros
    targets: tuple[int, ...]
    contributors: tuple[int, ...]  # of a Partial source, in the order they are combined
    lengths: tuple[int, ...]
    source_start: tuple[int, ...]
    target_start: tuple[int, ...]  # at this rank if it is a target, else at the first target
    mode: str  # what it is at this rank: "p2p", "broadcast", "local", or "none", which takes part in a reduction only


@dataclass(frozen=True, slots=True)
class PlanStats:
    """Figures of a plan, over all ranks. Copies within a rank count in ``local_bytes`` only."""

    send_bytes: dict[int, int]  # by rank, counting every receiver
    recv_bytes: dict[int, int]
    egress_bytes: dict[int, int]  # as send_bytes, but what goes to several ranks counts once
    reduce_bytes: dict[int, int]  # other ranks' contributions that the rank combines
    total_bytes: int
    local_bytes: int
    nchunks: int
    max_send: int  # of the busiest sender
    min_max_send: int  # no choice among replicas can be below this
    max_slice: int


class Plan:
    """What moves between two layouts of a tensor; made by ``tb.plan``. The same on every rank."""

    def __init__(
        self,
        src: Layout,
        dst: Layout,
        shape: Any,
        dtype: Any,
        hosts: Sequence[int] | None = None,
        unbalanced: bool = False,
        whole_rows: bool = False,
    ) -> None:
        self.src, self.dst = src, dst
        self.shape = _values.dims("shape", shape)
        self._dtype = _values.dtype("dtype", dtype)
        self.hosts = None
        if hosts is not None:
            self.hosts = tuple(_values.integer("a host", h, 0, 2**31 - 1) for h in _values.items("hosts", hosts))
        self._handle = c_void_p()
        opts = tb_plan_opts(
            unbalanced=_values.flag("unbalanced", unbalanced), whole_rows=_values.flag("whole_rows", whole_rows)
        )
        if self.hosts is not None:
            opts.hosts = (ctypes.c_int32 * len(self.hosts))(*self.hosts)
            opts.nhosts = len(self.hosts)
        self._opts = opts  # the plan borrows the hosts
        c_shape = _values.shape("shape", self.shape)
        lib.tb_plan_create(src._handle, dst._handle, byref(c_shape), self._dtype, byref(opts), byref(self._handle))

    @property
    def dtype(self) -> str:
        """Its dtype, by our name."""
        return _values.dtype_name(self._dtype)

    def __repr__(self) -> str:
        return f"tensorbus.plan({str(self.src)!r}, {str(self.dst)!r}, {self.shape}, {self.dtype!r})"

    def routes(self, rank: int, rotation: int = 0) -> list[Route]:
        """The boxes of which the rank is source, target or contributor.

        >>> import tensorbus as tb
        >>> p = tb.plan("mesh=2 place=S0", "mesh=1 place=R ranks=2", (4,), "f32")
        >>> [(r.source, r.target_start, r.lengths, r.mode) for r in p.routes(2)]
        [(0, (0,), (2,), 'p2p'), (1, (2,), (2,), 'p2p')]
        """
        rank = _values.integer("rank", rank, 0, TB_MAX_RANKS - 1)
        rotation = _values.integer("rotation", rotation, 0, 2**64 - 1)
        found = c_void_p()
        lib.tb_routes_create(byref(found))
        try:
            lib.tb_plan_routes(self._handle, rank, rotation, found)
            return [self._route(lib.tb_routes_at(found, i)[0], rank) for i in range(lib.tb_routes_count(found))]
        finally:
            lib.tb_routes_destroy(found)

    def _route(self, r: Any, rank: int) -> Route:
        n = len(self.shape)
        return Route(
            source=None if r.source == TB_NO_RANK else r.source,
            targets=tuple(r.targets[: r.ntargets]),
            contributors=tuple(r.contributors[: r.ncontributors]),
            lengths=tuple(r.len[:n]),
            source_start=tuple(r.src.start[:n]),
            target_start=tuple(r.dst.start[:n]),
            mode=tb_chunk_mode(lib.tb_route_mode(byref(r), rank)).name.removeprefix("TB_").lower(),
        )

    def stats(self) -> PlanStats:
        """What each rank sends and receives.

        >>> import tensorbus as tb
        >>> tb.plan("mesh=4 place=S0", "mesh=2,2 place=R,S1 ranks=4..7", (6144, 4096), "bf16").stats().total_bytes
        100663296
        """
        s = tb_plan_stats()
        lib.tb_plan_stats_compute(self._handle, byref(s))
        try:
            ranks = s.ranks[: s.nranks]

            def by_rank(figures: Any) -> dict[int, int]:
                return dict(zip(ranks, figures[: s.nranks], strict=True))

            return PlanStats(
                by_rank(s.send_bytes),
                by_rank(s.recv_bytes),
                by_rank(s.egress_bytes),
                by_rank(s.reduce_bytes),
                s.total_bytes,
                s.local_bytes,
                s.nchunks,
                s.max_send,
                s.min_max_send,
                s.max_slice,
            )
        finally:
            lib.tb_plan_stats_fini(byref(s))

    def check(self) -> None:
        """Proves the plan: every element of a target is written exactly once, by a rank that holds it."""
        lib.tb_plan_check(self._handle)

    def svg(self) -> str:
        """A picture of both sides and of what goes between them, as ``tensorbus plan --svg`` draws it."""
        if self._opts.unbalanced or self._opts.whole_rows:
            raise Refused("pictures are of plans without the options unbalanced and whole_rows")
        arguments = {
            "--shape": ",".join(map(str, self.shape)),
            "--dtype": self.dtype,
            "--src": str(self.src),
            "--dst": str(self.dst),
        }
        if self.hosts is not None:
            arguments["--hosts"] = ",".join(map(str, self.hosts))
        flat = [word for pair in arguments.items() for word in pair]
        command = [str(find("tensorbus")), "plan", *flat, "--svg", "-"]
        done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False)
        if done.returncode != 0:
            raise (Invalid if done.returncode == 2 else Error)(done.stderr.strip())
        return done.stdout

    def __del__(self, destroy: Callable[..., None] = lib.tb_plan_destroy) -> None:
        if handle := getattr(self, "_handle", None):
            destroy(handle)


def plan(
    src: str | Layout,
    dst: str | Layout,
    shape: Any,
    dtype: Any,
    *,
    hosts: Sequence[int] | None = None,
    unbalanced: bool = False,
    whole_rows: bool = False,
) -> Plan:
    """Which elements go from which rank to which, for a tensor of this global shape.

    ``hosts`` has the machine of rank 0, 1, 2, ...; then sources on the target's machine are preferred, and data crosses
    between machines once. With ``unbalanced``, the first replica sends everything, to compare with; with
    ``whole_rows``, what replicas share is not cut along the last dimension.

    >>> import tensorbus as tb
    >>> p = tb.plan("mesh=4 place=S0", "mesh=2,2 place=R,S1", (6144, 4096), "bf16")
    >>> p.check()
    >>> p.stats().max_send == p.stats().min_max_send
    True
    """
    return Plan(layout(src), layout(dst), shape, dtype, hosts, unbalanced, whole_rows)
