"""Generated tokens a second beside published figures, for Llama 2 on absent GPUs; no GPU.

    python -m benchmarks.generation                              # 14 cases, about 25 minutes
    python -m benchmarks.generation --record benchmarks/records

Every case compiles the program of one token, and predicts its time; "read" is the memory traffic of
that program, and "least" the bytes of parameters and cache, which each token must read once. Needs
``pip install -e '.[compile]'`` and no GPU.
"""

import argparse
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax.training.train_state import TrainState

import zerojax
from benchmarks.frame import Answer, Table, argument, question, say
from benchmarks.published_tables import giga
from zerojax.devices.mesh import laid_out
from zerojax.foresight.devices import parse_devices
from zerojax.generation.forecast import Batch, GenerationForecast, forecast
from zerojax.models.llama import SIZES, Llama, LlamaConfig
from zerojax.models.tensor_parallel import TensorParallel

PROMPT, NEW = 8, 200
"""Tokens of a prompt and new tokens: those of the published runs, which have prompts of 5."""

GPT_FAST = "https://github.com/pytorch-labs/gpt-fast"


class Case(NamedTuple):
    """A model on devices, one row.

    Attributes:
      model: Its name in ``zerojax.models.llama.SIZES``.
      kind: The kind of GPUs.
      devices: GPUs that share the model by tensor parallelism.
      bits: 16 for bf16, 8 or 4 for quantized weights.
      host: Whether the parameters are in host memory.
      published: Tokens a second of gpt-fast, on A100s limited to 330 W.
    """

    model: str
    kind: str
    devices: int = 1
    bits: int = 16
    host: bool = False
    published: float | None = None


CASES = (
    Case("llama-7b", "a100", published=104.9),
    Case("llama-7b", "a100", bits=8, published=155.58),
    Case("llama-7b", "a100", bits=4, published=196.8),
    Case("llama-7b", "a100", devices=2, published=168.84),
    Case("llama-7b", "a100", devices=4, published=254.02),
    Case("llama-7b", "a100", devices=8, published=328.43),
    Case("llama-70b", "a100", devices=4, published=38.01),
    Case("llama-70b", "a100", devices=8, published=62.5),
    Case("llama-70b", "a100", devices=8, bits=8, published=80.44),
    Case("llama-7b", "h100"),
    Case("llama-7b", "h100", bits=8),
    Case("llama-70b", "h100", devices=2, bits=8),
    Case("llama-70b", "h100", devices=8, bits=8),
    Case("llama-13b", "h100", host=True),
)
NOTE = (
    f"One row, a prompt of {PROMPT} tokens and {NEW} new ones. Published: gpt-fast, A100 80 GB "
    f"limited to 330 W, {GPT_FAST} (README, read in November 2026); its 4-bit weights have groups "
    "of 32, those here a scale for each output. No GPU has run these programs."
)


def run(case: Case) -> GenerationForecast:
    """Compiles a case."""
    mesh, rates = parse_devices(f"{case.kind}:{case.devices}")
    tensor = None
    if case.devices > 1:
        mesh = laid_out(mesh, {"data": 1, "model": case.devices})
        tensor = TensorParallel(mesh)
    model = Llama(LlamaConfig(**SIZES[case.model] | {"scan": True}), tensor=tensor)
    offload: Any = {"offload_param": "cpu", "offload_optimizer": "cpu"} if case.host else {}
    zero = zerojax.zero(
        stage=3, bf16=True, mesh=mesh, specs=tensor.specs if tensor else None, **offload
    )

    def create() -> TrainState:
        params = model.init(jax.random.key(0), jnp.ones((1, 8), jnp.int32))["params"]
        return TrainState.create(apply_fn=None, params=params, tx=optax.sgd(0.1))

    params = zero.abstract_state(create).params
    if case.bits < 16:
        params = zerojax.quantize_weights(params, case.bits)
    return forecast(
        model, params, Batch(1, PROMPT, NEW), mesh=mesh, rates=rates,
        weights="by_layer" if case.host else "gathered",
    )  # fmt: skip


@question(
    "generation",
    "Generated tokens a second beside published figures",
    argument("--cases", nargs="+", type=int, default=[*range(len(CASES))], help="numbers of cases"),
    absent_devices=True,
)
def main(options: argparse.Namespace) -> Answer:
    results: dict[str, Any] = {}
    lines = [[
        "", "peak GB", "read GB", "least GB", "ms a token", "tokens/s", "published", "ratio",
    ]]  # fmt: skip
    for case in (CASES[i] for i in options.cases):
        weights = "bf16" if case.bits == 16 else f"int{case.bits}"
        place = ", from host memory" if case.host else ""
        name = f"{case.model}, {weights}{place}, {case.devices} x {case.kind}"
        say(f"compiling {name}")
        found = run(case)
        least = found.parameter_bytes + found.cache_bytes
        ratio = found.tokens_per_second / case.published if case.published else None
        results[name] = {
            "peak": found.peak,
            "token_bytes": found.token_bytes,
            "least_bytes": least,
            "seconds": found.token.seconds,
            "tokens_per_second": found.tokens_per_second,
            "published": case.published,
            "traffic": {t.kind: (t.times, t.bytes) for t in found.token.traffic},
        }
        lines.append([
            name, giga(found.peak), "" if case.host else giga(found.token_bytes), giga(least),
            f"{found.token.seconds * 1e3:.2f}", f"{found.tokens_per_second:.1f}",
            f"{case.published}" if case.published else "", f"{ratio:.2f}" if ratio else "",
        ])  # fmt: skip
    return Answer(results, [NOTE, Table(lines)])


if __name__ == "__main__":
    main()
