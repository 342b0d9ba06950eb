"""The quick start's task: what its figures rest on."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from flows.quickstart import describe, grpo_config, sft_config
from flows.quickstart_task import CAREFUL, Problem, build_model, build_tokenizer, make_task, write_task
from trainers.config import SFTConfig
from trainers.data import PromptBuilder, load_tokenizer
from trainers.rewards import exact_match_reward


def test_a_seed_gives_the_same_task_and_another_seed_another() -> None:
    assert make_task(3) == make_task(3)
    assert make_task(3).held_out != make_task(4).held_out


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_no_problem_serves_two_purposes(seed: int) -> None:
    task = make_task(seed)
    parts = [[row["prompt"] for row in part] for part in (task.held_out, task.sft, task.grpo)]
    assert [len(part) for part in parts] == [512, 3000, 6488]
    assert len(set().union(*parts)) == sum(map(len, parts)) == 10_000


@pytest.mark.parametrize(
    ("a", "b", "answer", "careless"),
    [
        (37, 48, "85", "75"),
        (12, 34, "46", "46"),
        (5, 7, "12", "2"),
        (99, 99, "198", "88"),
        (50, 50, "100", "0"),
        (0, 0, "0", "0"),
    ],
)
def test_careful_and_careless_sums(a: int, b: int, answer: str, careless: str) -> None:
    problem = Problem(a, b)
    assert (problem.question, problem.answer, problem.careless) == (f"{a}+{b}", answer, careless)


def test_demonstrations_are_right_or_careless_in_the_stated_shares() -> None:
    carried = total = 0
    for row in make_task(0).sft:
        problem = Problem(*map(int, row["prompt"].split("+")))
        assert row["completion"] in (problem.answer, problem.careless)
        if problem.answer != problem.careless:
            total += 1
            carried += row["completion"] == problem.answer
    # 1,800 problems or more with a carry: three standard deviations are 0.035.
    assert total > 1800 and abs(carried / total - CAREFUL) < 0.035


def test_answers_are_what_the_reward_accepts() -> None:
    task = make_task(1)
    for row in task.grpo[:200] + task.held_out[:200]:
        a, b = map(int, row["prompt"].split("+"))
        wrong = str(a + b + 10)
        assert exact_match_reward(completions=[str(a + b), f" {a + b}", wrong, ""], answer=[row["answer"]] * 4) == [1, 1, 0, 0]


def test_tokenizer_and_template(tmp_path: Path) -> None:
    build_tokenizer().save_pretrained(tmp_path)
    config = SFTConfig(model=str(tmp_path), dataset={"path": "x.jsonl"})  # type: ignore[arg-type]
    tokenizer = load_tokenizer(config)
    text = "(12+34) * 5 = 230, 7-9/3?"
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    assert len(tokenizer(text)["input_ids"]) == len(text)
    assert tokenizer("x")["input_ids"] == [tokenizer.unk_token_id]
    builder = PromptBuilder(tokenizer, config)
    row = {"prompt": "37+48", "completion": "85"}
    prompt = builder.prompt(0, 0, row)
    assert tokenizer.convert_ids_to_tokens(prompt.token_ids.tolist()) == ["<user>", *"37+48", "<assistant>"]
    assert tokenizer.convert_ids_to_tokens(builder.completion_ids(prompt, row)[1].tolist()) == [*"85", "<end>"]


def test_model_is_small_and_of_its_seed() -> None:
    import torch

    first, again, other = build_model(0), build_model(0), build_model(1)
    assert 1.0e6 < sum(p.numel() for p in first.parameters()) < 1.3e6
    assert first.config.vocab_size == len(build_tokenizer())
    assert all(torch.equal(p, q) for p, q in zip(first.parameters(), again.parameters(), strict=True))
    assert not torch.equal(first.lm_head.weight, other.lm_head.weight)


def test_written_rows_are_the_tasks(tmp_path: Path) -> None:
    write_task(tmp_path, 5)
    task = make_task(5)
    for name in ("held_out", "sft", "grpo"):
        rows = [json.loads(line) for line in (tmp_path / f"{name}.jsonl").read_text().splitlines()]
        assert rows == getattr(task, name)


def test_importing_the_quick_start_brings_no_torch() -> None:
    code = "import sys, flows.quickstart; sys.exit(any(m in sys.modules for m in ('torch', 'transformers')))"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_configs_are_valid_and_keep_held_out_problems_out_of_training(tmp_path: Path) -> None:
    write_task(tmp_path, 0)
    for config in (sft_config("a", tmp_path, 0), grpo_config("b", tmp_path, 0, "m", gpus=0)):
        assert config.eval is not None
        assert config.eval.dataset.path == str(tmp_path / "held_out.jsonl") != config.dataset.path
        rows = [json.loads(line) for line in Path(config.dataset.path).read_text().splitlines()]
        held_out = [json.loads(line) for line in Path(config.eval.dataset.path).read_text().splitlines()]
        assert len(held_out) >= 500
        assert not {row["prompt"] for row in rows} & {row["prompt"] for row in held_out}


@pytest.mark.parametrize(("gpus", "trainer_gpus"), [(0, 0), (1, 0), (2, None)])
def test_server_and_trainer_share_the_gpus_there_are(tmp_path: Path, gpus: int, trainer_gpus: int | None) -> None:
    config = grpo_config("b", tmp_path, 0, "m", gpus)
    assert config.servers.student.gpus is None and config.trainer.gpus == trainer_gpus


def test_progress_in_words() -> None:
    assert describe({}, {}, serving=False) == ("starting", [])
    assert "vLLM" in describe({"step": 0}, {}, serving=True)[0]
    assert describe({"step": 0}, {"evaluate_before": {}}, serving=True) == ("starting the trainer", [])
    progress = {"step": 25, "max_steps": 600, "loss": 0.5, "eval/accuracy": 0.25, "eta_s": 60.0}
    figures = ["loss 0.500", "held-out accuracy 0.250", "at most 60 s left"]
    assert describe(progress, {"evaluate_before": {}}, False) == ("step 25 of at most 600", figures)
    assert describe(progress, {"train": {}}, False) == ("evaluating the trained model", [])
    assert describe(progress, {"train": {}, "evaluate": {}}, False) == ("registering the model", [])


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_whole_quick_start(tmp_path: Path, seed: int) -> None:
    environment = {**os.environ, "LOOPWRIGHT_HOME": str(tmp_path)}
    loopwright = str(Path(sys.executable).with_name("loopwright"))
    try:
        run = subprocess.run(
            [loopwright, "quickstart", "--seed", str(seed)], env=environment, stdout=subprocess.PIPE, text=True, check=True
        )
    finally:
        subprocess.run([loopwright, "down"], env=environment, check=True)
    result = json.loads(run.stdout.splitlines()[-1])
    assert set(result) == {"accuracy_base", "accuracy_sft", "accuracy_grpo", "steps", "seconds", "mlflow_run"}
    assert result["accuracy_base"] < 0.05
    assert 0.2 <= result["accuracy_sft"] <= 0.7
    assert result["accuracy_grpo"] - result["accuracy_sft"] >= 0.15
    assert result["steps"] > 0 and result["mlflow_run"]
