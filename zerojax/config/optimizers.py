"""The named optimizers of the JSON, with their parameters and DeepSpeed's defaults."""

from zerojax.config.family import Family, Param
from zerojax.config.kinds import ABOVE_ZERO, AMOUNT, BETA, BETAS, FLAG, choice, optional

_LR = Param(AMOUNT, 1e-3, loud=True)
_EPS = Param(AMOUNT, 1e-8)
_BETAS = Param(BETAS, (0.9, 0.999))
_NO_AMSGRAD = Param(FLAG, False, (False,), "AMSGrad is not supported; leave it out")
_ANY_FLAG = Param(FLAG, False)
_DECAY = {
    "weight_decay": Param(AMOUNT, 0.0),
    # zerojax's own key: DeepSpeed decays every parameter.
    "weight_decay_mask": Param(choice("all", "no_bias_and_norm"), "all"),
}

_ADAMW: dict[str, Param] = {
    "lr": _LR,
    "betas": _BETAS,
    "eps": _EPS,
    **_DECAY,
    "bias_correction": Param(FLAG, True),
    "amsgrad": _NO_AMSGRAD,
    # These choose between implementations of one formula.
    "torch_adam": _ANY_FLAG,
    "fused": _ANY_FLAG,
    "set_grad_none": Param(FLAG, True),
    "fp32_optimizer_states": Param(FLAG, True, (True,), "moments stay in fp32; leave it out"),
}
# zerojax's own key: the update by a fused kernel or by XLA; null is by measurement, and with
# FusedAdam the kernel wherever it works in place.
_ADAMW["implementation"] = Param(optional(choice("mosaic_gpu", "xla")), None)
_ADAM = {**_ADAMW, "adam_w_mode": Param(FLAG, True)}
# AdamW decouples the decay by name, whatever the mode says.
_ADAMW["adam_w_mode"] = Param(FLAG, True, (True,), 'for L2 regularisation use type "Adam"')

_ONE_BIT = "1-bit compression is not there yet; use AdamW or Lamb"

OPTIMIZERS: dict[str, Family] = {
    "Adam": Family(_ADAM),
    "AdamW": Family(_ADAMW),
    "FusedAdam": Family(_ADAM),
    "CPUAdam": Family({k: v for k, v in _ADAM.items() if k != "implementation"}),
    "Lion": Family({"lr": _LR, "betas": Param(BETAS, (0.9, 0.99)), **_DECAY}),
    "SGD": Family(
        {
            "lr": _LR,
            "momentum": Param(BETA, 0.0),
            "nesterov": Param(FLAG, False),
            **_DECAY,
            "dampening": Param(AMOUNT, 0.0, (0.0,), "dampening is not supported; leave it out"),
        }
    ),
    "Adagrad": Family(
        {
            "lr": Param(AMOUNT, 1e-2, loud=True),
            "eps": Param(AMOUNT, 1e-10),
            **_DECAY,
            "amsgrad": _NO_AMSGRAD,
        }
    ),
    "Lamb": Family(
        {
            "lr": _LR,
            "betas": _BETAS,
            "eps": _EPS,
            **_DECAY,
            "bias_correction": Param(FLAG, True),
            "max_coeff": Param(ABOVE_ZERO, 10.0),
            "min_coeff": Param(AMOUNT, 0.01),
            "eps_inside_sqrt": Param(FLAG, False),
            "amsgrad": _NO_AMSGRAD,
        }
    ),
    "Muon": Family(
        {
            # Where it is not given: this for the matrices, 3e-4 for what Adam updates.
            "lr": Param(AMOUNT, 2e-2, loud=True),
            "muon_lr": Param(optional(AMOUNT), None),
            "adam_lr": Param(optional(AMOUNT), None),
            "momentum": Param(BETA, 0.95),
            "betas": Param(BETAS, (0.9, 0.95)),
            "eps": Param(AMOUNT, 1e-10),
            **_DECAY,
            # Two ways to compute one formula.
            "ns_method": Param(choice("gram", "standard"), "gram"),
            "per_head_muon": Param(
                FLAG,
                False,
                (False,),
                "orthogonalising each head by itself is not there yet; leave it out",
            ),
        }
    ),
    "OneBitAdam": Family(refused=_ONE_BIT),
    "ZeroOneAdam": Family(refused=_ONE_BIT),
    "OneBitLamb": Family(refused=_ONE_BIT),
}
