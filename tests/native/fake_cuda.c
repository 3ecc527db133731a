/* A stand-in for NVIDIA's driver library, for tests on machines that have none. It is built as
 * libcuda.so.1, keeps "device" memory on the host, executes asynchronous operations on a thread
 * per stream, and is strict where a real driver may forgive. It counts what is alive, what was
 * called and what was misused; the fake_* functions at the end control it.
 *
 * Simpler than the real one: there are primary contexts only, operations in the default stream
 * (handles 0 to 2) are done before their call returns, and every call but those on errors,
 * devices and the choice of a context needs a current context. */
#define _GNU_SOURCE
#include <pthread.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#define COUNT(array) (sizeof(array) / sizeof *(array))

/* Takes an item out of its list, and frees it. */
#define UNLINK(list, item)                  \
    do {                                    \
        __typeof__(&(list)) link = &(list); \
        while (*link != (item))             \
            link = &(*link)->next;          \
        *link = (item)->next;               \
        free(item);                         \
    } while (0)

typedef int CUresult, CUdevice;
typedef unsigned long long CUdeviceptr;
typedef struct CUctx_st *CUcontext;
typedef struct CUstream_st *CUstream;
typedef struct CUevent_st *CUevent;

/* Every result that this library or a test has a use for. */
#define RESULTS(X)                                                     \
    X(0, CUDA_SUCCESS, "no error")                                     \
    X(1, CUDA_ERROR_INVALID_VALUE, "invalid argument")                 \
    X(2, CUDA_ERROR_OUT_OF_MEMORY, "out of memory")                    \
    X(3, CUDA_ERROR_NOT_INITIALIZED, "initialization error")           \
    X(4, CUDA_ERROR_DEINITIALIZED, "driver shutting down")             \
    X(34, CUDA_ERROR_STUB_LIBRARY, "driver is a stub library")         \
    X(100, CUDA_ERROR_NO_DEVICE, "no CUDA-capable device is detected") \
    X(101, CUDA_ERROR_INVALID_DEVICE, "invalid device ordinal")        \
    X(201, CUDA_ERROR_INVALID_CONTEXT, "invalid device context")       \
    X(304, CUDA_ERROR_OPERATING_SYSTEM, "OS call failed")              \
    X(400, CUDA_ERROR_INVALID_HANDLE, "invalid resource handle")       \
    X(500, CUDA_ERROR_NOT_FOUND, "named symbol not found")             \
    X(600, CUDA_ERROR_NOT_READY, "device not ready")                   \
    X(700, CUDA_ERROR_ILLEGAL_ADDRESS, "illegal memory access")        \
    X(709, CUDA_ERROR_CONTEXT_IS_DESTROYED, "context is destroyed")    \
    X(712, CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED,                  \
      "part or all of the memory is already registered")               \
    X(713, CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED,                      \
      "the memory is not registered")                                  \
    X(719, CUDA_ERROR_LAUNCH_FAILED, "unspecified launch failure")     \
    X(800, CUDA_ERROR_NOT_PERMITTED, "operation not permitted")        \
    X(801, CUDA_ERROR_NOT_SUPPORTED, "operation not supported")        \
    X(999, CUDA_ERROR_UNKNOWN, "unknown error")

#define AS_ENUM(code, name, text) name = code,
enum { RESULTS(AS_ENUM) };

enum {
    ATTRIBUTE_INTEGRATED = 18,
    ATTRIBUTE_UNIFIED_ADDRESSING = 41,
    ATTRIBUTE_HOST_REGISTER_SUPPORTED = 99,
    POINTER_MEMORY_TYPE = 2,
    POINTER_DEVICE_ORDINAL = 9,
    MEMORYTYPE_DEVICE = 2,
    REGISTER_PORTABLE_DEVICEMAP = 3,
    REGISTER_READ_ONLY = 8,
    STREAM_NON_BLOCKING = 1,
    EVENT_FLAGS = 7,
};

/* Name, suffix of the version that is implemented, parameters, what has to be there (see enter),
 * and what is done, with the mutex held. */
