"""Fine-tuning of a toy Llama: its loss falls, and what it writes is what it trained."""

import json
import re
import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.traverse_util import flatten_dict, unflatten_dict
from models.recorded_folders import tensors_of
from safetensors.numpy import save_file
from typer.testing import CliRunner, Result

import zerojax
from examples.finetune import ALPHA, RANK, Method, app, save, started, workload
from zerojax.__main__ import app as zerojax_app
from zerojax.models import from_folder
from zerojax.models.hugging_face import llama
from zerojax.models.llama import Llama, LlamaConfig

pytestmark = [
    pytest.mark.usefixtures("quick_compile"),
    pytest.mark.filterwarnings("ignore:.VariableState. was removed:DeprecationWarning"),  # qwix
]

PAGE = Path(__file__).parents[2] / "docs/how-to/one-card.md"
CONFIG = {
    "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
    "optimizer": {"type": "AdamW", "params": {"lr": 3e-2}},
}
SIZES = LlamaConfig(
    vocab_size=61, block_size=16, n_layer=2, n_head=2, n_embd=64, n_inner=128, n_kv_head=1
)
TEXT = "the dog saw the cat and the cat saw the dog and "


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A Llama with a tokenizer of words, beside a folder of text and a config."""
    library = pytest.importorskip("tokenizers", reason="tokenizers is not installed")
    folder = tmp_path / "Llama-3.1-8B"
    params = Llama(SIZES).init(jax.random.key(0), jnp.zeros((1, 8), jnp.int32))["params"]
    llama.save(params, SIZES, folder)
    words = {word: i for i, word in enumerate(["?", *sorted({*TEXT.split()})])}
    tokenizer = library.Tokenizer(library.models.WordLevel(words, unk_token="?"))
    tokenizer.pre_tokenizer = library.pre_tokenizers.Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))
    (tmp_path / "chats").mkdir()
    (tmp_path / "chats" / "train.txt").write_text(TEXT * 40)
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | {"bf16": {"enabled": True}}))
    return folder


def words(command: str, **changed: int) -> Iterator[list[str]]:
    """The words behind ``python -m`` of each command of the page that begins so, with other
    values of some options."""
    text = PAGE.read_text().replace("\\\n", " ")
    for line in re.findall(rf"^python -m ({command} .*)$", text, re.M):
        options = shlex.split(line)
        for name, value in changed.items():
            options[options.index(f"--{name}") + 1] = str(value)
        yield options


@pytest.fixture
def configs(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The page's configs in the current folder, beside the model and the text that it names."""
    monkeypatch.chdir(folder.parent)
    for name, text in re.findall(r'```json title="(\S+)"\n(.*?)```', PAGE.read_text(), re.S):
        Path(name).write_text(text)


@pytest.mark.usefixtures("configs")
def test_the_commands_of_the_page_train() -> None:
    commands = [*words("examples.finetune", block_size=8, per_device_train_batch_size=1)]
    assert {*Method} == {c[c.index("--method") + 1] for c in commands}
    for _, *options in commands:
        result = CliRunner().invoke(
            app, [*options, "--max_train_steps", "2"], catch_exceptions=False
        )
        assert result.exit_code == 0, result.stderr
        assert "Wrote runs/finetune" in result.stdout


@pytest.mark.gpu_compile
@pytest.mark.usefixtures("configs", "gpu_compiler_installed")
def test_the_commands_of_the_page_plan() -> None:
    for _, *options in words("zerojax", batch=1, seq=64):
        result = CliRunner().invoke(zerojax_app, options, catch_exceptions=False)
        assert result.exit_code == 0, result.output
        assert "predicted step time" in result.output


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
    assert losses[-1] < 0.95 * losses[0]
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
