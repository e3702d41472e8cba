"""DeepSpeed's logs: a line every ``steps_per_print`` updates, the times of
``wall_clock_breakdown``, and metrics in CSV files, TensorBoard and wandb under DeepSpeed's tags.

A decorated step writes them by itself::

    {"steps_per_print": 10,
     "csv_monitor": {"enabled": true, "output_path": "logs", "job_name": "gpt"}}

Files in reading order: ``after_step`` is all that a decorated step calls. It passes a step's
figures, named by ``tags``, through ``backlog`` to ``writers``, and prints ``lines`` with the times
of ``clock``; ``finite`` warns of numbers that are not finite.
"""
