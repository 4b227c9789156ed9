"""What is known of rows that a table does not say: the rules of ``data/vocabulary.json`` and what they do to a row."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from typing import Any

from tunecast.calibrate.rule_words import in_rule_words
from tunecast.calibrate.run_table import SkipRowError
from tunecast.calibrate.vocabulary import SHARDED, vocabulary

OF_SHARDS = ("reduce_dtype", "master_dtype")
"""Options of rules that say how FSDP shards."""


def rules_of(row: dict[str, str]) -> list[dict[str, Any]]:
    """The rules that speak of this row, however its cells are spelt."""
    columns = {column for rule in vocabulary()["rules"] for column in rule["when"]}
    spelt = {column: in_rule_words(column, row) for column in columns}
    return [
        rule
        for rule in vocabulary()["rules"]
        if all(_says(pattern, spelt[column]) for column, pattern in rule["when"].items())
    ]


def _says(pattern: str, spellings: Iterable[str]) -> bool:
    return any(re.search(pattern, text, re.I) for text in spellings)


def check_rules(row: dict[str, str], rules: Iterable[dict[str, Any]]) -> None:
    """Raises SkipRowError for a row that a rule skips, by the cell that the rule is ``of`` where it is of one."""
    for rule in rules:
        if "skip" in rule:
            cell = f"{rule['of']} {row[rule['of']]!r}: " if "of" in rule else ""
            raise SkipRowError(f"{cell}{rule['skip']}")


def filled(row: dict[str, str], notes: list[str]) -> dict[str, str]:
    """The row with cells filled that its source leaves empty, or set where the code that it ran says what they mean.

    A rule ``takes`` a cell from the notes by the first group of a pattern.
    """
    for rule in rules_of(row) if "framework" in row else []:
        for column, text in rule.get("fills", {}).items():
            why = vocabulary().get(column, {}).get(text, {}).get("skip")
            if why and column not in row:
                recipe = f"{row['framework']!r} has {text} there by its own recipe"
                raise SkipRowError(f"{column} is not stated, and {recipe}: {why}")
        fills = {column: text for column, text in rule.get("fills", {}).items() if not row.get(column)}
        sets = {column: text for column, text in rule.get("sets", {}).items() if row.get(column, text) != text}
        notes += (f"{column} is not stated: {text!r} is taken ({rule['source']})." for column, text in fills.items())
        notes += (f"{column} {row[column]!r} is read as {text!r} ({rule['source']})." for column, text in sets.items())
        row = row | fills | rule.get("sets", {})
        for column, pattern in rule.get("takes", {}).items():
            stated = re.search(pattern, row.get("notes", ""))
            row = row if stated is None or row.get(column) else row | {column: stated[1]}
    return row


def from_rules(rules: list[dict[str, Any]], key: str, *, but: Collection[str] = ()) -> dict[str, Any]:
    """What the rules say under a key, later ones first, but of these fields nothing."""
    return {name: value for rule in rules for name, value in rule.get(key, {}).items() if name not in but}


def with_rules(options: dict[str, Any], rules: list[dict[str, Any]], notes: list[str]) -> dict[str, Any]:
    """The options with what is known of every run with a framework, model or method: versions of code and settings of
    scripts. What a rule says ``else`` holds where no cell says otherwise; without shards nothing is said of them."""
    said = [(name, value, rule["source"]) for rule in rules for name, value in rule.get("else", {}).items()]
    silent = {name: (value, source) for name, value, source in said if name not in options}
    notes += (f"{name} is not stated: {value} is taken ({source})." for name, (value, source) in silent.items())
    sharded = options.get("sharding") in SHARDED
    taken = {name: value for name, (value, _) in silent.items()}
    return taken | options | from_rules(rules, "then", but=() if sharded else OF_SHARDS)
