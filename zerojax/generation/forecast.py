"""The needs of a generation, from programs compiled for devices that need not exist.

mesh, rates = parse_devices("h100:8")
print(forecast(model, params, Batch(rows=8, prompt=512, new=512), mesh=mesh, rates=rates))
"""

from __future__ import annotations

import dataclasses
from typing import Literal

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.typing import DTypeLike

from zerojax.devices.mesh import batch_axes, batch_devices
from zerojax.devices.network import nodes_of
from zerojax.devices.rates import Rates
from zerojax.foresight.attribution import ParameterShapes
from zerojax.foresight.costs import Measurement, measure_compiled
from zerojax.generation import weights as parameter_weights
from zerojax.generation.beam_search import Ends, Search
from zerojax.generation.decoders import Cache, EncoderDecoder, Source, decoder_of
from zerojax.generation.layers import Layered
from zerojax.generation.program import Generation, Lengths, Programs, rounded
from zerojax.generation.sampling import Sampling
from zerojax.generation.weights import Weights
from zerojax.hlo.program import parse
from zerojax.hlo.work import work_of
from zerojax.plan import layout
from zerojax.plan.table import Summarized, Summary, Table, size
from zerojax.xla import compat
from zerojax.xla.types import PyTree


@dataclasses.dataclass(frozen=True)
class Batch:
    """The rows of a generation.

    Attributes:
      rows: Their number, over all devices.
      prompt: Tokens of each prompt, or of each source of an encoder-decoder.
      new: New tokens of each row.
    """

    rows: int
    prompt: int
    new: int


@dataclasses.dataclass(frozen=True, repr=False)
class GenerationForecast(Summarized):
    """The needs of a generation on each device, in bytes and seconds.

    Attributes:
      batch: The rows.
      rates: The speeds and the memory of the devices.
      weights: Where the parameters are: see :func:`zerojax.generate`, or "on_host".
      parameter_bytes: Bytes of the parameters on a device, or in host memory for it.
      cache_bytes: Bytes of the cache on a device.
      reading: The program that reads the prompts.
      token: The program that adds a token to each row.
      token_bytes: Bytes that the program of a token reads and writes in device memory.
    """

    batch: Batch
    rates: Rates
    weights: Weights | Literal["on_host"]
    parameter_bytes: int
    cache_bytes: int
    reading: Measurement
    token: Measurement
    token_bytes: int

    @property
    def on_host(self) -> bool:
        """True if the parameters are in host memory."""
        return self.weights == "on_host"

    @property
    def peak(self) -> int:
        """Bytes of device memory at the peak."""
        return max(sum(p.memory.values()) for p in (self.reading, self.token))

    @property
    def fits(self) -> bool:
        """True if the peak fits into the memory of a device."""
        return self.peak <= self.rates.room

    @property
    def tokens_per_second(self) -> float:
        """New tokens of all rows in a second."""
        return self.batch.rows / self.token.seconds

    @property
    def least_seconds(self) -> float:
        """Time in which a device reads its parameters and its cache once, at the peak bandwidth: no
        token takes less."""
        cache = self.cache_bytes / self.rates.bandwidth
        bandwidth = self.rates.host if self.on_host else self.rates.bandwidth
        return cache + self.parameter_bytes / bandwidth

    def summary(self) -> Summary:
        """Returns the memory, the times and the traffic as a table."""
        place = "in host memory" if self.on_host else f"{self.weights.replace('_', ' ')}"
        rows = [
            ("parameters", f"{size(self.parameter_bytes)}, {place}"),
            ("cache", size(self.cache_bytes)),
            ("peak", f"{size(self.peak)} of {size(self.rates.room)}"),
            ("prompts", f"{self.reading.seconds * 1e3:.3g} ms"),
            ("a token", f"{self.token.seconds * 1e3:.3g} ms, at least "
                        f"{self.least_seconds * 1e3:.3g} ms to read parameters and cache"),
            ("tokens/s", f"{self.tokens_per_second:,.0f}"),
            *(
                (f"{t.kind} a token", f"{t.times} times, {size(t.bytes)}, {t.waited * 1e3:.3g} ms")
                for t in self.token.traffic
            ),
        ]  # fmt: skip
        batch = self.batch
        title = (
            f"generation, {batch.rows} rows, prompts of {batch.prompt} tokens, {batch.new} new "
            f"ones, {self.rates.kind}"
        )
        return Summary(title, (Table(rows),))


