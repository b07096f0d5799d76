"""Kernels whose horizons are known by arithmetic; each name says why it wraps, or does not."""

import triton
import triton.language as tl


@triton.jit
def row_product(x, stride, WIDTH: tl.constexpr):
    row = tl.program_id(0)
    tl.load(x + row * stride + tl.arange(0, WIDTH))


@triton.jit
def row_wide(x, stride, WIDTH: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    tl.load(x + row * stride + tl.arange(0, WIDTH))


@triton.jit
def row_sum(x, stride, WIDTH: tl.constexpr):
    row = tl.program_id(0)
    tl.load(x + (row * stride + tl.arange(0, WIDTH)))


@triton.jit
def page(x, table, stride, WIDTH: tl.constexpr):
    number = tl.load(table + tl.program_id(0))
    tl.store(x + number * stride + tl.arange(0, WIDTH), 1.0)


@triton.jit
def page_wide(x, table, stride, WIDTH: tl.constexpr):
    number = tl.load(table + tl.program_id(0)).to(tl.int64)
    tl.store(x + number * stride + tl.arange(0, WIDTH), 1.0)


@triton.jit
def masked_tail(x, stride, rows, BLOCK: tl.constexpr):
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.load(x + row * stride, mask=row < rows)


@triton.jit
def masked_out(x, stride, rows, limit, BLOCK: tl.constexpr):
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.load(x + row * stride, mask=row < limit)


@triton.jit
def lost_mask(x, count, BLOCK: tl.constexpr):
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.load(x + index, mask=index < count)


@triton.jit
def carried(x, step, count, WIDTH: tl.constexpr):
    offset = 0
    for _ in range(0, count):
        tl.load(x + offset + tl.arange(0, WIDTH))
        offset += step


@triton.jit
def carried_pointer(x, step, count, WIDTH: tl.constexpr):
    pointer = x + tl.arange(0, WIDTH)
    for _ in range(0, count):
        tl.load(pointer)
        pointer += step


@triton.jit
def loop_variable(x, stride, count, WIDTH: tl.constexpr):
    for i in range(0, count):
        tl.load(x + i * stride + tl.arange(0, WIDTH))


@triton.jit
def unused(x, stride, WIDTH: tl.constexpr):
    row = tl.program_id(0)
    size = row * stride
    tl.load(x + tl.where(size == 7, 1, 0) + tl.arange(0, WIDTH))


@triton.jit
def cancelled(x, stride, WIDTH: tl.constexpr):
    row = tl.program_id(0)
    tl.load(x + (row * stride + 5) - row * stride + tl.arange(0, WIDTH))


@triton.jit
def _address(row, stride):
    return row * stride


@triton.jit
def called(x, stride, WIDTH: tl.constexpr):
    tl.load(x + _address(tl.program_id(0), stride) + tl.arange(0, WIDTH))


@triton.jit
def block_base(x, stride, rows, WIDTH: tl.constexpr):
    base = x + tl.program_id(0) * stride
    pointer = tl.make_block_ptr(base, (WIDTH,), (1,), (0,), (WIDTH,), (0,))
    tl.load(pointer, boundary_check=(0,))


@triton.jit
def block_offset(x, stride, rows, WIDTH: tl.constexpr):
    shape, strides = (rows, WIDTH), (stride, 1)
    pointer = tl.make_block_ptr(x, shape, strides, (tl.program_id(0), 0), (1, WIDTH), (1, 0))
    tl.load(pointer, boundary_check=(0, 1))


@triton.jit
def narrowed(x, starts, WIDTH: tl.constexpr):
    start = tl.load(starts + tl.program_id(0)).to(tl.int32)
    tl.load(x + start + tl.arange(0, WIDTH))


@triton.jit
def shifted(x, WIDTH: tl.constexpr):
    tl.load(x + (tl.program_id(0) << 12) + tl.arange(0, WIDTH))


@triton.jit
def not_here(x, WIDTH: tl.constexpr):
    tl.load(x + no_such_function(tl.program_id(0)) + tl.arange(0, WIDTH))  # noqa: F821
