"""Fine-tuning of a toy Llama: its loss falls, and what it writes is what it trained."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.traverse_util import flatten_dict, unflatten_dict
from models.recorded_folders import folder_of, tensors_of
from safetensors.numpy import save_file
from typer.testing import CliRunner, Result

import zerojax
from examples.finetune import ALPHA, RANK, Method, app, save, started, workload
from zerojax.models import from_folder

pytestmark = [
    pytest.mark.usefixtures("quick_compile"),
    pytest.mark.filterwarnings("ignore:.VariableState. was removed:DeprecationWarning"),  # qwix
]

CONFIG = {
    "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
    "optimizer": {"type": "AdamW", "params": {"lr": 3e-2}},
}
TEXT = "the dog saw the cat and the cat saw the dog and "


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A Llama with a tokenizer of words, beside a folder of text and a config."""
    library = pytest.importorskip("tokenizers", reason="tokenizers is not installed")
    folder_of("llama3", tmp_path / "llama")
    words = {word: i for i, word in enumerate(["?", *sorted({*TEXT.split()})])}
    tokenizer = library.Tokenizer(library.models.WordLevel(words, unk_token="?"))
    tokenizer.pre_tokenizer = library.pre_tokenizers.Whitespace()
    tokenizer.save(str(tmp_path / "llama" / "tokenizer.json"))
    (tmp_path / "chats").mkdir()
    (tmp_path / "chats" / "train.txt").write_text(TEXT * 40)
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | {"bf16": {"enabled": True}}))
    return tmp_path / "llama"


def run(folder: Path, *options: str | int) -> Result:
    chats, config = folder.parent / "chats", folder.parent / "config.json"
    where = ["--model_name_or_path", folder, "--dataset_name", chats, "--config", config]
    where += ["--block_size", 8, "--output_dir", folder.parent / "out"]
    return CliRunner().invoke(app, [*map(str, (*where, *options))], catch_exceptions=False)


@pytest.mark.parametrize("method", [*Method])
def test_the_loss_falls(folder: Path, method: Method) -> None:
    result = run(folder, "--method", method, "--max_train_steps", 20)
    assert result.exit_code == 0, result.stderr
    losses = [float(loss) for loss in re.findall(r"loss (\d+\.\d+)", result.stdout)]
    assert len(losses) == 10
    assert losses[-1] < 0.7 * losses[0]
    written = sorted(path.name for path in (folder.parent / "out").iterdir())
    if method == Method.full:
        assert {"config.json", "model.safetensors"} <= {*written}
    else:
        assert written == ["adapter_config.json", "adapter_model.safetensors"]


def test_adapters_are_pefts_names_of_what_was_added(folder: Path) -> None:
    """The folder's weights and each adapter's product, added, have the logits of the state."""
    zero = zerojax.zero(CONFIG)
    loaded: Any = from_folder(folder, zero=zero, parameters=False, scan=True)
    work = workload(loaded.model, Method.lora, zero, 8, 8)
    state: Any = started(loaded, work, zero)
    tokens = np.random.default_rng(0).integers(6, size=(8, 9)).astype(np.int32)
    before = jax.tree.map(np.asarray, state.base)
    for _ in range(2):
        state, _ = zero(work.train_step)(state, {"tokens": tokens})
    jax.tree.map(np.testing.assert_array_equal, state.base, before)
    both = unflatten_dict(flatten_dict(state.params) | flatten_dict(state.base))
    logits = state.apply_fn({"params": both}, jnp.asarray(tokens))

    save(loaded, state, folder.parent / "out")
    adapters = tensors_of(folder.parent / "out" / "adapter_model.safetensors")
    tensors = tensors_of(folder / "model.safetensors")
    for name in [name for name in adapters if ".lora_A." in name]:
        a, b = adapters[name], adapters[name.replace("lora_A", "lora_B")]
        target = name.removeprefix("base_model.model.").replace(".lora_A", "")
        tensors[target] = tensors[target] + ALPHA / RANK * b @ a
    shutil.copytree(folder, merged := folder.parent / "merged")
    save_file(tensors, merged / "model.safetensors")
    whole: Any = from_folder(merged)
    expected = whole.model.apply({"params": whole.parameters}, jnp.asarray(tokens))
    np.testing.assert_allclose(logits, expected, rtol=1e-4, atol=1e-4)
