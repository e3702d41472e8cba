"""Features that no hardware has proven yet: tested, importable by name, and free to go.

``CONTRIBUTING.md`` has the rule by which a feature enters, leaves or is deleted. The rooms below
know none of them: :mod:`zerojax.experimental.choice` picks by the keys of the config, and
``zerojax.zero`` hands the choice down.

A config comes in; an ``Exchange``, a ``ProgramReader`` or rules of optimizers come out. Read
``choice`` first.

- ``loco``: quantized gradients with error feedback.
- ``one_bit``, ``one_bit_lamb``: the rules of the 1-bit optimizers. ``one_bit_momentum``: their
  exchange of gradients, by ``one_bit_mean``.
- ``disk_params``: parameters that a program reads from the disk while it runs.
- ``top_k``: an optax transformation that users import; no key of the config asks for it.
"""
