// Elementwise kernels, sums, layer normalization and softmax, for every type of elements; sums are
// float, or double for double.  Arrays are contiguous matrices of `rows` x `cols` unless a comment
// says otherwise.  A backward kernel follows its forward kernel.  `mm3d/arrays/cupy_kernels.py`
// launches them; `mm3d/model/functional.py` documents what they compute.

struct half_t { unsigned short bits; };
struct bf16_t { unsigned short bits; };

template <typename T> struct Wide { typedef float type; };
template <> struct Wide<double> { typedef double type; };
#define W typename Wide<T>::type

__device__ inline float wide(float x) { return x; }
__device__ inline double wide(double x) { return x; }
__device__ inline float wide(bf16_t x) { return __uint_as_float((unsigned)x.bits << 16); }
__device__ inline float wide(half_t x)
{
    float y;
#ifdef MM3D_ON_HOST
    y = host_half_to_float(x.bits);
#else
    asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x.bits));
#endif
    return y;
}
__device__ inline void put(float &y, float x) { y = x; }
__device__ inline void put(double &y, double x) { y = x; }
__device__ inline void put(float &y, double x) { y = (float)x; }
__device__ inline void put(bf16_t &y, float x)
{
    unsigned u = __float_as_uint(x);
    if (x != x)
        y.bits = (unsigned short)((u >> 16) | 64);
    else
        y.bits = (unsigned short)((u + 0x7FFF + ((u >> 16) & 1)) >> 16);    // to nearest even
}
__device__ inline void put(half_t &y, float x)
{
#ifdef MM3D_ON_HOST
    y.bits = host_float_to_half(x);
#else
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(y.bits) : "f"(x));
#endif
}

// --- Sixteen bytes at a time, where addresses and lengths allow it -------------------------

template <typename T> struct alignas(16) Pack { T of[16 / sizeof(T)]; };

__device__ inline bool aligned(const void *a, const void *b, const void *c)
{
    return ((((size_t)a) | ((size_t)b) | ((size_t)c)) & 15) == 0;
}

// Combine every row with the vector b, which a thread reads once for all its rows.
template <typename T, typename F>
__device__ void with_rows(long long rows, long long cols, const T *a, const T *b, T *y, F f)
{
    const int width = 16 / sizeof(T);
    const long long c = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    if (aligned(a, b, y) && cols % width == 0) {
        if (c * width >= cols)
            return;
        const Pack<T> v = ((const Pack<T> *)b)[c];
        for (long long r = blockIdx.y; r < rows; r += gridDim.y) {
            Pack<T> u = ((const Pack<T> *)(a + r * cols))[c], out;
            for (int i = 0; i < width; i++)
                put(out.of[i], f(wide(u.of[i]), wide(v.of[i])));
            ((Pack<T> *)(y + r * cols))[c] = out;
        }
        return;
    }
    for (long long j = c * width; j < cols && j < (c + 1) * width; j++)
        for (long long r = blockIdx.y; r < rows; r += gridDim.y)
            put(y[r * cols + j], f(wide(a[r * cols + j]), wide(b[j])));
}

// --- GELU, bias, scale ---------------------------------------------------------------------

template <typename V> __device__ inline V gelu(V u)
{
    const V a = (V)0.79788456080286535588, b = (V)(0.79788456080286535588 * 0.044715);
    return (V)0.5 * u * (1 + tanh(u * (a + b * (u * u))));
}
template <typename V> __device__ inline V gelu_slope(V u)
{
    const V a = (V)0.79788456080286535588, b = (V)(0.79788456080286535588 * 0.044715);
    const V t = tanh(u * (a + b * (u * u)));
    return (V)0.5 * (1 + t) + (V)0.5 * u * (a + 3 * b * (u * u)) * (1 - t * t);
}
template <typename T>
__global__ void bias_gelu_forward(const T *x, const T *b, T *y, long long rows, long long cols)
{
    with_rows(rows, cols, x, b, y, [](W u, W v) { return gelu(u + v); });
}
template <typename T>
__global__ void add_rows(const T *a, const T *b, T *y, long long rows, long long cols)
{
    with_rows(rows, cols, a, b, y, [](W u, W v) { return u + v; });
}
template <typename T>
__global__ void scale_rows(const T *a, const T *b, T *y, long long rows, long long cols)
{
    with_rows(rows, cols, a, b, y, [](W u, W v) { return u * v; });
}

