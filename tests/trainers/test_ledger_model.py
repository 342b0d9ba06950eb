"""The ledger against a slow, obvious model, in any order of events; resumed from any earlier snapshot."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from trainers.rollouts.ledger import Key, Ledger, State

CAUSES = ["stale", "zero_variance", "filtered", "failed"]


class LedgerMachine(RuleBasedStateMachine):
    """`done`: key → "trained" or a cause. `under`: key → what is under way, a queued group as [left, trained, cause]."""

    @initialize(prompts=st.integers(1, 5), epochs=st.integers(1, 3), stream=st.booleans(), shuffle=st.booleans())
    def begin(self, prompts: int, epochs: int, stream: bool, shuffle: bool) -> None:
        self.prompts, self.epochs, self.stream, self.shuffle = prompts, epochs, stream, shuffle
        self.ledger = self.fresh()
        order = Ledger(prompts, 7, shuffle and not stream, epochs)
        self.keys: list[Key] = [(epoch, int(row)) for epoch in range(epochs) for row in order.order(epoch)]
        self.done: dict[Key, str] = {}
        self.under: dict[Key, Any] = {}
        self.saved: list[tuple[dict[str, Any], dict[Key, str], dict[Key, int]]] = []

    def fresh(self, seed: int = 7) -> Ledger:
        return Ledger(None if self.stream else self.prompts, seed, self.shuffle, self.epochs)

    def some(self, data: st.DataObject, kind: type | str) -> Key | None:
        keys = [key for key, what in self.under.items() if (what == kind if isinstance(kind, str) else isinstance(what, kind))]
        return data.draw(st.sampled_from(keys)) if keys else None

    @rule()
    def take(self) -> None:
        left = [key for key in self.keys if key not in self.done and key not in self.under]
        key = self.ledger.peek()
        while self.stream and key is not None and key[1] >= self.prompts:
            self.ledger.ended(key[0], self.prompts)
            key = self.ledger.peek()
        assert self.ledger.next() == key == (left[0] if left else None)
        assert self.ledger.exhausted == (len(left) <= 1) or self.stream
        if key is not None:
            self.under[key] = "in flight"

    @rule(data=st.data())
    def score(self, data: st.DataObject) -> None:
        if key := self.some(data, "in flight"):
            self.ledger.scored(key)
            self.under[key] = "scored"

    @rule(data=st.data(), cause=st.sampled_from(CAUSES), kind=st.sampled_from(["in flight", "scored"]))
    def drop(self, data: st.DataObject, cause: str, kind: str) -> None:
        if key := self.some(data, kind):
            self.ledger.dropped(key, cause)
            del self.under[key]
            self.done[key] = cause

    @rule(data=st.data(), samples=st.integers(1, 3))
    def queue(self, data: st.DataObject, samples: int) -> None:
        if key := self.some(data, "scored"):
            self.ledger.queued(key, samples)
            self.under[key] = [samples, 0, ""]

    @rule(samples=st.integers(2, 3))
    def queue_and_train_one(self, samples: int) -> None:
        """The short way to a partly trained group."""
        left = [key for key in self.keys if key not in self.done and key not in self.under]
        self.take()
        if left:
            self.ledger.scored(left[0])
            self.ledger.queued(left[0], samples)
            assert self.ledger.settle(left[0]) is False
            self.under[left[0]] = [samples - 1, 1, ""]

    @rule(data=st.data(), cause=st.sampled_from([None, None, "stale", "oversize"]))
    def settle(self, data: st.DataObject, cause: str | None) -> None:
        if key := self.some(data, list):
            group = self.under[key]
            group[0] -= 1
            group[1] += cause is None
            group[2] = cause or group[2]
            finished = group[0] == 0
            assert self.ledger.settle(key, cause) is (finished and not group[1])
            if finished:
                del self.under[key]
                self.done[key] = "trained" if group[1] else group[2]

    @rule()
    def save(self) -> None:
        partial = {key: "trained" for key, what in self.under.items() if isinstance(what, list) and what[1]}
        left = {key: what[0] for key, what in self.under.items() if isinstance(what, list)}
        self.saved.append((json.loads(json.dumps(self.ledger.state_dict())), self.done | partial, left))

    @precondition(lambda self: self.saved)
    @rule(data=st.data(), buffered=st.booleans())
    def resume(self, data: st.DataObject, buffered: bool) -> None:
        """From any snapshot; the buffer, if it was kept, gives back what of it is still fresh."""
        index = data.draw(st.integers(0, len(self.saved) - 1))
        del self.saved[index + 1 :]
        state, done, left = self.saved[index]
        self.ledger = self.fresh(seed=99)  # the order is the one it was begun with
        self.ledger.load_state_dict(state)
        self.done, self.under = dict(done), {}
        for key, samples in left.items() if buffered else ():
            fresh = data.draw(st.integers(0, samples))
            if fresh:
                self.ledger.restored(key, fresh)
                self.under[key] = [fresh, int(self.done.pop(key, None) is not None), ""]
        self.ledger.close_finished()

    @invariant()
    def it_agrees(self) -> None:
        if not hasattr(self, "ledger"):
            return
        assert self.ledger.done == len(self.done)
        expected: dict[int, dict[str, Any]] = {}
        for (epoch, _), what in self.done.items():
            counts = expected.setdefault(epoch, {"trained": 0, "dropped": {}})
            if what == "trained":
                counts["trained"] += 1
            else:
                counts["dropped"][what] = counts["dropped"].get(what, 0) + 1
        for epoch, counts in self.ledger.summary.items():
            assert sum(key[0] == epoch for key in self.done) == self.prompts
            assert counts == expected[epoch]
        if not self.stream:
            whole = [e for e in range(self.epochs) if sum(key[0] == e for key in self.done) == self.prompts]
            done_in_order = next((e for e in range(self.epochs) if e not in whole), self.epochs)
            assert sorted(self.ledger.summary) == list(range(done_in_order))
            assert self.ledger.passes() == len(self.done) / self.prompts
        names = {"in flight": State.IN_FLIGHT, "scored": State.SCORED}
        for key, what in self.under.items():
            assert self.ledger.state(key) is (State.QUEUED if isinstance(what, list) else names[what])
        for key in self.done:
            assert self.ledger.state(key) in (State.TRAINED, State.DROPPED)

    @invariant()
    def the_state_says_what_counts(self) -> None:
        if not hasattr(self, "ledger"):
            return
        state = self.ledger.state_dict()
        counted = set(self.done) | {key for key, what in self.under.items() if isinstance(what, list) and what[1]}
        order = {epoch: [key for key in self.keys if key[0] == epoch] for epoch in range(self.epochs)}
        listed = {key for epoch in range(state["epoch"]) for key in order[epoch]}
        listed |= set(order.get(state["epoch"], [])[: state["next_index"]])
        for epoch, ranges in state["done"].items():
            for start, stop in ranges:
                listed |= set(order[int(epoch)][start:stop])
        assert listed == counted
        assert sum(state["dropped"].values()) == sum(what != "trained" for what in self.done.values())


LedgerMachine.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
test_the_ledger_agrees_with_the_model = LedgerMachine.TestCase
