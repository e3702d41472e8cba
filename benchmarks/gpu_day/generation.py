"""Part 2: tokens that a model generates from bf16 and quantized weights, beside the forecast."""

import functools
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

import zerojax
from benchmarks.gpu_day import models
from benchmarks.gpu_day.measurement import attempts
from benchmarks.kernel_times import median_seconds
from zerojax.devices.rates import kind_of, rates
from zerojax.generation.forecast import Batch, forecast


def tokens(size: Mapping[str, Any], rows: int, prompt: int, new: int) -> Iterator[dict[str, Any]]:
    """Seconds of a token with bf16, int8 and int4 weights; A is bf16, so that it runs A B A C A."""
    model = models.build(size, layers=models.OWN, remat=False)
    mesh = zerojax.mesh(1)
    replicated = NamedSharding(mesh, PartitionSpec())

    def create() -> Any:
        params = model.init(jax.random.key(0), jnp.ones((1, 8), jnp.int32))["params"]
        return jax.tree.map(lambda x: x.astype(jnp.bfloat16), params)

    params = jax.jit(create, out_shardings=replicated)()

    def run(bits: int) -> dict[str, Any]:
        weights = params if bits == 16 else _quantized(params, bits)
        prompts = jnp.ones((rows, prompt), jnp.int32)

        def seconds(new: int) -> float:
            return median_seconds(
                lambda: zerojax.generate(model, weights, prompts, max_new_tokens=new),
                jax.block_until_ready,
            )

        # The difference leaves out the prompts, and the placement of the parameters.
        a_token = (seconds(new) - seconds(new // 2)) / (new - new // 2)
        found = {"seconds": a_token, "tokens_per_second": rows / a_token}
        if (kind := kind_of(jax.devices()[0])) is not None:
            batch = Batch(rows, prompt, new)
            predicted = forecast(model, weights, batch, mesh=mesh, rates=rates(kind))
            found["forecast"] = predicted.token.seconds
        return found

    ways = {"bf16": 16, "int8": 8, "bf16, again": 16, "int4": 4, "bf16, at the end": 16}
    yield from attempts({name: functools.partial(run, bits) for name, bits in ways.items()})


def _quantized(params: Any, bits: int) -> Any:
    return zerojax.quantize_weights(params, bits, select=lambda path, x: "kernel" in path)
