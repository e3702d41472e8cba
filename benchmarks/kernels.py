"""What the fused kernels cost beside what XLA makes of plain JAX.

    python -m benchmarks.kernels [--only KERNEL] [--only step] [--devices 1] [--record FOLDER]

On a GPU: the time of each call, beside XLA's and (where it is installed) torch's and Liger's, and
the share of a plain copy's bandwidth measured in the same run. Without one: what the H100's
compiler makes of it, so that the timings are owed. "step" is the memory of the main job's step
with them, which is always compiled for absent H100s.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
from rich.progress import track

import zerojax
from benchmarks import kernel_steps
from benchmarks.kernel_peers import peers
from benchmarks.kernel_times import copy_rate, timed, timed_peer
from benchmarks.report import console, console_table, heading, markdown_table, write_json
from pallas_kernels import compat, dispatch
from pallas_kernels.activations.arguments import MEASURED as ACTIVATIONS
from pallas_kernels.arguments import Measured
from pallas_kernels.cross_entropy.arguments import MEASURED as CROSS_ENTROPY
from pallas_kernels.fused_adamw.arguments import MEASURED as ADAMW
from pallas_kernels.grad_norm_finite.arguments import MEASURED as GRAD_NORM
from pallas_kernels.norms.arguments import MEASURED as NORMS
from pallas_kernels.quantize.arguments import MEASURED as QUANTIZE

IMPLEMENTATIONS = ("mosaic_gpu", "xla")
STEP = "step"
CALLS: tuple[Measured, ...] = (
    *ADAMW,
    *GRAD_NORM,
    *NORMS,
    *ACTIVATIONS,
    *CROSS_ENTROPY,
    *QUANTIZE,
)


@dataclasses.dataclass(frozen=True)
class Cost:
    """What one implementation of a call costs.

    Attributes:
      launches: Mosaic kernels in the program.
      temporaries: bytes beside arguments and results.
      seconds: of a call; None without a GPU.
    """

    kernel: str
    shape: str
    implementation: str
    bytes: int
    flops: int
    launches: int
    temporaries: int
    compile_seconds: float
    seconds: float | None = None

    @classmethod
    def of(cls, call: Measured, implementation: str, **costs: Any) -> Cost:
        return cls(call.kernel, call.shape, implementation, call.bytes, call.flops, **costs)


def run(calls: Sequence[Measured], devices: int) -> tuple[list[Cost], float | None]:
    """Costs of all calls, and the bandwidth of a copy in bytes a second, on a GPU."""
    here = dispatch.target().platform == "gpu"
    costs = []
    for call in track(calls, description="kernels", transient=True):
        costs += [cost(call, name, devices, here) for name in IMPLEMENTATIONS]
        costs += [peer(call, *each) for each in peers(call)] if here else []
    return costs, copy_rate() if here else None


def cost(call: Measured, implementation: str, devices: int, here: bool) -> Cost:
    """Compiles one call, and times it on a GPU."""
    compiled, seconds = _compiled(call, implementation, devices, here)
    analysis: Any = compiled.memory_analysis()
    return Cost.of(
        call,
        implementation,
        launches=compat.kernels_in(compiled),
        temporaries=analysis.temp_size_in_bytes,
        compile_seconds=seconds,
        seconds=timed(call, compiled) if here else None,
    )


def peer(call: Measured, name: str, once: Callable[[], Any]) -> Cost:
    """The same call by torch or Liger."""
    begin = time.perf_counter()
    once()
    compile_seconds = time.perf_counter() - begin
    seconds = timed_peer(once)
    return Cost.of(
        call, name, launches=0, temporaries=0, compile_seconds=compile_seconds, seconds=seconds
    )


def _compiled(
    call: Measured, implementation: str, devices: int, here: bool
) -> tuple[jax.stages.Compiled, float]:
    """And the seconds that it took."""
    begin = time.perf_counter()
    function, arguments = call.call(implementation), call.arguments
    if not here:
        mesh, replicated = zerojax.topology("h100", devices=devices), jax.sharding.PartitionSpec()
        sharding = jax.sharding.NamedSharding(mesh, replicated)
        # Every device makes the complete call: this is about one device's program.
        function = jax.shard_map(
            function, mesh=mesh, in_specs=replicated, out_specs=replicated, check_vma=False
        )
        arguments = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), arguments
        )
    lowered = jax.jit(function, donate_argnums=call.in_place).lower(*arguments)
    return lowered.compile(), time.perf_counter() - begin


HEADER = (
    "kernel",
    "call",
    "implementation",
    "GB to move",
    "launches",
    "temporaries MB",
    "ms",
    "of a copy",
    "XLA's time over it",
)


def rows(costs: Sequence[Cost], copy: float | None) -> list[list[str]]:
    """Headings, and a line for each cost; ``copy`` is a copy's bytes a second."""
    xla = {(c.kernel, c.shape): c.seconds for c in costs if c.implementation == "xla"}
    lines = [[*HEADER]]
    for c in costs:
        base = xla.get((c.kernel, c.shape))
        times = ["owed"] * 3
        if c.seconds and base and copy:
            share = c.bytes / c.seconds / copy
            times = [f"{1e3 * c.seconds:.3f}", f"{share:.0%}", f"{base / c.seconds:.2f}"]
        sizes = f"{c.bytes / 1e9:.2f}", str(c.launches), f"{c.temporaries / 1e6:.1f}"
        lines.append([c.kernel, c.shape, c.implementation, *sizes, *times])
    return lines


def markdown(
    costs: Sequence[Cost], copy: float | None, steps: Sequence[kernel_steps.Step] = ()
) -> str:
    """The record."""
    where = (
        f"On {jax.devices()[0].device_kind}; a plain copy moves {copy / 1e9:.0f} GB/s."
        if copy is not None
        else "No GPU at hand: compiled for absent H100s, and **all timings are owed**; "
        'until then\n`implementation=None` is `"xla"` for every kernel.'
    )
    parts = [heading("Kernels"), where]
    parts += [markdown_table(rows(costs, copy), 3)] if costs else []
    if steps:
        table = markdown_table(kernel_steps.rows(steps), 3)
        parts += ["## The main job's step", kernel_steps.ABOUT, table]
    return "\n\n".join(parts) + "\n"


def main() -> None:
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # torch needs some, too
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.kernels", description="The fused kernels beside XLA."
    )
    names = [*dict.fromkeys(call.kernel for call in CALLS), STEP]
    parser.add_argument("--only", action="append", choices=names, help="may be repeated")
    parser.add_argument("--devices", type=int, default=1, help="to compile for, without a GPU")
    parser.add_argument("--record", type=Path, metavar="FOLDER", help="also write a record here")
    options = parser.parse_args()
    chosen = [call for call in CALLS if call.kernel in (options.only or names)]
    costs, copy = run(chosen, options.devices)
    if costs:
        console().print(console_table(rows(costs, copy)))
    steps = kernel_steps.run() if STEP in (options.only or names) else []
    if steps:
        console().print(console_table(kernel_steps.rows(steps)))
    if copy is None:
        console().print("No GPU here: compiled for H100s, all timings are owed.")
    if options.record:
        stem = options.record / f"{datetime.date.today()}-kernels"
        write_json(
            stem.with_suffix(".json"),
            {
                "copy_rate": copy,
                "costs": [dataclasses.asdict(c) for c in costs],
                "steps": [dataclasses.asdict(s) for s in steps],
            },
        )
        stem.with_suffix(".md").write_text(markdown(costs, copy, steps))


if __name__ == "__main__":
    main()
