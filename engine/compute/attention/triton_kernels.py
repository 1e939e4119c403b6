"""The kernels that Triton compiles. They run without Python."""

import triton
import triton.language as tl


@triton.jit
def attend_tile(
    query,
    keys,
    values,
    outputs,
    log_sums,
    tiles,
    rows,
    positions,
    table,
    scaling,
    query_head_stride,
    query_row_stride,
    KV_HEADS: tl.constexpr,
    HEADS_OF_EACH: tl.constexpr,
    GROUP: tl.constexpr,
    SCORES: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    KEYS: tl.constexpr,
    SOFTCAP: tl.constexpr,
    WINDOW: tl.constexpr,
):
    """Attend one tile for one KV head. A row of scores belongs to a query row and a query head."""
    tile = tiles + tl.program_id(0) * 6
    kv_head = tl.program_id(1)
    rows_begin = tl.load(tile)
    num_rows = tl.load(tile + 1)
    table_begin = tl.load(tile + 2)
    begin = tl.load(tile + 3)
    end = tl.load(tile + 4)
    part_begin = tl.load(tile + 5)
    lane = tl.arange(0, SCORES)
    dim = tl.arange(0, PADDED_DIM)
    place = lane // GROUP
    member = lane % GROUP
    row = tl.load(rows + rows_begin + place, mask=place < num_rows, other=0)
    position = tl.load(positions + row, mask=place < num_rows, other=-1)
    head = kv_head * HEADS_OF_EACH + member
    is_row = (place < num_rows) & (member < HEADS_OF_EACH)
    is_there = is_row[:, None] & (dim < HEAD_DIM)[None, :]
    query_begin = head.to(tl.int64) * query_head_stride + row.to(tl.int64) * query_row_stride
    q = tl.load(query + query_begin[:, None] + dim[None, :], mask=is_there, other=0.0)
    end = tl.minimum(end, tl.max(position, 0) + 1)
    if WINDOW > 0:
        earliest = tl.min(tl.where(place < num_rows, position, 2147483647), 0)
        begin = tl.maximum(begin, earliest - WINDOW + 1)
    largest = tl.full([SCORES], float("-inf"), tl.float32)
    total = tl.zeros([SCORES], tl.float32)
    output = tl.zeros([SCORES, PADDED_DIM], tl.float32)
    for first in range(begin, end, KEYS):
        key = first + tl.arange(0, KEYS)
        block = tl.load(table + table_begin + key // BLOCK_SIZE, mask=key < end, other=0)
        slot = block.to(tl.int64) * BLOCK_SIZE + key % BLOCK_SIZE
        where = ((slot * KV_HEADS + kv_head) * HEAD_DIM)[:, None] + dim[None, :]
        is_key = (key < end)[:, None] & (dim < HEAD_DIM)[None, :]
        k = tl.load(keys + where, mask=is_key, other=0.0)
        v = tl.load(values + where, mask=is_key, other=0.0)
        score = tl.dot(q, tl.trans(k), input_precision="ieee") * scaling
        score = cap_and_hide(score, key, end, position, SOFTCAP, WINDOW)
        output, total, largest = fold(output, total, largest, score, v)
    whole = tl.where(total > 0.0, total, 1.0)
    part = (part_begin + place).to(tl.int64) * (KV_HEADS * HEADS_OF_EACH) + head
    tl.store(log_sums + part, largest + tl.log(whole), mask=is_row)
    written = part[:, None] * HEAD_DIM + dim[None, :]
    tl.store(outputs + written, output / whole[:, None], mask=is_there)


@triton.jit
def cap_and_hide(score, key, end, position, SOFTCAP: tl.constexpr, WINDOW: tl.constexpr):
    """Scores (rows, keys) with the softcap of Gemma 2. A key that a row does not see gets minus
    infinity."""
    if SOFTCAP > 0.0:
        # A score becomes cap x tanh(score / cap). The sigmoid computes it, as `tl` has no tanh.
        score = SOFTCAP * (2.0 * tl.sigmoid(2.0 * score / SOFTCAP) - 1.0)
    is_seen = (key < end)[None, :] & (key[None, :] <= position[:, None])
    if WINDOW > 0:
        is_seen = is_seen & (key[None, :] > position[:, None] - WINDOW)
    return tl.where(is_seen, score, float("-inf"))


@triton.jit
def fold(output, total, largest, score, values):
    """Add more keys (rows, keys) to the attention, by the running maximum (arXiv 2205.14135)."""
    new_largest = tl.maximum(largest, tl.max(score, 1))
    base = tl.where(new_largest == float("-inf"), 0.0, new_largest)
    weight = tl.exp(score - base[:, None])
    shrink = tl.exp(largest - base)
    total = total * shrink + tl.sum(weight, 1)
    output = output * shrink[:, None]
    output += tl.dot(weight.to(values.dtype), values, input_precision="ieee")
    return output, total, new_largest


@triton.jit
def merge_parts(
    outputs,
    log_sums,
    offsets,
    parts,
    sinks,
    merged,
    num_heads,
    num_rows,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    HAS_SINKS: tl.constexpr,
):
    """Merge one row's parts for one head. Each part is weighed by the sum of its exponentials.

    A sink is one more part, without a value.
    """
    row = tl.program_id(0)
    head = tl.program_id(1)
    begin = tl.load(offsets + row)
    end = tl.load(offsets + row + 1)
    dim = tl.arange(0, PADDED_DIM)
    is_dim = dim < HEAD_DIM
    largest = tl.full([], float("-inf"), tl.float32)
    total = tl.zeros([], tl.float32)
    if HAS_SINKS:
        largest = tl.load(sinks + head)
        total += 1.0
    output = tl.zeros([PADDED_DIM], tl.float32)
    for index in range(begin, end):
        part = tl.load(parts + index).to(tl.int64) * num_heads + head
        log_sum = tl.load(log_sums + part)
        new_largest = tl.maximum(largest, log_sum)
        base = tl.where(new_largest == float("-inf"), 0.0, new_largest)
        shrink = tl.exp(largest - base)
        weight = tl.exp(log_sum - base)
        part_output = tl.load(outputs + part * HEAD_DIM + dim, mask=is_dim, other=0.0)
        output = output * shrink + part_output * weight
        total = total * shrink + weight
        largest = new_largest
    place = (head.to(tl.int64) * num_rows + row) * HEAD_DIM
    result = output / tl.where(total > 0.0, total, 1.0)
    tl.store(merged + place + dim, result.to(merged.dtype.element_ty), mask=is_dim)
