"""Lines and bars on a terminal."""

import io

import pytest
from rich.console import Console

from zerojax.trainer import screen
from zerojax.trainer.screen import Screen


def test_an_evaluation_has_a_bar_beside_that_of_training(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = io.StringIO()

    def console(quiet: bool) -> Console:
        return Console(file=terminal, force_terminal=True, quiet=quiet, width=80)

    monkeypatch.setattr(screen, "Console", console)
    shown = Screen(bars=True)
    with shown.bar("step", 10, 4, keep=True) as training:
        training()
        training(0, figures="5 rows/s")
        with shown.bar("eval", 20) as evaluation:
            evaluation(16)
            shown.print("step  5/10  eval_[loss] 1")
        training()
    text = terminal.getvalue()
    assert "eval    16/20" in text
    assert "step     6/10" in text
    assert "step  5/10  eval_[loss] 1" in text
    assert text.rindex("eval    16/20") < text.rindex("step     6/10")
    with shown.bar("test", 3) as again:  # after the display has stopped
        again(3)
        shown.print("step 10/10  test_loss 1")
    assert "test     3/3" in terminal.getvalue()


def test_elsewhere_there_are_lines_only(capsys: pytest.CaptureFixture[str]) -> None:
    shown = Screen(bars=True)
    with shown.bar("step", 10) as bar:
        bar()
        shown.print("a line")
    assert capsys.readouterr().out == "a line\n"
