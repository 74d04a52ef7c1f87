"""What the library tells of connections that were refused or lost, and the like."""

from __future__ import annotations

import os
from typing import Any

from . import _values
from ._c import lib, tb_log_level
from ._errors import Invalid

_LEVELS = {level.name.removeprefix("TB_LOG_").lower(): level for level in tb_log_level}
_fd = -1  # a copy of the file's


def log(level: str = "warn", file: Any = 2) -> None:
    """Has the library write its messages up to ``level`` to a file: "off", "error", "warn", "info" or "debug".

    ``file`` is a descriptor, by default standard error, or what has a ``fileno()``. Each message is one line. Until
    this is called, there are none.

    >>> import os, tensorbus as tb
    >>> reader, writer = os.pipe()
    >>> tb.log("info", writer)
    >>> tb.log("off")
    """
    global _fd
    number = _values.choice("level", level, _LEVELS)
    copy = -1
    if number != tb_log_level.TB_LOG_OFF:
        try:
            copy = os.dup(file if isinstance(file, int) else file.fileno())
        except (AttributeError, OSError, OverflowError, TypeError, ValueError) as error:
            raise Invalid(f"file must be a descriptor or an open file, not {file!r}: {error}") from None
    lib.tb_log_set_fd(number, copy)  # the library uses the old one no more when this returns
    before, _fd = _fd, copy
    if before >= 0:
        os.close(before)
