"""Folders of transformers' models from the recorded names and shapes, and comparisons with them."""

import importlib.util
import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
from models import recorded_encoders as recorded
from safetensors import safe_open
from safetensors.numpy import save_file

from zerojax.models import from_folder

STORED = np.load(recorded.FILE)
HAS_TRANSFORMERS = all(map(importlib.util.find_spec, ("torch", "transformers")))


def folder_of(case: str, folder: Path) -> dict[str, np.ndarray]:
    """Writes the folder that transformers writes, and returns its tensors."""
    shapes = json.loads(str(STORED[f"{case}.shapes"]))
    tensors = {name: recorded.drawn(case, name, tuple(shape)) for name, shape in shapes.items()}
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(str(STORED[f"{case}.config"]), "utf-8")
    save_file(tensors, folder / "model.safetensors")
    return tensors


def loads_and_saves_as_transformers(case: str, folder: Path, **fields: Any) -> None:
    """Asserts that the model has the recorded logits, and is saved with the same tensors."""
    tensors = folder_of(case, folder / "in")
    loaded = from_folder(folder / "in", **fields)
    logits = jax.jit(loaded.model.apply)({"params": loaded.parameters}, **recorded.inputs(case))
    np.testing.assert_allclose(logits, STORED[f"{case}.logits"], atol=1e-5, rtol=0)

    loaded.save(folder / "out", loaded.parameters)
    with safe_open(folder / "out/model.safetensors", "np") as saved:
        again = {name: saved.get_tensor(name) for name in saved.keys()}  # noqa: SIM118
    assert again.keys() == tensors.keys()
    jax.tree.map(np.testing.assert_array_equal, again, tensors)
    config = from_folder(folder / "out", parameters=False, **fields)
    assert config.model.config == loaded.model.config


def transformers_loads_what_is_saved(case: str, folder: Path) -> None:
    """Asserts that transformers computes the recorded logits from a saved folder."""
    folder_of(case, folder / "in")
    loaded = from_folder(folder / "in")
    loaded.save(folder / "out", loaded.parameters)
    logits = recorded.logits(case, folder / "out")
    np.testing.assert_allclose(logits, STORED[f"{case}.logits"], atol=1e-5, rtol=0)
