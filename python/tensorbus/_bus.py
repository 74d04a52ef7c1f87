"""The bus: worlds, pairs, batches and transfers."""

from __future__ import annotations

import asyncio
import atexit
import ctypes
import os
import sys
import weakref
from collections.abc import Callable, Generator, Iterable, Mapping
from ctypes import byref, c_bool, c_char_p, c_int32, c_int64, c_uint64, c_void_p
from dataclasses import dataclass
from typing import Any

from . import _tensors, _values
from ._c import (
    TB_MAX_RANKS,
    declare,
    lib,
    take_text,
    tb_batch_opts,
    tb_batch_state,
    tb_commit,
    tb_event,
    tb_pair_opts,
    tb_phase,
    tb_status,
    tb_tensor,
    tb_tie,
    tb_transfer_opts,
    tb_transfer_state,
    tb_world_opts,
)
from ._errors import Cancelled, Error, Invalid, Timeout, make
from ._handle import Deadline, Handle, sleep_until_readable
from ._layout import Layout, layout

_look = declare(lib, "tb_wait")  # without exceptions
_EVENTS = {event.name.removeprefix("TB_").lower(): event for event in tb_event}
_COMMITS = {commit.name.removeprefix("TB_").lower(): commit for commit in tb_commit}
_PHASES = tuple(p.name.removeprefix("TB_PHASE_").lower() for p in tb_phase)[: tb_phase.TB_PHASE_COUNT]
_MOST = {"u32": 2**32 - 1, "i32": 2**31 - 1, "i64": 2**63 - 1}
_live: weakref.WeakSet[Bus] = weakref.WeakSet()


def _choose(parameter: str, value: Any, choices: Mapping[str, int]) -> int:
    if not isinstance(value, str) or value not in choices:
        raise Invalid(f"{parameter} is {value!r}; there are {', '.join(map(repr, choices))}")
    return choices[value]


# ---- Joining --------------------------------------------------------------------------------------------------------


