"""Which trials make which curve, and the forms that are tried for it, with their physical bounds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from tunecast.calibrate.fit_curves import FormSpec
from tunecast.calibrate.fit_tiles import learn_tiles
from tunecast.calibrate.fit_trials import Observation, Trial, observations
from tunecast.model.curve_names import kind_of
from tunecast.model.curves import WIDE_HEAD, Params
from tunecast.model.factors import Curve
from tunecast.model.operation import CHOSEN, EFFICIENT, MASKED, Kind
from tunecast.model.time import curve_key
from tunecast.model.units import KIB, MIB

CURVE_BENCHES = ("memory", "walk", "gemm", "grouped", "attention", "masked", "dequant", "loss")
"""Memory first: other forms start from its bandwidth."""
TRAFFIC = ("copy", "add")
"""Memory operations that read and write, as training kernels do; pure reads and writes are reported apart."""
POSITIVE_S = 1e-9
"""Smallest floor of a kernel that a fit may find: a clock tick."""
CACHE_REACH = (256 * KIB, 1024 * MIB)
"""Last-level caches of the devices sold today: from a core's L2 to a server processor's L3."""


def curve_observations(trials: Sequence[Trial]) -> dict[str, list[Observation]]:
    """Observations by curve name: memory first, within a kind plain kernels, then the dtype with most trials."""
    groups: dict[str, list[Observation]] = {}
    for bench in CURVE_BENCHES:
        for found in observations(trials, bench):
            if bench == "memory" and found.operation.name not in TRAFFIC:
                continue
            groups.setdefault(curve_key(found.operation), []).append(found)
    rank = {bench: place for place, bench in enumerate(CURVE_BENCHES)}
    return dict(sorted(groups.items(), key=lambda item: (rank[kind_of(item[0])], "-" in item[0], -len(item[1]))))


def specs_for(
    name: str,
    found: Sequence[Observation],
    *,
    processors: int | None,
    fitted: Mapping[str, Curve],
    issue_s: float | None = None,
) -> list[FormSpec]:
    """The forms to try for one curve, started at what the trials show and at the curves already `fitted`.

    ``issue_s`` is the host's time per call where it bounded the shortest trials (`host_plateau`), 0 where it did not;
    None on a device that is its own host, whose kinds have floors of their own.
    """
    memory = fitted.get("memory")
    floor_s = memory.params["t0_s"] if memory and issue_s is not None else None
    kin = [curve for other, curve in fitted.items() if _family(other) == _family(name)]
    if name.startswith(FEW_SHAPES):
        kin = kin or [curve for other, curve in fitted.items() if other == _plain(name)]
    if len(found) < FEW and kin and "flops_per_s" in kin[0].params:
        return [borrowed(found, kin[0])]
    if kind_of(name) == Kind.GEMM:
        return _gemm_specs(found, processors=processors, memory=memory, floor_s=floor_s, issue_s=issue_s)
    if kind_of(name) == Kind.ATTENTION:
        counted = None if name.startswith(FULL) else processors
        specs = _attention_specs(found, processors=counted, memory=memory, floor_s=floor_s)
        return [_issued(spec, issue_s) for spec in specs]
    if name == "dequant":
        return [_issued(_elements_spec(found, memory, floor_s), issue_s)]
    if name == "memory":
        return [_issued(spec, issue_s) for spec in _memory_specs(found)]
    return [_traffic_spec(found, memory)]


FULL = tuple(f"attention-{kernel}." for kernel in (MASKED, CHOSEN))
"""Attention that runs all pairs."""
FEW_SHAPES = (*FULL, f"attention-{EFFICIENT}.")
"""Attention whose few trials may take their shape from the device's own kernel."""


def _plain(name: str) -> str:
    """The curve of the device's own kernel for the same kind, dtype and pass."""
    return f"{kind_of(name)}.{name.partition('.')[2]}"


