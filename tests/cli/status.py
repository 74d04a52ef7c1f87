"""Two agents, a pair, a batch and some transfers; and what status, top and HTTP say of them at each step."""

import array
import fcntl
import json
import os
import pty
import select
import signal
import struct
import subprocess
import sys
import termios
import time
import urllib.error
import urllib.request

from raw import FOLDER, TENSORBUS, Connection, bad, check, command, good, init_pair, memory, register, start, stop, tensor

DEADLINE = 30


def tool(*words, status=0):
    run = subprocess.run([TENSORBUS, *words], capture_output=True, text=True, timeout=60, check=False)
    check(run.returncode == status, f"{words}: exit status {run.returncode}: {run.stdout} {run.stderr}")
    return run


def report(path):
    """What `status --json` says of one agent."""
    agents = json.loads(tool("status", "--json", "--timeout", "30", "--socket", path).stdout)["agents"]
    check(len(agents) == 1 and agents[0]["socket"] == path, f"agents: {agents}")
    return agents[0]


def until(claim, what):
    end = time.monotonic() + DEADLINE
    while not claim():
        check(time.monotonic() < end, what)
        time.sleep(0.02)


def get(url, method="GET"):
    request = urllib.request.Request(url, method=method)
    try:
        with urllib.request.urlopen(request, timeout=DEADLINE) as answer:
            return answer.status, answer.headers["Content-Type"], answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.headers["Content-Type"], error.read().decode()


def metrics(url):
    """The samples, by name and labels. Each is preceded by its HELP and TYPE."""
    code, kind, text = get(url + "/metrics")
    check(code == 200 and kind.startswith("text/plain; version=0.0.4"), f"/metrics: {code} {kind}")
    check(text.endswith("\n"), "/metrics does not end with a line")
    samples, types, helped = {}, {}, None
    for line in text.splitlines():
        words = line.split(" ")
        if words[:2] == ["#", "HELP"]:
            helped = words[2]
        elif words[:2] == ["#", "TYPE"]:
            check(words[2] == helped and words[2] not in types, f"TYPE without HELP, or twice: {line}")
            types[words[2]] = words[3]
        else:
            name, value = line.rsplit(" ", 1)
            family = name.split("{")[0]
            if types.get(helped) == "histogram":
                check(family in (helped + "_bucket", helped + "_sum", helped + "_count"), f"no sample of a histogram: {line}")
                family = helped
            check(family == helped and family in types, f"a sample of no family: {line}")
            check((types[family] == "counter") == family.endswith("_total"), f"the type of {family}")
            check(name not in samples, f"twice: {name}")
            samples[name] = float(value)
    for name, kind in types.items():
        if kind == "histogram":
            check_histogram(samples, name)
    return samples


def check_histogram(samples, name):
    """Buckets count up to the number of all, and their bounds ascend."""
    for direction in "send", "recv":
        label = f'direction="{direction}"'
        buckets = [(float(n.split('le="')[1][:-2]), v) for n, v in samples.items()
                   if n.startswith(f"{name}_bucket{{{label},")]
        check(len(buckets) > 2 and buckets == sorted(set(buckets)), f"{name}: {buckets}")
        counts = [count for _, count in buckets]
        check(counts == sorted(counts), f"{name}: {buckets}")
        check(buckets[-1] == (float("inf"), samples[f"{name}_count{{{label}}}"]), f"{name}: {buckets}")


def expect_metrics(url, **wanted):
    samples = metrics(url)
    for name, value in wanted.items():
        check(samples.get("tensorbus_" + name) == value, f"{name} is not {value}: {samples}")
    return samples


