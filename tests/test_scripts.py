"""The diffs of docs/scripts.md: few new lines, and the new side runs with tiny folders."""

import ast
import collections
import dataclasses
import json
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, get_args, get_type_hints

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file

import zerojax
from zerojax.models import bart, from_folder, gpt
from zerojax.models.bert import SIZES as BERT_SIZES
from zerojax.models.bert import BertConfig
from zerojax.models.hugging_face import bart as bart_files
from zerojax.models.hugging_face import bert as bert_files
from zerojax.models.hugging_face import gpt2
from zerojax.models.hugging_face.folder import Format, abstract

PAGE = Path(__file__).parents[1] / "docs/scripts.md"
DIFFS = {
    name: diff.splitlines()
    for name, diff in re.findall(r"^## (\w+)\n\n```diff\n(.*?)^```$", PAGE.read_text(), re.S | re.M)
}
NAMES = [
    "run_glue",
    "run_clm",
    "run_summarization",
    "run_glue_no_trainer",
    "run_clm_no_trainer",
]
JSON = re.search(r"^```json\n(.*?)^```$", PAGE.read_text(), re.S | re.M)

pytestmark = pytest.mark.usefixtures("quick_compile")


def side(name: str, sign: str) -> str:
    return "\n".join(line[1:] for line in DIFFS[name] if line[:1] in ("", " ", sign)) + "\n"


def test_the_page_has_five_scripts() -> None:
    assert list(DIFFS) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_at_most_ten_lines_are_new(name: str) -> None:
    assert 1 <= sum(line.startswith("+") for line in DIFFS[name]) <= 10
    assert max(map(len, DIFFS[name])) <= 106
    ast.parse(side(name, "-"))
    assert "zerojax" not in side(name, "-")


class Rows:
    """Columns, as a `datasets.Dataset` has them."""

    def __init__(self, columns: dict[str, list[Any]]) -> None:
        self._columns, self.column_names = columns, list(columns)
        kind = collections.namedtuple("kind", "num_classes")
        self.features = {"label": kind(2)}

    def __len__(self) -> int:
        return len(next(iter(self._columns.values())))

    def __getitem__(self, key: Any) -> Any:
        if isinstance(key, str):
            return self._columns[key]
        return {name: column[key] for name, column in self._columns.items()}

    def map(self, function: Callable[..., Any], batched: bool, remove_columns: Any = ()) -> "Rows":
        assert batched
        kept = {k: v for k, v in self._columns.items() if k not in remove_columns}
        return Rows(kept | function(self._columns))


class RowsBySplit(dict[str, Rows]):
    def map(self, *args: Any, **options: Any) -> "RowsBySplit":
        return RowsBySplit({name: rows.map(*args, **options) for name, rows in self.items()})


def load_dataset(name: str, config: str | None = None) -> RowsBySplit:
    rng = np.random.default_rng(0)

    def texts(rows: int, longest: int = 12) -> list[str]:
        letters = [rng.choice(list("abcdefgh"), rng.integers(3, longest)) for _ in range(rows)]
        return [" ".join(row) for row in letters]

    def split(rows: int) -> Rows:
        if name == "glue":
            sentences = texts(rows)
            labels = [int("a" in sentence) for sentence in sentences]
            return Rows({"sentence": sentences, "label": labels, "idx": list(range(rows))})
        if name == "wikitext":
            return Rows({"text": texts(2 * rows, 30)})
        return Rows({"article": texts(rows), "highlights": texts(rows, 6)})

    return RowsBySplit(train=split(24), validation=split(8))


