"""Tools as the model is told of them, the formats in which models call them, and rendering with a chat template."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.tiny_model import build_tokenizer
from tests.support.tool_chat import call, text, tool_tokenizer
from trainers.errors import ConfigError
from trainers.rollouts import call_formats
from trainers.rollouts.call_formats import CallFormat, RequestedCall, format_of
from trainers.rollouts.chat import Chat
from trainers.rollouts.tools import Toolbox, make_tool


def weather(city: str, days: int = 1) -> str:
    """Tell the weather.

    Args:
        city: where
        days: how many days ahead
    """
    return f"{city}: sun for {days} days"


WEATHER = make_tool(weather).schema


# What the model is told -------------------------------------------------------------------------------------------------------


def test_the_schema_is_that_of_signature_and_docstring() -> None:
    function = WEATHER["function"]
    assert (function["name"], function["description"]) == ("weather", "Tell the weather.")
    assert function["parameters"]["properties"]["city"] == {"type": "string", "description": "where"}
    assert function["parameters"]["required"] == ["city"]
    partial = make_tool(functools.partial(weather, city="Rome"))
    assert partial.name == "weather" and list(partial.schema["function"]["parameters"]["properties"]) == ["days"]
    assert partial.schema["function"]["parameters"]["required"] == []


def _without_docstring(city: str) -> str:
    return city


def _without_type(city) -> str:  # type: ignore[no-untyped-def]
    """Tell the weather.

    Args:
        city: where
    """
    return city


def _without_description(city: str) -> str:
    """Tell the weather."""
    return city


class _Callable:
    def __call__(self, city: str) -> str:
        return city


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (_without_docstring, r"tool `_without_docstring`: .*no docstring.* Give it a docstring"),
        (_without_type, r"tool `_without_type`: .*city is missing a type hint"),
        (_without_description, r"tool `_without_description`: .*no description for the argument 'city'"),
        (lambda city: city, "has no name the model could call it by"),
        (_Callable(), "is a _Callable: the model calls a tool by its name, so pass a function"),
        (_Callable, "is a type: the model calls a tool by its name"),
        (functools.partial(weather, "Rome"), "binds arguments by position"),
    ],
)
def test_a_function_the_model_cannot_be_told_of_is_refused_with_the_remedy(function: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_tool(function)


def test_two_tools_of_one_name_are_refused() -> None:
    with pytest.raises(ConfigError, match="two tools are called `weather`"):
        Toolbox([make_tool(weather), make_tool(functools.partial(weather, days=2))])


# How models call --------------------------------------------------------------------------------------------------------------

ROME = RequestedCall("weather", {"city": "Rome", "days": 2})
OSLO = RequestedCall("weather", {"city": "Oslo"})
BEGIN, SEP, END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"


@pytest.mark.parametrize(
    ("form", "said", "calls", "rest"),
    [
        (call_formats.HERMES, "Hm.\n" + call("weather", city="Rome", days=2), [ROME], "Hm.\n"),
        (call_formats.HERMES, call("weather", city="Rome", days=2) + "\n" + call("weather", city="Oslo"), [ROME, OSLO], "\n"),
        (call_formats.HERMES, '<tool_call>{"name": "weather", "arguments": {"city": "Oslo"}}<|im_end|>', [OSLO], ""),
        (
            call_formats.FUNCTION_TAGS,
            "Hm.\n<tool_call>\n<function=weather>\n<parameter=city>\nRome\n</parameter>\n<parameter=days>\n2\n</parameter>\n"
            "</function>\n</tool_call><|im_end|>",
            [ROME],
            "Hm.\n<|im_end|>",
        ),
        (
            call_formats.KEY_VALUE_TAGS,
            "<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Rome</arg_value>\n<arg_key>days</arg_key>\n"
            "<arg_value>2</arg_value>\n</tool_call>",
            [ROME],
            "",
        ),
        (call_formats.LLAMA, '{"name": "weather", "parameters": {"city": "Rome", "days": 2}}<|eot_id|>', [ROME], ""),
        (
            call_formats.LLAMA,
            '<|python_tag|>{"name": "weather", "parameters": {"city": "Rome", "days": 2}}; '
            '{"name": "weather", "parameters": {"city": "Oslo"}}<|eom_id|>',
            [ROME, OSLO],
            "",
        ),
        (
            call_formats.MISTRAL,
            'Hm.[TOOL_CALLS] [{"name": "weather", "arguments": {"city": "Rome", "days": 2}, "id": "abcdefghi"}]</s>',
            [RequestedCall("weather", ROME.arguments, id="abcdefghi")],
            "Hm.",
        ),
        (
            call_formats.MISTRAL,
            '[TOOL_CALLS]weather[ARGS]{"city": "Rome", "days": 2}[TOOL_CALLS]weather[ARGS]{"city": "Oslo"}</s>',
            [ROME, OSLO],
            "",
        ),
        (
            call_formats.DEEPSEEK,
            f'Hm.<｜tool▁calls▁begin｜>{BEGIN}function{SEP}weather\n```json\n{{"city": "Rome", "days": 2}}\n```{END}\n'
            f'{BEGIN}weather{SEP}{{"city": "Oslo"}}{END}<｜tool▁calls▁end｜>',
            [ROME, OSLO],
            "Hm.\n",
        ),
    ],
)
def test_every_format_is_read(form: CallFormat, said: str, calls: list[RequestedCall], rest: str) -> None:
    assert form.begins(said)
    assert form.parse(said, [WEATHER]) == (calls, rest)


@pytest.mark.parametrize(
    ("form", "said"),
    [
        (call_formats.HERMES, "<tool_call>{'name': 'weather'}</tool_call>"),
        (call_formats.FUNCTION_TAGS, "<tool_call>\n<function=weather>\n<parameter=city>\nRome"),
        (call_formats.KEY_VALUE_TAGS, "<tool_call>\n<arg_key>city</arg_key>\n<arg_value>Rome</arg_value>\n</tool_call>"),
        (call_formats.LLAMA, '{"name": "weather", "parameters": {"city"'),
        (call_formats.LLAMA, '<|python_tag|>weather.call(city="Rome")'),
        (call_formats.MISTRAL, '[TOOL_CALLS] [{"name": "weather", '),
        (call_formats.DEEPSEEK, f"{BEGIN}weather{SEP}{{'city'}}{END}"),
    ],
)
def test_a_broken_call_is_a_call_with_a_problem(form: CallFormat, said: str) -> None:
    calls, _ = form.parse(said, [WEATHER])
    assert calls and calls[-1].problem


def test_an_answer_in_json_is_no_call() -> None:
    assert call_formats.LLAMA.parse('{"city": "Rome"}', [WEATHER]) == ([], '{"city": "Rome"}')
    assert call_formats.LLAMA.parse("{1, 2}", [WEATHER]) == ([], "{1, 2}")
    assert not call_formats.LLAMA.begins("Rome")


def test_a_text_argument_stays_text_even_if_it_looks_like_a_number() -> None:
    said = "<function=weather><parameter=city>\n12\n</parameter><parameter=days>\nmany\n</parameter></function>"
    (requested,), _ = call_formats.FUNCTION_TAGS.parse(said, [WEATHER])
    assert requested.arguments == {"city": "12", "days": "many"}


FORMATS = [call_formats.HERMES, call_formats.FUNCTION_TAGS, call_formats.KEY_VALUE_TAGS]
FORMATS += [call_formats.LLAMA, call_formats.MISTRAL, call_formats.DEEPSEEK]
PIECES = [
    "<tool_call>",
    "</tool_call>",
    "<function=",
    "weather>",
    "</function>",
    "<parameter=city>",
    "</parameter>",
    "<arg_key>",
]
PIECES += [
    "</arg_key>",
    "<arg_value>",
    "<|python_tag|>",
    "[TOOL_CALLS]",
    "[ARGS]",
    BEGIN,
    SEP,
    END,
    '{"name": "weather"',
    "{",
    "}",
]
PIECES += ['"arguments": ', "[", "]", "null", "1", ", ", "```json\n", ";", "\n", "[" * 2000, '{"a":' * 2000]


@settings(max_examples=300, deadline=None)
@given(st.lists(st.sampled_from(PIECES), max_size=12).map("".join))
def test_reading_never_raises(said: str) -> None:
    for form in FORMATS:
        calls, rest = form.parse(said, [WEATHER])
        assert isinstance(rest, str)
        assert all(requested.problem or isinstance(requested.arguments, dict) for requested in calls)


def test_the_format_is_told_by_the_template() -> None:
    templates = {
        "<tool_call>\n<function=": call_formats.FUNCTION_TAGS,
        "<tool_call>{{ name }}<arg_key>": call_formats.KEY_VALUE_TAGS,
        "<tool_call>": call_formats.HERMES,
        "[TOOL_CALLS] [": call_formats.MISTRAL,
        BEGIN: call_formats.DEEPSEEK,
        "{{ '<|python_tag|>' }}": call_formats.LLAMA,
        "of its own": call_formats.HERMES,
    }
    assert [format_of(template) for template in templates] == list(templates.values())


# Rendering and reading --------------------------------------------------------------------------------------------------------


def test_ids_are_those_of_the_tokenizer_whatever_was_done_with_it_before() -> None:
    tokenizer = build_tokenizer()
    chat = Chat(tokenizer)
    messages = [
        {"role": "user", "content": "1+1="},
        {"role": "assistant", "content": "2"},
        {"role": "user", "content": "?" * 30},
    ]
    expected = tokenizer(chat.render(messages), add_special_tokens=False)["input_ids"]
    assert chat.prompt_ids(messages).tolist() == expected and chat.prompt_ids(messages).dtype == np.int32
    tokenizer(["1", "22"], padding=True, truncation=True, max_length=5)
    assert chat.prompt_ids(messages).tolist() == expected


def test_without_a_template_the_contents_are_the_prompt() -> None:
    tokenizer = tool_tokenizer(template=None)
    assert text(Chat(tokenizer).prompt_ids([{"role": "user", "content": "2+2="}])) == "2+2="


def test_template_arguments_and_tools_reach_the_template() -> None:
    chat = Chat(
        tool_tokenizer("{{ mood }}: {% for tool in tools %}{{ tool.function.name }}{% endfor %}"), {"mood": "calm"}, [WEATHER]
    )
    assert chat.render([{"role": "user", "content": "?"}]) == "calm: weather"


def test_calls_get_ids_where_the_template_writes_them() -> None:
    tokenizer = tool_tokenizer()
    said = Chat(tokenizer, tools=[WEATHER]).encode(call("weather", city="Oslo") + "<|im_end|>")
    assert "id" not in Chat(tokenizer, tools=[WEATHER]).read(said, said).message["tool_calls"][0]
    tokenizer.chat_template += "{% if messages[0].tool_calls %}{{ messages[0].tool_calls[0].id | length == 9 }}{% endif %}"
    chat = Chat(tokenizer, tools=[WEATHER])
    answer = chat.read(said, said)
    assert answer.calls[0].id == answer.message["tool_calls"][0]["id"] == "call00000"
    assert chat.render([answer.message]).endswith("True")


def test_a_tokenizer_with_a_parser_of_its_own_is_read_by_it() -> None:
    tokenizer = tool_tokenizer()
    tokenizer.response_template = {
        "defaults": {"role": "assistant"},
        "start_anchor": "<|im_start|>assistant\n",
        "fields": {
            "reasoning_content": {"open": "<think>", "close_pattern": r"</think>\s*", "content": "text"},
            "tool_calls": {
                "open": "<tool_call>",
                "close_pattern": r"</tool_call>\s*",
                "repeats": True,
                "content": "json",
                "transform": {"type": "function", "function": "{content}"},
            },
            "content": {"close_pattern": r"<\|im_end\|>\s*", "content": "text"},
        },
    }
    chat = Chat(tokenizer, tools=[WEATHER])
    prompt = chat.prompt_ids([{"role": "user", "content": "?"}])
    said = chat.read(prompt, chat.encode("<think>so</think>\n" + call("weather", city="Oslo") + "<|im_end|>"))
    assert said.calls == [OSLO] and said.message["reasoning_content"] == "so"
    assert said.message["tool_calls"][0]["function"] == {"name": "weather", "arguments": {"city": "Oslo"}}
    broken = chat.read(prompt, chat.encode("<tool_call>\n{oops\n</tool_call><|im_end|>"))
    assert broken.calls[0].problem and broken.message == {"role": "assistant", "content": "<tool_call>\n{oops\n</tool_call>"}
    plain = chat.read(prompt, chat.encode("Hello<|im_end|>"))
    assert plain.calls == [] and plain.message["content"] == "Hello"


def _small_bpe(kind: str) -> Any:
    """A tokenizer as real ones are made: byte-level (GPT-2, Qwen) or with word marks (Llama 2, Mistral)."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    corpus = ["<|im_start|>user\nhello there, count to 10\n", "assistant  tool call: one two three é\n\n"]
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    if kind == "bytes":
        tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
    elif kind == "words":
        tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.Metaspace(prepend_scheme="first"), decoders.Metaspace()
        alphabet = [chr(code) for code in (10, *range(32, 127))]
    else:
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        tokenizer.decoder, alphabet = decoders.Fuse(), [chr(code) for code in (10, *range(32, 127))]
    special = ["<unk>", "<|im_start|>", "<|im_end|>"]
    tokenizer.train_from_iterator(
        corpus, trainers.BpeTrainer(vocab_size=400, special_tokens=special, initial_alphabet=alphabet, show_progress=False)
    )
    tokenizer.add_tokens(["<tool_call>", "</tool_call>"])
    tokenizer.add_special_tokens(
        [AddedToken("<mask>", lstrip=True), AddedToken("<|im_start|>x"), AddedToken("<br>", rstrip=True)]
    )
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>", unk_token="<unk>")
    fast.chat_template = tool_tokenizer().chat_template
    return fast


