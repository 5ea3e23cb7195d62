"""The fields of a Hugging Face configuration from any source, read by type."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, Protocol

from kvkeep.core.errors import InvalidValue, UnsupportedModel, reason
from kvkeep.core.geometry.hub import download_hint

__all__ = ["ConfigFields", "ConfigSource"]


class _ConfigObject(Protocol):
    def to_dict(self) -> dict[str, Any]: ...


ConfigSource = _ConfigObject | Mapping[str, Any] | str | os.PathLike[str]

# Where multimodal models keep the part that generates text.
_TEXT_PARTS: Final = ("text_config", "llm_config", "language_config", "thinker_config")
# Fields that such a part inherits from the whole configuration.
_INHERITED: Final = ("dtype", "torch_dtype", "architectures", "is_encoder_decoder")


class ConfigFields:
    """A configuration whose fields are read by type; a null field counts as missing.

    A field of another type raises `UnsupportedModel` with its name and value.
    """

    def __init__(self, fields: Mapping[str, Any]) -> None:
        self._fields = {name: value for name, value in fields.items() if value is not None}

    @classmethod
    def read(cls, config: ConfigSource) -> ConfigFields:
        """Read the part that generates text; see `KVGeometry.from_config`."""
        if isinstance(config, str | os.PathLike):
            return cls(_read_file(Path(config)))._text_part()
        if isinstance(config, Mapping):
            return cls(config)._text_part()
        to_dict = getattr(config, "to_dict", None)
        if not callable(to_dict):
            raise InvalidValue(
                f"config is {type(config).__name__}; a Hugging Face configuration, its dictionary, "
                "or the path of its config.json or model directory is needed"
            )
        return cls(to_dict())._text_part()

    @property
    def family(self) -> str:
        """The model type, such as "llama" or "gemma3_text"; empty if the configuration has none."""
        return self.text("model_type")

    @property
    def base_family(self) -> str:
        """The model type without "_text", which the text parts of multimodal models add."""
        return self.family.removesuffix("_text")

    def __contains__(self, name: str) -> bool:
        return name in self._fields

    def value(self, name: str) -> Any:
        """Return the field as it is; None if it is missing."""
        return self._fields.get(name)

    def number(self, *names: str, least: int = 1) -> int | None:
        """Return the first existing field of ``names``, an int of at least ``least``; else None."""
        for name in names:
            if name in self._fields:
                value = self._fields[name]
                if isinstance(value, bool) or not isinstance(value, int) or value < least:
                    raise self._wrong(name, f"one whole number of at least {least} for all layers")
                return value
        return None

    def needed(self, *names: str) -> int:
        """Return `number`, or raise if no field exists."""
        number = self.number(*names)
        if number is None:
            raise UnsupportedModel(
                f"the configuration (model_type {self.family!r}) names no {names[0]}; a "
                "config.json may leave out its family's defaults, and transformers.AutoConfig "
                "fills them in: pass the object it gives"
            )
        return number

    def text(self, name: str) -> str:
        """Return a text field; empty if it is missing."""
        value = self._fields.get(name, "")
        if not isinstance(value, str):
            raise self._wrong(name, "text")
        return value

    def texts(self, name: str) -> list[str]:
        """Return a field that is a list of texts; empty if it is missing."""
        value = self._fields.get(name, [])
        if not isinstance(value, list | tuple) or not all(isinstance(item, str) for item in value):
            raise self._wrong(name, "a list of texts")
        return list(value)

    def numbers(self, name: str) -> list[int]:
        """Return a field that is a list of whole numbers or booleans; empty if it is missing."""
        value = self._fields.get(name, [])
        if not isinstance(value, list | tuple) or not all(isinstance(item, int) for item in value):
            raise self._wrong(name, "a list of whole numbers")
        return [int(item) for item in value]

    def flag(self, name: str) -> bool:
        """Whether the field exists and is not false, zero or empty."""
        return bool(self._fields.get(name))

    def part(self, name: str) -> ConfigFields | None:
        """Return a nested configuration; None if it is missing."""
        value = self._fields.get(name)
        return ConfigFields(value) if isinstance(value, Mapping) else None

    def changed(self, overrides: Mapping[str, Any]) -> ConfigFields:
        """Return the configuration with other values for some fields."""
        return ConfigFields(self._fields | dict(overrides))

    def _text_part(self) -> ConfigFields:
        for name in _TEXT_PARTS:
            part = self.part(name)
            if part is not None:
                above = {key: self._fields[key] for key in _INHERITED if key in self}
                return ConfigFields(above | part._fields)._text_part()
        return self

    def _wrong(self, name: str, right: str) -> UnsupportedModel:
        return UnsupportedModel(
            f"{name} is {self._fields[name]!r} in the configuration; {right} is needed"
        )


def _read_file(path: Path) -> Mapping[str, Any]:
    file = path
    try:
        if path.is_dir():
            file = path / "config.json"
        content = file.read_bytes()
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path
        hint = download_hint(path) or "; a local model directory or its config.json is needed"
        raise UnsupportedModel(f"cannot read {file}: {reason(error)}{hint}") from error
    try:
        fields = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise UnsupportedModel(f"{file} is not JSON: {error}") from error
    if not isinstance(fields, dict):
        raise UnsupportedModel(f"{file} holds {type(fields).__name__}, not a configuration")
    return fields
