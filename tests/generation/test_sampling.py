"""Drawn tokens against the distribution from which they are drawn."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from zerojax.generation.sampling import Sampling

LOGITS = np.log(np.array([0.05, 0.4, 0.1, 0.25, 0.2]))


@pytest.mark.parametrize(
    ("sampling", "expected"),
    [
        (Sampling(temperature=1.0), [0.05, 0.4, 0.1, 0.25, 0.2]),
        (Sampling(temperature=0.5), np.array([0.05, 0.4, 0.1, 0.25, 0.2]) ** 2),
        (Sampling(temperature=1.0, top_k=2), [0, 0.4, 0, 0.25, 0]),
        (Sampling(temperature=1.0, top_p=0.5), [0, 0.4, 0, 0.25, 0]),
        (Sampling(temperature=1.0, top_p=0.9), [0, 0.4, 0.1, 0.25, 0.2]),
        (Sampling(temperature=1.0, top_k=3, top_p=0.6), [0, 0.4, 0, 0.25, 0]),
    ],
    ids=str,
)
def test_draws_follow_the_distribution(sampling: Sampling, expected: list[float]) -> None:
    rows = 4000
    drawn = sampling.choose(jnp.broadcast_to(LOGITS, (rows, 5)), jax.random.key(0))
    counts = np.bincount(np.asarray(drawn), minlength=5)
    means = rows * np.asarray(expected) / np.sum(expected)
    assert (counts[means == 0] == 0).all()
    chi_square = ((counts - means)[means > 0] ** 2 / means[means > 0]).sum()
    assert chi_square < 18.5  # exceeded once in a thousand with 4 degrees of freedom


def test_greedy_takes_the_largest() -> None:
    assert Sampling().choose(jnp.array([LOGITS]), None).tolist() == [1]
