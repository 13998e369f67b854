/* The simulated accelerator: a device type of PyTorch's own (PrivateUse1), whose operators run on the processor.

   Operators run at once, on a second mapping of the device's memory, after the host has waited for what their stream
   still has to do; copies and events are tasks of the stream's worker. So values are those of the processor, to the
   bit, and what is not ordered by streams and events goes wrong here as it would on hardware. */

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/autocast_mode.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/transformers/attention.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/library.h>

#include <set>
#include <unordered_map>

#include "memory.h"

namespace simulated {

using at::Tensor;
using c10::Device;
using c10::DeviceIndex;

static DeviceAllocator device_allocator;
static HostAllocator host_allocator;
REGISTER_ALLOCATOR(DEVICE_TYPE, &device_allocator)
REGISTER_HOST_ALLOCATOR(DEVICE_TYPE, &host_allocator)

/* ---- Random numbers: a generator of the processor's, which its kernels are lent by its state. */

struct Generator final : at::CPUGeneratorImpl {
  explicit Generator(DeviceIndex device) {
    device_ = Device(DEVICE_TYPE, device);
    key_set_ = c10::DispatchKeySet(c10::DispatchKey::PrivateUse1);
  }
};

static const at::Generator &default_generator(DeviceIndex device) {
  static auto *all = new std::vector<at::Generator>{at::make_generator<Generator>(0), at::make_generator<Generator>(1)};
  static_assert(NUM_DEVICES == 2);
  return all->at(device < 0 ? current_device : device);
}

/* ---- What PyTorch asks of every device: which is current, its streams, its events. */

struct Guard final : c10::impl::DeviceGuardImplInterface {
  static c10::Stream make(int device, int id) { return c10::Stream(c10::Stream::UNSAFE, Device(DEVICE_TYPE, device), id); }
  static int index(Device device) { return device.has_index() ? device.index() : current_device; }
  static std::shared_ptr<Mark> &mark(void *event) { return *static_cast<std::shared_ptr<Mark> *>(event); }

  c10::DeviceType type() const override { return DEVICE_TYPE; }
  DeviceIndex deviceCount() const noexcept override { return NUM_DEVICES; }
  Device getDevice() const override { return {DEVICE_TYPE, DeviceIndex(current_device)}; }
  void setDevice(Device device) const override {
    TORCH_CHECK(device.index() < NUM_DEVICES, "there are ", NUM_DEVICES, " simulated devices, not ", device);
    uncheckedSetDevice(device);
  }
  void uncheckedSetDevice(Device device) const noexcept override { current_device = index(device); }
  Device exchangeDevice(Device device) const override {
    const Device before = getDevice();
    setDevice(device);
    return before;
  }
  c10::Stream getStream(Device device) const override { return make(index(device), current_streams[index(device)]); }
  c10::Stream getDefaultStream(Device device) const override { return make(index(device), 0); }
  c10::Stream getNewStream(Device device, int) const override {
    static std::atomic<int> num_made{0};
    return make(index(device), 1 + num_made++ % (STREAMS_PER_DEVICE - 1));
  }
  c10::Stream getStreamFromGlobalPool(Device device, bool) const override { return getNewStream(device, 0); }
  c10::Stream exchangeStream(c10::Stream next) const override {
    const c10::Stream before = getStream(next.device());
    current_streams[next.device_index()] = int(next.id());
    return before;
  }
  void *getStreamNativeHandle(const c10::Stream of) const override { return &stream(number_of(of)); }
  bool queryStream(const c10::Stream &of) const override { return !stream(number_of(of)).num_pending(); }
  void synchronizeStream(const c10::Stream &of) const override { synchronize(stream(number_of(of))); }
  void synchronizeDevice(const DeviceIndex device) const override { synchronize_device(device); }

