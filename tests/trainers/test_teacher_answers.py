"""What teachers answer: bytes of vLLM's own classes against the numbers they were made of, and bytes that are none."""

from __future__ import annotations

import base64
import importlib.util
import io
import json
import subprocess
import sys
from functools import cache
from typing import Any

import numpy as np
import pytest

from trainers.rollouts.protocol import RequestFailed, Retryable
from trainers.rollouts.teacher_answers import Scored, read_chosen, read_prompt_logprobs

VOCABULARY, LENGTH, START, TOP_K = 40, 60, 7, 3
# What would mislead a scan that took text for structure.
TEXTS = ['"', "}},{", '{"logprob":', '":{"logprob":-1.5,"rank":', ',"prompt_logprobs":[', "\\", "\n", "é", "null,null", "7"]
needs_vllm = pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed")


def make_cases() -> list[dict[str, Any]]:
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, VOCABULARY, LENGTH)
    # From near certainty (tiny numbers, written with exponents) to indifference; some tokens are impossible.
    scores = np.log(rng.dirichlet(np.full(VOCABULARY, 0.02), LENGTH - 1) + 1e-30)
    scores[5:20] = np.log(rng.dirichlet(np.ones(VOCABULARY), 15))
    scores[30] = np.where(np.arange(VOCABULARY) == 5, -1e-7, -20.0)
    table = scores.astype(np.float32).astype(float)
    table[table < -60] = -np.inf
    tokens[1::3] = table.argmax(axis=1)[::3]
    rows = [[None if np.isinf(value) else value for value in row] for row in table.tolist()]
    common = {"tokens": tokens.tolist(), "scores": rows, "texts": [TEXTS[i % len(TEXTS)] for i in range(VOCABULARY)]}
    cases = [{"form": form, "top": top, **common} for form in ("generate", "completions") for top in (TOP_K, 0)]
    return [*cases, {"form": "chosen", "values": [row[:4] for row in rows[START - 1 :]]}]


