"""What a framework cell says ran: the label of its stack effects, the stack whose defaults apply, and of which age.

Precedence among several names in one cell is the order of ``data/vocabulary_frameworks.json``: what wraps the others
comes first. Versions that the cell states decide the defaults; without one, those of the newest release on the date of
the table; without a date, today's. A range of versions that nobody recorded falls back on plain transformers where the
software runs its code without kernels of its own, and is refused otherwise.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tunecast.calibrate.cell_grammar import folded, pieces_of, software
from tunecast.calibrate.run_table import SkipRowError
from tunecast.calibrate.words import listed
from tunecast.catalogs.errors import InputError
from tunecast.model.stack_versions import chosen_ranges
from tunecast.model.stacks import METHODS, built_stack
from tunecast.model.versions import in_range, version_key

PLAIN = "hf-peft"
TRANSFORMERS = "transformers"
MEGATRON = "megatron"
UNKNOWN = "unknown"
OWN_CODE = ("torchtune", "litgpt")
"""Stacks that run their own models: plain transformers do not stand in for an age of them."""
OWN_LOOP = re.compile(
    r"\b(own|custom|manual|hand ?written|home ?made|bare|plain|raw|py ?torch)( py ?torch)?( train(ing)?)? loop\b"
)
"""A training loop that its authors wrote, as a framework cell calls it."""
NO_TRAINER = re.compile(r"\bno trainer\b|\b(own|custom|in ?house) trainer\b")
"""Words for a program without transformers' Trainer, as its examples call themselves."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Software:
    """The training software of a row."""

    label: str
    stack: str = ""
    """Stack whose defaults a row takes for what it does not say; empty: only what columns and rules say."""
    code: str = ""
    """``transformers`` or ``megatron`` where that code runs."""
    options: Mapping[str, Any] = field(default_factory=dict)
    attention: str = ""
    """The attention kernel that it runs where nothing is said, of software without a stack."""
    fused: str = ""
    """Fused kernels that its code switches on where the model allows them."""
    mixes: bool = False
    """Whether a bare ``bf16`` means mixed precision in it."""
    quantizes: str = ""
    """How it loads a base of which nothing is said, in a sentence; empty: unquantized."""
    method: str = ""
    """Method that the cell names beside the software ("TRL QLoRA notebook"): full, lora or qlora."""
    adds_in_fp32: bool = False
    """Whether its buffer of 16-bit gradients is in fp32 unless told otherwise (Megatron-LM's ``--bf16``)."""
    own_loop: bool = False
    """No Trainer: a bare ``bf16`` is the dtype of its weights alone."""
    trainer: bool = True
    """Whether transformers' Trainer, or one made of it, drives its steps; where nothing is said, too."""
    notes: tuple[str, ...] = ()

    @property
    def loop(self) -> dict[str, bool]:
        """Option of a run that no Trainer drives."""
        return {} if self.trainer else {"trainer_loop": False}

    @property
    def joins(self) -> bool:
        """Whether its layers have one map into attention and one into the feed-forward."""
        return self.code.startswith(MEGATRON)


