"""A step from its decorator to its compiled programs. In reading order:

- ``step``: the decorated call; ``decorated``: the base class shared with an evaluated function.
- ``arguments``, ``call``, ``jitted``: the roles of the arguments (state, batch, static, further).
- ``batch``: the placement of the batch. ``last``: recognition of the state that a step returned.
- ``program``: the settings of a step, and the protocol of the two compiled steps.
- ``resident``: the state is stored on the devices; one program.
- ``body``, ``view``: the user's function, and the optimizer that it sees.
- ``entering``, ``evaluate_body``: the arrays of the state; the function, emitted for shards.
- ``offloaded``, ``gradient_program``, ``optimizer_update``: the state is stored elsewhere; several
  programs.
- ``per_device``: a kernel within a step.
"""
