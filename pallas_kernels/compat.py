"""Differences between versions of jax for Mosaic GPU, and access to names jax does not export."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax

# jax 0.10 has the simulator but does not export it. No version exports the detected races, or
# whether a kernel traced now would run in the simulator.
from jax._src import config as _config
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks as _callbacks
from jax._src.pallas.mosaic_gpu.interpret import params as _params
from jax.experimental.pallas import mosaic_gpu as plgpu

IN_PLACE = jax.version.__version_info__ >= (0, 11)
"""True if a kernel can overwrite its arguments; in older jax, results have separate buffers."""


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
    return x if simulated() and not IN_PLACE else plgpu.layout_cast(x, layout)


def store(ref: Any, at: tuple[Any, ...], value: Any) -> None:
    """Writes a value to GPU memory, even if it does not fill complete sectors of 32 bytes.

    jax 0.12 rejects such values in ``ref[at] = value``; older versions have no other way to write.
    """
    if simulated() or not hasattr(plgpu, "store"):
        ref[at] = value
    else:
        plgpu.store(ref.at[at], value, optimized=False)


def launch(
    body: Callable[..., None],
    inputs: Sequence[jax.Array],
    outputs: Sequence[jax.ShapeDtypeStruct],
    over: Mapping[int, int],
    **keywords: Any,
) -> list[jax.Array]:
    """Runs ``body(*input refs, *output refs)`` as a Mosaic GPU kernel.

    Args:
      over: for an output, the input that it overwrites. If jax does not support this, the output
        has a separate buffer; the body must be correct in both cases.
    """
    if not IN_PLACE or not over:
        return [*plgpu.kernel(body, out_type=[*outputs], **keywords)(*inputs)]
    refs = {i: jax.new_ref(inputs[i]) for i in over.values()}
    fresh = [k for k in range(len(outputs)) if k not in over]

    def in_place(*args: Any) -> None:
        ins, outs = args[: len(inputs)], iter(args[len(inputs) :])
        body(*ins, *(ins[over[k]] if k in over else next(outs) for k in range(len(outputs))))

    arguments = [refs.get(i, x) for i, x in enumerate(inputs)]
    kernel = plgpu.kernel(in_place, out_type=[outputs[k] for k in fresh], **keywords)
    results = iter(kernel(*arguments))
    return [refs[over[k]][...] if k in over else next(results) for k in range(len(outputs))]


def tokamax_attention() -> Any:
    """Returns tokamax's attention for Hopper and newer GPUs.

    tokamax exports this class only in a module that also needs jax-triton, and its public function
    supports neither a range of keys per query nor returning the sums for the backward pass.
    """
    module = importlib.import_module("tokamax._src.ops.attention.pallas_mosaic_gpu")
    return module.PallasMosaicGpuFlashAttention()
