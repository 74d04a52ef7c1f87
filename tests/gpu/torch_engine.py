#!/usr/bin/env python3
"""What an engine on a GPU relies on, without an engine: for a machine with a GPU and PyTorch. Prints what it has seen.

usage: PYTHONPATH=python tests/gpu/torch_engine.py [--cpu] [PART...]

A trainer sends versions to a stand-in for an engine's model, in plain PyTorch, whose loader fuses, transposes and
computes. After each version every element is compared. The parts, each of them two processes, at the same time:

graph       a CUDA graph that was captured before the updates is replayed after each
expandable  both have PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True; segments grow and shrink meanwhile
unmapped    the engine's parameters are unmapped between updates, and mapped again; then the trainer's tensors are, with
            tb's invalidate and without, which is refused
streams     weights are written on a stream, read on another and overwritten, with nothing that waits but tensorbus

--cpu: what of it can be done without a GPU, to try this program.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import os
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from multiprocessing.connection import Client, Listener
from pathlib import Path
from typing import Any

import torch

import tensorbus as tb
from tensorbus import engine

IS_GPU = "--cpu" not in sys.argv
MOST_S = 55.0 if IS_GPU else 200.0  # for everything
CALL_S = 20.0 if IS_GPU else 60.0  # for each step of it
DEVICE = "cuda" if IS_GPU else "cpu"
SHADOWS = ("device", "pinned", "off")
LAYERS, HIDDEN, INNER = 4, 1024, 1536
if not IS_GPU:
    HIDDEN, INNER = 64, 96
    torch.set_num_threads(1)

# ---- The model ------------------------------------------------------------------------------------------------------


def shapes() -> dict[str, tuple[int, ...]]:
    """The checkpoint."""
    one = {"norm": (HIDDEN,), "gate": (INNER, HIDDEN), "up": (INNER, HIDDEN), "down": (HIDDEN, INNER), "scaled": (64,)}
    return {f"layers.{i}.{name}.weight": shape for i in range(LAYERS) for name, shape in one.items()}


def fill(tensor: Any, name: str, version: int) -> None:
    """Small integers, of which every one differs between two versions that follow each other; exact in all dtypes."""
    at = torch.arange(tensor.numel(), device=tensor.device, dtype=torch.int64).view(tensor.shape)
    tensor.copy_((at * 7 + sum(name.encode()) + 5 * version) % 13 - 6)


class Layer(torch.nn.Module):
    """Gate and up in one parameter, down transposed, one parameter that the loader computes."""

    def __init__(self, empty: Callable[[tuple[int, ...]], Any]) -> None:
        super().__init__()

        def parameter(*shape: int) -> Any:
            holder = torch.nn.Module()
            holder.weight = torch.nn.Parameter(empty(shape), requires_grad=False)
            return holder

        self.norm, self.gate_up = parameter(HIDDEN), parameter(2 * INNER, HIDDEN)
        self.down, self.scaled = parameter(INNER, HIDDEN), parameter(64)


class Model(torch.nn.Module):
    def __init__(self, empty: Callable[[tuple[int, ...]], Any]) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(Layer(empty) for _ in range(LAYERS))

    def load_weights(self, weights: Any) -> None:
        for name, loaded in weights:
            _, i, part, _ = name.split(".")
            layer: Any = self.layers[int(i)]
            if part in ("gate", "up"):
                layer.gate_up.weight.data.narrow(0, INNER if part == "up" else 0, INNER).copy_(loaded)
            elif part == "down":
                layer.down.weight.data.copy_(loaded.t())
            elif part == "scaled":
                layer.scaled.weight.data.copy_(loaded * 2)
            else:
                layer.norm.weight.data.copy_(loaded)

    def forward(self, x: Any) -> Any:
        """Of every layer by itself, so that the sums of integers are exact in float32."""
        made = []
        for layer in self.layers:
            inner = x @ layer.gate_up.weight.float().t()
            out = inner.sign()[:, :INNER] @ layer.down.weight.float() + layer.norm.weight.float()
            made += [inner, out, layer.scaled.weight.float().expand(len(x), 64)]
        return torch.cat(made, dim=1)


def empty(shape: tuple[int, ...]) -> Any:
    return torch.zeros(shape, dtype=torch.bfloat16, device=DEVICE)


def cold(version: int) -> Model:
    """The model as it would be loaded from disk."""
    model = Model(empty)
    loaded = {name: torch.empty(shape, device=DEVICE) for name, shape in shapes().items()}
    for name, tensor in loaded.items():
        fill(tensor, name, version)
    model.load_weights(loaded.items())
    return model


def wrong(tensors: dict[str, Any], version: int) -> list[str]:
    """The parameters that are not those of the version, element by element."""
    wanted = dict(cold(version).named_parameters())
    assert tensors.keys() == wanted.keys()
    return [
        f"{name}: {int((tensors[name] != wanted[name]).sum())} of {wanted[name].numel()} elements"
        for name in wanted
        if not torch.equal(tensors[name], wanted[name])
    ]


def spin() -> None:
    """Work that takes the GPU about 25 ms, so that what is not ordered would be seen."""
    if IS_GPU:
        torch.cuda._sleep(50_000_000)


def on(stream: Any) -> Any:
    return torch.cuda.stream(stream) if IS_GPU else contextlib.nullcontext()


def new_stream() -> Any:
    return torch.cuda.Stream() if IS_GPU else None


# ---- Memory that can be unmapped -------------------------------------------------------------------------------------


class Location(ctypes.Structure):
    _fields_ = [("type", ctypes.c_int), ("id", ctypes.c_int)]


class Properties(ctypes.Structure):
    """CUmemAllocationProp."""

    _fields_ = [
        ("type", ctypes.c_int),
        ("handle_types", ctypes.c_int),
        ("location", Location),
        ("win32", ctypes.c_void_p),
        ("flags", ctypes.c_ubyte * 8),
    ]


class Access(ctypes.Structure):
    """CUmemAccessDesc."""

    _fields_ = [("location", Location), ("flags", ctypes.c_int)]


def driver(name: str, *args: Any) -> None:
    result = getattr(ctypes.CDLL("libcuda.so.1"), name)(*args)
    if result != 0:
        raise RuntimeError(f"{name}: CUDA error {result}")


class Region:
    """Addresses of GPU memory that stay, under which memory is mapped, in pieces, and unmapped, as in sleep mode."""

    PIECE = 4 << 20

    def __init__(self, nbytes: int, is_shareable: bool) -> None:
        self.nbytes, self.is_shareable, self.is_mapped = -(-nbytes // self.PIECE) * self.PIECE, is_shareable, False
        self.used = 0
        self.tensors: list[Any] = []
        if not IS_GPU:
            return
        torch.cuda.current_stream().synchronize()  # there is a context
        address = ctypes.c_uint64()
        driver("cuMemAddressReserve", ctypes.byref(address), *map(ctypes.c_uint64, (self.nbytes, 0, 0, 0)))
        self.address = address.value
        self.map()

    def empty(self, shape: tuple[int, ...], dtype: Any = torch.bfloat16) -> Any:
        nbytes = torch.Size(shape).numel() * dtype.itemsize
        begin, self.used = self.used, self.used + -(-nbytes // 256) * 256
        assert self.used <= self.nbytes
        if IS_GPU:
            said = {"shape": (nbytes,), "typestr": "|u1", "data": (self.address + begin, False), "version": 3}
            holder = type("Holder", (), {"__cuda_array_interface__": said})()
            made = torch.as_tensor(holder, device="cuda")
            assert made.data_ptr() == self.address + begin
        else:
            made = torch.zeros(nbytes, dtype=torch.uint8)
        self.tensors.append(made)
        return made.view(dtype).view(shape)

    def map(self) -> None:
        """Other memory than before; what it holds is garbage."""
        if IS_GPU:
            props = Properties(type=1, handle_types=int(self.is_shareable), location=Location(1, 0))
            for offset in range(0, self.nbytes, self.PIECE):
                handle = ctypes.c_uint64()
                driver("cuMemCreate", ctypes.byref(handle), ctypes.c_uint64(self.PIECE), ctypes.byref(props), ZERO)
                at, size = ctypes.c_uint64(self.address + offset), ctypes.c_uint64(self.PIECE)
                driver("cuMemMap", at, size, ZERO, handle, ZERO)
                driver("cuMemRelease", handle)
            access = Access(Location(1, 0), 3)
            whole = ctypes.c_uint64(self.address), ctypes.c_uint64(self.nbytes)
            driver("cuMemSetAccess", *whole, ctypes.byref(access), ctypes.c_uint64(1))
        self.is_mapped = True

    def unmap(self) -> None:
        if IS_GPU:
            torch.cuda.synchronize()
            for offset in range(0, self.nbytes, self.PIECE):
                driver("cuMemUnmap", ctypes.c_uint64(self.address + offset), ctypes.c_uint64(self.PIECE))
        self.is_mapped = False

    def poison(self) -> None:
        for tensor in self.tensors:
            tensor.fill_(0x5A)
        if IS_GPU:
            torch.cuda.synchronize()


ZERO = ctypes.c_uint64(0)
ROOM = sum(torch.Size(shape).numel() * 4 + 256 for shape in shapes().values())

# ---- The engine's process --------------------------------------------------------------------------------------------


class Rank:
    """What the engine does when the trainer asks."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.receiver: Any = None
        self.seen: dict[str, Any] = {}  # what slow work has read of the parameters that was there before an update
        self.is_slow = False

    def make(self, shadow: str, is_unmapped: bool = False) -> str:
        """A new model, loaded from disk, in place of the one before. Returns what the trace says."""
        self.close()
        self.region = Region(ROOM, False) if is_unmapped else None
        self.model = Model(self.region.empty if self.region else empty)
        self.model.load_state_dict(cold(1000).state_dict())
        self.addresses = {name: p.data_ptr() for name, p in self.model.named_parameters()}
        headers = {name: (shape, torch.float32) for name, shape in shapes().items()}
        trace = engine.trace(self.model, headers)
        self.receiver = engine.Receiver(self.model, [trace], 0, shadow, is_unmapped=is_unmapped and shadow == "off")
        return trace.report()

    def capture(self) -> None:
        """A graph of the model's forward, as it is now."""
        generator = torch.Generator().manual_seed(5)
        self.x = torch.randint(-3, 4, (8, HIDDEN), generator=generator).float().to(DEVICE)
        if not IS_GPU:
            return
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                self.model(self.x)
        torch.cuda.current_stream().wait_stream(side)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.y = self.model(self.x)

    def init_weight_transfer_engine(self, info: dict[str, Any]) -> None:
        self.receiver.join(**info)

    def start_weight_update(self) -> None:
        pass

    def update_weights(self, info: dict[str, Any]) -> None:
        if info["version"] == 0:
            raise RuntimeError("given up")
        self.receiver.receive()

    def finish_weight_update(self) -> None:
        if self.is_slow:  # work that is still to read the old weights
            spin()
            self.seen = {name: p.detach().clone() for name, p in self.model.named_parameters()}
        pause = self.receiver.commit()
        if self.is_slow:
            with on(new_stream()):  # it waits for nothing
                self.now = {name: p.detach().clone() for name, p in self.model.named_parameters()}
        self.model.load_weights(self.receiver.whole.items())
        self.said = f"{1e3 * pause.pause:.1f} of {1e3 * pause.total:.1f} ms"

    def look(self, version: int) -> list[str]:
        """What is wrong."""
        found = wrong(dict(self.model.named_parameters()), version)
        found += [f"{n} has moved" for n, p in self.model.named_parameters() if p.data_ptr() != self.addresses[n]]
        return found

    def replay(self, version: int) -> list[str]:
        """What is wrong with the result of the graph."""
        if IS_GPU:
            self.y.fill_(float("nan"))
            self.graph.replay()
        else:
            self.y = self.model(self.x)
        wanted = cold(version)(self.x)
        return [] if torch.equal(self.y, wanted) else [f"the graph's result is not that of version {version}"]

    def poison(self) -> None:
        for p in self.model.parameters():
            p.data.view(torch.uint8).fill_(0x5A)

    def sleep(self) -> None:
        self.region.unmap()

    def wake(self) -> None:
        self.region.map()
        self.region.poison()

    def slow(self) -> None:
        self.is_slow = True

    def look_slow(self, old: int, new: int) -> list[str]:
        """What is wrong with what was read before and after an update; modules that the loader computes come later."""
        torch.cuda.synchronize() if IS_GPU else None
        direct = {name for name in self.seen if ".scaled." not in name}
        return [
            f"{when}: {what}"
            for when, tensors, version in (("before", self.seen, old), ("after", self.now, new))
            for what in wrong(tensors, version)
            if what.partition(":")[0] in direct
        ]

    def pause(self) -> str:
        return self.said

    def segments(self) -> bool:
        return all_expandable()

    def receive_plain(self, versions: int, n: int) -> list[str]:
        """Receives on a stream, reads there slowly, and receives again at once."""
        stream, got = new_stream(), torch.zeros(n, device=DEVICE)
        out = [torch.full((n,), -2.0, device=DEVICE) for _ in range(versions)]
        if IS_GPU:
            torch.cuda.synchronize()
        npending = 0
        with tb.join(self.url, group="reader", index=0, size=1, timeout=CALL_S) as bus, on(stream):
            pair = bus.pair("plain", "writer", layout="mesh=1 place=R")
            batch = bus.batch("plain")
            batch.add(pair, "w", got)
            for version in range(versions):
                npending += bool(IS_GPU and not stream.query())
                t = batch.recv(timeout=CALL_S, wait=None)
                t.stream_wait("arrived")
                spin()
                out[version].copy_(got)  # the next receive must wait for this
                t.wait("committed")
            torch.cuda.synchronize() if IS_GPU else None
        nwrong = [int((o != version).sum()) for version, o in enumerate(out)]
        found = [f"version {version}: {count} of {n} elements" for version, count in enumerate(nwrong) if count]
        if IS_GPU and npending == 0:
            found.append("no receive began while the stream was still reading")
        return found

    def close(self) -> None:
        if self.receiver is not None:
            self.receiver.close()
            self.receiver = None


