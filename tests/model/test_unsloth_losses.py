"""Unsloth's losses against unsloth_zoo itself, against what inductor makes of the same operations, and by hand.

Numbers of unsloth_zoo were made once by running its own functions (wheels from PyPI, on a CPU): chunks by
``get_chunk_size`` and ``fused_linear_rows``, tiles by ``_tiled_layout``; bytes and FLOPs of ``_ce_impl`` by following
its allocations and products with the Triton kernels replaced by nothing.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tunecast.catalogs.errors import UnknownNameError
from tunecast.model.architectures import load_architecture
from tunecast.model.context import Step
from tunecast.model.fused_losses import Head
from tunecast.model.inventory import step_operations
from tunecast.model.loss_budget import tiles_from
from tunecast.model.memory import memory_timeline
from tunecast.model.on_device import resolve_for
from tunecast.model.operation import Kind
from tunecast.model.question import Question
from tunecast.model.resolve import resolve_run
from tunecast.model.run import Run
from tunecast.model.tape import Node, Tape, Tensor
from tunecast.model.tape_peaks import alive_on
from tunecast.model.target import resolve_targets
from tunecast.model.units import GIB
from tunecast.model.unsloth_losses import chunked, logits_sizes, today
from tunecast.model.unsloth_rules import Sizes, chunks_of, rows_today, tile_of

SMALL, BIG = "Qwen/Qwen2.5-0.5B", "Qwen/Qwen3-8B"

CHUNKS = [  # unsloth_zoo 2026.6.7, 2026.9.2 and 2026.10.8: rows, vocabulary, GiB allowed, GiB fixed, chunks
    ("unsloth-2025.12", 512, 151936, 7.0, 0.0, 1),
    ("unsloth-2025.12", 4096, 151936, 3.2, 0.0, 1),
    ("unsloth-2025.12", 16384, 151936, 3.2, 0.0, 4),
    ("unsloth-2025.12", 65536, 128256, 16.0, 0.0, 1),
    ("unsloth-2025.12", 65536, 262144, 30.0, 0.0, 4),
    ("unsloth-2026.7", 4096, 151936, 4.0, 0.0, 1),
    ("unsloth-2026.7", 8192, 151936, 4.0, 0.0, 4),
    ("unsloth-2026.7", 16384, 128256, 0.7, 0.0, 12),
    ("unsloth-2026.9", 512, 151936, 4.0, 0.0, 1),
    ("unsloth-2026.9", 4096, 151936, 4.0, 0.03125, 4),
    ("unsloth-2026.9", 16384, 128256, 1.5, 0.125, 24),
    ("unsloth-2026.9", 4096, 262144, 4.0, 2.267578125, 12),
]
ROWS = [  # unsloth_zoo 2026.10.9 with 2 GiB for logits: rows, width, vocabulary, rows of a chunk
    (511, 896, 151936, 511),
    (8190, 4096, 128256, 512),
    (16380, 8192, 128256, 1024),
    (65000, 4096, 32000, 4096),
    (300, 576, 49152, 300),
]
TILES = [  # the same: rows, vocabulary, whether the card has at most 24.5 GiB, rows and columns of a tile
    (511, 151936, True, (511, 16384)),
    (8191, 151936, False, (4096, 16384)),
    (4094, 128256, False, (4094, 16384)),
]
TODAY = [  # the same: rows, width, vocabulary, samples, trained head, small card; peak bytes, FLOPs
    (600, 64, 40000, 1, False, False, 96241152, 6133760000),
    (600, 64, 40000, 1, False, True, 39640576, 6133760000),
    (5000, 64, 40000, 4, False, False, 271288832, 51159040000),
    (4096, 128, 65536, 2, True, False, 287634432, 206057766912),
    (4200, 128, 65536, 1, False, True, 273325568, 140895059968),
    (2000, 1024, 4000, 2, False, False, 52482560, 32735232000),
    (10000, 1024, 4000, 2, True, False, 136322048, 245710848000),
    (5000, 1024, 40000, 1, False, True, 306215936, 819036160000),
]


def run_of(loss: str, **values: Any) -> Run:
    return replace(Run(method="lora", loss_type=loss), **values)


@pytest.mark.parametrize(("loss", "rows", "vocab", "budget_gib", "fixed_gib", "chunks"), CHUNKS)
def test_chunks_are_those_of_unsloth(
    loss: str, rows: int, vocab: int, budget_gib: float, fixed_gib: float, chunks: int
) -> None:
    sizes = Sizes(rows=rows, hidden=4096, vocab=vocab, fixed_bytes=int(fixed_gib * GIB))
    assert chunks_of(run_of(loss, loss_budget_bytes=int(budget_gib * GIB)), sizes) == chunks


@pytest.mark.parametrize(("rows", "hidden", "vocab", "found"), ROWS)
def test_rows_of_a_chunk_are_those_of_unsloth(rows: int, hidden: int, vocab: int, found: int) -> None:
    assert rows_today(run_of("unsloth"), Sizes(rows=rows, hidden=hidden, vocab=vocab)) == found


@pytest.mark.parametrize(("rows", "vocab", "small", "found"), TILES)
def test_tiles_are_those_of_unsloth(rows: int, vocab: int, small: bool, found: tuple[int, int]) -> None:
    run = run_of("unsloth", loss_tiles_from=0 if small else 4096)
    assert tile_of(run, Sizes(rows=rows, hidden=64, vocab=vocab)) == found


def written(run: Run, rows: int, hidden: int, vocab: int) -> tuple[float, float]:
    """Peak bytes and FLOPs of the loss alone, its hidden state and weight not counted."""
    tape = Tape()
    tape.moment = "loss"
    step = Step(tape=tape, architecture=load_architecture(BIG), run=run, platform="cuda")
    head = Head(name="lm_head", hidden=hidden, vocab=vocab, rows=rows)
    tape.logits_sizes = logits_sizes(step, head)
    x = Tensor(rows * hidden, run.dtype, None, node=Node((), lambda _: (), saves=(), layer=None, moment=""))
    write = today if run.loss_type == "unsloth" else chunked
    write(step, x, step.weight("lm_head", hidden * vocab), Tensor(rows, "int64", None), head)
    return max(peak.total for peak in alive_on(tape, range(0)).peaks.values()), sum(e.flops for e in tape.events)


@pytest.mark.parametrize(("rows", "hidden", "vocab", "samples", "trained", "small", "peak", "flops"), TODAY)
def test_todays_loss_takes_the_memory_and_flops_of_unsloths_own(
    rows: int, hidden: int, vocab: int, samples: int, trained: bool, small: bool, peak: int, flops: int
) -> None:
    run = Run(
        method="full" if trained else "lora", precision="bf16", loss_type="unsloth", max_length=rows // samples,
        per_device_train_batch_size=samples, loss_tiles_from=0 if small else 4096,
    )  # fmt: skip
    found = written(run, rows, hidden, vocab)
    assert found == (pytest.approx(peak, rel=0.002), pytest.approx(flops))


def compiled_peak(tmp_path: Path, rows: int, hidden: int, vocab: int, chunks: int, *, trained: bool) -> float:
    """Bytes that torch allocates at most for chunks of a compiled loss with its gradients, all in fp32."""
    torch = pytest.importorskip("torch")
    if shutil.which("g++") is None:
        pytest.skip("inductor needs a C++ compiler")
    x, weight = torch.randn(rows, hidden), torch.randn(vocab, hidden)
    labels = torch.randint(0, vocab, (rows,))

    def loss(part: Any, weight: Any, target: Any) -> Any:
        logits = torch.nn.functional.linear(part, weight)
        return torch.nn.functional.cross_entropy(logits.float(), target, reduction="sum") / rows

    def graph(part: Any, weight: Any, target: Any, to_x: Any, to_weight: Any, total: Any) -> None:
        wanted = (0, 1) if trained else (0,)
        given, value = torch.func.grad_and_value(loss, argnums=wanted)(part, weight, target)
        if trained:
            to_weight.add_(given[1])
        total.add_(value)
        to_x[:] = given[0]

    compiled = torch.compile(graph, dynamic=True, fullgraph=True)

    def step() -> None:
        to_x, total = torch.empty_like(x), torch.zeros(())
        to_weight = torch.zeros_like(weight) if trained else None
        for part, target, piece in zip(x.chunk(chunks), labels.chunk(chunks), to_x.chunk(chunks), strict=True):
            compiled(part, weight, target, piece, to_weight, total)

    step()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        step()
    profile.export_chrome_trace(str(tmp_path / "trace.json"))
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    changes = sorted((e["ts"], e["args"]["Bytes"]) for e in events if e.get("name") == "[memory]")
    alive = peak = 0.0
    for _, change in changes:
        alive += change
        peak = max(peak, alive)
    return peak


@pytest.mark.parametrize(("chunks", "trained"), [(1, False), (4, False), (1, True)])
def test_a_compiled_chunk_has_one_tensor_of_vocabulary_width(tmp_path: Path, chunks: int, trained: bool) -> None:
    """What torch allocates when inductor compiles the operations of Unsloth's chunks, gradients within the forward."""
    rows, hidden, vocab = 512, 64, 20000
    wide = rows * vocab * 16
    run = Run(
        method="full" if trained else "lora", dtype="fp32", precision="fp32", loss_type="unsloth-2026.9",
        loss_budget_bytes=wide // chunks + rows * hidden * 4 + 2 * trained * vocab * hidden * 4, max_length=rows,
    )  # fmt: skip
    found, flops = written(run, rows, hidden, vocab)
    assert found == pytest.approx(compiled_peak(tmp_path, rows, hidden, vocab, chunks, trained=trained), rel=0.01)
    assert flops == (3 if trained else 2) * 2.0 * rows * hidden * vocab


