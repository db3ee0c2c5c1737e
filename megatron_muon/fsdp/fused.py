"""Weights that hold several matrices: how the module that splits the output divides their rows.

A name is not enough: `query_key_value` has all queries first in one model and alternates by head in
another. So the class of the module decides, for families of transformers, some code from its hub,
and torch.nn. A weight that only looks fused is not split, and the table says so.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from numbers import Integral
from typing import Any

from torch import nn

from megatron_muon.core.layout import RowSplit, whole
from megatron_muon.core.user_errors import UserError

Modules = Mapping[str, nn.Module]
"""The modules of a model by name, as `model.named_modules()` gives them."""

Split = int | str | Sequence[int | str]
"""Rows of the matrices that are fused in one: `(4096, 1024, 1024)`, repeated to fill the rows, each
a block; the same after "interleaved", `("interleaved", 64, 64, 64)`, if part i of every repetition
belongs to matrix i; "interleaved" alone, if rows alternate; "whole", for one matrix."""

WHOLE = "whole"
INTERLEAVED = "interleaved"
"""Words of `split=`: one block; rows of the matrices alternate."""

LOOKS_FUSED = re.compile(
    r"weight_[ih]h|in_proj(?!_[a-z](\.|$))|qkv|kqv|gate_up|up_gate|w1[23]|glu|c_attn|query_key|key_value"
    r"|(?<![a-z])(x_proj|w?kv(?![a-z]))",
    re.I,
)
"""Names of layers that keep several matrices in one weight."""

Divide = Callable[[Any, int], RowSplit]
"""The split of a weight by the module whose forward splits its output, and the number of rows."""


def _equal(count: int) -> Divide:
    def divide(owner: Any, rows: int) -> RowSplit:
        return RowSplit(1, (rows // count,) * count)

    return divide


def _sizes(*names: str) -> Divide:
    """Consecutive parts whose sizes are attributes of the owner."""

    def divide(owner: Any, rows: int) -> RowSplit:
        return RowSplit(1, tuple(getattr(owner, name) for name in names))

    return divide


def _by_head(owner: Any, rows: int) -> RowSplit:
    """Query, key and value rows, head by head."""
    sizes = (getattr(owner, name, 0) for name in ("head_dim", "head_size", "attention_head_size"))
    head = next(filter(None, sizes))
    return RowSplit(rows // (3 * head), (head,) * 3)


def _gated_query(owner: Any, rows: int) -> RowSplit:
    """Query and gate rows, head by head."""
    return RowSplit(rows // (2 * owner.head_dim), (owner.head_dim,) * 2)


def _grouped_query(owner: Any, rows: int) -> RowSplit:
    """All queries, all keys, all values, of which there may be fewer."""
    heads = getattr(owner, "num_key_value_heads", None) or owner.config.num_key_value_heads
    keys = heads * owner.head_dim
    return RowSplit(1, (rows - 2 * keys, keys, keys))


def _falcon(owner: Any, rows: int) -> RowSplit:
    head = owner.head_dim
    if owner.new_decoder_architecture:
        return RowSplit(
            owner.num_kv_heads, (owner.num_heads // owner.num_kv_heads * head, head, head)
        )
    if owner.multi_query:
        return RowSplit(1, (rows - 2 * head, head, head))
    return _by_head(owner, rows)


def _gpt_bigcode(owner: Any, rows: int) -> RowSplit:
    if owner.is_cross_attention:
        return RowSplit(1, (rows // 2,) * 2)
    if owner.multi_query:
        return RowSplit(1, (owner.embed_dim, owner.kv_dim, owner.kv_dim))
    return _by_head(owner, rows)


def _conv1d(owner: Any, rows: int) -> RowSplit:
    return _equal(2 if getattr(owner, "is_cross_attention", False) else 3)(owner, rows)


def _codegen(owner: Any, rows: int) -> RowSplit:
    """Query, value and key rows of four parts, one per TPU core."""
    return RowSplit(4, (rows // 12,) * 3)


def _interleaved(owner: Any, rows: int) -> RowSplit:
    return RowSplit(rows // 2, (1, 1))


def _gate_up(owner: Any, rows: int) -> RowSplit:
    """Gate, then up, or alternating; transformers marks experts with `is_concatenated`."""
    if getattr(owner, "is_concatenated", True):
        return RowSplit(1, (rows // 2,) * 2)
    return _interleaved(owner, rows)


def _delta_qkvz(owner: Any, rows: int) -> RowSplit:
    """Query, key, then value and gate rows of the value heads, by key head."""
    values = owner.value_dim // owner.num_k_heads
    return RowSplit(owner.num_k_heads, (owner.head_k_dim, owner.head_k_dim, values, values))


def _delta_ba(owner: Any, rows: int) -> RowSplit:
    per_key_head = owner.num_v_heads // owner.num_k_heads
    return RowSplit(owner.num_k_heads, (per_key_head, per_key_head))


def _mamba2(owner: Any, rows: int) -> RowSplit:
    """z, x, B, C and dt."""
    states = owner.n_groups * owner.ssm_state_size
    return RowSplit(
        1, (owner.intermediate_size, owner.intermediate_size, states, states, owner.num_heads)
    )


def _mamba_x(owner: Any, rows: int) -> RowSplit:
    return RowSplit(1, (owner.time_step_rank, owner.ssm_state_size, owner.ssm_state_size))


def _latent_heads(owner: Any, rows: int) -> RowSplit:
    """Key and value rows, head by head."""
    nope, value = owner.qk_nope_head_dim, owner.v_head_dim
    return RowSplit(rows // (nope + value), (nope, value))


HALVES, THIRDS = _equal(2), _equal(3)
FUSED: tuple[tuple[str, str, Divide], ...] = (
    ("torch.nn.*.MultiheadAttention", "in_proj_weight", THIRDS),
    ("torch.nn.*.LSTM*", "weight_[ih]h*", _equal(4)),
    ("torch.nn.*.GRU*", "weight_[ih]h*", THIRDS),
    ("*.Phi*Attention", "qkv_proj", _grouped_query),
    ("*.Qwen3Next*Attention *.Qwen3_5*Attention *.Qwen4*Attention", "q_proj", _gated_query),
    ("transformers.*", "gate_up_proj", _gate_up),
    ("*.Phi*MLP", "gate_up_proj", HALVES),
    ("*.MiniMaxLightningAttention", "qkv_proj", _by_head),
    ("*.CodeGenAttention", "qkv_proj", _codegen),
    ("*.FalconAttention", "query_key_value", _falcon),
    ("*.GPTNeoX*Attention *.BloomAttention *.PersimmonAttention", "query_key_value", _by_head),
    ("*", "W_pack", THIRDS),  # Baichuan, whose classes have general names
    ("*.DbrxAttention", "Wqkv", _grouped_query),
    ("*.MptAttention *.ModernBert*Attention", "Wqkv", THIRDS),
    ("*.ModernBert*MLP", "Wi", HALVES),
    ("*.GPTBigCodeAttention", "c_attn", _gpt_bigcode),
    ("transformers.*", "c_attn", _conv1d),
    ("*.DisentangledSelfAttention", "in_proj", _by_head),
    ("*.LayoutLMv2SelfAttention", "qkv_linear", THIRDS),
    ("*.BarkSelf*Attention*", "att_proj", THIRDS),
    ("*.Exaone*VisionAttention", "qkv", _sizes("q_dim", "kv_dim", "kv_dim")),
    ("transformers.* timm.*", "qkv", THIRDS),  # vision towers
    ("*.GraniteMoe*MLP", "input_linear", HALVES),
    ("*.JetMoeAttention", "kv_proj", HALVES),
    ("*.Lfm*ShortConv", "in_proj", THIRDS),
    ("*.ZambaMambaMixer", "in_proj", _interleaved),
    ("*.MambaMixer *.FalconMambaMixer *.JambaMambaMixer", "in_proj", HALVES),
    ("*.MambaMixer *.FalconMambaMixer *.JambaMambaMixer", "x_proj", _mamba_x),
    ("*.Mamba2Mixer *.BambaMixer *.NemotronHMamba2Mixer", "in_proj", _mamba2),
    ("*.Zamba2MambaMixer *.GraniteMoeHybridMambaLayer *.FalconH1Mixer", "in_proj", _mamba2),
    ("*GatedDeltaNet", "in_proj_qkvz", _delta_qkvz),
    ("*GatedDeltaNet", "in_proj_ba", _delta_ba),
    ("*GatedDeltaNet", "in_proj_qkv", _sizes("key_dim", "key_dim", "value_dim")),
    ("*.xLSTM*", "qkv_opreact", _sizes("qk_dim", "qk_dim", "v_dim", "v_dim")),
    ("*Attention", "kv_a_proj_with_mqa", _sizes("kv_lora_rank", "qk_rope_head_dim")),
    ("*Attention", "kv_b_proj", _latent_heads),
)
"""Patterns for the class of the module that splits, with its package, and for the weight or its
layer; how the rows divide. The first match holds.