def _default_seat() -> tuple[int, int] | None:
    """The seat that torch.distributed, or torchrun's environment, gives this process."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        return distributed.get_rank(), distributed.get_world_size()
    try:
        return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    except (KeyError, ValueError):
        return None


def _choose_seat(url: str, index: int | None, size: int | None) -> tuple[int, int]:
    if index is None and size is None and url.startswith("agent:"):
        return 0, 0  # whichever seat the agent has
    seat = _default_seat() if index is None or size is None else None
    if seat is None and (index is None or size is None):
        raise Invalid("index and size are missing, and neither torch.distributed nor RANK and WORLD_SIZE has them")
    if seat is not None:
        index = seat[0] if index is None else index
        size = seat[1] if size is None else size
    return (
        _values.integer("index", index, 0, TB_MAX_RANKS - 1),
        _values.integer("size", size, 1, TB_MAX_RANKS),
    )


def join(
    url: str,
    group: str | None = None,
    index: int | None = None,
    size: int | None = None,
    *,
    timeout: float | None = None,
    token: str | None = None,
    transport: str | None = None,
    workers: int = 0,
    host: str | None = None,
    plan_bytes: int = 0,
    name: str | None = None,
) -> Bus:
    """Takes seat ``index`` of the ``size`` in ``group``, on the bus whose store is at ``url``.

    ``url`` is "unix:/run/bus.sock", "tcp://127.0.0.1:7000" or "etcd://a:2379,b:2379"; or an agent,
    "agent:/run/trainer-0.sock", whose seat it is then. ``index`` and ``size`` default to those of torch.distributed, or
    of the variables RANK and WORLD_SIZE. ``timeout``, in seconds, is for joining, and for calls that are given none.
    The other options are those of ``tb_world_opts``.

    >>> import tempfile, tensorbus as tb
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     with tb.join(f"unix:{folder}/bus", group="trainer", index=0, size=1) as bus:
    ...         bus
    <tensorbus.Bus trainer 0 of 1>
    """
    c_url = _values.text("url", url)
    c_group = _values.optional_text("group", group)
    if group is None and not url.startswith("agent:"):
        raise Invalid("group is missing")
    index, size = _choose_seat(url, index, size)
    opts = tb_world_opts(
        token=_values.optional_text("token", token),
        timeout_ms=_values.milliseconds("timeout", timeout),
        transport=_values.optional_text("transport", transport),
        workers=_values.integer("workers", workers, 0, _MOST["i32"]),
        host=_values.optional_text("host", host),
        plan_bytes=_values.integer("plan_bytes", plan_bytes, 0, _MOST["i64"]),
        name=_values.optional_text("name", name),
    )
    bus = Bus(f"{group} {index} of {size}")
    lib.tb_world_join(c_url, c_group, index, size, byref(opts), byref(bus._handle))
    bus._begin()
    return bus


class Bus(Handle):
    """A process's seat on the bus; made by ``tb.join``. Closing it closes its batches and pairs first."""

    def __init__(self, what: str) -> None:
        super().__init__(what)
        self._pairs: list[Pair] = []
        self._batches: list[Batch] = []

    def _begin(self) -> None:
        group, index, size = c_char_p(), c_int32(), c_int32()
        lib.tb_world_seat(self._handle, byref(group), byref(index), byref(size))
        self.group = (group.value or b"").decode()
        self.index, self.size = index.value, size.value
        self.rank: int = lib.tb_world_rank(self._handle)
        self.incarnation: int = lib.tb_world_incarnation(self._handle)
        self._what = f"{self.group} {self.index} of {self.size}"
        self._seats = {self.group: (self.index, self.size)}
        _live.add(self)

    def groups(self) -> dict[str, tuple[int, int]]:
        """The groups that this process is in, each with its seat there: (index, size)."""
        return dict(self._seats)

    def enter(self, group: str, index: int, size: int) -> None:
        """Takes a seat in another group, too."""
        c_group = _values.text("group", group)
        index = _values.integer("index", index, 0, TB_MAX_RANKS - 1)
        size = _values.integer("size", size, 1, TB_MAX_RANKS)
        with self._use() as world:
            lib.tb_world_enter(world, c_group, index, size)
            self._seats[group] = (index, size)

    def pair(
        self,
        name: str,
        remote: str,
        layout: str | Layout | None = None,
        *,
        group: str | None = None,
        timeout: float | None = None,
        wait: bool = True,
    ) -> Pair:
        """Meets group ``remote``; all ranks of both groups make the pair ``name``, each side with its own ``layout``.

        The layout may be left out if every tensor brings its own. With "none", on both sides, seat i sends to seat i,
        and each rank's tensors are its own. ``group`` is this side's, where the process is in several. With
        ``wait=False`` the others are waited for when a batch is registered.
        """
        c_name, c_remote = _values.text("name", name), _values.text("remote", remote)
        here = self.group if group is None else group
        _values.text("group", here)
        if here not in self._seats:
            raise Invalid(f"this process is not in group {here!r}")
        index, size = self._seats[here]
        opts = tb_pair_opts(
            group=here.encode(),
            timeout_ms=_values.milliseconds("timeout", timeout),
            no_wait=not _values.flag("wait", wait),
        )
        pair = Pair(self, name, remote, layout, index, size)
        with self._use() as world:
            lib.tb_pair_create(world, c_name, c_remote, pair._c_layout(), byref(opts), byref(pair._handle))
        self._pairs.append(pair)
        return pair

    def batch(
        self,
        name: str,
        *,
        commit: str = "in_place",
        bucket_size: int = 0,
        staging_bytes: int = 0,
        max_in_flight: int = 0,
        group_window: int = 0,
        staged: bool = False,
        snapshot: bool = False,
        ties: Mapping[str, str] | None = None,
        ignored: Iterable[str] = (),
        checksum: bool = False,
    ) -> Batch:
        """Tensors that travel together. All ranks of its pairs make it, by the same name.

        ``commit`` is "in_place" or "shadow": what arrives lands in the tensors, or beside them until all ranks of the
        group have all of theirs. ``ties`` maps names of tied weights to canonical ones, ``ignored`` has patterns of
        names that may be on one side only. The other options are those of ``tb_batch_opts``; 0 is their default.
        """
        if isinstance(ignored, str) or not isinstance(ignored, Iterable):
            raise Invalid("ignored must be a list of patterns")
        if ties is not None and not isinstance(ties, Mapping):
            raise Invalid("ties must be a dict of names and canonical names")
        c_ties = [tb_tie(_values.text("a tie", a), _values.text("a tie", b)) for a, b in (ties or {}).items()]
        c_ignored = [_values.text("an ignored pattern", p) for p in ignored]
        opts = tb_batch_opts(
            bucket_size=_values.integer("bucket_size", bucket_size, 0, _MOST["i64"]),
            staging_bytes=_values.integer("staging_bytes", staging_bytes, 0, _MOST["i64"]),
            max_in_flight=_values.integer("max_in_flight", max_in_flight, 0, _MOST["u32"]),
            group_window=_values.integer("group_window", group_window, 0, _MOST["u32"]),
            staged=_values.flag("staged", staged),
            snapshot=_values.flag("snapshot", snapshot),
            ties=(tb_tie * len(c_ties))(*c_ties),
            nties=len(c_ties),
            ignored=(c_char_p * len(c_ignored))(*c_ignored),
            nignored=len(c_ignored),
            commit=_choose("commit", commit, _COMMITS),
            checksum=_values.flag("checksum", checksum),
        )
        c_name = _values.text("name", name)
        batch = Batch(self, name, commit)
        with self._use() as world:
            lib.tb_batch_create(world, c_name, byref(opts), byref(batch._handle))
        self._batches.append(batch)
        return batch

    def invalidate(self, tensor: Any) -> None:
        """The tensor's memory is about to be freed or moved: transfers that use it fail, by name.

        When this returns, neither this process nor a peer uses the memory. Batches with tensors in it have to be made
        again.
        """
        view = _tensors.read(tensor)
        first, last = _span(view)
        with self._use() as world:
            lib.tb_world_invalidate(world, first, last - first)

    def close(self) -> None:
        """Closes its batches and pairs, then leaves all groups. What was sent and released is waited for."""
        for batch in list(self._batches):
            batch.close()
        for pair in list(self._pairs):
            pair.close()
        if handle := self._take():
            lib.tb_world_destroy(handle)
        _live.discard(self)


