"""Fused kernels for NVIDIA GPUs, written with Pallas (Mosaic GPU). Knows nothing of zerojax.

Empty for now: each kernel will be a folder of its own with ``api.py``, ``reference.py`` and
its implementation, and is added where it beats what XLA makes of plain JAX.
"""
