"""The bus: who is there, and the pairs and batches of this process."""

from __future__ import annotations

import atexit
import itertools
import os
import sys
import weakref
from collections.abc import Callable, Iterable, Mapping
from ctypes import byref, c_char_p, c_int32, c_uint64, c_void_p
from typing import Any, NamedTuple

from . import _tensors, _values
from ._batch import COMMITS, Batch
from ._c import TB_MAX_RANKS, lib, take_text, tb_batch_opts, tb_pair_opts, tb_world_opts
from ._call import Call, awaiting, waiting
from ._copy import CopyService
from ._errors import Invalid, Timeout
from ._handle import Deadline, Handle, finish_apart
from ._layout import Layout
from ._pair import Pair

_live: weakref.WeakSet[Bus] = weakref.WeakSet()


# ---- Joining --------------------------------------------------------------------------------------------------------


def _choose_seat(url: str | None, index: int | None, size: int | None) -> tuple[int, int]:
    """The seat; (0, 0): whichever the agent has, or what the library finds in the environment."""
    distributed = sys.modules.get("torch.distributed")
    if index is None and size is None:
        has_agent = url.startswith("agent:") if url is not None else bool(os.environ.get("TENSORBUS_AGENT"))
        if has_agent or os.environ.get("TENSORBUS_INDEX") or distributed is None:
            return 0, 0
        if not (distributed.is_available() and distributed.is_initialized()):
            return 0, 0
        index, size = distributed.get_rank(), distributed.get_world_size()
    if index is None or size is None:
        raise Invalid(f"{'index' if index is None else 'size'} is missing: give both of index and size, or neither")
    return (
        _values.integer("index", index, 0, TB_MAX_RANKS - 1),
        _values.integer("size", size, 1, TB_MAX_RANKS),
    )


def _joining(
    url: str | None = None,
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
) -> Call[Bus]:
    """Takes seat ``index`` of the ``size`` in ``group``, on the bus whose store is at ``url``.

    ``url`` is "unix:/run/bus.sock", "tcp://127.0.0.1:7000" or "etcd://a:2379,b:2379"; or an agent,
    "agent:/run/trainer-0.sock", whose seat this must be. The default is TENSORBUS_STORE or TENSORBUS_AGENT in the
    environment; `tensorbus run` sets them. ``group`` defaults to TENSORBUS_GROUP; ``index`` and ``size``
    to those of torch.distributed, or of the environment: TENSORBUS_INDEX and TENSORBUS_SIZE, or what torchrun, MPI,
    Slurm or Kubernetes has set (tensorbus.h has the variables).

    Options: ``timeout``, in seconds, to join, and for calls without a timeout of their own (30); ``token``, the same in
    all processes that use one store; ``transport``, "auto", "shm", "ucx" or "self"; ``workers``, the number of threads
    that copy; ``host``, an id: processes with equal ids are on one machine; ``plan_bytes``, the most memory for plans;
    ``name``, the name of this process in an agent's status.

    >>> import tempfile, tensorbus as tb
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     with tb.join(f"unix:{folder}/bus", group="trainer", index=0, size=1) as bus:
    ...         bus
    <tensorbus.Bus trainer 0 of 1>
    """
    c_url = _values.optional_text("url", url)
    c_group = _values.optional_text("group", group)
    index, size = _choose_seat(url, index, size)
    opts = tb_world_opts(
        token=_values.optional_text("token", token),
        timeout_ms=_values.milliseconds("timeout", timeout),
        transport=_values.optional_text("transport", transport),
        workers=_values.integer("workers", workers, 0, _values.MOST_I32),
        host=_values.optional_text("host", host),
        plan_bytes=_values.integer("plan_bytes", plan_bytes, 0, _values.MOST_I64),
        name=_values.optional_text("name", name),
    )
    bus = Bus(f"{group} {index} of {size}")
    if opts.timeout_ms:
        bus._timeout = opts.timeout_ms / 1000
    arguments = (c_url, c_group, index, size, byref(opts))
    return Call(f"joining {url or 'the bus'}", None, bus, bus._handle, bus._begin, lib.tb_call_join, *arguments)


join = waiting("join", _joining)
join_async = awaiting("join", _joining)


class Group(NamedTuple):
    """A group on the bus."""

    present: int  # seats that are taken
    size: int


class Plans(NamedTuple):
    """How often batches of a bus found their plan ready, and what is kept."""

    hits: int
    misses: int  # plans that had to be made
    nbytes: int  # of plans that are kept


