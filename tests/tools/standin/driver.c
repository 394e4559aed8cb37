/* A stand-in for NVIDIA's driver library: "device" memory in which no host instruction may look.

   A CUDA-aware MPI that loads this as libcuda.so.1 takes its own device code path, inter-process
   copies included.  Every allocation is a shared-memory object mapped twice: where its address
   says it lies, nothing may be read or written; a second mapping, known only to this library, is
   what copies and the test's kernels use.  Any other access ends the process. */
#define _GNU_SOURCE
#include <cuda.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

enum { MOST = 65536, NAME = 40, PAGE = 4096 };

struct block {
    char *device, *host;    /* the address that may not be touched, and the one that may */
    size_t bytes;
    unsigned long long id;  /* of this allocation, never used again */
    int foreign;            /* opened from another process */
    char name[NAME];        /* of the shared-memory object; empty: this entry is free */
};

static struct block blocks[MOST];
static int used, serial, context;
static unsigned long long made;
static long copied, copied_between_processes;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

static struct block *holding(const void *address)
{
    const char *p = address;
    for (int i = 0; i < used; i++)
        if (blocks[i].name[0] && p >= blocks[i].device && p < blocks[i].device + blocks[i].bytes)
            return blocks + i;
    return NULL;
}

static struct block *locked_holding(const void *address)
{
    pthread_mutex_lock(&lock);
    struct block *found = holding(address);
    pthread_mutex_unlock(&lock);
    return found;
}

static CUresult map(const char *name, size_t bytes, int create, CUdeviceptr *out)
{
    int file = shm_open(name, O_RDWR | (create ? O_CREAT | O_EXCL : 0), 0600);
    if (file < 0 || (create && ftruncate(file, bytes)))
        return CUDA_ERROR_OUT_OF_MEMORY;
    pthread_mutex_lock(&lock);
    int i = 0;
    while (i < used && blocks[i].name[0])
        i++;
    if (i == MOST)
        abort();
    if (i == used)
        used++;
    struct block *b = blocks + i;
    b->bytes = bytes;
    b->foreign = !create;
    b->id = __sync_add_and_fetch(&made, 1);
    b->device = mmap(NULL, bytes, PROT_NONE, MAP_SHARED, file, 0);
    b->host = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    strcpy(b->name, name);
    close(file);
    *out = (CUdeviceptr)b->device;
    pthread_mutex_unlock(&lock);
    return b->device == MAP_FAILED || b->host == MAP_FAILED ? CUDA_ERROR_OUT_OF_MEMORY
                                                            : CUDA_SUCCESS;
}

