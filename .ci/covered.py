"""Fails for files of which the tests run hardly a line; reads what `coverage json -o -` says."""

import json
import sys

LEAST = 60  # percent of a file's lines; imports and definitions alone make about 40
ELSEWHERE = "zerojax/launch/"  # the README's command tests it, and benchmarks/launchers.py with Ray

percent = {
    name: file["summary"]["percent_covered"] for name, file in json.load(sys.stdin)["files"].items()
}
untested = [
    f"{name}: {part:.0f}%"
    for name, part in percent.items()
    if part < LEAST and not name.startswith(ELSEWHERE)
]
print(f"{len(percent)} files measured; below {LEAST}%: {', '.join(untested) or 'none'}")
sys.exit(bool(untested))
