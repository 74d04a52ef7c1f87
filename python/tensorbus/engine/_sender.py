"""The trainer's side: sends versions to one engine, whose calls (start, update, finish) rank 0 makes meanwhile."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch

from .._bus import join
from .._errors import Cancelled, Error, Timeout
from .._transfer import Transfer
from ._source import Source

VOTE = "version"  # the name of the tensor whose arrival is the engine's decision


class _Control:
    """Calls of the engine, one after the other, in a thread; on ranks that make none, nothing."""

    def __init__(self, *calls: Callable[[], Any]) -> None:
        self.error: BaseException | None = None
        self._calls = calls
        self._thread = threading.Thread(target=self._run, daemon=True)
        if calls:
            self._thread.start()

    def _run(self) -> None:
        try:
            for call in self._calls:
                call()
        except BaseException as error:
            self.error = error

    def join(self, timeout: float) -> None:
        """Waits for the last call, and raises what one of them has raised."""
        if self._calls:
            self._thread.join(timeout)
        if self.error is not None:
            raise self.error
        if self._thread.is_alive():
            raise Timeout(f"the engine has not answered after {timeout:.0f} s")

    def wait(self, transfer: Transfer) -> None:
        """Waits until the transfer is committed; if a call fails before, the transfer is cancelled."""
        while True:
            try:
                transfer.wait("committed", timeout=0.1)
                return
            except Timeout:
                if transfer.state().status != "ok":
                    raise
            except Cancelled as cancelled:
                raise cancelled from self.error
            if self.error is not None:
                transfer.close()
                raise self.error


class Sender:
    """Sends a source to an engine. Every rank of the trainer makes one, and calls ``send``; rank 0 has a client."""

    def __init__(
        self,
        url: str,
        rank: int,
        size: int,
        source: Source,
        client: Any = None,
        *,
        group: str = "trainer",
        engine: str = "engine",
        token: str | None = None,
        timeout: float = 120.0,
    ) -> None:
        self._client: Any = client
        self._calls, self._timeout = rank == 0, timeout
        self.version = 0
        info = {"url": url, "group": group, "engine": engine, "token": token, "timeout": timeout}
        control = self._control(lambda: self._client.init_weight_transfer_engine(info))
        self._bus = join(url, group, rank, size, token=token, timeout=timeout)
        try:
            pair = self._bus.pair("weights", engine, timeout=timeout, wait=False)
            self._data = self._bus.batch("weights", ties=source.ties)
            source.add_to(self._data, pair)
            self._vote = self._bus.batch("vote")
            self._number = torch.zeros(1, dtype=torch.int64)
            self._vote.add(pair, VOTE, self._number, layout=f"mesh={size} place=R")
            self._register(control)
        except BaseException:
            self._bus.close()
            raise
        control.join(timeout)

    def _control(self, *calls: Callable[[], Any]) -> _Control:
        return _Control(*calls) if self._calls else _Control()

    def _register(self, control: _Control) -> None:
        try:
            for batch in self._data, self._vote:
                batch.register(timeout=self._timeout)
        except Error as error:
            raise error from control.error

    def send(self, weight_version: str | None = None) -> None:
        """Sends a version; on return the engine has decided to take it, and has it. All ranks call it."""
        number = self.version + 1
        self._number[0] = number
        control = self._control(
            self._start,
            lambda: self._client.update_weights({"version": number}),
            lambda: self._client.finish_weight_update(*([weight_version] if weight_version is not None else [])),
        )
        for batch in self._data, self._vote:
            with batch.send(timeout=self._timeout, wait=None, whole_group=True) as transfer:
                control.wait(transfer)
        control.join(self._timeout)
        self.version = number

    def _start(self) -> None:
        """Begins an update. One that failed in its finish is still open for vLLM; a call that fails ends it."""
        try:
            self._client.start_weight_update()
        except Exception:
            try:
                self._client.update_weights({"version": 0})
            except Exception:
                self._client.start_weight_update()
            else:
                raise

    def close(self) -> None:
        """Leaves the bus."""
        self._bus.close()
