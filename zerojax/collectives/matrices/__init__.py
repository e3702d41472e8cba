"""Optimizers that compute with matrices: each device computes with some of the matrices.

Muon's Newton-Schulz iteration and Shampoo's roots read a matrix in full, while ZeRO shards every
matrix over the devices. Gathered, each matrix would be computed with on every device. Instead,
equal functions of matrices of one shape run on a stack of the matrices, of which each device has
some: one all-to-all brings the matrices there, and another brings the results to the shards.

- ``find``: the functions of matrices in an optimizer's update.
- ``programs``, ``entry``: the program for one matrix, from the program for a stack of them.
- ``groups``, ``exchange``: equal functions, and the all-to-alls of their matrices.
- ``distribute``: the update with its groups.
"""

from zerojax.collectives.matrices.distribute import MatrixUpdate as MatrixUpdate
