"""DeepSpeed's rules of thumb for the memory of model states, before any compile.

The tables use P parameters, L of them in the largest layer, G GPUs in total, g GPUs per node, n
nodes, and the factor a = 1.5 for buffers in host memory. They list bytes, as in DeepSpeed 0.19
(``runtime/zero/stage_1_and_2.py`` and ``stage3.py``):

=================================  =================  ==========================================
ZeRO-2                             per GPU            per CPU
=================================  =================  ==========================================
optimizer offloaded                2P                 P max(4G, 16) a
nothing offloaded                  2P + 18P/G         4P g a
=================================  =================  ==========================================

=================================  =================  ==========================================
ZeRO-3                             per GPU            per CPU: zero_init=1; zero_init=0
=================================  =================  ==========================================
optimizer and parameters           4L                 18P a/n; P max(4g, 18/n) a
optimizer                          4L + 2P/G          16P a/n; P max(4g, 16/n) a
nothing                            4L + 18P/G         4L g a; 4P g a
=================================  =================  ==========================================

Activations, logits and gathered parameters are not included.
"""

from __future__ import annotations

import collections
import inspect
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from flax import linen, nnx

from zerojax.xla.types import PyTree

GIB = 2**30
BUFFERS = 1.5
"""The factor on host memory, for buffers."""


@dataclass(frozen=True)
class Need:
    """The memory that one offload configuration needs.

    Attributes:
      cpu: Bytes of a node's host memory.
      gpu: Bytes of each GPU.
      options: The configuration, in DeepSpeed's format.
    """

    cpu: int
    gpu: int
    options: str


@dataclass(frozen=True)
class Estimate:
    """The needs of each offload configuration; ``str()`` is DeepSpeed's table, where GB is 2^30
    bytes.

    Attributes:
      stage: The ZeRO stage, 2 or 3.
      params: The number of parameters of the model.
      largest_layer: The number of parameters of its largest layer; None at stage 2.
      gpus_per_node: The number of GPUs of a node.
      nodes: The number of nodes.
      needs: One need for each configuration, most offloaded first.
    """

    stage: int
    params: int
    largest_layer: int | None
    gpus_per_node: int
    nodes: int
    needs: tuple[Need, ...]

    def __str__(self) -> str:
        nodes = f"{self.nodes} node{'s' * (self.nodes > 1)}"
        gpus = f"{self.gpus_per_node} GPU{'s' * (self.gpus_per_node > 1)}"
        model = f"{int(self.params / 1e6)}M total params"
        if self.largest_layer is not None:
            model += f", {int(self.largest_layer / 1e6)}M largest layer params"
        lines = [
            f"ZeRO-{self.stage}: memory for params, optim states and gradients",
            f"HW: {nodes}, {gpus} per node",
            f"SW: model with {model}",
            "  per CPU  |  per GPU |   Options",
        ]
        lines += [
            f" {need.cpu / GIB:7.2f}GB | {need.gpu / GIB:6.2f}GB | {need.options}"
            for need in self.needs
        ]
        return "\n".join(lines)


def estimate_zero2_model_states_mem_needs_all_cold(
    total_params: float,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
) -> Estimate:
    """Estimates the memory that ZeRO-2 needs by DeepSpeed's formulas; prints and returns the table.

    Args:
      total_params: The number of parameters of the model.
      num_gpus_per_node: The number of GPUs of a node.
      num_nodes: The number of nodes.

    Raises:
      ValueError: A number is not positive.

    Example:
      >>> _ = estimate_zero2_model_states_mem_needs_all_cold(3e9, 8)
      ZeRO-2: memory for params, optim states and gradients
      HW: 1 node, 8 GPUs per node
      SW: model with 3000M total params
        per CPU  |  per GPU |   Options
        134.11GB |   5.59GB | offload_optimizer=cpu
        134.11GB |  11.87GB | offload_optimizer=none
    """
    p, _ = _checked(total_params, None, num_gpus_per_node, num_nodes)
    gpus, a = num_gpus_per_node * num_nodes, BUFFERS
    needs = (
        Need(int(p * max(4 * gpus, 16) * a), 2 * p, "offload_optimizer=cpu"),
        Need(
            int(p * 4 * num_gpus_per_node * a), 2 * p + int(18 * p / gpus), "offload_optimizer=none"
        ),
    )
    return _shown(Estimate(2, p, None, num_gpus_per_node, num_nodes, needs))


