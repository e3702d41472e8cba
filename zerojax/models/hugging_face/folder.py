"""Models in Hugging Face's folders: configs and parameters, read and written.

A `Format` describes a model type by its names and its conversion of `config.json`; the functions of
the modules beside this one, such as `zerojax.models.hugging_face.gpt2.load`, are its methods.
"""

import dataclasses
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Generic

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.sharding import Sharding
from jax.typing import DTypeLike

from zerojax import weights
from zerojax.checkpoint.naming import Renamed
from zerojax.models.config import Fields
from zerojax.models.hugging_face import config_file
from zerojax.models.hugging_face.config_file import Config, Json
from zerojax.models.losses import Batch
from zerojax.plan.stored import unwrap_stored
from zerojax.weights.saver import CONFIG_FILE, MAX_FILE_BYTES
from zerojax.weights.writer import Path
from zerojax.xla.types import PyTree

TOKEN = jax.ShapeDtypeStruct((1, 1), jnp.int32)

Loss = Callable[[nn.Module, Batch], dict[str, PyTree]]
"""A loss for the Trainer."""


@dataclasses.dataclass(frozen=True)
class Format(Generic[Config]):
    """A model type of Hugging Face.

    Attributes:
      config: The type of the model's config.
      from_hf: Converts a `config.json` to a config.
      to_hf: Converts a config to a `config.json`.
      names: Returns the tensors of a model's parameters.
      model: The model's class, called with the config.
      loss: The loss of a bound model and a batch, for the Trainer; see `zerojax.models.losses`.
      needed: Fields that a checkpoint must state, in addition to those without a default.
      head: Patterns of the parameters that have no tensors after pretraining, so that a model
        that is loaded for training starts with new ones.
    """

    config: type[Config]
    from_hf: Callable[[Json], Config]
    to_hf: Callable[[Config], Json]
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
        return config_file.texts(config, self.to_hf(config))

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
        config = self.saved_config(leaves, extra)
        return Renamed(self.names(config), self.texts(config))

    def saved_config(self, leaves: Mapping[str, tuple[int, ...]], extra: object) -> Config:
        """Returns the config in a checkpoint's `extra`.

        Raises:
          ValueError: There is no config, or fields are missing or invalid.
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
        return self.config(**values)


@dataclasses.dataclass(frozen=True)
class LanguageModel(Format[Config]):
    """A model type of which zerojax has the head too, so that all parameters are known.

    Attributes:
      stack: The name of the stacked blocks.
      checked: Fields that a folder's `config.json` must share with a model that loads the folder,
        with Hugging Face's keys: no tensor's shape shows the number of heads.
    """

    _: dataclasses.KW_ONLY
    stack: str
    checked: Sequence[tuple[str, str]]

    def load(
        self, path: Path, config: Config, *, like: PyTree = None, dtype: DTypeLike | None = None
    ) -> PyTree:
        """Loads a model's `params` from a safetensors file or a folder of Hugging Face's.

        Args:
          path: A file, or a folder with `model.safetensors` or `model.safetensors.index.json`. A
            folder's `config.json`, if present, must agree with `config`.
          config: The config of the model.
          like: The shardings of the parameters: a tree of arrays or `jax.ShapeDtypeStruct`, such as
            `.params` of `zero.init` or `zero.abstract_state`, or of shardings. None for JAX's
            default device.
          dtype: The dtype of the parameters. None for the dtype of `like`, or float32; fp16 and
            bf16 files are widened.

        Returns:
          A tree of arrays with the structure of `like`.

        Raises:
          ValueError: A file is corrupt, or a tensor is missing, unexpected, of a wrong shape or of
            integers. All headers are checked before anything is loaded.
          FileNotFoundError: A file does not exist.
        """
        like = wanted(self.model(config), like, dtype)
        if (pathlib.Path(path) / CONFIG_FILE).exists():
            self._check(path, config)
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
        wanted(self.model(config), params)
        weights.save(
            folder,
            params,
            self.names(config),
            texts=self.texts(config),
            max_shard_size=max_shard_size,
        )

    def saved_config(self, leaves: Mapping[str, tuple[int, ...]], extra: object) -> Config:
        """Returns the config in a checkpoint's `extra`; the parameters show `scan`.

        Raises:
          ValueError: There is no config, fields are missing or invalid, or the parameters do not
            match them.
        """
        scan = any(name.startswith(f"{self.stack}.") for name in leaves)
        config = dataclasses.replace(super().saved_config(leaves, extra), scan=scan)
        params = {
            name.replace(".", "/"): jax.ShapeDtypeStruct(shape, jnp.float32)
            for name, shape in leaves.items()
        }
        wanted(self.model(config), params)
        return config

    def _check(self, folder: Path, ours: Config) -> None:
        theirs = self.read_config(folder)
        for name, key in self.checked:
            if getattr(theirs, name) != getattr(ours, name):
                raise ValueError(
                    f"{pathlib.Path(folder) / CONFIG_FILE}: {key} = {getattr(theirs, name)}, but "
                    f"the model has {name} = {getattr(ours, name)}: build it from "
                    "read_config(folder)"
                )


def abstract(model: nn.Module, *inputs: jax.ShapeDtypeStruct) -> PyTree:
    """Returns the `params` of a model as `jax.ShapeDtypeStruct`; a token is the default input."""
    return jax.eval_shape(model.init, jax.random.key(0), *(inputs or [TOKEN]))["params"]


def wanted(model: nn.Module, like: PyTree = None, dtype: DTypeLike | None = None) -> PyTree:
    """Returns the target shape, dtype and sharding of every parameter, in a tree like `like`.

    Args:
      model: The model, with a `config`.
      like: A tree of arrays, of `jax.ShapeDtypeStruct`, or of shardings; None for the model's.
      dtype: The dtype of all parameters; None for the dtype of `like`, or float32.

    Raises:
      ValueError: `like` does not have the model's parameters, or `dtype` is not a float dtype.
    """
    name = f"{type(model).__name__}(config)"
    shapes = abstract(model)
    like = shapes if like is None else like
    expected, given = by_path(shapes), by_path(like)
    if unmatched := expected.keys() ^ given.keys():
        path = min(unmatched)
        owner = name if path in expected else "the tree given"
        raise ValueError(
            f"only {owner} has the parameter {path} ({len(unmatched)} such parameters): pass the "
            "config that the model was created with, with its n_layer and scan"
        )
    leaves = []
    for path, leaf in given.items():
        shape = expected[path].shape
        is_sharding = isinstance(leaf, Sharding)
        if not is_sharding and tuple(leaf.shape) != shape:
            raise ValueError(
                f"the parameter {path} is {list(leaf.shape)} in the tree given, {list(shape)} in "
                f"{name}: pass the config that the model was created with"
            )
        leaf_dtype = jnp.dtype(dtype or getattr(leaf, "dtype", jnp.float32))
        if not jnp.issubdtype(leaf_dtype, jnp.floating):
            raise ValueError(f"dtype {leaf_dtype} of the parameter {path}: pass a float dtype")
        sharding = leaf if is_sharding else getattr(unwrap_stored(leaf), "sharding", None)
        leaves.append(jax.ShapeDtypeStruct(shape, leaf_dtype, sharding=sharding))
    return jax.tree.unflatten(jax.tree.structure(like), leaves)


def by_path(tree: PyTree) -> dict[str, PyTree]:
    """Returns a tree's leaves by path, in the format of `weights.load`."""
    return {
        jax.tree_util.keystr(path, simple=True, separator="/"): leaf
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    }
