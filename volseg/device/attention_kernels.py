# ruff: noqa: N803  (upper case: what Triton is compiled for)
# mypy: disable-error-code="no-untyped-def"
"""Triton kernels of ``attention``, by tiles of ``BN`` rows and ``BM`` columns of scores.

Matrix ``r`` of scores belongs to sample ``r // H`` and head ``r % H``. Columns beyond the last are minus infinity.
"""

from volseg.device.triton_kernels import kernel, tl, triton


@triton.jit
def _begin(source, r, H, STEP_B, STEP_H):
    """Return the address of a matrix's rows."""
    return source + (r // H).to(tl.int64) * STEP_B + (r % H).to(tl.int64) * STEP_H


@triton.jit
def _load(source, first, second, STEP_1, STEP_2, MOST_1, MOST_2):
    """Return a tile of a matrix, with zeros beyond its ends."""
    mask = (first[:, None] < MOST_1) & (second[None, :] < MOST_2)
    return tl.load(source + first[:, None] * STEP_1 + second[None, :] * STEP_2, mask=mask, other=0.0)


@triton.jit
def _store(out, first, second, STEP_1, STEP_2, MOST_1, MOST_2, value):
    mask = (first[:, None] < MOST_1) & (second[None, :] < MOST_2)
    tl.store(out + first[:, None] * STEP_1 + second[None, :] * STEP_2, value.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _add_term(scores, term, EVERY, COUNT, STEP, STEP_1, STEP_2, r, first, second, MOST_1, MOST_2):
    source = term + (r // EVERY % COUNT).to(tl.int64) * STEP
    return scores + _load(source, first, second, STEP_1, STEP_2, MOST_1, MOST_2).to(tl.float32)


@kernel()
def attention_kernel(
    q, k, v, out, logs,
    qb, qh, qn, qf, kb, kh, km, kf, vb, vh, vm, vg, ob, oh, on, og,
    term, te, tc, tr, tn, tm, other, we, wc, wr, wn, wm,
    H, N, M, F, G, scale, TERMS: tl.constexpr,
    BN: tl.constexpr, BM: tl.constexpr, BF: tl.constexpr, BG: tl.constexpr,
):  # fmt: skip
    """Write the attended values of queries, and the logarithms of their softmax's divisors."""
    blocks = tl.cdiv(N, BN)
    r = tl.program_id(0) // blocks
    n = tl.program_id(0) % blocks * BN + tl.arange(0, BN)
    f, g = tl.arange(0, BF), tl.arange(0, BG)
    query = _load(_begin(q, r, H, qb, qh), n, f, qn, qf, N, F)
    keys, values = _begin(k, r, H, kb, kh), _begin(v, r, H, vb, vh)
    most = tl.full((BN,), float("-inf"), tl.float32)
    total = tl.zeros((BN,), tl.float32)
    sums = tl.zeros((BN, BG), tl.float32)
    for begin in range(0, M, BM):
        m = begin + tl.arange(0, BM)
        scores = tl.dot(query, _load(keys, f, m, kf, km, F, M)) * scale
        if TERMS > 0:
            scores = _add_term(scores, term, te, tc, tr, tn, tm, r, n, m, N, M)
        if TERMS > 1:
            scores = _add_term(scores, other, we, wc, wr, wn, wm, r, n, m, N, M)
        scores = tl.where(m[None, :] < M, scores, float("-inf"))
        largest = tl.maximum(most, tl.max(scores, 1))
        # For a row that is minus infinity so far: later columns may be larger.
        base = tl.where(largest == float("-inf"), 0.0, largest)
        weights, shrunk = tl.exp(scores - base[:, None]), tl.exp(most - base)
        value = _load(values, m, g, vm, vg, M, G)
        total = total * shrunk + tl.sum(weights, 1)
        sums = sums * shrunk[:, None] + tl.dot(weights.to(value.dtype), value)
        most = largest
    _store(_begin(out, r, H, ob, oh), n, g, on, og, N, G, sums / total[:, None])
    base = tl.where(most == float("-inf"), 0.0, most)
    tl.store(logs + r.to(tl.int64) * N + n, base + tl.log(total), mask=n < N)


@kernel()
def attention_query_kernel(
    q, k, v, grad, out, found, logs, sums,
    qb, qh, qn, qf, kb, kh, km, kf, vb, vh, vm, vg, gb, gh, gn, gg, ob, oh, on, og, fb, fh, fn, ff,
    term, te, tc, tr, tn, tm, other, we, wc, wr, wn, wm,
    H, N, M, F, G, scale, TERMS: tl.constexpr,
    BN: tl.constexpr, BM: tl.constexpr, BF: tl.constexpr, BG: tl.constexpr,
):  # fmt: skip
    """Write the gradient of the queries, and the sum of each row of the result with its gradient."""
    blocks = tl.cdiv(N, BN)
    r = tl.program_id(0) // blocks
    n = tl.program_id(0) % blocks * BN + tl.arange(0, BN)
    f, g = tl.arange(0, BF), tl.arange(0, BG)
    query = _load(_begin(q, r, H, qb, qh), n, f, qn, qf, N, F)
    slope = _load(_begin(grad, r, H, gb, gh), n, g, gn, gg, N, G)
    result = _load(_begin(out, r, H, ob, oh), n, g, on, og, N, G)
    own = tl.sum(slope.to(tl.float32) * result.to(tl.float32), 1)
    row = r.to(tl.int64) * N + n
    tl.store(sums + row, own, mask=n < N)
    log = tl.load(logs + row, mask=n < N, other=0.0)
    keys, values = _begin(k, r, H, kb, kh), _begin(v, r, H, vb, vh)
    total = tl.zeros((BN, BF), tl.float32)
    for begin in range(0, M, BM):
        m = begin + tl.arange(0, BM)
        key = _load(keys, f, m, kf, km, F, M)
        scores = tl.dot(query, key) * scale
        if TERMS > 0:
            scores = _add_term(scores, term, te, tc, tr, tn, tm, r, n, m, N, M)
        if TERMS > 1:
            scores = _add_term(scores, other, we, wc, wr, wn, wm, r, n, m, N, M)
        scores = tl.where(m[None, :] < M, scores, float("-inf"))
        weights = tl.exp(scores - log[:, None])
        of_weights = tl.dot(slope, _load(values, g, m, vg, vm, G, M))
        of_scores = weights * (of_weights - own[:, None])
        total += tl.dot(of_scores.to(key.dtype), tl.trans(key))
    _store(_begin(found, r, H, fb, fh), n, f, fn, ff, N, F, total * scale)


@kernel()
def attention_key_kernel(
    q, k, v, grad, of_key, of_value, logs, sums,
    qb, qh, qn, qf, kb, kh, km, kf, vb, vh, vm, vg, gb, gh, gn, gg, ob, oh, om, of, pb, ph, pm, pg,
    term, te, tc, tr, tn, tm, other, we, wc, wr, wn, wm,
    H, N, M, F, G, scale, TERMS: tl.constexpr,
    BN: tl.constexpr, BM: tl.constexpr, BF: tl.constexpr, BG: tl.constexpr,
):  # fmt: skip
    """Write the gradients of keys and values."""
    blocks = tl.cdiv(M, BM)
    r = tl.program_id(0) // blocks
    m = tl.program_id(0) % blocks * BM + tl.arange(0, BM)
    f, g = tl.arange(0, BF), tl.arange(0, BG)
    key = _load(_begin(k, r, H, kb, kh), m, f, km, kf, M, F)
    value = _load(_begin(v, r, H, vb, vh), m, g, vm, vg, M, G)
    queries, slopes = _begin(q, r, H, qb, qh), _begin(grad, r, H, gb, gh)
    key_total, value_total = tl.zeros((BM, BF), tl.float32), tl.zeros((BM, BG), tl.float32)
    for begin in range(0, N, BN):
        n = begin + tl.arange(0, BN)
        # Transposed, columns first: they are the rows of the sum.
        query, slope = _load(queries, f, n, qf, qn, F, N), _load(slopes, g, n, gg, gn, G, N)
        scores = tl.dot(key, query) * scale
        if TERMS > 0:
            scores = _add_term(scores, term, te, tc, tr, tm, tn, r, m, n, M, N)
        if TERMS > 1:
            scores = _add_term(scores, other, we, wc, wr, wm, wn, r, m, n, M, N)
        row = r.to(tl.int64) * N + n
        log = tl.load(logs + row, mask=n < N, other=0.0)
        own = tl.load(sums + row, mask=n < N, other=0.0)
        weights = tl.where(n[None, :] < N, tl.exp(scores - log[None, :]), 0.0)
        value_total += tl.dot(weights.to(slope.dtype), tl.trans(slope))
        of_scores = weights * (tl.dot(value, slope) - own[None, :])
        key_total += tl.dot(of_scores.to(query.dtype), tl.trans(query))
    _store(_begin(of_key, r, H, ob, oh), m, f, om, of, M, F, key_total * scale)
    _store(_begin(of_value, r, H, pb, ph), m, g, pm, pg, M, G, value_total)


@kernel()
def attention_term_kernel(
    q, k, v, grad, logs, sums, out,
    qb, qh, qn, qf, kb, kh, km, kf, vb, vh, vm, vg, gb, gh, gn, gg,
    term, te, tc, tr, tn, tm, other, we, wc, wr, wn, wm,
    H, N, M, F, G, scale, every, count, members, per_program, TERMS: tl.constexpr,
    BN: tl.constexpr, BM: tl.constexpr, BF: tl.constexpr, BG: tl.constexpr,
):  # fmt: skip
    """Write sums of the gradients of score matrices, for each part of the matrices that use one term matrix."""
    # Score matrices of one place run side by side: they read the same mask.
    matrix, place = tl.program_id(0) % count, tl.program_id(0) // count
    tiles = tl.cdiv(N, BN) * tl.cdiv(M, BM)
    part, tile = place // tiles, place % tiles
    n = tile // tl.cdiv(M, BM) * BN + tl.arange(0, BN)
    m = tile % tl.cdiv(M, BM) * BM + tl.arange(0, BM)
    f, g = tl.arange(0, BF), tl.arange(0, BG)
    total = tl.zeros((BN, BM), tl.float32)
    for member in range(part * per_program, tl.minimum((part + 1) * per_program, members)):
        r = (member // every * count + matrix) * every + member % every
        query = _load(_begin(q, r, H, qb, qh), n, f, qn, qf, N, F)
        slope = _load(_begin(grad, r, H, gb, gh), n, g, gn, gg, N, G)
        scores = tl.dot(query, _load(_begin(k, r, H, kb, kh), f, m, kf, km, F, M)) * scale
        if TERMS > 0:
            scores = _add_term(scores, term, te, tc, tr, tn, tm, r, n, m, N, M)
        if TERMS > 1:
            scores = _add_term(scores, other, we, wc, wr, wn, wm, r, n, m, N, M)
        row = r.to(tl.int64) * N + n
        log = tl.load(logs + row, mask=n < N, other=0.0)
        own = tl.load(sums + row, mask=n < N, other=0.0)
        of_weights = tl.dot(slope, _load(_begin(v, r, H, vb, vh), g, m, vg, vm, G, M))
        total += tl.exp(scores - log[:, None]) * (of_weights - own[:, None])
    _store(out + (part * count + matrix).to(tl.int64) * N * M, n, m, M, 1, N, M, total)
