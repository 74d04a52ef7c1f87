"""For programs that use Megatron-LM's resharding: its copy service, its planner and its refit, by tensorbus.

``swap_model_weights`` and ``CopyService`` go where those of ``megatron.core.resharding`` do; ``refit`` is the former
without what has no meaning here. docs/coming-from.md has a complete program.
"""

from ._planner import PlanError, build_local_reshard_plan, build_plan_from_rosters, index_metadata_rosters
from ._refit import (
    Refit,
    clear_all_caches,
    clear_refits,
    prepare_swap_model_weights,
    refit,
    swap_model_weights,
)
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
    "clear_all_caches",
    "clear_refits",
    "index_metadata_rosters",
    "match_local_ops_by_task_id",
    "prepare_swap_model_weights",
    "refit",
    "swap_model_weights",
]
