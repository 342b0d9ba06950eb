"""`RewardModel` against a real HTTP server whose bodies are checked by vLLM's own request and response classes."""

from __future__ import annotations

import asyncio
import logging
import pickle
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web

from trainers.config_parts import CallableSpec
from trainers.errors import ConfigError, ServerError
from trainers.metrics import MetricBag
from trainers.rewards import RewardModel, load_callable, reward_name
from trainers.rollouts.scoring import Scorer
from trainers.types import Prompt, Rollout, RolloutGroup

PROMPTS = [[{"role": "system", "content": "s"}, {"role": "user", "content": "2+2?"}]] * 2
COMPLETIONS = [[{"role": "assistant", "content": "4"}], [{"role": "assistant", "content": "five"}]]


class JudgeServer:
    """Scores a conversation with the length of its last message. `faults` come first: a status, "reset", or a body."""

    def __init__(self) -> None:
        self.requests: list[tuple[str, dict[str, Any], str | None]] = []
        self.faults: deque[Any] = deque()
        self.most, self._now = 0, 0
        self.url = ""

    @asynccontextmanager
    async def run(self) -> AsyncIterator[JudgeServer]:
        app = web.Application()
        for path, answer in (("/classify", self._classify), ("/pooling", self._pool), ("/judge", self._judge)):
            app.router.add_post(path, lambda request, answer=answer: self._handle(request, answer))
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        try:
            yield self
        finally:
            await runner.cleanup()

    async def _handle(self, request: web.Request, answer: Any) -> web.Response:
        body = await request.json()
        self.requests.append((request.path, body, request.headers.get("Authorization")))
        self._now += 1
        self.most = max(self.most, self._now)
        await asyncio.sleep(0.01)
        self._now -= 1
        fault = self.faults.popleft() if self.faults else None
        if fault == "reset":
            assert request.transport is not None
            request.transport.abort()
        if isinstance(fault, int):
            return web.json_response({"error": {"message": f"told to answer {fault}"}}, status=fault)
        return web.json_response(answer(body) if fault is None or fault == "reset" else fault)

    @staticmethod
    def _length(body: dict[str, Any]) -> float:
        return float(len(body["input"] if "input" in body else body["messages"][-1]["content"]))

    def _classify(self, body: dict[str, Any]) -> dict[str, Any]:
        data = {"index": 0, "label": "LABEL_0", "probs": [-1.0, self._length(body)], "num_classes": 2}
        usage = {"prompt_tokens": 1, "total_tokens": 1, "completion_tokens": 0}
        return {"id": "c", "object": "list", "created": 1, "model": body["model"], "data": [data], "usage": usage}

    def _pool(self, body: dict[str, Any]) -> dict[str, Any]:
        per_token = [[0.0], [self._length(body)]] if "messages" in body else [self._length(body)]
        data = {"index": 0, "object": "pooling", "data": per_token}
        usage = {"prompt_tokens": 1, "total_tokens": 1, "completion_tokens": 0}
        return {"id": "p", "object": "list", "created": 1, "model": body["model"], "data": [data], "usage": usage}

    def _judge(self, body: dict[str, Any]) -> dict[str, Any]:
        return {"rewards": [None, *map(float, range(1, len(body["completions"])))]}


async def scores(model: RewardModel, **columns: Any) -> list[float | None]:
    try:
        return await model(prompts=PROMPTS, completions=COMPLETIONS, **columns)
    finally:
        await model.aclose()


