"""What every block of a decoder needs while a step is written on the tape."""

from __future__ import annotations

from dataclasses import dataclass, field

from tunecast.model import primitives as ops
from tunecast.model.architecture import Architecture
from tunecast.model.run import Run
from tunecast.model.tape import Tape, Tensor


@dataclass(slots=True, kw_only=True)
class Step:
    """What every block needs to know while a step is written on the tape."""

    tape: Tape
    architecture: Architecture
    run: Run
    platform: str
    cache: ops.Cache = field(default_factory=dict)
    weights: list[Tensor] = field(default_factory=list)
    """Attention weights that the present layer's code holds until it returns."""
    returned: list[Tensor] = field(default_factory=list)
    """What attention returns beside its output: kept by name until the next layer has ended."""

    stored_keys: dict[int | None, tuple[Tensor, Tensor]] = field(default_factory=dict)
    """Keys and values that later layers attend to, by the window of the layers that do."""
    earlier: list[Tensor] = field(default_factory=list)
    """What the micro-batch before left alive."""
    outliving: list[Tensor] = field(default_factory=list)
    """What the micro-batch leaves alive until the next one's logits are there (LitGPT with an old bitsandbytes)."""

    @property
    def tokens(self) -> int:
        """Tokens of one micro-batch."""
        return self.run.tokens_per_micro_batch

    @property
    def autocast_dtype(self) -> str | None:
        """The dtype products run in under autocast, else None."""
        return self.run.compute_dtype if self.run.autocast else None

    @property
    def activation_dtype(self) -> str:
        """The dtype of a product's result."""
        return self.autocast_dtype or self.run.dtype

    @property
    def stream_dtype(self) -> str:
        """The dtype of embedded tokens, which the residual stream inherits."""
        saved = self.architecture.embedding_module in self.run.modules_to_save
        return self.run.saved_dtype if saved else self.run.dtype

    def weight(self, name: str, elements: int) -> Tensor:
        """A base parameter, trained by a full fine-tune, or whole beside adapters in a copy."""
        if name in self.run.modules_to_save:
            return Tensor(elements, self.run.saved_dtype, None, leaf=name)
        leaf = None if self.run.has_adapters else name
        return Tensor(elements, self.run.dtype, None, leaf=leaf)

    def adapter(self, name: str, elements: int) -> Tensor:
        """A trained adapter parameter."""
        return Tensor(elements, self.run.adapter_dtype, None, leaf=name)


@dataclass(frozen=True, slots=True, kw_only=True)
class Tables:
    """What all layers of a forward pass share."""

    waves: tuple[tuple[Tensor, Tensor], ...]
    """cos and sin of every position: one pair, or one for local and one for global layers."""
    alibi: Tensor | None = None
    """A slope per head for every distance; None where positions are told otherwise."""
    mask: Tensor | None = None
    """Sliding-window mask; None when every layer can do without."""
    full_mask: Tensor | None = None
    """Mask of the layers without a window, where eager attention has both kinds."""

    @property
    def masks(self) -> tuple[Tensor, ...]:
        """All masks."""
        return tuple(mask for mask in (self.full_mask, self.mask) if mask is not None)

    def mask_of(self, window: int | None) -> Tensor | None:
        """The mask of a layer with this window."""
        return self.full_mask if window is None and self.full_mask is not None else self.mask
