"""The status line of the main job, on terminals of several widths."""

import io
import re

import jax.numpy as jnp
import optax
import pytest
from rich.console import Console

import zerojax
from examples.run_clm.progress import Progress, fitting


@pytest.mark.parametrize("width", [60, 80, 200])
def test_each_frame_has_the_step_and_the_bar(width: int) -> None:
    zero = zerojax.zero(stage=1)
    state = zero.init(lambda: zero.wrap(optax.adam(1e-3)).init({"w": jnp.ones(8)}))
    terminal, console = (
        Console(width=width, force_terminal=True, color_system=None, file=io.StringIO())
        for _ in range(2)
    )
    with Progress(terminal, 606, done=0, step_tokens=4096, mesh=zero.mesh) as progress:
        frames = []
        for step in range(1, 607):
            progress.advance(step, jnp.float32(2.2317), state)
            with console.capture() as shown:
                console.print(progress)
            frames += shown.get().splitlines()
    for step, frame in enumerate(frames, 1):
        assert re.match(rf"step {step}/606 [━╸╺ ]{{10,}} loss 2.232 ", frame), frame
        assert re.search(r" (\d:\d\d:\d\d|-:--:--)$", frame), frame
    assert len(frames) == 606  # a line each
    assert ("grad norm" in frames[-1]) == (width == 200)
    assert ("tokens/s" in frames[-1]) == (width >= 80)


def test_a_narrow_terminal_keeps_the_first_figures() -> None:
    figures = ["198,701 tokens/s", "peak 4.0 MB/device", "lr 0.001"]
    assert fitting(figures, 38) == "  198,701 tokens/s  peak 4.0 MB/device"
    assert fitting(figures, 37) == "  198,701 tokens/s"
    assert fitting(figures, 3) == ""
