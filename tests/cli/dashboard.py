"""The live page in a real browser: agents, their transfers, one that is killed; with the keyboard, in light and dark."""

import array
import base64
import http.server
import json
import os
import subprocess
import threading
import time
import urllib.error
import urllib.request

from browser import PROGRAM, Browser
from raw import FOLDER, TENSORBUS, Connection, check, command, good, memory, pack, start, tensor

RANKS = int(os.environ.get("TB_RANKS", "2"))  # on each side
PICTURES = os.environ.get("TB_PICTURES")  # a folder for screenshots
NBYTES, DEADLINE = 1 << 20, 30
agents, others = [], []


def until(claim, what, seconds=DEADLINE):
    end = time.monotonic() + seconds
    while not claim():
        check(time.monotonic() < end, what() if callable(what) else what)
        time.sleep(0.02)


def get(url, **headers):
    try:
        with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=DEADLINE) as answer:
            return answer.status, answer.headers, answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.headers, error.read().decode()


def serve(*words):
    program = subprocess.Popen([TENSORBUS, "dashboard", *words], stdout=subprocess.PIPE, text=True)
    others.append(program)
    line = program.stdout.readline()
    check(line.startswith("page at http://") and line.endswith("/\n"), f"printed {line}")
    return program, line[len("page at ") : -1]


def pair_of(local, remote, place):
    return command(
        "InitPair", pair_name="weights", local_name=local, expected_world_size=RANKS, remote_name=remote,
        mesh_shape_payload=pack({"shape": [RANKS], "ranks": None}), placements_payload=pack([place]),
    )


def make_batch():
    """A connection to each agent, with the batch registered: rows on the trainer, columns on the engine."""
    all_of = []
    for i, (_, path) in enumerate(agents):
        local, remote, place = ("trainer", "engine", ["S", 0]) if i < RANKS else ("engine", "trainer", ["S", 1])
        c = Connection(path)
        all_of.append((c, c.send(pair_of(local, remote, place))))
    for c, seq in all_of:
        good(c.reply(seq))
    side = RANKS * 128
    waiting = []
    for c, _ in all_of:
        nbytes = side * 128 * 4
        fd, data = memory(nbytes)
        data[:] = array.array("f", range(side * 128)).tobytes()
        message = command("RegisterTensors", batch_id="step", bucket_size=NBYTES,
                          tensors=[["weights", tensor("w", [side, side], 0, nbytes)]])
        waiting.append((c, c.send(message, [fd])))
    for c, seq in waiting:
        good(c.reply(seq))
    return [c for c, _ in all_of]


def transfer(connections, versions):
    for _ in range(versions):
        waiting = [(c, c.send(command("Transfer", batch_id="step", transfer_type="send" if i < RANKS else "recv")))
                   for i, c in enumerate(connections)]
        for c, seq in waiting:
            good(c.reply(seq))


def check_http(url):
    code, headers, page = get(url)
    check(code == 200 and headers["Content-Type"] == "text/html; charset=utf-8", f"/: {code}")
    check("default-src 'none'" in headers["Content-Security-Policy"], f"/: {headers}")
    check("src=" not in page and "http://" not in page and "https://" not in page, "the page has external files")
    code, _, text = get(url + "status")
    check(code == 200 and len(json.loads(text)["agents"]) == 2 * RANKS, f"/status: {code} {text}")
    check(get(url + "healthz")[2] == "ok\n" and get(url + "metrics")[0] == 404, "other paths")
    check(get(url + "status", Host="evil.example")[0] == 403, "a page of another site can read the status")
    with urllib.request.urlopen(url + "events", timeout=DEADLINE) as events:
        check(events.headers["Content-Type"] == "text/event-stream", f"events: {events.headers}")
        for _ in range(2):
            line, end = events.readline(), events.readline()
            check(line.startswith(b"data: {") and end == b"\n", f"an event: {line[:80]}")
            json.loads(line[6:])


