"""Modules in a batch, in one process: names, ties, what is refused, what is looked at again, shared memory."""

from __future__ import annotations

import asyncio
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import tensorbus as tb
from tensorbus import _module


def in_pair(folder: Path, *roles: Callable[[tb.Bus, tb.Pair], Any]) -> list[Any]:
    """Runs the two functions as the only ranks of groups "a" and "b", in threads."""
    results: list[Any] = [None, None]

    def run(i: int) -> None:
        try:
            with tb.join(f"unix:{folder}/bus", group="ab"[i], index=0, size=1, timeout=20.0) as bus:
                results[i] = roles[i](bus, bus.pair("p", "ba"[i], layout="mesh=1 place=R"))
        except BaseException as error:
            results[i] = error

    threads = [threading.Thread(target=run, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60.0)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results


class Tied(nn.Module):
    def __init__(self, tie: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(6, 4)
        self.norm = nn.BatchNorm1d(4)
        self.head = nn.Linear(4, 6, bias=False)
        if tie:
            self.head.weight = self.embed.weight


def state(module: nn.Module) -> dict[str, torch.Tensor]:
    return {name: t.clone() for name, t in module.state_dict().items()}


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


@pytest.mark.parametrize(("source_is_tied", "target_is_tied"), [(True, False), (False, True), (True, True)])
def test_ties(tmp_path: Path, source_is_tied: bool, target_is_tied: bool) -> None:
    source, target = Tied(source_is_tied), Tied(target_is_tied)
    if not source_is_tied:
        source.head.weight.data.copy_(source.embed.weight.data)
    nn.init.normal_(source.norm.running_mean)

    def send(bus: tb.Bus, pair: tb.Pair) -> None:
        # Of two tensors, the source has to say that they are equal, if the target has one.
        batch = bus.batch("step", ties={} if source_is_tied else {"head.weight": "embed.weight"})
        batch.add_module(pair, source, buffers=True)
        batch.send(timeout=20.0)

    def recv(bus: tb.Bus, pair: tb.Pair) -> None:
        batch = bus.batch("step")
        batch.add_module(pair, target, buffers=True)
        batch.recv(timeout=20.0)

    in_pair(tmp_path, send, recv)
    assert same(state(source), state(target))


class Views(nn.Module):
    """Two parameters of the same memory, and a third that is tied to the second."""

    def __init__(self, are_views: bool) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.randn(3, 4))
        self.b = nn.Parameter(self.a.data.view(3, 4) if are_views else torch.randn(3, 4))
        self.c = self.b if are_views else nn.Parameter(torch.randn(3, 4))


@pytest.mark.parametrize("target_has_views", [False, True])
def test_views_of_the_same_memory_are_ties(tmp_path: Path, target_has_views: bool) -> None:
    source, target = Views(True), Views(target_has_views)

    def send(bus: tb.Bus, pair: tb.Pair) -> None:
        batch = bus.batch("step")
        batch.add_module(pair, source)
        batch.send(timeout=20.0)

    def recv(bus: tb.Bus, pair: tb.Pair) -> None:
        batch = bus.batch("step")
        batch.add_module(pair, target)
        batch.recv(timeout=20.0)

    in_pair(tmp_path, send, recv)
    assert same(state(source), state(target))


def borrows(batch: tb.Batch, *tensors: torch.Tensor) -> bool:
    """Whether peers use the memory of these tensors."""
    borrowed = {view.address for added in batch._tensors.values() for _, view, _ in added}
    return {t.data_ptr() for t in tensors} <= borrowed


@pytest.mark.parametrize("is_shared", [False, True])
def test_storage_that_moves(tmp_path: Path, is_shared: bool) -> None:
    """Parameters are sent from wherever they are when it is sent, and only copied first where peers could not read."""
    source, target = nn.Sequential(nn.Linear(5, 3)), nn.Sequential(nn.Linear(5, 3))
    sent: list[dict[str, torch.Tensor]] = []
    got: list[dict[str, torch.Tensor]] = []
    turn = threading.Barrier(2, timeout=30.0)

    def replace() -> None:
        source[0] = nn.Linear(5, 3)

    def moves() -> list[Callable[[], Any]]:
        new = {name: torch.randn_like(t) for name, t in source.state_dict().items()}
        return [
            lambda: None,
            lambda: setattr(source[0].weight, "data", torch.randn(3, 5)),
            lambda: setattr(source[0].weight, "data", torch.randn(5, 3).t()),  # other strides
            lambda: source.load_state_dict(new, assign=True),
            lambda: source[0].bias.data.add_(1),
            lambda: setattr(source[0], "bias", nn.Parameter(torch.randn(3))),
            lambda: source.to(torch.float64).to(torch.float32),
            replace,
        ]

    changes = moves()

    def send(bus: tb.Bus, pair: tb.Pair) -> None:
        if is_shared:
            tb.share(source)
        batch = bus.batch("step")
        batch.add_module(pair, source)
        for i, change in enumerate(changes):
            before = weakref.ref(source[0].weight)
            change()
            sent.append(state(source))
            batch.send(timeout=20.0)
            if i != 2:  # strides are part of what was agreed
                assert borrows(batch, source[0].weight, source[0].bias) == (i == 0 or not is_shared)
            if i == 3:
                assert (before() is None) == (not is_shared)
            turn.wait()

    def recv(bus: tb.Bus, pair: tb.Pair) -> None:
        batch = bus.batch("step")
        batch.add_module(pair, target)
        for _ in changes:
            batch.recv(timeout=20.0)
            got.append(state(target))
            turn.wait()

    in_pair(tmp_path, send, recv)
    assert len(sent) == len(changes)
    assert all(same(a, b) for a, b in zip(sent, got, strict=True))


@pytest.mark.parametrize("commit", ["in_place", "shadow"])
def test_storage_that_moves_is_received_into(tmp_path: Path, commit: str) -> None:
    """However the program waits, what it has now gets the version; every element of it is poisoned before."""
    source, target = nn.Linear(5, 3), nn.Linear(5, 3)
    sent: list[dict[str, torch.Tensor]] = []
    got: list[dict[str, torch.Tensor]] = []
    turn = threading.Barrier(2, timeout=30.0)

    def wait_for_state(batch: tb.Batch) -> None:
        transfer = batch.recv(timeout=20.0, wait=None)
        deadline = time.monotonic() + 20.0
        while batch.version == 0 and time.monotonic() < deadline:
            time.sleep(0.01)
        assert batch.version > 0
        assert not transfer.is_closed

    ways: list[Callable[[tb.Batch], Any]] = [
        wait_for_state,
        lambda batch: batch.recv(timeout=20.0),
        lambda batch: batch.recv(timeout=20.0, wait=None).wait(),
        lambda batch: batch.recv(timeout=20.0, wait=None).stream_wait(),
        lambda batch: asyncio.run(await_it(batch.recv(timeout=20.0, wait=None))),
    ]

    async def await_it(transfer: tb.Transfer) -> None:
        await transfer

    def send(bus: tb.Bus, pair: tb.Pair) -> None:
        batch = bus.batch("step")
        batch.add_module(pair, source)
        for _ in ways:
            for parameter in source.parameters():
                nn.init.normal_(parameter)
            sent.append(state(source))
            batch.send(timeout=20.0, wait="committed")
            turn.wait()

    def recv(bus: tb.Bus, pair: tb.Pair) -> None:
        batch = bus.batch("step", commit=commit)
        batch.add_module(pair, target)
        batch.register(timeout=20.0)
        for way in ways:
            target.weight.data = torch.full((5, 3), torch.nan).t()
            target.load_state_dict({"weight": target.weight, "bias": torch.full((3,), torch.nan)}, assign=True)
            way(batch)
            got.append(state(target))
            turn.wait()

    in_pair(tmp_path, send, recv)
    assert len(sent) == len(ways)
    assert all(same(a, b) for a, b in zip(sent, got, strict=True))


def look(module: nn.Module, change: Callable[[], Any], is_send: bool = True) -> None:
    watch = _module.Watch(module, buffers=False, reshard=False, ranks=None, mesh=None)
    change()
    watch.look(is_send)


def test_what_has_changed_is_refused_by_name() -> None:
    linear = nn.Linear(5, 3)
    with pytest.raises(tb.Refused, match=r"'weight' was registered as a plain tensor of shape \[3, 5\]"):
        look(linear, lambda: setattr(linear.weight, "data", torch.zeros(3, 4)))
    linear = nn.Linear(5, 3)
    with pytest.raises(tb.Refused, match="'bias' has another dtype"):
        look(linear, lambda: setattr(linear, "bias", nn.Parameter(torch.zeros(3, dtype=torch.bfloat16))))
    linear = nn.Linear(5, 3)
    with pytest.raises(tb.Refused, match="'bias' is gone"):
        look(linear, lambda: setattr(linear, "bias", None))
    linear = nn.Linear(5, 3)
    with pytest.raises(tb.Invalid, match="memory of parameter 'weight' was freed or resized"):
        look(linear, lambda: linear.weight.untyped_storage().resize_(0))
    tied = Tied(True)
    with pytest.raises(tb.Refused, match=r"was tied to .*, and is not any more"):
        look(tied, lambda: setattr(tied.head, "weight", nn.Parameter(torch.zeros_like(tied.head.weight))))
    linear = nn.Linear(5, 3)
    with pytest.raises(tb.Refused, match="'weight' has elements that share memory"):
        look(linear, lambda: setattr(linear.weight, "data", torch.ones(1, 5).expand(3, 5)), is_send=False)
    look(linear, lambda: None)
    layers = nn.Sequential(nn.Linear(5, 3), nn.ReLU())
    with pytest.raises(tb.Refused, match=r"'2\.weight' is new in its module"):
        look(layers, lambda: layers.append(nn.Linear(3, 2)))
    layers = nn.Sequential(nn.Linear(5, 3), nn.ReLU())
    with pytest.raises(tb.Refused, match=r"'0\.bias' is gone from its module"):
        look(layers, lambda: layers.__setitem__(0, nn.Linear(5, 3, bias=False)))
    with pytest.raises(tb.Refused, match="'scale' is new in its module"):
        look(linear, lambda: linear.register_parameter("scale", nn.Parameter(torch.ones(3))))
    for ranks in ("01", 3, {0: "a"}):
        with pytest.raises(tb.Invalid, match="ranks"):
            _module.Watch(nn.Linear(2, 2), buffers=False, reshard=False, ranks=ranks, mesh=None)


class Packed(torch.Tensor):
    """As float8 tensors of libraries are: no memory of its own."""

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Packed:
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=torch.bfloat16)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func.__name__ if "detach" not in func.__name__ else args[0]


