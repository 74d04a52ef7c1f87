"""Etha's commands, as its msgspec definitions write them: two ranks on each side, defaults left out and in.

    commands.py TOOL FOLDER             by the frames recorded in commands.txt
    commands.py TOOL FOLDER --msgspec   by msgspec, which has to write the recorded ones, too
"""

import array
import json
import os
import sys
import tempfile
import time

from raw import Connection, bad, check, good, memory, pack, start

RECORDED = os.path.join(os.path.dirname(os.path.abspath(__file__)), "commands.txt")
SIZE = 2


def make_definitions():
    """Field by field: which command has which, and what is left out if it has its default."""
    import msgspec

    base = [("timestamp", float | None, None), ("semaphore_name", str | None, None)]
    commands = {
        "Transfer": [("batch_id", str), ("transfer_type", str)],
        "RegisterTensors": [("batch_id", str), ("tensors", list[tuple[str, bytes]]), ("bucket_size", int | None, None)],
        "InitPair": [
            ("pair_name", str), ("local_name", str), ("expected_world_size", int), ("remote_name", str),
            ("mesh_shape_payload", bytes | None, None), ("placements_payload", bytes | None, None),
        ],
        "QueryStatus": [("batch_id", str), ("state_name", str)],
        "CleanupBatch": [("batch_id", str)],
    }
    kinds = {}
    for is_short in (False, True):
        base_class = msgspec.defstruct("BaseCommand", base, tag=True, kw_only=True, omit_defaults=is_short)
        for name, fields in commands.items():
            kinds[name, is_short] = msgspec.defstruct(
                name, fields, bases=(base_class,), tag=True, kw_only=True, omit_defaults=is_short
            )
    return lambda name, is_short, fields: msgspec.msgpack.encode(kinds[name, is_short](**fields))


class Frames:
    """Made by msgspec, or the recorded ones."""

    def __init__(self, uses_msgspec):
        self.make = make_definitions() if uses_msgspec else None
        self.used = set()
        with open(RECORDED) as file:
            self.recorded = dict(line.split() for line in file if not line.startswith("#"))

    def get(self, label, name, is_short, **fields):
        key = f"{label}{'.short' if is_short else ''}"
        self.used.add(key)
        if not self.make:
            check(key in self.recorded, f"{RECORDED} has no {key}")
            return bytes.fromhex(self.recorded[key])
        frame = self.make(name, is_short, fields)
        if os.environ.get("TB_RECORD"):
            self.recorded[key] = frame.hex()
        check(self.recorded.get(key) == frame.hex(), f"msgspec writes {key} as {frame.hex()}, not {self.recorded.get(key)}")
        return frame

    def finish(self):
        if os.environ.get("TB_RECORD"):
            with open(RECORDED, "w") as file:
                file.write("# Etha's commands, written by msgspec; `commands.py --msgspec` checks them\n")
                file.writelines(f"{key} {self.recorded[key]}\n" for key in sorted(self.used))
        check(self.used == set(self.recorded), f"recorded and not sent: {set(self.recorded) - self.used}")


def values(version, seat, count):
    return array.array("f", [version * 10000 + seat * 1000 + i for i in range(count)]).tobytes()


def payload(name, shape, offset, nbytes):
    return pack({"name": name, "dtype": "torch.float32", "shape": shape, "mem": {"fd": 0, "offset": offset}, "nbytes": nbytes})


def counts(seat):
    """Elements of the tensors that a seat has: they differ, and one is a scalar."""
    return {"w": (2 + seat) * 3, "scale": 1, **({"bias": 5} if seat == 1 else {})}


def shapes(seat):
    return {"w": [2 + seat, 3], "scale": [], **({"bias": [5]} if seat == 1 else {})}


def own_tensors(seat):
    tensors, at = [], 0
    for name, count in counts(seat).items():
        tensors.append(("own", payload(name, shapes(seat)[name], at, count * 4)))
        at += count * 4
    return tensors


