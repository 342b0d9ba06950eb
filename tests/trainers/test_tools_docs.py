"""docs/tools_and_environments.md: what it says of the code is true, and its examples run as they are written."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.rollout_runs import only_step, running
from tests.support.stub_server import StubServer
from tests.support.tool_chat import call, responses, text, tool_tokenizer
from trainers.config import GRPOConfig
from trainers.metrics import CATALOG, spec_of
from trainers.rewards import load_object
from trainers.rollouts import call_formats, loop
from trainers.rollouts.tools import make_tool

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/tools_and_environments.md").read_text(encoding="utf-8")


@pytest.fixture
def files(tmp_path: Path) -> Path:
    """A folder with the page's Python files."""
    for block in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL):
        (tmp_path / block.splitlines()[0].removeprefix("# ")).write_text(block)
    return tmp_path


def test_the_tool_of_the_page_can_be_told_to_a_model(files: Path) -> None:
    schema = make_tool(load_object(f"{files}/my_tools.py:search")).schema["function"]
    assert schema["description"] == "Search the encyclopedia."
    assert schema["parameters"]["properties"]["query"] == {"type": "string", "description": "What to look for."}
    assert schema["parameters"]["required"] == ["query"]


@pytest.mark.parametrize("by_config", [True, False])
async def test_the_loop_of_the_page_plays_the_environment_of_the_page(files: Path, by_config: bool) -> None:
    """The stub adds 5 at once; with the hint it adds 1 until the count is right."""

    def script(prompt: list[int]) -> str:
        shown, answers = text(prompt), responses(prompt)
        target = re.search(r"Count to (\d)", shown)
        assert target is not None, shown
        if "Add 1 until" in shown:
            return "done" if answers and answers[-1] == target[1] else call("add", amount=1)
        return "done" if answers else call("add", amount=5)

    stub = StubServer(max_model_len=4000)
    stub.script = script
    paths = {"environment_factory": f"{files}/my_environment.py:Counter", "loop_cls": f"{files}/my_loop.py:Curriculum"}
    objects: dict[str, Any] = {"from_config": paths}
    if not by_config:
        objects = {"from_config": {"environment_factory": paths["environment_factory"]}}
        objects |= {
            "loop_class": load_object(paths["loop_cls"]),
            "environment_factory": load_object(paths["environment_factory"]),
        }
    rows = [{"target": target} for target in (2, 5, 3)]
    async with running(
        stub, [], rows, tokenizer=tool_tokenizer(), max_completion_length=2000, shuffle=False, **objects
    ) as engine:
        assert await only_step(engine) is None  # every group is of equal rewards
        kept = {row["row"]: row for row in engine.drain_rows()}
    assert {number: (row["reward"], row["tool_calls"]) for number, row in kept.items()} == {0: (0.5, 2), 2: (0.5, 3)}
    assert kept[0]["rewards/Counter"] == 1.0  # row 1 was filtered: 5 is too far for the first epoch


def test_what_the_page_calls_by_name_exists() -> None:
    for name in re.findall(r"`((?:tools|env|rewards|rollout)/[^`…]+)`", PAGE.replace("<Class>", "Counter")):
        assert name in CATALOG or spec_of(name)
    for name in re.findall(r"`(max_\w+|fork_\w+|keep_\w+|vllm_\w+)`", PAGE):
        assert name in GRPOConfig.model_fields, name
    for hook in ("setup", "filter_prompt", "generate_one", "compute_advantages", "converse", "turn"):
        assert callable(getattr(loop.AsyncRolloutLoop, hook)) and hook in PAGE
    (block,) = re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)
    config = GRPOConfig.model_validate({"model": "m", "dataset": {"path": "d.jsonl"}, **yaml.safe_load(block)})
    for spec in [*config.tools, config.environment_factory]:
        assert spec is not None and callable(load_object(f"{ROOT}/{spec.path}"))


@pytest.mark.parametrize(
    "example",
    [
        '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>',
        "<tool_call><function=f><parameter=a>1</parameter></function></tool_call>",
        "<tool_call>f<arg_key>a</arg_key><arg_value>1</arg_value></tool_call>",
        '{"name": "f", "parameters": {"a": 1}}',
        '<|python_tag|>{"name": "f", "parameters": {"a": 1}}',
        '[TOOL_CALLS] [{"name": "f", "arguments": {"a": 1}}]',
        '[TOOL_CALLS]f[ARGS]{"a": 1}',
        '<｜tool▁call▁begin｜>f<｜tool▁sep｜>{"a": 1}<｜tool▁call▁end｜>',
    ],
)
def test_every_form_of_the_table_is_read(example: str) -> None:
    shown = example.replace('"f"', "…").replace(">f<", ">NAME<").replace("=f>", "=NAME>").replace("]f[", "]NAME[")
    shown = shown.replace('{"a": 1}', "{…}").replace("=a>1<", "=KEY>VALUE<").replace(">a<", ">KEY<").replace(">1<", ">VALUE<")
    if not example.startswith("<|python_tag|>"):
        assert f"`{shown}`" in PAGE, shown
    template = example if "parameters" not in example else "<|python_tag|>"
    (found,), _ = call_formats.format_of(template).parse(example, [])
    assert (found.name, found.arguments, found.problem) == ("f", {"a": 1}, None)
