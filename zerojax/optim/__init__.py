"""Optimizers and schedules by DeepSpeed's names, and the features that wrap any optimizer.

Start with :func:`zerojax.optim.named.named_optimizer`, which builds the optax transformation that
a config names, and :func:`zerojax.optim.wrap.wrap`, which adds loss scale, skipping, clipping and
telemetry to any optax transformation. In reading order:

- ``named``, with its rules in ``scaling`` and ``muon``, ``decay`` (the mask of weight decay),
  ``schedules``.
- ``over_matrices``: functions of one matrix, of which each device applies some.
- ``moments``: Adam's moments stored in bfloat16.
- ``wrap``, with ``loss_scale``, ``norm`` and ``frozen`` (gradients that an optimizer ignores).
- ``telemetry``: the counters and figures of a wrapped state.
"""