#define CALLS(X)                                                                                   \
    X(cuGetProcAddress, _v2,                                                                       \
      (const char *name, void **address, int version, uint64_t flags, int *status), NOTHING,       \
      ((void)flags, find_address(name, address, version, status)))                                 \
    X(cuGetErrorName, , (CUresult code, const char **text), NOTHING, describe(code, text, true))   \
    X(cuGetErrorString, , (CUresult code, const char **text), NOTHING,                             \
      describe(code, text, false))                                                                 \
    X(cuInit, , (unsigned flags), NOTHING, initialize(flags))                                      \
    X(cuDriverGetVersion, , (int *version), NOTHING, (*version = 13000, CUDA_SUCCESS))             \
    X(cuDeviceGetCount, , (int *count), DRIVER, (*count = fake.n_devices, CUDA_SUCCESS))           \
    X(cuDeviceGet, , (CUdevice *device, int ordinal), DRIVER, get_device(device, ordinal))         \
    X(cuDeviceGetName, , (char *name, int length, CUdevice device), DRIVER,                        \
      name_device(name, length, device))                                                           \
    X(cuDeviceTotalMem, _v2, (size_t *bytes, CUdevice device), DRIVER,                             \
      total_memory(bytes, device))                                                                 \
    X(cuDeviceGetAttribute, , (int *value, int attribute, CUdevice device), DRIVER,                \
      get_attribute(value, attribute, device))                                                     \
    X(cuDevicePrimaryCtxRetain, , (CUcontext *context, CUdevice device), DRIVER,                   \
      retain(context, device))                                                                     \
    X(cuDevicePrimaryCtxRelease, _v2, (CUdevice device), DRIVER, release(device))                  \
    X(cuCtxGetCurrent, , (CUcontext *context), DRIVER,                                             \
      (*context = handle_of(current_context()), CUDA_SUCCESS))                                     \
    X(cuCtxSetCurrent, , (CUcontext context), DRIVER, set_current(value_of(context), false))       \
    X(cuCtxPushCurrent, _v2, (CUcontext context), DRIVER, set_current(value_of(context), true))    \
    X(cuCtxPopCurrent, _v2, (CUcontext *context), DRIVER, pop_current(context))                    \
    X(cuCtxGetDevice, , (CUdevice *device), CURRENT, context_device(device, current_context()))    \
    X(cuMemGetInfo, _v2, (size_t *unused, size_t *total), CURRENT, memory_info(unused, total))     \
    X(cuMemAlloc, _v2, (CUdeviceptr *address, size_t size), CURRENT, allocate(address, size))      \
    X(cuMemFree, _v2, (CUdeviceptr address), CURRENT,                                              \
      drop_at(true, handle_of(address), CUDA_ERROR_INVALID_VALUE))                                 \
    X(cuMemHostRegister, _v2, (void *address, size_t size, unsigned flags), CURRENT,               \
      register_host(address, size, flags))                                                         \
    X(cuMemHostUnregister, , (void *address), CURRENT,                                             \
      drop_at(false, address, CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED))                              \
    X(cuMemcpyHtoD, _v2, (CUdeviceptr to, const void *from, size_t size), CURRENT,                 \
      copy(NULL, handle_of(to), from, size, true, false))                                          \
    X(cuMemcpyDtoH, _v2, (void *to, CUdeviceptr from, size_t size), CURRENT,                       \
      copy(NULL, to, handle_of(from), size, false, true))                                          \
    X(cuMemcpyDtoD, _v2, (CUdeviceptr to, CUdeviceptr from, size_t size), CURRENT,                 \
      copy(NULL, handle_of(to), handle_of(from), size, true, true))                                \
    X(cuMemcpyHtoDAsync, _v2, (CUdeviceptr to, const void *from, size_t size, CUstream stream),    \
      CURRENT, copy(stream, handle_of(to), from, size, true, false))                               \
    X(cuMemcpyDtoHAsync, _v2, (void *to, CUdeviceptr from, size_t size, CUstream stream),          \
      CURRENT, copy(stream, to, handle_of(from), size, false, true))                               \
    X(cuMemsetD8, _v2, (CUdeviceptr to, unsigned char value, size_t n), CURRENT,                   \
      fill(NULL, to, value, n, 1))                                                                 \
    X(cuMemsetD32, _v2, (CUdeviceptr to, unsigned value, size_t n), CURRENT,                       \
      fill(NULL, to, value, n, 4))                                                                 \
    X(cuMemsetD32Async, , (CUdeviceptr to, unsigned value, size_t n, CUstream stream), CURRENT,    \
      fill(stream, to, value, n, 4))                                                               \
    X(cuPointerGetAttribute, , (void *value, int attribute, CUdeviceptr address), DRIVER,          \
      pointer_attribute(value, attribute, address))                                                \
    X(cuStreamCreate, , (CUstream *stream, unsigned flags), CURRENT, create_stream(stream, flags)) \
    X(cuStreamDestroy, _v2, (CUstream stream), CURRENT, end_stream(stream))                        \
    X(cuStreamSynchronize, , (CUstream stream), CURRENT, stream_state(stream, true))               \
    X(cuStreamQuery, , (CUstream stream), CURRENT, stream_state(stream, false))                    \
    X(cuEventCreate, , (CUevent *event, unsigned flags), CURRENT, create_event(event, flags))      \
    X(cuEventRecord, , (CUevent event, CUstream stream), CURRENT, record(event, stream))           \
    X(cuEventQuery, , (CUevent event), CURRENT, event_state(event, false))                         \
    X(cuEventSynchronize, , (CUevent event), CURRENT, event_state(event, true))                    \
    X(cuEventDestroy, _v2, (CUevent event), CURRENT, end_event(event))

#define AS_INDEX(name, suffix, parameters, need, body) F_##name,
enum function { CALLS(AS_INDEX) N_FUNCTIONS };

#define AS_NAME(name, suffix, parameters, need, body) #name,
static const char *const names[] = {CALLS(AS_NAME)};

enum {
    MAX_DEVICES = 8,
    MAX_RULES = 64,
    MAX_STACK = 16,
    DEVICE_ALIGNMENT = 256,
    WORKER_STACK = 256 << 10,
    POISONED = 16 << 20, /* so many bytes of new device memory are no zeros */
};

/* What a handle is of; the high bits of its value, the rest is a number never used again. */
enum kind { CONTEXT = 1, STREAM, EVENT, HANDLE_SHIFT = 40 };

/* Device memory, or registered host memory. One that is closing waits for `pending`, the
 * operations that use it: it can't be found any more, but still takes its place. */
struct range {
    struct range *next;
    bool on_device, closing;
    int device;
    uint64_t context;
    uint8_t *start;
    uint64_t size, pending;
};

struct operation {
    struct operation *next;
    uint8_t *to;
    const uint8_t *from; /* NULL: fill with `value` */
    uint64_t size;
    uint32_t value; /* the four bytes of the pattern */
    struct range *uses[2];
};

