"""Separate blocks as stacks, and back."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.core import FrozenDict, freeze
from jax.sharding import NamedSharding, PartitionSpec

import zerojax
from zerojax.weights import stacked, unstacked


def tree(leaf: Any = lambda i: np.full((2, 3), i)) -> dict[str, Any]:
    blocks = {f"h_{i}": {"mlp": {"w": leaf(i)}, "b": leaf(i)} for i in range(11)}
    return {"model": {"norm": np.ones(3, "f4"), **blocks}, "head": np.zeros(3, "f4")}


def assert_same(one: Any, other: Any) -> None:
    assert jax.tree.structure(one) == jax.tree.structure(other)
    jax.tree.map(np.testing.assert_array_equal, one, other)


@pytest.mark.parametrize("as_arrays", [np.asarray, jnp.asarray], ids=["numpy", "jax"])
def test_blocks_at_any_depth_in_the_order_of_their_numbers(as_arrays: Any) -> None:
    params = jax.tree.map(as_arrays, tree())
    stacks = stacked(params, "h_{}")
    assert stacks["model"].keys() == {"norm", "h"}
    w = stacks["model"]["h"]["mlp"]["w"]
    np.testing.assert_array_equal(w[:, 0, 0], range(11))
    assert isinstance(w, type(params["head"]))
    assert_same(unstacked(stacks, "h_{}"), params)
    assert_same(stacked(unstacked(stacks)), stacks)


def test_keys_above_and_a_key_for_the_stack() -> None:
    params = {name: tree()["model"] for name in ("encoder", "decoder")}
    stacks = stacked(params, "decoder/h_{}", "layers")
    assert stacks["decoder"].keys() == {"norm", "layers"}
    assert_same(stacks["encoder"], params["encoder"])
    assert_same(unstacked(stacks, "decoder/h_{}", "layers"), params)


def test_lists_optimizer_states_and_frozen_dicts() -> None:
    params = {"layers": [*tree()["model"].values()][1:]}
    stacks = stacked(params, "layers/{}")
    assert stacks["layers"]["b"].shape == (11, 2, 3)
    assert_same(unstacked(stacks, "layers/{}"), params)
    moments = optax.EmptyState(), optax.TraceState(tree())
    assert_same(unstacked(stacked(moments)), moments)
    frozen = stacked(freeze(tree()))
    assert isinstance(frozen, FrozenDict)
    assert_same(unstacked(frozen), freeze(tree()))


def test_a_list_of_nnx_modules() -> None:
    class Model(nnx.Module):
        def __init__(self) -> None:
            self.blocks = nnx.List([nnx.Linear(2, 3, rngs=nnx.Rngs(i)) for i in range(3)])

    state = nnx.state(Model())
    stacks = stacked(state, "blocks/{}")
    assert stacks["blocks"]["kernel"].shape == (3, 2, 3)
    assert_same(unstacked(stacks, "blocks/{}"), state)


def test_shapes_shardings_and_traced_arrays() -> None:
    mesh = zerojax.mesh(axes={"stage": 2, "data": 4})
    by_columns = NamedSharding(mesh, PartitionSpec(None, "data"))
    params = tree(lambda i: jax.device_put(np.full((2, 4), i), by_columns))
    w = stacked(params)["model"]["h"]["b"]
    assert w.sharding.spec == PartitionSpec(None, None, "data")
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), params)
    assert jax.eval_shape(stacked, shapes) == stacked(shapes)
    abstract = stacked(tree(lambda i: jax.ShapeDtypeStruct((2, 4), "int8", sharding=by_columns)))
    assert abstract["model"]["h"]["b"].sharding == w.sharding
    by_stage = jax.device_put(w[:10], NamedSharding(mesh, PartitionSpec("stage", None, "data")))
    blocks = unstacked({"h": by_stage})
    assert blocks["h_9"].sharding.spec == by_columns.spec
    np.testing.assert_array_equal(blocks["h_9"], params["model"]["h_9"]["b"])


def test_names_of_axes_get_one_for_the_layers() -> None:
    boxes = {f"h_{i}": nn.Partitioned(jnp.ones((2, 3)), ("embed", "mlp")) for i in range(2)}
    box = stacked(boxes)["h"]
    assert (box.names, box.value.shape) == ((None, "embed", "mlp"), (2, 2, 3))
    assert unstacked({"h": box})["h_1"].names == ("embed", "mlp")


def test_refusals_name_what_is_wrong() -> None:
    w = np.zeros((2, 3))
    with pytest.raises(ValueError, match=r"no 'layers_{}', only \['model', 'head'\]"):
        stacked(tree(), "layers_{}")
    with pytest.raises(ValueError, match=r"blocks \[0, 2\], and 1 is missing"):
        stacked({"h_0": w, "h_2": w})
    with pytest.raises(ValueError, match="block h_1 has other arrays than block h_0"):
        stacked({"h_0": {"w": w}, "h_1": {"b": w}})
    with pytest.raises(ValueError, match=r"h_1\['w'\] is float64\[2\], that of block 0 .*\[2, 3\]"):
        stacked({"h_0": {"w": w}, "h_1": {"w": w[:, 0]}})
    with pytest.raises(ValueError, match="beside the blocks there is 'h'"):
        stacked({"h_0": w, "h": w})
    with pytest.raises(ValueError, match="no 'h', only"):
        unstacked(tree())
    with pytest.raises(ValueError, match=r"h is no stack .* \[\(2,\), \(3,\)\]"):
        unstacked({"h": {"w": w, "b": w.T}})
    with pytest.raises(ValueError, match=r"blocks = 'h' must be the key of blocks"):
        stacked(tree(), "h")