  void record(void **event, const c10::Stream &on, const DeviceIndex, const c10::EventFlag) const override {
    if (!*event) *event = new std::shared_ptr<Mark>;
    mark(*event) = simulated::record(stream(number_of(on)));
  }
  void block(void *event, const c10::Stream &waiting) const override {
    if (event) simulated::wait(stream(number_of(waiting)), mark(event));
  }
  bool queryEvent(void *event) const override {
    if (event && !mark(event)->is_done()) return false;
    if (event) host_has_seen(mark(event)->clock);
    return true;
  }
  void synchronizeEvent(void *event) const override {
    if (!event) return;
    mark(event)->on->wait(mark(event)->place);
    host_has_seen(mark(event)->clock);
  }
  void destroyEvent(void *event, const DeviceIndex) const noexcept override { delete &mark(event); }
  double elapsedTime(void *start, void *end, const DeviceIndex) const override {
    TORCH_CHECK(mark(start)->is_done() && mark(end)->is_done(), "the simulated device has not passed both events");
    return 1e3 * (mark(end)->passed_s - mark(start)->passed_s);
  }
  void recordDataPtrOnStream(const c10::DataPtr &data, const c10::Stream &on) const override {
    device_allocator.recordStream(data, on);
  }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)

static void resize_storage(c10::StorageImpl *storage, size_t num_bytes) {
  if (num_bytes == storage->nbytes()) return;
  c10::DeviceGuard guard(storage->device());
  auto data = device_allocator.allocate(num_bytes);
  if (const size_t kept = std::min(num_bytes, storage->nbytes())) {
    std::lock_guard<std::mutex> lock(bookkeeping);
    Stream &on = current_stream(current_device);
    poison(storage->data(), on);
    poison(data.get(), on);
    tick(on);
    note_access(storage->data(), kept, on, false, "resize_");
    note_access(data.get(), kept, on, true, "resize_");
    on.push([to = kernel_address(data.get()), from = kernel_address(storage->data()), kept] { memcpy(to, from, kept); }, true);
  }
  storage->set_data_ptr_noswap(std::move(data));
  storage->set_nbytes(num_bytes);
}

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return NUM_DEVICES; }
  void setCurrentDevice(DeviceIndex device) const override { Guard().setDevice({DEVICE_TYPE, device}); }
  DeviceIndex getCurrentDevice() const override { return DeviceIndex(current_device); }
  DeviceIndex exchangeDevice(DeviceIndex device) const override { return Guard().exchangeDevice({DEVICE_TYPE, device}).index(); }
  DeviceIndex maybeExchangeDevice(DeviceIndex device) const override { return exchangeDevice(device); }
  const at::Generator &getDefaultGenerator(DeviceIndex device) const override { return default_generator(device); }
  at::Generator getNewGenerator(DeviceIndex device) const override {
    return at::make_generator<Generator>(device < 0 ? DeviceIndex(current_device) : device);
  }
  Device getDeviceFromPtr(void *address) const override { return {DEVICE_TYPE, DeviceIndex(arena(1).has(address))}; }
  bool isPinnedPtr(const void *address) const override { return is_pinned(address); }
  at::Allocator *getPinnedMemoryAllocator() const override { return &host_allocator; }
  void resizePrivateUse1Bytes(const c10::Storage &storage, size_t num_bytes) const override {
    resize_storage(storage.unsafeGetStorageImpl(), num_bytes);
  }
};

/* ---- Tensors and copies. */

static bool is_ours(const Tensor &tensor) { return tensor.defined() && tensor.device().type() == DEVICE_TYPE; }

/* A tensor of the same shape, type and strides on another storage. */
static Tensor on_storage(c10::Storage storage, const Tensor &like, c10::DispatchKey key) {
  auto tensor = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), c10::DispatchKeySet(key), like.dtype());
  tensor.unsafeGetTensorImpl()->set_sizes_and_strides(like.sizes(), like.strides(), like.storage_offset());
  return tensor;
}