struct stream {
    struct stream *next;
    uint64_t id, context;
    bool non_blocking, closing;
    uint64_t submitted, done; /* operations so far */
    struct operation *first, *last;
    pthread_t worker;
};

/* Complete when `position` operations of the stream are done or the stream is gone. */
struct event {
    struct event *next;
    uint64_t id, context, stream, position;
};

struct device {
    uint64_t total, reserved, context, retained;
    int integrated;
};

struct rule {
    enum function function;
    CUresult result;
    uint64_t first, times;
};

static struct {
    pthread_mutex_t mutex;
    pthread_cond_t changed; /* anything that somebody may wait for */
    bool initialized;
    uint64_t serial, epoch, speed, peak_registered, misuses;
    char misuse[200];
    int n_devices, n_rules;
    struct device devices[MAX_DEVICES];
    struct rule rules[MAX_RULES];
    uint64_t calls[N_FUNCTIONS];
    struct range *ranges;
    struct stream *streams;
    struct event *events;
} fake = {.mutex = PTHREAD_MUTEX_INITIALIZER};

/* A thread's stack of contexts, valid for the epoch (fake_reset starts a new one). */
static _Thread_local struct {
    uint64_t epoch;
    int depth;
    uint64_t contexts[MAX_STACK];
    char misuse[sizeof fake.misuse];
} thread;

/* ---- Time, handles, contexts. From here to the calls: with the mutex held. ---- */

static void set_defaults(void)
{
    memset(fake.devices, 0, sizeof fake.devices);
    for (int i = 0; i < MAX_DEVICES; i++)
        fake.devices[i].total = UINT64_C(1) << 30;
    memset(fake.calls, 0, sizeof fake.calls);
    fake.n_devices = 2;
    fake.n_rules = 0;
    fake.speed = fake.peak_registered = fake.misuses = 0;
    fake.misuse[0] = 0;
    fake.epoch++;
}

__attribute__((constructor)) static void start(void)
{
    pthread_condattr_t attributes;
    pthread_condattr_init(&attributes);
    pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC);
    pthread_cond_init(&fake.changed, &attributes);
    pthread_condattr_destroy(&attributes);
    set_defaults();
}

static void wait_change(void)
{
    pthread_cond_wait(&fake.changed, &fake.mutex);
}

static void notify(void)
{
    pthread_cond_broadcast(&fake.changed);
}

static double seconds(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + (double)now.tv_nsec * 1e-9;
}

/* Takes the time of `size` bytes; a new speed counts from the beginning, so that a test can
 * hold all operations back (1 byte per second) and let them go. */
static void pace(uint64_t size)
{
    double begin = seconds();
    while (fake.speed != 0) {
        double end = begin + (double)size / (double)fake.speed;
        if (seconds() >= end)
            return;
        double limit = end < begin + 1e6 ? end : begin + 1e6;
        struct timespec until = {.tv_sec = (time_t)limit};
        until.tv_nsec = (long)((limit - (double)until.tv_sec) * 1e9);
        pthread_cond_timedwait(&fake.changed, &fake.mutex, &until);
    }
}

static void count_misuse(const char *text, const void *address)
{
    fake.misuses++;
    snprintf(fake.misuse, sizeof fake.misuse, "%s (%p)", text, address);
}

static uint64_t new_handle(enum kind kind)
{
    return (uint64_t)kind << HANDLE_SHIFT | ++fake.serial;
}

static uint64_t value_of(const void *handle)
{
    return (uint64_t)(uintptr_t)handle;
}

static void *handle_of(uint64_t value)
{
    return (void *)(uintptr_t)value;
}

static int device_of(uint64_t context)
{
    for (int i = 0; i < fake.n_devices; i++)
        if (fake.devices[i].retained != 0 && fake.devices[i].context == context)
            return i;
    return -1;
}

static CUresult check_context(uint64_t context)
{
    if (device_of(context) >= 0)
        return CUDA_SUCCESS;
    uint64_t serial = context & ((UINT64_C(1) << HANDLE_SHIFT) - 1);
    bool known = context >> HANDLE_SHIFT == CONTEXT && serial != 0 && serial <= fake.serial;
    return known ? CUDA_ERROR_CONTEXT_IS_DESTROYED : CUDA_ERROR_INVALID_CONTEXT;
}

/* 0 if there is none. */
static uint64_t current_context(void)
{
    if (thread.epoch != fake.epoch)
        thread.depth = 0;
    thread.epoch = fake.epoch;
    return thread.depth != 0 ? thread.contexts[thread.depth - 1] : 0;
}

static struct device *device_at(CUdevice index)
{
    return index >= 0 && index < fake.n_devices ? &fake.devices[index] : NULL;
}

/* ---- Ranges of memory ---- */

static bool covers(const struct range *range, const uint8_t *address, uint64_t size)
{
    uintptr_t start = (uintptr_t)range->start, from = (uintptr_t)address;
    return from >= start && from - start <= range->size && size <= range->size - (from - start);
}

static bool overlaps(const struct range *range, const uint8_t *address, uint64_t size)
{
    uintptr_t start = (uintptr_t)range->start, from = (uintptr_t)address;
    return from >= start ? from - start < range->size : start - from < size;
}

static struct range *find_range(bool on_device, const uint8_t *address, uint64_t size)
{
    for (struct range *range = fake.ranges; range != NULL; range = range->next)
        if (range->on_device == on_device && !range->closing && covers(range, address, size))
            return range;
    return NULL;
}

