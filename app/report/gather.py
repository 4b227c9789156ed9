"""Everything a report shows, computed once: page and Markdown only lay it out."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tunecast.catalogs.errors import InputError, TunecastError

if TYPE_CHECKING:
    from tunecast.against_catalog import CatalogComparison
    from tunecast.model.forecast import Forecast
    from tunecast.recommendation import Recommendation
    from tunecast.sweep_result import Sweep

Told = Callable[[str], None]
CHOSEN_BY_RECOMMEND = ("sharding", "tp", "pp", "cp", "deadline", "owned")
"""Options of a single forecast that a recommendation chooses itself or does not take. Of the number of GPUs it has the
global batch, and tries as many and fewer."""
PLANNED = (
    "method", "num_gpus", "sharding", "per_device_train_batch_size", "gradient_accumulation_steps",
    "gradient_checkpointing", "tp", "pp", "cp", "pp_interleave",
)  # fmt: skip
"""What makes a recommended plan, besides its card."""
GRID_LENGTHS = (0.5, 1.0, 2.0)
GRID_BATCHES = (1, 2, 4, 8)


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What was asked and everything that was found."""

    command: str
    made_at: str
    version: str
    forecasts: tuple[Forecast, ...]
    """One per GPU, best first."""
    recommendation: Recommendation | None
    why_no_recommendation: str | None
    tornado: Sweep
    grid: Sweep
    comparisons: tuple[CatalogComparison, ...]
    asked_tokens: float | None
    """Tokens of all epochs, where they were asked for; whole steps may train a few more."""

    @property
    def best(self) -> Forecast:
        """The cheapest card that fits the run as it was asked."""
        return self.forecasts[0]

    @property
    def recommended(self) -> Forecast | None:
        """The cheapest plan of all; None where nothing can be recommended."""
        found = self.recommendation
        return None if found is None or found.cheapest is None else found.cheapest.forecast

    @property
    def plan(self) -> Forecast:
        """What pictures, sensitivity and origins are about: the recommended plan, else the best card as asked."""
        return self.recommended or self.best


def gather(
    model: str,
    *,
    command: str,
    gpu: str | Iterable[str] = "all",
    records: Sequence[str | Path] = (),
    told: Told | None = None,
    **options: Any,
) -> Report:
    """Forecast every card, recommend, and vary the recommended plan, or else the best card.

    Raises InputError without an amount of data.
    """
    from tunecast.against_catalog import against_catalog
    from tunecast.api import estimate
    from tunecast.calibrate.environment import package_version
    from tunecast.calibrate.record import utc_now
    from tunecast.calibrate.watch.observations import split_records
    from tunecast.forecast_table import best_first

    say = told or _untold
    say("forecasting every card")
    forecasts = best_first(estimate(model, gpu=gpu, records=records, **options))
    if forecasts[0].whole_run is None:
        raise InputError("A report is about a whole run; say how much data: add --tokens 10M, or --max-steps 500.")
    records, _ = split_records(records)
    say("comparing offers")
    recommendation, why_not = _recommended(model, gpu, records, options, forecasts[0])
    say("moving every input")
    plan = None if recommendation is None or recommendation.cheapest is None else recommendation.cheapest.forecast
    asked = {**options, "num_gpus": forecasts[0].run.num_gpus} if plan is None else as_planned(plan, options)
    tornado, grid = _varied(model, plan or forecasts[0], records, asked)
    say("comparing with the catalog")
    return Report(
        command=command,
        made_at=utc_now(),
        version=package_version("tunecast") or "unknown",
        forecasts=tuple(forecasts),
        recommendation=recommendation,
        why_no_recommendation=why_not,
        tornado=tornado,
        grid=grid,
        comparisons=tuple(against_catalog(Path(path)) for path in records),
        asked_tokens=_asked_tokens(options),
    )


def _asked_tokens(options: dict[str, Any]) -> float | None:
    """The amount of data, for all epochs: as typed with --tokens, or samples of a stated mean length."""
    from tunecast.model.amount import parse_count

    epochs = float(options.get("num_train_epochs") or 1)
    if options.get("tokens") is not None:
        return parse_count(options["tokens"], name="--tokens") * epochs
    if options.get("num_samples") is None or options.get("mean_tokens") is None:
        return None
    samples = parse_count(options["num_samples"], name="--num-samples")
    return samples * float(options["mean_tokens"]) * epochs


def _untold(what: str) -> None:
    """Nobody listens."""
    del what


def _recommended(
    model: str, gpu: str | Iterable[str], records: Sequence[str | Path], options: dict[str, Any], best: Forecast
) -> tuple[Recommendation | None, str | None]:
    """What to rent, or why that cannot be said (a CPU, a job of one's own machines)."""
    from tunecast.model.read_numbers import whole_number
    from tunecast.recommender import DEFAULT_MAX_GPUS, recommend
    from tunecast.report.words import global_batch

    if options.get("owned"):
        return None, "the GPUs are your own, and nothing is rented; costs are those of electricity"
    kept = {name: value for name, value in options.items() if name not in CHOSEN_BY_RECOMMEND}
    if kept.get("num_gpus") == "auto":
        kept.pop("num_gpus")
    if best.run.tp * best.run.pp * best.run.cp > 1 or options.get("num_gpus") == "auto":
        kept["global_batch"] = global_batch(best)
    names = [name for name in ([gpu] if isinstance(gpu, str) else gpu) if not _own(name)]
    if not names:
        return None, "nobody rents out the devices asked for"
    records = [path for path in records if not _own(_device_of(Path(path)))]
    try:
        asked = kept.get("num_gpus")
        most = None if asked is None else max(DEFAULT_MAX_GPUS, whole_number("num_gpus", asked))
        found = recommend(model, gpu=names, records=records, max_gpus=most, **kept)
    except TunecastError as error:
        return None, str(error)
    return (found, None) if found.front else (None, found.refusal())


def _own(device: str) -> bool:
    """Whether a device is here, or simulated, and so not for rent."""
    return device == "cpu" or device.startswith("mock:")


def as_planned(plan: Forecast, options: dict[str, Any]) -> dict[str, Any]:
    """The options of the run as a recommended plan lays it out."""
    kept = {name: value for name, value in options.items() if name not in CHOSEN_BY_RECOMMEND}
    return kept | {name: getattr(plan.run, name) for name in PLANNED}


def _varied(model: str, best: Forecast, records: Sequence[str | Path], options: dict[str, Any]) -> tuple[Sweep, Sweep]:
    """The tornado of one plan, and its cost over batch and length."""
    from tunecast.sweep import sweep

    own = [path for path in records if _device_of(Path(path)) == best.gpu]
    asked = {**options, "gpu": best.gpu, "records": own}
    limit = best.architecture.max_position or best.run.max_length * 2
    lengths = sorted(
        {round(best.run.max_length * share) for share in GRID_LENGTHS if best.run.max_length * share <= limit}
    )
    over = [f"max_length={_joined(lengths)}", f"per_device_train_batch_size={_joined(GRID_BATCHES)}"]
    free = {name: value for name, value in asked.items() if name not in ("max_length", "per_device_train_batch_size")}
    return sweep(model, analysis="tornado", **asked), sweep(model, over=over, **free)


def _joined(values: Iterable[int]) -> str:
    return ",".join(map(str, values))


def _device_of(path: Path) -> str:
    from tunecast.calibrate.fitted_records import fitted_record

    return fitted_record(path)[0]
