"""A class of optimizers for matrices, and trials of it on small blocks before it is trusted.

`OwnerMethod` runs such a class, unmodified, where it sees gradients alone. A trial runs two steps of
small blocks on the CPU. It finds whether updates depend on weights, what the class keeps and where,
whether it draws random numbers, and how many operations it takes.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import pkgutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import emerging_optimizers
import torch
from emerging_optimizers import registry
from torch import Tensor
from torch.optim import Optimizer
from torch.utils._pytree import TreeSpec, keystr, tree_flatten_with_path
from torch.utils.flop_counter import FlopCounterMode

from megatron_muon.errors import SettingError, reason_of

OURS = ("lr", "weight_decay", "weight_decay_method")
"""Arguments that the ranks with the rows apply; the class gets 1 and no decay."""

OWN = ("muon", "adaptive_muon", "muon_hyperball")
"""Names of emerging-optimizers that this package implements by its methods and rules."""

_CPU = torch.device("cpu")
_SHAPE = (4, 3)
_STORED = (int, bool, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.int32)
"""Types of state that checkpoints hold in fp32: whole numbers up to 2^24."""

_COUNTED_SIDE = 192
"""Longer side of the blocks whose operations are counted, at most."""

_LINALG = {
    torch.ops.aten.linalg_qr: 16 / 3,
    torch.ops.aten._linalg_eigh: 12,
    torch.ops.aten._linalg_svd: 16,
}
"""Operations of factorizations, with their orthogonal factors, as multiples of n^3.

