"""The model of a run: of random weights at a known size, or of a folder of transformers'.

Example::

    source = find("mini", texts)                  # config and tokenizer
    state = new_state(zero, source, tx, seed=0)   # drawn, or the folder's
    save(folder, state.params, source)
"""

import dataclasses
import pathlib
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
from flax.training.train_state import TrainState

import zerojax
from examples.run_seq2seq import tokens
from zerojax.models.bart import BLENDERBOT, Bart, BartConfig
from zerojax.models.bart import SIZES as SIZES_OF_BART
from zerojax.models.hugging_face.bart import names, read_config
from zerojax.models.hugging_face.bart import texts as config_texts
from zerojax.models.tokenizer import load_tokenizer

# A BlenderBot that learns in a minute of two CPU cores. Tokens are as large as their positions at
# the start: with `scale_embedding` it takes far longer until targets follow their sources.
MINI = BLENDERBOT | dict(
    vocab_size=512, d_model=64, encoder_layers=1, decoder_layers=1, encoder_attention_heads=4,
    decoder_attention_heads=4, encoder_ffn_dim=256, decoder_ffn_dim=256,
    max_position_embeddings=128, dropout=0.0, init_std=0.05, scale_embedding=False,
)  # fmt: skip
SIZES = {"mini": MINI} | SIZES_OF_BART


@dataclasses.dataclass(frozen=True)
class Source:
    """What to begin with. `folder` has the weights; None draws them."""

    config: BartConfig
    tokenizer: Any
    folder: pathlib.Path | None

    @property
    def model(self) -> Bart:
        return Bart(self.config)


def find(name: str, texts: Iterable[str]) -> Source:
    """The model of a name of `SIZES`, with a tokenizer trained on `texts`, or of a folder with
    `config.json`, `model.safetensors` and `tokenizer.json`.

    Raises:
      FileNotFoundError: The folder lacks one of its files.
      ValueError: There is no such model, or its tokenizer does not fit.
    """
    if name in SIZES:
        config = BartConfig(**SIZES[name])
        return Source(config, tokens.trained(texts, config), None)
    folder = pathlib.Path(name)
    if not folder.is_dir():
        raise ValueError(
            f"--model_name_or_path {name} is no folder, and none of {', '.join(SIZES)}"
        )
    config = read_config(folder)
    tokenizer = load_tokenizer(folder, vocab_size=config.vocab_size)
    tokenizer.no_padding()
    tokenizer.no_truncation()
    return Source(config, tokenizer, folder)


def new_state(zero: zerojax.Zero, source: Source, tx: Any, seed: int) -> TrainState:
    """A state whose parameters are the folder's, or drawn."""

    def create_state(key: jax.Array) -> TrainState:
        some = jnp.ones((1, 8), jnp.int32)
        params = source.model.init(key, some, some)["params"]
        return TrainState.create(apply_fn=source.model.apply, params=params, tx=tx)

    key = jax.random.key(seed)
    state = zero.init(create_state, key)
    if source.folder is None:
        return state
    like = zero.abstract_state(create_state, key).params
    loaded = zerojax.weights.load(source.folder, like=like, names=names(source.config))
    return state.replace(params=loaded)


def save(folder: pathlib.Path, params: Any, source: Source) -> None:
    """A folder that transformers loads, and `--model_name_or_path` too."""
    config = source.config
    zerojax.weights.save(folder, params, names(config), texts=config_texts(config))
    source.tokenizer.save(str(folder / "tokenizer.json"))
