"""The traced step before its collectives are inserted: values found again in it, and checks of it.

The jaxpr of a user's step comes in; variables, a rewritten jaxpr, or an error for the user come
out.

- ``marks``, to be read first: named identities by which the trace shows gradients and losses.
- ``updates``: the gradients of a step without marks, found by its dataflow. ``unused``: gradients
  that the update does not use, removed.
- ``loss_scaling``: the loss scale in place of its mark. ``dependence``: the check that nothing in a
  step needs the new parameters, for updates that follow the step.
- ``explicit``: the conversion of a step with explicit mesh axes.
- ``gradients`` and ``tiled`` are functions that users call in their steps: ``value_and_grad``,
  ``grad``, ``weighted_mean`` and ``tiled``.
"""
