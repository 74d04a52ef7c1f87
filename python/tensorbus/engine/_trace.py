"""Tracing an engine: which boxes of which checkpoint tensors its loaders copy to which parameters."""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from .._errors import Invalid
from ._record import Piece, Recording, Slot, record

Checkpoint = Mapping[str, tuple[tuple[int, ...], Any]]  # shape and torch.dtype by name


@dataclass(slots=True)
class Module:
    """A module that has parameters of its own, and how its weights get there."""

    name: str
    nbytes: int
    sources: set[str]  # the checkpoint tensors that it is loaded from
    pieces: list[Piece]  # none if it is loaded by the engine's own loader
    reason: str | None  # why it is; None: it goes the direct way


@dataclass(slots=True)
class Trace:
    """What one rank of an engine wants of a checkpoint. It can be pickled, for the other ranks."""

    shapes: dict[str, tuple[int, ...]]  # of all checkpoint tensors
    dtypes: dict[str, Any]
    modules: dict[str, Module] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)  # tensors with which the loader has failed, and its error

    @property
    def used(self) -> set[str]:
        """The checkpoint tensors that this rank wants something of."""
        return set(self.failed).union(*(module.sources for module in self.modules.values()))

    @property
    def direct_share(self) -> float:
        """The share of the modules' bytes that goes the direct way."""
        total = sum(m.nbytes for m in self.modules.values())
        return sum(m.nbytes for m in self.modules.values() if m.reason is None) / total if total else 1.0

    def report(self) -> str:
        """The direct share, and why each of the other modules is loaded by the engine's own loader."""
        direct = sum(m.reason is None for m in self.modules.values())
        lines = [f"{direct} of {len(self.modules)} modules, {self.direct_share:.1%} of the bytes, go the direct way"]
        lines += [f"{m.name}: {m.reason}" for m in self.modules.values() if m.reason is not None]
        return "\n".join(lines + [f"checkpoint tensor '{name}': {why}" for name, why in self.failed.items()])


def trace(
    model: Any,
    checkpoint: Checkpoint,
    *,
    restored: Callable[[Any], contextlib.AbstractContextManager[Any]] | None = None,
    process: Callable[[Any], None] | None = None,
    loaded: Mapping[str, Any] | None = None,
) -> Trace:
    """Drives ``model.load_weights`` once with recording tensors. The model's weights stay as they are.

    ``checkpoint`` has shapes and dtypes of the checkpoint's tensors. A model whose weights were converted after loading
    is put back by ``restored``, a context, into the form that its loaders want, where parameters may be meta tensors.
    ``process`` is what the engine does with one module after loading. ``loaded`` are the tensors that the model was
    loaded from: a module whose bytes are not those that the trace makes of them was changed by something else.

    A module goes the direct way if each element of its parameters is copied from the checkpoint once, or is a constant;
    if loading random bits by the loader and by the trace gives the same bytes; and if ``process`` then leaves memory,
    strides and bytes as they are. For every other module the reason is told.
    """
    if not callable(getattr(model, "load_weights", None)):
        raise Invalid(f"{type(model).__name__} has no load_weights")
    live = {slot.name: slot.tensor for slot in _list_slots(model)}
    made = Trace(
        {name: tuple(shape) for name, (shape, _) in checkpoint.items()},
        {name: d for name, (_, d) in checkpoint.items()},
    )
    with torch.no_grad(), restored(model) if restored is not None else contextlib.nullcontext():
        slots = _list_slots(model)
        device = next((t.device for t in live.values()), torch.device("cpu"))
        made.failed = _drive(model, checkpoint, slots, device)
        written = {slot.module for slot in slots if slot.sources}
        modules = dict(model.named_modules())
        for name in sorted(written):
            own = [s for s in slots if s.module == name and (isinstance(s.tensor, torch.nn.Parameter) or s.sources)]
            sources = set[str]().union(*(slot.sources for slot in own))
            reason = _why_not(own, live)
            reason = reason or _try(model, modules[name], own, checkpoint, sources, device, process)
            if reason is None and loaded is not None:
                reason = _compare(own, live, loaded)
            made.modules[name] = Module(
                name,
                sum(slot.tensor.numel() * slot.tensor.element_size() for slot in own),
                sources,
                [] if reason else [piece for slot in own for piece in slot.pieces],
                reason,
            )
    return made


