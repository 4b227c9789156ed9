"""A device that a forecast is made for: catalog facts, this CPU, or a simulated GPU."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from tunecast.catalogs.errors import InputError
from tunecast.catalogs.gpus import Gpu, find_gpu, load_gpus, training_dtype
from tunecast.model.shared_host import HostRecord, host_record

MOCK_PREFIX = "mock:"


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """One kind of device."""

    id: str
    """Catalog id, ``cpu`` or ``mock:<id>[#seed]``."""
    gpu: Gpu | None
    """Catalog facts; those of the simulated card for a mock; None for a CPU."""
    usable_bytes: float | None
    peaks: Mapping[str, float]
    """Dense peak FLOP/s by dtype; for a CPU the measured GEMM ceiling."""
    record: Mapping[str, Any] | None = None
    """The calibration record of this very device, if one was given."""
    shared: HostRecord | None = None
    """Of a device without a record: that of another card in the same machine (``--share-host``)."""

    @property
    def platform(self) -> str:
        """``cuda`` or ``cpu``: which code path the training code takes."""
        return "cpu" if self.gpu is None else "cuda"

    @property
    def compute_capability(self) -> str | None:
        """Of a card, as the catalog names it; None for a CPU."""
        return None if self.gpu is None else self.gpu.compute_capability

    @property
    def has_bf16(self) -> bool:
        """Whether bf16 runs in hardware."""
        return self.gpu is None or training_dtype(self.gpu) == "bf16"

    @property
    def emulates_bf16(self) -> bool:
        """Whether this is a CPU that multiplies bf16 many times slower than fp32, as its record says."""
        return self.gpu is None and self.record is not None and emulates_bf16(self.record["hardware"].get("host"))

    @property
    def is_mock(self) -> bool:
        """Whether this is a simulated GPU."""
        return self.id.startswith(MOCK_PREFIX)


def emulates_bf16(host: Mapping[str, Any] | None) -> bool:
    """What a record's facts of the host say of a CPU; of records from before it was asked, no."""
    return bool((host or {}).get("emulates_bf16", False))


def resolve_targets(
    names: Iterable[str], records: Mapping[str, Mapping[str, Any]], *, share_host: bool = False
) -> list[Target]:
    """Devices by name, in the order asked, each once. `records` maps a device id to its record.

    ``all``, and no name at all, stands for every catalog GPU and the devices of the records. A record that no requested
    device can use is refused, unless its host is theirs (`share_host`).
    """
    asked = list(names) or ["all"]
    ids = list(dict.fromkeys(_expand([*asked, *(records if "all" in asked else ())])))
    if share_host:
        return _sharing(ids, records)
    unused = [gpu for gpu in records if gpu not in ids]
    if unused:
        shares = len(records) == 1 and unused[0] != "cpu" and _hostless(ids, records) and not _apart(ids, records)
        alone = ", or take the host alone from it: estimate --share-host" if shares else ""
        raise InputError(
            f"The record was measured on {unused[0]}, which is not among the devices asked for ({_short(ids)}); "
            f"add --gpu {unused[0]}, or leave the record out{alone}."
        )
    return [_target(gpu_id, records.get(gpu_id)) for gpu_id in ids]


def _sharing(ids: list[str], records: Mapping[str, Mapping[str, Any]]) -> list[Target]:
    """Every device without a record has the host of the one that was given; simulated hosts are no real ones."""
    shared = host_record(records)
    others, apart = _hostless(ids, records), _apart(ids, records)
    if apart:
        raise InputError(
            f"--share-host would give {apart[0]} the host of {shared.gpu}, and one of the two is simulated; leave "
            "--share-host out."
        )
    targets = [_target(gpu_id, records.get(gpu_id)) for gpu_id in ids]
    return [replace(target, shared=shared) if target.id in others else target for target in targets]


def _hostless(ids: list[str], records: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """The cards that no record is of."""
    return [gpu_id for gpu_id in ids if gpu_id not in records and gpu_id != "cpu"]


def _apart(ids: list[str], records: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Those of them that are in no machine with the card of the one record: one is simulated, the other real."""
    simulated = [name.startswith(MOCK_PREFIX) for name in records]
    return [other for other in _hostless(ids, records) if [other.startswith(MOCK_PREFIX)] != simulated]


def device_ids(names: Iterable[str]) -> tuple[str, ...]:
    """The devices that names stand for; none where all are asked for, or none is named."""
    asked = list(names)
    return () if not asked or "all" in asked else tuple(_expand(asked))


def _expand(names: list[str]) -> Iterable[str]:
    for name in names:
        if name == "all":
            yield from load_gpus()
        elif name == "cpu":
            yield name
        elif name.startswith(MOCK_PREFIX):
            yield canonical_mock(name)
        else:
            yield find_gpu(name).id


def canonical_mock(name: str) -> str:
    """``mock:<alias>[#seed][@variant]`` with the catalog id and the seed (0 unless given)."""
    body, _, variant = name.removeprefix(MOCK_PREFIX).partition("@")
    alias, _, seed = body.partition("#")
    return f"{MOCK_PREFIX}{find_gpu(alias).id}#{seed or 0}" + (f"@{variant}" if variant else "")


def mocked_gpu(mock_id: str) -> Gpu:
    """Catalog facts that a mock borrows."""
    return find_gpu(mock_id.removeprefix(MOCK_PREFIX).partition("@")[0].partition("#")[0])


def _target(gpu_id: str, record: Mapping[str, Any] | None) -> Target:
    if gpu_id == "cpu":
        return _cpu_target(record)
    gpu = mocked_gpu(gpu_id) if gpu_id.startswith(MOCK_PREFIX) else load_gpus()[gpu_id]
    measured = None if record is None else record["hardware"].get("memory_bytes")
    usable = gpu.usable_bytes if measured is None else measured
    return Target(id=gpu_id, gpu=gpu, usable_bytes=usable, peaks=gpu.peaks, record=record)


def _cpu_target(record: Mapping[str, Any] | None) -> Target:
    if record is None:
        raise InputError(
            "No prior exists for a CPU: measure this one first (tunecast calibrate --device cpu) "
            "and add --record FILE, or name GPUs with --gpu."
        )
    return Target(
        id="cpu",
        gpu=None,
        usable_bytes=record["hardware"].get("memory_bytes"),
        peaks=_measured_ceiling(record),
        record=record,
    )


def _measured_ceiling(record: Mapping[str, Any]) -> dict[str, float]:
    """Fastest measured matrix product by dtype, FLOP/s: what a CPU's MFU is relative to."""
    ceiling: dict[str, float] = {}
    for trial in record["trials"]:
        if trial["bench"] != "gemm" or trial["outcome"] != "ok" or not trial["samples_s"]:
            continue
        p = trial["params"]
        rate = 2.0 * p["m"] * p["n"] * p["k"] / min(trial["samples_s"])
        ceiling[p["dtype"]] = max(ceiling.get(p["dtype"], 0.0), rate)
    return ceiling


def _short(ids: list[str]) -> str:
    return ", ".join(ids) if len(ids) <= 4 else f"{', '.join(ids[:3])} and {len(ids) - 3} more"