def check_token():
    """Beyond loopback, whoever looks needs the token."""
    token = "t" * 32
    with open(f"{FOLDER}/token", "w") as file:
        file.write(token + "\n")
    refused = subprocess.run([TENSORBUS, "dashboard", "--listen", "0.0.0.0:0"], capture_output=True, text=True, timeout=60,
                             check=False)
    check(refused.returncode == 1 and "give --token-file" in refused.stderr, f"without a token: {refused}")
    program, url = serve("--listen", "0.0.0.0:0", "--token-file", f"{FOLDER}/token", "--socket", f"{FOLDER}/none")
    url = url.replace("0.0.0.0", "127.0.0.1")
    code, headers, _ = get(url)
    check(code == 401 and headers["WWW-Authenticate"].startswith("Basic"), f"without a token: {code} {headers}")
    for wrong in "Bearer " + "u" * 32, "Bearer t", "Basic " + base64.b64encode(b"x:y").decode(), "Basic ?":
        check(get(url + "status", Authorization=wrong)[0] == 401, f"taken: {wrong}")
    for right in "Bearer " + token, "Basic " + base64.b64encode(f"any:{token}".encode()).decode():
        check(get(url + "status", Authorization=right)[0] == 200, f"refused: {right}")
    check(get(url + "healthz")[0] == 200, "/healthz wants a token")
    program.terminate()
    check(program.wait(DEADLINE) == 0, "the dashboard does not end")


def picture(browser, name):
    if PICTURES:
        browser.save_screenshot(f"{PICTURES}/{name}.png")


def look(url, connections):
    browser = Browser(FOLDER)
    try:
        browser.open(url)
        until(lambda: f"{2 * RANKS} of {2 * RANKS}" in browser.text(), lambda: f"not all ranks are shown: {browser.text()}")
        text = browser.text()
        for wanted in ("trainer: ", "engine: ", "weights", "step", "idle", "Bytes between ranks", "store connected"):
            check(wanted in text, f"'{wanted}' is not shown: {text}")
        check(browser.evaluate("document.querySelectorAll('#history tbody tr').length") == 8, f"history: {text}")
        versions = browser.evaluate("[...document.querySelectorAll('#history td:first-child')].map(cell => Number(cell.innerText))")
        check(versions == sorted(versions, reverse=True), f"versions are not in order: {versions}")
        ids = browser.evaluate("/[0-9a-f]{8}-[0-9a-f]{4}/.test(document.querySelector('#ranks').innerText)")
        check(not ids, f"the id of a machine is shown in full: {text}")
        cells = browser.evaluate("heat.cells.size")
        check(cells == RANKS * RANKS, f"the heat map has {cells} cells")
        transfer(connections, 1)
        until(lambda: browser.evaluate("document.querySelector('#batches tbody').innerText").count("\t5\t") == 2,
              lambda: f"version 5 is not shown: {browser.text()}", 5)

        # With the keyboard: to the ranks, and along them.
        for _ in range(20):
            browser.press("Tab")
            if browser.evaluate("document.activeElement.className").startswith("seat"):
                break
        browser.press("ArrowRight")
        check("1" in browser.evaluate("document.querySelector('#rank').innerText"), "a rank is not described")
        check(browser.evaluate("document.activeElement.dataset.key") in ("engine 1", "trainer 1"), "the focus is elsewhere")
        browser.evaluate("document.querySelector('#heat').focus()")
        browser.press("ArrowDown")
        browser.press("ArrowRight")
        check(" to " in browser.evaluate("document.querySelector('#cell').textContent"), "a cell is not described")
        colours = []
        for theme in "light", "dark":
            browser.use_theme(theme)
            colours.append(browser.evaluate("getComputedStyle(document.body).backgroundColor"))
            time.sleep(1.2 if PICTURES else 0)
            picture(browser, f"{2 * RANKS}-{theme}")
        check(colours[0] != colours[1], f"light and dark are the same: {colours}")

        # An agent that is killed shows up within two seconds.
        agents[1][0].kill()
        agents[1][0].wait()
        begun = time.monotonic()
        until(lambda: "1 lost" in browser.text(), lambda: f"the loss is not shown: {browser.text()}")
        took = time.monotonic() - begun
        print(f"the loss was shown after {took:.2f} s")
        check("trainer 1" in browser.evaluate("document.querySelector('#failures').innerText"), "it is not named")
        browser.use_theme("light")
        picture(browser, f"{2 * RANKS}-lost")
        return took
    finally:
        browser.close()


def bus_of(url):
    return json.loads(get(url + "status")[2])["bus"]


