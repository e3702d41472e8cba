"""Figures that the device has not finished."""

import logging
import math

import jax.numpy as jnp
import pytest

from zerojax.monitor.backlog import Backlog, Figures
from zerojax.optim.wrap import UNKNOWN


class Kept:
    """A writer that keeps what it is given."""

    where = "kept"

    def __init__(self):
        self.events, self.closed, self.broken = [], 0, False

    def write(self, figures, samples):
        if self.broken:
            raise ConnectionError("no network")
        self.events += [(tag, value, samples) for tag, value in figures.items()]

    def close(self):
        self.closed += 1


@pytest.fixture
def kept():
    return Kept()


@pytest.fixture
def backlog(kept):
    made = Backlog(lambda: [kept])
    yield made
    made.close()


def test_what_is_not_ready_is_not_waited_for_and_keeps_its_place(backlog, kept, slow):
    first, second = slow(1.0), slow(2.0)
    second.done = True
    for number, x in enumerate((first, second), 1):
        backlog.push(Figures(8, number, {"x": x}))
    assert (kept.events, first.read, second.read) == ([], False, False)
    assert backlog.before is None
    first.done = True
    backlog.push(Figures(8, 3, {"x": 3.0}))
    assert kept.events == [("x", 1.0, 8), ("x", 2.0, 16), ("x", 3.0, 24)]
    assert backlog.before == 0


def test_close_waits_for_everything(backlog, kept, slow):
    for number in range(1, 4):
        backlog.push(Figures(8, slow(number), {"x": slow(number)}))
    assert kept.events == []
    backlog.close()
    assert kept.events == [("x", 1.0, 8), ("x", 2.0, 16), ("x", 3.0, 24)]
    assert kept.closed == 1
    backlog.close()
    assert kept.closed == 1


def test_the_backlog_has_a_bound(backlog, kept, slow):
    arrays = [slow(n) for n in range(258)]
    for number, x in enumerate(arrays, 1):
        backlog.push(Figures(1, number, {"x": x}))
    assert [x.read for x in arrays[:3]] == [True, True, False]
    assert len(kept.events) == 2


def test_a_state_from_a_checkpoint_goes_on_where_it_was(backlog, kept):
    backlog.push(Figures(8, jnp.int32(101), {"x": 1.0}))
    backlog.push(Figures(8, jnp.int32(102), {"x": 2.0}))
    assert (backlog.before, [e[2] for e in kept.events]) == (100, [808, 816])


def test_without_writers_only_the_first_step_is_read(slow):
    backlog = Backlog(list)
    step, x = slow(5), slow()
    backlog.push(Figures(8, step, {"x": x}))
    step.done = x.done = True
    later = slow()
    backlog.push(Figures(8, later, {"x": later}))
    later.done = True
    backlog.close()
    assert (backlog.before, x.read, later.read) == (4, False, False)


def test_a_writer_that_fails_is_named_once_and_asked_again(backlog, kept, caplog):
    kept.broken = True
    for number in range(1, 4):
        backlog.push(Figures(8, number, {"x": 1.0}))
    kept.broken = False
    backlog.push(Figures(8, 4, {"x": 2.0}))
    assert kept.events == [("x", 2.0, 32)]
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert record.getMessage() == (
        "kept: metrics are missing (ConnectionError: no network). Training continues; this warning "
        "is not repeated."
    )


def test_a_rate_that_is_not_known_is_left_out(backlog, kept):
    nan = jnp.float32(jnp.nan)
    backlog.push(Figures(8, 1, {"Train/Samples/lr": nan, "Train/Samples/train_loss": nan}))
    assert [tag for tag, *_ in kept.events] == ["Train/Samples/train_loss"]


def test_a_norm_that_was_not_computed_is_left_out(backlog, kept):
    for norm in (UNKNOWN, jnp.nan):
        backlog.push(Figures(8, 1, {"Train/Samples/grad_norm": jnp.float32(norm)}))
    assert [(tag, math.isnan(value)) for tag, value, _ in kept.events] == [
        ("Train/Samples/grad_norm", True)
    ]