@atexit.register
def _close_all() -> None:
    """So that no thread of the library uses a tensor's memory when the interpreter frees that."""
    for bus in list(_live):
        for batch in list(bus._batches):
            batch._cancel_all()
        bus.close()


def _span(view: _tensors.View) -> tuple[int, int]:
    """The first byte of the tensor's elements, and the one after the last."""
    if 0 in view.shape:
        return view.address, view.address
    strides = view.strides or _tensors.row_major(view.shape)
    reach = [(n - 1) * s for n, s in zip(view.shape, strides, strict=True)]
    bits = _values.dtype_bits(view.dtype)
    first = sum(r for r in reach if r < 0)
    last = sum(r for r in reach if r > 0) + 1
    return view.address + first * bits // 8, view.address + -(-last * bits // 8)


# ---- Pairs ----------------------------------------------------------------------------------------------------------


class Pair(Handle):
    """Two groups that exchange tensors; made by ``Bus.pair``."""

    def __init__(self, bus: Bus, name: str, remote: str, text: str | Layout | None, index: int, size: int) -> None:
        super().__init__(f"pair '{name}'")
        self._bus = bus
        self.name, self.remote = name, remote
        self.index, self.size = index, size  # this process's seat in its side's group
        self.is_seat_to_seat = text == "none"
        self.layout = None if text is None or self.is_seat_to_seat else layout(text)

    def _c_layout(self) -> bytes | None:
        """Where every tensor brings its own layout, the pair's is not used; but all ranks have to have the same."""
        if self.is_seat_to_seat:
            return None
        return str(self.layout).encode() if self.layout else f"mesh={self.size} place=R".encode()

    def close(self) -> None:
        """Gives the pair up; its batches can't be moved through it any more."""
        if handle := self._take():
            self._bus._pairs.remove(self)
            lib.tb_pair_destroy(handle)


