"""oneDNN's linear layers in the native backend: when they are chosen, their numbers, and what they keep in memory.

In fp32 they run everywhere, so the whole path is tested everywhere; in 16 bits where the CPU has kernels for them.
"""

from __future__ import annotations

import gc
import weakref

import pytest
import torch

from kernel_reference import DTYPES, assert_agree, linear, random
from llm42.engine.selftest import self_test
from llm42.kernels import NativeKernels, PortableKernels, RowBatch, RowSegment, atlas
from llm42.kernels.native import backend, linears
from llm42.kernels.native.linears import OneDnnLinears, OwnLinears, has_matrix_instructions
from llm42.kernels.portable import has_native_gemm
from llm42.model.config import ModelConfig
from llm42.model.decoder import Decoder
from llm42.model.weights import load_weights
from tiny_models import VOCAB_SIZE, write_tiny_model

SHAPES = ((1, 1), (51, 7), (577, 37), (64, 64))


@pytest.fixture(scope="module")
def onednn(native) -> NativeKernels:
    return NativeKernels(native._flags, linears="onednn")


@pytest.fixture(params=filter(has_native_gemm, DTYPES), ids=str)
def dtype(request) -> torch.dtype:
    """Each dtype that oneDNN has kernels for on this CPU; fp32 always."""
    return request.param


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("bias", [False, True])
def test_a_linear_equals_the_formula_the_librarys_and_the_portable_one(onednn, native, shape, bias, dtype):
    in_features, out_features = shape
    weights = random(out_features, in_features, seed=1, dtype=dtype), random(out_features, seed=2, dtype=dtype)
    weights = weights if bias else (weights[0], None)
    others = native, PortableKernels()
    mine, *theirs = (kernels.prepare_linear(*weights) for kernels in (onednn, *others))
    assert mine.weight.is_mkldnn
    for rows in (1, 2, 5, 16, 65):
        wide = random(rows, in_features + 3, dtype=dtype)
        for x in (wide[:, 2:-1], wide[:, 2:-1].contiguous()):
            with torch.inference_mode():
                found = onednn.linear(x, mine)
            assert found.dtype == dtype
            for kernels, prepared in zip(others, theirs, strict=True):
                assert_agree(found, kernels.linear(x, prepared), linear(x, *weights))


def test_a_batch_of_no_rows_gives_no_rows(onednn, dtype):
    prepared = onednn.prepare_linear(random(7, 51, dtype=dtype))
    assert onednn.linear(torch.empty(0, 51, dtype=dtype), prepared).shape == (0, 7)


def test_an_embedding_is_a_row_of_the_table_and_ties_to_the_lm_head(onednn, native, dtype):
    table, x, ids = random(37, 51, dtype=dtype), random(5, 51, seed=1, dtype=dtype), torch.tensor([36, 0, 0, 17])
    for kernels in (onednn, native):
        embedding = kernels.prepare_embedding(table)
        assert torch.equal(kernels.embedding(ids, embedding), table[ids])
        found = kernels.linear(x, kernels.tied_lm_head(embedding))
        assert_agree(found, native.linear(x, native.prepare_linear(table)), linear(x, table, None))


def test_only_an_embedding_keeps_the_weights_as_they_came(onednn):
    """The packed ones are a copy that nothing else is held beside; the table is no copy."""
    weight, table = random(64, 96), random(64, 96, seed=1)
    references = weakref.ref(weight), weakref.ref(table)
    packed, embedding = onednn.prepare_linear(weight), onednn.prepare_embedding(table)
    x = random(3, 96, seed=2)
    before = onednn.linear(x, packed)
    weight.zero_(), table.zero_()
    assert torch.equal(onednn.linear(x, packed), before)
    assert before.any()
    assert not onednn.embedding(torch.arange(64), embedding).any()
    del weight, table
    gc.collect()
    assert references[0]() is None
    assert references[1]() is not None


