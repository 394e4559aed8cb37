// Elementwise kernels and sums over rows, for every type of elements; sums are float, or double for
// double.  Arrays are contiguous matrices of `rows` x `cols` unless a comment says otherwise.  A
// backward kernel follows its forward kernel.  `mm3d/arrays/cupy_kernels.py` launches them;
// `mm3d/model/functional.py` documents what they compute.

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
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(y.bits) : "f"(x));
#else
    unsigned u = __float_as_uint(x);
    if (x != x)
        y.bits = (unsigned short)((u >> 16) | 64);
    else
        y.bits = (unsigned short)((u + 0x7FFF + ((u >> 16) & 1)) >> 16);    // to nearest even
#endif
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

// Read and write the packs of a row, or what is left of its end: the `mine` elements from `at` on.
template <typename T>
__device__ inline Pack<T> read_pack(const T *a, long long at, int mine, bool packed)
{
    Pack<T> u;
    if (packed)
        return *(const Pack<T> *)(a + at);
    for (int i = 0; i < 16 / sizeof(T); i++)    // a bound that is known keeps u in registers
        if (i < mine)
            u.of[i] = a[at + i];
    return u;
}
template <typename T>
__device__ inline void write_pack(T *a, long long at, int mine, bool packed, const Pack<T> &u)
{
    if (packed)
        *(Pack<T> *)(a + at) = u;
    else
        for (int i = 0; i < 16 / sizeof(T); i++)
            if (i < mine)
                a[at + i] = u.of[i];
}

// Combine every row with vectors p and q, which a thread reads once for all its rows.
template <typename T, typename F>
__device__ void with_rows(long long rows, long long cols, const T *a, const T *p, const T *q,
                          T *y, F f)
{
    const int width = 16 / sizeof(T);
    const long long c = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    if (aligned(a, p, y) && aligned(q, q, q) && cols % width == 0) {
        if (c * width >= cols)
            return;
        const Pack<T> v = ((const Pack<T> *)p)[c], w = ((const Pack<T> *)q)[c];
        for (long long r = blockIdx.y; r < rows; r += gridDim.y) {
            Pack<T> u = ((const Pack<T> *)(a + r * cols))[c], out;
            for (int i = 0; i < width; i++)
                put(out.of[i], f(wide(u.of[i]), wide(v.of[i]), wide(w.of[i])));
            ((Pack<T> *)(y + r * cols))[c] = out;
        }
        return;
    }
    for (long long j = c * width; j < cols && j < (c + 1) * width; j++)
        for (long long r = blockIdx.y; r < rows; r += gridDim.y)
            put(y[r * cols + j], f(wide(a[r * cols + j]), wide(p[j]), wide(q[j])));
}

// --- GELU, bias, scale ---------------------------------------------------------------------

