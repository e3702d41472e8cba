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

import jax
from jax.sharding import Mesh, PartitionSpec
from jax.tree_util import KeyPath

from zerojax.devices.mesh import (
    automatic,
    batch_axes,
    nearest_multiples,
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

    Raises:
      ValueError: The mesh has no such axis, or the axis shards the rows of the batch.
    """

    mesh: Mesh
    axis: str = MODEL

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
