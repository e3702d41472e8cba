"""The table of what a step hides of its collectives."""

import pytest

from benchmarks.hidden import (
    Case,
    compile_case,
)


@pytest.mark.sweep
@pytest.mark.gpu_compile
@pytest.mark.usefixtures("require_gpu_compiler")
def test_an_unrolled_model_hides_most_before_hopper() -> None:
    """With one collective under way at a time the share is 64%."""
    case = Case(model="llama-7b", scan=False, devices="a100:8", micro=1, overlap=True)
    assert compile_case(case).hidden > 0.75
