"""Batches: tensors that travel together."""

from __future__ import annotations

import ctypes
import functools
import gc
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from ctypes import POINTER, byref, c_bool, c_char_p, c_int64, c_size_t, c_uint64, c_void_p
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from . import _module, _tensors, _torch, _values
from ._c import (
    Dims,
    lib,
    take_text,
    tb_batch_opts,
    tb_batch_state,
    tb_commit,
    tb_ir,
    tb_rebinding,
    tb_tensor,
    tb_tie,
    tb_transfer_opts,
)
from ._call import Call, awaiting, waiting
from ._errors import Error, Invalid, Refused, Timeout
from ._handle import Deadline, Handle
from ._ir import IR
from ._layout import Layout, layout, part_shape
from ._pair import Pair
from ._transfer import EVENTS, Transfer, TransferState

if TYPE_CHECKING:
    from ._bus import Bus

COMMITS = {commit.name.removeprefix("TB_").lower(): commit for commit in tb_commit}


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

    def __init__(self, bus: Bus, name: str, commit: str, opts: tb_batch_opts, ties: dict[str, str]) -> None:
        super().__init__(f"batch '{name}'")
        self._bus = bus
        self.name, self.commit = name, commit
        self._opts, self._ties = opts, ties
        self._tensors: dict[Pair, list[tuple[str, _tensors.View, tb_tensor]]] = {}
        self._alike: dict[tuple[Any, ...], tb_tensor] = {}  # whose texts are those of all that are alike
        self._gpu: str | None = None  # the first device of the tensors that is one
        self._to_look_at: list[tuple[str, _tensors.View]] = []  # tensors that are checked before every transfer
        self._is_registered = False
        self._sent = 0  # the number of the last send that was committed, of those that are closed
        self._transfers: dict[bool, Transfer] = {}  # by is_send
        self._watches: list[tuple[Pair, _module.Watch]] = []  # of modules, which look at their tensors again

    def _create(self) -> None:
        """Makes the library's batch; or makes it again, with more ties and the same tensors."""
        ties = [tb_tie(name.encode(), canonical.encode()) for name, canonical in self._ties.items()]
        self._opts.ties, self._opts.nties = (tb_tie * len(ties))(*ties), len(ties)
        made = c_void_p()
        with self._bus._use() as world:
            lib.tb_batch_create(world, self.name.encode(), byref(self._opts), byref(made))
            for pair, tensors in self._tensors.items():
                lib.tb_batch_add_pair(made, pair._handle)
                _add_all(made, pair._handle, tensors)
        with self._lock:
            self._handle, made = made, self._handle
        lib.tb_batch_destroy(made)

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
        ranks: Mapping[int, int] | Sequence[int] | None = None,
        mesh: Any = None,
        encode: str | None = None,
        scales: Any = None,
        scale: Any = None,
        scale_group: str | None = None,
    ) -> None:
        """Adds this rank's part of tensor ``name``: a NumPy array, a PyTorch tensor, or anything with DLPack.

        ``shape`` is the global one; by default, the tensor's own. ``layout`` is this side's for this tensor; by
        default, what the tensor brings, or the pair's. ``dtype`` reinterprets the bits, for dtypes that NumPy lacks:
        "bf16" for an array of uint16. ``wire_dtype`` requests a cast on the way; tensors with a lower ``group`` arrive
        first; ``view`` converts the stored tensor to the one that ``name`` names. The memory is borrowed until the
        batch is closed.

        ``ranks`` maps the ranks of a DTensor's mesh to seats of the group, if they differ. If the DTensor's mesh is a
        sub-mesh of ``mesh``, the tensor is replicated over the other dimensions of ``mesh``.

        ``encode`` is the format if this side's tensor is quantised: "mxfp8", "fp8_block", "fp8_tensor" or "nvfp4", with
        the options in docs/models.md. ``scales`` and ``scale`` are the tensors of its scales. Tensors with the same
        ``scale_group`` share one scale.
        """
        if ranks is not None or mesh is not None:
            tensor = _torch.read_dtensor(name, tensor, ranks, mesh)
        described, found = self._describe(pair, name, tensor, shape, layout, dtype, wire_dtype, group, view)
        if any(given is not None for given in (encode, scales, scale, scale_group)):
            found = _encode(name, described, found, encode, scales, scale, scale_group)
        self._add(pair, [(name, (described, found))])

    def add_all(self, pair: Pair, tensors: Mapping[str, Any], *, shapes: Mapping[str, Any] | None = None) -> None:
        """Adds many tensors by name; ``shapes`` has the global shapes where they are not the tensors' own.

        One call of the library adds them all. The first that it refuses is named; those before it are in the batch.
        """
        shapes, tensors = _values.mapping("shapes", shapes), _values.mapping("tensors", tensors)
        with _without_collecting():
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
        try:
            self._own(pair)
            found = _reinterpret(_tensors.read(tensor), dtype)
            key = None
            if shape is None and text is None and wire_dtype is None and group == 0 and view is None:
                # As nearly all of a model's tensors: what has been found of one is so of all that are alike.
                key = (pair, found.dtype, found.shape, found.strides, found.device, found.layout, found.global_shape)
                if (alike := self._alike.get(key)) is not None:
                    described = tb_tensor.from_buffer_copy(alike)
                    described.data = found.address if described.memory else None
                    return described, found
            its_layout = layout(text) if text is not None else layout(found.layout) if found.layout else None
            whole = _values.dims("shape", shape) if shape is not None else found.global_shape or found.shape
            _check_part(pair, its_layout, whole, found.shape)
            described = tb_tensor(
                data=found.address if 0 not in found.shape else None,
                dtype=found.dtype,
                ndim=len(whole),
                shape=_c_dims(whole),
                layout=str(its_layout).encode() if its_layout else None,
                wire_dtype=0 if wire_dtype is None else _values.dtype("wire_dtype", wire_dtype),
                group=_values.integer("group", group, 0, 2**32 - 2),
                view=_values.optional_text("view", view),
                memory=found.device.encode() if 0 not in found.shape else None,
            )
            if found.strides is not None and 0 not in found.shape:
                described.strides = (c_int64 * len(found.strides))(*found.strides)
            if key is not None:
                self._alike[key] = described
                described = tb_tensor.from_buffer_copy(described)  # the caller may change it
        except Error as error:
            raise type(error)(f"tensor '{name}': {error}", error.status) from None
        return described, found

    def _add(self, pair: Pair, tensors: list[tuple[str, tuple[tb_tensor, _tensors.View]]]) -> None:
        self._reap()
        with self._use() as batch, self._own(pair)._use() as c_pair:
            new = [(name, view, described) for name, (described, view) in tensors]
            kept = self._tensors.setdefault(pair, [])
            nkept = len(kept)
            kept += new  # first: whatever interrupts this, they are kept alive
            self._is_registered = False
            nadded = c_size_t(len(new))
            try:
                _add_all(batch, c_pair, new, nadded)
            finally:
                del kept[nkept + nadded.value :]
                self._count_tensors()

    def add_module(
        self,
        pair: Pair,
        module: Any,
        *,
        buffers: bool = False,
        reshard: bool = False,
        mesh: Any = None,
        ranks: Mapping[int, int] | Sequence[int] | None = None,
        wire_dtype: Any = None,
    ) -> None:
        """Adds every parameter of a PyTorch module, by name; with ``buffers``, those of its state_dict, too.

        What wrappers add to names (``_orig_mod.``, ``_checkpoint_wrapped_module.``, ``module.``) is dropped, and tied
        parameters become ties. DTensors bring their layouts, in which ``ranks`` maps ranks of the mesh to seats. One on
        a sub-mesh, such as FSDP's part of a mesh for FSDP and tensor parallelism, is replicated over the others beside
        it in ``mesh``, a DeviceMesh, or in the largest mesh of the module's parameters. Plain tensors have the pair's
        layout, or are replicated over ``mesh``.

        The batch keeps the module, not addresses: every transfer looks at each parameter again. If the storage of a
        parameter has moved (``.data =``, ``.to()``, ``load_state_dict(assign=True)``, offloading), the batch binds the
        new memory. It can't do so if the new memory has other strides or is of another kind, and with an agent. Then
        the batch keeps the old memory, and copies the parameter to it before a send, and back after a receive.

        Refused, by name, are parameters whose layout or dtype has changed, and tied parameters that are not tied any
        more; also a module that FSDP has unsharded, unless ``reshard`` is set, which reshards it first.
        """
        with _without_collecting():
            self._add_module(pair, module, buffers, reshard, mesh, ranks, wire_dtype)

    def _add_module(
        self, pair: Pair, module: Any, buffers: bool, reshard: bool, mesh: Any, ranks: Any, wire_dtype: Any
    ) -> None:
        watch = _module.Watch(
            module,
            buffers=_values.flag("buffers", buffers),
            reshard=_values.flag("reshard", reshard),
            ranks=ranks,
            mesh=mesh,
        )
        described = [
            (name, self._describe(pair, name, view, None, None, None, wire_dtype, 0, None))
            for name, view in watch.views.items()
        ]
        ties = {name: canonical for name, canonical in watch.ties.items() if self._ties.get(name) != canonical}
        if ties and self.epoch > 0:
            name = next(iter(ties))
            raise Refused(f"parameter '{name}' is tied, and the batch is registered; name it in the ties of bus.batch")
        if ties:
            self._ties |= ties
            self._create()
        self._add(pair, described)
        self._watches.append((pair, watch))

    def rebind(self, pair: Pair, tensors: Mapping[str, Any]) -> None:
        """From now on these tensors are in other memory; nothing is copied, and peers need not do anything.

        Shape, dtype, strides and device are what they were, and the memory is of the same kind: of ``tb.empty`` only if
        the old one was. Not with an agent, and not for quantised tensors. The parameters of ``add_module`` are followed
        without it.

        >>> import tempfile, numpy, tensorbus as tb
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     with tb.join(f"unix:{folder}/bus", "rows", index=0, size=1) as bus:
        ...         bus.enter("columns", 0, 1)
        ...         x, y = numpy.ones((2, 3)), numpy.zeros((2, 3))
        ...         batch = bus.batch("step")
        ...         there = bus.pair("p", "columns", "mesh=1 place=S0", group="rows", wait=False)
        ...         batch.add(there, "w", x)
        ...         batch.add(bus.pair("p", "rows", "mesh=1 place=S1", group="columns", wait=False), "w", y)
        ...         batch.rebind(there, {"w": numpy.full((2, 3), 7.0)})
        ...         sent, received = batch.reshard("rows", timeout=20.0)
        ...         y.tolist(), received.version
        ([[7.0, 7.0, 7.0], [7.0, 7.0, 7.0]], 1)
        """
        self._reap()
        added = {name: view for name, view, _ in self._tensors.get(self._own(pair), ())}
        views: dict[tuple[Pair, str], _tensors.View] = {}
        for name, tensor in _values.mapping("tensors", tensors).items():
            was = added.get(name)
            if was is None:
                raise Invalid(f"there is no tensor {name!r} of {pair._what} in batch '{self.name}'")
            try:
                view = _reinterpret(_tensors.read(tensor), _values.dtype_name(was.dtype))
                if (view.shape, view.strides, view.device) != (was.shape, was.strides, was.device):
                    raise Invalid("it must have the shape, the strides and the device that it had")
            except Error as error:
                raise type(error)(f"tensor '{name}': {error}", error.status) from None
            views[pair, name] = view
        self._rebind(views)

    # -- Pairs --

    def _own(self, pair: Any) -> Pair:
        if not isinstance(pair, Pair) or pair._bus is not self._bus:
            raise Invalid(f"{pair!r} is no pair of this bus")
        return pair

    def add_pair(self, pair: Pair) -> None:
        """Takes part in the pair's transfers even if this process adds none of its tensors."""
        self._reap()
        with self._use() as batch, self._own(pair)._use() as c_pair:
            lib.tb_batch_add_pair(batch, c_pair)
            self._tensors.setdefault(pair, [])
            self._is_registered = False

    def remove_pair(self, pair: Pair) -> None:
        """Takes the pair and its tensors out of the batch, while no transfer of it is under way."""
        self._reap()
        with self._use() as batch, self._own(pair)._use() as c_pair:
            lib.tb_batch_remove_pair(batch, c_pair)
            self._tensors.pop(pair, None)
            self._count_tensors()
            self._watches = [(other, watch) for other, watch in self._watches if other is not pair]

    def _registering(self, timeout: float | None = None) -> Call[Batch]:
        """Waits until both sides of every pair have added their tensors, and names and shapes agree.

        The exception names the processes that disagree, or that are missing at the deadline. The first transfer
        registers the batch if this was not called.
        """

        def done() -> None:
            self._is_registered = True

        self._look_again(is_send=True)
        timeout_ms = _values.milliseconds("timeout", timeout)
        return Call(f"registering {self._what}", self, self, None, done, lib.tb_call_register, timeout_ms)

    register = waiting("register", _registering)
    register_async = awaiting("register", _registering)

    # -- State --

    def state(self) -> BatchState:
        """What this process has received."""
        if (receive := self._transfers.get(False)) is not None:
            receive._land_if_done()
        state = tb_batch_state()
        with self._use() as batch:
            lib.tb_batch_query(batch, byref(state))
        return BatchState(state.version, state.is_mixed, state.is_torn, state.transfer_signal, state.is_in_doubt)

    @property
    def version(self) -> int:
        """The number of the last version that is in the tensors of all pairs; 0: none.

        A process that only sends has the number of the last version that all receivers have.
        """
        if (received := self.state().version) > 0:
            return received
        try:
            under_way = self._transfers[True].version
        except (KeyError, Invalid):  # there is none, or another thread has just closed it
            under_way = 0
        return max(self._sent, under_way)

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
        with self._use() as batch, self._own(pair)._use() as c_pair:
            lib.tb_batch_version(batch, c_pair, byref(version), byref(is_torn))
        return version.value, is_torn.value

    def dump(self, is_send: bool) -> str:
        """Every piece that this process sends or receives, one to a line, once it has been moved that way."""
        with self._use() as batch:
            return take_text(lib.tb_batch_dump, batch, _values.flag("is_send", is_send))

    def ir(self, is_send: bool) -> IR:
        """What this process does when the registered batch is sent, or received. Ranks are those of the bus."""
        out = POINTER(tb_ir)()
        is_send = _values.flag("is_send", is_send)
        with self._use() as batch:
            lib.tb_batch_ir(batch, is_send, byref(out))
        return IR(out)

    def signal(self, question: int, timeout: float | None = None, *, group: str | None = None) -> bool:
        """Whether there is something to move, with the same answer on all ranks of the group that ask this question.

        With it, all ranks of an engine can take the same branch. Programs number their questions from 1, on all ranks
        alike. The default ``timeout`` is 30 seconds.
        """
        out = c_bool()
        question = _values.integer("question", question, 1, 2**64 - 1)
        c_group = _values.optional_text("group", group)
        deadline = Deadline(30.0 if timeout is None else _values.milliseconds("timeout", timeout) / 1000)
        for nlooks in itertools.count():
            left = deadline.left
            try:
                with self._use(nlooks > 0) as batch:  # for a while at a time, so that signals are handled
                    milliseconds = 50 if left is None else min(50, int(left * 1000) + 1)
                    lib.tb_batch_signal(batch, c_group, question, milliseconds, byref(out))
                break
            except Timeout:
                if deadline.is_over:
                    raise
        return out.value

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

        The first transfer registers the batch; with ``wait=None`` that is a part of the transfer.
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

    def reshard(
        self,
        source: str,
        timeout: float | None = None,
        *,
        skip_lost: bool = False,
        whole_group: bool = False,
        stream: int | None = None,
    ) -> tuple[TransferState | None, TransferState | None]:
        """Moves the batch once, from group ``source`` to the groups that it exchanges with, and waits until it is done.

        This process sends, receives, or does both, depending on its groups, so all processes of a job make the same
        call. Returns the states of the two transfers; None for one that this process takes no part in.

        >>> import tempfile, numpy, tensorbus as tb
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     with tb.join(f"unix:{folder}/bus", "rows", index=0, size=1) as bus:
        ...         bus.enter("columns", 0, 1)
        ...         x, y = numpy.arange(6.0).reshape(2, 3), numpy.zeros((2, 3))
        ...         batch = bus.batch("step")
        ...         batch.add(bus.pair("p", "columns", "mesh=1 place=S0", group="rows", wait=False), "w", x)
        ...         batch.add(bus.pair("p", "rows", "mesh=1 place=S1", group="columns", wait=False), "w", y)
        ...         sent, received = batch.reshard("rows", timeout=20.0)
        ...         y.tolist(), received.version
        ([[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]], 1)
        """
        _values.text("source", source)
        sends = any(pair.group == source for pair in self._tensors)
        targets = {pair.group for pair in self._tensors if pair.remote == source}
        if not sends and not targets:
            raise Invalid(f"group {source!r} is in no pair of batch '{self.name}'")
        if len(targets) > 1:
            raise Refused(f"batch '{self.name}' is received as the groups {', '.join(map(repr, sorted(targets)))}")
        begun: list[Transfer] = []
        if not self._is_registered:
            self.register(timeout)
        try:
            for target in targets:
                begun.append(self._transfer(False, timeout, None, target, skip_lost, False, whole_group, stream))
            if sends:
                begun.append(self._transfer(True, timeout, None, source, skip_lost, False, whole_group, stream))
            for transfer in reversed(begun):
                transfer.wait("committed")
            states = {transfer.is_send: transfer.state() for transfer in begun}
        finally:
            for transfer in begun:
                transfer.close()
        return states.get(True), states.get(False)

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
        try:
            opts = _transfer_opts(timeout, group, skip_lost, hold, whole_group)
        except TypeError:  # what has no hash is refused by name
            opts = _transfer_opts.__wrapped__(timeout, group, skip_lost, hold, whole_group)
        event = None if wait is None else _values.choice("wait", wait, EVENTS)
        if self._to_look_at:
            self._look_again(is_send)
        if (before := self._transfers.get(is_send)) is not None:
            before._finish()
            before._check_begun()
        moved = self._follow([(pair, each) for pair, watch in self._watches for each in watch.look(is_send)])
        handle = self._stream(stream)
        if not self._is_registered and event is not None:
            self.register(timeout)
        if handle is not None:
            opts = tb_transfer_opts.from_buffer_copy(opts)
            opts.stream = ctypes.addressof(handle)
        transfer = Transfer(self, is_send)
        if is_send and moved:
            _module.copy_moved(moved, True, stream)
        elif moved:
            transfer._moved, transfer._stream = moved, stream
        self._check_ours()
        try:
            with self._lock:
                batch = self._get()
                self._transfers[is_send] = transfer  # before it begins: it is never lost, whatever interrupts this
                if self._is_registered:
                    (lib.tb_send if is_send else lib.tb_recv)(batch, byref(opts), byref(transfer._handle))
                else:
                    transfer._begin_by_call(opts)
            if event is not None:
                transfer._wait(event, again=True)
        except BaseException:
            transfer.close()
            raise
        return transfer

    def _follow(self, moved: list[tuple[Pair, _module.Moved]]) -> list[_module.Moved]:
        """Borrows the memory that parameters have moved to; returns those of which the old memory is still borrowed.

        The library refuses memory of another kind, since peers reach it in another way.
        """
        fitting = [(pair, each) for pair, each in moved if each.may_rebind]
        if fitting:
            try:
                self._rebind({(pair, each.name): each.view for pair, each in fitting})
            except Refused:
                fitting = []
        for _, each in fitting:
            each.rebound()
        kept = {id(each) for _, each in fitting}
        return [each for _, each in moved if id(each) not in kept]

    def _rebind(self, views: dict[tuple[Pair, str], _tensors.View]) -> None:
        moved = [tb_rebinding(p._get(), name.encode(), view.address or None) for (p, name), view in views.items()]
        with self._use() as batch:
            lib.tb_batch_rebind(batch, (tb_rebinding * len(moved))(*moved), len(moved))
            for pair, tensors in self._tensors.items():
                for i, (name, _, described) in enumerate(tensors):
                    if (view := views.get((pair, name))) is not None:
                        described.data = view.address or None
                        tensors[i] = (name, view, described)
            self._count_tensors()

    def _stream(self, stream: int | None) -> c_void_p | None:
        """A handle of the stream that orders the tensors; None: all are in CPU memory."""
        if stream is not None:
            return c_void_p(_values.integer("stream", stream, 0, 2**64 - 1))
        if self._gpu is None:
            return None
        found = _tensors.current_stream(self._gpu)
        return None if found is None else c_void_p(found)

    def _count_tensors(self) -> None:
        """Finds what every transfer needs to know of the tensors, once they have changed."""
        every = [tensor for tensors in self._tensors.values() for tensor in tensors]
        self._gpu = next((view.device for _, view, _ in every if view.device != "host"), None)
        self._to_look_at = [(name, v) for name, v, _ in every if v.is_readonly or v.look_again is not None]

    def _look_again(self, is_send: bool) -> None:
        """Refuses, by name, tensors that can't be used any more as they were added."""
        for name, view in self._to_look_at:
            try:
                if view.is_readonly and not is_send:
                    raise Invalid("it is read-only, and can't be received into")
                if view.look_again is not None:
                    view.look_again()
            except Error as error:
                raise type(error)(f"tensor '{name}' of batch '{self.name}': {error}", error.status) from None

    def _reap(self) -> None:
        """Closes transfers that have ended; one that was released is waited for, until its own deadline."""
        for transfer in list(self._transfers.values()):
            transfer._finish()

    def _cancel_all(self) -> None:
        for transfer in list(self._transfers.values()):
            transfer.close()

    def close(self) -> None:
        """Stops using the tensors. Waits for a send that was released; cancels other transfers that are under way."""
        for transfer in list(self._transfers.values()):
            transfer._finish(cancels=True)
        if self._take():
            self._destroy(self._bus, lib.tb_batch_destroy, (self._tensors, self._watches))
        if not self._is_inherited:
            self._tensors, self._to_look_at, self._watches, self._alike = {}, [], [], {}
        if self in self._bus._batches:
            self._bus._batches.remove(self)


