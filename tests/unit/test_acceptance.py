"""What drafts have been accepted so far, by depth and by node, and what that says of the next one."""

from __future__ import annotations

import pytest

from longdraft.drafters.auto.acceptance import AcceptanceByDepth, NodeAcceptance
from longdraft.request.tree import Trie, from_paths, root_only
from longdraft.speculation.decayed_rate import PRIOR_WEIGHT, DecayedRate


def test_depths_that_were_not_tried_are_expected_to_do_as_well_as_the_last_one():
    depths = AcceptanceByDepth(4)
    for accepted in (0, 1, 2, 3) * 30:
        depths.add(2, accepted)
    first, second, third, fourth = depths.reached()
    assert first == pytest.approx(0.75, abs=0.05) and second == pytest.approx(0.5, abs=0.05)
    assert third == pytest.approx(second * second / first) and fourth == pytest.approx(third * second / first)


def test_a_new_request_starts_with_the_acceptance_of_the_earlier_ones():
    others = AcceptanceByDepth(4)
    for _ in range(50):
        others.add(4, 3)
    own = others.of_a_request()
    assert own.reached() == pytest.approx(others.reached(), abs=0.1)
    for _ in range(80):
        own.add(4, 0)
    assert own.reached()[0] < 0.1 < 0.9 < others.reached()[0]


def test_acceptance_is_counted_by_source_depth_and_rank():
    acceptance = NodeAcceptance()
    tree = from_paths(1, [(2, 4), (3,)], "self")
    for step in range(300):
        acceptance.add(tree, [0, 1, 2] if step % 2 else [0, 3] if step % 10 == 0 else [0])
    reach = acceptance.reach(tree)
    assert reach[0] == 1
    assert reach[1] == pytest.approx(0.5, abs=0.1) and reach[2] == pytest.approx(reach[1], abs=0.05)
    assert reach[3] == pytest.approx(0.1, abs=0.06)


def test_a_decayed_rate_begins_with_what_is_expected_and_follows_the_latest_outcomes():
    rate = DecayedRate()
    assert rate.value(0.3) == 0.3 and rate.mean == 0
    rate.add(True)
    assert rate.value(0.3) == pytest.approx((1 + PRIOR_WEIGHT * 0.3) / (1 + PRIOR_WEIGHT)) and rate.mean == 1
    for _ in range(500):
        rate.add(False)
    assert rate.value(0.3) < 0.03 and rate.mean < 0.001
    units = DecayedRate(0.5)
    for hits, tries in ((3, 4), (1, 8)):
        units.add(hits, tries)
    assert units.mean == pytest.approx((0.5 * 3 + 1) / (0.5 * 4 + 8))


def test_a_tree_keeps_the_wanted_nodes_below_wanted_ones():
    tree = from_paths(1, [(2, 4), (3, 5)], "self")
    kept = tree.kept([True, False, True, True, True])
    assert kept == from_paths(1, [(3, 5)], "self")
    assert tree.kept([True] * 5) is tree


def test_chains_after_the_leaves_of_a_tree_end_at_the_given_depth_and_keep_its_rates():
    trie = Trie(1)
    trie.add(trie.add(0, 2, "self", 0.9), 3, "self")
    trie.add(0, 4, "self", 0.4)
    tree = trie.tree()
    longer = tree.extended(lambda leaf: [10 * tree.tokens[leaf]] * 9, 3, "grammar")
    assert (longer.tokens, longer.parents) == ((1, 2, 3, 4, 30, 40, 40), (-1, 0, 1, 0, 2, 3, 5))
    assert longer.sources == ("", "self", "self", "self", "grammar", "grammar", "grammar")
    assert longer.rates == (None, 0.9, None, 0.4, None, None, None)
    assert len(root_only(1).extended(lambda leaf: [2] * 99, 99, "grammar")) == 33, "of which 32 are new"
    assert tree.extended(lambda leaf: (), 9, "grammar") is tree


def test_a_path_follows_the_tokens_as_far_as_there_are_guesses():
    tree = from_paths(1, [[2, 3, 4], [2, 5]], "")
    assert tree.follow([2, 5, 6]) == [0, tree.children[0, 2], tree.children[tree.children[0, 2], 5]]
    assert tree.follow([9]) == tree.follow([]) == [0]
