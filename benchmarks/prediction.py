"""Predictions against a GPU: memory and time of steps, forecast without it and then run on it.

Command::

    python -m benchmarks.prediction --record benchmarks/records

Each case is forecast in a process that sees no GPU, as ``python -m zerojax plan`` does, and run in
another, which owns the GPU's memory: the device's own peak statistic, and the median of the steps'
times. A case that is predicted not to fit is run all the same, to see that it runs out of memory.
"""

import argparse
import dataclasses
import os
import statistics
import time
from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import Mesh

import zerojax
from benchmarks.frame import Answer, Table, argument, question, say
from benchmarks.separate import in_a_process
from zerojax.config import load
from zerojax.foresight.choice import OFFLOADS, Choice
from zerojax.foresight.devices import parse_devices
from zerojax.models import names as models
from zerojax.models.registry import bound
from zerojax.plan.table import size
from zerojax.step.train_step import Step
from zerojax.tuning.study import Study
from zerojax.tuning.workload import workload

STEPS, WARM_UP = 10, 3
FRACTION = "0.95"  # of the GPU's memory, for JAX
MEMORY, TIME = 0.05, 0.25  # how far a prediction may be off
_PREALLOCATE = "XLA_PYTHON_CLIENT_PREALLOCATE"
CONFIG = {"bf16": {"enabled": True}}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """A training step of a GPT, by a choice of settings, on one GPU."""

    model: str
    choice: Choice
    seq: int = 1024

    @property
    def name(self) -> str:
        return f"{self.model}, {self.choice}"


def case(model: str, stage: int, micro: int, remat: bool, offload: int = 0) -> Case:
    choice = Choice(stage=stage, micro=micro, remat=remat, offload=OFFLOADS[offload])
    return Case(model=model, choice=choice)


CASES = (
    case("gpt2", 0, 8, True),
    case("gpt2", 0, 8, False),
    case("gpt2", 3, 32, True),
    case("gpt2", 1, 8, True, 1),
    case("gpt2_medium", 0, 8, True),
    case("gpt2_medium", 3, 8, False),
    case("gpt2_large", 2, 8, True),
    case("gpt2_large", 3, 4, True, 2),
    case("gpt2_xl", 0, 4, True),
    case("gpt2_xl", 3, 16, True),
    case("gpt2_xl", 2, 8, True, 1),
    case("gpt2_xl", 3, 8, True, 2),
    case("gpt2_xl", 0, 16, False),  # runs out of 80 GB
    case("gpt2", 0, 128, False),  # so does this
)


def predict(wanted: Case, kind: str) -> dict[str, Any]:
    """The forecast of a case, in a process without the GPU."""
    mesh, rates = parse_devices(f"{kind}:1")
    study = Study(
        getattr(models, wanted.model), load(CONFIG), mesh, rates,
        rows=wanted.choice.micro, seq=wanted.seq, remat=wanted.choice.remat,
    )  # fmt: skip
    forecast = study.forecast(wanted.choice)
    return {"bytes": forecast.peak.bytes, "fits": forecast.fits, "seconds": forecast.seconds}


def run(wanted: Case, mesh: Mesh | None = None) -> dict[str, Any]:
    """The case itself, on all devices or on those of a mesh.

    ``bytes`` is the device's own peak, None on devices that keep no statistic; what XLA tries out
    while it compiles counts there. ``compiled`` is the memory of the largest compiled program.
    """
    choice = wanted.choice
    mesh = zerojax.mesh() if mesh is None else mesh
    config = choice.config(load(CONFIG), mesh.size)
    zero = zerojax.zero(config, mesh=mesh, check_memory=False)  # what does not fit is to run out
    rows = choice.micro * mesh.size
    function = bound(getattr(models, wanted.model), {"seq": wanted.seq, "remat": choice.remat})
    work = workload(function, zero, rows, wanted.seq)
    step: Step[..., Any] = zero(work.train_step)
    batch = {
        name: jax.random.randint(jax.random.key(1), x.shape, 0, 200, x.dtype)
        for name, x in work.batch.items()
    }
    times = []
    try:
        state = zero.init(work.create_state, jax.random.key(0))
        for _ in range(WARM_UP + STEPS):
            begun = time.perf_counter()
            state, out = step(state, batch)
            jax.block_until_ready((state, out))
            times.append(time.perf_counter() - begun)
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        return {"bytes": None, "fits": False, "seconds": None, "compiled": None}
    stats = jax.local_devices()[0].memory_stats() or {}
    seconds = statistics.median(times[WARM_UP:])
    return {
        "bytes": stats.get("peak_bytes_in_use"),
        "fits": True,
        "seconds": seconds,
        "compiled": compiled_bytes(step, state, batch),
    }


