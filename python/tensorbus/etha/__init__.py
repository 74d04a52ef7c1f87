"""The interface of Etha's tensor bus, over tensorbus: change the import, and the agents and clients are ours.

``TensorBusAgent`` is ``tensorbus agent``; clients reach it by a Unix socket whose path is what Etha calls that of the
command queue. docs/coming-from.md tells what is different. Needs PyTorch.
"""

from ._agent import TensorBusAgent
from ._bootstrap import BootstrapInfo, bootstrap_client
from ._client import BatchHandler, Completion, TensorBusClient

__all__ = [
    "BatchHandler",
    "BootstrapInfo",
    "Completion",
    "TensorBusAgent",
    "TensorBusClient",
    "bootstrap_client",
]
