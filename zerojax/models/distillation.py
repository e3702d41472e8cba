"""The loss of knowledge distillation: a student learns from the logits of a teacher.

Source: Hinton, Vinyals and Dean 2015, "Distilling the Knowledge in a Neural Network"
(https://arxiv.org/abs/1503.02531), section 2.
"""

import jax
import jax.numpy as jnp
import optax

from zerojax.models.loss import cross_entropy, widen


def distillation_loss(
    student_logits: jax.Array,
    teacher_logits: jax.Array,
    targets: jax.Array | None = None,
    *,
    temperature: float = 2.0,
    hard_weight: float = 0.5,
) -> jax.Array:
    r"""Computes the distillation loss of each token.

    .. math::

        (1 - w) \, T^2 \, \mathrm{KL}(\operatorname{softmax}(t / T) \,\|\,
        \operatorname{softmax}(s / T)) + w \, (-\log \operatorname{softmax}(s)_y)

    for the student's logits s, the teacher's t and the target y, in nats. The factor T² keeps the
    gradient's scale independent of T. The teacher gets no gradient.

    The mean over tokens is the loss of a step: ``losses.mean()``, or
    ``zerojax.weighted_mean(losses, mask)`` with a mask that is 0 on padding; both are the same
    with and without gradient accumulation.

    Args:
      student_logits: s, floats [..., V], such as [B, T, V].
      teacher_logits: t, floats [..., V] from the same inputs.
      targets: y, int [...] from 0 to V - 1. None for the term of the teacher only, without
        ``1 - w``.
      temperature: T, above 0. Higher ones weigh unlikely tokens more.
      hard_weight: w, from 0 (the teacher only) to 1 (the targets only).

    Returns:
      The losses [...], in float32 or wider.

    Raises:
      ValueError: The vocabularies or other shapes differ, or an option is out of range.

    Example:
      >>> student, teacher = jnp.zeros((2, 3, 5)), jnp.ones((2, 3, 5))
      >>> losses = distillation_loss(student, teacher, jnp.zeros((2, 3), jnp.int32))
      >>> losses.shape, round(float(losses.mean()), 4)       # half of ln 5: the teacher agrees
      ((2, 3), 0.8047)
    """
    if student_logits.shape != teacher_logits.shape:
        raise ValueError(
            f"distillation_loss: logits of the student are {[*student_logits.shape]}, of the "
            f"teacher {[*teacher_logits.shape]}: call both with the same inputs, and cut the "
            "larger vocabulary, teacher_logits[..., :V]"
        )
    if targets is not None:
        is_integer = jnp.issubdtype(targets.dtype, jnp.integer)
        if targets.shape != student_logits.shape[:-1] or not is_integer:
            raise ValueError(
                f"distillation_loss: targets are {targets.dtype}{[*targets.shape]}. Pass token "
                f"numbers, integers {[*student_logits.shape[:-1]]}."
            )
    if not (temperature > 0 and 0 <= hard_weight <= 1):
        raise ValueError(
            f"distillation_loss: temperature = {temperature} must be above 0, and hard_weight "
            f"= {hard_weight} from 0 to 1"
        )
    student, teacher = widen(student_logits), jax.lax.stop_gradient(widen(teacher_logits))
    log_student, log_teacher = (jax.nn.log_softmax(x / temperature) for x in (student, teacher))
    soft = optax.losses.kl_divergence_with_log_targets(log_student, log_teacher)
    soft = temperature**2 * soft
    if targets is None:
        return soft
    return (1 - hard_weight) * soft + hard_weight * cross_entropy(student, targets)
