"""What a running vLLM server can do, asked from the server itself, and the flag to add where that is not enough."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import httpx

from infra.errors import ServerLacks, ServerUnreachable
from infra.vllm_command import BACKEND

CONNECT_TIMEOUT_S = 10.0
# The first /server_info collects facts about the machine, which takes seconds on a busy one.
ANSWER_TIMEOUT_S = 120.0
CONTROL_PATHS = ("/pause", "/resume", "/start_weight_update", "/update_weights", "/finish_weight_update")
SYNC = "/loopwright/sync"  # of our middleware and proxy: a whole weight sync in one call
GENERATE = "/inference/v1/generate"


@dataclass(frozen=True)
class Capabilities:
    """`None`: the server does not tell (a server without /server_info, that is without VLLM_SERVER_DEV_MODE=1)."""

    version: str
    model: str  # folder or hub id it was started with
    served_name: str  # what requests call it
    max_model_len: int
    generate_endpoint: bool
    control_plane: bool  # pause and weight updates
    keyed: bool  # it refuses requests without a key, also where vLLM's own check would not
    weight_transfer: str | None
    logprobs_mode: str | None
    max_logprobs: int | None
    dtype: str | None
    device: str | None
    chunked_prefill: bool | None


@dataclass(frozen=True)
class Needs:
    """What a run asks of its student server, or with `frozen` of a teacher, whose weights stay as they are.

    `generate_endpoint`: /inference/v1/generate, without which a student's tokens come without their policy versions.
    """

    max_model_len: int = 1
    weight_transfer: str | None = BACKEND
    logprobs_mode: str = "processed_logprobs"
    max_logprobs: int = 1
    generate_endpoint: bool = True
    frozen: bool = False


def request(url: str, key: str | None, path: str, **options: Any) -> httpx.Response:
    """One GET (or `method=`) on a connection of its own. ServerUnreachable when nothing answers, or it wants another key."""
    response = _answer(url, key, path, **options)
    if response.status_code == 401:
        place = "VLLM_API_KEY, or the variable that `api_key_env` names"
        hint = f"its key differs from {place}" if key else f"set {place}, to its key"
        raise ServerUnreachable(f"the server at {url} refused the request for want of a key: {hint}")
    return response


def _answer(url: str, key: str | None, path: str, **options: Any) -> httpx.Response:
    """As `request`, of any status."""
    headers = {b"Connection": b"close"} | ({b"Authorization": f"Bearer {key.strip()}".encode()} if key else {})
    timeout = httpx.Timeout(options.pop("timeout", ANSWER_TIMEOUT_S), connect=CONNECT_TIMEOUT_S)
    try:
        # A proxy from the environment would only get in the way of a loopback or private address.
        with httpx.Client(headers=headers, timeout=timeout, trust_env=False) as client:
            return client.request(options.pop("method", "GET"), url.rstrip("/") + path, **options)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise ServerUnreachable(
            f"no vLLM server answers at {url} ({type(error).__name__}: {error}): start one with `loopwright serve MODEL`"
        ) from error


def probe(url: str, key: str | None = None) -> Capabilities:
    """Ask a server what it can do. ServerUnreachable when it does not answer as vLLM does."""
    try:
        served = request(url, key, "/v1/models").raise_for_status().json()["data"][0]
        name, longest = str(served["id"]), int(served["max_model_len"])
        version = request(url, key, "/version").raise_for_status().json()["version"]
        paths = _paths(url, key)
        config = _config(url, key) if "/server_info" in paths else {}
    except (httpx.HTTPStatusError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise ServerUnreachable(f"what answers at {url} is not a vLLM server: {error!r}") from error
    model, scheduler = config.get("model_config") or {}, config.get("scheduler_config") or {}
    return Capabilities(
        version=version,
        model=served.get("root") or name,
        served_name=name,
        max_model_len=longest,
        generate_endpoint=GENERATE in paths,
        control_plane=SYNC in paths or all(path in paths for path in CONTROL_PATHS),
        keyed=_keyed(url),
        weight_transfer=(config.get("weight_transfer_config") or {}).get("backend") if config or SYNC not in paths else BACKEND,
        logprobs_mode=model.get("logprobs_mode"),
        max_logprobs=model.get("max_logprobs"),
        dtype=str(model["dtype"]).removeprefix("torch.") if "dtype" in model else None,
        device=(config.get("device_config") or {}).get("device"),
        chunked_prefill=scheduler.get("enable_chunked_prefill"),
    )


def _config(url: str, key: str | None) -> dict[str, Any]:
    """What it tells of itself; empty where it does not (Rust)."""
    answer = request(url, key, "/server_info", params={"config_format": "json"})
    found = answer.json().get("vllm_config") if answer.status_code == 200 else None
    return found if isinstance(found, dict) else {}


def _paths(url: str, key: str | None) -> set[str]:
    """The paths it has of those that matter: from its OpenAPI page, or asked for one by one where it has none (Rust)."""
    page = request(url, key, "/openapi.json")
    paths = set(page.json()["paths"]) if page.status_code == 200 else set()
    if not paths:
        paths |= {"/server_info"} if request(url, key, "/server_info").status_code == 200 else set()
        # An empty request is refused where the endpoint exists, and not found where it does not.
        paths |= {GENERATE} if request(url, key, GENERATE, method="POST", json={}).status_code not in (404, 405) else set()
    return paths | ({SYNC} if request(url, key, SYNC).status_code == 200 else set())


def _keyed(url: str) -> bool:
    # /metrics is outside what vLLM's own key check covers.
    return _answer(url, None, "/metrics").status_code == 401


def lacking(found: Capabilities, needs: Needs) -> list[str]:
    """What is missing, one line each, with what to start the server with."""
    lines = []
    if not found.control_plane and not needs.frozen:
        lines.append("it has no /pause and /update_weights: start it with VLLM_SERVER_DEV_MODE=1 in its environment")
    if not found.generate_endpoint and needs.generate_endpoint:
        lines.append("it has no /inference/v1/generate: add --enable-scale-out")
    transfers = needs.weight_transfer is not None and not needs.frozen and found.control_plane
    if transfers and found.weight_transfer != needs.weight_transfer:
        lines.append(
            f"its weight transfer backend is {found.weight_transfer}: add --weight-transfer-config "
            f'\'{{"backend": "{needs.weight_transfer}"}}\' (and infra/vllm_plugin to its PYTHONPATH)'
        )
    if found.logprobs_mode not in (None, needs.logprobs_mode):
        lines.append(f"its logprobs are {found.logprobs_mode}: add --logprobs-mode {needs.logprobs_mode}")
    if found.max_logprobs is not None and 0 <= found.max_logprobs < needs.max_logprobs:
        lines.append(f"it returns at most {found.max_logprobs} logprobs a token: add --max-logprobs {needs.max_logprobs}")
    if found.max_model_len < needs.max_model_len:
        lines.append(f"its longest sequence is {found.max_model_len} tokens: add --max-model-len {needs.max_model_len}")
    if found.device == "cpu" and found.chunked_prefill:
        lines.append("on a CPU, seeded requests kill an engine with chunked prefill: add --no-enable-chunked-prefill")
    return lines


def require(url: str, found: Capabilities, needs: Needs) -> None:
    """ServerLacks naming everything that is missing."""
    if lines := lacking(found, needs):
        raise ServerLacks(f"the vLLM server at {url} cannot do what this run needs:\n- " + "\n- ".join(lines))
