"""Part 2: what the roofline model assumes, beside what the device does.

Products by shape, attention by shape, and a training step instruction by instruction.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.gpu_day import models, training
from benchmarks.gpu_day.copies import spent
from benchmarks.gpu_day.measurement import attempts
from benchmarks.kernel_times import median_seconds
from pallas_kernels import attention as fused_attention
from zerojax.devices.rates import Rates, kind_of, rates
from zerojax.hlo.program import HloProgram, parse
from zerojax.hlo.work import FREE, work_of
from zerojax.xla.compiler import COMMAND_BUFFERS

ONE_BY_ONE: dict[str, Any] = {COMMAND_BUFFERS: ""}
"""Options of XLA under which the profiler names the instruction of each kernel."""
KINDS = {"attention forward": "attention_fwd", "attention backward": "attention_bwd"} | {
    "matrix products": "custom-call", "products with a bias": "cublas-lt",
}  # fmt: skip
"""Parts of the names of instructions, by kind."""
OTHERS = "other kernels"
FORMS: dict[str, Callable[[jax.Array, jax.Array, jax.Array], jax.Array]] = {
    "forward": lambda x, w, y: x @ w,
    "of the input": lambda x, w, y: y @ w.T,
    "of the weight": lambda x, w, y: x.T @ y,
}
"""The three products of a layer, for x [rows, in], w [in, out] and y [rows, out]."""


def products(shapes: Sequence[Sequence[int]], sustained: float) -> Iterator[dict[str, Any]]:
    """FLOP/s of a layer's three products in bf16 by ``rows x in x out``, and of the first one
    after ``sustained`` seconds of nothing else, when the device's power limits its clock."""

    def timed(shape: Sequence[int], form: str) -> dict[str, float]:
        rows, width, out = shape
        sizes = ((rows, width), (width, out), (rows, out))
        keys = jax.random.split(jax.random.key(0), len(sizes))
        arrays = [
            jax.random.normal(key, size, jnp.bfloat16)
            for key, size in zip(keys, sizes, strict=True)
        ]
        call = functools.partial(jax.jit(FORMS[form]), *arrays)
        flops = 2 * rows * width * out
        seconds = median_seconds(call, jax.block_until_ready, rounds=7)
        return {"flops_per_second": flops / seconds, "seconds": seconds}

    def after_a_while() -> dict[str, float]:
        begun, last = time.perf_counter(), {}
        while time.perf_counter() - begun < sustained:
            last = timed(shapes[0], "forward")
        return last

    yield from attempts(
        {
            f"{' x '.join(map(str, shape))}, {form}": functools.partial(timed, shape, form)
            for shape in shapes
            for form in FORMS
        }
        | {"sustained": after_a_while}
    )


def attention(shapes: Sequence[Sequence[int]]) -> Iterator[dict[str, Any]]:
    """Seconds and FLOP/s of causal attention by ``rows x tokens x heads x groups x width``, by
    cuDNN and by Mosaic's kernel, forward and with its gradient. Scores behind the mask count."""
    ways = ("cudnn", "mosaic_gpu") if jax.default_backend() == "gpu" else ("xla",)

    def timed(shape: Sequence[int], way: str, backward: bool) -> dict[str, float]:
        rows, tokens, heads, groups, width = shape
        keys = jax.random.split(jax.random.key(0), 3)
        q, k, v = (
            jax.random.normal(key, (rows, tokens, n, width), jnp.bfloat16)
            for key, n in zip(keys, (heads, groups, groups), strict=True)
        )
        forward = functools.partial(fused_attention, is_causal=True, implementation=way)

        def total(*qkv: jax.Array) -> jax.Array:
            return forward(*qkv).astype(jnp.float32).sum()

        run = jax.grad(total, (0, 1, 2)) if backward else forward
        call = functools.partial(jax.jit(run), q, k, v)
        flops = (7 if backward else 2) * 2 * rows * heads * tokens**2 * width
        seconds = median_seconds(call, jax.block_until_ready, rounds=7)
        return {"flops_per_second": flops / seconds, "seconds": seconds}

    yield from attempts(
        {
            f"{' x '.join(map(str, shape))}, {way}{', with gradient' * backward}": (
                functools.partial(timed, shape, way, backward)
            )
            for shape in shapes
            for way in ways
            for backward in (False, True)
        }
    )


