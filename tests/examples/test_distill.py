"""Distillation, shortened: it runs with either teacher, and prints the three losses."""

import math
import re

import pytest
from typer.testing import CliRunner

from examples.distill import app

pytestmark = pytest.mark.usefixtures("quick_compile")


@pytest.mark.parametrize("teacher", ["fp32", "int8"])
def test_it_prints_the_losses(teacher: str) -> None:
    options = ["--teacher", teacher, "--teacher_steps", "20", "--steps", "20"]
    result = CliRunner().invoke(app, options, catch_exceptions=False)
    pattern = r"held-out loss: teacher (.*), student (.*), distilled (.*)\n"
    losses = re.fullmatch(pattern, result.output)
    assert losses is not None, result.output
    assert all(float(loss) < math.log(256) for loss in losses.groups())
