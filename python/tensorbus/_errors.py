"""The exceptions. Each has the library's sentence, and fields for programs: ``status``, and whom it is about."""

from __future__ import annotations

import re

_PEER = re.compile(r"\brank (?P<rank>\d+) \((?P<group>.+?) (?P<seat>\d+)\)")
_SEAT = re.compile(r"\b(?P<group>[^\s:(),']+) (?P<seat>\d+) (?:is gone|is missing|has left|was lost)")


class Error(Exception):
    """What tensorbus reports. ``str()`` is one sentence that says what is wrong and where.

    ``status`` is the name of the C library's status, such as ``"timeout"``. Where the sentence names a process,
    ``rank`` is its rank on the bus, ``group`` its group and ``seat`` its index there; else these are None.

    >>> import tensorbus as tb
    >>> try:
    ...     tb.layout("mesh=4 place=S0,S1")
    ... except tb.Error as error:
    ...     print(error.status)
    invalid
    """

    status = "error"

    def __init__(self, sentence: str, status: str | None = None) -> None:
        super().__init__(sentence)
        if status is not None:
            self.status = status
        found = _PEER.search(sentence) or _SEAT.search(sentence)
        named = found.groupdict() if found else {}
        self.rank: int | None = int(named["rank"]) if "rank" in named else None
        self.group: str | None = named.get("group")
        self.seat: int | None = int(named["seat"]) if named else None


class Invalid(Error, ValueError):
    """An argument is wrong."""

    status = "invalid"


class Refused(Error):
    """Well formed, but against a rule: a cast to 8 bits that nobody asked for, a forked child."""

    status = "refused"


class Timeout(Error, TimeoutError):
    """Nothing happened before the deadline. The sentence names who is missing."""

    status = "timeout"


class PeerLost(Error, ConnectionError):
    """A process, or the connection with it, is gone: ``rank``, ``group`` and ``seat`` say which."""

    status = "lost"


class Denied(Error, PermissionError):
    """Not allowed: a wrong token, another user's process."""

    status = "denied"


class Conflict(Error):
    """Somebody else was first, or says something else."""

    status = "conflict"


class Cancelled(Error):
    """It was given up, here or by a peer."""

    status = "cancelled"


class InDoubt(Error):
    """Whether the version is committed is not known; the next transfer of the batch finds out."""

    status = "in doubt"


class Superseded(Error):
    """The version was overtaken: its receivers are offered a higher one by others."""

    status = "superseded"


class OutOfMemory(Error, MemoryError):
    """An allocation failed."""

    status = "no memory"


_BY_STATUS: dict[int, tuple[type[Error], str | None]] = {
    -1: (Invalid, None),
    -2: (OutOfMemory, None),
    -3: (Invalid, "too big"),
    -4: (Refused, None),
    -5: (Error, "io"),
    -6: (Error, "internal"),
    -7: (Timeout, None),
    -8: (PeerLost, None),
    -9: (Denied, None),
    -10: (Conflict, None),
    -11: (Cancelled, None),
    -12: (InDoubt, None),
    -13: (Superseded, None),
}


def make(status: int, sentence: str) -> Error:
    """The exception for a status of the C library."""
    cls, name = _BY_STATUS.get(status, (Error, f"status {status}"))
    return cls(sentence, name)
