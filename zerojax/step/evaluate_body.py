"""The user's step, traced on whole parameters and run on sharded ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax

from zerojax.accumulation.lanes import Lanes
from zerojax.accumulation.own_sums import Reducer
from zerojax.accumulation.roles import roles_of
from zerojax.accumulation.run import MicroBatches, rows_together
from zerojax.collectives import Inserter, Shard, filled, moved_stacks
from zerojax.collectives.error_feedback import ErrorFeedback
from zerojax.collectives.host import Host, unpadded
from zerojax.collectives.one_bit import OneBitMomentum
from zerojax.collectives.rounding import round_in_advance
from zerojax.collectives.shard import Gathering
from zerojax.distributed import log
from zerojax.offload.disk.params import DiskParam, ParamReader
from zerojax.optim.one_bit import one_bit_state, sending
from zerojax.optim.wrap import ZeroOptState, choose
from zerojax.plan.error_feedback import key_of
from zerojax.plan.places import DEVICE, DISK, offloads
from zerojax.plan.plan import DTYPES, Leaf, Plan, layout
from zerojax.step.call import join
from zerojax.step.extra_state import wanted_specs
from zerojax.step.further_arguments import FurtherArguments, WithShards, enter_arguments
from zerojax.step.program import StepSetting
from zerojax.step.ragged_products import warn_of_ragged_products
from zerojax.step.view import cast
from zerojax.trace.dependence import check_late
from zerojax.trace.loss_scaling import replacements
from zerojax.trace.unused import without_unused_gradients
from zerojax.train_state.state_parts import Parts
from zerojax.xla import jaxprs


def evaluate_body(
    setting: StepSetting,
    tx: Any,
    start: Parts,
    params: Sequence[Any],
    batch: Any,
    arrays: list[Any],
    further: FurtherArguments,
    *,
    replace: Mapping[str, Any] | None = None,
    host: Host | None = None,
) -> tuple[Parts, Any]:
    """The state and the results that the user's step makes.

    The step is traced on the whole batch, as if all its arrays lay on the device, and checked.
    Then the trace is run on ``params``, each made whole where the stage has it, micro-batch by
    micro-batch under accumulation.

    Args:
      setting: The step.
      tx: The optimizer that the user's step sees.
      start: The state that the user's step sees. Its parameters may be shapes.
      params: The compute parameters, as :func:`enter` makes them.
      batch: Leaves [rows, ...], under accumulation [k, rows, ...].
      arrays, further: The step's further arguments, see :class:`StepSetting`.
      replace, host: For the inserter, in a step without accumulation.

    Raises:
      ValueError: The step updates never or too often, or would compute other numbers.
      NotImplementedError: The step goes on with parameters that are updated later.
    """
    config, body, k = setting.config, setting.body, setting.layout.accumulation
    low = DTYPES[config.compute_dtype]
    if low is not None and config.auto_cast:
        batch = cast(batch, low)
    args, kwargs = join(arrays, further.static)
    shards = enter_arguments(setting.inserter, arrays, further.specs)

    def trace(batch: Any) -> tuple[Any, Any]:
        closed, shapes = body.trace(
            lambda parts, batch: body(parts, tx, batch, args, kwargs), start, batch
        )
        return WithShards.of(closed, shards), shapes

    closed, shapes = trace(batch if k == 1 else rows_together(batch))
    jaxpr = jaxprs.open_jaxpr(closed)[0]
    body.check(jaxpr, len(params))
    warn_of_ragged_products(body.name, jaxpr, setting.layout.world)
    if offloads(config):
        check_late(jaxpr, start, shapes, body.name)
    replace = {**replacements(closed, start.opt_state.opt.loss_scale), **(replace or {})}
    closed = without_unused_gradients(closed)
    others = jax.tree.leaves((start.opt_state, start.step))
    rest = enter_rest(setting.inserter, setting.plan, start.rest)
    given = [*params, *others, *rest, *jax.tree.leaves(batch)]
    given = round_in_advance(closed, given, setting.inserter)
    feedback = _error_feedback(setting, start)
    if k == 1 and feedback is not None:
        batch = jax.tree.map(lambda x: x[None] if x.ndim else x, batch)
        given[-len(jax.tree.leaves(batch)) :] = jax.tree.leaves(batch)
    elif k == 1 and setting.inserter.overlap:
        given = filled.defer(closed, given, setting.inserter)
    given = moved_stacks.move(closed, given, setting.inserter)
    # What is wanted as a shard leaves for host memory there, where the parameters' gradients do.
    want = wanted_specs(setting.plan, jaxpr, shapes) if host is None else ()
    if k == 1 and feedback is None:
        rows = {x.shape[0] for x in jax.tree.leaves(batch) if x.shape}
        outs = setting.inserter(
            closed, given, replace, want, host, rows.pop() if len(rows) == 1 else None
        )
    else:

        def trace_used(batch: Any) -> tuple[Any, Any]:
            closed, shapes = trace(batch)
            return without_unused_gradients(closed), shapes

        sharded = config.stage >= 2 and feedback is None
        # Quantized gradients are no sums of a lane's own.
        alone = config.offload_param or (sharded and config.zero_quantized_gradients)
        micro_batches = MicroBatches(
            trace_used,
            closed,
            batch,
            roles_of(body.name, start, batch, shapes),
            k,
            setting.layout.leaves.blocks if k > 1 else 1,
            setting.inserter,
            want,
            sharded=sharded,
            lanes=None if alone else Lanes.of(setting.plan.mesh, sharded=sharded),
            dtype=DTYPES[config.grad_accum_dtype],
            feedback=feedback,
        )
        outs = micro_batches(given, replace)
    if setting.inserter.as_they_are:
        names = ", ".join(
            f"{name} {shape}" for name, shape in dict.fromkeys(setting.inserter.as_they_are)
        )
        log.warning(
            "%s: zero_quantized_gradients: each device's own part of these gradients is not known, "
            "so that they are reduced as they are: %s.",
            body.name,
            names,
        )
        setting.inserter.as_they_are.clear()
    made = jax.tree.unflatten(jax.tree.structure(shapes), outs)
    return made if feedback is None else _with_errors(made, feedback)


def _error_feedback(setting: StepSetting, start: Parts) -> Reducer | None:
    """The errors that a step's gradients, or momenta, are sent with; None where it has none."""
    config, opt = setting.config, start.opt_state.opt
    loco = config.zeropp_loco_param
    if not jax.tree.leaves(opt.error):
        return None
    structure: Any = jax.tree.structure(start.params)
    errors = structure.flatten_up_to(opt.error)
    scale = None if opt.loss_scale is None else opt.loss_scale.scale
    if loco is not None:
        return ErrorFeedback(loco, setting.inserter, errors, opt.steps - opt.skipped, scale)
    state, key = one_bit_state(opt.inner), key_of(config)
    assert state is not None
    assert config.optimizer is not None
    assert key is not None
    how = sending(state, config.optimizer.with_defaults())
    return OneBitMomentum(setting.inserter, errors, state, how, scale, key)


