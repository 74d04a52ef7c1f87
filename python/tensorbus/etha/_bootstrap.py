"""A client by the environment: which agent, and where it is."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from dataclasses import dataclass

from ._client import TensorBusClient

_PR_SET_PTRACER, _ANY = 0x59616D61, ctypes.c_ulong(-1)


@dataclass
class BootstrapInfo:
    """How a client was found."""

    agent_rank: int
    global_rank: int
    rank_offset: int | None  # None: AGENT_RANK was set
    command_queue_path: str  # the agent's socket
    state_path: str
    method: str  # "direct": AGENT_RANK; "offset": RANK + AGENT_RANK_OFFSET


def bootstrap_client(
    path_naming_fn: Callable[[int], tuple[str, str]] | None = None,
    connection_timeout: float = 30.0,
) -> tuple[TensorBusClient, BootstrapInfo]:
    """The client of agent AGENT_RANK, or else RANK + AGENT_RANK_OFFSET.

    ``path_naming_fn`` returns the two paths of an agent by its rank; by default, /tmp/agent_rank{N}_command.lmdb and
    /tmp/agent_rank{N}_state.lmdb.
    """
    ctypes.CDLL(None).prctl(_PR_SET_PTRACER, _ANY, 0, 0, 0)  # the agent may copy this process's memory
    global_rank = int(os.environ["RANK"])
    rank_offset: int | None = None
    if "AGENT_RANK" in os.environ:
        agent_rank, method = int(os.environ["AGENT_RANK"]), "direct"
    else:
        rank_offset = int(os.environ.get("AGENT_RANK_OFFSET", 0))
        agent_rank, method = global_rank + rank_offset, "offset"
    if path_naming_fn is None:
        command_path, state_path = (f"/tmp/agent_rank{agent_rank}_{kind}.lmdb" for kind in ("command", "state"))
    else:
        command_path, state_path = path_naming_fn(agent_rank)
    client = TensorBusClient(agent_rank, command_path, state_path, connection_timeout)
    return client, BootstrapInfo(agent_rank, global_rank, rank_offset, command_path, state_path, method)
