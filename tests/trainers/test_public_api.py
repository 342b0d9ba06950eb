"""AsyncGRPOTrainer: bad input before anything starts, and scripts run for real against the shared vLLM server."""

import json
import subprocess
import sys
from functools import partial

import httpx
import pytest
from datasets import Dataset

import trainers
from tests.support.forwarding import forwarding
from tests.support.in_thread import in_thread, port_or_any
from tests.support.scripts import CURRICULUM, QUICKSTART, ROOT, quick_start, run_script
from tests.support.tiny_model import build_model, build_tokenizer
from trainers import AsyncGRPOConfig, AsyncGRPOTrainer
from trainers.errors import CheckpointError, ConfigError, DatasetError
from trainers.rewards import accuracy_reward, code_reward

ROWS = [{"prompt": "1+1=", "answer": "2"}]
# A port nothing listens on: whoever got that far would fail otherwise, and later.
NOWHERE = {"vllm_server_base_url": "http://127.0.0.1:9", "vllm_server_timeout": 1.0}


def make(tmp_path, reward_funcs=accuracy_reward, args=None, **given):
    args = args or AsyncGRPOConfig(output_dir=str(tmp_path / "out"), **NOWHERE)
    given = {"train_dataset": ROWS, **given}
    return AsyncGRPOTrainer(model="some/model", reward_funcs=reward_funcs, args=args, **given)


def test_public_names():
    for name in ("AsyncGRPOTrainer", "AsyncGRPOConfig", "AsyncRolloutLoop", "Rollout", "RolloutGroup", "TurnRecord"):
        assert getattr(trainers, name).__name__ == name


def test_a_lambda_is_a_type_error_at_train(tmp_path):
    trainer = make(tmp_path, reward_funcs=[accuracy_reward, lambda completions, **kwargs: [0.0] * len(completions)])
    with pytest.raises(TypeError, match="<lambda>") as caught:
        trainer.train()
    for way in ("function at the top level of a module", "functools.partial", "__call__"):
        assert way in str(caught.value)
    assert not (tmp_path / "out").exists()


def undescribed(a: int) -> int:
    return a


def test_tools_and_environments_are_looked_at_when_train_is_called(tmp_path):
    with pytest.raises(TypeError, match=r"tool `.*<lambda>` cannot be handed to the rollout process"):
        make(tmp_path, tools=[lambda a: a]).train()
    with pytest.raises(TypeError, match=r"environment_factory `.*<lambda>` cannot be handed"):
        make(tmp_path, environment_factory=lambda: None).train()
    with pytest.raises(ConfigError, match=r"tool `undescribed`: .*no docstring"):
        make(tmp_path, tools=[undescribed]).train()
    assert not (tmp_path / "out").exists()


def described(a: int, b: int) -> int:
    """Add.

    Args:
        a: One number.
        b: Another.
    """
    return a + b


@pytest.mark.parametrize("tools", [described, [described], [partial(described, b=1)]])
def test_one_tool_or_several_are_named_by_where_they_are_defined(tmp_path, tools):
    (spec,) = make(tmp_path, tools=tools).config.tools
    assert spec.path == f"{__name__}:described"


def test_an_environment_may_stand_for_reward_functions_and_prompts(tmp_path):
    config = make(tmp_path, reward_funcs=None, environment_factory=Environment, train_dataset=[{"start": 1}]).config
    assert config.environment_factory.path.endswith(":Environment") and config.reward_funcs == []


class Environment:
    def reset(self, start: int) -> str:
        return f"count from {start}"

    def get_reward(self) -> float:
        return 1.0


class Undescribed:
    """An environment one of whose tools the model could not be told of."""

    def reset(self, **row):
        return None

    def jump(self, height: int):
        return height


def test_an_environment_class_with_a_wrong_docstring_is_found_before_anything_starts(tmp_path):
    with pytest.raises(ConfigError, match=r"tool `jump`: .*no docstring"):
        make(tmp_path, environment_factory=Undescribed).train()
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("reward", "message"),
    [
        (lambda completions, colour: [0.0], r"needs `colour`: train_dataset has only: answer\. Add the column"),
        (
            lambda completions, prompt, **rest: [0.0],
            r"needs `prompt`: the prompt comes as `prompts`; train_dataset has",
        ),
        (code_reward, "needs `tests` or `test` and `entry_point` or `inputs` and `outputs`: train_dataset has only: answer"),
    ],
)
def test_a_reward_that_asks_for_what_no_column_gives_is_found_at_once(tmp_path, reward, message):
    with pytest.raises(DatasetError, match=message):
        make(tmp_path, reward_funcs=reward)
    make(tmp_path, reward_funcs=lambda prompts, completions, completion_ids, answer, other=1, **rest: [0.0])


