"""The shape atlas: at which row counts do the linear layers give a row the same bits?

A class is measured, never assumed. For each linear and each bucket (a row count that the engine may use) a pass holds
one probe row at many indices among hostile neighbours. A bucket is usable if all its probe rows are equal; buckets
with equal bits in every layer form a class. 16-bit outputs round away nearly every difference in the order of a sum, so
there are also probe rows whose sums cancel (`_cancelling_rows`). The canonical class is the largest one, so that it
covers verification, prefill and as many decode passes as can be; the lm_head, which runs on fewer rows, has its own.

Source of the method: LLM-42 (arXiv 2601.17768) for shape-consistent kernels; the classes are this project's.
"""

from __future__ import annotations

import json
import logging
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch

from llm42.kernels.interface import Kernels, PreparedLinear
from llm42.protocol.shape_class import VERIFICATION_ROWS, ShapeClass

logger = logging.getLogger(__name__)

# Every count where a pass is cheap and padding would show, then coarser: what passes are padded up to.
BUCKETS = (*range(1, 17), *range(18, 65, 2), *range(68, 129, 4), *range(136, 257, 8), *range(272, 513, 16))
LOGIT_BUCKETS = tuple(count for count in BUCKETS if count <= 64)
_HUGE = 1.0e4
_VERSION = 5
_NUM_CANCELLING = 4


@dataclass(frozen=True, slots=True)
class Atlas:
    """What was measured.

    Attributes:
        classes: Per linear, its classes of usable row counts, each ascending, the largest class first.
        row_counts: The canonical class of the layers.
        logit_row_counts: The canonical class of the lm_head.
        layer_seconds: Per row count, the time of one layer's linears.
    """

    classes: dict[str, tuple[tuple[int, ...], ...]]
    row_counts: tuple[int, ...]
    logit_row_counts: tuple[int, ...]
    layer_seconds: dict[int, float]

    @property
    def rows(self) -> ShapeClass:
        """The canonical class of the layers."""
        return ShapeClass(self.row_counts)

    @property
    def logit_rows(self) -> ShapeClass:
        """The canonical class of the lm_head."""
        return ShapeClass(self.logit_row_counts)


class NoClassError(Exception):
    """A linear layer gives a row other bits by its index or its neighbours at every row count."""


@torch.inference_mode()
def measure(
    kernels: Kernels,
    layers: Mapping[str, PreparedLinear],
    lm_head: PreparedLinear,
    row_counts: Sequence[int] = BUCKETS,
    logit_row_counts: Sequence[int] = LOGIT_BUCKETS,
) -> Atlas:
    """Measure the classes of the layers' linears and of the lm_head.

    Raises:
        NoClassError: No row count is usable.
    """
    bits: dict[str, dict[int, bytes]] = {}
    seconds = dict.fromkeys(row_counts, 0.0)
    for name, linear in layers.items():
        bits[name] = {}
        cancelling = _cancelling_rows(kernels, linear)
        for rows in row_counts:
            found, took = _probe(kernels, linear, cancelling, rows, _HUGE)
            seconds[rows] += took
            if found is not None:
                bits[name][rows] = found
    head = {rows: found for rows in logit_row_counts if (found := probe(kernels, lm_head, rows)) is not None}
    classes = {name: _classes({rows: (found,) for rows, found in of.items()}) for name, of in bits.items()}
    common = set.intersection(*(set(of) for of in bits.values()))
    together = _classes({rows: tuple(of[rows] for of in bits.values()) for rows in common})
    classes["lm_head"] = _classes({rows: (found,) for rows, found in head.items()})
    for name, usable in (("the layers", together), ("lm_head", classes["lm_head"])):
        if not usable:
            raise NoClassError(
                f"a row of {name} depends on its index or its neighbours at every row count of "
                f"{list(row_counts if name == 'the layers' else logit_row_counts)}; choose other canonical_rows or "
                "canonical_logit_rows (multiples of 16 usually work)"
            )
    atlas = Atlas(classes, together[0], classes["lm_head"][0], seconds)
    if not still_holds(atlas, kernels, layers, lm_head):
        raise NoClassError("a row of a linear layer depends on its index or its neighbours' values")
    return atlas


@torch.inference_mode()
def still_holds(atlas: Atlas, kernels: Kernels, layers: Mapping[str, PreparedLinear], lm_head: PreparedLinear) -> bool:
    """Whether an atlas agrees with the kernels, at a small and a usual row count and among meek and huge neighbours."""
    for linears, canonical in ((layers.values(), atlas.rows), ((lm_head,), atlas.logit_rows)):
        counts = {canonical.row_counts[0], canonical.usual}
        for linear in linears:
            cancelling = _cancelling_rows(kernels, linear)
            found = {_probe(kernels, linear, cancelling, rows, s)[0] for rows in counts for s in (1.0, _HUGE)}
            if len(found) != 1 or None in found:
                return False
    return True


def probe(kernels: Kernels, linear: PreparedLinear, rows: int, neighbours: float = _HUGE) -> bytes | None:
    """The bits of fixed probe rows in passes of ``rows``; None if they depend on their index or their neighbours."""
    return _probe(kernels, linear, _cancelling_rows(kernels, linear), rows, neighbours)[0]