class Bus(Handle):
    """A process's seat on the bus; made by ``tb.join``. Closing it closes its batches and pairs first."""

    def __init__(self, what: str) -> None:
        super().__init__(what)
        self._timeout = 30.0  # seconds, of calls that are given none
        self._pairs: list[Pair] = []
        self._batches: list[Batch] = []
        self._services: list[CopyService] = []

    def _begin(self) -> None:
        group, index, size = c_char_p(), c_int32(), c_int32()
        lib.tb_world_seat(self._handle, byref(group), byref(index), byref(size))
        self.group = (group.value or b"").decode()
        self.index, self.size = index.value, size.value
        self.rank: int = lib.tb_world_rank(self._handle)
        self.incarnation: int = lib.tb_world_incarnation(self._handle)
        self._what = f"bus seat {self.index} of {self.size} in group '{self.group}'"
        self._seats = {self.group: (self.index, self.size)}
        _live.add(self)

    def __repr__(self) -> str:
        closed = ", closed" if self.is_closed else ""
        return f"<tensorbus.Bus {self.group} {self.index} of {self.size}{closed}>"

    def _make_apart(self, call: Callable[[c_void_p], None]) -> None:
        """Makes a call that has no descriptor, in a thread; an exception such as KeyboardInterrupt leaves it there."""
        failures: list[BaseException] = []

        def body() -> None:
            try:
                call(world)
            except BaseException as error:
                failures.append(error)

        with self._use() as world:
            thread = finish_apart(self, body)  # the world is not destroyed before it has ended
        while thread.is_alive():
            thread.join(0.2)  # signals are handled
            if self.is_closed and thread.is_alive():
                raise self._closed_meanwhile()
        for failure in failures:
            raise failure

    def _close_apart(self, made: Handle) -> None:
        """Closes what a call makes that was left in its thread, once it has ended; at once if there is none."""
        users = [t for t in self._ending if t.is_alive()]

        def body() -> None:
            for user in users:
                user.join()
            made.close()

        finish_apart(self, body) if users else made.close()

    def groups(self, timeout: float | None = None) -> dict[str, Group]:
        """The groups on the bus, by name: how many of their seats are taken, of how many.

        >>> import tempfile, tensorbus as tb
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     with tb.join(f"unix:{folder}/bus", group="trainer", index=0, size=2) as bus:
        ...         bus.groups()
        {'trainer': Group(present=1, size=2)}
        """
        timeout_ms = _values.milliseconds("timeout", timeout)
        texts: list[str] = []
        self._make_apart(lambda world: texts.append(take_text(lib.tb_world_groups, world, timeout_ms)))
        found = (line.split(" ", 2) for line in texts[0].splitlines())
        return {name: Group(int(present), int(size)) for present, size, name in found}

    def wait(self, group: str, timeout: float | None = None) -> None:
        """Waits until every seat of the group is taken; ``Timeout`` names those that are not.

        >>> import tempfile, tensorbus as tb
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     with tb.join(f"unix:{folder}/bus", group="trainer", index=0, size=2) as bus:
        ...         bus.wait("trainer", timeout=0.01)
        Traceback (most recent call last):
        tensorbus._errors.Timeout: group 'trainer' has 1 of 2 ranks; missing: 1
        """
        c_group = _values.text("group", group)
        deadline = Deadline(self._timeout if timeout is None else _values.milliseconds("timeout", timeout) / 1000)
        for nlooks in itertools.count():
            left = deadline.left or 0.0
            try:
                with self._use(nlooks > 0) as world:  # for a while at a time, so that signals are handled
                    lib.tb_world_wait(world, c_group, min(50, int(left * 1000) + 1))
                return
            except Timeout:
                if deadline.is_over:
                    raise

    @property
    def plans(self) -> Plans:
        """How often a batch found its plan, how often one had to be made, and the memory of all plans that are kept."""
        hits, misses = c_uint64(), c_uint64()
        with self._use() as world:
            lib.tb_world_plan_counters(world, byref(hits), byref(misses))
            return Plans(hits.value, misses.value, lib.tb_world_plan_bytes(world))

    @property
    def seats(self) -> dict[str, tuple[int, int]]:
        """The groups that this process is in, each with its seat there: (index, size)."""
        return dict(self._seats)

    def enter(self, group: str, index: int, size: int) -> None:
        """Takes a seat in another group, too."""
        c_group = _values.text("group", group)
        index = _values.integer("index", index, 0, TB_MAX_RANKS - 1)
        size = _values.integer("size", size, 1, TB_MAX_RANKS)
        self._make_apart(lambda world: lib.tb_world_enter(world, c_group, index, size))
        self._seats[group] = (index, size)

    def _pairing(
        self,
        name: str,
        remote: str,
        layout: str | Layout | None = None,
        *,
        group: str | None = None,
        timeout: float | None = None,
        wait: bool = True,
    ) -> Call[Pair]:
        """Meets group ``remote``; all ranks of both groups make the pair ``name``, each side with its own ``layout``.

        The layout may be left out if every tensor brings its own. With "none", on both sides, seat i sends to seat i,
        and each rank's tensors are its own.

        Options: ``group``, this side's, if the process is in several; ``timeout``, in seconds; with ``wait=False`` the
        call returns at once, and registering a batch waits for the others.
        """
        c_name, c_remote = _values.text("name", name), _values.text("remote", remote)
        here = self.group if group is None else group
        c_here = _values.text("group", here)
        if here not in self._seats:
            raise Invalid(f"this process is not in group {here!r}")
        opts = tb_pair_opts(
            group=c_here,
            timeout_ms=_values.milliseconds("timeout", timeout),
            no_wait=not _values.flag("wait", wait),
        )
        pair = Pair(self, name, here, remote, layout, *self._seats[here])
        arguments = (c_name, c_remote, pair._c_layout(), byref(opts))
        self._pairs.append(pair)  # before it is made: it is never lost, whatever interrupts this
        return Call(f"making {pair._what}", self, pair, pair._handle, lambda: None, lib.tb_call_pair, *arguments)

    pair = waiting("pair", _pairing)
    pair_async = awaiting("pair", _pairing)

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
        sends: bool = False,
    ) -> Batch:
        """Tensors that travel together. All ranks of its pairs make it, by the same name.

        ``commit`` is "in_place", which writes arriving data to the tensors, or "shadow", which writes it to other
        memory until all ranks of the group have all of their data. ``ties`` maps names of tied weights to canonical
        ones, ``ignored`` has patterns of names that may be on one side only. ``sends`` says that this side is going to
        send: then registration prepares the first transfer, which otherwise takes longer than later ones. The other
        options are those of ``tb_batch_opts``; 0 is their default.
        """
        ties = _values.mapping("ties", ties)
        for names in ties.items():
            for each in names:
                _values.text("a tie", each)
        c_ignored = [_values.text("an ignored pattern", p) for p in _values.items("ignored", ignored)]
        opts = tb_batch_opts(
            bucket_size=_values.integer("bucket_size", bucket_size, 0, _values.MOST_I64),
            staging_bytes=_values.integer("staging_bytes", staging_bytes, 0, _values.MOST_I64),
            max_in_flight=_values.integer("max_in_flight", max_in_flight, 0, _values.MOST_U32),
            group_window=_values.integer("group_window", group_window, 0, _values.MOST_U32),
            staged=_values.flag("staged", staged),
            snapshot=_values.flag("snapshot", snapshot),
            ignored=(c_char_p * len(c_ignored))(*c_ignored),
            nignored=len(c_ignored),
            commit=_values.choice("commit", commit, COMMITS),
            checksum=_values.flag("checksum", checksum),
            sends=_values.flag("sends", sends),
        )
        _values.text("name", name)
        batch = Batch(self, name, commit, opts, dict(ties))
        batch._create()
        self._batches.append(batch)
        return batch

    def invalidate(self, tensor: Any) -> None:
        """The tensor's memory is about to be freed or moved: transfers that use it fail, by name.

        When this returns, neither this process nor a peer uses the memory. Batches with tensors in it have to be made
        again.
        """
        view = _tensors.read(tensor)
        first, last = _tensors.span(view)
        with self._use() as world:
            lib.tb_world_invalidate(world, first, last - first)

    def close(self) -> None:
        """Closes its batches and pairs, then leaves all groups. Waits until receivers have what was released."""
        for batch in list(self._batches):
            batch.close()
        for service in list(self._services):
            service.close()
        for pair in list(self._pairs):
            pair.close()
        if self._take():
            self._destroy(None, lib.tb_world_destroy, None)
        _live.discard(self)


@atexit.register
def _close_all() -> None:
    """So that no thread of the library uses a tensor's memory when the interpreter frees that."""
    for bus in list(_live):
        for batch in list(bus._batches):
            batch._cancel_all()
        bus.close()
