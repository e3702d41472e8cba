"""Part 5: copies between device and host beside each other and beside matrix products."""

import functools
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

import zerojax
from benchmarks.gpu_day.measurement import attempts
from benchmarks.kernel_times import median_seconds
from zerojax.collectives.host import fetch_to_device, send_to_host
from zerojax.xla.compiler import streaming

OPTIONS: dict[str, dict[str, Any]] = {
    "default": {},
    "no command buffers": {"xla_gpu_graph_min_graph_size": 10**6},
}
WAYS = ("in", "out", "both", "products", "both and products")


def beside(rows: int, width: int, turns: int, size: int) -> Iterator[dict[str, Any]]:
    """Seconds of loops that copy ``turns`` times ``[rows, width]`` of float32 in, out or both, and
    multiply bf16 matrices ``[size, size]`` meanwhile, by options of XLA; and the device's streams.

    Where copies overlap, "both" takes as long as "in", and "both and products" as the longest.
    """
    mesh = zerojax.mesh(1)
    device, host = (
        NamedSharding(mesh, PartitionSpec(), memory_kind=kind) for kind in (None, "pinned_host")
    )
    x = jnp.ones((rows * turns, width))
    matrix = jax.device_put(jnp.full((size, size), 1e-4, jnp.bfloat16), device)

    def measured(way: str, options: Mapping[str, Any]) -> dict[str, Any]:
        source, target = jax.device_put(x, host), jax.device_put(x, host)
        chosen = streaming(mesh, dict(options)) if jax.default_backend() == "gpu" else None
        run = jax.jit(
            loop(way, rows, turns), out_shardings=(host, device, device), compiler_options=chosen
        )
        compiled = run.lower(source, target, matrix).compile()

        def call() -> Any:
            return compiled(source, target, matrix)

        found: dict[str, Any] = {"seconds": median_seconds(call, jax.block_until_ready, rounds=5)}
        if way == WAYS[-1]:
            found["streams"] = streams(call)
        return found

    for name, options in OPTIONS.items():
        for way in WAYS:
            yield from attempts({f"{way}, {name}": functools.partial(measured, way, options)})


def loop(way: str, rows: int, turns: int) -> Callable[..., Any]:
    """A function of a source and a target in host memory and of a matrix."""

    def body(turn: jax.Array, carried: Any) -> Any:
        target, came, product, source, matrix = carried
        leaving = came
        if way.startswith(("in", "both")):
            came = fetch_to_device(lax.dynamic_slice_in_dim(source, turn * rows, rows, 0))
        if way.startswith(("out", "both")):
            gone = send_to_host(leaving)
            target = lax.dynamic_update_slice_in_dim(target, gone, turn * rows, 0)
        if way.endswith("products"):
            product = product @ matrix
        return target, came, product, source, matrix

    def run(source: jax.Array, target: jax.Array, matrix: jax.Array) -> Any:
        came = jnp.zeros((rows, source.shape[1]))
        begun = (target, came, matrix, source, matrix)
        return lax.fori_loop(0, turns, body, begun)[:3]

    return run


def streams(call: Callable[[], Any]) -> dict[str, dict[str, float]]:
    """Seconds by operation on each stream of the device, the longest five; empty on a CPU."""
    by_line = spent(call, lambda event: event.name.split(".")[0][:40])
    return {
        line: dict(sorted(seconds.items(), key=lambda each: -each[1])[:5])
        for line, seconds in by_line.items()
    }


def spent(call: Callable[[], Any], kind: Callable[[Any], str]) -> dict[str, dict[str, float]]:
    """Seconds on the device by the profiler's line, and by the kind of an event; empty on a CPU."""
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            jax.block_until_ready(call())
        (path,) = Path(folder).rglob("*.xplane.pb")
        planes = jax.profiler.ProfileData.from_file(str(path)).planes
        found: dict[str, dict[str, float]] = {}
        for plane in (each for each in planes if each.name.startswith("/device:GPU")):
            for line in plane.lines:
                seconds = found.setdefault(line.name, {})
                for event in line.events:
                    name = kind(event)
                    seconds[name] = seconds.get(name, 0.0) + event.duration_ns / 1e9
        return found
