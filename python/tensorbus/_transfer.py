"""Transfers: versions on their way."""

from __future__ import annotations

import asyncio
import itertools
import select
from collections.abc import Callable, Generator
from ctypes import byref
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from . import _module, _values
from ._c import declare, lib, tb_event, tb_phase, tb_status, tb_transfer_opts, tb_transfer_state
from ._call import Call
from ._errors import Cancelled, Error, Refused, Timeout, make
from ._handle import Deadline, Handle, readable, sleep_until_readable

if TYPE_CHECKING:
    from ._batch import Batch
    from ._pair import Pair

EVENTS = {event.name.removeprefix("TB_").lower(): event for event in tb_event}
_PHASES = tuple(p.name.removeprefix("TB_PHASE_").lower() for p in tb_phase)[: tb_phase.TB_PHASE_COUNT]
_look = declare(lib, "tb_wait")  # without exceptions
_AT_ONCE_MS = 5  # no signal is handled for so long


@dataclass(frozen=True, slots=True)
class TransferState:
    """How far a transfer is."""

    status: str  # "ok" while it is under way and after it succeeded, else that of the exception
    sentence: str  # what is wrong, if it has failed
    events: frozenset[str]
    attempt: int
    version: int  # of one that is committed; 0: it is not
    bytes_done: int
    bytes_total: int
    groups_done: int
    groups_total: int
    seconds: float
    phases: dict[str, float]  # seconds of each


def _read_state(call: Callable[[Any], None]) -> TransferState:
    s = tb_transfer_state()
    call(byref(s))
    return _make_state(s, make(s.status, lib.tb_error_detail().decode("utf-8", "replace")) if s.status else None)


def _make_state(s: tb_transfer_state, failure: Error | None) -> TransferState:
    return TransferState(
        status=failure.status if failure else "ok",
        sentence=str(failure) if failure else "",
        events=frozenset(name for name, event in EVENTS.items() if s.events & event),
        attempt=s.attempt,
        version=s.version,
        bytes_done=s.bytes_done,
        bytes_total=s.bytes_total,
        groups_done=s.groups_done,
        groups_total=s.groups_total,
        seconds=s.seconds,
        phases=dict(zip(_PHASES, s.phase, strict=True)),
    )


