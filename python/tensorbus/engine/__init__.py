"""Live inference engines: where checkpoint tensors lie in an engine's parameters, as its own loaders say, and updates.

``trace`` is for every module that has a ``load_weights``; ``Sender`` and ``Receiver`` are the two ends of updates.
"""

from ._receiver import Pause, Receiver
from ._record import Piece
from ._sender import Sender
from ._source import Source, from_checkpoint, from_module, read_headers
from ._targets import Target, Targets, make_targets
from ._trace import Checkpoint, Module, Trace, apply, locate, trace

__all__ = [
    "Checkpoint",
    "Module",
    "Pause",
    "Piece",
    "Receiver",
    "Sender",
    "Source",
    "Target",
    "Targets",
    "Trace",
    "apply",
    "from_checkpoint",
    "from_module",
    "locate",
    "make_targets",
    "read_headers",
    "trace",
]
