"""``zero.evaluate``: a function of a state and a batch that updates no parameter.

The user's function and its arguments come in; the function's results for the global batch come out,
and the variables of NNX objects that it changes are written back.

- ``decorated``, to be read first: the evaluated function and its call.
- ``objects``: the state of a call. ``program``: the compiled program.
- ``batch``: the division of any number of rows into micro-batches of equal size.
- ``rows``: the function split into a program per micro-batch and one that runs once;
  :mod:`zerojax.trainer.partial` uses it too. ``masks``: rows that do not count in a reduction.
- ``undivided``: the reasons why a function runs on all rows at once.
"""
