"""Decoders from folders on several devices, and what they refuse."""

from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec
from models.recorded_decoders import inputs
from models.recorded_folders import folder_of, stored

import zerojax
from zerojax.models import from_folder
from zerojax.models.hugging_face.architectures import find
from zerojax.models.hugging_face.folder import abstract
from zerojax.models.tensor_parallel import TensorParallel

pytestmark = pytest.mark.usefixtures("quick_compile")


@pytest.mark.slow
def test_a_step_at_stage_3_is_the_plain_one(tmp_path: Path) -> None:
    folder_of("mixtral", tmp_path)
    rows = np.random.default_rng(1).integers(3, 29, (8, 9))

    def step(params: Any, rows: jax.Array, model: Any) -> tuple[Any, jax.Array]:
        def loss(params: Any) -> jax.Array:
            losses: jax.Array = model.apply({"params": params}, rows[:, :-1], targets=rows[:, 1:])
            return losses.mean()

        value, grads = jax.value_and_grad(loss)(params)
        return jax.tree.map(lambda x, g: x - 0.1 * g, params, grads), value

    plain = from_folder(tmp_path, scan=True)
    expected, value = jax.jit(partial(step, model=plain.model))(plain.parameters, rows)
    zero = zerojax.zero(stage=3, stage3_param_persistence_threshold=0)
    loaded = from_folder(tmp_path, zero=zero, scan=True)
    params, loss = zero(partial(step, model=loaded.model))(loaded.parameters, rows)
    np.testing.assert_allclose(loss, value, rtol=1e-5)
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5), params, expected)


@pytest.mark.parametrize(
    "case", ["linear", "qwen3", "gemma2", "phi3", "gpt2_classifier", "mixtral"]
)
def test_tensor_parallelism_has_a_spec_for_every_parameter(case: str, tmp_path: Path) -> None:
    folder_of(case, tmp_path)
    tensor = TensorParallel(zerojax.mesh(axes={"data": 4, "model": 2}))
    zero = zerojax.zero(stage=3, mesh=tensor.mesh, specs=tensor.specs)
    if case == "mixtral":
        with pytest.raises(ValueError, match="experts are not sharded over 'model'"):
            from_folder(tmp_path, zero=zero)
        return
    loaded = from_folder(tmp_path, zero=zero, scan=True, parameters=False)
    assert loaded.model.tensor == tensor
    assert PartitionSpec(None, None, "model") in jax.tree.leaves(
        tensor.specs(abstract(loaded.model))
    )


def test_rows_with_padding_under_tensor_parallelism(tmp_path: Path) -> None:
    folder_of("gemma2", tmp_path)
    tensor = TensorParallel(zerojax.mesh(axes={"data": 4, "model": 2}))
    zero = zerojax.zero(stage=3, mesh=tensor.mesh, specs=tensor.specs)
    loaded = from_folder(tmp_path, zero=zero, scan=True)
    batch = inputs("gemma2")["logits"]
    apply = jax.jit(partial(loaded.model.apply, {"params": loaded.parameters}))
    logits = apply(batch["input_ids"], attention_mask=batch["attention_mask"])
    np.testing.assert_allclose(logits, stored("gemma2", "logits"), atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"model_type": "mixtral", "output_router_logits": True}, "output_router_logits = True"),
        ({"model_type": "gemma2", "hidden_activation": "gelu"}, "hidden_activation = 'gelu'"),
        ({"model_type": "phi3", "resid_pdrop": 0.1}, "resid_pdrop = 0.1 is not supported"),
        ({"model_type": "mistral", "layer_types": ["full_attention"]}, "layer_types = .'full_att"),
    ],
)
def test_what_is_not_computed_is_named(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        find(values).from_hf(values)
