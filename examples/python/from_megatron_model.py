"""The models of from_megatron_theirs.py and from_megatron_ours.py, which describe themselves as Megatron's do."""

from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch import nn

ROWS = 6


class Model(nn.Module):
    """Two matrices, whose rows are cut over the ranks of ``tp``."""

    def __init__(self, tp: dist.ProcessGroup, dp: dist.ProcessGroup) -> None:
        super().__init__()
        self.config = SimpleNamespace(num_moe_experts=None)
        self.pg_collection = SimpleNamespace(tp=tp, dp=dp, ep=None, pp=None)
        self.first = tp.rank() * (ROWS // tp.size())
        for name in "up", "down":
            weight = nn.Parameter(torch.full((ROWS // tp.size(), 4), -1.0), requires_grad=False)
            weight.tensor_model_parallel, weight.partition_dim, weight.partition_stride = True, 0, 1
            self.register_parameter(name, weight)

    def expected(self, version: int) -> list[torch.Tensor]:
        """Version n of this rank's part of both matrices."""
        rows = torch.arange(self.first, self.first + len(self.up), dtype=torch.float32)
        return [(rows * 10)[:, None] + torch.arange(4.0) + 100 * version + 1000 * i for i in range(2)]

    def fill(self, version: int) -> None:
        """Sets the weights to a version."""
        for weight, values in zip(self.parameters(), self.expected(version), strict=True):
            weight.copy_(values)


def make() -> tuple[Model, Model]:
    """A model that is cut over two ranks, and one that each of them has as a whole."""
    rank = dist.get_rank()
    both = dist.new_group([0, 1])
    alone = [dist.new_group([0]), dist.new_group([1])][rank]
    return Model(tp=both, dp=alone), Model(tp=alone, dp=both)


def report(target: Model, version: int) -> None:
    """Tells whether the version has arrived."""
    same = all(torch.equal(a, b) for a, b in zip(target.parameters(), target.expected(version), strict=True))
    print(f"rank {dist.get_rank()}: version {version}, {'equal' if same else 'wrong'}", flush=True)
