"""Calibration at start-up: the atlas (measured, or known from an earlier start), the self-test, and what they decide.

Invariant: what is decided about bits follows from the contract alone, so that every start under it decides the same;
measured times decide only when things happen.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from typing import Any

from llm42.config import EngineConfig
from llm42.engine.contract import fingerprint, with_classes
from llm42.engine.scheduler import PassShapes
from llm42.engine.selftest import self_test
from llm42.engine.tuning import PassCosts
from llm42.kernels import atlas as atlases
from llm42.kernels.atlas import Atlas
from llm42.model.decoder import Decoder
from llm42.paths import cache_dir
from llm42.protocol import ShapeClass
from llm42.protocol.shape_class import VERIFICATION_ROWS, describe_counts

logger = logging.getLogger(__name__)

# A pass longer than this keeps neighbours waiting for their next token.
_AFFORDABLE_SECONDS = 0.2


@dataclass(frozen=True, slots=True)
class Calibration:
    """What an engine starts with."""

    atlas: Atlas
    contract: dict[str, Any]
    shapes: PassShapes
    costs: PassCosts
    refusal: str | None
    """Why deterministic requests are refused, or None."""


def calibrate(
    config: EngineConfig, decoder: Decoder, contract: dict[str, Any], *, prefers_throughput: bool
) -> Calibration:
    """Find the canonical classes and check that they hold.

    Args:
        config: The configuration.
        decoder: The loaded model.
        contract: The contract without the classes.
        prefers_throughput: Whether passes may be as large as the class allows, though neighbours wait for their end.
    """
    refusal = None
    try:
        atlas = _atlas(config, decoder, contract)
    except atlases.NoClassError as error:
        refusal = f"the start-up self-test failed: {error}"
        rows = config.canonical_rows or VERIFICATION_ROWS
        atlas = Atlas({}, (rows,), (config.canonical_logit_rows or rows,), {})
    if refusal is None and (reason := self_test(decoder, atlas.rows)) is not None:
        refusal = f"the start-up self-test failed: {reason}"
    if refusal is not None:
        logger.warning("deterministic requests will be refused: %s", refusal)
    if config.mode == "off":
        refusal = "the engine runs with mode='off'; start it with mode='auto', 'verify' or 'invariant'"
    seconds = {rows: decoder.config.num_hidden_layers * time for rows, time in atlas.layer_seconds.items()}
    canonical = atlas.rows
    if config.mode == "invariant":
        canonical = ShapeClass([canonical.usual])
    affordable = None
    if not prefers_throughput:
        quick = [rows for rows in canonical.row_counts if seconds.get(rows, 0.0) <= _AFFORDABLE_SECONDS]
        affordable = max([canonical.usual, *quick])
    shapes = PassShapes.choose(config, canonical, affordable)
    return Calibration(atlas, with_classes(contract, atlas), shapes, PassCosts(seconds or None), refusal)


def _atlas(config: EngineConfig, decoder: Decoder, contract: dict[str, Any]) -> Atlas:
    row_counts = atlases.BUCKETS if config.canonical_rows is None else (config.canonical_rows,)
    logit_row_counts = atlases.LOGIT_BUCKETS if config.canonical_logit_rows is None else (config.canonical_logit_rows,)
    key = fingerprint({**contract, "row_counts": row_counts, "logit_row_counts": logit_row_counts})
    path = cache_dir() / "atlas" / f"{key}.json"
    started = time.monotonic()
    atlas = atlases.load(path)
    is_new = atlas is None or not atlases.still_holds(atlas, decoder.kernels, decoder.linears, decoder.lm_head)
    if atlas is None or is_new:
        atlas = atlases.measure(decoder.kernels, decoder.linears, decoder.lm_head, row_counts, logit_row_counts)
        atlases.save(atlas, path)
    logger.info(
        "atlas: canonical passes have %s rows, %s for logits (%s in %.1f s)",
        describe_counts(atlas.row_counts),
        describe_counts(atlas.logit_row_counts),
        "measured" if is_new else "known",
        time.monotonic() - started,
    )
    return atlas
