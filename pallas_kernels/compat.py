"""Differences between versions of jax for Mosaic GPU, and access to names jax does not export."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator
from typing import Any

import jax

# jax 0.10 has the simulator but does not export it. No version exports the detected races, or
# whether a kernel traced now would run in the simulator.
from jax._src import config as _config
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks as _callbacks
from jax._src.pallas.mosaic_gpu.interpret import params as _params
from jax.experimental.pallas import mosaic_gpu as plgpu

_BEFORE_11 = jax.version.__version_info__ < (0, 11)


class RaceError(Exception):
    """Two threads of a simulated kernel access the same memory, and one of them writes."""


def default_device() -> jax.Device:
    """Returns the device of ``jax.default_device``, which may be absent, or the first device."""
    device: Any = jax.config.jax_default_device  # type: ignore[attr-defined]
    return device if isinstance(device, jax.Device) else jax.local_devices()[0]


@contextlib.contextmanager
def simulator(**changes: Any) -> Iterator[None]:
    """Runs kernels that are traced in this context in JAX's GPU simulator, on the CPU.

    Out-of-bounds reads are errors. Uninitialized memory and unwritten results are NaN.

    Raises:
      RaceError: a kernel in the context had a race; raised at exit.
    """
    params = _params.InterpretGPUParams(
        **{
            "detect_races": True,
            "out_of_bounds_reads": "raise",
            "uninitialized_memory": "nan",
            **changes,
        }
    )
    _callbacks.reset_gpu_interpret_mode_state()
    try:
        with _params.force_gpu_interpret_mode(params):
            yield
        if _callbacks._races is not None and _callbacks._races.races_found:
            raise RaceError("a kernel in the simulator had a race; its lines are in the output")
    finally:
        _callbacks.reset_gpu_interpret_mode_state()


def simulated() -> bool:
    """Returns whether a kernel traced now runs in the simulator."""
    return _config.pallas_tpu_interpret_mode_context_manager.value is not None


def kernels_in(compiled: jax.stages.Compiled) -> int:
    """Returns the number of Mosaic kernels that a program launches."""
    return (compiled.as_text() or "").count('custom_call_target="mosaic_gpu')


def laid_out(x: Any, layout: Any) -> Any:
    """Casts a kernel's value to a layout; the simulator of jax 0.10 has no layouts."""
    return x if simulated() and _BEFORE_11 else plgpu.layout_cast(x, layout)


def load(ref: Any, at: tuple[Any, ...], layout: Any) -> Any:
    """Reads GPU memory in any layout, without shared memory between."""
    if simulated():
        return ref[at]
    index = ((),) if _BEFORE_11 else ()  # jax 0.10 needs an index
    return plgpu.load(ref.at[at], *index, layout=layout, optimized=False)


def store(ref: Any, at: tuple[Any, ...], value: Any) -> None:
    """Writes a value to GPU memory, even if it does not fill complete sectors of 32 bytes.

    jax 0.12 rejects such values in ``ref[at] = value``; older versions have no other way to write.
    """
    if simulated() or not hasattr(plgpu, "store"):
        ref[at] = value
    else:
        plgpu.store(ref.at[at], value, optimized=False)


def tokamax_attention() -> Any:
    """Returns tokamax's attention for Hopper and newer GPUs.

    tokamax exports this class only in a module that also needs jax-triton, and its public function
    supports neither a range of keys per query nor returning the sums for the backward pass.
    """
    module = importlib.import_module("tokamax._src.ops.attention.pallas_mosaic_gpu")
    return module.PallasMosaicGpuFlashAttention()