Source: Golub and Van Loan, Matrix Computations, 4th edition, sections 5.2, 8.3 and 8.6: about
8/3 n^3 for QR and as many for Q; 9 n^3 and more, and 4 m^2 n + 8 m n^2 + 9 n^3, for the others.
"""


@dataclass(frozen=True)
class Leaf:
    """One value in a block's state.

    Attributes:
        slot: its name, as `exp_avg`, or `Q_0` for the first of a list.
        shape: of the tensor; empty for a number.
        dtype: of the tensor, or the type of the number.
        on_host: it is a number, or a tensor that the class keeps in host memory.
    """

    slot: str
    shape: tuple[int, ...]
    dtype: Any
    on_host: bool


@dataclass(frozen=True, eq=False)
class Candidate:
    """A class with its arguments.

    Attributes:
        name: for messages, tables and checkpoints.
        make: the class, a `torch.optim.Optimizer`.
        arguments: of the class; learning rate and weight decay are set by `OwnerMethod`.
    """

    name: str
    make: type[Optimizer]
    arguments: Mapping[str, Any]

    def optimizer(self, parameters: Sequence[Tensor], lr: float = 1.0) -> Optimizer:
        """The class on these parameters; with `lr` of 1 updates are the values that it subtracts.

        Raises:
            SettingError: the class does not take the arguments.
        """
        given = {**self.arguments, "lr": lr}
        takes = inspect.signature(self.make).parameters
        if "weight_decay" in takes:
            given["weight_decay"] = 0.0
        try:
            return self.make(parameters, **given)
        except Exception as error:  # a user's class may raise anything
            if not self.arguments:
                raise refusal(self.name, f"refuses a matrix of zeros: {error}") from None
            own = ", ".join(sorted(takes.keys() - {"params", *OURS}))
            raise SettingError(
                "matrix_optimizer_args",
                dict(self.arguments),
                f"does not suit {self.name}: {error}",
                f"it takes {own}",
            ) from None

    @functools.cached_property
    def trial(self) -> Trial:
        """The class tried on small blocks.

        Raises:
            SettingError: its updates depend on weights, or it keeps state that no checkpoint has.
        """
        return Trial(self)

    @functools.cache  # noqa: B019  # there are few
    def operations(self, rows: int, cols: int) -> int:
        """Operations of a step of a block, after its first: products and factorizations, or elements.

        They are counted on a smaller block of the same proportions, and grow with the third power.
        """
        factor = max(1.0, max(rows, cols) / _COUNTED_SIDE)
        shape = max(1, round(rows / factor)), max(1, round(cols / factor))
        formulas = {op: functools.partial(_operations, each) for op, each in _LINALG.items()}
        counter = FlopCounterMode(display=False, custom_mapping=formulas)
        with alone():
            block = _Block(self, torch.zeros(shape))
            block.step(0)
            with counter:
                block.step(1)
        return max(rows * cols, round(counter.get_total_flops() * factor**3))

    @functools.cache  # noqa: B019  # there are few
    def state_of(self, shape: tuple[int, int]) -> tuple[tuple[Leaf, ...], TreeSpec]:
        """The values in the state of a block of `shape`, and their tree, by asking the class on meta.

        Raises:
            SettingError: it makes its state where a meta tensor cannot follow.
        """
        with alone():
            block = _Block(self, torch.zeros(shape, device="meta"))
            block.parameter.grad = torch.zeros_like(block.parameter)
            with contextlib.suppress(RuntimeError, NotImplementedError):
                # one that reads a number of the device ends here, after it has made its state
                block.optimizer.step()
        leaves, tree = _leaves_of(block.state)
        if [leaf.slot for leaf in leaves] != self.trial.slots:
            reason = "does not make its state before it reads numbers of the device"
            raise refusal(self.name, reason)
        return leaves, tree


class _Block:
    """One block of a class: its parameter and state."""

    def __init__(self, candidate: Candidate, values: Tensor) -> None:
        self.name = candidate.name
        self.parameter = values.float()
        self.optimizer = candidate.optimizer([self.parameter])

    @property
    def state(self) -> dict[str, Any]:
        """As the class has it."""
        return dict(self.optimizer.state.get(self.parameter, {}))

    def step(self, seed: int) -> Tensor:
        """Return the update for a random gradient.

        Raises:
            SettingError: the class fails; it may raise anything.
        """
        before = self.parameter.clone()
        self.parameter.grad = random_gradient(self.parameter.shape, seed)
        try:
            self.optimizer.step()
        except Exception as error:
            shape = " x ".join(map(str, self.parameter.shape))
            reason = f"fails on a block of {shape}: {reason_of(error)}"
            raise refusal(self.name, reason) from error
        return before.sub_(self.parameter)


class Trial:
    """Two steps of a class on a small block, with and without weights.

    Attributes:
        slots: names of state.
        is_random: the class draws from torch's random numbers.

    Raises:
        SettingError: updates depend on weights, or state is outside of `optimizer.state`.
    """

    def __init__(self, candidate: Candidate) -> None:
        with alone():
            block = _Block(candidate, torch.zeros(_SHAPE))
            if block.state:
                raise refusal(candidate.name, "makes state before its first step")
            settings = _settings(block.optimizer)
            with seeded(0, _CPU):
                before = torch.get_rng_state()
                updates = [block.step(seed) for seed in range(2)]
                self.is_random = not torch.equal(before, torch.get_rng_state())
            if _settings(block.optimizer) != settings:
                raise refusal(
                    candidate.name,
                    "keeps state outside of optimizer.state, which no checkpoint has",
                )
            other = _Block(candidate, 1.0 + random_gradient(_SHAPE, 2).abs())
            with seeded(0, _CPU):
                moved = [other.step(seed) for seed in range(2)]
        if not all(map(_is_close, updates, moved)):
            raise refusal(
                candidate.name, "reads weights: its update of them is not that of a matrix of zeros"
            )
        found, _ = _leaves_of(block.state)
        self.slots = [leaf.slot for leaf in found]
        for leaf in found:
            if leaf.dtype not in _STORED:
                raise refusal(
                    candidate.name, f"keeps {leaf.slot} of {leaf.dtype}, which fp32 cannot hold"
                )


def _is_close(one: Tensor, other: Tensor) -> bool:
    """True for updates that differ by the rounding of weights alone."""
    return bool((one - other).norm() <= 1e-4 * (1.0 + one.norm()))


def _settings(optimizer: Optimizer) -> list[Any]:
    """Numbers of an optimizer that are not state of a parameter."""
    values = {**vars(optimizer), **optimizer.param_groups[0]}
    return [value for value in values.values() if isinstance(value, (bool, int, float))]


def refusal(name: str, reason: str) -> SettingError:
    """The error for a class that cannot run on owners."""
    return SettingError(
        "matrix_optimizer",
        name,
        reason,
        "use soap, rekls, polargrad, mop, psgd_pro, or another whose update depends on gradients",
    )


def random_gradient(shape: Sequence[int], seed: int) -> Tensor:
    """Normal numbers, fp32, on the CPU."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(tuple(shape), generator=generator, dtype=torch.float32)


