"""Differences between the versions of jax, and private names of jax and Python.

Importing this module warns if the installed jax is not one of :data:`TESTED`."""

from __future__ import annotations

import functools
import math
import sys
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, NamedTuple, TypeVar, cast

import jax
from jax._src import compiler, core, distributed, dtypes, traceback_util, xla_bridge
from jax._src.interpreters import mlir, partial_eval, pxla
from jax.sharding import Mesh

from zerojax.xla.jaxprs import is_library

F = TypeVar("F", bound=Callable[..., Any])

TESTED = ("0.10.2", "0.11.2", "0.12.0.1")
"""Versions of jax that zerojax is tested with."""


def warn_if_untested(version: str) -> None:
    """Warns that zerojax is not tested with a version of jax, and names those that are tested."""
    if version not in TESTED:
        warnings.warn(
            f"zerojax is tested with jax {', '.join(TESTED[:-1])} and {TESTED[-1]}, not with "
            f"{version}: if something fails, install a tested version",
            stacklevel=2,
        )


warn_if_untested(jax.__version__)


INLINE: Any = jax.Inline.JAX_EARLY if hasattr(jax, "Inline") else True
"""Option of ``jax.jit`` that copies the equations of the function to its call site."""

ALL_REDUCE_KERNELS_FAIL = 64 if jax.version.__version_info__ >= (0, 12) else math.inf
"""The smallest number of GPUs for which XLA's all-reduce kernels end the compiling process."""


class LoweredFor(jax.stages.Lowered):
    """A lowered program, and the devices for which it is compiled.

    A program with arrays in host memory is traced for an abstract mesh if its devices are absent,
    because jax forgets the memory kinds of absent devices.
    """

    def __init__(self, lowered: jax.stages.Lowered, devices: Sequence[jax.Device]) -> None:
        for name in jax.stages.Lowered.__slots__:
            setattr(self, name, getattr(lowered, name))
        # Only this private attribute selects the compiler of absent devices.
        self._lowering.compile_args["backend"] = devices[0].client
        self._devices = tuple(devices)

    def compile(
        self, compiler_options: dict[str, str | bool] | None = None, **_: object
    ) -> jax.stages.Compiled:
        return super().compile(compiler_options, device_assignment=self._devices)


def lower_for(traced: jax.stages.Traced, mesh: Mesh) -> jax.stages.Lowered:
    """Lowers a traced program for the devices of a mesh, which may be absent."""
    devices = list(mesh.devices.flat)
    # Absent devices have no memories, and only they need another way.
    if devices[0].addressable_memories():
        return cast(jax.stages.Lowered, traced.lower())
    # Devices call the platform "gpu", and JAX lowers for "cuda" or "rocm".
    platform = "cuda" if devices[0].platform == "gpu" else devices[0].platform
    return LoweredFor(traced.lower(lowering_platforms=(platform,)), devices)


def compiler_options(lowered: jax.stages.Lowered) -> dict[str, str | bool]:
    """Returns the XLA options of a lowered program, which its text does not show."""
    lowering: Any = lowered._lowering
    return dict(lowering._compiler_options_kvs)


class JitOptions(NamedTuple):
    """The arguments of ``jax.jit`` other than the function.

    Attributes:
      static, donated: positions and names, as far as the function's signature shows both.
      given: names of the options passed that decide where or how the function is compiled.
    """

    static: tuple[int | str, ...]
    donated: tuple[int | str, ...]
    given: tuple[str, ...]


def jit_options(jitted: Any) -> JitOptions:
    """Returns the options of a function that ``jax.jit`` returned, which jax does not export.

    Raises:
      AttributeError: this version of jax stores the options elsewhere.
    """
    info = jitted._jit_info

    def is_any_specified(leaves: Iterable[object]) -> bool:
        return any(x is not None and type(x).__name__ != "UnspecifiedValue" for x in leaves)

    given = {
        "in_shardings": is_any_specified((*info.in_shardings_leaves, *info.in_layouts_leaves)),
        "out_shardings": is_any_specified((*info.out_shardings_leaves, *info.out_layouts_leaves)),
        "device": info.device is not None,
        "backend": info.backend is not None,
        "compiler_options": bool(info.compiler_options_kvs),
    }
    return JitOptions(
        (*info.static_argnums, *info.static_argnames),
        (*info.donate_argnums, *info.donate_argnames),
        tuple(name for name, is_given in given.items() if is_given),
    )


def take_for_array(kind: type, to_array: Callable[[Any], jax.Array]) -> None:
    """Registers a class whose instances jax accepts as arrays, in ``jit`` and every operation.

    Args:
      kind: The class, whose instances have ``shape``, ``dtype`` and ``sharding``.
      to_array: Function from an instance to the array that it stands for, sharded by ``sharding``.
    """
    # JAX's protocol for this purpose, __jax_array__, does not cover arguments of jit.
    core.pytype_aval_mappings[kind] = lambda x: core.ShapedArray(x.shape, x.dtype)
    dtypes.register_canonicalize_value_handler(kind, to_array)

    def sharded(
        xs: Sequence[object],
        shardings: object,
        layouts: object,
        copy_semantics: object,
        *more: object,
    ) -> Sequence[object]:
        arrays = [to_array(x) for x in xs]
        return cast(
            "Sequence[object]", pxla.shard_args(shardings, layouts, copy_semantics, arrays, *more)
        )

    pxla.shard_arg_handlers[kind] = sharded


