"""A step from its decorator to its compiled programs.

The user's function and its arguments come in; the new state and the function's other results come
out. In reading order:

- ``train_step``: the decorated call; ``decorated``: the base class shared with an evaluated
  function.
- ``arguments``, ``call``, ``jitted``: what each argument is (state, batch, static, further).
  ``find_state``, ``find_optimizer``: the state among the arguments and the optimizer of a step, if
  the user names neither. ``further_arguments``: arguments that are sharded like parameters.
- ``batch``, ``batch_placer``: the check and the placement of the batch. ``last``: recognition of
  the state that the last step returned.
- ``program``: the settings of a step, and the protocol of the two compiled steps.
- ``resident``: the state is stored on the devices; one program.
- ``body``, ``view``: the user's function, and the optimizer that it sees. ``own_update``: gradients
  that reach no wrapped optimizer.
- ``entering``, ``evaluate_body``: the arrays of the state; the function, emitted for shards.
- ``offloaded``, ``gradient_sender``, ``optimizer_update``: the state is stored elsewhere; several
  programs.
- ``collectives_table``: the table of a step's collectives.
- ``sequence``, ``per_device``: rows sharded along their tokens, and a kernel within a step, both
  for the authors of models.
"""
