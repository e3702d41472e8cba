"""Losses of a GPT trained with quantized collectives (ZeRO++) and in fp8, beside bf16 and fp32.

    python -m benchmarks.quantized_training                          # 1000 steps each, 20 minutes
    python -m benchmarks.quantized_training --steps 20               # 3 minutes
    python -m benchmarks.quantized_training --text shakespeare.txt --record benchmarks/records
    python -m benchmarks.quantized_training --moments                # Adam's moments in bf16

The model is that of the main job (examples/run_clm) in small, with plain attention and no dropout,
on 8 devices at stage 3; the config is configs/zero3.json with precision and quantization switched
on. Batches are the same for all, and so is the start but for the last run, whose start is another:
the distance of that run shows the part of chance. To expect: with weights and gradients in int8,
and with products in fp8, the held-out loss at the end is within 1% of bf16's; else the exit status
is 1. Products in fp8 are emulated, in bfloat16 on rounded operands. With --moments, which takes
DeepSpeed's betas, it is within 0.5% for moments in bf16 that are rounded stochastically.
"""

import argparse
import dataclasses
import functools
import json
import math
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax.training.train_state import TrainState
from jax.sharding import Mesh
from matplotlib import pyplot as plt

import zerojax
from benchmarks.frame import Answer, Table, argument, question, say
from examples.run_clm import data
from examples.run_clm.devices import data_mesh
from examples.run_clm.job import DEFAULT_CONFIG
from zerojax.hlo.traffic import collectives
from zerojax.models.gpt import GPT, GPTConfig
from zerojax.plan.rule import SMALL

MODEL = GPTConfig(vocab_size=256, block_size=64, n_layer=2, n_head=4, n_embd=128)
ROWS = 16
STEPS = 1000
EVALUATIONS = 5
EVALUATION_ROWS, EVALUATION_BATCHES = 128, 8
WINDOW = 20  # steps that a mean of the training loss covers
BASE, BOTH, FP8 = "bf16", "qwZ + qgZ", "fp8"
STOCHASTIC, NEAREST = "bf16 moments, stochastic", "bf16 moments, nearest"
ALLOWED = {BOTH: 0.01, FP8: 0.01, STOCHASTIC: 0.005}
CODES = ("s8", "u8", "f8e4m3fn")  # dtypes of int8, of two int4 in a byte, and of fp8

