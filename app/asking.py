"""From what a user says to a question and the devices it is asked of: the same for every command that forecasts."""

from __future__ import annotations

from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tunecast.catalogs.errors import InputError

if TYPE_CHECKING:
    from tunecast.model.question import Question
    from tunecast.model.step_source import StepSource
    from tunecast.model.target import Target


def asked_question(
    model: str | Path,
    *,
    gpu: str | Iterable[str],
    records: Iterable[str | Path] = (),
    usd_per_gpu_hour: float | None = None,
    prices: str | Path | Iterable[str | Path] = (),
    achieved_tflops: float | None = None,
    source: StepSource | None = None,
    share_host: bool = False,
    **options: Any,
) -> tuple[Question, list[Target], tuple[str, ...]]:
    """(question, devices, notes on how it was read); raises InputError with what to type instead."""
    from tunecast.asked import options_by_count, read_asked, with_saves
    from tunecast.calibrate.fitted_records import fitted_records
    from tunecast.calibrate.watch.observations import refuse_unused, split_records
    from tunecast.catalogs.price_book import price_book
    from tunecast.model.bounds import check_switches
    from tunecast.model.config_file import model_word
    from tunecast.model.experts_modules import of_age
    from tunecast.model.question import Question
    from tunecast.model.read_numbers import plain_numbers
    from tunecast.model.target import device_ids, resolve_targets
    from tunecast.model.whole_run_options import split_whole_run

    model, options = model_word(model), plain_numbers(options)
    _check_types(model, options.get("num_gpus"))
    names = gpu_names(gpu)
    check_switches(options)
    calibrations, observations = split_records(records)
    around, options = split_whole_run(options)
    options = with_tokenizer(model, options)
    asked = read_asked(model, options, exact=source is not None)
    around, saved = with_saves(around, asked)
    question = Question(
        architecture=of_age(asked.architecture, asked.options),
        options=asked.options,
        option_origins=asked.origins,
        options_on=options_by_count(model, options),
        usd_per_gpu_hour=usd_per_gpu_hour,
        price_book=price_book(several_paths(prices)),
        achieved_tflops=achieved_tflops,
        whole_run=around,
        source=source,
        observations=observations,
    )
    ids = () if share_host else device_ids(names)
    targets = resolve_targets(names, fitted_records(calibrations, ids, records), share_host=share_host)
    refuse_unused(observations, [target.id for target in targets])
    return question, targets, (*asked.notes, *saved)


def several_paths(given: str | Path | Iterable[str | Path]) -> tuple[str | Path, ...]:
    """The paths that were given, of which one may stand alone."""
    return (given,) if isinstance(given, str | Path) else tuple(given)


def gpu_names(gpu: str | Iterable[str]) -> list[str]:
    """The devices that were given, of which one may stand alone."""
    names = [gpu] if isinstance(gpu, str) else list(gpu) if isinstance(gpu, Iterable) else [gpu]
    if not names:
        raise InputError("gpu=[] names no device; give for example gpu='l40s', or gpu='all'.")
    if not all(isinstance(name, str) for name in names):
        raise InputError(f"gpu is {gpu!r}, but it is a word or several; give for example gpu='l40s', or gpu='all'.")
    return names


def _check_types(model: str, num_gpus: Any) -> None:
    """What only Python can get wrong: the command line gives words."""
    if not model.strip():
        raise InputError("The model is an empty word; name one, for example meta-llama/Llama-3.1-8B, or a config.json.")
    if num_gpus not in (None, "auto"):
        from tunecast.model.read_numbers import whole_number

        whole_number("num_gpus", num_gpus)


def with_tokenizer(model: str, options: dict[str, Any]) -> dict[str, Any]:
    """``bytes_per_token`` in place of a tokenizer: the one named, else that beside a local model's config.json."""
    given = {name: value for name, value in options.items() if name != "tokenizer"}
    path = options.get("tokenizer")
    if options.get("dataset") is None:
        if path is not None:
            raise InputError("--tokenizer counts the tokens of a file of data; add --dataset FILE, or leave it out.")
        return given
    from tunecast.model.dataset import NOTHING_TO_TOKENIZE, read_dataset

    if read_dataset(str(options["dataset"])).tokenized:
        if path is not None:
            raise InputError(NOTHING_TO_TOKENIZE)
        return given
    beside = Path(model).parent if Path(model).name == "config.json" else Path(model)
    if path is None and (beside / "tokenizer.json").is_file() and find_spec("tokenizers") is not None:
        path = str(beside / "tokenizer.json")
    if path is None:
        return given
    from tunecast.calibrate.tokenizing import bytes_per_token

    return given | {"bytes_per_token": bytes_per_token(str(options["dataset"]), path)}
