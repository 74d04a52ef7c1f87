"""What all objects with a C handle have in common: who may use it, and when it goes."""

from __future__ import annotations

import asyncio
import collections
import operator
import os
import select
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from ctypes import c_void_p
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from ._errors import Cancelled, Invalid, Refused

if TYPE_CHECKING:
    from ._call import Call

_H = TypeVar("_H", bound="Handle")

# How long a wait sleeps before it looks again. Descriptors wake it; but of several threads that wait for one transfer,
# the first that looks takes the news from the others, and one may close what another waits for.
_SLICE_S = 0.2

_nforks = 0


def _count_fork() -> None:
    global _nforks
    _nforks += 1


os.register_at_fork(after_in_child=_count_fork)


def forks() -> int:
    """How many forks lie between the first process that imported this and this one."""
    return _nforks


class Handle:
    """An object of the C library. Calls on it are made by one thread at a time; waits are not calls.

    In a forked child everything but ``close`` is refused, and ``close`` does nothing.
    """

    def __init__(self, what: str) -> None:
        self._what = what
        self._handle = c_void_p()
        self._taken: Iterator[c_void_p] = iter(())  # to be destroyed, and used no more
        self._lock = threading.RLock()
        self._calls: list[Call[Any]] = []  # that use it, and are under way
        self._ending: list[threading.Thread] = []  # that still use it, for what was given up
        self._made_by = os.getpid()
        self._forks_before = _nforks

    @property
    def _is_inherited(self) -> bool:
        return self._forks_before != _nforks

    @property
    def is_closed(self) -> bool:
        """Whether it was closed."""
        return not self._handle

    def _check_ours(self) -> None:
        """Refuses what was made before a fork; its lock may be held by a thread that this process does not have."""
        if self._forks_before != _nforks:
            raise Refused(
                f"this {self._what} belongs to process {self._made_by}; a forked child can't use it: join again, or "
                "start children by spawn"
            )

    def _get(self, again: bool = False) -> c_void_p:
        """The handle. With the lock held. ``again``: a wait had it before, and it may have been closed meanwhile."""
        if not self._handle:
            raise self._closed_meanwhile() if again else Invalid(f"{self._what} is closed")
        return self._handle

    def _closed_meanwhile(self) -> Cancelled:
        return Cancelled(f"{self._what} was closed while a call waited for it")

    @contextmanager
    def _use(self, again: bool = False) -> Iterator[c_void_p]:
        """The handle, for a call. Where microseconds count, callers do the same by hand."""
        self._check_ours()
        with self._lock:
            yield self._get(again)

    def _take(self) -> bool:
        """From now on nobody gets the handle. Whether it is still to be destroyed.

        An exception such as KeyboardInterrupt may come between any two steps: what was taken and not destroyed is so by
        the next ``close``.
        """
        if self._is_inherited:
            return False
        for call in list(self._calls):
            call.close()
        with self._lock:
            if self._handle:
                self._taken, self._handle = iter((self._handle,)), c_void_p()
        return operator.length_hint(self._taken) > 0

    def _destroy_taken(self, destroy: Callable[..., object]) -> None:
        """Destroys what was taken, once. No signal is handled between the two halves of that, taking and calling."""
        collections.deque(map(destroy, self._taken), maxlen=0)

    def _destroy(self, owner: Handle | None, destroy: Callable[..., object], kept: object) -> None:
        """Destroys it after what still uses it: apart if there is any. ``kept`` stays until then."""
        users = [t for t in self._ending + (owner._ending if owner else []) if t.is_alive()]
        if not users:
            self._destroy_taken(destroy)
            return

        def body() -> None:
            for user in users:
                user.join()
            self._destroy_taken(destroy)
            del kept_until_then[:]

        kept_until_then = [kept]
        finish_apart(owner or self, body)

    def close(self) -> None:
        """Gives it up. May be called again."""
        raise NotImplementedError

    def __enter__(self: _H) -> _H:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def __reduce__(self) -> NoReturn:
        raise TypeError(f"this {self._what} belongs to its process, and can't be pickled; join in the other process")

    def __repr__(self) -> str:
        return f"<tensorbus.{type(self).__name__} {self._what}{', closed' if self.is_closed else ''}>"


def finish_apart(owner: Handle, body: Callable[[], object]) -> threading.Thread:
    """Calls what may wait for a store or peer that is silent. It ends by its own deadline; nobody waits for that."""
    thread = threading.Thread(target=body, daemon=True)
    owner._ending = [t for t in owner._ending if t.is_alive()] + [thread]
    thread.start()
    return thread


def is_readable(fd: int, milliseconds: float = 0) -> bool:
    """Whether the descriptor is readable, or becomes so meanwhile. Signals are handled."""
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    return bool(poll.poll(milliseconds))


def sleep_until_readable(fd: int, seconds: float | None = None) -> None:
    """Sleeps until the descriptor is readable, for so long at most, or a while. Signals are handled meanwhile."""
    is_readable(fd, 1000 * (_SLICE_S if seconds is None else min(seconds, _SLICE_S)))


def make_interruptible(call: Callable[[], object], cancel: Callable[[], object]) -> None:
    """Makes a call that has no descriptor. In the main thread, an exception such as KeyboardInterrupt cancels it."""
    if threading.current_thread() is not threading.main_thread():
        call()  # signals are handled by another thread
        return
    done = threading.Event()
    failures: list[BaseException] = []

    def body() -> None:
        try:
            call()
        except BaseException as error:
            failures.append(error)
        finally:
            done.set()

    threading.Thread(target=body, daemon=True).start()
    interrupt: BaseException | None = None
    is_done = False
    while not is_done:
        try:
            is_done = done.wait(_SLICE_S if interrupt is None else 0.01)
            if interrupt is not None and not is_done:
                cancel()  # again and again: it may not have begun yet
        except BaseException as error:  # a second one does not leave it alone, either: it uses the program's memory
            interrupt = interrupt or error
            cancel()
    if interrupt is not None:
        raise interrupt
    if failures:
        raise failures[0]


def _resolve(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


async def readable(fd: int) -> None:
    """The same in asyncio. On a copy of the descriptor: others may close it, or wait for it, too."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[None] = loop.create_future()
    copy = os.dup(fd)
    try:
        loop.add_reader(copy, _resolve, future)
        await asyncio.wait([future], timeout=_SLICE_S)
    finally:
        loop.remove_reader(copy)
        os.close(copy)


class Deadline:
    """A time that a wait ends at; None: never."""

    def __init__(self, seconds: float | None) -> None:
        self._at = None if seconds is None else time.monotonic() + seconds

    @property
    def left(self) -> float | None:
        """Seconds until then, at least 0."""
        return None if self._at is None else max(0.0, self._at - time.monotonic())

    @property
    def is_over(self) -> bool:
        """Whether it has come."""
        return self.left == 0.0
