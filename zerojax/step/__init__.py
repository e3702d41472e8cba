"""A step from its decorator to its compiled programs. In the order of reading:

- ``step``: the decorated call; ``decorated`` is what it shares with an evaluated function.
- ``arguments``, ``call``, ``jitted``: which argument is the state, the batch, static, or more.
- ``batch``: where the batch goes. ``last``: whether the state is the one that the last step left.
- ``program``: what a step is compiled from, and the protocol of the two compiled steps.
- ``resident``: the state lies on the devices; one program.
- ``body``, ``view``: the user's function, and the optimizer that it sees.
- ``entering``, ``evaluate_body``: the arrays of the state; the function, compiled for shards.
- ``offloaded``, ``gradient_program``, ``optimizer_update``: the state lies elsewhere; several
  programs.
- ``per_device``: a kernel within a step.
"""
