"""Differences between the versions of jax for Mosaic GPU, and what jax does not export."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax

# jax 0.10 has the simulator and does not export it. No version exports the races that it has
# seen, or whether a kernel traced now would run in it.
from jax._src import config as _config
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks as _callbacks
from jax._src.pallas.mosaic_gpu.interpret import params as _params
from jax.experimental.pallas import mosaic_gpu as plgpu

IN_PLACE = jax.version.__version_info__ >= (0, 11)
"""Whether a kernel can write over its arguments; before, results have buffers of their own."""


class RaceError(Exception):
    """Two threads of a simulated kernel use the same memory, one of them to write."""


def default_device() -> jax.Device:
    """The device of ``jax.default_device``, which may be absent, else the first one."""
    device: Any = jax.config.jax_default_device  # type: ignore[attr-defined]
    return device if isinstance(device, jax.Device) else jax.local_devices()[0]


@contextlib.contextmanager
def simulator(**changes: Any) -> Iterator[None]:
    """Runs the kernels traced within it in JAX's GPU simulator, on the CPU.

    Reads beyond an array are errors, memory that nobody wrote holds NaN, and so do results before
    the kernel writes them.

    Raises:
      RaceError: at the end, if a kernel within had a race.
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
    """Whether a kernel traced now runs in the simulator."""
    return _config.pallas_tpu_interpret_mode_context_manager.value is not None


def kernels_in(compiled: jax.stages.Compiled) -> int:
    """How many Mosaic kernels a program launches."""
    return (compiled.as_text() or "").count('custom_call_target="mosaic_gpu')


def laid_out(x: Any, layout: Any) -> Any:
    """A value of a kernel in a layout; the simulator of jax 0.10 knows none."""
    return x if simulated() and not IN_PLACE else plgpu.layout_cast(x, layout)


def store(ref: Any, at: tuple[Any, ...], value: Any) -> None:
    """Writes a value to GPU memory, also where it fills no complete sector of 32 bytes.

    jax 0.12 refuses the latter in ``ref[at] = value``; older versions have no other way to write.
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
      over: for an output the input that it is written over. Where jax cannot do that, it is a
        buffer of its own; the body has to be right for both.
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
    """tokamax's attention for Hopper and newer. It exports the class in a module that needs
    jax-triton as well, and its function knows neither the range of keys of a query nor the sums
    that the backward pass keeps."""
    module = importlib.import_module("tokamax._src.ops.attention.pallas_mosaic_gpu")
    return module.PallasMosaicGpuFlashAttention()
