"""The ledger alone: order, table of states, settling sample by sample, ranges, closing of epochs."""

from __future__ import annotations

import json

import pytest

from trainers.rollouts.ledger import COUNTS, Ledger, State


def take(ledger: Ledger, count: int) -> list[tuple[int, int]]:
    keys = [ledger.next() for _ in range(count)]
    assert None not in keys
    return keys  # type: ignore[return-value]


def train(ledger: Ledger, key: tuple[int, int]) -> None:
    ledger.scored(key)
    ledger.queued(key, 1)
    ledger.settle(key)


def reload(ledger: Ledger) -> Ledger:
    other = Ledger(ledger.prompts, 99, True, ledger.epochs)
    other.load_state_dict(json.loads(json.dumps(ledger.state_dict())))
    other.close_finished()
    return other


def test_every_state_is_in_the_table() -> None:
    assert set(COUNTS) == set(State)
    assert {state for state, counts in COUNTS.items() if counts} == {State.TRAINED, State.DROPPED}


def test_the_order_depends_on_seed_and_epoch_alone() -> None:
    first, second = Ledger(20, 1, True, None), Ledger(20, 1, True, None)
    orders = [first.order(epoch).tolist() for epoch in (0, 1)]
    assert orders[0] != orders[1] and sorted(orders[0]) == list(range(20))
    assert [second.order(epoch).tolist() for epoch in (0, 1)] == orders
    assert Ledger(20, 2, True, None).order(0).tolist() != orders[0]
    assert Ledger(4, 1, False, None).order(3).tolist() == [0, 1, 2, 3]
    assert [row for _, row in take(first, 20)] == orders[0]


@pytest.mark.parametrize(("epochs", "prompts", "total"), [(1.0, 3, 3), (1.5, 4, 6), (0.1, 30, 3), (0.5, 3, 2), (2.0, 5, 10)])
def test_fractional_epochs(epochs: float, prompts: int, total: int) -> None:
    ledger = Ledger(prompts, 0, True, epochs)
    keys = take(ledger, total)
    assert len(set(keys)) == total and ledger.next() is None and ledger.exhausted
    for key in keys:
        train(ledger, key)
    assert ledger.done == total and sum(counts["trained"] for counts in ledger.summary.values()) == total
    assert reload(ledger).exhausted


def test_a_group_is_settled_sample_by_sample() -> None:
    ledger = Ledger(2, 0, False, 1)
    first, second = take(ledger, 2)
    for key in (first, second):
        ledger.scored(key)
        ledger.queued(key, 2)
    ledger.settle(first, "stale")
    assert ledger.state(first) is State.QUEUED
    assert ledger.settle(first) is False  # one of two was trained: the group is
    ledger.settle(second, "stale")
    assert ledger.settle(second, "stale") is True
    assert ledger.summary == {0: {"trained": 1, "dropped": {"stale": 1}}}


def test_the_state_lists_what_is_done_beyond_the_first_gap() -> None:
    ledger = Ledger(8, 0, False, None)
    keys = take(ledger, 8)
    for position in (0, 1, 3, 4, 6):
        train(ledger, keys[position])
    next_epoch = take(ledger, 1)[0]
    ledger.dropped(next_epoch, "filtered")
    state = ledger.state_dict()
    assert (state["epoch"], state["next_index"]) == (0, 2)
    assert state["done"] == {"0": [[3, 5], [6, 7]], "1": [[0, 1]]} and state["dropped"] == {"filtered": 1}
    restored = reload(ledger)
    assert [restored.next() for _ in range(4)] == [(0, 2), (0, 5), (0, 7), (1, 1)]
    assert restored.seed == 0 and not restored.shuffle  # as it was begun, not as the config says now


def test_a_partly_trained_group_stays_trained_whatever_becomes_of_the_rest() -> None:
    ledger = Ledger(1, 0, False, 1)
    key = take(ledger, 1)[0]
    ledger.scored(key)
    ledger.queued(key, 3)
    ledger.settle(key)
    lost = reload(ledger)
    assert lost.summary == {0: {"trained": 1, "dropped": {}}} and lost.exhausted
    kept = Ledger(1, 0, False, 1)
    kept.load_state_dict(ledger.state_dict())
    kept.restored(key, 2)
    kept.close_finished()
    assert kept.summary == {} and kept.exhausted
    kept.settle(key, "stale")
    assert kept.settle(key, "stale") is False
    assert kept.summary == {0: {"trained": 1, "dropped": {}}}


def test_impossible_transitions_are_bugs() -> None:
    ledger = Ledger(2, 0, False, 1)
    key = take(ledger, 1)[0]
    with pytest.raises(AssertionError, match="cannot go from IN_FLIGHT to QUEUED"):
        ledger.queued(key, 1)
    ledger.dropped(key, "failed")
    with pytest.raises(AssertionError, match="cannot go to SCORED: it is done"):
        ledger.scored(key)
    last, beyond = Ledger(2, 0, False, 1), (0, 1)
    take(last, 2)
    last.dropped(beyond, "failed")
    with pytest.raises(AssertionError, match="cannot go from DROPPED"):
        last.scored(beyond)
