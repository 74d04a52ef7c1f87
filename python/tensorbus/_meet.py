"""The bus of a process group: the ranks tell each other over torch.distributed where they meet."""

from __future__ import annotations

import contextlib
import secrets
import socket
import tempfile
import weakref
from typing import Any

import tensorbus as tb

RANKS = "ranks"  # the group of all; seats are the ranks of the process group


def gather(mine: Any, group: Any) -> list[Any]:
    """What every rank of the process group has, by rank."""
    import torch.distributed as dist

    size = dist.get_world_size() if group is None else group.size()
    everyone: list[Any] = [None] * size
    dist.all_gather_object(everyone, mine, group=group)
    return everyone


def join(group: Any, rank: int, size: int, timeout: float | None) -> tb.Bus:
    """Takes seat ``rank`` of the bus of this process group; all of its ranks call it.

    Rank 0 chooses the place, and the others learn it by a collective: a socket in a folder of its own where all are on
    one machine, else a port of rank 0's machine.
    """
    name = socket.gethostname()
    folder = offer = None
    if rank == 0:
        folder = tempfile.TemporaryDirectory(prefix="tensorbus-")
        offer = (f"unix:{folder.name}/bus", f"tcp://{_address(name)}:{_free_port()}", secrets.token_hex(16))
    told = gather((name, offer), group)
    local, remote, token = told[0][1]
    url = local if len({host for host, _ in told}) == 1 else remote
    bus = tb.join(url, RANKS, rank, size, token=token, timeout=timeout)
    if folder is not None:
        weakref.finalize(bus, folder.cleanup)
    return bus


def _address(name: str) -> str:
    with contextlib.suppress(OSError):
        return socket.gethostbyname(name)
    return name


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        port: int = probe.getsockname()[1]
        return port
