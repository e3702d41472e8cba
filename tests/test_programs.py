"""Programs as users write them: the numbers of plain jit on the global batch, or words.

Each is evaluated in exact arithmetic, without a compile (``tests/exact.py``): an inserted sum, one
that is left out where partial sums are added up, a wrong operand, layer or micro-batch, a cast too
early or too late all fail. Some are compiled too, for what XLA makes of the program.
"""

import logging
from collections.abc import Iterator
from typing import Any

import emitted
import jax
import numpy as np
import optax
import pytest
from equal import TOLERANCE, assert_near, check, host, start, zero_for
from programs import PROGRAMS, ROWS, Kind, shapes
from programs.program import WIDTH

import zerojax

WITHOUT_AXES = {name: program for name, program in PROGRAMS.items() if not program.axes}
"""The specs of the others name axes of other meshes: test_features.py."""
HEAVY = {
    "gpt", "gpt_dropout", "gpt_remat", "gpt_scan", "nnx_gpt", "nnx_gpt_remat",
    "sequence_llama_scan", "sequence_llama", "sequence_gpt", "sequence_unaware",
    "tables_convolved", "layered", "layered_remat",
}  # fmt: skip
"""They take seconds."""
CONVOLVED = {"tables_convolved"}
"""A convolution is a hash of all its rows, see ``tests/exact.py``."""
OWN_ROUNDINGS = {"lstm", "gradients_clipped_by_value", "weights_clipped", "sequence_llama_scan"}
"""In bfloat16 a bound is rounded, or a loop adds up rounded gradients in another order."""


def exact_cells() -> Iterator[Any]:
    """Every program at every stage, on the global batch and by micro-batch. In turn biases are
    gathered together, as in large models, and each array is sharded alone and padded. In the fast
    tier are, of each program, one stage on the global batch and another by micro-batch."""
    names = [name for name in emitted.NAMES if not emitted.ALL[name].axes]
    for i, name in enumerate(names):
        equal = emitted.ALL[name].accumulated.kind is Kind.EQUAL and name not in CONVOLVED
        for k in (1, 4) if equal else (1,):
            for stage in (0, 1, 2, 3):
                fast = stage == ((3, 3, 1, 2)[i % 4] if k == 1 else (2, 3, 3, 1)[i % 4])
                fast = fast and (k == 1 or name not in HEAVY)
                small = (63, 0)[(i + stage + k) % 2]
                marks = () if fast else pytest.mark.sweep
                yield pytest.param(name, stage, k, small, marks=marks)


@pytest.mark.parametrize(("name", "stage", "k", "small"), list(exact_cells()))
def test_exactly(name: str, stage: int, k: int, small: int) -> None:
    emitted.check(emitted.source(name), stage, k, small_array_size=small)


