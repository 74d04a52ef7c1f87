"""Live inference engines: where checkpoint tensors lie in an engine's parameters, as its own loaders say, and updates.

``trace`` is for every module that has a ``load_weights``; ``Sender`` and ``Receiver`` are the two ends of updates.
"""

from ._megatron import from_megatron
from ._receiver import Pause, Receiver
from ._record import Piece
from ._sender import Sender, pass_on
from ._source import Source, as_source, from_checkpoint, from_module, from_torchtitan, read_headers
from ._targets import Target, Targets, make_targets
from ._trace import Checkpoint, Module, Trace, apply, locate, trace
from ._verify import Difference, Hashes, Verified, compare, hash_boxes, verify

__all__ = [
    "Checkpoint",
    "Difference",
    "Hashes",
    "Module",
    "Pause",
    "Piece",
    "Receiver",
    "Sender",
    "Source",
    "Target",
    "Targets",
    "Trace",
    "Verified",
    "apply",
    "as_source",
    "compare",
    "from_checkpoint",
    "from_megatron",
    "from_module",
    "from_torchtitan",
    "hash_boxes",
    "locate",
    "make_targets",
    "pass_on",
    "read_headers",
    "trace",
    "verify",
]
