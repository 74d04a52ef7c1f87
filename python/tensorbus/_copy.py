"""The copy service: tensors from rank to rank within a group, as they are."""

from __future__ import annotations

from ctypes import byref, c_int64
from typing import TYPE_CHECKING, Any

from . import _tensors, _values
from ._c import TB_MAX_DIMS, lib, tb_copy_opts, tb_copy_view
from ._errors import Error, Invalid
from ._handle import Handle, make_interruptible

if TYPE_CHECKING:
    from ._bus import Bus

_NO_TASK = 2**64 - 1  # TB_NO_TASK


class CopyService(Handle):
    """Copies tensors from rank to rank; made by ``tb.copy_service``. Each rank submits, then all run."""

    def __init__(self, bus: Bus, group: str, size: int) -> None:
        super().__init__(f"copy service of group '{group}'")
        self._bus, self._size = bus, size
        self._held: list[_tensors.View] = []  # of what was submitted: borrowed until the run returns

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
        number = _NO_TASK if task_id is None else _values.integer("task_id", task_id, 0, _NO_TASK - 1)
        views = [_read(i, each, call is lib.tb_copy_submit_recv) for i, each in enumerate(tensors)]
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
        with self._use() as copy:
            try:
                for view in self._held:
                    if view.look_again is not None:
                        view.look_again()
                make_interruptible(lambda: lib.tb_copy_run(copy, timeout_ms), lambda: lib.tb_copy_cancel(copy))
            finally:
                self._held.clear()

    def close(self) -> None:
        """Gives it up; runs that need this rank fail from then on. Closing the bus does this first."""
        if handle := self._take():
            self._bus._services.remove(self)
            lib.tb_copy_close(handle)
            self._held.clear()


def _read(index: int, tensor: Any, is_target: bool) -> _tensors.View:
    try:
        view = _tensors.read(tensor)
        if is_target and view.is_readonly:
            raise Invalid("it is read-only, and can't be received into")
    except Error as error:
        raise type(error)(f"tensor {index}: {error}", error.status) from None
    return view


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
    """Opens the copy service of a group; all of its ranks do, by the same name. By default, the group joined first.

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
    with bus._use() as world:
        lib.tb_copy_open(world, c_name, c_group, byref(opts), byref(service._handle))
    bus._services.append(service)
    return service