def estimate_zero3_model_states_mem_needs_all_cold(
    total_params: float,
    largest_layer_params: float,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
) -> Estimate:
    """Estimates the memory that ZeRO-3 needs by DeepSpeed's formulas; prints and returns the table.

    ``zero_init=1`` is for parameters that are created sharded, as by :meth:`zerojax.Zero.init`.

    Args:
      total_params: The number of parameters of the model.
      largest_layer_params: The number of parameters of its largest layer.
      num_gpus_per_node: The number of GPUs of a node.
      num_nodes: The number of nodes.

    Raises:
      ValueError: A number is not positive, or the layer is larger than the model.

    Example:
      >>> table = estimate_zero3_model_states_mem_needs_all_cold(7e9, 131072000, 8)
      ... # doctest: +ELLIPSIS
      ZeRO-3: memory for params, optim states and gradients
      ...
      >>> table.needs[-1].gpu // 10**6
      16274
    """
    p, layer = _checked(total_params, largest_layer_params, num_gpus_per_node, num_nodes)
    g, n, a = num_gpus_per_node, num_nodes, BUFFERS
    needs = []
    for optimizer, params in ((True, True), (True, False), (False, False)):
        if optimizer:
            at_rest = 18 if params else 16
            gpu = 4 * layer + (0 if params else int(2 * p / (g * n)))
            cpu = (p * at_rest / n * a, p * max(4 * g, at_rest / n) * a)
        else:
            gpu = 4 * layer + int(18 * p / (g * n))
            cpu = (layer * 4 * g * a, p * 4 * g * a)
        places = [f"{'cpu' if is_offloaded else 'none':4}" for is_offloaded in (params, optimizer)]
        options = f"offload_param={places[0]}, offload_optimizer={places[1]}"
        needs += [
            Need(int(c), gpu, f"{options}, zero_init={zero_init}")
            for zero_init, c in zip((1, 0), cpu, strict=True)
        ]
    return _shown(Estimate(3, p, layer, g, n, tuple(needs)))


def estimate_zero2_model_states_mem_needs_all_live(
    model: object,
    *inputs: object,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
) -> Estimate:
    """Calls :func:`estimate_zero2_model_states_mem_needs_all_cold` with a model's parameter count.

    Args:
      model: A linen module, an ``nnx.Module``, or a tree of parameters, abstract or not.
      *inputs: The inputs that initialise a linen module, abstract or not; nothing is computed. A
        language model, which takes ``tokens`` or ``input_ids``, needs no inputs.

    Raises:
      TypeError: The model is none of these, or takes inputs other than tokens and got no inputs.

    Example:
      >>> import jax.numpy as jnp
      >>> from flax import linen as nn
      >>> table = estimate_zero2_model_states_mem_needs_all_live(nn.Dense(2000), jnp.ones((1, 999)))
      ... # doctest: +ELLIPSIS
      ZeRO-2: memory for params, optim states and gradients
      ...
      >>> table.params
      2000000
    """
    total, _ = parameters(model, inputs)
    return estimate_zero2_model_states_mem_needs_all_cold(total, num_gpus_per_node, num_nodes)


