"""Models in Hugging Face's folders: configs and parameters, read and written.

A `Format` describes a model type by its names and its conversion of `config.json`; the functions of
the modules beside this one, such as `zerojax.models.hugging_face.gpt2.load`, are its methods.
"""

import dataclasses
import pathlib
import re
from collections.abc import Callable, Mapping, Sequence

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from zerojax import weights
from zerojax.checkpoint.naming import Renamed
from zerojax.models.config import Fields
from zerojax.models.hugging_face import config_file
from zerojax.models.hugging_face.config_file import Config, ConfigFormat
from zerojax.models.losses import Batch
from zerojax.weights.saver import CONFIG_FILE, GENERATION_FILE, MAX_FILE_BYTES, json_text
from zerojax.weights.writer import Path
from zerojax.xla.types import PyTree, Shaped

TOKEN = jax.ShapeDtypeStruct((1, 1), jnp.int32)

Loss = Callable[[nn.Module, Batch], dict[str, PyTree]]
"""A loss for the Trainer."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Format(ConfigFormat[Config]):
    """A model of transformers: its `config.json`, its tensors, and what computes and trains it.

    Attributes:
      names: Returns the tensors of a model's parameters.
      model: The model's class, called with the config.
      loss: The loss of a bound model and a batch, for the Trainer; see `zerojax.models.losses`.
      needed: Fields that a checkpoint must state, in addition to those without a default.
      head: Patterns of the parameters that have no tensors after pretraining, so that a model
        that is loaded for training starts with new ones.
    """

    names: Callable[[Config], weights.Names]
    model: Callable[[Config], nn.Module]
    loss: Loss
    needed: Sequence[str] = ()
    head: Sequence[str] = ()

    @property
    def inputs(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        """The arguments of `model.init`: the source and the target of an encoder-decoder."""
        return (TOKEN, TOKEN) if hasattr(self.model, "encode") else (TOKEN,)

    def read_config(self, folder: Path) -> Config:
        """Reads a folder's `config.json`, and keeps its `generation_config.json`.

        Raises:
          FileNotFoundError: The folder has no `config.json`.
          ValueError: The file is not a JSON object, or zerojax does not support the model.
        """
        return config_file.read(folder, self.from_hf)

    def texts(self, config: Config) -> dict[str, str]:
        """Returns `config.json`, and the original `generation_config.json` if any, by file name."""
        generation = config_file.carried(config, GENERATION_FILE)
        extra = {GENERATION_FILE: json_text(generation)} if generation else {}
        return {CONFIG_FILE: json_text(self.to_hf(config)), **extra}

    def load(
        self, path: Path, config: Config, *, like: PyTree = None, dtype: DTypeLike = jnp.float32
    ) -> PyTree:
        """Loads a model's `params` from a safetensors file or a folder of Hugging Face's.

        Args:
          path: A file, or a folder with `model.safetensors` or `model.safetensors.index.json`. A
            folder's `config.json`, if present, must agree with `config`.
          config: The config of the model.
          like: The dtypes and shardings of the parameters: a tree of arrays or
            `jax.ShapeDtypeStruct`, such as `.params` of `zero.init` or `zero.abstract_state`. None
            for `dtype`, on JAX's default device.
          dtype: The dtype without `like`; fp16 and bf16 files are widened.

        Returns:
          A tree of arrays with the structure of `like`.

        Raises:
          ValueError: A file is corrupt, or a tensor is missing, unexpected, of a wrong shape or of
            integers. All headers are checked before anything is loaded.
          FileNotFoundError: A file does not exist.
        """
        if like is None:
            shapes = abstract(self.model(config), *self.inputs)
            like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, dtype), shapes)
        else:
            self.check_parameters(config, by_path(like))
        if (pathlib.Path(path) / CONFIG_FILE).exists():
            keys = {field: key for field, key, _ in self.keys}
            for name, ours, theirs in config_file.differences(config, self.read_config(path)):
                raise ValueError(
                    f"{pathlib.Path(path) / CONFIG_FILE}: {keys.get(name, name)} = {theirs}, but "
                    f"the model has {name} = {ours}: build it from read_config(folder)"
                )
        return weights.load(path, like=like, names=self.names(config))

    def save(
        self,
        params: PyTree,
        config: Config,
        folder: Path,
        *,
        max_shard_size: int = MAX_FILE_BYTES,
    ) -> None:
        """Writes a model's parameters to a folder that `load` and transformers can read.

        The folder has `config.json`, the `generation_config.json` of the folder from which `config`
        was read, and `model.safetensors`, or `model-00001-of-0000N.safetensors` and an index if the
        total exceeds `max_shard_size` bytes. The files get their final names at the end, so that an
        error before leaves the folder unchanged.

        Args:
          params: `model.init(...)["params"]` or `state.params`, on any devices of this process.
          config: The config of the model.
          folder: The folder, created if it does not exist.
          max_shard_size: The size of the largest file, in bytes.

        Raises:
          ValueError: The arrays are not the model's parameters, or are stored on other processes'
            devices.
        """
        self.check_parameters(config, by_path(params))
        names, texts = self.names(config), self.texts(config)
        weights.save(folder, params, names, texts=texts, max_shard_size=max_shard_size)

    def check_parameters(self, config: Config, given: Mapping[str, Shaped]) -> None:
        """Rejects parameters, by path, that are not those of the config's model.

        Raises:
          ValueError: A parameter is missing, surplus or of another shape.
        """
        model = self.model(config)
        expected = by_path(abstract(model, *self.inputs))
        name = f"{type(model).__name__}(config)"
        if unmatched := expected.keys() ^ given.keys():
            path = min(unmatched)
            owner = name if path in expected else "the tree given"
            raise ValueError(
                f"only {owner} has the parameter {path} ({len(unmatched)} such parameters): pass "
                "the config that the model was created with, with its n_layer and scan"
            )
        for path, leaf in given.items():
            if tuple(leaf.shape) != expected[path].shape:
                raise ValueError(
                    f"the parameter {path} is {[*leaf.shape]} in the tree given, "
                    f"{[*expected[path].shape]} in {name}: pass the config that the model was "
                    "created with"
                )

    def export_names(self, leaves: Mapping[str, tuple[int, ...]], extra: object) -> Renamed:
        """Serves `zerojax export CHECKPOINT OUT --names MODULE:export_names`.

        The checkpoint must have been saved with `extra={"model": {...}}`, the fields of the model's
        config, as `Trainer` does, because the shapes do not show all of them.

        Args:
          leaves: Shapes by name, such as `h_0.attn.c_attn.kernel`; with `scan=True`, `h.attn...`.
          extra: The `extra` of the checkpoint.

        Raises:
          ValueError: `extra` has no such fields, or the parameters do not match them.
        """
        fields = dataclasses.fields(self.config)
        required = [
            field.name
            for field in fields
            if field.default is dataclasses.MISSING or field.name in self.needed
        ]
        saved = extra.get("model") if isinstance(extra, Mapping) else None
        if not isinstance(saved, Mapping) or not saved.keys() >= set(required):
            raise ValueError(
                f"its extra['model'] is {saved!r}, and needs {', '.join(required)} of "
                f"{self.config.__name__}: save(step, state, extra={{'model': {{...}}}})"
            )
        values: Fields = {field.name: saved[field.name] for field in fields if field.name in saved}
        values |= {name: tuple(value) for name, value in values.items() if isinstance(value, list)}
        # The blocks of a stack have no numbers.
        values.setdefault("scan", not any(re.search(r"_\d+\.", name) for name in leaves))
        config = self.config(**values)
        shapes = {
            name.replace(".", "/"): jax.ShapeDtypeStruct(shape, jnp.float32)
            for name, shape in leaves.items()
        }
        self.check_parameters(config, shapes)
        return Renamed(self.names(config), self.texts(config))


def abstract(model: nn.Module, *inputs: jax.ShapeDtypeStruct) -> PyTree:
    """Returns the `params` of a model as `jax.ShapeDtypeStruct`; a token is the default input."""
    return jax.eval_shape(model.init, jax.random.key(0), *(inputs or [TOKEN]))["params"]


def by_path(tree: PyTree) -> dict[str, PyTree]:
    """Returns a tree's leaves by path, in the format of `weights.load`."""
    return {
        jax.tree_util.keystr(path, simple=True, separator="/"): leaf
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    }
