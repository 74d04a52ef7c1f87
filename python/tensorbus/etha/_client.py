"""The client: pairs, batches and transfers through an agent, by Etha's calls."""

from __future__ import annotations

import contextlib
import logging
import os
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import tensorbus as tb

from .. import _module, _torch
from .._handle import Deadline
from ._agent import GROUP
from ._side import Parts, Side, left

if TYPE_CHECKING:
    import torch
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor.placement_types import Placement

logger = logging.getLogger(__name__)

_UNWATCHED_S = 1800.0  # the deadline of a transfer that nobody waits for, which is that of torch.distributed
_MOST_DIMS = 8

try:
    from posix_ipc import BusyError as _Busy  # type: ignore[import-not-found, unused-ignore]
except ImportError:
    _Busy = TimeoutError


class TransferError(tb.Error, RuntimeError):
    """What is no ValueError, TimeoutError or ConnectionError, as Etha's clients expect it."""


class NotYet(tb.Timeout, _Busy):  # type: ignore[misc, unused-ignore]
    """The transfer has not ended when ``Completion.acquire`` gives up; it goes on."""


@contextlib.contextmanager
def _translated() -> Iterator[None]:
    try:
        yield
    except (ValueError, TimeoutError, ConnectionError, RuntimeError):
        raise
    except tb.Error as error:
        raise TransferError(str(error), error.status) from error


class Completion:
    """The end of a transfer: what a semaphore is in Etha, but for failures, which ``acquire`` raises."""

    def __init__(self, transfer: tb.Transfer) -> None:
        self._transfer = transfer
        self._has_ended = False

    def acquire(self, timeout: float | None = None) -> None:
        """Waits until all ranks of both sides have ended it; raises why it failed."""
        if self._has_ended:
            return
        with _translated():
            try:
                self._transfer.wait("committed", timeout)
            except tb.Timeout as error:
                if self._transfer.state().status == "ok":
                    raise NotYet(str(error)) from None
                raise
        self._has_ended = True

    def close(self) -> None:
        """Nothing: the transfer goes on."""

    unlink = close


class BatchHandler:
    """A batch that was registered."""

    def __init__(self, client: TensorBusClient, batch_id: str, pair_names: list[str]) -> None:
        self._client = weakref.ref(client)
        self.batch_id = batch_id
        self.pair_names = pair_names

    @property
    def client(self) -> TensorBusClient:
        client = self._client()
        if client is None:
            raise RuntimeError(f"the client of batch '{self.batch_id}' is gone")
        return client

    def transfer(
        self, transfer_type: Literal["send", "recv"], blocking: bool = False, timeout: float = 30.0
    ) -> Completion:
        """Sends or receives all tensors of the batch; see ``TensorBusClient.transfer``."""
        return self.client.transfer(self.batch_id, transfer_type, blocking, timeout)

    def query_transfer_signal(self, blocking: bool = True, timeout: float = 30.0) -> bool:
        """See ``TensorBusClient.query_transfer_signal``."""
        return self.client.query_transfer_signal(self.batch_id, blocking, timeout)

    def close(self, blocking: bool = True, timeout: float = 30.0) -> None:  # noqa: ARG002
        """Gives the tensors back. What was sent is waited for until its receivers have it."""
        self.client._close_batch(self.batch_id, self)

    def __del__(self) -> None:
        with contextlib.suppress(Exception):
            self.close(blocking=False)


class _Pair:
    """A pair that was asked for; made when the others are waited for."""

    def __init__(self, local: str, remote: str, size: int, mesh: Any, placements: Any) -> None:
        self.asked = local, remote, size, mesh, placements
        self.parts: Parts | None = None
        self.pair: tb.Pair | None = None


class _Batch:
    """A batch, and what was asked and begun of it."""

    def __init__(self, batch: tb.Batch, group: str) -> None:
        self.batch, self.group = batch, group
        self.handler: weakref.ref[BatchHandler] | None = None
        self.nquestions = 0
        self.last: Completion | None = None

    def begin(self, is_send: bool, deadline_s: float) -> tb.Transfer:
        begin = self.batch.send if is_send else self.batch.recv
        try:
            return begin(deadline_s, wait=None, group=self.group, whole_group=True)
        except tb.Refused as error:
            if is_send or "whole_group" not in str(error):
                raise
            logger.warning("batch '%s' ends for each rank by itself: %s", self.batch.name, error)
            return begin(deadline_s, wait=None, group=self.group)


