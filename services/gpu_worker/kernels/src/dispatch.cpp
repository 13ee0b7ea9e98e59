// Which instruction sets this processor and kernel offer, where threads run, and the page copy. Leaves the choice to the caller.
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#if defined(__linux__)
#include <sched.h>
#include <sys/syscall.h>
#endif
#if defined(_OPENMP)
#include <omp.h>
#endif

#include <algorithm>
#include <vector>

#include "interface.h"

namespace radixfleet {

const Kernels& kernels_of(int isa) {
  switch (isa) {
#if defined(RF_HAVE_AVX2)
    case kAvx2: return kernels_avx2;
#endif
#if defined(RF_HAVE_AVX512)
    case kAvx512: return kernels_avx512;
#endif
#if defined(RF_HAVE_AMX)
    case kAmx: return kernels_amx;
#endif
    default: return kernels_portable;
  }
}

namespace {

#if defined(__x86_64__)
struct CpuId {  // what the processor says of itself; not every compiler has a name for each of it
  uint32_t a, b, c, d;
  explicit CpuId(uint32_t leaf, uint32_t part = 0) : a(leaf), c(part) {
    __asm__ volatile("cpuid" : "+a"(a), "=b"(b), "+c"(c), "=d"(d));
  }
};

bool has_avx2() {
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && (CpuId(1).c >> 29 & 1);  // F16C
}
bool has_avx512() {
  const bool has_base = has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                        __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
  return has_base && (CpuId(7).c >> 11 & 1) && (CpuId(7, 1).a >> 5 & 1);  // AVX512-VNNI, AVX512-BF16
}
#endif

#if defined(__linux__) && defined(__x86_64__)
bool cpuid_has_amx() {
  const uint32_t d = CpuId(7).d;
  return (d >> 22 & 1) && (d >> 24 & 1) && (d >> 25 & 1);  // AMX-BF16, AMX-TILE, AMX-INT8
}
// The kernel gives the 8 KiB tile state to a process only on request (ARCH_REQ_XCOMP_PERM, XTILEDATA).
bool request_amx() { return syscall(SYS_arch_prctl, 0x1023, 18) == 0; }

// Runs a tile instruction in a child, so that a hypervisor that shows the flag and traps the use costs us nothing.
bool probe_amx() {
  const pid_t child = fork();
  if (child == 0) {
    if (!request_amx()) _exit(1);
    alignas(64) uint8_t config[64] = {1};
    config[16] = 64, config[48] = 1;
    __asm__ volatile("ldtilecfg %0\n\ttilezero %%tmm0\n\ttilerelease" : : "m"(config));
    _exit(0);
  }
  int status = 0;
  return child > 0 && waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 0;
}
#endif

}  // namespace
}  // namespace radixfleet

using namespace radixfleet;

// 1 when the kernels of `isa` are in this library and run here. For AMX this also asks the kernel for its state.
RF_EXPORT int rf_has_isa(int isa) {
  if (isa == kPortable) return 1;
#if defined(__x86_64__)
  __builtin_cpu_init();
#if defined(RF_HAVE_AVX2)
  if (isa == kAvx2) return has_avx2();
#endif
#if defined(RF_HAVE_AVX512)
  if (isa == kAvx512) return has_avx512();
#endif
#if defined(RF_HAVE_AMX) && defined(RF_SOFT_TILES)
  if (isa == kAmx) return has_avx512();
#elif defined(RF_HAVE_AMX) && defined(__linux__)
  if (isa == kAmx) return has_avx512() && cpuid_has_amx() && probe_amx() && request_amx();
#endif
#endif
  return 0;
}

// Reads `words` words of memory on all threads and returns their exclusive or: for measuring bandwidth.
RF_EXPORT uint64_t rf_read_memory(const uint64_t* memory, int64_t words, int threads) {
  uint64_t sum = 0;
  (void)threads;
#pragma omp parallel for num_threads(threads) schedule(static) reduction(^ : sum)
  for (int64_t i = 0; i < words; i++) sum ^= memory[i];
  return sum;
}

namespace radixfleet {
namespace {

std::vector<int32_t> places;  // [threads][width] processors, -1: none; written once, before any step
int places_width = 0;

bool keep_on(const int32_t* cpus, int width) {
#if defined(__linux__)
  const int last = *std::max_element(cpus, cpus + width);
  cpu_set_t* set = CPU_ALLOC(last + 1);
  if (!set) return false;
  const size_t size = CPU_ALLOC_SIZE(last + 1);
  CPU_ZERO_S(size, set);
  for (int i = 0; i < width; i++)
    if (cpus[i] >= 0) CPU_SET_S(cpus[i], size, set);
  const bool kept = sched_setaffinity(0, size, set) == 0;
  CPU_FREE(set);
  return kept;
#else
  (void)cpus, (void)width;
  return false;
#endif
}

}  // namespace

// The runtime may end helpers and start others, which begin where their maker is: so each looks once for itself.
bool keep_place(int thread) {
  static thread_local bool looked = false, kept = false;
  if (looked || (size_t)(thread + 1) * places_width > places.size()) return kept;
  looked = places_width > 0;
  return kept = looked && keep_on(places.data() + (int64_t)thread * places_width, places_width);
}

}  // namespace radixfleet

// Keeps thread i of every step's team, of which the caller is the first, on the processors cpus[i][width], -1: none. How
// many threads could not be kept so.
RF_EXPORT int rf_pin_threads(const int32_t* cpus, int width, int threads) {
  places.assign(cpus, cpus + (int64_t)threads * width), places_width = width;
  int kept = 0;
#if defined(_OPENMP)
#pragma omp parallel num_threads(threads) reduction(+ : kept)
  kept += keep_place(omp_get_thread_num());
#endif
  return threads - kept;
}

namespace {

bool any_is_target(const int64_t* sources, const int64_t* targets, int count) {
  std::vector<int64_t> sorted(targets, targets + count);
  std::sort(sorted.begin(), sorted.end());
  return std::any_of(sources, sources + count, [&](int64_t id) { return std::binary_search(sorted.begin(), sorted.end(), id); });
}

}  // namespace

// Copies pages of `page_bytes` bytes within every layer; all sources are read before any target is written.
RF_EXPORT int rf_copy_pages(void* const* layers, int num_layers, const int64_t* sources, const int64_t* targets, int count,
                            int64_t page_bytes, int threads) {
  // By way of other memory only where a page is both: fresh memory costs more than the copy.
  const bool is_held = any_is_target(sources, targets, count);
  char* held = is_held ? (char*)malloc((size_t)num_layers * count * page_bytes) : nullptr;
  if (is_held && !held) return -1;
  (void)threads;
#pragma omp parallel for num_threads(threads) schedule(static)
  for (int l = 0; l < num_layers; l++) {
    char *layer = (char*)layers[l], *copy = held + (size_t)l * count * page_bytes;
    for (int i = 0; is_held && i < count; i++) memcpy(copy + i * page_bytes, layer + sources[i] * page_bytes, page_bytes);
    for (int i = 0; i < count; i++)
      memcpy(layer + targets[i] * page_bytes, is_held ? copy + i * page_bytes : layer + sources[i] * page_bytes, page_bytes);
  }
  free(held);
  return 0;
}
