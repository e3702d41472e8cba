"""Error feedback of quantized gradients (LoCo): the value of `zeropp_loco_param`."""

from collections.abc import Mapping
from typing import Annotated, ClassVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from zerojax.config.keys.row import ValueKind


class Loco(BaseModel):
    """The settings of error feedback.

    Attributes:
      err_beta: The weight of the old error in the new error; the current quantization error has
        the weight 1 - err_beta.
      reset_T: The number of updates after which the error is reset to zero.

    Example:
      >>> LOCO.check({"err_beta": 0.8}).reset_T
      1024
    """

    model_config: ClassVar[ConfigDict] = ConfigDict(frozen=True, extra="forbid")

    err_beta: Annotated[float, Field(strict=True, ge=0, lt=1)] = 0.8
    reset_T: Annotated[int, Field(strict=True, ge=1, le=2**31 - 1)] = 1024

    def __repr__(self) -> str:
        return self.model_dump_json()


def _loco(value: object) -> object:
    return Loco(**value) if isinstance(value, Mapping) else value


LOCO = ValueKind(
    'an object as {"err_beta": 0.8, "reset_T": 1024}, with err_beta from 0 to below 1 and reset_T '
    "an integer of at least 1",
    Annotated[Loco, BeforeValidator(_loco)],
)