@cache
def bodies() -> list[bytes]:
    command = [sys.executable, "-m", "tests.support.vllm_scores"]
    done = subprocess.run(command, input=json.dumps(make_cases()), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return [body.encode() for body in json.loads(done.stdout)]


def expected(case: dict[str, Any]) -> Scored:
    """By sorting, token by token."""
    width = case["top"]
    rows = []
    for token, given in zip(case["tokens"][START:], case["scores"][START - 1 :], strict=True):
        row = np.array([-np.inf if value is None else value for value in given])
        others = [i for i in sorted(range(len(row)), key=lambda i: -row[i])[:width] if i != token and row[i] > -np.inf]
        rows.append(([*others, *[-1] * (width - len(others))], [row[i] for i in others], row[token]))
    logprobs = [[*values, *[-np.inf] * (width - len(values))] for _, values, _ in rows]
    shape = (len(rows), width)
    return Scored(
        np.array([ids for ids, _, _ in rows], np.int32).reshape(shape),
        np.array(logprobs, np.float32).reshape(shape),
        np.array([target for _, _, target in rows], np.float32),
    )


@needs_vllm
@pytest.mark.parametrize("number", range(4))
def test_prompt_logprobs_of_vllms_own_classes(number: int) -> None:
    case, body = make_cases()[number], bodies()[number]
    found, wanted = read_prompt_logprobs(body, np.array(case["tokens"], np.int32), START, case["top"]), expected(case)
    np.testing.assert_array_equal(found.ids, wanted.ids)
    np.testing.assert_array_equal(found.logprobs, wanted.logprobs)  # to the last bit of float32
    np.testing.assert_array_equal(found.targets, wanted.targets)
    assert np.isinf(found.targets).any() and (found.targets > -1e-4).any(), "the case has neither extreme"


@needs_vllm
def test_chosen_ids_of_vllms_own_classes() -> None:
    case = make_cases()[4]
    values = np.array([[-np.inf if value is None else value for value in row] for row in case["values"]], np.float32)
    ids = np.tile(np.array([9, 4, -1, 6], np.int32), (len(values), 1))
    found = read_chosen(bodies()[4], ids)
    np.testing.assert_array_equal(found.targets, values[:, 0])
    impossible = np.isinf(values[:, 1:])
    np.testing.assert_array_equal(found.ids, np.where(impossible | (ids[:, 1:] < 0), -1, ids[:, 1:]))
    np.testing.assert_array_equal(found.logprobs, np.where(found.ids < 0, -np.inf, values[:, 1:]))
    with pytest.raises(RequestFailed, match=r"shape \(3, 4\) were asked for, the server sent those of shape"):
        read_chosen(bodies()[4], ids[:3])


def answer(positions: list[Any]) -> bytes:
    rows = [
        position and {str(i): {"logprob": value, "rank": 1, "decoded_token": ",null,[]"} for i, value in position.items()}
        for position in positions
    ]
    return json.dumps({"choices": [{"prompt_logprobs": rows}], "padding": "x" * 64}, separators=(",", ":")).encode()


TOKENS = np.array([3, 7, 2, 9], np.int32)


def test_a_position_without_scores_is_told_apart() -> None:
    found = read_prompt_logprobs(answer([None, {7: -0.5, 1: -1.0}, None, {9: -2.0, 4: -0.25}]), TOKENS, 1, 2)
    assert found.ids.tolist() == [[1, -1], [-1, -1], [4, -1]]
    assert found.targets.tolist()[::2] == [-0.5, -2.0] and np.isnan(found.targets[1])
    assert not np.isnan(read_prompt_logprobs(answer([None, None, {2: -0.5}, {9: -2.0}]), TOKENS, 2, 0).targets).any()


def test_entries_in_any_order_as_a_rust_front_end_writes_them() -> None:
    body = answer([None, {1: -3.0, 7: -0.1, 4: -2.5}, {5: -2.0, 8: -0.2, 2: -9.0}, {9: -1.0}])
    found = read_prompt_logprobs(body, TOKENS, 1, 2)
    assert [dict(zip(*pair, strict=True)) for pair in zip(found.ids.tolist(), found.logprobs.tolist(), strict=True)][:2] == [
        {1: -3.0, 4: -2.5},
        {5: -2.0, 8: pytest.approx(-0.2)},
    ]
    assert found.targets.tolist() == pytest.approx([-0.1, -9.0, -1.0])


def test_ids_of_any_size() -> None:
    tokens = np.array([0, 9, 10, 255, 256, 1000, 65_536, 151_935, 999_999_999], np.int32)
    body = answer([None, *({int(token): -0.5, 262_143: -1.0} for token in tokens[1:])])
    found = read_prompt_logprobs(body, tokens, 1, 1)
    assert (found.targets == -0.5).all() and (found.ids == 262_143).all()


def test_numbers_in_every_notation() -> None:
    values = [0, -0.0, -1, -12.25, -0.0001, -1.1920928955078125e-07, -1e-05, -3.4028234663852886e-38, -1234.5678]
    tokens = np.arange(len(values) + 1, dtype=np.int32)
    body = answer([None, *({index: value} for index, value in enumerate(values, start=1))])
    np.testing.assert_array_equal(read_prompt_logprobs(body, tokens, 1, 0).targets, np.array(values, np.float32))


@pytest.mark.parametrize(
    ("body", "error", "message"),
    [
        (b'{"choices":[{"prompt_logprobs":null}]}', RequestFailed, "no prompt_logprobs"),
        (answer([None, {7: -0.5}, {2: -0.5}]), RequestFailed, r"scored 3 positions \(2 with entries\), not 4"),
        (answer([None, {7: -0.5}, {2: -0.5}])[:120], Retryable, "do not end"),
        (answer([None, {"ab": -0.5}, {"c": -0.5}, {"d": -0.5}]), RequestFailed, "by their text"),
    ],
)
def test_answers_that_are_none(body: bytes, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        read_prompt_logprobs(body, TOKENS, 1, 2)


@pytest.mark.parametrize("number", ["NaN", "null", "-Infinity"])
def test_what_a_broken_teacher_computes_is_not_taken_for_silence(number: str) -> None:
    body = answer([None, {7: -0.5}, {2: -0.25, 5: -0.5}, {9: -0.5}]).replace(b"-0.25", number.encode())
    with pytest.raises(RequestFailed, match="log-probabilities that are no numbers"):
        read_prompt_logprobs(body, TOKENS, 1, 2)
    assert read_prompt_logprobs(body, TOKENS, 3, 2).targets.tolist() == [-0.5], "of the prompt nothing is wanted"


def chosen(values: list[list[float]]) -> bytes:
    with io.BytesIO() as buffer:
        np.save(buffer, np.array(values, np.float32))
        return b'{"prompt_token_id_logprobs":"' + base64.b64encode(buffer.getvalue()) + b'"}'


def test_chosen_ids_of_a_broken_teacher_are_not_taken_for_silence() -> None:
    ids = np.array([[3, -1], [4, 5]], np.int32)
    assert np.isfinite(read_chosen(chosen([[-1.0, np.nan], [-2.0, -3.0]]), ids).targets).all()
    with pytest.raises(RequestFailed, match="log-probabilities that are no numbers"):
        read_chosen(chosen([[-1.0, -np.inf], [-2.0, np.nan]]), ids)


def test_a_realised_token_that_is_not_listed_is_unknown() -> None:
    found = read_prompt_logprobs(answer([None, {7: -0.5}, {5: -0.5}, {9: -0.5}]), TOKENS, 1, 1)
    assert np.isnan(found.targets).tolist() == [False, True, False]


@pytest.mark.parametrize("body", [b"<html>", b'{"prompt_token_id_logprobs":"????"}', b'{"prompt_token_id_logprobs":"AAAA"}'])
def test_chosen_answers_that_are_none(body: bytes) -> None:
    with pytest.raises(Retryable, match="not an answer"):
        read_chosen(body, np.zeros((2, 1), np.int32))


def test_an_answer_without_chosen_ids_says_so() -> None:
    with pytest.raises(RequestFailed, match="the server sent none"):
        read_chosen(b'{"choices":[]}', np.zeros((2, 1), np.int32))
