"""Which parameters of a model Muon takes and which AdamW, by names, patterns and groups, and the table that says so.

Muon is for matrices inside a network. By name: a 2D parameter is one, unless it is an embedding or an output layer.
Without names nothing can be told from a shape, so parameters without names must all be matrices, as for
`torch.optim.Muon`, or be in a group that says its optimizer.
"""

from __future__ import annotations

import difflib
import itertools
import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

import torch
from torch import nn

from megatron_muon.core.errors import UserError
from megatron_muon.core.layout import RowSplit
from megatron_muon.core.numbers import check_number

MUON, ADAMW = "muon", "adamw"
OPTIMIZER = "optimizer"
"""The key of a parameter group that says which of the two takes it."""

DECAY_VECTORS = "decay_vectors"
"""The key of a group of AdamW's that says whether its weight decay holds for what has fewer than two dimensions too."""

EMBEDDINGS = ("*embed*", "emb", "*_emb", "wte", "wpe", "shared", "relative_attention_bias")
"""Names of modules, one part of a dotted name each, whose weights are tables of vectors."""

TABLES = ("*bias*", "*_table", "*_log")
"""Names of parameters of two dimensions that are no matrices: biases by head, tables by position, rates of a Mamba."""

OUTPUTS = (
    *("lm_head", "head", "heads", "output", "output_layer", "to_logits", "fc", "fc_out", "proj_out"),
    *("classifier", "score", "qa_outputs", "seq_relationship", "unembed", "embed_out"),
)
"""Names of modules that make a network's outputs, where they are in no numbered layer."""

_NUMBERS = {
    "lr": "lr",
    "weight_decay": "weight_decay",
    "momentum": "muon_momentum",
    "betas": "adam_beta1",
    "eps": "adam_eps",
}
"""Numbers that a group may have, with the names of their ranges."""

Rule = Callable[[str, torch.Tensor], bool]
"""Whether Muon takes the parameter of this name."""

_FOR_OTHER = {MUON: ("betas", "eps", DECAY_VECTORS), ADAMW: ("momentum",)}
"""Settings of a group that have no effect on its part of Muon, or of AdamW."""

OF_ALL = ("nesterov", "ns_coefficients", "ns_steps", "adjust_lr_fn")
"""Settings of torch.optim.Muon's groups that here hold for the whole optimizer."""

KNOWN = (*_NUMBERS, OPTIMIZER, DECAY_VECTORS)
"""Settings that a group may have."""

NOTES = ("name", "param_names", "initial_lr", "max_lr", "min_lr", "max_momentum", "base_momentum", "swa_lr")
"""What else a group may have: a label, and what torch's schedulers keep in it."""

_DTYPES = (torch.float32, torch.bfloat16, torch.float64)


@dataclass
class Selection:
    """Parameter groups, each of one optimizer, without parameters that need no gradient.

    Attributes:
        groups: one for each that was given, in that order, and after these AdamW's parts of those that hold both.
        names: a name for each parameter.
        why: for each parameter of AdamW, the reason.
        frozen: what needs no gradient.
        splits: the blocks of matrices that hold several.
        grouped: whether groups with settings of their own were given.
    """

    groups: list[dict[str, Any]] = field(default_factory=list)
    names: dict[torch.Tensor, str] = field(default_factory=dict)
    why: dict[torch.Tensor, str] = field(default_factory=dict)
    frozen: list[torch.Tensor] = field(default_factory=list)
    splits: dict[torch.Tensor, RowSplit] = field(default_factory=dict)
    grouped: bool = False

    @property
    def muon(self) -> list[dict[str, Any]]:
        """The groups of matrices."""
        return [group for group in self.groups if group[OPTIMIZER] == MUON]

    def exchanged(self, before: Sequence[torch.Tensor], groups: Sequence[Mapping[str, Any]]) -> Selection:
        """The same choice for `groups` that have other parameters in the places of those before."""
        pairs = list(zip(before, members_of(groups), strict=True))
        for old, new in pairs:
            _check_tensor(self.names[old], new)
        return replace(
            self,
            groups=[dict(group) for group in groups],
            names={new: self.names[old] for old, new in pairs} | {p: self.names[p] for p in self.frozen},
            why={new: self.why[old] for old, new in pairs if old in self.why},
            splits={},
        )

    def table(self, *, full: bool = False) -> str:
        """Which optimizer takes which parameters, with the reason, what is split and what has no weight decay."""
        rows = []
        for group in sorted(self.groups, key=lambda group: group[OPTIMIZER] == ADAMW):
            for p in group["params"]:
                notes = [self.why.get(p, ""), blocks(self.splits[p]) if p in self.splits else ""]
                if group[OPTIMIZER] == ADAMW and not decays(group, p):
                    notes.append("no weight decay")
                rows.append(Row(group[OPTIMIZER], self.names[p], p.shape, "; ".join(filter(None, notes))))
        return table(rows, frozen=len(self.frozen), full=full)


