"""A user's state, wrapped, planned, and placed on the devices, in host memory or on disk.

A state, or a function that creates one, comes in; the parts of a placed state and their plan come
out. ``states.States``, to be read first, opens, plans and creates states.

- ``state_placer``: the arrays of an existing state, placed for a step or an evaluation.
- ``placer``: single arrays, put into the places of their leaves; the disks.
- ``checks``: what is refused before.
"""
