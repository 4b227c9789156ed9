"""Plans written to files: training configurations and rental tasks, each saying in its head what it is."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tunecast.catalogs.errors import InputError, NotSupportedError, UnknownNameError
from tunecast.catalogs.files import refuse_one_file_twice, write_all
from tunecast.model.units import HOUR_S

if TYPE_CHECKING:
    from tunecast.model.forecast import Forecast
    from tunecast.model.run import Run
    from tunecast.recommendation import Picked, Recommendation
    from tunecast.rental_tasks import Task

PICKS = ("cheapest", "balance", "fastest")
TRAINING = ("trl", "axolotl", "llama-factory")
RENTAL = ("skypilot", "dstack")
KINDS = (*TRAINING, *RENTAL)


CUT_CROSS_ENTROPY = (
    "'cut-cross-entropy[transformers] @ git+https://github.com/axolotl-ai-cloud/ml-cross-entropy.git@4dfa522'"
)
"""The fork that axolotl's plugin asks for (integrations/cut_cross_entropy/__init__.py of 0.19)."""
NOT_SAID = (
    "Not the plan's but this file's own, and not those of a file that was asked about: learning rate, schedule, "
    "lora_alpha, weight decay, seeds, evaluation and the data's format."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """One file that was written."""

    kind: str
    path: Path
    notes: tuple[str, ...] = ()
    """What the file runs otherwise than the plan."""


def read_asked_files(asked: Sequence[str], pick: str) -> list[tuple[str, Path]]:
    """``KIND=FILE.yaml`` texts; raises InputError, before any work is done, for what cannot be written."""
    if pick not in PICKS:
        raise UnknownNameError("pick", pick, PICKS, hint=f"--pick takes {', '.join(PICKS)}.")
    found = []
    for text in asked:
        kind, _, name = text.partition("=")
        if kind not in KINDS:
            raise UnknownNameError("file to write", kind, KINDS, hint=f"--write takes {', '.join(KINDS)}.")
        path = Path(name)
        if path.suffix.lower() not in (".yaml", ".yml"):
            raise InputError(f"--write {text} names no YAML file; type for example --write {kind}={kind}.yaml.")
        found.append((kind, path))
    refuse_one_file_twice(
        (f"--write {text.partition('=')[0]}", path) for text, (_, path) in zip(asked, found, strict=True)
    )
    return found


def training_kinds(asked: Sequence[tuple[str, Path]]) -> tuple[str, ...]:
    """Kinds of training file that are written: TRL's beside rental tasks alone, none where nothing is written."""
    kinds = [kind for kind, _ in asked]
    found = tuple(kind for kind in TRAINING if kind in kinds)
    return found or (TRAINING[:1] if kinds else ())


def write_plan(found: Recommendation, asked: Sequence[tuple[str, Path]], pick: str) -> list[Written]:
    """Write the picked plan, all files or none; a rental task without a training file beside it gets TRL's."""
    picked = getattr(found, pick)
    if picked is None or not asked:
        return []
    wanted = list(asked)
    kinds = {kind: path for kind, path in wanted}
    training = training_kinds(wanted)[0]
    if training not in kinds:
        first = wanted[0][1]
        kinds[training] = first.with_name(f"{first.name.split('.')[0]}-train.yaml")
        wanted.insert(0, (training, kinds[training]))
    made = [
        _training(found, picked, pick, kind, path)
        if kind in TRAINING
        else _task(found, picked, pick, kind, path, training, kinds[training])
        for kind, path in wanted
    ]
    try:
        write_all({each.path: text for each, text in made})
    except OSError as error:
        raise InputError(f"{error.filename} cannot be written ({error.strerror}); name another file.") from error
    return [each for each, _ in made]


def head_lines(found: Recommendation, picked: Picked, pick: str) -> list[str]:
    """What the file is, for its reader."""
    forecast, candidate = picked.forecast, picked.candidate
    assert forecast.total_time_h is not None
    assert forecast.cost_usd is not None
    time, cost = forecast.total_time_h, forecast.cost_usd
    hours = f"{time.value:.2f} h (80%: {time.low:.2f} to {time.high:.2f})"
    dollars = f"${cost.value:.2f} (${cost.low:.2f} to ${cost.high:.2f})"
    return [
        f"{found.model} on {candidate.num_gpus} x {forecast.gpu}: the {pick} plan of tunecast recommend.",
        f"Forecast: {hours}, {dollars}, {found.steps}.",
    ]


def _training(found: Recommendation, picked: Picked, pick: str, kind: str, path: Path) -> tuple[Written, str]:
    from tunecast.model.amount import resolve_amount
    from tunecast.model.configs.write import DATASET, config_for
    from tunecast.model.configs.write_back import differences
    from tunecast.model.rows import groups_rows, unpacked_rows

    forecast = picked.forecast
    amount = resolve_amount(forecast.run, {**found.amount_options})
    assert amount is not None
    packed, cut = unpacked_rows(forecast.run, found.amount_options) is None, _cuts(forecast.run, found.amount_options)
    mapping = config_for(
        kind,
        forecast.architecture,
        forecast.run,
        amount.steps,
        packed=packed,
        cut=cut,
        grouped=groups_rows(found.amount_options),
        epochs=amount.epochs,
        weights=found.weights,
        sees=_sees(found.model),
    )
    saves, resumed = saved(kind, found, forecast)
    mapping |= saves
    other = differences(kind, mapping, forecast.architecture, forecast.run, packed=packed)
    notes = [
        f"{name} is {_shown(value)} in this file's framework, {_shown(getattr(forecast.run, name))} in the forecast"
        for name, value in other.items()
    ]
    notes += own_forecast(found, picked, kind, other)
    if packages := packages_of(forecast.run):
        notes.append(f"the forecast is of a machine with {' and '.join(packages)}: pip install {' '.join(packages)}")
    notes += resumed
    if (
        kind == "axolotl"
        and packed
        and mapping["attn_implementation"] == "sdpa"
        and forecast.run.compute_dtype == "bf16"
    ):
        notes.append(
            "axolotl calls packed rows under sdpa in bf16 unsupported on cards before Hopper (schemas/config.py: the "
            "loss may be 0); --attn-implementation flash_attention_2 keeps their samples apart"
        )
    rows = "rows are packed" if packed else "every sample is a row"
    if cut and kind == "axolotl":
        notes.append(
            f"axolotl's type completion makes pieces of samples longer than {forecast.run.max_length} tokens, which "
            "the forecast cuts, so that max_steps ends the training before the data; other types cut them"
        )
    elif cut:
        rows += f", and samples are cut at {forecast.run.max_length} tokens, as the forecast counts them"
    lines = [*head_lines(found, picked, pick), f"Put your data where {DATASET} stands; {rows}.", NOT_SAID]
    return Written(kind=kind, path=path, notes=tuple(notes)), _dumped([*lines, *notes], mapping)


CURES = {"axolotl": "--stack axolotl --loss-type cut_cross_entropy", "llama-factory": "--stack liger"}
"""What keeps logits small in files that cannot say the plan's own loss path."""
AS_MUCH = 0.01
"""Share by which time and money of a file may differ from its plan's untold."""


def own_forecast(found: Recommendation, picked: Picked, kind: str, other: Mapping[str, Any]) -> list[str]:
    """What the file takes where its framework runs otherwise than the plan, as far as that can be forecast.

    Raises NotSupportedError for a file whose run does not fit."""
    if not other or found.otherwise is None:
        return []
    from tunecast.model.configs.write_limits import a_file

    try:
        own = found.otherwise(picked, other)
    except (InputError, NotSupportedError):  # a layout that only its framework has
        return []
    cards = f"{picked.candidate.num_gpus} x {own.gpu}"
    if own.verdict == "no":
        instead = CURES[kind] if "loss_type" in other and kind in CURES else f"--stack {kind}"
        raise NotSupportedError(
            f"{a_file(kind)} of this plan does not fit {cards}, since it runs with {_in_words(other)}; type {instead}, "
            "which its file says."
        )
    told = []
    if (own.fit_probability or 0.0) < found.limits.min_fit_confidence:
        told.append(f"so this file fits {cards} with a probability of {own.fit_probability or 0.0:.0%} alone")
    planned = picked.forecast
    pairs = ((own.total_time_h, planned.total_time_h), (own.cost_usd, planned.cost_usd))
    if any(mine and theirs and abs(mine.value / theirs.value - 1.0) >= AS_MUCH for mine, theirs in pairs):
        assert own.total_time_h is not None
        assert own.cost_usd is not None
        told.append(f"so this file's own forecast is {own.total_time_h.value:.2f} h and ${own.cost_usd.value:.2f}")
    return told


def _in_words(changes: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {_shown(value)}" for name, value in changes.items() if name != "stack_version")


def saved(kind: str, found: Recommendation, forecast: Forecast) -> tuple[dict[str, Any], list[str]]:
    """Fields of the checkpoints that the plan's time and price count, and on an interruptible machine what makes use of
    them: those asked for, else as often as its forecast proposes."""
    cuts = None if forecast.whole_run is None else forecast.whole_run.interruptions
    steps = found.save_steps
    if cuts is not None and cuts.job.interval_h is not None and forecast.step_time_s is not None:
        steps = max(round(cuts.job.interval_h * HOUR_S / forecast.step_time_s.value), 1)
    if steps is None:
        return {"save_strategy": "no"}, []  # else trainers save every 500 steps, which nothing here counts
    limit = 1 if cuts is not None and found.save_total_limit is None else found.save_total_limit
    fields: dict[str, Any] = {"save_strategy": "steps", "save_steps": steps}
    if limit is not None:
        fields["save_total_limit"] = limit
    if cuts is None:
        return fields, []
    if kind == "axolotl":
        return fields | {"auto_resume_from_checkpoints": True}, []
    if kind == "llama-factory":  # finds its last checkpoint by itself (hparams/parser.py)
        return fields, []
    resumed = "after an interruption, and only then, add --resume_from_checkpoint out/checkpoint-N, as is forecast"
    return fields, [resumed]


def _sees(model: str) -> bool:
    """Whether the catalog says that a model has parts beside its text decoder."""
    from tunecast.catalogs.models import find_model

    try:
        return bool(find_model(model).vision_params)
    except UnknownNameError:
        return False


def _cuts(run: Run, options: Mapping[str, Any]) -> bool:
    """Whether the data have samples that are longer than a row, which the forecast cuts."""
    from tunecast.model.dataset import bytes_per_token
    from tunecast.model.rows import trained_data

    if options.get("dataset") is None:
        return False
    return trained_data(options).longer(bytes_per_token(options).value, run.max_length) > 0


def _shown(value: Any) -> str:
    """A field's value in words."""
    return (", ".join(map(str, value)) or "none") if isinstance(value, tuple) else str(value)


def packages_of(run: Run) -> tuple[str, ...]:
    """What pip calls the packages that the plan's kernels of linear attention come from."""
    from tunecast.model.configs.write_back import installed_packages
    from tunecast.model.fused import PIP_NAMES

    return tuple(PIP_NAMES[part] for part in installed_packages(run))


def _task(
    found: Recommendation, picked: Picked, pick: str, kind: str, path: Path, training: str, config: Path
) -> tuple[Written, str]:
    from tunecast.model.configs.write import attention_written
    from tunecast.model.configs.write_limits import offloads_alone
    from tunecast.model.published_weights import published_bytes
    from tunecast.model.question import STORED_AS
    from tunecast.model.resolve_parallel import ZERO
    from tunecast.rental_tasks import TASKS, Task

    forecast, gpu = picked.forecast, picked.candidate.target.gpu
    if gpu is not None and gpu.vendor != "nvidia":
        raise NotSupportedError(
            f"--write {kind} of a plan on {gpu.id} is not built: its machine needs an image with PyTorch for ROCm; "
            "take another plan with --pick, or name NVIDIA's cards with --gpu."
        )
    machines = int(picked.candidate.price.offer.get("instances") or 1)
    if machines > 1:  # Every trainer must be told which it runs on and where the first is; calibrate measures one.
        raise NotSupportedError(
            f"A rental task of {machines} machines is not built yet: each would have to start its own part of the job; "
            f"take a plan of one machine with --max-gpus {math.ceil(picked.candidate.num_gpus / machines)}, or write "
            "the training file alone."
        )
    task = Task(
        candidate=picked.candidate,
        model=found.model,
        weights_bytes=published_bytes(forecast.architecture, found.amount_options.get(STORED_AS)),
        config_kind=training,
        config_file=config.name,
        packages=(*packages_of(forecast.run), *trainers_packages(training, forecast.run)),
        saved_bytes=saved_bytes(found, forecast),
        plan=f"{forecast.run} {found.steps}",
        deepspeed=forecast.run.sharding in ZERO or offloads_alone(forecast.run),
        fused_kernels=forecast.run.fused_kernels,
        attention=attention_written(forecast.run),
    )
    mapping = TASKS[kind](task)
    sky = "sky jobs launch" if picked.candidate.kind == "spot" else "sky launch"  # which starts it anew after a cut
    start = f"{sky} {path.name}" if kind == "skypilot" else f"dstack apply -f {path.name}"
    lines = [
        *head_lines(found, picked, pick),
        *told_of_machine(kind, task),
        f"Start it in the folder of {config.name}: {start}",
        "It measures the card before it trains (tunecast calibrate, some minutes), which the forecast does not count.",
        "TUNECAST is what pip installs: git+https://... of your own clone, unless a package index of yours has it.",
    ]
    return Written(kind=kind, path=path), _dumped(lines, mapping)


def trainers_packages(kind: str, run: Run) -> tuple[str, ...]:
    """What pip calls packages that the training file switches on and its trainer does not bring; axolotl brings
    Liger's and torchao (its pyproject.toml)."""
    from tunecast.model.optimizer_torchao import TORCHAO

    liger = run.stack == "liger" and kind != "axolotl"
    torchao = run.optim in TORCHAO and kind != "axolotl"
    cut = run.loss_type == "cut_cross_entropy" and kind == "axolotl"
    split = run.cp > 1 and kind == "axolotl"
    packages = {"liger-kernel": liger, "torchao": torchao, CUT_CROSS_ENTROPY: cut, "ring-flash-attn": split}
    return tuple(name for name, needed in packages.items() if needed)


def saved_bytes(found: Recommendation, forecast: Forecast) -> float:
    """Checkpoints that are on the disk at once, one more than stay while the last is written, and the result."""
    from tunecast.model.amount import resolve_amount
    from tunecast.model.run_work import trained_and_state

    model, state = trained_and_state(forecast.architecture, forecast.run)
    fields, _ = saved("trl", found, forecast)
    if "save_steps" not in fields:
        return model
    amount = resolve_amount(forecast.run, {**found.amount_options})
    assert amount is not None
    made = -(-amount.steps // fields["save_steps"])
    return model + float(min(made, fields.get("save_total_limit", made) + 1)) * (model + state)


def told_of_machine(kind: str, task: Task) -> list[str]:
    """What the task cannot say of the plan's machine, and what outlives it."""
    lines = []
    if kind == "skypilot" and task.unsaid_provider:
        lines.append(
            f"The plan's price is that of {task.unsaid_provider}, which SkyPilot does not know: it takes the cheapest "
            f"of your clouds up to ${task.most_usd_per_h:.2f} an hour, perhaps with the card in another form."
        )
    if task.interruptible:
        lines.append(f"Checkpoints go into the bucket {task.bucket}, and a job that was cut goes on with the last.")
    return lines


def _dumped(head: Iterable[str], mapping: Mapping[str, Any]) -> str:
    """YAML with a head of comments; text of several lines as a block."""
    import yaml

    class Dumper(yaml.SafeDumper):
        """Blocks for text of several lines."""

    def as_block(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
        return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)

    Dumper.add_representer(str, as_block)
    body = yaml.dump(dict(mapping), Dumper=Dumper, sort_keys=False, width=120)
    return "".join(f"# {line}\n" for line in head) + body


def with_written(found: Recommendation, written: Sequence[Written]) -> Recommendation:
    """The recommendation, telling what was written."""
    lines = [f"wrote {each.path} ({each.kind}){': ' if each.notes else ''}{'; '.join(each.notes)}" for each in written]
    return replace(found, notes=(*found.notes, *lines))
