// Storages whose bytes are elsewhere, for penstock.offload: whoever asks for their memory gets an error with a message of
// ours, in every thread and by every road (kernels, addresses, DLPack, pickling), instead of a null pointer. PyTorch has
// that for its own use (graphs of CUDA), and lets Python set it only in builds for CUDA; the methods are inline.

#include <c10/core/StorageImpl.h>

extern "C" void penstock_refuse(void* storage, const char* message) {
    static_cast<c10::StorageImpl*>(storage)->release_data_and_set_meta_custom_data_ptr_error_msg_(std::string(message));
}

extern "C" void penstock_allow(void* storage) {
    static_cast<c10::StorageImpl*>(storage)->clear_data_ptr_access_error_msg_();
}

extern "C" void* penstock_address(void* storage) {
    return static_cast<c10::StorageImpl*>(storage)->_mutable_data_ptr_no_checks().get();
}