/* A tensor of the processor's over the same bytes, which it does not own. */
static Tensor alias_of(const Tensor &tensor) {
  auto *storage = tensor.storage().unsafeGetStorageImpl();
  c10::DataPtr data(kernel_address(storage->data()), c10::kCPU);
  return on_storage(c10::Storage(c10::Storage::use_byte_size_t(), storage->nbytes(), std::move(data),
                                 c10::GetAllocator(c10::kCPU), true), tensor, c10::DispatchKey::CPU);
}

static void note(const Tensor &tensor, Stream &on, bool is_write, const std::string &what) {
  size_t num_bytes = tensor.numel() ? tensor.itemsize() : 0;
  for (int64_t at = 0; num_bytes && at < tensor.dim(); ++at)
    num_bytes += (tensor.size(at) - 1) * tensor.stride(at) * tensor.itemsize();
  if (num_bytes) note_access(tensor.const_data_ptr(), num_bytes, on, is_write, what);
}

static Tensor empty(at::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                    std::optional<Device> device, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  c10::OptionalDeviceGuard guard(device);
  return at::detail::empty_generic(size, &device_allocator, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                   c10::dtype_or_default(dtype), format);
}

static Tensor empty_strided(at::IntArrayRef size, at::IntArrayRef stride, std::optional<at::ScalarType> dtype,
                            std::optional<at::Layout>, std::optional<Device> device, std::optional<bool>) {
  c10::OptionalDeviceGuard guard(device);
  return at::detail::empty_strided_generic(size, stride, &device_allocator,
                                           c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), c10::dtype_or_default(dtype));
}

static void set_shape(const Tensor &tensor, at::IntArrayRef size, at::IntArrayRef stride, int64_t offset) {
  auto *storage = tensor.storage().unsafeGetStorageImpl();
  const size_t needed_bytes = at::detail::computeStorageNbytes(size, stride, tensor.itemsize(), offset);
  if (needed_bytes > storage->nbytes()) resize_storage(storage, needed_bytes);
  tensor.unsafeGetTensorImpl()->set_sizes_and_strides(size, stride, offset);
}

static const Tensor &resize_(const Tensor &self, at::IntArrayRef size, std::optional<at::MemoryFormat> format) {
  const auto shape = at::empty(size, self.options().device(c10::kMeta), format);
  if (self.sizes() != size) set_shape(self, shape.sizes(), shape.strides(), self.storage_offset());
  return self;
}

static Tensor &set_storage(Tensor &self, at::Storage source, int64_t offset, at::IntArrayRef size, at::IntArrayRef stride) {
  self.unsafeGetTensorImpl()->set_storage_keep_dtype(std::move(source));
  const auto contiguous = c10::contiguous_strides(size);
  set_shape(self, size, stride.empty() ? at::IntArrayRef(contiguous) : stride, offset);
  return self;
}

static Tensor &set_whole_storage(Tensor &self, at::Storage source) {
  const int64_t size = source.nbytes() / self.itemsize(), stride = 1;
  return set_storage(self, std::move(source), 0, size, stride);
}

static Tensor &set_tensor(Tensor &self, const Tensor &source) {
  return set_storage(self, source.storage(), source.storage_offset(), source.sizes(), source.strides());
}

static Tensor &set_nothing(Tensor &self) { return set_tensor(self, at::empty({0}, self.options())); }

static void record_stream(Tensor &self, c10::Stream used) { device_allocator.recordStream(self.storage().data_ptr(), used); }

/* Parameters may move between the host and this device by ``.data``, as those of CUDA do. */
static bool may_set_data(const Tensor &self, const Tensor &from) {
  return self.layout() == at::kStrided && from.layout() == at::kStrided;
}

/* Whether the host has to wait for a copy, whatever was asked for: pageable memory cannot be copied from later. */
static bool prepare_host_side(const Tensor &host, Stream &on) {
  if (!is_pinned(host.const_data_ptr())) return true;
  pool(HOST).record_stream(host.const_data_ptr(), on.number);
  return false;
}