static CUresult unmap(CUdeviceptr p)
{
    pthread_mutex_lock(&lock);
    struct block *b = holding((void *)p);
    if (b) {
        munmap(b->device, b->bytes);
        munmap(b->host, b->bytes);
        if (!b->foreign)
            shm_unlink(b->name);
        b->name[0] = 0;
    }
    pthread_mutex_unlock(&lock);
    return b ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

static void __attribute__((destructor)) clean(void)
{
    for (int i = 0; i < used; i++)
        if (blocks[i].name[0] && !blocks[i].foreign)
            shm_unlink(blocks[i].name);
}

/* For the test: where kernels may work, and what travelled. */
void *standin_memory(CUdeviceptr p)
{
    struct block *b = locked_holding((void *)p);
    return b ? b->host + ((char *)p - b->device) : NULL;
}
long standin_copied(void) { return copied; }
long standin_copied_between_processes(void) { return copied_between_processes; }

/* Device and context. */
CUresult cuInit(unsigned flags) { return CUDA_SUCCESS; }
CUresult cuDeviceGetCount(int *n) { *n = 1; return CUDA_SUCCESS; }
CUresult cuDeviceGet(CUdevice *device, int n) { *device = n; return CUDA_SUCCESS; }
CUresult cuDeviceGetAttribute(int *value, CUdevice_attribute which, CUdevice device)
{ *value = 0; return CUDA_SUCCESS; }
CUresult cuDeviceGetPCIBusId(char *text, int length, CUdevice device)
{ snprintf(text, length, "0000:00:00.0"); return CUDA_SUCCESS; }
CUresult cuDeviceCanAccessPeer(int *can, CUdevice a, CUdevice b)
{ *can = 1; return CUDA_SUCCESS; }
CUresult cuDevicePrimaryCtxGetState(CUdevice device, unsigned *flags, int *active)
{ *flags = 0; *active = context; return CUDA_SUCCESS; }
CUresult cuDevicePrimaryCtxRetain(CUcontext *c, CUdevice device)
{ context = 1; *c = (CUcontext)&context; return CUDA_SUCCESS; }
CUresult cuCtxGetCurrent(CUcontext *c)
{ *c = context ? (CUcontext)&context : NULL; return CUDA_SUCCESS; }
CUresult cuCtxSetCurrent(CUcontext c) { context = 1; return CUDA_SUCCESS; }
CUresult cuCtxPushCurrent(CUcontext c) { return CUDA_SUCCESS; }
CUresult cuCtxPopCurrent(CUcontext *c) { *c = (CUcontext)&context; return CUDA_SUCCESS; }
CUresult cuCtxGetDevice(CUdevice *device)
{ *device = 0; return context ? CUDA_SUCCESS : CUDA_ERROR_INVALID_CONTEXT; }

/* Streams and events: copies are done when the call returns, so there is nothing to wait for. */
CUresult cuStreamCreate(CUstream *s, unsigned flags)
{ *s = (CUstream)&used; return context ? CUDA_SUCCESS : CUDA_ERROR_INVALID_CONTEXT; }
CUresult cuStreamDestroy(CUstream s) { return CUDA_SUCCESS; }
CUresult cuStreamSynchronize(CUstream s) { return CUDA_SUCCESS; }
CUresult cuEventCreate(CUevent *e, unsigned flags)
{ *e = (CUevent)&serial; return context ? CUDA_SUCCESS : CUDA_ERROR_INVALID_CONTEXT; }
CUresult cuEventDestroy(CUevent e) { return CUDA_SUCCESS; }
CUresult cuEventRecord(CUevent e, CUstream s) { return CUDA_SUCCESS; }
CUresult cuEventQuery(CUevent e) { return CUDA_SUCCESS; }

/* Memory. */
CUresult cuMemAlloc(CUdeviceptr *p, size_t bytes)
{
    char name[NAME];
    context = 1;
    snprintf(name, NAME, "/mm3d-standin-%d-%d", getpid(), __sync_fetch_and_add(&serial, 1));
    return map(name, (bytes / PAGE + 1) * PAGE, 1, p);
}
CUresult cuMemFree(CUdeviceptr p) { return unmap(p); }
CUresult cuMemHostRegister(void *p, size_t bytes, unsigned flags) { return CUDA_SUCCESS; }
CUresult cuMemHostUnregister(void *p) { return CUDA_SUCCESS; }
CUresult cuMemGetAddressRange(CUdeviceptr *start, size_t *bytes, CUdeviceptr p)
{
    struct block *b = locked_holding((void *)p);
    if (!b)
        return CUDA_ERROR_INVALID_VALUE;
    if (start)
        *start = (CUdeviceptr)b->device;
    if (bytes)
        *bytes = b->bytes;
    return CUDA_SUCCESS;
}
CUresult cuMemcpyAsync(CUdeviceptr to, CUdeviceptr from, size_t bytes, CUstream s)
{
    struct block *a = locked_holding((void *)to), *b = locked_holding((void *)from);
    char *d = (char *)to, *o = (char *)from;
    if ((a && d + bytes > a->device + a->bytes) || (b && o + bytes > b->device + b->bytes))
        return CUDA_ERROR_INVALID_VALUE;
    copied += bytes;
    if ((a && a->foreign) || (b && b->foreign))
        copied_between_processes += bytes;
    memmove(a ? a->host + (d - a->device) : d, b ? b->host + (o - b->device) : o, bytes);
    return CUDA_SUCCESS;
}
CUresult cuPointerGetAttribute(void *out, CUpointer_attribute which, CUdeviceptr p)
{
    struct block *b = locked_holding((void *)p);
    if (!b)
        return CUDA_ERROR_INVALID_VALUE;
    if (which == CU_POINTER_ATTRIBUTE_MEMORY_TYPE)
        *(unsigned *)out = CU_MEMORYTYPE_DEVICE;
    else if (which == CU_POINTER_ATTRIBUTE_CONTEXT)
        *(CUcontext *)out = (CUcontext)&context;
    else if (which == CU_POINTER_ATTRIBUTE_BUFFER_ID)
        *(unsigned long long *)out = b->id;
    else
        return CUDA_ERROR_INVALID_VALUE;
    return CUDA_SUCCESS;
}
CUresult cuPointerGetAttributes(unsigned n, CUpointer_attribute *which, void **out, CUdeviceptr p)
{
    struct block *b = locked_holding((void *)p);
    for (unsigned i = 0; i < n; i++)
        if (which[i] == CU_POINTER_ATTRIBUTE_MEMORY_TYPE)
            *(unsigned *)out[i] = b ? CU_MEMORYTYPE_DEVICE : 0;
        else if (which[i] == CU_POINTER_ATTRIBUTE_CONTEXT)
            *(CUcontext *)out[i] = b ? (CUcontext)&context : NULL;
        else if (which[i] == CU_POINTER_ATTRIBUTE_IS_MANAGED)
            *(unsigned *)out[i] = 0;
    return CUDA_SUCCESS;
}
CUresult cuPointerSetAttribute(const void *value, CUpointer_attribute which, CUdeviceptr p)
{ return CUDA_SUCCESS; }

/* Between processes: a handle is the name and the size. */
CUresult cuIpcGetMemHandle(CUipcMemHandle *handle, CUdeviceptr p)
{
    struct block *b = locked_holding((void *)p);
    if (!b)
        return CUDA_ERROR_INVALID_VALUE;
    memset(handle, 0, sizeof *handle);
    memcpy(handle->reserved, b->name, NAME);
    memcpy(handle->reserved + NAME, &b->bytes, sizeof b->bytes);
    return CUDA_SUCCESS;
}
CUresult cuIpcOpenMemHandle(CUdeviceptr *p, CUipcMemHandle handle, unsigned flags)
{
    size_t bytes;
    memcpy(&bytes, handle.reserved + NAME, sizeof bytes);
    return map(handle.reserved, bytes, 0, p);
}
CUresult cuIpcCloseMemHandle(CUdeviceptr p) { return unmap(p); }
CUresult cuIpcGetEventHandle(CUipcEventHandle *handle, CUevent e)
{ memset(handle, 0, sizeof *handle); return CUDA_SUCCESS; }
CUresult cuIpcOpenEventHandle(CUevent *e, CUipcEventHandle handle)
{ *e = (CUevent)&serial; return CUDA_SUCCESS; }

/* What only memory from the virtual-memory interface or from pools has; there is none here. */
CUresult cuMemRetainAllocationHandle(CUmemGenericAllocationHandle *handle, void *p)
{ return CUDA_ERROR_INVALID_VALUE; }
CUresult cuMemRelease(CUmemGenericAllocationHandle handle) { return CUDA_SUCCESS; }
CUresult cuMemGetAllocationPropertiesFromHandle(CUmemAllocationProp *properties,
                                                CUmemGenericAllocationHandle handle)
{ return CUDA_ERROR_INVALID_VALUE; }
CUresult cuMemGetAccess(unsigned long long *flags, const CUmemLocation *where, CUdeviceptr p)
{ return CUDA_ERROR_INVALID_VALUE; }
CUresult cuMemPoolGetAccess(CUmemAccess_flags *flags, CUmemoryPool pool, CUmemLocation *where)
{ return CUDA_ERROR_INVALID_VALUE; }
