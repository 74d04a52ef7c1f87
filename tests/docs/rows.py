"""Compares rows of layouts and views, as pages have them, with what the library computes. usage: rows.py FILE

    shape 10  mesh=4 place=S0  0: 0-3  1: 3-6  ...        what ranks hold, for shapes of one dimension
    shape 8  mesh=2 place=S0  split(0,2,4)  2,4  mesh=... shape and layout of a view
    layout  mesh=2,4 place=...                            for the rows below it, of shape [48, 16] ("hidden" is 16)
    q  slice(0,0,32) split(0,2,4,4)  2,4,4,hidden  mesh=...

Columns are two spaces apart.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

import tensorbus as tb

HIDDEN = 16


def numbers(text: str) -> tuple[int, ...]:
    """A shape."""
    return tuple(HIDDEN if word == "hidden" else int(word) for word in text.split(","))


def held(layout: str, shape: tuple[int, ...], rank: int) -> str:
    """The segments of a rank."""
    return ",".join(f"{a}-{b}" for a, b in tb.layout(layout).local(shape, rank)[0]) or "none"


layout, wrong, count = "", [], 0
for line in Path(sys.argv[1]).read_text().splitlines():
    first, second, *rest = re.split(" {2,}", line.strip())
    if first == "layout":
        layout = second
    elif rest and ":" in rest[0]:
        shape = numbers(first.removeprefix("shape "))
        printed = [f"{rank}: {held(second, shape, rank)}" for rank in tb.layout(second).ranks]
        if printed != rest:
            wrong.append(f"{line}: {printed}")
    elif rest:
        is_view_of = first.startswith("shape ")
        view, shape, source = (
            (rest[0], numbers(first.removeprefix("shape ")), second) if is_view_of else (second, (48, HIDDEN), layout)
        )
        canonical, found = tb.apply_view(view, shape, source)
        if canonical != numbers(rest[-2]) or str(found) != str(tb.layout(rest[-1])):
            wrong.append(f"{line}: {canonical} {found}")
    count += 1
print("\n".join(wrong))
sys.exit(1 if wrong or not count else 0)