static bool any_overlap(bool on_device, const uint8_t *address, uint64_t size)
{
    for (struct range *range = fake.ranges; range != NULL; range = range->next)
        if (range->on_device == on_device && overlaps(range, address, size))
            return true;
    return false;
}

/* Of one device, or of all (-1). */
static uint64_t sum_ranges(bool on_device, int device, uint64_t *n)
{
    uint64_t size = 0;
    *n = 0;
    for (struct range *range = fake.ranges; range != NULL; range = range->next)
        if (range->on_device == on_device && (device < 0 || range->device == device)) {
            size += range->size;
            ++*n;
        }
    return size;
}

static CUresult add_range(bool on_device, uint8_t *start, uint64_t size)
{
    struct range *range = malloc(sizeof *range);
    if (range == NULL)
        return CUDA_ERROR_OUT_OF_MEMORY;
    uint64_t context = current_context(), n;
    *range = (struct range){.next = fake.ranges, .on_device = on_device, .start = start,
                            .size = size, .context = context, .device = device_of(context)};
    fake.ranges = range;
    uint64_t registered = sum_ranges(false, -1, &n);
    if (registered > fake.peak_registered)
        fake.peak_registered = registered;
    return CUDA_SUCCESS;
}

/* Waits for operations that still use it, which should not be: memory must not vanish under
 * the worker, even in a test that fails. */
static void drop_range(struct range *range)
{
    if (range->pending != 0)
        count_misuse(range->on_device ? "device memory freed while operations use it"
                                      : "host memory unregistered while operations use it",
                     range->start);
    range->closing = true;
    while (range->pending != 0)
        wait_change();
    if (range->on_device)
        munmap(range->start - DEVICE_ALIGNMENT, range->size + DEVICE_ALIGNMENT);
    UNLINK(fake.ranges, range);
}

static uint64_t free_bytes(int device)
{
    uint64_t n, used = sum_ranges(true, device, &n) + fake.devices[device].reserved;
    return fake.devices[device].total > used ? fake.devices[device].total - used : 0;
}

/* Addresses are multiples of 256 but of nothing larger, and new memory is not zero. */
static CUresult allocate(CUdeviceptr *address, uint64_t size)
{
    int device = device_of(current_context());
    if (size == 0)
        return CUDA_ERROR_INVALID_VALUE;
    if (size > SIZE_MAX - DEVICE_ALIGNMENT)
        return CUDA_ERROR_OUT_OF_MEMORY;
    if (fake.devices[device].total != 0 && size > free_bytes(device))
        return CUDA_ERROR_OUT_OF_MEMORY;
    uint8_t *memory = mmap(NULL, size + DEVICE_ALIGNMENT, PROT_READ | PROT_WRITE,
                           MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED)
        return CUDA_ERROR_OUT_OF_MEMORY;
    uint8_t *first = memory + DEVICE_ALIGNMENT;
    CUresult result = add_range(true, first, size);
    if (result != CUDA_SUCCESS) {
        munmap(memory, size + DEVICE_ALIGNMENT);
        return result;
    }
    memset(first, 0xa5, size < POISONED ? size : POISONED);
    *address = value_of(first);
    return CUDA_SUCCESS;
}

static bool is_mapped(const uint8_t *address, uint64_t size)
{
    uintptr_t before = (uintptr_t)address % (uintptr_t)sysconf(_SC_PAGESIZE);
    return msync((uint8_t *)address - before, size + before, MS_ASYNC) == 0;
}

static CUresult register_host(uint8_t *address, uint64_t size, unsigned flags)
{
    if (flags & REGISTER_READ_ONLY) /* as the device's attribute says */
        return CUDA_ERROR_NOT_SUPPORTED;
    if (address == NULL || size == 0 || (flags & ~(unsigned)REGISTER_PORTABLE_DEVICEMAP) ||
        any_overlap(true, address, size) || !is_mapped(address, size))
        return CUDA_ERROR_INVALID_VALUE;
    if (any_overlap(false, address, size))
        return CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED;
    return add_range(false, address, size);
}

/* ---- Streams, operations, events ---- */

static struct stream *find_stream(uint64_t id, bool also_closing)
{
    for (struct stream *stream = fake.streams; stream != NULL; stream = stream->next)
        if (stream->id == id && (also_closing || !stream->closing))
            return stream;
    return NULL;
}

static bool is_default(CUstream handle)
{
    return value_of(handle) <= 2;
}

static void transfer(const struct operation *operation)
{
    if (operation->from != NULL) {
        memmove(operation->to, operation->from, operation->size);
        return;
    }
    uint8_t pattern[sizeof operation->value];
    memcpy(pattern, &operation->value, sizeof pattern);
    for (uint64_t i = 0; i < operation->size; i++)
        operation->to[i] = pattern[i % sizeof pattern];
}

/* Memory is looked at only after the delay: a source that is reused too early, or a target
 * that is read too early, has wrong bytes. The mutex is released meanwhile. */
static void execute(struct operation *operation)
{
    pace(operation->size);
    pthread_mutex_unlock(&fake.mutex);
    transfer(operation);
    pthread_mutex_lock(&fake.mutex);
    for (size_t i = 0; i < COUNT(operation->uses); i++)
        if (operation->uses[i] != NULL)
            operation->uses[i]->pending--;
}