def serve(folder: str) -> None:
    rank = Rank(f"unix:{folder}/bus")
    with Listener(f"{folder}/engine", "AF_UNIX") as listener, listener.accept() as connection:
        method = ""
        while method != "close":
            method, args = connection.recv()
            try:
                connection.send((True, getattr(rank, method)(*args)))
            except Exception:
                traceback.print_exc()
                connection.send((False, traceback.format_exc()))


# ---- The trainer's process -------------------------------------------------------------------------------------------


class Engine:
    """Calls of the engine; those of vLLM's clients among them."""

    def __init__(self, folder: str) -> None:
        until = time.monotonic() + MOST_S
        while True:
            try:
                self._connection = Client(f"{folder}/engine", "AF_UNIX")
                break
            except OSError:  # it has not started
                if time.monotonic() > until:
                    raise
                time.sleep(0.01)
        self._lock = threading.Lock()

    def __getattr__(self, method: str) -> Callable[..., Any]:
        """What the engine does, and what it returns."""
        return lambda *args: self.begin(method, *args)()

    def begin(self, method: str, *args: Any) -> Callable[[], Any]:
        """The same, in two steps."""
        assert self._lock.acquire(timeout=CALL_S), f"{method}: the engine has not answered the call before"
        self._connection.send((method, args))

        def end() -> Any:
            try:
                if not self._connection.poll(CALL_S):
                    raise RuntimeError(f"the engine has not answered {method} within {CALL_S:.0f} s")
                is_ok, value = self._connection.recv()
            finally:
                self._lock.release()
            if not is_ok:
                raise RuntimeError(f"the engine, in {method}:\n{value}")
            return value

        return end


