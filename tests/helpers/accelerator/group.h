// A process group for tensors of the device. It refuses what NCCL would refuse, and lets gloo do the
// rest.
#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/reducer_timer.hpp>

#include "kernels.h"

namespace pretend {

using Work = c10::intrusive_ptr<c10d::Work>;
using Tensors = std::vector<Tensor>;

inline Tensors on_host(const Tensors& tensors) {
  Tensors result;
  for (const Tensor& tensor : tensors) {
    result.push_back(on_host(tensor));
  }
  return result;
}

// The work of a collective that has ended. Who waits for it lets its current stream wait for the
// stream on which the collective began, as with NCCL: the future does so with events.
class Ended final : public c10d::Work {
 public:
  explicit Ended(Tensors results) : results_(std::move(results)) {
    const auto type = c10::ListType::create(c10::TensorType::get());
    const std::vector<c10::Device> devices = {c10::Device(kDevice, current_device)};
    future_ = c10::make_intrusive<c10::ivalue::Future>(type, devices);
    future_->markCompleted(c10::IValue(results_));
    finish();
  }
  bool wait(std::chrono::milliseconds) override {
    future_->wait();
    return true;
  }
  Tensors result() override {
    return results_;
  }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override {
    return future_;
  }

 private:
  Tensors results_;
  c10::intrusive_ptr<c10::ivalue::Future> future_;
};

class Group final : public c10d::Backend {
 public:
  explicit Group(c10::intrusive_ptr<c10d::Backend> gloo)
      : c10d::Backend(gloo->getRank(), gloo->getSize()), gloo_(std::move(gloo)) {}

  const std::string getBackendName() const override {
    return "pretend_ccl";
  }

  Work allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override {
    check(tensors);
    Tensors host = on_host(tensors);
    gloo_->allreduce(host, options)->wait();
    return c10::make_intrusive<Ended>(tensors);
  }

  Work broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override {
    check(tensors);
    Tensors host = on_host(tensors);
    gloo_->broadcast(host, options)->wait();
    return c10::make_intrusive<Ended>(tensors);
  }

  Work allgather(std::vector<Tensors>& outputs, Tensors& inputs,
      const c10d::AllgatherOptions& options) override {
    check(inputs);
    check(outputs.at(0));
    std::vector<Tensors> host_outputs = {on_host(outputs[0])};
    Tensors host_inputs = on_host(inputs);
    gloo_->allgather(host_outputs, host_inputs, options)->wait();
    return c10::make_intrusive<Ended>(outputs[0]);
  }

  // torch's own synchronized batch norm gathers into one tensor.
  Work _allgather_base(
      Tensor& output, Tensor& input, const c10d::AllgatherOptions& options) override {
    check({input, output});
    std::vector<Tensors> parts = {Tensors()};
    for (const Tensor& part : on_host(output).chunk(getSize())) {
      parts[0].push_back(part.view(input.sizes()));
    }
    Tensors host_inputs = {on_host(input)};
    gloo_->allgather(parts, host_inputs, options)->wait();
    return c10::make_intrusive<Ended>(Tensors{output});
  }

  // A state_dict that is sharded is gathered tensor by tensor.
  Work allgather_into_tensor_coalesced(
      Tensors& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) override {
    for (size_t k = 0; k < outputs.size(); ++k) {
      _allgather_base(outputs[k], inputs[k], options)->wait();
    }
    return c10::make_intrusive<Ended>(outputs);
  }

  // fully_shard leaves each rank its shard of the gradients.
  Work _reduce_scatter_base(
      Tensor& output, Tensor& input, const c10d::ReduceScatterOptions& options) override {
    check({output, input});
    Tensor host_output = on_host(output);
    Tensor host_input = on_host(input);
    gloo_->_reduce_scatter_base(host_output, host_input, options)->wait();
    return c10::make_intrusive<Ended>(Tensors{output});
  }

  // torch.distributed.checkpoint gathers on rank 0 what each rank will write, and answers each.
  Work gather(std::vector<Tensors>& outputs, Tensors& inputs,
      const c10d::GatherOptions& options) override {
    check(inputs);
    std::vector<Tensors> host_outputs;
    for (const Tensors& tensors : outputs) {
      check(tensors);
      host_outputs.push_back(on_host(tensors));
    }
    Tensors host_inputs = on_host(inputs);
    gloo_->gather(host_outputs, host_inputs, options)->wait();
    return c10::make_intrusive<Ended>(inputs);
  }

  Work scatter(Tensors& outputs, std::vector<Tensors>& inputs,
      const c10d::ScatterOptions& options) override {
    check(outputs);
    std::vector<Tensors> host_inputs;
    for (const Tensors& tensors : inputs) {
      check(tensors);
      host_inputs.push_back(on_host(tensors));
    }
    Tensors host_outputs = on_host(outputs);
    gloo_->scatter(host_outputs, host_inputs, options)->wait();
    return c10::make_intrusive<Ended>(outputs);
  }

  Work barrier(const c10d::BarrierOptions& options) override {
    return gloo_->barrier(options);
  }

  // A device mesh splits the group of all ranks.
  bool supportsSplitting() const override {
    return true;
  }

  c10::intrusive_ptr<Options> getBackendOptions() override {
    return gloo_->getBackendOptions();
  }

  c10::intrusive_ptr<c10d::Backend> split(const c10::intrusive_ptr<c10d::Store>& store,
      const std::vector<int>& ranks, const c10::intrusive_ptr<Options>& options) override {
    return c10::make_intrusive<Group>(gloo_->split(store, ranks, options));
  }

 private:
  static void check(const Tensors& tensors) {
    for (const Tensor& tensor : tensors) {
      TORCH_CHECK(is_here(tensor), "pretend_ccl: found a tensor on ", tensor.device());
      TORCH_CHECK(tensor.get_device() == current_device, "pretend_ccl: found a tensor on ",
          tensor.device(), ", and the current device is ", static_cast<int>(current_device));
      TORCH_CHECK(tensor.is_contiguous() || tensor.is_non_overlapping_and_dense(),
          "pretend_ccl: found a tensor with gaps in its memory");
      begin_with(current_stream(current_device), {tensor});
    }
  }

  c10::intrusive_ptr<c10d::Backend> gloo_;
};

// DistributedDataParallel warns of devices without such a timer.
class Timer final : public c10d::Timer {
 public:
  explicit Timer(c10::Device) {}
  std::optional<int64_t> measureDifference(Event start, Event end) override {
    const auto from = getTimestamp(start);
    const auto to = getTimestamp(end);
    if (!from || !to) {
      return std::nullopt;
    }
    return *to - *from;
  }
};

}  // namespace pretend
