"""How a seed draws the hidden constants of a mock, and the variants that change one thing about it."""

from __future__ import annotations

import math
from dataclasses import replace

from tunecast.calibrate.mock.card import Card
from tunecast.calibrate.mock.physics import (
    AllocatorPhysics,
    AttentionPhysics,
    GemmPhysics,
    HostPhysics,
    LaunchPhysics,
    MemoryPhysics,
    NoisePhysics,
    Physics,
    PowerPhysics,
    Tile,
    generator,
)
from tunecast.calibrate.mock.ranges import evidence, tags
from tunecast.catalogs.errors import UnknownNameError
from tunecast.model.operation import UPCAST
from tunecast.model.units import GIGA, KIB, MIB
from tunecast.model.units import MICROSECOND_S as US

PICO = 1e-12
VARIANTS = ("tiles", "throttling", "slow-host")
"""Other tile sizes; a hot card with a lowered power limit; a host with a slow single core."""


class _Draw:
    """Named draws: each constant has its own generator, so adding one never moves another."""

    def __init__(self, card: Card, seed: int) -> None:
        self.key = (card.gpu_id, seed)
        self.tags = tags(card)

    def __call__(self, name: str) -> float:
        """Log-uniform in the constant's range for this kind of card."""
        between = evidence().constants[name].of(self.tags)
        u = generator("physics", *self.key, name).random()
        return math.exp(math.log(between.low) + u * (math.log(between.high) - math.log(between.low)))


def draw_physics(card: Card, seed: int, variant: str | None = None) -> Physics:
    """The hidden constants of ``mock:<card>#<seed>[@variant]``."""
    draw = _Draw(card, seed)
    base = Physics(
        identity=identity(card.gpu_id, seed, variant),
        root=identity(card.gpu_id, seed, None),
        gemm=_gemm(card, draw),
        attention=_attention(card, draw),
        roughness=draw("roughness"),
        memory=_memory(card, draw),
        power=_power(card, draw),
        launch=LaunchPhysics(gap_s=draw("gap") * US, minimum_s=draw("minimum") * US),
        host=_host(draw),
        allocator=_allocator(draw),
        noise=_noise(draw),
    )
    return base if variant is None else vary(base, variant)


def identity(gpu_id: str, seed: int, variant: str | None) -> str:
    """How a mock is named everywhere; the variant is part of the name because it changes the truth."""
    return f"mock:{gpu_id}#{seed}" + (f"@{variant}" if variant else "")


def vary(base: Physics, variant: str) -> Physics:
    """The same card and host with one thing wrong or different."""
    if variant == "tiles":
        return replace(base, gemm=replace(base.gemm, tiles=OTHER_TILES))
    if variant == "throttling":
        power = replace(base.power, limit=0.8, hot_c=base.power.throttle_c + 9.0)
        return replace(base, power=power)
    if variant == "slow-host":
        return replace(base, host=slower_host(base.host, 2.2))
    raise UnknownNameError("mock variant", variant, VARIANTS, hint=f"Known variants: {', '.join(VARIANTS)}.")


def slower_host(host: HostPhysics, factor: float) -> HostPhysics:
    """The same host with every instruction `factor` times as long."""
    return replace(
        host,
        operator_s=host.operator_s * factor,
        launch_s=host.launch_s * factor,
        module_s=host.module_s * factor,
        layer_s=host.layer_s * factor,
        checkpoint_s=host.checkpoint_s * factor,
        walk_s=host.walk_s * factor,
        sync_s=host.sync_s * factor,
    )


AMPERE_TILES = (
    Tile(bm=256, bn=128, bk=32, rate=1.0, resident=1),
    Tile(bm=128, bn=256, bk=32, rate=0.995, resident=1),
    Tile(bm=128, bn=128, bk=32, rate=0.96, resident=2),
    Tile(bm=128, bn=64, bk=32, rate=0.88, resident=3),
    Tile(bm=64, bn=128, bk=32, rate=0.88, resident=3),
    Tile(bm=64, bn=64, bk=64, rate=0.76, resident=5),
    Tile(bm=128, bn=32, bk=64, rate=0.62, resident=4),
    Tile(bm=32, bn=128, bk=64, rate=0.62, resident=4),
)
HOPPER_TILES = (
    Tile(bm=256, bn=128, bk=64, rate=1.0, resident=1),
    Tile(bm=128, bn=256, bk=64, rate=1.0, resident=1),
    Tile(bm=128, bn=192, bk=64, rate=0.98, resident=1),
    Tile(bm=128, bn=128, bk=64, rate=0.93, resident=1),
    Tile(bm=64, bn=256, bk=64, rate=0.90, resident=2),
    Tile(bm=128, bn=64, bk=64, rate=0.80, resident=2),
    Tile(bm=64, bn=64, bk=128, rate=0.62, resident=4),
    Tile(bm=64, bn=16, bk=128, rate=0.25, resident=6),
)
OTHER_TILES = (
    Tile(bm=192, bn=128, bk=32, rate=0.99, resident=1),
    Tile(bm=160, bn=160, bk=32, rate=0.97, resident=1),
    Tile(bm=96, bn=192, bk=64, rate=0.93, resident=2),
    Tile(bm=96, bn=96, bk=64, rate=0.85, resident=3),
    Tile(bm=48, bn=96, bk=64, rate=0.66, resident=5),
    Tile(bm=96, bn=24, bk=64, rate=0.50, resident=5),
)

