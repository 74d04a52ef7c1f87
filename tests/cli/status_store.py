"""What `status --store` says of a bus: who is there and who is missing, pairs, batches and their versions."""

import json
import os
import re
import signal
import socket
import subprocess
import time

from raw import FOLDER, TENSORBUS, Connection, check, command, good, init_pair, memory, pack, register, start, tensor

URL = f"unix:{FOLDER}/store"
DEADLINE = 30
NBYTES = 64 * 32 * 4


def tool(*words, status=0):
    run = subprocess.run([TENSORBUS, "status", "--store", URL, *words], capture_output=True, text=True, timeout=60, check=False)
    check(run.returncode == status, f"{words}: exit status {run.returncode}: {run.stdout} {run.stderr}")
    return run


def bus():
    return json.loads(tool("--json").stdout)


def until(claim, what):
    end = time.monotonic() + DEADLINE
    while not claim():
        check(time.monotonic() < end, f"{what}: {bus()}")
        time.sleep(0.05)


def rows(text, first):
    """The words of the lines of the table whose first title this is."""
    lines = text.splitlines()
    at = next(i for i, line in enumerate(lines) if line.startswith(first + " "))
    end = next((i for i in range(at, len(lines)) if not lines[i]), len(lines))
    return [re.split(r"  +", line.strip()) for line in lines[at + 1 : end]]


def batch(name="b"):
    return next((b for b in bus()["batches"] if b["name"] == name), None)


def sides(name="b"):
    return {side["group"]: side for side in (batch(name) or {"sides": []})["sides"]}