def _operations(factor: float, shape: Sequence[int], *_: Any, **__: Any) -> int:
    """Operations of a factorization, for torch's counter, from the shape of its input."""
    m, n = shape[-2:]
    return round(factor * max(m, n) * min(m, n) ** 2)


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """Run small blocks without gradients, compilers, or traces in torch's random numbers."""
    eager = torch.compiler.set_stance("force_eager")
    with torch.no_grad(), torch.random.fork_rng(devices=[]), eager, torch.device("cpu"):
        yield


@contextlib.contextmanager
def seeded(seed: int, device: torch.device) -> Iterator[None]:
    """Draw torch's random numbers from `seed`, and leave those of the program as they were."""
    is_cpu = device.type == "cpu"
    with torch.random.fork_rng(devices=[] if is_cpu else [device]):
        torch.default_generator.manual_seed(seed)  # torch.manual_seed would seed every GPU
        if not is_cpu:
            with torch.cuda.device(device):
                torch.cuda.manual_seed(seed)
        yield


def _leaves_of(state: Mapping[str, Any]) -> tuple[tuple[Leaf, ...], TreeSpec]:
    """The values in a block's state, in the order of torch's trees."""
    values, tree = tree_flatten_with_path(dict(state))
    found = []
    for path, value in values:
        slot = _slot_of(path)
        if isinstance(value, Tensor):
            on_host = value.ndim == 0 and value.device.type == "cpu"
            found.append(Leaf(slot, tuple(value.shape), value.dtype, on_host))
        else:
            found.append(Leaf(slot, (), type(value), True))
    return tuple(found), tree


def values_by_slot(state: Mapping[str, Any]) -> dict[str, Any]:
    """The values in a block's state."""
    return {_slot_of(path): value for path, value in tree_flatten_with_path(dict(state))[0]}


def _slot_of(path: Any) -> str:
    return "_".join(part.strip("'\"") for part in keystr(path).strip("[]").split("]["))


def find(given: str | type[Optimizer], arguments: Mapping[str, Any]) -> Candidate:
    """The class of a name of emerging-optimizers, of `module:Class`, or as it is.

    Raises:
        SettingError: there is none, this package implements it, an argument is this package's, or
            text stands for True or False.
    """
    for name in arguments:
        if name in OURS:
            raise SettingError(
                "matrix_optimizer_args",
                f"{name}={arguments[name]}",
                "is not the class's: the ranks with the rows apply rate and decay",
                "set the learning rate and weight decay of the run",
            )
    names = _registered()
    if isinstance(given, str) and ":" in given:
        module, _, attribute = given.partition(":")
        try:
            made = getattr(importlib.import_module(module), attribute)
        except Exception as error:  # of any module
            why = f"cannot be imported: {reason_of(error)}"
            raise SettingError("matrix_optimizer", given, why, "give module:Class") from error
    else:
        made = names.get(given.lower()) if isinstance(given, str) else given
    if not (isinstance(made, type) and issubclass(made, Optimizer)):
        raise SettingError(
            "matrix_optimizer",
            given,
            "is not an optimizer of emerging-optimizers, nor a class of torch.optim.Optimizer",
            f"use one of {', '.join(sorted(set(names) - set(OWN)))}, or module:Class",
        )
    by_class = {each: name for name, each in names.items()}
    name = by_class.get(made, made.__name__)
    if made not in by_class and name.lower() in (*names, "adamw"):
        name = f"{made.__module__}.{name}"
    if name in OWN:
        raise SettingError(
            "matrix_optimizer", name, "is implemented by this package", "use Muon's settings"
        )
    _refuse_text_for_bools(made, arguments)
    return Candidate(name, made, dict(arguments))


def _refuse_text_for_bools(made: type[Optimizer], arguments: Mapping[str, Any]) -> None:
    """Refuse text for an argument that is True or False: any text would be True."""
    takes = inspect.signature(made).parameters
    for name, value in arguments.items():
        is_switch = name in takes and isinstance(takes[name].default, bool)
        if is_switch and isinstance(value, str):
            raise SettingError(
                "matrix_optimizer_args",
                f"{name}={value}",
                "is neither True nor False",
                f"type {name}=True or {name}=False",
            )


@functools.cache
def _registered() -> dict[str, type[Optimizer]]:
    """The optimizers of emerging-optimizers by name; it registers them as its modules are imported."""
    package = emerging_optimizers.__path__, "emerging_optimizers."
    for found in pkgutil.walk_packages(*package, onerror=lambda name: None):
        with contextlib.suppress(ImportError):
            importlib.import_module(found.name)
    return {name: registry.get_optimizer_cls(name) for name in registry.get_optimizer_name_list()}
