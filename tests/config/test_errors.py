"""Keys that nobody knows: which is meant, and many of them."""

import pytest

from zerojax.config import ConfigError, load
from zerojax.config.explain import explain


def problems(config, **more):
    with pytest.raises(ConfigError) as caught:
        load(config, **more)
    return caught.value.problems


@pytest.mark.parametrize(("config", "path"), [({"": 1}, '""'), ({"bf16": {"": 1}}, 'bf16.""')])
def test_a_key_without_a_name(config, path):
    says = f"{path}: a key without a name; take it out, or give it its name"
    assert problems(config) == (says,)
    row = explain(config).rows[0]
    assert (row.key, row.became) == (path, "wrong")


def test_a_dotted_key_is_to_be_nested():
    assert problems({"zero_optimization.stage": 3}) == (
        '"zero_optimization.stage": sections are objects; write '
        '{"zero_optimization": {"stage": ...}}',
    )


MANY = {f"k{i}": i for i in range(10_000)}


@pytest.mark.parametrize(
    "config",
    [MANY, dict.fromkeys(MANY, "auto"), {"optimizer": {"type": "Adam", "params": MANY}}],
    ids=["top", "auto", "params"],
)
def test_many_unknown_keys_are_told_by_their_number(config):
    found = problems(config)
    assert len(found) == 21
    assert found[-1].endswith("; and 9979 more like it")


def test_a_row_for_each_of_many():
    rows, found = explain({f"k{i}": i for i in range(100)})
    assert [row.became for row in rows[:100]] == ["wrong"] * 100
    assert len(found) == 21


def test_a_long_key_is_cut():
    (problem,) = problems({"x" * 100_000: 1})
    assert len(problem) < 200