def own_parts(frames, clients, short):
    """Seat i sends to seat i, part by part. All fields that have defaults have them."""
    pending = []
    for group, other in (("trainer", "inference"), ("inference", "trainer")):
        for seat in range(SIZE):
            frame = frames.get(f"own.{group}", "InitPair", short, pair_name="own", local_name=group,
                               expected_world_size=SIZE, remote_name=other)
            pending.append((clients[group, seat], clients[group, seat].send(frame)))
    for client, seq in pending:
        good(client.reply(seq))
    pending, maps = [], {}
    frame_of = {seat: frames.get(f"own.register{seat}", "RegisterTensors", short, batch_id="b", tensors=own_tensors(seat))
                for seat in range(SIZE)}
    for key, client in clients.items():
        nbytes = sum(counts(key[1]).values()) * 4
        fd, maps[key] = memory(nbytes)
        pending.append((client, client.send(frame_of[key[1]], [fd])))
        os.close(fd)
    for client, seq in pending:
        good(client.reply(seq))
    send = frames.get("send", "Transfer", short, batch_id="b", transfer_type="send")
    receive = frames.get("recv", "Transfer", short, batch_id="b", transfer_type="recv")
    query = frames.get("query", "QueryStatus", short, batch_id="b", state_name="transfer_signal")
    cleanup = frames.get("cleanup", "CleanupBatch", short, batch_id="b")
    for version in (1, 2):
        pending = []
        for (group, seat), client in clients.items():
            n = sum(counts(seat).values())
            maps[group, seat][:] = values(version, seat, n) if group == "trainer" else b"\xa5" * (n * 4)
            pending.append((client, client.send(send if group == "trainer" else receive)))
        for client, seq in pending:
            check(good(client.reply(seq))["version"] == version, "another version")
        for (group, seat), m in maps.items():
            check(m[:] == values(version, seat, sum(counts(seat).values())), f"{group} {seat} has not version {version}")
        for client in clients.values():
            check(good(client.call(query))["transfer_signal"] is False, "the signal is still set")
    for client in clients.values():
        good(client.call(cleanup))


def layouts(frames, clients, is_short):
    """With payloads: rows to columns; a time that is an integer, and one that is a float."""
    mesh = pack({"shape": [SIZE], "ranks": None})
    pending = []
    for group, other, dim in (("trainer", "inference", 0), ("inference", "trainer", 1)):
        frame = frames.get(f"rows.{group}", "InitPair", is_short, pair_name="rows", local_name=group, expected_world_size=SIZE,
                           remote_name=other, mesh_shape_payload=mesh, placements_payload=pack([["S", dim]]),
                           timestamp=1700000000 if dim else 1700000000.5)
        pending += [(clients[group, seat], clients[group, seat].send(frame)) for seat in range(SIZE)]
    for client, seq in pending:
        good(client.reply(seq))
    frame = frames.get("rows.register", "RegisterTensors", is_short, batch_id="b", bucket_size=1 << 20,
                       tensors=[("rows", payload("w", [4, 6], 0, 48))])
    pending, maps = [], {}
    for key, client in clients.items():
        fd, maps[key] = memory(48)
        pending.append((client, client.send(frame, [fd])))
        os.close(fd)
    for client, seq in pending:
        good(client.reply(seq))
    pending = []
    for (group, seat), client in clients.items():
        is_send = group == "trainer"
        maps[group, seat][:] = array.array("f", range(seat * 12, seat * 12 + 12)).tobytes() if is_send else b"\xa5" * 48
        way = "send" if is_send else "recv"
        pending.append((client, client.send(frames.get(way, "Transfer", is_short, batch_id="b", transfer_type=way))))
    for client, seq in pending:
        good(client.reply(seq))
    for seat in range(SIZE):
        wanted = array.array("f", [row * 6 + seat * 3 + column for row in range(4) for column in range(3)]).tobytes()
        check(maps["inference", seat][:] == wanted, f"inference {seat} has other columns")
    for client in clients.values():
        good(client.call(frames.get("cleanup", "CleanupBatch", is_short, batch_id="b")))


def questions(clients):
    """The same question has the same answer on all ranks of a group, and status tells the last one."""
    group = [clients["inference", seat] for seat in range(SIZE)]
    query = {"type": "QueryStatus", "batch_id": "b", "state_name": "transfer_signal"}
    pending = []
    for (name, seat), client in clients.items():
        fd, _ = memory(48)
        frame = {"type": "RegisterTensors", "batch_id": "b", "tensors": [["rows", payload("w", [4, 6], 0, 48)]]}
        pending.append((client, client.send(frame, [fd])))
        os.close(fd)
    for client, seq in pending:
        good(client.reply(seq))
    check("question" not in good(group[0].call(query)), "an answer without a question")
    for client in group:
        reply = good(client.call({**query, "question": 1}))
        check(reply["question"] == 1 and reply["transfer_signal"] is False, f"nothing is sent: {reply}")
    sends = [(clients["trainer", seat], clients["trainer", seat].send({"type": "Transfer", "batch_id": "b", "transfer_type": "send"}))
             for seat in range(SIZE)]
    number = 1
    while not good(group[1].call({**query, "question": number}))["transfer_signal"]:
        number += 1
        check(number < 200000, "the signal is not seen")
    for client in group:
        check(good(client.call({**query, "question": number}))["transfer_signal"] is True, "another answer")
        check(good(client.call({**query, "question": 1}))["transfer_signal"] is False, "the first answer has changed")
    receives = [(c, c.send({"type": "Transfer", "batch_id": "b", "transfer_type": "recv"})) for c in group]
    for client, seq in sends + receives:
        good(client.reply(seq))
    for client in reversed(group):
        check(good(client.call({**query, "question": number}))["transfer_signal"] is True, "the answer has changed")
        check(good(client.call({**query, "question": number + 1}))["transfer_signal"] is False, "the signal is still set")
        report = json.loads(good(client.call({"type": "Inspect"}))["report"])
        signals = [b["signals"] for b in report["batches"] if b["id"] == "b"]
        wanted = {"group": "inference", "question": number + 1, "transfer_signal": False}
        check(signals == [[wanted]], f"status: {signals}")
    bad(group[0].call({**query, "question": 9, "group_name": "trainer"}), "no registered pair of group 'trainer'")
    for client in clients.values():
        good(client.call({"type": "CleanupBatch", "batch_id": "b"}))


