"""Pipeline stages: the loops over layers of a traced step, run by groups of devices in turn.

- ``stacks``: the parameters that are sharded over the axis "stage": stacks of layers.
- ``program``: the step with its loops over layers replaced, to be read first.
- ``schedule``, ``slots``, ``loop``: which stage runs which micro-batch at which tick, the arrays of
  all micro-batches, and the program of a stage.
"""
