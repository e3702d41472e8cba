"""The plan: the sharding, the place and the reason for every array of a state.

The shapes of a state's parts, the user's specs, a mesh and a config come in; a ``Plan`` comes out.

- ``rule``, to be read first: the sharding of one array. ``layout``: partition specs as tuples.
- ``planning``: ``make_plan`` applies the rule to all arrays.
- ``state_sharding``: ``Plan``. ``leaf``: one array of the plan. ``table``: text, in full and short.
- ``places``: device, host memory or disk. ``live``: the parameters that stay gathered at stage 3.
  ``quantized``: the arrays that are sent in low-bit blocks.
- ``stacks``: the stacks of layers that pipeline stages share.
- ``stored``: arrays that are padded, or sharded over parts of an axis, as the user sees them.
"""