static Tensor &copy_(Tensor &self, const Tensor &given, bool non_blocking) {
  if (self.is_same(given) || !self.numel()) return self;
  const Tensor from = given.expand_as(self);
  Stream &on = current_stream((is_ours(from) ? from : self).device().index());
  const bool is_inside = is_ours(from) && is_ours(self);
  Stream &other = current_stream(self.is_cpu() ? from.device().index() : self.device().index());
  if (&other != &on) wait(on, record(other));
  {
    std::lock_guard<std::mutex> guard(bookkeeping);
    for (const Tensor *tensor : {&from, &std::as_const(self)}) poison(tensor->const_data_ptr(), on);
    tick(on);
    note(from, on, false, "copy_");
    note(self, on, true, "copy_");
  }
  Tensor target = alias_of(self), source = alias_of(from);
  bool waits = !non_blocking && !is_inside;
  if (!is_ours(from) && prepare_host_side(from, on) && !waits) source = at::empty_like(source).copy_(source);
  if (!is_ours(self) && prepare_host_side(self, on)) waits = true;
  on.push([target, source]() mutable {
    at::AutoDispatchBelowADInplaceOrView below_autograd;
    target.copy_(source);
  }, true);
  if (&other != &on) wait(other, record(on));
  if (waits) synchronize(on);
  return self;
}

/* ---- All other operators: the processor's own, on aliases of the same memory. */

class Call {
 public:
  Call(const c10::OperatorHandle &op, torch::jit::Stack *stack)
      : op_(op), stack_(*stack), arguments_(op.schema().arguments()), returns_(op.schema().returns()) {
    for (auto &argument : arguments_) writes_ |= is_written(argument);
    is_view_ = !writes_ && !returns_.empty() && returns_[0].alias_info();
  }

  void run() {
    find_device();
    c10::DeviceGuard guard(Device(DEVICE_TYPE, DeviceIndex(device_)));
    Stream &on = current_stream(device_);
    if (!is_view_) {
      poison_all(on);
      on.wait(on.last());
    }
    is_late_ = !is_view_ && on.draws_late();
    at::AutoDispatchBelowADInplaceOrView below_autograd;
    c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
    const size_t first = stack_.size() - arguments_.size();
    for (size_t at = 0; at < arguments_.size(); ++at) give(stack_[first + at], arguments_[at]);
    compute();
    for (auto &operand : operands_)
      if (operand.is_written) commit(operand, on);
    bool is_told_host = false;
    for (size_t at = stack_.size() - returns_.size(); at < stack_.size(); ++at) is_told_host |= !take(stack_[at], on);
    if (is_view_ && !has_fresh_) return;
    std::lock_guard<std::mutex> lock(bookkeeping);
    tick(on);
    for (auto &operand : operands_)
      if (!operand.is_written) note(operand.ours, on, false, op_.schema().name());
    for (auto &tensor : written_) note(tensor, on, true, op_.schema().name());
    if (is_told_host) join(host_clock, on.clock);
  }

 private:
  struct Operand {
    Tensor ours, alias;
    bool is_written;
  };

  static bool is_written(const c10::Argument &argument) { return argument.alias_info() && argument.alias_info()->isWrite(); }

  template <class Do>
  static void for_each_tensor(const c10::IValue &value, Do act) {
    if (value.isTensor()) act(value.toTensor());
    if (value.isList())
      for (const c10::IValue &item : value.toListRef())
        if (item.isTensor()) act(item.toTensor());
  }

