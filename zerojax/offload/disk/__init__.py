"""Arrays of a state in files on a disk.

A ``jax.Array``, or chunks of one, come in; handles that a state holds in place of the array come
out, and chunks that are read in the background.

- ``array``, to be read first: the storage of one array (``DiskLeaf``), and the handle to its
  current value (``DiskArray``).
- ``slices``: the shards and chunks of an array. A chunk is stored as one block of the store.
- ``store``: blocks of bytes by key, read and written by threads. ``folder``: the folder of a run.
  ``file``: one file, and its checksum.
"""
