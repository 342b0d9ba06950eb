"""Which front end a vLLM server gets, and how many processes: what the run asks for against what the installation can do.

On a GPU the front end is what limits a server (`docs/serving.md` has the figures). Requests of a run ask for what our plugin
does, tokens in batches and log-probabilities as arrays, and then one Python process keeps up with the engine. Log-probabilities
of prompts, which a teacher is asked for, are written out token by token: by the Rust front end, or by several processes.

    Asks + Features + cores ──▶ choose ──▶ Choice(front end, processes, why)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from infra.errors import ServerLacks
from infra.vllm_features import Features

FrontEnd = Literal["auto", "python", "rust"]
RUST_ENV = "VLLM_USE_RUST_FRONTEND"
COUNT_FLAGS = ("--api-server-count", "-asc")
MOST_PROCESSES = 8  # beyond which a teacher's throughput no longer rose
CORES_PER_PROCESS = 2  # the engine and its workers need the rest
# What the Rust front end of vLLM 0.26 ends with an error for.
RUST_REFUSES = frozenset({
    "--aggregate-engine-logging", "--allowed-local-media-path", "--allowed-media-domains", "--collect-detailed-traces",
    "--config", "--data-parallel-external-lb", "--data-parallel-hybrid-lb", "--data-parallel-rank", "--disable-fastapi-docs",
    "--enable-force-include-usage", "--enable-log-deltas", "--enable-log-outputs", "--enable-offline-docs",
    "--enable-prompt-embeds", "--enable-ssl-refresh", "--exclude-tools-when-tool-choice-none", "--generation-config",
    "--h11-max-header-count", "--h11-max-incomplete-event-size", "--hf-config-path", "--hf-overrides", "--hf-token",
    "--io-processor-plugin", "--kv-sharing-fast-prefill", "--limit-mm-per-prompt", "--log-config-file", "--log-error-stack",
    "--max-log-len", "--media-io-kwargs", "--middleware", "--mm-processor-cache-gb",
    "--mm-processor-cache-type", "--mm-processor-kwargs", "--otlp-traces-endpoint", "--override-generation-config",
    "--reasoning-parser-plugin", "--response-role", "--return-tokens-as-token-ids", "--root-path", "--skip-tokenizer-init",
    "--tokenizer", "--tokenizer-revision", "--tokens-only", "--tool-parser-plugin", "--tool-server",
    "--trust-request-chat-template", "--uvicorn-log-level",
})  # fmt: skip

RUST_TOKENIZERS = ("tokenizer.json", "tiktoken.model", "*.tiktoken")  # one of which it must find


@dataclass(frozen=True)
class Asks:
    """`scores`: it is a teacher, asked for log-probabilities of prompts. `front_end`, `api_processes`: the user's word.

    `python_only`: of the user's own arguments, or of the model, what the Rust front end refuses.
    """

    device: Literal["cpu", "cuda"]
    scores: bool = False
    sampling_mask: bool = False
    adapters: bool = False
    front_end: FrontEnd = "auto"
    api_processes: int | None = None
    python_only: str | None = None


@dataclass(frozen=True)
class Choice:
    rust: bool = False
    api_processes: int = 1
    sampling_mask: bool = False
    reasons: list[str] = field(default_factory=list)


def choose(asks: Asks, features: Features, cores: int) -> Choice:
    """ServerLacks when the user's word cannot be kept."""
    reasons: list[str] = []
    mask = asks.sampling_mask and asks.device == "cuda" and features.takes("return_sampling_mask")
    if asks.sampling_mask and not mask:
        cause = "needs a GPU" if asks.device == "cpu" else f"is not in vLLM {features.version}"
        reasons.append(f"no candidate sets: --return-sampling-mask {cause}, so the ratio to the sampler stays biased")
    if asks.front_end == "rust":
        if (obstacle := rust_obstacle(asks, features, mask)) is not None:
            raise ServerLacks(f"the Rust front end cannot be used: {obstacle}; leave out {RUST_ENV} or set it to 0")
        return Choice(True, 1, mask, [*reasons, "Rust front end: as given"])
    if asks.front_end == "auto" and asks.scores and asks.api_processes is None and rust_obstacle(asks, features, mask) is None:
        if asks.python_only is None:
            return Choice(True, 1, mask, [*reasons, "Rust front end: the fastest for log-probabilities of prompts"])
        reasons.append(f"Python front end: the Rust one refuses {asks.python_only}")
    count, why = python_processes(asks, cores)
    return Choice(False, count, mask, [*reasons, why])


def rust_obstacle(asks: Asks, features: Features, mask: bool) -> str | None:
    """Why the Rust front end will not do; None: it will."""
    if features.rust is None:
        return f"vLLM {features.version} is installed without it (no executable vllm-rs in its folder)"
    if asks.device == "cpu":
        return "on a CPU the model is the limit, and the run's processes need the cores"
    if mask:
        return "it returns no candidate sets"
    if asks.adapters:
        return "adapters that change while it serves were never tried with it"
    if not asks.scores:
        return "it has no endpoints for weight updates, which a student takes; teachers may have it"
    return None


def python_processes(asks: Asks, cores: int) -> tuple[int, str]:
    if asks.adapters:
        if asks.api_processes not in (None, 1):
            raise ServerLacks(
                f"{COUNT_FLAGS[0]} {asks.api_processes} with adapters: an adapter is loaded in one process only; leave it out"
            )
        return 1, "1 API process: adapters are loaded in one process only"
    if asks.api_processes is not None:
        return asks.api_processes, f"API processes: {asks.api_processes}, as given"
    if asks.device == "cpu":
        return 1, "1 API process: on a CPU the model is the limit"
    if not asks.scores:
        return 1, "1 API process: tokens come to it in batches, and it sends log-probabilities as arrays"
    count = max(1, min(MOST_PROCESSES, cores // CORES_PER_PROCESS))
    return count, f"API processes: {count} for log-probabilities of prompts on {cores} cores"


def given_processes(arguments: Sequence[str]) -> int | None:
    """What a user's own arguments say of the process count; the last one counts."""
    count = None
    for at, argument in enumerate(arguments):
        name, equals, value = argument.partition("=")
        if _flag(name) in COUNT_FLAGS:
            text = value if equals else "".join(arguments[at + 1 : at + 2])
            if not text.isdecimal() or int(text) < 1:
                raise ServerLacks(f"{name} {text}: give the number of API processes, 1 or more")
            count = int(text)
    return count


def python_only(arguments: Sequence[str], model: str) -> str | None:
    """What the Rust front end refuses: a folder whose tokenizer it cannot read, or the first such of a user's own arguments."""
    folder = Path(model).expanduser()
    if folder.is_dir() and not any(any(folder.glob(pattern)) for pattern in RUST_TOKENIZERS):
        return f"a model that has no {', '.join(RUST_TOKENIZERS[:-1])} or {RUST_TOKENIZERS[-1]}"
    return next((argument for argument in map(_flag, arguments) if argument in RUST_REFUSES), None)


def takes_adapters(arguments: Sequence[str]) -> bool:
    """Whether a user's own arguments say that adapters may be loaded."""
    return "--enable-lora" in map(_flag, arguments)


def _flag(argument: str) -> str:
    """`--enable-lora` of `--enable_lora`, `--hf-overrides` of `--hf-overrides.rope_theta=1`: vLLM takes all of them."""
    name = argument.partition("=")[0]
    return name.partition(".")[0].replace("_", "-") if name.startswith("--") else name
