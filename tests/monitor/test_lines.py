"""The text of the lines, and who sees them."""

import contextlib
import io
import logging

import pytest

from zerojax.config import ZeroConfig
from zerojax.monitor.lines import momentum, say


@pytest.mark.parametrize(
    ("optimizer", "scheduler", "expected"),
    [
        (None, None, None),
        ({"type": "AdamW"}, None, (0.9, 0.999)),
        ({"type": "AdamW", "params": {"betas": [0.8, 0.9]}}, {"type": "WarmupLR"}, (0.8, 0.9)),
        ({"type": "SGD", "params": {"momentum": 0.5}}, None, 0.5),
        ({"type": "Adagrad"}, None, 0.0),
    ],
)
def test_momentum(optimizer, scheduler, expected):
    given = ZeroConfig.from_keywords(optimizer=optimizer, scheduler=scheduler)
    assert momentum(given) == expected


@contextlib.contextmanager
def bare():
    """The loggers as in a program that configured nothing.

    No fixture: pytest adds its handlers after those.
    """
    root, ours = logging.getLogger(), logging.getLogger("zerojax")
    handlers, levels = root.handlers[:], (root.level, ours.level)
    root.handlers[:] = []
    root.setLevel(logging.WARNING)
    ours.setLevel(logging.NOTSET)
    yield root, ours
    root.handlers[:] = handlers
    root.setLevel(levels[0])
    ours.setLevel(levels[1])


def test_without_handlers_a_line_goes_to_stderr_once(capsys):
    with bare() as (root, ours):
        say("step=1")
        say("step=2")
        assert (root.handlers, ours.handlers, ours.level) == ([], [], logging.NOTSET)
    written = capsys.readouterr()
    assert written.out == ""
    first, second = written.err.splitlines()
    assert first.endswith("] [INFO] [zerojax] step=1")
    assert second.endswith("] [INFO] [zerojax] step=2")


@pytest.mark.parametrize("level", [logging.WARNING, logging.DEBUG])
def test_a_handler_of_the_users_gets_it_instead(capsys, level):
    stream = io.StringIO()
    with bare() as (root, _):
        root.addHandler(logging.StreamHandler(stream))
        root.setLevel(level)  # WARNING is how Python sets it, not a wish
        say("step=1")
    assert stream.getvalue() == "step=1\n"
    assert capsys.readouterr().err == ""
