"""The training contract by hand-written examples: anchors, blocks, masks, positions, labels, weights, acceptance."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kconv.speculative import contract as c


def anchors(*positions: int, keep: tuple[bool, ...] | None = None) -> c.Anchors:
    return c.Anchors(torch.tensor([positions]), torch.tensor([keep or (True,) * len(positions)]))


def test_block_layout() -> None:
    ids = torch.tensor([[10, 11, 12, 13, 14, 15]])
    blocks = c.block_tokens(ids, anchors(1, 3, 0, keep=(True, True, False)), 3, mask_token_id=99)
    assert blocks.tolist() == [[11, 99, 99, 13, 99, 99, 99, 99, 99]]


def test_positions_are_local_to_a_packed_document() -> None:
    context = torch.tensor([[0, 1, 2, 0, 1, 2]])
    assert c.block_positions(anchors(1, 4), 2, context).tolist() == [[0, 1, 2, 0, 1, 2, 1, 2, 1, 2]]


def test_mask_by_hand() -> None:
    """Strictly before the anchor, own block in both directions, no other block; a padding block sees only itself."""
    mask = c.block_mask(torch.tensor([[2, 3]]), torch.tensor([[True, False]]), 4, 2)
    seen = (mask[0, 0] == 0).long().tolist()
    assert seen == [[1, 1, 0, 0, 1, 1, 0, 0]] * 2 + [[0, 0, 0, 0, 0, 0, 1, 1]] * 2
    assert set(mask.unique().tolist()) == {0.0, -math.inf}


def test_mask_causal_packed_and_sliding() -> None:
    keep = torch.ones(1, 1, dtype=torch.bool)
    causal = c.block_mask(torch.tensor([[1]]), keep, 2, 3, causal=True)
    assert (causal[0, 0, :, 2:] == 0).long().tolist() == [[1, 0, 0], [1, 1, 0], [1, 1, 1]]
    packed = c.block_mask(torch.tensor([[4]]), keep, 5, 1, documents=torch.tensor([[0, 0, 1, 1, 1]]))
    assert (packed[0, 0] == 0).long().tolist() == [[0, 0, 1, 1, 0, 1]]
    query = c.block_mask(torch.tensor([[4]]), keep, 5, 2, window=3)
    assert (query[0, 0] == 0).long().tolist() == [[0, 0, 1, 1, 0, 1, 1], [0, 0, 0, 1, 0, 1, 1]]
    anchor = c.block_mask(torch.tensor([[4]]), keep, 5, 2, window=3, window_rule="anchor")
    assert (anchor[0, 0] == 0).long().tolist() == [[0, 1, 1, 1, 0, 1, 1]] * 2


@given(st.integers(2, 24), st.integers(1, 6), st.booleans(), st.integers(0, 10**6))
@settings(max_examples=60, deadline=None)
def test_no_row_is_empty(length: int, block: int, causal: bool, seed: int) -> None:
    """A row without a visible key is NaN after the softmax and spreads; there is none, whatever the anchors."""
    g = torch.Generator().manual_seed(seed)
    positions = torch.randint(0, length, (2, 3), generator=g)
    keep = torch.rand(2, 3, generator=g) > 0.5
    window = int(torch.randint(1, 5, (1,), generator=g))
    mask = c.block_mask(positions, keep, length, block, causal=causal, window=window)
    assert (mask == 0).any(-1).all()


def test_anchors_leave_room_and_are_supervised() -> None:
    loss = torch.ones(2, 10)
    loss[0, :4] = 0
    loss[1, 3:] = 0
    found = c.sample_anchors(loss, 4, 100)
    assert found.positions[0][found.keep[0]].tolist() == [4, 5, 6]
    assert found.positions[1][found.keep[1]].tolist() == [0, 1, 2]
    few = c.sample_anchors(loss, 4, 2, generator=torch.Generator().manual_seed(0))
    assert few.positions.shape == (2, 2)
    assert (few.positions.diff() > 0).all()


def test_anchors_of_packed_documents_keep_their_block_inside() -> None:
    documents = torch.tensor([[0] * 5 + [1] * 3 + [2] * 6])
    found = c.sample_anchors(torch.ones(1, 14), 4, 100, documents=documents)
    assert found.positions[0].tolist() == [0, 1, 8, 9, 10]
    spark = c.sample_anchors(torch.ones(1, 14), 4, 100, documents=documents, sample_from_anchor=True)
    assert spark.positions[0].tolist() == [0, 1, 2, 3, 5, 6, 8, 9, 10, 11, 12]


def test_no_anchor_is_an_error_a_trainer_can_catch() -> None:
    with pytest.raises(c.NoValidAnchors, match="no supervised position of 5"):
        c.sample_anchors(torch.zeros(1, 5), 4)


def test_labels_of_both_kinds() -> None:
    ids, loss = torch.tensor([[10, 11, 12, 13, 14]]), torch.tensor([[1.0, 1, 1, 0, 1]])
    target, trained = c.labels(ids, loss, anchors(1), 4)
    assert target.tolist() == [[[11, 12, 13, 14]]]
    assert trained.tolist() == [[[False, True, False, True]]]
    target, trained = c.labels(ids, loss, anchors(1), 4, sample_from_anchor=True)
    assert target[0, 0, :3].tolist() == [12, 13, 14]
    assert trained.tolist() == [[[True, False, False, False]]]


def test_labels_stop_at_the_document_and_skip_padding_blocks() -> None:
    ids, loss = torch.arange(6)[None], torch.ones(1, 6)
    documents = torch.tensor([[0, 0, 0, 1, 1, 1]])
    _, trained = c.labels(ids, loss, anchors(1, 3, keep=(True, False)), 3, sample_from_anchor=True, documents=documents)
    assert trained.tolist() == [[[True, False, False], [False] * 3]]


def test_weights() -> None:
    assert c.decay_weights(4, None).tolist() == [0, 1, 1, 1]
    torch.testing.assert_close(c.decay_weights(4, 2.0), torch.tensor([0.0, 1.0, math.exp(-0.5), math.exp(-1.0)]))
    assert c.decay_weights(3, 2.0, sample_from_anchor=True)[0] == 1.0


def test_acceptance() -> None:
    assert c.accepted_run(torch.tensor([[5, 6, 7], [5, 9, 7]]), torch.tensor([[5, 6, 8, 1], [5, 6, 7, 2]])).tolist() == [2, 1]
    predicted = torch.tensor([[[0, 5, 6, 7], [0, 1, 6, 7], [0, 1, 2, 3]]])
    target = torch.tensor([[[0, 5, 6, 9], [0, 5, 6, 7], [0, 1, 2, 3]]])
    trained = torch.tensor([[[False, True, True, True]] * 2 + [[False] * 4]])
    assert c.acceptance_lengths(predicted, target, trained).tolist() == [3.0, 1.0]


@pytest.mark.parametrize("packed", [False, True])
def test_labels_and_anchors_equal_nemo(packed: bool) -> None:
    """NeMo's trainer draws and labels the same, given the same anchors."""
    core = pytest.importorskip("nemo_automodel.components.speculative.dflash.core")
    g = torch.Generator().manual_seed(2)
    ids, loss = torch.randint(0, 50, (2, 16), generator=g), (torch.rand(2, 16, generator=g) > 0.2).float()
    documents = torch.tensor([[0] * 7 + [1] * 9, [0] * 4 + [1] * 12]) if packed else None
    remaining = c.remaining_in_document(documents) if documents is not None else None

    class Draft(torch.nn.Module):
        input_embedding_scale = 1.0

    trainer = core.DFlashTrainerModule(
        Draft(), torch.nn.Identity(), torch.nn.Identity(), 49, block_size=4, attention_backend="sdpa", num_anchors=99
    )
    theirs, keep = trainer._sample_anchor_positions(16, loss, ids.device, remaining)
    ours = c.sample_anchors(loss, 4, 99, documents=documents)
    assert torch.equal(ours.positions, theirs)
    assert torch.equal(ours.keep, keep)
    _, target, mask = trainer._build_block_targets(ids, loss, theirs, keep, 16, doc_remaining=remaining)
    mine, trained = c.labels(ids, loss, ours, 4, documents=documents)
    assert torch.equal(mine[ours.keep], target[keep])
    assert torch.equal(trained[..., 1:], mask[..., 1:] > 0.5)
