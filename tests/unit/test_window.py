"""The rows of a drafting layer: the latest ones of the text, its first ones, and those of drafts."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from longdraft import kernels
from longdraft.cache.window import RowWindow

HEADS, DIM, LAYERS = 2, 4, 2
KERNELS = kernels.choose("cpu", "float32", "reference")
MOVES = st.one_of(st.tuples(st.just("text"), st.integers(1, 9)), st.tuples(st.just("drafts"), st.integers(1, 4)),
                  st.tuples(st.just("keep"), st.integers(0, 4)), st.tuples(st.just("room"), st.integers(1, 4)),
                  st.tuples(st.just("restart"), st.integers(1, 3)))


@given(st.lists(MOVES, max_size=20), st.integers(1, 7), st.integers(0, 3))
@settings(max_examples=60, deadline=None)
def test_the_window_holds_the_first_and_the_latest_rows_and_the_drafts(moves, window, sinks):
    """Compared with lists in which each row is one number."""
    held = RowWindow(KERNELS, LAYERS, HEADS, DIM, window, 4, sinks)
    first: list[float] = []
    text: list[float] = []
    drafts: list[float] = []
    number = end = 0

    def rows(count):
        nonlocal number
        number += count
        values = torch.arange(number - count, number).float()
        return values.tolist(), values[None, :, None, None].expand(LAYERS, -1, HEADS, DIM).contiguous()

    def write(values):
        nonlocal text, end
        while values and end == len(first) < sinks and not text:
            first.append(values.pop(0))
            end += 1
        text = (text + values)[-window:]
        end += len(values)

    for move, count in moves:
        if move == "drafts":
            values, k = rows(min(count, 4 - len(drafts)))
            held.add_drafts(k, -k)
            drafts += values
            continue
        if move == "keep":
            kept = min(count, len(drafts))
            held.keep(kept)
            write(drafts[:kept])
        else:
            held.keep(0)
        drafts = []
        if move == "text":
            values, k = rows(count)
            held.add_text(k, -k)
            write(values)
        elif move == "room":
            held.make_room(count)
            text = text[max(0, len(text) + count - window) :]
        elif move == "restart" and end >= sinks:
            held.restart(end + count)
            text, end = [], end + count
        for store in held.stores:
            k, v = store.read(torch.arange(held.length).expand(HEADS, -1))
            assert k[0, : held.num_sinks, 0].tolist() == first
            assert sorted(k[0, held.num_sinks :, 0].tolist()) == sorted(text + drafts) and torch.equal(k, -v)
        assert held.end == end


def test_sinks_are_rotated_to_the_positions_before_the_window():
    inverse = torch.tensor([1.0, 0.1])

    def rotations(positions):
        angles = torch.tensor(positions).float()[:, None] * inverse
        return angles.cos(), angles.sin()

    torch.manual_seed(0)
    held, keys = RowWindow(KERNELS, 1, HEADS, DIM, 5, 0, 2), torch.randn(20, HEADS, DIM)
    for position in range(20):
        k = KERNELS.rope(keys[position : position + 1], *rotations([position]))
        held.add_text(k[None], k[None])
        held.turn_sinks(rotations)
    found, values = held.stores[0].read(torch.arange(2).expand(HEADS, -1))
    wanted = KERNELS.rope(keys[:2], *rotations([13, 14])).transpose(0, 1)
    torch.testing.assert_close(found, wanted)  # the window holds positions 15 to 19
    torch.testing.assert_close(values, KERNELS.rope(keys[:2], *rotations([0, 1])).transpose(0, 1))


@pytest.mark.parametrize("length", [30, 600])
def test_memory_does_not_grow_with_the_text(length):
    held = RowWindow(KERNELS, 1, HEADS, DIM, 12, 4)
    before = held.nbytes
    held.add_text(*(torch.zeros(1, length, HEADS, DIM) for _ in range(2)))
    assert held.nbytes == before and held.num_text == 12
