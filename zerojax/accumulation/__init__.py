"""Gradient accumulation: a traced step split into what runs per micro-batch and what runs once.

A step traced on the global batch, a function that traces it on other batches, and the roles of its
arguments come in; ``run.MicroBatches``, to be read first, computes the results of the global batch
micro-batch by micro-batch. In the order of the work:

- ``flat``: the step without calls. ``symbolic``, ``traces``, ``instances``: the step on a symbolic
  number of rows, from two traces, and on the numbers of rows that are needed.
- ``resolve``, ``analysis``, ``equation_analysis``: the dependence of each value on the rows of the
  batch, a ``RowKind`` of ``kinds``, by the rules of ``row_rules``, ``product_rules`` and
  ``sum_rules``. ``reductions``: sum, max and so on.
- ``roles``: the results that each micro-batch computes, and the state that it passes to the next.
- ``split``: the programs that run per micro-batch and once.
- ``lanes``: micro-batches side by side, one per device.

:mod:`zerojax.evaluation.rows` splits functions of a batch with the same modules.
"""