class Tokenizer:
    """A token a letter; it pads as a tokenizer of transformers does."""

    padding_side = "right"

    def __init__(self, pad_token: str | None) -> None:
        self.pad_token = pad_token

    def __call__(
        self, texts: list[str] | None = None, text_target: list[str] | None = None, *,
        max_length: int | None = None, truncation: bool = False, padding: str | bool = False,
    ) -> dict[str, Any]:  # fmt: skip
        given = texts or text_target or []
        tokens = [[4 + ord(word) % 32 for word in text.split()][:max_length] for text in given]
        rows = {"input_ids": tokens, "attention_mask": [[1] * len(row) for row in tokens]}
        if not padding:
            return rows
        assert max_length is not None
        return {k: [x + [0] * (max_length - len(x)) for x in v] for k, v in rows.items()}

    def pad(
        self, rows: list[dict[str, Any]], *, padding: bool, pad_to_multiple_of: int,
        return_tensors: str,
    ) -> Any:  # fmt: skip
        if self.pad_token is None:
            raise ValueError("Asking to pad but the tokenizer does not have a padding token.")
        longest = max(len(row["input_ids"]) for row in rows)
        width = -(-longest // pad_to_multiple_of) * pad_to_multiple_of

        def padded(name: str, value: Any) -> Any:
            of_tokens = name in ("input_ids", "attention_mask")
            return np.pad(value, (0, width - len(value))) if of_tokens else np.asarray(value)

        columns = {name: [padded(name, row[name]) for row in rows] for name in rows[0]}
        return collections.UserDict({name: np.stack(column) for name, column in columns.items()})

    def save_pretrained(self, folder: str) -> None:
        Path(folder, "tokenizer.json").write_text("{}")


class ArgumentParser:
    """Reads `--name value` into dataclasses, as `HfArgumentParser` does."""

    def __init__(self, types: tuple[type, ...]) -> None:
        self._types = types

    def parse_args_into_dataclasses(self) -> tuple[Any, ...]:
        words = iter(sys.argv[1:])
        given = {word.removeprefix("--"): next(words) for word in words}
        return tuple(self._read(kind, given) for kind in self._types)

    @staticmethod
    def _read(kind: Any, given: dict[str, str]) -> Any:
        hints, values = get_type_hints(kind), {}
        for field in dataclasses.fields(kind):
            if field.name in given:
                hint = next(iter(get_args(hints[field.name])), hints[field.name])
                text = given[field.name]
                values[field.name] = text == "True" if hint is bool else hint(text)
        return kind(**values)


class Tensor:
    """A tensor of torch: an array that has to be asked for."""

    def __init__(self, array: np.ndarray) -> None:
        self._array = array

    def numpy(self) -> np.ndarray:
        return self._array


def default_data_collator(rows: list[dict[str, Any]]) -> dict[str, Tensor]:
    return {name: Tensor(np.array([row[name] for row in rows])) for name in rows[0]}


@dataclasses.dataclass
class DataLoader:
    dataset: Rows
    batch_size: int
    collate_fn: Callable[..., Any]
    shuffle: bool = False
    drop_last: bool = False

    def _starts(self) -> range:
        end = len(self.dataset) - (self.batch_size - 1 if self.drop_last else 0)
        return range(0, end, self.batch_size)

    def __len__(self) -> int:
        return len(self._starts())

    def __iter__(self) -> Iterator[Any]:
        for start in self._starts():
            rows = range(start, min(start + self.batch_size, len(self.dataset)))
            yield self.collate_fn([self.dataset[i] for i in rows])


def module(name: str, **contents: Any) -> ModuleType:
    fake = ModuleType(name)
    vars(fake).update(contents)
    return fake


def write(folder: Path, format: Format[Any], config: Any) -> None:
    """Writes a folder of small parameters."""
    shapes, rng = abstract(format.model(config), *format.inputs), np.random.default_rng(1)
    params = jax.tree.map(lambda x: rng.normal(0, 0.02, x.shape).astype("f"), shapes)
    zerojax.weights.save(folder, params, format.names(config), texts=format.texts(config))


def bert_folder(folder: Path) -> None:
    sizes = BERT_SIZES["bert-tiny"] | {"max_position_embeddings": 128, "num_hidden_layers": 1}
    write(folder, bert_files.MASKED_LM, BertConfig(**sizes))


def gpt2_folder(folder: Path) -> None:
    write(folder, gpt2.FORMAT, gpt.GPTConfig(**gpt.SIZES["tiny"] | {"n_layer": 1}))


def bart_folder(folder: Path) -> None:
    layers = {"encoder_layers": 1, "decoder_layers": 1}
    sizes = bart.SIZES["blenderbot-tiny"] | layers | {"max_position_embeddings": 128}
    write(folder, bart_files.FORMAT, bart.BartConfig(**sizes))


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., Path]:
    """Runs the new side of a script; returns its `output_dir`."""

    def run(name: str, folder: Callable[[Path], None], pads: bool, **options: object) -> Path:
        folder(tmp_path / "pretrained")
        source = tmp_path / "pretrained"
        tokenizer = Tokenizer("<pad>" if pads else None)
        loaders = module("AutoTokenizer", from_pretrained=lambda folder: tokenizer)
        transformers = module(
            "transformers", AutoTokenizer=loaders, HfArgumentParser=ArgumentParser,
            default_data_collator=default_data_collator,
        )  # fmt: skip
        for fake in (
            transformers,
            module("datasets", load_dataset=load_dataset),
            module("torch.utils.data", DataLoader=DataLoader),
        ):
            monkeypatch.setitem(sys.modules, fake.__name__, fake)
        given = {
            "model_name_or_path": source, "output_dir": tmp_path / "out", "learning_rate": 0.01,
            "per_device_train_batch_size": 1, "num_train_epochs": 1, **options,
        }  # fmt: skip
        words = [word for k, v in given.items() for word in (f"--{k}", str(v))]
        monkeypatch.setattr(sys, "argv", [name, *words])
        monkeypatch.chdir(tmp_path)
        exec(compile(side(name, "+"), f"{name}.py", "exec"), {"__name__": name})
        return tmp_path / "out"

    return run


