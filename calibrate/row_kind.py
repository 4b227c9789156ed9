"""What a row says of itself: the kind of training that ran, and how sure its author is of the figures."""

from __future__ import annotations

import re

from tunecast.calibrate.run_table import DOUBTS, NOTHING, Row, SkipRowError

CONFIDENCES = ("high", "medium", "low", "")
NEXT_TOKEN = (
    r"(?:continu(?:ed|al) )?(?:(?:domain )?adaptive )?pre ?train(?:ing|ed)?|c?pt|dapt"
    r"|domain (?:adaptation|adaptive training)|(?:(?:supervised|instruct(?:ion)?|domain) )?fine ?tun(?:e|ing|ed)"
    r"|s?ft|instruct(?:ion)?(?: tun(?:e|ing|ed))?|train(?:ing)?"
)
"""Training on a next token, which is what is forecast."""
HOW = r"full|q ?lora|lora|dora|peft|adapters?|post ?train(?:ing)?"
"""Words beside it: which weights are trained, and a stage that may be another training where it stands alone."""
KIND = re.compile(rf"(?:(?:{HOW}) )*(?:{NEXT_TOKEN})(?: (?:{HOW}|{NEXT_TOKEN}))*|not stated")
ALONE = re.compile(r"post ?train(?:ing)?")


def check_kind(row: Row) -> None:
    """What ran is training on a next token."""
    kind = row.get("kind", "")
    if kind.lower() in NOTHING:
        return
    plain = re.sub(r"[\s_()+/,&-]+", " ", kind.lower()).strip()
    if ALONE.fullmatch(plain):
        raise SkipRowError(
            f"kind {kind!r} may be preference tuning or reinforcement learning too: write sft if it is that"
        )
    if KIND.fullmatch(plain) is None:
        raise SkipRowError(f"kind {kind!r} is none of finetune, pretrain, sft, training")


def check_confidence(row: Row) -> None:
    """Low confidence is never used; a word that is none of the known ones cannot be told from it."""
    confidence = row.get("confidence", "").lower()
    confidence = "" if confidence in NOTHING and confidence not in DOUBTS else confidence
    grades = {re.sub(r"^med\.?$", "medium", part) for part in re.split(r" ?(?:-|/|\bto\b) ?", confidence)}
    if grades == {"low"}:
        raise SkipRowError("low confidence")
    if (len(grades) > 1 and grades != {"medium", "high"}) or not grades <= {*CONFIDENCES}:
        raise SkipRowError(f"confidence {row['confidence']!r} is none of high, medium, low")