def test_a_loop_class_made_in_a_function_is_a_type_error(tmp_path):
    class Local(trainers.AsyncRolloutLoop):
        pass

    class Trainer(AsyncGRPOTrainer):
        loop_cls = Local

    trainer = Trainer("some/model", accuracy_reward, AsyncGRPOConfig(output_dir=str(tmp_path / "out"), **NOWHERE), ROWS)
    with pytest.raises(TypeError, match=r"loop class `.*Local`"):
        trainer.train()


@pytest.mark.parametrize("rows", [[{"question": "1+1=", "answer": "2"}], Dataset.from_list([{"question": "1+1="}])])
def test_a_missing_prompt_column_is_named(tmp_path, rows):
    with pytest.raises(DatasetError, match="no column `prompt`; it has: question"):
        make(tmp_path, train_dataset=rows)


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({"reward_funcs": []}, ConfigError, "at least one reward function"),
        ({"reward_funcs": "org/reward-model"}, TypeError, "over HTTP"),
        ({"reward_funcs": [1]}, TypeError, "cannot be called"),
        ({"train_dataset": None}, ConfigError, "train_dataset is missing"),
        ({"train_dataset": []}, DatasetError, "no rows"),
        ({"args": {"max_steps": 1}}, TypeError, "AsyncGRPOConfig"),
        ({"tools": [1]}, TypeError, "tool 1 is a int, which cannot be called"),
        ({"environment_factory": {"a": dict}}, TypeError, "environment_factory is a dict: pass one class or function"),
        ({"args": AsyncGRPOConfig(reward_weights=[1.0, 2.0])}, ConfigError, "2 values for 1 reward functions"),
    ],
)
def test_wrong_arguments(tmp_path, given, error, message):
    with pytest.raises(error, match=message):
        make(tmp_path, **given)


def test_a_model_folder_that_does_not_exist():
    with pytest.raises(ConfigError, match="'/no/such/folder': there is no such folder"):
        AsyncGRPOTrainer("/no/such/folder", accuracy_reward, train_dataset=ROWS)


def test_a_model_by_name_and_a_loaded_model_exclude_init_arguments(tmp_path):
    args = AsyncGRPOConfig(output_dir=str(tmp_path), model_init_kwargs={"attn_implementation": "eager"})
    with pytest.raises(ConfigError, match="loaded already"):
        AsyncGRPOTrainer(build_model(), accuracy_reward, args, ROWS, processing_class=build_tokenizer())


def test_the_default_folder_is_named_after_the_model():
    assert AsyncGRPOTrainer("org/Model-1B", accuracy_reward, train_dataset=ROWS).args.output_dir == "Model-1B-AsyncGRPO"


def test_resuming_from_nothing_and_from_half_a_checkpoint(tmp_path):
    with pytest.raises(CheckpointError, match="no whole checkpoint"):
        make(tmp_path).train(resume_from_checkpoint=True)
    half = tmp_path / "out" / "checkpoint-3"
    half.mkdir(parents=True)
    with pytest.raises(CheckpointError, match="not whole"):
        make(tmp_path).train(resume_from_checkpoint=str(half))


def test_a_trainer_is_inert_in_the_rollout_process():
    code = """
import trainers
trainer = trainers.AsyncGRPOTrainer("/no/such/model", print, trainers.AsyncGRPOConfig(bf16=True, fp16=False))
print(trainer.train().global_step)
trainer.save_model("/nowhere")
"""
    environment = {"LOOPWRIGHT_ROLLOUT_PROCESS": "1", "PYTHONPATH": str(ROOT), "PATH": "", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "0\n"), done.stderr


def weight_version(server):
    return httpx.get(f"{server.url}/weight_info", headers=server.headers).json()["weight_version"]


@pytest.mark.server
def test_the_quick_start_as_it_is_written(vllm_server, tmp_path):
    with in_thread(forwarding(vllm_server.url, port_or_any(8000))) as url:
        script = quick_start(QUICKSTART, vllm_server.model_dir, vllm_server_base_url=url)
        done = run_script(script, tmp_path, key=vllm_server.key)
    assert done.returncode == 0, done.stderr
    (steps,) = (tmp_path / "after").read_text().split()  # once: the rollout process stopped at train()
    assert int(steps) >= 3
    checkpoint = tmp_path / f"{vllm_server.model_dir.name}-AsyncGRPO" / f"checkpoint-{steps}"
    assert json.loads((checkpoint / "manifest.json").read_text())["step"] == int(steps)
    assert weight_version(vllm_server) == steps
    history = json.loads((checkpoint / "trainer_state.json").read_text())["log_history"]
    assert len(history) == int(steps)
    assert all(0 < entry["rewards/digits_reward"] < 1 for entry in history if "rewards/digits_reward" in entry)
    # Every prompt of the one epoch is done, whether its group was trained or dropped for equal rewards.
    ledger = json.loads((checkpoint / "rollout_state.json").read_text())
    assert ledger["epoch"] * 12 + ledger["next_index"] == 12


