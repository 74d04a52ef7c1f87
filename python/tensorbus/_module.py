"""Modules of PyTorch: their parameters by name, looked at again before every transfer; and their memory, shared."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from . import _dtensor, _memory, _tensors, _torch
from ._errors import Error, Invalid, Refused

# Parts of names that wrappers add: torch.compile, activation checkpointing, DistributedDataParallel.
_WRAPPERS = frozenset(("_orig_mod", "_checkpoint_wrapped_module", "module"))


def plain_name(name: str) -> str:
    """The name without what wrappers have put into it.

    >>> plain_name("module._orig_mod.layers.0._checkpoint_wrapped_module.mlp.weight")
    'layers.0.mlp.weight'
    """
    *path, last = name.split(".")
    return ".".join([part for part in path if part not in _WRAPPERS] + [last])


@dataclass(slots=True)
class _Place:
    """Where a module keeps a tensor, and what was there when it was added."""

    owner: dict[str, Any]  # a module's _parameters or _buffers
    key: str
    name: str
    tensor: Any
    spec: Any  # of a DTensor, else None
    held: _torch.Held  # the memory that the batch borrows
    view: _tensors.View


@dataclass(slots=True)
class _Tied:
    """Another name of a tensor."""

    owner: dict[str, Any]
    key: str
    name: str
    place: _Place


def _held(view: _tensors.View) -> _torch.Held:
    held = view.keepalive
    assert isinstance(held, _torch.Held)
    return held


def _memory_of(view: _tensors.View) -> tuple[Any, ...]:
    """Equal for tensors that are the same elements of the same memory."""
    return view.address, view.device, view.dtype, view.shape, view.strides, view.layout, view.global_shape


def _has_overlap(view: _tensors.View) -> bool:
    """Whether elements share memory, as those of expanded tensors do."""
    dims = sorted((s, n) for n, s in zip(view.shape, view.strides or (), strict=False) if n > 1)
    reach = 0
    for stride, n in dims:
        if stride <= reach:
            return True
        reach += stride * (n - 1)
    return False


@dataclass(slots=True)
class Moved:
    """A tensor that is in other memory than the batch borrows."""

    place: _Place
    view: _tensors.View
    local: Any

    @property
    def name(self) -> str:
        """Its name in the batch."""
        return self.place.name

    @property
    def may_rebind(self) -> bool:
        """Whether the batch could borrow the new memory in place of the old, as far as is known here."""
        was = self.place.view
        return (self.view.strides, self.view.device) == (was.strides, was.device)

    def rebound(self) -> None:
        """The batch borrows the new memory now."""
        self.place.held, self.place.view = _held(self.view), self.view


def copy_moved(moved: list[Moved], is_send: bool, stream: int | None) -> None:
    """Copies tensors that have moved to the memory that the batch borrows, before a send; or from it.

    Copies of a GPU are done on ``stream``, a handle; by default, on PyTorch's current one.
    """
    torch = _torch.loaded()
    tensors = [(each.place.held.alias(each.place.view), each.local) for each in moved]
    gpus = {t.device for pair in tensors for t in pair if t.device.type == "cuda"} if stream is not None else ()
    with contextlib.ExitStack() as contexts:
        for gpu in gpus:
            contexts.enter_context(torch.cuda.stream(torch.cuda.ExternalStream(stream, device=gpu)))
        for borrowed, now in tensors:
            borrowed.copy_(now) if is_send else now.copy_(borrowed)


def _children(module: Any) -> list[tuple[str, Any]]:
    """All modules in it, itself first, with their names without what wrappers add; those in two places come twice."""
    return [
        (plain_name(path + ".")[:-1] if path else "", child)
        for path, child in module.named_modules(remove_duplicate=False)
    ]


def _list(children: list[tuple[str, Any]], buffers: bool) -> Iterator[tuple[dict[str, Any], str, str]]:
    """All parameters, and on request the buffers that are saved: owner, key and name. Tied ones come several times."""
    for path, child in children:
        prefix = path + "." if path else ""
        for key, tensor in child._parameters.items():
            if tensor is not None:
                yield child._parameters, key, prefix + key
        for key, tensor in child._buffers.items() if buffers else ():
            if tensor is not None and key not in child._non_persistent_buffers_set:
                yield child._buffers, key, prefix + key


def _fsdp_groups(children: list[tuple[str, Any]]) -> list[tuple[str, Any, Any]]:
    """Of each module that fully_shard was applied to: its name, itself, and its groups of parameters."""
    found = []
    for path, child in children:
        if hasattr(child, "_get_fsdp_state"):
            state = child._get_fsdp_state()
            groups = getattr(state, "_fsdp_param_groups", None)
            if groups is None:  # before torch 2.12 a module had one group at most
                group = getattr(state, "_fsdp_param_group", None)
                groups = [] if group is None else [group]
            found += [(path or "the root", child, group) for group in groups]
    return found


class Watch:
    """The parameters of a module that is in a batch. ``look`` finds what has changed, before a transfer uses it."""

    def __init__(self, module: Any, *, buffers: bool, reshard: bool, ranks: _dtensor.RankMap | None, mesh: Any) -> None:
        torch = _torch.loaded()
        if torch is None or not isinstance(module, torch.nn.Module):
            raise Invalid(f"module must be a torch.nn.Module, not {type(module).__name__}")
        _dtensor.check_ranks(ranks)
        self._module = module
        self._buffers, self._reshard, self._ranks = buffers, reshard, ranks
        self._plain_layout = None if mesh is None else _replicated(mesh, ranks)
        children = _children(module)
        self._meshes = tuple(m for m in (mesh, _largest_mesh(children)) if m is not None)
        self._fsdp = _fsdp_groups(children)
        self.ties: dict[str, str] = {}  # names of tensors that are there under another name
        self._check_sharded()
        self._tied: list[_Tied] = []
        self._places = self._find_places(children)
        self._keep_parts(children)

    def _find_places(self, children: list[tuple[str, Any]]) -> list[_Place]:
        places: dict[str, _Place] = {}
        first: dict[Any, str] = {}  # by tensor, and by memory
        for owner, key, name in _list(children, self._buffers):
            tensor = owner[key]
            if name in places or name in self.ties:
                raise Invalid(f"two parameters are '{name}' without the names of wrappers")
            canonical = first.get(id(tensor))
            if canonical is None:
                place = self._read(owner, key, name)
                canonical = name if place.view.address == 0 else first.setdefault(_memory_of(place.view), name)
                first[id(tensor)] = canonical
                if canonical == name:
                    places[name] = place
                    continue
            self.ties[name] = canonical
            self._tied.append(_Tied(owner, key, name, places[canonical]))
        return list(places.values())

    def _keep_parts(self, children: list[tuple[str, Any]]) -> None:
        """Keeps which tensors the module has: its modules, and how many tensors each has, as they are now."""
        self._parts: list[tuple[dict[str, Any], tuple[Any, ...]]] = []
        self._counts: list[tuple[dict[str, Any], int]] = []
        for _, child in children:
            if child._modules:
                self._parts.append((child._modules, tuple(child._modules.values())))
            self._counts.append((child._parameters, len(child._parameters)))
            if self._buffers:
                self._counts.append((child._buffers, len(child._buffers)))

    def _check_parts(self) -> None:
        """Follows modules that were put into the place of others. Names must stay what they were."""
        are_same = all(tuple(of.values()) == kept for of, kept in self._parts)
        if are_same and all(len(owner) == count for owner, count in self._counts):
            return
        children = _children(self._module)
        found = {name: (owner, key) for owner, key, name in _list(children, self._buffers)}
        known: list[_Place | _Tied] = [*self._places, *self._tied]
        for each in known:
            if each.name not in found:
                raise Refused(f"parameter '{each.name}' is gone from its module; make the batch again")
            each.owner, each.key = found.pop(each.name)
        if found:
            raise Refused(f"parameter '{next(iter(found))}' is new in its module; make the batch again")
        self._keep_parts(children)
        self._fsdp = _fsdp_groups(children)

    def _read(self, owner: dict[str, Any], key: str, name: str) -> _Place:
        tensor = owner[key]
        try:
            view = _torch.read(tensor, self._ranks, self._meshes, plain=self._plain_layout, looks=False)
        except Error as error:
            raise type(error)(f"parameter '{name}': {error}") from None
        assert view is not None  # parameters are tensors
        spec = None if view.global_shape is None else tensor._spec
        return _Place(owner, key, name, tensor, spec, _held(view), view)

    @property
    def views(self) -> dict[str, _tensors.View]:
        """What is to be added to the batch, by name."""
        return {place.name: place.view for place in self._places}

    def look(self, is_send: bool) -> list[Moved]:
        """Looks at type, layout and address of each tensor again, and returns those whose storage has moved.

        What can't be moved as it was registered is refused, by name.
        """
        self._check_parts()
        self._check_sharded()
        for tied in self._tied:
            self._check_tied(tied.owner.get(tied.key), tied.name, tied.place)
        moved: list[Moved] = []
        for place in self._places:
            tensor = place.owner.get(place.key)
            if tensor is place.tensor:
                spec = place.spec
                local = tensor if spec is None else tensor._local_tensor
                if (
                    (spec is None or tensor._spec is spec)
                    and local.data_ptr() == place.held.address
                    and place.held.is_intact
                ):
                    continue
            found = self._look_closer(place, tensor, is_send)
            if found is not None:
                moved.append(found)
        return moved

    def _check_tied(self, tensor: Any, name: str, place: _Place) -> None:
        """Tied tensors are one object, or two with the same memory, as after load_state_dict(assign=True)."""
        other = place.owner.get(place.key)
        if tensor is other:
            return
        if tensor is not None and other is not None:
            mine, its = _torch.local_part(tensor), _torch.local_part(other)
            if (mine.data_ptr(), mine.stride()) == (its.data_ptr(), its.stride()):
                return
        raise Refused(
            f"parameter '{name}' was tied to '{place.name}' when it was registered, and is not any more; make the "
            "batch again"
        )

    def _look_closer(self, place: _Place, tensor: Any, is_send: bool) -> Moved | None:
        """The tensor if it has moved; None: it is what it was."""
        what = f"parameter '{place.name}'"
        if tensor is None:
            raise Refused(f"{what} is gone from its module; make the batch again")
        now = self._read(place.owner, place.key, place.name)
        was, view = place.view, now.view
        if (view.layout, view.global_shape, view.shape) != (was.layout, was.global_shape, was.shape):
            raise Refused(
                f"{what} was registered as {_describe(was)}, and is {_describe(view)} now; make the batch again"
            )
        if view.dtype != was.dtype:
            raise Refused(f"{what} has another dtype than when it was registered; make the batch again")
        if not place.held.is_intact:
            raise Invalid(f"the memory of {what} was freed or resized after it was registered; make the batch again")
        place.tensor, place.spec = now.tensor, now.spec
        if (view.address, view.strides) == (was.address, was.strides):
            return None
        if not is_send and _has_overlap(view):
            raise Refused(f"{what} has elements that share memory, and can't be received into")
        return Moved(place, view, now.held.local.detach())

    def _check_sharded(self) -> None:
        for name, child, group in self._fsdp:
            if not group.is_sharded and self._reshard:
                child.reshard()
            if not group.is_sharded:
                raise Refused(
                    f"module '{name}' is unsharded, as FSDP leaves it after a forward pass without a backward "
                    "pass: call its reshard(), or add it with reshard=True"
                )


def _describe(view: _tensors.View) -> str:
    if view.layout is None:
        return f"a plain tensor of shape {list(view.shape)}"
    whole = list(view.global_shape or view.shape)
    return f"{whole} with the layout '{view.layout}', here {list(view.shape)}"


def _largest_mesh(children: list[tuple[str, Any]]) -> Any:
    kind = _torch.dtensor_type()
    if kind is None:
        return None
    parameters = (p for _, child in children for p in child._parameters.values())
    meshes = [p.device_mesh for p in parameters if isinstance(p, kind)]
    return max(meshes, key=lambda mesh: mesh.size(), default=None)


def _replicated(mesh: Any, ranks: _dtensor.RankMap | None) -> str:
    """The layout of plain tensors, of which all ranks of the mesh have a copy."""
    if not hasattr(mesh, "mesh"):
        raise Invalid(f"mesh must be a DeviceMesh, not {type(mesh).__name__}")
    numbers = _dtensor.mesh_ranks(mesh, ranks)
    text = f"mesh={len(numbers)} place=R"
    return text if numbers == list(range(len(numbers))) else f"{text} ranks={','.join(map(str, numbers))}"


# ---- Shared memory --------------------------------------------------------------------------------------------------


def share(what: Any) -> Any:
    """Moves CPU memory of a module's parameters and buffers, or of a tensor, to memory that peers read in place.

    The tensors stay what they are, and those that shared a storage, or were tied, still do: only the memory behind them
    changes. Views that the program has made of a module's tensors keep the old memory; those of a tensor go with it.
    Gradients stay where they are. Returns the module or tensor.
    """
    torch = _torch.loaded()
    if torch is not None and isinstance(what, torch.Tensor):
        if not share_storage(what):
            raise Refused(
                "the tensor's memory can't be moved: it is not resizable CPU memory of PyTorch, as that of NumPy's "
                "arrays and of torch.multiprocessing is not, or this PyTorch can't exchange storages (2.13 can)"
            )
        return what
    if torch is None or not isinstance(what, torch.nn.Module):
        raise Invalid(f"there are torch.nn.Module and torch.Tensor to share, not {type(what).__name__}")
    children = _children(what)
    tensors = [_torch.local_part(owner[key]) for owner, key, _ in _list(children, buffers=True)]
    for _, _, group in _fsdp_groups(children):  # what FSDP gathers from: the shards with their padding
        tensors += [p._sharded_param_data for p in group.fsdp_params]
    shared: dict[int, Any] = {}  # storages by the address of those that they replace
    for tensor in {id(t): t for t in tensors}.values():
        storage = tensor.untyped_storage()
        if tensor.device.type != "cpu" or storage.nbytes() == 0:
            continue
        if storage.data_ptr() not in shared:
            new = _copy_storage(storage)
            shared[storage.data_ptr()] = new
            shared[new.data_ptr()] = new  # one that was moved already
        moved = torch.empty(0, dtype=tensor.dtype)
        tensor.data = moved.set_(shared[storage.data_ptr()], tensor.storage_offset(), tensor.size(), tensor.stride())
    return what


def _copy_storage(storage: Any) -> Any:
    """A storage with the same bytes, in memory that peers read in place."""
    new = _memory.empty((storage.nbytes(),), "u8").torch().untyped_storage()
    return new.copy_(storage)


def share_storage(tensor: Any) -> bool:
    """Whether peers can map the tensor's storage, which is moved for that, with all tensors that have it, if it can be.

    Memory that is not only PyTorch's stays where it is.
    """
    storage = _torch.local_part(tensor).untyped_storage()
    if storage.nbytes() == 0 or _memory.begins_at(storage.data_ptr()):
        return True
    is_own = storage.device.type == "cpu" and storage.resizable() and not storage.is_shared()
    if not is_own or storage.is_pinned() or not hasattr(storage, "_swap_data_ptr_"):
        return False
    storage._swap_data_ptr_(_copy_storage(storage))
    return True
