"""The shape atlas over kernels whose classes are known, because a formula says how a row depends on its pass."""

from __future__ import annotations

import json
import logging

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from llm42.kernels import PortableKernels, PreparedLinear, atlas
from llm42.kernels.atlas import NoClassError
from llm42.protocol import ShapeClass

COUNTS = (1, 2, 3, 4, 5, 6, 8, 16)
LAYERS, HEAD = 6, 10
"""Output features, by which the kernels tell a layer from the lm_head."""


def nothing(_x):
    return 0.0


def something(_x):
    return 1.0


def by_parity(x):
    return float(x.shape[0] % 2)


def by_index(x):
    return torch.arange(x.shape[0])[:, None]


def by_neighbours(x):
    return float(x.abs().amax() > 1e3)


def only_at(counts, effect):
    """The effect, at some row counts."""
    return lambda x: effect(x) if x.shape[0] in counts else 0.0


class FakeKernels(PortableKernels):
    """A linear is one product per element, exact and row-local, plus an effect of the pass."""

    def __init__(self, layers=nothing, head=nothing):
        self._effects = {LAYERS: layers, HEAD: head}
        self.row_counts = {LAYERS: set(), HEAD: set()}

    def linear(self, x, linear):
        self.row_counts[linear.out_features].add(x.shape[0])
        return x[:, : linear.out_features] * 0.5 + self._effects[linear.out_features](x)


class TellingKernels(FakeKernels):
    """Can tell the second layer that it sees from the first."""

    def __init__(self):
        super().__init__()
        self._seen = []

    def is_second(self, linear):
        if not any(weight is linear.weight for weight in self._seen):
            self._seen.append(linear.weight)
        return linear.weight is not self._seen[0]


class BlockKernels(PortableKernels):
    """Sums in fp32 in blocks of inputs, whose size follows from the row count; outputs in bf16."""

    def __init__(self, block_of):
        self._block_of = block_of

    def linear(self, x, linear):
        block = self._block_of(x.shape[0])
        total = torch.zeros(x.shape[0], linear.out_features)
        for a, b in zip(x.float().split(block, 1), linear.weight.float().split(block, 1), strict=True):
            # One after the other: a matrix product has an order of its own for each row count.
            total += sum(a[:, i, None] * b[:, i] for i in range(a.shape[1]))
        return total.bfloat16()


def prepared(out_features):
    return PreparedLinear(torch.zeros(out_features, 12), None, torch.float32, out_features, 12)


def measure(kernels, counts=COUNTS, head_counts=COUNTS, names=("qkv", "down")):
    return atlas.measure(kernels, {name: prepared(LAYERS) for name in names}, prepared(HEAD), counts, head_counts)


def still_holds(found, kernels):
    return atlas.still_holds(found, kernels, {"qkv": prepared(LAYERS)}, prepared(HEAD))


# Classes --------------------------------------------------------------------------------------------------------------


def test_kernels_that_do_not_know_their_row_count_are_one_class():
    kernels = FakeKernels()
    found = measure(kernels)
    assert found.classes == dict.fromkeys(("qkv", "down", "lm_head"), (COUNTS,))
    assert found.rows == found.logit_rows == ShapeClass(COUNTS)
    assert kernels.row_counts == {LAYERS: set(COUNTS), HEAD: set(COUNTS)}


def test_bits_by_parity_are_two_classes_and_the_larger_one_is_canonical():
    found = measure(FakeKernels(layers=by_parity))
    assert found.classes["qkv"] == ((2, 4, 6, 8, 16), (1, 3, 5))
    assert found.row_counts == (2, 4, 6, 8, 16)


@given(st.lists(st.integers(0, 2), min_size=len(COUNTS), max_size=len(COUNTS)))
@settings(max_examples=40)
def test_row_counts_are_together_exactly_if_their_bits_are_equal(kinds):
    kind_of = dict(zip(COUNTS, kinds, strict=True))
    classes = measure(FakeKernels(layers=lambda x: float(kind_of[x.shape[0]]))).classes["qkv"]
    assert sorted(count for found in classes for count in found) == list(COUNTS)
    assert len(classes) == len(set(kinds))
    assert all(len({kind_of[count] for count in found}) == 1 for found in classes)
    assert [len(found) for found in classes] == sorted(map(len, classes), reverse=True)


