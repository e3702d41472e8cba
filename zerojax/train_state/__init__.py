"""A user's training state, split into the parts that the rest of zerojax works on, and rebuilt.

The arguments of a step that are its state come in: a flax ``TrainState``, NNX objects, or any
pytrees. An ``OpenedState`` comes out: the arrays as ``Parts``, and functions that split and rebuild
states of this kind. :func:`zerojax.placement.states.split_state` chooses the module.

- ``state_parts``, to be read first: ``Parts`` and ``OpenedState``.
- ``linen``: a ``TrainState``. ``nnx``: NNX objects. ``pytree``: any pytree.
- ``nnx_graph``: the graph of NNX objects, remembered to compare a later call with it.
- ``bound``: the optimizer of a state that the user sees, with optax's own ``opt_state`` and
  zerojax's numbers beside it.
- ``results``: the new state among the results of a step.
"""
