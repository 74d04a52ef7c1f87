"""What trainer and engine tell each other: a request, which travels as a tensor, and its result, over the bus."""

from __future__ import annotations

import json
import pickle
import threading
import time
from dataclasses import asdict, dataclass
from typing import Any

import torch

from .._bus import join
from .._errors import Timeout

NAME = "tensorbus"
REPORT_NBYTES = 4096


@dataclass(frozen=True, slots=True)
class Request:
    """What ``load`` is to do."""

    version: int  # 0: meet the trainer
    id: str
    url: str
    group: str
    engine: str
    token: str | None
    timeout: float
    shadow: str
    is_in_update: bool = False


class _ByValue:
    """A tensor of bytes that is pickled with its bytes; torch's own way needs both processes on one machine."""

    def __init__(self, data: bytes) -> None:
        self._data = data

    def __reduce__(self) -> tuple[Any, tuple[list[int]]]:
        return torch.ByteTensor, (list(self._data),)


def encode(request: Request) -> bytes:
    """The named tensors of SGLang's request."""
    return pickle.dumps([(NAME, _ByValue(json.dumps(asdict(request)).encode()))])


def decode(named_tensors: Any) -> Request:
    """The other way round."""
    return Request(**json.loads(bytes(dict(named_tensors)[NAME].tolist())))


def tell(request: Request, sentence: str) -> None:
    """Tells the trainer what has become of a request; "" is good."""
    text = sentence.encode()[: REPORT_NBYTES - 1].ljust(REPORT_NBYTES, b"\0")
    with _meet(request, f"{request.engine} report {request.id}") as bus:
        batch = _batch(
            bus, f"{request.group} report {request.id}", torch.frombuffer(bytearray(text), dtype=torch.uint8)
        )
        batch.send(timeout=request.timeout, wait="committed")


class Hearing:
    """Hears it, in a thread: SGLang answers a request only when the engine has told."""

    def __init__(self, request: Request) -> None:
        self._request, self._is_over = request, False
        self._result: str | BaseException | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._result = self._hear()
        except BaseException as error:
            self._result = error

    def _hear(self) -> str:
        request = self._request
        remote = f"{request.engine} report {request.id}"
        until = time.monotonic() + 3 * request.timeout
        with _meet(request, f"{request.group} report {request.id}") as bus:
            while True:
                try:
                    bus.wait(remote, 0.2)
                    break
                except Timeout:
                    if self._is_over or time.monotonic() > until:
                        raise
            told = torch.zeros(REPORT_NBYTES, dtype=torch.uint8)
            _batch(bus, remote, told).recv(timeout=request.timeout)
        text: str = told.numpy().tobytes().rstrip(b"\0").decode("utf-8", "replace")
        return text

    def result(self) -> str:
        """What was told, when SGLang has answered."""
        self._thread.join(self._request.timeout)
        if isinstance(self._result, BaseException):
            raise self._result
        if self._result is None:
            raise Timeout(f"the engine '{self._request.engine}' has not told what became of the request")
        return self._result

    def give_up(self) -> None:
        """Nothing will be told."""
        self._is_over = True
        self._thread.join(5.0)


def _meet(request: Request, group: str) -> Any:
    return join(request.url, group, 0, 1, token=request.token, timeout=request.timeout)


def _batch(bus: Any, remote: str, tensor: Any) -> Any:
    batch = bus.batch("report")
    batch.add(bus.pair("report", remote, layout="mesh=1 place=R"), "report", tensor)
    return batch