def _issued(spec: FormSpec, issue_s: float | None) -> FormSpec:
    """The form behind a host that takes ``issue_s`` per call."""
    return replace(spec, fixed=spec.fixed | {"issue_s": issue_s}) if issue_s else spec


def _floored(spec: FormSpec, floor_s: float | None, fastest_s: float) -> FormSpec:
    """The form with the floor that all kernels share, read off the kernels that only move bytes, and one of its own."""
    if floor_s is None:
        return spec
    start = {name: value for name, value in spec.start.items() if name != "t0_s"} | {"own_s": fastest_s / 8}
    reach = {name: ends for name, ends in spec.reach.items() if name != "t0_s"} | {"own_s": (POSITIVE_S, fastest_s)}
    return replace(spec, start=start, reach=reach, fixed=spec.fixed | {"t0_s": floor_s})


def _family(name: str) -> tuple[str, str]:
    """Kind and pass: curves that differ in dtype only."""
    kind, *rest = name.split(".")
    return kind, rest[-1] if len(rest) > 1 else ""


def _fastest(found: Sequence[Observation]) -> float:
    return min(o.seconds for o in found)


def _floor_start(found: Sequence[Observation], memory: Curve | None) -> float:
    """Where the fit of a kind's own floor starts, and stays unless trials say otherwise: a quarter of the fastest
    trial; of few trials, which cannot tell a floor from a rate, no more than kernels that only move bytes have."""
    quarter = _fastest(found) / 4
    return quarter if memory is None or len(found) >= FEW else min(quarter, memory.params["t0_s"])


FEW = 8
"""Below this many trials only the rate is fitted; the rest comes from the curve of the same kind that has most."""


def borrowed(found: Sequence[Observation], like: Curve) -> FormSpec:
    """The form and shape effects of another curve, at a rate of its own."""
    rate = max(o.operation.flops / o.seconds for o in found)
    fixed = {name: value for name, value in like.params.items() if name != "flops_per_s" and "gp_" not in name}
    if "t0_s" in fixed:  # a floor is below every time that was measured
        fixed["t0_s"] = min(fixed["t0_s"], _fastest(found) / 4)
    return FormSpec(
        form=like.form, start={"flops_per_s": rate}, reach={"flops_per_s": (rate / 2, rate * 4)}, fixed=fixed
    )


def _gemm_specs(
    found: Sequence[Observation],
    *,
    processors: int | None,
    memory: Curve | None,
    floor_s: float | None,
    issue_s: float | None,
) -> list[FormSpec]:
    rate = max(o.operation.flops / o.seconds for o in found)
    moved = memory.params["bytes_per_s"] if memory else max(o.operation.bytes / o.seconds for o in found)
    start: Params = {
        "flops_per_s": rate,
        "bytes_per_s": moved,
        "k0": 32.0,
        "nn": 1.0,
        "tn": 1.0,
        "t0_s": _floor_start(found, memory),
    }
    reach = {"nn": (0.5, 3.0), "tn": (0.5, 3.0), "flops_per_s": (rate / 2, rate * 2), "k0": (1e-2, 2048.0)}
    reach |= {"t0_s": (POSITIVE_S, _fastest(found)), "bytes_per_s": (moved / 4, moved * 8)}
    fixed = {n: v for n, v in memory.params.items() if n.startswith("cache")} if memory else {}
    smooth = FormSpec(
        form="gemm",
        start=start | {"tile": 32.0, "area": 1e5},
        reach=reach | {"tile": (1e-2, 512.0), "area": (1.0, 1e8)},
        fixed=fixed,
    )
    smooth = _issued(_floored(smooth, floor_s, _fastest(found)), issue_s)
    if not processors:
        return [smooth]
    waves = FormSpec(
        form="gemm_waves",
        start=start | {"quantised": 0.5, "half": 32.0},
        reach=reach | {"quantised": (1e-3, 1.0), "half": (1e-2, 512.0)},
        fixed=fixed | {"processors": float(processors)},
    )
    waves = _issued(_floored(waves, floor_s, _fastest(found)), issue_s)
    own = replace(waves, fixed=waves.fixed | learn_tiles(waves, found))
    return [smooth, waves, own]


