"""What the fused kernels cost beside what XLA makes of plain JAX.

    python -m benchmarks.kernels [--only KERNEL] [--devices 1] [--record FOLDER]

On a GPU: the time of each call, and the share of a plain copy's bandwidth measured in the same
run. Without one: what the H100's compiler makes of it, so that the timings are owed.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from rich.progress import track
from rich.table import Table

from benchmarks.report import circumstances, console, write_json
from pallas_kernels import dispatch
from pallas_kernels.activations.arguments import MEASURED as ACTIVATIONS
from pallas_kernels.arguments import Measured
from pallas_kernels.cross_entropy.arguments import MEASURED as CROSS_ENTROPY
from pallas_kernels.fused_adamw.arguments import MEASURED as ADAMW
from pallas_kernels.grad_norm_finite.arguments import MEASURED as GRAD_NORM
from pallas_kernels.norms.arguments import MEASURED as NORMS
from pallas_kernels.quantize.arguments import MEASURED as QUANTIZE

IMPLEMENTATIONS = ("mosaic_gpu", "xla")
CALLS: tuple[Measured, ...] = (
    *ADAMW,
    *GRAD_NORM,
    *NORMS,
    *ACTIVATIONS,
    *CROSS_ENTROPY,
    *QUANTIZE,
)
_ROUNDS = 20


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

    @property
    def rate(self) -> float | None:
        """Bytes a second."""
        return None if self.seconds is None else self.bytes / self.seconds


def run(calls: Sequence[Measured], devices: int) -> tuple[list[Cost], float | None]:
    """Costs of all calls, and the bandwidth of a copy in bytes a second, on a GPU."""
    here = dispatch.target().platform == "gpu"
    found = []
    for call in track(calls, description="kernels", transient=True):
        found += [cost(call, name, devices, here) for name in IMPLEMENTATIONS]
    return found, copy_rate() if here else None


def cost(call: Measured, implementation: str, devices: int, here: bool) -> Cost:
    """Compiles one call, and times it where there is a GPU."""
    compiled, seconds = _compiled(call, implementation, devices, here)
    analysis: Any = compiled.memory_analysis()
    return Cost(
        kernel=call.kernel,
        shape=call.shape,
        implementation=implementation,
        bytes=call.bytes,
        flops=call.flops,
        launches=str(compiled.as_text()).count('custom_call_target="mosaic_gpu'),
        temporaries=analysis.temp_size_in_bytes,
        compile_seconds=seconds,
        seconds=_timed(call, compiled) if here else None,
    )


def _compiled(
    call: Measured, implementation: str, devices: int, here: bool
) -> tuple[jax.stages.Compiled, float]:
    begin = time.perf_counter()
    function = call.call(implementation)
    if here:
        lowered = jax.jit(function, donate_argnums=call.in_place).lower(*call.arguments)
        return lowered.compile(), time.perf_counter() - begin
    import zerojax

    mesh = zerojax.topology("h100", devices=devices)
    whole = jax.sharding.PartitionSpec()
    sharding = jax.sharding.NamedSharding(mesh, whole)
    # Every device makes the whole call: this is about one device's program.
    mapped = jax.shard_map(function, mesh=mesh, in_specs=whole, out_specs=whole, check_vma=False)
    arguments = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), call.arguments
    )
    lowered = jax.jit(mapped, donate_argnums=call.in_place).lower(*arguments)
    return lowered.compile(), time.perf_counter() - begin


def _timed(call: Measured, compiled: Any) -> float:
    """Median seconds of a call, the results in place of the arguments they are written over."""
    arguments = list(jax.tree.map(_random, call.arguments))
    times = []
    for turn in range(_ROUNDS + 3):
        begin = time.perf_counter()
        made = jax.block_until_ready(compiled(*arguments))
        times += [time.perf_counter() - begin] if turn >= 3 else []
        for at, result in zip(call.in_place, made if call.in_place else (), strict=False):
            arguments[at] = result
    return statistics.median(times)


def _random(x: Any) -> jax.Array:
    key = jax.random.key(x.size % 9973)
    if jnp.issubdtype(x.dtype, jnp.floating):
        return jax.random.uniform(key, x.shape, jnp.float32, 0.05, 1).astype(x.dtype)
    if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key):
        return key
    return jax.random.randint(key, x.shape, 0, 100).astype(x.dtype)


def copy_rate() -> float:
    """Bytes a second that a plain copy reads and writes."""
    x = jnp.zeros(2**28, jnp.float32)
    copy = jax.jit(jnp.copy)
    times = []
    for _ in range(_ROUNDS):
        begin = time.perf_counter()
        copy(x).block_until_ready()
        times.append(time.perf_counter() - begin)
    return 2 * x.nbytes / statistics.median(times)


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
    """The table's lines."""
    xla = {(c.kernel, c.shape): c.seconds for c in costs if c.implementation == "xla"}
    found = []
    for c in costs:
        base = xla.get((c.kernel, c.shape))
        timed = c.seconds is not None and copy is not None and c.rate is not None
        found.append(
            [
                c.kernel,
                c.shape,
                c.implementation,
                f"{c.bytes / 1e9:.2f}",
                str(c.launches),
                f"{c.temporaries / 1e6:.1f}",
                f"{1e3 * c.seconds:.3f}" if c.seconds is not None else "owed",
                f"{c.rate / copy:.0%}" if timed and c.rate and copy else "owed",
                f"{base / c.seconds:.2f}" if timed and base and c.seconds else "owed",
            ]
        )
    return found


def markdown(costs: Sequence[Cost], copy: float | None) -> str:
    """The record."""
    found = circumstances()
    versions = ", ".join(f"{name} {version}" for name, version in found["versions"].items())
    where = (
        f"On {jax.devices()[0].device_kind}; a plain copy moves {copy / 1e9:.0f} GB/s."
        if copy is not None
        else "No GPU at hand: compiled for H100s that are not there, and **all timings are owed**; "
        'until then\n`implementation=None` is `"xla"` for every kernel.'
    )
    lines = [HEADER, ["---", "---", "---", *["---:"] * (len(HEADER) - 3)], *rows(costs, copy)]
    table = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    return (
        f"# Kernels\n\nDate: {datetime.date.today()}. Command: `{found['command']}`.\nMachine: "
        f"{found['cores']} CPU cores. Versions: {versions}.\n\n{where}\n\n{table}\n"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.kernels", description="The fused kernels beside XLA."
    )
    names = list(dict.fromkeys(call.kernel for call in CALLS))
    parser.add_argument("--only", action="append", choices=names, help="may be repeated")
    parser.add_argument("--devices", type=int, default=1, help="to compile for, without a GPU")
    parser.add_argument("--record", type=Path, metavar="FOLDER", help="also write a record here")
    options = parser.parse_args()
    chosen = [call for call in CALLS if call.kernel in (options.only or names)]
    costs, copy = run(chosen, options.devices)
    table = Table(*HEADER)
    for row in rows(costs, copy):
        table.add_row(*row)
    console().print(table)
    if copy is None:
        console().print("No GPU here: compiled for H100s, all timings are owed.")
    if options.record:
        stem = options.record / f"{datetime.date.today()}-kernels"
        write_json(
            stem.with_suffix(".json"),
            {"copy_rate": copy, "costs": [dataclasses.asdict(c) for c in costs]},
        )
        stem.with_suffix(".md").write_text(markdown(costs, copy))


if __name__ == "__main__":
    main()
