"""The optimizers and schedules that the JSON may name: parameters, and DeepSpeed's defaults.

`zerojax.optim.named` and `zerojax.optim.schedules` build them.
"""

from dataclasses import replace

from zerojax.config.row import (
    ABOVE_ZERO,
    AMOUNT,
    BETA,
    BETAS,
    FLAG,
    INTEGER,
    NON_NEGATIVE,
    NUMBER,
    POSITIVE,
    REQUIRED,
    Param,
    choice,
    optional,
)

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
    # These flags choose between implementations of one formula.
    "torch_adam": _ANY_FLAG,
    "fused": _ANY_FLAG,
    "set_grad_none": Param(FLAG, True),
    "fp32_optimizer_states": Param(FLAG, True, (True,), "moments stay in fp32; leave it out"),
}
_ADAM = {**_ADAMW, "adam_w_mode": Param(FLAG, True)}
# AdamW decouples the weight decay by definition, regardless of the mode.
_ADAMW["adam_w_mode"] = Param(FLAG, True, (True,), 'for L2 regularisation use type "Adam"')

OPTIMIZERS: dict[str, dict[str, Param]] = {
    "Adam": _ADAM,
    "AdamW": _ADAMW,
    "FusedAdam": _ADAM,
    "CPUAdam": _ADAM,
    "Lion": {"lr": _LR, "betas": Param(BETAS, (0.9, 0.99)), **_DECAY},
    "SGD": {
        "lr": _LR,
        "momentum": Param(BETA, 0.0),
        "nesterov": Param(FLAG, False),
        **_DECAY,
        "dampening": Param(AMOUNT, 0.0, (0.0,), "dampening is not supported; leave it out"),
    },
    "Adagrad": {
        "lr": Param(AMOUNT, 1e-2, loud=True),
        "eps": Param(AMOUNT, 1e-10),
        **_DECAY,
        "amsgrad": _NO_AMSGRAD,
    },
    "Lamb": {
        "lr": _LR,
        "betas": _BETAS,
        "eps": _EPS,
        **_DECAY,
        "bias_correction": Param(FLAG, True),
        "max_coeff": Param(ABOVE_ZERO, 10.0),
        "min_coeff": Param(AMOUNT, 0.01),
        "eps_inside_sqrt": Param(FLAG, False),
        "amsgrad": _NO_AMSGRAD,
    },
    "Muon": {
        # If lr is omitted: this rate for the matrices, 3e-4 for the parameters that Adam updates.
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
    },
}

REPLACED_TYPES = {"OneBitAdam": "AdamW", "OneBitLamb": "Lamb", "ZeroOneAdam": "AdamW"}
"""DeepSpeed's optimizers that send momenta in 1 bit, which zerojax does not support, with the
optimizer to use instead."""

_LAST = Param(INTEGER, -1, (-1,), "the step counter in the state says where a run resumes")
_WARMUP = {
    "warmup_num_steps": Param(POSITIVE, 1000, loud=True),
    "warmup_type": Param(choice("log", "linear"), "log", loud=True),
    "last_batch_iteration": _LAST,
}
_TOTAL = Param(
    POSITIVE, REQUIRED, why="only the training loop knows how long it runs; write the number"
)
_MAX_LR = Param(optional(AMOUNT), None, auto="the optimizer's learning rate")
_CYCLE_LR = Param(AMOUNT, REQUIRED, why="DeepSpeed has no default for it; write the number")

SCHEDULERS: dict[str, dict[str, Param]] = {
    "WarmupLR": {
        "warmup_min_lr": Param(AMOUNT, 0.0),
        "warmup_max_lr": _MAX_LR,
        **_WARMUP,
    },
    "WarmupDecayLR": {
        "total_num_steps": _TOTAL,
        "warmup_min_lr": Param(AMOUNT, 0.0),
        "warmup_max_lr": replace(_MAX_LR, default=1e-3, loud=True),
        **_WARMUP,
    },
    "WarmupCosineLR": {
        "total_num_steps": _TOTAL,
        "warmup_min_ratio": Param(AMOUNT, 0.0),
        "warmup_num_steps": _WARMUP["warmup_num_steps"],
        "cos_min_ratio": Param(AMOUNT, 1e-4, loud=True),
        **_WARMUP,
    },
    "OneCycle": {
        "cycle_min_lr": _CYCLE_LR,
        "cycle_max_lr": _CYCLE_LR,
        "decay_lr_rate": Param(AMOUNT, 0.0),
        "cycle_first_step_size": Param(POSITIVE, 2000, loud=True),
        "cycle_second_step_size": Param(optional(POSITIVE), None),
        # DeepSpeed stores the stair counts but never uses them, so zerojax ignores them too.
        "cycle_first_stair_count": Param(optional(NON_NEGATIVE), 0),
        "cycle_second_stair_count": Param(optional(NON_NEGATIVE), None),
        "decay_step_size": Param(NON_NEGATIVE, 0),
        "cycle_momentum": Param(FLAG, True, loud=True),
        "cycle_min_mom": Param(BETA, 0.8),
        "cycle_max_mom": Param(BETA, 0.9),
        "decay_mom_rate": Param(NUMBER, 0.0),
        "last_batch_iteration": _LAST,
    },
    "LRRangeTest": {
        "lr_range_test_min_lr": Param(AMOUNT, 1e-3, loud=True),
        "lr_range_test_step_size": Param(POSITIVE, 2000, loud=True),
        "lr_range_test_step_rate": Param(NUMBER, 1.0, loud=True),
        "lr_range_test_staircase": Param(FLAG, False),
        "last_batch_iteration": _LAST,
    },
}

NAMED_TYPES = {"optimizer": OPTIMIZERS, "scheduler": SCHEDULERS}
"""The parameters of each type, by section and type."""
