"""Decoders from folders: their logits, tensor names and configs are those of transformers."""

import importlib.util
import json
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from models import recorded_decoders as recorded
from safetensors import safe_open
from safetensors.numpy import save_file

import zerojax
from zerojax.models import from_folder
from zerojax.models.hugging_face.architectures import find
from zerojax.models.tensor_parallel import TensorParallel

STORED = np.load(recorded.FILE)

pytestmark = pytest.mark.usefixtures("quick_compile")


def folder_of(case: str, folder: Path) -> dict[str, np.ndarray]:
    """Writes the folder that transformers writes, and returns its tensors."""
    shapes = json.loads(str(STORED[f"{case}.shapes"]))
    tensors = {name: recorded.drawn(case, name, tuple(shape)) for name, shape in shapes.items()}
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(str(STORED[f"{case}.config"]), "utf-8")
    save_file(tensors, folder / "model.safetensors")
    return tensors


@pytest.mark.parametrize("case", recorded.CASES)
def test_logits_and_saved_tensors_are_those_of_transformers(case: str, tmp_path: Path) -> None:
    tensors = folder_of(case, tmp_path / "in")
    loaded = from_folder(tmp_path / "in", scan=case != "llama3")
    logits = jax.jit(loaded.model.apply)({"params": loaded.parameters}, recorded.ROWS)
    np.testing.assert_allclose(logits, STORED[f"{case}.logits"], atol=1e-5, rtol=0)

    loaded.save(tmp_path / "out", loaded.parameters)
    with safe_open(tmp_path / "out/model.safetensors", "np") as saved:
        again = {name: saved.get_tensor(name) for name in saved.keys()}  # noqa: SIM118
    assert again.keys() == tensors.keys()
    jax.tree.map(np.testing.assert_array_equal, again, tensors)
    config = from_folder(tmp_path / "out", parameters=False, scan=loaded.model.config.scan)
    assert config.model.config == loaded.model.config


@pytest.mark.skipif(
    not all(map(importlib.util.find_spec, ("torch", "transformers"))),
    reason="torch and transformers are not installed: nothing to load a saved folder with",
)
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("case", recorded.CASES)
def test_transformers_loads_what_is_saved(case: str, tmp_path: Path) -> None:
    folder_of(case, tmp_path / "in")
    loaded = from_folder(tmp_path / "in")
    loaded.save(tmp_path / "out", loaded.parameters)
    logits = recorded.logits(recorded.CASES[case][0], tmp_path / "out")
    np.testing.assert_allclose(logits, STORED[f"{case}.logits"], atol=1e-5, rtol=0)


@pytest.mark.slow
@pytest.mark.parametrize("case", ["mixtral", pytest.param("gemma2", marks=pytest.mark.sweep)])
def test_a_step_at_stage_3_is_the_plain_one(case: str, tmp_path: Path) -> None:
    folder_of(case, tmp_path)
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


@pytest.mark.parametrize("case", recorded.CASES)
def test_tensor_parallelism_has_a_spec_for_every_parameter(case: str, tmp_path: Path) -> None:
    folder_of(case, tmp_path)
    tensor = TensorParallel(zerojax.mesh(axes={"data": 4, "model": 2}))
    zero = zerojax.zero(stage=3, mesh=tensor.mesh, specs=tensor.specs)
    if case == "mixtral":
        with pytest.raises(ValueError, match="experts are not sharded over 'model'"):
            from_folder(tmp_path, zero=zero)
        return
    loaded = from_folder(tmp_path, zero=zero, scan=True)
    assert loaded.model.tensor == tensor
    sharded = [x for x in jax.tree.leaves(loaded.parameters) if "model" in x.sharding.spec]
    assert sharded
    if case == "gemma2":
        jitted = jax.jit(partial(loaded.model.apply, {"params": loaded.parameters}))
        logits = jitted(np.tile(recorded.ROWS, (2, 1)))
        expected = np.tile(STORED[f"{case}.logits"], (2, 1, 1))
        np.testing.assert_allclose(logits, expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"model_type": "mixtral", "output_router_logits": True}, "output_router_logits = True"),
        ({"model_type": "gemma2", "hidden_activation": "gelu"}, "hidden_activation = 'gelu'"),
        ({"model_type": "phi3", "resid_pdrop": 0.1}, "resid_pdrop = 0.1 is not supported"),
        ({"model_type": "mistral", "layer_types": ["full_attention"]}, "layer_types = .'full_att"),
        ({"model_type": "qwen3_moe", "num_experts": 8, "use_sliding_window": False}, "'qwen2', wh"),
    ],
)
def test_what_is_not_computed_is_named(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        find(values).from_hf(values)


def test_an_option_of_another_model_type_is_not_saved(tmp_path: Path) -> None:
    folder_of("qwen3", tmp_path)
    loaded = from_folder(tmp_path, parameters=False, attn_logit_softcapping=3.0)
    with pytest.raises(
        ValueError, match=r"no 'qwen3' with attn_logit_softcapping = 3.0, only None"
    ):
        loaded.format.texts(loaded.model.config)