  void find_device() {
    device_ = current_device;
    bool is_found = false;
    for (size_t at = stack_.size() - arguments_.size(); at < stack_.size(); ++at) {
      if (stack_[at].isDevice() && stack_[at].toDevice().has_index()) device_ = stack_[at].toDevice().index();
      for_each_tensor(stack_[at], [&](const Tensor &tensor) {
        if (!is_ours(tensor)) return;
        TORCH_CHECK(!is_found || device_ == tensor.device().index(), op_.schema().name(), " got tensors on two simulated devices");
        device_ = tensor.device().index();
        is_found = true;
      });
    }
  }

  void poison_all(Stream &on) {
    std::lock_guard<std::mutex> guard(bookkeeping);
    for (size_t at = stack_.size() - arguments_.size(); at < stack_.size(); ++at)
      for_each_tensor(stack_[at], [&](const Tensor &tensor) {
        if (is_ours(tensor)) poison(tensor.const_data_ptr(), on);
      });
  }

  /* Lets the processor see an argument. */
  void give(c10::IValue &value, const c10::Argument &argument) {
    auto optional = argument.type()->cast<c10::OptionalType>();
    if (value.isTensor()) {
      value = alias(value.toTensor(), is_written(argument));
    } else if (value.isTensorList()) {
      c10::List<Tensor> aliases;
      for (const Tensor &tensor : value.toTensorVector()) aliases.push_back(alias(tensor, is_written(argument)));
      value = aliases;
    } else if (value.isList() && value.type()->castRaw<c10::ListType>()->getElementType()->kind() == c10::TypeKind::OptionalType) {
      c10::List<std::optional<Tensor>> aliases;
      for (const c10::IValue &item : value.toListRef())
        aliases.push_back(item.isNone() ? std::optional<Tensor>() : alias(item.toTensor(), false));
      value = aliases;
    } else if (value.isDevice() && value.toDevice().type() == DEVICE_TYPE) {
      value = Device(c10::kCPU);
    } else if (value.isGenerator() || (value.isNone() && optional && optional->getElementType()->kind() == c10::TypeKind::GeneratorType)) {
      if (value.isGenerator()) generator_ = value.toGenerator();
      value = at::detail::getDefaultCPUGenerator();
      draws_ = true;
    }
  }

  Tensor alias(const Tensor &tensor, bool is_written) {
    if (!is_ours(tensor)) {
      const std::string &name = op_.schema().name();
      const bool is_index = name == "aten::index" || name.find("index_put") != std::string::npos || name.find("unsafe_index") != std::string::npos;
      const bool may_be_mixed = !tensor.defined() || (tensor.dim() == 0 && name != "aten::equal") || tensor.is_meta() || is_index;
      TORCH_CHECK(may_be_mixed, op_.schema().name(), " got tensors on the simulated device and on ", tensor.device());
      return tensor;
    }
    Tensor alias = alias_of(tensor);
    if (is_written && is_late_) {
      alias = at::empty_strided(alias.sizes(), alias.strides(), alias.options()).copy_(alias);
    } else {
      auto &storage = aliases_[tensor.storage().unsafeGetStorageImpl()];
      if (!storage) ours_[alias.storage().unsafeGetStorageImpl()] = tensor.storage(), storage = alias.storage();
      alias = on_storage(storage, tensor, c10::DispatchKey::CPU);
    }
    operands_.push_back({tensor, alias, is_written});
    return alias;
  }