class Trained(torch.nn.Module):
    """The trainer's parameters, by the checkpoint's names, in float32."""

    def __init__(self, empty: Callable[[tuple[int, ...]], Any]) -> None:
        super().__init__()
        for name, shape in shapes().items():
            *path, last = name.split(".")
            module: Any = self
            for part in path:
                if part not in module._modules:
                    module.add_module(part, torch.nn.Module())
                module = module._modules[part]
            module.register_parameter(last, torch.nn.Parameter(empty(shape), requires_grad=False))

    def fill(self, version: int) -> None:
        for name, p in self.named_parameters():
            fill(p, name, version)


class Trainer:
    def __init__(self, folder: str, model: Trained) -> None:
        self.folder, self.model, self.engine = folder, model, Engine(folder)
        self.sender = engine.Sender(f"unix:{folder}/bus", 0, 1, engine.from_module(model), engine=None, timeout=CALL_S)

    def meet(self, *args: Any) -> str:
        """A new engine. What its trace says."""
        said: str = self.engine.make(*args)
        self.sender.add("engine", self.engine)
        return said.splitlines()[0]

    def again(self) -> None:
        self.sender.add("engine", self.engine)

    def send(self) -> None:
        self.sender.send()

    def update(self, version: int) -> None:
        self.model.fill(version)
        self.send()
        check(self.engine.look(version))

    def dump(self) -> list[str]:
        """How each tensor is sent."""
        text = self.sender._links["engine"].data.dump(is_send=True)
        return [line for line in text.splitlines() if "layers." in line]


