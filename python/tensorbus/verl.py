"""verl's weight transfer by tensorbus, as the checkpoint engine "tensorbus"; docs/engines.md tells how.

verl gathers every tensor before it hands it over: what travels here are whole tensors, from rank 0 of the actor to all
workers of the rollout, in buckets of ``bucket_size`` bytes, of which each side has two.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import secrets
import socket
import time
from collections.abc import AsyncIterator
from typing import Any

import torch
from verl.checkpoint_engine.base import CheckpointEngine, CheckpointEngineRegistry
from verl.utils.device import get_device_name
from verl.workers.rollout.utils import ensure_async_iterator

from ._bus import join
from ._errors import Invalid, Refused

HEADER_NBYTES = 1 << 20  # of what a bucket's header may say: names, dtypes, shapes
ALIGN = 16  # bytes; tensors begin at multiples of it


@CheckpointEngineRegistry.register("tensorbus")
class TensorbusCheckpointEngine(CheckpointEngine):  # type: ignore[misc] # verl has no types here
    """Rank 0 of the actor and the rollout's workers meet anew for each update, so that workers may come and go.

    ``timeout``, in seconds, is for meeting, and for each bucket, with what verl does meanwhile. ``address`` is the one
    at which the rollout reaches rank 0 of the actor; by default, the one that Ray knows.
    """

    def __init__(
        self, bucket_size: int, is_master: bool = False, timeout: float = 300.0, address: str | None = None
    ) -> None:
        self.bucket_size = bucket_size // ALIGN * ALIGN
        if self.bucket_size == 0:
            raise Invalid(f"bucket_size is {bucket_size} bytes; it has to be at least {ALIGN}")
        self.is_master, self.timeout, self.address = is_master, timeout, address
        self._bus: Any = None

    # ---- What the driver calls, on all workers ----

    def prepare(self) -> dict[str, Any]:
        """On rank 0 of the actor: where the next update meets."""
        self.finalize()  # one that failed was not finalized
        if not self.is_master:
            return {}
        address = self.address or _own_address()
        return {"url": f"tcp://{address}:{_free_port(address)}", "token": secrets.token_hex(16)}

    @classmethod
    def build_topology(
        cls, actor_wg_world_size: int, rollout_world_size: int, metadata: list[dict[str, Any]]
    ) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
        """Rank 0 of the actor sends; the actor's other ranks have seat -1, and only walk through the weights."""
        if "url" not in metadata[0]:
            raise Invalid("rank 0 of the actor was not made with is_master=True")

        def arguments(group: str, seats: list[int]) -> dict[str, list[Any]]:
            same = {"group": group, "rollout_size": rollout_world_size, **metadata[0]}
            return {"seat": seats, **{key: [value] * len(seats) for key, value in same.items()}}

        return (
            arguments("actor", [0] + [-1] * (actor_wg_world_size - 1)),
            arguments("rollout", list(range(rollout_world_size))),
        )

    def init_process_group(self, group: str, seat: int, rollout_size: int, url: str, token: str) -> None:
        """Meets the others; those that do not come are named when the deadline is over."""
        if seat < 0:
            return
        is_actor = group == "actor"
        size, remote = (1, "rollout") if is_actor else (rollout_size, "actor")
        self._bus = join(url, group, seat, size, token=token, timeout=self.timeout)
        try:
            self._pair = self._bus.pair("weights", remote, layout=f"mesh={size} place=R", timeout=self.timeout)
            self._headers = [torch.zeros(HEADER_NBYTES, dtype=torch.uint8) for _ in range(2)]
            self._buckets = [torch.empty(self.bucket_size, dtype=torch.uint8, device=_device()) for _ in range(2)]
            self._batches: dict[tuple[str, int, int], Any] = {}
            for which in range(2):
                self._batch("header", which, HEADER_NBYTES)
        except BaseException:
            self.finalize()
            raise

    def finalize(self) -> None:
        """Leaves the others, and frees the buckets."""
        if self._bus is not None:
            self._bus.close()
            self._bus = None
            self._batches, self._headers, self._buckets = {}, [], []

    # ---- Sending ----

    @torch.no_grad()  # type: ignore[untyped-decorator] # torch has no types here
    async def send_weights(self, weights: Any, global_steps: int | None = None) -> dict[str, float] | None:
        """Sends the weights while the next bucket is filled; returns how much that was, and how long it took."""
        del global_steps
        if self._bus is None:
            async for _ in ensure_async_iterator(weights):
                pass  # making them is collective over the actor's ranks
            return None
        began, nbytes, which = time.perf_counter(), 0, 0
        sending: asyncio.Future[None] | None = None
        try:
            async for used, tensors, is_last in self._fill(weights):
                if sending is not None:
                    await sending
                self._synchronize()  # the bucket is filled, and another thread sends it
                header = {"nbytes": used, "tensors": tensors, "is_last": is_last}
                sending = self._begin(self._send, which, header)
                nbytes, which = nbytes + used, 1 - which
                if is_last:
                    await sending
        except BaseException as error:
            if sending is not None:
                await asyncio.wait([sending])
            if sending is None or sending.exception() is None:
                with contextlib.suppress(Exception):  # the rollout is told why
                    await self._begin(self._send, which, {"error": f"{type(error).__name__}: {error}"})
            self.finalize()
            raise
        return {"tensorbus/send_bytes": float(nbytes), "tensorbus/send_seconds": time.perf_counter() - began}

    async def _fill(self, weights: Any) -> AsyncIterator[tuple[int, list[Any], bool]]:
        """Fills the buckets by turns; yields how much of one is used, and what is in it."""
        which, used, tensors, header_nbytes = 0, 0, list[Any](), 0
        async for name, tensor in ensure_async_iterator(weights):
            data = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
            used = min(-(-used // ALIGN) * ALIGN, self.bucket_size)
            at = 0
            while True:
                entry = [name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape), at, used, 0]
                most = len(json.dumps(entry)) + 32  # the numbers may get longer
                if (used == self.bucket_size and at < len(data)) or header_nbytes + most > HEADER_NBYTES - 128:
                    yield used, tensors, False
                    which, used, tensors, header_nbytes = 1 - which, 0, [], 0
                    continue
                n = min(self.bucket_size - used, len(data) - at)
                self._buckets[which][used : used + n].copy_(data[at : at + n])
                entry[5] = n
                tensors.append(entry)
                used, at, header_nbytes = used + n, at + n, header_nbytes + most
                if at == len(data):
                    break
        yield used, tensors, True

    def _send(self, which: int, header: dict[str, Any]) -> None:
        text = json.dumps(header).encode()
        self._headers[which][: len(text) + 1] = torch.frombuffer(bytearray(text + b"\0"), dtype=torch.uint8)
        self._batch("header", which, HEADER_NBYTES).send(timeout=self.timeout, wait="released")
        if nbytes := header.get("nbytes"):
            self._batch("bucket", which, nbytes).send(timeout=self.timeout, wait="released")
        if header.get("is_last"):  # nobody leaves before all have it
            for batch in self._batches.values():
                for transfer in list(batch._transfers.values()):
                    transfer.wait("committed", timeout=self.timeout)

    # ---- Receiving ----

    async def receive_weights(self, global_steps: int | None = None) -> AsyncIterator[tuple[str, Any]]:
        """Yields the weights while the next bucket arrives. A tensor is not to be used after the next one was asked
        for: its bucket may be filled again.
        """
        del global_steps
        which = 0
        receiving: asyncio.Future[dict[str, Any]] | None = self._begin(self._recv, which)
        parts: Any = None  # of a tensor that is in several buckets
        try:
            while receiving is not None:
                header = await receiving
                receiving = None
                bucket, which = self._buckets[which], 1 - which
                if not header["is_last"]:
                    receiving = self._begin(self._recv, which)
                for name, dtype, shape, at, offset, n in header["tensors"]:
                    kind = getattr(torch, dtype)
                    whole = torch.Size(shape).numel() * kind.itemsize
                    data = bucket[offset : offset + n]
                    if n < whole:
                        parts = torch.empty(whole, dtype=torch.uint8, device=bucket.device) if at == 0 else parts
                        parts[at : at + n].copy_(data)
                        if at + n < whole:
                            continue
                        data, parts = parts, None
                    yield name, data.view(kind).view(shape)
                self._synchronize()  # what was to be read of the bucket has been
        finally:
            if receiving is not None:
                await asyncio.wait([receiving])  # it has a deadline
                receiving.exception()

    def _recv(self, which: int) -> dict[str, Any]:
        self._batch("header", which, HEADER_NBYTES).recv(timeout=self.timeout)
        header: dict[str, Any] = json.loads(self._headers[which].numpy().tobytes().partition(b"\0")[0])
        if "error" in header:
            raise Refused(f"the actor has given the update up: {header['error']}")
        if header["nbytes"]:
            self._batch("bucket", which, header["nbytes"]).recv(timeout=self.timeout)
        return header

    # ---- Both ----

    def _batch(self, kind: str, which: int, nbytes: int) -> Any:
        """A bucket's header, or its first bytes; all but the last bucket of an update have about the same length."""
        key = (kind, which, nbytes)
        if key not in self._batches:
            batch = self._bus.batch(f"{kind} {which} {nbytes}")
            tensors = self._headers if kind == "header" else self._buckets
            batch.add(self._pair, kind, tensors[which][:nbytes])
            batch.register(timeout=self.timeout)
            self._batches[key] = batch
        return self._batches[key]

    @staticmethod
    def _begin(function: Any, *arguments: Any) -> asyncio.Future[Any]:
        """In a thread, at once: the generator of weights does not let the event loop run."""
        return asyncio.get_running_loop().run_in_executor(None, function, *arguments)

    @staticmethod
    def _synchronize() -> None:
        if _device() != "cpu":
            torch.accelerator.synchronize()


def _device() -> str:
    """Where verl has weights; it has a name for GPUs also where there are none."""
    return str(get_device_name()) if torch.accelerator.is_available() else "cpu"


def _own_address() -> str:
    import ray

    return str(ray.util.get_node_ip_address()).strip("[]")


def _free_port(address: str) -> int:
    with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as probe:
        probe.bind((address, 0))
        port: int = probe.getsockname()[1]
        return port
