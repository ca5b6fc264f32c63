// Tensors of the device: how they are made and copied. Everything else runs the kernel of the CPU
// on the same memory.
#pragma once

#include <ATen/ATen.h>
#include <ATen/EmptyTensor.h>
#include <ATen/NativeFunctions.h>
#include <torch/library.h>

#include <set>
#include <string>
#include <vector>

#include "memory.h"

namespace pretend {

using at::IntArrayRef;
using at::Tensor;
using std::optional;

inline bool is_here(const Tensor& tensor) {
  return tensor.defined() && tensor.device().type() == kDevice;
}

// Return the same memory as a tensor of the CPU.
inline Tensor on_host(const Tensor& tensor) {
  if (!is_here(tensor)) {
    return tensor;
  }
  const auto options = tensor.options().device(at::kCPU).requires_grad(false);
  if (tensor.numel() == 0) {
    return at::empty_strided(tensor.sizes(), tensor.strides(), options);
  }
  return at::from_blob(tensor.data_ptr(), tensor.sizes(), tensor.strides(), options);
}

inline Tensor make(IntArrayRef size, IntArrayRef stride, at::ScalarType type) {
  const c10::DispatchKeySet keys(c10::DispatchKey::PrivateUse1);
  return at::detail::empty_strided_generic(size, stride, &device_allocator, keys, type);
}

// Return a tensor of the device with the values of a result of the CPU.
inline Tensor on_device(const Tensor& tensor) {
  if (!tensor.defined() || is_here(tensor)) {
    return tensor;
  }
  Tensor result = make(tensor.sizes(), tensor.strides(), tensor.scalar_type());
  if (tensor.numel()) {
    on_host(result).copy_(tensor);
  }
  return result;
}

// Begin a piece of work of a device that uses these tensors. Return its number.
inline int64_t begin_with(Key stream, std::initializer_list<Tensor> tensors) {
  const int64_t number = begin(stream);
  for (const Tensor& tensor : tensors) {
    if (is_here(tensor) && tensor.numel()) {
      note_use(tensor.storage().data(), stream, number);
    }
  }
  return number;
}

// Making tensors

inline Tensor empty(IntArrayRef size, optional<at::ScalarType> type, optional<at::Layout>,
    optional<at::Device> device, optional<bool>, optional<at::MemoryFormat> format) {
  const c10::DeviceGuard guard(device.value_or(c10::Device(kDevice, current_device)));
  const c10::DispatchKeySet keys(c10::DispatchKey::PrivateUse1);
  const auto dtype = c10::dtype_or_default(type);
  return at::detail::empty_generic(size, &device_allocator, keys, dtype, format);
}

inline Tensor empty_strided(IntArrayRef size, IntArrayRef stride, optional<at::ScalarType> type,
    optional<at::Layout>, optional<at::Device> device, optional<bool>) {
  const c10::DeviceGuard guard(device.value_or(c10::Device(kDevice, current_device)));
  return make(size, stride, c10::dtype_or_default(type));
}

// Copying

inline Tensor copy_from(const Tensor& from, const Tensor& to, bool non_blocking) {
  const auto device = is_here(to) ? to.get_device() : from.get_device();
  const Key stream = current_stream(device);
  const bool from_pinned = from.is_cpu() && non_blocking && from.is_pinned();
  if (from_pinned && !is_default(stream)) {
    copy_later(stream, [from, to] { on_host(to).copy_(from); });
    return to;
  }
  const int64_t number = begin_with(stream, {from, to});
  on_host(to).copy_(on_host(from));
  const bool from_pageable = from.is_cpu() && from.numel() > 1 && !from_pinned;
  if (to.is_cpu() || from_pageable) {
    wait(kHost, stream, number);
  }
  return to;
}

inline Tensor copy_from_and_resize(const Tensor& from, const Tensor& to) {
  at::native::resize_(to, from.sizes());
  return copy_from(from, to, false);
}

// Every other operation

inline bool is_one_of(const std::string& name, const std::set<std::string>& names) {
  return names.count(name) > 0;
}

// Operations that take tensors of the CPU beside those of a device
const std::set<std::string> kMixed = {
    "aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_"};
// Operations whose result the CPU needs, so that it waits for the device
const std::set<std::string> kWaiting = {
    "aten::_local_scalar_dense", "aten::nonzero", "aten::equal", "aten::masked_select"};

// One call of an operation: its arguments become tensors of the CPU, its results become tensors of
// the device.
class Call {
 public:
  Call(const c10::OperatorHandle& operation, torch::jit::Stack* stack)
      : operation_(operation), schema_(operation.schema()), stack_(*stack) {
    arguments_ = schema_.arguments().size();
    first_ = stack_.size() - arguments_;
    given_.assign(stack_.begin() + first_, stack_.end());
  }