def members_of(groups: Iterable[Mapping[str, Any]]) -> list[torch.Tensor]:
    """The parameters of all these groups."""
    return [p for group in groups for p in group["params"]]


def decays(group: Mapping[str, Any], parameter: torch.Tensor) -> bool:
    """Whether a group's weight decay holds for this parameter of AdamW's."""
    return parameter.ndim > 1 or bool(group[DECAY_VECTORS])


def why_not_muon(name: str, parameter: torch.Tensor) -> str:
    """Why a parameter is no matrix inside the network; empty where it is one."""
    if parameter.ndim != 2:
        return f"{parameter.ndim}D"
    if not parameter.numel():
        return "no elements"
    parts = name.split(".")
    if any(fnmatchcase(parts[-1].lower(), pattern) for pattern in TABLES):
        return "table"
    numbered = any(part.isdigit() for part in parts)
    if not numbered and any(part.lower() in OUTPUTS for part in parts):
        return "output layer"
    if any(fnmatchcase(part.lower(), pattern) for part in parts for pattern in EMBEDDINGS):
        return "embedding"
    return ""


def select(params: Any, matrices: Sequence[str] | Rule | None = None, exclude: Sequence[str] = ()) -> Selection:
    """Sort parameters by optimizer.

    Args:
        params: `model.named_parameters()`, tensors, or groups of either; a group may have `optimizer`, "muon" or
            "adamw", which decides for its parameters.
        matrices: what Muon is to take, instead of the rule by name: patterns (`matching`) or a `Rule` of one's own.
        exclude: such patterns of what goes to AdamW all the same.

    Raises:
        TypeError: `params` is a module or a tensor, or holds something that is not a tensor.
        UserError: something in `params` that Muon cannot take, a pattern that matches nothing.
    """
    selection = Selection()
    tensors = list(_trained(params, selection))
    if not tensors:
        raise UserError("no parameter needs a gradient; unfreeze at least one")
    by_name = {name: p for name, p, options in tensors if name and OPTIMIZER not in options}
    if matrices is None:
        included = {name for name, p in by_name.items() if not why_not_muon(name, p)}
    elif callable(matrices):
        included = {name for name, p in by_name.items() if matrices(name, p)}
    else:
        of_two = [name for name, p in by_name.items() if p.ndim == 2]
        included = set(matching("matrices", matrices, of_two, others=by_name))
    excluded = set(matching("exclude", exclude, [name for name in by_name if name in included], others=by_name))
    parts: dict[tuple[int, str], dict[str, Any]] = {}  # of each given group Muon's, AdamW's or both
    for name, parameter, options in tensors:
        optimizer, why = options.get(OPTIMIZER), "its group says so"
        if optimizer is None:
            optimizer = MUON if not name or name in included - excluded else ADAMW
            why = "exclude" if name in excluded else why_not_muon(name, parameter) or "not among matrices"
        if optimizer == ADAMW:
            selection.why[parameter] = why
        elif parameter.ndim != 2 or not parameter.numel():
            raise UserError(
                f"{selection.names[parameter]} has shape {tuple(parameter.shape)}, Muon takes matrices of two "
                "dimensions; pass model.named_parameters(), leave it out of matrices=, or put it into a group with "
                "optimizer='adamw'"
            )
        parts.setdefault((id(options), optimizer), _part(options, optimizer))["params"].append(parameter)
    second = {key: part for key, part in parts.items() if key[1] == ADAMW and (key[0], MUON) in parts}
    selection.groups = [*(part for key, part in parts.items() if key not in second), *second.values()]
    if not selection.muon:
        raise UserError(
            "no parameter is a matrix for Muon; use torch.optim.AdamW, or say with matrices= what Muon is to take"
        )
    return selection


def _part(options: Mapping[str, Any], optimizer: str) -> dict[str, Any]:
    """A parameter group of one optimizer, still empty, with the options of a given one that concern it."""
    group = {name: value for name, value in options.items() if name not in _FOR_OTHER[optimizer]}
    if optimizer == ADAMW:
        group[DECAY_VECTORS] = options.get(DECAY_VECTORS, "weight_decay" in options)
    return {**group, "params": [], OPTIMIZER: optimizer}


