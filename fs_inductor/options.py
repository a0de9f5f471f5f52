"""Every option and environment variable of the backend, in one table."""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

PREFIX = "flashsampling."


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
        None, "FLASHSAMPLING_MIN_VOCAB", "smallest vocabulary to fuse; None: 1024 on GPUs, 4096 on CPUs"
    )
    tp: bool = _option(True, "FLASHSAMPLING_TP", "fuse LM heads whose vocabulary is sharded over ranks")

    def smallest_vocab(self, device_type: str) -> int:
        """The vocabulary below which a site on ``device_type`` is left alone."""
        if self.min_vocab is not None:
            return self.min_vocab
        return 4096 if device_type == "cpu" else 1024

    @classmethod
    def split(cls, options: Mapping[str, Any] | None) -> tuple[Options, dict[str, Any]]:
        """Our own options, and the rest of ``options`` for Inductor.

        Raises:
            ValueError: an unknown option with our prefix.
            TypeError: a value of the wrong type.
        """
        table = {f.name: f for f in fields(cls)}
        ours = {name: _from_environment(f) for name, f in table.items() if f.metadata["variable"] in os.environ}
        rest: dict[str, Any] = {}
        for key, value in (options or {}).items():
            if not key.startswith(PREFIX):
                rest[key] = value
                continue
            name = key[len(PREFIX) :]
            if name not in table:
                nearest = difflib.get_close_matches(name, table, n=1, cutoff=0.0)[0]
                raise ValueError(f"unknown option {key!r}; did you mean {PREFIX + nearest!r}? Options: {_names(table)}")
            ours[name] = _checked(key, table[name].name, value)
        return cls(**ours), rest


def _names(table: Mapping[str, Any]) -> str:
    return ", ".join(PREFIX + name for name in table)


def _checked(key: str, name: str, value: Any) -> Any:
    if name == "min_vocab":
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
    if option.name == "min_vocab":
        if not text.isdigit():
            raise ValueError(f"{variable} must be a whole number, not {os.environ[variable]!r}")
        return int(text)
    if text not in ("0", "1", "true", "false"):
        raise ValueError(f"{variable} must be 0, 1, true or false, not {os.environ[variable]!r}")
    return text in ("1", "true")
