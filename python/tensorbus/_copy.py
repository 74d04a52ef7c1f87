"""The copy service: tensors from rank to rank within a group, as they are."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping
from ctypes import byref, c_int64, c_void_p
from typing import TYPE_CHECKING, Any

from . import _ir, _slices, _tensors, _values
from ._c import TB_MAX_DIMS, lib, tb_bucket_step, tb_copy_opts, tb_copy_view, tb_ir_execute_opts
from ._errors import Invalid
from ._handle import Handle, make_interruptible

if TYPE_CHECKING:
    from ._bus import Bus


class CopyService(Handle):
    """Copies tensors from rank to rank; made by ``tb.copy_service``. Each rank submits, then all run."""

    def __init__(self, bus: Bus, group: str, size: int) -> None:
        super().__init__(f"copy service of group '{group}'")
        self._bus, self._size = bus, size
        self._held: list[_tensors.View] = []  # of what was submitted: borrowed until the run returns
        self._runs = threading.Lock()  # one at a time
        self._running: tuple[c_void_p, threading.Event] | None = None  # the call of a run, and its end

    def submit_send(self, tensor: Any, dest: int, task_id: int | None = None) -> None:
        """Adds an operation to the next run: a tensor, or a list of them, for rank ``dest`` of the group.

        ``task_id`` is the same at both ends, and unique in the run. Without one, the n-th operation from a rank to
        another belongs to the n-th that the other receives from it. Both ends have as many bytes, in items of the same
        size; nothing is cast.
        """
        self._submit(lib.tb_copy_submit_send, "dest", tensor, dest, task_id)

    def submit_recv(self, tensor: Any, source: int, task_id: int | None = None) -> None:
        """The same for what rank ``source`` sends; the tensor is written by the run."""
        self._submit(lib.tb_copy_submit_recv, "source", tensor, source, task_id)

    def _submit(self, call: Any, parameter: str, tensor: Any, rank: Any, task_id: Any) -> None:
        tensors = tensor if isinstance(tensor, list | tuple) else [tensor]
        rank = _values.integer(parameter, rank, 0, self._size - 1)
        number = _slices.NO_TASK if task_id is None else _values.integer("task_id", task_id, 0, _slices.NO_TASK - 1)
        is_target = call is lib.tb_copy_submit_recv
        views = [_tensors.read_for(f"tensor {i}", each, is_target) for i, each in enumerate(tensors)]
        described = (tb_copy_view * len(views))(*map(_describe, views))
        with self._use() as copy:
            call(copy, described, len(views), rank, number)
            self._held += views

    def run(self, timeout: float | None = None) -> None:
        """Does what was submitted since the last run; all ranks of the group call it.

        Returns when what this rank sends has been read and what it receives is there. What does not fit together fails
        the run on every rank, before anything is written, with the same sentence.
        """
        timeout_ms = _values.milliseconds("timeout", timeout)
        self._run(lambda copy: lib.tb_copy_run(copy, timeout_ms))

    def _run(self, call: Callable[[Any], object], is_interruptible: bool = True) -> None:
        """Makes a call that runs what was submitted, too."""

        def body() -> None:
            ended = threading.Event()
            with self._use(again=True) as copy:
                self._running = copy, ended
            try:
                call(copy)
            finally:
                with self._lock:
                    self._running = None
                ended.set()

        self._check_ours()
        with self._runs:
            try:
                with self._use():
                    for view in self._held:
                        if view.look_again is not None:
                            view.look_again()
                make_interruptible(body, self._cancel) if is_interruptible else body()
            finally:
                self._held.clear()

    def _cancel(self) -> threading.Event | None:
        """Ends the run that is under way; the result is set when it has. None: there is none."""
        with self._lock:
            if self._running is None:
                return None
            copy, ended = self._running
            lib.tb_copy_cancel(copy)
            return ended

    def execute(
        self,
        ir: _ir.IR,
        sources: Mapping[str, Any] | None = None,
        targets: Mapping[str, Any] | None = None,
        timeout: float | None = None,
        *,
        bus_ranks: bool = False,
    ) -> None:
        """Does what an IR says; all ranks of the group call it, each with its own, which has the same names.

        ``sources`` and ``targets`` have this rank's parts of the tensors that it sends and receives, by name. Ranks in
        the IR are seats of the group, or, with ``bus_ranks``, those of the bus, as ``Batch.ir`` has them. What does not
        fit together fails on all ranks, with one sentence, before anything is written. What was submitted is run, too.

        >>> import tempfile, numpy, tensorbus as tb
        >>> with tempfile.TemporaryDirectory() as folder, tb.join(f"unix:{folder}/bus", "all", index=0, size=1) as bus:
        ...     ir = tb.IR.plan(0, {"w": tb.TensorSpec("mesh=1 place=S0", "mesh=1 place=S1", (2, 2), "f32")})
        ...     x, y = numpy.ones((2, 2), "f4"), numpy.zeros((2, 2), "f4")
        ...     tb.copy_service(bus).execute(ir, {"w": x}, {"w": y})
        ...     y.tolist()
        [[1.0, 1.0], [1.0, 1.0]]
        """
        if not isinstance(ir, _ir.IR):
            raise Invalid(f"ir must be a tensorbus.IR, not {type(ir).__name__}")
        read, written = _tensors.read_all("sources", sources, False), _tensors.read_all("targets", targets, True)
        bound = _ir.bind_names(ir, read, written)
        opts = tb_ir_execute_opts(
            timeout_ms=_values.milliseconds("timeout", timeout), bus_ranks=_values.flag("bus_ranks", bus_ranks)
        )
        self._run(lambda copy: lib.tb_ir_execute(copy, ir._pointer, bound, byref(opts)))

    def _execute(
        self, ir: _ir.IR, bound: Any, timeout: float | None, progress: Callable[[int, tb_bucket_step], None] | None
    ) -> None:
        """The same for parts that are bound. ``progress`` is called by other threads."""
        opts = tb_ir_execute_opts(timeout_ms=_values.milliseconds("timeout", timeout))
        if progress is not None:
            opts.progress = type(opts.progress)(lambda _arg, bucket, step: progress(bucket, tb_bucket_step(step)))
        self._run(lambda copy: lib.tb_ir_execute(copy, ir._pointer, bound, byref(opts)), is_interruptible=False)

    def execute_plan(
        self,
        sends: Iterable[_slices.SliceOp],
        recvs: Iterable[_slices.SliceOp],
        sources: Mapping[str, Any] | None = None,
        targets: Mapping[str, Any] | None = None,
        timeout: float | None = None,
    ) -> _slices.PlanCounts:
        """Executes a plan that somebody else has made; all ranks of the group call it.

        ``sends`` and ``recvs`` are slices of this rank's ``sources`` and ``targets``: tensors by name, or ``PlanParam``
        for those that travel in another dtype or are quantised. What any rank finds wrong fails it on every rank, with
        one sentence, before anything is written. What was submitted is run, too. The result tells how many receives
        were written in which way.

        >>> import tempfile, numpy, tensorbus as tb
        >>> with tempfile.TemporaryDirectory() as folder, tb.join(f"unix:{folder}/bus", "all", index=0, size=1) as bus:
        ...     x, y = numpy.arange(6.0).reshape(2, 3), numpy.zeros((1, 3))
        ...     row, all_of_it = [slice(1, 2), slice(0, 3)], [slice(0, 1), slice(0, 3)]
        ...     sends, recvs = [tb.SliceOp("w", 0, row, all_of_it, 7)], [tb.SliceOp("w", 0, all_of_it, row, 7)]
        ...     tb.copy_service(bus).execute_plan(sends, recvs, {"w": x}, {"w": y}), y.tolist()
        (PlanCounts(direct=1, copied=0, transformed=0, accumulated=0), [[3.0, 4.0, 5.0]])
        """
        plan = _slices.Plan(self._size, sends, recvs, sources, targets, _describe)
        timeout_ms = _values.milliseconds("timeout", timeout)
        self._run(lambda copy: lib.tb_reshard_execute_plan(copy, byref(plan.c), timeout_ms, byref(plan.counts)))
        return plan.result

    def close(self) -> None:
        """Gives it up, and cancels a run of another thread; runs that need this rank fail from then on.

        Closing the bus does this first.
        """
        if self._take():
            while (ended := self._cancel()) is not None:
                ended.wait(0.01)
            self._destroy_taken(lib.tb_copy_close)
            self._held.clear()
        if self in self._bus._services:
            self._bus._services.remove(self)


def _describe(view: _tensors.View) -> tb_copy_view:
    is_empty = 0 in view.shape
    described = tb_copy_view(
        data=None if is_empty else view.address,
        dtype=view.dtype,
        ndim=len(view.shape),
        shape=(c_int64 * TB_MAX_DIMS)(*view.shape),
        memory=None if is_empty else view.device.encode(),
    )
    if view.strides is not None and not is_empty:
        described.strides = (c_int64 * len(view.strides))(*view.strides)
    return described


def copy_service(
    bus: Bus,
    group: str | None = None,
    *,
    name: str = "copy",
    timeout: float | None = None,
    bucket_size: int = 0,
    staging_bytes: int = 0,
    max_in_flight: int = 0,
    staged: bool = False,
    convert_local: bool = False,
) -> CopyService:
    """Opens the copy service of a group; all of its ranks do, by the same name. The default is the group joined first.

    The options are those of ``tb_copy_opts``; 0 is their default. With ``convert_local``, what a rank copies to itself
    is cast and broadcast, as by PyTorch's ``copy_``.

    >>> import tempfile, numpy, tensorbus as tb
    >>> with tempfile.TemporaryDirectory() as folder, tb.join(f"unix:{folder}/bus", "all", index=0, size=1) as bus:
    ...     service = tb.copy_service(bus, "all")
    ...     x = numpy.zeros(3)
    ...     service.submit_send(numpy.arange(3.0), dest=0, task_id=1)
    ...     service.submit_recv(x, source=0, task_id=1)
    ...     service.run()
    ...     x.tolist()
    [0.0, 1.0, 2.0]
    """
    if not hasattr(bus, "seats"):
        raise Invalid(f"bus must be a tensorbus.Bus, not {type(bus).__name__}")
    group = bus.group if group is None else group
    c_name, c_group = _values.text("name", name), _values.text("group", group)
    if group not in bus.seats:
        raise Invalid(f"this process is not in group {group!r}")
    opts = tb_copy_opts(
        timeout_ms=_values.milliseconds("timeout", timeout),
        bucket_size=_values.integer("bucket_size", bucket_size, 0, _values.MOST_I64),
        staging_bytes=_values.integer("staging_bytes", staging_bytes, 0, _values.MOST_I64),
        max_in_flight=_values.integer("max_in_flight", max_in_flight, 0, _values.MOST_U32),
        staged=_values.flag("staged", staged),
        convert_local=_values.flag("convert_local", convert_local),
    )
    service = CopyService(bus, group, bus.seats[group][1])
    bus.wait(group, timeout)
    bus._services.append(service)  # before it is opened: it is never lost, whatever interrupts this
    try:
        bus._make_apart(lambda world: lib.tb_copy_open(world, c_name, c_group, byref(opts), byref(service._handle)))
    except BaseException:
        bus._close_apart(service)
        raise
    return service