  /* What draws, draws from the processor's own generator, which has the state of ours meanwhile. */
  void compute() {
    const auto tags = op_.getTags();
    draws_ |= std::find(tags.begin(), tags.end(), at::Tag::nondeterministic_seeded) != tags.end();
    auto processors = at::detail::getDefaultCPUGenerator(), ours = generator_.defined() ? generator_ : default_generator(device_);
    const auto before = draws_ ? processors.get_state() : Tensor();
    if (draws_) processors.set_state(ours.get_state());
    op_.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), &stack_);
    if (draws_) ours.set_state(processors.get_state()), processors.set_state(before);
  }

  void commit(Operand &operand, Stream &on) {
    const bool is_reshaped = operand.alias.sizes() != operand.ours.sizes() || operand.alias.strides() != operand.ours.strides();
    if (is_reshaped) set_shape(operand.ours, operand.alias.sizes(), operand.alias.strides(), operand.ours.storage_offset());
    written_.push_back(operand.ours);
    {
      std::lock_guard<std::mutex> guard(bookkeeping);
      poison(operand.ours.const_data_ptr(), on);
    }
    if (!is_late_ && !(is_reshaped && operand.alias.numel())) return;
    on.push([to = alias_of(operand.ours), from = operand.alias]() mutable {
      at::AutoDispatchBelowADInplaceOrView below_autograd;
      to.copy_(from);
    }, true);
    if (!is_late_) on.wait(on.last());
  }

  /* Replaces a result by ours; false for what is none of tensors, which the host then knows. */
  bool take(c10::IValue &value, Stream &on) {
    if (value.isTensor()) {
      value = result(value.toTensor(), on);
    } else if (value.isTensorList()) {
      c10::List<Tensor> results;
      for (const Tensor &tensor : value.toTensorVector()) results.push_back(result(tensor, on));
      value = results;
    } else {
      return false;
    }
    return true;
  }

  Tensor result(const Tensor &tensor, Stream &on) {
    if (!tensor.defined() || !tensor.device().is_cpu()) return tensor;
    for (auto &operand : operands_)
      if (operand.alias.is_same(tensor)) return operand.ours;
    auto &storage = ours_[tensor.storage().unsafeGetStorageImpl()];
    if (!storage) {
      const size_t num_bytes = tensor.storage().nbytes();
      storage = c10::Storage(c10::Storage::use_byte_size_t(), num_bytes, device_allocator.allocate(num_bytes), &device_allocator, true);
      {
        std::lock_guard<std::mutex> guard(bookkeeping);
        poison(storage.data(), on);
      }
      on.push([to = kernel_address(storage.data()), tensor, num_bytes] { memcpy(to, tensor.storage().data(), num_bytes); }, true);
      if (!is_late_) on.wait(on.last());
      has_fresh_ = true;
    }
    const Tensor ours = on_storage(storage, tensor, c10::DispatchKey::PrivateUse1);
    if (!is_view_ || has_fresh_) written_.push_back(ours);
    return ours;
  }

  const c10::OperatorHandle &op_;
  torch::jit::Stack &stack_;
  const std::vector<c10::Argument> &arguments_, &returns_;
  int device_ = 0;
  bool writes_ = false, is_view_ = false, is_late_ = false, draws_ = false, has_fresh_ = false;
  at::Generator generator_;
  std::vector<Operand> operands_;
  std::vector<Tensor> written_;
  std::unordered_map<c10::StorageImpl *, c10::Storage> aliases_, ours_; /* of ours to the processor's, and back */
};

static void run_on_processor(const c10::OperatorHandle &op, torch::jit::Stack *stack) { Call(op, stack).run(); }

static int64_t choose_math(const Tensor &, const Tensor &, const Tensor &, const std::optional<Tensor> &, double, bool, std::optional<double>, bool) {
  return 0; /* of attention's ways, the one that is made of other operators */
}

}  // namespace simulated

namespace at::native {
REGISTER_PRIVATEUSE1_DISPATCH(_fused_sdp_choice_stub, &simulated::choose_math)
}

using namespace simulated;