def software_of(text: str, source_date: str = "") -> Software:
    """The software that a cell names; raises SkipRowError for what is unknown or not built."""
    versions: dict[str, str] = {}
    pieces = pieces_of("framework", text)
    for piece in pieces:
        version, name = str(piece.facts.get("version", "")), piece.facts.get("family", next(reversed(versions), None))
        if name is None:
            continue
        if version and versions.get(str(name)) not in (None, "", version):
            both = f"{versions[str(name)]} and {version}"
            raise SkipRowError(f"framework {text!r} names two versions of {name}, {both}: write the one that ran")
        versions[str(name)] = versions.get(str(name)) or version
    named = [family for family in software()["families"] if family["name"] in versions]
    main = next((family for family in named if "label" in family), None)
    if main is None:
        if text and not any(piece.term.kind == "unstated" for piece in pieces):
            raise SkipRowError(f"framework {text!r} names no training software")
        note = "framework is not stated: transformers' plain operations, with the spread of all stacks."
        return Software(label=UNKNOWN, notes=(note,))
    code = str(main.get("code", ""))
    stack = str(main.get("stack", PLAIN if code == TRANSFORMERS else ""))
    options = dict(main.get("options", {}))
    packages = {str(family["package"]): versions[family["name"]] for family in named if family.get("package")}
    for package, version in packages.items():
        _possible(text, package, version)
    methods = {piece.text for piece in pieces if piece.text in METHODS}
    notes: list[str] = []
    if stack:
        try:
            taken, stack = _aged(stack, packages, source_date, notes, own_kernels=bool(main.get("no_plain")))
        except SkipRowError as unrecorded:
            raise SkipRowError(f"framework {text!r}: {unrecorded}") from unrecorded
        options = {"stack": stack, **taken, **options}
    options |= _added([family for family in named if family is not main])
    fused = str(options.pop("fused_kernels", software()[MEGATRON]["fused_kernels"] if code == MEGATRON else ""))
    return Software(
        label=str(main["label"]),
        stack=stack,
        code=code,
        options=options,
        attention=str(main.get("attention", "")),
        fused=fused,
        mixes=bool(main.get("mixes")),
        quantizes=str(main.get("quantizes", "")),
        method=methods.pop() if len(methods) == 1 else "",
        adds_in_fp32=bool(main.get("adds_in_fp32")),
        own_loop=bool(main.get("own_loop")),
        trainer=_by_trainer(main) and not _without_trainer(text),
        notes=tuple(notes),
    )


def has_own_loop(text: str) -> bool:
    """Whether the cell says that its authors wrote the loop around the software that it names: which tensors that loop
    keeps from step to step, and in which numbers, nobody but its code says."""
    return OWN_LOOP.search(folded(text)) is not None


def trainer_drives(label: str) -> bool:
    """Whether transformers' Trainer drives the software of a label: unless all that is known of it says otherwise."""
    named = [family for family in software()["families"] if family.get("label") == label]
    return not named or any(_by_trainer(family) for family in named)


def _by_trainer(family: Mapping[str, Any]) -> bool:
    return family.get("code") == TRANSFORMERS and not (family.get("own_loop") or family.get("no_trainer"))


def _without_trainer(text: str) -> bool:
    """Whether the cell says that something else than transformers' Trainer drives the steps."""
    return has_own_loop(text) or NO_TRAINER.search(folded(text)) is not None


def attention_of(label: str) -> str:
    """The attention kernel that the software of a label runs where nothing is said; empty where that is not known."""
    return next((str(f.get("attention", "")) for f in software()["families"] if f.get("label") == label), "")


def _possible(text: str, package: str, version: str) -> None:
    """No version is beyond the next major of the newest release that is recorded; NVIDIA numbers torch by months."""
    releases: list[list[str]] = software()["releases"].get(package, [])
    major = re.match(r"\d+", version)
    if package == "torch" or not releases or major is None:
        return
    newest = releases[0][1]
    if int(major[0]) > int(newest.split(".")[0]) + 1:
        raise SkipRowError(
            f"framework {text!r}: {version} is no version of {package}, whose newest known are of the series "
            f"{newest.split('.')[0]}.x: write it as the package has it"
        )


def _added(named: list[dict[str, Any]]) -> dict[str, Any]:
    """Options of kernels that are named beside a trainer; fused ones add up."""
    found: dict[str, Any] = {}
    for family in named:
        more = kernels_added(str(family.get("adds", "")))
        both = [name for each in (found, more) for name in str(each.get("fused_kernels", "")).split(",") if name]
        found |= more | ({"fused_kernels": ",".join(dict.fromkeys(both))} if both else {})
    return found


def kernels_added(name: str) -> dict[str, Any]:
    """Options of a library of kernels that is named beside a trainer, or beside what it leaves to others."""
    return {option: value for option, value in software()["adds"].get(name, {}).items() if option != "source"}