def together(clients):
    """whole_group, into files that agents write after the transfer: a receive ends when all of its group have ended."""
    pending, files = [], {}
    for (group, seat), client in clients.items():
        file = files[group, seat] = tempfile.TemporaryFile(dir="/dev/shm")
        file.write(values(1, seat, 6) if group == "trainer" else b"\xa5" * 24)
        file.flush()
        tensors = [["own", payload("w", [2, 3], 0, 24)]]
        pending.append((client, client.send({"type": "RegisterTensors", "batch_id": "b", "tensors": tensors}, [file.fileno()])))
    for client, seq in pending:
        good(client.reply(seq))
    transfer = {"type": "Transfer", "batch_id": "b", "whole_group": True}
    first, second = (clients["inference", seat] for seat in range(SIZE))
    pending = [(clients["trainer", seat], clients["trainer", seat].send({**transfer, "transfer_type": "send"})) for seat in range(SIZE)]
    pending.append((first, first.send({**transfer, "transfer_type": "recv"})))
    until = time.monotonic() + 20
    while os.pread(files["inference", 0].fileno(), 24, 0) != values(1, 0, 6):
        check(time.monotonic() < until, "inference 0 has not its part")
    query = {"type": "QueryStatus", "batch_id": "b", "state_name": "progress"}
    time.sleep(0.1)
    for key, other in clients.items():
        state = good(other.call(query))["state"]
        wanted = "idle" if other is second else "sending" if key[0] == "trainer" else "receiving"
        check(state == wanted, f"{key} is {state} before inference 1 has received")
    pending.append((second, second.send({**transfer, "transfer_type": "recv"})))
    for client, seq in pending:
        check(good(client.reply(seq))["version"] == 1, "another version")
    for seat in range(SIZE):
        check(os.pread(files["inference", seat].fileno(), 24, 0) == values(1, seat, 6), f"inference {seat} has not version 1")
    for client in clients.values():
        good(client.call({"type": "CleanupBatch", "batch_id": "b"}))


def refusals(clients):
    client = clients["trainer", 0]
    pair = {"type": "InitPair", "pair_name": "q", "local_name": "trainer", "expected_world_size": SIZE, "remote_name": "inference"}
    bad(client.call({**pair, "mesh_shape_payload": pack({"shape": [SIZE]})}), "a mesh and no placements")
    bad(client.call({**pair, "placements_payload": pack([["R"]])}), "placements and no mesh")
    bad(client.call({**pair, "timestamp": "now"}), "timestamp is a string; it must be a number")
    query = {"type": "QueryStatus", "batch_id": "b"}
    bad(client.call({**query, "state_name": "colour"}), "QueryStatus: state_name is 'colour'")
    bad(client.call(query), "QueryStatus: state_name is missing")
    bad(client.call({**query, "state_name": "version"}), "there is no batch 'b'")
    bad(client.call({"type": "Transfer", "batch_id": "b", "transfer_type": "push"}), "Transfer: transfer_type is 'push'")


agents = []
try:
    frames = Frames("--msgspec" in sys.argv[3:])
    clients = {}
    for group in ("trainer", "inference"):
        for seat in range(SIZE):
            agents.append(start(group, seat, SIZE))
            clients[group, seat] = Connection(agents[-1][1])
    for is_short in (False, True):
        own_parts(frames, clients, is_short)
        layouts(frames, clients, is_short)
    questions(clients)
    together(clients)
    refusals(clients)
    frames.finish()
finally:
    for agent, _ in reversed(agents):
        agent.terminate()
        agent.wait()