def coordination() -> Any:
    """Returns the client of the service through which ``jax.distributed`` coordinates processes.

    Raises:
      RuntimeError: ``jax.distributed`` is not initialized.
    """
    # JAX exports the service's keys and values only through its own multi-host utilities.
    client = distributed.global_state.client
    if client is None:
        raise RuntimeError("jax.distributed is not initialized: call zerojax.init_distributed()")
    return client


def backends_are_initialized() -> bool:
    """Returns whether JAX has looked for devices, after which processes cannot be joined any
    more."""
    # Every public function that answers this question would itself look for devices.
    return xla_bridge.backends_are_initialized()


def frames(thread: int | None = None) -> Iterator[FrameType]:
    """Yields the frames of all threads, or of one, the innermost first."""
    # Python has no public name for the frames of other threads.
    for number, innermost in sys._current_frames().items():
        frame: FrameType | None = innermost if thread in (None, number) else None
        while frame is not None:
            yield frame
            frame = frame.f_back


def with_large_stack(function: F) -> F:
    """Changes a function so that its calls find room for many frames on Python's stack.

    CPython stores frames in chunks of 16 KB. Where the calls of a loop cross the end of a chunk,
    each call maps the next chunk and unmaps it again, and a trace takes up to a quarter longer, at
    depths that nobody chooses. The function's own frame asks for half a megabyte, and gets a chunk
    of twice that size, which has room for the deeper frames; the system allots no memory to pages
    that no frame touches.
    """
    plain: Any = function
    plain.__code__ = plain.__code__.replace(co_stacksize=2**16)
    return function


def before_the_end(act: Callable[[], None]) -> None:
    """Registers a function to call at the end of the program, while executors still accept work."""
    # Executors already refuse work when the functions of atexit are called.
    threading._register_atexit(act)  # type: ignore[attr-defined]


_COMPILES = {module.__file__ for module in (partial_eval, mlir, compiler)}


def compiles(frame: FrameType) -> bool:
    """Returns whether a frame traces, lowers or compiles, which jax does not announce publicly."""
    return frame.f_code.co_filename in _COMPILES


def process_number() -> int:
    """Returns the number of this process; 0 unless ``jax.distributed`` is initialized."""
    # jax.process_index() returns the same number, but starts the backends.
    return int(distributed.global_state.process_id)


def entries_by_device(x: Any) -> int:
    """Returns the number of devices if each has one entry of an array's leading dimension, as
    ``jax.pmap`` and ``jax.device_put_replicated`` place arrays; 0 for an array placed otherwise."""
    sharding = getattr(x, "sharding", None)
    if not isinstance(sharding, jax.sharding.NamedSharding):
        return 0
    names, spec = sharding.mesh.axis_names, sharding.spec
    # Under jax.pmap the mesh has one axis, which JAX itself has named.
    private = len(names) == 1 and names[0].startswith("_") and spec[:1] == names
    return int(x.shape[0]) if private and x.shape[0] == sharding.mesh.size else 0


def _exclude_from_tracebacks() -> None:
    """Registers the files of zerojax with JAX's traceback filter, which has no public interface."""
    for path in Path(__file__).parents[1].iterdir():
        # Lines of these files belong to the user's model.
        if path.name != "models":
            traceback_util.register_exclusion(str(path))


_exclude_from_tracebacks()


def with_short_traceback(call: F) -> F:
    """Returns ``call`` with errors whose traceback ends at the user's line.

    JAX removes its own frames and those of zerojax, but keeps ``jax.numpy`` and Python's library.
    Filtering follows the option ``jax_traceback_filtering``; "off" keeps all frames.
    """
    filtered = traceback_util.api_boundary(call)

    @functools.wraps(call)
    def run(*args: Any, **kwargs: Any) -> Any:
        __tracebackhide__ = True  # for IPython
        try:
            return filtered(*args, **kwargs)
        except Exception as error:
            if traceback_util._filtering_mode().endswith("remove_frames"):
                error.with_traceback(_without_library(error.__traceback__))
            raise

    return cast(F, run)


def _without_library(trace: TracebackType | None) -> TracebackType | None:
    """Returns a traceback without the frames of zerojax, JAX and Python's library."""
    if trace is None:
        return None
    following, frame = _without_library(trace.tb_next), trace.tb_frame
    if is_library(frame.f_code.co_filename) or not traceback_util.include_frame(frame):
        return following
    return TracebackType(following, frame, trace.tb_lasti, trace.tb_lineno)
