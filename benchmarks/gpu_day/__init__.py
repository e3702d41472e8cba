"""All measurements that this project needs of a GPU, in one command that loses no second of it.

    python -m benchmarks.gpu_day --minutes 9 --record OUT        # --part 1..3 for some of it
    python -m benchmarks.gpu_day --toy --record OUT              # rehearsal on the CPU
    python -m benchmarks.gpu_day --list --record OUT             # what is not yet measured

Read first ``plan.measurements`` (what is measured) and ``__main__.run`` (how). The parts are 1
smoke, 2 forecasts, 3 training, 4 kernels, 5 offload, 6 XLA options. ``plan.py`` has every
measurement with its tier and its expected seconds. Those that measure no time run first, beside
each other; then all parts' first tier. A measurement runs in a process of its own,
which finds its imports done, and has the GPU to itself where it measures time. It begins only
where its expected seconds are left, and ends with the budget. Its figures, or its error with the
traceback, are in ``OUT/gpu-day.json`` before the next one begins; a later call with the same folder
goes on where this one ended (``--again`` repeats what failed). ``OUT/gpu-day.md`` has the tables,
and what they propose for ``device_kinds.json`` and for ``pallas_kernels/measured.py``.

Before, on a machine with a registry and no GPU::

    python -m benchmarks.gpu_day.wheels .gpu_day/wheels
    JAX_PLATFORMS=cpu python -m benchmarks.gpu_day.forecasts --kind h100 --kind h200

Then on a bare machine with one H100 or H200, Python 3.12 and jax 0.11.2, into which the checkout
came with ``.gpu_day`` (git ignores that folder), and where ``$OUT`` is brought back::

    python3 -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --upgrade
      --target /tmp/site .gpu_day/wheels/*.whl && export PYTHONPATH=/tmp/site || exit;
    cp .gpu_day/gpu-day.json $OUT/ 2>/dev/null;
    PYTHONUNBUFFERED=1 python3 -m benchmarks.gpu_day --minutes 9 --record $OUT

in one line, with a limit of 600 s. Afterwards copy ``gpu-day.json`` from what came back to
``.gpu_day/`` and run the same line again, until ``--list`` shows no measurement as "owed".
"""
