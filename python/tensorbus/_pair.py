"""Pairs: two groups that exchange tensors."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ._c import lib
from ._handle import Handle
from ._layout import Layout, layout

if TYPE_CHECKING:
    from ._bus import Bus


class Pair(Handle):
    """Two groups that exchange tensors; made by ``Bus.pair``."""

    def __init__(
        self, bus: Bus, name: str, group: str, remote: str, text: str | Layout | None, index: int, size: int
    ) -> None:
        super().__init__(f"pair '{name}'")
        self._bus = bus
        self.name, self.group, self.remote = name, group, remote
        self.index, self.size = index, size  # this process's seat in `group`
        self.is_seat_to_seat = isinstance(text, str) and text == "none"
        self.layout = None if text is None or self.is_seat_to_seat else layout(text)

    def _c_layout(self) -> bytes | None:
        """Where every tensor brings its own layout, the pair's is not used; but all ranks have to have the same."""
        if self.is_seat_to_seat:
            return None
        return str(self.layout).encode() if self.layout else f"mesh={self.size} place=R".encode()

    def close(self) -> None:
        """Destroys the pair; batches can't be transferred through it any more."""
        if self._take():
            self._destroy(self._bus, lib.tb_pair_destroy, None)
        if self in self._bus._pairs:
            self._bus._pairs.remove(self)
