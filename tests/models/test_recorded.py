"""What the tests of DeBERTa and BART compare with is what transformers computes."""

import importlib.util

import numpy as np
import pytest
from models import recorded


@pytest.mark.skipif(
    not all(map(importlib.util.find_spec, ("torch", "transformers"))),
    reason="torch and transformers are not installed: nothing to compare the recorded with",
)
@pytest.mark.filterwarnings("default")
def test_the_recorded_is_what_transformers_computes_here() -> None:
    computed, stored = recorded.compute(), np.load(recorded.FILE)
    assert computed.keys() == set(stored)
    for name, array in computed.items():
        np.testing.assert_allclose(array, stored[name], atol=1e-5, rtol=0, err_msg=name)


def test_targets_are_filled_up_behind_their_end() -> None:
    tokens = np.array([[2, 5, 2, 2], [2, 5, 6, 7]])
    ended = recorded.ended(tokens, end=2, pad=1, length=5)
    np.testing.assert_array_equal(ended, [[2, 5, 2, 1, 1], [2, 5, 6, 7, 1]])