TORCH_LIBRARY_IMPL(_, PrivateUse1, library) { library.fallback(torch::CppFunction::makeFromBoxedFunction<&run_on_processor>()); }
TORCH_LIBRARY_IMPL(_, AutogradPrivateUse1, library) { library.fallback(torch::CppFunction::makeFallthrough()); }
TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, library) { library.fallback(torch::CppFunction::makeFallthrough()); }

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  library.impl("empty.memory_format", empty);
  library.impl("empty_strided", empty_strided);
  library.impl("copy_", copy_);
  library.impl("resize_", resize_);
  library.impl("record_stream", record_stream);
  library.impl("set_.source_Storage", set_whole_storage);
  library.impl("set_.source_Storage_storage_offset", set_storage);
  library.impl("set_.source_Tensor", set_tensor);
  library.impl("set_", set_nothing);
  library.impl("_fused_sdp_choice", choose_math);
  library.impl("_has_compatible_shallow_copy_type", may_set_data);
  const auto on_processor = [&](const std::string &name) {
    library.impl(name.c_str(), torch::CppFunction::makeFromBoxedFunction<&run_on_processor>());
  };
  on_processor("convolution");
  on_processor("convolution_backward");
  /* Where an operator has a kernel made of other operators beside the processor's, the fallback would not be asked. */
  const std::set<std::string> own{"aten::empty.memory_format", "aten::empty_strided", "aten::copy_", "aten::resize_", "aten::record_stream", "aten::_fused_sdp_choice"};
  auto &dispatcher = c10::Dispatcher::singleton();
  for (const auto &name : dispatcher.getAllOpNames()) {
    const auto op = dispatcher.findOp(name);
    if (name.name.rfind("aten::", 0) || name.name == "aten::set_" || own.count(c10::toString(name)) || !op || !op->hasKernelForDispatchKey(c10::DispatchKey::CPU)) continue;
    if (op->hasKernelForDispatchKey(c10::DispatchKey::CompositeExplicitAutograd) || op->hasKernelForDispatchKey(c10::DispatchKey::CompositeImplicitAutograd))
      on_processor(c10::toString(name));
  }
}

#define TO_LOWER(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, lower_precision_fp)
#define TO_FLOAT32(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32)
#define TO_FLOAT32_UNLESS_GIVEN(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32_set_opt_dtype)
#define TO_WIDEST(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, promote)
TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, library) {
  auto &m = library; /* the name that PyTorch's macros expect */
  AT_FORALL_LOWER_PRECISION_FP(TO_LOWER)
  AT_FORALL_FP32(TO_FLOAT32)
  AT_FORALL_FP32_SET_OPT_DTYPE(TO_FLOAT32_UNLESS_GIVEN)
  AT_FORALL_PROMOTE(TO_WIDEST)
}

PYBIND11_MODULE(simulated_device, module) {
  static Hooks hooks;
  at::RegisterPrivateUse1HooksInterface(&hooks);
  module.def("set_conditions", [](int least_delay_us, int most_delay_us, bool lazy, int late_percent, bool poison, bool check, int64_t limit_bytes, double patience_s, uint32_t seed) {
    conditions.least_delay_us = least_delay_us, conditions.most_delay_us = most_delay_us;
    conditions.lazy = lazy, conditions.late_percent = late_percent, conditions.poison = poison, conditions.check = check;
    conditions.limit_bytes = limit_bytes, conditions.patience_s = patience_s, conditions.seed = seed;
    for (int at = 0; at < NUM_STREAMS; ++at) stream(at).reseed();
  });
  module.attr("NUM_DEVICES") = NUM_DEVICES;
  module.def("hold", [](int device, int id, bool is_held) { stream(device * STREAMS_PER_DEVICE + id).hold(is_held); });
  module.def("num_pending", [](int device, int id) { return stream(device * STREAMS_PER_DEVICE + id).num_pending(); });
  module.def("take_races", [] {
    std::lock_guard<std::mutex> guard(bookkeeping);
    return std::exchange(races, {});
  });
  module.def("register_host", [](uint64_t address, size_t num_bytes) { return register_host(reinterpret_cast<char *>(address), num_bytes); });
  module.def("unregister_host", [](uint64_t address) { return unregister_host(reinterpret_cast<char *>(address)); }, pybind11::call_guard<pybind11::gil_scoped_release>());
  module.def("default_generator", [](int device) { return default_generator(DeviceIndex(device)); });
}
