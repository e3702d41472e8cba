"""The ladder on one card: what is registered, and the figures of one rung."""

import jax
import jax.numpy as jnp
import pytest

from benchmarks.one_card import (
    BESIDE,
    DEVICES,
    HEADINGS,
    RECIPES,
    REGISTERED,
    beside,
    cells,
    forecast,
)
from zerojax.foresight.devices import parse_devices
from zerojax.models.llama import Llama, LlamaConfig

PARAMETERS = {"3B": 3_212_749_824, "8B": 8_030_261_248, "70B": 70_553_706_496}
"""As the models' cards have them."""


def test_each_row_names_a_size_a_recipe_devices_and_a_source() -> None:
    for row in REGISTERED["rows"]:
        assert row["size"] in REGISTERED["sizes"]
        assert row["recipe"] in RECIPES
        assert parse_devices(row["devices"])[1].kind in row["devices"]
        assert row["source"].startswith("https://github.com/")
        assert row["tokens_per_second"] > 0


@pytest.mark.parametrize("size", PARAMETERS)
def test_the_sizes_are_those_of_the_models(size: str) -> None:
    model = Llama(LlamaConfig(**REGISTERED["sizes"][size], scan=True))
    shapes = jax.eval_shape(model.init, jax.random.key(0), jnp.zeros((1, 8), jnp.int32))
    assert sum(leaf.size for leaf in jax.tree.leaves(shapes)) == PARAMETERS[size]


@pytest.mark.gpu_compile
@pytest.mark.usefixtures("require_gpu_compiler")
@pytest.mark.filterwarnings("ignore:.VariableState. was removed:DeprecationWarning")  # qwix
class TestCompiled:
    def test_a_rung(self) -> None:
        """The base takes two bytes a parameter, and adapters of rank 8 little beside it."""
        found = forecast("3B", DEVICES[0], RECIPES["LoRA"])
        assert found is not None
        assert found.fits
        base, weights = (found.peak.memory[kind] for kind in ("extra state", "parameters"))
        assert base == pytest.approx(2 * PARAMETERS["3B"], rel=1e-3)
        assert weights < 0.03 * base
        assert len(["rtx-4090:1", "LoRA", *cells(found)]) == len(HEADINGS)
        row = REGISTERED["rows"][1] | {"size": "3B"}
        assert len(beside(row)) == len(BESIDE.split(", "))

    def test_what_cannot_fit_is_not_compiled(self) -> None:
        assert forecast("70B", DEVICES[0], RECIPES["full"]) is None
