"""DeepSpeed's logs: a line every ``steps_per_print`` updates, the times of
``wall_clock_breakdown``, and metrics in CSV files, TensorBoard and wandb under DeepSpeed's tags.

A decorated step writes them by itself::

    {"steps_per_print": 10,
     "csv_monitor": {"enabled": true, "output_path": "logs", "job_name": "gpt"}}

:class:`Reporter` serves any other loop:

Example:
  >>> import pathlib, tempfile
  >>> import jax.numpy as jnp
  >>> from zerojax.config import ZeroConfig
  >>> logs = tempfile.mkdtemp()
  >>> config = ZeroConfig.from_keywords(csv_monitor={"output_path": logs, "job_name": "a"})
  >>> last = {"learning_rate": jnp.float32(0.5), "grad_norm": jnp.float32(2.0),
  ...         "loss_scale": jnp.float32(1), "skipped_steps": jnp.int32(0), "step": jnp.int32(1)}
  >>> with Reporter(config) as reporter:
  ...     reporter.record(last, {"loss": jnp.float32(0.25)}, rows=8)
  >>> print(pathlib.Path(logs, "a", "Train_Samples_train_loss.csv").read_text())
  step,train_loss
  8,0.25
  <BLANKLINE>

Files in reading order: ``after_step`` is all that a decorated step calls; ``reporter`` passes a
step's figures, named by ``tags``, through ``backlog`` to ``writers``, and prints ``lines`` with
the times of ``clock``; ``finite`` warns of numbers that are not finite.
"""

from zerojax.monitor.reporter import Reporter as Reporter