def check(found: list[str]) -> None:
    assert not found, "\n".join(found)


def plain(shape: tuple[int, ...]) -> Any:
    return torch.zeros(shape, device=DEVICE)


def all_expandable() -> bool:
    return bool(not IS_GPU or all(s["is_expandable"] for s in torch.cuda.memory_snapshot()))


def part_graph(folder: str) -> Iterator[str]:
    t = Trainer(folder, Trained(plain))
    for shadow in SHADOWS:
        said = t.meet(shadow)
        t.engine.capture()
        for version in range(1, 6):
            if shadow == "off":
                t.engine.poison()
            t.update(version)
            check(t.engine.replay(version))
        yield f"shadow {shadow}: 5 versions, pause {t.engine.pause()}, {said}"
    t.engine.close()


def part_expandable(folder: str) -> Iterator[str]:
    holes = [plain((1 << 20,)) for _ in range(4)]
    t = Trainer(folder, Trained(plain))
    for shadow in SHADOWS:
        t.meet(shadow)
        for version in range(1, 6):
            junk = [plain((n << 20,)) for n in (3, 7, 11)]  # the segment grows
            if version == 3:
                holes.clear()
            if version == 4:  # parameters that have moved
                for p in t.model.parameters():
                    p.data = p.data.clone()
            t.update(version)
            del junk
            torch.cuda.empty_cache() if IS_GPU else None  # what is free is unmapped
        if IS_GPU:
            assert all_expandable(), "the trainer's segments are not expandable"
            assert t.engine.segments(), "the engine's segments are not expandable"
            staged = [line for line in t.dump() if "read in place" not in line and shadow != "pinned"]
            assert not staged, "all elements are right, but it was not read in place:\n" + "\n".join(staged[:3])
        yield f"shadow {shadow}: 5 versions" + (", read in place" if IS_GPU and shadow != "pinned" else "")
    t.engine.close()


