"""Weights that hold several matrices: how the module that splits the output divides their rows.

A name is not enough: `query_key_value` has all queries first in one model and alternates by head in
another. So the class of the module decides, for families of transformers, some code from its hub,
and torch.nn. A weight that only looks fused is not split, and the table says so.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from numbers import Integral
from typing import Any

from torch import nn

from megatron_muon.core.layout import RowSplit, whole
from megatron_muon.errors import UserError

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

Parts = int | tuple[int, ...]
"""A number of equal parts, or the rows of each part; these repeat until they fill the weight."""

Rule = int | str | Callable[[Any], Parts]
"""How a weight divides, if need be by the module whose forward splits its output; a string names
the module's attributes that hold the rows of each part."""


def _heads(queries: int, keys: int, size: int) -> Parts:
    """Query, key and value rows of so many heads."""
    return queries * size, keys * size, keys * size


def _falcon(m: Any) -> Parts:
    is_grouped = m.new_decoder_architecture or m.multi_query
    queries = m.num_heads // m.num_kv_heads if is_grouped else 1
    return _heads(queries, 1, m.head_dim)


def _gpt_bigcode(m: Any) -> Parts:
    return 2 if m.is_cross_attention else _heads(m.num_key_value_groups, 1, m.head_dim)


def _conv1d(m: Any) -> Parts:
    return 2 if getattr(m, "is_cross_attention", False) else 3


def _gate_up(m: Any) -> Parts:
    """Gate, then up, or alternating; transformers marks experts with `is_concatenated`."""
    return 2 if getattr(m, "is_concatenated", True) else (1, 1)


def _delta_qkvz(m: Any) -> Parts:
    """Query, key, then value and gate rows of the value heads, by key head."""
    values = m.value_dim // m.num_k_heads
    return m.head_k_dim, m.head_k_dim, values, values


def _mamba2(m: Any) -> Parts:
    """z, x, B, C and dt."""
    states = m.n_groups * m.ssm_state_size
    return m.intermediate_size, m.intermediate_size, states, states, m.num_heads