def resolved(model: str, gpu: str, **options: Any) -> Run:
    architecture = load_architecture(model)
    given = {"method": "lora", "stack": "unsloth", "max_length": 512, **options}
    (target,) = resolve_targets([gpu], {})
    return resolve_for(Question(architecture=architecture, options=given), target).run


def head_products(model: str, run: Run) -> set[tuple[int, ...]]:
    return {op.shape for op in step_operations(load_architecture(model), run) if op.name == "lm_head"}


@pytest.mark.parametrize(
    ("version", "rows"), [("2025.12", 512), ("2026.8.1", 512), ("2026.10.8", 512), ("2026.10.9", 511)]
)
def test_a_short_batch_is_one_chunk_in_every_release(version: str, rows: int) -> None:
    """512 tokens by 151,936 words are 297 MiB in fp32 and 1.2 GiB at 16 bytes, within 4 GiB and a T4's free memory."""
    run = resolved(SMALL, "t4", stack_version=version)
    assert head_products(SMALL, run) == {(rows, 151936, 896), (rows, 896, 151936)}


def test_a_small_card_takes_tiles_and_a_large_one_from_4096_tokens() -> None:
    assert head_products(SMALL, resolved(SMALL, "rtx-4090")) >= {(511, 16384, 896), (511, 896, 16384)}
    assert head_products(SMALL, resolved(SMALL, "h100-sxm5")) == {(511, 151936, 896), (511, 896, 151936)}
    assert (4096, 16384, 896) in head_products(SMALL, resolved(SMALL, "h100-sxm5", max_length=8192))
    cards = {name: tiles_from(resolve_targets([name], {})[0]) for name in ("t4", "mi300x", "l4", "a100-sxm4-40gb")}
    assert cards == {"t4": -1, "mi300x": -1, "l4": 0, "a100-sxm4-40gb": 4096}


