"""The user's step on shards: traces and checks the step, decides on gathers, and emits it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax

from zerojax.accumulation.lanes import Lanes
from zerojax.accumulation.roles import Roles, roles_of
from zerojax.accumulation.run import MicroBatches, Trace, rows_together
from zerojax.collectives import gather_once
from zerojax.collectives.matrices import with_matrices
from zerojax.collectives.sharded_products import multiplies_shards
from zerojax.devices.mesh import STAGE
from zerojax.graph.rows import RowDimensions
from zerojax.pipeline.program import Pipeline
from zerojax.pipeline.schedule import Schedule
from zerojax.plan import layout
from zerojax.plan.layout import Spec
from zerojax.plan.places import offloads
from zerojax.plan.state_sharding import DTYPES
from zerojax.step.call import Further
from zerojax.step.entering import BodyArrays, enter_rest
from zerojax.step.further_arguments import WithShards, enter_arguments
from zerojax.step.gradient_sender import GradientSender
from zerojax.step.own_update import wanted_specs, with_gradient_norm
from zerojax.step.program import StepSetting
from zerojax.step.view import cast
from zerojax.trace.broadcasts import with_broadcasts_in_loops
from zerojax.trace.chunked_loss import Sizes, with_chunked_losses
from zerojax.trace.dependence import check_late, with_updated_copies
from zerojax.trace.explicit import automatic_update, typed_replicated
from zerojax.trace.late import with_late_weights
from zerojax.trace.loss_scaling import replacements
from zerojax.trace.marks import GRADIENT
from zerojax.trace.ravelled import without_ravels
from zerojax.trace.unused import without_unused_gradients
from zerojax.train_state.state_parts import Parts
from zerojax.xla import hijax, jaxprs
from zerojax.xla.types import AnyJaxpr, PyTree

_NUMBERS = (bool, int, float, complex)


def evaluate_body(
    setting: StepSetting,
    tx: optax.GradientTransformationExtraArgs,
    start: Parts,
    params: BodyArrays,
    batch: PyTree,
    further: Further,
    send: GradientSender | None = None,
) -> tuple[Parts, PyTree]:
    """Returns the state and the results that the user's step computes.

    The step is traced on the global batch, as if all its arrays were stored on the device, and
    checked. Then the trace is run on ``params``, each gathered where the stage requires it,
    micro-batch by micro-batch under accumulation.

    Args:
      setting: The step.
      tx: The optimizer that the user's step sees.
      start: The state that the user's step sees. Its parameters may be shapes.
      params: The compute parameters, from :func:`zerojax.step.entering.enter`.
      batch: Leaves [rows, ...], under accumulation [k, rows, ...].
      further: The step's further arguments.
      send: Sends each gradient to its place; None leaves the gradients to the optimizer.

    Raises:
      ValueError: The step never updates, or too often, or would compute other numbers than under
        plain jit.
      NotImplementedError: The step continues with parameters that are updated later.
    """
    k, inserter, schedule = setting.layout.accumulation, setting.inserter, setting.layout.schedule
    low, name = DTYPES[setting.config.compute_dtype], setting.body.name
    if low is not None and setting.config.auto_cast:
        batch = cast(batch, low)
    whole = batch if k == 1 else rows_together(batch)

    # Trace the step on the global batch, and refuse it if plain jit would have other numbers.
    trace = _tracing(setting, tx, start, further)
    # JAX traces shapes otherwise than the arrays of this program.
    closed, shapes = trace(whole if schedule is None else jax.tree.map(jaxprs.like, whole))
    jaxpr, _ = jaxprs.open_jaxpr(closed)
    setting.body.check(jaxpr, start, shapes[0])
    if offloads(setting.config):
        check_late(jaxpr, start, shapes, name)
    # Gradients that go to host memory are sent where they are produced.
    host = None if send is None else send.host()
    want = wanted_specs(setting.plan, jaxpr, shapes) if host is None else ()
    replace: dict[str, Callable[[PyTree], PyTree]] = {
        **replacements(closed, start.opt_state.opt.loss_scale)
    }
    if send is not None:
        replace[GRADIENT] = send
    # Only now, because the check counts the marks of all gradients.
    closed, trace = without_unused_gradients(closed), _with_used_gradients(trace)
    several = whole if setting.body.function.signature.several and k > 1 else ()
    roles = roles_of(name, start, batch, shapes, several)
    if schedule is not None:
        closed = _pipelined(setting, schedule, trace, closed, batch, roles)
        setting.states.warn_once(schedule.advice)

    # Decide how the parameters that stay gathered are gathered.
    given, kept, dims = _arguments(setting, start, params, batch)
    # On other meshes devices share the tokens of a row, or the vocabulary.
    if k == 1 and setting.explicit is None and inserter.devices == setting.plan.mesh.size:
        sizes = Sizes(inserter.devices, multiplies_shards(inserter))
        rows_of = functools.partial(RowDimensions.of_program, given=dims)
        closed = with_chunked_losses(closed, rows_of, sizes)
    rows = RowDimensions.of_program(closed, dims)
    # Under accumulation each micro-batch's loop would gather the stacks again.
    fill = inserter.overlap and k == 1
    kept = gather_once.decide_kept(closed, given, kept, inserter, rows, fill=fill)

    # Emit the step with its collectives.
    given = gather_once.gather(given, kept, inserter, closed)
    if k > 1:
        outs = _micro_batches(setting, trace, closed, batch, roles, want)(given, replace)
    else:
        outs = inserter(closed, given, replace, want, host, rows)
    _warn_of_formats(setting)
    results: tuple[Parts, PyTree] = jax.tree.map(
        # A result may be a Python number, which no equation computes.
        lambda like, x: jnp.asarray(x, like.dtype) if isinstance(x, _NUMBERS) else x,
        shapes,
        jax.tree.unflatten(jax.tree.structure(shapes), outs),
    )
    return results


def _warn_of_formats(setting: StepSetting) -> None:
    """Warns of arrays that the emitted step sends or multiplies in their own dtype despite the
    config."""
    name, inserter = setting.body.name, setting.inserter
    if sent := ", ".join(dict.fromkeys(inserter.sent_unquantized)):
        setting.states.warn_once(
            f"{name}: zero_quantized_gradients: zerojax cannot tell each device's own part of the "
            f"gradients of {sent}, and sends them in their own dtype"
        )
    if left := ", ".join(sorted(inserter.sent.multiplied - inserter.multiplied)):
        setting.states.warn_once(
            f"{name}: fp8: {left} are multiplied in their own dtype. Products in fp8 are of "
            "matrices, and of stacks of matrices that a loop takes layer by layer"
        )


def _tracing(
    setting: StepSetting,
    tx: optax.GradientTransformationExtraArgs,
    start: Parts,
    further: Further,
) -> Trace:
    """Returns a function that traces the user's step on a batch, from the state and the batch to
    the new state and the results, and returns the shapes of these results too."""
    body, plan, explicit = setting.body, setting.plan, setting.explicit
    # Once, not in each trace: all traces of the step share what is gathered here.
    shards = enter_arguments(setting.inserter, further)

    @functools.wraps(body.function)  # JAX's errors name the user's step, and its file and line
    def step(parts: Parts, batch: PyTree) -> PyTree:
        if explicit is None:
            return body(parts, tx, batch, *further)
        return body(parts, automatic_update(tx), batch, *typed_replicated(further))

    def trace(batch: PyTree) -> tuple[Any, PyTree]:
        closed: AnyJaxpr
        if explicit is None:
            closed, shapes = hijax.trace(step, start, batch)
            closed = with_late_weights(closed, len(jax.tree.leaves(start)))
        else:
            closed, shapes = explicit.trace(step, start, batch, plan)
        closed = with_broadcasts_in_loops(without_ravels(closed))
        if explicit is None and setting.config.compute_grad_norm:
            closed = with_gradient_norm(closed, shapes)
        closed = with_updated_copies(closed, start, shapes)
        if not setting.kind.knows_parameters:
            before = jax.tree.leaves((start.params, start.opt_state, start.step))
            rest = [layout.full(x.spec, len(x.shape)) for x in plan.leaves["rest"]]
            specs = [*(None for _ in before), *rest, *(None for _ in jax.tree.leaves(batch))]
            closed = with_matrices(closed, specs, setting.inserter)
        return WithShards.of(closed, shards), shapes

    return trace


def _arguments(
    setting: StepSetting, start: Parts, params: BodyArrays, batch: PyTree
) -> tuple[list[object], list[gather_once.KeptGather | None], list[int | None]]:
    """Returns the arguments of the step's trace, how each is gathered if it is kept, as far as the
    plan says, and the dimension of the batch's rows in each."""
    rest = enter_rest(setting.inserter, setting.plan, start.rest)
    optimizer, rows = jax.tree.leaves((start.opt_state, start.step)), jax.tree.leaves(batch)
    at = setting.layout.axis if setting.layout.accumulation == 1 else 0
    values = [*params.values, *optimizer, *rest.values, *rows]
    kept = [*params.kept, *(None for _ in optimizer), *rest.kept, *(None for _ in rows)]
    dims = [at if x.ndim > at else None for x in rows]
    return values, kept, [*[None] * (len(values) - len(rows)), *dims]


