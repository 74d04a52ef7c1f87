"""SGLang's weight updates by tensorbus: ``load`` runs in SGLang, ``Trainer`` in the trainer; docs/engines.md tells how.

``load`` is what ``--custom-weight-loader tensorbus.sglang.load`` names. Only it needs SGLang.
"""

from ._load import load
from ._trainer import Trainer

__all__ = ["Trainer", "load"]
