"""The collectives of a step, and their places in the program.

A traced step, its arguments (some of them a ``Shard``) and the target specs of its gradients come
in; ``Inserter`` evaluates the step equation by equation, and its results come out as arrays of the
program that is being traced. Read ``insert`` first, then ``shard`` and ``gathering``.

- Values: ``shard`` (parameters as shards, gradients reduced to shards), ``partial_sums`` (gradients
  not yet summed over the devices), ``host`` (arrays in host memory).
- Sends: ``gathering`` (all-gathers, reduce-scatters, the scope of a gather), ``reduction``,
  ``quantization``, ``many`` (small arrays in one all-gather).
- Decisions before a program runs: ``program_decisions``, from ``wanted`` (target specs of
  gradients, traced back to the equations that compute them), ``adjacent``, ``residuals``,
  ``uses``.
- Decisions before a loop runs: ``loop_decisions``, from ``loops`` (gradients reduced after the
  loop), ``held`` (constants gathered before the loop), ``ahead`` (layers gathered one iteration
  ahead), ``behind`` (gradients reduced one iteration later). ``scans`` runs the loop, with
  ``entries``, ``filled``, ``iterations``.
- Decisions at the entry of a step: ``kept``, with ``uses`` (the variables that a program needs
  unsharded, and their dtypes).
- Rules for one kind of equation: ``propagate`` (specs through moves), ``lookups``, ``in_place``
  (products with weights that stay sharded), ``convolutions``, ``gradients``, ``uneven``,
  ``copies``, ``widening``, ``minibatches``.
- The optimizer's update: ``matrices`` (each device computes with some of the matrices).
- Order of the program, for XLA: ``order``, ``window``. ``layer``: the size of a layer, for options
  of XLA.
- Reports: ``decisions`` (one collective as data), ``ledger`` (the record of them).
"""

from zerojax.collectives.insert import Inserter as Inserter
from zerojax.collectives.shard import Shard as Shard
