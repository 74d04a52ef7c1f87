"""A headless Chromium, driven through its pipe."""

import base64
import json
import os
import select
import shutil
import subprocess
import time

PROGRAM = shutil.which("chromium") or shutil.which("chromium-browser")
PATIENCE = 60


class Browser:
    """One tab. `folder` takes the profile."""

    def __init__(self, folder, width=1280, height=900):
        to_browser, self.write_fd = os.pipe()
        self.read_fd, from_browser = os.pipe()

        def connect():  # Chromium reads commands from 3 and writes answers to 4
            read, write = os.dup(to_browser), os.dup(from_browser)
            os.dup2(read, 3)
            os.dup2(write, 4)

        self.program = subprocess.Popen(
            [PROGRAM, "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run",
             "--remote-debugging-pipe", f"--user-data-dir={folder}/profile", f"--window-size={width},{height}",
             "--force-color-profile=srgb", "about:blank"],
            preexec_fn=connect, close_fds=False, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )
        os.close(to_browser)
        os.close(from_browser)
        self.data, self.number, self.session = b"", 0, None
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self.session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]

    def read(self, deadline):
        while b"\0" not in self.data:
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([self.read_fd], [], [], left)[0]:
                raise TimeoutError("the browser does not answer")
            part = os.read(self.read_fd, 1 << 20)
            if not part:
                raise EOFError("the browser has ended")
            self.data += part
        message, self.data = self.data.split(b"\0", 1)
        return json.loads(message)

    def call(self, method, **params):
        self.number += 1
        request = {"id": self.number, "method": method, "params": params}
        if self.session:
            request["sessionId"] = self.session
        data = json.dumps(request).encode() + b"\0"
        while data:
            data = data[os.write(self.write_fd, data) :]
        deadline = time.monotonic() + PATIENCE
        while True:
            answer = self.read(deadline)
            if answer.get("id") == self.number:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']}")
                return answer["result"]

    def open(self, url):
        self.call("Page.navigate", url=url)

    def evaluate(self, expression):
        result = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in result:
            raise RuntimeError(f"{expression}: {result['exceptionDetails']}")
        return result["result"].get("value")

    def text(self):
        return self.evaluate("document.body ? document.body.innerText : ''")

    def press(self, key):
        for kind in "keyDown", "keyUp":
            self.call("Input.dispatchKeyEvent", type=kind, key=key, code=key,
                      windowsVirtualKeyCode={"Tab": 9, "ArrowLeft": 37, "ArrowUp": 38, "ArrowRight": 39, "ArrowDown": 40}[key])

    def use_theme(self, theme):
        """"light" or "dark"."""
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": theme}])

    def save_screenshot(self, path):
        """Of the whole page."""
        data = self.call("Page.captureScreenshot", captureBeyondViewport=True, format="png")["data"]
        with open(path, "wb") as file:
            file.write(base64.b64decode(data))

    def close(self):
        self.program.kill()
        self.program.wait()
        os.close(self.read_fd)
        os.close(self.write_fd)
