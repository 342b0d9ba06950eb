"""The trainer core on a GPU against its own CPU reference. Nothing here runs without one (see benchmarks/RESULTS.md)."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.support.fake_source import FakeSource, make_samples
from tests.support.policies import grpo_config, tiny_policy
from tests.support.thread_ring import attention_of_threads
from tests.support.tiny_model import build_model
from trainers import attention, norm_kernels, rotation_kernels
from trainers.algorithms import build_algorithm
from trainers.attention import PackedLayout, reference
from trainers.attention.backends import choose_backend
from trainers.attention.blocks import CUDNN, FLASH, REFERENCE, choose_blocks
from trainers.batch import PackedBatch
from trainers.distributed import Ranks, init_distributed, shutdown_distributed
from trainers.head import token_logprobs
from trainers.loop import TrainLoop
from trainers.losses import loss_inputs
from trainers.model import build_policy
from trainers.packing import pack_row

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

CPU = Ranks(0, 1, 0, torch.device("cpu"), None, None)


# The compiler looks at gradients of tensors that are not leaves, and warns itself of it.
@pytest.mark.filterwarnings("ignore:The .grad attribute")
@pytest.mark.parametrize("make", ["_torch_varlen", "_flex", "_installed_flash", "_hub_kernel"])
def test_every_backend_that_loads_here_agrees_with_the_reference(make):
    from trainers.attention import backends

    try:
        backend = getattr(backends, make)()
    except Exception as error:
        pytest.skip(f"{make} does not load here: {type(error).__name__}: {str(error)[:120]}")
    generator = torch.Generator("cuda").manual_seed(0)
    lengths = [1, 700, 64, 3, 257]
    layout = PackedLayout.from_numpy(np.concatenate([[0], np.cumsum(lengths)]), "cuda")
    shapes = [(sum(lengths), heads, 128) for heads in (16, 8, 8)]
    inputs = [torch.randn(s, device="cuda", generator=generator).requires_grad_() for s in shapes]
    weight = torch.randn(shapes[0], device="cuda", generator=generator)
    wanted = reference(*inputs, layout, 128**-0.5)
    wanted_grads = torch.autograd.grad((wanted * weight).sum(), inputs)
    low = [x.detach().bfloat16().requires_grad_() for x in inputs]
    got = backend.fn(*low, layout, 128**-0.5)
    grads = torch.autograd.grad((got * weight.bfloat16()).sum(), low)
    for a, b in zip([got, *grads], [wanted, *wanted_grads], strict=True):
        assert (a.float() - b).norm() / b.norm() < 1e-2


def test_the_chosen_backend_is_a_fast_one_and_says_why():
    backend = choose_backend(torch.device("cuda"), torch.bfloat16)
    assert backend.name != "reference", backend.reason
    assert choose_backend(torch.device("cuda"), torch.float32).name == "reference"


@pytest.mark.parametrize(("ranks", "tokens", "head_dim"), [(2, 2048, 64), (4, 4096, 128), (3, 6 * 333, 128)])
@pytest.mark.parametrize("blocks", [FLASH, CUDNN], ids=lambda blocks: blocks.name)
def test_ring_attention_of_several_ranks_equals_whole_attention(blocks, ranks, tokens, head_dim):
    """The ranks are threads; of bfloat16 the ring loses no more than whole attention does."""
    generator = torch.Generator("cuda").manual_seed(0)
    shapes = [(tokens, heads, head_dim) for heads in (8, 2, 2, 8)]
    inputs = [torch.randn(s, device="cuda", generator=generator) for s in shapes]
    layout, scale = PackedLayout.from_numpy(np.array([0, tokens]), "cuda"), head_dim**-0.5

    def whole(dtype: torch.dtype) -> list[torch.Tensor]:
        q, k, v = (x.to(dtype).requires_grad_() for x in inputs[:3])
        out = reference(q, k, v, layout, scale)
        return [out.detach(), *torch.autograd.grad(out, (q, k, v), inputs[3].to(dtype))]

    q, k, v, d_out = (x.bfloat16() for x in inputs)
    rounded = [x.float() for x in (q, k, v, d_out)]
    got = attention_of_threads(ranks, [q, k, v], d_out, scale, blocks)
    exact = attention_of_threads(ranks, rounded[:3], rounded[3], scale, REFERENCE)
    for a, b, c in zip(got, whole(torch.float32), whole(torch.bfloat16), strict=True):
        lost = (c.float() - b).norm() / b.norm()
        assert (a.float() - b).norm() / b.norm() < 1.2 * lost + 1e-3
    for a, b in zip(got, exact, strict=True):
        assert (a.float() - b).norm() / b.norm() < 1e-2


def test_ring_attention_has_fast_blocks_here():
    choice = choose_blocks("cuda", torch.bfloat16)
    assert (choice.short.name, choice.long.name) == ("flash", "cudnn"), choice.reason
    assert choose_blocks("cuda", torch.float32).long.name == "reference"


def test_kernels_of_norms_and_rotations_are_used_here():
    device = torch.device("cuda")
    assert norm_kernels.works(device) and rotation_kernels.works(device)


def test_float32_gradients_equal_those_of_the_cpu():
    row = pack_row(make_samples(seed=5, step=1, count=7))
    gradients = []
    for ranks in (CPU, Ranks(0, 1, 0, torch.device("cuda", 0), None, None)):
        policy = tiny_policy(grpo_config(bf16=False), ranks=ranks)
        logprobs = policy(PackedBatch.from_row(row, ranks.device))[0]
        logprobs.sum().backward()
        gradients.append({name: p.grad.cpu() for name, p in policy.model.named_parameters()})
    for name, wanted in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], wanted, rtol=2e-3, atol=2e-4, msg=name)


def test_top_logprobs_and_candidate_sets_equal_those_of_the_cpu():
    samples = make_samples(seed=5, step=1, count=6)
    for sample in samples[::2]:
        sample.candidate_counts = np.full(sample.trained_tokens, 20, np.int32)
        sample.candidate_ids = np.tile(np.arange(0, 60, 3, dtype=np.int32), sample.trained_tokens)
    row, config, seen = pack_row(samples), grpo_config(bf16=False), []
    for ranks in (CPU, Ranks(0, 1, 0, torch.device("cuda", 0), None, None)):
        policy = tiny_policy(config, ranks=ranks)
        batch = PackedBatch.from_row(row, ranks.device)
        outputs = policy(batch)
        loss, _ = build_algorithm(config).loss(loss_inputs(outputs, batch)).losses[0]
        loss.backward()
        gradients = [p.grad for p in policy.parameters() if p.grad is not None]
        seen.append([tensor.detach().cpu() for tensor in (outputs.logprobs, outputs.top_logprobs, loss, *gradients)])
    for wanted, got in zip(*seen, strict=True):
        torch.testing.assert_close(got, wanted, rtol=2e-3, atol=2e-4)


@pytest.mark.parametrize(("softcap", "temperature", "chunk"), [(None, 1.0, None), (None, 0.7, 64), (30.0, 1.3, 100)])
def test_the_fused_head_of_bfloat16_states_equals_dense_softmax(softcap, temperature, chunk):
    """Against float64, from the logits as bfloat16 products give them; several chunks and one."""
    torch.manual_seed(3)
    hidden = (2 * torch.randn(300, 64, device="cuda")).bfloat16().requires_grad_()
    weight = torch.randn(5000, 64, device="cuda").bfloat16().requires_grad_()
    targets, top_ids = torch.randint(5000, (300,), device="cuda"), torch.randint(-1, 5000, (300, 8), device="cuda")
    scale = torch.randn(300, 9, device="cuda")
    leaves = [hidden, weight]

    def gradients(logprobs, top):
        total = (logprobs * scale[:, 0]).sum() + (torch.where(top_ids < 0, 0.0, top) * scale[:, 1:]).sum()
        return torch.autograd.grad(total, leaves)

    ours = token_logprobs(hidden, weight, targets, temperature=temperature, softcap=softcap, top_ids=top_ids, chunk=chunk)
    logits = torch.nn.functional.linear(hidden, weight).double()
    logits = logits if softcap is None else torch.tanh(logits / softcap) * softcap
    dense = (logits / temperature).log_softmax(-1)
    target, top = dense.gather(-1, targets[:, None])[:, 0], dense.gather(-1, top_ids.clamp_min(0))
    torch.testing.assert_close(ours.logprobs.double(), target, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(ours.entropy.double(), -(dense.exp() * dense).sum(-1), rtol=1e-4, atol=1e-4)
    assert torch.equal(ours.argmax_hit, target >= dense.amax(-1))
    for a, b in zip(gradients(ours.logprobs, ours.top_logprobs), gradients(target, top), strict=True):
        assert (a.double() - b.double()).norm() < 1e-2 * b.double().norm()


def test_a_bfloat16_run_follows_the_float32_one_and_resumes(tmp_path):
    attention.install(torch.device("cuda"), torch.bfloat16)
    ranks = init_distributed(needs_mesh=True)
    try:
        results = {}
        for name, bf16, steps in (("fp32", False, 6), ("bf16", True, 6), ("half", True, 3)):
            config = grpo_config(bf16=bf16, output_dir=str(tmp_path / name), max_steps=steps, learning_rate=1e-3, save_steps=3)
            loop = TrainLoop(config, build_algorithm(config), tiny_policy(config, ranks=ranks), ranks, FakeSource(steps=6))
            results[name] = (loop, loop.run())
        config = grpo_config(bf16=True, output_dir=str(tmp_path / "half"), max_steps=6, learning_rate=1e-3, save_steps=3)
        resumed = TrainLoop(
            config, build_algorithm(config), tiny_policy(config, ranks=ranks, seed=1), ranks, FakeSource(steps=6)
        )
        resumed.run(results["half"][1].checkpoint)

        def weights(loop):
            return torch.cat([p.detach().full_tensor().flatten() for p in loop.policy.parameters()])

        start = torch.cat([p.detach().full_tensor().flatten() for p in tiny_policy(config, ranks=ranks).parameters()])
        moved = weights(results["fp32"][0]) - start
        assert moved.norm() > 0
        assert (weights(results["bf16"][0]) - start - moved).norm() / moved.norm() < 0.5
        torch.testing.assert_close(weights(resumed), weights(results["bf16"][0]), rtol=0, atol=1e-5)
    finally:
        shutdown_distributed()


def test_float32_master_weights_run_beside_a_flash_backend():
    backend = attention.install(torch.device("cuda"), torch.bfloat16)
    assert backend.name != "reference"
    ranks = Ranks(0, 1, 0, torch.device("cuda", 0), None, None)
    model = build_model(0, True)
    model.set_attn_implementation(attention.NAME)
    build_policy(model, grpo_config(), ranks)