def part_unmapped(folder: str) -> Iterator[str]:
    region = Region(ROOM, True)
    t = Trainer(folder, Trained(lambda shape: region.empty(shape, torch.float32)))
    for shadow in SHADOWS:
        said = t.meet(shadow, True)
        t.engine.capture()
        for version in range(1, 5):
            t.engine.sleep()
            t.engine.wake()
            t.update(version)
            check(t.engine.replay(version))
        yield f"the engine's, shadow {shadow}: unmapped and mapped again 4 times, with a graph from before; {said}"
    t.meet("device")
    for version in range(1, 4):
        t.update(version)
        for p in t.model.parameters():
            t.sender.bus.invalidate(p)
        region.unmap()
        region.map()
        region.poison()
        t.again()
    t.update(4)
    yield "the trainer's: unmapped and mapped again 3 times, with invalidate"
    if IS_GPU:
        region.unmap()
        region.map()
        try:
            t.model.fill(5)
            t.send()
        except tb.Error as error:
            assert "layers." in str(error), f"it names no tensor: {error}"
            yield f"without invalidate it is refused: {str(error).splitlines()[0]}"
        else:
            raise AssertionError("memory that was mapped again without invalidate was sent")


def part_streams(folder: str) -> Iterator[str]:
    model = Trained(plain)
    t = Trainer(folder, model)
    writing, other = new_stream(), new_stream()
    t.engine.slow()
    npending = 0
    for shadow in SHADOWS:
        t.meet(shadow)
        for version in range(1, 6):
            with on(writing):
                spin()
                model.fill(version)
                npending += bool(IS_GPU and not writing.query())
                t.send()  # after what is on the stream
            with on(other):  # which waits for nothing
                for p in model.parameters():
                    p.fill_(99)
            if IS_GPU:
                writing.wait_stream(other)
            check(t.engine.look(version))
            check(t.engine.look_slow(1000 if version == 1 else version - 1, version))
        yield f"shadow {shadow}: 5 versions; {npending} sends began before the weights were written"
    assert npending > 0 or not IS_GPU, "no send began while the stream was still writing"
    versions, n = 12, 4 << 20 if IS_GPU else 4096
    w = torch.zeros(n, device=DEVICE)
    if IS_GPU:
        torch.cuda.synchronize()
    end = t.engine.begin("receive_plain", versions, n)
    with tb.join(f"unix:{folder}/bus", group="writer", index=0, size=1, timeout=CALL_S) as bus, on(writing):
        pair = bus.pair("plain", "reader", layout="mesh=1 place=R")
        batch = bus.batch("plain")
        batch.add(pair, "w", w)
        for version in range(versions):
            spin()
            w.fill_(version)
            sent = batch.send(timeout=CALL_S, wait=None)
            sent.stream_wait("released")
            w.fill_(-1)  # on the stream: the receiver must not see it
            sent.wait("committed")
        check(end())
    yield f"stream_wait: {versions} versions, overwritten at once and read slowly"
    t.engine.close()


