"""Options that the configs of all models share, and checks of their fields."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, ClassVar

from jax.typing import DTypeLike

from zerojax.offload.activations import remat_policy

Fields = dict[str, Any]
"""Keyword arguments of a config."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Options of every model.

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

    scan: bool = False
    remat: bool | str = False
    dtype: DTypeLike | None = None
    hugging_face: str = dataclasses.field(default="", compare=False, repr=False)

    computed: ClassVar[Mapping[str, str]] = {}

    def check_sizes(self, *names: str) -> None:
        """Rejects the config if a named field is not a positive int."""
        for name in names:
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                self.reject(name, "be a positive int")

    def check_optional_sizes(self, *names: str) -> None:
        """Rejects the config if a named field is neither None nor a positive int."""
        self.check_sizes(*(name for name in names if getattr(self, name) is not None))

    def check_rates(self, *names: str) -> None:
        """Rejects the config if a named field is not a dropout rate in [0, 1)."""
        for name in names:
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1:
                self.reject(name, "be in [0, 1)")

    def check_positive(self, *names: str) -> None:
        """Rejects the config if a named field is not a positive number."""
        for name in names:
            value = getattr(self, name)
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            if not is_number or not 0 < value < math.inf:
                self.reject(name, "be a positive number")

    def check_flags(self, *names: str) -> None:
        """Rejects the config if a named field is neither True nor False."""
        for name in names:
            if not isinstance(getattr(self, name), bool):
                self.reject(name, "be True or False")

    def check_remat(self) -> None:
        """Rejects the config if `remat` is neither a bool nor the name of a policy."""
        if not isinstance(self.remat, str):
            self.check_flags("remat")
        else:
            remat_policy(self.remat)

    def check_heads(self, width: str, heads: str) -> None:
        """Rejects the config if its width is not a multiple of its number of heads."""
        if getattr(self, width) % getattr(self, heads):
            self.reject(width, f"be a multiple of {heads} = {getattr(self, heads)}")

    def check_one_of(self, name: str, *known: object) -> None:
        """Rejects the config if the named field is not a known value."""
        if getattr(self, name) not in known:
            self.reject(name, f"be {' or '.join(map(repr, known))}")

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
