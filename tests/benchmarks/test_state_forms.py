"""On eight H100s the form of the state changes nothing of what zerojax decides to send."""

import jax
import pytest

import zerojax
from benchmarks.state_forms import FORMS, SMALL, program


@pytest.mark.gpu_compile
@pytest.mark.usefixtures("require_gpu_compiler")
def test_every_form_sends_what_a_train_state_sends() -> None:
    sent = {}
    for form in FORMS:
        made = program(SMALL, form, scan=False, updates=1)
        zero = zerojax.zero(stage=3, mesh=zerojax.topology("h100", 8), **made.settings)
        state = zero.abstract_state(made.create, jax.random.key(0))
        states = state if made.several else (state,)
        sent[form] = zero(made.step).collectives(*states, made.batch(8)).bytes_by_kind()
    train_state, *others = sent.values()
    assert train_state["all-gather"] > 0
    assert train_state["reduce-scatter"] > 0
    assert [dict(each) for each in others] == [train_state] * len(others)
