"""Traffic of a model sharded over an axis, beside Megatron's count and ZeRO's theory.

    python -m benchmarks.tensor_parallel                                # minutes
    python -m benchmarks.tensor_parallel --record benchmarks/records

Compiled by XLA:GPU for absent H100s: needs ``pip install -e '.[compile,examples]'``, no GPU.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax

import zerojax
from benchmarks.frame import Answer, Table, question, say
from zerojax.hlo.traffic import Collective, collectives
from zerojax.models import gpt, llama
from zerojax.models.tensor_parallel import MODEL, TensorParallel
from zerojax.tuning.workload import workload

MEGA = 1e6
GATHERS, SCATTERS = 6, 5
"""All-gathers and reduce-scatters of a block's activations in a step, as Megatron has them: two and
two in the forward pass, two and two in the backward pass, and of what a rematerialised block
computes again two gathers and one scatter (the last product is not needed)."""
HEAD = (2, 1)
"""Gathers and scatters of head and table: the head's input and the table's gradient are gathered,
the gradient of the head's input is scattered."""
ABOUT = (
    "One of the devices at stage 3, bf16, AdamW, blocks in a scan and rematerialised from their "
    "inputs, tokens cut between blocks. `gathers` and `scatters`: arrays of activations over "
    f'"{MODEL}" in a step, and Megatron\'s count, {GATHERS} and {SCATTERS} a block (forward 2 and '
    "2, backward 2 and 2, computed again 2 and 1) and 2 and 1 of head and table. `model MB`: all "
    "that is sent over that axis, and of it what is not an activation of a block (head, table, "
    "loss; of GPT its one kernel of q, k and v, whose shards change places). `data MB`: over "
    '"data", and its share of the theory 3 x 2P/m x (d - 1)/d. `largest`: of the arrays that a '
    "collective moves, beside the logits of the device's rows, which none moves. GPT's data MB "
    "have beside the theory, for medium, the rows that are looked up in the tied table, and their "
    "gradient (3%), and shards of the gradient of q, k and v that change places (2%). Compiled by "
    "XLA:GPU for absent devices."
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """A step to compile.

    Attributes:
      size: A name in `zerojax.models.gpt.SIZES` or `zerojax.models.llama.SIZES`.
      data, model: The sizes of the mesh's axes "data" and that of the model.
      micro: Rows in a micro-batch of each group of ``model`` devices.
      seq: Tokens in a row.
      changes: Changes of the named size.
    """

    size: str
    data: int
    model: int
    micro: int
    seq: int
    changes: Mapping[str, int] = dataclasses.field(default_factory=dict)

    @property
    def axes(self) -> dict[str, int]:
        return {"data": self.data, MODEL: self.model}

    @property
    def config(self) -> Any:
        options: Any = {"block_size": self.seq, "scan": True, "remat": True, **self.changes}
        if self.size in llama.SIZES:
            return llama.LlamaConfig(**llama.SIZES[self.size] | options)
        return gpt.GPTConfig(**gpt.SIZES[self.size] | options)


CASES = (
    Case(size="llama-7b", data=4, model=2, micro=4, seq=2048),
    Case(size="llama-7b", data=2, model=4, micro=4, seq=2048),
    Case(size="llama-7b", data=8, model=8, micro=4, seq=2048),
    Case(size="llama3-8b", data=4, model=2, micro=1, seq=8192),
    Case(size="medium", data=4, model=2, micro=8, seq=1024),
    Case(size="large", data=2, model=4, micro=8, seq=1024),
)


@dataclasses.dataclass(frozen=True)
class Sent:
    """The traffic of a device in a step, in bytes but for ``gathers`` and ``scatters``.

    Attributes:
      gathers, scatters: The number of activations that are gathered, and reduced and scattered.
      model: Bytes sent over the axis of the model.
      beside: Those of ``model`` that are not of the blocks' activations.
      zero, theory: Bytes sent over the axis "data", and those of ZeRO's three passes over the
        parameters.
      largest: Bytes of the largest array that a collective moves.
      logits: Bytes of the logits of the device's rows over the complete vocabulary.
      state: Bytes of the program's arguments: parameters, moments and the batch.
    """

    case: Case
    parameters: int
    gathers: int
    scatters: int
    model: int
    beside: int
    zero: int
    theory: int
    largest: int
    logits: int
    state: int

    @property
    def counted(self) -> tuple[int, int]:
        """Gathers and scatters as Megatron has them."""
        layers = self.case.config.n_layer
        return GATHERS * layers + HEAD[0], SCATTERS * layers + HEAD[1]

    @property
    def of_theory(self) -> float:
        return self.zero / self.theory


def compiled(case: Case) -> Sent:
    """Compiles a case for H100s, and counts."""
    mesh = zerojax.topology("h100", case.data * case.model, axes=case.axes)
    tensor = TensorParallel(mesh)
    zero = zerojax.zero(stage=3, bf16=True, mesh=mesh, specs=tensor.specs)
    kind = llama.Llama if case.size in llama.SIZES else gpt.GPT
    config = case.config
    work = workload(lambda: kind(config, tensor=tensor), zero, case.micro * case.data, case.seq)
    state = zero.abstract_state(work.create_state, jax.random.key(0))
    executable: Any = zero(work.train_step).lower(state, work.batch).compile()
    sent = [*collectives(executable.as_text())]
    parameters = sum(x.size for x in jax.tree.leaves(state.params))
    rows = (case.micro, case.seq)
    return Sent(
        case,
        parameters,
        _times(sent, "all-gather", (*rows, config.n_embd), case),
        _times(sent, "reduce-scatter", (*rows, config.n_embd), case),
        model := sum(each.moved_bytes for each in sent if along(each, case) == MODEL),
        model - _of_blocks(config.n_layer, math.prod(rows) * config.n_embd, case.model),
        sum(each.moved_bytes for each in sent if along(each, case) == "data"),
        round(3 * 2 * parameters / case.model * (case.data - 1) / case.data),
        max(shape.bytes for each in sent for shape in each.shapes),
        2 * math.prod(rows) * config.vocab_size,
        executable.memory_analysis().argument_size_in_bytes,
    )


def along(each: Collective, case: Case) -> str:
    """The axis that a collective runs along; "both" for both."""
    group = sorted(each.groups[0])
    if group[-1] // case.model == group[0] // case.model:
        return MODEL
    return "data" if len({device % case.model for device in group}) == 1 else "both"


def _times(sent: Sequence[Collective], kind: str, shape: tuple[int, ...], case: Case) -> int:
    """Arrays of a shape, in any order of its dimensions, that collectives of a kind move over the
    axis of the model in a step."""
    wanted = _sides(shape)
    return sum(
        each.times * sum(_sides(x.dims) == wanted for x in each.shapes)
        for each in sent
        if each.kind == kind and along(each, case) == MODEL
    )


def _sides(shape: Sequence[int]) -> list[int]:
    return sorted(size for size in shape if size > 1)


def _of_blocks(layers: int, elements: int, model: int) -> int:
    """Bytes that Megatron sends of the activations of all blocks."""
    return round((GATHERS + SCATTERS) * layers * 2 * elements * (model - 1) / model)


def rows(found: Sequence[Sent]) -> list[list[str]]:
    """Headings, and a line for each case."""
    lines = [
        ["model", "data x model", "rows", "gathers", "scatters", "model MB", "beside blocks",
         "data MB", "of theory", "largest MB", "logits MB", "state MB"],
    ]  # fmt: skip
    for s in found:
        case = s.case
        sizes = (s.model, s.beside, s.zero, s.largest, s.logits, s.state)
        model, beside, zero, largest, logits, state = (f"{x / MEGA:,.0f}" for x in sizes)
        counts = [f"{s.gathers}, {s.counted[0]}", f"{s.scatters}, {s.counted[1]}"]
        about = [case.size, f"{case.data} x {case.model}", f"{case.micro} x {case.seq}"]
        share = f"{s.of_theory:.2f}"
        lines.append([*about, *counts, model, beside, zero, share, largest, logits, state])
    return lines


@question("tensor_parallel", "Tensor parallelism on absent H100s", absent_devices=True)
def main(options: argparse.Namespace) -> Answer:
    found = []
    for case in CASES:
        say(f"compiling {case.size}, {case.data} x {case.model}")
        found.append(compiled(case))
    return Answer({"cases": found}, [ABOUT, Table(rows(found), texts=3)])


if __name__ == "__main__":
    main()