def test_the_library_needs_no_second_copy_of_a_tied_table(native):
    embedding = native.prepare_embedding(random(37, 51))
    assert native.tied_lm_head(embedding) is embedding


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A model with tied embeddings and QK norm."""
    return write_tiny_model(tmp_path_factory.mktemp("onednn"), "qwen3", dtype=torch.float32)


def decoder_of(model, kernels) -> Decoder:
    config = ModelConfig.from_directory(model)
    return Decoder(config, load_weights(model, config, torch.float32), kernels, 256)


@torch.inference_mode()
def pass_of(decoder) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits of a pass with two prompts and padding, and what the pool holds then."""
    kv = decoder.new_kv_pool(40, 4)
    batch = RowBatch([RowSegment(0, 0, 30, range(1, 9)), RowSegment(30, 0, 1, [20])], 35, 4)
    logits = decoder.logits(decoder.forward(torch.arange(35) * 31 % VOCAB_SIZE, batch, kv))
    return logits, kv.read(torch.arange(40 * 4))


def test_a_decoder_with_them_runs_its_layers_one_by_one_to_the_same_numbers(onednn, native, model):
    (found, kv), (expected, other) = (pass_of(decoder_of(model, kernels)) for kernels in (onednn, native))
    assert native._stack is not None
    assert onednn._stack is None
    assert expected.abs().max() > 1.0
    assert (found - expected).abs().max() < 1e-3
    assert (kv - other).abs().max() < 1e-4
    assert kv.any()


def test_their_classes_are_measured_and_hold_for_whole_passes(onednn, model):
    decoder = decoder_of(model, onednn)
    counts = (1, 2, 3, 8, 16, 24, 32, 64)
    measured = atlas.measure(onednn, decoder.linears, decoder.lm_head, counts, counts)
    assert set(measured.classes) == {"qkv", "o", "gate_up", "down", "lm_head"}
    assert set(measured.row_counts) <= set(counts)
    assert atlas.still_holds(measured, onednn, decoder.linears, decoder.lm_head)
    assert self_test(decoder, measured.rows) is None


def test_a_dtype_without_kernels_is_refused_with_a_remedy(onednn, monkeypatch):
    monkeypatch.setattr(linears, "has_native_gemm", lambda _: False)
    with pytest.raises(ValueError, match=r"no kernels for torch.bfloat16 on this CPU; use linears='own'"):
        onednn.prepare_linear(random(7, 51, dtype=torch.bfloat16))


# The choice

CPUS = {
    # avx512, amx, what torch gives to oneDNN; what is expected
    "AVX2": (False, False, set(), set()),
    "AVX2 that converts": (False, False, {torch.bfloat16, torch.float16}, set()),
    "AVX-512": (True, False, {torch.bfloat16}, set()),
    "AVX512-FP16": (True, False, {torch.bfloat16, torch.float16}, {torch.float16}),
    "AMX, AVX512-FP16": (True, True, {torch.bfloat16, torch.float16}, {torch.bfloat16, torch.float16}),
    "Arm": (False, False, {torch.bfloat16, torch.float16}, set()),
}


@pytest.mark.parametrize(("avx512", "amx", "native_gemms", "expected"), CPUS.values(), ids=CPUS)
def test_they_are_chosen_for_16_bits_where_the_cpu_has_instructions_that_the_library_does_not_use(
    native, monkeypatch, avx512, amx, native_gemms, expected
):
    monkeypatch.setattr(torch.cpu, "_is_avx512_supported", lambda: avx512)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: amx)
    monkeypatch.setattr(linears, "has_native_gemm", lambda dtype: dtype == torch.float32 or dtype in native_gemms)
    assert {dtype for dtype in DTYPES if has_matrix_instructions(dtype)} == expected
    chosen = NativeKernels(native._flags)
    for dtype in DTYPES:
        assert type(chosen._linears[dtype]) is (OneDnnLinears if dtype in expected else OwnLinears)
    assert all(type(of) is OwnLinears for of in NativeKernels(native._flags, linears="own")._linears.values())


def test_the_contract_names_them_and_what_they_choose_by(native, onednn, monkeypatch):
    assert native.versions()["linears"] == "own"
    assert "onednn" not in native.versions()
    assert onednn.versions()["linears"] == "oneDNN for bfloat16, float16, float32"
    monkeypatch.setattr(backend, "has_matrix_instructions", lambda dtype: dtype == torch.bfloat16)
    assert NativeKernels(native._flags).versions()["linears"] == "oneDNN for bfloat16, own for others"
    for name in linears._SETTINGS:
        monkeypatch.delenv(name, raising=False)
    before = onednn.versions()["onednn"]
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "SSE41")
    assert onednn.versions()["onednn"].split() == [*before.split(), "ONEDNN_MAX_CPU_ISA=SSE41"]
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: not before.endswith("amx"))
    assert onednn.versions()["onednn"] != before