WARP_GROUP = {"sm9", "sm10"}
"""Warp-group tensor instructions and multicast loads; GeForce Blackwell (SM120) has neither."""


def _modern(card: Card) -> bool:
    return bool(WARP_GROUP & tags(card))


def _gemm(card: Card, draw: _Draw) -> GemmPhysics:
    return GemmPhysics(
        tiles=HOPPER_TILES if _modern(card) else AMPERE_TILES,
        ceiling=draw("ceiling"),
        prologue_clk=draw("prologue"),
        store_bytes_per_clk=draw("store"),
        layout_rate={"nt": 1.0, "nn": draw("nn"), "tn": draw("tn")},
        misjudgement=draw("misjudgement"),
        split_k=(1, 2, 4, 8, 16),
    )


def _attention(card: Card, draw: _Draw) -> AttentionPhysics:
    base = draw("attention")
    return AttentionPhysics(
        block_q=128,
        block_kv={64: 128, 96: 64, 128: 64, 192: 64, 256: 32},
        rate={64: 0.92 * base, 96: 0.94 * base, 128: base, 192: 0.93 * base, 256: 0.88 * base},
        legacy_rate=draw("legacy"),
        tuned_rate=draw("tuned"),
        exp_per_clk=16.0,
        exp_hidden=draw("exp_hidden"),
        backward_rate=draw("attention_backward"),
        setup_clk=draw("attention_setup"),
    )


def _memory(card: Card, draw: _Draw) -> MemoryPhysics:
    multicast = 2.0 if _modern(card) else 1.0
    return MemoryPhysics(
        bandwidth_frac=draw("bandwidth"),
        latency_s=draw("latency") * US,
        inflight_bytes_per_block=draw("inflight") * KIB,
        block_bytes=16 * KIB,
        blocks_per_sm=8,
        tail=draw("tail"),
        l2_speedup=draw("l2_speedup"),
        l2_keep=draw("l2_keep"),
        l2_bytes_per_sm_clk=draw("l2_rate") * multicast,
        class_rate={
            "elementwise": 1.0,
            "reduction": draw("reduction"),
            "softmax": draw("softmax"),
            "strided": draw("strided"),
            "gather": draw("gather"),
            UPCAST: 1.0,
        },
        upcast_bytes_per_clk=draw("upcast"),
        dequant_elements_per_clk=draw("dequant"),
    )


TENSOR_DTYPES = ("bf16", "fp16", "fp32")


def _tensor_share(card: Card, picojoule: float) -> float:
    """Power of the tensor cores at their full rate, over the limit: energy per FLOP times the peak."""
    peak = max(card.peak_flops_per_s.get(dtype, 0.0) for dtype in TENSOR_DTYPES)
    return picojoule * PICO * peak / card.tdp_w


def _power(card: Card, draw: _Draw) -> PowerPhysics:
    headroom = draw("headroom")
    return PowerPhysics(
        headroom=headroom,
        drift_per_c=draw("drift") if headroom > 1.0 else 0.0,
        idle=draw("idle"),
        active=draw("active"),
        tensor=_tensor_share(card, draw("tensor_energy")),
        dram=draw("dram"),
        exponent=draw("exponent"),
        leakage=draw("leakage"),
        limit=1.0,
        ambient_c=draw("ambient"),
        hot_c=draw("hot"),
        throttle_c=83.0,
        throttle_per_c=0.015,
        tau_s=draw("tau"),
        control_s=draw("control"),
    )


def _host(draw: _Draw) -> HostPhysics:
    """Times of a fast workstation's core, all of them longer by the factor of this machine's."""
    core = draw("cpu") * US
    return HostPhysics(
        operator_s=draw("operator") * core,
        launch_s=draw("launch") * core,
        kind_factor={
            "gemm": draw("host_gemm"),
            "attention": draw("host_attention"),
            "memory": 1.0,
            "dequant": draw("host_dequant"),
            "loss": 1.2,
            "optimizer": draw("host_optimizer"),
            "communication": 4.0,
        },
        phase_factor={
            "forward": 1.0,
            "recompute": draw("host_recompute"),
            "backward": draw("host_backward"),
            "optimizer": 1.0,
        },
        module_s=draw("module") * core,
        layer_s=draw("layer") * core,
        checkpoint_s=draw("checkpoint") * core,
        walk_s=draw("walk") * core,
        sync_s=draw("sync") * US,
        variety=draw("variety"),
        jitter=draw("jitter"),
        pcie_frac=draw("pcie"),
        pageable_frac=draw("pageable"),
        transfer_latency_s=draw("transfer_latency") * US,
        disk_read_bytes_per_s=draw("disk_read") * GIGA,
        disk_write_bytes_per_s=draw("disk_write") * GIGA,
        page_cache_bytes_per_s=draw("page_cache") * GIGA,
        quantize_elements_per_s=draw("quantize") * GIGA,
        network_frac=draw("network"),
    )


def _allocator(draw: _Draw) -> AllocatorPhysics:
    return AllocatorPhysics(
        context_bytes=int(draw("context")) * MIB,
        workspace_bytes=round(draw("workspaces") * MIB),
        fragmentation=draw("fragmentation"),
        segment_bytes=2 * MIB,
    )


def _noise(draw: _Draw) -> NoisePhysics:
    return NoisePhysics(log_sd=draw("noise"), outlier_probability=draw("outlier"), outlier_max=1.6)