static void *work(void *argument)
{
    struct stream *stream = argument;
    pthread_mutex_lock(&fake.mutex);
    while (stream->first != NULL || !stream->closing) {
        struct operation *operation = stream->first;
        if (operation == NULL) {
            wait_change();
            continue;
        }
        execute(operation);
        stream->first = operation->next;
        free(operation);
        stream->done++;
        notify();
    }
    pthread_mutex_unlock(&fake.mutex);
    return NULL;
}

static bool is_done(uint64_t stream_id, uint64_t position)
{
    const struct stream *stream = find_stream(stream_id, true);
    return stream == NULL || stream->done >= position;
}

static void wait_done(uint64_t stream_id, uint64_t position)
{
    while (!is_done(stream_id, position))
        wait_change();
}

static struct stream *next_blocking(uint64_t context)
{
    for (struct stream *stream = fake.streams; stream != NULL; stream = stream->next)
        if (stream->context == context && !stream->non_blocking &&
            stream->done != stream->submitted)
            return stream;
    return NULL;
}

/* The default stream runs after all others of its context, but for the non-blocking ones. */
static void wait_blocking(void)
{
    const struct stream *stream;
    uint64_t context = current_context();
    while ((stream = next_blocking(context)) != NULL)
        wait_done(stream->id, stream->submitted);
}

static CUresult start_worker(struct stream *stream)
{
    pthread_attr_t attributes;
    pthread_attr_init(&attributes);
    pthread_attr_setstacksize(&attributes, WORKER_STACK);
    int error = pthread_create(&stream->worker, &attributes, work, stream);
    pthread_attr_destroy(&attributes);
    return error == 0 ? CUDA_SUCCESS : CUDA_ERROR_OPERATING_SYSTEM;
}

static CUresult create_stream(CUstream *handle, unsigned flags)
{
    if (flags > STREAM_NON_BLOCKING)
        return CUDA_ERROR_INVALID_VALUE;
    struct stream *stream = malloc(sizeof *stream);
    if (stream == NULL)
        return CUDA_ERROR_OUT_OF_MEMORY;
    *stream = (struct stream){.next = fake.streams, .id = new_handle(STREAM),
                              .context = current_context(), .non_blocking = flags != 0};
    CUresult result = start_worker(stream);
    if (result != CUDA_SUCCESS) {
        free(stream);
        return result;
    }
    fake.streams = stream;
    *handle = handle_of(stream->id);
    return CUDA_SUCCESS;
}

/* What was submitted is done first. */
static void destroy_stream(struct stream *stream)
{
    stream->closing = true;
    notify();
    pthread_mutex_unlock(&fake.mutex);
    pthread_join(stream->worker, NULL);
    pthread_mutex_lock(&fake.mutex);
    UNLINK(fake.streams, stream);
    notify();
}

static void claim(const struct operation *operation)
{
    for (size_t i = 0; i < COUNT(operation->uses); i++)
        if (operation->uses[i] != NULL)
            operation->uses[i]->pending++;
}

static CUresult append(uint64_t id, const struct operation *model, bool wait)
{
    struct stream *stream = find_stream(id, false);
    struct operation *operation = malloc(sizeof *operation);
    if (operation == NULL)
        return CUDA_ERROR_OUT_OF_MEMORY;
    *operation = *model;
    claim(operation);
    if (stream->first == NULL)
        stream->first = operation;
    else
        stream->last->next = operation;
    stream->last = operation;
    uint64_t position = ++stream->submitted;
    notify();
    if (wait)
        wait_done(id, position);
    return CUDA_SUCCESS;
}

/* The default stream's turn, in the calling thread. */
static void run_now(struct operation *operation)
{
    claim(operation);
    wait_blocking();
    execute(operation);
    notify();
}

/* The range that an address of an operation belongs to; NULL for pageable host memory. Memory
 * of which a registration covers a part only can't be copied. */
static CUresult find_use(bool on_device, const uint8_t *address, uint64_t size,
                         struct range **range)
{
    *range = find_range(on_device, address, size);
    if (*range != NULL)
        return CUDA_SUCCESS;
    bool invalid = on_device || address == NULL || any_overlap(true, address, size) ||
                   any_overlap(false, address, size);
    return invalid ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}

/* Asynchronous if all host memory is registered, and not in the default stream. */
static CUresult submit(CUstream handle, struct operation operation, bool to_device,
                       bool from_device)
{
    if (!is_default(handle) && find_stream(value_of(handle), false) == NULL)
        return CUDA_ERROR_INVALID_HANDLE;
    if (operation.size == 0)
        return CUDA_SUCCESS;
    CUresult result = find_use(to_device, operation.to, operation.size, &operation.uses[0]);
    if (result == CUDA_SUCCESS && operation.from != NULL)
        result = find_use(from_device, operation.from, operation.size, &operation.uses[1]);
    if (result != CUDA_SUCCESS)
        return result;
    if (!is_default(handle)) {
        bool pageable = operation.uses[0] == NULL ||
                        (operation.from != NULL && operation.uses[1] == NULL);
        return append(value_of(handle), &operation, pageable);
    }
    run_now(&operation);
    return CUDA_SUCCESS;
}

static CUresult fill(CUstream handle, CUdeviceptr address, uint32_t value, uint64_t n,
                     unsigned width)
{
    if (address % width != 0 || n > UINT64_MAX / width)
        return CUDA_ERROR_INVALID_VALUE;
    uint32_t pattern = width == 1 ? (value & 0xff) * UINT32_C(0x01010101) : value;
    struct operation operation = {.to = handle_of(address), .size = n * width,
                                  .value = pattern};
    return submit(handle, operation, true, false);
}

