// What PyTorch asks of a device: which one is current, its streams and events, pinned memory.
#pragma once

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <atomic>

#include "memory.h"

namespace pretend {

struct Guard final : c10::impl::DeviceGuardImplInterface {
  static constexpr c10::DeviceType static_type = kDevice;

  Guard() = default;
  explicit Guard(c10::DeviceType) {}

  c10::DeviceType type() const override {
    return kDevice;
  }

  c10::DeviceIndex deviceCount() const noexcept override {
    return device_count();
  }
  c10::Device getDevice() const override {
    return {kDevice, current_device};
  }
  void setDevice(c10::Device device) const override {
    TORCH_CHECK(device.index() < device_count(), "pretend: there is no device ",
        static_cast<int>(device.index()), ", only ", device_count());
    uncheckedSetDevice(device);
  }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    current_device = or_current(device.index());
  }
  c10::Device exchangeDevice(c10::Device device) const override {
    const c10::Device before = getDevice();
    setDevice(device);
    return before;
  }

  c10::Stream getStream(c10::Device device) const override {
    const c10::DeviceIndex index = or_current(device.index());
    return stream(index, current_streams[index]);
  }
  c10::Stream getDefaultStream(c10::Device device) const override {
    return stream(or_current(device.index()), 0);
  }
  c10::Stream getNewStream(c10::Device device, int /*priority*/) const override {
    static std::atomic<c10::StreamId> next{1};
    return stream(or_current(device.index()), next++);
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool /*priority*/) const override {
    return getNewStream(device, 0);
  }
  c10::Stream exchangeStream(c10::Stream other) const override {
    const c10::Stream before = getStream(other.device());
    current_streams[other.device_index()] = other.id();
    return before;
  }
  bool queryStream(const c10::Stream& other) const override {
    std::lock_guard<std::recursive_mutex> guard(lock);
    return streams[key(other)].late.empty();
  }
  void synchronizeStream(const c10::Stream& other) const override {
    host_waits_for(key(other));
  }
  void synchronizeDevice(const c10::DeviceIndex device) const override {
    std::lock_guard<std::recursive_mutex> guard(lock);
    host_waits++;
    for (auto& [other, state] : streams) {
      if (other >> 32 == device) {
        host_waits--;  // all streams of the device count as one wait
        host_waits_for(other);
      }
    }
  }

  void record(void** event, const c10::Stream& other, const c10::DeviceIndex,
      const c10::EventFlag) const override {
    std::lock_guard<std::recursive_mutex> guard(lock);
    if (!*event) {
      *event = new Event();
    }
    const auto now = std::chrono::steady_clock::now();
    *static_cast<Event*>(*event) = {key(other), streams[key(other)].asked, now};
  }
  void block(void* event, const c10::Stream& other) const override {
    if (event) {
      const auto* e = static_cast<Event*>(event);
      wait(key(other), e->stream, e->number);
    }
  }
  bool queryEvent(void* event) const override {
    std::lock_guard<std::recursive_mutex> guard(lock);
    if (!event) {
      return true;
    }
    const auto* e = static_cast<Event*>(event);
    const auto& late = streams[e->stream].late;
    return late.empty() || late.front().number > e->number;
  }
  void synchronizeEvent(void* event) const override {
    const auto* e = static_cast<Event*>(event);
    wait(kHost, e->stream, e->number);
  }
  double elapsedTime(void* begin, void* end, const c10::DeviceIndex) const override {
    const auto span = static_cast<Event*>(end)->time - static_cast<Event*>(begin)->time;
    return std::chrono::duration<double, std::milli>(span).count();
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override {
    delete static_cast<Event*>(event);
  }

 private:
  static c10::Stream stream(c10::DeviceIndex device, c10::StreamId id) {
    return c10::Stream(c10::Stream::UNSAFE, c10::Device(kDevice, device), id);
  }
  static Key key(const c10::Stream& stream) {
    return key_of(stream.device_index(), stream.id());
  }
};

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override {
    return true;
  }
  bool isAvailable() const override {
    return device_count() > 0;
  }
  bool hasPrimaryContext(c10::DeviceIndex) const override {
    return true;
  }
  c10::DeviceIndex deviceCount() const override {
    return device_count();
  }
  c10::DeviceIndex getCurrentDevice() const override {
    return current_device;
  }
  void setCurrentDevice(c10::DeviceIndex device) const override {
    Guard().setDevice(c10::Device(kDevice, device));
  }
  bool isPinnedPtr(const void* memory) const override {
    std::lock_guard<std::recursive_mutex> guard(lock);
    return pinned.count(memory) > 0;
  }
  c10::Allocator* getPinnedMemoryAllocator() const override {
    return &pinned_allocator;
  }
  // The device draws the random numbers of the CPU, so both train the same.
  const at::Generator& getDefaultGenerator(c10::DeviceIndex) const override {
    return at::detail::getDefaultCPUGenerator();
  }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    c10::DataPtr memory = device_allocator.allocate(bytes);
    if (storage.nbytes()) {
      std::memcpy(memory.get(), storage.data(), std::min(bytes, storage.nbytes()));
    }
    storage.set_data_ptr_noswap(std::move(memory));
    storage.unsafeGetStorageImpl()->set_nbytes(bytes);
  }
};

}  // namespace pretend