# ---- Batches --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class BatchState:
    """What this process has received through all pairs of a batch together."""

    version: int  # the last that all pairs had at one time; 0: none
    is_mixed: bool  # the pairs' versions differ
    is_torn: bool  # some pair's tensors have parts of a version that failed
    transfer_signal: bool  # sending: not all have read it; receiving: there is something to receive
    is_in_doubt: bool  # a receive has ended with InDoubt, and the next has not found out yet


class Batch(Handle):
    """Tensors that travel together; made by ``Bus.batch``. It keeps the memory of its tensors alive."""

    def __init__(self, bus: Bus, name: str, commit: str) -> None:
        super().__init__(f"batch '{name}'")
        self._bus = bus
        self.name, self.commit = name, commit
        self._tensors: dict[Pair, list[tuple[str, _tensors.View]]] = {}
        self._is_registered = False
        self._transfers: dict[bool, Transfer] = {}  # by is_send
        # Called before every transfer, with is_send: what looks at tensors again, and refuses those that have changed.
        self._before_transfer: list[Callable[[bool], None]] = []

    # -- Tensors --

    def add(
        self,
        pair: Pair,
        name: str,
        tensor: Any,
        *,
        shape: Any = None,
        layout: str | Layout | None = None,
        dtype: Any = None,
        wire_dtype: Any = None,
        group: int = 0,
        view: str | None = None,
    ) -> None:
        """Adds this rank's part of tensor ``name``: a NumPy array, a PyTorch tensor, or anything with DLPack.

        ``shape`` is the global one; by default, the tensor's own. ``layout`` is this side's for this tensor; by
        default, what the tensor brings, or the pair's. ``dtype`` reinterprets the bits, for dtypes that NumPy lacks:
        "bf16" for an array of uint16. ``wire_dtype`` asks for a cast on the way, ``group`` orders arrivals, ``view``
        says how the stored tensor becomes the one that is named. The memory is borrowed until the batch is closed.
        """
        self._add(pair, [(name, self._describe(pair, name, tensor, shape, layout, dtype, wire_dtype, group, view))])

    def add_all(self, pair: Pair, tensors: Mapping[str, Any], *, shapes: Mapping[str, Any] | None = None) -> None:
        """Adds many tensors by name, all or none; ``shapes`` has the global ones where they are not the tensors' own.

        Faster than ``add`` for each, because it is one call of the library.
        """
        shapes = shapes or {}
        self._add(
            pair,
            [
                (name, self._describe(pair, name, tensor, shapes.get(name), None, None, None, 0, None))
                for name, tensor in tensors.items()
            ],
        )

    def _describe(
        self,
        pair: Pair,
        name: Any,
        tensor: Any,
        shape: Any,
        text: str | Layout | None,
        dtype: Any,
        wire_dtype: Any,
        group: int,
        view: str | None,
    ) -> tuple[tb_tensor, _tensors.View]:
        """The tensor as the library takes it, after all checks that need the tensor itself."""
        _values.text("a tensor's name", name)
        if not isinstance(pair, Pair) or pair._bus is not self._bus:
            raise Invalid(f"tensor '{name}': {pair!r} is no pair of this bus")
        try:
            found = _reinterpret(_tensors.read(tensor), dtype)
            its_layout = layout(text) if text is not None else layout(found.layout) if found.layout else None
            whole = _values.dims("shape", shape if shape is not None else found.global_shape or found.shape)
            _check_part(pair, its_layout, whole, found.shape)
            described = tb_tensor(
                data=found.address if 0 not in found.shape else None,
                dtype=found.dtype,
                ndim=len(whole),
                shape=(c_int64 * 8)(*whole),
                layout=str(its_layout).encode() if its_layout else None,
                wire_dtype=0 if wire_dtype is None else _values.dtype("wire_dtype", wire_dtype),
                group=_values.integer("group", group, 0, 2**32 - 2),
                view=_values.optional_text("view", view),
                memory=found.device.encode() if 0 not in found.shape else None,
            )
            if found.strides is not None and 0 not in found.shape:
                described.strides = (c_int64 * len(found.strides))(*found.strides)
        except Error as error:
            raise type(error)(f"tensor '{name}': {error}", error.status) from None
        return described, found

    def _add(self, pair: Pair, tensors: list[tuple[str, tuple[tb_tensor, _tensors.View]]]) -> None:
        with self._use() as batch, pair._use() as c_pair:
            kept = self._tensors.setdefault(pair, [])
            for name, (described, view) in tensors:
                lib.tb_batch_add(batch, c_pair, name.encode(), byref(described))
                kept.append((name, view))
            self._is_registered = False

    # -- Pairs --

    def add_pair(self, pair: Pair) -> None:
        """Takes part in the pair's transfers even if this process adds none of its tensors."""
        with self._use() as batch, _pair_of(self, pair)._use() as c_pair:
            lib.tb_batch_add_pair(batch, c_pair)
            self._tensors.setdefault(pair, [])
            self._is_registered = False

    def remove_pair(self, pair: Pair) -> None:
        """Takes the pair and its tensors out of the batch, while no transfer of it is under way."""
        self._reap()
        with self._use() as batch, _pair_of(self, pair)._use() as c_pair:
            lib.tb_batch_remove_pair(batch, c_pair)
            self._tensors.pop(pair, None)

    def register(self, timeout: float | None = None) -> None:
        """Waits until both sides of every pair have added their tensors, and names and shapes agree.

        Who disagrees, or is missing at the deadline, is named in the exception. The first transfer registers a batch
        that has not been.
        """
        timeout_ms = _values.milliseconds("timeout", timeout)
        with self._use() as batch:
            lib.tb_batch_register(batch, timeout_ms)
            self._is_registered = True

    # -- State --

    def state(self) -> BatchState:
        """What this process has received."""
        state = tb_batch_state()
        with self._use() as batch:
            lib.tb_batch_query(batch, byref(state))
        return BatchState(state.version, state.is_mixed, state.is_torn, state.transfer_signal, state.is_in_doubt)

    @property
    def version(self) -> int:
        """The number of the last transfer that was completed into the tensors of all pairs; 0: none."""
        return self.state().version

    @property
    def is_torn(self) -> bool:
        """Whether some tensors have parts of a version that failed."""
        return self.state().is_torn

    @property
    def epoch(self) -> int:
        """How often this process has registered pairs of the batch, or removed them."""
        with self._use() as batch:
            epoch: int = lib.tb_batch_epoch(batch)
        return epoch

    def version_of(self, pair: Pair) -> tuple[int, bool]:
        """The version that this process has received through the pair, and whether that is torn."""
        version, is_torn = c_uint64(), c_bool()
        with self._use() as batch, _pair_of(self, pair)._use() as c_pair:
            lib.tb_batch_version(batch, c_pair, byref(version), byref(is_torn))
        return version.value, is_torn.value

    def dump(self, is_send: bool) -> str:
        """Every piece that this process sends or receives, one to a line, once it has been moved that way."""
        with self._use() as batch:
            return take_text(lib.tb_batch_dump, batch, _values.flag("is_send", is_send))

    # -- Transfers --

    def send(
        self,
        timeout: float | None = None,
        wait: str | None = "released",
        *,
        group: str | None = None,
        skip_lost: bool = False,
        whole_group: bool = False,
        stream: int | None = None,
    ) -> Transfer:
        """Sends the tensors to the other sides of the batch's pairs, and waits for an event.

        "released": the tensors may change again. "committed": all receivers have the version. With ``wait=None`` it
        returns at once, with the transfer. ``timeout`` is for the whole transfer. Tensors on a GPU are read after the
        work on ``stream``, a handle; by default, PyTorch's current one.
        """
        return self._transfer(True, timeout, wait, group, skip_lost, False, whole_group, stream)

    def recv(
        self,
        timeout: float | None = None,
        wait: str | None = "committed",
        *,
        group: str | None = None,
        skip_lost: bool = False,
        hold: bool = False,
        whole_group: bool = False,
        stream: int | None = None,
    ) -> Transfer:
        """Receives the next version into the tensors, and waits for an event.

        "arrived": this rank's data is in, or, with commit="shadow", beside the tensors. "committed": the version is in
        this rank's tensors. "decided", with ``hold``: the group has decided, and ``Transfer.proceed`` lets the tensors
        change. With ``wait=None`` it returns at once, with the transfer.
        """
        return self._transfer(False, timeout, wait, group, skip_lost, hold, whole_group, stream)

    def _transfer(
        self,
        is_send: bool,
        timeout: float | None,
        wait: str | None,
        group: str | None,
        skip_lost: bool,
        hold: bool,
        whole_group: bool,
        stream: int | None,
    ) -> Transfer:
        opts = tb_transfer_opts(
            timeout_ms=_values.milliseconds("timeout", timeout),
            group=_values.optional_text("group", group),
            skip_lost=_values.flag("skip_lost", skip_lost),
            hold=_values.flag("hold", hold),
            whole_group=_values.flag("whole_group", whole_group),
        )
        event = None if wait is None else _choose("wait", wait, _EVENTS)
        if not is_send:
            self._check_writable()
        self._reap(is_send)
        for look_again in self._before_transfer:
            look_again(is_send)
        if not self._is_registered:
            self.register(timeout)
        handle = self._stream(stream)
        if handle is not None:
            opts.stream = ctypes.addressof(handle)
        transfer = Transfer(self, is_send)
        with self._use() as batch:
            self._transfers[is_send] = transfer  # before it begins: it is never lost, whatever interrupts this
            (lib.tb_send if is_send else lib.tb_recv)(batch, byref(opts), byref(transfer._handle))
        if event is not None:
            try:
                transfer.wait(wait)
            except BaseException:
                transfer.close()
                raise
        return transfer

    def _stream(self, stream: int | None) -> c_void_p | None:
        """A handle of the stream that orders the tensors; None: all are in CPU memory."""
        if stream is not None:
            return c_void_p(_values.integer("stream", stream, 0, 2**64 - 1))
        for tensors in self._tensors.values():
            for _, view in tensors:
                if view.device != "host":
                    found = _tensors.current_stream(view.device)
                    return None if found is None else c_void_p(found)
        return None

    def _check_writable(self) -> None:
        for tensors in self._tensors.values():
            for name, view in tensors:
                if view.is_readonly:
                    raise Invalid(f"tensor '{name}' of batch '{self.name}' is read-only, and can't be received into")

    def _reap(self, *kinds: bool) -> None:
        """Closes transfers that have ended; one that was released is waited for, until its own deadline."""
        for is_send in kinds or (True, False):
            transfer = self._transfers.get(is_send)
            if transfer is not None:
                transfer._finish()

    def _cancel_all(self) -> None:
        for transfer in list(self._transfers.values()):
            transfer.close()

    def close(self) -> None:
        """Gives the tensors back. A send that was released is waited for; what else is under way is cancelled."""
        for transfer in list(self._transfers.values()):
            transfer._finish(cancels=True)
        if handle := self._take():
            self._bus._batches.remove(self)
            lib.tb_batch_destroy(handle)
            self._tensors.clear()
            self._before_transfer.clear()


