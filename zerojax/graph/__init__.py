"""The view of a jaxpr that all analyses share: producers, users, regions, facts.

An open jaxpr comes in; answers about its equations and values come out. No module of this room
changes a program.

- ``regions``, to be read first: the programs inside an equation (a call, a loop, a branch), and the
  correspondence of their values to its operands and results.
- ``def_use``: the producer and the users of each value of one program, and the equations that
  compute some values, by ``graph_of(jaxpr)``.
- ``analysis``: facts of values, by one rule per primitive and through all regions. ``reach``: two
  such analyses.
- ``search``: the equations at any depth. ``primitives``: families of primitives that rules treat
  alike.
- ``cache``: results that are kept for as long as their jaxpr exists.
"""
