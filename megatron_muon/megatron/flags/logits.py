"""Which attention shows its logits, and where clipping them has an effect: the rules of `--qk-clip`, said once.

Plain values alone, as in `refusals`, so that the command line can ask before torch is imported.
"""

from __future__ import annotations

from typing import Any

from megatron_muon.core.numbers import check_number
from megatron_muon.errors import UserError

CLIP, LOG = "--qk-clip", "--log-max-attention-logit"


def asked(model: Any) -> str | None:
    """The flag that needs attention logits, of parsed flags or a TransformerConfig."""
    if model.qk_clip:
        return CLIP
    return LOG if model.log_max_attention_logit else None


def check_logits(model: Any) -> None:
    """Refuse `--qk-clip` and `--log-max-attention-logit` where no attention shows its logits, or nothing is clipped.

    Raises:
        UserError: names the flags and the remedy.
    """
    if (flag := asked(model)) is None:
        return
    if model.cuda_graph_impl != "none":
        raise UserError(
            f"{flag} is not supported with --cuda-graph-impl {model.cuda_graph_impl}: a replayed layer runs no Python, "
            "so its logits are not kept; leave one of the two flags out"
        )
    # Transformer Engine's attention: of its backends cuDNN's and the unfused one return logits, and not in FP8.
    backend = getattr(model.attention_backend, "name", model.attention_backend)
    if backend == "flash":
        raise UserError(
            f"{flag} is not supported with --attention-backend flash, which returns no logits; use fused or auto"
        )
    if getattr(model, "fp8_dot_product_attention", False):  # has no flag
        raise UserError(
            f"{flag} is not supported with fp8_dot_product_attention=True, which returns no logits; leave one of the "
            "two out"
        )
    if (variant := model.experimental_attention_variant) is not None:
        raise UserError(
            f"{flag} is not supported with --experimental-attention-variant {variant}, which keeps no logits; leave "
            "one of the two flags out"
        )
    if flag == CLIP:
        _check_clip(model)


def _check_clip(model: Any) -> None:
    for name in ("qk_clip_alpha", "qk_clip_threshold"):
        check_number(name, getattr(model, name))
    if model.multi_latent_attention:  # which normalises before the projections that make the heads
        return
    for name in ("qk_layernorm", "qk_l2_norm"):
        if getattr(model, name):
            norm = f"--{name.replace('_', '-')}"
            raise UserError(
                f"{CLIP} has no effect with {norm}, which normalises queries and keys after the rows that would be "
                f"scaled; leave {CLIP} out, or {norm}"
            )