// --- Sums over rows: blocks of 32 columns x 8 rows, a part for each block of rows ----------

template <typename T, typename F>
__device__ void column_parts(long long rows, long long cols, W *parts, F f)
{
    __shared__ W some[8][33];
    const int lane = threadIdx.x % 32, group = threadIdx.x / 32;
    const long long c = (long long)blockIdx.x * 32 + lane;
    W sum = 0;
    if (c < cols)
        for (long long r = (long long)blockIdx.y * 8 + group; r < rows; r += 8 * gridDim.y)
            sum += f(r * cols + c);
    some[group][lane] = sum;
    __syncthreads();
    if (group == 0 && c < cols) {
        for (int g = 1; g < 8; g++)
            sum += some[g][lane];
        parts[blockIdx.y * cols + c] = sum;
    }
}
template <typename T>
__global__ void sum_rows(const T *a, W *parts, long long rows, long long cols)
{
    column_parts<T>(rows, cols, parts, [=](long long i) { return wide(a[i]); });
}
template <typename T>
__global__ void sum_products(const T *a, const T *b, W *parts, long long rows, long long cols)
{
    column_parts<T>(rows, cols, parts, [=](long long i) { return wide(a[i]) * wide(b[i]); });
}
// dx of GELU(x + b) and, while its elements are in registers, the sums of its columns: db.
template <typename T>
__global__ void bias_gelu_backward(const T *dy, const T *x, const T *b, T *dx, W *parts,
                                   long long rows, long long cols)
{
    const int width = 16 / sizeof(T);
    __shared__ W some[8][32 * width + 1];
    const int lane = threadIdx.x % 32, group = threadIdx.x / 32;
    const long long c = ((long long)blockIdx.x * 32 + lane) * width;
    const int mine = c >= cols ? 0 : cols - c < width ? (int)(cols - c) : width;
    const bool packed = aligned(dy, x, dx) && cols % width == 0;
    W bias[width], sum[width];
    for (int i = 0; i < width; i++) {
        bias[i] = i < mine ? wide(b[c + i]) : 0;
        sum[i] = 0;
    }
    for (long long r = (long long)blockIdx.y * 8 + group; mine && r < rows; r += 8 * gridDim.y) {
        const long long at = r * cols + c;
        Pack<T> g, u;
        if (packed) {
            g = *(const Pack<T> *)(dy + at);
            u = *(const Pack<T> *)(x + at);
        } else
            for (int i = 0; i < mine; i++) {
                g.of[i] = dy[at + i];
                u.of[i] = x[at + i];
            }
        for (int i = 0; i < width; i++)
            if (i < mine) {
                const W d = wide(g.of[i]) * gelu_slope(wide(u.of[i]) + bias[i]);
                put(g.of[i], d);
                sum[i] += d;
            }
        if (packed)
            *(Pack<T> *)(dx + at) = g;
        else
            for (int i = 0; i < mine; i++)
                dx[at + i] = g.of[i];
    }
    for (int i = 0; i < width; i++)
        some[group][lane * width + i] = sum[i];
    __syncthreads();
    for (int i = threadIdx.x; i < 32 * width; i += blockDim.x) {
        const long long column = (long long)blockIdx.x * 32 * width + i;
        W total = some[0][i];
        for (int g = 1; g < 8; g++)
            total += some[g][i];
        if (column < cols)
            parts[blockIdx.y * cols + column] = total;
    }
}
template <typename T> __global__ void sum_parts(const W *parts, T *sum, int count, long long cols)
{
    const long long c = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    if (c >= cols)
        return;
    W total = 0;
    for (int p = 0; p < count; p++)
        total += parts[p * cols + c];
    put(sum[c], total);
}

// --- Rows: one block each ------------------------------------------------------------------