@functools.lru_cache(maxsize=64, typed=True)
def _transfer_opts(timeout: Any, group: Any, skip_lost: Any, hold: Any, whole_group: Any) -> tb_transfer_opts:
    """Kept, since a program passes the same ones again and again. The library only reads them."""
    return tb_transfer_opts(
        timeout_ms=_values.milliseconds("timeout", timeout),
        group=_values.optional_text("group", group),
        skip_lost=_values.flag("skip_lost", skip_lost),
        hold=_values.flag("hold", hold),
        whole_group=_values.flag("whole_group", whole_group),
    )


def _add_all(
    batch: c_void_p, pair: c_void_p, tensors: list[tuple[str, _tensors.View, tb_tensor]], nadded: c_size_t | None = None
) -> None:
    names = (c_char_p * len(tensors))(*(name.encode() for name, _, _ in tensors))
    described = (tb_tensor * len(tensors))(*(t for _, _, t in tensors))
    lib.tb_batch_add_all(batch, pair, names, described, len(tensors), None if nadded is None else byref(nadded))


@functools.lru_cache(maxsize=4096)
def _c_dims(whole: tuple[int, ...]) -> Any:
    """Kept: the many tensors of a model have few shapes. Structs copy it."""
    return Dims(*whole)


@contextmanager
def _without_collecting() -> Iterator[None]:
    """Tens of thousands of objects are made, none of them garbage: the collector would look at all again and again."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


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


def _encode(
    name: str, described: tb_tensor, found: _tensors.View, encode: Any, scales: Any, scale: Any, scale_group: Any
) -> _tensors.View:
    """Adds the encoding."""
    try:
        described.encode = _values.text("encode", encode)
        described.scale_group = _values.optional_text("scale_group", scale_group)
        scales_of = _tensors.read_scales(found, described.encode, scales, scale)
        for field, view in scales_of.items():
            setattr(described, field, view.address if math.prod(view.shape) else None)
    except Error as error:
        raise type(error)(f"tensor '{name}': {error}", error.status) from None
    return replace(found, keepalive=[found.keepalive, *(view.keepalive for view in scales_of.values())])


def _check_part(pair: Pair, its: Layout | None, whole: tuple[int, ...], part: tuple[int, ...]) -> None:
    """The library can't see how long the memory is; so the local shape must be what the layout says."""
    its = its or pair.layout
    if its is None:
        if not pair.is_seat_to_seat:
            raise Invalid(f"it has no layout, and {pair._what} was made without one")
        expected = whole
    else:
        expected = part_shape(its, whole, pair.index)
        if pair.index not in its.ranks and part != expected and 0 not in part:
            raise Invalid(f"seat {pair.index} is not in its layout, '{its}', so that it holds nothing; not {part}")
    if part != expected and not (0 in part and 0 in expected):
        raise Invalid(
            f"seat {pair.index} holds {expected} of the global shape {whole} in the layout "
            f"'{its or 'none'}', but the tensor is {part}; is the argument shape the global one?"
        )
