"""The trainer's side: sends versions to engines, whose calls (start, update, finish) rank 0 makes meanwhile."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

import torch

from .._batch import Batch
from .._bus import join
from .._errors import Cancelled, Conflict, Error, Invalid, PeerLost, Timeout
from .._handle import sleep_until_readable
from .._transfer import Transfer
from ._source import Source

VOTE = "version"  # the name of the tensor whose arrival is the engine's decision


class _Control:
    """Calls of an engine by name, one after the other, in a thread; on ranks that make none, nothing."""

    def __init__(self, engine: str = "", **calls: Callable[[], Any]) -> None:
        self.error: Error | None = None
        self._engine, self._calls = engine, calls
        self._thread = threading.Thread(target=self._run, daemon=True)
        if calls:
            self._thread.start()

    def _run(self) -> None:
        for name, call in self._calls.items():
            try:
                call()
            except Exception as error:
                why = (str(error).strip() or type(error).__name__).splitlines()[-1]
                self.error = Error(f"engine '{self._engine}' has failed in {name}: {why}", "engine")
                self.error.__cause__ = error
                return

    @property
    def is_running(self) -> bool:
        """Whether a call is under way."""
        return self._thread.is_alive()

    def join(self, timeout: float, is_last: bool = True) -> None:
        """Waits for the last call; raises what one of them has raised, and, if ``is_last``, that it has not ended."""
        if self._calls:
            self._thread.join(timeout)
        if self.error is not None:
            raise self.error
        if is_last and self.is_running:
            raise Timeout(f"engine '{self._engine}' has not answered after {timeout:.0f} s")

    def wait(self, transfer: Transfer) -> None:
        """Waits until the transfer is committed; if a call fails before, the transfer is cancelled.

        What the transfer itself fails with says more than the call, and all ranks know it: it has a second to come.
        """
        while True:
            failure = self.error
            try:
                transfer.wait("committed", timeout=0.1 if failure is None else 1.0)
                return
            except Timeout:
                if transfer.state().status != "ok":
                    raise
                if failure is not None:
                    transfer.close()
                    raise failure from None
            except Cancelled as cancelled:
                raise cancelled from self.error
            except Error as error:
                raise error from failure


class _Link:
    """One engine: the pair with it, two batches, and its client on rank 0."""

    def __init__(self, sender: Sender, engine: str, client: Any) -> None:
        self._sender, self._engine, self._client = sender, engine, client
        self._open: list[Any] = []  # what close() closes
        self._control = _Control()
        self.register()

    def _call(self, **calls: Callable[[], Any]) -> _Control:
        return _Control(self._engine, **calls) if self._sender.rank == 0 else _Control()

    def register(self, is_in_update: bool = False) -> None:
        """Meets the engine. Names and shapes agree then, in both directions."""
        self.close()
        sender = self._sender
        info = sender.info | {"engine": self._engine, "is_in_update": is_in_update}
        control = self._call(init_weight_transfer_engine=lambda: self._client.init_weight_transfer_engine(info))
        try:
            until = time.monotonic() + sender.timeout
            while True:
                try:
                    self._meet(control, max(0.0, until - time.monotonic()))
                    break
                except (PeerLost, Conflict) as error:
                    # An engine that an earlier trainer has left is still there until it hears of this one.
                    is_leaving = error.group == self._engine if isinstance(error, PeerLost) else has_old_number(error)
                    if not is_leaving or control.error is not None or time.monotonic() > until:
                        raise
                    self.close()
                    time.sleep(0.05)
        except Error as error:
            self.close()
            raise error from (None if error is control.error else control.error)
        except BaseException:
            self.close()
            raise
        control.join(sender.timeout)

    def _meet(self, control: _Control, timeout: float) -> None:
        sender, bus = self._sender, self._sender.bus
        until = time.monotonic() + timeout
        pair = bus.pair(f"weights {self._engine}", self._engine, timeout=timeout, wait=False)
        self._open.append(pair)
        self.data = bus.batch(f"weights {self._engine}", ties=sender.source.ties)
        self._open.append(self.data)
        sender.source.add_to(self.data, pair)
        self.vote = bus.batch(f"vote {self._engine}")
        self._open.append(self.vote)
        self.vote.add(pair, VOTE, sender.number, layout=f"mesh={sender.size} place=R")
        for batch in self.data, self.vote:
            self._register(batch, control, max(0.0, until - time.monotonic()))

    def _register(self, batch: Batch, control: _Control, timeout: float) -> None:
        """Registers; if the engine's call fails before, nobody waits for the engine any longer."""

        def sleep(fd: int) -> None:
            if control.error is not None:
                raise control.error
            sleep_until_readable(fd, 0.2)

        batch._registering(timeout=timeout).wait(sleep)

    def begin(self, version: int, weight_version: str | None) -> Transfer:
        """Begins to send, after the work that is on this thread's stream."""
        self._control = self._call(
            start_weight_update=self._start,
            update_weights=lambda: self._client.update_weights({"version": version}),
            finish_weight_update=lambda: self._client.finish_weight_update(
                *([weight_version] if weight_version is not None else [])
            ),
        )
        return self.data.send(timeout=self._sender.timeout, wait=None, whole_group=True)

    def end(self, transfer: Transfer) -> None:
        """Waits until the engine has the version."""
        with transfer:
            self._control.wait(transfer)
        with self.vote.send(timeout=self._sender.timeout, wait=None, whole_group=True) as vote:
            self._control.wait(vote)
        self._control.join(self._sender.timeout)

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
        while self._open:
            self._open.pop().close()