class TensorBusClient:
    """A program's connection with its agent.

    The paths may also be in TENSOR_BUS_COMMAND_QUEUE_PATH and TENSOR_BUS_STATE_PATH. The first is that of the agent's
    socket; the second is not used.
    """

    def __init__(
        self,
        agent_rank: int,
        lmdb_command_queue_path: str | None = None,
        agent_state_lmdb_path: str | None = None,
        connection_timeout: float = 30.0,
    ) -> None:
        self.agent_rank = agent_rank
        self.agent_state_lmdb_path = agent_state_lmdb_path or os.environ.get("TENSOR_BUS_STATE_PATH")
        path = lmdb_command_queue_path or os.environ.get("TENSOR_BUS_COMMAND_QUEUE_PATH")
        if path is None:
            raise ValueError("lmdb_command_queue_path is missing, and TENSOR_BUS_COMMAND_QUEUE_PATH is not set")
        token_file = os.environ.get("TENSORBUS_TOKEN_FILE")
        token = Path(token_file).read_text().splitlines()[0] if token_file else None
        try:
            bus = tb.join(f"agent:{path}", timeout=connection_timeout, token=token)
        except tb.Error as error:
            raise ConnectionError(f"agent {agent_rank}: {error}") from error
        if (bus.group, bus.index) != (GROUP, agent_rank):
            bus.close()
            raise ConnectionError(f"the agent at {path} is {bus.group} {bus.index}, not {GROUP} {agent_rank}")
        self._bus = bus
        self._sides: dict[str, Side] = {}
        self._pairs: dict[str, _Pair] = {}
        self._batches: dict[str, _Batch] = {}

    # -- Pairs --

    def init_pair(
        self,
        pair_name: str,
        local_name: str,
        remote_name: str,
        expected_world_size: int,
        device_mesh: DeviceMesh | None = None,
        placements: tuple[Placement, ...] | None = None,
        blocking: bool = True,
        timeout: float = 30.0,
    ) -> None:
        """Meets ``remote_name`` as one of the ``expected_world_size`` ranks of ``local_name``.

        The mesh says which of them has which part, by their ranks in the program. If a side gives no mesh, or no
        placements, its i-th rank exchanges tensors with the i-th of the other, in the order of agents. With
        ``blocking=False`` the others are waited for when tensors are registered.
        """
        with _translated():
            self._forget_pair(pair_name)
            pair = _Pair(local_name, remote_name, expected_world_size, device_mesh, placements)
            self._pairs[pair_name] = pair
            if blocking:
                self._meet(pair_name, pair, Deadline(timeout))

    def _forget_pair(self, name: str) -> None:
        old = self._pairs.pop(name, None)
        if old is not None and old.pair is not None:
            old.pair.close()

    def _meet(self, name: str, pair: _Pair, deadline: Deadline) -> tuple[tb.Pair, Parts]:
        if pair.pair is None or pair.parts is None:
            local, remote, size, mesh, placements = pair.asked
            side = self._sides.get(local)
            if side is None:
                side = self._sides[local] = Side(self._bus, self.agent_rank, local, size, deadline)
            if side.size != size:
                raise ValueError(f"pair '{name}': '{local}' has {side.size} ranks, not {size}")
            parts = Parts(side, mesh, placements)
            made = self._bus.pair(name, remote, parts.pair_layout, group=local, timeout=left(deadline))
            try:
                if not self._has_mesh_there(name, made, parts, remote, deadline):
                    parts.layout = None
            except BaseException:
                made.close()
                raise
            pair.pair, pair.parts = made, parts
        return pair.pair, pair.parts

    def _has_mesh_there(self, name: str, pair: tb.Pair, parts: Parts, remote: str, deadline: Deadline) -> bool:
        """Whether the other side has a mesh, too. If one side has none, ranks meet by their order."""
        told = tb.empty((1,), "u8")
        for sender in sorted((parts.side.name, remote)):
            sends = sender == parts.side.name
            told.torch().fill_(sends and parts.layout is not None)
            with self._bus.batch(f"etha/{name}/mesh of {sender}") as batch:
                batch.add(pair, "has mesh", told, layout=f"mesh={parts.side.size} place=R")
                batch.register(left(deadline))
                (batch.send if sends else batch.recv)(left(deadline), group=parts.side.name)
            if not sends:
                found = bool(told.torch().item())
        return found

    # -- Batches --

    def register_tensors(
        self,
        batch_id: str,
        tensors: list[tuple[torch.Tensor, str]],
        bucket_size: int | None = None,
        timeout: float = 30.0,
    ) -> BatchHandler:
        """Registers this rank's parts, each with the name of its pair, and waits until both sides have.

        Within a pair, the n-th tensor of one side is the n-th of the other. Global shapes follow from those of all
        parts. Dtypes may differ: what is sent is cast. The memory is used until the batch is closed. Storages on the
        CPU are moved to memory that the agents map, and views go with them, as in Etha.
        """
        if not tensors:
            raise ValueError("tensors list cannot be empty")
        deadline = Deadline(timeout)
        by_pair: dict[str, list[torch.Tensor]] = {}
        for tensor, pair_name in tensors:
            if pair_name not in self._pairs:
                raise ValueError(f"batch '{batch_id}' has a tensor of pair '{pair_name}', which was not initialised")
            _module.share_storage(tensor)
            by_pair.setdefault(pair_name, []).append(_torch.local_part(tensor).detach())
        with _translated():
            # In one order on both sides: each of these waits for the other.
            met = {name: self._meet(name, self._pairs[name], deadline) for name in sorted(by_pair)}
            by_side: dict[str, list[str]] = {}
            for name, (_, parts) in met.items():
                by_side.setdefault(parts.side.name, []).append(name)
            self._close_batch(batch_id)
            batch = self._bus.batch(batch_id, bucket_size=bucket_size or 0)
            try:
                for group in sorted(by_side):  # in one order on all ranks
                    pairs = {name: by_pair[name] for name in by_side[group]}
                    told = _gather(self._sides[group], batch_id, pairs, deadline)
                    first = 0
                    for name, its in pairs.items():
                        _add(batch, name, *met[name], its, [row[first:] for row in told])
                        first += len(its) * (1 + _MOST_DIMS)
                batch.register(left(deadline))
            except BaseException:
                batch.close()
                raise
        handler = BatchHandler(self, batch_id, list(by_pair))
        kept = self._batches[batch_id] = _Batch(batch, min(by_side))
        kept.handler = weakref.ref(handler)
        return handler

    def _find(self, batch_id: str) -> _Batch:
        if batch_id not in self._batches:
            raise ValueError(f"there is no batch '{batch_id}'")
        return self._batches[batch_id]

    def _close_batch(self, batch_id: str, handler: BatchHandler | None = None) -> None:
        """A handler closes its own batch only, not one that was registered under the same name later."""
        kept = self._batches.get(batch_id)
        if kept is None or (handler is not None and kept.handler is not None and kept.handler() not in (handler, None)):
            return
        del self._batches[batch_id]
        kept.batch.close()

    # -- Transfers --

    def transfer(
        self, batch_id: str, transfer_type: Literal["send", "recv"], blocking: bool = False, timeout: float = 30.0
    ) -> Completion:
        """Begins to send or to receive the batch; with ``blocking``, waits for its end, and raises why it failed.

        It ends when all ranks have. One that is not waited for has half an hour; a batch's transfers follow one
        another, so that one that is begun waits for the one before.
        """
        if transfer_type not in ("send", "recv"):
            raise ValueError(f"transfer_type is {transfer_type!r}; there are 'send' and 'recv'")
        kept = self._find(batch_id)
        with _translated():
            if kept.last is not None:
                with contextlib.suppress(tb.Error, RuntimeError):  # it has raised that, or nobody waited for it
                    kept.last.acquire()
            done = Completion(kept.begin(transfer_type == "send", timeout if blocking else _UNWATCHED_S))
        kept.last = done
        if blocking:
            try:
                done.acquire()
            except BaseException:
                done._transfer.close()
                raise
        return done

    def query_transfer_signal(self, batch_id: str, blocking: bool = True, timeout: float = 30.0) -> bool:
        """Whether the sender has begun a transfer that is not received yet.

        All ranks of a side get the same answer to the n-th question of a batch. With ``blocking=False``, what this rank
        sees.
        """
        kept = self._find(batch_id)
        with _translated():
            if not blocking:
                return kept.batch.state().transfer_signal
            kept.nquestions += 1
            return kept.batch.signal(kept.nquestions, timeout, group=kept.group)

    def close(self) -> None:
        """Closes batches and pairs, and the connection."""
        for batch_id in list(self._batches):
            self._close_batch(batch_id)
        self._bus.close()


