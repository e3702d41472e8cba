"""Folders of transformers' models, with logits, tensor names and config keys that are recorded.

So the tests need no torch. This file wrote them at the tag `before-the-cut` (commit 7c474e67), with
transformers 5.24.0 and torch 2.13.0 on a CPU, in fp32. Both sides draw the same weights by name.
"""

import json
import zlib
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
from models import recorded_decoders as decoders
from models import recorded_encoders as encoders
from safetensors import safe_open
from safetensors.numpy import save_file

FILE = Path(__file__).parent / "data" / "folders.npz"
CASES = decoders.CASES | encoders.CASES

Arrays = dict[str, np.ndarray]


def stored(case: str, name: str) -> np.ndarray:
    """Returns the logits of a call, or the text of "config" or "shapes", which are JSON."""
    with np.load(FILE) as file:
        array: np.ndarray = file[f"{case}.{name}"]
    return array


def inputs(case: str) -> dict[str, Arrays]:
    """Returns the inputs of a model's calls by transformers' names, by the name of the call."""
    return (decoders if case in decoders.CASES else encoders).inputs(case)


def drawn(case: str, name: str, shape: tuple[int, ...]) -> np.ndarray:
    """Draws a tensor, wide enough that no part of a model is without effect; norms around 1."""
    rng = np.random.default_rng(zlib.crc32(name.encode()))
    is_norm = ("norm" in name.lower() or ".ln_" in name) and name.endswith("weight")
    center = float(is_norm and case != "gemma2")  # whose norms add the 1
    width = 0.05 if is_norm else 0.25
    return (width * rng.standard_normal(shape) + center).astype(np.float32)


def tensors_of(file: Path) -> Arrays:
    """Returns the tensors of a safetensors file by name."""
    with safe_open(file, "np") as tensors:
        return {name: tensors.get_tensor(name) for name in tensors.keys()}  # noqa: SIM118


def folder_of(case: str, folder: Path) -> Arrays:
    """Writes the folder that transformers writes, and returns its tensors."""
    shapes = json.loads(str(stored(case, "shapes")))
    tensors = {name: drawn(case, name, tuple(shape)) for name, shape in shapes.items()}
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(str(stored(case, "config")), "utf-8")
    save_file(tensors, folder / "model.safetensors")
    return tensors


def assert_recorded(case: str, found: Any) -> None:
    """Asserts that logits, by call, are the recorded ones."""
    recorded = {call: stored(case, call) for call in inputs(case)}
    jax.tree.map(partial(np.testing.assert_allclose, atol=1e-5, rtol=1e-5), found, recorded)
