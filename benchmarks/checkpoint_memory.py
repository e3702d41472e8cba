"""Peak host memory of one save or one restore, in a process of its own.

    python -m benchmarks.checkpoint_memory save zerojax FOLDER 2.0

prints a :class:`Footprint` as JSON; ``benchmarks.checkpoint`` runs it.
"""

import argparse
import dataclasses
import json
import re
import subprocess
import sys
from pathlib import Path

import jax
from jax.sharding import Mesh

import zerojax
from benchmarks.savers import SAVERS, create_state_of
from examples.run_clm.devices import data_mesh

CLEAR, STATUS = Path("/proc/self/clear_refs"), Path("/proc/self/status")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Footprint:
    """Resident bytes of the process.

    Attributes:
      task: "save" or "restore".
      saver: a key of ``SAVERS``.
      before: with the state there that is to be saved; or with the devices ready and nothing on
        them, that restore fills.
      peak: the most until the task was done.
    """

    task: str
    saver: str
    before: int
    peak: int

    @property
    def growth(self) -> int:
        return max(0, self.peak - self.before)


def footprint(task: str, saver: str, folder: Path, gigabytes: float) -> Footprint:
    """Starts a process that saves into the folder, or restores what another one saved there."""
    command = [sys.executable, "-m", "benchmarks.checkpoint_memory"]
    done = subprocess.run(
        [*command, task, saver, str(folder), str(gigabytes)],
        cwd=Path(__file__).parents[1],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return Footprint(**json.loads(done.stdout.splitlines()[-1]))


def measure(task: str, saver: str, folder: Path, gigabytes: float, mesh: Mesh) -> Footprint:
    """Saves or restores here and now."""
    zero = zerojax.zero(stage=3, mesh=mesh)
    create_state = create_state_of(gigabytes)
    by = SAVERS[saver](folder, zero)
    if task == "save":
        state = jax.block_until_ready(zero.init(create_state))
        before = resident("VmRSS")
        forget_peak()
        by.save(1, state)
        by.wait()
    else:
        abstract = zero.abstract_state(create_state)
        before = resident("VmRSS")
        forget_peak()
        jax.block_until_ready(by.restore(abstract))
    peak = resident("VmHWM")
    by.close()
    return Footprint(task=task, saver=saver, before=before, peak=peak)


def forget_peak() -> None:
    """From here on counts the peak."""
    CLEAR.write_text("5")


def resident(what: str) -> int:
    """VmRSS: bytes resident now; VmHWM: the most since the peak was forgotten."""
    match = re.search(rf"^{what}:\s*(\d+) kB$", STATUS.read_text(), re.MULTILINE)
    assert match is not None
    return int(match[1]) * 1024


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.checkpoint_memory", description="Peak memory of one task."
    )
    parser.add_argument("task", choices=("save", "restore"))
    parser.add_argument("saver", choices=SAVERS)
    parser.add_argument("folder", type=Path)
    parser.add_argument("gigabytes", type=float)
    options = parser.parse_args()
    task, saver, folder = options.task, options.saver, options.folder
    measured = measure(task, saver, folder, options.gigabytes, data_mesh(None))
    print(json.dumps(dataclasses.asdict(measured)))


if __name__ == "__main__":
    main()