def coincident_cells() -> Iterator[Any]:
    names = [
        name
        for name in emitted.NAMES
        if not emitted.ALL[name].axes
        and emitted.ALL[name].accumulated.kind is Kind.EQUAL
        # The second is a hash of all rows, the first returns vectors of as many numbers.
        and name not in {"results_vectors", *CONVOLVED}
    ]
    for i, name in enumerate(names):
        fast = name in {"mlp", "tied", "nnx_norm", "loss_two_means", "graphs", "stack_in_a_loop"}
        marks = () if fast else pytest.mark.sweep
        yield pytest.param(name, i // 2 % 4, 1 + i % 2, marks=marks)


@pytest.mark.parametrize(("name", "stage", "devices"), list(coincident_cells()))
def test_rows_that_are_as_many_as_a_width(name: str, stage: int, devices: int) -> None:
    """In micro-batches of one row, or of two."""
    k = WIDTH if devices == 1 else WIDTH // 2
    emitted.check(emitted.source(name, WIDTH), stage, k, zerojax.mesh(devices))


def rounded_cells() -> Iterator[Any]:
    names = [
        name
        for name, program in WITHOUT_AXES.items()
        if "bfloat16" in program.dtypes and not program.nnx and name not in OWN_ROUNDINGS
    ]
    for i, name in enumerate(names):
        marks = () if i % 3 == 0 and name not in HEAVY else pytest.mark.sweep
        yield pytest.param(name, (3, 0, 1, 2)[i // 3 % 4], marks=marks)


@pytest.mark.parametrize(("name", "stage"), list(rounded_cells()))
def test_exactly_as_mixed_precision_by_hand(name: str, stage: int) -> None:
    emitted.check(emitted.source(name), stage, bf16=True)


OTHER_OUTCOMES = [
    (name, 1 + i % 3)
    for i, (name, program) in enumerate(PROGRAMS.items())
    if program.accumulated.kind is not Kind.EQUAL
]


@pytest.mark.parametrize(("name", "stage"), OTHER_OUTCOMES)
def test_what_is_not_equal_by_micro_batch_is_told(
    name: str, stage: int, caplog: pytest.LogCaptureFixture
) -> None:
    outcome = PROGRAMS[name].accumulated
    config: dict[str, Any] = {"stage": stage, "gradient_accumulation_steps": 4}
    if outcome.kind is Kind.REFUSED:
        with pytest.raises((TypeError, ValueError)) as caught:
            emitted.emitted(emitted.source(name), **config)
        assert outcome.words in str(caught.value)
        return
    with caplog.at_level(logging.INFO, "zerojax"):
        emitted.emitted(emitted.source(name), **config)
    lines = [record.getMessage() for record in caplog.records if record.name == "zerojax"]
    assert sum(outcome.words in line for line in lines) == 1, lines


def compiled_cells() -> Iterator[Any]:
    """Every form in which a step is called, and one of five other programs: stages, micro-batches
    and dtypes in turn, half of them in the sweep."""
    forms = [program.name for program in shapes.PROGRAMS]
    others = [name for name in WITHOUT_AXES if name not in forms]
    for i, name in enumerate([*forms, *others[::5]]):
        program = PROGRAMS[name]
        by_part = i % 2 == 1 and program.accumulated.kind is not Kind.REFUSED
        low = i % 4 == 2 and "bfloat16" in program.dtypes
        dtype = "bfloat16" if low else program.dtypes[0]
        stage, k = (3, 3, 1, 2, 3, 0)[i % 6], 4 if by_part else 1
        marks = pytest.mark.sweep if name in HEAVY or i % 4 in (0, 3) else ()
        yield pytest.param(name, stage, k, dtype, marks=marks)


@pytest.mark.slow
@pytest.mark.usefixtures("quick_compile")
@pytest.mark.parametrize(("name", "stage", "k", "dtype"), list(compiled_cells()))
def test_compiled(name: str, stage: int, k: int, dtype: str) -> None:
    """Three steps, from a state that is placed when it first comes."""
    check(name, stage, k, dtype=dtype, small_array_size=0 if stage % 2 else 8192)


@pytest.mark.usefixtures("quick_compile")
def test_batch_statistics_of_micro_batches() -> None:
    """The gradient is the mean of those that micro-batches have with their own statistics, which
    pass from one to the next; a number made of statistics is their mean."""

    def step(state: Any, batch: Any) -> Any:
        state, _ = program.step(state, batch)
        return state, jax.tree.leaves(state.batch_stats)[0].sum()

    program = PROGRAMS["batch_norm"]
    (batch,) = program.batch(np.random.default_rng(0))
    with jax.enable_x64(True):
        want = start("batch_norm", "float64")
        stats, gradients, sums = want.batch_stats, [], []
        for rows in np.split(np.arange(ROWS), 4):

            def loss_fn(params: Any, rows: Any = rows, stats: Any = stats) -> Any:
                variables = {"params": params, "batch_stats": stats}
                logits, new = want.apply_fn(variables, batch["x"][rows], mutable=["batch_stats"])
                label = batch["label"][rows]
                losses = optax.softmax_cross_entropy_with_integer_labels(logits, label)
                return losses.mean(), new["batch_stats"]

            grads, stats = jax.jit(jax.grad(loss_fn, has_aux=True))(want.params)
            gradients.append(grads)
            sums.append(jax.tree.leaves(stats)[0].sum())
        mean = jax.tree.map(lambda *x: sum(x) / 4, *gradients)
        want = want.apply_gradients(grads=mean, batch_stats=stats)
        zero = zero_for(3, 4, accumulate_statistics=True)
        got, mean_sum = zero(step)(start("batch_norm", "float64"), batch)
        assert_near(*(host((x.params, x.batch_stats)) for x in (got, want)), TOLERANCE["float64"])
        assert float(mean_sum) == pytest.approx(float(sum(sums)) / 4, rel=1e-9)
