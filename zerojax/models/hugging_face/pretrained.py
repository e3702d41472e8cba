"""`from_folder`: the model, parameters, names and loss of any Hugging Face folder."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, cast

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.training.train_state import TrainState
from jax.typing import DTypeLike

from zerojax import weights
from zerojax.api import Zero
from zerojax.devices.mesh import SEQUENCE
from zerojax.distributed import log
from zerojax.models.config import Fields
from zerojax.models.hugging_face import architectures, config_file
from zerojax.models.hugging_face.folder import Format, Loss, abstract, by_path
from zerojax.models.losses import Batch
from zerojax.models.tensor_parallel import TensorParallel
from zerojax.optim.frozen import init_reads
from zerojax.trace.gradients import value_and_grad, weighted_mean
from zerojax.weights.arrangement import Bounds
from zerojax.weights.loader import placed
from zerojax.weights.names import link, pattern_of
from zerojax.weights.reader import open_tensors, read_json
from zerojax.weights.saver import MAX_FILE_BYTES
from zerojax.weights.tree import open_tree
from zerojax.weights.writer import Path
from zerojax.xla.types import PyTree, Shaped


@dataclasses.dataclass(frozen=True)
class Pretrained:
    """A model of a Hugging Face folder.

    Attributes:
      model: The flax module; `model.config` has its sizes and options.
      parameters: The tree of its parameters, or None if they were not to be loaded.
      names: The tensors of the parameters, for `zerojax.weights.load` and `save`.
      loss: The loss of the model and a batch, for `Trainer(loss=...)`.
      folder: The folder.
      format: The conversion of the config and of the names.
      ignore_mismatched_sizes: Whether the head's tensors of another shape are drawn anew.
    """

    model: Any
    parameters: PyTree
    names: weights.Names
    loss: Loss
    folder: Path
    format: Format[Any]
    ignore_mismatched_sizes: bool = False

    def load(self, like: PyTree, key: jax.Array | None = None) -> PyTree:
        """Loads the parameters into a tree like `like`; draws those of a new head.

        Args:
          like: Arrays, or `jax.ShapeDtypeStruct` with shardings, such as `.params` of `zero.init`;
            `Trainer(params=pretrained.load)` passes them.
          key: The key of a new head's parameters, by default `jax.random.key(0)`.
        """
        new = self.new_head()
        loaded = weights.load(self.folder, like=like, names=_without(self.names, new))
        if not new:
            return loaded
        opened = open_tree(loaded)

        def draw(key: jax.Array) -> dict[str, jax.Array]:
            drawn = by_path(self.init(key))
            return {path: drawn[path].astype(opened.leaves[path].dtype) for path in new}

        drawn = jax.jit(draw)(jax.random.key(0) if key is None else key)
        return opened.close({path: _placed(opened.leaves[path], x) for path, x in drawn.items()})

    def new_head(self) -> dict[str, list[str]]:
        """Returns the head's parameters to draw anew, each with its tensors in the folder.

        They have no tensor there, or, with `ignore_mismatched_sizes`, one of another shape.

        Raises:
          ValueError: A tensor has another shape, without `ignore_mismatched_sizes`.
        """
        shapes = by_path(abstract(self.model, *self.format.inputs))
        links = link(self.names, {path: x.shape for path, x in shapes.items()}).links
        prefix = self.names.prefix
        with open_tensors(self.folder) as tensors:
            found = {self.names.short(name): x.shape for name, x in tensors.items()}
        new: dict[str, list[str]] = {}
        differing = []
        for pattern in self.format.head:
            needed = {
                path: {x.tensor.removeprefix(prefix): x.tensor_shape for x in links[path]}
                for path in filter(pattern_of(pattern).fullmatch, links)
            }
            if not any(found.keys() & tensors.keys() for tensors in needed.values()):
                new |= {path: [] for path in needed}
                continue
            for path, wanted in needed.items():
                other = [name for name in wanted if found.get(name, wanted[name]) != wanted[name]]
                differing += [f"{x} {[*found[x]]}, not {[*wanted[x]]}" for x in other]
                new |= {path: other} if other else {}
        if differing and not self.ignore_mismatched_sizes:
            raise ValueError(
                f"{self.folder}: the head has {'; '.join(differing)}; nothing was loaded. Pass the "
                "folder's num_labels, or ignore_mismatched_sizes=True for a new head"
            )
        if differing:
            log.warning("%s: the head's parameters are new: %s.", self.folder, "; ".join(differing))
        return new

    def init(self, key: jax.Array) -> PyTree:
        """Returns new parameters."""
        inputs = [jnp.zeros(x.shape, x.dtype) for x in self.format.inputs]
        return self.model.init(key, *inputs)["params"]

    def create_state(
        self, zero: Zero, tx: optax.GradientTransformation | None = None
    ) -> TrainState:
        """Returns a state on the devices of `zero`, with the folder's parameters.

        Args:
          zero: The decorator of the step.
          tx: The optimizer, by default `zero.optimizer()`, which the config names.
        """
        tx = zero.optimizer() if tx is None else tx
        shapes = abstract(self.model, *self.format.inputs)

        def create(params: PyTree) -> TrainState:
            return cast(
                TrainState, TrainState.create(apply_fn=self.model.apply, params=params, tx=tx)
            )

        def create_with_zeros() -> TrainState:
            return create(jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes))

        if init_reads(tx, shapes):
            like = cast(TrainState, zero.abstract_state(create_with_zeros)).params
            return cast(TrainState, zero.init(create, self.load(like)))
        # Otherwise both the zeros and the folder's parameters would need memory beside the state.
        state = zero.init(create_with_zeros)
        return cast(TrainState, state.replace(params=self.load(state.params)))

    def train_step(self, state: TrainState, batch: Batch) -> tuple[TrainState, jax.Array]:
        """Returns the next state and the mean loss [], for `zero(pretrained.train_step)`.

        Args:
          state: A state, such as that of `create_state`.
          batch: Arrays by transformers' names, rows on the first axis. All micro-batches of an
            update have one key for dropout.
        """
        key = jax.random.fold_in(jax.random.key(0), state.step)

        def mean(params: PyTree) -> jax.Array:
            forward = nn.apply(self.loss, self.model)
            return weighted_mean(*forward({"params": params}, batch, rngs={"dropout": key})["loss"])

        loss, grads = value_and_grad(mean)(state.params)
        return state.apply_gradients(grads=grads), loss

    def eval_step(self, state: TrainState, batch: Batch) -> dict[str, PyTree]:
        """Returns the mean `loss` [] and the `logits`, for `zero.evaluate(pretrained.eval_step)`.

        A batch without `labels` may have logits only.
        """
        outputs = nn.apply(self.loss, self.model)({"params": state.params}, batch)
        if "loss" not in outputs:
            return outputs
        return {**outputs, "loss": weighted_mean(*outputs["loss"])}

    def save(
        self,
        folder: Path,
        parameters: PyTree,
        *,
        max_shard_size: int = MAX_FILE_BYTES,
    ) -> None:
        """Writes a folder that transformers reads: the parameters, and the JSON files.

        Args:
          folder: The folder, created if it does not exist.
          parameters: A tree as `parameters`, such as `state.params`.
          max_shard_size: The size of the largest file, in bytes.
        """
        self.format.save(parameters, self.model.config, folder, max_shard_size=max_shard_size)


def from_folder(
    folder: Path,
    *,
    zero: Zero | None = None,
    architecture: str | None = None,
    dtype: DTypeLike = jnp.float32,
    parameters: bool = True,
    key: jax.Array | None = None,
    ignore_mismatched_sizes: bool = False,
    **fields: object,
) -> Pretrained:
    """Returns the model of a Hugging Face folder, with its parameters, names and loss.

    Args:
      folder: A folder with `config.json` and `model.safetensors`, or its index and files.
      zero: The decorator: each parameter is loaded shard by shard to where the plan puts it.
        None for JAX's default device.
      architecture: The class of transformers, in place of the one that `config.json` names:
        "DebertaV2ForSequenceClassification" for a classifier from the weights of a pretraining.
      dtype: The dtype of the parameters; fp16 and bf16 files are widened.
      parameters: False to load no parameters: `Trainer(params=pretrained.load)` does it later.
      key: The key of a new head's parameters, by default `jax.random.key(0)`.
      ignore_mismatched_sizes: True to draw those parameters of the head anew whose tensors have
        another shape, as with `num_labels=2` for a folder with three labels. A warning names them.
      **fields: Fields of the config, such as `scan=True`, `remat=True` and `num_labels=3`.

    Raises:
      FileNotFoundError: A file does not exist.
      ValueError: zerojax has no such model, or does not support a key of the config; the message
        names the models, or the key. A tensor is missing, unexpected or of a wrong shape.

    Example:
      >>> import tempfile
      >>> from zerojax.models.gpt import GPT, SIZES, GPTConfig
      >>> from zerojax.models.hugging_face import gpt2
      >>> config = GPTConfig(**SIZES["tiny"])
      >>> fresh = GPT(config).init(jax.random.key(1), jnp.zeros((1, 8), jnp.int32))["params"]
      >>> with tempfile.TemporaryDirectory() as folder:      # for you: a download
      ...     gpt2.save(fresh, config, folder)
      ...     model, params = (loaded := from_folder(folder)).model, loaded.parameters
      >>> model.config.n_embd, bool((params["wte"]["embedding"] == fresh["wte"]["embedding"]).all())
      (32, True)
    """
    file = config_file.in_folder(folder)
    try:
        format = architectures.find(read_json(file), architecture)
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from None
    config = dataclasses.replace(format.read_config(folder), **fields)
    model = format.model(config)
    if zero:
        per_device = partial(zero.per_device, sharded={SEQUENCE: 1} if zero.sequence else {})
        tensor = TensorParallel.of(zero.mesh)
        values: Fields = {"sequence": zero.sequence, "tensor": tensor, "per_device": per_device}
        known = {field.name for field in dataclasses.fields(model)}
        model = model.clone(**{name: x for name, x in values.items() if name in known})
    pretrained = Pretrained(
        model, None, format.names(config), format.loss, folder, format, ignore_mismatched_sizes
    )
    if not parameters:
        return pretrained
    stored: Any = read_json(file).get("quantization_config") or {}
    if stored.get("quantization_status") == "compressed":
        raise ValueError(
            f"{file}: quantization_config says that the weights are codes, and zerojax loads "
            "floats: pass the folder or the checkpoint that was quantized"
        )

    def create_state(key: jax.Array) -> TrainState:
        params = jax.tree.map(lambda x: x.astype(dtype), pretrained.init(key))
        return TrainState.create(apply_fn=None, params=params, tx=optax.identity())

    abstract_state = zero.abstract_state if zero else jax.eval_shape
    like = cast(TrainState, abstract_state(create_state, jax.random.key(0))).params
    return dataclasses.replace(pretrained, parameters=pretrained.load(like, key))


def _placed(leaf: Shaped, x: jax.Array) -> object:
    """Places an array of a head with the sharding of `leaf`."""
    array = np.asarray(x)

    def read(bounds: Bounds) -> np.ndarray:
        ends = [(0, max(0, end - size)) for (_, end), size in zip(bounds, array.shape, strict=True)]
        return np.pad(array, ends)[tuple(slice(*bound) for bound in bounds)]

    return placed(leaf, read)


def _without(names: weights.Names, new: Mapping[str, Sequence[str]]) -> weights.Names:
    """Returns names that leave out the new parameters, and ignore their tensors."""
    ignored = [*names.ignored, *(tensor for tensors in new.values() for tensor in tensors)]
    tensors = {**dict.fromkeys(new), **names.tensors}
    return dataclasses.replace(names, tensors=tensors | dict.fromkeys(new), ignored=ignored)
