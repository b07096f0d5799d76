"""Small kernels for tests of lockstep. Import it only where Triton is installed.

``numbers`` has an int32 of each program, which decides what the program does.
"""

from attnlab.kernels.triton import interpreter

triton = interpreter.interpreted_triton()
tl = triton.language

# Programs that take different ways.


@triton.jit
def branch(numbers, out, SIZE: tl.constexpr):
    i = tl.program_id(0)
    n = tl.load(numbers + i)
    block = tl.arange(0, SIZE) + n
    if n > 4:
        block = block * 2
        if n % 2 == 0:
            block += 100
        else:
            late = block - 7
            block = late
    elif n == 3:
        block = -block
    tl.store(out + i * SIZE + tl.arange(0, SIZE), block)


@triton.jit
def loops(numbers, out, SIZE: tl.constexpr):
    i = tl.program_id(0)
    n = tl.load(numbers + i)
    total = tl.zeros([SIZE], dtype=tl.float32)
    last = 0
    for j in range(n):
        for k in range(j, n):
            total += (tl.arange(0, SIZE) + j * 3 + k).to(tl.float32) / 7
        last = j
    m = n
    while m > 1:
        m = m // 2 if m % 2 == 0 else 3 * m + 1
        total = total * 0.5 + m
    tl.store(out + i * SIZE + tl.arange(0, SIZE), total + last)


@triton.jit
def begins(numbers, out):
    i = tl.program_id(0)
    n = tl.load(numbers + i)
    product = 1
    for j in range(n, n + 3):
        product = product * 3 + j // 2
    tl.store(out + i, product)


@triton.jit
def kinds(numbers, out):
    i = tl.program_id(0)
    n = tl.load(numbers + i)
    found = n
    for _j in range(n):
        found = found * 0.5 + 1  # an int32 before the loop
    tl.store(out + i, found)


@triton.jit
def negative(numbers, out):
    i = tl.program_id(0)
    n = tl.load(numbers + i)
    total = 0
    for j in range(n, n + 3):
        total = total * 3 + (j - 6) // 2
    tl.store(out + i, total)


@triton.jit
def selects(numbers, out, SIZE: tl.constexpr):
    i = tl.program_id(0)
    n = tl.load(numbers + i)
    at = tl.arange(0, SIZE)
    mean = n / 4
    chosen = (mean == 1.25) & (at < 3)  # a scalar condition of floats, spread over a block
    tl.store(out + i * SIZE + at, tl.where(chosen, 1.0, 0.5))


@triton.jit
def returns(numbers, out, SIZE: tl.constexpr):
    i = tl.program_id(0)
    n = tl.load(numbers + i)
    if n % 3 == 0:
        return
    at = i * SIZE + tl.arange(0, SIZE)
    if n > 5:
        tl.store(out + at, 1.0 * n)
        return
    for j in range(n):
        if j == 2:
            return
    tl.store(out + at, tl.arange(0, SIZE) * 0.25)


@triton.jit
def jumps(numbers, out):
    i = tl.program_id(0)
    n = tl.load(numbers + i)
    total = 0
    for j in range(n):
        if j % 2 == 1:
            continue
        if j > 4:
            break
        total += j
    while total < 100:
        total += n + 1
        if total > 50:
            break
    tl.store(out + i, total)


@triton.jit
def stores(numbers, out):
    i = tl.program_id(0)
    n = tl.load(numbers + i)
    if n > 4:
        tl.store(out + 2 * i, 1.5 + n)
    else:
        tl.store(out + 2 * i, 0.5 - n)
        if n > 2:
            tl.store(out + 2 * i + 1, 0.25)


@triton.jit
def conditions(numbers, out):
    i = tl.program_id(0)
    n = tl.load(numbers + i)
    found = 0
    if n > 1 and 8 // n > 1:
        found += 1
    if n < 2 or 6 % n == 0:
        found += 10
    if 2 < n <= 5 < 2 * n:
        found += 100
    if not n:
        found += 1000
    found += 10000 if n == 4 else 20000
    tl.store(out + i, found)


# Blocks: shapes, reductions, products, loads and stores.


