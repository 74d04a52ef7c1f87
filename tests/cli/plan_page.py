"""The page of `tensorbus plan --html` in a real browser: one rank's transfers are looked up."""

import os
import sys

from browser import PROGRAM, Browser

page, folder = sys.argv[1:]
if not PROGRAM:
    print("skipped: there is no browser (chromium)")
    sys.exit(0)
browser = Browser(folder)
try:
    browser.open("file://" + page)
    for rank, wanted, rows in ((0, "sends 4096 bytes", 128), (130, "receives 4096 bytes", 128), (300, "takes no part", 0)):
        browser.evaluate(f"""new Promise(done => {{
            const go = () => {{ $("rank").value = {rank}; show(); done(); }};
            document.readyState === "complete" ? go() : addEventListener("load", go);
        }})""")
        sums = browser.evaluate("$('sums').textContent")
        found = browser.evaluate("$('rows').children.length")
        if (sums, found) != (wanted, rows):
            sys.exit(f"rank {rank}: '{sums}' with {found} rows, and not '{wanted}' with {rows}")
        others = browser.evaluate("[...$('rows').children].map(row => Number(row.children[1].textContent))")
        if others != sorted(others):
            sys.exit(f"rank {rank}: its transfers are not in the order of ranks: {others}")
    if os.environ.get("TB_PICTURES"):
        browser.save_screenshot(os.environ["TB_PICTURES"] + "/plan.png")
finally:
    browser.close()
