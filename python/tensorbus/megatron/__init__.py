"""For programs that use Megatron-LM's resharding: its copy service, its planner and its refit, by tensorbus.

``CopyService`` goes where ``megatron.core.resharding`` takes one of its own; ``refit`` takes the place of
``swap_model_weights``. docs/coming-from.md has both in a complete program.
"""

from ._planner import PlanError, build_local_reshard_plan, build_plan_from_rosters, index_metadata_rosters
from ._refit import Refit, clear_refits, refit
from ._service import CopyService, match_local_ops_by_task_id
from ._types import ParameterMetadata, RecvOp, ReshardPlan, SendOp, TransferOp

__all__ = [
    "CopyService",
    "ParameterMetadata",
    "PlanError",
    "RecvOp",
    "Refit",
    "ReshardPlan",
    "SendOp",
    "TransferOp",
    "build_local_reshard_plan",
    "build_plan_from_rosters",
    "clear_refits",
    "index_metadata_rosters",
    "match_local_ops_by_task_id",
    "refit",
]