@triton.jit
def shapes(source, scale, out, SIZE: tl.constexpr):
    i = tl.program_id(0)
    row = tl.load(source + i * SIZE + tl.arange(0, SIZE))
    tile = row[:, None] * tl.load(scale + i) + row[None, :]
    tile = tl.trans(tile) - tl.reshape(tl.ravel(tile), [SIZE, SIZE])
    both = tl.join(tile, tile * 2)
    left, right = both.split()
    far = tl.cat(row, row)
    tile += left + right + tl.sum(far, axis=0) + tl.max(row, axis=0)
    tile += tl.cumsum(tile, axis=1) + tl.argmin(tile, axis=1)[:, None]
    tile += tl.sum(tl.sum(tile, axis=1, keep_dims=True))
    at = tl.arange(0, SIZE)[:, None] * SIZE + tl.arange(0, SIZE)[None, :]
    tl.store(out + i * SIZE * SIZE + at, tile)


@triton.jit
def product(left, right, out, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr):
    i = tl.program_id(0)
    m, n, k = tl.arange(0, M), tl.arange(0, N), tl.arange(0, K)
    x = tl.load(left + i * M * K + m[:, None] * K + k[None, :])
    y = tl.load(right + n[None, :] * K + k[:, None])
    tl.store(out + i * M * N + m[:, None] * N + n[None, :], tl.dot(x, y))


@triton.jit
def scalars(numbers, out, SIZE: tl.constexpr):
    i = tl.program_id(0)
    n = tl.load(numbers + i)
    block = tl.arange(0, SIZE)
    tl.store(out + i * SIZE + block, n * 10 + block + tl.where(n > block, n, 0))


@triton.jit
def gather(source, where, out, count, SIZE: tl.constexpr):
    i = tl.program_id(0)
    at = tl.arange(0, SIZE)
    rows = tl.load(where + i * SIZE + at)
    tile = tl.load(
        source + rows[:, None] * SIZE + at[None, :], mask=(rows >= 0)[:, None], other=-1.0
    )
    tl.store(out + i * SIZE + at, tl.sum(tile, axis=1), mask=i * SIZE + at < count)


@triton.jit
def wraps(numbers, out):
    i = tl.program_id(0)
    n = tl.load(numbers + i)
    for _j in range(n):
        n = n * 300
    tl.store(out + i, n * 50000)


@triton.jit
def walk(numbers, cache, out, SIZE: tl.constexpr):
    i = tl.program_id(0)
    n = tl.load(numbers + i)
    at = tl.arange(0, SIZE)
    total = tl.zeros([SIZE], dtype=tl.float32)
    for j in range(n):
        total += tl.load(cache + j * SIZE + at, mask=at != n, other=0.5)
    tl.store(out + i * SIZE + at, total)


# What lockstep does not run.


@triton.jit
def atomic(out, count):
    tl.atomic_add(out + tl.program_id(0) % 2, 1.5)


@triton.jit
def larger(a, b):
    return tl.maximum(a, b) + 1


@triton.jit
def reduction(out, count, SIZE: tl.constexpr = 8):
    found = tl.reduce(tl.arange(0, SIZE) + tl.program_id(0), 0, larger)
    tl.store(out + tl.program_id(0), found)


@triton.jit
def stored_first(out, count):
    i = tl.program_id(0)
    tl.store(out + i, 3.0 + i)
    tl.store(out + count + i, tl.load(out + i) * 2)


@triton.jit
def loaded_first(out, count):
    i = tl.program_id(0)
    before = tl.load(out + (i + 7) % 8)
    tl.store(out + i, before + 1)


@triton.jit
def same_element(out, count):
    i = tl.program_id(0)
    tl.store(out + i // 2, 1.0 * i)
    tl.store(out + i // 2, 2.0 * i, mask=i % 2 == 0)


@triton.jit
def equal_element(out, count):
    i = tl.program_id(0)
    tl.store(out + i // 2, 0.5 * (i // 2))
    tl.store(out + 8 + i % 4, 1.0 * (i % 4))


@triton.jit
def equal_then_other(out, count):
    i = tl.program_id(0)
    tl.store(out + i // 2, 5.0)
    tl.store(out + i // 2, 6.0, mask=i % 2 == 0)


@triton.jit
def earlier(out, count):
    i, j = tl.program_id(0), tl.program_id(1)
    tl.store(out + (i + j) % 3 + tl.arange(0, 2), 1.0 * (10 * i + j))


@triton.jit
def late_load(out, count):
    i = tl.program_id(0)
    tl.store(out + i, 1.0 * i + tl.load(out + i - 4, mask=i >= 4, other=0.0))


@triton.jit
def walrus(out, count):
    if (n := tl.program_id(0)) > 1:
        tl.store(out + n, 5.0)


@triton.jit
def mask_of_numbers(source, out):
    i = tl.program_id(0)
    at = 2 * i + tl.arange(0, 2)
    tl.store(out + at, tl.load(source + at, mask=at % 3, other=7.0))
