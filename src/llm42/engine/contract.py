"""The contract: everything that may change bits and is fixed while an engine runs, and its hash, the fingerprint."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from llm42 import sampling
from llm42.config import EngineConfig
from llm42.kernels.atlas import Atlas
from llm42.model.decoder import Decoder
from llm42.model.weights import weights_digest
from llm42.sampling.grammar import grammar_version

_TEXT_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "generation_config.json",
)
"""Files that decide which token ids a text becomes, and which of them end an output."""


def contract(config: EngineConfig, decoder: Decoder, model_path: Path) -> dict[str, Any]:
    """The contract as plain data, but for the canonical classes: the same bits are promised wherever it is equal."""
    return {
        "weights": weights_digest(model_path),
        "text": {
            name: hashlib.sha256((model_path / name).read_bytes()).hexdigest()
            for name in _TEXT_FILES
            if (model_path / name).exists()
        },
        "model": asdict(decoder.config),
        "dtype": config.dtype,
        "kernels": decoder.kernels.versions(),
        "num_threads": torch.get_num_threads(),
        "sampler": sampling.SAMPLER_VERSION,
        "grammar": grammar_version(),
    }


def with_classes(contract_data: dict[str, Any], atlas: Atlas) -> dict[str, Any]:
    """The contract with the canonical classes that were measured under it."""
    classes = {"rows": list(atlas.row_counts), "logit_rows": list(atlas.logit_row_counts)}
    return {**contract_data, "canonical_class": classes}


def fingerprint(contract_data: dict[str, Any]) -> str:
    """A short name of a contract, as the OpenAI API's ``system_fingerprint``."""
    canonical = json.dumps(contract_data, sort_keys=True, separators=(",", ":"))
    return "fp_" + hashlib.sha256(canonical.encode()).hexdigest()[:16]
