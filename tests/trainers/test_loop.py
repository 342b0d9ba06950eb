"""The loop on one rank with a deterministic source: order of events, callbacks, stops, divergence."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import TrainerCallback

from tests.support.fake_source import FakeSource
from tests.support.policies import ONE_RANK, grpo_config, tiny_policy
from trainers import perf
from trainers.algorithms import LossInputs, LossOutput
from trainers.algorithms.grpo import GRPO
from trainers.errors import ConfigError, DivergenceError, RolloutProcessDied
from trainers.loop import TrainLoop
from trainers.metrics import spec_of
from trainers.roster import Listed


class Sink:
    """Records what the loop reports."""

    def __init__(self) -> None:
        self.metrics: dict[int, dict[str, float]] = {}
        self.events: list[tuple[Any, ...]] = []

    def started(self, info, resume_step):
        self.events.append(("started", resume_step))

    def log(self, step, metrics):
        self.metrics.setdefault(step, {}).update(metrics)

    def commit(self, step):
        self.events.append(("commit", step))

    def rollouts(self, step, rows):
        self.events.append(("rollouts", step, len(rows)))

    def bottleneck(self, step, text):
        self.events.append(("bottleneck", step))

    def checkpoint(self, step, path):
        self.events.append(("checkpoint", step))


class FakeSync:
    """Counts pushes; the weights it was given are those after the step."""

    def __init__(self) -> None:
        self.versions: list[int] = []
        self.first: list[float] = []
        self.closed = False
        self.waits: list[bool] = []  # answers of `wanting`
        self.admitted: list[int] = []
        self.told: list[list[Listed]] = []

    def wanting(self):
        return self.waits.pop(0) if self.waits else False

    def admit(self, policy, version):
        self.admitted.append(version)

    def news(self):
        return self.told.pop(0) if self.told else None

    served_as = None

    def push(self, policy, version):
        self.versions.append(version)
        self.first.append(next(policy.parameters()).detach().flatten()[0].item())
        return {"perf/weight_sync_s": 0.5}

    def close(self):
        self.closed = True


def make_loop(tmp_path, source: FakeSource | None = None, *, algorithm=None, callbacks=(), sink=None, **fields) -> TrainLoop:
    options = {name: fields.pop(name) for name in ("weight_sync", "evaluate", "stop_requested") if name in fields}
    config = grpo_config(**{"output_dir": str(tmp_path), "max_steps": 4, "save_steps": 100, **fields})
    return TrainLoop(
        config,
        algorithm or GRPO(config),
        tiny_policy(config),
        ONE_RANK,
        source or FakeSource(),
        callbacks=list(callbacks),
        sink=sink or Sink(),
        **options,
    )


def test_steps_are_requested_one_ahead_at_the_version_they_train_at_and_committed_before_the_sync(tmp_path):
    source, sync = FakeSource(), FakeSync()
    make_loop(tmp_path, source, max_steps=3, weight_sync=sync, weight_sync_steps=2).run()
    assert [call for call in source.calls if call[0] != "snapshot"] == [
        ("start", 0, 0),
        ("synced", 0),
        ("next", 1, 0),
        ("request", 2, 0),
        ("committed", 1),
        ("next", 2, 0),
        ("request", 3, 1),
        ("committed", 2),
        ("synced", 1),
        ("next", 3, 1),
        ("committed", 3),
    ]
    assert sync.versions == [0, 1] and sync.first[0] != sync.first[1]
    assert source.closed and sync.closed


def test_without_max_steps_the_run_ends_with_the_data_and_saves_once(tmp_path):
    source, sink = FakeSource(steps=5), Sink()
    loop = make_loop(tmp_path, source, max_steps=-1, sink=sink)
    result = loop.run()
    assert (result.step, result.stopped) == (5, "data")
    assert [entry["epoch"] for entry in loop.callbacks.state.log_history] == [0.1, 0.2, 0.3, 0.4, 0.5]
    assert loop.callbacks.state.epoch == 1.0, "what was dropped after the last step counts too"
    assert result.checkpoint == tmp_path / "checkpoint-5"
    assert [event for event in sink.events if event[0] in ("started", "commit", "checkpoint")] == [
        ("started", 0),
        ("commit", 5),
        ("checkpoint", 5),
    ]


def test_servers_that_come_while_it_waits_get_the_weights_and_the_source_is_told(tmp_path):
    source, sync = FakeSource(), FakeSync()
    sync.told = [None, [Listed("a", "http://a")], None, [Listed("b", "http://b")]]  # type: ignore[list-item]
    source.not_ready, sync.waits = 4, [False, True, False, True]
    make_loop(tmp_path, source, max_steps=1, weight_sync=sync).run()
    assert sync.admitted == [0, 0] and sync.versions == [0, 1]
    calls = [call for call in source.calls if call[0] != "snapshot"]
    assert calls == [
        ("start", 0, 0),
        ("synced", 0),
        ("servers", ["http://a"]),
        ("next", 1, 0),
        ("committed", 1),
        ("servers", ["http://b"]),
        ("synced", 1),
    ]


def test_every_logged_metric_is_in_the_catalog_and_totals_run_on(tmp_path):
    sink = Sink()
    make_loop(tmp_path, sink=sink, max_steps=4, logging_steps=2, weight_sync=FakeSync()).run()
    assert sorted(sink.metrics) == [2, 4]
    for name in sink.metrics[4]:
        spec_of(name)
    expected = {
        "loss",
        "grad_norm",
        "learning_rate",
        "ratio",
        "kl",
        "entropy",
        "clip_ratio/low_min",
        "perf/step_s",
        "perf/fwd_bwd_s",
    }
    assert expected <= sink.metrics[4].keys()
    assert sink.metrics[4]["perf/weight_sync_s"] == 0.5
    assert sink.metrics[4]["num_tokens"] > sink.metrics[2]["num_tokens"] > 0
    assert "perf/mfu_fwd_bwd" not in sink.metrics[4], "a CPU has no peak in the table"


def test_the_first_step_is_logged_if_asked_for(tmp_path):
    sink = Sink()
    make_loop(tmp_path, sink=sink, max_steps=4, logging_steps=3, logging_first_step=True).run()
    assert sorted(sink.metrics) == [1, 3, 4]


def test_the_logged_loss_is_the_steps_own(tmp_path):
    """Loss, ratio and entropy of step 1 equal those computed from all its samples in one row."""
    one, split = Sink(), Sink()
    make_loop(tmp_path / "a", FakeSource(micro=1), sink=one, max_steps=1, gradient_accumulation_steps=1).run()
    make_loop(tmp_path / "b", FakeSource(micro=4), sink=split, max_steps=1, gradient_accumulation_steps=4).run()
    for name in ("loss", "grad_norm", "ratio", "kl", "entropy", "clip_ratio/region_mean"):
        assert split.metrics[1][name] == pytest.approx(one.metrics[1][name], rel=1e-4), name


class Recorder(TrainerCallback):
    def __init__(self) -> None:
        self.events: list[str] = []

    def __getattribute__(self, name):
        if name.startswith("on_"):
            return lambda args, state, control, **kwargs: self.events.append(f"{name[3:]}:{state.global_step}")
        return super().__getattribute__(name)


def test_callbacks_fire_in_transformers_order(tmp_path):
    recorder = Recorder()
    make_loop(tmp_path, callbacks=[recorder], max_steps=2, save_steps=2).run()
    assert recorder.events == [
        "train_begin:0",
        "step_begin:0",
        "pre_optimizer_step:0",
        "optimizer_step:0",
        "step_end:1",
        "log:1",
        "step_begin:1",
        "pre_optimizer_step:1",
        "optimizer_step:1",
        "step_end:2",
        "log:2",
        "save:2",
        "train_end:2",
    ]


class Demanding(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        control.should_save = state.global_step == 1
        control.should_evaluate = state.global_step == 2
        control.should_training_stop = state.global_step == 3
        assert kwargs["optimizer"] is not None and kwargs["model"] is not None


def test_control_flags_of_a_users_callback_are_honoured(tmp_path):
    sink, evaluated = Sink(), []

    def evaluate(policy, version):
        evaluated.append(version)
        return {"eval/accuracy": 0.25}

    result = make_loop(tmp_path, callbacks=[Demanding], sink=sink, evaluate=evaluate, max_steps=9).run()
    assert (result.step, result.stopped, len(evaluated)) == (3, "callback", 1)
    assert [event[1] for event in sink.events if event[0] == "commit"] == [1, 3]
    assert sink.metrics[2]["eval/accuracy"] == 0.25


def test_a_stop_signal_saves_at_the_step_boundary(tmp_path):
    source = FakeSource()
    result = make_loop(tmp_path, source, stop_requested=lambda: source.done >= 2).run()
    assert (result.step, result.stopped, result.checkpoint) == (2, "signal", tmp_path / "checkpoint-2")


class NotFinite(GRPO):
    def loss(self, inputs: LossInputs) -> LossOutput:
        output = super().loss(inputs)
        output.losses = [(value * float("nan"), denominator) for value, denominator in output.losses]
        return output


def test_a_loss_that_is_not_finite_ends_the_run_before_the_update(tmp_path):
    source, sync = FakeSource(), FakeSync()
    loop = make_loop(tmp_path, source, algorithm=NotFinite(grpo_config()), weight_sync=sync)
    before = {name: parameter.detach().clone() for name, parameter in loop.policy.named_parameters()}
    with pytest.raises(DivergenceError, match=r"step 1: loss nan"):
        loop.run()
    assert source.closed and source.done == 0 and sync.versions == [0] and not list(tmp_path.iterdir())
    for name, parameter in loop.policy.named_parameters():
        torch.testing.assert_close(parameter.detach(), before[name])


def test_a_dead_source_ends_the_run_with_its_own_words(tmp_path):
    source = FakeSource(fail_at=2)
    with pytest.raises(RolloutProcessDied, match="killed by SIGKILL"):
        make_loop(tmp_path, source).run()
    assert source.closed and source.done == 1


def test_a_tokenizer_larger_than_the_model_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="ids up to 64 but the model has 64 embeddings"):
        make_loop(tmp_path, FakeSource(vocab=65)).run()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"max_steps": -1, "lr_scheduler_type": "cosine"}, "set max_steps"),
        ({"max_steps": -1, "warmup_steps": 0.1}, "fraction of max_steps"),
        ({"lr_scheduler_type": "reduce_lr_on_plateau"}, "needs an evaluation loss"),
        ({"lr_scheduler_type": "no_such_schedule"}, "no_such_schedule"),
        ({"optim": "no_such_optimizer"}, "no_such_optimizer"),
    ],
)
def test_optimizers_and_schedules_that_cannot_work_are_refused(tmp_path, fields, message):
    with pytest.raises(ConfigError, match=message):
        make_loop(tmp_path, **fields)


def test_warmup_and_decay_follow_the_named_schedule(tmp_path):
    sink = Sink()
    make_loop(
        tmp_path, sink=sink, learning_rate=1.0, lr_scheduler_type="linear", warmup_steps=0.5, max_steps=4, max_grad_norm=0.1
    ).run()
    assert [sink.metrics[step]["learning_rate"] for step in (1, 2, 3, 4)] == [0.0, 0.5, 1.0, 0.5]


def test_gradients_are_clipped_to_the_global_norm(tmp_path):
    norms = []

    class Norm(TrainerCallback):
        def on_pre_optimizer_step(self, args, state, control, model, **kwargs):
            norms.append(torch.stack([p.grad.norm() for p in model.parameters()]).norm().item())

    sink = Sink()
    make_loop(tmp_path, sink=sink, callbacks=[Norm], max_grad_norm=0.01, max_steps=1).run()
    assert norms == [pytest.approx(0.01, rel=1e-3)] and sink.metrics[1]["grad_norm"] > 0.1


@pytest.mark.parametrize(
    ("step_s", "wait_s", "held_s", "side"),
    [
        (1.0, 0.5, 0.0, "generation-bound"),
        (1.0, 0.0, 0.9, "trainer-bound"),
        (1.0, 0.05, 0.05, "balanced"),
        (1.0, 0.6, 0.1, "generation-bound"),
        (1.0, 0.6, 0.9, "serial"),
    ],
)
def test_the_bottleneck_line_names_the_side_and_the_option(step_s, wait_s, held_s, side):
    line = perf.bottleneck(step_s, wait_s, held_s)
    assert line.startswith(side) and (side == "balanced" or "; " in line)


def test_flops_by_hand():
    """Two segments of 2 and 3 tokens, 4 terms: 6 per body weight and token, 6VH per term, 6·layers·width per l²."""
    from trainers.types import StepTotals

    policy = tiny_policy()
    parameters = sum(p.numel() for p in policy.model.parameters())
    expected = 6 * (parameters - 64 * 64) * 5 + 6 * 64 * 64 * 4 + 6 * 2 * 64 * (4 + 9)
    assert perf.FlopCounter(policy.model).step(StepTotals(4, 2, 1, 5, 4 + 9)) == expected


def test_peaks_by_device_name():
    assert perf.peak_flops("NVIDIA H200", torch.bfloat16) == pytest.approx(989.4e12)
    assert perf.peak_flops("NVIDIA H200", torch.float32) is None
    assert perf.peak_flops("Some Future GPU", torch.bfloat16) is None


def test_a_collapsed_reward_ends_the_run_as_diverged_with_its_checkpoints(tmp_path) -> None:
    sink = Sink()
    loop = make_loop(tmp_path, sink=sink, max_steps=8, save_steps=2, reward_collapse={"above": 0.5, "below": 0.4, "steps": 2})
    rewards = iter([0.2, 0.8, 0.3, 0.3, 0.3])
    account = loop._account

    def with_reward(*args) -> None:
        account(*args)
        loop.bag.add("reward", next(rewards))

    loop._account = with_reward  # type: ignore[method-assign]
    with pytest.raises(DivergenceError, match=r"below 0\.4 for 2 steps, since step 3; it was 0\.8 at step 2"):
        loop.run()
    assert [event[1] for event in sink.events if event[0] == "checkpoint"] == [2]
    assert sorted(sink.metrics) == [1, 2, 3, 4]
