"""Peak host memory of one save or one restore, in a process of its own."""

import dataclasses
import re
from pathlib import Path

import jax

import zerojax
from benchmarks.savers import SAVERS, create_state_of
from benchmarks.separate import in_a_process
from examples.run_clm.devices import data_mesh

CLEAR, STATUS = Path("/proc/self/clear_refs"), Path("/proc/self/status")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Footprint:
    """Resident bytes of the process.

    Attributes:
      task: "save" or "restore".
      saver: a key of ``SAVERS``.
      before: bytes at the start of the task: a save's with the state in memory, a restore's with
        nothing on the devices.
      peak: the most bytes until the task was done.
    """

    task: str
    saver: str
    before: int
    peak: int

    @property
    def growth(self) -> int:
        return max(0, self.peak - self.before)


def footprint(task: str, saver: str, folder: Path, gigabytes: float) -> Footprint:
    """Measures a process that saves into the folder, or restores the state saved in that folder."""
    return Footprint(**in_a_process(measure, task, saver, str(folder.absolute()), gigabytes))


def measure(task: str, saver: str, folder: str, gigabytes: float) -> Footprint:
    """Saves or restores on all devices, and measures this process."""
    zero = zerojax.zero(stage=3, mesh=data_mesh(None))
    create_state = create_state_of(gigabytes)
    by = SAVERS[saver](Path(folder), zero)
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
    """Starts a new peak of resident memory."""
    CLEAR.write_text("5")


def resident(what: str) -> int:
    """Bytes of one line of ``/proc/self/status``: "VmRSS" for those resident now, "VmHWM" for the
    most since :func:`forget_peak`."""
    match = re.search(rf"^{what}:\s*(\d+) kB$", STATUS.read_text(), re.MULTILINE)
    assert match is not None
    return int(match[1]) * 1024