def curriculum(vllm_server, folder, steps, *more, launcher=()):
    done = run_script(
        CURRICULUM,
        folder,
        str(vllm_server.model_dir),
        vllm_server.url,
        str(steps),
        *more,
        key=vllm_server.key,
        launcher=launcher,
    )
    assert done.returncode == 0, done.stderr
    (output,) = [line.split(maxsplit=3) for line in done.stdout.splitlines() if line.startswith("OUTPUT")]
    assert output[1] == str(steps)


@pytest.mark.server
def test_a_subclassed_config_a_custom_loop_and_resuming(vllm_server, tmp_path):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    curriculum(vllm_server, tmp_path, 2)
    lines = [line.split() for line in (tmp_path / "pass_rates").read_text().splitlines()]
    assert lines
    assert {cap for _, _, cap in lines} == {"2.0"}
    curriculum(vllm_server, tmp_path, 4, "resume")
    assert weight_version(vllm_server) == "4"
    assert [path.name for path in sorted((tmp_path / "out").glob("checkpoint-*"))] == ["checkpoint-2", "checkpoint-4"]
    history = json.loads((tmp_path / "out" / "checkpoint-4" / "trainer_state.json").read_text())["log_history"]
    assert [entry["step"] for entry in history] == [1, 2, 3, 4]
    assert any("rewards/Length" in entry for entry in history)
    assert any("rewards/contains" in entry for entry in history)
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "final").state_dict()
    kept = AutoModelForCausalLM.from_pretrained(tmp_path / "out" / "checkpoint-4").state_dict()
    first = AutoModelForCausalLM.from_pretrained(vllm_server.model_dir).state_dict()
    assert all(saved[name].equal(kept[name]) for name in kept)
    assert any(not saved[name].equal(first[name]) for name in first)
    assert AutoTokenizer.from_pretrained(tmp_path / "final").chat_template


@pytest.mark.server
def test_two_ranks_under_torchrun(vllm_server, tmp_path):
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
    curriculum(vllm_server, tmp_path, 2, launcher=launcher)
    assert weight_version(vllm_server) == "2"
    state = json.loads((tmp_path / "out" / "checkpoint-2" / "loop_state.json").read_text())
    assert state["world_size"] == 2


@pytest.mark.server
def test_in_process_with_a_loaded_model_callbacks_and_an_optimizer(vllm_server, tmp_path, monkeypatch):
    import torch
    from transformers import TrainerCallback

    events = []

    class Recorder(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            events.append((type(args).__name__, state.global_step, kwargs["model"] is model))
            control.should_training_stop = state.global_step == 2

    monkeypatch.setenv("VLLM_API_KEY", vllm_server.key)
    model = build_model(seed=1)
    before = model.get_input_embeddings().weight.detach().clone()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    trainer = AsyncGRPOTrainer(
        model=model,
        reward_funcs=mean_length,
        args=AsyncGRPOConfig(
            output_dir=str(tmp_path / "out"), vllm_server_base_url=vllm_server.url, num_generations=4, max_completion_length=16
        ),
        train_dataset=Dataset.from_list([{"prompt": f"{i}-1="} for i in range(100)]),
        processing_class=build_tokenizer(),
        callbacks=[Recorder],
        optimizers=(optimizer, None),
    )
    output = trainer.train()
    assert output.global_step == 2
    assert events == [("AsyncGRPOConfig", 1, True), ("AsyncGRPOConfig", 2, True)]
    assert not model.get_input_embeddings().weight.equal(before)
    assert set(output.metrics) >= {"train_runtime", "train_loss", "epoch"}
    # The model can be used as before.
    ids = torch.tensor([[1, 4, 8, 9]])
    assert model(ids).logits.shape == (1, 4, 64)


def mean_length(completion_ids, **kwargs):
    return [len(ids) / 16 for ids in completion_ids]


@pytest.mark.parametrize(("given", "policy"), [({}, "PASSIVE"), ({"OMP_WAIT_POLICY": "ACTIVE"}, "ACTIVE")])
def test_waiting_threads_leave_the_cores_to_the_server(given, policy):
    code = "import trainers, os, sys; assert 'torch' not in sys.modules; print(os.environ['OMP_WAIT_POLICY'])"
    environment = {"PYTHONPATH": str(ROOT), "PATH": "", **given}
    assert subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True).stdout.split() == [
        policy
    ]
