"""A copy service for Megatron-LM's resharding, over that of tensorbus."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import tensorbus as tb

from .. import _meet
from ._types import BaseService, RecvOp, SendOp


class CopyService(BaseService):
    """For ``swap_model_weights(..., refit_method=CopyService(group))``; all ranks of the process group make it.

    ``bus``, of which seat i of ``bus.group`` is rank i, is used where the program has one; else the ranks meet by
    themselves. ``timeout``, in seconds, is for making it and for each ``run`` (30); a run that fails names who is
    missing, and what does not fit together fails on all ranks before anything is written.

    Tensors may have any strides. A rank's copies to itself are cast if dtypes differ, as theirs are; between ranks
    nothing is cast. Tensors on a GPU are read and written after the work on the streams that were current when they
    were submitted, and when the run begins.
    """

    requires_process_group_barrier = False  # a run ends when what this rank sends was read, and what it receives is in

    def __init__(self, group: Any = None, *, bus: tb.Bus | None = None, timeout: float | None = None) -> None:
        super().__init__(group)
        self._timeout = timeout
        self._own_bus = _meet.join(group, self.rank, self.world_size, timeout) if bus is None else None
        used = self._own_bus if bus is None else bus
        assert used is not None
        if used.seats[used.group] != (self.rank, self.world_size):
            raise tb.Invalid(
                f"rank {self.rank} of {self.world_size} is seat {used.index} of {used.size} of group '{used.group}'"
            )
        self._copy: tb.CopyService | None = None
        self._events: dict[tuple[int, int], Any] = {}  # by device and stream: the work that comes first
        try:
            self._copy = tb.copy_service(used, used.group, name="megatron", timeout=timeout, convert_local=True)
        except BaseException:
            self.close()
            raise

    def submit_send(self, src_tensor: Any, dest_rank: int, task_id: int | None = None) -> None:
        """A tensor for rank ``dest_rank``. Several under one id are one operation, in their order."""
        copy = self._opened()
        self._follow(src_tensor)
        copy.submit_send(_plain(src_tensor), dest_rank, task_id)

    def submit_recv(self, dest_tensor: Any, src_rank: int, task_id: int | None = None) -> None:
        """A tensor from rank ``src_rank``. Without ids, what one rank sends to another belongs together by order."""
        copy = self._opened()
        self._follow(dest_tensor)
        copy.submit_recv(_plain(dest_tensor), src_rank, task_id)

    def run(self) -> None:
        """Copies what was submitted; all ranks call it."""
        copy = self._opened()
        for device in {device for device, _ in self._events}:
            sys.modules["torch"].cuda.current_stream(device).synchronize()
        for event in self._events.values():
            event.synchronize()
        self._events.clear()
        copy.run(self._timeout)

    def close(self) -> None:
        """Runs of others that need this rank fail from now on. Closing it again does nothing."""
        copy, self._copy = getattr(self, "_copy", None), None
        if copy is not None:
            copy.close()
        bus, self._own_bus = getattr(self, "_own_bus", None), None
        if bus is not None:
            bus.close()

    def _opened(self) -> tb.CopyService:
        if self._copy is None:
            raise tb.Invalid("the copy service is closed")
        return self._copy

    def _follow(self, tensor: Any) -> None:
        """Remembers the work on the tensor's stream: a copy that began before it ended would move old values."""
        if not tensor.is_cuda:
            return
        stream = sys.modules["torch"].cuda.current_stream(tensor.device)
        self._events[tensor.device.index, stream.cuda_stream] = stream.record_event()


def _plain(tensor: Any) -> Any:
    return tensor.detach()  # a parameter that needs a gradient is not exported otherwise


def match_local_ops_by_task_id(
    local_sends: Sequence[Any], local_recvs: Sequence[Any], backend_name: str, rank: int
) -> list[tuple[Any, Any]]:
    """Pairs what a rank sends to itself with what it receives, by ``task_id``; a RuntimeError says what is amiss."""
    where = f"{backend_name}, rank {rank}"
    if any(op.task_id is None for op in (*local_sends, *local_recvs)):
        raise RuntimeError(f"{where}: a copy within a rank requires a task_id")
    sends = {op.task_id: op for op in local_sends}
    recvs = {op.task_id: op for op in local_recvs}
    if not len(sends) == len(local_sends) == len(local_recvs) == len(recvs):
        raise RuntimeError(
            f"{where}: unmatched local ops: {len(local_sends)} sends with {len(sends)} ids, "
            f"{len(local_recvs)} receives with {len(recvs)} ids"
        )
    if missing := recvs.keys() - sends.keys():
        raise RuntimeError(f"{where}: missing local send of task_id {min(missing)}")
    return [(sends[task_id], op) for task_id, op in recvs.items()]


__all__ = ["CopyService", "RecvOp", "SendOp", "match_local_ops_by_task_id"]
