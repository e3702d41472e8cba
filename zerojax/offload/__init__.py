"""State in host memory or on disk, and its update, which streams through the devices.

An optimizer's update as a function of flat arrays, with the place of each array, comes in;
``update.Update``, to be read first, replaces the arrays sub-group by sub-group.

- ``separate``: the update split into a prelude of scalars and clusters of arrays.
- ``groups``: clusters, or rows of clusters, packed into the groups that are updated in turn.
- ``stream``: the programs that update one group and bring the next one in.
- ``compute_copies``: parameters in the compute dtype, beside parameters that rest elsewhere.
- ``disk``: arrays in files. ``disk_params``: parameters that a compiled program reads from them.
- ``fetch``: a state copied to the devices. ``activations``: activations in host memory.
"""
