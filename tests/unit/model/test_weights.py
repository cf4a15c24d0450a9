"""Weights: what loads is bit for bit what transformers holds; each damaged directory is refused by file and tensor.

The corruptions are made on real files written by transformers; each has its partner in the same file, loaded whole.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from typing import TYPE_CHECKING, Any

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from llm42.errors import ModelError
from llm42.model.config import ModelConfig
from llm42.model.weights import expected_tensors, load_weights, weights_digest
from tiny_models import FAMILIES, write_tiny_model

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
NORM = "model.layers.1.input_layernorm.weight"
ATTENTION = "model.layers.2.self_attn"
UP = "model.layers.1.mlp.up_proj.weight"


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Directories by family and shard size, written once and never changed."""
    made: dict[tuple[str, int], Path] = {}

    def get(family: str = "llama", max_shard_size: int = 10**9) -> Path:
        key = (family, max_shard_size)
        if key not in made:
            directory = tmp_path_factory.mktemp(f"{family}-{max_shard_size}")
            made[key] = write_tiny_model(directory, family, max_shard_size=max_shard_size)
        return made[key]

    return get


@pytest.fixture
def single(pristine: Callable[..., Path], tmp_path: Path) -> Path:
    """A private copy of an untied model in one file."""
    return shutil.copytree(pristine("qwen2"), tmp_path / "single")


@pytest.fixture
def sharded(pristine: Callable[..., Path], tmp_path: Path) -> Path:
    """A private copy of the same model in several files."""
    return shutil.copytree(pristine("qwen2", 100_000), tmp_path / "sharded")


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Tiny matrices on a busy machine: threads cost more than they give."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def load(directory: Path, dtype: torch.dtype = torch.bfloat16) -> dict[str, torch.Tensor]:
    return load_weights(directory, ModelConfig.from_directory(directory), dtype)


def edit(path: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    """Rewrite a safetensors file with its tensors changed."""
    tensors = {name: tensor.clone() for name, tensor in load_file(path).items()}
    change(tensors)
    save_file(tensors, path)


def read_index(directory: Path) -> dict[str, Any]:
    index: dict[str, Any] = json.loads((directory / INDEX).read_text())
    return index


def refused(directory: Path) -> str:
    with pytest.raises(ModelError) as caught:
        load(directory)
    return str(caught.value)


@pytest.mark.parametrize("max_shard_size", [10**9, 100_000], ids=["single", "sharded"])
@pytest.mark.parametrize("family", FAMILIES)
def test_loaded_weights_equal_transformers_bit_for_bit(
    family: str, max_shard_size: int, pristine: Callable[..., Path]
) -> None:
    directory = pristine(family, max_shard_size)
    assert (directory / INDEX).exists() == (max_shard_size == 100_000)
    config = ModelConfig.from_directory(directory)
    reference = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.bfloat16).state_dict()
    if config.tie_word_embeddings:
        assert torch.equal(reference.pop("lm_head.weight"), reference["model.embed_tokens.weight"])
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        weights = load_weights(directory, config, dtype)
        assert weights.keys() == reference.keys() == expected_tensors(config).keys()
        for name, tensor in weights.items():
            assert tensor.dtype == dtype
            assert torch.equal(tensor, reference[name].to(dtype)), name
            assert tensor.is_contiguous()


@pytest.mark.parametrize("stored", [torch.float16, torch.float32, torch.float64])
def test_any_stored_float_is_cast_to_the_asked_dtype(stored: torch.dtype, single: Path) -> None:
    edit(single / SINGLE, lambda tensors: tensors.update({k: (v.double() / 3).to(stored) for k, v in tensors.items()}))
    source = load_file(single / SINGLE)
    assert all(torch.equal(tensor, source[name].bfloat16()) for name, tensor in load(single).items())


def test_biases_follow_the_config_fields(tmp_path: Path) -> None:
    directory = write_tiny_model(tmp_path, "llama", attention_bias=True, mlp_bias=True)
    names = load(directory).keys()
    assert sum(name.endswith(".bias") for name in names) == 3 * 7
    assert names == load_file(directory / SINGLE).keys()


def test_weights_are_copies_that_a_later_change_of_the_file_cannot_reach(single: Path) -> None:
    weights = load(single)
    before = {name: tensor.clone() for name, tensor in weights.items()}
    with safe_open(single / SINGLE, framework="pt") as file:
        mapped = file.get_tensor(UP)
    content = (single / SINGLE).read_bytes()
    with (single / SINGLE).open("r+b") as file:
        file.write(bytes(len(content)))
    assert not torch.equal(mapped, before[UP])  # the partner: a mapped tensor is changed by this
    assert all(torch.equal(weights[name], before[name]) for name in before)