def _attention_specs(
    found: Sequence[Observation], *, processors: int | None, memory: Curve | None, floor_s: float | None
) -> list[FormSpec]:
    """Rates that fall with short and narrow work; where processors are counted, also blocks scheduled over them. Those
    of a causal kernel differ in length; kernels that run all pairs have no `processors` here."""
    rate = max(o.operation.flops / o.seconds for o in found)
    sizes = {o.operation.shape[5] for o in found}
    first_s = _floor_start(found, memory)
    start: Params = {"flops_per_s": rate, "length0": 100.0, "t0_s": first_s, "work0_flops": rate * 1e-5}
    reach = {"flops_per_s": (rate / 2, rate * 4), "length0": (1e-2, 8192.0), "t0_s": (POSITIVE_S, _fastest(found))}
    if len(sizes) > 1:
        start, reach = start | {"head_dim0": 16.0}, reach | {"head_dim0": (1e-2, 1024.0)}
    if max(sizes) > WIDE_HEAD and not processors:
        start, reach = start | {"wide": 0.1}, reach | {"wide": (1e-3, 3.0)}
    smooth = FormSpec(form="attention", start=start, reach=reach)
    if floor_s is not None:
        start = {name: value for name, value in start.items() if name != "t0_s"}
        smooth = replace(smooth, start=start, fixed={"t0_s": floor_s})
    if not processors or len(found) < FEW:
        return [smooth]
    start = {name: value for name, value in start.items() if name != "work0_flops"} | {"tail": 0.3}
    reach |= {"tail": (1e-2, 1.0)}
    if max(sizes) > WIDE_HEAD:
        start, reach = start | {"wide": 0.1}, reach | {"wide": (1e-3, 3.0)}
    fixed = smooth.fixed | {"processors": float(processors)}
    return [smooth, FormSpec(form="attention", start=start, reach=reach, fixed=fixed)]


def _elements_spec(found: Sequence[Observation], memory: Curve | None, floor_s: float | None) -> FormSpec:
    rate = max(o.operation.shape[0] / o.seconds for o in found)
    spec = FormSpec(
        form="elements",
        start={"bytes_per_s": rate, "t0_s": _floor_start(found, memory)},
        reach={"t0_s": (POSITIVE_S, _fastest(found))},
    )
    return _floored(spec, floor_s, _fastest(found))


def _memory_specs(found: Sequence[Observation]) -> list[FormSpec]:
    rate = max(found, key=lambda o: o.operation.bytes)
    bandwidth = rate.operation.bytes / rate.seconds
    plain = FormSpec(
        form="bandwidth",
        start={"bytes_per_s": bandwidth, "t0_s": _fastest(found) / 2},
        reach={"t0_s": (POSITIVE_S, _fastest(found))},
    )
    cached = replace(
        plain,
        start=plain.start | {"cache_bytes": 32.0 * MIB, "cache_bytes_per_s": 3 * bandwidth, "cache_width": 0.5},
        reach=plain.reach
        | {"cache_bytes": CACHE_REACH, "cache_bytes_per_s": (bandwidth, 20 * bandwidth), "cache_width": (0.1, 2.0)},
    )
    return [plain, cached]


def _traffic_spec(found: Sequence[Observation], memory: Curve | None) -> FormSpec:
    """Loss and optimizer: their own bandwidth over the memory curve's floor."""
    biggest = max(found, key=lambda o: o.operation.bytes)
    fixed = {"t0_s": memory.params["t0_s"]} if memory else {}
    return FormSpec(form="bandwidth", start={"bytes_per_s": biggest.operation.bytes / biggest.seconds}, fixed=fixed)
