"""The catalog's names and reductions."""

from __future__ import annotations

import json
import re

import pytest

from trainers.metrics import CATALOG, MetricBag, sanitize, spec_of


@pytest.mark.parametrize("name", CATALOG)
def test_a_catalog_entry_is_whole_and_mlflow_takes_its_name(name: str) -> None:
    from mlflow.utils.validation import _validate_metric_name

    spec = CATALOG[name]
    assert spec.name == name and spec.unit and spec.meaning and spec.algorithms
    concrete = re.sub(r"<\w+>", "some.thing-1_x", name)
    _validate_metric_name(concrete)
    assert spec_of(concrete) is spec
    if name.endswith("_total") or "_total/" in name:
        assert spec.reduction == "total"
    if name.endswith("_s"):
        assert spec.unit in ("s", "tokens/s")
    if "tok_s" in name:
        assert spec.unit == "tokens/s"


@pytest.mark.parametrize(
    "name",
    ["surprise", "perf/surprise", "rewards/", "rewards/a b", "rewards/<func>", "rollout/failed_total", "loss\n", "Loss", ""],
)
def test_what_is_not_in_the_catalog_is_refused(name: str) -> None:
    with pytest.raises(KeyError, match="not in the catalog"):
        spec_of(name)


def test_the_most_special_pattern_wins() -> None:
    assert spec_of("rewards/accuracy").name == "rewards/<func>"
    assert spec_of("rewards/accuracy_none_frac").name == "rewards/<func>_none_frac"
    assert spec_of("rollout/failed_total/timeout").name == "rollout/failed_total/<cause>"


def test_a_users_name_becomes_one_that_mlflow_takes() -> None:
    assert sanitize("pass@8") == "pass_8"
    assert sanitize("my reward/α?") == "my_reward_α_"
    assert sanitize("a.b-c_d") == "a.b-c_d"
    assert spec_of(f"rewards/{sanitize('is it = 5%?')}").name == "rewards/<func>"


def test_reductions_by_hand() -> None:
    bag = MetricBag()
    for loss, tokens, longest, shortest, norm in ((6.0, 3, 7, 2, 0.5), (2.0, 1, 4, 1, 0.25)):
        bag.add("loss", loss, tokens)
        bag.add("completions/max_length", longest)
        bag.add("completions/min_length", shortest)
        bag.add("grad_norm", norm)
        bag.add("batch/samples_per_step", 4)
        bag.add("num_tokens", 10)
    assert bag.values() == {
        "loss": 2.0,  # (6 + 2) / (3 + 1), not the mean of the means
        "completions/max_length": 7.0,
        "completions/min_length": 1.0,
        "grad_norm": 0.25,
        "batch/samples_per_step": 8.0,
        "num_tokens": 20.0,
    }


def test_bags_merge_through_json_as_if_they_had_been_one() -> None:
    one, first, second = MetricBag(), MetricBag(), MetricBag()
    for number, bag in enumerate((first, second, second)):
        for target in (one, bag):
            target.add("reward", float(number), 2)
            target.add("sample/staleness_max", number % 2)
            target.add("rollout/failed_total/timeout", 1)
    merged = MetricBag()
    for bag in (first, second):
        merged.merge({name: (pair[0], pair[1]) for name, pair in json.loads(json.dumps(bag.drain())).items()})
    assert merged.values() == one.values()
    assert merged.values() == {"reward": 0.5, "sample/staleness_max": 1.0, "rollout/failed_total/timeout": 3.0}


def test_a_mean_over_nothing_is_left_out_and_a_drained_bag_is_empty() -> None:
    bag = MetricBag()
    bag.add("reward", 0.0, 0)
    bag.add("loss", 1.0, 2)
    assert bag.values() == {"loss": 0.5}
    assert bag.drain() == {"reward": (0.0, 0.0), "loss": (1.0, 2.0)}
    assert bag.values() == {} and bag.drain() == {}


def test_a_bag_refuses_an_unknown_name() -> None:
    with pytest.raises(KeyError, match="perf/surprise"):
        MetricBag().add("perf/surprise", 1.0)
