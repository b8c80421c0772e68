/* An allocator that fills every block with one byte. CUDA's runtime is found at run time: no headers are needed. */
#include <dlfcn.h>
#include <stddef.h>

static int byte_ = 0;
static int (*malloc_)(void **, size_t);
static int (*free_)(void *);
static int (*set_)(void *, int, size_t);
static int (*set_on_)(void *, int, size_t, void *);
static int (*sync_)(void);

int gradtruth_open(const char *runtime) {
  void *handle = dlopen(runtime, RTLD_NOW);
  if (!handle) return 1;
  malloc_ = (int (*)(void **, size_t))dlsym(handle, "cudaMalloc");
  free_ = (int (*)(void *))dlsym(handle, "cudaFree");
  set_ = (int (*)(void *, int, size_t))dlsym(handle, "cudaMemset");
  set_on_ = (int (*)(void *, int, size_t, void *))dlsym(handle, "cudaMemsetAsync");
  sync_ = (int (*)(void))dlsym(handle, "cudaDeviceSynchronize");
  return !(malloc_ && free_ && set_ && set_on_ && sync_);
}

void gradtruth_byte(int value) { byte_ = value; }

/* Fill a free block, after what its stream was given before. Returns CUDA's error. */
int gradtruth_fill(void *block, int value, size_t size, void *stream) {
  return set_on_(block, value, size, stream);
}

void *gradtruth_alloc(ptrdiff_t size, int device, void *stream) {
  void *block = NULL;
  (void)device;
  (void)stream;
  if (malloc_(&block, (size_t)size)) return NULL;
  if (set_(block, byte_, (size_t)size) || sync_()) {
    free_(block);
    return NULL;
  }
  return block;
}

void gradtruth_free(void *block, ptrdiff_t size, int device, void *stream) {
  (void)size;
  (void)device;
  (void)stream;
  sync_();
  free_(block);
}