def _pair_of(batch: Batch, pair: Any) -> Pair:
    if not isinstance(pair, Pair) or pair._bus is not batch._bus:
        raise Invalid(f"{pair!r} is no pair of this bus")
    return pair


def _reinterpret(view: _tensors.View, dtype: Any) -> _tensors.View:
    """The same bits as another dtype of the same width; or, of 4 bits, two elements to a byte."""
    if dtype is None:
        return view
    number = _values.dtype("dtype", dtype)
    bits, had = _values.dtype_bits(number), _values.dtype_bits(view.dtype)
    shape = view.shape
    if bits == 4 and had == 8 and view.strides is None and shape:
        shape = (*shape[:-1], shape[-1] * 2)
    elif bits != had:
        raise Invalid(
            f"its elements have {had} bits, and can't be taken as {_values.dtype_name(number)}, which has {bits}"
        )
    return _tensors.View(
        view.address, number, shape, view.strides, view.device, view.keepalive, view.is_readonly, None, view.layout
    )


def _check_part(pair: Pair, its: Layout | None, whole: tuple[int, ...], part: tuple[int, ...]) -> None:
    """The library can't see how long the memory is; so the local shape must be what the layout says."""
    its = its or pair.layout
    if its is None:
        if not pair.is_seat_to_seat:
            raise Invalid(f"it has no layout, and {pair._what} was made without one")
        expected = whole
    else:
        expected = its.local_shape(whole, pair.index)
        if pair.index not in its.ranks and part != expected and 0 not in part:
            raise Invalid(f"seat {pair.index} is not in its layout, '{its}', so that it holds nothing; not {part}")
    if part != expected and not (0 in part and 0 in expected):
        raise Invalid(
            f"seat {pair.index} holds {expected} of the global shape {whole} in the layout "
            f"'{its or 'none'}', but the tensor is {part}; is the argument shape the global one?"
        )


