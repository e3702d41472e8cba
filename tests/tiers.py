"""Bounds and durations of tests, and the draw of sweeps.

A test belongs to one tier: "fast" (no mark), "slow", "sweep" or "toy". ``conftest.py`` imports the
hooks.
"""

import hashlib
import itertools
import json
import os
import random
import resource
import subprocess
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest

BOUNDS = {"fast": 3.0, "slow": 90.0, "sweep": 90.0, "toy": 90.0}
"""CPU seconds of a test, with its fixtures and the processes that it waits for."""
SLACK = 2.0
"""A test is reported from so many times its bound, as a busy or slow machine takes longer."""
REMEDY = {
    "fast": "mark it slow",
    "slow": "make it smaller, or a sweep",
    "sweep": "make it smaller, or split it",
    "toy": "make it smaller, or split it",
}
GREW = 1.3, 5.0
"""Factor and seconds by which a file's CPU seconds grow before the file is reported."""
ROOT = Path(__file__).parent.parent
RECORD = ROOT / ".ci" / "durations.json"
"""By tier and file: the CPU seconds of the tests that ran, and their number."""
SWEEP_SECONDS = 30.0
"""CPU seconds by that record that the sweeps of one run may take. It was written while compiled
programs were kept; without them sweeps take four times as long. They repeat what a fast or slow
test shows once, so a run draws few; ``.ci/run --all`` has all."""

# Benchmarks at toy size and examples end to end, which take a quarter of the time of all slow
# tests: only `.ci/run --all` runs them. What the package does is shown by the tests of its rooms;
# that these programs call it rightly is shown by the few that are slow tests like others, by files
# or tests: those that need no step, one benchmark, and the examples that the README has.
TOY_FOLDERS = {"benchmarks", "examples"}
SMOKE = {
    f"tests/{name}" for name in (
        "benchmarks/test_frame.py",
        "benchmarks/test_memory.py::test_peak_falls_from_stage_to_stage",
        "benchmarks/test_offload.py",
        "examples/run_clm/test_data.py", "examples/test_command.py", "examples/test_public_api.py",
        "examples/test_run_clm.py::test_trains_resumes_and_knows_when_it_is_done",
        "examples/test_scripts.py::test_it_ends_as_its_docstring_says",
        "examples/test_tables.py",
    )
}  # fmt: skip
# Tests that start processes by these fixtures; examples in docstrings that compile a model.
SLOW_FIXTURES = {"in_processes", "in_two_processes", "quick_processes"}
SLOW_EXAMPLES = {
    "zerojax.models.hugging_face.gpt2", "zerojax.models.hugging_face.llama", "zerojax.models.llama",
    "zerojax.tuning.workload.Workload",
}  # fmt: skip
STARTED = pytest.StashKey[float]()


def rest_in_a_sweep(values: Iterable[Any], first: int) -> list[Any]:
    """The values of a parameter of a test; those after the first ones belong to a sweep."""
    given = [x if isinstance(x, tuple) else (x,) for x in values]
    marks = [[pytest.mark.sweep] if i >= first else [] for i in range(len(given))]
    return [pytest.param(*x, marks=mark) for x, mark in zip(given, marks, strict=True)]


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("tiers")
    group.addoption("--record", metavar="FILE", help="write CPU seconds a file to this JSON")
    group.addoption("--draw", action="store_true", help="of the sweeps run a draw")
    group.addoption("--seed", default="", help="of that draw; default the commit's name")


def tier(item: pytest.Item) -> str:
    tiers = ("toy", "sweep", "slow")
    return next((name for name in tiers if item.get_closest_marker(name)), "fast")


def is_toy(name: str) -> bool:
    """Whether only ``.ci/run --all`` runs a test."""
    file, test = name.partition("::")[0], name.partition("[")[0]
    return in_toy_folder(name) and not {file, test} & SMOKE


def in_toy_folder(name: str) -> bool:
    return name.split("/")[1] in TOY_FOLDERS


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Marks tests by their folder, their fixtures and ``one_in``, before the mark expression is
    applied. Leaves out sweeps and toys that the expression does not name, and with ``--draw`` those
    sweeps that were not drawn."""
    combinations: Counter[str] = Counter()
    for item in items:
        if (mark := item.get_closest_marker("one_in")) is not None:
            test = item.nodeid.partition("[")[0]
            if combinations[test] % mark.args[0]:
                item.add_marker("sweep")
            combinations[test] += 1
        fixtures = SLOW_FIXTURES & set(getattr(item, "fixturenames", ()))
        if is_toy(item.nodeid):
            item.add_marker("toy")
        elif in_toy_folder(item.nodeid) or fixtures or item.name in SLOW_EXAMPLES:
            item.add_marker("slow")
    expression = config.getoption("markexpr")
    left_out = [name for name in ("sweep", "toy") if expression and name not in expression]
    keep = {item for item in items if tier(item) not in left_out}
    if config.getoption("draw"):
        sweeps = {item.nodeid: item for item in keep if tier(item) == "sweep"}
        names = drawn(expected_seconds(sweeps), config.getoption("seed") or head())
        keep -= {item for name, item in sweeps.items() if name not in names}
    config.hook.pytest_deselected(items=[item for item in items if item not in keep])
    items[:] = [item for item in items if item in keep]


def head() -> str:
    command = ["git", "rev-parse", "HEAD"]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout


def expected_seconds(tests: Iterable[str]) -> dict[str, float]:
    """CPU seconds that each sweep takes by the record: the mean of its file's sweeps, else of its
    file's slow tests, else of all sweeps."""
    record = json.loads(RECORD.read_text())
    known = record["sweep"]
    mean = sum(seconds for seconds, _ in known.values()) / sum(count for _, count in known.values())
    of_file = {file: seconds / count for file, (seconds, count) in (record["slow"] | known).items()}
    return {test: of_file.get(test.partition("::")[0], mean) for test in tests}


