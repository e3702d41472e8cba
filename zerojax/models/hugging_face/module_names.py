"""Names of tensors for models whose modules have Hugging Face's names.

>>> names = module_names("model.", "encoder/layers")
>>> names["{stack:path}_{layer:int}/{module:path}/kernel"].name     # decoder/layers_3/fc1/kernel
'model.{stack}.{layer}.{module}.weight'
>>> names["encoder/layers/{module:path}/bias"].arrangement     # encoder/layers/fc1/bias
'... -> layer ...'
"""

from zerojax.weights import Tensor

# A parameter, its tensor, and the axes of the tensor and of the parameter; torch stores linear
# layers as [out, in].
LEAVES = (
    ("kernel", "weight", "o i", "i o"),
    ("embedding", "weight", "...", "..."),
    ("scale", "weight", "...", "..."),
    ("bias", "bias", "...", "..."),
)


def module_names(prefix: str, *stacks: str, layers: range | None = None) -> dict[str, Tensor]:
    """Returns the tensor of each parameter by path pattern; the first matching pattern counts.

    Args:
      prefix: The prefix of all tensors.
      stacks: Paths of stacked blocks; those of unrolled blocks end in the blocks' numbers.
      layers: Numbers of the stacked blocks in the tensors' names; by default from 0.
    """
    names = {
        "{module:path}/conv/kernel": Tensor(f"{prefix}{{module}}.conv.weight", "o i k -> k i o")
    }
    parts = {} if layers is None else {"layer": [str(layer) for layer in layers]}
    for leaf, tensor, tensor_axes, param_axes in LEAVES:
        for stack in stacks:
            names[f"{stack}/{{module:path}}/{leaf}"] = Tensor(
                f"{prefix}{stack.replace('/', '.')}.{{layer}}.{{module}}.{tensor}",
                f"{tensor_axes} -> layer {param_axes}",
                parts,
            )
        names[f"{{stack:path}}_{{layer:int}}/{{module:path}}/{leaf}"] = Tensor(
            f"{prefix}{{stack}}.{{layer}}.{{module}}.{tensor}", f"{tensor_axes} -> {param_axes}"
        )
        names[f"{{module:path}}/{leaf}"] = Tensor(
            f"{prefix}{{module}}.{tensor}", f"{tensor_axes} -> {param_axes}"
        )
    return names