def _gather(side: Side, batch_id: str, by_pair: dict[str, list[torch.Tensor]], deadline: Deadline) -> list[list[int]]:
    """The shapes that all ranks of the side have, by seat."""
    try:
        return side.gather(f"shapes of {batch_id}", _shapes(by_pair), deadline)
    except tb.Conflict as error:
        raise tb.Conflict(
            f"batch '{batch_id}': ranks of '{side.name}' give different numbers of tensors ({error}, which is "
            f"{1 + _MOST_DIMS} numbers for each tensor)",
            error.status,
        ) from error


def _shapes(by_pair: dict[str, list[torch.Tensor]]) -> list[int]:
    """Each tensor's number of dims, then these, and zeros up to eight."""
    numbers: list[int] = []
    for tensors in by_pair.values():
        for tensor in tensors:
            dims = list(tensor.shape)
            numbers += [len(dims), *dims, *[0] * (_MOST_DIMS - len(dims))]
    return numbers


def _add(batch: tb.Batch, name: str, pair: tb.Pair, parts: Parts, tensors: list[Any], told: list[list[int]]) -> None:
    """Adds one pair's tensors, by names that both sides make from their order; ``told`` has shapes by seat."""
    side = parts.side
    if parts.layout is None:
        mine = f"mesh=1 place=R ranks={side.seat}"
        for i, tensor in enumerate(tensors):
            batch.add(pair, f"{side.order.index(side.seat)}/{i:06d}", tensor, layout=mine)
        return
    wholes = {}
    for i in range(len(tensors)):
        at = i * (1 + _MOST_DIMS)
        shapes = [tuple(row[at + 1 : at + 1 + row[at]]) for row in told]
        wholes[f"{i:06d}"] = parts.whole(f"tensor {i} of pair '{name}'", shapes)
    if side.seat not in parts.layout.ranks:
        batch.add_pair(pair)
        return
    batch.add_all(pair, dict(zip(wholes, tensors, strict=True)), shapes=wholes)