def test_counts_at_which_a_row_depends_on_its_index_are_not_used():
    found = measure(FakeKernels(layers=only_at({3, 4, 16}, by_index), head=only_at({2}, by_index)))
    assert found.classes["qkv"] == ((1, 2, 5, 6, 8),)
    assert found.row_counts == (1, 2, 5, 6, 8)
    assert found.logit_row_counts == (1, 3, 4, 5, 6, 8, 16)


def test_a_count_is_canonical_only_if_it_is_usable_in_every_layer():
    class Uneven(TellingKernels):
        def linear(self, x, linear):
            y = super().linear(x, linear)
            is_split = x.shape[0] >= 8 if self.is_second(linear) else x.shape[0] <= 2
            return y + 1.0 if is_split and linear.out_features == LAYERS else y

    found = measure(Uneven())
    assert found.classes["qkv"] == ((3, 4, 5, 6, 8, 16), (1, 2))
    assert found.classes["down"] == ((1, 2, 3, 4, 5, 6), (8, 16))
    assert found.row_counts == (3, 4, 5, 6)


def bf16_layer(in_features=96):
    weight = torch.randn(16, in_features, generator=torch.Generator().manual_seed(1)).bfloat16()
    return PreparedLinear(weight, None, torch.bfloat16, 16, in_features)


@pytest.mark.parametrize("block", [12, 32, 47])
def test_another_order_of_the_sums_is_another_class_though_16_bits_round_nearly_all_of_it_away(block):
    def classes(block_of):
        return atlas.measure(BlockKernels(block_of), {"down": bf16_layer()}, bf16_layer(), COUNTS, COUNTS).classes

    assert classes(lambda _: 96)["down"] == (COUNTS,)
    assert classes(lambda rows: block if rows <= 2 else 96)["down"] == (COUNTS[2:], COUNTS[:2])


def test_one_ordinary_row_does_not_see_the_order():
    """Why the probe has rows whose sums cancel: the partner of the test above."""
    linear = bf16_layer()
    row = atlas._rows(linear, 1, 1.0)[0]
    outputs = [BlockKernels(lambda _, block=block: block).linear(row, linear) for block in (12, 96)]
    assert torch.equal(*outputs)


def test_two_inputs_of_a_cancelling_row_are_huge_and_their_products_cancel_exactly():
    linear = bf16_layer()
    rows = atlas._cancelling_rows(BlockKernels(lambda _: 96), linear)
    for row in rows.float():
        a, b = row.abs().topk(2).indices
        pair = row[a] * linear.weight[:, a].float() + row[b] * linear.weight[:, b].float()
        assert (pair == 0.0).any()
        assert torch.minimum(row[a].abs(), row[b].abs()) > 100 * row.abs().topk(3).values[2]


def test_the_lm_head_has_counts_and_a_class_of_its_own():
    found = measure(FakeKernels(head=by_parity), counts=(4, 8, 12), head_counts=(1, 2, 3))
    assert found.row_counts == (4, 8, 12)
    assert found.classes["lm_head"] == ((1, 3), (2,))
    assert found.logit_row_counts == (1, 3)


@pytest.mark.parametrize(
    ("counts", "canonical"),
    [((1, 2, 60, 70), (60, 70)), ((40, 50, 200, 300), (40, 50)), ((1, 2, 3, 60, 70), (1, 2, 3))],
    ids=str,
)
def test_the_largest_class_is_canonical_and_among_equals_the_one_nearest_to_64(counts, canonical):
    smaller = set(counts[: len(counts) - 2])
    found = measure(FakeKernels(layers=lambda x: float(x.shape[0] in smaller)), counts=counts)
    assert found.row_counts == canonical


def test_the_time_of_a_layer_is_known_for_every_row_count():
    seconds = measure(FakeKernels()).layer_seconds
    assert set(seconds) == set(COUNTS)
    assert min(seconds.values()) > 0.0


# Refusals -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("part", ["layers", "head"])
def test_rows_that_depend_on_their_neighbours_values_have_no_class(part):
    with pytest.raises(NoClassError, match="its index or its neighbours' values"):
        measure(FakeKernels(**{part: by_neighbours}))


