"""The configs under examples/ load, and what they name does what it should on rows as the data has them."""

import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

from flows.config_file import load_config
from flows.convert import PACKAGED
from flows.recipe_plan import Plan, load_recipe
from trainers.data import check_columns, load_data
from trainers.rewards import load_callable, load_object
from trainers.rollouts.tools import make_tool

EXAMPLES = Path(__file__).parents[2] / "examples"
GOLD = "Natalia sold 48/2 = <<48/2=24>>24 clips in May.\nNatalia sold 48+24 = <<48+24=72>>72 clips altogether.\n#### 72"


def test_gsm8k_smollm2_loads():
    config = load_config(
        "grpo", EXAMPLES / "gsm8k_smollm2.yaml", ["dataset.path=train.jsonl", "max_steps=9"], environ={}
    ).config
    assert config.model in PACKAGED
    assert (config.dataset.path, config.dataset.prompt_column, config.max_steps) == ("train.jsonl", "question", 9)
    assert config.dataset.system_prompt.endswith("#### 10")
    # A prompt of the longest question and a whole completion fit both the server and a row.
    assert config.token_budget == config.servers.student.max_model_len


@pytest.mark.parametrize(
    ("completion", "rewards"),
    [
        (GOLD, [1.0, 1.0]),
        ("She sold 24 in May, 72 in all.\n#### 72", [1.0, 1.0]),
        ("That makes\n#### $72.00", [1.0, 1.0]),
        ("The answer is 72.", [1.0, 0.0]),
        ("#### 71", [0.0, 1.0]),
        ("#### 72 clips and then some", [1.0, 0.0]),
        ("", [0.0, 0.0]),
    ],
)
def test_gsm8k_rewards(completion, rewards):
    config = load_config("grpo", EXAMPLES / "gsm8k_smollm2.yaml", environ={}).config
    columns = {"completions": [[{"role": "assistant", "content": completion}]], "answer": [GOLD], "question": ["?"]}
    assert [load_callable(spec)(**columns)[0] for spec in config.reward_funcs] == rewards


def test_calculator_tool_loads_and_its_parts_say_what_they_should():
    config = load_config("grpo", EXAMPLES / "calculator_tool.yaml", environ={}).config
    tool, reward = (load_callable(absolute(spec)) for spec in (*config.tools, *config.reward_funcs))
    assert make_tool(tool).schema["function"]["parameters"]["required"] == ["expression"]
    assert [tool(text) for text in ("2*(3 + 4)", "-7/2", "12 - 1.5")] == [14, -3.5, 10.5]
    for text in ("__import__('os')", "2**9", "x", "'a'*3"):
        with pytest.raises(ValueError):
            tool(text)
    said = [[{"role": "assistant", "content": content}] for content in ("It is 12, not 13.\n156", "156 it is, not 157", "")]
    assert reward(said, answer=["156"] * 3) == [1.0, 0.0, 0.0]
    rows = load_object(f"{EXAMPLES}/calculator_tool.py:problems")(3)
    assert [int(row["answer"]) for row in rows] == [tool(row["prompt"][8:].split("?")[0]) for row in rows]


def test_guess_environment_loads_and_can_be_won_by_halving():
    config = load_config("grpo", EXAMPLES / "guess_environment.yaml", environ={}).config
    spec = absolute(config.environment_factory)
    factory = partial(load_object(spec.path), **spec.kwargs)
    assert config.reward_funcs == [] and factory().highest == 7
    for row in load_object(f"{EXAMPLES}/guess_environment.py:games")(7, 7):
        game, low, high, answer = factory(), 1, 7, ""
        assert "from 1 to 7" in game.reset(**row) and game.get_reward() == 0.0
        while answer != "right":
            middle = (low + high) // 2
            answer = game.guess(middle)
            low, high = (middle + 1, high) if answer == "higher" else (low, middle - 1)
        assert game.get_reward() == 1.0 and game.guess(1) == "the game is over"


def absolute(spec):
    """An import path relative to the repository, from anywhere."""
    return spec.model_copy(update={"path": str(EXAMPLES.parent / spec.path)})


@pytest.mark.parametrize("name", ["calculator_tool", "guess_environment"])
def test_the_data_of_an_example_is_written_as_its_flow_reads_it(name, tmp_path):
    file = tmp_path / "rows.jsonl"
    subprocess.run([sys.executable, EXAMPLES / f"{name}.py", "--write-data", file], check=True)
    config = load_config("grpo", EXAMPLES / f"{name}.yaml", [f"dataset.path={file}"], environ={}).config
    rows = load_data(config.dataset)
    assert len(rows) == 2000
    check_columns(rows, config)


@pytest.fixture(scope="module")
def arithmetic(tmp_path_factory):
    """The data and the base model of the recipe on two cores, in a folder `arithmetic` as its file has it."""
    folder = tmp_path_factory.mktemp("recipe")
    subprocess.run([sys.executable, EXAMPLES / "specialise_and_merge_arithmetic.py", folder / "arithmetic"], check=True)
    return folder


