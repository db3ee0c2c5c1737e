"""The passes over memory of a step as Triton kernels, a whole wave in a launch.

A kernel copies between rows, which lie at addresses of their own or in a lane (the near end), and a
lane or stacks (the far end), and computes on the way. `core.tiles` makes the tables that say what a
program copies, `core.fused` launches. A sum takes its terms in the same order at every run.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language import constexpr

PIECE = constexpr(10)
"""Fields of a piece: `core.tiles`."""
GROUP = constexpr(6)
"""Numbers of a group: share of momentum, one minus it, lr, decay, one minus beta2, eps."""
FP32, BF16, INT8 = constexpr(0), constexpr(1), constexpr(2)
"""Formats of momentum."""
SCALE_COLS = constexpr(128)
"""Columns that share a scale in int8: `offload.codecs`."""
NONE, DECOUPLED, CAUTIOUS = constexpr(0), constexpr(1), constexpr(2)
"""Kinds of decay."""
OF_ELEMENTS, OF_NEURONS = constexpr(1), constexpr(2)
"""Kinds of second moments, beside NONE."""
FIRST, SECOND = constexpr(0x7FEB352D), constexpr(0x846CA68B)
"""Multipliers of lowbias32: `offload.codecs`."""
LEVEL_SIZE = constexpr(2048)
"""Elements that a program multiplies at a time."""
LEAST_BITS, MOST_BITS = constexpr(0x2B800000), constexpr(0x53800000)
"""Magnitudes of 2^-40 and 2^40, between which blocks are iterated as they are."""


@triton.jit
def _tile(
    tiles,
    pieces,
    rows: constexpr,
    cols: constexpr,
    aligned: constexpr,
    tall_aligned: constexpr,
):
    """This program's piece, rows `(rows, 1)` and columns `(1, cols)` of it, near offsets, and their mask."""
    piece = pieces + tl.load(tiles + tl.program_id(0)).to(tl.int64) * PIECE
    tile = tl.program_id(0) - tl.load(piece + 7)
    height = tl.multiple_of(tl.load(piece + 5), tall_aligned)
    width = tl.multiple_of(tl.load(piece + 6), aligned)
    across = tl.cdiv(width, cols)
    row = (tile // across * rows + tl.arange(0, rows))[:, None]
    col = (tile % across * cols + tl.arange(0, cols))[None, :]
    start = tl.multiple_of(tl.load(piece + 1), aligned)
    near = start + row * tl.multiple_of(tl.load(piece + 2), aligned) + col
    return piece, row, col, near, (row < height) & (col < width)


@triton.jit
def _in_shard(piece, row, col):
    """Rows and columns of a shard, whose rows are the near end's."""
    start = tl.load(piece + 1)
    stride = tl.load(piece + 2)
    return (start // stride).to(tl.int32) + row, (start % stride).to(tl.int32) + col


@triton.jit
def _load_far(far, piece, row, col, inside, aligned: constexpr, tall_aligned: constexpr):
    """Values of the far end, where columns may be rows."""
    start = tl.load(piece + 3)
    stride = tl.load(piece + 4)
    if tl.load(piece + 8) == 1:
        down = tl.multiple_of(start, tall_aligned) + col * tl.multiple_of(stride, tall_aligned)
        values = tl.load(far + down + row, mask=inside, other=0.0)
    else:
        at = tl.multiple_of(start, aligned) + row * tl.multiple_of(stride, aligned) + col
        values = tl.load(far + at, mask=inside, other=0.0)
    return values


@triton.jit
def _store_far(far, piece, row, col, values, inside, aligned: constexpr, tall_aligned: constexpr):
    """Write values to the far end, if there is one."""
    start = tl.load(piece + 3)
    stride = tl.load(piece + 4)
    kind = tl.load(piece + 8)
    if kind == 1:
        down = tl.multiple_of(start, tall_aligned) + col * tl.multiple_of(stride, tall_aligned)
        tl.store(far + down + row, values, mask=inside)
    elif kind == 0:
        at = tl.multiple_of(start, aligned) + row * tl.multiple_of(stride, aligned) + col
        tl.store(far + at, values, mask=inside)


@triton.jit
def _pointer(addresses, of, stored: constexpr, aligned: constexpr):
    """A matrix's memory, in a format."""
    half: constexpr = tl.bfloat16 if stored == BF16 else tl.int8
    dtype: constexpr = tl.float32 if stored == FP32 else half
    pointer = tl.load(addresses + of).to(tl.pointer_type(dtype))
    return tl.multiple_of(pointer, 2 * aligned)


@triton.jit
def _read(addresses, of, near, inside, stored: constexpr, aligned: constexpr):
    """Where a matrix's elements are, and their values in fp32."""
    at = _pointer(addresses, of, stored, aligned) + near
    return at, tl.load(at, mask=inside, other=0).to(tl.float32)


@triton.jit
def _lerp(start, end, weight):
    """start + weight * (end - start), rounded as torch does."""
    return tl.where(
        tl.abs(weight) < 0.5,
        start + weight * (end - start),
        end - (end - start) * (1.0 - weight),
    )


@triton.jit
def _mixed(bits, shift: constexpr):
    return bits ^ (bits >> shift)


@triton.jit
def _hash(numbers, seed):
    """`codecs._hashes`: lowbias32 of numbers xor a seed."""
    bits = _mixed(numbers.to(tl.uint32) ^ seed.to(tl.uint32), 16) * FIRST
    return _mixed(_mixed(bits, 15) * SECOND, 16)


@triton.jit
def _noise(seeds, of, row, col):
    """`codecs._noise`: int32 in [-2^15, 2^15) by row and column of the matrix."""
    seed = seeds + of * 4
    rows = _hash(row + tl.load(seed + 2), tl.load(seed))
    cols = _hash(col + tl.load(seed + 3), tl.load(seed + 1))
    bits = _mixed((rows ^ cols) * FIRST, 15) * SECOND
    return bits.to(tl.int32, bitcast=True) >> 16


@triton.jit
def _scales_of(scales, of, piece, in_row):
    """The scales of rows of a shard in int8."""
    line = tl.cdiv(tl.load(piece + 2), SCALE_COLS)
    return _pointer(scales, of, FP32, 1) + in_row * line


@triton.jit
def _store_momentum(
    at,
    scales,
    seeds,
    of,
    piece,
    row,
    in_row,
    in_col,
    values,
    inside,
    stored: constexpr,
):
    """Store momentum in its format, rounded as `offload.codecs` does."""
    if stored == FP32:
        tl.store(at, values, mask=inside)
    else:
        noise = _noise(seeds, of, in_row, in_col)
        if stored == BF16:
            bits = values.to(tl.int32, bitcast=True) + (noise & 0xFFFF)
            bits = tl.where(values == values, bits, 0x7FC00000) >> 16
            tl.store(at, bits.to(tl.int16).to(tl.bfloat16, bitcast=True), mask=inside)
        else:
            codes, scale = _companded(tl.where(inside, tl.abs(values), 0.0), noise)
            tl.store(at, tl.where(values < 0, -codes, codes).to(tl.int8), mask=inside)
            block = tl.min(in_col) // SCALE_COLS + tl.arange(0, scale.shape[1])[None, :]
            end = tl.load(piece + 5) - tl.min(row)
            height = tl.arange(0, values.shape[0])[:, None] < end
            last = tl.max(tl.where(inside, in_col, -1)) // SCALE_COLS
            scale_at = _scales_of(scales, of, piece, in_row) + block
            tl.store(scale_at, scale, mask=height & (block <= last))


@triton.jit
def _companded(magnitudes, noise):
    """Codes of magnitudes `(rows, cols)`, and scales `(rows, cols / 128)`: `codecs.Int8.encode`."""
    rows: constexpr = magnitudes.shape[0]
    blocks: constexpr = magnitudes.shape[1] // SCALE_COLS
    cut = tl.reshape(magnitudes, (rows, blocks, SCALE_COLS))
    largest = tl.max(cut.to(tl.int32, bitcast=True), axis=2).to(tl.float32, bitcast=True)
    scale = tl.div_rn(tl.div_rn(largest, 16129.0) * 16129.0, 16129.0)
    scale = tl.where(scale < 1.1754943508222875e-38, 0.0, scale)
    inverse = tl.where(scale > 0, tl.div_rn(1.0, tl.where(scale > 0, scale, 1.0)), 0.0)
    squares = tl.reshape(cut * inverse[:, :, None], magnitudes.shape)
    roots = tl.floor(tl.sqrt_rn(squares))
    remainders = squares - roots * roots
    half = roots + 0.5
    codes = half + 0.5 * tl.div_rn(remainders, half)
    codes = codes + (noise >> 2).to(tl.float32) * 0.00006103515625
    codes = tl.floor(codes + 0.000030517578125)
    return tl.minimum(tl.where(codes == codes, codes, 0.0), 127.0), scale


@triton.jit
def _level(
    fields,
    slots,
    siblings,
    largest,
    stacks,
    factors,
    multiplies: constexpr,
):
    """Factors of the slots of a matrix, by which they are multiplied; magnitudes become 0."""
    first = tl.load(fields + 2)
    end = first + tl.load(fields + 3)
    worst = tl.full((), 0, tl.int32)
    for number in range(first, end):
        bits = tl.atomic_max(largest + tl.load(siblings + number), 0) & 0x7FFFFFFF
        worst = tl.maximum(worst, bits)
    for number in range(first, end):
        slot = tl.load(siblings + number)
        bits = tl.atomic_max(largest + slot, 0) & 0x7FFFFFFF
        power = tl.maximum(bits & 0x7F800000, 0x00800000).to(tl.float32, bitcast=True)
        factor = tl.div_rn(0.5, power)
        if multiplies:
            is_usual = (bits == 0) | ((bits >= LEAST_BITS) & (bits <= MOST_BITS))
            factor = tl.where(is_usual, 1.0, factor)
        factor = tl.where(worst < 0x7F800000, factor, float("nan"))
        tl.store(factors + slot, factor)
        tl.store(largest + slot, 0)
        if multiplies and factor != 1.0:
            start = stacks + tl.load(slots + slot * 6)
            numel = tl.load(slots + slot * 6 + 1)
            for begin in range(0, numel, LEVEL_SIZE):
                place = begin + tl.arange(0, LEVEL_SIZE)
                inside = place < numel
                values = tl.load(start + place, mask=inside, other=0.0, cache_modifier=".cg")
                tl.store(start + place, values.to(tl.float32) * factor, mask=inside)


@triton.jit
def _note(
    slot,
    slots,
    siblings,
    largest,
    counters,
    stacks,
    factors,
    values,
    alone: constexpr,
    multiplies: constexpr,
):
    """Take values into a slot's largest magnitude, as bits: NaN is the largest.

    `alone`: the last program of a matrix levels its slots. It sees what the others have stored, as
    all add to the matrix's counter after that.
    """
    bits = tl.abs(values).to(tl.float32).to(tl.int32, bitcast=True)
    tl.atomic_max(largest + slot, tl.max(bits))
    if alone:
        fields = slots + slot * 6
        counter = counters + tl.load(fields + 5)
        tl.debug_barrier()
        before = tl.atomic_add(counter, 1, sem="acq_rel")
        if before == tl.load(fields + 4) - 1:
            _level(fields, slots, siblings, largest, stacks, factors, multiplies)
            tl.store(counter, 0)


@triton.jit
def level(
    heads,
    slots,
    siblings,
    largest,
    stacks,
    factors,
    multiplies: constexpr,
):
    """Level the slots of matrices, each named by one of its slots.

    The factor of a slot is the power of two that `passes.unit_factor` gives, and NaN if an element of
    its matrix is not finite. With `multiplies` it is 1 where squares fit as they are, and slots are
    multiplied by the others. `slots` are start, elements, first of its
    matrix's slots among siblings and their number, tiles of the matrix, its counter.
    """
    fields = slots + tl.load(heads + tl.program_id(0)) * 6
    _level(fields, slots, siblings, largest, stacks, factors, multiplies)


@triton.jit
def find(
    tiles,
    pieces,
    matrices,
    gradients,
    failed,
    half: constexpr,
    rows: constexpr,
    cols: constexpr,
    aligned: constexpr,
    tall_aligned: constexpr,
):
    """Mark matrices with NaN whose gradient is missing, or not finite. `half`: gradients are bf16."""
    piece, _, _, near, inside = _tile(tiles, pieces, rows, cols, aligned, tall_aligned)
    of = tl.load(piece)
    is_there = tl.load(gradients + of) != 0
    _, gradient = _read(gradients, of, near, inside & is_there, half, aligned)
    bits = tl.max(gradient.to(tl.int32, bitcast=True) & 0x7FFFFFFF)
    if (bits >= 0x7F800000) | (is_there == 0):
        tl.store(failed + tl.load(matrices + of), float("nan"))


@triton.jit
def advance(
    tiles,
    pieces,
    matrices,
    gradients,
    momenta,
    scales,
    seeds,
    groups,
    numbers,
    failed,
    out,
    levels,
    siblings,
    largest,
    counters,
    factors,
    half: constexpr,
    stored: constexpr,
    nesterov: constexpr,
    may_fail: constexpr,
    to_stacks: constexpr,
    alone: constexpr,
    multiplies: constexpr,
    rows: constexpr,
    cols: constexpr,
    aligned: constexpr,
    tall_aligned: constexpr,
):
    """momentum <- lerp(momentum, gradient, 1 - share); out <- lerp(gradient, momentum, share).

    `half`: gradients are bf16. `to_stacks`: magnitudes of slots are noted; `alone`: no other rank's
    matter, so slots are levelled.
    """
    piece, row, col, near, inside = _tile(tiles, pieces, rows, cols, aligned, tall_aligned)
    of = tl.load(piece)
    group = numbers + tl.load(groups + of) * GROUP
    there = inside & (tl.load(gradients + of) != 0)
    _, gradient = _read(gradients, of, near, there, half, aligned)
    at, momentum = _read(momenta, of, near, inside, stored, aligned)
    in_row, in_col = _in_shard(piece, row, col)
    if stored == INT8:  # a code stands for its square with its sign
        scale = _scales_of(scales, of, piece, in_row) + in_col // SCALE_COLS
        momentum = momentum * tl.abs(momentum) * tl.load(scale, mask=inside, other=0.0)
    advanced = _lerp(momentum, gradient, tl.load(group + 1))
    sent = _lerp(gradient, advanced, tl.load(group)) if nesterov else advanced
    if may_fail:
        mark = tl.load(failed + tl.load(matrices + of))
        stays = mark != mark
        advanced = tl.where(stays, momentum, advanced)
        sent = tl.where(stays, mark, sent)
    _store_momentum(at, scales, seeds, of, piece, row, in_row, in_col, advanced, inside, stored)
    sent = sent.to(out.dtype.element_ty)
    _store_far(out, piece, row, col, sent, inside, aligned, tall_aligned)
    if to_stacks:
        slot = tl.load(piece + 9)
        sent = tl.where(inside, sent, 0.0)
        _note(slot, levels, siblings, largest, counters, out, factors, sent, alone, multiplies)


@triton.jit
def fill(
    tiles,
    pieces,
    lane,
    stacks,
    levels,
    siblings,
    largest,
    counters,
    factors,
    alone: constexpr,
    multiplies: constexpr,
    rows: constexpr,
    cols: constexpr,
    aligned: constexpr,
    tall_aligned: constexpr,
):
    """Copy a lane to stacks, with the largest magnitude of each slot."""
    piece, row, col, near, inside = _tile(tiles, pieces, rows, cols, aligned, tall_aligned)
    values = tl.load(lane + near, mask=inside, other=0.0)
    _store_far(stacks, piece, row, col, values, inside, aligned, tall_aligned)
    slot = tl.load(piece + 9)
    _note(slot, levels, siblings, largest, counters, stacks, factors, values, alone, multiplies)


@triton.jit
def drain(
    tiles,
    pieces,
    lane,
    stacks,
    rows: constexpr,
    cols: constexpr,
    aligned: constexpr,
    tall_aligned: constexpr,
):
    """Copy stacks to a lane."""
    piece, row, col, near, inside = _tile(tiles, pieces, rows, cols, aligned, tall_aligned)
    values = _load_far(stacks, piece, row, col, inside, aligned, tall_aligned)
    tl.store(lane + near, values, mask=inside)


@triton.jit
def _squares(strip, parts, stacks, width: constexpr, depth: constexpr):
    """Sums of squares of the neurons of a strip."""
    neuron = tl.arange(0, width)
    inside = neuron < tl.load(strip + 3)
    squares = tl.zeros((width,), tl.float32)
    first = tl.load(strip + 4)
    for number in range(first, first + tl.load(strip + 5)):
        part = parts + number * 4
        start = stacks + tl.load(part)
        across = tl.load(part + 1)
        along = tl.load(part + 2)
        elements = tl.load(part + 3)
        for begin in range(0, elements, depth):
            element = begin + tl.arange(0, depth)
            there = element < elements
            if across == 1:
                at = start + tl.load(strip + 6) + element[:, None] * along + neuron[None, :]
                mask = there[:, None] & inside[None, :]
                values = tl.load(at, mask=mask, other=0.0).to(tl.float32)
                squares += tl.sum(values * values, axis=0)
            else:
                rows = (tl.load(strip + 6) + neuron) * across
                at = start + rows[:, None] + element[None, :]
                mask = inside[:, None] & there[None, :]
                values = tl.load(at, mask=mask, other=0.0).to(tl.float32)
                squares += tl.sum(values * values, axis=1)
    return squares


@triton.jit
def neurons(
    strips,
    parts,
    lanes,
    stacks,
    factors,
    before,
    after,
    scales,
    sums,
    counters,
    groups,
    numbers,
    width: constexpr,
    depth: constexpr,
):
    """Advance second moments of neurons, and find what multiplies their updates.

    `strips` are matrix, slot, first neuron, neurons, first part, parts, offset in a part, elements
    of a neuron; first strip and strips, first neuron and neurons of the matrix. `parts` are start,
    strides of neurons and of their elements, elements; `lanes` the places of neurons among moments.
    The last program of a matrix multiplies all its factors, so that its norm stays.
    """
    strip = strips + tl.program_id(0) * 12
    neuron = tl.arange(0, width)
    inside = neuron < tl.load(strip + 3)
    squares = _squares(strip, parts, stacks, width, depth)
    factor = tl.load(factors + tl.load(strip + 1))
    is_finite = factor == factor
    squares = tl.where(is_finite, squares, 0.0)
    group = numbers + tl.load(groups + tl.load(strip)) * GROUP
    eps = tl.load(group + 5)
    place = tl.load(lanes + tl.load(strip + 2) + neuron, mask=inside, other=0)
    moment = tl.load(before + place, mask=inside, other=0.0)
    means = squares / tl.load(strip + 7).to(tl.float32)
    moment = _lerp(moment, means, tl.where(is_finite, tl.load(group + 4), 0.0))
    tl.store(after + place, moment, mask=inside)
    inverse = tl.div_rn(1.0, tl.sqrt_rn(tl.maximum(moment, eps)))
    tl.store(scales + place, inverse, mask=inside)
    tl.store(sums + tl.program_id(0) * 2, tl.sum(squares))
    tl.store(sums + tl.program_id(0) * 2 + 1, tl.sum(squares * inverse * inverse))
    first = tl.load(strip + 8)
    count = tl.load(strip + 9)
    tl.debug_barrier()
    done = tl.atomic_add(counters + first, 1, sem="acq_rel")
    if done == count - 1:
        norm = tl.full((), 0.0, tl.float32)
        norm_now = tl.full((), 0.0, tl.float32)
        for number in range(first, first + count):
            norm += tl.load(sums + number * 2, cache_modifier=".cg")
            norm_now += tl.load(sums + number * 2 + 1, cache_modifier=".cg")
        ratio = tl.sqrt_rn(norm) / tl.maximum(tl.sqrt_rn(norm_now), eps)
        ratio = tl.where(is_finite, ratio, float("nan"))
        start = lanes + tl.load(strip + 10)
        for begin in range(0, tl.load(strip + 11), 1024):
            lane = begin + tl.arange(0, 1024)
            there = lane < tl.load(strip + 11)
            at = scales + tl.load(start + lane, mask=there, other=0)
            values = tl.load(at, mask=there, other=0.0, cache_modifier=".cg")
            tl.store(at, values * ratio, mask=there)
        tl.store(counters + first, 0)


@triton.jit
def normalize(
    tiles,
    pieces,
    weights,
    stacks,
    lanes,
    scales,
    rows: constexpr,
    cols: constexpr,
    aligned: constexpr,
    tall_aligned: constexpr,
):
    """Multiply updates by their neurons' factors, and by their block's, `weights`.

    The near end is in the stacks. The far start of a piece is its first neuron among `lanes`; its
    neurons are its columns, or its rows where columns are rows there. Its number is its block's.
    """
    piece, row, col, near, inside = _tile(tiles, pieces, rows, cols, aligned, tall_aligned)
    neuron = lanes + tl.load(piece + 3)
    if tl.load(piece + 8) == 0:
        place = tl.load(neuron + col, mask=col < tl.load(piece + 6), other=0) + row * 0
    else:
        place = tl.load(neuron + row, mask=row < tl.load(piece + 5), other=0) + col * 0
    scale = tl.load(scales + place, mask=inside, other=0.0) * tl.load(weights + tl.load(piece))
    values = tl.load(stacks + near, mask=inside, other=0.0)
    tl.store(stacks + near, values.to(tl.float32) * scale, mask=inside)


@triton.jit
def descend(
    tiles,
    pieces,
    weights,
    groups,
    numbers,
    updates,
    firsts,
    moments,
    row_scales,
    scales,
    gradients,
    sums,
    half: constexpr,
    half_gradients: constexpr,
    decay: constexpr,
    moment: constexpr,
    holds: constexpr,
    rows: constexpr,
    cols: constexpr,
    aligned: constexpr,
    tall_aligned: constexpr,
):
    """weight <- weight - lr * (update + decay * weight); where an update is NaN the weight stays.

    `half`: weights are bf16. `moment`: updates are divided by the root of each element's second
    moment, whose addresses are `moments`; or multiplied by their neurons' `scales`, and then
    `moments` are the first neuron of each matrix twice, plus 1 if neurons are columns. `holds`:
    weights stay, updates go to the gradients' place, and their sums ||w||^2, ||u||^2 and <w, u> to `sums`.
    """
    piece, row, col, near, inside = _tile(tiles, pieces, rows, cols, aligned, tall_aligned)
    of = tl.load(piece)
    weight_at, before = _read(weights, of, near, inside, half, aligned)
    group = numbers + tl.load(groups + of) * GROUP
    lr = tl.load(group + 2)
    update = _load_far(updates, piece, row, col, inside, aligned, tall_aligned).to(tl.float32)
    if (tl.load(piece + 1) == 0) & (tl.program_id(0) == tl.load(piece + 7)):
        tl.store(firsts + of, tl.load(updates + tl.load(piece + 3)).to(tl.float32))
    if moment != NONE:
        in_row, in_col = _in_shard(piece, row, col)
        row_scale = _pointer(row_scales, of, FP32, 1) + in_row
        row_scale = tl.load(row_scale, mask=row < tl.load(piece + 5), other=0.0)
        if moment == OF_ELEMENTS:
            moment_at, square = _read(moments, of, near, inside, FP32, 1)
            advanced = _lerp(square, update * update, tl.load(group + 4))
            square = tl.where(update == update, advanced, square)
            tl.store(moment_at, square, mask=inside)
            update = tl.div_rn(update, tl.sqrt_rn(square) + tl.load(group + 5)) * row_scale
        else:
            neuron = tl.load(moments + of)
            is_col = neuron % 2
            place = neuron // 2 + in_col * is_col + in_row * (1 - is_col)
            update = update * tl.load(scales + place, mask=inside, other=0.0) * row_scale
    if holds:
        update_at = _pointer(gradients, of, half_gradients, aligned) + near
        there = inside & (tl.load(gradients + of) != 0)
        update = tl.where(there & (update == update), update, 0.0)
        update = update.to(update_at.dtype.element_ty)
        tl.store(update_at, update, mask=there)
        update = update.to(tl.float32)
        at = sums + tl.program_id(0) * 3
        tl.store(at, tl.sum(before * before))
        tl.store(at + 1, tl.sum(update * update))
        tl.store(at + 2, tl.sum(before * update))
    else:
        rate = tl.load(group + 3)
        step = update
        if decay == CAUTIOUS:
            less = before - before * (rate * lr)
            less = less.to(weight_at.dtype.element_ty).to(tl.float32)
            before = tl.where(update * before >= 0, less, before)
        elif decay == DECOUPLED:
            step = update + rate * before
        after = tl.where(update == update, before - lr * step, before)
        tl.store(weight_at, after, mask=inside)


@triton.jit
def total(runs, partial, sums, count, size: constexpr):
    """Add three numbers of the tiles of each matrix; `runs` are matrix, first tile, tiles."""
    run = runs + tl.program_id(0) * 3
    first = tl.load(run + 1)
    tiles = tl.load(run + 2)
    for number in tl.static_range(3):
        terms = tl.zeros((size,), tl.float32)
        for begin in range(0, tiles, size):
            tile = begin + tl.arange(0, size)
            at = partial + (first + tile) * 3 + number
            terms += tl.load(at, mask=tile < tiles, other=0.0)
        place = sums + number * count + tl.load(run)
        tl.store(place, tl.load(place) + tl.sum(terms))


@triton.jit
def move(
    tiles,
    pieces,
    matrices,
    weights,
    gradients,
    of_weights,
    of_updates,
    half: constexpr,
    half_gradients: constexpr,
    rows: constexpr,
    cols: constexpr,
    aligned: constexpr,
    tall_aligned: constexpr,
):
    """weight <- of_weights * weight + of_updates * update, with a matrix's two numbers."""
    piece, _, _, near, inside = _tile(tiles, pieces, rows, cols, aligned, tall_aligned)
    of = tl.load(piece)
    inside = inside & (tl.load(gradients + of) != 0)
    weight_at, weight = _read(weights, of, near, inside, half, aligned)
    _, update = _read(gradients, of, near, inside, half_gradients, aligned)
    matrix = tl.load(matrices + of)
    weight *= tl.load(of_weights + matrix)
    weight = weight.to(weight_at.dtype.element_ty).to(tl.float32)
    weight += update * tl.load(of_updates + matrix)
    tl.store(weight_at, weight, mask=inside)


@triton.jit
def divide(
    given,
    least,
    out,
    roots,
    m,
    numel,
    has_least: constexpr,
    parts: constexpr,
    size: constexpr,
):
    """Blocks divided by their traces, of no less than 2^-100 and `least` squared.

    Each program adds up the diagonal, in the same order. `roots` get the roots of the inverses.
    """
    across = tl.cdiv(numel, size * parts)
    block = (tl.program_id(0) // across).to(tl.int64)
    start = given + block * numel
    terms = tl.zeros((1024,), tl.float32)
    for begin in range(0, m, 1024):
        place = begin + tl.arange(0, 1024)
        at = start + place.to(tl.int64) * (m + 1)
        terms += tl.load(at, mask=place < m, other=0.0).to(tl.float32)
    square = tl.sum(terms)
    if has_least:
        norm = tl.load(least + block)
        square = tl.maximum(square, norm * norm, propagate_nan=tl.PropagateNan.ALL)
    square = tl.maximum(square, 7.888609052210118e-31, propagate_nan=tl.PropagateNan.ALL)
    inverse = tl.div_rn(1.0, square)
    part = tl.program_id(0) % across
    if part == 0:
        tl.store(roots + block, tl.sqrt_rn(inverse))
    for number in tl.static_range(parts):
        place = (part.to(tl.int64) * parts + number) * size + tl.arange(0, size)
        values = tl.load(start + place, mask=place < numel, other=0.0)
        divided = values.to(tl.float32) * inverse
        tl.store(out + block * numel + place, divided, mask=place < numel)


@triton.jit
def shift(q, factors, added, m, numel, size: constexpr):
    """q <- factor * (q + added I), rounded once, of each block."""
    across = tl.cdiv(numel, size)
    block = (tl.program_id(0) // across).to(tl.int64)
    place = (tl.program_id(0) % across).to(tl.int64) * size + tl.arange(0, size)
    at = q + block * numel + place
    values = tl.load(at, mask=place < numel, other=0.0).to(tl.float32)
    values += tl.where(place % (m + 1) == 0, added, 0.0)
    values *= tl.load(factors + block)
    tl.store(at, values, mask=place < numel)