static struct event *find_event(CUevent handle)
{
    for (struct event *event = fake.events; event != NULL; event = event->next)
        if (event->id == value_of(handle))
            return event;
    return NULL;
}

static CUresult create_event(CUevent *handle, unsigned flags)
{
    if (flags & ~(unsigned)EVENT_FLAGS)
        return CUDA_ERROR_INVALID_VALUE;
    struct event *event = malloc(sizeof *event);
    if (event == NULL)
        return CUDA_ERROR_OUT_OF_MEMORY;
    *event = (struct event){.next = fake.events, .id = new_handle(EVENT),
                            .context = current_context()};
    fake.events = event;
    *handle = handle_of(event->id);
    return CUDA_SUCCESS;
}

static CUresult record(CUevent handle, CUstream stream_handle)
{
    if (is_default(stream_handle))
        wait_blocking();
    struct event *event = find_event(handle);
    struct stream *stream = find_stream(value_of(stream_handle), false);
    if (event == NULL || (stream == NULL && !is_default(stream_handle)))
        return CUDA_ERROR_INVALID_HANDLE;
    if (event->context != (stream != NULL ? stream->context : current_context()))
        return CUDA_ERROR_INVALID_HANDLE;
    event->stream = stream != NULL ? stream->id : 0;
    event->position = stream != NULL ? stream->submitted : 0;
    return CUDA_SUCCESS;
}

/* ---- Ends of contexts ---- */

static struct range *range_in(uint64_t context)
{
    struct range *range = fake.ranges;
    while (range != NULL && (range->closing || range->context != context))
        range = range->next;
    return range;
}

static struct stream *stream_in(uint64_t context)
{
    struct stream *stream = fake.streams;
    while (stream != NULL && (stream->closing || stream->context != context))
        stream = stream->next;
    return stream;
}

static struct event *event_in(uint64_t context)
{
    struct event *event = fake.events;
    while (event != NULL && event->context != context)
        event = event->next;
    return event;
}

/* What belongs to a context goes with it, as in the real driver; to rely on it is misuse. */
static void destroy_context(uint64_t context)
{
    struct stream *stream;
    struct range *range;
    struct event *event;
    if (stream_in(context) != NULL || range_in(context) != NULL || event_in(context) != NULL)
        count_misuse("context released before what belongs to it", handle_of(context));
    while ((stream = stream_in(context)) != NULL)
        destroy_stream(stream);
    while ((range = range_in(context)) != NULL)
        drop_range(range);
    while ((event = event_in(context)) != NULL)
        UNLINK(fake.events, event);
}

static CUresult set_current(uint64_t context, bool push)
{
    uint64_t before = current_context();
    if (context == 0 && !push) {
        thread.depth -= before != 0;
        return CUDA_SUCCESS;
    }
    CUresult result = check_context(context);
    if (result != CUDA_SUCCESS)
        return result;
    if (push || before == 0) {
        if (thread.depth == MAX_STACK)
            return CUDA_ERROR_OUT_OF_MEMORY;
        thread.depth++;
    }
    thread.contexts[thread.depth - 1] = context;
    return CUDA_SUCCESS;
}

/* ---- The calls: each is between enter and leave ---- */

enum need { NOTHING, DRIVER, CURRENT };

static CUresult injected(enum function function)
{
    for (int i = 0; i < fake.n_rules; i++) {
        const struct rule *rule = &fake.rules[i];
        uint64_t call = fake.calls[function];
        if (rule->function == function && call >= rule->first &&
            call - rule->first < rule->times)
            return rule->result;
    }
    return CUDA_SUCCESS;
}

/* Takes the mutex, counts the call, and says whether it can go on. */
static CUresult enter(enum function function, enum need need)
{
    pthread_mutex_lock(&fake.mutex);
    fake.calls[function]++;
    CUresult result = injected(function);
    if (result == CUDA_SUCCESS && need != NOTHING && !fake.initialized)
        result = CUDA_ERROR_NOT_INITIALIZED;
    if (result == CUDA_SUCCESS && need == CURRENT)
        result = check_context(current_context());
    return result;
}

static CUresult leave(CUresult result)
{
    pthread_mutex_unlock(&fake.mutex);
    return result;
}

#define AS_TEXT(code, name, text) {code, #name, text},
static const struct {
    CUresult code;
    const char *name, *text;
} results[] = {RESULTS(AS_TEXT)};

