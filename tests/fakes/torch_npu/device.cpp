// A fake device npu with separate tensors, generator and memory statistics that uses the kernels of the CPU. Mixing its
// tensors with CPU tensors fails, as on a real device.

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/core/impl/alloc_cpu.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/extension.h>

#include <algorithm>
#include <atomic>
#include <cstring>

namespace {

using at::Tensor;
constexpr auto kNpu = c10::DeviceType::PrivateUse1;

std::atomic<int64_t> allocated{0}, peak{0};
int num_devices = 1;
thread_local c10::DeviceIndex current = 0;

// ---- memory

struct Block {
  void* data;
  size_t size;
};

struct Memory final : c10::Allocator {
  c10::DataPtr allocate(size_t size) override {
    auto* block = new Block{size ? c10::alloc_cpu(size) : nullptr, size};
    const int64_t now = allocated += static_cast<int64_t>(size);
    if (now > peak) peak = now;
    return {block->data, block, &release, c10::Device(kNpu, current)};
  }
  static void release(void* context) {
    auto* block = static_cast<Block*>(context);
    allocated -= static_cast<int64_t>(block->size);
    if (block->data) c10::free_cpu(block->data);
    delete block;
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, size_t count) const override { default_copy_data(to, from, count); }
};
Memory memory;
REGISTER_ALLOCATOR(kNpu, &memory);

void resize_storage(c10::StorageImpl* storage, size_t size) {
  auto fresh = memory.allocate(size);
  std::memcpy(fresh.get(), storage->data(), std::min(size, storage->nbytes()));
  storage->set_data_ptr_noswap(std::move(fresh));
  storage->set_nbytes(size);
}

// ---- device, streams and events: everything is done when a call returns

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kNpu; }
  c10::Device exchangeDevice(c10::Device device) const override {
    const auto before = getDevice();
    current = device.index();
    return before;
  }
  c10::Device getDevice() const override { return {kNpu, current}; }
  void setDevice(c10::Device device) const override { current = device.index(); }
  void uncheckedSetDevice(c10::Device device) const noexcept override { current = device.index(); }
  c10::Stream getStream(c10::Device device) const override { return c10::Stream(c10::Stream::DEFAULT, device); }
  c10::Stream getDefaultStream(c10::Device device) const override { return getStream(device); }
  c10::Stream getNewStream(c10::Device device, int) const override { return getStream(device); }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override { return getStream(device); }
  c10::Stream exchangeStream(c10::Stream stream) const override { return stream; }
  c10::DeviceIndex deviceCount() const noexcept override { return static_cast<c10::DeviceIndex>(num_devices); }
  void record(void**, const c10::Stream&, const c10::DeviceIndex, const c10::EventFlag) const override {}
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeStream(const c10::Stream&) const override {}
  void synchronizeEvent(void*) const override {}
  void synchronizeDevice(const c10::DeviceIndex) const override {}
  void destroyEvent(void*, const c10::DeviceIndex) const noexcept override {}
  void recordDataPtrOnStream(const c10::DataPtr&, const c10::Stream&) const override {}
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

at::Generator& generator() {
  static at::Generator own = at::detail::createCPUGenerator(67280421310721);
  return own;
}

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return static_cast<c10::DeviceIndex>(num_devices); }
  void setCurrentDevice(c10::DeviceIndex device) const override { current = device; }
  c10::DeviceIndex getCurrentDevice() const override { return current; }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override { return std::exchange(current, device); }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override { return exchangeDevice(device); }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex) const override { return generator(); }
  at::Generator getNewGenerator(c10::DeviceIndex) const override { return at::detail::createCPUGenerator(); }
  at::Device getDeviceFromPtr(void*) const override { return {kNpu, current}; }
  c10::Allocator* getPinnedMemoryAllocator() const override { return c10::GetCPUAllocator(); }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t size) const override {
    resize_storage(storage.unsafeGetStorageImpl(), size);
  }
};

// ---- tensors

Tensor host(const Tensor& tensor) {  // the same memory as a tensor of the CPU, which keeps the first alive
  if (tensor.device().type() != kNpu) return tensor;
  return at::from_blob(
      tensor.data_ptr(), tensor.sizes(), tensor.strides(), [tensor](void*) {}, at::dtype(tensor.scalar_type()));
}

