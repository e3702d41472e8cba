"""Evaluation sets by name."""

import pytest

from zerojax.trainer.evaluation import evaluation_set, evaluation_sets


def test_sets_are_found_by_name() -> None:
    given = {"long": [1, 2], "short": [3]}
    assert evaluation_set(given, "short") == [3]
    assert evaluation_sets([1, 2], "eval") == {"eval": [1, 2]}
    with pytest.raises(ValueError, match=r"evaluate\('shrt'\): .* has long, short"):
        evaluation_set(given, "shrt")
    with pytest.raises(ValueError, match="is not a dict"):
        evaluation_set([1, 2], "long")
    with pytest.raises(ValueError, match="without datasets"):
        evaluation_sets({}, "eval")