PARTS = {"graph": part_graph, "expandable": part_expandable, "unmapped": part_unmapped, "streams": part_streams}

# ---- All of it -------------------------------------------------------------------------------------------------------


def start(folder: Path, part: str, role: str) -> subprocess.Popen[bytes]:
    env = dict(os.environ)
    if part == "expandable":
        env["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"
    flags = [] if IS_GPU else ["--cpu"]
    with (folder / role).open("wb") as log:
        return subprocess.Popen(
            [sys.executable, __file__, *flags, f"--{role}", part, str(folder)],
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
        )


def child(role: str, part: str, folder: str) -> int:
    faulthandler.dump_traceback_later(MOST_S - 5, exit=True)  # says where it hangs
    if role == "--serve":
        serve(folder)
        return 0
    for line in PARTS[part](folder):
        print(line, flush=True)
    print("all of it", flush=True)
    sys.stdout.flush()
    os._exit(0)  # the engine may be in the middle of something


def report(folder: Path, part: str, began: float, ended: float, roles: dict[str, subprocess.Popen[bytes]]) -> bool:
    text = (folder / "train").read_text(errors="replace")
    good = roles["train"].returncode == 0 and text.endswith("all of it\n")
    lines = [f"  {line}" for line in text.splitlines() if line != "all of it"]
    print(f"{part}: {'passed' if good else 'FAILED'}, {ended - began:.1f} s")
    print("\n".join(lines[-40:]))
    if not good:
        print(
            f"  {'; '.join(f'{role}: exit status {p.returncode}' for role, p in roles.items())}; the engine has said:"
        )
        print("\n".join(f"  {line}" for line in (folder / "serve").read_text(errors="replace").splitlines()[-40:]))
    return good


def main() -> int:
    if IS_GPU and not torch.cuda.is_available():
        print("skipped: torch sees no GPU")
        return 77
    chosen = [name for name in sys.argv[1:] if not name.startswith("--")] or list(PARTS)
    unknown = [name for name in chosen if name not in PARTS]
    if unknown:
        print(f"there is no part {unknown[0]}; there are {', '.join(PARTS)}")
        return 2
    began = time.monotonic()
    failed = 0
    with tempfile.TemporaryDirectory() as temporary:
        running = {}
        for part in chosen:
            folder = Path(temporary, part)
            folder.mkdir()
            running[part] = {role: start(folder, part, role) for role in ("train", "serve")}
        for part, roles in running.items():
            with contextlib.suppress(subprocess.TimeoutExpired):
                roles["train"].wait(max(0.1, began + MOST_S - time.monotonic()))
            ended = time.monotonic()
            for p in roles.values():
                p.kill()
                p.wait()
            failed += not report(Path(temporary, part), part, began, ended, roles)
    print(f"{len(chosen) - failed} of {len(chosen)} passed on {torch.cuda.get_device_name() if IS_GPU else 'the CPU'}")
    return 1 if failed else 0


if __name__ == "__main__":
    if len(sys.argv) >= 3 and sys.argv[-3] in ("--train", "--serve"):
        sys.exit(child(*sys.argv[-3:]))
    sys.exit(main())
