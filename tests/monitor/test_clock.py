"""Means of times, and samples per second."""

from zerojax.monitor.clock import Clock, Pace


def test_a_mean_covers_the_steps_since_the_last_line():
    clock = Clock()
    assert clock.line() is None
    for seconds in (0.01, 0.03):
        clock.add({"batch": 2 * seconds, "step": seconds})
    assert clock.line() == "time (ms) | batch: 40.00 | step: 20.00 | mean of 2 steps"
    assert clock.line() is None
    clock.add({"step": 0.5})
    assert clock.line() == "time (ms) | step: 500.00"


def test_the_first_step_is_in_no_mean():
    clock = Clock()
    assert "compilation" in clock.first({"step": 60.0})
    assert clock.line() is None


def test_a_pace_counts_from_the_last_time():
    pace = Pace()
    pace.start(10.0)
    assert pace.per_second(20.0) is None
    pace.add(30)
    assert pace.per_second(30.0) == 3.0
    pace.add(30)
    assert pace.per_second(60.0) == 1.0
