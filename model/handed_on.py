"""What a checkpointed layer hands on to later ones beside its result: keys and values that several layers attend to.

Later layers make gradients of it, which meet until the backward of the layer that made it comes. That recomputes the
layer, and what it makes again takes the place of what it handed on: code that has one dictionary for all layers
(transformers' ``KVSharingDict``) holds it, with the graph behind it, as long as one checkpoint is left to run.
"""

from __future__ import annotations

from collections.abc import Sequence

from tunecast.model.tape_parts import Tensor


class HandedOn:
    """Gradients of what checkpoints have handed on, and what lives on in its place."""

    def __init__(self) -> None:
        self.gradients: dict[str, Tensor | None] = {}
        """By the name that a tensor handed on has as a leaf: the sum so far."""
        self._kept: list[Tensor] = []

    def begin(self, tensors: Sequence[Tensor], *, reentrant: bool) -> Sequence[Tensor]:
        """Tensors of a forward, as leaves whose gradients meet here; a reentrant checkpoint makes them without a graph,
        and no gradients of them are made."""
        for tensor in () if reentrant else tensors:
            tensor.leaf = f"handed on {len(self.gradients)}"
            self.gradients[tensor.leaf] = None
        return tensors

    def take_back(self, given_on: Sequence[Tensor], again: Sequence[Tensor]) -> dict[int, Tensor]:
        """The gradients of what was `given_on`, by the nodes that have made it `again`. Nodes of a reentrant checkpoint
        run themselves and let go of what they keep."""
        found: dict[int, Tensor] = {}
        for tensor, made in zip(given_on, again, strict=True):
            self._kept += (made,) if tensor.leaf is None else (made, *saved_behind(made))
            gradient = self.gradients.get(tensor.leaf or "")
            if gradient is not None:
                found[id(made.node)] = gradient
        return found

    def let_go(self) -> list[Tensor]:
        """What has lived on so far, and from now on does not."""
        kept, self._kept = self._kept, []
        return kept


def saved_behind(tensor: Tensor) -> list[Tensor]:
    """What the nodes keep that a tensor came from, one behind the other."""
    found: list[Tensor] = []
    seen: set[int] = set()
    behind = [tensor.node]
    while behind:
        node = behind.pop()
        if node is not None and id(node) not in seen:
            seen.add(id(node))
            found += node.saves
            behind += [each.node for each in node.inputs]
    return found