def test_the_arithmetic_recipe_is_whole(arithmetic, monkeypatch):
    monkeypatch.chdir(arithmetic)
    plan = Plan(load_recipe(EXAMPLES / "specialise_and_merge_arithmetic.yaml", []))
    sft, *specialists, merged = plan.stages()
    assert [stage.name for stage in (sft, *specialists, merged)] == [
        f"arithmetic-{stage}" for stage in ("sft", "addition", "ordering", "merged")
    ]
    assert sft.model == str(arithmetic / "arithmetic" / "model") and len(load_data(sft.dataset)) == 6000
    longest = max(len(row["completion"]) + 1 for row in load_data(sft.dataset))
    for stage in (*specialists, merged):
        assert stage.max_completion_length >= (6 if stage.name == "arithmetic-addition" else longest)
    for name, specialist in zip(("addition", "ordering"), specialists, strict=True):
        held_out = load_data(plan.config.domains[name].eval.dataset)
        rows, demonstrated = load_data(specialist.dataset), load_data(sft.dataset)
        prompts = [{row["prompt"] for row in data} for data in (held_out, rows, demonstrated)]
        assert (len(held_out), len(rows)) == (256, 4000) and not prompts[0] & (prompts[1] | prompts[2])
        assert {len(row["prompt"]) for row in held_out} <= set(range(3, 9))  # with the two marks and an answer below 64 tokens


def test_the_arithmetic_recipes_demonstrations_are_careful_in_the_stated_share():
    make = load_object(f"{EXAMPLES}/specialise_and_merge_arithmetic.py:make_rows")
    ordering = load_object(f"{EXAMPLES}/specialise_and_merge_arithmetic.py:Ordering")
    assert make(3) == make(3) and make(3)["sft"] != make(4)["sft"]
    assert (ordering((62, 31, 9)).answer, ordering((62, 31, 9)).careless) == ("9,31,62", "62,9,31")
    told = [row for row in make(0)["sft"] if "," in row["prompt"]]
    problems = [ordering(tuple(map(int, row["prompt"].split(",")))) for row in told]
    open_ones = [(p, row) for p, row in zip(problems, told, strict=True) if p.answer != p.careless]
    careful = sum(row["completion"] == problem.answer for problem, row in open_ones) / len(open_ones)
    assert all(row["completion"] in (problem.answer, problem.careless) for problem, row in open_ones)
    assert len(open_ones) > 1800 and abs(careful - 0.4) < 0.035  # three standard deviations


def test_the_open_mopd_recipe_is_whole():
    plan = Plan(load_recipe(EXAMPLES / "open_mopd_smollm3.yaml", []))
    (merged,) = plan.stages()
    assert plan.trained == [] and merged.model == "BytedTsinghua-SIA/Open-MOPD-SmolLM3-3B-MixSFT"
    teachers = merged.servers.teachers
    assert list(teachers) == list(plan.config.domains) == ["math", "code", "instructions"]
    assert [teacher.model.rpartition("-")[2] for teacher in teachers.values()] == ["Math", "Code", "IF"]
    # Eight GPUs: students, teachers, trainer. A prompt of 4,096 tokens and a whole completion fit server and row.
    student = merged.servers.student
    assert student.count * student.gpus + sum(teacher.gpus for teacher in teachers.values()) + merged.trainer.gpus == 8
    assert merged.token_budget == student.max_model_len == merged.max_completion_length + 4096
    for name in ("math", "code"):
        scored = plan.evaluation(name, merged.model)
        assert callable(load_callable(scored.reward_func)) and scored.max_completion_length == 16384


def test_the_open_mopd_prompts_are_written_one_file_per_domain(tmp_path):
    split = load_object(f"{EXAMPLES}/open_mopd_smollm3.py:split")
    asked = [{"role": "user", "content": "?"}]
    rows = [{"prompt": asked, "domain": name} for name in ("math", "if", "code", "if")]
    assert split(rows, tmp_path) == {"math": 1, "code": 1, "instructions": 2}
    config = load_recipe(EXAMPLES / "open_mopd_smollm3.yaml", [])
    for name, domain in config.domains.items():
        data = load_data(domain.dataset.model_copy(update={"path": str(tmp_path / f"{name}.jsonl")}))
        assert domain.dataset.path == f"open_mopd/{name}.jsonl" and data[0]["prompt"] == asked
    with pytest.raises(SystemExit, match="no row is of code"):
        split(rows[:2], tmp_path)
    with pytest.raises(SystemExit, match="'chemistry'"):
        split([{"prompt": asked, "domain": "chemistry"}], tmp_path)


@pytest.mark.parametrize(("name", "ranks", "length"), [("1m", 8, 1 << 20), ("one_gpu", 1, 1 << 18), ("cpu", 2, 1 << 15)])
def test_books_examples_load_with_every_lever(name, ranks, length):
    config = load_config("sft", EXAMPLES / f"sft_books_{name}.yaml", ["dataset.path=my-books"], environ={}).config
    assert (config.max_length, config.trainer.ranks, config.cp_size, config.dataset.path) == (length, ranks, ranks, "my-books")
    assert config.rope_parameters == {"rope_type": "yarn", "factor": "auto"} and config.gradient_checkpointing_kwargs["offload"]
    assert config.save_attention and config.mlp_tile_tokens and config.books is not None and not config.packing
    assert max(config.long_eval.needle.lengths) == length and config.long_eval.books.path


def test_the_model_of_the_cpu_example_is_made_from_the_books(tmp_path):
    (tmp_path / "books").mkdir()
    (tmp_path / "books" / "a.txt").write_text("the sea was calm and we had no wind\n" * 50)
    script = [sys.executable, str(EXAMPLES / "sft_books_cpu.py"), str(tmp_path / "model"), str(tmp_path / "books")]
    subprocess.run(script, check=True, timeout=300)
    from transformers import AutoConfig, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    assert tokenizer.decode(tokenizer("the calm sea")["input_ids"]) == "the calm sea" and tokenizer.eos_token_id == 0
    made = load_config("sft", EXAMPLES / "sft_books_cpu.yaml", environ={}).config
    assert AutoConfig.from_pretrained(tmp_path / "model").max_position_embeddings * 16 == made.max_length
