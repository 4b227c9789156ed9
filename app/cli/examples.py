"""A few real command lines for the end of each command's help."""

from __future__ import annotations

EXAMPLES: dict[str, tuple[str, ...]] = {
    "env": ("env", "env --json"),
    "calibrate": (
        "calibrate",
        "calibrate --full --out records",
        "calibrate --device mock:l40s",
    ),
    "fit": ("fit tunecast-records/l40s-48gb_20261120T101500Z_0a1b2c3d.json",),
    "measure": (
        "measure Qwen/Qwen2.5-0.5B --max-length 512",
        "measure Qwen/Qwen2.5-7B --method qlora --steps 10",
    ),
    "estimate": (
        "estimate meta-llama/Llama-3.1-8B --method qlora --tokens 10M",
        "estimate Qwen/Qwen2.5-7B --gpu rtx-4090 --max-batch --explain",
        "estimate config.yaml --num-samples 20k --mean-tokens 600",
        "estimate config.yaml --gpu l40s --record records/l40s.json --json",
        "estimate config.yaml --num-gpus auto --deadline 2d",
    ),
    "recommend": (
        "recommend meta-llama/Llama-3.1-8B --method qlora --tokens 10M",
        "recommend config.yaml --tokens 10M --budget 50 --deadline 12h",
        "recommend config.yaml --spot --write skypilot=task.yaml",
    ),
    "sweep": (
        "sweep meta-llama/Llama-3.1-8B --gpu l40s --tokens 10M",
        "sweep Qwen/Qwen2.5-7B --gpu l40s --analysis what-if",
        "sweep Qwen/Qwen2.5-7B --gpu l40s --over max_length=512,1024,2048",
    ),
    "report": (
        "report meta-llama/Llama-3.1-8B --method qlora --tokens 10M",
        "report config.yaml --tokens 10M --gpu l40s --markdown report.md",
    ),
    "compare": (
        "compare records/l40s.json",
        "compare records/a.json records/b.json --plot shares.svg",
    ),
    "validate": (
        "validate my-runs.csv --max-median-error 0.15",
        "validate records/l40s-48gb_run_20261120T101500Z_0a1b2c3d.json",
        "validate out/trainer_state.json --config config.yaml --gpu l40s",
    ),
    "catalog": (
        "catalog gpus",
        "catalog prices --gpu h100-sxm5-80gb --trend",
        "catalog prices --refresh --provider runpod",
    ),
    "web": ("web", "web --host 0.0.0.0 --port 8080"),
}
"""By command, without the leading ``tunecast``."""


def epilog(command: str) -> str:
    """The examples as help shows them; the first mark keeps its lines apart."""
    lines = (f"  tunecast {example}" for example in EXAMPLES[command])
    return "\n".join(("\b", "Examples:", *lines))