# ---- Transfers ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class TransferState:
    """How far a transfer is."""

    status: str  # "ok" while it is under way and after it succeeded, else that of the exception
    sentence: str  # what is wrong, if it has failed
    events: frozenset[str]
    attempt: int
    version: int  # of one that is committed; 0: it is not
    bytes_done: int
    bytes_total: int
    groups_done: int
    groups_total: int
    seconds: float
    phases: dict[str, float]  # seconds of each


def _read_state(call: Callable[[Any], None]) -> TransferState:
    s = tb_transfer_state()
    call(byref(s))
    failure = make(s.status, lib.tb_error_detail().decode("utf-8", "replace")) if s.status else None
    return TransferState(
        status=failure.status if failure else "ok",
        sentence=str(failure) if failure else "",
        events=frozenset(name for name, event in _EVENTS.items() if s.events & event),
        attempt=s.attempt,
        version=s.version,
        bytes_done=s.bytes_done,
        bytes_total=s.bytes_total,
        groups_done=s.groups_done,
        groups_total=s.groups_total,
        seconds=s.seconds,
        phases=dict(zip(_PHASES, s.phase, strict=True)),
    )


class Transfer(Handle):
    """A version on its way; made by ``Batch.send`` and ``Batch.recv``. It can be awaited.

    The batch keeps it until it has ended, so that it need not be kept. Closing it cancels it if it is under way, and so
    does cancelling the task that awaits it.
    """

    def __init__(self, batch: Batch, is_send: bool) -> None:
        super().__init__(f"{'send' if is_send else 'receive'} of batch '{batch.name}'")
        self._batch = batch
        self.is_send = is_send
        self._default_event = "released" if is_send else "committed"

    def _look(self, event: int) -> tuple[Timeout | None, int]:
        """None if the event has come; raises the transfer's failure; else why it has not, and what to poll."""
        with self._use() as transfer:
            status = _look(transfer, event, 0)
            if status == tb_status.TB_OK:
                return None, -1
            failure = make(status, lib.tb_error_detail().decode("utf-8", "replace"))
            if not isinstance(failure, Timeout):
                raise failure
            state = tb_transfer_state()
            lib.tb_transfer_query(transfer, byref(state))
            if state.status != tb_status.TB_OK:
                raise make(state.status, lib.tb_error_detail().decode("utf-8", "replace"))
            return failure, lib.tb_transfer_fd(transfer)

    def wait(self, event: str | None = None, timeout: float | None = None) -> None:
        """Waits for an event, or for the failure of the transfer, which it raises.

        By default for "released" of a send and "committed" of a receive. After ``timeout`` seconds it raises
        ``Timeout``, and the transfer goes on; without, the transfer's own deadline ends it.
        """
        number = _choose("event", self._default_event if event is None else event, _EVENTS)
        timeout_ms = _values.milliseconds("timeout", timeout)
        deadline = Deadline(None if timeout is None else timeout_ms / 1000)
        while True:
            missing, fd = self._look(number)
            if missing is None:
                return
            if deadline.is_over:
                raise Timeout(str(missing).replace("after 0 ms", f"after {timeout_ms} ms"))
            sleep_until_readable(fd, deadline.left)

    def __await__(self) -> Generator[Any, None, None]:
        return self._await_event(_EVENTS[self._default_event]).__await__()

    async def _await_event(self, number: int) -> None:
        loop = asyncio.get_running_loop()
        try:
            while True:
                missing, fd = self._look(number)
                if missing is None:
                    return
                await _readable(loop, fd)
        except asyncio.CancelledError:
            self.close()
            raise

    def stream_wait(self, event: str | None = None, stream: int | None = None) -> None:
        """Makes a CUDA stream wait for an event; the CPU does not. Without tensors on a GPU, this waits for it.

        ``stream`` is a handle; by default, PyTorch's current one. A transfer that fails later lets the stream go on:
        so look at ``wait``, too, before what the stream did is relied upon.
        """
        name = self._default_event if event is None else event
        number = _choose("event", name, _EVENTS)
        handle = self._batch._stream(stream)
        if handle is None:
            self.wait(name)
            return
        with self._use() as transfer:
            lib.tb_stream_wait(transfer, number, byref(handle))

    def wait_group(self, group: int, timeout: float | None = None) -> None:
        """Waits until the tensors of this group have arrived."""
        group = _values.integer("group", group, 0, 2**32 - 2)
        deadline = Deadline(None if timeout is None else _values.milliseconds("timeout", timeout) / 1000)
        while True:
            left = deadline.left
            with self._use() as transfer:
                try:
                    lib.tb_wait_group(transfer, group, 50 if left is None else min(50, int(left * 1000)))
                    return
                except Timeout:
                    state = tb_transfer_state()
                    lib.tb_transfer_query(transfer, byref(state))
                    if deadline.is_over or state.status != tb_status.TB_OK:
                        raise

    def proceed(self) -> None:
        """Lets a receive with ``hold`` change the tensors, now or as soon as it is decided."""
        with self._use() as transfer:
            lib.tb_proceed(transfer)

    def state(self, pair: Pair | None = None) -> TransferState:
        """How far it is, or what has become of one pair's part."""
        with self._use() as transfer:
            if pair is None:
                return _read_state(lambda out: lib.tb_transfer_query(transfer, out))
            with _pair_of(self._batch, pair)._use() as c_pair:
                return _read_state(lambda out: lib.tb_transfer_pair(transfer, c_pair, out))

    @property
    def version(self) -> int:
        """Its number, if it is committed; 0: it is not."""
        return self.state().version

    def fileno(self) -> int:
        """A descriptor that is readable when something has come about that no wait has seen; for select and poll."""
        with self._use() as transfer:
            fd: int = lib.tb_transfer_fd(transfer)
        return fd

    def cancel(self) -> None:
        """Ends it, here and at its peers; the tensors are not used any more when this returns."""
        with self._use() as transfer:
            lib.tb_cancel(transfer)

    def _finish(self, cancels: bool = False) -> None:
        """Closes a transfer that has ended. A send whose tensors are released has still to be read by its receivers."""
        if self.is_closed or self._is_inherited:
            self._batch._transfers.pop(self.is_send, None)
            return
        state = self.state()
        has_ended = state.status != "ok" or "committed" in state.events
        if not has_ended and "released" in state.events:
            try:
                self.wait("committed")
            except Error:
                pass  # its receivers report that; the tensors were released
        elif not has_ended and not cancels:
            return  # the next one is refused, by name
        self.close()

    def close(self) -> None:
        """Gives it up: cancels it if it is under way."""
        if handle := self._take():
            lib.tb_transfer_destroy(handle)
        if self._batch._transfers.get(self.is_send) is self:
            del self._batch._transfers[self.is_send]


def _resolve(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


async def _readable(loop: asyncio.AbstractEventLoop, fd: int) -> None:
    """Waits until the descriptor is readable. On a copy: another may close it, and several may wait for it."""
    if fd < 0:
        raise Cancelled("it was closed while it was awaited")
    copy = os.dup(fd)
    future = loop.create_future()
    try:
        loop.add_reader(copy, _resolve, future)
        await asyncio.wait([future], timeout=0.2)
    finally:
        loop.remove_reader(copy)
        os.close(copy)
