"""Pipeline stages: the loops over layers of a traced step, run by groups of devices in turn.

- ``program``: the step with its loops over layers replaced, to be read first.
- ``schedule``, ``slots``, ``loop``: which stage runs which micro-batch at which tick, the arrays of
  all micro-batches, and the program of a stage.
- ``layer``: the program of a layer on one device.
"""