def test_a_rotary_buffer_of_old_checkpoints_is_ignored(single: Path) -> None:
    extra = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)}
    edit(single / SINGLE, lambda tensors: tensors.update(extra))
    assert load(single).keys().isdisjoint(extra)


def test_an_lm_head_beside_tied_embeddings_must_equal_them(pristine: Callable[..., Path], tmp_path: Path) -> None:
    directory = shutil.copytree(pristine("llama"), tmp_path / "tied")
    edit(directory / SINGLE, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone()}))
    assert "lm_head.weight" not in load(directory)
    edit(directory / SINGLE, lambda t: t["lm_head.weight"][5, 7].add_(1))
    message = refused(directory)
    assert f"{SINGLE}: tensor lm_head.weight differs" in message
    assert "tie_word_embeddings" in message
    edit(directory / SINGLE, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].float()}))
    assert f"{SINGLE}: tensor lm_head.weight differs" in refused(directory)


def drop(name: str) -> Callable[[dict[str, torch.Tensor]], Any]:
    return lambda tensors: tensors.pop(name)


def put(name: str, tensor: torch.Tensor) -> Callable[[dict[str, torch.Tensor]], Any]:
    return lambda tensors: tensors.update({name: tensor})


@pytest.mark.parametrize(
    ("change", "tensor", "words"),
    [
        (drop(NORM), NORM, "is missing (1 of 39 are)"),
        (drop("lm_head.weight"), "lm_head.weight", "is missing"),
        (drop(f"{ATTENTION}.k_proj.bias"), f"{ATTENTION}.k_proj.bias", "is missing"),
        (put(NORM, torch.ones(63)), NORM, "has shape (63,), expected (64,)"),
        (put(UP, torch.ones(64, 176)), UP, "has shape (64, 176), expected (176, 64)"),
        (put(UP, torch.ones(176 * 64)), UP, "has shape (11264,)"),
        (put(UP, torch.ones(176, 64, dtype=torch.int8)), UP, "has dtype I8"),
        (put(UP, torch.ones(176, 64, dtype=torch.bool)), UP, "has dtype BOOL"),
        (put(UP, torch.ones(176, 64).to(torch.float8_e4m3fn)), UP, "has dtype F8_E4M3"),
        (put(f"{ATTENTION}.q_norm.weight", torch.ones(16)), f"{ATTENTION}.q_norm.weight", "is not part of"),
        (put("model.layers.0.mlp.up_proj.bias", torch.ones(176)), "model.layers.0.mlp.up_proj.bias", "is not part of"),
        (put("model.layers.3.input_layernorm.weight", torch.ones(64)), "model.layers.3.input_layernorm.weight", "not"),
        (put("model.layers.1.mlp.up_proj.weight_scale", torch.ones(1)), f"{UP}_scale", "is not part of Qwen2"),
    ],
)
def test_a_wrong_tensor_is_refused_by_file_and_name(
    change: Callable[[dict[str, torch.Tensor]], Any], tensor: str, words: str, single: Path
) -> None:
    edit(single / SINGLE, len)
    assert len(load(single)) == 39  # the partner: rewriting the file alone does no harm
    edit(single / SINGLE, change)
    message = refused(single)
    assert f"/{SINGLE}: tensor {tensor} " in message
    assert words in message


def header_length(content: bytes) -> int:
    return 8 + int.from_bytes(content[:8], "little")


@pytest.mark.parametrize("size", [0, 1, 7, 8, 9, 1000])
def test_a_file_cut_inside_its_header_is_refused_by_name(size: int, single: Path) -> None:
    (single / SINGLE).write_bytes((single / SINGLE).read_bytes()[:size])
    assert f"/{SINGLE} has {size} bytes" in refused(single)


@pytest.mark.parametrize("fraction", [0.0, 0.01, 0.5, 0.99, 1.0])
def test_a_file_cut_inside_its_data_is_refused_by_the_first_tensor_cut(fraction: float, single: Path) -> None:
    content = (single / SINGLE).read_bytes()
    start = header_length(content)
    size = start + int((len(content) - start - 1) * fraction)
    (single / SINGLE).write_bytes(content[:size])
    header = {name: entry for name, entry in json.loads(content[8:start]).items() if name != "__metadata__"}
    ends = sorted((start + entry["data_offsets"][1], name) for name, entry in header.items())
    first_cut = next(name for end, name in ends if end > size)
    assert f"/{SINGLE} is truncated: tensor {first_cut} ends at byte" in refused(single)