  void run() {
    for (size_t k = 0; k < arguments_; k++) {
      take_argument(k);
    }
    check_devices();
    if (schema_.name() == "aten::_fused_sgd_") {
      check_strides();
    }
    const Key stream = current_stream(or_current(device_));
    const int64_t number = begin(stream);
    for (const void* memory : memory_) {
      note_use(memory, stream, number);
    }
    operation_.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), &stack_);
    if (is_one_of(schema_.name(), kWaiting)) {
      wait(kHost, stream, number);
    }
    first_ = stack_.size() - schema_.returns().size();
    for (size_t k = 0; k < schema_.returns().size(); k++) {
      give_result(k);
    }
  }

 private:
  void take_argument(size_t k) {
    c10::IValue& value = stack_[first_ + k];
    if (value.isTensor() && schema_.arguments()[k].is_out()) {
      look_at(value.toTensor());
      results_.push_back(at::empty({0}, value.toTensor().options().device(at::kCPU)));
      value = results_.back();
    } else if (value.isTensor()) {
      value = look_at(value.toTensor());
    } else if (value.isTensorList()) {
      std::vector<Tensor> list;
      for (const Tensor& tensor : value.toTensorVector()) {
        list.push_back(look_at(tensor));
      }
      value = list;
    } else if (value.isOptionalTensorList()) {
      c10::List<optional<Tensor>> list;
      for (const optional<Tensor>& tensor : value.toOptionalTensorVector()) {
        list.push_back(tensor ? optional<Tensor>(look_at(*tensor)) : tensor);
      }
      value = list;
    } else if (value.isDevice()) {
      value = c10::Device(at::kCPU);
    }
  }

  // Note where a tensor is, and return it as one of the CPU.
  Tensor look_at(const Tensor& tensor) {
    if (is_here(tensor)) {
      if (tensor.dim() > 0 || device_ < 0) {
        same_device_ = same_device_ && (device_ < 0 || device_ == tensor.get_device());
        device_ = tensor.get_device();
      }
      if (tensor.numel()) {
        memory_.push_back(tensor.storage().data());
      }
    } else if (tensor.defined() && tensor.dim() > 0) {
      has_cpu_ = true;
    }
    return on_host(tensor);
  }

  void check_devices() const {
    TORCH_CHECK(same_device_, "Expected all tensors to be on the same device, found two: ",
        schema_.name());
    TORCH_CHECK(device_ < 0 || !has_cpu_ || is_one_of(schema_.name(), kMixed),
        "Expected all tensors to be on the same device, found pretend and cpu: ", schema_.name());
  }

  // CUDA's kernel takes weights, gradients and momentum only in one memory format.
  void check_strides() const {
    const auto weights = given_[0].toTensorVector();
    for (size_t list = 1; list <= 2; list++) {
      const auto others = given_[list].toTensorVector();
      for (size_t k = 0; k < others.size(); k++) {
        TORCH_CHECK(others[k].strides().equals(weights[k].strides()), schema_.name(),
            ": expected weights, gradients and momentum with the same strides, found ",
            weights[k].strides(), " and ", others[k].strides());
      }
    }
  }

  void give_result(size_t k) {
    c10::IValue& value = stack_[first_ + k];
    const auto* alias = schema_.returns()[k].alias_info();
    if (alias && alias->isWrite()) {
      give_argument(value, *alias);
    } else if (value.isTensor()) {
      value = on_device(value.toTensor());
    } else if (value.isTensorList()) {
      std::vector<Tensor> list;
      for (const Tensor& tensor : value.toTensorVector()) {
        list.push_back(on_device(tensor));
      }
      value = list;
    }
  }

  // The result is an argument that the operation has written to.
  void give_argument(c10::IValue& value, const c10::AliasInfo& alias) {
    for (size_t k = 0; k < arguments_; k++) {
      const auto* other = schema_.arguments()[k].alias_info();
      if (!other || !other->isWrite() || other->beforeSets() != alias.beforeSets()) {
        continue;
      }
      if (schema_.arguments()[k].is_out()) {  // the kernel has chosen its shape
        const Tensor computed = value.toTensor();
        const Tensor given = given_[k].toTensor();
        at::native::resize_(given, computed.sizes());
        if (computed.numel()) {
          on_host(given).copy_(computed);
        }
      }
      value = given_[k];
      return;
    }
  }

  const c10::OperatorHandle& operation_;
  const c10::FunctionSchema& schema_;
  torch::jit::Stack& stack_;
  size_t arguments_ = 0;
  size_t first_ = 0;  // the place in the stack of the first argument, then of the first result
  std::vector<c10::IValue> given_;  // the arguments
  std::vector<Tensor> results_;  // where the kernel writes; it returns references to them
  std::vector<const void*> memory_;  // of the tensors of the device
  int device_ = -1;  // of the arguments
  bool same_device_ = true;
  bool has_cpu_ = false;  // whether an argument is on the CPU and no number
};

inline void run_on_cpu(const c10::OperatorHandle& operation, torch::jit::Stack* stack) {
  Call(operation, stack).run();
}

// Convolutions reach a device under other names, with other arguments.

inline Tensor convolution(const Tensor& x, const Tensor& weight, const optional<Tensor>& bias,
    IntArrayRef stride, IntArrayRef padding, IntArrayRef dilation, bool transposed,
    IntArrayRef output_padding, int64_t groups) {
  TORCH_CHECK(is_here(x) && is_here(weight),
      "Expected all tensors to be on the same device, found pretend and cpu: convolution");
  optional<Tensor> host_bias;
  if (bias && bias->defined()) {
    host_bias = on_host(*bias);
  }
  begin_with(current_stream(x.get_device()), {x, weight});
  return on_device(at::convolution(on_host(x), on_host(weight), host_bias, stride, padding,
      dilation, transposed, output_padding, groups));
}

inline std::tuple<Tensor, Tensor, Tensor> convolution_backward(const Tensor& gradient,
    const Tensor& x, const Tensor& weight, IntArrayRef stride, IntArrayRef padding,
    IntArrayRef dilation, bool transposed, IntArrayRef output_padding, int64_t groups,
    std::array<bool, 3> mask) {
  const int64_t channels = weight.size(0);
  const auto bias_size = mask[2] ? at::OptionalIntArrayRef(channels) : std::nullopt;
  begin_with(current_stream(x.get_device()), {gradient, x, weight});
  auto [x_gradient, weight_gradient, bias_gradient] =
      at::convolution_backward(on_host(gradient), on_host(x), on_host(weight), bias_size, stride,
          padding, dilation, transposed, output_padding, groups, mask);
  return {on_device(x_gradient), on_device(weight_gradient), on_device(bias_gradient)};
}

}  // namespace pretend
