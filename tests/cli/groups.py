"""Pairs whose local group is none of the agents' own: the agents enter it, if their seats follow from the command."""

import array
import json
import os

from raw import Connection, bad, check, command, good, memory, pack, start

SIZE = 2


def pair(name, local, size, remote, **options):
    return {"type": "InitPair", "pair_name": name, "local_name": local, "expected_world_size": size, "remote_name": remote,
            "mesh_shape_payload": pack({"shape": [size]}), "placements_payload": pack([["S", 0]]), **options}


def call_all(calls):
    pending = [(client, client.send(*message)) for client, *message in calls]
    return [good(client.reply(seq)) for client, seq in pending]


def move(batch, name, sources, targets, rows=12):
    """From the seats of one group to those of another, by rows, without saying for which groups the tensors are."""
    maps, calls = {}, []
    for group in (sources, targets):
        share = rows // len(group) * 4
        for seat, client in enumerate(group):
            fd, maps[group is sources, seat] = memory(share)
            tensor = pack({"name": "w", "dtype": "f32", "shape": [rows], "mem": {"fd": 0}, "nbytes": share})
            calls.append((client, {"type": "RegisterTensors", "batch_id": batch, "tensors": [[name, tensor]]}, [fd]))
    call_all(calls)
    for _, _, (fd,) in calls:
        os.close(fd)
    for (is_source, seat), m in maps.items():
        n = len(m) // 4
        m[:] = array.array("f", [100 + seat * n + i for i in range(n)]).tobytes() if is_source else b"\xa5" * len(m)
    call_all([(c, command("Transfer", batch_id=batch, transfer_type="send")) for c in sources]
             + [(c, command("Transfer", batch_id=batch, transfer_type="recv")) for c in targets])
    got = b"".join(maps[False, seat][:] for seat in range(len(targets)))
    check(got == array.array("f", range(100, 100 + rows)).tobytes(), f"{name}: not what was sent")


agents = []
try:
    for group in ("trainer", "inference"):
        for seat in range(SIZE):
            agents.append(start(group, seat, SIZE))
    trainer = [Connection(path) for _, path in agents[:SIZE]]
    inference = [Connection(path) for _, path in agents[SIZE:]]

    # As many as the agent's own group has: the same seats. Twice, by two clients at once, of one agent too.
    again = Connection(agents[0][1])
    call_all([(c, pair("obs", "obs_source", SIZE, "obs_target")) for c in [*trainer, again]]
             + [(c, pair("obs", "obs_target", SIZE, "obs_source")) for c in inference])
    move("b", "obs", trainer, inference)

    # One rank: seat 0. It need not be the first of its agents.
    call_all([(trainer[1], pair("one", "single", 1, "other")), (inference[1], pair("one", "other", 1, "single"))])
    move("c", "one", [trainer[1]], [inference[1]])

    # Any others: by `index`; agents of two groups make one.
    three = pair("three", "three", 3, "last")
    for client in trainer:
        bad(client.call(three), "has no seat in group 'three'; which of 3 seats it should take does not follow from the command: pass 'index'")
    bad(trainer[0].call({**three, "index": 3}), "seat 3 is none of the 3 seats of group 'three'")
    call_all([(trainer[1], {**three, "index": 0}), (inference[0], {**three, "index": 1}), (trainer[0], {**three, "index": 2}),
              (inference[1], pair("three", "last", 1, "three"))])
    move("d", "three", [trainer[1], inference[0], trainer[0]], [inference[1]])
    bad(trainer[0].call({**three, "index": 1}), "the agent has seat 2 in group 'three', not seat 1 as pair 'three' says")
    good(trainer[0].call(three))
    bad(trainer[0].call(pair("three", "three", 4, "last")), "group 'three' has 3 ranks, not 4 as is expected for pair 'three'")

    # The question of a batch whose only group was entered.
    query = command("QueryStatus", batch_id="d", state_name="transfer_signal")
    for client in (trainer[0], trainer[1], inference[0]):
        reply = good(client.call({**query, "question": 1}))
        check(reply["question"] == 1 and reply["transfer_signal"] is False, f"question: {reply}")
    report = json.loads(good(trainer[0].call(command("Inspect")))["report"])
    check([b["signals"][0]["group"] for b in report["batches"] if b["id"] == "d"] == ["three"], f"status: {report['batches']}")

    # A client at the wrong socket does not take the other group's seat; nor does one whose seat is taken.
    bad(trainer[0].call(pair("p", "nobody", SIZE, "trainer")), "but in the other group, trainer; which of 2 seats")
    bad(trainer[0].call({**pair("p", "inference", SIZE, "somebody"), "timeout_ms": 2000}), "inference")
    check(all(a.poll() is None for a, _ in agents), "an agent has ended")

    bad(trainer[0].call(pair("p", "same", 1, "same")), "'same' can't be both of them")

    # Both sides of a pair at one agent: then the tensors' sides have to be said.
    calls = [(trainer[0], {**pair("both", a, 1, b), "index": 0}) for a, b in (("left", "right"), ("right", "left"))]
    call_all(calls)
    fd, _ = memory(16)
    tensor = pack({"name": "w", "dtype": "f32", "shape": [4], "mem": {"fd": 0}, "nbytes": 16})
    frame = {"type": "RegisterTensors", "batch_id": "e", "tensors": [["both", tensor]]}
    bad(trainer[0].call(frame, [fd]), "pass 'sides' to say for which the tensors are")
    two = {**frame, "tensors": [["both", tensor]] * 2, "sides": ["left", "right"]}
    good(trainer[0].call(two, [fd]))

    for agent, path in reversed(agents):
        agent.terminate()
        check(agent.wait(20) == 0, f"{path} ended with {agent.returncode}")
    agents = []
finally:
    for agent, _ in agents:
        agent.kill()
        agent.wait()
