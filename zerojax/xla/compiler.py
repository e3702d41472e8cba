"""Options for XLA, set for each compile: in the environment, an unknown option ends the process."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from zerojax.config import ConfigError
from zerojax.xla import compat

# Bytes of unreduced gradients that may wait to be reduced together. XLA's default lets
# hundreds of megabytes wait, which stages 2 and 3 exist to avoid.
BUCKET = 32 * 2**20


# Concurrent copies between device and host memory. XLA's default, one, would end each copy before
# the next begins, and before the computation that should hide the copy.
COPIES = 64

COMMAND_BUFFERS = "xla_gpu_enable_command_buffer"
"""XLA's option for the kinds of operations that it records in CUDA graphs. A graph runs copies and
kernels one after another on one stream, so that a copy hides behind nothing
(benchmarks/records/2026-11-27-gpu_day.md)."""

DISABLED_PASSES = "xla_disable_hlo_passes"
"""XLA's option for passes that it leaves out, separated by commas."""

REMATERIALIZATION = "rematerialization"
"""The pass that computes values again where XLA estimates that they do not fit."""

SLOP_FACTOR = "xla_gpu_memory_limit_slop_factor"
"""XLA's option for the percentage of the memory beside a program's arguments that the program may
use before XLA stops overlapping collectives and computes values again."""

SLOP = 95
"""XLA's default of :data:`SLOP_FACTOR`."""

# XLA's scheduler reserves a fifth of a device's memory for other uses.
SCHEDULED = 0.8

MERGED_PRODUCTS = "dot-merger"
"""The pass that concatenates small weights which multiply the same values, in each run."""

GPUS = ("gpu", "cuda")
"""The platforms of GPUs, as devices name them."""

# Bytes of a gathered or reduced result up to which XLA combines collectives by default.
COMBINED = 30 * 2**20

# Bytes of a layer from which on XLA's options for loops over layers are worth their compile time.
LEAST_LAYER = 2**20

# Concurrent collectives, all of which XLA's scheduler assumes to take equally long.
TOGETHER = 4

Options = dict[str, int | bool | str]
"""Option values by XLA's names."""


class JitOnceDecided:
    """A function under ``jax.jit`` whose compiler options depend on its first trace.

    Args:
      function: The function.
      choose: Returns the options once the function is traced.
      **how: Other arguments of ``jax.jit``.
    """

    def __init__(
        self, function: Callable[..., Any], choose: Callable[[], Options | None], **how: Any
    ) -> None:
        self._function, self._choose, self._how = function, choose, how
        self._jitted: Any = None

    def __call__(self, *args: Any) -> Any:
        """Runs the function."""
        if self._jitted is None:
            self.trace(*args)
        return self._jitted(*args)

    def trace(self, *args: Any) -> jax.stages.Traced:
        """Traces the function for abstract or concrete arguments."""
        if self._jitted is None:
            # JAX keeps this trace for every jit of the same function, whatever its options.
            jax.jit(self._function, **self._how).trace(*args)
            self._jit(self._choose())
        traced: jax.stages.Traced = self._jitted.trace(*args)
        return traced

    def save_memory(self) -> None:
        """Lets XLA save memory from now on, in a function that has been traced."""
        self._jit({**(self._options or {}), **saving_memory(self._options)})

    def _jit(self, options: Options | None) -> None:
        self._options = options
        self._jitted = jax.jit(self._function, compiler_options=options, **self._how)