Tensor empty(
    at::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
    std::optional<at::Device> device, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  const c10::OptionalDeviceGuard guard(device);
  constexpr c10::DispatchKeySet keys(c10::DispatchKey::PrivateUse1);
  return at::detail::empty_generic(size, &memory, keys, c10::dtype_or_default(dtype), format);
}

Tensor empty_strided(
    at::IntArrayRef size, at::IntArrayRef stride, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
    std::optional<at::Device> device, std::optional<bool>) {
  const c10::OptionalDeviceGuard guard(device);
  constexpr c10::DispatchKeySet keys(c10::DispatchKey::PrivateUse1);
  return at::detail::empty_strided_generic(size, stride, &memory, keys, c10::dtype_or_default(dtype));
}

const Tensor& resize_(const Tensor& self, at::IntArrayRef size, std::optional<at::MemoryFormat>) {
  self.unsafeGetTensorImpl()->set_sizes_contiguous(size);
  const auto bytes = static_cast<size_t>((self.storage_offset() + self.numel()) * self.element_size());
  if (self.storage().nbytes() < bytes) resize_storage(self.storage().unsafeGetStorageImpl(), bytes);
  return self;
}

Tensor copy_from(const Tensor& self, const Tensor& to, bool) {
  host(to).copy_(host(self));
  return to;
}

Tensor copy_from_and_resize(const Tensor& self, const Tensor& to) {
  if (to.sizes() != self.sizes()) to.resize_(self.sizes());
  return copy_from(self, to, false);
}

Tensor convolution(
    const Tensor& input, const Tensor& weight, const std::optional<Tensor>& bias, at::IntArrayRef stride,
    at::IntArrayRef padding, at::IntArrayRef dilation, bool transposed, at::IntArrayRef output_padding,
    int64_t groups) {
  const auto offset = bias && bias->defined() ? std::optional<Tensor>(host(*bias)) : std::nullopt;
  return at::convolution(
             host(input), host(weight), offset, stride, padding, dilation, transposed, output_padding, groups)
      .to(input.device());
}

std::tuple<Tensor, Tensor, Tensor> convolution_backward(
    const Tensor& grad, const Tensor& input, const Tensor& weight, at::IntArrayRef stride, at::IntArrayRef padding,
    at::IntArrayRef dilation, bool transposed, at::IntArrayRef output_padding, int64_t groups,
    std::array<bool, 3> wanted) {
  const std::vector<int64_t> bias{grad.size(1)};
  auto [first, second, third] = at::convolution_backward(
      host(grad), host(input), host(weight), bias, stride, padding, dilation, transposed, output_padding, groups,
      wanted);
  const auto back = [&](const Tensor& found) { return found.defined() ? found.to(input.device()) : found; };
  return {back(first), back(second), back(third)};
}

void on_cpu(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& arguments = op.schema().arguments();
  const auto first = stack->size() - arguments.size();
  for (size_t i = 0; i < arguments.size(); ++i) {
    if (arguments[i].name() == "generator" && (*stack)[first + i].isNone()) (*stack)[first + i] = generator();
  }
  at::native::cpu_fallback(op, stack, /*error_on_views=*/true);
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&on_cpu>()); }

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("resize_", &resize_);
  m.impl("_copy_from", &copy_from);
  m.impl("_copy_from_and_resize", &copy_from_and_resize);
  m.impl("_local_scalar_dense", [](const Tensor& self) { return host(self).item(); });
  m.impl("as_strided", &at::native::as_strided_tensorimpl);
  m.impl("view", static_cast<Tensor (*)(const Tensor&, at::IntArrayRef)>(&at::native::view));
  m.impl("_reshape_alias", &at::native::_reshape_alias);
  m.impl("unfold", &at::native::unfold);
  m.impl("set_", &at::native::set_cpu_);
  m.impl("set_.source_Tensor", &at::native::set_tensor_);
  m.impl("set_.source_Storage", static_cast<Tensor& (*)(Tensor&, at::Storage)>(&at::native::set_));
  m.impl("set_.source_Storage_storage_offset", &at::native::set_storage_cpu_);
  m.impl("convolution_overrideable", &convolution);
  m.impl("convolution_backward_overrideable", &convolution_backward);
  m.impl("_has_compatible_shallow_copy_type", [](const Tensor&, const Tensor&) { return true; });
  m.impl("record_stream", [](Tensor&, c10::Stream) {});
}

// ---- collectives, by gloo

struct Hccl final : c10d::Backend {
  using Work = c10::intrusive_ptr<c10d::Work>;
  using Tensors = std::vector<Tensor>;