_QWZ = {"zero_quantized_weights": True}
_QGZ = {"zero_quantized_gradients": True}
_INT4 = _QGZ | {"zero_quantized_gradients_dtype": "int4"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Variant:
    """Settings that one run switches on.

    Attributes:
      zero: Keys of ``zero_optimization``.
      fp8: The section ``fp8``.
      start: The seed of the parameters at the start.
      b2: The second beta of AdamW; 0.95 is the config's, 0.999 DeepSpeed's default.
      moments: ``STOCHASTIC`` for ``bf16_optimizer_states``; ``NEAREST`` for a step that rounds the
        moments to bfloat16 after each update; "" for float32.
    """

    zero: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    fp8: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    bf16: bool = True
    start: int = 0
    b2: float = 0.95
    moments: str = ""


VARIANTS: Mapping[str, Variant] = {
    BASE: Variant(),
    "fp32": Variant(bf16=False),
    "qwZ": Variant(zero=_QWZ),
    "qgZ": Variant(zero=_QGZ),
    BOTH: Variant(zero=_QWZ | _QGZ),
    "qgZ int4": Variant(zero=_INT4),
    FP8: Variant(fp8={"enabled": True, "emulate": True, "min_size": SMALL}),
    "bf16, other start": Variant(start=1),
}
MOMENTS: Mapping[str, Variant] = {
    BASE: Variant(b2=0.999),
    STOCHASTIC: Variant(b2=0.999, moments=STOCHASTIC),
    NEAREST: Variant(b2=0.999, moments=NEAREST),
    "bf16, other start": Variant(b2=0.999, start=1),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    """One training; losses in nats a character.

    Attributes:
      weights: Paths of the parameters that are gathered as codes, by the plan.
      gathered, exchanged: Bytes of codes in the compiled step's all-gathers and all-to-alls, of
        unsharded arrays.
      train: The loss of every step.
      held_out: (steps, loss) at each evaluation.
      seconds: Seconds of the compile, the steps and the evaluations.
    """

    name: str
    weights: list[str]
    gathered: int
    exchanged: int
    train: list[float]
    held_out: list[tuple[int, float]]
    seconds: float

    def excess_over(self, other: "Run") -> float:
        """Excess of the held-out loss at the end over the other's, relative to that."""
        return self.held_out[-1][1] / other.held_out[-1][1] - 1

    def ending(self, steps: int) -> float:
        """The mean training loss of the last steps."""
        return float(np.mean(self.train[-steps:]))


def run(
    name: str,
    variant: Variant,
    text: data.Text,
    steps: int,
    mesh: Mesh,
    model: GPTConfig = MODEL,
    evaluations: int = EVALUATIONS,
) -> Run:
    """Trains one variant, and counts the codes in its compiled step."""
    began = time.perf_counter()
    zero = zerojax.zero(config_of(variant), mesh=mesh)
    gpt = GPT(model)

    def create_state(key: jax.Array) -> TrainState:
        params = gpt.init(key, jnp.zeros((1, model.block_size), jnp.int32))["params"]
        return TrainState.create(apply_fn=gpt.apply, params=params, tx=zero.optimizer())

    def loss_fn(params: Any, batch: Any) -> jax.Array:
        inputs, targets = batch["tokens"][:, :-1], batch["tokens"][:, 1:]
        losses: Any = gpt.apply({"params": params}, inputs, targets=targets)
        return losses.mean()

    def train_step(state: TrainState, batch: Any) -> tuple[TrainState, jax.Array]:
        loss, grads = zerojax.value_and_grad(loss_fn)(state.params, batch)
        state = state.apply_gradients(grads=grads)
        if variant.moments == NEAREST:
            state = state.replace(opt_state=jax.tree.map(nearest, state.opt_state))
        return state, loss

    step = zero(train_step)
    evaluate = zero.evaluate(lambda state, batch: loss_fn(state.params, batch))
    batches = data.Batches(text.train, ROWS, model.block_size)
    unseen = data.Batches(text.held_out, EVALUATION_ROWS, model.block_size)
    state = zero.init(create_state, jax.random.key(variant.start))
    plan = zero.plan(state)
    weights = sorted(leaf.path for leaf in (*plan.quantized.leaves, *plan.fp8.leaves))
    gathered, exchanged = codes_in(step.lower(state, batches.batch_at(0)).compile().as_text() or "")
    train, held_out, every = [], [], max(1, steps // evaluations)
    for done in range(1, steps + 1):
        state, loss = step(state, batches.batch_at(done - 1))
        train.append(float(loss))
        if done % every == 0 or done == steps:
            losses = [float(evaluate(state, b)) for b in unseen.spread(EVALUATION_BATCHES)]
            held_out.append((done, float(np.mean(losses))))
    return Run(
        name=name,
        weights=weights,
        gathered=gathered,
        exchanged=exchanged,
        train=train,
        held_out=held_out,
        seconds=time.perf_counter() - began,
    )


def config_of(variant: Variant) -> dict[str, Any]:
    """The main job's config with what the variant switches on."""
    config: dict[str, Any] = json.loads(DEFAULT_CONFIG.read_text())
    config["zero_optimization"] |= variant.zero
    config["optimizer"]["params"]["betas"] = [0.9, variant.b2]
    low = {"enabled": variant.bf16, "bf16_optimizer_states": variant.moments == STOCHASTIC}
    return config | {"bf16": low, "fp8": variant.fp8}


def nearest(x: jax.Array) -> jax.Array:
    """Rounds a moment to bfloat16 and back; returns a counter unchanged."""
    return jax.lax.reduce_precision(x, 8, 7) if x.ndim else x


def sizes_of(params: Any) -> dict[str, int]:
    """Elements of each parameter, by its path in the plan."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(params)
    return {f"params{jax.tree_util.keystr(path)}": math.prod(x.shape) for path, x in leaves}


def codes_in(hlo: str) -> tuple[int, int]:
    """Bytes of codes in the all-gathers and in the all-to-alls of a compiled step."""
    sent = {"all-gather": 0, "all-to-all": 0}
    for each in collectives(hlo):
        codes = sum(each.bytes_by_dtype.get(dtype, 0) for dtype in CODES)
        if codes:
            sent[each.kind] += each.times * codes
    return sent["all-gather"], sent["all-to-all"]


def table(runs: Sequence[Run]) -> list[list[str]]:
    """Headings, and a row for each run beside the first, which is bf16's."""
    last = min(100, len(runs[0].train))
    rows = [["run", "held-out loss", "from bf16's", f"training, last {last} steps", "from bf16's",
             "gathered in codes", "exchanged in codes"]]  # fmt: skip
    for each in runs:
        base = each is runs[0]
        training = each.ending(last)
        rows.append([
            each.name,
            f"{each.held_out[-1][1]:.4f}",
            "" if base else f"{each.excess_over(runs[0]):+.2%}",
            f"{training:.4f}",
            "" if base else f"{training / runs[0].ending(last) - 1:+.2%}",
            f"{each.gathered / 1e3:,.0f} kB" if each.gathered else "",
            f"{each.exchanged / 1e3:,.0f} kB" if each.exchanged else "",
        ])  # fmt: skip
    return rows


def draw(runs: Sequence[Run], allowed: float, path: Path) -> None:
    """A panel for each run but the first: its losses' distance from the first's, up to 1.5 times
    what is allowed, in percent."""
    base, rows = runs[0], -(-len(runs[1:]) // 4) or 1
    figure, panels = plt.subplots(rows, 4, sharex=True, sharey=True, squeeze=False,
        figsize=(10, 2.5 * rows), dpi=110, layout="constrained")  # fmt: skip
    for panel, each in zip(panels.flat, runs[1:], strict=False):
        means, of_base = _means(each.train), _means(base.train)
        ends = np.arange(1, len(means) + 1) * WINDOW
        panel.plot(ends, 100 * (means / of_base - 1), linewidth=1, label="training")
        steps = [step for step, _ in each.held_out]
        losses = zip(each.held_out, base.held_out, strict=True)
        distances = [100 * (a / b - 1) for (_, a), (_, b) in losses]
        panel.plot(steps, distances, marker="o", markersize=4, label="held-out")
        panel.axhline(0, color="grey", linewidth=0.8)
        for sign in (-1, 1):
            panel.axhline(sign * allowed, color="grey", linewidth=0.8, linestyle="--")
        panel.set_title(f"{each.name}: {distances[-1]:+.2f}%", fontsize=10)
    if len(runs) > 1:
        panels.flat[0].legend(frameon=False, fontsize=8)
    panels.flat[0].set_ylim(-1.5 * allowed, 1.5 * allowed)  # of all, as they share the axis
    for panel in panels[:, 0]:
        panel.set_ylabel("% from bf16's loss")
    for panel in panels[-1]:
        panel.set_xlabel("step")
    figure.savefig(path)
    plt.close(figure)


def answer(runs: Sequence[Run], sizes: Mapping[str, int]) -> Answer:
    named = {name: size for name, size in sizes.items() if size > SMALL}
    small = sum(size for size in sizes.values() if size <= SMALL)
    conditions = (
        f"{len(runs[0].train)} steps of {ROWS} rows of {MODEL.block_size} bytes at stage 3 on 8 "
        f"virtual CPU devices, beside other work. GPT of {MODEL.n_layer} layers, width "
        f"{MODEL.n_embd}, {sum(sizes.values()):,} parameters, plain attention, no dropout; "
        "configs/zero3.json with bf16 (but for fp32) and what the row names. Held-out loss: "
        f"{EVALUATION_ROWS * EVALUATION_BATCHES} windows of text that training never sees, "
        "parameters gathered as in the step."
    )
    codes = (
        f"Gradients of {len(named)} arrays ({sum(named.values()):,} elements) are sent in codes: "
        f"{_listed(named)}. Of these qwZ gathers the kernels. The {len(sizes) - len(named)} others "
        f"({small:,} elements) have at most {SMALL} elements each and are sent unquantized. fp8 "
        "gathers and multiplies the kernels but for the head's. Bytes "
        "of codes are those of unsharded arrays in the compiled step."
    )
    figures = {"device": jax.devices()[0].device_kind, "devices": jax.device_count(),
               "rows": ROWS, "model": dataclasses.asdict(MODEL) | {"dtype": None},
               "sizes": sizes, "runs": runs}  # fmt: skip
    claimed = {each.name: each.excess_over(runs[0]) for each in runs if each.name in ALLOWED}
    missed = [
        f"{name} differs from bf16 by {excess:+.2%}"
        for name, excess in claimed.items()
        if abs(excess) > ALLOWED[name]
    ]
    parts: list[str | Table] = [conditions, Table(table(runs)), codes]
    allowed, name = max(ALLOWED[each] for each in claimed), ""
    drawing = functools.partial(draw, runs, 100 * allowed)
    if STOCHASTIC in claimed:
        parts, name = parts[:-1], "bf16_moments"
    return Answer(figures, parts, draw=drawing, missed=missed, name=name)


@question(
    "quantized_training",
    "Training with quantized collectives",
    argument("--steps", type=int, default=STEPS),
    argument("--text", type=Path, metavar="FILE", help="default: the standard library's sources"),
    argument("--moments", action="store_true", help="moments in bf16 in place of collectives"),
)
def main(options: argparse.Namespace) -> Answer:
    if options.steps < WINDOW:
        raise SystemExit(f"--steps: at least {WINDOW}")
    mesh = data_mesh(8)
    documents = [data.read_text(options.text)] if options.text else data.python_sources()
    text = data.split(documents, MODEL.block_size)
    tokens = jnp.zeros((1, MODEL.block_size), jnp.int32)
    shapes = jax.eval_shape(GPT(MODEL).init, jax.random.key(0), tokens)["params"]
    runs: list[Run] = []
    for name, variant in (MOMENTS if options.moments else VARIANTS).items():
        runs.append(run(name, variant, text, options.steps, mesh))
        say(f"{name}: {runs[-1].held_out} in {runs[-1].seconds:.0f} s")
    return answer(runs, sizes_of(shapes))


def _means(losses: Sequence[float]) -> np.ndarray:
    complete = len(losses) // WINDOW * WINDOW
    return np.array(losses[:complete]).reshape(-1, WINDOW).mean(1)


def _listed(sizes: Mapping[str, int]) -> str:
    return ", ".join(f"`{path}` {size:,}" for path, size in sizes.items())


if __name__ == "__main__":
    main()