// Powers of 2 and reciprocals are an instruction each in float, and 0 below 2^-126.
#ifdef MM3D_ON_HOST
__device__ inline float power_of_2(float x) { return exp2f(x); }
__device__ inline float reciprocal(float x) { return 1 / x; }
#else
__device__ inline float power_of_2(float x)
{
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
__device__ inline float reciprocal(float x)
{
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
#endif
__device__ inline double power_of_2(double x) { return exp2(x); }
__device__ inline double reciprocal(double x) { return 1 / x; }

// (1 + tanh v) / 2 = 1 / (1 + exp(-2 v)) for v = sqrt(2 / pi) (u + 0.044715 u^3), without
// cancellation.
template <typename V> __device__ inline V logistic(V u)
{
    const V a = (V)-2.30220819814432489, b = (V)(-2.30220819814432489 * 0.044715);
    return reciprocal(1 + power_of_2(u * (a + b * (u * u))));    // a = -2 sqrt(2 / pi) / ln 2
}
template <typename V> __device__ inline V gelu(V u) { return u * logistic(u); }
template <typename V> __device__ inline V gelu_slope(V u)
{
    const V a = (V)1.59576912160573071176, b = (V)(1.59576912160573071176 * 0.044715);
    const V s = logistic(u);
    return s + u * (a + 3 * b * (u * u)) * s * (1 - s);
}
template <typename T>
__global__ void bias_gelu_forward(const T *x, const T *b, T *y, long long rows, long long cols)
{
    with_rows(rows, cols, x, b, b, y, [](W u, W v, W) { return gelu(u + v); });
}
template <typename T>
__global__ void add_rows(const T *a, const T *b, T *y, long long rows, long long cols)
{
    with_rows(rows, cols, a, b, b, y, [](W u, W v, W) { return u + v; });
}
template <typename T>
__global__ void scale_rows(const T *a, const T *b, T *y, long long rows, long long cols)
{
    with_rows(rows, cols, a, b, b, y, [](W u, W v, W) { return u * v; });
}
template <typename T>
__global__ void scale_add_rows(const T *a, const T *b, const T *c, T *y, long long rows,
                               long long cols)
{
    with_rows(rows, cols, a, b, c, y, [](W u, W v, W w) { return u * v + w; });
}

// --- SwiGLU: g and u are the rows of (rows, 2, cols) ---------------------------------------

// Call f with the place of a pack in a row of (rows, cols), the same place among the g's, how many
// elements there are, and whether they are a pack.
template <typename T, typename F>
__device__ void gated_rows(long long rows, long long cols, bool packed, F f)
{
    const int width = 16 / sizeof(T);
    const long long c = ((long long)blockIdx.x * blockDim.x + threadIdx.x) * width;
    if (c >= cols)
        return;
    const int mine = cols - c < width ? (int)(cols - c) : width;
    for (long long r = blockIdx.y; r < rows; r += gridDim.y)
        if (packed)    // constants need fewer instructions and registers
            f(r * cols + c, 2 * r * cols + c, width, true);
        else
            f(r * cols + c, 2 * r * cols + c, mine, false);
}
template <typename V> __device__ inline V sigmoid(V g)
{
    return reciprocal(1 + power_of_2(g * (V)-1.44269504088896340736));
}
template <typename T>
__global__ void swiglu_forward(const T *x, T *y, long long rows, long long cols)
{
    const int width = 16 / sizeof(T);
    const bool whole = aligned(x, y, y) && cols % width == 0;
    gated_rows<T>(rows, cols, whole, [=](long long at, long long gate, int mine, bool packed) {
        const Pack<T> g = read_pack(x, gate, mine, packed);
        Pack<T> u = read_pack(x, gate + cols, mine, packed);
        for (int i = 0; i < width; i++)
            if (i < mine)
                put(u.of[i], wide(g.of[i]) * sigmoid(wide(g.of[i])) * wide(u.of[i]));
        write_pack(y, at, mine, packed, u);
    });
}
template <typename T>
__global__ void swiglu_backward(const T *dy, const T *x, T *dx, long long rows, long long cols)
{
    const int width = 16 / sizeof(T);
    const bool whole = aligned(dy, x, dx) && cols % width == 0;
    gated_rows<T>(rows, cols, whole, [=](long long at, long long gate, int mine, bool packed) {
        const Pack<T> d = read_pack(dy, at, mine, packed);
        Pack<T> g = read_pack(x, gate, mine, packed), u = read_pack(x, gate + cols, mine, packed);
        for (int i = 0; i < width; i++)
            if (i < mine) {
                const W a = wide(d.of[i]), b = wide(g.of[i]), c = wide(u.of[i]), s = sigmoid(b);
                put(g.of[i], a * c * s * (1 + b * (1 - s)));
                put(u.of[i], a * b * s);
            }
        write_pack(dx, gate, mine, packed, g);
        write_pack(dx, gate + cols, mine, packed, u);
    });
}

// --- Rotations of heads, (batch, positions, n, heads, 2, half) --------------------------------

// The first `rotated` of n are rotated by the cosines and sines, (positions, half); others are
// copied.  `length` is the number of pairs.
template <typename T>
__global__ void rotate(const T *x, const W *cosines, const W *sines, T *y, long long length,
                       int positions, int n, int rotated, int heads, int half)
{
    const int width = 16 / sizeof(T);
    const bool packed = aligned(x, y, y) && half % width == 0;
    const int step = packed ? width : 1;
    for (long long j = ((long long)blockIdx.x * blockDim.x + threadIdx.x) * step; j < length;
         j += (long long)gridDim.x * blockDim.x * step) {
        const long long head = j / half, row = head / heads;
        const int c = (int)(j - head * half), position = (int)(row / n % positions);
        const long long at = head * 2 * half + c;
        Pack<T> u = read_pack(x, at, step, packed), v = read_pack(x, at + half, step, packed);
        if (row % n < rotated)
            for (int i = 0; i < width; i++)
                if (i < step) {
                    const W a = wide(u.of[i]), b = wide(v.of[i]);
                    const W by = cosines[(long long)position * half + c + i];
                    const W with = sines[(long long)position * half + c + i];
                    put(u.of[i], a * by - b * with);
                    put(v.of[i], b * by + a * with);
                }
        write_pack(y, at, step, packed, u);
        write_pack(y, at + half, step, packed, v);
    }
}

// --- Sums and copies of arrays ---------------------------------------------------------------

template <typename T> __global__ void add_arrays(const T *a, const T *b, T *y, long long length)
{
    const int width = 16 / sizeof(T);
    const long long c = ((long long)blockIdx.x * blockDim.x + threadIdx.x) * width;
    if (aligned(a, b, y) && c + width <= length) {
        Pack<T> u = *(const Pack<T> *)(a + c);
        const Pack<T> v = *(const Pack<T> *)(b + c);
        for (int i = 0; i < width; i++)
            put(u.of[i], wide(u.of[i]) + wide(v.of[i]));
        *(Pack<T> *)(y + c) = u;
    } else
        for (long long j = c; j < length && j < c + width; j++)
            put(y[j], wide(a[j]) + wide(b[j]));
}
// Copy an array (n0, n1, n2, d), whose rows of d elements have no gaps, between two layouts: x0, y0
// and so on are the distances of its first three dimensions.  It has fewer than 2^31 elements.
template <typename T>
__global__ void copy_rows(const T *x, T *y, int length, int n1, int n2, int d, long long x0,
                          long long x1, long long x2, long long y0, long long y1, long long y2)
{
    const int width = 16 / sizeof(T);
    const bool packed = aligned(x, y, y) && d % width == 0
                        && (x0 | x1 | x2 | y0 | y1 | y2) % width == 0;
    const int step = packed ? width : 1;
    for (long long j = ((long long)blockIdx.x * blockDim.x + threadIdx.x) * step; j < length;
         j += (long long)gridDim.x * blockDim.x * step) {
        const int row = (int)j / d, c = (int)j % d;
        const int k2 = row % n2, k1 = row / n2 % n1, k0 = row / n2 / n1;
        const T *from = x + k0 * x0 + k1 * x1 + k2 * x2 + c;
        T *to = y + k0 * y0 + k1 * y1 + k2 * y2 + c;
        if (packed)
            *(Pack<T> *)to = *(const Pack<T> *)from;
        else
            *to = *from;
    }
}

// --- Sums over rows: blocks of 32 packs of columns x 8 rows, a part for each block of rows ----

// The blocks that have stored their parts, by columns; all zero between two kernels.  As many as
// `mm3d.arrays.cupy_kernels.GpuKernels.max_across`.
__device__ unsigned stored[16384];

// `f` adds to N sums, one after another, of at most `width` columns each from its first argument on,
// of which its second says how many there are, and its third whether they are a pack.  Of all blocks
// with the same columns the last one to store its part adds the parts, in an order that does not
// depend on it, and puts them into the N rows of `sum`, or of `wide_sum` where that is not null.
template <int N, typename T, typename F>
__device__ void column_sums(long long rows, long long cols, bool packed, W *parts, T *sum,
                            W *wide_sum, F f)
{
    const int width = 16 / sizeof(T);
    __shared__ W some[8][N * 32 * width + 1];
    const int lane = threadIdx.x % 32, group = threadIdx.x / 32;
    const long long c = ((long long)blockIdx.x * 32 + lane) * width;
    const int mine = c >= cols ? 0 : cols - c < width ? (int)(cols - c) : width;
    W own[N * width];
    const auto add_groups = [&](bool complete) {
        for (int i = 0; i < N * width; i++)
            some[group][i / width * 32 * width + lane * width + i % width] = own[i];
        __syncthreads();
        for (int i = threadIdx.x; i < N * 32 * width; i += blockDim.x) {
            const long long column = (long long)blockIdx.x * 32 * width + i % (32 * width);
            const long long at = i / (32 * width) * cols + column;
            W total = some[0][i];
            for (int g = 1; g < 8; g++)
                total += some[g][i];
            if (column >= cols)
                continue;
            if (!complete)
                parts[blockIdx.y * N * cols + at] = total;
            else if (wide_sum)
                wide_sum[at] = total;
            else
                put(sum[at], total);
        }
    };
    for (int i = 0; i < N * width; i++)
        own[i] = 0;
    const long long first = (long long)blockIdx.y * 8 + group, step = 8 * gridDim.y;
    if (packed && mine)    // constants need fewer instructions and registers
#pragma unroll 1
        for (long long r = first; r < rows; r += step)
            f(r * cols + c, width, true, own);
    else if (mine)
#pragma unroll 1
        for (long long r = first; r < rows; r += step)
            f(r * cols + c, mine, false, own);
    add_groups(gridDim.y == 1);
    if (gridDim.y == 1)
        return;
    __shared__ bool last;
    __threadfence();    // the part is stored before it is counted
    __syncthreads();
    if (threadIdx.x == 0) {
        last = atomicAdd(stored + blockIdx.x, 1u) == gridDim.y - 1;
        if (last)
            stored[blockIdx.x] = 0;
    }
    __syncthreads();
    if (!last)
        return;
    __threadfence();    // parts are read after they are counted
    for (int i = 0; i < N * width; i++)
        own[i] = 0;
#pragma unroll 4
    for (long long p = group; p < gridDim.y; p += 8)
        for (int i = 0; i < N * width; i++)
            own[i] += i % width < mine ? parts[(p * N + i / width) * cols + c + i % width] : 0;
    add_groups(true);
}
template <typename T>
__global__ void sum_rows(const T *a, W *parts, T *sum, W *wide_sum, long long rows,
                         long long cols)
{
    const int width = 16 / sizeof(T);
    const bool packed = aligned(a, a, a) && cols % width == 0;
    column_sums<1, T>(rows, cols, packed, parts, sum, wide_sum,
                      [=](long long at, int mine, bool packed, W *own) {
        const Pack<T> u = read_pack(a, at, mine, packed);
        for (int i = 0; i < width; i++)
            own[i] += i < mine ? wide(u.of[i]) : 0;
    });
}
template <typename T>
__global__ void sum_products(const T *a, const T *b, W *parts, T *sum, W *wide_sum,
                             long long rows, long long cols)
{
    const int width = 16 / sizeof(T);
    const bool packed = aligned(a, b, b) && cols % width == 0;
    column_sums<1, T>(rows, cols, packed, parts, sum, wide_sum,
                      [=](long long at, int mine, bool packed, W *own) {
        const Pack<T> u = read_pack(a, at, mine, packed), v = read_pack(b, at, mine, packed);
        for (int i = 0; i < width; i++)
            own[i] += i < mine ? wide(u.of[i]) * wide(v.of[i]) : 0;
    });
}
template <typename T>
__global__ void sum_rows_and_products(const T *a, const T *b, W *parts, T *sum, W *wide_sum,
                                      long long rows, long long cols)
{
    const int width = 16 / sizeof(T);
    const bool packed = aligned(a, b, b) && cols % width == 0;
    column_sums<2, T>(rows, cols, packed, parts, sum, wide_sum,
                      [=](long long at, int mine, bool packed, W *own) {
        const Pack<T> u = read_pack(a, at, mine, packed), v = read_pack(b, at, mine, packed);
        for (int i = 0; i < width; i++) {
            own[i] += i < mine ? wide(u.of[i]) : 0;
            own[width + i] += i < mine ? wide(u.of[i]) * wide(v.of[i]) : 0;
        }
    });
}
// dx of GELU(x + b) and, while its elements are in registers, the sums of its columns: db.
template <typename T>
__global__ void bias_gelu_backward(const T *dy, const T *x, const T *b, T *dx, W *parts, T *sum,
                                   W *wide_sum, long long rows, long long cols)
{
    const int width = 16 / sizeof(T);
    const bool packed = aligned(dy, x, dx) && cols % width == 0;
    const long long c = ((long long)blockIdx.x * 32 + threadIdx.x % 32) * width;
    W bias[width];
    for (int i = 0; i < width; i++)
        bias[i] = c + i < cols ? wide(b[c + i]) : 0;
    column_sums<1, T>(rows, cols, packed, parts, sum, wide_sum,
                      [&](long long at, int mine, bool packed, W *own) {
        Pack<T> g = read_pack(dy, at, mine, packed);
        const Pack<T> u = read_pack(x, at, mine, packed);
        for (int i = 0; i < width; i++)
            if (i < mine) {
                const W d = wide(g.of[i]) * gelu_slope(wide(u.of[i]) + bias[i]);
                put(g.of[i], d);
                own[i] += d;
            }
        write_pack(dx, at, mine, packed, g);
    });
}
