// Normalizations and softmax, which need whole rows.  Where rows are not `centred`, they are divided
// by the root of their mean square, and no mean is subtracted.  ``kernels.cu``, which goes before, has
// the types, and says what holds for all kernels.

// --- Rows: one block each ------------------------------------------------------------------

template <typename V, typename F> __device__ inline V across_warp(V x, F join)
{
    for (int d = 16; d > 0; d /= 2)
        x = join(x, __shfl_xor_sync(0xFFFFFFFFu, x, d));
    return x;
}
template <typename V, typename F> __device__ V across_block(V x, F join)
{
    __shared__ V some[32];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
    x = across_warp(x, join);
    __syncthreads();    // no thread reads `some` any longer
    if (lane == 0)
        some[warp] = x;
    __syncthreads();
    x = some[0];
    for (int w = 1; w < warps; w++)
        x = join(x, some[w]);
    return x;
}
template <typename V, typename F> __device__ V row_sum(long long cols, F f)
{
    V sum = 0;
    for (long long c = threadIdx.x; c < cols; c += blockDim.x)
        sum += f(c);
    return across_block(sum, [](V a, V b) { return a + b; });
}

// Normalization in steps, for rows divided over ranks: `sums` and `squares` are summed over the
// ranks between the steps.  `sums` is null where rows are not centred.
template <typename T> __global__ void norm_sums(const T *x, W *sums, long long cols)
{
    const T *u = x + blockIdx.x * cols;
    const W sum = row_sum<W>(cols, [=](long long c) { return wide(u[c]); });
    if (threadIdx.x == 0)
        sums[blockIdx.x] = sum;
}
template <typename T>
__global__ void norm_squares(const T *x, const W *sums, W *squares, W features, long long cols)
{
    const T *u = x + blockIdx.x * cols;
    const W mean = sums ? sums[blockIdx.x] / features : 0;
    const W sum = row_sum<W>(cols, [=](long long c) {
        const W v = wide(u[c]) - mean;
        return v * v;
    });
    if (threadIdx.x == 0)
        squares[blockIdx.x] = sum;
}
template <typename T>
__global__ void norm_scale(const T *x, const W *sums, const W *squares, T *y, W *rstd, W features,
                           W eps, long long cols)
{
    const long long row = blockIdx.x * cols;
    const W mean = sums ? sums[blockIdx.x] / features : 0;
    const W by = 1 / sqrt(squares[blockIdx.x] / features + eps);
    for (long long c = threadIdx.x; c < cols; c += blockDim.x)
        put(y[row + c], (wide(x[row + c]) - mean) * by);
    if (threadIdx.x == 0)
        rstd[blockIdx.x] = by;
}
// The same in one kernel, for whole rows.  A thread keeps its packs of the row in registers; where
// it cannot, its elements are read again, from the cache.
const int KEPT = 2;
template <typename T>
__device__ inline bool keeps(const T *a, const T *b, const T *y, long long cols)
{
    const int width = 16 / sizeof(T);
    return aligned(a, b, y) && cols % width == 0 && cols <= (long long)KEPT * blockDim.x * width;
}
template <typename T> __device__ inline void keep(Pack<T> *kept, const T *row, long long cols)
{
    for (int k = 0; k < KEPT; k++) {
        const long long c = (threadIdx.x + (long long)k * blockDim.x) * (16 / sizeof(T));
        if (c < cols)
            kept[k] = *(const Pack<T> *)(row + c);
    }
}
template <typename T, typename F> __device__ inline W kept_sum(long long cols, F f)
{
    const int width = 16 / sizeof(T);
    W sum = 0;
    for (int k = 0; k < KEPT; k++)
        if ((threadIdx.x + (long long)k * blockDim.x) * width < cols)
            for (int i = 0; i < width; i++)
                sum += f(k, i);
    return across_block(sum, [](W a, W b) { return a + b; });
}
template <typename T, typename F> __device__ inline void put_kept(T *row, long long cols, F f)
{
    const int width = 16 / sizeof(T);
    for (int k = 0; k < KEPT; k++) {
        const long long c = (threadIdx.x + (long long)k * blockDim.x) * width;
        if (c >= cols)
            break;
        Pack<T> out;
        for (int i = 0; i < width; i++)
            put(out.of[i], f(k, i));
        *(Pack<T> *)(row + c) = out;
    }
}
template <typename T> __launch_bounds__(1024)
__global__ void norm_forward(const T *x, T *y, W *rstd, W features, W eps, int centred,
                             long long cols)
{
    const T *u = x + blockIdx.x * cols;
    T *v = y + blockIdx.x * cols;
    W by;
    if (keeps(u, u, v, cols)) {
        Pack<T> kept[KEPT];
        keep(kept, u, cols);
        W mean = 0;
        if (centred)
            mean = kept_sum<T>(cols, [&](int k, int i) { return wide(kept[k].of[i]); }) / features;
        by = 1 / sqrt(kept_sum<T>(cols, [&](int k, int i) {
            const W d = wide(kept[k].of[i]) - mean;
            return d * d;
        }) / features + eps);
        put_kept(v, cols, [&](int k, int i) { return (wide(kept[k].of[i]) - mean) * by; });
    } else {
        W mean = 0;
        if (centred)
            mean = row_sum<W>(cols, [=](long long c) { return wide(u[c]); }) / features;
        by = 1 / sqrt(row_sum<W>(cols, [=](long long c) {
            const W d = wide(u[c]) - mean;
            return d * d;
        }) / features + eps);
        for (long long c = threadIdx.x; c < cols; c += blockDim.x)
            put(v[c], (wide(u[c]) - mean) * by);
    }
    if (threadIdx.x == 0)
        rstd[blockIdx.x] = by;
}
template <typename T> __launch_bounds__(1024)
__global__ void norm_backward_whole(const T *dy, const T *xhat, const W *rstd, T *dx, W features,
                                    int centred, long long cols)
{
    const T *g = dy + blockIdx.x * cols, *h = xhat + blockIdx.x * cols;
    T *d = dx + blockIdx.x * cols;
    const W by = rstd[blockIdx.x];
    if (keeps(g, h, d, cols)) {
        Pack<T> kept[KEPT], other[KEPT];
        keep(kept, g, cols);
        keep(other, h, cols);
        W first = 0;
        if (centred)
            first = kept_sum<T>(cols, [&](int k, int i) { return wide(kept[k].of[i]); })
                    / features;
        const W second = kept_sum<T>(cols, [&](int k, int i) {
            return wide(kept[k].of[i]) * wide(other[k].of[i]);
        }) / features;
        put_kept(d, cols, [&](int k, int i) {
            return (wide(kept[k].of[i]) - first - wide(other[k].of[i]) * second) * by;
        });
        return;
    }
    W first = 0;
    if (centred)
        first = row_sum<W>(cols, [=](long long c) { return wide(g[c]); }) / features;
    const W second = row_sum<W>(cols, [=](long long c) { return wide(g[c]) * wide(h[c]); })
                     / features;
    for (long long c = threadIdx.x; c < cols; c += blockDim.x)
        put(d[c], (wide(g[c]) - first - wide(h[c]) * second) * by);
}
template <typename T>
__global__ void norm_backward_sums(const T *dy, const T *xhat, W *sums, int centred,
                                   long long cols)
{
    const T *g = dy + blockIdx.x * cols, *h = xhat + blockIdx.x * cols;
    sums += (1 + centred) * blockIdx.x;
    if (centred) {
        const W first = row_sum<W>(cols, [=](long long c) { return wide(g[c]); });
        if (threadIdx.x == 0)
            sums[0] = first;
    }
    const W second = row_sum<W>(cols, [=](long long c) { return wide(g[c]) * wide(h[c]); });
    if (threadIdx.x == 0)
        sums[centred] = second;
}
template <typename T>
__global__ void norm_backward(const T *dy, const T *xhat, const W *rstd, const W *sums, T *dx,
                              W features, int centred, long long cols)
{
    const long long row = blockIdx.x * cols;
    const W by = rstd[blockIdx.x];
    sums += (1 + centred) * blockIdx.x;
    const W first = centred ? sums[0] / features : 0, second = sums[centred] / features;
    for (long long c = threadIdx.x; c < cols; c += blockDim.x)
        put(dx[row + c], (wide(dy[row + c]) - first - wide(xhat[row + c]) * second) * by);
}

