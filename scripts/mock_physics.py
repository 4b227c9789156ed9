#!/usr/bin/env python3
"""Are the mocks like real cards? Their kernels against published ones, and the source of every hidden constant.

    python scripts/mock_physics.py [--out results/validation/mock/physics.md]

Published are single kernels and times of the host (calibrate/data/mock_kernels.json), never whole
training runs: those judge the forecasts, and a mock made from them would agree with what is judged.
The ranges are in calibrate/data/mock_physics.json.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from tunecast.calibrate.mock.published import Kernel, kernels, on_mock
from tunecast.calibrate.mock.ranges import Constant, Range, evidence
from tunecast.calibrate.trace.tracer import trace_step
from tunecast.model.architectures import load_architecture
from tunecast.model.operation import Operation, Phase
from tunecast.model.run import Run

SEEDS = range(20)
LAYER_OF = "TinyLlama/TinyLlama-1.1B-Chat-v1.0"
"""The model whose decoding gives the published host seconds of a layer."""
KINDS = ("product", "attention", "memory", "dequantization", "host")


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """One published figure and the mocks' of the same card."""

    kernel: Kernel
    mocks: tuple[float, ...]

    @property
    def ratio(self) -> float:
        """The mocks' median over the published figure."""
        return statistics.median(self.mocks) / self.kernel.published

    @property
    def inside(self) -> bool:
        """Whether the published figure is among the mocks'."""
        return min(self.mocks) <= self.kernel.published <= max(self.mocks)


def decoder_layer() -> tuple[Operation, ...]:
    """Operations of one layer's forward pass, without adapters, as the real code issues them."""
    run = Run(method="full", max_length=512, gradient_checkpointing=False)
    stream = trace_step(load_architecture(LAYER_OF), run, platform="cuda").stream
    return tuple(op for op in stream if op.layer == 1 and op.phase is Phase.FORWARD)


def compared(found: Iterable[Kernel], seeds: Iterable[int] = SEEDS) -> list[Compared]:
    """Every published kernel on mocks of its card."""
    layer = decoder_layer()
    return [Compared(kernel=k, mocks=tuple(on_mock(k, seed, layer) for seed in seeds)) for k in found]


def table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> list[str]:
    """A Markdown table."""
    lines = (head, ("---",) * len(head), *rows)
    return [f"| {' | '.join(line)} |" for line in lines]


