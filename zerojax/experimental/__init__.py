"""Features that no hardware has proven yet: tested, importable by name, and free to go.

``CONTRIBUTING.md`` has the rule by which a feature enters, leaves or is deleted. The rooms below
know none of them: :mod:`zerojax.experimental.choice` picks by the keys of the config, and
``zerojax.zero`` hands the choice down.
"""
