// Streams, events, and what has waited for what.
//
// Work on a stream is numbered from 1. It is done at once, except copies from pinned memory on a
// side stream: these are late. They are made only when something waits for them, so a program that
// does not wait reads memory that nobody has written.
#pragma once

#include <c10/core/Device.h>
#include <c10/core/Stream.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <deque>
#include <functional>
#include <map>
#include <mutex>

namespace pretend {

constexpr auto kDevice = c10::DeviceType::PrivateUse1;

inline int device_count() {
  const char* count = std::getenv("PRETEND_DEVICES");
  return count ? std::atoi(count) : 1;
}

using Key = int64_t;  // of a stream, among the streams of all devices
constexpr Key kHost = -1;  // in place of a stream: the CPU

inline Key key_of(c10::DeviceIndex device, c10::StreamId stream) {
  return (static_cast<Key>(device) << 32) + stream;
}

struct Copy {
  int64_t number;
  std::function<void()> run;
};

struct StreamState {
  int64_t asked = 0;  // the number of its newest piece of work
  std::deque<Copy> late;  // the copies that are not made yet
  std::map<Key, int64_t> waited_for;  // other streams, up to this piece of their work
};

// Of this process. All functions below hold the lock.
inline std::recursive_mutex lock;
inline std::map<Key, StreamState> streams;
inline int64_t host_waits = 0;  // how often the CPU waited for a device

// Of this thread
inline thread_local c10::DeviceIndex current_device = 0;
inline thread_local std::map<c10::DeviceIndex, c10::StreamId> current_streams;

inline c10::DeviceIndex or_current(c10::DeviceIndex device) {
  return device < 0 ? current_device : device;
}

inline Key current_stream(c10::DeviceIndex device) {
  return key_of(device, current_streams[device]);
}

inline bool is_default(Key stream) {
  return (stream & 0xffffffff) == 0;
}

// Make the late copies of a stream, up to a piece of its work.
inline void run(Key stream, int64_t number) {
  std::lock_guard<std::recursive_mutex> guard(lock);
  auto& late = streams[stream].late;
  while (!late.empty() && late.front().number <= number) {
    Copy copy = late.front();
    late.pop_front();
    copy.run();
  }
}

// Let a stream, or the CPU (kHost), wait for a piece of work of another stream, and so for all that
// this one has waited for.
inline void wait(Key waiter, Key stream, int64_t number) {
  std::lock_guard<std::recursive_mutex> guard(lock);
  run(stream, number);
  auto& newest = streams[waiter].waited_for;
  newest[stream] = std::max(newest[stream], number);
  for (const auto& [other, others_number] : streams[stream].waited_for) {
    newest[other] = std::max(newest[other], others_number);
  }
  host_waits += waiter == kHost;
}

inline void host_waits_for(Key stream) {
  std::lock_guard<std::recursive_mutex> guard(lock);
  wait(kHost, stream, streams[stream].asked);
}

inline bool has_waited(Key waiter, Key stream, int64_t number) {
  std::lock_guard<std::recursive_mutex> guard(lock);
  return waiter == stream || streams[waiter].waited_for[stream] >= number;
}

// Begin a piece of work that is done at once, after the late copies before it. Return its number.
inline int64_t begin(Key stream) {
  std::lock_guard<std::recursive_mutex> guard(lock);
  run(stream, streams[stream].asked);
  return ++streams[stream].asked;
}

// Ask for a copy that is late.
inline void copy_later(Key stream, std::function<void()> copy) {
  std::lock_guard<std::recursive_mutex> guard(lock);
  const int64_t number = ++streams[stream].asked;
  streams[stream].late.push_back({number, std::move(copy)});
}

struct Event {
  Key stream;
  int64_t number;  // the piece of work before it
  std::chrono::steady_clock::time_point time;
};

}  // namespace pretend
