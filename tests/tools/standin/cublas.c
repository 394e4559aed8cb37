/* A stand-in for libcublas: prototypes as in cublas_api.h; what is asked is answered by the test.

   Every argument goes to the function that `standin_answer` names, widened to 64 bits, so that one
   that was passed as another type arrives wrong. */
#include <stddef.h>

typedef int (*Answer)(const char *name, const long long *arguments);
static Answer answer;
void standin_answer(Answer given) { answer = given; }

#define A(x) (long long)(x)

int cublasSetMathMode(void *handle, int mode)
{
    const long long all[] = {A(handle), mode};
    return answer("mode", all);
}
int cublasSetStream_v2(void *handle, void *stream)
{
    const long long all[] = {A(handle), A(stream)};
    return answer("stream", all);
}
int cublasSetWorkspace_v2(void *handle, void *workspace, size_t bytes)
{
    const long long all[] = {A(handle), A(workspace), A(bytes)};
    return answer("workspace", all);
}
int cublasGemmStridedBatchedEx(void *handle, int transa, int transb, int m, int n, int k,
                               const void *alpha, const void *a, int atype, int lda,
                               long long int stridea, const void *b, int btype, int ldb,
                               long long int strideb, const void *beta, void *c, int ctype,
                               int ldc, long long int stridec, int count, int compute, int algo)
{
    const long long all[] = {A(handle), transa, transb, m, n, k, A(alpha), A(a), atype, lda,
                             stridea, A(b), btype, ldb, strideb, A(beta), A(c), ctype, ldc,
                             stridec, count, compute, algo};
    return answer("gemm", all);
}
const char *cublasGetStatusString(int status)
{ return status == 14 ? "an internal operation failed" : "an error of the stand-in"; }
