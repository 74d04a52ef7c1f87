"""The ``tensorbus`` command of the package: executes the program inside of it; ``explain`` is Python."""

from __future__ import annotations

import os
import sys
from typing import NoReturn

from ._c import find


def main() -> NoReturn:
    """Becomes the program, with this process's arguments."""
    if sys.argv[1:2] == ["explain"]:
        from .explain import main as explain

        sys.exit(explain(sys.argv[2:]))
    program = find("tensorbus")
    sys.stdout.flush()
    os.execv(program, ["tensorbus", *sys.argv[1:]])
