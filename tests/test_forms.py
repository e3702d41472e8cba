"""Programs with their state in other forms than a ``TrainState``: the numbers of plain jit on the
global batch, or an error."""

from collections.abc import Iterator
from typing import Any

import jax
import pytest
from equal import (
    STEPS,
    TOLERANCE,
    arguments,
    assert_near,
    by_micro_batch,
    host,
    plain,
    start,
    zero_for,
)
from forms import FORMS, NAMES, in_form, ordered, parts_of
from programs import PROGRAMS, Kind

pytestmark = pytest.mark.usefixtures("quick_compile")


def cells() -> Iterator[Any]:
    """Each program in one form, in turn unsplit and by micro-batch, stages in turn. One small
    program in each form is of the core."""
    core = [name for name in NAMES if not name.startswith(("gpt", "conv"))][: len(FORMS)]
    for i, name in enumerate(sorted(NAMES, key=lambda name: name not in core)):
        turn, at = divmod(i, len(FORMS))
        form, k = [*FORMS][at], 4 if (turn + at) % 2 else 1
        stage = (3, 2)[turn // 2 % 2] if k > 1 else (3, 1, 2, 0)[turn // 2 % 4]
        marks = () if name in core else pytest.mark.sweep
        where = f"{name}-{form.replace(' ', '_')}-stage{stage}-by{k}"
        yield pytest.param(name, form, stage, k, marks=marks, id=where)


@pytest.mark.parametrize(("name", "form", "stage", "k"), list(cells()))
def test_program(name: str, form: str, stage: int, k: int) -> None:
    program, kind = PROGRAMS[name], FORMS[form]
    outcome = program.once if k == 1 else program.accumulated
    dtype = program.dtypes[0]
    with jax.enable_x64(dtype == "float64"):
        like = start(name, dtype)
        objects = kind.take(parts_of(like))
        step = zero_for(stage, k)(in_form(kind, program.step, like))
        results = []

        def run() -> Any:
            state = objects
            for given in arguments(name, dtype):
                state, out = kind.read(step(*ordered(kind, state, given)))
                results.append(host(out))
            return kind.give(*state)

        if outcome.kind is Kind.REFUSED:
            with pytest.raises((TypeError, ValueError)):
                run()
            return
        parts = run()
        if outcome.kind is Kind.TOLD:
            return
        want, params, rest = plain(name, dtype)
        near = (k > 1 and program.near) or TOLERANCE[dtype]
        assert len(want) == STEPS
        got = results, host(parts.params), host(parts.rest)
        assert_near(got, (by_micro_batch(want, k), params, rest), near)
