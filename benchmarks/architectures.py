"""Traffic and memory of eight architectures, compiled for absent GPUs.

    python -m benchmarks.architectures                              # about ten minutes on two cores
    python -m benchmarks.architectures --only LSTM --only ViT       # those whose names begin so
    python -m benchmarks.architectures --record benchmarks/records

Each is compiled at stages 2 and 3, and under plain ``jax.jit`` with the same state sharded by
``in_shardings`` and ``out_shardings`` alone. Traffic stands beside what ZeRO's theory asks for.
Needs ``pip install -e '.[compile,examples]'`` and no GPU.
"""

import argparse
import dataclasses
import datetime
import functools
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from rich.console import Console

import zerojax
from benchmarks.architecture_models import Architecture, Sizes, architectures
from benchmarks.measure import COMPUTE_BYTES, fsdp_sharding
from benchmarks.report import console, console_table, heading, markdown_table, write_json
from zerojax.hlo.traffic import collectives

DEVICES = 8
MEGA = 1e6
KINDS = ("all-gather", "reduce-scatter", "all-reduce", "all-to-all")
STAGES: tuple[int | None, ...] = (2, 3, None)
WITHIN = 1.1  # of the theory, for the recurrent model
NOTE = (
    "Compiled by XLA:GPU for 8 absent H100s: bf16 compute with fp32 masters, AdamW.\n"
    "Traffic in units of 2P bytes, the bf16 parameters once. Theory: stage 2 one gather and one\n"
    "scatter, stage 3 two gathers and one scatter (one gather of what is only looked up). A table\n"
    "tied to the output is gathered and scattered once for each of its two uses.\n"
    "Sent: bytes a device sends in a ring, over those of the theory (for plain jit that of stage\n"
    "3); an all-reduce sends twice its size. Peak: arguments and temporaries of a device.\n"
    "Plain jit: the same step, its state cut as at stage 3 by shardings alone."
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cost:
    """What a step of an architecture costs, for each device.

    Attributes:
      stage: None for plain jit.
      parameters: how many the model has.
      units: by kind of collective, the bytes that go through it in a step, over 2P.
      sent: bytes sent in a ring, over those of the theory.
      peak_bytes: arguments and temporaries.
      seconds: tracing and compiling.
    """

    architecture: str
    stage: int | None
    parameters: int
    units: dict[str, float]
    sent: float
    peak_bytes: int
    seconds: float

    @property
    def name(self) -> str:
        return "plain jit" if self.stage is None else f"stage {self.stage}"


def compile_architecture(architecture: Architecture, stage: int | None) -> Cost:
    """Compile one step and read its costs off it.

    Raises:
      ImportError: the GPU compiler's wheels are not installed.
    """
    mesh = zerojax.topology("h100", DEVICES)
    began = time.perf_counter()
    lowered, parameters = lower_architecture(architecture, stage, mesh)
    compiled: Any = lowered.compile()
    seconds = time.perf_counter() - began
    moves = collectives(compiled.as_text())
    unit = COMPUTE_BYTES * parameters
    units: dict[str, float] = {}
    for each in moves:
        units[each.kind] = units.get(each.kind, 0) + each.times * each.payload_bytes / unit
    memory = compiled.memory_analysis()
    theory = (2 if stage == 2 else 3) * unit * (DEVICES - 1) / DEVICES
    return Cost(
        architecture=architecture.name,
        stage=stage,
        parameters=parameters,
        units=units,
        sent=sum(each.moved_bytes for each in moves) / theory,
        peak_bytes=memory.argument_size_in_bytes + memory.temp_size_in_bytes,
        seconds=seconds,
    )


def lower_architecture(
    architecture: Architecture, stage: int | None, mesh: Mesh
) -> tuple[jax.stages.Lowered, int]:
    """Lower one step, None for that of plain jit; return it and the number of parameters."""
    if stage is None:
        return _lower_plain(architecture, mesh)
    zero = zerojax.zero(stage=stage, bf16=True, mesh=mesh)
    state = zero.abstract_state(architecture.create, jax.random.key(0))
    batch = architecture.batch(DEVICES * architecture.rows)
    return zero(architecture.step()).lower(state, batch), _count(state.params)


def _lower_plain(architecture: Architecture, mesh: Mesh) -> tuple[jax.stages.Lowered, int]:
    state = jax.eval_shape(architecture.create, jax.random.key(0))
    shardings = jax.tree.map(functools.partial(fsdp_sharding, mesh), state)
    rows, replicated = (NamedSharding(mesh, PartitionSpec(*axes)) for axes in (["data"], []))
    step = architecture.step(lambda params: jax.tree.map(lambda x: x.astype(jnp.bfloat16), params))
    jitted = jax.jit(
        step,
        in_shardings=(shardings, rows),
        out_shardings=(shardings, replicated),
        donate_argnums=0,
    )
    batch = architecture.batch(DEVICES * architecture.rows)
    return jitted.lower(state, batch), _count(state.params)


def run(
    chosen: Sequence[Architecture],
    stages: Sequence[int | None] = STAGES,
    say: Callable[[str], None] = lambda text: None,
) -> list[Cost]:
    """Compile the chosen architectures; ``say`` is told of each as it is done."""
    costs = []
    for architecture in chosen:
        for stage in stages:
            cost = compile_architecture(architecture, stage)
            costs.append(cost)
            say(f"{cost.architecture}, {cost.name}: {_units(cost)}, {cost.seconds:.0f} s")
    return costs


def table(costs: Sequence[Cost]) -> list[list[str]]:
    """A row of headings, and one for each cost."""
    rows = [["architecture", "", "parameters M", "gathers", "scatters", "all-reduces",
             "all-to-alls", "other", "sent / theory", "peak MB", "seconds"]]  # fmt: skip
    for each in costs:
        other = sum(units for kind, units in each.units.items() if kind not in KINDS)
        theory = [None, None] if each.stage is None else [1 if each.stage == 2 else 2, 1]
        rows.append(
            [
                each.architecture,
                each.name,
                f"{each.parameters / MEGA:.0f}",
                *(
                    f"{each.units.get(kind, 0):.2f}" + (f" ({bound})" if bound else "")
                    for kind, bound in zip(KINDS, [*theory, None, None], strict=True)
                ),
                f"{other:.2f}",
                f"{each.sent:.2f}",
                f"{each.peak_bytes / MEGA:,.0f}",
                f"{each.seconds:.0f}",
            ]
        )
    return rows


def missed(costs: Sequence[Cost]) -> list[str]:
    """The recurrent models that send more than the theory, with some slack."""
    return [
        f"{each.architecture}, {each.name}: sends {each.sent:.2f} of the theory, limit {WITHIN}"
        for each in costs
        if each.architecture.startswith("LSTM") and each.stage is not None and each.sent > WITHIN
    ]


def markdown(costs: Sequence[Cost]) -> str:
    """The record."""
    parts = [heading("Traffic of architectures", ", no GPU"), NOTE]
    parts += [markdown_table(table(costs), texts=2)]
    limits = "; ".join(missed(costs)) or "none"
    parts += [f"Limits missed (the LSTM within {WITHIN} of the theory): {limits}."]
    return "\n\n".join(parts) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.architectures", description="Traffic of eight architectures."
    )
    parser.add_argument("--only", action="append", metavar="NAME", help="may be given repeatedly")
    parser.add_argument("--record", type=Path, metavar="FOLDER", help="also write a record here")
    options = parser.parse_args()
    chosen = _chosen(architectures(Sizes()), options.only)
    # Compiling for an absent GPU works only while JAX does not look for one.
    jax.config.update("jax_platforms", "cpu")
    out: Console = console()
    costs = run(chosen, say=lambda text: out.print(text, highlight=False))
    out.print(
        console_table(
            table(costs), title="Traffic in units of 2P bytes", caption=NOTE, caption_justify="left"
        )
    )
    if options.record:
        stem = options.record / f"{datetime.date.today()}-architectures"
        figures = [dataclasses.asdict(each) for each in costs]
        write_json(stem.with_suffix(".json"), {"costs": figures, "missed": missed(costs)})
        stem.with_suffix(".md").write_text(markdown(costs))
    if over := missed(costs):
        raise SystemExit("\n".join(over))


def _chosen(known: Sequence[Architecture], names: Sequence[str] | None) -> list[Architecture]:
    chosen = [each for each in known if not names or each.name.startswith(tuple(names))]
    if not chosen:
        listed = ", ".join(each.name for each in known)
        raise SystemExit(f"no architecture begins with {' or '.join(names or ())}: {listed}")
    return chosen


def _count(params: Any) -> int:
    return sum(leaf.size for leaf in jax.tree.leaves(params))


def _units(cost: Cost) -> str:
    return ", ".join(f"{kind} {units:.2f}" for kind, units in cost.units.items()) or "nothing sent"


if __name__ == "__main__":
    main()