def estimate_zero3_model_states_mem_needs_all_live(
    model: object,
    *inputs: object,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
) -> Estimate:
    """Calls :func:`estimate_zero3_model_states_mem_needs_all_cold` with a model's parameter counts;
    the arguments are those of :func:`estimate_zero2_model_states_mem_needs_all_live`.

    The largest layer is the module with the most parameters outside of its submodules; of a stack
    created by ``nn.scan``, one layer counts. A tree of parameters and an ``nnx.Module`` do not
    record which arrays are stacks: pass the unrolled model.
    """
    total, largest = parameters(model, inputs)
    return estimate_zero3_model_states_mem_needs_all_cold(
        total, largest, num_gpus_per_node, num_nodes
    )


def parameters(model: PyTree, inputs: Sequence[PyTree] = ()) -> tuple[int, int]:
    """Returns the parameter counts of a model and of its largest module, submodules excluded.

    Example:
      >>> import jax.numpy as jnp
      >>> parameters({"embed": {"table": jnp.ones((9, 2))}, "dense": {"w": jnp.ones(4)}})
      (22, 18)
    """
    tree, layers = model, dict[tuple[str, ...], int]()
    if isinstance(model, linen.Module):

        def count(
            method: Callable[..., PyTree],
            args: tuple[PyTree, ...],
            kwargs: dict[str, PyTree],
            context: linen.module.InterceptorContext,
        ) -> PyTree:
            """Counts a called module's own parameters; under ``nn.scan`` it has one layer's."""
            result = method(*args, **kwargs)
            for name, value in context.module.variables.get("params", {}).items():
                layers[(*context.module.path, name)] = sum(x.size for x in jax.tree.leaves(value))
            return result

        with linen.intercept_methods(count):
            given = jax.random.key(0), *(inputs or _tokens_of(model))
            tree = linen.meta.unbox(jax.eval_shape(model.init, *given).get("params", {}))
    elif isinstance(model, nnx.Module):
        tree = nnx.to_pure_dict(nnx.state(model, nnx.Param))
    modules: collections.Counter[str] = collections.Counter()
    total = 0
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        if not hasattr(leaf, "shape"):
            raise TypeError(
                "model: expected a flax module or a tree of parameters, got a "
                f"{type(model).__name__} with {leaf!r} at {jax.tree_util.keystr(path) or 'its top'}"
            )
        total += math.prod(leaf.shape)
        names = tuple(getattr(key, "key", "") for key in path)
        modules[jax.tree_util.keystr(path[:-1])] += layers.get(names, math.prod(leaf.shape))
    if not modules:
        raise TypeError(f"model: a {type(model).__name__} has no parameters: pass params")
    return total, max(modules.values())


_TOKENS = frozenset({"tokens", "input_ids", "decoder_input_ids"})


def _tokens_of(model: linen.Module) -> list[jax.ShapeDtypeStruct]:
    """Returns abstract inputs of a model that takes only tokens; its parameters do not depend on
    them.

    Raises:
      TypeError: The model takes other inputs.
    """
    arguments = [*inspect.signature(type(model).__call__).parameters.values()][1:]
    required = [p.name for p in arguments if p.default is p.empty and p.kind is not p.VAR_KEYWORD]
    if not _TOKENS.issuperset(required):
        raise TypeError(
            f"model: {type(model).__name__} takes {', '.join(required)}: pass jax.ShapeDtypeStructs"
        )
    return [jax.ShapeDtypeStruct((1, 8), jnp.int32)] * len(required)


def _checked(params: float, layer: float | None, gpus: int, nodes: int) -> tuple[int, int]:
    values = {
        "total_params": params,
        "largest_layer_params": 1 if layer is None else layer,
        "num_gpus_per_node": gpus,
        "num_nodes": nodes,
    }
    for name, value in values.items():
        if not 0 < value < math.inf:
            raise ValueError(f"{name} = {value} must be above 0 and finite")
    if layer is not None and layer > params:
        raise ValueError(f"largest_layer_params = {layer:,.0f} exceeds total_params {params:,.0f}")
    return int(params), int(layer or 0)


def _shown(estimate: Estimate) -> Estimate:
    print(estimate)
    return estimate