def _with_errors(made: tuple[Parts, Any], feedback: Reducer) -> tuple[Parts, Any]:
    """What a step makes, with the errors that its gradients have left."""
    parts, out = made
    view = parts.opt_state
    error = jax.tree.unflatten(jax.tree.structure(parts.params), feedback.after)
    view = view._replace(opt=view.opt._replace(error=error))
    return parts._replace(opt_state=view), out


def enter(
    inserter: Inserter,
    plan: Plan,
    leaves: Sequence[Leaf],
    values: Sequence[Any],
    reader: ParamReader | None = None,
    *,
    by_partition: bool = True,
) -> list[Any]:
    """What the inserter is given of a state's arrays, each from where the plan has it.

    What is gathered once is gathered here: at stages 1 and 2 everything, at stage 3 small arrays,
    those that stay gathered over an update, and secondary shards (hpZ).

    Args:
      inserter: Runs the body.
      plan: PartitionSpec and place of every leaf.
      leaves: The arrays' leaves in the plan.
      values: The arrays. None for one that lies on disk, and for one that the body does not use.
      reader: Reads arrays from the disk, by their position in ``leaves``.
      by_partition: Whether they have secondary shards (hpZ).
    """
    entered: list[Any] = []
    quantized = plan.quantized.paths
    for i, (x, leaf) in enumerate(zip(values, leaves, strict=True)):
        spec, away = layout.full(leaf.spec, len(leaf.shape)), leaf.place != DEVICE
        if leaf.place == DISK:
            assert reader is not None
            x = DiskParam(reader, i, leaf.padded, leaf.dtype, plan.sharding(leaf))
        if away and x is not None:
            x = unpadded(x, leaf.shape)
        cut = away or (leaf.sharded and x is not None)
        secondary = None
        if by_partition and not away and not inserter.share:
            secondary = plan.secondary_spec(leaf)
        if secondary is not None and x is not None:
            x = inserter.secondary(x, spec, secondary, quantized=leaf.path in quantized)
            spec = secondary
        few = leaf.path in quantized
        how = Gathering(host=away, quantized=few)
        entered.append(Shard(x, spec, gathering=how) if cut else x)
    stay = plan.live.paths if not inserter.share else ()  # where one gather serves all uses anyway
    live = [i for i, leaf in enumerate(leaves) if leaf.path in stay]
    return [
        x if whole is None else x.with_copy(whole)
        for x, whole in zip(entered, inserter.in_advance(entered, live), strict=True)
    ]


def enter_rest(inserter: Inserter, plan: Plan, rest: Mapping[str, Any]) -> list[Any]:
    """The same of the state beside the parameters, in its order.

    Small arrays are gathered field by field: those of a field that is not used whole, an average
    for one, are not gathered.
    """
    entered: list[Any] = []
    for _, field in sorted(rest.items()):
        values, first = jax.tree.leaves(field), len(entered)
        leaves = plan.leaves["rest"][first : first + len(values)]
        entered += enter(inserter, plan, leaves, values, by_partition=False)
    return entered


def was_done(setting: StepSetting, before: ZeroOptState, after: ZeroOptState) -> jax.Array | None:
    """bool [], whether the update was made; None where no step is skipped."""
    return after.skipped == before.skipped if setting.config.skips_overflow else None


def unless_skipped(done: jax.Array | None, after: Any, before: Any) -> Any:
    """``after`` of a step that was done, ``before`` of one that was skipped."""
    return after if done is None else choose(done, after, before)
