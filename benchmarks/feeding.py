"""What feeding costs: own rows on the devices, in 1, 2 and 4 processes.

    python -m benchmarks.feeding                                  # a minute on two cores
    python -m benchmarks.feeding --record benchmarks/records

Every process has 4096 rows of its own: tokens and labels int32 [4096, 128], weights float32 [4096].
Compared turn by turn, until the arrays lie on four devices in all: what a decorated step does with
them before it runs; plain ``jax.make_array_from_process_local_data``, array by array; and
``jax.device_put`` to the process's own devices, which knows nothing of other processes. To expect:
zerojax less than 1 ms above ``device_put``.
"""

import argparse
import datetime
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import zerojax
from benchmarks.report import console, console_table, heading, markdown_table, write_json
from zerojax.distributed.row_agreement import RowAgreement
from zerojax.step.batch import BatchLayout

DEVICES, ROWS, TOKENS = 4, 4096, 128
TURNS, WARM_UP = 200, 20


class Feeding(NamedTuple):
    """Medians of the first process, in seconds.

    Attributes:
      agreed: To see that the rows are those of the call before.
      zerojax: That, and placing the batch.
      plain: By ``jax.make_array_from_process_local_data``.
      local: By ``jax.device_put`` to the process's own devices.
      ratio: Of zerojax to plain, the median over the turns.
      added: By zerojax to local, the median over the turns.
    """

    processes: int
    agreed: float
    zerojax: float
    plain: float
    local: float
    ratio: float
    added: float

    def row(self) -> tuple[str, ...]:
        milliseconds = (f"{1e3 * x:.3f}" for x in (self.zerojax, self.plain, self.local))
        return (
            str(self.processes), *milliseconds, f"{self.ratio:.2f}", f"{1e3 * self.added:.3f}",
            f"{1e6 * self.agreed:.1f}",
        )  # fmt: skip


HEAD = (
    "processes", "zerojax ms", "make_array_from_process_local_data ms", "local device_put ms",
    "zerojax / make_array", "zerojax - device_put ms", "of it comparing rows µs",
)  # fmt: skip


def batch_of(rows: int = ROWS) -> dict[str, np.ndarray]:
    """A process's own rows."""
    tokens = np.random.default_rng(jax.process_index()).integers(50000, size=(rows, TOKENS))
    labels = np.roll(tokens, -1, axis=1)
    weights = np.ones(rows, np.float32)
    return {"tokens": tokens.astype("i4"), "labels": labels.astype("i4"), "weights": weights}


def measure(turns: int = TURNS) -> Feeding:
    """In one of the processes; all of them measure at the same time."""
    mesh = zerojax.mesh()
    layout = BatchLayout(mesh, zerojax.zero(stage=1).config.batch(mesh.size))
    agreement, batch, rows = RowAgreement("feeding"), batch_of(), PartitionSpec("data")
    everywhere = NamedSharding(mesh, rows)
    here = NamedSharding(Mesh(np.array(jax.local_devices()), "data"), rows)

    def agree() -> None:
        agreement.agree(layout.leaves.row_counts(batch))

    def fed() -> Any:
        agree()
        return layout.place(batch)

    ways: tuple[Callable[[], Any], ...] = (
        agree,
        fed,
        lambda: {
            name: jax.make_array_from_process_local_data(everywhere, x) for name, x in batch.items()
        },
        lambda: jax.device_put(batch, here),
    )
    times: list[list[float]] = [[] for _ in ways]
    for turn in range(WARM_UP + turns):
        for way, its_times in zip(ways, times, strict=True):
            start = time.perf_counter()
            jax.block_until_ready(way())
            its_times += [time.perf_counter() - start] * (turn >= WARM_UP)
    agreed, ours, plain, local = map(statistics.median, times)
    _, ours_each, plain_each, local_each = times
    return Feeding(
        jax.process_count(),
        agreed,
        ours,
        plain,
        local,
        statistics.median(a / b for a, b in zip(ours_each, plain_each, strict=True)),
        statistics.median(a - b for a, b in zip(ours_each, local_each, strict=True)),
    )


def launched(count: int) -> Feeding:
    """The figures of so many processes."""
    environ = {**os.environ, "JAX_NUM_CPU_DEVICES": str(DEVICES // count)}
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "figures.json"
        command = ["-m", "zerojax", "launch", "--nproc-per-node", str(count)]
        command += ["-m", "benchmarks.feeding", "--measure", str(out)]
        subprocess.run([sys.executable, *command], check=True, env=environ)
        return Feeding(*json.loads(out.read_text()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--measure", type=Path, metavar="FILE", help="measure in this process")
    parser.add_argument("--record", type=Path, metavar="FOLDER", help="also write a record here")
    options = parser.parse_args()
    if options.measure:
        zerojax.init_distributed()
        figures = measure()
        if jax.process_index() == 0:
            options.measure.write_text(json.dumps(figures))
        return
    found = [launched(count) for count in (1, 2, 4)]
    rows = [HEAD, *(each.row() for each in found)]
    console().print(console_table(rows))
    if options.record:
        stem = options.record / f"{datetime.date.today()}-feeding"
        write_json(stem.with_suffix(".json"), {"feeding": [each._asdict() for each in found]})
        said = (
            f"Every process places {ROWS} rows of its own: tokens and labels int32 [{ROWS}, "
            f"{TOKENS}],\nweights float32 [{ROWS}], on {DEVICES} virtual CPU devices in all. "
            f"Medians of\n{TURNS} turns of the first process; ratio and difference in each turn."
        )
        parts = [heading("Feeding own rows"), said, markdown_table(rows)]
        stem.with_suffix(".md").write_text("\n\n".join(parts) + "\n")
    sys.exit(any(each.added > 1e-3 for each in found))


if __name__ == "__main__":
    main()
