"""Strict reading of a DeepSpeed JSON, or of Accelerate's YAML as one, into a frozen config.

Start with `load.load`: it takes a path, a mapping and values for "auto", and returns a
`ZeroConfig` with a `Note` on each key, or raises a `ConfigError` with all problems. In reading
order:

- `settings`: every setting, with its key, kind, defaults and meaning; `sections` and `named` for
  those that are objects, `kinds` of values, `unsupported` for keys without effect,
  `keys` for all of them, `schema` for editors.
- `files`: a file as plain dicts. `accelerate`: YAML to JSON.
- `load`: the checks of a JSON; `auto`: each "auto"; `together`: contradictions, and fields that
  have no effect next to others.
- `frozen`: `ZeroConfig`, also from keywords, which `keywords` types; `batch`: its batch sizes.
- `explain`, `resolved`: tables of a config, whether or not it loads, and after it was loaded.
"""

from zerojax.config.batch import BatchSizes as BatchSizes
from zerojax.config.errors import ConfigError as ConfigError
from zerojax.config.frozen import ZeroConfig as ZeroConfig
from zerojax.config.load import load as load
from zerojax.config.named import OptimizerConfig as OptimizerConfig
from zerojax.config.named import SchedulerConfig as SchedulerConfig
from zerojax.config.row import Note as Note
from zerojax.config.sections import Fp8Config as Fp8Config
from zerojax.config.sections import MonitorConfig as MonitorConfig
from zerojax.config.sections import OffloadOptimizer as OffloadOptimizer
from zerojax.config.sections import OffloadParam as OffloadParam
from zerojax.config.sections import WandbConfig as WandbConfig