def test_the_budget_is_half_of_what_is_free_before_there_is_optimizer_state() -> None:
    """A fully trained 0.5B model in bf16 rests on 494,032,768 x 2 bytes; AdamW's states come after the first loss."""
    (target,) = resolve_targets(["t4"], {})
    run = resolved(SMALL, "t4", method="full", stack_version="2025.12", dtype="fp32")
    assert target.usable_bytes is not None
    assert run.loss_budget_bytes == pytest.approx((target.usable_bytes - 4 * 494032768) / 2, rel=0.001)
    assert resolved(SMALL, "t4", stack_version="2026.10.8").loss_budget_bytes == 4 * GIB
    assert resolved(SMALL, "t4").loss_budget_bytes == 2 * GIB


def test_where_nothing_is_free_plenty_stays_assumed() -> None:
    assert resolved("meta-llama/Llama-3.1-70B", "t4", stack_version="2025.12").loss_budget_bytes is None


def test_less_free_memory_makes_more_and_smaller_chunks() -> None:
    """2 x 8,192 tokens of 151,936 words are 9.3 GiB in fp32: one chunk on an H100, four where 2 GiB are allowed."""
    wide = resolved(BIG, "h100-sxm5", method="qlora", max_length=8192, per_device_train_batch_size=2,
                    stack_version="2025.12")  # fmt: skip
    narrow = replace(wide, loss_budget_bytes=2 * GIB)
    one, four = (memory_timeline(load_architecture(BIG), run).moments["loss"] for run in (wide, narrow))
    assert one - four == pytest.approx(2 * (16384 - 4096) * (151936 + 4096), rel=0.01)


def test_without_a_card_its_memory_is_called_assumed() -> None:
    found = resolve_run(load_architecture(SMALL), {"stack": "unsloth"})
    assert (found.origins["loss_budget_bytes"], found.origins["loss_tiles_from"]) == ("assumed", "assumed")
    with pytest.raises(UnknownNameError, match="loss_budget_bytes"):
        resolve_run(load_architecture(SMALL), {"loss_budget_bytes": GIB})


def test_the_gradient_of_the_hidden_state_is_copied_once_in_the_backward() -> None:
    """512 tokens of 896 numbers in 16 bits, read and written."""
    run = resolved(SMALL, "t4", stack_version="2026.10.8")
    (found,) = [op for op in step_operations(load_architecture(SMALL), run) if op.name == "loss.scale"]
    assert found.kind is Kind.MEMORY
    assert found.total_bytes == pytest.approx(2 * 512 * 896 * 2, rel=0.001)
