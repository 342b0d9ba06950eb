"""The adaptive cap, and the numbers it is made from."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainers.rollouts.concurrency import AdaptiveCap
from trainers.rollouts.server_load import ServerLoad, parse_load

PAGE = """# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="policy"} 3.0
vllm:num_requests_running{engine="1",model_name="policy"} 4.0
vllm:num_requests_waiting{engine="0",model_name="policy"} 2.0
vllm:num_requests_waiting_by_reason{engine="0",model_name="policy",reason="capacity"} 50.0
vllm:kv_cache_usage_perc{engine="0",model_name="a \\"quoted\\", name}"} 0.25
vllm:kv_cache_usage_perc{engine="1",model_name="policy"} 0.75 1732900000000
vllm:num_preemptions_total{engine="0",model_name="policy"} 1.0
vllm:num_preemptions_created{engine="0",model_name="policy"} 1.7e+09
vllm:generation_tokens_total{engine="0",model_name="policy"} 1.25e+06
vllm:cache_config_info{block_size="16",engine="0",kv_cache_size_tokens="4096",num_gpu_blocks="512"} 1.0
vllm:cache_config_info{block_size="16",engine="1",kv_cache_size_tokens="None",num_gpu_blocks="128"} 1.0
process_resident_memory_bytes 1e+09
"""


def load(usage: float, waiting: float = 0.0) -> ServerLoad:
    return ServerLoad(usage, 1.0, waiting, 0.0, 0.0, None)


def test_a_page_of_two_engines() -> None:
    """Requests and tokens add up; the fullest cache counts; the plain token count comes before blocks × block size."""
    assert parse_load(PAGE) == ServerLoad(0.75, 7.0, 2.0, 1.0, 1.25e6, 4096 + 128 * 16)


@pytest.mark.parametrize(
    ("labels", "tokens"),
    [
        ('block_size="16",num_gpu_blocks="10"', 160),
        ('block_size="16",num_gpu_blocks="None"', None),
        ('kv_cache_size_tokens="7",num_gpu_blocks="10",block_size="16"', 7),
        ("", None),
    ],
)
def test_what_holds_the_cache(labels: str, tokens: int | None) -> None:
    found = parse_load(f"vllm:cache_config_info{{{labels}}} 1.0\nvllm:kv_cache_usage_perc 0.5\n")
    assert found is not None and found.kv_tokens == tokens


def test_another_servers_page_is_none() -> None:
    assert parse_load("sglang:token_usage 0.5\n") is None and parse_load("") is None


@pytest.mark.parametrize(
    ("ceiling", "kv_tokens", "start"), [(100, 40_000, 9.0), (4, 40_000, 4.0), (100, 4000, 1.0), (100, None, 100.0)]
)
def test_it_starts_with_what_certainly_fits(ceiling: int, kv_tokens: int | None, start: float) -> None:
    assert AdaptiveCap(ceiling, kv_tokens, 4096).value == start


def test_it_grows_by_a_quarter_for_every_cap_many_finished_rollouts() -> None:
    cap = AdaptiveCap(9, 4 * 4096, 4096)
    cap.finished(0)  # nothing is known of the server yet
    cap.observe(load(0.59), 4)
    grown = []
    for _ in range(4 + 5 + 7 + 8 + 20):
        cap.finished(3)
        grown.append(cap.value)
    assert grown[2:4] == [4.0, 5.0] and grown[7:9] == [5.0, 6.25]
    assert grown[14:16] == [6.25, 7.8125] and grown[22:24] == [7.8125, 9.0] and grown[-1] == 9.0


@pytest.mark.parametrize("other", [load(0.6), load(0.1, waiting=1), None])
def test_it_stays_where_the_cache_is_neither_empty_nor_full(other: ServerLoad | None) -> None:
    cap = AdaptiveCap(100, 4 * 4096, 4096)
    cap.observe(load(0.1), 4)
    for _ in range(3):
        cap.finished(3)
    cap.observe(other, 4)
    cap.finished(3)
    cap.observe(load(0.1), 4)
    for _ in range(3):  # those before do not count any more
        cap.finished(3)
    assert cap.value == 4.0
    cap.finished(3)
    assert cap.value == 5.0


def test_it_is_cut_once_until_in_flight_is_below() -> None:
    cap = AdaptiveCap(100, 20 * 4096, 4096)
    cap.observe(load(0.8), 20)
    assert cap.value == 20.0
    cap.observe(load(0.81), 20)
    assert cap.value == pytest.approx(14.0)
    for in_flight in (20, 17, 14):
        cap.observe(load(0.95), in_flight)
    assert cap.value == pytest.approx(14.0)
    cap.finished(13)
    cap.observe(load(0.95), 14)
    assert cap.value == pytest.approx(9.8)


def test_it_never_goes_below_one() -> None:
    cap = AdaptiveCap(8, 4096, 4096)
    for _ in range(5):
        cap.observe(load(0.99), 0)
    assert cap.value == 1.0


LOOKS = st.tuples(st.sampled_from([0.0, 0.3, 0.6, 0.7, 0.85, 1.0]), st.integers(0, 2), st.integers(0, 40), st.booleans())


@given(st.integers(1, 64), st.one_of(st.none(), st.integers(1, 10**6)), st.lists(LOOKS, max_size=60))
def test_it_moves_only_for_a_reason(ceiling: int, kv_tokens: int | None, events: list) -> None:
    """Within [1, ceiling]; up only after a calm look, down only at a full one, and never twice without room between."""
    cap = AdaptiveCap(ceiling, kv_tokens, 4096)
    calm, room_since_cut = False, True
    for usage, waiting, in_flight, ends in events:
        room_since_cut |= in_flight < cap.value
        before = cap.value
        if ends:
            cap.finished(in_flight)
            assert cap.value == before or (calm and cap.value == min(ceiling, before * 1.25))
        else:
            cap.observe(load(usage, waiting), in_flight)
            calm = usage < 0.6 and waiting == 0
            assert cap.value == before or (usage > 0.8 and room_since_cut and math.isclose(cap.value, max(1, before * 0.7)))
            if cap.value < before:
                room_since_cut = False
        assert 1 <= cap.value <= ceiling