def _list_slots(model: Any) -> list[Slot]:
    """Parameters and buffers; of those that are tied the first."""
    slots: dict[int, Slot] = {}
    for path, module in model.named_modules():
        for tensors in module._parameters, module._buffers:
            for key, tensor in tensors.items():
                if tensor is not None:
                    slots.setdefault(tensor.untyped_storage()._cdata, Slot(path, key, tensor))
    return list(slots.values())


def _drive(model: Any, checkpoint: Checkpoint, slots: Sequence[Slot], device: Any) -> dict[str, str]:
    """Loads recording tensors: all at once, or one by one if the loader fails; returns those with which it failed."""

    def load(names: Iterable[str]) -> None:
        with Recording(slots):
            model.load_weights((name, record(name, *checkpoint[name], device)) for name in names)

    try:
        load(checkpoint)
        return {}
    except Exception:
        for slot in slots:
            slot.pieces, slot.constants, slot.computed, slot.emptied = [], [], {}, set()
    failed = {}
    for name in checkpoint:
        before = [(len(slot.pieces), len(slot.constants)) for slot in slots]
        try:
            load([name])
        except Exception as error:
            failed[name] = f"its loader failed: {_describe(error)}"
            for slot, (npieces, nconstants) in zip(slots, before, strict=True):
                if len(slot.pieces) > npieces:
                    slot.computed.setdefault(failed[name], set()).add(name)
                del slot.pieces[npieces:], slot.constants[nconstants:]
    return failed


def _describe(error: Exception) -> str:
    """What an engine's code has raised; an assertion that says nothing, by its line."""
    text = str(error)
    if not text and (frames := traceback.extract_tb(error.__traceback__)):
        text = f"{frames[-1].name}: {frames[-1].line}"
    return f"{type(error).__name__}: {text}"


def _why_not(own: Sequence[Slot], live: Mapping[str, Any]) -> str | None:
    """What the records themselves say against the direct way."""
    for slot in own:
        if slot.computed:
            return next(iter(slot.computed))
        tensor, now = slot.tensor, live.get(slot.name)
        if now is None:
            return f"'{slot.key}' is not there any more after loading"
        if (tensor.shape, tensor.stride(), tensor.dtype) != (now.shape, now.stride(), now.dtype):
            return (
                f"'{slot.key}' is {list(tensor.shape)} {tensor.dtype} when it is loaded, and {list(now.shape)} "
                f"{now.dtype} afterwards, or has other strides"
            )
        if not tensor.is_contiguous():
            return f"'{slot.key}' is not contiguous"
        count = torch.zeros(tensor.numel(), dtype=torch.uint8)
        boxes = [(piece.offset, piece.size, piece.strides) for piece in slot.pieces]
        for offset, size, strides in boxes + slot.constants:
            count.as_strided(size, strides, offset).add_(1)
        once = int((count == 1).sum())
        if once != tensor.numel():
            return f"{tensor.numel() - once} of {tensor.numel()} elements of '{slot.key}' are not written exactly once"
    return None


def apply(pieces: Iterable[Piece], sources: Mapping[str, Any], params: Mapping[str, Any]) -> None:
    """Copies the pieces from whole checkpoint tensors to parameters."""
    for piece in pieces:
        box = sources[piece.source][tuple(slice(a, a + n) for a, n in zip(piece.start, piece.size, strict=True))]
        locate(piece, params[piece.param]).copy_(box)


def locate(piece: Piece, param: Any) -> Any:
    """The part of a parameter that a piece is copied to."""
    return param.as_strided(piece.size, piece.strides, param.storage_offset() + piece.offset)