class Transfer(Handle):
    """A version on its way; made by ``Batch.send`` and ``Batch.recv``. It can be awaited.

    The batch keeps it until it has ended, so the program need not. Closing a transfer that is under way cancels it, and
    so does cancelling the task that awaits it.
    """

    def __init__(self, batch: Batch, is_send: bool) -> None:
        super().__init__(f"{'send' if is_send else 'receive'} of batch '{batch.name}'")
        self._batch = batch
        self.is_send = is_send
        self._default_event = "released" if is_send else "committed"
        self._call: Call[Transfer] | None = None  # that registers the batch first, and then begins this
        self._poll: select.epoll | None = None  # of what fileno() has returned meanwhile
        self._is_committed = False  # somebody has waited for that
        self._moved: list[_module.Moved] = []  # parameters that a receive is still to be copied to
        self._stream: int | None = None  # on which that is done
        self._lands_at = tb_event.TB_ARRIVED if batch.commit == "in_place" else tb_event.TB_COMMITTED

    @property
    def is_closed(self) -> bool:
        """Whether it was closed."""
        return not self._handle and self._call is None

    def _begin_by_call(self, opts: tb_transfer_opts) -> None:
        """Has the batch registered, and begins then."""

        def done() -> None:
            self._batch._is_registered = True

        begin = lib.tb_call_send if self.is_send else lib.tb_call_recv
        self._call = Call(self._what, self._batch, self, self._handle, done, begin, byref(opts))
        self._call.start()

    def _begin_fd(self) -> int:
        """-1: it has begun; raises why it can't; else what to poll until then."""
        if self._call is None:
            return -1
        with self._lock:
            call = self._call
            if call is None:
                return -1
            if not self._handle:
                if call.is_closed:
                    raise Cancelled(f"{self._what} was cancelled")
                if (fd := call.look()) >= 0:
                    return fd
            if self._poll is not None:
                self._poll.register(lib.tb_transfer_fd(self._handle), select.EPOLLIN)
            call.close()
            self._call = None
            return -1

    def _check_begun(self) -> None:
        if self._call is not None:
            raise Refused(
                f"{self._batch._what} is already being {'sent' if self.is_send else 'received'}; close that transfer "
                "first"
            )

    def _await_begun(self, deadline: Deadline) -> None:
        while (fd := self._begin_fd()) >= 0:
            if deadline.is_over:
                raise self._not_begun()
            sleep_until_readable(fd, deadline.left)

    def _not_begun(self) -> Timeout:
        return Timeout(f"{self._what} has not begun: the batch is still being registered")

    def _land(self) -> None:
        """Copies what has arrived in the memory that was registered to where the program has the tensors now."""
        _module.copy_moved(self._moved, False, self._stream)
        self._moved = []

    def _land_if_done(self) -> None:
        """The same for a receive that nobody waits for."""
        if self._moved and not self.is_closed:
            try:
                self._look(tb_event.TB_COMMITTED)
            except Error:
                pass  # it has failed, as its waits say

    def _look(self, event: int, milliseconds: int = 0, again: bool = False) -> tuple[Timeout | None, int]:
        """None if the event has come; raises the transfer's failure; else why it has not, and what to poll."""
        self._check_ours()
        with self._lock:
            if self._call is not None and (fd := self._begin_fd()) >= 0:
                return self._not_begun(), fd
            transfer = self._get(again)
            status = _look(transfer, event, milliseconds)
            if status == 0:
                self._is_committed |= event == tb_event.TB_COMMITTED
                if self._moved and event in (tb_event.TB_COMMITTED, self._lands_at):
                    self._land()
                return None, -1
            failure = make(status, lib.tb_error_detail().decode("utf-8", "replace"))
            if not isinstance(failure, Timeout):
                raise failure
            state = tb_transfer_state()
            lib.tb_transfer_query(transfer, byref(state))
            if state.status != tb_status.TB_OK:
                raise make(state.status, lib.tb_error_detail().decode("utf-8", "replace"))
            return failure, lib.tb_transfer_fd(transfer)

    def wait(self, event: str | None = None, timeout: float | None = None) -> None:
        """Waits for an event, or for the failure of the transfer, which it raises.

        The default is "released" for a send and "committed" for a receive. After ``timeout`` seconds the call raises
        ``Timeout``, and the transfer goes on; the default is the transfer's own deadline.
        """
        number = _values.choice("event", self._default_event if event is None else event, EVENTS)
        self._wait(number, None if timeout is None else _values.milliseconds("timeout", timeout))

    def _wait(self, event: int, timeout_ms: int | None = None, again: bool = False) -> None:
        # Most end at once: that is waited for in the library, which takes less than to poll.
        missing, fd = self._look(event, _AT_ONCE_MS if timeout_ms is None else min(_AT_ONCE_MS, timeout_ms), again)
        if missing is None:
            return
        deadline = Deadline(None if timeout_ms is None else timeout_ms / 1000)
        while missing is not None:
            if deadline.is_over:
                raise Timeout(str(missing).replace("after 0 ms", f"after {timeout_ms} ms"))
            sleep_until_readable(fd, deadline.left)
            missing, fd = self._look(event, again=True)

    def __await__(self) -> Generator[Any, None, None]:
        return self._await_event(EVENTS[self._default_event]).__await__()

    async def _await_event(self, number: int) -> None:
        try:
            missing, fd = self._look(number)
            while missing is not None:
                await readable(fd)
                missing, fd = self._look(number, again=True)
        except asyncio.CancelledError:
            self.close()
            raise

    def stream_wait(self, event: str | None = None, stream: int | None = None) -> None:
        """Makes a CUDA stream wait for an event; the CPU does not. Without tensors on a GPU, this waits for it;
        so it does if parameters of a module have moved, and are copied then.

        ``stream`` is a handle; by default, PyTorch's current one. If the transfer fails later, the stream continues: so
        call ``wait``, too, before relying on the stream's results.
        """
        name = self._default_event if event is None else event
        number = _values.choice("event", name, EVENTS)
        handle = self._batch._stream(stream)
        if handle is None or self._moved:
            self.wait(name)
            return
        self._await_begun(Deadline(None))
        with self._use() as transfer:
            lib.tb_stream_wait(transfer, number, byref(handle))

    def wait_group(self, group: int, timeout: float | None = None) -> None:
        """Waits until the tensors of this group have arrived."""
        group = _values.integer("group", group, 0, 2**32 - 2)
        deadline = Deadline(None if timeout is None else _values.milliseconds("timeout", timeout) / 1000)
        self._await_begun(deadline)
        for nlooks in itertools.count():
            left = deadline.left
            with self._use(nlooks > 0) as transfer:
                try:
                    lib.tb_wait_group(transfer, group, 50 if left is None else min(50, int(left * 1000)))
                    if self._moved and group == 0 and self._lands_at == tb_event.TB_ARRIVED:
                        self._land()  # modules are in group 0
                    return
                except Timeout:
                    state = tb_transfer_state()
                    lib.tb_transfer_query(transfer, byref(state))
                    if deadline.is_over or state.status != tb_status.TB_OK:
                        raise

    def proceed(self) -> None:
        """Lets a receive with ``hold`` change the tensors, now or as soon as it is decided."""
        self._await_begun(Deadline(None))
        with self._use() as transfer:
            lib.tb_proceed(transfer)

    def state(self, pair: Pair | None = None) -> TransferState:
        """The state of the transfer, or of one pair's part of it."""
        if self._call is not None:
            try:
                if self._begin_fd() >= 0:
                    return _make_state(tb_transfer_state(), None)
            except Error as failure:
                return _make_state(tb_transfer_state(), failure)
        with self._use() as transfer:
            if pair is None:
                return _read_state(lambda out: lib.tb_transfer_query(transfer, out))
            with self._batch._own(pair)._use() as c_pair:
                return _read_state(lambda out: lib.tb_transfer_pair(transfer, c_pair, out))

    @property
    def version(self) -> int:
        """The version's number if it is committed, else 0."""
        return self.state().version

    def fileno(self) -> int:
        """A descriptor for select and poll, readable while no wait has returned the last event or failure."""
        if self._poll is None and (begins := self._begin_fd()) >= 0:
            self._poll = select.epoll()  # one descriptor for both: before it begins, and after
            self._poll.register(begins, select.EPOLLIN)
        if self._poll is not None:
            return self._poll.fileno()
        with self._use() as transfer:
            fd: int = lib.tb_transfer_fd(transfer)
        return fd

    def cancel(self) -> None:
        """Cancels it, here and at its peers; when this returns, the tensors are not used any more.

        If the senders have not begun, a receive is cancelled here only: the next one receives what they send then.
        """
        if self._call is not None and self._begin_fd() >= 0:
            self._call.close()
            return
        with self._use() as transfer:
            lib.tb_cancel(transfer)

    def _finish(self, cancels: bool = False) -> None:
        """Closes a transfer that has ended. A send whose tensors are released has still to be read by its receivers."""
        if self._call is not None and not self._is_inherited:
            try:
                if self._begin_fd() >= 0:
                    if cancels:
                        self.close()
                    return
            except Error:
                self.close()  # it has never begun
        if not self._is_inherited:
            self._land_if_done()
        if self.is_closed or self._is_inherited:
            self.close()
            return
        if not self._is_committed:
            with self._use() as transfer:
                self._is_committed = _look(transfer, tb_event.TB_COMMITTED, 0) == tb_status.TB_OK
        if self._is_committed:
            self.close()
            return
        state = self.state()
        has_ended = state.status != "ok" or "committed" in state.events
        if not has_ended and "released" in state.events:
            try:
                self.wait("committed")
            except Error:
                pass  # its receivers report that; the tensors were released
        elif not has_ended and not cancels:
            return  # the next one is refused, by name
        self.close()

    def _keep_version(self) -> None:
        """So that the batch knows the last version it sent."""
        if not (self.is_send and self._is_committed) or self._is_inherited:
            return
        with self._lock:
            if not self._handle:
                return
            state = tb_transfer_state()
            try:
                lib.tb_transfer_query(self._handle, byref(state))
            except Error:
                return  # an agent that does not answer
            self._batch._sent = max(self._batch._sent, state.version)

    def close(self) -> None:
        """Cancels it if it is under way."""
        if (call := self._call) is not None:
            call.close()
            self._call = None
        if self._poll is not None:
            self._poll.close()
        self._keep_version()
        if self._take():
            self._destroy_taken(lib.tb_transfer_destroy)
        if self._batch._transfers.get(self.is_send) is self:
            del self._batch._transfers[self.is_send]
