"""AsyncGRPOConfig: a TrainingArguments dataclass that is the pydantic GRPOConfig in another dress."""

import dataclasses
import pickle
from dataclasses import dataclass

import pytest
import torch
from accelerate.parallelism_config import ParallelismConfig
from transformers import HfArgumentParser, SchedulerType, TrainingArguments

from trainers.arguments import AsyncGRPOConfig
from trainers.config import GRPOConfig
from trainers.errors import ConfigError
from trainers.training_arguments import REFUSED

GIVEN = {"model": "m", "dataset": {"path": "d"}, "reward_funcs": ["rewards:one"]}


@dataclass
class CurriculumConfig(AsyncGRPOConfig):
    pass_rate_cap: float = 0.9


def test_defaults_are_the_pydantic_ones():
    args = AsyncGRPOConfig()
    assert isinstance(args, TrainingArguments)
    expected = GRPOConfig.model_validate({**GIVEN, "output_dir": "trainer_output", "bf16": torch.cuda.is_available()})
    assert args.to_config(**GIVEN) == expected
    assert (args.learning_rate, args.logging_steps, args.gradient_checkpointing) == (1e-6, 1, True)
    assert (args.ignore_data_skip, args.remove_unused_columns) == (True, False)
    assert args.lr_scheduler_type is SchedulerType.CONSTANT


def test_values_reach_the_config():
    args = AsyncGRPOConfig(
        output_dir="~/x", num_generations=4, optim="sgd", lr_scheduler_type="cosine", max_steps=10, bf16=True, epsilon_high=0.3
    )
    config = args.to_config(**GIVEN)
    assert (config.num_generations, config.optim, config.lr_scheduler_type, config.max_steps) == (4, "sgd", "cosine", 10)
    assert config.bf16 is True
    assert config.epsilon_high == 0.3
    assert not config.output_dir.startswith("~")


def test_a_dataclass_subclass_adds_fields_and_changes_defaults():
    @dataclass
    class Mine(AsyncGRPOConfig):
        extra: float = 0.9
        temperature: float = 0.7

    args = Mine(max_steps=3)
    assert (args.extra, args.temperature, args.max_steps) == (0.9, 0.7, 3)
    assert args.to_config(**GIVEN).temperature == 0.7
    assert Mine(extra=0.1).extra == 0.1


def test_a_subclass_survives_pickling_and_replace():
    args = dataclasses.replace(CurriculumConfig(pass_rate_cap=0.5, eval={"dataset": {"path": "e"}, "every": 2}), max_steps=4)
    copy = pickle.loads(pickle.dumps(args))
    assert (copy.pass_rate_cap, copy.max_steps, copy.eval_steps) == (0.5, 4, 2)
    assert copy.to_config(**GIVEN).eval.every == 2


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("fp16", True),
        ("deepspeed", "ds.json"),
        ("push_to_hub", True),
        ("ignore_data_skip", False),
        ("eval_strategy", "epoch"),
        ("average_tokens_across_devices", False),
        ("save_strategy", "no"),
        ("dataloader_num_workers", 4),
        ("include_num_input_tokens_seen", "all"),
    ],
)
def test_a_refused_field_gives_the_reason_and_the_alternative(name, value):
    with pytest.raises(ConfigError, match=name) as caught:
        AsyncGRPOConfig(**{name: value})
    assert REFUSED[name] in str(caught.value)


def test_a_refused_default_of_a_subclass_is_refused_too():
    @dataclass
    class Half(AsyncGRPOConfig):
        fp16: bool = True

    with pytest.raises(ConfigError, match="fp16"):
        Half()


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_every_refused_field_may_be_given_at_its_default(name):
    AsyncGRPOConfig(**{name: getattr(AsyncGRPOConfig(), name)})


def test_a_value_out_of_range_names_the_field():
    with pytest.raises(ConfigError, match="num_generations"):
        AsyncGRPOConfig(num_generations=1)
    with pytest.raises(TypeError, match="num_generation"):
        AsyncGRPOConfig(num_generation=4)


def test_weights_are_matched_with_the_functions_given_later():
    args = AsyncGRPOConfig(reward_weights=[1.0, 0.5])
    with pytest.raises(ConfigError, match="2 values for 1 reward functions"):
        args.to_config(**GIVEN)


def test_eval_drives_transformers_events():
    args = AsyncGRPOConfig(eval={"dataset": {"path": "e"}, "every": 5})
    assert (args.eval_strategy, args.eval_steps) == ("steps", 5)
    assert AsyncGRPOConfig(eval={"dataset": {"path": "e"}}).eval_strategy == "no"


def test_no_process_group_and_ranks_from_the_launcher(monkeypatch):
    for name, value in {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "MASTER_ADDR": "127.0.0.1"}.items():
        monkeypatch.setenv(name, value)
    args = AsyncGRPOConfig()
    assert (args.world_size, args.process_index, args.local_process_index, args.should_save) == (4, 3, 1, False)
    assert not torch.distributed.is_initialized()


def test_the_argument_parser_of_transformers_reads_it():
    (args,) = HfArgumentParser(CurriculumConfig).parse_args_into_dataclasses(
        ["--num_generations", "4", "--pass_rate_cap", "0.8", "--output_dir", "out", "--token_budget", "512"]
    )
    assert (args.num_generations, args.pass_rate_cap, args.output_dir, args.token_budget) == (4, 0.8, "out", 512)
    assert args.vllm_server_base_url == "http://localhost:8000"
    (args,) = HfArgumentParser(CurriculumConfig).parse_args_into_dataclasses(["--vllm_server_base_url", "http://a", "http://b"])
    assert args.vllm_server_base_url == ["http://a", "http://b"]


def test_a_parallelism_config_is_a_spelling_of_two_fields():
    args = AsyncGRPOConfig(parallelism_config=ParallelismConfig(sp_size=2))
    assert (args.sp_size, args.cp_size, args.to_config(**GIVEN).sp_size) == (2, 1, 2)
    assert dataclasses.replace(args, max_steps=3).sp_size == 2
    ring = AsyncGRPOConfig(
        parallelism_config=ParallelismConfig(cp_size=2), sp_size=2, token_budget=0, per_device_train_batch_size=1
    )
    assert (ring.cp_size, ring.sp_size) == (2, 2), "both together, which accelerate itself refuses"


@pytest.mark.parametrize(
    ("sizes", "fields", "words"),
    [
        ({"tp_size": 2}, {}, "tp_size=2.*a layer is not split over ranks"),
        ({"dp_replicate_size": 2, "dp_shard_size": 2}, {}, "dp_replicate_size=2.*always sharded"),
        ({"dp_shard_size": 3, "sp_size": 2}, {}, "dp_shard_size=3.*of which 2 would"),
        ({"sp_size": 2}, {"sp_size": 4}, "sp_size=4, and parallelism_config has sp_size=2: write one"),
    ],
)
def test_what_else_a_parallelism_config_asks_for_is_refused(monkeypatch, sizes, fields, words):
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(ConfigError, match=words):
        AsyncGRPOConfig(parallelism_config=ParallelismConfig(**sizes), **fields)


def test_a_parallelism_config_of_as_many_shards_as_there_are_places_is_taken(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert AsyncGRPOConfig(parallelism_config=ParallelismConfig(sp_size=2, dp_shard_size=2)).sp_size == 2
    with pytest.raises(ConfigError, match="is a dict"):
        AsyncGRPOConfig(parallelism_config={"sp_size": 2})
