"""DeepSpeed's update rules written out in NumPy, in float64.

Each takes a parameter, its gradients in order and the knobs, and returns the parameter after all
updates. A knob named lr or b1 may be a list, one number for each update.
"""

import numpy as np


def at(value, n):
    return value[n - 1] if isinstance(value, list) else value


def adam(p, grads, lr=1e-3, b1=0.9, b2=0.999, eps=1e-8, wd=0.0, l2=False, correct=True):
    p, m, v = np.float64(p), 0.0, 0.0
    for n, g in enumerate(grads, 1):
        b, rate = at(b1, n), at(lr, n)
        g = np.float64(g) + (wd * p if l2 else 0)
        m = b * m + (1 - b) * g
        v = b2 * v + (1 - b2) * g * g
        c1, c2 = (1 - b**n, 1 - b2**n) if correct else (1, 1)
        p = p - rate * (m / c1 / (np.sqrt(v / c2) + eps) + (0 if l2 else wd * p))
    return p


def lion(p, grads, lr=1e-3, b1=0.9, b2=0.99, wd=0.0):
    p, m = np.float64(p), 0.0
    for n, g in enumerate(map(np.float64, grads), 1):
        b, rate = at(b1, n), at(lr, n)
        p = p * (1 - rate * wd) - rate * np.sign(b * m + (1 - b) * g)
        m = b2 * m + (1 - b2) * g
    return p


def sgd(p, grads, lr=1e-3, mu=0.0, nesterov=False, wd=0.0):
    p, m = np.float64(p), 0.0
    for n, g in enumerate(map(np.float64, grads), 1):
        g = g + wd * p
        m = mu * m + g
        p = p - at(lr, n) * (g + mu * m if nesterov else m)
    return p


def adagrad(p, grads, lr=1e-2, eps=1e-10, wd=0.0):
    p, s = np.float64(p), 0.0
    for g in map(np.float64, grads):
        g = g + wd * p
        s = s + g * g
        p = p - lr * g / (np.sqrt(s) + eps)
    return p


def lamb(p, grads, lr=1e-3, b1=0.9, b2=0.999, eps=1e-8, wd=0.0, low=0.01, high=10.0, correct=True,
         inside=False):  # fmt: skip
    p, m, v = np.float64(p), 0.0, 0.0
    for n, g in enumerate(map(np.float64, grads), 1):
        b, rate = at(b1, n), at(lr, n)
        m = b * m + (1 - b) * g
        v = b2 * v + (1 - b2) * g * g
        u = m / (np.sqrt(v + eps) if inside else np.sqrt(v) + eps) + wd * p
        ratio = np.clip(np.linalg.norm(p) / np.linalg.norm(u), low, high)
        size = np.sqrt(1 - b2**n) / (1 - b**n) if correct else 1
        p = p - rate * size * ratio * u
    return p


def newton_schulz(x):
    """[rows, columns] -> the same, its singular values near 1."""
    a, b, c = 3.4445, -4.7750, 2.0315
    tall = x.shape[0] > x.shape[1]
    x = x.T if tall else x
    x = x / (np.linalg.norm(x) + 1e-7)
    for _ in range(5):
        square = x @ x.T
        x = a * x + (b * square + c * square @ square) @ x
    return x.T if tall else x


def muon(p, grads, lr=2e-2, mu=0.95, wd=0.0):
    """On torch's [out, in], as DeepSpeed has it: pass the transpose of a flax kernel."""
    p, m = np.float64(p), np.zeros(np.shape(p))
    for n, g in enumerate(map(np.float64, grads), 1):
        rate = at(lr, n)
        m = m + (1 - mu) * (g - m)
        u = newton_schulz(g + mu * (m - g)) * np.sqrt(max(1, p.shape[0] / p.shape[1]))
        p = p * (1 - rate * wd) - rate * u
    return p