def drawn(seconds: Mapping[str, float], seed: str) -> set[str]:
    """Names of sweeps, drawn by the seed until they take ``SWEEP_SECONDS``: a few dozen commits
    meet all.

    Args:
      seconds: CPU seconds of each sweep, by name.
      seed: The commit's name.
    """
    draw = random.Random(hashlib.sha256(seed.encode()).hexdigest())
    order = draw.sample(sorted(seconds), len(seconds))
    totals = itertools.accumulate(seconds[name] for name in order)
    return {name for name, total in zip(order, totals, strict=True) if total <= SWEEP_SECONDS}


OF_FORKED: list[float] = []
"""CPU seconds of the processes that a fork server started, for which it waits itself."""


def cpu_seconds() -> float:
    """Of this process, of those that it waited for, and of those that were forked for it."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum((each.ru_utime + each.ru_stime for each in used), start=sum(OF_FORKED))


def resident() -> float:
    """Gigabytes of memory that this process holds now."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e9


def peak() -> float:
    """Gigabytes of memory that this process held at most."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    item.stash[STARTED] = cpu_seconds()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Any:
    """Adds a test's tier, CPU seconds and the peak memory to the report of its end."""
    if call.when == "teardown" and STARTED in item.stash:
        cpu = cpu_seconds() - item.stash[STARTED]
        item.user_properties += [("tier", tier(item)), ("cpu", cpu), ("peak", peak())]
    return (yield)


class Durations:
    """CPU seconds and memory of the tests of a run, in the process that reports."""

    def __init__(self, config: pytest.Config) -> None:
        self.config = config
        self.files: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
        self.counts: Counter[tuple[str, str]] = Counter()
        self.over: list[tuple[float, str]] = []
        self.peak = 0.0

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        figures = dict(report.user_properties)
        if report.when != "teardown" or "cpu" not in figures:
            return
        name, cpu = str(figures["tier"]), float(str(figures["cpu"]))
        file = report.nodeid.partition("::")[0]
        self.files[name][file] += cpu
        self.counts[name, file] += 1
        self.peak = max(self.peak, float(str(figures["peak"])))
        if cpu > BOUNDS[name] * SLACK:
            bound = f"{cpu:.1f} CPU s, the bound of {name} tests is {BOUNDS[name]:.0f}"
            self.over.append((cpu, f"{report.nodeid}: {bound}; {REMEDY[name]}"))

    def write(self, record: Path) -> None:
        """Replaces the figures of the tiers that ran."""
        known = json.loads(record.read_text()) if record.exists() else {}
        for name, files in self.files.items():
            known[name] = {
                file: [round(files[file], 1), self.counts[name, file]] for file in sorted(files)
            }
        record.write_text(json.dumps(known) + "\n")

    def grown(self, record: Path) -> list[str]:
        """Files whose tests took longer than in the run that a record is of."""
        before = json.loads(record.read_text()) if record.exists() else {}
        factor, seconds = GREW
        lines = []
        for name, files in self.files.items():
            for file, cpu in files.items():
                old, count = before.get(name, {}).get(file, (0.0, 1))
                old *= min(1.0, self.counts[name, file] / count)
                if cpu > max(factor * old, old + seconds):
                    lines.append(f"{file} ({name}) {old:.0f} -> {cpu:.0f} CPU s")
        return lines

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        write = terminalreporter.write_line
        for name, files in self.files.items():
            slowest = sorted(files, key=lambda file: -files[file])[:10]
            total = f"{name}: {sum(files.values()):.0f} CPU s; slowest files: "
            write(total + ", ".join(f"{file} {files[file]:.0f}" for file in slowest))
        for line in self.grown(RECORD):
            write(f"grew: {line}")
        if path := self.config.getoption("record"):
            self.write(Path(path))
        write(f"largest resident memory of a process: {self.peak:.1f} GB")
        for _, line in sorted(self.over, reverse=True):
            write(f"over its bound: {line}")


def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(Durations(config), "durations")
