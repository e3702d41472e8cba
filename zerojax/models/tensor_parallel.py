"""Megatron's tensor parallelism for the GPTs and Llamas: parameter specs, sharding constraints.

mesh = zerojax.mesh(axes={"data": 4, "model": 2})
tensor = TensorParallel(mesh)
zero = zerojax.zero("configs/zero3_bf16.json", mesh=mesh, specs=tensor.specs)
model = Llama(config, tensor=tensor)

The axis shards the columns of a block's first products (q, k, v, up, gate), the rows of its second
products (out, down), the heads, and the vocabulary of the embedding table and of the LM head.
Outside these products, in norms and residuals, it shards tokens (sequence parallelism): a
reduce-scatter after one product and an all-gather before the next replace an all-reduce. Sources:
Shoeybi et al. 2019 (arXiv:1909.08053), Korthikanti et al. 2022 (arXiv:2205.05198).

Shapes: B batch, T time, D features, H heads, d features of a head, F features of a wide layer.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.tree_util import KeyPath
from jax.typing import DTypeLike

from zerojax.devices.mesh import (
    SEQUENCE,
    automatic,
    batch_axes,
    batch_devices,
    nearest_multiples,
    sequence_size,
)
from zerojax.xla.types import PyTree

MODEL = "model"

COLUMNS = {"kernel": -1, "bias": -1}
ROWS = {"kernel": -2, "bias": 0}  # the bias is added once, after the sum over devices
REPLICATED = {"embedding": 0, "scale": 0, "bias": 0}

_MODULES = (
    ("q_proj k_proj v_proj gate_proj up_proj c_fc lm_head", COLUMNS),
    # c_attn's kernel concatenates q, k and v, so that its columns cannot be sharded by heads. At
    # rest its rows are sharded; where the kernel is used, it is resharded to columns.
    ("o_proj down_proj c_proj c_attn", ROWS),
    ("wte embed_tokens", {"embedding": -2}),
    ("wpe ln_1 ln_2 ln_f norm q_norm k_norm pre_feedforward_layernorm post_feedforward_layernorm "
     "input_layernorm post_attention_layernorm", REPLICATED),
    ("score", {"kernel": 0}),
)  # fmt: skip

CUT = {module: dims for modules, dims in _MODULES for module in modules.split()}
"""Dimension that the axis shards, by module and parameter, counted from the last; 0 for none."""


@dataclasses.dataclass(frozen=True)
class TensorParallel:
    """Tensor parallelism of a model over a mesh axis.

    Attributes:
      mesh: The mesh of `zerojax.zero(..., mesh=mesh)`; its devices need not exist.
      axis: The mesh axis that shards the model.
      shards_tokens: Whether the axis also shards tokens between blocks. Otherwise partial sums are
        all-reduced, twice a block.

    Raises:
      ValueError: The mesh has no such axis, or the axis shards the rows of the batch.
    """

    mesh: Mesh
    axis: str = MODEL
    shards_tokens: bool = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "mesh", automatic(self.mesh))
        if self.axis not in self.mesh.shape or self.axis in batch_axes(self.mesh):
            raise ValueError(
                f"tensor parallelism needs an axis {self.axis!r} beside the batch's, and the "
                f"mesh has {dict(self.mesh.shape)}: make it with zerojax.mesh(axes={{'data': "
                f"..., {self.axis!r}: ...}})"
            )

    @classmethod
    def of(cls, mesh: Mesh) -> TensorParallel | None:
        """Returns tensor parallelism over the axis "model"; None without the axis, or at size 1."""
        return cls(mesh) if mesh.shape.get(MODEL, 1) > 1 else None

    @property
    def devices(self) -> int:
        """Number of devices that share a model."""
        return self.mesh.shape[self.axis]

    @property
    def sharded_heads(self) -> dict[str, int]:
        """The argument `sharded` of `zero.per_device` and `fused_attention` for heads
        [B, T, H, d]."""
        return {self.axis: 2}

    def specs(self, params: PyTree) -> PyTree:
        """Returns each parameter's `PartitionSpec`, for `zerojax.zero(..., specs=tensor.specs)`.

        Raises:
          ValueError: A parameter's module is not in :data:`CUT`.
        """
        return jax.tree_util.tree_map_with_path(self._spec, params)

    def _spec(self, path: KeyPath, x: jax.Array) -> PartitionSpec:
        names = jax.tree_util.keystr(path, simple=True, separator="/").split("/")
        names = names[:-1] if names[-1] == "value" else names
        module, name = names[-2:] if len(names) > 1 else ("", names[-1])
        dim = CUT.get(module, {}).get(name)
        if dim is None:
            raise ValueError(
                f"params{jax.tree_util.keystr(path)}: tensor parallelism knows no module "
                f"{module!r} with a parameter {name!r}, only those of zerojax.models.gpt and "
                "zerojax.models.llama: pass zerojax.zero(..., specs={...: "
                f"PartitionSpec(None, {self.axis!r})}}), or remove {self.axis!r} from the mesh"
            )
        return PartitionSpec(*[None] * (x.ndim + dim), self.axis) if dim else PartitionSpec()

    def check(self, config: object, *names: str) -> None:
        """Rejects sizes of a model that the axis does not divide.

        Args:
          config: The model's config, with a field of each name.
          names: The names of the sizes that the axis shards.

        Raises:
          ValueError: A size does not divide; the message suggests sizes that do.
        """
        kind, n = type(config).__name__, self.devices
        for name in names:
            if (size := getattr(config, name)) % n:
                raise ValueError(
                    f"{kind}.{name} = {size} does not divide among the {n} devices of the mesh "
                    f"axis {self.axis!r}: make it {nearest_multiples(size, n)}, or change the axis"
                )

    def check_tokens(self, tokens: jax.Array) -> None:
        """Rejects rows [B, T] if the axis does not divide their tokens."""
        size, n = tokens.shape[1], self.devices * sequence_size(self.mesh)
        if self.shards_tokens and size % n:
            raise ValueError(
                f"{size} tokens in a row do not divide among the {n} devices of the mesh axis "
                f"{self.axis!r}: pad or cut the rows to {nearest_multiples(size, n)}"
            )

    def gathered(self, x: jax.Array) -> jax.Array:
        """All-gathers the sharded tokens of [B, T, D], before a product with sharded columns.

        The gradient is reduce-scattered.
        """
        if not self.shards_tokens:
            return x
        return _resharded(x, self._at(3), self._at(3, 1))

    def scattered(self, x: jax.Array) -> jax.Array:
        """Reduce-scatters partial sums [B, T, D] over tokens, after a product with sharded rows.

        The gradient is all-gathered.
        """
        if not self.shards_tokens:
            return lax.with_sharding_constraint(x, self._at(3))
        return _resharded(x, self._at(3, 1), self._at(3))

    def looked_up(self, x: jax.Array) -> jax.Array:
        """Reduce-scatters embeddings [B, T, D] over tokens, from a table with sharded rows.

        Each device has zeros for tokens in other devices' rows. The result is first constrained to
        be unsharded, because XLA would otherwise reshard the indices.
        """
        return self.scattered(lax.with_sharding_constraint(x, self._at(3)))

    def features(self, x: jax.Array) -> jax.Array:
        """Constrains [B, T, F] to sharded features."""
        return lax.with_sharding_constraint(x, self._at(3, 2))

    def heads(self, x: jax.Array) -> jax.Array:
        """Constrains [B, T, H, d] to sharded heads."""
        return lax.with_sharding_constraint(x, self._at(4, 2))

    def between(self, fn: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
        """Wraps `fn` of [B, T, D] to take and return arrays with sharded tokens."""
        return lambda x, *more: self.scattered(fn(self.gathered(x), *more))

    def side_by_side(
        self,
        x: jax.Array,
        kernel: jax.Array,
        bias: jax.Array,
        count: int,
        dtype: DTypeLike | None = None,
    ) -> list[jax.Array]:
        """Computes `jnp.split(x kernel + bias, count, -1)` of x [B, T, D] with sharded features."""
        x, kernel, bias = nn.dtypes.promote_dtype(x, kernel, bias, dtype=dtype)
        bias = self._split(bias, count)
        if self.exchanges(x.shape[-1]):
            parts = _product(x, kernel.reshape(x.shape[-1], count, -1), self)
        else:
            parts = jnp.einsum("btd,dnf->nbtf", x, self._split(kernel, count))
        return [part + b for part, b in zip(parts, bias, strict=True)]

    def _split(self, weights: jax.Array, count: int) -> jax.Array:
        """Splits concatenated weights [..., count F] into [..., count, F] with sharded F.

        A kernel [D, count F] has sharded rows at rest, a bias [count F] is not sharded. The
        resharding moves shards between devices, in the gradient too.
        """
        *leading, width = weights.shape
        split = weights.reshape(*leading, count, width // count)
        columns = NamedSharding(self.mesh, PartitionSpec(*[None] * (split.ndim - 1), self.axis))
        rows = NamedSharding(self.mesh, PartitionSpec(self.axis) if leading else PartitionSpec())
        # The gradient is computed with sharded F; otherwise XLA would gather the activations.
        return lax.with_sharding_constraint(_resharded(split, columns, rows), columns)

    def exchanges(self, features: int) -> bool:
        """Returns whether a kernel's gradient is reduce-scattered before it is resharded to rows.

        This applies to kernels that `side_by_side` splits. It requires a single mesh axis for the
        rows of the batch, and kernel rows (`features`) that divide among all devices.
        """
        if sequence_size(self.mesh) > 1 or len(batch_axes(self.mesh)) > 1:
            return False
        return features % (self.devices * batch_devices(self.mesh)) == 0

    def _at(self, rank: int, dimension: int = 0) -> NamedSharding:
        """Returns a sharding of `dimension` over the axis (0: none), with unconstrained rows.

        On a mesh with the axis "seq", that axis shards tokens as well, before this one.
        """
        entries: list[object] = [PartitionSpec.UNCONSTRAINED] + [None] * (rank - 1)
        if sequence_size(self.mesh) > 1:
            entries[1] = SEQUENCE
        if dimension:
            entries[dimension] = (SEQUENCE, self.axis) if entries[dimension] else self.axis
        return NamedSharding(self.mesh, PartitionSpec(*entries))


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def _resharded(x: jax.Array, of_x: NamedSharding, of_gradient: NamedSharding) -> jax.Array:
    """Constrains x and its gradient to separate shardings.

    A plain constraint would leave the gradient's partial sums to be all-reduced.
    """
    return lax.with_sharding_constraint(x, of_x)


def _resharded_fwd(
    x: jax.Array, of_x: NamedSharding, of_gradient: NamedSharding
) -> tuple[jax.Array, None]:
    return _resharded(x, of_x, of_gradient), None


def _resharded_bwd(
    of_x: NamedSharding, of_gradient: NamedSharding, _: None, gradient: jax.Array
) -> tuple[jax.Array]:
    return (lax.with_sharding_constraint(gradient, of_gradient),)


_resharded.defvjp(_resharded_fwd, _resharded_bwd)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _product(x: jax.Array, kernel: jax.Array, tensor: TensorParallel) -> jax.Array:
    """Multiplies x [B, T, D] by a row-sharded kernel [D, count, F]: [count, B, T, F], sharded F."""
    columns = NamedSharding(tensor.mesh, PartitionSpec(None, None, tensor.axis))
    return jnp.einsum("btd,dnf->nbtf", x, lax.with_sharding_constraint(kernel, columns))


def _product_fwd(
    x: jax.Array, kernel: jax.Array, tensor: TensorParallel
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return _product(x, kernel, tensor), (x, kernel)


def _product_bwd(
    tensor: TensorParallel, kept: tuple[jax.Array, jax.Array], gradient: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Computes the kernel's gradient with sharded F, as [devices, D / devices, count, F].

    A reduce-scatter over the rows of the batch shards the second dimension, and only its result is
    resharded to rows. Otherwise XLA would all-reduce the full gradient, although each device keeps
    only a shard.
    """
    x, kernel = kept
    (rows,), model = batch_axes(tensor.mesh), tensor.axis

    def constrain(value: jax.Array, *spec: str | None) -> jax.Array:
        return lax.with_sharding_constraint(value, NamedSharding(tensor.mesh, PartitionSpec(*spec)))

    d_x = jnp.einsum("nbtf,dnf->btd", gradient, constrain(kernel, None, None, model))
    split = x.reshape(*x.shape[:2], tensor.devices, -1)
    d_kernel = jnp.einsum("btme,nbtf->menf", split, gradient)
    for spec in ((None, None, None, model), (None, rows, None, model), (model, rows, None, None)):
        d_kernel = constrain(d_kernel, *spec)
    return d_x, d_kernel.reshape(kernel.shape)


_product.defvjp(_product_fwd, _product_bwd)
