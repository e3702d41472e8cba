"""The experimental features that a config asks for, in the forms that the rooms below take."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import optax
from jax.sharding import Mesh

from zerojax.accumulation.exchange import Exchange
from zerojax.config import ZeroConfig
from zerojax.config.keys.named_types import ONE_BIT
from zerojax.experimental.disk_params import ParamReader
from zerojax.experimental.loco import LoCo
from zerojax.experimental.one_bit import scale_by_one_bit_adam, scale_by_zero_one_adam
from zerojax.experimental.one_bit_lamb import scale_by_one_bit_lamb
from zerojax.experimental.one_bit_momentum import OneBit
from zerojax.offload.program_reader import ProgramReader
from zerojax.optim.named import Rule, Setting, Transformations
from zerojax.plan.quantized import sent_formats


def exchange_of(config: ZeroConfig, mesh: Mesh, axis: str) -> Exchange | None:
    """Returns the exchange of gradients that a config asks for; None for ordinary sums."""
    if config.zeropp_loco_param is not None:
        return LoCo(config.zeropp_loco_param, sent_formats(config).gradients, mesh, axis)
    if config.optimizer is not None and config.optimizer.type in ONE_BIT:
        return OneBit(config.optimizer, mesh)
    return None


def reader_of(config: ZeroConfig) -> ProgramReader | None:
    """Returns a reader of one program's arrays on disk; None if a config keeps nothing on disk."""
    sections = config.offload_optimizer, config.offload_param
    on_disk = any(section is not None and section.device == "nvme" for section in sections)
    return ParamReader(config.offload_param) if on_disk else None


def _one_bit_adam(s: Setting) -> Transformations:
    b1, b2 = s.params["betas"]
    correct = s.params["bias_correction"]
    rule = scale_by_one_bit_adam(
        b1, b2, s.params["eps"], s.params["freeze_step"], bias_correction=correct
    )
    return [rule, *s.decay]


def _one_bit_lamb(s: Setting) -> Transformations:
    return [scale_by_one_bit_lamb(s.params, optax.chain(optax.identity(), *s.decay))]


def _zero_one_adam(s: Setting) -> Transformations:
    b1, b2 = s.params["betas"]
    steps = (s.params[f"var_{name}"] for name in ("freeze_step", "update_scaler"))
    correct = s.params["bias_correction"]
    return [
        scale_by_zero_one_adam(b1, b2, s.params["eps"], *steps, bias_correction=correct),
        *s.decay,
    ]


OPTIMIZERS: Mapping[str, Rule] = MappingProxyType(
    {
        "OneBitAdam": _one_bit_adam,
        "OneBitLamb": _one_bit_lamb,
        "ZeroOneAdam": _zero_one_adam,
    }
)
"""The rules of the optimizers that the JSON names. OneBitAdam is AdamW, with v frozen after
``freeze_step`` updates; ZeroOneAdam is AdamW with a v that is updated at growing intervals;
OneBitLamb is Lamb, with v and the trust ratios frozen after ``freeze_step`` updates. See
:mod:`zerojax.experimental.one_bit`."""
