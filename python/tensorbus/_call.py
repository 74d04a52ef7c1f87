"""Calls of the library that wait for others: joining, pairing, registering."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Coroutine, Generator, Iterator
from contextlib import contextmanager
from ctypes import byref, c_void_p
from typing import Any, Generic, ParamSpec, TypeVar

from ._c import lib
from ._errors import Cancelled
from ._handle import Handle, finish_apart, is_readable, readable, sleep_until_readable

_T = TypeVar("_T", bound=Handle)
_P = ParamSpec("_P")
_PATIENCE_S = 0.5  # with a call that was given up


class Call(Handle, Generic[_T]):
    """A thread of the library's makes the call; this waits for its descriptor, and can be awaited.

    An exception, such as KeyboardInterrupt or the cancellation of a task, gives the call up, and so does closing its
    owner, the bus or the batch. ``out`` is where the handle goes that the call makes; ``done`` is called at its end.
    """

    def __init__(
        self,
        what: str,
        owner: Handle | None,
        result: _T,
        out: c_void_p | None,
        done: Callable[[], None],
        begin: Callable[..., None],
        *arguments: Any,
    ) -> None:
        super().__init__(what)
        self._owner, self._result, self._done = owner, result, done
        self._out = None if out is None else byref(out)
        self._begin, self._arguments = begin, arguments

    def start(self) -> None:
        """Begins it, where whatever interrupts that gives it up."""
        if self._owner is None:
            self._begin(*self._arguments, byref(self._handle))
            return
        with self._owner._use() as owner:
            self._owner._calls.append(self)
            self._begin(owner, *self._arguments, byref(self._handle))

    def look(self) -> int:
        """-1 if it has ended well; raises its failure; else the descriptor."""
        if self.is_closed:
            raise Cancelled(f"{self._what} was given up: {self._owner!r} was closed")
        with self._use() as call:
            fd: int = lib.tb_call_fd(call)
            if not is_readable(fd):
                return fd
            lib.tb_call_result(call, self._out)
            self._done()
            return -1

    def wait(self, sleep: Callable[[int], object] = sleep_until_readable) -> _T:
        """Waits until it has ended, by its own deadline at the latest. ``sleep`` is given the descriptor each time."""
        with self._giving_up():
            self.start()
            while (fd := self.look()) >= 0:
                sleep(fd)
        return self._result

    def __await__(self) -> Generator[Any, None, _T]:
        return self._await().__await__()

    async def _await(self) -> _T:
        with self._giving_up():
            self.start()
            while (fd := self.look()) >= 0:
                await readable(fd)
        return self._result

    @contextmanager
    def _giving_up(self) -> Iterator[None]:
        """Closes it in the end, and what it has made if nobody gets that."""
        try:
            try:
                yield
            finally:
                self.close()
        except BaseException:
            if self._out is not None:
                self._result.close()
            raise

    def close(self) -> None:
        """Gives it up if it is under way. It ends soon, but for one whose store does not answer."""
        if self._is_inherited:
            return
        with self._lock:
            is_done = self._owner is None or not self._handle or is_readable(lib.tb_call_fd(self._handle))
        if self._take():
            if is_done or self._owner is None:
                self._destroy_taken(lib.tb_call_destroy)
            else:
                finish_apart(self._owner, lambda: self._destroy_taken(lib.tb_call_destroy)).join(_PATIENCE_S)
        if self._owner is not None and self in self._owner._calls:
            self._owner._calls.remove(self)


def waiting(name: str, begin: Callable[_P, Call[_T]]) -> Callable[_P, _T]:
    """A function that waits for the call that ``begin`` makes; it has the same parameters and documentation."""

    @functools.wraps(begin)
    def wait(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        return begin(*args, **kwargs).wait()

    _name(wait, begin, name)
    begin.__qualname__ = wait.__qualname__  # as a TypeError calls it
    return wait


def awaiting(name: str, begin: Callable[_P, Call[_T]]) -> Callable[_P, Coroutine[Any, Any, _T]]:
    """The same for asyncio."""

    @functools.wraps(begin)
    async def wait(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        return await begin(*args, **kwargs)

    wait.__doc__ = f"``{name}`` in asyncio."
    _name(wait, begin, f"{name}_async")
    return wait


def _name(function: Any, begin: Callable[..., Any], name: str) -> None:
    """As help() shows it: what the call makes is what the function returns."""
    signature = inspect.signature(begin)
    made = str(signature.return_annotation).removeprefix("Call[").removesuffix("]")
    function.__name__, function.__qualname__ = name, f"{begin.__qualname__.rpartition('.')[0]}.{name}".lstrip(".")
    function.__signature__ = signature.replace(return_annotation=made)