class Screen:
    """`tensorbus top` on a terminal."""

    def __init__(self, *words):
        self.master, self.slave = pty.openpty()
        fcntl.ioctl(self.slave, termios.TIOCSWINSZ, struct.pack("HHHH", 30, 100, 0, 0))
        self.before = termios.tcgetattr(self.slave)
        self.data = b""
        self.program = subprocess.Popen(
            [TENSORBUS, "top", *words], stdin=self.slave, stdout=self.slave, stderr=self.slave,
            env={**os.environ, "TERM": "xterm"}, start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
        )

    def read(self):
        if select.select([self.master], [], [], 0.05)[0]:
            self.data += os.read(self.master, 65536)

    def until_shows(self, what, times=1):
        def shows():
            self.read()
            return self.data.count(what) >= times

        until(shows, f"top does not show {what}: {self.data}")

    def ends(self):
        """As it should: all of the terminal's state is what it was."""
        def has_ended():
            self.read()
            return self.program.poll() is not None

        until(has_ended, "top does not end")
        while select.select([self.master], [], [], 0)[0]:
            self.read()
        check(self.program.returncode == 0, f"top ended with {self.program.returncode}: {self.data}")
        check(self.data.startswith(b"\033[?1049h\033[?25l"), f"top begins with {self.data[:40]}")
        check(self.data.endswith(b"\033[?25h\033[?1049l"), f"top ends with {self.data[-40:]}")
        check(termios.tcgetattr(self.slave) == self.before, "the terminal is not as it was")
        os.close(self.master)
        os.close(self.slave)