class Params4bit(nn.Parameter):
    """As bitsandbytes has: bytes that are not the parameter's elements."""


def refused_parameters() -> dict[str, tuple[Any, str]]:
    return {
        "packed": (nn.Parameter(Packed(torch.zeros(4)), requires_grad=False), "Packed"),
        "4 bits": (Params4bit(torch.zeros(4, dtype=torch.uint8), requires_grad=False), "Params4bit"),
        "meta": (nn.Parameter(torch.zeros(4, device="meta")), "device 'meta'"),
        "lazy": (nn.parameter.UninitializedParameter(), "UninitializedParameter"),
        "complex": (nn.Parameter(torch.zeros(4, dtype=torch.complex64)), "complex64"),
        "sparse": (nn.Parameter(torch.eye(3).to_sparse()), "sparse"),
        "nested": (nn.Parameter(torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)])), "nested"),
    }


@pytest.mark.parametrize("kind", list(refused_parameters()))
def test_what_is_no_plain_tensor_is_refused_by_name(kind: str) -> None:
    parameter, what = refused_parameters()[kind]
    module = nn.Module()
    module.inner = nn.Module()
    module.inner.register_parameter("weight", parameter)
    with pytest.raises((tb.Refused, tb.Invalid), match=rf"parameter 'inner\.weight': .*{what}"):
        look(module, lambda: None)


