// Memory of the device and pinned memory. Both are ordinary memory of this process.
#pragma once

#include <c10/core/Allocator.h>

#include <cstdio>
#include <cstring>
#include <map>
#include <set>

#include "streams.h"

namespace pretend {

struct Block {
  Key home;  // the stream that it was allocated on, which may use it again once it is free
  std::map<Key, int64_t> uses;  // per stream, the number of the last work that used it
  std::set<Key> recorded;  // the streams of record_stream()
};

inline std::map<const void*, Block> blocks;
inline std::map<c10::DeviceIndex, int64_t> allocated;  // bytes, since the process started
inline std::set<const void*> pinned;

// End the process if freed memory may still be in use: its home stream could overwrite it.
inline void check_unused(const Block& block) {
  for (const auto& [stream, number] : block.uses) {
    const bool is_safe = block.recorded.count(stream) || has_waited(block.home, stream, number) ||
        has_waited(kHost, stream, number);
    if (!is_safe) {
      std::fprintf(stderr,
          "pretend: memory of stream %lld is freed while stream %lld uses it: "
          "expected tensor.record_stream(), or a wait\n",
          static_cast<long long>(block.home), static_cast<long long>(stream));
      std::_Exit(70);
    }
  }
}

inline void free_block(void* memory) {
  std::lock_guard<std::recursive_mutex> guard(lock);
  const auto found = blocks.find(memory);
  if (found != blocks.end()) {
    check_unused(found->second);
    blocks.erase(found);
  }
  std::free(memory);
}

inline void free_pinned(void* memory) {
  std::lock_guard<std::recursive_mutex> guard(lock);
  pinned.erase(memory);
  std::free(memory);
}

struct DeviceAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    const c10::Device device(kDevice, current_device);
    if (bytes == 0) {
      return {nullptr, nullptr, &free_block, device};
    }
    void* memory = std::malloc(bytes);
    std::memset(memory, 0xff, bytes);  // as float: NaN, which finds who reads it too early
    std::lock_guard<std::recursive_mutex> guard(lock);
    blocks[memory] = Block{current_stream(current_device), {}, {}};
    allocated[current_device] += bytes;
    return {memory, memory, &free_block, device};
  }
  c10::DeleterFnPtr raw_deleter() const override {
    return &free_block;
  }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    std::memcpy(to, from, bytes);
  }
};

struct PinnedAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    void* memory = std::malloc(bytes + 1);
    std::lock_guard<std::recursive_mutex> guard(lock);
    pinned.insert(memory);
    return {memory, memory, &free_pinned, c10::Device(c10::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override {
    return &free_pinned;
  }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    std::memcpy(to, from, bytes);
  }
};

inline DeviceAllocator device_allocator;
inline PinnedAllocator pinned_allocator;

inline void note_use(const void* memory, Key stream, int64_t number) {
  std::lock_guard<std::recursive_mutex> guard(lock);
  const auto found = blocks.find(memory);
  if (found != blocks.end()) {
    found->second.uses[stream] = number;
  }
}

inline void record_stream(const void* memory, Key stream) {
  std::lock_guard<std::recursive_mutex> guard(lock);
  const auto found = blocks.find(memory);
  if (found != blocks.end()) {
    found->second.recorded.insert(stream);
  }
}

}  // namespace pretend
