"""Real optimizer steps on this CPU: what should train trains, what is frozen stays, memory is what the code holds."""

import dataclasses
import math
from types import SimpleNamespace

import pytest

from tunecast.calibrate.devices.protocol import TrialSpec
from tunecast.calibrate.trace.spec import architecture_to_dict, run_to_dict
from tunecast.catalogs.errors import NotSupportedError
from tunecast.model.architectures import architecture_from_config
from tunecast.model.resolve import resolve_run

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("peft")
pytest.importorskip("bitsandbytes")

from tunecast.calibrate import steps  # noqa: E402
from tunecast.calibrate.allocations import peak_allocated_bytes, peak_of  # noqa: E402
from tunecast.calibrate.devices.cpu import CpuBackend, CpuDevice  # noqa: E402
from tunecast.calibrate.steps import prepare_training, run_step  # noqa: E402
from tunecast.calibrate.weights import held_bytes  # noqa: E402

CONFIG = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 300,
    "tie_word_embeddings": False,
    "max_position_embeddings": 512,
}
LLAMA = architecture_from_config(CONFIG, "tiny-llama")
QWEN = architecture_from_config(
    {**CONFIG, "model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "tie_word_embeddings": True}, "tiny-qwen"
)
LAYER_MATRICES = 128 * (128 + 64 + 64 + 128) + 3 * 128 * 256
METHODS = ("lora", "qlora", "full")


def run_of(method, architecture=LLAMA, **options):
    options = {"method": method, "max_length": 16, "per_device_train_batch_size": 2, **options}
    if method != "full":
        options.setdefault("lora_r", 4)
    return resolve_run(architecture, options).run


def training_of(method, architecture=LLAMA, **options):
    torch.manual_seed(5)
    return prepare_training(architecture, run_of(method, architecture, **options), "cpu")


def spec_of(run, architecture=LLAMA):
    params = {"architecture": architecture_to_dict(architecture), "run": run_to_dict(run), "steps": 2}
    return TrialSpec(bench="step", params=params, repeats=2, warmup=1)


@pytest.mark.parametrize("checkpointing", [True, False])
@pytest.mark.parametrize("method", METHODS)
def test_trained_parameters_change_and_frozen_ones_do_not(method, checkpointing):
    training = training_of(method, gradient_checkpointing=checkpointing)
    for group in training.optimizer.param_groups:
        group["lr"] = 0.05  # A norm of 1.0 in bf16 does not move by less than 1/256.
    before = {name: parameter.detach().clone() for name, parameter in training.model.named_parameters()}
    for _ in range(2):
        training.step()
    trained = {name for name, parameter in training.model.named_parameters() if parameter.requires_grad}
    changed = {
        name for name, parameter in training.model.named_parameters() if not torch.equal(parameter, before[name])
    }
    assert changed == trained
    assert all("lora_" in name for name in trained) == (method != "full")
    assert all(parameter.grad is None for parameter in training.model.parameters())


@pytest.mark.parametrize(("architecture", "tied"), [(LLAMA, False), (QWEN, True)], ids=["llama", "qwen2"])
def test_weights_are_real_finite_and_tied_as_the_config_says(architecture, tied):
    model = training_of("lora", architecture).model
    assert all(not tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))
    assert all(torch.isfinite(parameter).all() for parameter in model.parameters())
    base = model.get_base_model()
    assert (base.lm_head.weight is base.model.embed_tokens.weight) is tied


def test_rotary_tables_are_those_of_the_config():
    base = training_of("lora").model.get_base_model()
    expected = 1.0 / 10000.0 ** (torch.arange(0, 32, 2, dtype=torch.float) / 32)
    torch.testing.assert_close(base.model.rotary_emb.inv_freq, expected)


def test_a_qlora_base_is_packed_and_nothing_else_is():
    import bitsandbytes as bnb

    model = training_of("qlora").model
    packed = {name for name, module in model.named_modules() if isinstance(module, bnb.nn.Linear4bit)}
    assert len(packed) == 2 * 7
    assert not any("lm_head" in name or "lora_" in name for name in packed)
    weights = [module.weight for module in model.modules() if isinstance(module, bnb.nn.Linear4bit)]
    assert sum(weight.numel() for weight in weights) == 2 * LAYER_MATRICES // 2
    assert all(weight.dtype == torch.uint8 and weight.quant_state.nested for weight in weights)