def _micro_batches(
    setting: StepSetting,
    trace: Trace,
    closed: AnyJaxpr,
    batch: PyTree,
    roles: Roles,
    want: Sequence[Spec | None],
) -> MicroBatches:
    """Splits the step into a part that runs for each micro-batch and a part that runs once."""
    config, inserter, k = setting.config, setting.inserter, setting.layout.accumulation
    sharded = config.stage >= 2
    # A lane's quantized gradients are not sums.
    without_lanes = config.offload_param or (sharded and config.zero_quantized_gradients)
    return MicroBatches(
        trace,
        closed,
        batch,
        roles,
        k,
        setting.layout.leaves.blocks,
        inserter,
        want,
        statistics=config.accumulate_statistics,
        sharded=sharded,
        lanes=None if without_lanes else Lanes.of(setting.plan.mesh, sharded=sharded),
        dtype=DTYPES[config.grad_accum_dtype],
    )


def _with_used_gradients(trace: Trace) -> Trace:
    """Returns a function that traces a step without the gradients that its update does not use."""

    def trace_used(batch: PyTree) -> tuple[AnyJaxpr, PyTree]:
        closed, shapes = trace(batch)
        return without_unused_gradients(closed), shapes

    return trace_used


def _pipelined(
    setting: StepSetting,
    schedule: Schedule,
    trace: Trace,
    closed: AnyJaxpr,
    batch: PyTree,
    roles: Roles,
) -> Any:
    """Replaces the step's loops over layers by pipelines."""
    plan = setting.plan
    # In the order of the arguments: parameters, optimizer state and counter, other state.
    between = [False] * (len(roles.state) - len(plan.compute) - len(roles.rest))
    first, rest = (
        [bool(leaf.spec) and STAGE in layout.axes(leaf.spec[0]) for leaf in leaves]
        for leaves in (plan.compute, plan.leaves["rest"])
    )
    dtype = DTYPES[setting.config.grad_accum_dtype]
    stages = [*first, *between, *rest]
    pipeline = Pipeline(closed, trace, batch, roles, stages, schedule, dtype)
    return WithShards(*pipeline.traced())
