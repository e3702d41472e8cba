"""Programs as users write them: the numbers of plain jit on the global batch, or words."""

import logging
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
import optax
import pytest
from equal import TOLERANCE, assert_near, check, host, start, zero_for
from programs import PROGRAMS, ROWS, Kind

from zerojax.plan import rule

pytestmark = pytest.mark.usefixtures("quick_compile")


# They take seconds to compile, and differ from others in the forward pass alone: stage 3 stands for
# the others.
VARIANTS = {
    "gpt", "gpt_dropout", "gpt_remat", "gpt_scan", "nnx_gpt", "nnx_gpt_dropout", "nnx_gpt_remat",
    "sequence_llama_scan", "sequence_llama", "sequence_gpt", "sequence_unaware",
    "tables_convolved",
}  # fmt: skip


def cells() -> Iterator[Any]:
    """Program, stage, micro-batches and dtype: every program by micro-batch at stage 3; half of
    them whole at another stage, and the other half in bfloat16 at stage 0 or 3, or at stage 3 where
    they have no bfloat16; by micro-batch the other way round.

    All but one, under accumulation, are of the sweep, and so are three of four programs that are
    equal, as test_invariant.py has all of them in exact arithmetic."""
    for i, (name, program) in enumerate(PROGRAMS.items()):
        if program.axes:  # their specs name axes of other meshes: test_features.py
            continue
        for k in (1, 4):
            more = i % 2 == k // 4
            runs = [(3, program.dtypes[0])]
            if more:
                runs.append((i // 2 % 3, program.dtypes[0]))
            elif "bfloat16" in program.dtypes:
                runs.append((i // 2 % 2 * 3, "bfloat16"))
            runs = runs[:1] if name in VARIANTS else runs[-1:] if k == 1 else runs
            for at, (stage, dtype) in enumerate(runs):
                core = k == 4 and at == (i // 2 % 2 if more else 0) and name not in VARIANTS
                core = core and (i % 4 == 0 or program.accumulated.kind is not Kind.EQUAL)
                marks = () if core else pytest.mark.sweep
                where = f"{name}-stage{stage}-by{k}-{dtype}"
                yield pytest.param(name, stage, k, dtype, marks=marks, id=where)


@pytest.mark.parametrize(("name", "stage", "k", "dtype"), list(cells()))
def test_program(
    name: str, stage: int, k: int, dtype: str, caplog: pytest.LogCaptureFixture
) -> None:
    outcome = PROGRAMS[name].once if k == 1 else PROGRAMS[name].accumulated
    with caplog.at_level(logging.INFO, "zerojax"):
        check(name, stage, k, dtype=dtype)
    if outcome.kind is Kind.TOLD:
        lines = [record.getMessage() for record in caplog.records if record.name == "zerojax"]
        assert sum(outcome.words in line for line in lines) == 1, lines


@pytest.mark.one_in(2)
@pytest.mark.parametrize("k", [pytest.param(1, marks=pytest.mark.sweep), 4])
@pytest.mark.parametrize(
    ("name", "stage"),
    [
        ("gan_simultaneous", 3),
        ("gan_simultaneous", 1),
        ("mean_teacher", 3),
        pytest.param("gan_weighted", 3, marks=pytest.mark.sweep),
        pytest.param("early_average", 3, marks=pytest.mark.sweep),
        ("target_copied", 2),
        pytest.param("target_periodic", 3, marks=pytest.mark.sweep),
        ("batch_norm", 3),
        ("nnx_batch_norm", 3),
    ],
)
def test_state_beside_the_parameters_is_sharded(
    name: str, stage: int, k: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Arrays as small as these too."""
    program = PROGRAMS[name]
    if k > 1 and program.accumulated.kind is not Kind.EQUAL:
        k = 1
    monkeypatch.setattr(rule, "SMALL", 0)
    with jax.enable_x64(True):
        plan = zero_for(stage, k).plan(start(name, "float64"))
    assert any(leaf.sharded for leaf in plan.leaves["rest"])
    check(name, stage, k, dtype="float64")


@pytest.mark.slow
def test_batch_statistics_of_micro_batches() -> None:
    """The gradient is the mean of those that micro-batches have with their own statistics, which
    pass from one to the next."""
    program = PROGRAMS["batch_norm"]
    (batch,) = program.batch(np.random.default_rng(0))
    with jax.enable_x64(True):
        want = start("batch_norm", "float64")
        stats, gradients = want.batch_stats, []
        for rows in np.split(np.arange(ROWS), 4):

            def loss_fn(params: Any, rows: Any = rows, stats: Any = stats) -> Any:
                variables = {"params": params, "batch_stats": stats}
                logits, new = want.apply_fn(variables, batch["x"][rows], mutable=["batch_stats"])
                label = batch["label"][rows]
                losses = optax.softmax_cross_entropy_with_integer_labels(logits, label)
                return losses.mean(), new["batch_stats"]

            grads, stats = jax.grad(loss_fn, has_aux=True)(want.params)
            gradients.append(grads)
        mean = jax.tree.map(lambda *x: sum(x) / 4, *gradients)
        want = want.apply_gradients(grads=mean, batch_stats=stats)
        got, _ = zero_for(3, 4)(program.step)(start("batch_norm", "float64"), batch)
        assert_near(*(host((x.params, x.batch_stats)) for x in (got, want)), TOLERANCE["float64"])
