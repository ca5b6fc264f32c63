// A pretend accelerator: a device for PyTorch whose memory is ordinary memory and whose kernels are
// those of the CPU. What a program must not do on a GPU is an error here.
#include <torch/csrc/utils/pybind.h>

#include "device.h"
#include "group.h"
#include "kernels.h"

namespace pretend {

REGISTER_ALLOCATOR(kDevice, &device_allocator)
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)
Hooks hooks;
const bool registered = (at::RegisterPrivateUse1HooksInterface(&hooks), true);

}  // namespace pretend

namespace c10d {
C10_REGISTER_TYPED_CLASS(TimerRegistry, c10::DeviceType::PrivateUse1, pretend::Timer)
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&pretend::run_on_cpu>());
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  using at::IntArrayRef;
  using at::Tensor;
  library.impl("empty.memory_format", pretend::empty);
  library.impl("empty_strided", pretend::empty_strided);
  library.impl("_copy_from", pretend::copy_from);
  library.impl("_copy_from_and_resize", pretend::copy_from_and_resize);
  library.impl("convolution_overrideable", pretend::convolution);
  library.impl("convolution_backward_overrideable", pretend::convolution_backward);
  library.impl("record_stream", [](Tensor& tensor, at::Stream stream) {
    const auto key = pretend::key_of(stream.device_index(), stream.id());
    pretend::record_stream(tensor.storage().data(), key);
  });

  // Views: the same memory with another shape
  library.impl("as_strided",
      [](const Tensor& self, IntArrayRef size, IntArrayRef stride, std::optional<int64_t> offset) {
        return at::native::as_strided_tensorimpl(self, size, stride, offset);
      });
  library.impl("view", [](const Tensor& self, IntArrayRef size) {
    return at::native::view(self, size);
  });
  library.impl("_reshape_alias", [](const Tensor& self, IntArrayRef size, IntArrayRef stride) {
    return at::native::_reshape_alias(self, size, stride);
  });
  library.impl("unfold", [](const Tensor& self, int64_t dim, int64_t size, int64_t step) {
    return at::native::unfold(self, dim, size, step);
  });
  library.impl("resize_",
      [](const Tensor& self, IntArrayRef size, std::optional<at::MemoryFormat> format)
          -> const Tensor& { return at::native::resize_(self, size, format); });
  library.impl("set_.source_Storage", [](Tensor& self, at::Storage source) -> Tensor& {
    return at::native::set_(self, source);
  });
  library.impl("set_.source_Storage_storage_offset",
      [](Tensor& self, at::Storage source, int64_t offset, IntArrayRef size, IntArrayRef stride)
          -> Tensor& { return at::native::set_storage_cpu_(self, source, offset, size, stride); });
  library.impl("set_.source_Tensor", [](Tensor& self, const Tensor& source) -> Tensor& {
    return at::native::set_tensor_(self, source);
  });
}

TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, library) {
  library.fallback(torch::CppFunction::makeFallthrough());
}

// Collectives have no gradient. (torch 2.9 does not know that for devices like this one.)
TORCH_LIBRARY_IMPL(c10d, AutogradPrivateUse1, library) {
  for (const char* name : {"allreduce_", "broadcast_", "allgather_", "_allgather_base_", "barrier"}) {
    library.impl(name, torch::CppFunction::makeFallthrough());
  }
}

PYBIND11_MODULE(pretend_device, module) {
  module.def("wrap_group", [](const c10::intrusive_ptr<c10d::Backend>& gloo) {
    return c10::intrusive_ptr<c10d::Backend>(c10::make_intrusive<pretend::Group>(gloo));
  });
  module.def("device_count", &pretend::device_count);
  module.def("host_waits", [] { return pretend::host_waits; });
  module.def("allocated", [](int device) { return pretend::allocated[device]; });
}