Sources: the forward methods of these classes in transformers 5.23 and torch 2.13.
"""

_STORED_TRANSPOSED = "transformers.pytorch_utils.Conv1D *.Llama4TextExperts"
"""Classes with (inputs, outputs) weights that transformers does not mark as `is_transposed`."""


def row_split(split: Split, name: str, rows: int) -> RowSplit:
    """The blocks of a matrix with `rows` rows; a UserError if `split` does not fit."""
    if split == WHOLE:
        return whole(rows)
    words = (split,) if isinstance(split, str) or not isinstance(split, Iterable) else tuple(split)
    is_interleaved = words[:1] == (INTERLEAVED,)
    parts: tuple[Any, ...] = (words[1:] or (1, 1)) if is_interleaved else words
    is_possible = bool(parts) and all(
        isinstance(part, Integral) and int(part) > 0 for part in parts
    )
    if not is_possible or rows % sum(parts):
        raise UserError(
            f"split: {name} has {rows} rows, which {split!r} does not fill; give whole numbers of"
            " rows, such as (4096, 1024, 1024), the same after 'interleaved', or 'whole'"
        )
    parts = tuple(map(int, parts))
    repeats = rows // sum(parts)
    return RowSplit(repeats, parts) if is_interleaved else RowSplit(1, parts * repeats)


def known_split(name: str, rows: int, modules: Modules) -> RowSplit | None:
    """The blocks of the weight of this name; None if its class is unknown, or sizes do not fit."""
    owner, weight = _owner(name, modules)
    for patterns, weights, divide in FUSED:
        if fnmatchcase(weight, weights) and _is_a(owner, patterns):
            try:
                split = divide(owner, rows)
            except AttributeError:  # a class of this name from elsewhere
                return None
            return split if split.rows == rows else None
    return None


def is_stored_transposed(name: str, modules: Modules) -> bool:
    """True if a weight is stored as (inputs, outputs)."""
    module = modules.get(name.rpartition(".")[0])
    if getattr(module, "is_transposed", False):
        return True
    return _is_a(module, _STORED_TRANSPOSED)


def note_of(name: str, modules: Modules) -> str:
    """A note for a matrix that is one block and looks fused by its name; empty for others."""
    looks_fused = LOOKS_FUSED.search(_owner(name, modules)[1])
    return "looks fused, by its name: pass the model, or see split=" if looks_fused else ""


def _owner(name: str, modules: Modules) -> tuple[nn.Module | None, str]:
    """The module whose forward uses a weight, and the name of the weight, or its layer, in it."""
    path, _, last = name.rpartition(".")
    if last == "weight":
        path, _, last = path.rpartition(".")
    return modules.get(path), last


def _is_a(module: nn.Module | None, patterns: str) -> bool:
    for kind in type(module).__mro__:
        name = f"{kind.__module__}.{kind.__name__}"
        if any(fnmatchcase(name, pattern) for pattern in patterns.split()):
            return True
    return False