def _aged(
    stack: str, packages: Mapping[str, str], source_date: str, notes: list[str], *, own_kernels: bool
) -> tuple[dict[str, Any], str]:
    """Options that choose the defaults of then, and the stack that has them."""
    source_date = source_date or _age_of(packages)
    wanted = {name: packages.get(name) or _newest(name, source_date) for name in built_stack(stack).get("packages", {})}
    found: list[str] = []
    for name, version in wanted.items():
        if version is None:
            continue
        if _recorded(stack, name, version):
            found.append(f"{name}={version}")
        elif stack == PLAIN:
            oldest = _oldest(stack, name)
            found.append(f"{name}={oldest}")
            then = version if packages.get(name) else f"of {source_date}"
            notes.append(f"Defaults of {name} {then} are not recorded: those of {oldest}, the oldest that are.")
        elif own_kernels or stack in OWN_CODE:
            then = version if packages.get(name) else f"of {source_date}"
            raise SkipRowError(f"defaults of {name} {then} are not recorded, the oldest are of {_oldest(stack, name)}")
        else:
            then = version if packages.get(name) else f"of {source_date}"
            notes.append(f"Defaults of {name} {then} are not recorded: those of plain transformers are taken.")
            return _aged(PLAIN, packages, source_date, notes, own_kernels=False)
    dated = [name for name, version in wanted.items() if version not in (None, "0") and not packages.get(name)]
    if dated not in ([], ["torch"]):
        missing = f"The version of {listed(dated)} is not" if any(packages.values()) else "No version is"
        notes.append(f"{missing} stated: defaults of the newest release by {source_date}.")
    options: dict[str, Any] = {"stack_version": ",".join(found)} if found else {}
    stated = packages.get(TRANSFORMERS)
    if stated and stack != PLAIN:
        options["hf_code"] = code_of(stated)
    return options, stack


def code_of(version: str) -> str:
    """Age of Hugging Face's code by the version of transformers."""
    ranges: list[list[str]] = software()["hf_code"]["ranges"]
    return next(code for first, code in ranges if in_range(version, f">={first}"))


def _recorded(stack: str, package: str, version: str) -> bool:
    try:
        chosen_ranges(stack, f"{package}={version}")
    except InputError:
        return False
    return True


def _oldest(stack: str, package: str) -> str:
    """First version of the oldest recorded range."""
    oldest = built_stack(stack)["packages"][package][-1]["versions"]
    return str(min(re.findall(r">=([\d.]+)", oldest), key=version_key))


def _age_of(packages: Mapping[str, str]) -> str:
    """The day when stated versions were the newest of their range: that on which the next range began; empty: today's.

    Of several packages the oldest decides, for what was installed beside it.
    """
    ends = []
    for name, version in packages.items():
        later = [
            date for date, first in software()["releases"].get(name, []) if version and in_range(version, f"<{first}")
        ]
        ends += later[-1:]
    return min(ends, default="")


def _newest(package: str, source_date: str) -> str | None:
    """First version of the newest recorded range on a date; empty: older than all; None: no date, today's."""
    releases: list[list[str]] = software()["releases"].get(package, [])
    day = last_day(source_date)
    if not day or not releases:
        return None
    return next((version for date, version in releases if date <= day), "0")


def last_day(source_date: str) -> str:
    """The last day that a date may mean: ``2025`` is 2025-12-31, ``2023-10 to 2024-01`` is 2024-01-31."""
    dates = re.findall(r"\b(20\d\d)(?:-(\d\d))?(?:-(\d\d))?\b", source_date)
    if not dates:
        return ""
    year, month, day = dates[-1]
    return f"{year}-{month or '12'}-{day or '31'}"


def had_sdpa(source_date: str) -> bool:
    """Whether transformers took sdpa by default when the table was written."""
    since: str = software()["sdpa_since"]["date"]
    day = last_day(source_date)
    return not day or day >= since