def compiled_bytes(step: Step[..., Any], state: Any, batch: Any) -> int:
    """The device memory of the largest program; with JAX's cache of compiled programs on, nothing
    is compiled again."""
    return max(bytes_of(each.lowered.compile()) for each in step.programs(state, batch))


def bytes_of(compiled: jax.stages.Compiled) -> int:
    """Arguments, temporaries and results of a program."""
    memory: Any = compiled.memory_analysis()
    result = memory.output_size_in_bytes - memory.alias_size_in_bytes
    return memory.argument_size_in_bytes + memory.temp_size_in_bytes + result


def predicted_case(at: int, kind: str) -> dict[str, Any]:
    return predict(CASES[at], kind)


def run_case(at: int) -> dict[str, Any]:
    return run(CASES[at])


def verdict(predicted: dict[str, Any], actual: dict[str, Any]) -> str:
    """The figures of a prediction that are off, or "ok"."""
    wrong = []
    if predicted["fits"] != actual["fits"]:
        wrong.append("fit")
    for name, most in (("bytes", MEMORY), ("seconds", TIME)):
        if actual[name] is not None and abs(predicted[name] / actual[name] - 1) > most:
            wrong.append(name)
    return ", ".join(wrong) or "ok"


def table(results: Sequence[dict[str, Any]]) -> list[list[str]]:
    rows = [["case", "predicted", "peak", "predicted", "step", "verdict"]]
    for each in results:
        predicted, actual = each["predicted"], each["measured"]
        peak = "no statistic" if actual["fits"] else "out of memory"
        rows.append(
            [
                each["case"],
                size(predicted["bytes"]) + ("" if predicted["fits"] else ", does not fit"),
                size(actual["bytes"]) if actual["bytes"] is not None else peak,
                f"{1e3 * predicted['seconds']:.0f} ms",
                "" if actual["seconds"] is None else f"{1e3 * actual['seconds']:.0f} ms",
                verdict(predicted, actual),
            ]
        )
    return rows


@question(
    "prediction",
    "Predictions against a GPU",
    argument("--kind", default="h100", help="name of the GPU's kind"),
)
def main(options: argparse.Namespace) -> Answer:
    os.environ[_PREALLOCATE] = "false"  # this process leaves the GPU to the others
    if jax.default_backend() != "gpu":
        raise SystemExit("no GPU here: this compares predictions with one")
    absent = os.environ | {"JAX_PLATFORMS": "cpu"}
    owner = os.environ | {_PREALLOCATE: "true", "XLA_PYTHON_CLIENT_MEM_FRACTION": FRACTION}
    results = []
    for at, each in enumerate(CASES):
        say(f"{at + 1} of {len(CASES)}: {each.name}")
        predicted = in_a_process(predicted_case, at, options.kind, environment=absent)
        actual = in_a_process(run_case, at, environment=owner)
        results.append({"case": each.name, "predicted": predicted, "measured": actual})
    device = jax.devices()[0].device_kind
    figures = {"device": device, "results": results}
    return Answer(figures, [Table(table(results))], machine=f", {device}")


if __name__ == "__main__":
    main()