def test_losses_fall_when_one_batch_is_learnt():
    training = training_of("full", gradient_checkpointing=False)
    for group in training.optimizer.param_groups:
        group["lr"] = 1e-2

    def loss():
        with torch.no_grad():
            return training.model(**training.batch).loss.item()

    first = loss()
    for _ in range(8):
        training.step()
    assert loss() < 0.8 * first


@pytest.mark.parametrize("method", METHODS)
def test_a_bench_gives_every_step_and_the_memory_views(method):
    result = run_step(spec_of(run_of(method)), CpuDevice().backend)
    assert (len(result.samples_s), len(result.warmup_s)) == (2, 1)
    memory = result.memory
    assert memory.reserved_bytes is None
    assert 0 < memory.at_rest_bytes < memory.allocated_bytes
    assert memory.process_bytes is None or memory.process_bytes > memory.allocated_bytes
    assert result.extra["tokens_per_step"] == 32


@pytest.mark.parametrize(
    ("taken_s", "more"),
    [
        ((), 0),  # no warm-up was asked for
        ((3.0, 0.6), 0),
        ((0.3, 0.1, 0.1), 3),  # the first step, which loads kernels, warms nothing: 0.2 of 0.5 s are there
        ((0.3, 0.02), 24),
        ((0.3, 1e-9), 200),
    ],
)
def test_short_steps_are_repeated_until_half_a_second_is_full(taken_s, more):
    assert steps.steps_to_warm(taken_s) == more


@pytest.mark.parametrize(("platform", "warmed"), [("cuda", True), ("cpu", False)])
def test_only_a_card_is_warmed_for_longer_than_was_asked(platform, warmed, monkeypatch):
    done = []
    training = SimpleNamespace(
        platform=platform, step=lambda: done.append(1), model=torch.nn.Linear(2, 2), optimizer=None, run=run_of("full")
    )
    monkeypatch.setattr(steps, "prepare_training", lambda *_: training)
    monkeypatch.setattr(steps, "_with_allocated", lambda reading, _: reading)
    monkeypatch.setattr(steps, "MOST_STEPS_S", 0.0)
    result = run_step(spec_of(run_of("full")), CpuDevice().backend)
    assert len(done) == len(result.warmup_s) + len(result.samples_s)
    assert len(result.samples_s) == 2
    assert (len(result.warmup_s) == 1 + steps.MOST_STEPS) is warmed
    paces = result.extra.get("launch_s", [])
    assert len(paces) == (2 if warmed else 0), "before the steps that count, and after"
    assert all(pace > 0.0 for pace in paces)


class UnevenSteps:
    """Steps that take a tenth of a second or, every other time, so much more, on a clock of their own."""

    platform, model, optimizer, run = "cuda", torch.nn.Linear(2, 2), None, run_of("full")

    def __init__(self, more_s):
        self.now_s, self.taken, self.more_s = 0.0, 0, more_s

    def clock(self):
        return self.now_s

    def step(self):
        self.taken += 1
        self.now_s += 0.1 + self.more_s * (self.taken % 2)


@pytest.mark.parametrize(
    ("more_s", "platform", "most_s", "counted"),
    [
        (0.0, "cuda", 3.0, 4),  # even steps: those asked for suffice
        (0.002, "cuda", 3.0, 4),  # 1.1%
        (0.1, "cuda", 3.0, 20),  # 0.6 s are there; 2.4 s more, of 0.15 s each
        (0.1, "cuda", None, 7),  # a calibration's step fills a second
        (0.1, "cuda", 0.5, 4),
        (0.1, "cpu", 3.0, 4),
    ],
)
def test_steps_that_scatter_on_a_card_are_timed_until_they_fill_the_time_given(
    more_s, platform, most_s, counted, monkeypatch
):
    training = UnevenSteps(more_s)
    training.platform = platform
    monkeypatch.setattr(steps, "prepare_training", lambda *_: training)
    monkeypatch.setattr(steps, "_with_allocated", lambda reading, _: reading)
    monkeypatch.setattr(steps, "launch_pace_s", lambda _: 1e-5)
    asked = spec_of(run_of("full"))
    asked = dataclasses.replace(asked, repeats=4, params=asked.params | ({} if most_s is None else {"most_s": most_s}))
    result = run_step(asked, CpuBackend(training.clock))
    assert len(result.samples_s) == counted
    assert training.taken == counted + len(result.warmup_s)


def test_a_pace_that_changes_once_scatters():
    """Three steps of one pace and two of another: the median of deviations is nothing."""
    assert steps.steps_to_settle((0.3, 0.3, 0.3, 0.5, 0.5), 10.0) == math.ceil(8.1 / 0.3)


