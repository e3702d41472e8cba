"""Benchmarks: one question a file, answered by ``python -m benchmarks.NAME``.

Start with :mod:`benchmarks.frame`: a function under ``@question`` takes the command's options and
returns an ``Answer`` of figures, tables and missed limits, which the frame prints and, with
``--record``, writes to ``benchmarks/records/``. Files without ``@question`` are shared:

- ``report``: tables and JSON. ``plain``: a step in plain ``jax.jit``. ``separate``, ``supervised``:
  measurements in other processes, and launched runs.
- ``compiled``, ``measure``, ``offload_programs``: a step compiled for absent GPUs, and its costs;
  ``lifetimes`` and ``overlap`` read its schedule.
- ``published_*``: tables of others, recomputed. ``kernel_*``: the fused kernels.

:mod:`benchmarks.gpu_day` runs the measurements that need a GPU.
"""
