"""Live inference engines: where the checkpoint's tensors lie in an engine's parameters, as its own loaders say."""

from ._record import Piece
from ._targets import Target, make_targets
from ._trace import Checkpoint, Module, Trace, apply, locate, trace

__all__ = ["Checkpoint", "Module", "Piece", "Target", "Trace", "apply", "locate", "make_targets", "trace"]
