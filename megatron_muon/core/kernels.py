"""The passes over memory of a step as Triton kernels, a whole wave in a launch.

Each kernel copies between rows, which lie at addresses of their own, and a flat tensor (a lane, or
stacks), and computes on the way. `tiles` say what a program copies: see `core.tiles`.
"""

from __future__ import annotations

import triton
import triton.language as tl

FIELDS = tl.constexpr(9)


@triton.jit
def _place(
    tiles,
    pieces,
    tile_rows: tl.constexpr,
    tile_cols: tl.constexpr,
    tall: tl.constexpr,
    aligned: tl.constexpr,
):
    """The piece's number, and offsets at both ends `(tile_rows, tile_cols)` with their mask."""
    number = tl.program_id(0)
    piece = pieces + tl.load(tiles + number).to(tl.int64) * FIELDS
    of = tl.load(piece)
    near_start = tl.multiple_of(tl.load(piece + 1), aligned)
    near_stride = tl.multiple_of(tl.load(piece + 2), aligned)
    far_start = tl.load(piece + 3)
    far_stride = tl.load(piece + 4)
    rows = tl.load(piece + 5)
    cols = tl.multiple_of(tl.load(piece + 6), aligned)
    numel = tl.multiple_of(tl.load(piece + 7), aligned)
    tile = number - tl.load(piece + 8)
    across = tl.cdiv(cols, tile_cols)
    row = (tile // across * tile_rows + tl.arange(0, tile_rows))[:, None]
    col = (tile % across * tile_cols + tl.arange(0, tile_cols))[None, :]
    inside = (row < rows) & (col < cols) & (row * cols + col < numel)
    near = near_start + row * near_stride + col
    if tall:
        far = far_start + row + col * far_stride
    else:
        far = tl.multiple_of(far_start, aligned) + row * tl.multiple_of(far_stride, aligned) + col
    return of, near, far, inside


@triton.jit
def _lerp(start, end, weight):
    """start + weight * (end - start), rounded as torch does."""
    return tl.where(
        tl.abs(weight) < 0.5,
        start + weight * (end - start),
        end - (end - start) * (1.0 - weight),
    )


@triton.jit
def _note(largest, slot, values):
    """Take the largest magnitude of values into that of a slot, as bits: NaN is the largest."""
    bits = tl.abs(values).to(tl.float32).to(tl.int32, bitcast=True)
    tl.atomic_max(largest + slot, tl.max(bits))


@triton.jit
def advance(
    tiles,
    pieces,
    slots,
    matrices,
    gradients,
    momenta,
    groups,
    numbers,
    failed,
    out,
    largest,
    half: tl.constexpr,
    nesterov: tl.constexpr,
    may_fail: tl.constexpr,
    noted: tl.constexpr,
    tile_rows: tl.constexpr,
    tile_cols: tl.constexpr,
    tall: tl.constexpr,
    aligned: tl.constexpr,
):
    """momentum <- lerp(momentum, gradient, 1 - share); out <- lerp(gradient, momentum, share).

    `half`: gradients are bf16.
    """
    of, near, far, inside = _place(tiles, pieces, tile_rows, tile_cols, tall, aligned)
    address = tl.load(gradients + of)
    gradient_at = tl.multiple_of(
        address.to(tl.pointer_type(tl.bfloat16 if half else tl.float32)), 2 * aligned
    )
    momentum_at = tl.multiple_of(tl.load(momenta + of).to(tl.pointer_type(tl.float32)), 2 * aligned)
    number = numbers + tl.load(groups + of) * 4
    share = tl.load(number)
    rest = tl.load(number + 1)
    there = inside & (address != 0)
    gradient = tl.load(gradient_at + near, mask=there, other=0.0).to(tl.float32)
    momentum = tl.load(momentum_at + near, mask=inside, other=0.0)
    advanced = _lerp(momentum, gradient, rest)
    sent = _lerp(gradient, advanced, share) if nesterov else advanced
    if may_fail:
        mark = tl.load(failed + tl.load(matrices + of))
        stays = mark != mark
        advanced = tl.where(stays, momentum, advanced)
        sent = tl.where(stays, mark, sent)
    tl.store(momentum_at + near, advanced, mask=inside)
    sent = sent.to(out.dtype.element_ty)
    tl.store(out + far, sent, mask=inside)
    if noted:
        piece = tl.load(tiles + tl.program_id(0))
        _note(largest, tl.load(slots + piece), tl.where(inside, sent, 0.0))


@triton.jit
def fill(
    tiles,
    pieces,
    lane,
    stacks,
    largest,
    tile_rows: tl.constexpr,
    tile_cols: tl.constexpr,
    tall: tl.constexpr,
    aligned: tl.constexpr,
):
    """Copy a lane to stacks, with the largest magnitude of each slot."""
    slot, near, far, inside = _place(tiles, pieces, tile_rows, tile_cols, tall, aligned)
    values = tl.load(lane + near, mask=inside, other=0.0)
    tl.store(stacks + far, values, mask=inside)
    _note(largest, slot, values)


@triton.jit
def drain(
    tiles,
    pieces,
    lane,
    stacks,
    tile_rows: tl.constexpr,
    tile_cols: tl.constexpr,
    tall: tl.constexpr,
    aligned: tl.constexpr,
):
    """Copy stacks to a lane."""
    _, near, far, inside = _place(tiles, pieces, tile_rows, tile_cols, tall, aligned)
    tl.store(lane + near, tl.load(stacks + far, mask=inside), mask=inside)


@triton.jit
def descend(
    tiles,
    pieces,
    weights,
    groups,
    numbers,
    updates,
    firsts,
    half: tl.constexpr,
    decays: tl.constexpr,
    tile_rows: tl.constexpr,
    tile_cols: tl.constexpr,
    tall: tl.constexpr,
    aligned: tl.constexpr,
):
    """weight <- weight - lr * (update + decay * weight); where an update is NaN the weight stays."""
    of, near, far, inside = _place(tiles, pieces, tile_rows, tile_cols, tall, aligned)
    dtype: tl.constexpr = tl.bfloat16 if half else tl.float32
    weight_at = tl.multiple_of(tl.load(weights + of).to(tl.pointer_type(dtype)), 2 * aligned)
    number = numbers + tl.load(groups + of) * 4
    update = tl.load(updates + far, mask=inside, other=0.0).to(tl.float32)
    weight = tl.load(weight_at + near, mask=inside, other=0.0)
    before = weight.to(tl.float32)
    tl.store(firsts + of + near * 0, update, mask=inside & (near == 0))
    if decays:
        step = update + tl.load(number + 3) * before
    else:
        step = update
    after = before - tl.load(number + 2) * step
    after = tl.where(update == update, after, before)
    tl.store(weight_at + near, after.to(dtype), mask=inside)


@triton.jit
def factors(largest, out, count, size: tl.constexpr):
    """`passes.unit_factor` of magnitudes that are given as bits, which become 0."""
    place = tl.program_id(0) * size + tl.arange(0, size)
    inside = place < count
    bits = tl.load(largest + place, mask=inside, other=0)
    power = tl.maximum(bits & 0x7F800000, 0x00800000).to(tl.float32, bitcast=True)
    factor = tl.where(bits < 0x7F800000, 0.5 / power, float("nan"))
    tl.store(out + place, factor, mask=inside)
    tl.store(largest + place, tl.zeros_like(bits), mask=inside)