  explicit Hccl(c10::intrusive_ptr<c10d::Backend> gloo)
      : Backend(gloo->getRank(), gloo->getSize()), gloo_(std::move(gloo)) {}
  const std::string getBackendName() const override { return "hccl"; }
  void setSequenceNumberForGroup() override { gloo_->setSequenceNumberForGroup(); }
  uint64_t getSequenceNumberForGroup() override { return gloo_->getSequenceNumberForGroup(); }

  static Tensor own(const Tensor& tensor) {
    TORCH_CHECK(tensor.device().type() == kNpu, "HCCL takes tensors of npu, got one of ", tensor.device());
    return host(tensor);
  }
  static Tensor added(const Tensor& tensor) {
    TORCH_CHECK(tensor.scalar_type() != at::kDouble, "HCCL adds no float64 up");
    return own(tensor);
  }
  template <Tensor (*view)(const Tensor&)>
  static Tensors all(const Tensors& tensors) {
    Tensors found;
    for (const auto& tensor : tensors) found.push_back(view(tensor));
    return found;
  }
  static std::vector<Tensors> lists(const std::vector<Tensors>& several) {
    std::vector<Tensors> found;
    for (const auto& tensors : several) found.push_back(all<own>(tensors));
    return found;
  }

  Work broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override {
    auto at = all<own>(tensors);
    return gloo_->broadcast(at, options);
  }
  Work allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override {
    auto at = all<added>(tensors);
    return gloo_->allreduce(at, options);
  }
  Work allgather(std::vector<Tensors>& to, Tensors& from, const c10d::AllgatherOptions& options) override {
    auto outputs = lists(to);
    auto inputs = all<own>(from);
    return gloo_->allgather(outputs, inputs, options);
  }
  Work _allgather_base(Tensor& to, Tensor& from, const c10d::AllgatherOptions& options) override {
    auto output = own(to), input = own(from);
    return gloo_->_allgather_base(output, input, options);
  }
  Work allgather_into_tensor_coalesced(Tensors& to, Tensors& from, const c10d::AllgatherOptions& options) override {
    auto outputs = all<own>(to), inputs = all<own>(from);
    return gloo_->allgather_into_tensor_coalesced(outputs, inputs, options);
  }
  Work allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& options) override {
    auto at = all<added>(tensors);
    return gloo_->allreduce_coalesced(at, options);
  }
  Work reduce_scatter_tensor_coalesced(
      Tensors& to, Tensors& from, const c10d::ReduceScatterOptions& options) override {
    auto outputs = all<added>(to), inputs = all<added>(from);
    return gloo_->reduce_scatter_tensor_coalesced(outputs, inputs, options);
  }
  Work scatter(Tensors& to, std::vector<Tensors>& from, const c10d::ScatterOptions& options) override {
    auto outputs = all<own>(to);
    auto inputs = lists(from);
    return gloo_->scatter(outputs, inputs, options);
  }
  Work _reduce_scatter_base(Tensor& to, Tensor& from, const c10d::ReduceScatterOptions& options) override {
    auto output = added(to), input = added(from);
    return gloo_->_reduce_scatter_base(output, input, options);
  }
  Work alltoall_base(
      Tensor& to, Tensor& from, std::vector<int64_t>& to_sizes, std::vector<int64_t>& from_sizes,
      const c10d::AllToAllOptions& options) override {
    auto output = own(to), input = own(from);
    return gloo_->alltoall_base(output, input, to_sizes, from_sizes, options);
  }
  Work barrier(const c10d::BarrierOptions& options) override { return gloo_->barrier(options); }

 private:
  c10::intrusive_ptr<c10d::Backend> gloo_;
};

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  m.def("start", [](int devices) {
    num_devices = devices;
    at::RegisterPrivateUse1HooksInterface(new Hooks());
  });
  m.def("current", []() { return static_cast<int>(current); });
  m.def("select", [](int device) { current = static_cast<c10::DeviceIndex>(device); });
  m.def("generator", []() { return generator(); });
  m.def("allocated", []() { return allocated.load(); });
  m.def("peak", []() { return peak.load(); });
  m.def("reset_peak", []() { peak = allocated.load(); });
  m.def("hccl", [](c10::intrusive_ptr<c10d::Backend> gloo) {
    return c10::intrusive_ptr<c10d::Backend>(c10::make_intrusive<Hccl>(std::move(gloo)));
  });
}