def options(
    mesh: Mesh,
    chosen: Options | None = None,
    *,
    shards: int | None = None,
    layer: int = 0,
    overlap: bool = False,
    fp8: bool = False,
) -> Options | None:
    """Returns compiler options for the mesh's platform; None if there are none to set.

    Args:
      mesh: The devices.
      chosen: Options for GPUs that override the options of this module.
      shards: Number of shards of a gradient; by default one for each device.
      layer: Bytes of the largest layer that a loop prefetches, or whose reduction it defers; 0 if
        none.
      overlap: Whether collectives should overlap with computation.
      fp8: Whether products multiply fp8 codes.

    Raises:
      ConfigError: This version of XLA lacks a chosen option.
    """
    platform = mesh.devices.flat[0].platform
    if platform == "cpu":
        # One collective at a time: if a device waits in two, another may find no free thread, and
        # XLA ends the process after 40 seconds.
        return {"xla_cpu_scheduler_type": "CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED"}
    if platform not in GPUS:
        return None
    for name, value in (chosen or {}).items():
        if not knows(name, value):
            raise ConfigError(
                f"xla.{name}: the XLA of jax {jax.__version__} does not know it with the value "
                f"{value!r}; remove it, or install another jax"
            )
    # XLA counts the result of a reduce-scatter, which is one device's shard. Each collective over
    # many devices has a fixed cost, so a layer's gradients are reduced together.
    threshold = max(BUCKET, layer) // (shards or mesh.devices.size)
    defaults: Options = {"xla_gpu_reduce_scatter_combine_threshold_bytes": threshold}
    if mesh.devices.size >= compat.ALL_REDUCE_KERNELS_FAIL:
        defaults["xla_gpu_experimental_use_collective_kernels"] = ""  # NCCL's kernels run instead
    if overlap:
        # Otherwise, before Hopper, XLA waits for each collective where it starts.
        defaults["xla_gpu_enable_latency_hiding_scheduler"] = True
        # Otherwise a collective starts when the previous one has ended, and XLA waits for it.
        defaults["xla_gpu_experimental_parallel_collective_overlap_limit"] = TOGETHER
    if fp8:
        # XLA's own kernels multiply the dequantized operands in bfloat16, and so do products with
        # concatenated weights: of q, k and v of a Llama 8B with 2048 tokens a device.
        defaults["xla_gpu_enable_triton_gemm"] = False
        defaults[DISABLED_PASSES] = MERGED_PRODUCTS
    if layer >= LEAST_LAYER:
        # Otherwise each iteration copies the layer that it produces over the one that it received.
        defaults["xla_gpu_enable_while_loop_unrolling"] = "WHILE_LOOP_UNROLLING_DOUBLE_BUFFER"
        # XLA's estimate counts the stacks of such a loop twice, and XLA would compute values again
        # in programs that fit: a Llama 7B on 8 H100s takes 1.98 s a step with it, 1.24 s without.
        defaults[DISABLED_PASSES] = ",".join([MERGED_PRODUCTS] * fp8 + [REMATERIALIZATION])
    if layer > COMBINED:
        # A device runs collectives one after the other: XLA would wait for one of two prefetches.
        defaults["xla_gpu_all_gather_combine_threshold_bytes"] = layer
    return {**defaults, **(chosen or {})}


def memory_limit(memory: int, arguments: int, slop: int = SLOP) -> int:
    """Returns the bytes of arguments and temporaries above which XLA overlaps no collective and,
    unless the pass is left out, computes temporaries again.

    XLA for GPUs reserves a fifth of a device's memory for other uses, subtracts the arguments of a
    program, and reserves 5% of the rest for errors of its estimate (``GetSchedulerMemoryLimit`` in
    XLA's ``gpu_hlo_schedule.cc``).

    Args:
      memory: Bytes of the device's memory.
      arguments: Bytes of the program's arguments, whose buffers its results reuse.
      slop: The value of :data:`SLOP_FACTOR`.

    Example:
      >>> memory_limit(80_000_000_000, 4_000_000_000)
      61000000000
    """
    return arguments + round(slop / 100 * max(SCHEDULED * memory - arguments, 0))


def rematerializes(chosen: Mapping[str, int | bool | str]) -> bool:
    """Returns whether XLA, under these options, may compute values again to save memory."""
    return REMATERIALIZATION not in str(chosen.get(DISABLED_PASSES, "")).split(",")


def saving_memory(chosen: Mapping[str, int | bool | str] | None) -> dict[str, str | bool]:
    """Returns the options to change for a program that does not fit, so that XLA computes values
    again and keeps its own limit; none if the program has both."""
    changed: dict[str, str | bool] = {}
    if chosen and not rematerializes(chosen):
        passes = str(chosen[DISABLED_PASSES]).split(",")
        changed[DISABLED_PASSES] = ",".join(each for each in passes if each != REMATERIALIZATION)
    if chosen and int(chosen.get(SLOP_FACTOR, SLOP)) > SLOP:
        changed[SLOP_FACTOR] = str(SLOP)
    return changed


@functools.cache
def knows(name: str, value: int | bool | str) -> bool:
    """Returns whether this version of XLA takes an option with this value."""
    chosen: dict[str, Any] = {name: value}
    try:
        # All platforms have one set of options, so that a compile for any of them tells.
        jax.jit(jnp.negative).lower(0.0).compile(compiler_options=chosen)
    except jax.errors.JaxRuntimeError:
        return False
    return True


def streaming(mesh: Mesh, chosen: Options | None = None) -> Options | None:
    """Returns the options for a program that copies from and to host memory as it computes."""
    base = options(mesh)
    if base is None or mesh.devices.flat[0].platform == "cpu":
        return base
    copy_options: Options = {
        COMMAND_BUFFERS: "",
        "xla_gpu_enable_latency_hiding_scheduler": True,
        "xla_gpu_experimental_parallel_async_compute_limit": COPIES,
    }
    return {**base, **copy_options, **(chosen or {})}
