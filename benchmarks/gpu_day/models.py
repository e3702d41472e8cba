"""The models that ``gpu_day`` trains, and the speed and the memory of their training steps."""

import dataclasses
import functools
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

import pallas_kernels
from zerojax.devices.rates import kind_of, rates
from zerojax.models.gpt import GPT, GPTConfig
from zerojax.models.gpt import SIZES as GPT_SIZES
from zerojax.models.kernels import Kernels
from zerojax.models.llama import Llama, LlamaConfig

GPT2_XL: dict[str, Any] = {"family": "gpt", **GPT_SIZES["gpt2-xl"]}
LLAMA_8B: dict[str, Any] = dict(
    family="llama", vocab_size=128256, block_size=8192, n_layer=8, n_head=32, n_kv_head=8,
    n_embd=4096, n_inner=14336, rope_theta=500000.0, rms_norm_eps=1e-5,
)  # fmt: skip
"""Llama 3 8B (arXiv:2407.21783) with 8 of its 32 layers: 2.8B parameters, 45 GB with their state
and gradients."""
TOY_GPT: dict[str, Any] = {"family": "gpt", **GPT_SIZES["tiny"]}
TOY_LLAMA: dict[str, Any] = dict(
    family="llama", vocab_size=256, block_size=32, n_layer=2, n_head=4, n_kv_head=2, n_embd=32,
    n_inner=96,
)  # fmt: skip

OWN, FUSED, MOSAIC = "own", "fused", "mosaic_gpu"
"""A model's layers: its own; fused, each kernel where it was measured to be faster, and attention
by cuDNN; fused with Mosaic's kernels everywhere."""


def on_one(function: Callable[..., Any], replicated: Any = ()) -> Callable[..., Any]:
    """``zero.per_device`` for a plain step on one device."""
    return function


def build(
    size: Mapping[str, Any],
    per_device: Callable[..., Any] = on_one,
    layers: str = FUSED,
    scan: bool = True,
    remat: bool = True,
) -> Any:
    """A model, its blocks scanned with ``scan`` and rematerialised with ``remat``.

    ``layers`` is ``OWN``, ``FUSED`` or ``MOSAIC``."""
    sizes = {name: value for name, value in size.items() if name != "family"}
    if size["family"] == "gpt":
        kernels = Kernels(per_device, MOSAIC if layers == MOSAIC else None)
        config = GPTConfig(**sizes, scan=scan, remat=remat)
        return GPT(config, None if layers == OWN else kernels)
    causal = functools.partial(pallas_kernels.attention, is_causal=True)
    options = {} if layers == OWN else {"attention": per_device(causal)}
    return Llama(LlamaConfig(**sizes, scan=scan, remat=remat), **options)


def batch_of(size: Mapping[str, Any], rows: int, seq: int) -> dict[str, jax.Array]:
    """Random tokens, one more in a row for the targets."""
    shape = (rows, seq + 1)
    return {"tokens": jax.random.randint(jax.random.key(1), shape, 0, size["vocab_size"])}


def flops_a_token(size: Mapping[str, Any], seq: int) -> float:
    """FLOPs of training on one token: 6 for each parameter of a matrix product, those of the head
    included, and ``12 L D T`` for attention.

    Source: PaLM, appendix B (arXiv:2204.02311)."""
    layers, width = size["n_layer"], size["n_embd"]
    if size["family"] == "gpt":
        block = 12 * width**2
    else:
        shared = (size.get("n_kv_head") or size["n_head"]) / size["n_head"]
        block = (2 + 2 * shared) * width**2 + 3 * width * size["n_inner"]
    return 6 * (layers * block + size["vocab_size"] * width) + 12 * layers * width * seq


@dataclasses.dataclass(frozen=True, kw_only=True)
class Steps:
    """The times of some steps, in seconds.

    Attributes:
      first: seconds of the first call, with its compile.
      each: the median from call to result, where each step ends before the next begins.
      in_a_row: the mean of steps that are called without waiting, as training does.
      losses: the losses of the first call and of the last.
    """

    first: float
    each: float
    in_a_row: float
    losses: tuple[float, float]


def run_steps(step: Callable[..., Any], state: Any, batch: Any, steps: int) -> tuple[Any, Steps]:
    """Calls a step ``2 steps + 2`` times; returns the last state and the times of the calls."""

    def call() -> tuple[Any, Any]:
        return step(state, batch)

    begun = time.perf_counter()
    state, first = jax.block_until_ready(call())
    compiled = time.perf_counter() - begun
    state, _ = jax.block_until_ready(call())
    each = []
    for _ in range(steps):
        begun = time.perf_counter()
        state, out = jax.block_until_ready(call())
        each.append(time.perf_counter() - begun)
    begun = time.perf_counter()
    for _ in range(steps):
        state, out = call()
    jax.block_until_ready((state, out))
    in_a_row = (time.perf_counter() - begun) / steps
    losses = float(first["loss"]), float(out["loss"])
    return state, Steps(
        first=compiled, each=statistics.median(each), in_a_row=in_a_row, losses=losses
    )


def figures(
    size: Mapping[str, Any], rows: int, seq: int, turns: Sequence[Steps], program: int
) -> dict[str, Any]:
    """Speed by the median turn, and the device memory of the program in bytes.

    MFU is None where the device's peak is unknown."""
    middle = sorted(turns, key=lambda each: each.in_a_row)[(len(turns) - 1) // 2]
    tokens = rows * seq / middle.in_a_row
    return {
        **dataclasses.asdict(middle),
        "first": turns[0].first,
        "turns": [each.in_a_row for each in turns],
        "rows": rows,
        "seq": seq,
        "tokens_per_second": tokens,
        "mfu": mfu(size, seq, tokens),
        "bytes": program,
    }


def mfu(size: Mapping[str, Any], seq: int, tokens_per_second: float) -> float | None:
    """Model FLOPs over the bf16 peak of the data sheet; None on a CPU."""
    kind = kind_of(jax.devices()[0])
    if kind is None:
        return None
    return tokens_per_second * flops_a_token(size, seq) / rates(kind).matrix["bf16"]


def peak_bytes() -> int | None:
    """The most bytes of the first device that this process has held so far; None on a CPU."""
    return (jax.local_devices()[0].memory_stats() or {}).get("peak_bytes_in_use")


def cast_to_bf16(params: Any) -> Any:
    return jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), params)