FUSED: dict[str, Rule] = {
    "torch.nn.*.MultiheadAttention:in_proj_weight": 3,
    "torch.nn.*.LSTM*:weight_[ih]h*": 4,
    "torch.nn.*.GRU*:weight_[ih]h*": 3,
    "*.Phi*Attention:qkv_proj": lambda m: _heads(
        m.config.num_attention_heads, m.num_key_value_heads, m.head_dim
    ),
    "*.Qwen3Next*Attention:q_proj": "head_dim head_dim",
    "*.Qwen3_5*Attention:q_proj": "head_dim head_dim",
    "*.Qwen4*Attention:q_proj": "head_dim head_dim",
    "transformers.*:gate_up_proj": _gate_up,
    "*.Phi*MLP:gate_up_proj": 2,
    "*.MiniMaxLightningAttention:qkv_proj": "head_dim head_dim head_dim",
    "*.CodeGenAttention:qkv_proj": lambda m: (m.embed_dim // 4,) * 3,  # a group per TPU core
    "*.FalconAttention:query_key_value": _falcon,
    "*.GPTNeoX*Attention:query_key_value": "head_size head_size head_size",
    "*.BloomAttention:query_key_value": "head_dim head_dim head_dim",
    "*.PersimmonAttention:query_key_value": "head_dim head_dim head_dim",
    "*:W_pack": 3,  # Baichuan, whose classes have general names
    "*.DbrxAttention:Wqkv": lambda m: _heads(m.num_heads, m.num_key_value_heads, m.head_dim),
    "*.MptAttention:Wqkv": 3,
    "*.ModernBert*Attention:Wqkv": 3,
    "*.ModernBert*MLP:Wi": 2,
    "*.GPTBigCodeAttention:c_attn": _gpt_bigcode,
    "transformers.*:c_attn": _conv1d,
    "*.DisentangledSelfAttention:in_proj": lambda m: _heads(1, 1, m.attention_head_size),
    "*.LayoutLMv2SelfAttention:qkv_linear": 3,
    "*.BarkSelf*Attention*:att_proj": 3,
    "*.Exaone*VisionAttention:qkv": "q_dim kv_dim kv_dim",
    "transformers.*:qkv": 3,  # vision towers
    "timm.*:qkv": 3,
    "*.GraniteMoe*MLP:input_linear": 2,
    "*.JetMoeAttention:kv_proj": 2,
    "*.Lfm*ShortConv:in_proj": 3,
    "*.ZambaMambaMixer:in_proj": lambda _: (1, 1),
    "*.Zamba2MambaMixer:in_proj": _mamba2,
    "*MambaMixer:in_proj": 2,  # also Falcon's and Jamba's
    "*MambaMixer:x_proj": "time_step_rank ssm_state_size ssm_state_size",
    "*Mamba2Mixer:in_proj": _mamba2,  # also Nemotron-H's
    "*.BambaMixer:in_proj": _mamba2,
    "*.GraniteMoeHybridMambaLayer:in_proj": _mamba2,
    "*.FalconH1Mixer:in_proj": _mamba2,
    "*GatedDeltaNet:in_proj_qkvz": _delta_qkvz,
    "*GatedDeltaNet:in_proj_ba": lambda m: (m.num_v_heads // m.num_k_heads,) * 2,
    "*GatedDeltaNet:in_proj_qkv": "key_dim key_dim value_dim",
    "*.xLSTM*:qkv_opreact": "qk_dim qk_dim v_dim v_dim",
    "*Attention:kv_a_proj_with_mqa": "kv_lora_rank qk_rope_head_dim",
    "*Attention:kv_b_proj": "qk_nope_head_dim v_head_dim",
}
"""Rules by the class of the module that splits, with its package, and the weight or its layer. The
first pattern that matches holds.

Sources: the forward methods of these classes in transformers 5.23 and torch 2.13.
"""

_STORED_TRANSPOSED = ("transformers.pytorch_utils.Conv1D:", "*.Llama4TextExperts:")
"""Classes with (inputs, outputs) weights that transformers does not mark as `is_transposed`."""


def row_split(split: Split, name: str, rows: int) -> RowSplit:
    """The blocks of a matrix with `rows` rows; a UserError if `split` does not fit."""
    if split == WHOLE:
        return whole(rows)
    is_several = isinstance(split, Iterable) and not isinstance(split, str)
    parts: list[Any] = [*split] if is_several else [split]  # type: ignore[misc]
    is_interleaved = parts[:1] == [INTERLEAVED]
    if is_interleaved:
        parts = parts[1:] or [1, 1]
    are_rows = all(isinstance(part, Integral) and int(part) > 0 for part in parts)
    if not parts or not are_rows or rows % sum(parts):
        raise UserError(
            f"split: {name} has {rows} rows, which {split!r} does not fill; give whole numbers of"
            " rows, such as (4096, 1024, 1024), the same after 'interleaved', or 'whole'"
        )
    sizes = tuple(map(int, parts))
    repeats = rows // sum(sizes)
    return RowSplit(repeats, sizes) if is_interleaved else RowSplit(1, sizes * repeats)


def known_split(name: str, rows: int, modules: Modules) -> RowSplit | None:
    """The blocks of the weight of this name; None if its class is unknown, or sizes do not fit."""
    path, weight = _place(name)
    owner = modules.get(path)
    rule = FUSED.get(_match(owner, weight, FUSED))
    try:
        if isinstance(rule, str):
            parts: Parts | None = tuple(getattr(owner, part) for part in rule.split())
        else:
            parts = rule(owner) if callable(rule) else rule
    except AttributeError:  # a class of this name from elsewhere
        return None
    if isinstance(parts, int):
        parts = (rows // parts,) * parts
    if not parts or sum(parts) <= 0 or rows % sum(parts):
        return None
    return RowSplit(rows // sum(parts), parts)


def is_stored_transposed(name: str, modules: Modules) -> bool:
    """True if a weight is stored as (inputs, outputs)."""
    module = modules.get(name.rpartition(".")[0])
    is_marked = getattr(module, "is_transposed", False)
    return bool(is_marked or _match(module, "", _STORED_TRANSPOSED))


def note_of(name: str) -> str:
    """A note for a matrix that is one block and looks fused by its name; empty for others."""
    looks_fused = LOOKS_FUSED.search(_place(name)[1])
    return "looks fused, by its name: pass the model, or see split=" if looks_fused else ""


def _place(name: str) -> tuple[str, str]:
    """The module whose forward uses a weight, and the name of the weight, or its layer, in it."""
    path, _, last = name.rpartition(".")
    if last == "weight":
        path, _, last = path.rpartition(".")
    return path, last


def _match(
    module: nn.Module | None,
    weight: str,
    patterns: Iterable[str],
) -> str:
    """The first pattern that one of the module's classes matches with this weight; else empty."""
    kinds = type(module).__mro__
    names = [f"{kind.__module__}.{kind.__name__}:{weight}" for kind in kinds]
    matches = (pattern for pattern in patterns if fnmatch.filter(names, pattern))
    return next(matches, "")