@pytest.mark.parametrize(("part", "name"), [("layers", "the layers"), ("head", "lm_head")])
def test_rows_that_depend_on_their_index_at_every_count_have_no_class_and_the_error_says_what_to_do(part, name):
    with pytest.raises(NoClassError) as caught:
        measure(FakeKernels(**{part: by_index}), counts=(4, 8), head_counts=(4, 8))
    message = str(caught.value)
    assert message.startswith(f"a row of {name} depends on its index")
    assert "[4, 8]" in message
    assert "choose other canonical_rows or canonical_logit_rows" in message


def test_layers_that_are_usable_at_different_counts_only_have_no_class():
    class Disjoint(TellingKernels):
        def linear(self, x, linear):
            is_bad = (x.shape[0] == 8) == self.is_second(linear)
            return super().linear(x, linear) + (by_index(x) if is_bad else 0.0)

    with pytest.raises(NoClassError, match="a row of the layers"):
        measure(Disjoint(), counts=(4, 8))


@pytest.mark.parametrize("rows", COUNTS)
def test_the_probe_sees_an_index_and_gives_equal_bits_without_one(rows):
    linear = prepared(LAYERS)
    bits = atlas.probe(FakeKernels(), linear, rows)
    assert bits == atlas.probe(FakeKernels(), linear, 1, neighbours=1.0)
    assert len(bits) == 4 * LAYERS * 5
    assert (atlas.probe(FakeKernels(layers=by_index), linear, rows) is None) == (rows > 1)


# An atlas of an earlier start -----------------------------------------------------------------------------------------


def test_an_atlas_holds_for_the_kernels_it_was_measured_with():
    kernels = FakeKernels(layers=by_parity)
    assert still_holds(measure(kernels), kernels)


@pytest.mark.parametrize(
    "changed",
    [
        {"layers": only_at({COUNTS[-1]}, something)},
        {"layers": only_at({COUNTS[0]}, something)},
        {"layers": only_at({COUNTS[-1]}, by_neighbours)},
        {"layers": only_at({COUNTS[-1]}, by_index)},
        {"head": only_at({COUNTS[0]}, something)},
        {"head": only_at({COUNTS[-1]}, by_neighbours)},
    ],
    ids=["largest count", "smallest count", "neighbours", "index", "head count", "head neighbours"],
)
def test_an_atlas_does_not_hold_for_other_kernels(changed):
    found = measure(FakeKernels())
    assert still_holds(found, FakeKernels())
    assert not still_holds(found, FakeKernels(**changed))


def test_an_atlas_is_read_as_it_was_written(tmp_path):
    path = tmp_path / "new" / "folder" / "fp_1.json"
    found = measure(FakeKernels(layers=by_parity))
    atlas.save(found, path)
    assert atlas.load(path) == found
    assert [file.name for file in path.parent.iterdir()] == ["fp_1.json"]


def test_a_missing_atlas_is_none_and_no_news(tmp_path, caplog):
    assert atlas.load(tmp_path / "none.json") is None
    assert caplog.records == []


def saved(**changes):
    data = {"version": atlas._VERSION, "classes": {}, "row_counts": [4, 8], "logit_row_counts": [4]}
    return json.dumps({**data, "layer_seconds": {"4": 0.1}, **changes})


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "{}",
        saved(row_counts=[]),
        saved(row_counts=None),
        saved(logit_row_counts=["4"]),
        saved(classes=[]),
        saved(classes={"qkv": 1}),
        saved(layer_seconds={"4": "fast"}),
    ],
)
def test_an_atlas_that_cannot_be_read_is_none_with_a_warning_that_names_the_file(text, tmp_path, caplog):
    path = tmp_path / "fp_1.json"
    path.write_text(saved(), encoding="utf-8")
    assert atlas.load(path).row_counts == (4, 8)
    path.write_text(text, encoding="utf-8")
    assert atlas.load(path) is None
    assert "fp_1.json cannot be read and is measured again" in caplog.text


def test_an_atlas_of_another_version_is_none(tmp_path):
    path = tmp_path / "fp_1.json"
    path.write_text(saved(version=atlas._VERSION - 1), encoding="utf-8")
    assert atlas.load(path) is None


def test_a_folder_that_cannot_be_written_is_a_warning_and_no_error(tmp_path, caplog):
    (tmp_path / "file").write_text("in the way", encoding="utf-8")
    with caplog.at_level(logging.WARNING):
        atlas.save(measure(FakeKernels()), tmp_path / "file" / "fp_1.json")
    assert "the atlas cannot be kept" in caplog.text