template <typename V, typename F> __device__ V across_block(V x, F join)
{
    __shared__ V some[32];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
    for (int d = 16; d > 0; d /= 2)
        x = join(x, __shfl_xor_sync(0xFFFFFFFFu, x, d));
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

// Layer normalization in steps, for rows divided over ranks: `sums` and `squares`
// are summed over the ranks between the steps.
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
    const W mean = sums[blockIdx.x] / features;
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
    const W mean = sums[blockIdx.x] / features;
    const W by = 1 / sqrt(squares[blockIdx.x] / features + eps);
    for (long long c = threadIdx.x; c < cols; c += blockDim.x)
        put(y[row + c], (wide(x[row + c]) - mean) * by);
    if (threadIdx.x == 0)
        rstd[blockIdx.x] = by;
}
// The same in one kernel, for whole rows: elements that are read again come from the cache.
template <typename T>
__global__ void norm_forward(const T *x, T *y, W *rstd, W features, W eps, long long cols)
{
    const T *u = x + blockIdx.x * cols;
    const W mean = row_sum<W>(cols, [=](long long c) { return wide(u[c]); }) / features;
    const W squares = row_sum<W>(cols, [=](long long c) {
        const W v = wide(u[c]) - mean;
        return v * v;
    });
    const W by = 1 / sqrt(squares / features + eps);
    for (long long c = threadIdx.x; c < cols; c += blockDim.x)
        put(y[blockIdx.x * cols + c], (wide(u[c]) - mean) * by);
    if (threadIdx.x == 0)
        rstd[blockIdx.x] = by;
}

template <typename T>
__global__ void norm_backward_sums(const T *dy, const T *xhat, W *sums, long long cols)
{
    const T *g = dy + blockIdx.x * cols, *h = xhat + blockIdx.x * cols;
    const W first = row_sum<W>(cols, [=](long long c) { return wide(g[c]); });
    const W second = row_sum<W>(cols, [=](long long c) { return wide(g[c]) * wide(h[c]); });
    if (threadIdx.x == 0) {
        sums[2 * blockIdx.x] = first;
        sums[2 * blockIdx.x + 1] = second;
    }
}
template <typename T>
__global__ void norm_backward(const T *dy, const T *xhat, const W *rstd, const W *sums, T *dx,
                              W features, long long cols)
{
    const long long row = blockIdx.x * cols;
    const W by = rstd[blockIdx.x];
    const W first = sums[2 * blockIdx.x] / features, second = sums[2 * blockIdx.x + 1] / features;
    for (long long c = threadIdx.x; c < cols; c += blockDim.x)
        put(dx[row + c], (wide(dy[row + c]) - first - wide(xhat[row + c]) * second) * by);
}

// --- Softmax of scores (heads, queries, positions), one block a row -------------------------
// Scores are scaled here; in a causal row q positions beyond first + q have no weight.

template <typename T>
__global__ void softmax_forward(const W *scores, T *P, W *lse, int queries, int positions,
                                int first, int causal, W scale)
{
    const W *s = scores + (long long)blockIdx.x * positions;
    T *p = P + (long long)blockIdx.x * positions;
    const int last = first + (int)(blockIdx.x % queries) + 1;
    const int seen = causal && last < positions ? last : positions;
    W top = -__uint_as_float(0x7F800000u);    // minus infinity
    for (int c = threadIdx.x; c < seen; c += blockDim.x)
        top = s[c] * scale > top ? s[c] * scale : top;
    top = across_block(top, [](W a, W b) { return a > b ? a : b; });
    const W sum = row_sum<W>(seen, [=](long long c) { return exp(s[c] * scale - top); });
    for (int c = threadIdx.x; c < positions; c += blockDim.x)
        put(p[c], c < seen ? exp(s[c] * scale - top) / sum : (W)0);
    if (threadIdx.x == 0)
        lse[blockIdx.x] = top + log(sum);
}
template <typename T>
__global__ void softmax_recompute(const W *scores, T *P, const W *lse, int queries, int positions,
                              int first, int causal, W scale)
{
    const long long row = (long long)blockIdx.x * positions;
    const int last = first + (int)(blockIdx.x % queries) + 1;
    const int seen = causal && last < positions ? last : positions;
    for (int c = threadIdx.x; c < positions; c += blockDim.x)
        put(P[row + c], c < seen ? exp(scores[row + c] * scale - lse[blockIdx.x]) : (W)0);
}
template <typename T>
__global__ void softmax_backward(const T *P, const W *dP, T *dS, int positions, W scale)
{
    const long long row = (long long)blockIdx.x * positions;
    const W sum = row_sum<W>(positions, [=](long long c) {
        return wide(P[row + c]) * dP[row + c];
    });
    for (int c = threadIdx.x; c < positions; c += blockDim.x)
        put(dS[row + c], wide(P[row + c]) * (dP[row + c] - sum) * scale);
}