class Sender:
    """Sends a source to engines. Every rank of the trainer makes one, and makes the same calls; rank 0 has the clients.

    Engines are independent: each decides by itself whether it takes a version, and one that fails, or dies, does not
    keep the others from it. ``engine=None`` begins without one.
    """

    def __init__(
        self,
        url: str,
        rank: int,
        size: int,
        source: Source,
        client: Any = None,
        *,
        group: str = "trainer",
        engine: str | None = "engine",
        token: str | None = None,
        timeout: float = 120.0,
    ) -> None:
        self.rank, self.size, self.source, self.timeout = rank, size, source, timeout
        self.version = 0  # the last that was sent
        self.failed: dict[str, BaseException] = {}  # by engine, in the last send
        self.number = torch.zeros(1, dtype=torch.int64)
        self.info = {"url": url, "group": group, "token": token, "timeout": timeout}
        self._links: dict[str, _Link] = {}
        self.bus = join(url, group, rank, size, token=token, timeout=timeout)
        try:
            if engine is not None:
                self.add(engine, client)
        except BaseException:
            self.bus.close()
            raise

    @property
    def engines(self) -> list[str]:
        """Their names."""
        return list(self._links)

    def add(self, engine: str, client: Any = None) -> None:
        """Meets an engine that joins, also late, or one that was started again under its old name.

        It has the weights that it has loaded until the next ``send``, or until a ``send`` to it alone.
        """
        self.remove(engine)
        self._links[engine] = _Link(self, engine, client)

    def remove(self, engine: str) -> None:
        """Sends nothing to this engine any more."""
        if (link := self._links.pop(engine, None)) is not None:
            link.close()

    def send(self, weight_version: str | None = None, *, engine: str | None = None) -> None:
        """Sends a version to all engines; on return they have decided to take it, and have it.

        If some fail, the others get the version nevertheless; then the first failure is raised, and ``failed`` has all
        of them. With ``engine``, only this one gets the source as it is, as the version that the others have.
        """
        self.source.refresh()
        if engine is None:
            self.version += 1
        elif engine not in self._links:
            raise Invalid(f"there is no engine '{engine}'; there are {', '.join(self._links) or 'none'}")
        self.version = max(self.version, 1)
        self.number[0] = self.version
        self.failed = {}
        self._send(list(self._links) if engine is None else [engine], weight_version)
        again = [name for name, error in self.failed.items() if _has_unmapped(error)]
        for name in again:
            del self.failed[name]
            try:
                self._links[name].register(is_in_update=True)
            except Exception as error:
                self.failed[name] = error
        self._send([name for name in again if name not in self.failed], weight_version)
        for failure in self.failed.values():
            raise failure

    def _send(self, engines: Iterable[str], weight_version: str | None) -> None:
        begun = {}
        for name in engines:
            try:
                begun[name] = self._links[name].begin(self.version, weight_version)
            except Exception as error:
                self.failed[name] = error

        def end(name: str) -> None:
            try:
                self._links[name].end(begun[name])
            except Exception as error:
                self.failed[name] = error

        threads = [threading.Thread(target=end, args=(name,), daemon=True) for name in list(begun)[1:]]
        for thread in threads:
            thread.start()
        if begun:
            end(next(iter(begun)))
        for thread in threads:
            thread.join()

    def close(self) -> None:
        """Leaves the bus."""
        self.bus.close()
        self._links = {}


def has_old_number(error: BaseException) -> bool:
    """Whether a process has in a new store the number that another one had in the store before.

    One that knows both can't meet the later one, unless it leaves the bus and joins it again.
    """
    return isinstance(error, Conflict) and " has the number of another process" in str(error)


def _has_unmapped(error: BaseException) -> bool:
    """Whether an engine has taken its memory back after the last version; it is to be registered again."""
    return isinstance(error, Invalid) and " was invalidated; " in str(error)


def pass_on(
    giver: Any, newcomer: Any, url: str, *, engine: str = "engine", token: str | None = None, timeout: float = 120.0
) -> None:
    """An engine that has a version from a trainer gives it to one of the same kind, which has joined late.

    ``giver`` and ``newcomer`` are clients of the two; no trainer takes part. They meet at ``url``.
    """
    info = {"url": url, "token": token, "timeout": timeout, "engine": engine, "group": "giver"}
    controls = (
        _Control(
            "giver",
            start_weight_update=giver.start_weight_update,
            update_weights=lambda: giver.update_weights({"version": 0, "give": info}),
            finish_weight_update=giver.finish_weight_update,
        ),
        _Control(
            engine,
            init_weight_transfer_engine=lambda: newcomer.init_weight_transfer_engine(info | {"is_same_kind": True}),
            start_weight_update=newcomer.start_weight_update,
            update_weights=lambda: newcomer.update_weights({"version": 1}),
            finish_weight_update=newcomer.finish_weight_update,
        ),
    )
    until = time.monotonic() + 4 * timeout  # joining, registering, and two batches have one each
    while any(control.is_running for control in controls) and time.monotonic() < until:
        for control in controls:
            control.join(0.01, is_last=False)
    for control in controls:
        control.join(0.0)
