"""What the library and the command are linked to is in docs/dependencies.md. usage: linked.py FILE..."""

import re
import subprocess
import sys
from pathlib import Path

page = (Path(__file__).resolve().parents[2] / "docs/dependencies.md").read_text()
failed = False
for path in sys.argv[1:]:
    said = subprocess.run(["readelf", "-d", path], capture_output=True, text=True, check=True).stdout
    for name in re.findall(r"\(NEEDED\).*\[(.*)\]", said):
        if name.startswith(("libasan.", "libtsan.", "libubsan.")):
            continue  # a sanitizer's
        if name not in page:
            print(f"{path} is linked to {name}, which docs/dependencies.md does not name")
            failed = True
sys.exit(failed)