def check_bus(url):
    """With --store and no agent to ask: the whole bus, as the store knows it."""
    bus = bus_of(url)
    check({g["name"]: g["present"] for g in bus["groups"]} == {"trainer": RANKS, "engine": RANKS}, f"groups: {bus['groups']}")
    check([p["state"] for p in bus["pairs"]] == ["ready"], f"pairs: {bus['pairs']}")
    until(lambda: {s["group"]: s.get("version") or s.get("sent") for s in bus_of(url)["batches"][0]["sides"]}
          == {"trainer": 3, "engine": 3}, lambda: f"versions: {bus_of(url)['batches']}")


def transfers_of(url):
    return [t["direction"] for side in bus_of(url)["batches"][0]["sides"] for t in side["transfers"]]


def look_at_transfer(url, connections):
    """With --store and no agent to ask: a transfer under way, here receivers that wait."""
    browser = Browser(FOLDER) if PROGRAM else None
    try:
        waiting = [(c, c.send(command("Transfer", batch_id="step", transfer_type="recv"))) for c in connections[RANKS:]]
        until(lambda: transfers_of(url) == ["recv"], lambda: f"no transfer: {bus_of(url)['batches']}")
        if browser:
            browser.open(url)
            until(lambda: "engine 0\tstep\treceives" in browser.evaluate("document.querySelector('#transfers')?.innerText || ''"),
                  lambda: f"the transfer is not shown: {browser.text()}")
            picture(browser, f"{2 * RANKS}-store-transfer")
        waiting += [(c, c.send(command("Transfer", batch_id="step", transfer_type="send"))) for c in connections[:RANKS]]
        for c, seq in waiting:
            good(c.reply(seq))
        until(lambda: not transfers_of(url), lambda: f"it is still told: {bus_of(url)['batches']}")
        if browser:
            until(lambda: "none at the moment" in browser.evaluate("document.querySelector('#transfers').innerText"),
                  lambda: f"it is still shown: {browser.text()}")
    finally:
        if browser:
            browser.close()


def look_at_bus(url, groups):
    """The page has it, and who is killed now."""
    seat = [(s["group"], s["index"]) for s in bus_of(url)["seats"] if s["group"] == "trainer" and "gone" not in s][0]
    browser = Browser(FOLDER) if PROGRAM else None
    try:
        if browser:
            browser.open(url)
            until(lambda: all(g in browser.text() for g in groups), lambda: f"a group is not shown: {browser.text()}")
            for wanted in ("weights", "step", "store connected", "Shard(1)"):
                check(wanted in browser.text(), f"'{wanted}' is not shown: {browser.text()}")
        agents[seat[1]][0].kill()
        agents[seat[1]][0].wait()
        begun = time.monotonic()
        until(lambda: seat in [(s["group"], s["index"]) for s in bus_of(url)["seats"] if "gone" in s],
              lambda: f"the loss is not told: {bus_of(url)['seats']}")
        if browser:
            until(lambda: f"trainer {seat[1]}" in browser.evaluate("document.querySelector('#failures').innerText"),
                  lambda: f"the loss is not shown: {browser.text()}")
        took = time.monotonic() - begun
        print(f"the store's page showed the loss after {took:.2f} s")
        if browser:
            picture(browser, f"{2 * RANKS}-store")
        return took
    finally:
        if browser:
            browser.close()


def made_up(page, ranks, second):
    """What a bus of many ranks would say, `ranks` on each side, of which all send a part to eight others."""
    def report(group, index):
        rank = index + (ranks if group == "engine" else 0)
        is_engine = group == "engine"
        peers = [{"rank": (index * 8 + k) % ranks + (0 if is_engine else ranks), "host": f"node{(index * 8 + k) % ranks // 8}",
                  "label": f"rank 0 ({'trainer' if is_engine else 'engine'} {(index * 8 + k) % ranks})", "transport": "ucx",
                  "sent": 0 if is_engine else (second + k) << 20, "received": (second + k) << 20 if is_engine else 0,
                  "alive": True, "why": ""} for k in range(8)]
        transfer = {"direction": "recv" if is_engine else "send", "attempt": second, "bytes_done": second % 10 << 27,
                    "bytes_total": 10 << 27, "seconds": 0.5, "gb_per_s": 1.5, "phases": {"wait": 0.1, "wire": 0.4}}
        past = [{**transfer, "attempt": a, "version": a, "succeeded": True, "when": time.time() - second + a,
                 "phases": {"wait": 0.1 * (a % 3), "wire": 0.4, "commit": 0.01}} for a in range(max(1, second - 15), second + 1)]
        batch = {"id": "step", "pairs": ["weights"], "bytes": 1 << 30, "state": "receiving" if is_engine else "sending",
                 "version": second, "torn": False, "in_doubt": False, "mixed": False, "memory": f"cuda:{index % 8}",
                 "transfers": [transfer], "history": past, "error": "", "why": "", "tensors": 300}
        pair = {"name": "weights", "local": group, "remote": "engine", "state": "ready", "why": "", "sent": second << 30,
                "layout": "mesh=512 place=Shard(0)", "remote_layout": "mesh=512 place=Shard(1)"}
        return {"group": group, "index": index, "size": ranks, "rank": rank, "pid": 1000 + rank, "version": "0.2.0",
                "uptime": second, "store": {"connected": True}, "peers": peers, "pairs": [pair], "batches": [batch],
                "totals": {"send": {"bytes": second << 30}, "recv": {"bytes": 0}}}

    return json.dumps({"title": f"{2 * ranks} ranks", "time": time.time(), "bus": None, "agents": [
        {"where": f"{group}-{i}", "report": report(group, i), "why": "", "has_ended": False, "seat": None}
        for group in ("trainer", "engine") for i in range(ranks)]})