// --- Softmax of scaled scores (heads, queries, positions), one warp a row --------------------
// Row q has weights of `reach` positions at most, up to first + q; heads' logarithms are `apart`.  Of
// rows that can be read by fours, a lane holds up to 4 `FOURS` elements; others are read again.

const int FOURS = 8;
template <typename T> struct alignas(4 * sizeof(T)) Quad { T of[4]; };
template <typename V> struct Log { static constexpr V of_e = (V)1.44269504088896340736,
                                                       of_2 = (V)0.69314718055994530942; };

template <typename V> __device__ inline V warp_sum(V x)
{
    return across_warp(x, [](V a, V b) { return a + b; });
}
template <typename V> __device__ inline V warp_top(V x)
{
    return across_warp(x, [](V a, V b) { return a > b ? a : b; });
}
template <typename T> __device__ inline bool fours(const T *a, int length)
{
    return length % 4 == 0 && (size_t)a % sizeof(Quad<T>) == 0;
}
// Call f for each of the fours that this lane holds, with its number and its first column.
template <int N, typename F> __device__ inline void each_four(int length, F f)
{
    for (int k = 0; k < N; k++) {
        const int c = (32 * k + (int)threadIdx.x % 32) * 4;
        if (c < length)
            f(k, c);
    }
}
template <typename T, int N>
__device__ W softmax_held(const W *s, T *p, int length, int from, int seen, W scale)
{
    const W none = -__uint_as_float(0x7F800000u);
    Quad<W> held[N];
    W top = none, sum = 0;
    each_four<N>(length, [&](int k, int c) {
        held[k] = *(const Quad<W> *)(s + c);
        for (int i = 0; i < 4; i++) {
            held[k].of[i] = c + i >= from && c + i < seen ? held[k].of[i] * scale : none;
            top = held[k].of[i] > top ? held[k].of[i] : top;
        }
    });
    top = warp_top(top);
    each_four<N>(length, [&](int k, int c) {
        for (int i = 0; i < 4; i++) {
            held[k].of[i] = power_of_2(held[k].of[i] - top);
            sum += held[k].of[i];
        }
    });
    sum = warp_sum(sum);
    const W by = 1 / sum;
    each_four<N>(length, [&](int k, int c) {
        Quad<T> q;
        for (int i = 0; i < 4; i++)
            put(q.of[i], held[k].of[i] * by);
        *(Quad<T> *)(p + c) = q;
    });
    return top + log2(sum);
}
template <typename T>
__device__ W softmax_read_again(const W *s, T *p, int length, int from, int seen, W scale)
{
    W top = -__uint_as_float(0x7F800000u), sum = 0;
    for (int c = from + threadIdx.x % 32; c < seen; c += 32)
        top = s[c] * scale > top ? s[c] * scale : top;
    top = warp_top(top);
    for (int c = from + threadIdx.x % 32; c < seen; c += 32)
        sum += power_of_2(s[c] * scale - top);
    sum = warp_sum(sum);
    for (int c = threadIdx.x % 32; c < length; c += 32)
        put(p[c], c >= from && c < seen ? power_of_2(s[c] * scale - top) / sum : (W)0);
    return top + log2(sum);
}
template <typename T>
__global__ void softmax_forward(const W *scores, T *P, W *lse, long long rows, int queries,
                                int positions, int apart, int first, int reach, W scale)
{
    const long long row = (long long)blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32;
    if (row >= rows)
        return;
    const W *s = scores + row * positions;
    T *p = P + row * positions;
    const int query = (int)(row % queries), last = first + query + 1;
    const int from = max(last - reach, 0), seen = min(last, positions);
    const bool whole = fours(p, positions) && fours(s, positions);
    scale *= Log<W>::of_e;
    const W total = whole && positions <= 64 * FOURS
                        ? softmax_held<T, FOURS / 2>(s, p, positions, from, seen, scale)
                    : whole && positions <= 128 * FOURS
                        ? softmax_held<T, FOURS>(s, p, positions, from, seen, scale)
                        : softmax_read_again(s, p, positions, from, seen, scale);
    if (threadIdx.x % 32 == 0)
        lse[row / queries * apart + query] = total * Log<W>::of_2;
}
template <typename T>
__global__ void softmax_recompute(const W *scores, T *P, const W *lse, long long rows, int queries,
                                  int positions, int apart, int first, int reach, W scale)
{
    const long long row = (long long)blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32;
    if (row >= rows)
        return;
    const int query = (int)(row % queries), last = first + query + 1;
    const int from = max(last - reach, 0), seen = min(last, positions);
    const W *s = scores + row * positions;
    T *p = P + row * positions;
    const W total = lse[row / queries * apart + query] * Log<W>::of_e;
    scale *= Log<W>::of_e;
    if (fours(p, positions) && fours(s, positions))
        for (int c = 4 * (threadIdx.x % 32); c < positions; c += 128) {
            const Quad<W> u = *(const Quad<W> *)(s + c);
            Quad<T> q;
            for (int i = 0; i < 4; i++)
                put(q.of[i], c + i >= from && c + i < seen
                                 ? power_of_2(u.of[i] * scale - total) : (W)0);
            *(Quad<T> *)(p + c) = q;
        }
    else
        for (int c = threadIdx.x % 32; c < positions; c += 32)
            put(p[c], c >= from && c < seen ? power_of_2(s[c] * scale - total) : (W)0);
}
template <typename T, int N>
__device__ void softmax_slopes(const T *p, const W *g, T *d, int length, W scale)
{
    Quad<T> held[N];
    Quad<W> slopes[N];
    W sum = 0;
    each_four<N>(length, [&](int k, int c) {
        held[k] = *(const Quad<T> *)(p + c);
        slopes[k] = *(const Quad<W> *)(g + c);
    });
    each_four<N>(length, [&](int k, int c) {
        for (int i = 0; i < 4; i++)
            sum += wide(held[k].of[i]) * slopes[k].of[i];
    });
    sum = warp_sum(sum);
    each_four<N>(length, [&](int k, int c) {
        for (int i = 0; i < 4; i++)
            put(held[k].of[i], wide(held[k].of[i]) * (slopes[k].of[i] - sum) * scale);
        *(Quad<T> *)(d + c) = held[k];
    });
}
template <typename T>
__global__ void softmax_backward(const T *P, const W *dP, T *dS, long long rows, int positions,
                                 W scale)
{
    const long long row = (long long)blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32;
    if (row >= rows)
        return;
    const T *p = P + row * positions;
    const W *g = dP + row * positions;
    T *d = dS + row * positions;
    const bool whole = fours(p, positions) && fours(g, positions) && fours(d, positions);
    if (whole && positions <= 64 * FOURS)
        softmax_slopes<T, FOURS / 2>(p, g, d, positions, scale);
    else if (whole && positions <= 128 * FOURS)
        softmax_slopes<T, FOURS>(p, g, d, positions, scale);
    else {
        W sum = 0;
        for (int c = threadIdx.x % 32; c < positions; c += 32)
            sum += wide(p[c]) * g[c];
        sum = warp_sum(sum);
        for (int c = threadIdx.x % 32; c < positions; c += 32)
            put(d[c], wide(p[c]) * (g[c] - sum) * scale);
    }
}
