"""The tables of ``offload.py``: a row of headings, then rows of text; and the limits they show."""

import dataclasses
from collections.abc import Iterable, Sequence

from benchmarks.offload_largest import Largest
from benchmarks.offload_programs import Costs
from benchmarks.overlap import ScheduledCopy

GIGA = 1e9
SUB_GROUPS = 2.5  # at most beyond gradients and compute parameters
Rows = list[list[str]]

NOTES = {
    "sizes": "Optimizer and parameters offloaded to the host, one GPU. Update programs hold three "
    "halves of a sub-group.",
    "optimizer": "Optimizer offloaded. Between: gradients and compute parameters as they rest on "
    f"the device; beyond: what a program holds besides. The updates may hold {SUB_GROUPS} "
    "sub-groups beyond, the gradients' program no more than the same stage without offload holds "
    "beyond its own state. On one GPU that is loose: without offload compute parameters and (where "
    "scanned) gradients are among it.",
    "overlap": "Read off the compiled text, once a step. Over compute: share of the bytes under "
    "way while at least one computation runs; over products: the same for a matrix product; "
    "beside: while a copy the other way is. The link is the bound of an update, "
    "whose arithmetic is small.",
    "largest": "Largest model of a ladder of sizes; 1.5 GB of the memory are left for the CUDA "
    "context and the allocator. With offload host memory is then the limit: what each device needs "
    "of it stands beside. The next size: ~ by interpolation, else compiled.",
}


@dataclasses.dataclass(frozen=True)
class Limit:
    """A figure that is to be at most ``limit``."""

    what: str
    figure: float
    limit: float
    unit: str = "GB"

    @property
    def held(self) -> bool:
        return self.figure <= self.limit

    @property
    def word(self) -> str:
        return "held" if self.held else "MISSED"

    def __str__(self) -> str:
        return f"{self.what}: {self.figure:.2f} {self.unit}, limit {self.limit:.2f}: {self.word}"


def size_rows(sizes: Iterable[tuple[str, Costs, int]]) -> tuple[Rows, list[Limit]]:
    """A row for each size, with its limit in bytes."""
    rows = [["model", "parameters", "gradients GB", "updates GB", "peak GB", "at most", "",
             "host GB", "programs", "compile s"]]  # fmt: skip
    limits = []
    for name, costs, limit in sizes:
        bound = Limit(f"sizes, {name}", costs.peak.device_bytes / GIGA, limit / GIGA)
        limits.append(bound)
        rows.append(
            [
                name,
                _billions(costs),
                _giga(costs.gradients.device_bytes),
                _giga(costs.update_peak.device_bytes),
                f"{_giga(costs.peak.device_bytes)} ({costs.peak.name})",
                f"{bound.limit:g}",
                bound.word,
                f"{costs.host_bytes / GIGA:.1f}",
                str(len(costs.programs)),
                f"{sum(p.seconds for p in costs.programs):.0f}",
            ]
        )
    return rows, limits


def optimizer_rows(pairs: Iterable[tuple[Costs, Costs]]) -> tuple[Rows, list[Limit]]:
    """A row for each case beside the same without offload."""
    rows = [["case", "layers", "sub-group M", "between GB", "updates GB", "beyond, in sub-groups",
             "", "gradients GB", "beyond GB", "without: peak GB", "less its state", "",
             "host GB"]]  # fmt: skip
    limits = []
    for costs, plain in pairs:
        case = costs.case
        elements = case.sub_group_bytes // 12
        what = f"optimizer, {case.where}, sub-groups of {elements:,}"
        updates = Limit(f"{what}, updates", costs.sub_groups, SUB_GROUPS, "sub-groups")
        beyond = costs.gradients.device_bytes - costs.planned_bytes
        working = plain.peak.device_bytes - plain.state_bytes
        gradients = Limit(f"{what}, gradients beyond", beyond / GIGA, working / GIGA)
        limits += [updates, gradients]
        rows.append(
            [
                case.where,
                str(case.n_layer),
                f"{elements / 1e6:.3g}",
                _giga(costs.between_bytes),
                _giga(costs.update_peak.device_bytes),
                f"{costs.sub_groups:.2f} of {SUB_GROUPS}",
                updates.word,
                _giga(costs.gradients.device_bytes),
                _giga(beyond),
                _giga(plain.peak.device_bytes),
                _giga(working),
                gradients.word,
                f"{costs.host_bytes / GIGA:.1f}",
            ]
        )
    return rows, limits


