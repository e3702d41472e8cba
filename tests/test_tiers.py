"""Which tests are run when, and what is reported of them."""

from tiers import (
    ROOT,
    SMOKE,
    is_toy,
)  # fmt: skip


def test_toys_are_the_examples_and_benchmarks_but_for_a_few() -> None:
    assert is_toy("tests/benchmarks/test_memory.py::test_a[1]")
    assert not is_toy("tests/benchmarks/test_frame.py::test_a")
    assert not is_toy("tests/checkpoint/test_kill.py::test_a")
    for name in SMOKE:
        file, _, test = name.partition("::")
        assert f"def {test}" in (ROOT / file).read_text()


def test_ci_s_options_have_their_values_by_an_equals_sign() -> None:
    # An argument that names a file is where pytest looks for conftest.py, which has the options.
    words = (ROOT / ".ci" / "run").read_text().replace('"', " ").split()
    assert "--record" not in words
    assert "--record=.ci/durations.json" in words