def rewrite_header(path: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    content = path.read_bytes()
    start = header_length(content)
    header = json.loads(content[8:start])
    change(header)
    raw = json.dumps(header).encode()
    path.write_bytes(len(raw).to_bytes(8, "little") + raw + content[start:])


@pytest.mark.parametrize(
    "entry",
    [
        None,
        [],
        {},
        {"dtype": "BF16", "shape": [64]},
        {"dtype": 16, "shape": [64], "data_offsets": [0, 128]},
        {"dtype": "BF16", "shape": "64", "data_offsets": [0, 128]},
        {"dtype": "BF16", "shape": [-64], "data_offsets": [0, 128]},
        {"dtype": "BF16", "shape": [64.0], "data_offsets": [0, 128]},
        {"dtype": "BF16", "shape": [64], "data_offsets": [0, 126]},
        {"dtype": "BF16", "shape": [64], "data_offsets": [128, 0]},
        {"dtype": "BF16", "shape": [64], "data_offsets": [-128, 0]},
    ],
    ids=str,
)
def test_a_malformed_header_entry_is_refused_by_file_and_tensor(entry: object, single: Path) -> None:
    rewrite_header(single / SINGLE, lambda header: header.update({NORM: entry}))
    assert f"/{SINGLE} has a corrupt header: tensor {NORM} is" in refused(single)


@pytest.mark.parametrize("header", [b"", b"{", b"[]", b"1", b"\xff", b"[" * 100_000])
def test_a_header_that_is_no_json_object_is_refused_by_file(header: bytes, single: Path) -> None:
    (single / SINGLE).write_bytes(len(header).to_bytes(8, "little") + header)
    assert f"/{SINGLE} has a corrupt header (" in refused(single)


def test_overlapping_or_trailing_bytes_are_refused_by_file(single: Path) -> None:
    content = (single / SINGLE).read_bytes()
    (single / SINGLE).write_bytes(content + b"\0")
    assert f"/{SINGLE} is corrupt (" in refused(single)
    (single / SINGLE).write_bytes(content)
    offsets = json.loads(content[8 : header_length(content)])["model.norm.weight"]["data_offsets"]
    rewrite_header(single / SINGLE, lambda header: header[NORM].update({"data_offsets": offsets}))
    assert f"/{SINGLE} is corrupt (" in refused(single)


@given(data=st.data())
@settings(max_examples=80, deadline=None, derandomize=True)
def test_random_damage_to_a_header_never_escapes_as_another_error(data: st.DataObject, pristine: Any) -> None:
    """A damaged header is refused, or leaves each expected tensor with its right shape; it never crashes the loader."""
    source = pristine("llama")
    content = bytearray((source / SINGLE).read_bytes())
    position = st.integers(0, header_length(content) - 1)
    for index, byte in data.draw(st.dictionaries(position, st.integers(0, 255), min_size=1, max_size=4)).items():
        content[index] = byte
    damaged = source.parent / "damaged"
    damaged.mkdir(exist_ok=True)
    (damaged / SINGLE).write_bytes(content)
    config = ModelConfig.from_directory(source)
    try:
        weights = load_weights(damaged, config, torch.float32)
    except ModelError:
        return
    assert {name: tuple(tensor.shape) for name, tensor in weights.items()} == expected_tensors(config)


def test_a_missing_shard_is_refused_with_a_tensor_it_should_hold(sharded: Path) -> None:
    shard = read_index(sharded)["weight_map"][UP]
    (sharded / shard).unlink()
    message = refused(sharded)
    assert f"/{shard} is missing: {INDEX} says that it holds tensor " in message
    assert read_index(sharded)["weight_map"][message.rsplit(" ", 1)[1]] == shard


def test_a_truncated_shard_is_refused_by_name(sharded: Path) -> None:
    shard = read_index(sharded)["weight_map"]["lm_head.weight"]
    (sharded / shard).write_bytes((sharded / shard).read_bytes()[:-1])
    assert f"/{shard} is truncated: tensor " in refused(sharded)


def write_weight_map(directory: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    index = read_index(directory)
    change(index["weight_map"])
    (directory / INDEX).write_text(json.dumps(index))


def test_a_tensor_listed_in_the_wrong_shard_is_refused(sharded: Path) -> None:
    weight_map = read_index(sharded)["weight_map"]
    right, wrong = weight_map[UP], weight_map["lm_head.weight"]
    assert right != wrong
    write_weight_map(sharded, lambda weight_map: weight_map.update({UP: wrong}))
    assert f"/{right}: tensor {UP} is here, but {INDEX} lists it in {wrong}" in refused(sharded)


def test_a_tensor_listed_but_in_no_shard_is_refused(sharded: Path) -> None:
    shard = read_index(sharded)["weight_map"][UP]
    edit(sharded / shard, drop(UP))
    assert f"/{shard}: tensor {UP} is missing" in refused(sharded)


def test_a_tensor_that_neither_index_nor_shards_have_is_refused(sharded: Path) -> None:
    edit(sharded / read_index(sharded)["weight_map"][UP], drop(UP))
    write_weight_map(sharded, lambda weight_map: weight_map.pop(UP))
    assert f"/{INDEX}: tensor {UP} is missing (1 of 39 are)" in refused(sharded)


def test_a_tensor_in_two_shards_is_refused(sharded: Path) -> None:
    weight_map = read_index(sharded)["weight_map"]
    edit(sharded / weight_map["lm_head.weight"], put(UP, torch.zeros(176, 64, dtype=torch.bfloat16)))
    assert f"tensor {UP} is also in " in refused(sharded)


@pytest.mark.parametrize("shard", ["../model-00001-of-00006.safetensors", "/m.safetensors", "model.bin", "", 3, None])
def test_an_index_may_only_name_safetensors_files_beside_it(shard: object, sharded: Path) -> None:
    write_weight_map(sharded, lambda weight_map: weight_map.update({UP: shard}))
    assert f"/{INDEX}: tensor {UP} is in {shard!r}" in refused(sharded)


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"weight_map": []}', '{"weight_map": {}}'])
def test_an_unusable_index_is_refused_by_name(content: str, sharded: Path) -> None:
    (sharded / INDEX).write_text(content)
    assert f"/{INDEX}" in refused(sharded)


def test_pickled_weights_are_not_loaded_but_explained(single: Path) -> None:
    (single / SINGLE).rename(single / "pytorch_model.bin")
    message = refused(single)
    assert "pytorch_model.bin is a pickle" in message
    assert "save_pretrained" in message


def test_a_directory_without_weights_is_refused(single: Path) -> None:
    (single / SINGLE).unlink()
    assert f"{single} has no safetensors weights" in refused(single)
    with pytest.raises(ModelError, match="has no safetensors weights"):
        weights_digest(single)


def test_an_unsupported_target_dtype_is_refused(single: Path) -> None:
    with pytest.raises(ValueError, match=r"dtype is torch\.int8: supported are torch\.bfloat16"):
        load(single, torch.int8)


def test_the_digest_covers_names_and_contents_of_the_weight_files_only(single: Path, sharded: Path) -> None:
    digest = weights_digest(single)
    content = (single / SINGLE).read_bytes()
    assert digest == hashlib.sha256(f"{SINGLE}\0{len(content)}\0".encode() + content).hexdigest()
    (single / "config.json").write_text("{}")
    (single / "other.safetensors").write_bytes(b"unused")
    assert weights_digest(single) == digest
    (single / SINGLE).write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    assert weights_digest(single) != digest

    first, *_, last = sorted(set(read_index(sharded)["weight_map"].values()))
    whole = weights_digest(sharded)
    a, b = (sharded / first).read_bytes(), (sharded / last).read_bytes()
    (sharded / first).write_bytes(b)
    (sharded / last).write_bytes(a)
    assert weights_digest(sharded) != whole


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.usefixtures("one_thread")
def test_tiny_models_are_made_by_seed_and_do_not_collapse_into_one_token(family: str, tmp_path: Path) -> None:
    directories = [write_tiny_model(tmp_path / str(i), family, seed=seed) for i, seed in enumerate((0, 0, 1))]
    first, again, other = (weights_digest(directory) for directory in directories)
    assert first == again != other

    model = transformers.AutoModelForCausalLM.from_pretrained(directories[0], dtype=torch.float32)
    tokens = torch.randint(3, 512, (8, 12), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        for _ in range(32):
            tokens = torch.cat([tokens, model(tokens).logits[:, -1:].argmax(-1)], dim=1)
    distinct = [len(set(row[12:].tolist())) for row in tokens]
    assert sum(distinct) / len(distinct) > 8
