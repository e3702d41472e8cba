"""The collectives of a step, and their places in the program.

A traced step, its arguments (some of them a ``Shard``) and the target specs of its gradients come
in; ``Inserter`` decides, and then emits the step equation by equation, and its results come out as
arrays of the program that is being traced. Read ``insert`` and ``emit`` first, then ``shard`` and
``gathering``.

- Values: ``shard`` (parameters as shards, gradients reduced to shards), ``partial_sums`` (gradients
  not yet summed over the devices), ``host`` (arrays in host memory).
- Sends: ``gathering`` (all-gathers, reduce-scatters, the scope of a gather), ``reduction``,
  ``quantization``.
- Decisions at the entry of a step: ``gather_once``, with ``uses`` (the variables that a program
  needs unsharded, and their dtypes).
- Decisions before anything is emitted, by the ``Decider`` in ``insert``: ``decide``, from
  ``target_specs`` (those of gradients, traced back to the equations that compute them),
  ``residuals``, ``uses``, ``prefetch`` (layers gathered one iteration ahead), ``deferred``
  (gradients reduced one iteration later) and ``carried_sums`` (gradients reduced after the loop).
- Emission by these decisions: ``emit``; ``scans`` runs a loop, with ``stacks``.
- Rules for one kind of equation: ``propagate`` (specs through moves), ``gradients``, ``lookups``,
  ``sharded_products`` (products with weights that stay sharded), ``own_rows``, ``narrow``.
- The optimizer's update: ``matrices`` (each device computes with some of the matrices).
- Order of the program, for XLA: ``order``.
- Reports: ``decisions`` (one collective as data), ``ledger`` (the record of them).
"""

from zerojax.collectives.insert import Inserter as Inserter
from zerojax.collectives.shard import Shard as Shard