static CUresult describe(CUresult code, const char **text, bool name)
{
    *text = NULL;
    for (size_t i = 0; i < COUNT(results); i++)
        if (results[i].code == code)
            *text = name ? results[i].name : results[i].text;
    return *text != NULL ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

static CUresult initialize(unsigned flags)
{
    if (flags != 0)
        return CUDA_ERROR_INVALID_VALUE;
    if (fake.n_devices == 0)
        return CUDA_ERROR_NO_DEVICE;
    fake.initialized = true;
    return CUDA_SUCCESS;
}

static CUresult get_device(CUdevice *device, int ordinal)
{
    if (device_at(ordinal) == NULL)
        return CUDA_ERROR_INVALID_DEVICE;
    *device = ordinal;
    return CUDA_SUCCESS;
}

static CUresult name_device(char *name, int length, CUdevice device)
{
    if (device_at(device) == NULL)
        return CUDA_ERROR_INVALID_DEVICE;
    if (length <= 0)
        return CUDA_ERROR_INVALID_VALUE;
    snprintf(name, (size_t)length, "Fake device %d", device);
    return CUDA_SUCCESS;
}

static CUresult total_memory(size_t *bytes, CUdevice device)
{
    if (device_at(device) == NULL)
        return CUDA_ERROR_INVALID_DEVICE;
    *bytes = fake.devices[device].total;
    return CUDA_SUCCESS;
}

static CUresult get_attribute(int *value, int attribute, CUdevice device)
{
    if (device_at(device) == NULL)
        return CUDA_ERROR_INVALID_DEVICE;
    *value = attribute == ATTRIBUTE_UNIFIED_ADDRESSING ||
             attribute == ATTRIBUTE_HOST_REGISTER_SUPPORTED;
    if (attribute == ATTRIBUTE_INTEGRATED)
        *value = fake.devices[device].integrated;
    return CUDA_SUCCESS;
}

static CUresult retain(CUcontext *handle, CUdevice index)
{
    struct device *device = device_at(index);
    if (device == NULL)
        return CUDA_ERROR_INVALID_DEVICE;
    if (device->retained++ == 0)
        device->context = new_handle(CONTEXT);
    *handle = handle_of(device->context);
    return CUDA_SUCCESS;
}

static CUresult release(CUdevice index)
{
    struct device *device = device_at(index);
    if (device == NULL)
        return CUDA_ERROR_INVALID_DEVICE;
    if (device->retained == 0)
        return CUDA_ERROR_INVALID_CONTEXT;
    if (--device->retained == 0)
        destroy_context(device->context);
    return CUDA_SUCCESS;
}

static CUresult pop_current(CUcontext *handle)
{
    uint64_t context = current_context();
    if (context == 0)
        return CUDA_ERROR_INVALID_CONTEXT;
    thread.depth--;
    if (handle != NULL)
        *handle = handle_of(context);
    return CUDA_SUCCESS;
}

static CUresult context_device(CUdevice *device, uint64_t context)
{
    CUresult result = check_context(context);
    if (result == CUDA_SUCCESS)
        *device = device_of(context);
    return result;
}

static CUresult memory_info(size_t *unused, size_t *total)
{
    int device = device_of(current_context());
    *total = fake.devices[device].total;
    *unused = free_bytes(device);
    return CUDA_SUCCESS;
}

static CUresult drop_at(bool on_device, const uint8_t *address, CUresult unknown)
{
    struct range *range = find_range(on_device, address, 1);
    if (range == NULL || range->start != address)
        return unknown;
    drop_range(range);
    return CUDA_SUCCESS;
}

static CUresult pointer_attribute(void *value, int attribute, CUdeviceptr address)
{
    const struct range *range = find_range(true, handle_of(address), 1);
    if (range == NULL ||
        (attribute != POINTER_MEMORY_TYPE && attribute != POINTER_DEVICE_ORDINAL))
        return CUDA_ERROR_INVALID_VALUE;
    int answer = attribute == POINTER_MEMORY_TYPE ? MEMORYTYPE_DEVICE : range->device;
    memcpy(value, &answer, sizeof answer);
    return CUDA_SUCCESS;
}

static CUresult copy(CUstream stream, void *to, const void *from, size_t size, bool to_device,
                     bool from_device)
{
    if (from == NULL && size != 0)
        return CUDA_ERROR_INVALID_VALUE;
    struct operation operation = {.to = to, .from = from, .size = size};
    return submit(stream, operation, to_device, from_device);
}

static CUresult end_stream(CUstream handle)
{
    struct stream *stream = find_stream(value_of(handle), false);
    if (stream == NULL)
        return CUDA_ERROR_INVALID_HANDLE;
    destroy_stream(stream);
    return CUDA_SUCCESS;
}

static CUresult stream_state(CUstream handle, bool wait)
{
    if (is_default(handle)) {
        bool busy = next_blocking(current_context()) != NULL;
        if (wait)
            wait_blocking();
        return busy && !wait ? CUDA_ERROR_NOT_READY : CUDA_SUCCESS;
    }
    const struct stream *stream = find_stream(value_of(handle), false);
    if (stream == NULL)
        return CUDA_ERROR_INVALID_HANDLE;
    if (wait)
        wait_done(stream->id, stream->submitted);
    else if (stream->done != stream->submitted)
        return CUDA_ERROR_NOT_READY;
    return CUDA_SUCCESS;
}

static CUresult event_state(CUevent handle, bool wait)
{
    const struct event *event = find_event(handle);
    if (event == NULL)
        return CUDA_ERROR_INVALID_HANDLE;
    if (wait)
        wait_done(event->stream, event->position);
    else if (!is_done(event->stream, event->position))
        return CUDA_ERROR_NOT_READY;
    return CUDA_SUCCESS;
}

static CUresult end_event(CUevent handle)
{
    struct event *event = find_event(handle);
    if (event == NULL)
        return CUDA_ERROR_INVALID_HANDLE;
    UNLINK(fake.events, event);
    return CUDA_SUCCESS;
}

/* ---- The way in ---- */

static int find_function(const char *name)
{
    for (int i = 0; i < N_FUNCTIONS; i++)
        if (strcmp(names[i], name) == 0)
            return i;
    return -1;
}

static CUresult find_address(const char *, void **, int, int *);

#define AS_CALL(name, suffix, parameters, need, body)           \
    CUresult name##suffix parameters                            \
    {                                                           \
        CUresult result = enter(F_##name, need);                \
        return leave(result != CUDA_SUCCESS ? result : (body)); \
    }
CALLS(AS_CALL)

/* What these two names stood for before or stand for since. */
AS_CALL(cuGetProcAddress, , (const char *name, void **address, int version, uint64_t flags),
        NOTHING, ((void)flags, find_address(name, address, version, NULL)))
AS_CALL(cuCtxGetDevice, _v2, (CUdevice *device, CUcontext context), DRIVER,
        context_device(device, context != NULL ? value_of(context) : current_context()))

typedef void (*any_function)(void);
#define AS_ADDRESS(name, suffix, parameters, need, body) (any_function)name##suffix,
static const any_function addresses[] = {CALLS(AS_ADDRESS)};

/* One name has two signatures, which the version tells apart. */
static CUresult find_address(const char *name, void **address, int version, int *status)
{
    int index = find_function(name);
    any_function function = index < 0 ? NULL : addresses[index];
    if (index == F_cuCtxGetDevice && version >= 13000)
        function = (any_function)cuCtxGetDevice_v2;
    memcpy(address, &function, sizeof function);
    if (status != NULL)
        *status = index < 0; /* CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND is 1 */
    return index < 0 ? CUDA_ERROR_NOT_FOUND : CUDA_SUCCESS;
}

/* ---- Control ---- */

/* Everything as after loading, but what cuInit did; refused (-1) while anything is alive. */
int fake_reset(void)
{
    pthread_mutex_lock(&fake.mutex);
    bool alive = fake.ranges != NULL || fake.streams != NULL || fake.events != NULL;
    for (int i = 0; i < fake.n_devices; i++)
        alive |= fake.devices[i].retained != 0;
    if (!alive)
        set_defaults();
    return leave(alive ? -1 : 0);
}

/* `reserved` is in use by others. A total of 0: reported as 0 of 0 free, but without limit. */
int fake_device(int index, uint64_t total, uint64_t reserved, int integrated)
{
    if (index < 0 || index >= MAX_DEVICES)
        return -1;
    pthread_mutex_lock(&fake.mutex);
    struct device *device = &fake.devices[index];
    device->total = total;
    device->reserved = reserved;
    device->integrated = integrated != 0;
    return leave(0);
}

/* From now on; refused (-1) if it would take a device that is in use. */
int fake_device_count(int n)
{
    if (n < 0 || n > MAX_DEVICES)
        return -1;
    pthread_mutex_lock(&fake.mutex);
    for (int i = n; i < fake.n_devices; i++)
        if (fake.devices[i].retained != 0)
            return leave(-1);
    fake.n_devices = n;
    return leave(0);
}

/* Of each stream; 0 is no limit. It holds for operations under way too. */
void fake_speed(uint64_t bytes_per_second)
{
    pthread_mutex_lock(&fake.mutex);
    fake.speed = bytes_per_second;
    notify();
    pthread_mutex_unlock(&fake.mutex);
}

/* From the nth call from now on (1 is the next), `times` calls do nothing but fail. Of several
 * rules for a call the oldest counts. */
int fake_fail(const char *name, uint64_t nth, uint64_t times, int error)
{
    int function = find_function(name);
    if (function < 0 || nth == 0)
        return -1;
    pthread_mutex_lock(&fake.mutex);
    if (fake.n_rules == MAX_RULES)
        return leave(-1);
    fake.rules[fake.n_rules++] = (struct rule){.function = (enum function)function,
                                               .result = error, .times = times,
                                               .first = fake.calls[function] + nth};
    return leave(0);
}

/* UINT64_MAX: no such function. */
uint64_t fake_calls(const char *name)
{
    int function = find_function(name);
    if (function < 0)
        return UINT64_MAX;
    pthread_mutex_lock(&fake.mutex);
    uint64_t n = fake.calls[function];
    pthread_mutex_unlock(&fake.mutex);
    return n;
}

static uint64_t count_live(const char *what)
{
    uint64_t contexts = 0, streams = 0, threads = 0, events = 0, allocations, registrations;
    uint64_t bytes = sum_ranges(true, -1, &allocations);
    uint64_t registered = sum_ranges(false, -1, &registrations);
    for (int i = 0; i < MAX_DEVICES; i++)
        contexts += fake.devices[i].retained;
    for (const struct stream *stream = fake.streams; stream != NULL; stream = stream->next) {
        streams += !stream->closing;
        threads++;
    }
    for (const struct event *event = fake.events; event != NULL; event = event->next)
        events++;
    const struct {
        const char *name;
        uint64_t value;
    } counts[] = {
        {"contexts", contexts},           {"allocations", allocations},
        {"bytes", bytes},                 {"registrations", registrations},
        {"registered_bytes", registered}, {"peak_registered_bytes", fake.peak_registered},
        {"streams", streams},             {"events", events},
        {"threads", threads},             {"misuse", fake.misuses},
    };
    for (size_t i = 0; i < COUNT(counts); i++)
        if (strcmp(counts[i].name, what) == 0)
            return counts[i].value;
    return UINT64_MAX;
}

/* UINT64_MAX: no such count. */
uint64_t fake_live(const char *what)
{
    pthread_mutex_lock(&fake.mutex);
    uint64_t n = count_live(what);
    pthread_mutex_unlock(&fake.mutex);
    return n;
}

/* The last misuse, or "". Valid until the thread's next call. */
const char *fake_misuse(void)
{
    pthread_mutex_lock(&fake.mutex);
    memcpy(thread.misuse, fake.misuse, sizeof thread.misuse);
    pthread_mutex_unlock(&fake.mutex);
    return thread.misuse;
}
