"""Greedy accuracy: local generation against a plain loop, the server against local, scoring, the command."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.support.tiny_model import build_model, build_tiny_model, build_tokenizer
from trainers import evaluate
from trainers.config import DistillationConfig, GRPOConfig, SFTConfig
from trainers.errors import ConfigError, ServerError
from trainers.types import Prompt

QUESTIONS = ["1+1=", "2+3=", "10+5=", "say abc", "x"]


def digits(completions, **kwargs):
    """Share of a completion's characters that are digits; None for an empty one."""
    texts = [completion[0]["content"] for completion in completions]
    return [sum(c.isdigit() for c in text) / len(text) if text else None for text in texts]


@pytest.fixture
def config(tmp_path) -> GRPOConfig:
    held_out = tmp_path / "held_out.jsonl"
    held_out.write_text("".join(json.dumps({"question": q, "answer": "7"}) + "\n" for q in QUESTIONS))
    return GRPOConfig(
        model=str(build_tiny_model(tmp_path / "model")),
        dataset={"path": "train.jsonl"},  # type: ignore[arg-type]
        eval={
            "dataset": {"path": str(held_out), "prompt_column": "question"},
            "reward_func": f"{__file__}:digits",
            "max_completion_length": 6,
        },  # type: ignore[arg-type]
    )


def greedy(model, tokens: np.ndarray, limit: int, eos: int) -> list[int]:
    ids = tokens.tolist()
    for _ in range(limit):
        with torch.no_grad():
            ids.append(int(model(input_ids=torch.tensor([ids])).logits[0, -1].argmax()))
        if ids[-1] == eos:
            break
    return ids[len(tokens) :]


def test_local_generation_equals_a_plain_greedy_loop(config):
    tokenizer, model = build_tokenizer(), build_model()
    problems = evaluate.load_problems(config, tokenizer)
    turns = evaluate.local_generate(model, tokenizer, 6)(problems)
    assert len({len(problem.token_ids) for problem in problems}) > 1, "prompts must differ in length to be padded"
    for problem, turn in zip(problems, turns, strict=True):
        assert turn is not None
        expected = greedy(model, problem.token_ids, 6, tokenizer.eos_token_id)
        assert turn.output_ids.tolist() == expected
        assert turn.finish_reason == ("stop" if expected[-1] == tokenizer.eos_token_id else "length")


@pytest.mark.server
def test_the_server_gives_the_same_greedy_completions(config, vllm_server, monkeypatch):
    monkeypatch.setenv("VLLM_API_KEY", vllm_server.key)
    vllm_server.restore()
    tokenizer = build_tokenizer()
    problems = evaluate.load_problems(config, tokenizer)
    local = evaluate.local_generate(build_model(), tokenizer, 6)(problems)
    served = evaluate.server_generate([vllm_server.url], 60, 6)(problems)
    assert [t.output_ids.tolist() for t in served if t] == [t.output_ids.tolist() for t in local if t]
    too_long = Prompt(0, 0, [], {}, np.ones(512, np.int32))
    assert evaluate.server_generate([vllm_server.url], 60, 6)([too_long]) == [None]


def fixed(outputs: list[list[int] | None]):
    tokenizer = build_tokenizer()

    def generate(prompts):
        return [
            None if ids is None else evaluate._turn(prompt, np.array(ids), {tokenizer.eos_token_id})
            for prompt, ids in zip(prompts, outputs, strict=True)
        ]

    return generate


def test_accuracy_is_the_mean_where_the_reward_applies_and_a_failure_counts_as_zero(config):
    tokenizer = build_tokenizer()
    problems = evaluate.load_problems(config, tokenizer)
    seven, letter, eos = *tokenizer.convert_tokens_to_ids(["7", "a"]), tokenizer.eos_token_id
    # 1.0; 0.5; reward None; the request failed; 0.0
    outputs = [[seven, eos, letter], [seven, letter], [eos], None, [letter, eos]]
    result = evaluate.evaluate(problems, tokenizer, fixed(outputs), digits)
    assert result["accuracy"] == pytest.approx((1.0 + 0.5 + 0 + 0) / 4)
    assert (result["problems"], result["scored"], result["failed"]) == (5, 4, 1)
    assert result["clipped_ratio"] == 0.25 and result["mean_length"] == pytest.approx((2 + 2 + 1 + 2) / 4)
    assert result["examples"][0]["completion"] == "7" and result["examples"][2]["reward"] is None


def test_nothing_generated_or_nothing_scored_is_an_error_not_a_zero(config):
    tokenizer = build_tokenizer()
    problems = evaluate.load_problems(config, tokenizer)
    with pytest.raises(ServerError, match="answered none of the problems"):
        evaluate.evaluate(problems, tokenizer, fixed([None] * 5), digits)
    with pytest.raises(ConfigError, match="returned None for every problem"):
        evaluate.evaluate(problems, tokenizer, fixed([[tokenizer.eos_token_id]] * 5), digits)


def test_held_out_problems_of_a_student_of_several_teachers_name_none(config):
    teachers = {"math": "http://127.0.0.1:1", "code": "http://127.0.0.1:2"}
    assert config.eval is not None
    taught = DistillationConfig(model="m", dataset={"path": "d"}, eval=config.eval, teacher_server_urls=teachers)  # type: ignore[arg-type]
    problems = evaluate.load_problems(taught, build_tokenizer())
    assert [problem.token_ids.tolist() for problem in problems] == [
        problem.token_ids.tolist() for problem in evaluate.load_problems(config, build_tokenizer())
    ]


def test_what_is_missing_is_named(config):
    bare = config.model_copy(update={"eval": None})
    with pytest.raises(ConfigError, match=r"eval\.dataset is not set"):
        evaluate.load_problems(bare, build_tokenizer())
    sft = SFTConfig(model="m", dataset={"path": "d"}, eval={"dataset": {"path": "d"}})  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"set eval\.reward_func"):
        evaluate.eval_reward(sft)
    assert evaluate.max_new_tokens(config) == 6 and evaluate.max_new_tokens(sft) == 1024


def test_the_command_writes_its_result_whole(config, tmp_path, capsys):
    request, out = tmp_path / "request.json", tmp_path / "out.json"
    request.write_text(json.dumps({"config": config.model_dump(mode="json"), "model": None, "url": None}))
    assert evaluate.main([str(request), str(out)]) == 0
    result = json.loads(out.read_text())
    assert result["problems"] == 5 and f"accuracy {result['accuracy']:.4f} on" in capsys.readouterr().out
    assert not list(tmp_path.glob(".out.json*"))


def test_the_command_says_what_is_wrong(config, tmp_path, capsys):
    request, out = tmp_path / "request.json", tmp_path / "out.json"
    wrong = config.model_copy(update={"model": str(tmp_path / "nowhere")})
    request.write_text(json.dumps({"config": wrong.model_dump(mode="json")}))
    assert evaluate.main([str(request), str(out)]) == 1
    assert "evaluation failed: ConfigError" in capsys.readouterr().err and not Path(out).exists()
