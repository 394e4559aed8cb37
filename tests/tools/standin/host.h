// CUDA C++ on a processor: the threads of a block are fibres that take turns.  Each runs until it
// meets a barrier or a shuffle; as all threads of a block meet the same ones, one round of turns is
// what a barrier is.
#define MM3D_ON_HOST
#include <algorithm>
#include <cmath>
#include <cstring>
#include <tuple>
#include <ucontext.h>
#include <utility>
#include <vector>

struct Dim { unsigned x, y, z; };
static Dim threadIdx, blockIdx, blockDim, gridDim;
static ucontext_t scheduler;
static std::vector<ucontext_t> fibres;
static std::vector<char> running, stacks;
static unsigned current;
static double exchanged[1024];
static void (*body)(void *);
static void *given;

static void turn()
{
    const unsigned mine = current;
    swapcontext(&fibres[mine], &scheduler);
    current = mine;
    threadIdx.x = mine;
}

#define __global__
#define __launch_bounds__(threads)
#define __device__
#define __shared__ static
#define __syncthreads turn
using std::exp2; using std::log2; using std::max; using std::min; using std::sqrt;

template <typename V> V __shfl_xor_sync(unsigned, V x, int d)
{
    exchanged[current] = x;
    turn();
    const V other = (V)exchanged[current ^ d];
    turn();
    return other;
}
static void __threadfence() {}    // blocks run one after another
static unsigned atomicAdd(unsigned *x, unsigned y) { const unsigned was = *x; *x += y; return was; }
static float __uint_as_float(unsigned u) { float x; memcpy(&x, &u, 4); return x; }
static unsigned __float_as_uint(float x) { unsigned u; memcpy(&u, &x, 4); return u; }
static float host_half_to_float(unsigned short bits)
{ _Float16 h; memcpy(&h, &bits, 2); return (float)h; }
static unsigned short host_float_to_half(float x)
{ _Float16 h = (_Float16)x; unsigned short bits; memcpy(&bits, &h, 2); return bits; }

static void fibre()
{
    body(given);
    running[current] = 0;
    swapcontext(&fibres[current], &scheduler);
}

static void run_block()
{
    const unsigned threads = blockDim.x, stack = 65536;
    fibres.resize(threads);
    stacks.resize((size_t)threads * stack);
    running.assign(threads, 1);
    for (unsigned t = 0; t < threads; t++) {
        getcontext(&fibres[t]);
        fibres[t].uc_stack.ss_sp = &stacks[(size_t)t * stack];
        fibres[t].uc_stack.ss_size = stack;
        fibres[t].uc_link = &scheduler;
        makecontext(&fibres[t], fibre, 0);
    }
    for (bool left = true; left;) {
        left = false;
        for (unsigned t = 0; t < threads; t++)
            if (running[t]) {
                left = true;
                current = threadIdx.x = t;
                swapcontext(&scheduler, &fibres[t]);
            }
    }
}

template <typename... A, size_t... I>
void call(void (*kernel)(A...), void **a, std::index_sequence<I...>) { kernel(*(A *)a[I]...); }

template <typename... A> void run(void (*kernel)(A...), Dim grid, Dim block, void **a)
{
    typedef std::pair<void (*)(A...), void **> Work;
    Work work(kernel, a);
    given = &work;
    body = [](void *w) {
        call(((Work *)w)->first, ((Work *)w)->second, std::index_sequence_for<A...>());
    };
    gridDim = grid;
    blockDim = block;
    for (blockIdx.y = 0; blockIdx.y < grid.y; blockIdx.y++)
        for (blockIdx.x = 0; blockIdx.x < grid.x; blockIdx.x++)
            run_block();
}
