"""Every option and environment variable of the backend, in one table."""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch

from .gain import Rule, measured

PREFIX = "flashsampling."


_NUMBERS = ("min_vocab", "max_batch")


def _option(default: Any, variable: str, doc: str) -> Any:
    return field(default=default, metadata={"variable": variable, "doc": doc})


@dataclass(frozen=True)
class Options:
    """Options of ``torch.compile(..., backend="flashsampling", options={"flashsampling.NAME": value})``.

    An option that is not passed is read from its environment variable, then from its default.
    """

    enabled: bool = _option(True, "FLASHSAMPLING_ENABLED", "False compiles exactly as backend='inductor' would")
    strict: bool = _option(False, "FLASHSAMPLING_STRICT", "raise NotFusedError when a sink is not fused")
    min_vocab: int | None = _option(
        None, "FLASHSAMPLING_MIN_VOCAB", "smallest vocabulary to fuse; None: 4096 on GPUs, 50,000 on CPUs"
    )
    max_batch: int | None = _option(
        None,
        "FLASHSAMPLING_MAX_BATCH",
        "most rows to fuse a call for; None: no limit but what was measured. A dynamic batch is compiled once for each "
        "side of the limit; but the first call decides for all where bounds were declared with mark_dynamic, and a "
        "vocabulary sharded over ranks is fused unless all batches are beyond the limit",
    )
    tp: bool = _option(True, "FLASHSAMPLING_TP", "fuse LM heads whose vocabulary is sharded over ranks")

    def rule(self, device_type: str, dtype: torch.dtype = torch.bfloat16) -> Rule:
        """Which heads of ``dtype`` are worth fusing: the measured rule, with what is set here in its place."""
        rule = measured(device_type, dtype)
        if self.min_vocab is not None:
            rule = replace(rule, min_vocab=self.min_vocab)
        if self.max_batch is not None:
            rule = replace(rule, max_batch=self.max_batch, min_saving=None, exact_float32=False)
        return rule

    @classmethod
    def split(cls, options: Mapping[str, Any] | None) -> tuple[Options, dict[str, Any]]:
        """Our own options, and the rest of ``options`` for Inductor.

        Raises:
            ValueError: an unknown option with our prefix.
            TypeError: a value of the wrong type.
        """
        table = {f.name: f for f in fields(cls)}
        if options is not None and not (isinstance(options, Mapping) and all(isinstance(key, str) for key in options)):
            raise TypeError(f"options must be a dict with names as keys, not {options!r}")
        _check_environment(table)
        ours = {name: _from_environment(f) for name, f in table.items() if f.metadata["variable"] in os.environ}
        rest: dict[str, Any] = {}
        for key, value in (options or {}).items():
            if not key.startswith(PREFIX):
                _check_not_ours(key, table)
                rest[key] = value
                continue
            name = key[len(PREFIX) :]
            if name not in table:
                nearest = difflib.get_close_matches(name, table, n=1, cutoff=0.0)[0]
                raise ValueError(f"unknown option {key!r}; did you mean {PREFIX + nearest!r}? Options: {_names(table)}")
            ours[name] = _checked(key, table[name].name, value)
        return cls(**ours), rest


def _check_not_ours(key: str, table: Mapping[str, Any]) -> None:
    """Catches our own options without their prefix, or with a misspelt one, before Inductor lists all of its own."""
    near = difflib.get_close_matches(key, [*table, *(PREFIX + name for name in table)], n=1, cutoff=0.85)
    if not near:
        return
    from torch._inductor import config

    if key.replace("-", "_") not in config.get_config_copy():
        raise ValueError(f"unknown option {key!r}; did you mean {PREFIX + near[0].removeprefix(PREFIX)!r}?")


def _check_environment(table: Mapping[str, Any]) -> None:
    known = [f.metadata["variable"] for f in table.values()]
    for variable in os.environ:
        if variable.startswith("FLASHSAMPLING_") and variable not in known:
            nearest = difflib.get_close_matches(variable, known, n=1, cutoff=0.0)[0]
            raise ValueError(f"unknown environment variable {variable}; did you mean {nearest}?")


def _names(table: Mapping[str, Any]) -> str:
    return ", ".join(PREFIX + name for name in table)


def _checked(key: str, name: str, value: Any) -> Any:
    if name in _NUMBERS:
        if value is not None and (isinstance(value, bool) or not isinstance(value, int)):
            raise TypeError(f"{key} must be an int or None, not {value!r}")
        if value is not None and value < 0:
            raise ValueError(f"{key} must be >= 0, not {value}")
    elif not isinstance(value, bool):
        raise TypeError(f"{key} must be True or False, not {value!r}")
    return value


def _from_environment(option: Any) -> Any:
    variable = option.metadata["variable"]
    text = os.environ[variable].strip().lower()
    if option.name in _NUMBERS:
        if not (text.isascii() and text.isdigit()):
            raise ValueError(f"{variable} must be a whole number, not {os.environ[variable]!r}")
        return int(text)
    if text not in ("0", "1", "true", "false"):
        raise ValueError(f"{variable} must be 0, 1, true or false, not {os.environ[variable]!r}")
    return text in ("1", "true")
