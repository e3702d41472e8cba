"""Options that the configs of all models share, and checks of their fields."""

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Annotated, Any, ClassVar, NamedTuple, get_args, get_type_hints

from jax.typing import DTypeLike

from zerojax.offload.activations import remat_policy

Fields = dict[str, Any]
"""Keyword arguments of a config."""


class Bound(NamedTuple):
    """A requirement of a config's field, as the metadata of the type that annotates it."""

    requirement: str
    holds: Callable[[Any], bool]


Size = Annotated[int, Bound("be a positive int", lambda x: type(x) is int and x >= 1)]
Rate = Annotated[float, Bound("be in [0, 1)", lambda x: type(x) in (int, float) and 0 <= x < 1)]
"""A dropout rate."""

Positive = Annotated[
    float,
    Bound("be a positive number", lambda x: type(x) in (int, float) and 0 < x < math.inf),
]
Flag = Annotated[bool, Bound("be True or False", lambda x: isinstance(x, bool))]
Remat = Annotated[
    bool | str,
    Bound("be True or False", lambda x: isinstance(x, bool) or bool(remat_policy(x))),
]


def one_of(*known: object) -> Bound:
    """Returns the requirement to be one of some values."""
    return Bound(f"be {' or '.join(map(repr, known))}", known.__contains__)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Options of every model; types such as `Size` say which values of a field are rejected.

    Attributes:
      scan: Whether the blocks' parameters are stacked into `[L, ...]` leaves, so that one block is
        compiled, not L.
      remat: Whether only each block's input is saved, and the rest recomputed in the backward pass;
        or the name of a policy (`zerojax.remat_policy`) that says what is saved in addition.
      dtype: The dtype of the computation; None for the parameters' dtype, so that a model with bf16
        parameters computes in bf16. The statistics of norms, the softmax, the logits and the loss
        are always in fp32.
      hugging_face: Other contents of a Hugging Face folder's files, as JSON, to write them back.
      computed: Properties with the numbers that None stands for, by field.
    """

    scan: Flag = False
    remat: Remat = False
    dtype: DTypeLike | None = None
    hugging_face: str = dataclasses.field(default="", compare=False, repr=False)

    computed: ClassVar[Mapping[str, str]] = {}

    def __post_init__(self) -> None:
        for name, kind in get_type_hints(type(self), include_extras=True).items():
            options = (kind, *get_args(kind))  # of a union, such as `Size | None`
            bounds = [bound for x in options for bound in getattr(x, "__metadata__", ())]
            if getattr(self, name, None) is None and type(None) in options:
                continue
            for bound in bounds:
                if not bound.holds(getattr(self, name)):
                    self.reject(name, bound.requirement)

    def check_heads(self, width: str, heads: str) -> None:
        """Rejects the config if its width is not a multiple of its number of heads."""
        if getattr(self, width) % getattr(self, heads):
            self.reject(width, f"be a multiple of {heads} = {getattr(self, heads)}")

    def reject(self, name: str, requirement: str) -> None:
        """Raises ValueError that names a field, its value and what it must be or have."""
        raise ValueError(
            f"{type(self).__name__}.{name} must {requirement}, not {getattr(self, name)!r}"
        )


def remat_option(remat: bool, policy: str | None) -> bool | str:
    """Returns the option `remat` of a config for a block that also saves what `policy` names."""
    return remat and (policy or True)


Sizes = dict[str, Fields]
"""Sizes of published and small models by name, as the keyword arguments of a config."""