def assert_trained(folder: Path) -> None:
    """Checks that a folder can be loaded, and has its tensors of the start with new values."""
    assert from_folder(folder).parameters is not None
    after = load_file(folder / "model.safetensors")
    before = load_file("pretrained/model.safetensors")
    new = [name for name in after if name in before and (after[name] != before[name]).any()]
    assert len(new) > len(before) // 2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "folder", "pads", "options"),
    [
        ("run_glue", bert_folder, True, {}),
        pytest.param(*("run_clm", gpt2_folder, False, {"block_size": 24}), marks=pytest.mark.sweep),
        ("run_summarization", bart_folder, True, {}),
    ],
)
def test_a_script_with_trainer(
    name: str,
    folder: Callable[[Path], None],
    pads: bool,
    options: dict[str, object],
    run: Callable[..., Path],
) -> None:
    flags = {"do_train": True, "do_eval": True, "save_strategy": "no"}
    out = run(name, folder, pads, max_steps=3, **flags, **options)
    state = json.loads((out / "trainer_state.json").read_text())
    assert state["global_step"] == 3
    results = json.loads((out / "all_results.json").read_text())
    extra = {"run_glue": "eval_accuracy", "run_clm": "perplexity"}.get(name, "eval_loss")
    assert {"train_loss", "eval_loss", extra} <= results.keys()
    assert np.isfinite(results["train_loss"])
    assert (out / "README.md").read_text().startswith("---")
    assert (out / "model/tokenizer.json").exists()
    assert_trained(out / "model")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "folder", "options"),
    [
        ("run_glue_no_trainer", bert_folder, {}),
        pytest.param(
            *("run_clm_no_trainer", gpt2_folder, {"block_size": 24}), marks=pytest.mark.sweep
        ),
    ],
)
def test_a_script_with_accelerate(
    name: str,
    folder: Callable[[Path], None],
    options: dict[str, object],
    run: Callable[..., Path],
    tmp_path: Path,
) -> None:
    (tmp_path / "default_config.yaml").write_text(
        "distributed_type: DEEPSPEED\ndeepspeed_config: {deepspeed_config_file: ds_config.json}\n"
    )
    assert JSON is not None
    (tmp_path / "ds_config.json").write_text(JSON[1])
    out = run(name, folder, True, **options)
    results = json.loads((out / "all_results.json").read_text())
    assert np.isfinite(list(results.values())).all()
    assert (out / "tokenizer.json").exists()
    assert_trained(out)
