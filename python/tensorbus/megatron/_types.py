"""The objects of Megatron-LM's interface: its own, or, where megatron-core is not installed, the same fields."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

HAS_MEGATRON = False
if not TYPE_CHECKING:
    try:
        from megatron.core.resharding.copy_services.base import CopyService as BaseService
        from megatron.core.resharding.copy_services.base import RecvOp, SendOp
        from megatron.core.resharding.utils import ParameterMetadata, ReshardPlan, TransferOp

        HAS_MEGATRON = True
    except ModuleNotFoundError as missing:
        if missing.name is None or missing.name.split(".")[0] != "megatron":
            raise  # it is installed, and lacks something that it needs

if TYPE_CHECKING or not HAS_MEGATRON:

    class BaseService:
        """What every copy service of Megatron-LM has."""

        requires_process_group_barrier = True

        def __init__(self, group: Any = None) -> None:
            import torch.distributed as dist

            self.group = group
            self.rank: int = dist.get_rank() if group is None else group.rank()
            self.world_size: int = dist.get_world_size() if group is None else group.size()

    @dataclass
    class SendOp:
        """A tensor for another rank."""

        task_id: int | None
        tensor: Any
        dest_rank: int

    @dataclass
    class RecvOp:
        """A tensor from another rank."""

        task_id: int | None
        tensor: Any
        src_rank: int

    @dataclass
    class TransferOp:
        """A slice that this rank sends or receives."""

        param_name: str
        peer_rank: int
        is_send: bool
        my_slice: tuple[slice, ...]
        peer_slice: tuple[slice, ...]
        task_id: int | None = None

    @dataclass
    class ReshardPlan:
        """What one rank sends and receives."""

        send_ops: list[TransferOp]
        recv_ops: list[TransferOp]
        transform: Any = None
        buffer_dtypes: dict[str, Any] | None = None

    @dataclass
    class ParameterMetadata:
        """A rank's part of a parameter, and who has the others."""

        name: str
        shape: tuple[int, ...]
        dtype: Any
        element_size: int
        is_tp: bool = False
        partition_dim: int = 0
        partition_stride: int = 1
        partition_sizes: list[int] | None = None
        is_ep: bool = False
        num_experts: int | None = None
        owner_rank: int = -1
        tensor_parallel_group_ranks: list[int] | None = None
        expert_parallel_group_ranks: list[int] | None = None
        data_parallel_group_ranks: list[int] | None = None
        pipeline_parallel_group_ranks: list[int] | None = None
        resolved_name: str | None = None
        global_expert_index: int | None = None
