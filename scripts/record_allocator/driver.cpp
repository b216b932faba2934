// Reads steps, has PyTorch's allocator do them, and prints what its statistics say after each. See README.md.
//   a ID SIZE STREAM  allocate     f ID  free     r ID STREAM  record_stream     e  empty_cache
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <c10/cuda/PeerToPeerAccess.h>
#include <unistd.h>
#include <iostream>
#include <map>

namespace c10::cuda::_internal { void setHasPrimaryContext(bool (*)(c10::DeviceIndex)); }

int main() {
  c10::cuda::_internal::setHasPrimaryContext([](c10::DeviceIndex) { return true; });
  c10::cuda::detail::init_p2p_access_cache(1);
  c10::cuda::CUDACachingAllocator::init(1);
  auto* allocator = c10::cuda::CUDACachingAllocator::get();
  std::vector<c10::cuda::CUDAStream> streams{c10::cuda::getDefaultCUDAStream(0)};
  while (streams.size() < 4) streams.push_back(c10::cuda::getStreamFromPool(false, 0));
  std::map<void*, size_t> index;                                // of each stream
  for (size_t i = 0; i < streams.size(); ++i) index[streams[i].stream()] = i;

  std::map<long, c10::DataPtr> live;
  std::string step;
  while (std::cin >> step) {
    long id = 0;
    size_t size = 0, stream = 0, address = 0;
    std::string message;
    if (step == "a") {
      std::cin >> id >> size >> stream;
      c10::cuda::CUDAStreamGuard guard(streams[stream]);
      try {
        auto pointer = allocator->allocate(size);
        address = reinterpret_cast<size_t>(pointer.get());
        live.emplace(id, std::move(pointer));
      } catch (const c10::OutOfMemoryError& error) {
        message = error.what_without_backtrace();
      }
    } else if (step == "f") {
      std::cin >> id;
      live.erase(id);
    } else if (step == "r") {
      std::cin >> id >> stream;
      if (live.count(id)) allocator->recordStream(live.at(id), streams[stream]);
    } else {
      allocator->emptyCache({0, 0});
    }
    auto stats = allocator->getDeviceStats(0);
    for (int64_t value :
         {static_cast<int64_t>(address), stats.allocated_bytes[0].current, stats.allocated_bytes[0].peak,
          stats.reserved_bytes[0].current, stats.reserved_bytes[0].peak, stats.requested_bytes[0].current,
          stats.active_bytes[0].current, stats.active_bytes[0].peak, stats.inactive_split_bytes[0].current,
          stats.inactive_split[0].current, stats.segment[0].current, stats.allocation[0].current,
          stats.active[0].current, stats.num_alloc_retries, stats.num_ooms, stats.num_oom_rejections,
          stats.num_device_alloc, stats.num_device_free, stats.num_sync_all_streams})
      std::cout << value << " ";
    std::cout << "|" << message << "|";
    for (const auto& segment : allocator->snapshot({0, 0}).segments) {
      std::cout << segment.address << "," << segment.total_size << "," << segment.allocated_size << ","
                << segment.active_size << "," << index[segment.stream] << "," << segment.is_large << ","
                << segment.is_expandable;
      for (const auto& block : segment.blocks)
        std::cout << ":" << block.size << "," << (block.allocated ? 1 : block.active ? 2 : 0);
      std::cout << " ";
    }
    std::cout << "\n";
  }
  std::cout.flush();
  _exit(0);                                                   // without the destructors of a runtime that isn't there
}