@dataclasses.dataclass(frozen=True)
class Overlap:
    """Copies in one direction, of one loop or of all instructions outside loops.

    Attributes:
      number: copies in the program's text.
      bytes: bytes that they copy in a step.
      compute, products, beside: shares of the bytes that are under way over at least one
        computation, one matrix product, one copy the other way.
      fewest: computations that a copy spans at least.
    """

    number: int
    bytes: int
    compute: float
    products: float
    beside: float
    fewest: int

    @property
    def row(self) -> list[str]:
        shares = (f"{share:.0%}" for share in (self.compute, self.products, self.beside))
        return [str(self.number), f"{self.bytes / GIGA:.3f}", *shares, str(self.fewest)]


def overlap(programs: Sequence[Sequence[ScheduledCopy]], inward: bool) -> Overlap:
    """Sums up the copies of several programs in one direction, into the device if ``inward``."""
    mine = [each for copies in programs for each in copies if each.inward == inward]
    total = sum(each.times * each.bytes for each in mine)

    def share(copies: Iterable[ScheduledCopy]) -> float:
        return sum(each.times * each.bytes for each in copies) / max(1, total)

    return Overlap(
        number=len(mine),
        bytes=total,
        compute=share(each for each in mine if each.spans),
        products=share(each for each in mine if each.products),
        beside=share(
            each
            for copies in programs
            for each in copies
            if each.inward == inward
            and any(each.beside(other) for other in copies if other.inward != inward)
        ),
        fewest=min((each.spans for each in mine), default=0),
    )


def parts(costs: Costs) -> dict[str, list[list[ScheduledCopy]]]:
    """Copies of the gradients program by loop, and of the updates that copy both ways."""
    groups: dict[str, list[list[ScheduledCopy]]] = {}
    for each in costs.gradients.copies:
        loop = "backward loop" if each.backward else "forward loop"
        name = loop if each.times > 1 else "outside loops"
        groups.setdefault(f"gradients, {name}", [[]])[0].append(each)
    both = [list(u.copies) for u in costs.updates if len({c.inward for c in u.copies}) == 2]
    return groups | {f"{len(both)} update programs": both}


def overlap_rows(cases: Iterable[Costs]) -> Rows:
    """Rows for the loops of the gradients program and for the updates."""
    rows = [["case", "where", "way", "copies", "GB", "over compute", "over products", "beside",
             "fewest computations"]]  # fmt: skip
    for costs in cases:
        case = costs.case
        what = "both" if case.param else "optimizer"
        for where, programs in parts(costs).items():
            for inward, way in ((True, "in"), (False, "out")):
                overlapping = overlap(programs, inward)
                if overlapping.number:
                    rows.append([f"{what}, {case.where}", where, way, *overlapping.row])
    return rows


def largest_rows(outcomes: Iterable[Largest]) -> Rows:
    """A row for each mode and memory."""
    rows = [["mode", "memory GB", "largest", "width x layers", "peak GB", "bound by",
             "host GB a device", "next size GB"]]  # fmt: skip
    for each in outcomes:
        start = [each.mode, f"{each.memory / GIGA:g}"]
        above = "-" if each.above is None else f"{'' if each.compiled else '~'}{_giga(each.above)}"
        if each.costs is None:
            rows.append([*start, "none", *["-"] * 4, above])
            continue
        costs = each.costs
        more = ">= " if each.above is None else ""
        rows.append(
            [
                *start,
                more + _billions(costs),
                f"{costs.case.n_embd} x {costs.case.n_layer}",
                _giga(costs.peak.device_bytes),
                _bound(costs),
                f"{costs.host_bytes / GIGA:,.1f}" if costs.host_bytes else "-",
                above,
            ]
        )
    return rows


def _bound(costs: Costs) -> str:
    """The composition of the peak."""
    peak = costs.peak
    rest = costs.between_bytes if costs.updates else costs.state_bytes
    what = "gradients and compute parameters" if costs.updates else "state"
    share = rest / peak.device_bytes
    return f"{peak.name}: {what} {share:.0%}, temporaries {1 - share:.0%}"


def _giga(size: float) -> str:
    return f"{size / GIGA:.2f}"


def _billions(costs: Costs) -> str:
    return f"{costs.parameters / GIGA:.2f}B"