def instructions(
    size: Mapping[str, Any], rows: int, seq: int, most: int = 120, kind: str = "h200"
) -> Iterator[dict[str, Any]]:
    """The step of a model in plain jit: of each instruction the seconds that the profiler found
    and those of the roofline model, the longest first.

    Args:
      size, rows, seq: As for :func:`benchmarks.gpu_day.training.beside`.
      most: The number of instructions that are listed.
      kind: The kind of device whose rates count where none is present.
    """
    batch = models.batch_of(size, rows, seq)
    create, step = training.way(size)
    present = jax.default_backend() == "gpu"
    compiled = step.lower(state := create(), batch).compile(ONE_BY_ONE if present else None)
    speeds = rates(kind_of(jax.devices()[0]) or kind)
    expected = modelled(parse(compiled.as_text()), speeds)
    del step

    def call() -> Any:
        nonlocal state
        state, out = compiled(state, batch)
        return out

    each = []
    for _ in range(5):
        begun = time.perf_counter()
        jax.block_until_ready((call(), state))
        each.append(time.perf_counter() - begun)
    found = by_instruction(call)
    names = sorted(
        {*expected, *found}, key=lambda name: -max(found.get(name, 0), expected.get(name, [0])[0])
    )
    yield {
        "step_seconds": min(each),
        "measured_total": sum(found.values()),
        "modelled_total": sum(seconds for seconds, *_ in expected.values()),
        "instructions": [
            {"name": name, "measured": found.get(name), "modelled": expected.get(name)}
            for name in names[:most]
        ],
    }


def modelled(program: HloProgram, speeds: Rates) -> dict[str, list[Any]]:
    """By instruction: seconds of all its runs, number of runs, FLOPs, bytes, first result,
    origin."""
    found: dict[str, list[Any]] = {}
    for computation, each, times in program.walk():
        if each.opcode in FREE or each.opcode.endswith(("-done", "-update")):
            continue
        work = work_of(program, computation, each)
        results = " ".join(str(shape) for shape in each.shapes[:2])
        flops = sum(work.flops.values()) + sum(work.attention.values())
        seconds, origin = times * work.seconds(speeds), each.op_name[-80:]
        found[each.name] = [seconds, times, flops, work.bytes, results, origin]
    return found


def by_kind(results: Mapping[str, Any]) -> list[list[str]]:
    """A table of the results of :func:`instructions`: kinds of instructions, the measured seconds
    beside those of the roofline model at that time."""
    lines = [["step", "instructions", "measured ms", "modelled ms", "measured / modelled"]]
    for name, found in results.items():
        if "instructions" not in found:
            continue
        totals: dict[str, list[float]] = {}
        for each in found["instructions"]:
            kind = next((kind for kind, names in KINDS.items() if names in each["name"]), OTHERS)
            total = totals.setdefault(kind, [0.0, 0.0])
            total[0] += each["measured"] or 0.0
            total[1] += each["modelled"][0] if each["modelled"] else 0.0
        for kind, (measured, expected) in totals.items():
            times = [f"{1e3 * measured:.1f}", f"{1e3 * expected:.1f}"]
            lines.append([name, kind, *times, f"{measured / expected:.2f}" if expected else ""])
    return lines


def by_instruction(call: Callable[[], Any]) -> dict[str, float]:
    """Seconds on the device by the instruction that the profiler names; empty on a CPU."""
    by_line = spent(call, lambda event: str(dict(event.stats).get("hlo_op", event.name[:60])))
    found: dict[str, float] = {}
    for line, seconds in by_line.items():
        for name, each in seconds.items() if line.startswith("Stream") else ():
            found[name] = found.get(name, 0.0) + each
    return found
