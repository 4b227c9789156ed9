"""What is asked of every device."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from tunecast.catalogs.price_book import PriceBook
from tunecast.model.architecture import Architecture
from tunecast.model.kept_samples import OF_DATA
from tunecast.model.observed import Observations
from tunecast.model.run import BY_SPREAD, MESH
from tunecast.model.step_source import StepSource
from tunecast.model.whole_run_options import WholeRunOptions

STORED_AS = "stored_as"
"""Option that nobody types: how the weights of the copy that is loaded were published, if in few bits."""
BESIDE_STEPS = (
    "tokens", "num_samples", "mean_tokens", "num_train_epochs", "max_steps", "dataset",
    "steps_at_most", "steps_exactly", "rows_padded", "rows_packed", "rows_grouped", "rows_flat", *OF_DATA, STORED_AS,
    "packing", "group_by_length", "padding_free", "streaming", "dataloader_num_workers", BY_SPREAD, MESH,
)  # fmt: skip
"""What a training file may say that a step of one GPU does not depend on."""
RUN_OPTIONS_ELSEWHERE = (
    *BESIDE_STEPS, "bytes_per_token", "internode_gbps", "internode_of", "host_update_gb_per_s", "nvlink", "p2p",
    "serial_fraction",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """What is asked of every device."""

    architecture: Architecture
    options: Mapping[str, Any]
    """Run options and amounts, named as on the command line with underscores."""
    option_origins: Mapping[str, str] = field(default_factory=dict)
    options_on: Callable[[int], Mapping[str, Any]] | None = None
    """Options of a training file on so many GPUs, where the number is searched; raises what typing it would."""
    usd_per_gpu_hour: float | None = None
    price_book: PriceBook | None = None
    """Prices to choose from; None: the snapshot that ships."""
    achieved_tflops: float | None = None
    """Model TFLOP/s per GPU; replaces every step-time term."""
    whole_run: WholeRunOptions = field(default_factory=WholeRunOptions)
    """Everything around training: phases, machines, billing, interruptions."""
    factor_scales: Mapping[str, float] = field(default_factory=dict)
    """Multiples of factors, or of all seconds of a kind of operation (``gemm``), for what-ifs; see `factors.scaled`."""
    observations: Observations = field(default_factory=dict)
    """Runs that were watched, by device: they move the forecasts of their device."""
    source: StepSource | None = None
    """Where operations and memory come from instead of the formulas (``--exact``)."""