def test_names() -> None:
    module = nn.Linear(2, 2)
    for wrapper in ("_orig_mod", "_checkpoint_wrapped_module", "module"):
        outer = nn.Module()
        outer.add_module(wrapper, module)
        module = outer
    watch = _module.Watch(module, buffers=False, reshard=False, ranks=None, mesh=None)
    assert list(watch.views) == ["weight", "bias"]
    module.add_module("_orig_mod", nn.Linear(2, 2))
    with pytest.raises(tb.Invalid, match="two parameters are 'weight'"):
        _module.Watch(module, buffers=False, reshard=False, ranks=None, mesh=None)
    with pytest.raises(tb.Invalid, match=r"must be a torch\.nn\.Module, not list"):
        _module.Watch([], buffers=False, reshard=False, ranks=None, mesh=None)


def test_a_look_takes_at_most_2_us_a_tensor() -> None:
    module = nn.ModuleList([nn.Linear(2, 2) for _ in range(3000)])
    watch = _module.Watch(module, buffers=False, reshard=False, ranks=None, mesh=None)
    took = []
    for _ in range(9):
        start = time.process_time()
        watch.look(is_send=True)
        took.append((time.process_time() - start) / 6000)
    print(f"a look takes {min(took) * 1e6:.2f} to {max(took) * 1e6:.2f} us a tensor")
    assert min(took) < 2e-6