def main():
    agents = []

    def agent(*words):
        process, path = start(*words)
        agents.append(process)
        return process, path

    try:
        # Nobody is there, or nothing in it.
        check("the socket is missing" in tool(status=1).stderr, f"without a store: {tool(status=1).stderr}")
        trainer, trainer_path = agent("trainer", 0, 1)
        _, first_path = agent("inference", 0, 2)
        found = bus()
        check((found["store"], found["processes"], found["machines"]) == (URL, 2, 1), f"{found}")
        groups = {g["name"]: (g["size"], g["present"], g["missing"]) for g in found["groups"]}
        check(groups == {"trainer": (1, 1, []), "inference": (2, 1, [1])}, f"{groups}")
        seat = next(s for s in found["seats"] if s["group"] == "trainer")
        version = subprocess.run([TENSORBUS, "--version"], capture_output=True, text=True, check=True).stdout.split()[1]
        check((seat["machine"], seat["pid"], seat["version"]) == (socket.gethostname(), trainer.pid, version), f"{seat}")
        check(0 <= seat["age"] < 600 and "shm" in seat["transports"] and "devices" not in seat, f"{seat}")
        text = tool().stdout
        check(["inference", "2", "1", "1"] in rows(text, "group"), text)
        check(text.startswith(f"{URL}: 2 processes on 1 machine\n"), text)
        row = rows(text, "machine")
        check(len(row) == 1 and row[0][:2] == [socket.gethostname(), "inference 0, trainer 0"], text)

        # A pair that waits, for a seat that is empty, then for one whose program has not asked.
        a = Connection(trainer_path)
        b = Connection(first_path)
        waiting = a.send(init_pair(placements=(["R"],)))
        until(lambda: bus()["pairs"], "no pair")
        check(bus()["pairs"][0]["state"] == "waiting", f"{bus()['pairs']}")
        check("waiting: inference 0,1 missing" in tool().stdout, tool().stdout)
        _, second_path = agent("inference", 1, 2)
        c = Connection(second_path)
        layout = pack_pair()
        other = b.send(layout)
        until(lambda: "waiting: inference 1 missing" in tool().stdout, "who is missing is not told")
        good(c.call(layout))
        good(a.reply(waiting))
        good(b.reply(other))
        pair = bus()["pairs"][0]
        check((pair["name"], pair["state"]) == ("p", "ready"), f"{pair}")
        check({s["group"] for s in pair["sides"]} == {"trainer", "inference"}, f"{pair}")

        # A batch that waits for the other group, then for one of its ranks.
        fds = [memory(NBYTES)[0] for _ in range(3)]
        seqs = [(a, a.send(register("b", [tensor("w", [64, 32], 0, NBYTES)]), [fds[0]]))]
        until(lambda: "inference" in sides() and "trainer" in sides(), "no batch")
        check(batch()["state"] == "waiting" and sides()["inference"]["state"] == "not registered", f"{batch()}")
        check("inference 0 has not registered" in tool().stdout, tool().stdout)
        seqs.append((b, b.send(register("b", [tensor("w", [64, 32], 0, NBYTES)]), [fds[1]])))
        until(lambda: sides()["inference"].get("missing") == [1], "who is missing is not told")
        check("inference 1 missing" in tool().stdout, tool().stdout)
        seqs.append((c, c.send(register("b", [tensor("w", [64, 32], 0, NBYTES)]), [fds[2]])))
        for connection, seq in seqs:
            good(connection.reply(seq))
        until(lambda: batch()["state"] == "ready", "it is not ready")
        check((batch()["tensors"], batch()["bytes"], batch()["pair"]) == (1, NBYTES, "p"), f"{batch()}")
        check({s.get("devices") for s in bus()["seats"]} == {"host"}, f"{bus()['seats']}")

        # Versions, and how old they are.
        for _ in range(2):
            seqs = [(x, x.send(command("Transfer", batch_id="b", transfer_type="recv"))) for x in (b, c)]
            good(a.call(command("Transfer", batch_id="b", transfer_type="send")))
            for connection, seq in seqs:
                good(connection.reply(seq))
        until(lambda: sides()["inference"]["version"] == 2 and sides()["trainer"]["sent"] == 2, "versions")
        check(0 <= sides()["inference"]["age"] < 600 and not sides()["inference"]["torn"], f"{sides()}")
        row = rows(tool().stdout, "batch")[0]
        check(row[:4] == ["b", "p", "1", "8 KiB"] and re.search(r"inference has 2, \d+ s ago", row[4])
              and "trainer sent 2" in row[4] and row[5] == "ready", f"{row}")
        row = rows(tool("--all").stdout, "seat")
        check([r[0] for r in row] == ["inference 0", "inference 1", "trainer 0"], f"{row}")

        # A transfer under way: what the first rank of each group has of it.
        seqs = [(a, a.send(command("Transfer", batch_id="b", transfer_type="send")))]
        until(lambda: sides()["trainer"]["transfers"], "the send is not told")
        sent = sides()["trainer"]["transfers"][0]
        check((sent["direction"], sent["bytes_done"], sent["seconds"], sent["gb_per_s"]) == ("send", 0, 0, 0), f"{sent}")
        check(sent["bytes_total"] > 0 and not sides()["inference"]["transfers"], f"{sides()}")
        row = rows(tool().stdout, "batch")[0]
        check(re.search(r"; trainer 0 sends (3: )?0 of \d+ KiB", row[5]), f"{row}")
        seqs += [(x, x.send(command("Transfer", batch_id="b", transfer_type="recv"))) for x in (b, c)]
        for connection, seq in seqs:
            good(connection.reply(seq))
        until(lambda: not sides()["trainer"]["transfers"] and sides()["inference"]["version"] == 3, "it is still told")

        # It goes on as long as somebody reads.
        watch = subprocess.Popen([TENSORBUS, "status", "--store", URL, "--watch", "--interval", "0.1", "--json"],
                                 stdout=subprocess.PIPE, text=True)
        lines = [json.loads(watch.stdout.readline()) for _ in range(3)]
        check(all(line["processes"] == 3 for line in lines), f"{lines}")
        agents[2].kill()
        agents[2].wait()
        end = time.monotonic() + DEADLINE
        while json.loads(watch.stdout.readline())["processes"] != 2:
            check(time.monotonic() < end, "who has gone is still shown")
        watch.send_signal(signal.SIGINT)
        check(watch.wait(timeout=DEADLINE) == -signal.SIGINT, "--watch does not end")
        until(lambda: batch()["state"] == "failed", "the loss is not told")
        until(lambda: "was lost" in tool().stdout, "the reason is not told")

        # A batch that is gone is not shown any more.
        a.socket.close()
        b.socket.close()
        until(lambda: not bus()["batches"], "the batch is still shown")
        if os.environ.get("TB_SHOW"):
            print(tool().stdout)
    finally:
        for process in agents:
            process.kill()
            process.wait()


def pack_pair():
    """Both seats of the group have all of each tensor."""
    pair = init_pair(local="inference", remote="trainer", size=2)
    return {**pair, "mesh_shape_payload": pack({"shape": [2], "ranks": None})}


main()
