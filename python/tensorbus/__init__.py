"""tensorbus: move distributed tensors between independently launched programs whose layouts differ.

>>> import tensorbus as tb
>>> tb.plan("mesh=4 place=S0", "mesh=2,2 place=R,S1", (6144, 4096), "bf16").stats().nchunks
16

docs/python.md is the tutorial, and tells every call.
"""

from ._batch import Batch, BatchState
from ._bus import Bus, Group, Plans, join, join_async
from ._c import lib as _lib
from ._copy import CopyService, copy_service
from ._errors import (
    Cancelled,
    Conflict,
    Denied,
    Error,
    InDoubt,
    Invalid,
    OutOfMemory,
    PeerLost,
    Refused,
    Superseded,
    Timeout,
)
from ._hash import hash_tensor
from ._ir import IR, TensorSpec
from ._layout import Layout, Plan, PlanStats, Route, layout, plan
from ._log import log
from ._memory import Memory, empty
from ._module import share
from ._names import Match, Names, Part, apply_view, match_names
from ._pair import Pair
from ._slices import PlanCounts, PlanParam, SliceOp
from ._torch import torch_allocator
from ._transfer import Transfer, TransferState

__version__: str = _lib.tb_version_string().decode()

__all__ = [
    "IR",
    "Batch",
    "BatchState",
    "Bus",
    "Cancelled",
    "Conflict",
    "CopyService",
    "Denied",
    "Error",
    "Group",
    "InDoubt",
    "Invalid",
    "Layout",
    "Match",
    "Memory",
    "Names",
    "OutOfMemory",
    "Pair",
    "Part",
    "PeerLost",
    "Plan",
    "PlanCounts",
    "PlanParam",
    "PlanStats",
    "Plans",
    "Refused",
    "Route",
    "SliceOp",
    "Superseded",
    "TensorSpec",
    "Timeout",
    "Transfer",
    "TransferState",
    "apply_view",
    "copy_service",
    "empty",
    "hash_tensor",
    "join",
    "join_async",
    "layout",
    "log",
    "match_names",
    "plan",
    "share",
    "torch_allocator",
]