def _probe(
    kernels: Kernels, linear: PreparedLinear, cancelling: torch.Tensor, rows: int, neighbours: float
) -> tuple[bytes | None, float]:
    """As `probe`, and the seconds that the linear took."""
    x, places = _rows(linear, rows, neighbours)
    started = time.perf_counter()
    y = kernels.linear(x, linear)
    seconds = time.perf_counter() - started
    found = {-1: _bits(y, places)}
    # A bias would hide what does not cancel; it is added after the sum.
    unbiased = replace(linear, bias=None)
    for first in range(0, len(cancelling), len(places)):
        order = [(first + i) % len(cancelling) for i in range(len(places))]
        x[places] = cancelling[order]
        y = kernels.linear(x, unbiased)
        for index in set(order):
            found[index] = _bits(y, [place for place, of in zip(places, order, strict=True) if of == index])
    usable = [bits for _, bits in sorted(found.items()) if bits is not None]
    return b"".join(usable) if len(usable) == len(found) else None, seconds


def _rows(linear: PreparedLinear, rows: int, neighbours: float) -> tuple[torch.Tensor, list[int]]:
    """The input of a pass ``[rows, in_features]``, and where in it the probe row lies."""
    generator = torch.Generator().manual_seed(42)
    row = torch.randn(linear.in_features, generator=generator).to(linear.dtype)
    x = torch.randn((rows, linear.in_features), generator=generator).mul_(neighbours).to(linear.dtype)
    # Every other row and the last one; which ones depends on the count, so that all indices have their turn.
    places = sorted({*range(rows % 2, rows, 2), rows - 1})
    x[places] = row
    return x.to(linear.weight.device), places


def _cancelling_rows(kernels: Kernels, linear: PreparedLinear) -> torch.Tensor:
    """Rows ``[4, in_features]``: two inputs of each cancel in one output, exactly, and are huge beside the rest.

    With weights u and v for the inputs a and b, x[a] = s v and x[b] = -s u: while one of both is in the sum, the other
    terms lose their last bits, and which terms those are follows from the order. What remains shows it in 16 bits too.
    """
    generator = torch.Generator().manual_seed(43)
    size = linear.in_features
    pairs = [
        (0, size - 1),
        *(torch.randperm(size, generator=generator)[:2].tolist() for _ in range(_NUM_CANCELLING - 1)),
    ]
    x = torch.randn((_NUM_CANCELLING, size), generator=generator) * 2.0**-8
    if size == 1:
        return x.to(linear.weight.device, linear.dtype)
    # A row with a single 1 gives the weights of its input, in whatever form the backend keeps them.
    units = torch.zeros((2 * _NUM_CANCELLING, size), dtype=linear.dtype)
    units[range(len(units)), [index for pair in pairs for index in pair]] = 1.0
    weights = kernels.linear(units.to(linear.weight.device), replace(linear, bias=None)).cpu().float()
    for row, (a, b), of in zip(x, pairs, weights.view(_NUM_CANCELLING, 2, -1), strict=True):
        u, v = of[:, of.abs().amin(0).argmax()]
        scale = 13 - torch.frexp(torch.maximum(u.abs(), v.abs()))[1]
        row[a], row[b] = torch.ldexp(v, scale), -torch.ldexp(u, scale)
    return x.to(linear.weight.device, linear.dtype)


def _bits(y: torch.Tensor, places: list[int]) -> bytes | None:
    """The bits of the rows at these places; None if they are not all the same."""
    found = y[places].cpu().view(torch.uint8)
    return None if (found != found[:1]).any() else found[0].numpy().tobytes()


def _classes(bits: Mapping[int, tuple[bytes, ...]]) -> tuple[tuple[int, ...], ...]:
    """Row counts grouped by equal bits, the class that serves best first."""
    groups: dict[tuple[bytes, ...], list[int]] = {}
    for rows in sorted(bits):
        groups.setdefault(bits[rows], []).append(rows)
    return tuple(sorted((tuple(group) for group in groups.values()), key=_usefulness, reverse=True))


def _usefulness(row_counts: tuple[int, ...]) -> tuple[int, int]:
    """Many counts before few; among equals, the one that holds a verification pass most closely."""
    return len(row_counts), -min(abs(rows - VERIFICATION_ROWS) for rows in row_counts)


def load(path: Path) -> Atlas | None:
    """An atlas that was saved, or None if there is none that can be read."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        if data["version"] != _VERSION:
            return None
        return Atlas(
            {name: tuple(map(tuple, found)) for name, found in data["classes"].items()},
            ShapeClass(data["row_counts"]).row_counts,
            ShapeClass(data["logit_row_counts"]).row_counts,
            {int(rows): float(seconds) for rows, seconds in data["layer_seconds"].items()},
        )
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        logger.warning("the saved atlas %s cannot be read and is measured again: %s", path.name, error)
        return None


def save(atlas: Atlas, path: Path) -> None:
    """Keep an atlas for later starts; a cache that cannot be written is no error."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False, encoding="utf-8") as file:
            json.dump({"version": _VERSION, **asdict(atlas)}, file)
        Path(file.name).replace(path)
    except OSError as error:
        logger.warning("the atlas cannot be kept in %s: %s", path.parent, error)