agents, screens = [], []
try:
    trainer, trainer_path = start("trainer", 0, 1, "--http", "0")
    agents.append(trainer)
    line = trainer.stdout.readline()
    check(line.startswith("metrics at http://127.0.0.1:") and line.endswith("/metrics\n"), f"printed {line}")
    url = line[len("metrics at ") : -len("/metrics\n")]
    inference, inference_path = start("inference", 0, 1)
    agents.append(inference)

    # Nobody has come yet. Whoever asks is not counted.
    r = report(trainer_path)
    check((r["group"], r["index"], r["size"], r["incarnation"], r["protocol"]) == ("trainer", 0, 1, 1, 2), f"{r}")
    check(r["pid"] == trainer.pid and r["state"] == "serving" and r["uptime"] > 0, f"{r}")
    check(r["store"] == {"connected": True, "why": ""}, f"{r}")
    check(r["clients"] == r["pairs"] == r["batches"] == r["peers"] == [], f"{r}")
    expect_metrics(url, store_connected=1, clients=0, peers_alive=0)
    check(get(url + "/healthz") == (200, "text/plain; charset=utf-8", "ok\n"), f"/healthz: {get(url + '/healthz')}")
    check(get(url + "/")[0] == 200 and get(url + "/page")[0] == 404 and get(url + "/metrics/x")[0] == 404, "other paths are served")
    check(get(url + "/status", "POST")[0] == 405, "POST is served")
    check(get(url + "/status", "HEAD")[::2] == (200, ""), "HEAD is not served")

    # A pair that waits, and for whom. A client's name may hold what terminals obey.
    a = Connection(trainer_path, hello=False)
    good(a.call({"type": "Hello", "version": 1, "token": None, "client": "evil\x1b[2J"}))
    b = Connection(inference_path)
    waiting = a.send(init_pair())

    def pairs():
        return report(trainer_path)["pairs"]

    until(lambda: pairs() and "inference 0 is missing" in pairs()[0]["why"], "nobody is said to be missing")
    pair = pairs()[0]
    check((pair["name"], pair["remote"], pair["state"]) == ("p", "inference", "waiting"), f"{pair}")
    expect_metrics(url, **{'pair_ready{pair="p",remote="inference"}': 0, "clients": 1})
    text = tool("status", "--socket", trainer_path).stdout
    check("inference 0 is missing" in text and "evil?[2J" in text and "\x1b" not in text, f"status: {text}")
    good(b.call(init_pair(local="inference", remote="trainer")))
    good(a.reply(waiting))
    pair = pairs()[0]
    check(pair["state"] == "ready" and pair["why"] == "" and pair["layout"] == pair["remote_layout"], f"{pair}")

    # A batch, and transfers.
    NBYTES = 64 * 32 * 4
    fd_a, memory_a = memory(NBYTES)
    fd_b, _ = memory(NBYTES)
    memory_a[:] = array.array("f", range(64 * 32)).tobytes()
    seq = a.send(register("b", [tensor("w", [64, 32], 0, NBYTES)]), [fd_a])
    until(lambda: [x["state"] for x in report(trainer_path)["batches"]] == ["registering"], "it is not registering")
    until(lambda: "(inference 0) has not registered batch 'b'" in report(trainer_path)["batches"][0]["why"],
          "nobody is said to be waited for")
    check("has not registered batch 'b'" in tool("status", "--socket", trainer_path).stdout, "status does not say so")
    good(b.call(register("b", [tensor("w", [64, 32], 0, NBYTES)]), [fd_b]))
    good(a.reply(seq))
    batch = report(trainer_path)["batches"][0]
    check((batch["id"], batch["pairs"], batch["tensors"], batch["bytes"]) == ("b", ["p"], 1, NBYTES), f"{batch}")
    check(batch["memory"] == "host", f"{batch}")
    check(batch["state"] == "idle" and batch["version"] == 0 and batch["last"] is None, f"{batch}")

    # Its tensors, and where they are.
    text = tool("inspect", "--json", f"agent:{trainer_path}").stdout
    inspected = json.loads(text)
    check((inspected["kind"], inspected["path"]) == ("agent", trainer_path), f"inspect: {text}")
    check([x["id"] for x in inspected["batches"]] == ["b"] and "list" not in batch, f"inspect: {text}")
    wanted = {"name": "w", "pair": "p", "dtype": "f32", "shape": [64, 32], "layout": "mesh=1 place=Replicate",
              "bytes": NBYTES, "memory": "host"}
    check(inspected["batches"][0]["list"] == [wanted], f"inspect: {text}")
    text = tool("inspect", f"agent:{trainer_path}").stdout
    check(f"agent    trainer 0, {trainer_path}\nbatches  1\n\nbatch b of evil?[2J (" in text, f"inspect: {text}")
    row = ["w", "p", "f32", "64,32", "mesh=1", "place=Replicate", str(NBYTES), "host"]
    check(row in [line.split() for line in text.splitlines()] and "\x1b" not in text, f"inspect: {text}")
    run = tool("inspect", f"agent:{trainer_path}.none", status=1)
    check(run.stdout == "" and f"{trainer_path}.none" in run.stderr, f"inspect: {run}")

    # One that waits for the other side.
    seq = b.send(command("Transfer", batch_id="b", transfer_type="recv"))
    until(lambda: report(inference_path)["batches"][0]["state"] == "receiving", "it is not receiving")
    transfer = report(inference_path)["batches"][0]["transfers"][0]
    check(transfer["direction"] == "recv" and transfer["bytes_done"] == 0, f"{transfer}")
    text = tool("top", "--once", "--socket", inference_path).stdout
    check("receiving" in text and "[--------------------]   0%" in text and "\x1b" not in text, f"top: {text}")
    good(a.call(command("Transfer", batch_id="b", transfer_type="send")))
    good(b.reply(seq))
    for version in (2, 3):
        seq = b.send(command("Transfer", batch_id="b", transfer_type="recv"))
        good(a.call(command("Transfer", batch_id="b", transfer_type="send")))
        good(b.reply(seq))
    for path, direction, key in ((trainer_path, "send", "sent"), (inference_path, "recv", "received")):
        r = report(path)
        batch = r["batches"][0]
        last = batch["last"]
        check((batch["state"], batch["version"], batch["transfers"], batch["error"]) == ("idle", 3, [], ""), f"{batch}")
        check(last["direction"] == direction and last["attempt"] == 3 and last["bytes_done"] == NBYTES, f"{last}")
        check(set(last["phases"]) == {"plan", "wait", "pack", "wire", "unpack", "commit"}, f"{last}")
        history = batch["history"]
        check([(h["version"], h["attempt"], h["succeeded"]) for h in history] == [(v, v, True) for v in (1, 2, 3)], f"{history}")
        check(history[-1] == last and abs(last["when"] - time.time()) < 600, f"{history}")
        check(0 < sum(last["phases"].values()) <= last["seconds"] * 1.01 + 1e-4, f"{last}")
        total = r["totals"][direction]
        check((total["transfers"], total["failures"], total["bytes"]) == (3, 0, 3 * NBYTES), f"{total}")
        check(r["pairs"][0][key] == 3 * NBYTES, f"{r['pairs']}")
        check(r["peers"][0][key] == 3 * NBYTES and r["peers"][0]["sent"] * r["peers"][0]["received"] == 0, f"{r['peers']}")
        check(batch["why"] == "", f"{batch}")
        check([p["alive"] for p in r["peers"]] == [True] and r["peers"][0]["rank"] != r["rank"], f"{r['peers']}")
    bound = 1024
    while bound < NBYTES:
        bound *= 4
    samples = expect_metrics(url, **{
        'transfer_duration_seconds_count{direction="send"}': 3,
        'transfer_size_bytes_sum{direction="send"}': 3 * NBYTES,
        f'transfer_size_bytes_bucket{{direction="send",le="{bound}"}}': 3,
        f'transfer_size_bytes_bucket{{direction="send",le="{bound // 4}"}}': 0,
        f'transfer_size_bytes_bucket{{direction="send",le="{4 * bound}"}}': 3,
        'transfer_size_bytes_bucket{direction="recv",le="+Inf"}': 0,
        'transfers_total{direction="send",outcome="success"}': 3,
        'transfers_total{direction="send",outcome="failure"}': 0,
        'transfers_total{direction="recv",outcome="success"}': 0,
        'bytes_total{direction="send"}': 3 * NBYTES,
        'pair_bytes_total{pair="p",direction="send"}': 3 * NBYTES,
        'peer_bytes_total{peer="rank 1 (inference 0)",direction="send"}': 3 * NBYTES,
        'peer_bytes_total{peer="rank 1 (inference 0)",direction="recv"}': 0,
        'batch_version{batch="b"}': 3,
        'batch_mixed{batch="b"}': 0,
        'batch_torn{batch="b"}': 0,
        'batch_in_doubt{batch="b"}': 0,
        'batch_bytes{batch="b"}': NBYTES,
        "peers_alive": 1,
        "peers_lost": 0,
    })
    check(samples['tensorbus_transfer_seconds{batch="b",direction="send"}'] > 0, f"{samples}")
    over_http = json.loads(get(url + "/status")[2])
    check(over_http["batches"] == report(trainer_path)["batches"], f"/status: {over_http}")
    text = tool("top", "--once", "--socket", trainer_path).stdout
    check("rank 1 (inference 0)  shm" in text, f"top: {text}")
    text = tool("status", "--socket", inference_path).stdout
    for word in ("inference 0 of 1", "received", "recv, done", "rank 0 (trainer 0)", "alive", "commit"):
        check(word in text, f"'{word}' is not in {text}")

    # One that fails, in time.
    failing = command("Transfer", batch_id="b", transfer_type="recv")
    bad(b.call({**failing, "timeout_ms": 200}), "has not ended")
    batch = report(inference_path)["batches"][0]
    check(batch["state"] == "failed" and "has not ended" in batch["error"] and batch["version"] == 3, f"{batch}")
    check(report(inference_path)["totals"]["recv"]["failures"] == 1, "the failure is not counted")

    # The live screen, which q and signals end.
    for way_out in (lambda s: os.write(s.master, b"xq"), lambda s: s.program.send_signal(signal.SIGTERM),
                    lambda s: os.write(s.master, b"\x03")):
        screen = Screen("--socket", trainer_path, "--interval", "0.1")
        screens.append(screen)
        screen.until_shows(b"trainer 0", times=3)
        way_out(screen)
        screen.ends()

    # An agent that is stuck: a sentence by the deadline, and the others are shown all the same.
    link = os.path.join(os.environ["XDG_RUNTIME_DIR"], "tensorbus")
    os.mkdir(link, 0o700)
    os.symlink(trainer_path, f"{link}/trainer-0.sock")
    os.symlink(inference_path, f"{link}/inference-0.sock")
    stop(inference)
    begun = time.monotonic()
    run = tool("status", "--timeout", "3", status=1)
    check(time.monotonic() - begun < 20, "the deadline was not kept")
    check("trainer 0 of 1" in run.stdout and "inference 0 of 1" not in run.stdout, f"status: {run.stdout}")
    check("inference-0.sock is silent" in run.stderr and run.stderr.count("\n") == 1, f"said: {run.stderr}")
    silent = json.loads(tool("status", "--timeout", "3", "--json", status=1).stdout)["agents"]
    check([("error" in agent) for agent in silent] == [True, False], f"silent: {silent}")
    inference.send_signal(signal.SIGCONT)
    check(len(json.loads(tool("status", "--json").stdout)["agents"]) == 2, "it does not answer again")

    # One that was killed leaves its socket; its peer says that it is lost.
    inference.kill()
    inference.wait()
    check(len(json.loads(tool("status", "--json").stdout)["agents"]) == 1, "who has ended is shown")
    check("the agent has ended" in tool("status", "--all", status=1).stderr, "--all does not tell of it")
    until(lambda: not report(trainer_path)["peers"][0]["alive"], "the peer is not lost")
    r = report(trainer_path)
    check(r["peers"][0]["why"] and r["pairs"][0]["state"] == "lost" and r["pairs"][0]["why"], f"{r}")
    expect_metrics(url, peers_alive=0, peers_lost=1, **{'pair_ready{pair="p",remote="inference"}': 0})
    check("lost: " in tool("status", "--socket", trainer_path).stdout, "status does not say that it is lost")
    check("lost peer" in tool("top", "--once", "--socket", trainer_path).stdout, "top does not say so")

    # Whoever is there again is no longer lost, and what went to it before still counts.
    before = r["peers"][0]["sent"]
    inference, inference_path = start("inference", 0, 1)
    agents.append(inference)
    b = Connection(inference_path)
    seq = a.send(init_pair())
    good(b.call(init_pair(local="inference", remote="trainer")))
    good(a.reply(seq))
    peers = report(trainer_path)["peers"]
    check([(p["alive"], p["sent"]) for p in peers] == [(True, before)] and before >= 3 * NBYTES, f"{peers}")
    expect_metrics(url, peers_alive=1, peers_lost=0)
    inference.terminate()
    check(inference.wait(20) == 0, f"it ended with {inference.returncode}")

    trainer.terminate()
    check(trainer.wait(20) == 0, f"it ended with {trainer.returncode}")
    check(not os.path.exists(trainer_path), "its socket is still there")

    # A store that is lost, while nobody can serve it; and that is back.
    os.mkdir(f"{FOLDER}/here")
    address = f"unix:{FOLDER}/here/store"
    store = subprocess.Popen([TENSORBUS, "store", "--listen", address], stdout=subprocess.PIPE, text=True)
    agents.append(store)
    check(store.stdout.readline().startswith("serving "), "the store did not start")

    # One that does not answer when it has to decide: who receives does not know, and says so until it does.
    source, source_path = start("source", 0, 1, store=address)
    agents.append(source)
    target, target_path = start("target", 0, 1, "--http", "0", store=address)
    agents.append(target)
    url = target.stdout.readline()[len("metrics at ") : -len("/metrics\n")]
    a, b = Connection(source_path), Connection(target_path)
    seq = a.send(init_pair(local="source", remote="target"))
    good(b.call(init_pair(local="target", remote="source")))
    good(a.reply(seq))
    by_shadow = {**register("b", [tensor("w", [64, 32], 0, NBYTES)]), "commit": "shadow"}
    seq = a.send(by_shadow, [fd_a])
    good(b.call(by_shadow, [fd_b]))
    good(a.reply(seq))

    def in_doubt():
        batch = report(target_path)["batches"][0]
        text = tool("status", "--socket", target_path).stdout + tool("top", "--once", "--socket", target_path).stdout
        check(text.count("(in doubt)") == 2 * batch["in_doubt"], f"status and top: {text}")
        expect_metrics(url, **{'batch_in_doubt{batch="b"}': batch["in_doubt"], 'batch_torn{batch="b"}': 0})
        return batch["in_doubt"], batch["version"]

    stop(store)
    seq = a.send(command("Transfer", batch_id="b", transfer_type="send"))
    bad(b.call({**failing, "timeout_ms": 3000}), "version 1 of batch 'b' is committed is not known")
    a.reply(seq)
    check(in_doubt() == (True, 0), "it is not in doubt")
    store.send_signal(signal.SIGCONT)
    until(lambda: "is not known" not in b.call({**failing, "timeout_ms": 500})["message"], "it does not find out")
    check(in_doubt() == (False, 1), "it is in doubt still")

    spare, spare_path = start("spare", 0, 1, store=address)
    agents.append(spare)
    check(report(spare_path)["store"] == {"connected": True, "why": ""}, "there is no store")
    os.rename(f"{FOLDER}/here", f"{FOLDER}/away")
    store.kill()
    until(lambda: not report(spare_path)["store"]["connected"], "the store is not lost")
    check(report(spare_path)["store"]["why"], "it is not said why")
    check("store   lost: " in tool("status", "--socket", spare_path).stdout, "status does not say so")
    os.rename(f"{FOLDER}/away", f"{FOLDER}/here")
    until(lambda: report(spare_path)["store"]["connected"], "the store is not back")
finally:
    for screen in screens:
        screen.program.kill()
        screen.program.wait()
    for agent in agents:
        agent.kill()
        agent.wait()