def test_steps_that_scatter_are_not_timed_for_ever():
    assert steps.steps_to_settle((1e-4, 3e-4), 1e3) == steps.MOST_STEPS
    assert steps.steps_to_settle((1.0,), 1e3) == 0, "one step says nothing of scatter"


def test_trainable_parameters_by_hand():
    """Rank 4 on every linear map: r x (in + out) each."""
    widths = [(128, 128), (128, 64), (128, 64), (128, 128), (128, 256), (128, 256), (256, 128)]
    result = run_step(spec_of(run_of("lora")), CpuDevice().backend)
    assert result.extra["trainable_params"] == 2 * 4 * sum(into + out for into, out in widths)


def test_bytes_at_rest_by_hand():
    """bf16 weights, fp32 adapters, and the two fp32 rotary tables of 16 numbers."""
    model = training_of("lora").model
    weights = 2 * (2 * LAYER_MATRICES + 2 * 300 * 128 + (2 * 2 + 1) * 128)
    adapters = 4 * sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    assert held_bytes(model) == weights + adapters + 2 * 16 * 4


def test_held_bytes_count_the_optimizer_state():
    training = training_of("lora")
    without = held_bytes(training.model)
    training.step()
    trained = [parameter for parameter in training.model.parameters() if parameter.requires_grad]
    state = sum(2 * 4 * parameter.numel() + 4 for parameter in trained)
    assert held_bytes(training.model, training.optimizer) == without + state


def test_longer_sequences_need_more_and_checkpointing_less():
    def allocated(**options):
        return run_step(spec_of(run_of("lora", **options)), CpuDevice().backend).memory.allocated_bytes

    plain = allocated(max_length=128, gradient_checkpointing=False)
    assert allocated(max_length=256, gradient_checkpointing=False) > 1.3 * plain
    assert allocated(max_length=128, gradient_checkpointing=True) < plain


def test_accumulation_runs_every_micro_batch():
    training = training_of("lora", gradient_accumulation_steps=3)
    calls = []
    training.model.register_forward_hook(lambda *_: calls.append(1))
    training.step()
    assert len(calls) == 3
    assert training.run.tokens_per_step == 3 * 2 * 16


def test_fp16_autocast_trains_with_the_scaler_of_the_trainer():
    training = training_of("lora", precision="fp16-autocast")
    before = training.scaler.get_scale()
    weights = [parameter.detach().clone() for parameter in training.model.parameters() if parameter.requires_grad]
    training.step()
    trained = [parameter for parameter in training.model.parameters() if parameter.requires_grad]
    assert training.scaler.state_dict()["_growth_tracker"] == 1, "one step was scaled, and none skipped"
    assert training.scaler.get_scale() == before
    assert any(not torch.equal(old, new) for old, new in zip(weights, trained, strict=True))
    assert training_of("lora").scaler is None


@pytest.mark.parametrize("length", [2, 4])
def test_fp16_autocast_skips_no_step_where_gradients_are_large(length):
    """Few tokens have large gradients, which overflow under PyTorch's first scale; a step that is skipped is fast, and
    the state of the optimizer would be allocated in one that counts."""
    training = training_of("lora", precision="fp16-autocast", max_length=length, per_device_train_batch_size=1)
    trained = sum(parameter.requires_grad for parameter in training.model.parameters())
    for taken in (1, 2, 3):
        training.step()
        assert training.scaler.state_dict()["_growth_tracker"] == taken
        assert len(training.optimizer.state) == trained


def test_peak_of_a_running_sum():
    assert peak_of([]) == 0
    assert peak_of([-5, -3]) == 0
    assert peak_of([100, -100, 60, 70, -130]) == 130


def test_the_allocator_ledger_sees_tensors_come_and_go():
    def two_at_once_then_one():
        first = torch.empty(1 << 20, dtype=torch.uint8)
        second = torch.empty(1 << 20, dtype=torch.uint8)
        del first, second
        torch.empty(1 << 20, dtype=torch.uint8)

    assert peak_allocated_bytes(two_at_once_then_one) == 2 << 20


def test_the_ledger_leaves_stderr_as_it_was(capfd):
    import sys

    peak_allocated_bytes(lambda: torch.empty(10))
    print("still here", file=sys.stderr)
    assert capfd.readouterr().err == "still here\n"


def test_what_is_not_built_is_refused_not_recorded():
    with pytest.raises(NotSupportedError, match="no_such_optimizer"):
        CpuDevice().run(spec_of(dataclasses.replace(run_of("lora"), optim="no_such_optimizer")))
