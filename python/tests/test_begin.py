"""Transfers that begin and end in unusual ways: before the batch is registered, given up, closed by another thread."""

from __future__ import annotations

import asyncio
import os
import select
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tensorbus as tb

ALL = "mesh=1 place=R"


class Two:
    """Both ends in one process: `a` sends, `b` receives."""

    def __init__(self, folder: Path) -> None:
        self.buses = {g: tb.join(f"unix:{folder}/bus", group=g, index=0, size=1, timeout=20.0) for g in "ab"}
        self.pairs = {g: bus.pair("p", "ba"["ab".index(g)], ALL, wait=False) for g, bus in self.buses.items()}
        self.arrays = {g: np.full(4, float("ab".index(g) + 1)) for g in "ab"}
        self.batches: dict[str, tb.Batch] = {}

    def make(self, **options: Any) -> tuple[tb.Batch, tb.Batch]:
        for group, bus in self.buses.items():
            self.batches[group] = bus.batch("step", **options)
            self.batches[group].add(self.pairs[group], "w", self.arrays[group])
        return self.batches["a"], self.batches["b"]

    def register(self) -> None:
        other = threading.Thread(target=self.batches["a"].register)
        other.start()
        self.batches["b"].register()
        other.join()

    def are_equal(self) -> bool:
        return np.array_equal(self.arrays["a"], self.arrays["b"])


@pytest.fixture
def two(tmp_path: Path) -> Iterator[Two]:
    both = Two(tmp_path)
    with ExitStack() as stack:
        for bus in both.buses.values():
            stack.enter_context(bus)
        yield both


def move(two: Two) -> None:
    receive = two.batches["b"].recv(wait=None)
    two.arrays["a"] += 1
    two.batches["a"].send()
    receive.wait()
    assert two.are_equal()


# ---- Before the batch is registered ---------------------------------------------------------------------------------


def test_transfers_of_batches_that_are_not_registered(two: Two) -> None:
    """They return at once, also in the thread that has both ends; registering is a part of them."""
    sends, receives = two.make()
    sent = sends.send(wait=None, timeout=20.0)
    assert not sent.is_closed
    assert sent.state() == tb.TransferState("ok", "", frozenset(), 0, 0, 0, 0, 0, 0, 0.0, sent.state().phases)
    with pytest.raises(tb.Timeout, match="send of batch 'step' has not begun: the batch is still being registered"):
        sent.wait(timeout=0.05)
    with pytest.raises(tb.Refused, match="batch 'step' is already being sent"):
        sends.send(wait=None)
    received = receives.recv(wait=None, timeout=20.0)
    received.wait_group(0, timeout=20.0)
    received.wait()
    sent.wait("committed", timeout=20.0)
    assert two.are_equal()
    assert (received.version, sent.version, receives.version, sends.version) == (1, 1, 1, 1)
    move(two)
    assert (receives.version, sends.version) == (2, 2)


def test_a_descriptor_lasts(two: Two) -> None:
    """That of a transfer which has not begun is the same afterwards."""
    sends, receives = two.make()
    sent, received = sends.send(wait=None), receives.recv(wait=None)
    poll = select.poll()
    poll.register(received.fileno(), select.POLLIN)
    until = time.monotonic() + 20
    while "committed" not in received.state().events and time.monotonic() < until:
        assert poll.poll(20000)
    assert poll.poll(0) == []
    sent.wait("committed")
    assert two.are_equal()


def test_await_registers(two: Two) -> None:
    async def program() -> None:
        sends, receives = two.make()

        async def end(transfer: tb.Transfer) -> None:
            await transfer

        await asyncio.gather(end(sends.send(wait=None)), end(receives.recv(wait=None)))

    asyncio.run(program())
    assert two.are_equal()


def test_a_hold_before_it_begins(two: Two) -> None:
    sends, receives = two.make(commit="shadow")
    received, sent = receives.recv(wait=None, hold=True), sends.send(wait=None)
    received.proceed()
    received.wait()
    sent.wait("committed")
    assert two.are_equal()


@pytest.mark.parametrize("how", ["cancel", "close"])
def test_given_up_before_it_begins(two: Two, how: str) -> None:
    sends, _ = two.make()
    sent = sends.send(wait=None)
    getattr(sent, how)()
    with pytest.raises((tb.Cancelled, tb.Invalid), match="send of batch 'step'"):
        sent.wait(timeout=1.0)
    sent.close()
    two.register()
    move(two)


def test_what_can_not_be_registered_fails_the_wait(two: Two) -> None:
    two.arrays["b"] = np.zeros(5)
    sends, receives = two.make()
    transfers = sends.send(wait=None), receives.recv(wait=None)
    for transfer in transfers:
        for _ in range(2):
            with pytest.raises(tb.Conflict, match=r"tensor 'w' has shape \[[45]\] in group '[ab]' but \[[45]\] in"):
                transfer.wait(timeout=20.0)
        assert transfer.state().status == "conflict"
        with pytest.raises(tb.Conflict):
            transfer.fileno()


def test_a_forked_child_leaves_it_alone(two: Two) -> None:
    sends, receives = two.make()
    sent = sends.send(wait=None)
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            with pytest.raises(tb.Refused, match="forked child"):
                sent.wait()
            sent.close()
            sends.close()
            two.buses["a"].close()
            status = 0
        finally:
            os._exit(status)
    assert os.waitpid(pid, 0)[1] == 0
    receives.recv(wait=None).wait()
    sent.wait()
    assert two.are_equal()


