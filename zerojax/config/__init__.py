"""Strict reading of a DeepSpeed JSON, or of Accelerate's YAML as one, into a frozen config."""

from zerojax.config.batch import BatchSizes as BatchSizes
from zerojax.config.elasticity import Elasticity as Elasticity
from zerojax.config.errors import ConfigError as ConfigError
from zerojax.config.frozen import ZeroConfig as ZeroConfig
from zerojax.config.load import load as load
from zerojax.config.named import OptimizerConfig as OptimizerConfig
from zerojax.config.named import SchedulerConfig as SchedulerConfig
from zerojax.config.notes import Note as Note
from zerojax.config.sections import MonitorConfig as MonitorConfig
from zerojax.config.sections import OffloadOptimizer as OffloadOptimizer
from zerojax.config.sections import OffloadParam as OffloadParam
from zerojax.config.sections import WandbConfig as WandbConfig
