"""A state saved at any stage, on any devices, in any precision is restored at any other."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import pytest
from checkpoint.states import KEY, assert_same, create_linen, create_nnx, filled, values, zero_of

import zerojax
from zerojax.checkpoint import Checkpointer

PRECISIONS = ("fp32", "bf16", "fp16")
# Stage, devices, with a model axis, replica groups; the precisions take turns.
LAYOUTS = [
    (0, 1, False, None),
    (1, 8, False, 4),
    (2, 4, False, None),
    (3, 8, False, None),
    (3, 8, True, 2),
]
PLACES = [(*layout, PRECISIONS[i % 3]) for i, layout in enumerate(LAYOUTS)]
Place = tuple[int, int, bool, int | None, str]
CREATE: dict[str, Callable[..., Any]] = {"linen": create_linen, "nnx": create_nnx}


def make(place: Place, form: str) -> zerojax.Zero:
    stage, devices, model_axis, replicas, precision = place
    return zero_of(stage, devices, precision, model_axis and form == "linen", replicas)


pytestmark = [pytest.mark.usefixtures("quick_compile"), pytest.mark.slow]


@pytest.fixture(scope="module", params=CREATE)
def written(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, Path]:
    """One checkpoint from each place: step i from PLACES[i]."""
    form = request.param
    root = tmp_path_factory.mktemp(form)
    for step, place in enumerate(PLACES):
        zero = make(place, form)
        with Checkpointer(root, zero) as checkpointer:
            checkpointer.save(step, filled(zero.init(CREATE[form], KEY)))
    return form, root


@pytest.mark.parametrize("place", PLACES, ids=str)
def test_restores_from_everywhere(written: tuple[str, Path], place: Place) -> None:
    form, root = written
    zero = make(place, form)
    abstract = zero.abstract_state(CREATE[form], KEY)
    expected = filled(zero.init(CREATE[form], KEY))
    fresh = {k: v for k, v in values(zero.init(CREATE[form], KEY)).items() if "loss_scale" in k}
    with Checkpointer(root, zero, read_only=True) as checkpointer:
        for step, origin in enumerate(PLACES):
            got = checkpointer.restore(abstract, step)
            assert_same(got, expected)
            scale = {k: v for k, v in values(got).items() if "loss_scale" in k}
            kept = values(expected) if origin[-1] == "fp16" else fresh
            assert all((scale[name] == kept[name]).all() for name in scale), origin
            for x, like in zip(jax.tree.leaves(got), jax.tree.leaves(abstract), strict=True):
                assert x.sharding.is_equivalent_to(like.sharding, x.ndim)
