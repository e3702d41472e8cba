"""Meshes of devices that exist or not, the rows of each process, and the speeds of devices.

Start with :func:`zerojax.devices.mesh.mesh` and :func:`zerojax.devices.topology.topology`, which
return a mesh of existing or of absent devices. In reading order:

- ``mesh``: creation of meshes, and the roles of their axes: shard, replica, sequence, other.
- ``arranged``: a mesh in the pipeline stages and replica groups of a config.
- ``topology``: absent devices, from the descriptions in ``device_kinds.json``.
- ``rows``: the rows of a global batch that a process feeds, and their assembly.
- ``network``, ``rates``: nodes, and the speeds of each kind of device, for forecasts.
"""