def number(value: float) -> str:
    """Three figures, thousands in full."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def shown_params(kernel: Kernel) -> str:
    """What ran, in a few words."""
    p = kernel.params
    if kernel.kind == "product":
        return f"{p['m']} x {p['n']} x {p['k']} {p['dtype']}"
    if kernel.kind == "attention":
        mask, way = ("causal" if p["causal"] else "full"), ("backward" if p["backward"] else "forward")
        return f"{p['batch']} x {p['heads']} heads of {p['head_dim']}, {p['length']} long, {mask}, {way}"
    if kernel.kind == "memory":
        return f"{p['name']}, {number(p['bytes'] / 1e6)} MB"
    if kernel.kind == "dequantization":
        return f"{number(p['elements'] / 1e6)} million 4-bit values" + (" and scales" if "double_quant" in p else "")
    return str(p["what"])


def summary_rows(rows: list[Compared]) -> list[tuple[str, ...]]:
    """By kind: how many, the mocks' median over the published, the spread, and how many are among the mocks'."""
    found = []
    for kind in KINDS:
        of_kind = [r for r in rows if r.kernel.kind == kind]
        ratios = [r.ratio for r in of_kind]
        off = statistics.median(abs(ratio - 1.0) for ratio in ratios)
        inside = sum(r.inside for r in of_kind)
        middle = f"{statistics.median(ratios):.2f}"
        found.append((kind, str(len(ratios)), middle, f"{off:.0%}", f"{inside} of {len(ratios)}"))
    return found


def kernel_rows(rows: list[Compared]) -> list[tuple[str, ...]]:
    """One line per published figure."""
    found = []
    for row in rows:
        k = row.kernel
        gpu = "any" if k.kind == "host" else k.gpu
        middle = f"{number(statistics.median(row.mocks))} ({number(min(row.mocks))} to {number(max(row.mocks))})"
        verdict = "inside" if row.inside else "outside"
        figure = f"{number(k.published)} {k.unit}"
        found.append((gpu, shown_params(k), figure, middle, f"{row.ratio:.2f}", verdict, f"[{k.source}]"))
    return found


def shown_range(found: Range, alone: bool) -> str:
    """`0.8 to 0.9`, with its cards where there are several."""
    ends = number(found.low) if found.low == found.high else f"{found.low:g} to {found.high:g}"
    return ends if alone else f"{'others' if found.cards == 'all' else found.cards}: {ends}"


def status(constant: Constant) -> str:
    """Measured or assumed, and what became of the range that was drawn from before."""
    if constant.was is None:
        return f"{constant.status}, new"
    kept = [(r.low, r.high) for r in constant.ranges] == [constant.was]
    return f"{constant.status}, {'kept' if kept else 'changed'}"


def constant_row(constant: Constant) -> tuple[str, ...]:
    """One line of the table of constants."""
    ranges = "<br>".join(shown_range(r, len(constant.ranges) == 1) for r in constant.ranges)
    was = f"{constant.was[0]:g} to {constant.was[1]:g}" if constant.was else "-"
    figures = [f"{m.figure} [{', '.join(m.sources)}]" for m in constant.measured]
    words = "<br>".join([*figures, *([constant.note] if constant.note else [])]) or "no source found"
    unit = f" ({constant.unit})" if constant.unit else ""
    return f"`{constant.name}`", constant.what + unit, ranges, was, words, status(constant)


def constant_lines() -> list[str]:
    """The tables of constants by group, and the sources they name."""
    known = evidence()
    lines = ["## Hidden constants", "", "Drawn log-uniformly; before is the range in use until 2026-11-20."]
    groups = dict.fromkeys(c.group for c in known.constants.values())
    head = ("constant", "what it is", "range", "before", "published on real cards", "status")
    for group in groups:
        rows = [constant_row(c) for c in known.constants.values() if c.group == group]
        lines += ["", f"### {group.capitalize()}", "", *table(head, rows)]
    sources = [f"- [{key}] {words}." for key, words in known.sources.items()]
    return [*lines, "", f"## Sources (read {known.collected})", "", *sources]


def page(rows: list[Compared]) -> str:
    """The whole page."""
    counted = evidence().constants.values()
    measured = sum(c.status == "measured" for c in counted)
    opening = (
        f"{len(rows)} published figures of single kernels and of hosts against {len(SEEDS)} mocks of the same card. "
        f"{measured} of {len(counted)} hidden constants have a range from published measurements; the others are "
        "assumed and say so. The ranges were set with these figures in view, so the comparison shows that the mocks' "
        "mechanisms can be what was measured, not that they foretell it. No training run is among the sources, and "
        "no range was chosen by what a forecast of this project errs on mocks."
    )
    lines = [
        "# Mocks against real cards, kernel by kernel",
        "",
        "Made by `python scripts/mock_physics.py`.",
        "",
        opening,
        "",
        *table(("kind", "figures", "mocks over published", "median distance", "among the mocks'"), summary_rows(rows)),
        "",
        "## Kernels",
        "",
        "Median of the mocks (lowest to highest seed) beside each published figure. Rates count as the source does.",
        "",
        *table(("card", "what ran", "published", "mocks", "ratio", "among the mocks'", "source"), kernel_rows(rows)),
        "",
        *constant_lines(),
        "",
        LACKS,
    ]
    return "\n".join(lines)


LACKS = """\
## What mocks still lack

- Values of the data: products of zeros run 15% faster than of random values on an A100 [horace]; mocks are random.
- Passing from a fast first second to a lasting clock: a T4 runs 42 TFLOP/s at first and 24 later; a mock has one \
clock per trial, the higher the sooner that is over.
- The trainer around the step: its walk over the modules costs about 13.5 ms a micro-step at 2,000 modules \
[unsloth-b200]; mocks run the bare step that `tunecast calibrate` and `tunecast measure` run.
- Per-tensor host time of multi-tensor optimizer passes, beyond one launch for every 48 tensors.
- Shapes that no fast kernel fits: bf16 squares on an RTX 4090 drop from 156 to 116 TFLOP/s at an odd size and to 90 \
at 8 beyond a multiple of 16 (pytorch issue 181718); mocks only pad tiles. Models' own sizes are multiples of 64, but \
for vocabularies like GPT-2's 50,257.
- Libraries that schedule by stream-K: mocks of 170 SMs lose more in the last wave than a real RTX 5090.
- The host time of AMD's attention kernels: its backward took 417 us at 128 tokens in 2024 (pytorch pull request \
138947), where mocks issue it like any other kernel.
"""


def main() -> None:
    """Compare, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("results/validation/mock/physics.md"))
    arguments = parser.parse_args()
    arguments.out.write_text(page(compared(kernels())), encoding="utf-8")


if __name__ == "__main__":
    main()
