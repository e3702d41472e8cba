"""Which saved arrays are parameters, and what a callable may say of their names."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from checkpoint.recorded import save, save_plain
from flax import linen as nn
from flax import nnx
from flax.training.train_state import TrainState

from zerojax.checkpoint import CheckpointError
from zerojax.checkpoint.exporter import export
from zerojax.checkpoint.naming import Renamed, parameters, rename
from zerojax.checkpoint.saved import find
from zerojax.weights import Tensor

Shapes = Mapping[str, tuple[int, ...]]


class Net(nnx.Module):
    """With streams of its own and of a layer's, a key of the user's, and modules in a list."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.layers = nnx.List([nnx.Linear(3, 4, rngs=rngs), nnx.Linear(4, 2, rngs=rngs)])
        self.norm = nnx.BatchNorm(2, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.noise = nnx.Rngs(key=1, count=2)
        self.mine = nnx.Variable(jax.random.key(3))
        self.count = nnx.Variable(jnp.uint32(0))


def boxed() -> Any:
    init = nn.with_partitioning(nn.initializers.ones, ("data", None))
    params = nn.Dense(4, kernel_init=init).init(jax.random.key(0), jnp.ones((1, 3)))["params"]
    state = TrainState.create(apply_fn=None, params={"Dense_0": params}, tx=optax.adam(1e-3))
    return jax.tree.map(jnp.asarray, state)


@pytest.mark.parametrize("record", [True, False])
def test_linen_without_its_boxes(record: bool, tmp_path: Path) -> None:
    (save if record else save_plain)(tmp_path, 1, boxed())
    found = parameters(find(tmp_path))
    assert sorted(found) == ["Dense_0.bias", "Dense_0.kernel"]
    assert found["Dense_0.kernel"].path[-1] == "value"
    assert found["Dense_0.kernel"].shape == (3, 4)


@pytest.mark.parametrize("record", [True, False])
def test_the_model_of_nnx_without_its_streams(record: bool, tmp_path: Path) -> None:
    model = Net(nnx.Rngs(0))
    state = nnx.state((model, nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)))
    if record:
        save(tmp_path, 1, state, form="nnx")
    else:
        save_plain(tmp_path, 1, state)
    assert sorted(parameters(find(tmp_path))) == [
        "count",
        "layers.0.bias",
        "layers.0.kernel",
        "layers.1.bias",
        "layers.1.kernel",
        *(["mine"] if not record else []),  # on disk alone it is two numbers
        "norm.bias",
        "norm.mean",
        "norm.scale",
        "norm.var",
    ]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tree = {"params": {"h": {"w": jnp.ones((2, 3))}, "b": jnp.ones(4)}}
    save(tmp_path, 1, tree, extra={"n": 2})
    return tmp_path


def test_names_are_the_callables(folder: Path) -> None:
    saved = find(folder)
    leaves = parameters(saved)

    def split(shapes: Shapes, extra: Any) -> Renamed:
        assert shapes == {"h.w": (2, 3), "b": (4,)}
        assert extra == {"n": 2}
        return Renamed({"h/w": Tensor("w.{i}", "x -> i x"), "b": None}, {"a.txt": "a"})

    linked, texts = rename(leaves, split, saved)
    assert texts == {"a.txt": "a"}
    assert linked.tensors == {"w.0": (3,), "w.1": (3,)}
    assert [*linked.links] == ["h.w"]


def test_a_dtype_that_the_format_lacks(tmp_path: Path) -> None:
    save_plain(tmp_path / "in", 1, {"params": {"a": jnp.ones(3, jnp.int4)}})
    with pytest.raises(CheckpointError, match="a is int4, which safetensors does not have"):
        export(tmp_path / "in", tmp_path / "out", dtype="float16")
