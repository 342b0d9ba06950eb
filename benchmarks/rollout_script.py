"""What both engines of `rollout_engine` are given: tokenizer, prompts, a tool, a reward, and the stub's answers.

    write(folder) ─▶ tokenizer files │ dataset.jsonl │ answers.json

A conversation has `turns` turns: in all but the last the model writes a sentence and one call of `multiply` in the Hermes form.
One answer of eight writes its call with other white space than the chat template does, so that the next turn's re-tokenization
differs by a few tokens and is mended. The tokenizer is a byte-level BPE trained on this text, with the template of
Qwen3-2507-Instruct as TRL ships it.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

MODEL = "policy"
MAX_MODEL_LEN = 4096
_VARIANTS = 64
_SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_TAGS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>")
_THINGS = ("boxes of pens", "crates of apples", "shelves of books", "rows of chairs", "bags of marbles", "packs of cards")


def multiply(a: int, b: int) -> int:
    """Multiply two whole numbers.

    Args:
        a: The first factor.
        b: The second factor.
    """
    return a * b


def alternating(completions: list[Any], **_: Any) -> list[float]:
    """Rewards 0, 1, 0, 1, … over a group: no group is without variance."""
    return [float(i % 2) for i in range(len(completions))]


def question(row: int) -> str:
    rng = random.Random(row)
    thing = rng.choice(_THINGS)
    return (
        f"A warehouse receives {rng.randint(11, 99)} {thing} every morning and {rng.randint(11, 99)} more every evening, and "
        f"each of them holds {rng.randint(11, 99)} pieces. It is open {rng.randint(3, 7)} days a week. How many pieces arrive "
        f"in {rng.randint(2, 9)} weeks? Use the tool for every product and end with the number alone."
    )


def turn_text(turn: int, turns: int, variant: int) -> str:
    """What the model writes in this turn, without the end of turn."""
    rng = random.Random(1000 * turn + variant)
    a, b = rng.randint(11, 999), rng.randint(11, 99)
    if turn == turns - 1:
        return (
            f"Adding the parts gives {a * b} for one week and {a * b * 3} for all of them. I have checked each product with "
            f"the tool, and none of the factors was left out, so this is the whole number of pieces.\n\n{a * b * 3}"
        )
    space = "  " if variant % 8 == 0 else " "
    call = f'{{"name": "multiply", "arguments":{space}{{"a": {a}, "b": {b}}}}}'
    return (
        f"Step {turn + 1}: the morning and the evening together bring {a} of them, and each holds {b} pieces. I multiply these "
        f"two numbers with the tool rather than in my head, because a slip here would spoil every later step.\n"
        f"<tool_call>\n{call}\n</tool_call>"
    )


def build_tokenizer(turns: int) -> Any:
    """A `PreTrainedTokenizerFast` with a chat template that renders tools."""
    import trl
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    template = (Path(trl.__file__).parent / "chat_templates" / "qwen3_instruct_2507.jinja").read_text()
    texts = [template, Path(__file__).read_text(), *(question(row) for row in range(200))]
    texts += [turn_text(turn, turns, variant) for turn in range(turns) for variant in range(8)]
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    # Small enough that words are two tokens or so, large enough that ids have four digits.
    bpe.train_from_iterator(
        texts,
        trainers.BpeTrainer(
            vocab_size=1000, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False, min_frequency=2
        ),
    )
    bpe.add_tokens([f"<unused{i}>" for i in range(bpe.get_vocab_size(), 1000)])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=list(_SPECIAL),
        clean_up_tokenization_spaces=False,
        model_max_length=MAX_MODEL_LEN,
    )
    tokenizer.add_tokens(list(_TAGS))
    tokenizer.chat_template = template
    return tokenizer


def _body(tokenizer: Any, text: str, rng: random.Random) -> str:
    """A body as vLLM sends it for `logprobs: 0` and `return_token_ids`; the prompt's ids are left to the stub."""
    ids = tokenizer(text + "<|im_end|>", add_special_tokens=False)["input_ids"]
    logprobs = [-rng.expovariate(2.0) for _ in ids]
    names = [f"token_id:{i}" for i in ids]
    choice = {
        "index": 0,
        "text": text,
        "logprobs": {
            "text_offset": [4 * i for i in range(len(ids))],
            "token_logprobs": logprobs,
            "tokens": names,
            "top_logprobs": [{name: value} for name, value in zip(names, logprobs, strict=True)],
        },
        "finish_reason": "stop",
        "stop_reason": None,
        "token_ids": ids,
        "prompt_logprobs": None,
        "prompt_token_ids": [],
    }
    usage = {"prompt_tokens": 0, "total_tokens": 0, "completion_tokens": len(ids), "prompt_tokens_details": None}
    body = {"id": f"cmpl-{rng.getrandbits(128):032x}", "object": "text_completion", "created": 1, "model": MODEL}
    return json.dumps(body | {"choices": [choice], "usage": usage}, separators=(",", ":"))


def write(folder: Path, prompts: int, turns: int) -> None:
    """Write what both engines read into `folder`."""
    tokenizer = build_tokenizer(turns)
    tokenizer.save_pretrained(folder)
    with open(folder / "dataset.jsonl", "w") as stream:
        for row in range(prompts):
            stream.write(json.dumps({"prompt": [{"role": "user", "content": question(row)}], "answer": str(row)}) + "\n")
    marker = tokenizer.convert_tokens_to_ids("<tool_response>")
    assert marker >= 1000 and len(tokenizer) <= 9999, f"marker {marker} of {len(tokenizer)} could be part of another id"
    rng = random.Random(0)
    answers = [
        [_body(tokenizer, turn_text(turn, turns, variant), rng) for variant in range(_VARIANTS)] for turn in range(turns)
    ]
    what = {"marker": marker, "answers": answers, "model": MODEL, "max_model_len": MAX_MODEL_LEN}
    (folder / "answers.json").write_text(json.dumps(what))
