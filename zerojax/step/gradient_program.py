"""The program that makes the gradients of a step, and what is left of the step beside them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from zerojax.accumulation.roles import roles_of
from zerojax.accumulation.run import MicroBatches, rows_together
from zerojax.collectives import Inserter, Shard
from zerojax.collectives.host import Host, fetched, on_host, sent
from zerojax.monitor.after_step import Signals
from zerojax.offload.activations import smallest_away
from zerojax.offload.disk.params import DiskParam, ParamReader
from zerojax.offload.separate import Separated
from zerojax.optim.norm import square_sums
from zerojax.optim.wrap import ZeroOptState, choose, unscaled
from zerojax.plan.places import DEVICE, DISK
from zerojax.plan.plan import DTYPES, Plan, layout
from zerojax.step.body import Body, View, cast, collecting, constrainer
from zerojax.step.entering import entering
from zerojax.step.static_arguments import Static, join
from zerojax.trace.dependence import check_late
from zerojax.trace.loss_scaling import replacements
from zerojax.trace.marks import GRADIENT
from zerojax.train_state.state_parts import Parts
from zerojax.xla import compat
from zerojax.xla.compiler import streaming


class Collected(NamedTuple):
    """What the program makes.

    Attributes:
      grads: the gradients, a list in the order of the parameters; where those lie in host memory
        for the step, there too.
      scalars, shared: the prelude of the update, see :class:`Separated`.
      rest, step, out: of the user's step.
      done: bool [], the gradients are finite, so that the update is to be made.
      signals: for :class:`zerojax.monitor.after_step.Watch`.
    """

    grads: list[Any]
    scalars: list[Any]
    shared: list[Any]
    rest: Any
    step: Any
    out: Any
    done: Any
    signals: Signals


class Collect:
    """Compiles the user's step with an optimizer that only collects.

    Args:
      body: the user's step.
      plan: of the state.
      accumulation: micro-batches in a step.
      dtypes: of the gradients.
      trees: of the parameters and of the optimizer state.
      separated: the update.
      signals: what the host looks at afterwards, of the optimizer state without its arrays and
        of the results.
    """

    def __init__(
        self,
        body: Body,
        plan: Plan,
        accumulation: int,
        dtypes: Sequence[Any],
        trees: tuple[Any, Any],
        separated: Separated,
        signals: Callable[[ZeroOptState, Any], Signals],
    ) -> None:
        self.body, self.plan, self.config = body, plan, plan.config
        self.accumulation, self.dtypes, self.trees = accumulation, dtypes, trees
        self.separated, self.signals = separated, signals
        mesh = plan.lowering_mesh
        self.cut = constrainer(plan.on_device(plan.grads if accumulation > 1 else plan.params))
        self.inserter = Inserter(
            mesh, plan.axis, keep=self.config.stage < 3, away=smallest_away(self.config)
        )
        shardings = plan.shardings()
        grads = [plan.sharding(leaf) for leaf in plan.gradients()]
        param = self.config.offload_param
        self.reader = ParamReader(2 if param is None else param.buffer_count)
        self.jitted = jax.jit(
            self._run,
            static_argnums=6,
            out_shardings=(grads, None, None, shardings.rest, shardings.step, None, None, None),
            compiler_options=streaming(plan.mesh),
        )

    def given(self, compute: Sequence[Any]) -> list[Any]:
        """The compute parameters that the program takes; it reads the others from the disk."""
        pairs = list(zip(compute, self.plan.compute, strict=True))
        self.reader.use({i: x for i, (x, leaf) in enumerate(pairs) if leaf.place == DISK})
        return [x for x, leaf in pairs if leaf.place != DISK]

    def __call__(self, *arguments: Any) -> Collected:
        """Runs it on the arguments of :meth:`_run`."""
        return Collected(*self.jitted(*arguments))

    def _run(
        self,
        compute: list[Any],
        light: list[Any],
        rest: Any,
        step: Any,
        batch: Any,
        arrays: list[Any],
        static: Static,
    ) -> tuple[Any, ...]:
        """What :class:`Collected` says. ``light`` is the optimizer state of one number a leaf."""
        config = self.config
        if config.compute_dtype is not None and config.auto_cast:
            batch = cast(batch, DTYPES[config.compute_dtype])
        opt = self._state(light)
        args, kwargs = join(arrays, static)
        noted: list[jax.Array] = []

        def body(parts: Parts, batch: Any) -> Any:
            return self.body(parts, collecting(self.cut), batch, args, kwargs)

        there = iter(compute)
        all_ = [
            DiskParam(self.reader, i, leaf.shape, leaf.dtype, self.plan.sharding(leaf))
            if leaf.place == DISK
            else next(there)
            for i, leaf in enumerate(self.plan.compute)
        ]
        shards = entering(self.inserter, all_, self.plan.compute)  # not in each micro-batch
        params = jax.tree.unflatten(self.trees[0], all_)
        start = Parts(params, View(opt=opt), step, rest)
        empty = self._zeros(self.dtypes)
        still = self._zeros([leaf.dtype for leaf in self.plan.compute])
        view = View(opt=opt, grads=empty, updates=still)
        made, out = self._evaluate(body, start._replace(opt_state=view), shards, batch, noted)
        grads, sums = jax.tree.leaves(made.opt_state.grads), noted
        after, counted = made.rest, made.step
        if self.accumulation > 1:
            grads = [
                self.inserter.constrain(g, layout.full(leaf.spec, g.ndim))
                for g, leaf in zip(grads, self.plan.compute, strict=True)
            ]
            sums = [square_sums(unscaled(g, opt.loss_scale)) for g in grads]
        state = iter(light)
        known = [None if heavy else next(state) for heavy in self.plan.streamed]
        scalars, shared = self.separated.prelude([*grads, *[None] * len(grads), *known, *sums])
        for at, x in zip(self.separated.shared, shared, strict=True):
            known[at - len(grads)] = x
        new = jax.tree.unflatten(self.trees[1], known)
        done = jnp.asarray(True)
        if config.skips_overflow:
            done = new.skipped == opt.skipped
            after = choose(done, after, rest)
        return grads, scalars, shared, after, counted, out, done, self.signals(new, out)

    def _state(self, light: Sequence[Any]) -> Any:
        """The optimizer state without its arrays."""
        left = iter(light)
        known = [None if heavy else next(left) for heavy in self.plan.streamed]
        return jax.tree.unflatten(self.trees[1], known)

    def _zeros(self, dtypes: Sequence[Any]) -> Any:
        leaves = zip(self.plan.compute, dtypes, strict=True)
        return jax.tree.unflatten(self.trees[0], [jnp.zeros(x.shape, d) for x, d in leaves])

    def _evaluate(
        self,
        body: Callable[..., Any],
        parts: Parts,
        shards: Sequence[Any],
        batch: Any,
        noted: list[jax.Array],
    ) -> tuple[Parts, Any]:
        """Runs the body, each parameter brought in and made whole where the stage has it."""
        # The body itself knows nothing of memories: it is traced as if all were on the device.
        shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), parts.params)
        abstract = parts._replace(params=shapes)
        k = self.accumulation
        trace = functools.partial(self.body.trace, body, abstract)
        closed, shape = trace(batch if k == 1 else rows_together(batch))
        jaxpr = compat.open_jaxpr(closed)[0]
        self.body.check(jaxpr, len(self.plan.compute))
        check_late(jaxpr, abstract, shape, self.body.name)
        opt = parts.opt_state.opt
        replace: dict[str, Any] = dict(replacements(closed, opt.loss_scale))
        others = [*shards, *jax.tree.leaves((parts._replace(params=None), batch))]
        self.inserter.host = None
        if k == 1:
            noted.clear()
            replace[GRADIENT] = lambda g: self._leaving(g, opt, noted)
            if self.config.offload_param is not None:
                self.inserter.host = Host(
                    self.config.stage3_param_persistence_threshold,
                    lambda g: square_sums(unscaled(g, opt.loss_scale)),
                )
            outs = self.inserter(closed, others, replace)
        else:
            outs = MicroBatches(
                trace,
                closed,
                batch,
                roles_of(self.body.name, abstract, batch, shape),
                k,
                self.inserter,
                sharded=self.config.stage >= 2,
                dtype=DTYPES[self.config.grad_accum_dtype],
            )(others, replace)
        return jax.tree.unflatten(jax.tree.structure(shape), outs)

    def _leaving(self, g: Any, opt: Any, noted: list[jax.Array]) -> Any:
        """Takes note of a gradient's square sums, and sends it where it is to lie."""
        leaf = self.plan.compute[len(noted)]
        if on_host(g) and leaf.place == DEVICE:
            g = fetched(g.value)
        if on_host(g):
            noted.append(g.sums)
            return g
        spec = layout.full(leaf.spec, g.ndim)
        g = self.inserter.constrain(g, spec)
        noted.append(square_sums(unscaled(g, opt.loss_scale)))
        if leaf.place == DEVICE:
            return g
        return Shard(sent(g), spec, host=True, sums=noted[-1])
