"""YAML experiment files in the form of Megatron-LM's functional tests, as Megatron's flags.

    ENV_VARS:
      NCCL_ALGO: Ring
    MODEL_ARGS:
      --num-layers: 12
      --bf16: true                     # a flag without a value
      --recompute-modules: [moe_act, layernorm]
      --data-path: ${DATA_PATH}/text   # from the environment

A value reaches Megatron as it is written (`1e-4` stays `1e-4`); `true` gives the bare flag, `false`
and null leave the flag out. A bracketed string, `"[384 384 976]"`, is a list, as for upstream's
launch script. `$$` stands for a dollar sign. A file may build on others, named relative to it:

    BASE: [model.yaml, optimizer.yaml]
    MODEL_ARGS:
      --lr: 2e-3                       # instead of the bases'
      --clip-grad: null                # takes the bases' away

ENV_VARS and MODEL_ARGS are merged key by key, the file itself last. Variables of overridden flags
may be unset.
"""

import argparse
import os
import re
import string
from collections.abc import Collection, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from megatron_muon import shipped
from megatron_muon.errors import UserError
from megatron_muon.megatron.flags.flag_names import did_you_mean
from megatron_muon.megatron.flags.named_optimizer import MUONS, is_class
from megatron_muon.megatron.flags.refusals import ADAPTIVE, ITERATION, OF_MUON
from megatron_muon.settings import flag_of

ENV_KEY = "ENV_VARS"
ARGS_KEY = "MODEL_ARGS"
BASE_KEY = "BASE"

UNSET_FLAG = "--unset"
"""Removes a flag of the file: `--unset bf16`, for a bare flag without a `--no-` twin."""

MATRIX_OPTIMIZER = flag_of("matrix_optimizer")

_BRACKETED = re.compile(r"\[([^\[\],]+)\]\Z")

type Flag = tuple[str, tuple[str, ...]]
"""A flag with its values; none for a bare flag."""


@dataclass(frozen=True)
class ExperimentConfig:
    """The contents of an experiment file."""

    path: Path
    env: Mapping[str, str]
    flags: tuple[Flag, ...]  # in the file's order
    ignored: tuple[str, ...]  # unknown keys, such as those of upstream's test harness
    files: tuple[Path, ...]  # all files read, bases first
    origins: Mapping[str, Path]  # the file of each flag


class _Setting(NamedTuple):
    file: Path
    name: str
    value: Any

    def text(self, environ: Mapping[str, str]) -> str:
        """The value with variables replaced."""
        return self._expand(self.value, environ)

    def values(self, environ: Mapping[str, str]) -> tuple[str, ...] | None:
        """A flag's values; None for a flag that is left out."""
        if self.value is None:
            return None
        if isinstance(self.value, list):
            return tuple(self._expand(item, environ) for item in self.value)
        text = self.text(environ)
        if text.lower() == "true":
            return ()
        if text.lower() == "false":
            return None
        bracketed = _BRACKETED.match(text)
        return tuple(bracketed[1].split()) if bracketed else (text,)

    def _expand(self, text: Any, environ: Mapping[str, str]) -> str:
        """Replace `${NAME}` and `$NAME` from the environment, and `$$` by a dollar sign."""
        if not isinstance(text, str):
            raise UserError(f"{self.file}: {self.name} must be a value, or a list of them")
        try:
            return string.Template(text).substitute(environ)
        except KeyError as error:
            raise UserError(
                f"{self.file}: {self.name} needs the environment variable {error.args[0]}, which is"
                f" not set; type export {error.args[0]}=..., or give {self.name} on the command"
                " line"
            ) from None
        except ValueError as error:
            raise UserError(f"{self.file}: {self.name}: {text}: {error}") from None


def load_config(
    path: str | Path, environ: Mapping[str, str] | None = None, *, overridden: Container[str] = ()
) -> ExperimentConfig:
    """Read an experiment file and its bases; a mistake is a UserError that names the file.

    A missing file of configs/ is taken from the package (`shipped.find`). Variables are looked up
    in `environ`, by default `os.environ`. Flags that the user has `overridden` are left out.
    """
    path, environ = Path(path), os.environ if environ is None else environ
    layers = list(_layers(shipped.find(path)))  # bases first
    variables: dict[str, _Setting] = {}
    settings: dict[str, _Setting] = {}
    for file, sections in layers:
        for name, value in sections.get(ENV_KEY, {}).items():
            variables[name] = _Setting(file, name, value)
        for flag, value in sections.get(ARGS_KEY, {}).items():
            # An overriding flag comes after its opposite in a base, as on a command line.
            settings.pop(flag, None)
            settings[flag] = _Setting(file, flag, value)
    flags = []
    for flag, setting in settings.items():
        values = None if flag in overridden else setting.values(environ)
        if values is not None:
            flags.append((flag, values))
    keys = dict.fromkeys(key for _, sections in layers for key in sections)
    return ExperimentConfig(
        path=path,
        env={n: each.text(environ) for n, each in variables.items() if each.value is not None},
        flags=tuple(flags),
        ignored=tuple(key for key in keys if key not in (ENV_KEY, ARGS_KEY, BASE_KEY)),
        files=tuple(dict.fromkeys(file for file, _ in layers)),
        origins={flag: settings[flag].file for flag, _ in flags},
    )