def _compare(own: Sequence[Slot], live: Mapping[str, Any], loaded: Mapping[str, Any]) -> str | None:
    for slot in own:
        now = live[slot.name].detach()
        again = now.clone()
        _bytes(again).bitwise_not_()
        for offset, size, strides in slot.constants:
            again.as_strided(size, strides, offset).copy_(now.as_strided(size, strides, now.storage_offset() + offset))
        apply(slot.pieces, loaded, {slot.name: again})
        if not torch.equal(_bytes(again), _bytes(now)):
            return f"'{slot.key}' has other bytes now than its trace makes of the checkpoint"
    return None


def _random(shape: Sequence[int], dtype: Any, device: Any) -> Any:
    """Random bits; of floats that may be cast no NaNs, of which a cast does not keep the bits."""
    if dtype.is_floating_point and dtype.itemsize > 1:
        return torch.randn(tuple(shape), dtype=torch.float32, device=device).to(dtype)
    nbytes = int(torch.Size(shape).numel()) * dtype.itemsize
    return torch.randint(0, 256, (nbytes,), dtype=torch.uint8, device=device).view(dtype).view(tuple(shape))


def _bytes(tensor: Any) -> Any:
    return tensor.detach().contiguous().view(-1).view(torch.uint8)


def _try(
    model: Any,
    module: Any,
    own: Sequence[Slot],
    checkpoint: Checkpoint,
    sources: set[str],
    device: Any,
    process: Callable[[Any], None] | None,
) -> str | None:
    """Loads random bits by the loader and by the trace; a sentence if they differ, or if processing changes them."""
    bits = {name: _random(*checkpoint[name], device) for name in sorted(sources)}
    with _other_memory(module, own, device) as trial:
        try:
            model.load_weights((name, tensor.clone()) for name, tensor in bits.items())
        except Exception as error:
            return f"loading its tensors alone fails: {_describe(error)}"
        expected = {slot.name: trial[slot.key].detach().clone() for slot in own}
        for tensor in expected.values():
            _bytes(tensor).bitwise_not_()
        by_trace = {name: tensor.clone() for name, tensor in expected.items()}
        for slot in own:  # constants stay what the loader has written
            for offset, size, strides in slot.constants:
                by_trace[slot.name].as_strided(size, strides, offset).copy_(
                    trial[slot.key].detach().as_strided(size, strides, offset)
                )
        apply((piece for slot in own for piece in slot.pieces), bits, by_trace)
        for slot in own:
            if not torch.equal(_bytes(by_trace[slot.name]), _bytes(trial[slot.key])):
                return f"'{slot.key}' gets other bytes from the loader than from its trace"
        before = {key: (t.untyped_storage().data_ptr(), t.shape, t.stride(), t.dtype) for key, t in trial.items()}
        if process is None:
            return None
        try:
            process(module)
        except Exception as error:
            return f"what follows loading could not be tried: {_describe(error)}"
        for slot in own:
            now = getattr(module, slot.key, None)
            if (
                now is None
                or (now.untyped_storage().data_ptr(), now.shape, now.stride(), now.dtype) != before[slot.key]
            ):
                return f"what follows loading replaces '{slot.key}'"
            if not torch.equal(_bytes(by_trace[slot.name]), _bytes(now)):
                return f"what follows loading changes the bytes of '{slot.key}'"
    return None


@contextlib.contextmanager
def _other_memory(module: Any, own: Sequence[Slot], device: Any) -> Iterator[dict[str, Any]]:
    """The module with other memory for its parameters; afterwards it, and its quant_method, have what they had."""
    kept: list[tuple[Any, dict[str, Any]]] = []
    for thing in module, getattr(module, "quant_method", None):
        if hasattr(thing, "__dict__"):
            kept.append((thing, {k: dict(v) if isinstance(v, dict) else v for k, v in vars(thing).items()}))
    trial: dict[str, Any] = {}
    try:
        for slot in own:
            old = slot.tensor
            new = torch.empty_strided(old.size(), old.stride(), dtype=old.dtype, device=device)
            new.__class__, new.__dict__ = old.__class__, dict(old.__dict__)
            owner = module._parameters if slot.key in module._parameters else module._buffers
            owner[slot.key] = trial[slot.key] = new
        yield trial
    finally:
        for thing, state in kept:
            vars(thing).clear()
            vars(thing).update(state)
