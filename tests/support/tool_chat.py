"""A character tokenizer whose chat template shows tools, in Hermes' format. Its ids are those `StubServer` answers with."""

from __future__ import annotations

from typing import Any

import numpy as np

from tests.support.letters import letter_tokenizer
from tests.support.stub_server import EOS

START, END = "<|im_start|>", "<|im_end|>"
TEMPLATE = (
    "{% if tools %}<|im_start|>system\n{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}<|im_end|>\n{% endif %}"
    "{% for message in messages %}"
    "{% if message.role == 'tool' %}<|im_start|>user\n<tool_response>{{ message.content }}</tool_response><|im_end|>\n"
    "{% else %}<|im_start|>{{ message.role }}\n{{ message.content }}"
    "{% for call in message.tool_calls or [] %}{% if message.content or not loop.first %}{{ '\n' }}{% endif %}"
    '<tool_call>\n{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}\n</tool_call>'
    "{% endfor %}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def tool_tokenizer(template: str | None = TEMPLATE) -> Any:
    special = {"<pad>": 0, END: EOS, START: 2, "<unk>": 3}
    vocabulary = special | {chr(code): code + 4 for code in (10, *range(32, 127))}
    return letter_tokenizer(vocabulary, template, [START], eos_token=END)


def text(ids: Any) -> str:
    """The characters of ids, special tokens spelled out."""
    names = {0: "<pad>", EOS: END, 2: START, 3: "<unk>"}
    return "".join(names.get(int(i)) or chr(int(i) - 4) for i in np.asarray(ids))


def call(name: str, **arguments: Any) -> str:
    """A tool call as the template writes it."""
    import json

    return f'<tool_call>\n{{"name": "{name}", "arguments": {json.dumps(arguments)}}}\n</tool_call>'


def responses(prompt: Any) -> list[str]:
    """The tool results a prompt shows."""
    return [part.split("</tool_response>")[0] for part in text(prompt).split("<tool_response>")[1:]]
