"""What the estimator ftuneai says of the published runs that tunecast forecasts. Not needed to use tunecast.

    pip install -e '.[rival]'         # nothing else here imports ftuneai
    python scripts/rival_ftuneai.py   # writes results/validation/ftuneai.json

It gets the exact shape of the model from tunecast's catalog (its own list has few of these models), its
own figures of the GPU, and every option of the run that it has.
"""

from __future__ import annotations

import json
from importlib.metadata import version
from pathlib import Path
from typing import Any

from tunecast.calibrate.published import PublishedRun
from tunecast.calibrate.run_table import read_table
from tunecast.calibrate.validate import read_entries
from tunecast.model.units import HOUR_S

ROOT = Path(__file__).resolve().parent.parent
TABLE = ROOT / "results" / "published" / "published-runs.csv"
OUT = ROOT / "results" / "validation" / "ftuneai.json"
GPUS = {
    "a100-sxm4-80gb": "A100-80GB",
    "a100-sxm4-40gb": "A100-40GB",
    "h100-sxm5-80gb": "H100-80GB",
    "h200-sxm5-141gb": "H200-141GB",
    "t4-16gb": "T4-16GB",
    "l4-24gb": "L4-24GB",
    "rtx-4090-24gb": "RTX-4090-24GB",
    "a10g-24gb": "A10G-24GB",
}
SHARDINGS = {"zero1": "zero_1", "zero2": "zero_2", "zero3": "zero_3", "fsdp": "fsdp"}
SAMPLES = 10_000_000
"""Enough that hours rounded to two decimals say nothing."""


def target_of(modules: tuple[str, ...]) -> str:
    """The nearest of its three choices of adapter targets."""
    if "up_proj" in modules:
        return "all_linear"
    return "attention_all" if "o_proj" in modules else "attention"


def spec_of(run: PublishedRun) -> Any:
    """Our catalog's shape in its terms."""
    from ftuneai.core.models import ModelSpec  # type: ignore[import-not-found,unused-ignore]

    layer = run.architecture.groups[0].layer
    return ModelSpec(
        name=run.architecture.name,
        parameters=run.architecture.total_params,
        hidden_size=run.architecture.hidden_size,
        num_layers=sum(group.count for group in run.architecture.groups),
        num_attention_heads=layer.attention.num_heads,
        num_kv_heads=layer.attention.num_kv_heads,
        intermediate_size=layer.mlp.intermediate_size,
        vocab_size=run.architecture.vocab_size,
        max_seq_length=run.run.max_length,
    )


def answer(run: PublishedRun) -> dict[str, float]:
    """Its tokens/s of the whole job and its memory in GiB."""
    from ftuneai.core.memory import MemoryEstimator  # type: ignore[import-not-found,unused-ignore]
    from ftuneai.core.models import (  # type: ignore[import-not-found,unused-ignore]
        FineTuneMethod,
        LoRATarget,
        Quantization,
        ShardingStrategy,
        TrainingConfig,
    )
    from ftuneai.core.time import TimeEstimator  # type: ignore[import-not-found,unused-ignore]
    from ftuneai.loader import get_gpu  # type: ignore[import-not-found,unused-ignore]

    r = run.run
    config = TrainingConfig(
        model=run.architecture.name,
        method=FineTuneMethod(r.method),
        quantization=Quantization("4bit" if r.method == "qlora" else "none"),
        batch_size=r.per_device_train_batch_size,
        seq_length=r.max_length,
        gradient_checkpointing=r.gradient_checkpointing,
        lora_rank=r.lora_r or 16,
        lora_target=LoRATarget(target_of(r.lora_target_modules)),
        flash_attention=True,
        sharding=ShardingStrategy(SHARDINGS.get(r.sharding, "none")),
        num_gpus=r.num_gpus,
    )
    model = spec_of(run)
    hours = TimeEstimator(model, config).estimate(get_gpu(GPUS[run.gpu]), SAMPLES, 1, num_gpus=r.num_gpus).total_hours
    memory_gib = MemoryEstimator(model, config).estimate().total_gb
    return {"tokens_per_s": SAMPLES * r.max_length / (hours * HOUR_S), "memory_gib": memory_gib}


def main() -> None:
    """Write its answers by row id."""
    entries = read_entries(read_table(TABLE))
    runs = [entry.run for entry in entries if entry.run is not None and not entry.out_of_memory]
    rows = {run.id: answer(run) for run in runs if run.gpu in GPUS}
    OUT.write_text(
        json.dumps({"version": version("ftuneai"), "rows": rows}, indent=1, sort_keys=True) + "\n", encoding="utf-8"
    )
    print(f"{len(rows)} rows; wrote {OUT}")


if __name__ == "__main__":
    main()