def forecast(
    model: object,
    params: PyTree,
    batch: Batch,
    *,
    mesh: Mesh,
    rates: Rates,
    weights: Weights | None = None,
    dtype: DTypeLike | None = jnp.bfloat16,
) -> GenerationForecast:
    """Compiles the programs of :func:`zerojax.generate`, and predicts their memory and time.

    Args:
      model: As for ``generate``.
      params: The parameters, abstract or concrete, with their shardings.
      batch: The rows.
      mesh: The devices, which need not exist.
      rates: The speeds and the memory of the devices.
      weights, dtype: As for ``generate``.
    """
    decoder, params = decoder_of(model, params)
    shapes = parameter_weights.shapes(params, dtype)
    limit, rows, start, source = decoder.limit(), batch.rows, batch.prompt, None
    room = rounded(start, limit)
    if isinstance(decoder, EncoderDecoder):
        start = 1
        source = Source(*(jax.ShapeDtypeStruct((rows, room), x) for x in (jnp.int32, jnp.bool_)))
    longest = rounded(start + batch.new, limit)
    common = min(room, longest) if decoder.takes_positions and start > 1 else start
    cache = Cache.of(decoder, shapes, rows, longest, source)
    arrays, storage = parameter_weights.place(
        params, weights, dtype, cache.bytes, cache.stacks, mesh
    )
    on = storage.mesh or mesh
    generation = Generation(decoder, cache, Sampling(), common, Ends((), 0), storage, Search())
    programs = Programs(generation, mesh)
    spec = PartitionSpec(batch_axes(mesh) if rows % batch_devices(mesh) == 0 else None)

    def placed_rows(*shape: int, dtype: DTypeLike = jnp.int32) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(on, spec))

    def run(traced: jax.stages.Traced) -> tuple[jax.stages.Compiled, Measurement]:
        lowered, known = compat.lower_for(traced, mesh), ParameterShapes(frozenset(), 0)
        measured, compiled = measure_compiled(lowered, known, rates, nodes_of(mesh))
        return compiled or lowered.compile(), measured  # which raises XLA's error

    lengths = Lengths(placed_rows(rows), placed_rows(rows))
    source = jax.tree.map(lambda x: placed_rows(*x.shape, dtype=x.dtype), source)
    traced = programs.start.trace(arrays, placed_rows(rows, longest), lengths, source)
    compiled, reading = run(traced)
    progress = jax.tree.map(
        lambda x, sharding: jax.ShapeDtypeStruct(
            x.shape, x.dtype, sharding=NamedSharding(on, sharding.spec)
        ),
        traced.out_info,
        compiled.output_shardings,
    )
    compiled, token = run(programs.advance.trace(arrays, progress, lengths, None))
    moved = _moved_bytes(compiled.as_text() or "")
    where: Weights = "by_layer" if any(storage.shards) else "gathered"
    return GenerationForecast(
        batch, rates, "on_host" if programs.on_host else where,
        _device_bytes(arrays), _device_bytes(progress.cache),
        reading, token, moved,
    )  # fmt: skip


def _moved_bytes(text: str) -> int:
    """Returns the bytes that the instructions of a compiled program read and write."""
    program = parse(text)
    runs = program.walk()
    return sum(work_of(program, r.computation, r.instruction).bytes * r.times for r in runs)


def _device_bytes(arrays: Layered) -> int:
    """Returns the bytes of a device's shards."""
    return sum(
        parameter_weights.device_bytes(x, layout.full(x.sharding.spec, x.ndim))
        for x in jax.tree.leaves(arrays)
    )
