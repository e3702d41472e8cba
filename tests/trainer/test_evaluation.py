"""Evaluation sets by name."""

import pytest

from zerojax.trainer.evaluation import evaluation_sets


def test_a_set_has_its_prefix() -> None:
    assert evaluation_sets([1, 2], "eval") == {"eval": [1, 2]}
    with pytest.raises(ValueError, match="without datasets"):
        evaluation_sets({}, "eval")