# ---- Given up -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["cancel", "close"])
@pytest.mark.parametrize("commit", ["in_place", "shadow"])
def test_a_receive_that_is_given_up_stops_no_send(two: Two, how: str, commit: str) -> None:
    _, receives = two.make(commit=commit)
    two.register()
    for _ in range(3):
        getattr(receives.recv(wait=None), how)()
        move(two)
    assert receives.version == 3


def test_a_send_that_is_given_up_stops_no_receive(two: Two) -> None:
    sends, receives = two.make()
    two.register()
    sends.send(wait=None).cancel()
    with pytest.raises(tb.Timeout):
        receives.recv(timeout=0.1)
    move(two)
    assert (sends.version, receives.version) == (2, 2)


# ---- Closed by another thread ---------------------------------------------------------------------------------------

BLOCKED: dict[str, Callable[[Two], Any]] = {
    "send": lambda two: two.batches["a"].send(),
    "recv": lambda two: two.batches["a"].recv(),
    "wait": lambda two: two.batches["a"].recv(wait=None).wait(),
    "wait_group": lambda two: two.batches["a"].recv(wait=None).wait_group(0),
    "await": lambda two: asyncio.run(awaited(two.batches["a"].recv(wait=None))),
    "register": lambda two: two.batches["a"].register(),
    "reshard": lambda two: two.batches["a"].reshard("a"),
    "bus.wait": lambda two: two.buses["a"].wait("nobody"),
    "pair": lambda two: two.buses["a"].pair("q", "nobody", ALL),
    "copy_service": lambda two: tb.copy_service(two.buses["a"], "both"),
    "run": lambda two: two_services(two)[0].run(),
}


async def awaited(transfer: tb.Transfer) -> None:
    await transfer


def two_services(two: Two) -> list[tb.CopyService]:
    services: list[Any] = [None, None]

    def make(i: int) -> None:
        services[i] = tb.copy_service(two.buses["ab"[i]], "both")

    other = threading.Thread(target=make, args=(1,))
    other.start()
    make(0)
    other.join()
    return services


OF_A_BUS = ("bus.wait", "pair", "copy_service", "run")


@pytest.mark.parametrize(
    ("closed", "name"), [("bus", n) for n in BLOCKED] + [("batch", n) for n in BLOCKED if n not in OF_A_BUS]
)
def test_closing_ends_the_waits_of_other_threads(two: Two, name: str, closed: str) -> None:
    two.make()
    if name != "register":
        two.register()
    if name in ("copy_service", "run"):
        two.buses["a"].enter("both", 0, 2)
        two.buses["b"].enter("both", 1, 2)
    found: list[BaseException] = []

    def body() -> None:
        try:
            BLOCKED[name](two)
        except BaseException as error:
            found.append(error)

    thread = threading.Thread(target=body)
    thread.start()
    time.sleep(0.2)
    assert thread.is_alive()
    begun = time.monotonic()
    (two.buses if closed == "bus" else two.batches)["a"].close()
    thread.join(10.0)
    assert time.monotonic() - begun < 5
    assert isinstance(found[0], tb.Cancelled), found


def test_another_thread_can_use_the_bus_meanwhile(two: Two) -> None:
    """A call that waits for others does not keep its bus."""
    two.buses["a"].enter("both", 0, 2)
    failures: list[BaseException] = []

    def body() -> None:
        try:
            tb.copy_service(two.buses["a"], "both", timeout=2.0)
        except tb.Timeout as error:
            failures.append(error)

    thread = threading.Thread(target=body)
    thread.start()
    two.make()
    two.register()
    move(two)
    assert set(two.buses["a"].groups()) == {"a", "b", "both"}
    thread.join(20.0)
    assert len(failures) == 1


# ---- Ties -----------------------------------------------------------------------------------------------------------


def tied(two: Two, ties_of_a: dict[str, str] | None) -> list[tuple[np.ndarray, ...]]:
    """`a` has two tensors, `b` has one with two names."""
    x, y, z = np.full(3, 1.0), np.full(3, 2.0), np.zeros(3)
    a = two.batches["a"] = two.buses["a"].batch("tied", ties=ties_of_a)
    b = two.batches["b"] = two.buses["b"].batch("tied", ties={"head": "embed"})
    a.add(two.pairs["a"], "embed", x)
    a.add(two.pairs["a"], "head", y)
    b.add(two.pairs["b"], "embed", z)
    two.register()
    return [(x, y), (z,)]


def test_a_tie_that_only_the_target_has_is_refused_by_name(two: Two) -> None:
    (x, y), (z,) = tied(two, None)
    words = (
        "batch 'tied': tensor 'head' of group 'a' would be lost: group 'b' has it tied to 'embed', and group 'a' does"
    )
    for call in (two.batches["a"].send, two.batches["b"].recv):
        with pytest.raises(tb.Conflict, match=words):
            call(timeout=5.0)
    assert (z == 0).all()
    z[:] = 9
    received = two.batches["a"].recv(wait=None)  # the other way there is nothing to lose
    two.batches["b"].send()
    received.wait()
    assert (x == 9).all()
    assert (y == 9).all()


def test_a_tie_that_the_source_declares(two: Two) -> None:
    (x, _), (z,) = tied(two, {"head": "embed"})
    received = two.batches["b"].recv(wait=None)
    two.batches["a"].send()
    received.wait()
    assert np.array_equal(x, z)
