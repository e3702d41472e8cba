"""The processes of one job: detected, joined, compared, watched, and stopped together.

Start with :func:`zerojax.distributed.join.init_distributed`. The environment variables of a
launcher come in; the result is a process that JAX has joined to the others, or a ``LaunchError``
in all of them. In reading order:

- ``launched``, ``ray_train``, ``addresses``, ``gpus``: this process as its launcher describes it.
- ``roll_call``, ``preflight``: records of all processes, compared before JAX joins them.
- ``failure``: files for the launcher, and the exit on an exception. ``log``: messages once.
- ``coordinator``: one thread per process, and the texts that processes share. On top of it:
  ``exchange``, ``equality`` and ``turns`` let processes wait for each other; ``lockstep`` and
  ``watchdog`` end a job whose processes differ or stall.
"""
