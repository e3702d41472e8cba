"""ZeRO for JAX: put ``@zero`` on the flax ``train_step`` you have.

See :func:`zerojax.zero`.
"""

from zerojax.api import Zero as Zero
from zerojax.api import zero as zero
from zerojax.config import ConfigError as ConfigError
from zerojax.config import ZeroConfig as ZeroConfig
from zerojax.mesh import mesh as mesh
from zerojax.optim.schedules import schedule as schedule
from zerojax.plan import Plan as Plan
from zerojax.telemetry import telemetry as telemetry
from zerojax.topology import topology as topology

from jax import grad as grad  # isort: skip - drop-ins; they differ only where a loss scale does
from jax import value_and_grad as value_and_grad  # isort: skip