def test_share_keeps_tensors_and_ties() -> None:
    module = Tied(tie=True)
    module.part = nn.Parameter(module.embed.weight.data[2])
    module.embed.weight.grad = torch.ones(6, 4)
    before, address = state(module), module.embed.weight.data_ptr()
    parameter = module.embed.weight
    assert tb.share(module) is module
    assert module.embed.weight is parameter
    assert parameter.data_ptr() != address
    assert module.head.weight.data_ptr() == parameter.data_ptr()
    assert same(before, state(module))
    parameter.data[2] = 7
    assert torch.equal(module.part.data, torch.full((4,), 7.0))
    with pytest.raises(tb.Invalid, match=r"torch\.nn\.Module"):
        tb.share([module])


def test_share_moves_a_tensor_with_its_views() -> None:
    whole = torch.arange(12.0)
    view, parameter, address = whole[3:5], nn.Parameter(whole.view(3, 4)), whole.data_ptr()
    assert tb.share(parameter) is parameter
    assert whole.data_ptr() != address
    whole += 1
    assert (view.tolist(), parameter[0, 3].item()) == ([4.0, 5.0], 4.0)
    address = whole.data_ptr()
    assert tb.share(whole[2:]).data_ptr() == address + 8  # it was there already
    array = torch.zeros(4)
    kept = array.numpy()
    for other in (array, torch.from_numpy(kept), torch.zeros(4).share_memory_()):
        with pytest.raises(tb.Refused, match="can't be moved"):
            tb.share(other)
    array += 1
    assert kept.tolist() == [1.0] * 4