@pytest.mark.parametrize("api", ["vllm-classify", "vllm-pooling"])
@pytest.mark.parametrize("template", [None, "Q: {prompt} A: {completion}"])
async def test_vllms_endpoints(api: Any, template: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_KEY", "k1")
    async with JudgeServer().run() as server:
        model = RewardModel(server.url, model="rm", api=api, template=template, key_env="JUDGE_KEY")
        values = await scores(model, completion_ids=[[1], [2]], answer=["4", "4"])
    assert values == ([1.0, 4.0] if template is None else [len("Q: 2+2? A: 4"), len("Q: 2+2? A: five")])
    path, body, key = server.requests[0]
    assert key == "Bearer k1" and path == ("/classify" if api == "vllm-classify" else "/pooling")
    if template is None:
        assert body["messages"] == [*PROMPTS[0], *COMPLETIONS[0]]


async def test_a_templates_completion_is_what_the_model_wrote_not_what_its_tools_said() -> None:
    turns = [{"role": "assistant", "content": "let me see "}, {"role": "tool", "content": "9"}, *COMPLETIONS[0]]
    async with JudgeServer().run() as server:
        model = RewardModel(server.url, model="rm", template="{completion}")
        assert await model(prompts=PROMPTS[:1], completions=[turns]) == [float(len("let me see 4"))]
        await model.aclose()


def test_bodies_are_those_of_the_installed_vllm() -> None:
    classify = pytest.importorskip("vllm.entrypoints.pooling.classify.protocol")
    pooling = pytest.importorskip("vllm.entrypoints.pooling.pooling.protocol")
    sent: list[dict[str, Any]] = []

    async def collect() -> None:
        async with JudgeServer().run() as server:
            for api in ("vllm-classify", "vllm-pooling"):
                for template in (None, "{prompt}{completion}"):
                    await scores(RewardModel(server.url, model="rm", api=api, template=template))  # type: ignore[arg-type]
            sent.extend(body | {"path": path} for path, body, _ in server.requests)

    asyncio.run(collect())
    kinds = {
        ("/classify", True): classify.ClassificationChatRequest,
        ("/classify", False): classify.ClassificationCompletionRequest,
        ("/pooling", True): pooling.PoolingChatRequest,
        ("/pooling", False): pooling.PoolingCompletionRequest,
    }
    seen = set()
    for body in sent:
        key = (body.pop("path"), "messages" in body)
        request = kinds[key].model_validate(body)
        # An unknown field would be kept as an extra one and ignored by the server.
        assert not request.model_extra and request.use_activation is False and request.model == "rm"
        seen.add(key)
    assert seen == set(kinds)
    server = JudgeServer()
    classify.ClassificationResponse.model_validate(server._classify({"model": "rm", "input": "x"}))
    pooling.PoolingResponse.model_validate(server._pool({"model": "rm", "messages": [{"content": "x"}]}))


async def test_a_service_of_ones_own() -> None:
    async with JudgeServer().run() as server:
        assert await scores(RewardModel(f"{server.url}/judge", api="json"), answer=["a", "b"]) == [None, 1.0]
        ((_, body, key),) = server.requests
    assert body == {"prompts": PROMPTS, "completions": COMPLETIONS, "columns": {"answer": ["a", "b"]}} and key is None


async def test_what_may_pass_is_tried_again_and_what_may_not_is_said() -> None:
    async with JudgeServer().run() as server:
        model = RewardModel(server.url, model="rm")
        server.faults.extend([503, "reset", 429])
        assert await scores(model) == [1.0, 4.0]
        assert len(server.requests) == 5
        server.faults.extend([404, 404])
        with pytest.raises(ServerError, match=r"/classify refused: 404 .*told to answer 404"):
            await scores(model)
        server.faults.extend([{"data": []}, {"data": []}])
        with pytest.raises(ServerError, match=r"what is no vllm-classify answer.*'data': \[\]"):
            await scores(model)
        server.faults.extend([500] * 100)
        with pytest.raises(ServerError, match=r"no answer within 0.5 s \(timeout_s\); the last attempt: 500"):
            await scores(RewardModel(server.url, model="rm", timeout_s=0.5))
    with pytest.raises(ServerError, match="the last attempt: Client"):
        await scores(RewardModel(server.url, model="rm", timeout_s=0.5))


async def test_requests_at_once_are_bounded() -> None:
    async with JudgeServer().run() as server:
        model = RewardModel(server.url, model="rm", max_concurrency=3)
        try:
            values = await model(prompts=PROMPTS * 8, completions=COMPLETIONS * 8)
        finally:
            await model.aclose()
    assert values == [1.0, 4.0] * 8 and server.most == 3


def test_it_comes_from_a_config_and_can_be_pickled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("JUDGE_KEY", raising=False)
    path, url = "trainers.rewards:RewardModel", "http://localhost:1"
    model = load_callable(CallableSpec(path=path, kwargs={"url": url, "model": "rm", "name": "helpful"}))
    assert reward_name(model) == "helpful" and pickle.loads(pickle.dumps(model)).url == f"{url}/classify"
    for kwargs, message in (
        ({"api": "vllm-score"}, "write one of vllm-classify, vllm-pooling, json"),
        ({}, "needs `model`"),
        ({"model": "rm", "key_env": "JUDGE_KEY"}, "JUDGE_KEY is not set"),
    ):
        with pytest.raises(ConfigError, match=message):
            load_callable(CallableSpec(path=path, kwargs={"url": url, **kwargs}))


async def test_the_scoring_pool_calls_it_and_closes_it(caplog: pytest.LogCaptureFixture) -> None:
    async with JudgeServer().run() as server:
        metrics = MetricBag()
        model = RewardModel(server.url, model="rm", name="helpful")
        scorer = Scorer([model], [0.5], metrics)
        prompt = Prompt(0, 0, PROMPTS[0], {"answer": "4"}, None)  # type: ignore[arg-type]
        group = RolloutGroup(prompt, [Rollout(prompt, completion=completion) for completion in COMPLETIONS])
        server.faults.append(404)
        server.faults.append(None)
        server.faults.append(404)
        with caplog.at_level(logging.WARNING):
            await scorer.score(group)
        await scorer.close()
        assert model._open is None
    failed = [rollout for rollout in group.rollouts if rollout.failed is not None]
    assert len(failed) == 1 and "refused: 404" in str(failed[0].failed)
    assert sum(rollout.reward for rollout in group.rollouts if rollout.failed is None) in (0.5, 2.0)
    assert "rewards/helpful_call_s" in metrics.values()
