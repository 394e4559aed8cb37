// The loss over a vocabulary, and the optimizer.  ``kernels.cu`` and ``row_kernels.cu``, which go
// before, have the types, and say what holds for all kernels.

// --- Softmax of a vocabulary's long rows, one block each -------------------------------------

// Call f for each element of a row; what f puts into it is stored with `store`.
template <typename T, typename F>
__device__ inline void each_element(T *row, long long cols, bool store, F f)
{
    const int width = 16 / sizeof(T);
    if (aligned(row, row, row) && cols % width == 0)
        for (long long c = threadIdx.x; c < cols / width; c += blockDim.x) {
            Pack<T> u = ((Pack<T> *)row)[c];
            for (int i = 0; i < width; i++)
                f(u.of[i]);
            if (store)
                ((Pack<T> *)row)[c] = u;
        }
    else
        for (long long c = threadIdx.x; c < cols; c += blockDim.x) {
            T u = row[c];
            f(u);
            if (store)
                row[c] = u;
        }
}
// The row's maximum, sum of exponentials, 0, and with `sums` its sum; exponentials take its place.
template <typename T> __launch_bounds__(1024)
__global__ void softmax_statistics(T *x, W *out, long long sums, long long cols)
{
    T *row = x + blockIdx.x * cols;
    W top = -__uint_as_float(0x7F800000u), plain = 0, total = 0;
    each_element(row, cols, false, [&](T &u) {
        const W v = wide(u);
        top = v > top ? v : top;
        plain += v;
    });
    top = across_block(top, [](W a, W b) { return a > b ? a : b; });
    if (sums)
        plain = across_block(plain, [](W a, W b) { return a + b; });
    each_element(row, cols, true, [&](T &u) {
        const W e = power_of_2((wide(u) - top) * Log<W>::of_e);
        total += e;
        put(u, e);
    });
    total = across_block(total, [](W a, W b) { return a + b; });
    if (threadIdx.x == 0) {
        W *s = out + 4 * (long long)blockIdx.x;
        s[0] = top;
        s[1] = total;
        s[2] = 0;
        s[3] = sums ? plain : 0;
    }
}
// Overwrites x by scale x, and with `shifted` less shift; one number of each for a row.
template <typename T> __launch_bounds__(1024)
__global__ void softmax_gradient(T *x, const W *scale, const W *shift, long long shifted,
                                 long long cols)
{
    const W by = scale[blockIdx.x], less = shifted ? shift[blockIdx.x] : 0;
    each_element(x + blockIdx.x * cols, cols, true,
                 [&](T &u) { put(u, wide(u) * by - less); });
}

// --- Masters -------------------------------------------------------------------------------

// A parameter, as `GpuKernels.adamw_of_all` lays it down: its master, gradient, moments and value,
// or no value, elements, the first block of threads that changes it, and whether it decays.
template <typename T> struct Trained {
    W *w;
    const W *g;
    W *m, *v;
    T *y;
    long long length, first, decays;
};
template <typename T> struct alignas(16 * sizeof(T) / sizeof(W)) Rounded { T of[16 / sizeof(W)]; };

// AdamW, with numbers joined as `mm3d.training.optimizers.AdamW` joins them.  A thread changes
// `packs` packs of 16 bytes of a parameter, and rounds them into its value.
template <typename T>
__global__ void adamw(const Trained<T> *all, long long count, long long packs, W by, W keep_m,
                      W square, W keep_v, W eps, W rate, W keep_w)
{
    long long n = 0;
    for (long long end = count; end - n > 1;) {    // n: the last one that begins by this block
        const long long middle = (n + end) / 2;
        (all[middle].first <= blockIdx.x ? n : end) = middle;
    }
    const Trained<T> t = all[n];
    const W keep = t.decays ? keep_w : 1;
    const int width = 16 / sizeof(W);
    const auto change = [&](W &w, const W &g, W &m, W &v) {
        const W s = g * by;
        m = m * keep_m + s;
        v = v * keep_v + s * s * square;
        w = w * keep - m / (sqrt(v) + eps) * rate;
    };
    const bool whole = aligned(t.w, t.g, t.m) && aligned(t.v, t.y, t.y);
    long long c = ((blockIdx.x - t.first) * packs * blockDim.x + threadIdx.x) * width;
    for (int k = 0; k < packs; k++, c += blockDim.x * width)
        if (whole && c + width <= t.length) {
            Pack<W> w = *(Pack<W> *)(t.w + c), m = *(Pack<W> *)(t.m + c);
            Pack<W> v = *(Pack<W> *)(t.v + c);
            const Pack<W> g = *(const Pack<W> *)(t.g + c);
            Rounded<T> y;
            for (int i = 0; i < width; i++) {
                change(w.of[i], g.of[i], m.of[i], v.of[i]);
                put(y.of[i], w.of[i]);
            }
            *(Pack<W> *)(t.w + c) = w;
            *(Pack<W> *)(t.m + c) = m;
            *(Pack<W> *)(t.v + c) = v;
            if (t.y)
                *(Rounded<T> *)(t.y + c) = y;
        } else
            for (long long j = c; j < t.length && j < c + width; j++) {
                change(t.w[j], t.g[j], t.m[j], t.v[j]);
                if (t.y)
                    put(t.y[j], t.w[j]);
            }
}
// Copy x, float or double for double, rounded to the type of y, a pack of it in each thread.
template <typename T> __global__ void round_into(const W *x, T *y, long long length)
{
    const int width = 16 / sizeof(T), half = 16 / sizeof(W);
    const long long c = ((long long)blockIdx.x * blockDim.x + threadIdx.x) * width;
    if (aligned(x, y, y) && c + width <= length) {
        Pack<T> u;
        for (int k = 0; k < width / half; k++) {
            const Pack<W> part = ((const Pack<W> *)(x + c))[k];
            for (int i = 0; i < half; i++)
                put(u.of[k * half + i], part.of[i]);
        }
        *(Pack<T> *)(y + c) = u;
    } else
        for (long long j = c; j < length && j < c + width; j++)
            put(y[j], x[j]);
}
