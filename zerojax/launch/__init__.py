"""Processes of a job, placed on machines and supervised; no module here imports JAX.

``zerojax/cli/launch.py`` parses the options and calls this room; start with
:func:`zerojax.launch.local.run`. A ``Job`` and a ``Node`` come in; processes with the variables
that :mod:`zerojax.distributed.launched` reads are started, and an exit status comes out. In reading
order:

- ``job``, ``hosts``, ``gpus``, ``accelerate``: the script, the machines, the settings of a file.
- ``local``: the processes of one machine, restarted if allowed. ``group``: processes that start
  and end together; ``relay``: their output; ``descent``: their cleanup; ``failure``: the first
  failure. ``script``: what each process runs.
- ``mpi``, ``slurm``, ``kubernetes``: several machines.
"""
