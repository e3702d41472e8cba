"""Part 6: ``zerojax fit --xla``, which runs a step under several options of XLA."""

import dataclasses
from typing import Any

import zerojax
from zerojax.devices.rates import Rates, rates
from zerojax.models import names


def fitted(
    model: str, rows: int, seq: int, seconds: float, stage: int = 3, kind: str | None = None
) -> dict[str, Any]:
    """The ranking of one choice under each of XLA's options, run on the device.

    ``kind``: takes the rates of that kind and runs nothing, to rehearse.
    """
    config = {
        "bf16": {"enabled": True},
        "train_micro_batch_size_per_gpu": rows,
        "gradient_accumulation_steps": 1,
        "zero_optimization": {
            "stage": stage,
            "stage3_max_live_parameters": 0,
            "offload_optimizer": {"device": "none"},
            "offload_param": {"device": "none"},
        },
    }
    speeds: Rates | None = rates(kind) if kind else None
    found = zerojax.fit(
        config,
        getattr(names, model),
        train_batch_size=rows,
        seq=seq,
        mesh=zerojax.mesh(1),
        rates=speeds,
        compiles=4,
        seconds=seconds,
        xla=kind is None,
        note=print,
    )
    return {
        "ranking": [
            {
                "choice": str(each.choice),
                "xla": dict(each.choice.xla),
                "predicted": each.forecast.seconds,
                "seconds": each.measured,
            }
            for each in found.ranking
        ],
        "fastest": dataclasses.asdict(found.choice),
    }
