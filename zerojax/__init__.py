"""ZeRO for JAX: put ``@zero`` on the flax ``train_step`` you have.

See :func:`zerojax.zero`.
"""

from importlib import import_module as _import_module
from importlib import metadata as _metadata
from re import findall as _findall
from typing import TYPE_CHECKING as _TYPE_CHECKING
from typing import Any as _Any

if _TYPE_CHECKING:
    from zerojax import models as models
    from zerojax import weights as weights
    from zerojax.api import Zero as Zero
    from zerojax.api import zero as zero
    from zerojax.config import ConfigError as ConfigError
    from zerojax.config import ZeroConfig as ZeroConfig
    from zerojax.devices.mesh import mesh as mesh
    from zerojax.devices.rows import process_rows as process_rows
    from zerojax.devices.topology import topology as topology
    from zerojax.distributed.join import init_distributed as init_distributed
    from zerojax.foresight.estimators import (
        estimate_zero2_model_states_mem_needs_all_cold as estimate_zero2_model_states_mem_needs_all_cold,  # noqa: E501
    )
    from zerojax.foresight.estimators import (
        estimate_zero2_model_states_mem_needs_all_live as estimate_zero2_model_states_mem_needs_all_live,  # noqa: E501
    )
    from zerojax.foresight.estimators import (
        estimate_zero3_model_states_mem_needs_all_cold as estimate_zero3_model_states_mem_needs_all_cold,  # noqa: E501
    )
    from zerojax.foresight.estimators import (
        estimate_zero3_model_states_mem_needs_all_live as estimate_zero3_model_states_mem_needs_all_live,  # noqa: E501
    )
    from zerojax.foresight.guard import OutOfMemoryError as OutOfMemoryError
    from zerojax.generation.generate import generate as generate
    from zerojax.generation.generate import generate_stream as generate_stream
    from zerojax.models.distillation import distillation_loss as distillation_loss
    from zerojax.monitor.after_step import LossScaleError as LossScaleError
    from zerojax.offload.activations import remat_policy as remat_policy
    from zerojax.offload.disk.folder import DiskError as DiskError
    from zerojax.offload.fetch import on_device as on_device
    from zerojax.optim.loss_scale import LossScale as LossScale
    from zerojax.optim.over_matrices import over_matrices as over_matrices
    from zerojax.optim.schedules import schedule as schedule
    from zerojax.optim.telemetry import telemetry as telemetry
    from zerojax.optim.wrap import wrap as wrap
    from zerojax.plan.state_sharding import Plan as Plan
    from zerojax.quantize.weights import dequantize as dequantize
    from zerojax.quantize.weights import quantize_weights as quantize_weights
    from zerojax.trace.gradients import grad as grad
    from zerojax.trace.gradients import value_and_grad as value_and_grad
    from zerojax.trace.gradients import weighted_mean as weighted_mean
    from zerojax.trace.tiled import tiled as tiled
    from zerojax.trainer.arguments import TrainingArguments as TrainingArguments
    from zerojax.trainer.loop import Trainer as Trainer
    from zerojax.tuning.fit import Fitted as Fitted
    from zerojax.tuning.fit import fit as fit
    from zerojax.tuning.workload import Workload as Workload

# Loaded on first use, so that `zerojax launch` starts without JAX and holds no device.
_MODULES = {
    "ConfigError": "config",
    "DiskError": "offload.disk.folder",
    "Fitted": "tuning.fit",
    "LossScale": "optim.loss_scale",
    "LossScaleError": "monitor.after_step",
    "OutOfMemoryError": "foresight.guard",
    "Plan": "plan.state_sharding",
    "Trainer": "trainer.loop",
    "TrainingArguments": "trainer.arguments",
    "Workload": "tuning.workload",
    "Zero": "api",
    "ZeroConfig": "config",
    "dequantize": "quantize.weights",
    "distillation_loss": "models.distillation",
    "estimate_zero2_model_states_mem_needs_all_cold": "foresight.estimators",
    "estimate_zero2_model_states_mem_needs_all_live": "foresight.estimators",
    "estimate_zero3_model_states_mem_needs_all_cold": "foresight.estimators",
    "estimate_zero3_model_states_mem_needs_all_live": "foresight.estimators",
    "fit": "tuning.fit",
    "generate": "generation.generate",
    "generate_stream": "generation.generate",
    "grad": "trace.gradients",
    "init_distributed": "distributed.join",
    "mesh": "devices.mesh",
    "models": "models",
    "on_device": "offload.fetch",
    "over_matrices": "optim.over_matrices",
    "process_rows": "devices.rows",
    "quantize_weights": "quantize.weights",
    "remat_policy": "offload.activations",
    "schedule": "optim.schedules",
    "telemetry": "optim.telemetry",
    "tiled": "trace.tiled",
    "topology": "devices.topology",
    "value_and_grad": "trace.gradients",
    "weighted_mean": "trace.gradients",
    "weights": "weights",
    "wrap": "optim.wrap",
    "zero": "api",
}

try:
    __version__ = _metadata.version("zerojax")
except _metadata.PackageNotFoundError:  # a checkout that is not installed
    __version__ = "0+unknown"


def _require_jax(version: str) -> None:
    """Refuses a jax that lacks names on which the first use of zerojax would fail."""
    if tuple(map(int, _findall(r"\d+", version)[:3])) < (0, 10, 2):
        raise ImportError(
            f"zerojax needs jax>=0.10.2, and jax {version} is installed: run pip install -U "
            "'jax>=0.10.2' in this environment"
        )


_require_jax(_metadata.version("jax"))

__all__ = [*_MODULES]


def __getattr__(name: str) -> _Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'zerojax' has no attribute {name!r}")
    module = _import_module(f"zerojax.{_MODULES[name]}")
    value = module if name in ("models", "weights") else getattr(module, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """Lists only the public API; the subpackages are not part of it."""
    return [*__all__, "__version__"]
