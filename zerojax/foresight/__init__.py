"""Forecasts of a step's memory and time, and searches for settings that fit.

Start with :func:`zerojax.foresight.costs.forecast`: it compiles the programs of a step for devices
that need not exist, and returns a :class:`zerojax.foresight.forecast.Forecast`. In reading order:

- ``forecast``: the result, with its figures. ``costs``: the measurement of compiled programs.
  ``attribution``: their bytes by kind, such as parameters and activations.
- ``choice``: the settings that decide what fits. ``trials``: forecasts under different choices;
  ``remedies``, ``gathered`` and ``by_value`` search them.
- ``guard``: the check before a step's first run.
- ``devices``: devices by name. ``estimators``: DeepSpeed's formulas, without a compile.
"""
