"""What a vLLM server says of its load: the few numbers of `/metrics` that the engine reads.

The page is Prometheus text of a hundred kilobytes, mostly histograms. Only the lines wanted here are looked at. Engines of one
server (data parallel) are added up, but for the cache usage: the fullest one is the first to push requests out.
"""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import dataclass

_WANTED = re.compile(
    r"^vllm:(kv_cache_usage_perc|num_requests_running|num_requests_waiting|num_preemptions_total|generation_tokens_total"
    r"|cache_config_info)(?:\{([^\n]*)\})?[ \t]+(\S+)(?:[ \t]+\d+)?[ \t\r]*$",
    re.MULTILINE,
)
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')


@dataclass(frozen=True, slots=True)
class ServerLoad:
    """One look at a server. `kv_tokens`: the tokens its KV cache holds, None if it does not say."""

    kv_cache_usage: float  # share, 0 to 1
    running: float  # requests
    waiting: float
    preemptions: float  # since the server's start, as the next
    generated_tokens: float
    kv_tokens: int | None


def parse_load(page: str) -> ServerLoad | None:
    """The load that a `/metrics` page tells; None if it is no page of vLLM's scheduler."""
    values: defaultdict[str, list[float]] = defaultdict(list)
    kv_tokens: dict[str, int] = {}  # by engine
    for name, labels, value in _WANTED.findall(page):
        if name == "cache_config_info":
            said = dict(_LABEL.findall(labels))
            engine = said.get("engine", "0")
            kv_tokens[engine] = max(kv_tokens.get(engine, 0), _kv_tokens(said))
        else:
            values[name].append(float(value))
    if "kv_cache_usage_perc" not in values:
        return None
    return ServerLoad(
        kv_cache_usage=max(values["kv_cache_usage_perc"]),
        running=sum(values["num_requests_running"]),
        waiting=sum(values["num_requests_waiting"]),
        preemptions=sum(values["num_preemptions_total"]),
        generated_tokens=sum(values["generation_tokens_total"]),
        kv_tokens=sum(kv_tokens.values()) or None,
    )


def _kv_tokens(said: dict[str, str]) -> int:
    """Of one engine. Blocks × block size is wrong for models with several kinds of cache: the plain number comes first."""
    if (tokens := said.get("kv_cache_size_tokens", "")).isdecimal():
        return int(tokens)
    blocks, size = said.get("num_gpu_blocks", ""), said.get("block_size", "")
    return int(blocks) * int(size) if blocks.isdecimal() and size.isdecimal() else 0