def look_at_many(page, ranks):
    """How long the page takes for a document of many ranks; none of its own program's can be as large here."""
    documents = [made_up(page, ranks, second) for second in range(1, 7)]

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            is_page = self.path == "/"
            self.send_response(200)
            self.send_header("Content-Type", "text/html" if is_page else "text/event-stream")
            self.end_headers()
            if is_page:
                self.wfile.write(page.encode())
                return
            for document in documents:
                self.wfile.write(b"data: " + document.encode() + b"\n\n")
                time.sleep(0.5)
            time.sleep(DEADLINE)

        def log_message(self, *_):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    browser = Browser(FOLDER)
    try:
        browser.call("Performance.enable", timeDomain="threadTicks")
        browser.open(f"http://127.0.0.1:{server.server_port}/")
        until(lambda: browser.evaluate("document.querySelector('#batches tbody')?.innerText.includes('\\t6\\t')"), "version 6 is not shown")
        check(f"{2 * ranks} of {2 * ranks}" in browser.text(), "not all ranks are shown")
        ends = [(i, (i * 8 + k) % ranks) for i in range(ranks) for k in range(8)]
        cells = {(i, ranks + j) for i, j in ends} | {(j, ranks + i) for i, j in ends}
        check(browser.evaluate("heat.cells.size") == len(cells), "the heat map lacks cells")
        used = 1e3 * sum(m["value"] for m in browser.call("Performance.getMetrics")["metrics"]
                   if m["name"] in ("ScriptDuration", "LayoutDuration", "RecalcStyleDuration"))
        print(f"{2 * ranks} ranks: {len(documents[0]) / 1e6:.1f} MB a second, "
              f"{used / len(documents):.0f} ms of processor time to draw them")
        for theme in "light", "dark":
            browser.use_theme(theme)
            picture(browser, f"{2 * ranks}-{theme}")
        return used / len(documents)
    finally:
        browser.close()
        server.shutdown()


try:
    for group in "trainer", "engine":
        for index in range(RANKS):
            agents.append(start(group, index, RANKS))
    connections = make_batch()
    transfer(connections, 3)
    dashboard, url = serve("--listen", "0")
    check_http(url)
    check_token()
    bus_program, bus_url = serve("--listen", "0", "--store", f"unix:{FOLDER}/store", "--socket", f"{FOLDER}/none")
    check_bus(bus_url)
    look_at_transfer(bus_url, connections)
    if PROGRAM:
        took = look(url, connections)
        check(took < 10, f"the loss was shown after {took:.1f} s")
    took = look_at_bus(bus_url, ["trainer: ", f"engine: {RANKS} of {RANKS}"])
    check(took < 10, f"the loss was shown after {took:.1f} s")
    if PROGRAM:
        took = look_at_many(get(url)[2], 512)
        check(took < 500, f"1024 ranks take {took:.0f} ms of processor time to draw")  # of each second
    dashboard.terminate()
    check(dashboard.wait(DEADLINE) == 0, "the dashboard does not end")
finally:
    for process in [agent for agent, _ in agents] + others:
        process.kill()
        process.wait()
if not PROGRAM:
    print("skipped: what needs a browser (chromium)")
