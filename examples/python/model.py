"""The model of trainer.py and engine.py. Version n of its weights is known, so that the engine can compare."""

import torch
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor


class Block(nn.Module):
    """A layer of two matrices."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Adds what it makes of x."""
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Model(nn.Module):
    """Tokens in, logits out; the embedding is tied to the head."""

    def __init__(self, width: int = 96, vocabulary: int = 1001) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList([Block(width) for _ in range(4)])
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """The logits."""
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def version(number: int) -> Model:
    """The whole model as version `number` of the weights has it."""
    torch.manual_seed(number)
    return Model()


@torch.no_grad()
def load(model: nn.Module, number: int) -> None:
    """Sets this rank's part of each parameter: what training would do."""
    whole = dict(version(number).named_parameters())
    for name, p in model.named_parameters():
        if isinstance(p, DTensor):
            p.copy_(distribute_tensor(whole[name], p.device_mesh, p.placements, src_data_rank=None))
        else:
            p.copy_(whole[name])


@torch.no_grad()
def is_version(model: nn.Module, number: int) -> bool:
    """Whether all parameters, gathered, are those of the version. All ranks call it."""
    whole = dict(version(number).named_parameters())
    found = {name: p.full_tensor() if isinstance(p, DTensor) else p for name, p in model.named_parameters()}
    return found.keys() == whole.keys() and all(torch.equal(found[name], whole[name]) for name in whole)
