"""Access to jaxprs, and to parts of JAX and XLA that have no public interface.

Functions and jaxprs come in; jaxprs, lowered programs and compiler options come out. Nothing in
this room knows stages or plans. In reading order:

- ``types``: the types of pytrees, equations and jaxprs in annotations.
- ``jaxprs``: contents of equations and jaxprs; :func:`zerojax.xla.jaxprs.evaluate` runs one.
- ``rewriter``: :class:`zerojax.xla.rewriter.Rewriter`, which rewrites jaxprs and those inside them
  by a rule for one equation.
- ``hijax``: :func:`zerojax.xla.hijax.trace`, the traced function in terms that all rules know.
- ``unused``: arguments and equations that no result needs.
- ``compat``: differences between versions of jax, and private names of JAX and Python.
- ``compiler``: options for XLA by mesh. ``lowered``: names of programs and of their arguments.
- ``lines``: the user's line of an equation. ``garbage``: Python's garbage collector during a trace.
"""
