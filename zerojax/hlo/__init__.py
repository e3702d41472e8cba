"""Analyses of compiled programs, from the text that XLA prints and its dump of buffers.

Start with :func:`zerojax.hlo.program.parse`, which turns ``compiled.as_text()`` into instructions;
the other files take its result, or the text. Bytes, FLOPs and seconds of one device come out;
:mod:`zerojax.foresight` turns them into forecasts. In reading order:

- ``program``: computations, instructions and trip counts of loops.
- ``traffic``: the collectives, with their ``groups``; ``links``: their bytes by link.
- ``transfers``: copies between device and host memory.
- ``work``: FLOPs and bytes of instructions; ``timeline``: the predicted time of the program.
- ``provenance``: values that are arguments, only moved. ``assignment``: buffers at the peak.
  ``rematerialised``: values that XLA computes again.
"""