def test_shared_memory_is_read_in_place(tmp_path: Path) -> None:
    source, target = tb.share(nn.Linear(64, 64)), nn.Linear(64, 64)

    def send(bus: tb.Bus, pair: tb.Pair) -> str:
        batch = bus.batch("step")
        batch.add_module(pair, source)
        batch.send(timeout=20.0, wait="committed")
        return batch.dump(is_send=True)

    def recv(bus: tb.Bus, pair: tb.Pair) -> str:
        batch = bus.batch("step")
        batch.add_module(pair, target)
        batch.recv(timeout=20.0)
        return batch.dump(is_send=False)

    _, received = in_pair(tmp_path, send, recv)
    assert same(state(source), state(target))
    assert ", mapped" in received, received


def test_tensors(tmp_path: Path) -> None:
    """Strides, leaves that require gradients, views of one storage; and one that is resized under the batch."""
    storage = torch.arange(24.0)
    sent = {
        "transposed": torch.randn(3, 4, requires_grad=True).t(),
        "leaf": torch.randn(5, requires_grad=True),
        "first": storage[:12].view(3, 4),
        "second": storage[12:].view(4, 3)[:, 1:],
        "bf16": torch.randn(4, 4).to(torch.bfloat16),
        "scalar": torch.tensor(3.5),
        "empty": torch.empty(0, 3),
    }
    got = {name: torch.zeros(t.shape, dtype=t.dtype) for name, t in sent.items()}
    got["leaf"].requires_grad_()
    turn = threading.Barrier(2, timeout=30.0)

    def send(bus: tb.Bus, pair: tb.Pair) -> None:
        batch = bus.batch("step")
        batch.add_all(pair, sent)
        batch.send(timeout=20.0)
        turn.wait()
        sent["leaf"].data = torch.zeros(5)
        with pytest.raises(tb.Invalid, match="tensor 'leaf' of batch 'step': it has moved"):
            batch.send(timeout=20.0)
        storage.untyped_storage().resize_(0)
        with pytest.raises(tb.Invalid, match=r"tensor '(first|leaf)' of batch 'step': "):
            batch.send(timeout=20.0)

    def recv(bus: tb.Bus, pair: tb.Pair) -> None:
        batch = bus.batch("step")
        batch.add_all(pair, got)
        batch.recv(timeout=20.0)
        turn.wait()

    expected = {name: t.detach().clone() for name, t in sent.items()}
    in_pair(tmp_path, send, recv)
    assert same(expected, {name: t.detach() for name, t in got.items()})


def test_what_vmap_passes_is_refused(tmp_path: Path) -> None:
    with tb.join(f"unix:{tmp_path}/bus", group="a", index=0, size=1) as bus:
        pair, batch = bus.pair("p", "b", layout="mesh=1 place=R", wait=False), bus.batch("step")

        def add(row: torch.Tensor) -> torch.Tensor:
            with pytest.raises(tb.Refused, match="tensor 'row': it has no memory"):
                batch.add(pair, "row", row)
            return row

        torch.func.vmap(add)(torch.zeros(2, 3))


def test_allocator_without_a_gpu() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU: tests/gpu/torch_pool.py is for that")
    with pytest.raises(tb.Refused, match="torch sees none"):
        tb.torch_allocator()


def test_copy_service(tmp_path: Path) -> None:
    """With tensors of PyTorch: strides, leaves, bfloat16; and one that is freed between submit and run."""
    got = torch.zeros(3, 4, dtype=torch.bfloat16, requires_grad=True)
    with tb.join(f"unix:{tmp_path}/bus", group="all", index=0, size=1) as bus:
        service = tb.copy_service(bus, "all")
        sent = torch.randn(4, 3).to(torch.bfloat16).t()
        service.submit_send(sent, 0, task_id=1)
        service.submit_recv(got, 0, task_id=1)
        service.run(timeout=20.0)
        assert torch.equal(sent, got)
        gone = torch.zeros(8)
        service.submit_send(gone, 0, task_id=2)
        service.submit_recv(torch.zeros(8), 0, task_id=2)
        gone.untyped_storage().resize_(0)
        with pytest.raises(tb.Invalid, match="freed or resized"):
            service.run(timeout=20.0)
