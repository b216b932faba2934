// What the allocator asks of CUDA's runtime, driver and NVML, answered by keeping count. See README.md.
#include <cuda.h>
#include <cuda_runtime_api.h>
#include <unistd.h>
#include <cstdlib>
#include <cstring>
#include <map>
#include <string>

static size_t number(const char* name) { return strtoull(getenv(name), nullptr, 10); }
static size_t total() { static size_t n = number("CARD_TOTAL"); return n; }     // all of the card's memory
static size_t budget() { static size_t n = number("CARD_BUDGET"); return n; }   // what is free for this process
static size_t used = 0, top = 0x7F0000000000, handle_count = 0, stream_count = 0;
static std::map<size_t, size_t> pieces;                                         // cudaMalloc: address -> size
static std::map<CUmemGenericAllocationHandle, size_t> pages;                    // cuMemCreate: handle -> size

static bool takes(size_t size) {
  if (used + size > budget()) return false;
  used += size;
  return true;
}

static CUresult reserve(CUdeviceptr* address, size_t size, size_t, CUdeviceptr, unsigned long long) {
  *address = top;
  top += size;
  return CUDA_SUCCESS;
}
static CUresult create(CUmemGenericAllocationHandle* handle, size_t size, const CUmemAllocationProp*,
                       unsigned long long) {
  if (!takes(size)) return CUDA_ERROR_OUT_OF_MEMORY;
  pages[*handle = ++handle_count] = size;
  return CUDA_SUCCESS;
}
static CUresult release(CUmemGenericAllocationHandle handle) {
  used -= pages[handle];
  pages.erase(handle);
  return CUDA_SUCCESS;
}
static CUresult attribute(int* value, int, int) { *value = 0; return CUDA_SUCCESS; }
static CUresult fine() { return CUDA_SUCCESS; }

extern "C" {
cudaError_t cudaMalloc(void** address, size_t size) {
  if (!takes(size)) return cudaErrorMemoryAllocation;
  *address = reinterpret_cast<void*>(top);
  pieces[top] = size;
  top += size;
  return cudaSuccess;
}
cudaError_t cudaFree(void* address) {
  auto piece = pieces.find(reinterpret_cast<size_t>(address));
  if (piece == pieces.end()) return cudaSuccess;
  used -= piece->second;
  pieces.erase(piece);
  return cudaSuccess;
}
cudaError_t cudaMemGetInfo(size_t* free, size_t* all) { *free = budget() - used; *all = total(); return cudaSuccess; }
cudaError_t cudaGetDeviceCount(int* count) { *count = 1; return cudaSuccess; }
cudaError_t cudaGetDevice(int* device) { *device = 0; return cudaSuccess; }
cudaError_t cudaSetDevice(int) { return cudaSuccess; }
cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int) {
  memset(properties, 0, sizeof *properties);
  properties->totalGlobalMem = total();
  properties->major = 8;
  return cudaSuccess;
}
cudaError_t cudaDriverGetVersion(int* version) { *version = 13000; return cudaSuccess; }
cudaError_t cudaGetLastError() { return cudaSuccess; }
cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) { *event = (cudaEvent_t)1; return cudaSuccess; }
cudaError_t cudaEventDestroy(cudaEvent_t) { return cudaSuccess; }
cudaError_t cudaEventQuery(cudaEvent_t) { return cudaErrorNotReady; }       // nothing is done before it is waited for
cudaError_t cudaEventRecord(cudaEvent_t, cudaStream_t) { return cudaSuccess; }
cudaError_t cudaEventSynchronize(cudaEvent_t) { return cudaSuccess; }
cudaError_t cudaStreamSynchronize(cudaStream_t) { return cudaSuccess; }
cudaError_t cudaDeviceSynchronize() { return cudaSuccess; }
cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned, int) {
  *stream = reinterpret_cast<cudaStream_t>(++stream_count * 0x1000);
  return cudaSuccess;
}
cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  *least = 0;
  *greatest = -3;
  return cudaSuccess;
}
cudaError_t cudaStreamIsCapturing(cudaStream_t, cudaStreamCaptureStatus* status) {
  *status = cudaStreamCaptureStatusNone;
  return cudaSuccess;
}
cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode*) { return cudaSuccess; }
cudaError_t cudaGetDriverEntryPointByVersion(const char* name, void** function, unsigned, unsigned long long,
                                             cudaDriverEntryPointQueryResult* result) {
  static const std::map<std::string, void*> known{
      {"cuMemAddressReserve", (void*)reserve}, {"cuMemCreate", (void*)create}, {"cuMemRelease", (void*)release},
      {"cuDeviceGetAttribute", (void*)attribute}};
  auto found = known.find(name);
  *function = found == known.end() ? (void*)fine : found->second;
  if (result) *result = cudaDriverEntryPointSuccess;
  return cudaSuccess;
}

// NVML, which tells what each process on the card has in use, and of a fabric that isn't there.
struct Process { unsigned pid; unsigned long long in_use; };
int nvmlInit_v2() { return 0; }
int nvmlDeviceGetHandleByPciBusId_v2(const char*, void** device) { *device = (void*)1; return 0; }
int nvmlDeviceGetGpuFabricInfoV() { return 0; }
int nvmlSystemGetCudaDriverVersion_v2(int* version) { *version = 13000; return 0; }
int nvmlDeviceGetNvLinkRemoteDeviceType() { return 3; }
int nvmlDeviceGetNvLinkRemotePciInfo_v2() { return 3; }
int nvmlDeviceGetComputeRunningProcesses(void*, unsigned* count, Process* processes) {
  *count = 1;
  processes[0] = {static_cast<unsigned>(getpid()), used + total() - budget()};
  return 0;
}
}