TOKENIZERS = {"characters": tool_tokenizer(), **{kind: _small_bpe(kind) for kind in ("bytes", "words", "prepended")}}
SAID = st.lists(
    st.sampled_from(
        ["hello", " ", "\n", "<|im_start|>", "<|im_end|>", "<mask>", "<br>", "<tool_call>", "x", "é", "one two", "  "]
    ),
    max_size=6,
).map("".join)


@settings(max_examples=200, deadline=None)
@given(
    st.sampled_from(sorted(TOKENIZERS)), st.lists(st.tuples(st.sampled_from(["assistant", "tool", "user"]), SAID), max_size=8)
)
def test_a_prompt_tokenized_from_the_last_turn_on_equals_the_whole(kind: str, said: list[tuple[str, str]]) -> None:
    tokenizer = TOKENIZERS[kind]
    chat = Chat(tokenizer, tools=[WEATHER])
    messages: list[dict[str, Any]] = [{"role": "user", "content": "hello there"}]
    before = chat.known(messages, chat.prompt_ids(messages))
    for role, content in said:
        messages.append({"role": role, "content": content})
        before = chat.rendered(messages, before)
        assert before.ids.tolist() == tokenizer(before.text, add_special_tokens=False)["input_ids"]


def test_only_what_follows_the_last_turn_is_tokenized_again() -> None:
    class Watched(Chat):
        seen: list[str] = []  # noqa: RUF012

        def encode(self, text: str) -> np.ndarray:
            self.seen.append(text)
            return super().encode(text)

    chat = Watched(tool_tokenizer(), tools=[WEATHER])
    messages = [{"role": "user", "content": "hello"}]
    before = chat.rendered(messages)
    chat.rendered([*messages, {"role": "assistant", "content": "yes"}], before)
    assert chat.seen[1] == "<|im_start|>assistant\nyes<|im_end|>\n<|im_start|>assistant\n"
    chat.rendered([{"role": "user", "content": "rewritten"}, {"role": "assistant", "content": "yes"}], before)
    assert chat.seen[2].startswith("<|im_start|>system\n") and "rewritten" in chat.seen[2]
