"""Costs of the fused kernels beside those of XLA for plain JAX.

    python -m benchmarks.kernels [--only KERNEL] [--only step] [--devices 1] [--record FOLDER]

On a GPU: the time of each call, beside XLA's and (where it is installed) torch's and Liger's, and
the share of a plain copy's bandwidth measured in the same run. Without one: the program of the
H100's compiler, and no timings. "step" is the memory of a GPT's training step with the kernels,
which is always compiled for absent H100s.
"""

import argparse
import dataclasses
import os
import time
from collections.abc import Callable, Sequence
from typing import Any, Self

import jax

import zerojax
from benchmarks import kernel_steps
from benchmarks.frame import Answer, Table, argument, question, say
from benchmarks.kernel_peers import peers
from benchmarks.kernel_times import copy_rate, timed, timed_peer
from pallas_kernels import compat, dispatch
from pallas_kernels.arguments import Measured
from pallas_kernels.cross_entropy.arguments import MEASURED as CROSS_ENTROPY
from pallas_kernels.norms.arguments import MEASURED as NORMS
from pallas_kernels.quantize.arguments import MEASURED as QUANTIZE

IMPLEMENTATIONS = ("mosaic_gpu", "xla")
STEP = "step"
CALLS: tuple[Measured, ...] = (*NORMS, *CROSS_ENTROPY, *QUANTIZE)
KERNELS = tuple(dict.fromkeys(call.kernel for call in CALLS))


@dataclasses.dataclass(frozen=True)
class Cost:
    """The costs of one implementation of a call.

    Attributes:
      launches: the number of Mosaic kernels in the program.
      temporaries: bytes of device memory beside arguments and results.
      seconds: seconds of a call; None without a GPU.
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
    def of(cls, call: Measured, implementation: str, **costs: Any) -> Self:
        return cls(call.kernel, call.shape, implementation, call.bytes, call.flops, **costs)


def run(calls: Sequence[Measured], devices: int) -> tuple[list[Cost], float | None]:
    """Costs of all calls, and the bandwidth of a copy in bytes a second, on a GPU."""
    here = dispatch.target().platform == "gpu"
    costs = []
    for call in calls:
        say(f"{call.kernel}, {call.shape}")
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


def peer(call: Measured, name: str, once: Callable[[], object]) -> Cost:
    """Costs of a call by torch or Liger."""
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
    """Also returns the seconds that compiling took."""
    begin = time.perf_counter()
    function, arguments = call.call(implementation), call.arguments
    if not here:
        mesh, replicated = zerojax.topology("h100", devices=devices), jax.sharding.PartitionSpec()
        sharding = jax.sharding.NamedSharding(mesh, replicated)
        # Every device executes the complete call: the costs are those of one device's program.
        function = jax.shard_map(
            function, mesh=mesh, in_specs=replicated, out_specs=replicated, check_vma=False
        )
        arguments = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), arguments
        )
    lowered = jax.jit(function).lower(*arguments)
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


def answer(
    costs: Sequence[Cost], copy: float | None, steps: Sequence[kernel_steps.Step] = ()
) -> Answer:
    where = (
        f"On {jax.devices()[0].device_kind}; a plain copy moves {copy / 1e9:.0f} GB/s."
        if copy is not None
        else "No GPU at hand: compiled for absent H100s, and **all timings are owed**; "
        'until then\n`implementation=None` is `"xla"` for every kernel.'
    )
    parts: list[str | Table] = [where]
    if costs:
        parts.append(Table(rows(costs, copy), texts=3))
    if steps:
        title = "The main job's step"
        parts += [Table(kernel_steps.rows(steps), title=title, texts=3), kernel_steps.ABOUT]
    return Answer({"copy_rate": copy, "costs": costs, "steps": steps}, parts)


@question(
    "kernels",
    "Kernels",
    argument("--only", action="append", choices=[*KERNELS, STEP], help="may be repeated"),
    argument("--devices", type=int, default=1, help="to compile for, without a GPU"),
)
def main(options: argparse.Namespace) -> Answer:
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # torch needs some, too
    chosen = options.only or [*KERNELS, STEP]
    costs, copy = run([call for call in CALLS if call.kernel in chosen], options.devices)
    return answer(costs, copy, kernel_steps.run() if STEP in chosen else [])


if __name__ == "__main__":
    main()
