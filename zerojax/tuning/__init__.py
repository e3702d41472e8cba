"""The search for the settings that are predicted to train fastest: ``zerojax.fit``.

Start with :func:`zerojax.tuning.fit.fit`. A config that leaves settings open and a model come in;
a :class:`zerojax.tuning.fit.Fitted` with the fastest config and a ranking comes out. In reading
order:

- ``space``: the settings that a config leaves open. ``search``: the choices to compile, in order.
- ``workload``: a training step to plan, also from a bare language model; ``tasks``: named ones.
- ``study``: the trials of a model on a mesh, also for ``zerojax plan``. ``cache``: measurements on
  disk.
"""