def splits(
    given: Mapping[str, int | Sequence[int]], names: Mapping[torch.Tensor, str], parameters: Sequence[torch.Tensor]
) -> dict[torch.Tensor, RowSplit]:
    """The blocks of matrices that hold several, from the rows of each by pattern; they repeat to fill the rows."""
    found, by_name = {}, {names[p]: p for p in parameters}
    for pattern, several in given.items():
        parts = tuple(several) if isinstance(several, Iterable) else (several,)
        if not all(type(rows) is int for rows in parts):
            raise UserError(f"split: {pattern!r} has {several!r}; give whole numbers of rows, as (4096, 1024, 1024)")
        for name in matching("split", [pattern], by_name):
            rows = by_name[name].shape[0]
            if min(parts, default=0) < 1 or rows % sum(parts):
                raise UserError(f"split: {name} has {rows} rows, which parts of {parts} do not fill")
            found[by_name[name]] = RowSplit(1, parts * (rows // sum(parts)))
    return found


def _trained(params: Any, selection: Selection) -> Iterator[tuple[str, torch.Tensor, dict[str, Any]]]:
    """Each parameter that needs a gradient, with its name, empty where it has none, and the options of its group.

    Fills in the selection's `names` and `frozen`.
    """
    if isinstance(params, (nn.Module, torch.Tensor)):
        raise TypeError(f"params is a {type(params).__name__}; pass model.named_parameters()")
    given = list(params)
    if not given:
        raise UserError("params is empty; pass model.named_parameters(), which can be read only once")
    if not any(isinstance(group, Mapping) for group in given):
        given = [{"params": given}]
    for number, group in enumerate(given):
        if not isinstance(group, Mapping) or "params" not in group:
            raise TypeError(f"entry {number} of params is no parameter group with 'params', as the others are")
        options = {key: value for key, value in group.items() if key != "params"}
        _check_options(options, number)
        selection.grouped |= bool(options)
        members = [group["params"]] if isinstance(group["params"], torch.Tensor) else list(group["params"])
        if not members:
            raise UserError(f"parameter group {number} has no parameters; leave it out")
        for place, entry in enumerate(members):
            shown = f"parameter {place}" if len(given) == 1 else f"group {number}, parameter {place}"
            named = isinstance(entry, (tuple, list)) and len(entry) == 2 and isinstance(entry[0], str)
            name, parameter = entry if named else ("", entry)
            if not isinstance(parameter, torch.Tensor):
                raise TypeError(f"{shown} is a {type(parameter).__name__}, not a tensor; pass model.named_parameters()")
            name = name or _known_name(parameter)
            if parameter in selection.names:
                raise UserError(f"{name or shown} is given twice; pass each parameter once")
            selection.names[parameter] = name or shown
            if parameter.requires_grad:
                _check_tensor(name or shown, parameter)
                yield name, parameter, options
            else:
                selection.frozen.append(parameter)


def _check_options(options: Mapping[str, Any], number: int) -> None:
    """Refuse what has no effect on a group; what users note in groups of their own, they add once it is made."""
    optimizer = options.get(OPTIMIZER)
    for name, value in options.items():
        wrong = ""
        if name in OF_ALL:
            wrong = "which holds for the whole optimizer; pass it to Muon"
        elif name not in (*KNOWN, *NOTES):
            wrong = f"which Muon does not know; a group may have {', '.join(KNOWN)}"
        elif name == OPTIMIZER and value not in (MUON, ADAMW):
            wrong = "which does not exist; choose 'muon' or 'adamw'"
        elif name == DECAY_VECTORS and not isinstance(value, bool):
            wrong = "which is not True or False; choose one"
        elif name in _FOR_OTHER.get(str(optimizer), ()):
            wrong = f"which has no effect with optimizer={optimizer!r}; leave it out"
        if wrong:
            raise UserError(f"parameter group {number} has {name}={value!r}, {wrong}")
        values = {f"{name}[{place}]": beta for place, beta in enumerate(value)} if name == "betas" else {name: value}
        for shown, given in values.items() if name in _NUMBERS else ():
            given = given.item() if isinstance(given, torch.Tensor) else given
            check_number(_NUMBERS[name], given, flag=f"{shown} of parameter group {number}")


def _check_tensor(name: str, parameter: torch.Tensor) -> None:
    if parameter.dtype not in _DTYPES:
        why = "; in fp16 updates overflow: use bf16" if parameter.dtype == torch.float16 else ""
        raise UserError(f"{name} is of {parameter.dtype}; Muon and AdamW here take fp32, bf16 and fp64{why}")
    if parameter.layout != torch.strided:
        raise UserError(f"{name} is sparse ({parameter.layout}); Muon and AdamW here take dense parameters")


def _known_name(parameter: torch.Tensor) -> str:
    """The name that Megatron-FSDP has for one of its parameters; empty where it is not one."""
    model = getattr(parameter, "_megatron_fsdp_model", None)
    if model is None:
        return ""
    buffer = model.param_and_grad_buffer
    name: str = buffer.param_to_name.get(getattr(parameter, "orig_param", None), "")
    return re.sub(r"^(module\.)+", "", name)


def matching(
    argument: str, patterns: Sequence[str], names: Iterable[str], *, others: Iterable[str] = (), hint: str = ""
) -> list[str]:
    """The names in which at least one of the patterns of `argument` is found, in their order.

    A pattern is shell-style and case-sensitive, and matches whole components of a name, anywhere in it: `layers.1` is
    found in `layers.1.weight` and not in `layers.10.weight`, and a star matches dots too.

    Raises:
        UserError: a pattern is empty or found in none of `names`; the message says where among `others`, which Muon
            does not take, it is found, or the nearest component of a name, and ends with `hint`.
    """
    names = list(names)
    if isinstance(patterns, str):
        raise UserError(f"{argument} {patterns!r} is one string; pass a list of patterns")
    for pattern in patterns:
        if not pattern.strip():
            raise UserError(f"{argument} '' would match every matrix; name some, or leave it out")
        if any(_found(pattern, name) for name in names):
            continue
        nothing = f"{argument} {pattern} matches none of Muon's {len(names)} matrices"
        if there := next((name for name in others if _found(pattern, name)), None):
            raise UserError(f"{nothing}, only parameters that Muon does not take ({there}); leave it out")
        components = sorted({part for name in names for part in name.split(".")})
        parts = pattern.strip(".").split(".")
        near = ".".join((difflib.get_close_matches(part, components, 1) or [part])[0] for part in parts)
        wider = (each for each in (f"{pattern}*", f"*{pattern}*", near) if any(_found(each, name) for name in names))
        if meant := next(wider, ""):
            meant = f"; did you mean {meant}?"
        elif names:
            meant = f"; one of them is {names[0]}"
        raise UserError(f"{nothing} by whole components of their names{meant}{hint}")
    return [name for name in names if any(_found(pattern, name) for pattern in patterns)]


def _found(pattern: str, name: str) -> bool:
    return fnmatchcase(f".{name}.", f"*.{pattern.strip('.')}.*")


def steps_of(
    names: Iterable[str], steps_for: Mapping[str, int], *, others: Iterable[str] = (), hint: str = ""
) -> dict[str, int]:
    """The Newton-Schulz steps of matrices by name, from those of patterns; the last pattern that is found in one holds.

    Raises a UserError for a pattern as `matching` does.
    """
    names, others = list(names), list(others)
    found = {}
    for pattern, steps in steps_for.items():
        matched = matching("--muon-ns-steps-for", [pattern], names, others=others, hint=hint)
        found.update(dict.fromkeys(matched, steps))
    return found


_NUMBER_OF_LAYER = re.compile(r"(?<![^.])\d+(?![^.])|(?<=\.weight)\d+$")
"""The number of a layer, or of an expert, in a parameter's name."""


class Row(NamedTuple):
    """A parameter, the optimizer that takes it, and what is to be said of it."""

    optimizer: str
    name: str
    shape: Sequence[int]
    note: str = ""


def table(rows: Iterable[Row], *, frozen: int = 0, full: bool = False) -> str:
    """Tensors, elements and share of each optimizer; below, each kind of parameter, or with `full` each parameter.

    Parameters of one kind differ in the numbers of their layers alone, and share a line.
    """
    sizes: dict[str, list[int]] = defaultdict(list)
    kinds: dict[tuple[str, str, str, str], list[str]] = defaultdict(list)
    for row in rows:
        sizes[row.optimizer].append(math.prod(row.shape))
        shape = " x ".join(map(str, row.shape)) or "scalar"
        kind = row.name if full else _NUMBER_OF_LAYER.sub("*", row.name)
        kinds[row.optimizer, shape, kind, row.note].append(row.name)
    total = max(sum(map(sum, sizes.values())), 1)
    lines = [f"{'optimizer':<12}{'tensors':>9}{'parameters':>16}{'share':>9}"]
    for optimizer, counts in sizes.items():
        lines.append(f"{optimizer:<12}{len(counts):>9,}{sum(counts):>16,}{sum(counts) / total:>9.1%}")
    if frozen:
        lines.append(f"{'frozen':<12}{frozen:>9,}")
    lines.append("")
    for (optimizer, shape, kind, note), names in kinds.items():
        shown = names[0] if len(names) == 1 else kind
        lines.append(f"{optimizer:<12}{len(names):>9,}{shape:>16}  {shown}{f' ({note})' if note else ''}")
    return "\n".join(lines)


def blocks(split: RowSplit) -> str:
    """The rows of each block, as a note; of several alike in a row, how many there are. Empty for one block."""
    runs = [(split.groups * part, len(list(alike))) for part, alike in itertools.groupby(split.parts)]
    shown = ", ".join(f"{count} x {rows:,}" if count > 1 else f"{rows:,}" for rows, count in runs)
    return f"blocks of {shown} rows" if len(split.parts) > 1 else ""
