"""Part 2: the device's own rates, and steps that were forecast before.

The forecasts need no GPU, and their compiles would take a GPU's minutes::

    JAX_PLATFORMS=cpu python -m benchmarks.gpu_day.forecasts --kind h100
"""

import argparse
import dataclasses
import functools
import json
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

import zerojax
from benchmarks import prediction
from benchmarks.disk_rate import measure as disk_measure
from benchmarks.gpu_day.measurement import ERROR, attempts, failure
from benchmarks.kernel_times import copy_rate, median_seconds
from zerojax.devices.rates import Rates, kind_of, rates

PREDICTED = Path(__file__).with_name("predicted.json")
GIGA = 10**9
TOY = dataclasses.replace(prediction.case("mini", 3, 2, True), seq=16)

DTYPES = {"bf16": jnp.bfloat16, "f16": jnp.float16, "f32": jnp.float32}
SHAPES = {
    "8192 x 8192 x 8192": (8192, 8192, 8192),
    "GPT-2 XL's MLP, 8192 tokens": (8192, 1600, 6400),
    "Llama 8B's MLP, 8192 tokens": (8192, 4096, 14336),
}


def device_rates(scale: int = 1) -> Iterator[dict[str, Any]]:
    """Rates of the device; sizes are divided by ``scale``."""
    yield from attempts(
        {
            "matrix": functools.partial(_matrix, scale),
            "memory": lambda: {"bytes_per_second": copy_rate(2**28 // scale**2)},
            "host": lambda: link(2**30 // scale**2),
            "launch": _launch,
            "disk": functools.partial(_disk, scale),
        }
    )


def _matrix(scale: int) -> dict[str, Any]:
    """FLOP/s of products of random matrices, by dtype and shape."""
    found: dict[str, Any] = {}
    for name, dtype in DTYPES.items():
        found[name] = {}
        for what, (m, k, n) in SHAPES.items():
            m, k, n = (size // scale for size in (m, k, n))
            a = jax.random.normal(jax.random.key(0), (m, k)).astype(dtype)
            b = jax.random.normal(jax.random.key(1), (k, n)).astype(dtype)
            product = jax.jit(jnp.dot)
            run = functools.partial(product, a, b)
            found[name][what] = 2 * m * k * n / median_seconds(run, jax.block_until_ready)
    return found


def link(nbytes: int) -> dict[str, float]:
    """Bytes a second between the device and pinned host memory, one way and both ways at once."""
    mesh = zerojax.mesh(1)
    there, host = (
        NamedSharding(mesh, PartitionSpec(), memory_kind=kind) for kind in (None, "pinned_host")
    )
    x = jax.device_put(jnp.ones(nbytes // 4, jnp.float32), there)
    y = jax.device_put(x, host)

    def rate(call: Callable[[], Any]) -> float:
        return nbytes / median_seconds(call, jax.block_until_ready)

    return {
        "to_the_host": rate(lambda: jax.device_put(x, host)),
        "to_the_device": rate(lambda: jax.device_put(y, there)),
        "each_way_at_once": rate(lambda: (jax.device_put(x, host), jax.device_put(y, there))),
    }


def _launch(kernels: int = 200) -> dict[str, float]:
    """Seconds of one of many tiny kernels in a row."""

    @jax.jit
    def many(x: jax.Array) -> jax.Array:
        for _ in range(kernels):
            x = jax.lax.optimization_barrier(jnp.sin(x))
        return x

    x = jnp.ones(128)
    return {"seconds": median_seconds(lambda: many(x), jax.block_until_ready) / kernels}


def _disk(scale: int) -> dict[str, float]:
    """Bytes a second of the offloaded state's store."""
    with tempfile.TemporaryDirectory() as folder:
        blocks = 16 * 2**20 // scale**2
        found = disk_measure(folder, nbytes=2 * GIGA // scale**2, block_bytes=blocks, turns=1)
    return {"write": 1e6 * found.store_write[0], "read": 1e6 * found.store_read[0]}


def step(case: int | None) -> dict[str, Any]:
    """A case of ``benchmarks.prediction`` by its number, run; None for a toy."""
    if case is None:
        return prediction.run(TOY, zerojax.mesh(1))
    return prediction.run(prediction.CASES[case])


def proposal(found: Mapping[str, Any], peaks: Rates) -> dict[str, float]:
    """Entries of ``device_kinds.json`` as the device's rates would have them.

    The shares of products, attention and memory come from the instructions of training steps
    (:mod:`benchmarks.gpu_day.calibration`).
    """
    shares: dict[str, float] = {}
    if "each_way_at_once" in (host := found.get("host", {})):
        shares["host"] = min(host["to_the_host"], host["to_the_device"]) / peaks.host
    if "seconds" in (launch := found.get("launch", {})):
        shares["launch"] = launch["seconds"]
    if "write" in (disk := found.get("disk", {})):
        shares["disk"] = min(disk["write"], disk["read"])
    return shares


def proposed(found: Mapping[str, Any], device: str) -> dict[str, float]:
    """The proposal for a device by its name; empty for an unknown kind."""
    kind = _kind(device)
    return proposal(found, rates(kind)) if kind else {}


def predicted(device: str) -> dict[str, Any]:
    """The stored forecasts for a device's kind, by the case's name."""
    return _stored().get(_kind(device) or "", {})


def _kind(device: str) -> str | None:
    named = type("Named", (), {"device_kind": device})
    return kind_of(named())  # type: ignore[arg-type]


def _stored() -> dict[str, dict[str, Any]]:
    return json.loads(PREDICTED.read_text()) if PREDICTED.exists() else {}


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu_day.forecasts", description="The forecasts, without a GPU."
    )
    parser.add_argument("--kind", action="append", default=[], help="may be repeated")
    options = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")
    known = _stored()
    for kind in options.kind or ["h100"]:
        for case in prediction.CASES:
            cases = known.setdefault(kind, {})
            if case.name in cases and ERROR not in cases[case.name]:
                continue
            try:
                cases[case.name] = prediction.predict(case, kind)
            except Exception as error:
                cases[case.name] = failure(error)
            print(kind, case.name, {k: v for k, v in cases[case.name].items() if k != "traceback"})
            PREDICTED.write_text(json.dumps(known, indent=1) + "\n")


if __name__ == "__main__":
    main()