def merge(config: ExperimentConfig, user_argv: Sequence[str]) -> list[str]:
    """The file's flags without those that `--unset` names, then the user's, which win.

    Those `of_muon` are left out, too.
    """
    rest, unset = _without_unset(user_argv)
    unset |= set(of_muon(config, user_argv))
    return [*as_argv(item for item in config.flags if item[0] not in unset), *rest]


def of_muon(config: ExperimentConfig, user_argv: Sequence[str]) -> list[str]:
    """The file's flags for Muon's update, if the user's name another optimizer for matrices."""
    early = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    early.add_argument("--optimizer", default=MUONS[0])
    early.add_argument(MATRIX_OPTIMIZER)
    given, _ = early.parse_known_args(list(user_argv))
    if not (given.matrix_optimizer or is_class(given.optimizer)):
        return []
    names = {flag_of(name) for name in (*ITERATION, *OF_MUON, *ADAPTIVE)}
    if given.matrix_optimizer:
        names.add("--optimizer")
    return [flag for flag, _ in config.flags if flag in names]


def check_flags(config: ExperimentConfig, known: Collection[str]) -> None:
    """Refuse flags of a file that are not `known` to this megatron-core and this package."""
    unknown = [flag for flag, _ in config.flags if flag not in known]
    if unknown:
        hint = did_you_mean(unknown[0], known) if len(unknown) == 1 else ""
        hint = hint or f"; leave out what is not needed with {UNSET_FLAG} FLAG"
        raise UserError(
            f"{config.origins[unknown[0]]}: megatron-core {metadata.version('megatron-core')} does"
            f" not know {', '.join(unknown)}{hint}"
        )


def refuse_unknown_flags(argv: Sequence[str], known: Collection[str]) -> None:
    """Refuse an unknown flag of a command line, naming the nearest, and a value without a flag."""
    for flag in _flags_of(argv):
        if flag not in known:
            hint = did_you_mean(flag, known) or "; see pretrain_gpt.py --help"
            raise UserError(f"unknown flag {flag}{hint}")
    if argv and not argv[0].startswith("--"):
        raise UserError(f"unexpected argument {argv[0]!r}: flags begin with --")


def given_flags(user_argv: Sequence[str]) -> frozenset[str]:
    """The flags that a command line gives or, with `--unset`, removes."""
    return frozenset(_flags_of(user_argv)) | _without_unset(user_argv)[1]


def _flags_of(argv: Sequence[str]) -> list[str]:
    return [token.partition("=")[0] for token in argv if token.startswith("--")]


def pairs(argv: Sequence[str], known_flags: Container[str]) -> list[Flag]:
    """The flags of a command line with their values, without those of `--unset`.

    A token that is no known flag, such as -1, is a value of the flag before it.
    """
    found: list[list[str]] = []
    tokens, _ = _without_unset(argv)
    for token in tokens:
        flag, equals, value = token.partition("=")
        if flag in known_flags and token.startswith("--"):
            found.append([flag, value] if equals else [flag])
        elif found:
            found[-1].append(token)
    return [(flag, tuple(values)) for flag, *values in found]


def _without_unset(argv: Sequence[str]) -> tuple[list[str], set[str]]:
    """A command line without `--unset`, and the flags that `--unset` names."""
    rest = []
    unset = set()
    tokens = iter(argv)
    for token in tokens:
        flag, equals, name = token.partition("=")
        if flag != UNSET_FLAG:
            rest.append(token)
            continue
        if not equals:
            name = next(tokens, "")
        unset.add("--" + name.lstrip("-"))
    return rest, unset


def as_argv(flags: Iterable[Flag]) -> Iterator[str]:
    """Flags with their values as a command line."""
    for flag, values in flags:
        if len(values) == 1 and values[0].startswith("-"):
            yield f"{flag}={values[0]}"  # alone, argparse would read the value as a flag
        else:
            yield flag
            yield from values


class _Loader(yaml.BaseLoader):
    """Keeps scalars as they are written, except null; refuses a key that is given twice."""

    def construct_scalar(self, node: Any) -> Any:
        value: str = super().construct_scalar(node)
        return None if node.style is None and value.lower() in ("", "~", "null") else value

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        keys = [key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
        for key in keys:
            if keys.count(key) > 1:
                raise yaml.YAMLError(f"{key!r} is given twice; keep one of them")
        return super().construct_mapping(node, deep=deep)


def _layers(path: Path) -> Iterator[tuple[Path, dict[str, Any]]]:
    """The sections of a file's bases, then its own."""
    sections = _read(path)
    bases = sections.get(BASE_KEY) or []
    for base in bases if isinstance(bases, list) else [bases]:
        yield from _layers(path.parent / str(base))
    yield path, sections


def _read(path: Path) -> dict[str, Any]:
    try:
        sections: dict[str, Any] = yaml.load(path.read_text("utf-8"), Loader=_Loader)
    except OSError as error:
        raise UserError(f"cannot read configuration {str(path)!r}: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
        raise UserError(f"{path}: not valid YAML: {' '.join(str(error).split())}") from None
    for key in (ENV_KEY, ARGS_KEY):
        if not isinstance(sections, dict) or not isinstance(sections.get(key) or {}, dict):
            raise UserError(
                f"{path}: must have {ARGS_KEY}, with lines such as '--num-layers: 12'; {ENV_KEY}"
                " likewise"
            )
        if key in sections:
            sections[key] = sections[key] or {}
    return sections
