"""Models from folders: logits, tensor names and configs are those of transformers."""

from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import numpy as np
import pytest
from models import recorded_folders as recorded

from zerojax.models import from_folder

UNROLLED = ("llama3", "mixtral", "bert", "bert_classifier", "t5_1_1")
LAYOUTS = [(case, case not in UNROLLED) for case in recorded.CASES]

pytestmark = pytest.mark.usefixtures("quick_compile")


@pytest.mark.parametrize(("case", "scan"), [*LAYOUTS, ("phi3", False)])
def test_logits_and_saved_tensors_are_those_of_transformers(
    case: str, scan: bool, tmp_path: Path
) -> None:
    tensors = recorded.folder_of(case, tmp_path / "in")
    fields: Any = dict(scan=scan, remat=scan)
    loaded = from_folder(tmp_path / "in", **fields)

    @jax.jit
    def logits(params: Any, calls: Any) -> Any:
        loss = nn.apply(loaded.loss, loaded.model)
        return {name: loss({"params": params}, batch)["logits"] for name, batch in calls.items()}

    recorded.assert_recorded(case, logits(loaded.parameters, recorded.inputs(case)))
    loaded.save(tmp_path / "out", loaded.parameters)
    again = recorded.tensors_of(tmp_path / "out/model.safetensors")
    assert again.keys() == tensors.keys()
    jax.tree.map(np.testing.assert_array_equal, again, tensors)
    config = from_folder(tmp_path / "out", parameters=False, **fields)
    assert config.model.config == loaded.model.config
