"""The reconciler against a token-by-token version of the rule, and each drift case by hand."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from trainers.algorithms.sequences import group_samples, rollout_samples
from trainers.rollouts.reconcile import Drift, reconcile
from trainers.types import Prompt, Rollout, RolloutGroup, Sample, TurnRecord, VersionSpan

PROMPT = Prompt(0, 3, [{"role": "user", "content": "?"}], {}, np.array([5, 9], np.int32))


def turn(prompt: list[int], output: list[int], version: int = 0, first_logprob: float = -0.5, **more: Any) -> TurnRecord:
    logprobs = np.array([first_logprob - i for i in range(len(output))], np.float32)
    return TurnRecord(
        np.array(prompt, np.int32), np.array(output, np.int32), logprobs, [VersionSpan(0, len(output), version)], "stop", **more
    )


def conversation(*turns: TurnRecord, threshold: int = 1024) -> Rollout:
    return Rollout(PROMPT, list(turns), reconciled=reconcile(turns, threshold))


def samples_of(*turns: TurnRecord, threshold: int = 1024) -> list[Sample]:
    return rollout_samples(conversation(*turns, threshold=threshold), 0.5)


def brief(sample: Sample) -> tuple[list[int], str]:
    return sample.token_ids.tolist(), "".join("x" if trained else "." for trained in sample.loss_mask)


# Each case by hand ------------------------------------------------------------------------------------------------------------


def test_clean_turns_are_one_sample_with_tool_results_as_context() -> None:
    (sample,) = samples_of(turn([5, 9], [7, 2], version=4), turn([5, 9, 7, 2, 4, 4], [8, 1], version=6, first_logprob=-0.1))
    assert brief(sample) == ([5, 9, 7, 2, 4, 4, 8, 1], "..xx..xx")
    np.testing.assert_allclose(sample.sampler_logprobs, [0, 0, -0.5, -1.5, 0, 0, -0.1, -1.1])
    assert sample.versions.tolist() == [-1, -1, 4, 4, -1, -1, 6, 6]
    assert sample.version_min == 4


def test_a_small_rewrite_of_the_last_response_is_realigned_and_its_tail_becomes_context() -> None:
    turns = turn([5, 9], [7, 2, 3], version=1), turn([5, 9, 7, 6, 4], [8], version=2)
    (sample,) = samples_of(*turns)
    assert brief(sample) == ([5, 9, 7, 6, 4, 8], "..x..x")
    assert sample.sampler_logprobs[2] == -0.5 and sample.versions.tolist() == [-1, -1, 1, -1, -1, 2]
    assert reconcile(turns, 1024).drift == [Drift("realign", 2)]


def test_a_rewrite_as_long_as_the_threshold_forks() -> None:
    turns = turn([5, 9], [7, 2, 3]), turn([5, 9, 7, 6, 4], [8])
    assert [brief(sample) for sample in samples_of(*turns, threshold=2)] == [
        ([5, 9, 7, 2, 3], "..xxx"),
        ([5, 9, 7, 6, 4, 8], ".....x"),
    ]
    assert len(samples_of(*turns, threshold=3)) == 1
    assert reconcile(turns, 2).drift == [Drift("fork", 2)]


def test_a_rewrite_before_the_last_response_forks_however_short() -> None:
    turns = turn([5, 9], [7]), turn([5, 9, 7, 4], [8]), turn([5, 9, 6, 4, 8, 4], [1])
    assert [brief(sample) for sample in samples_of(*turns)] == [([5, 9, 7, 4, 8], "..x.x"), ([5, 9, 6, 4, 8, 4, 1], "......x")]
    assert reconcile(turns, 1024).drift == [Drift("clean", 0), Drift("fork", 3)]


def test_a_history_cut_short_within_the_last_response_is_realigned() -> None:
    (sample,) = samples_of(turn([5, 9], [7, 2, 3]), turn([5, 9, 7], [8]))
    assert brief(sample) == ([5, 9, 7, 8], "..xx")


def test_versions_are_those_of_trained_tokens_only() -> None:
    # All of turn 1 (version 1) is overwritten: the sample is as fresh as turn 2.
    (sample,) = samples_of(turn([5, 9], [7, 2], version=1), turn([5, 9, 6], [8], version=3))
    assert brief(sample) == ([5, 9, 6, 8], "...x") and sample.version_min == 3


def test_a_turn_sampled_across_a_weight_update_has_two_versions() -> None:
    record = turn([5], [7, 8, 9])
    record.spans = [VersionSpan(0, 2, 4), VersionSpan(2, 3, 5)]
    (sample,) = samples_of(record)
    assert sample.versions.tolist() == [-1, 4, 4, 5] and sample.version_min == 4


def test_sequences_without_a_trained_token_are_left_out() -> None:
    assert samples_of() == [] and samples_of(turn([5, 9], [])) == []
    assert samples_of(turn([], [7])) == []  # nothing predicts the first token
    assert [brief(sample) for sample in samples_of(turn([5, 9], []), turn([6], [7]))] == [([6, 7], ".x")]


def test_every_sample_of_a_conversation_carries_its_advantage() -> None:
    forked = conversation(turn([5, 9], [7, 2]), turn([6], [8]))
    single = conversation(turn([5, 9], [3]))
    samples = group_samples(RolloutGroup(PROMPT, [forked, single], np.array([1.5, -1.5], np.float32)))
    assert [sample.advantage for sample in samples] == [1.5, 1.5, -1.5] and {sample.group for sample in samples} == {"0:3"}


def test_what_the_sampler_was_asked_for_follows_its_tokens() -> None:
    def with_tops(prompt: list[int], output: list[int], counts: list[int]) -> TurnRecord:
        ids = np.array([[token, token + 100] for token in output], np.int32).reshape(-1, 2)
        sets = [token * 10 + i for token, count in zip(output, counts, strict=True) for i in range(count)]
        return turn(
            prompt,
            output,
            top_ids=ids,
            top_logprobs=-ids.astype(np.float32),
            candidate_ids=np.array(sets, np.int32),
            candidate_counts=np.array(counts, np.int32),
        )

    (sample,) = samples_of(with_tops([5], [7, 2], [1, 3]), with_tops([5, 7], [8, 9], [0, 2]))  # 2 was overwritten
    assert brief(sample) == ([5, 7, 8, 9], ".xxx")
    assert sample.top_ids is not None and sample.top_ids.tolist() == [[7, 107], [8, 108], [9, 109]]
    assert sample.top_logprobs is not None and sample.top_logprobs.tolist() == [[-7, -107], [-8, -108], [-9, -109]]
    assert sample.candidate_counts is not None and sample.candidate_counts.tolist() == [1, 0, 2]
    assert sample.candidate_ids is not None and sample.candidate_ids.tolist() == [70, 90, 91]
    (plain,) = samples_of(turn([5], [7]))
    assert plain.top_ids is None and plain.top_logprobs is None
    assert plain.candidate_ids is None and plain.candidate_counts is None


# Against an obvious version ---------------------------------------------------------------------------------------------------


@dataclass
class Row:
    """A sequence as lists, one entry per token."""

    ids: list[int] = field(default_factory=list)
    mask: list[bool] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    response_start: int = 0

    def add(self, token: int, trained: bool, logprob: float, version: int) -> None:
        trained = trained and len(self.ids) > 0
        self.ids.append(token)
        self.mask.append(trained)
        self.logprobs.append(logprob if trained else 0.0)
        self.versions.append(version if trained else -1)


def slow(turns: list[TurnRecord], threshold: int) -> tuple[list[Row], list[Drift]]:
    rows: list[Row] = []
    drifts: list[Drift] = []
    for record in turns:
        prompt = record.prompt_ids.tolist()
        if rows:
            row = rows[-1]
            matched = 0
            while matched < len(row.ids) and matched < len(prompt) and row.ids[matched] == prompt[matched]:
                matched += 1
            drift = len(row.ids) - matched
            if drift == 0:
                drifts.append(Drift("clean", 0))
            elif matched >= row.response_start and drift < threshold:
                drifts.append(Drift("realign", drift))
                for values in (row.ids, row.mask, row.logprobs, row.versions):
                    del values[matched:]
            else:
                drifts.append(Drift("fork", drift))
                rows.append(Row())
        else:
            rows.append(Row())
        row = rows[-1]
        for token in prompt[len(row.ids) :]:
            row.add(token, False, 0.0, -1)
        row.response_start = len(row.ids)
        for position, token in enumerate(record.output_ids.tolist()):
            version = next(span.version for span in record.spans if span.start <= position < span.stop)
            row.add(token, True, float(record.output_logprobs[position]), version)
    return [row for row in rows if any(row.mask)], drifts


@st.composite
def conversations(draw: st.DrawFn) -> list[TurnRecord]:
    """Turns whose prompts continue, cut, overwrite or replace what came before, over few tokens so that they meet by chance."""
    tokens = st.lists(st.integers(0, 2), max_size=4)
    turns: list[TurnRecord] = []
    held: list[int] = []
    for _ in range(draw(st.integers(1, 6))):
        prompt = list(held)
        change = draw(st.sampled_from(["append", "append", "cut", "overwrite", "replace"]))
        if change in ("cut", "overwrite") and prompt:
            at = draw(st.integers(0, len(prompt) - 1))
            prompt = prompt[:at] + ([] if change == "cut" else [draw(st.integers(0, 2)), *prompt[at + 1 :]])
        elif change == "replace":
            prompt = []
        prompt += draw(tokens)
        output = draw(tokens)
        record = turn(prompt, output, first_logprob=draw(st.floats(-9, -1, width=32)))
        split = draw(st.integers(0, len(output)))
        record.spans = [
            VersionSpan(0, split, draw(st.integers(0, 5))),
            VersionSpan(split, len(output), draw(st.integers(0, 5))),
        ]
        turns.append(record)
        held = prompt + output
    return turns


@settings(max_examples=400, deadline=None)
@given(conversations(), st.integers(1, 6))
def test_equal_to_the_obvious_version(turns: list[TurnRecord], threshold: int) -> None:
    rows, drifts = slow(turns, threshold)
    samples = samples_of(*turns, threshold=threshold)
    assert reconcile(turns, threshold).drift == drifts
    assert len(samples) == len(rows)
    for sample, row in zip(samples, rows, strict=True):
        assert sample.token_ids.tolist() == row.ids and sample.token_ids.dtype == np.int32
        assert sample.loss_mask.tolist() == row.mask
        np.testing.assert_array_equal(sample.sampler_logprobs, np.array(row.logprobs, np.float32))
        assert sample.versions.tolist() == row.versions and sample.versions.dtype == np.int32
        trained = [version for version, on in zip(row.versions, row.mask, strict=True) if on]
        assert sample.version_min == min(trained)


@settings(max_examples=200, deadline=None)
@given(conversations(), st.integers(1, 6))
def test_a_sampled_token_is_trained_at_most_once(turns: list[TurnRecord], threshold: int) -> None:
    outputs = np.concatenate([record.output_ids for record in turns])
    used = np.zeros(len(outputs), int)
    for sequence in reconcile(turns, threshold).sequences:
        index = sequence.origin[sequence.loss_mask]
        np.add.at(used, index, 1)
        np.testing.assert_array_equal(sequence.token_ids[sequence.loss_mask], outputs[index])
    assert used.max(initial=0) <= 1
